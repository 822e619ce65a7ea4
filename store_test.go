package main

// Tests of what a connection to the database does when PostgreSQL fails, and of what counts as a
// failure.

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	"hubs/internal/hubstest"
)

// Z2: An error of a database that can't serve now becomes a 503. An error that a bug causes, such
// as a wrong statement, stays as it is and so becomes a 500, because trying again does not help.
func TestClassesOfDatabaseErrors(t *testing.T) {
	t.Parallel()
	outages := []error{
		net.ErrClosed,
		io.ErrUnexpectedEOF,
		os.ErrDeadlineExceeded,
		sql.ErrConnDone,
		// PostgreSQL refuses the connection: no right to connect, no such database.
		&pq.Error{Code: "28000", Severity: pqerror.SeverityFatal},
		&pq.Error{Code: "3D000", Severity: pqerror.SeverityFatal},
	}
	for _, code := range []pqerror.Code{

		"0A000", // a column has changed its type
		"25006", // read only, because it is a standby
		"40001", // serialization failure
		"40P01", // deadlock
		"53100", // disk full
		"53300", // too many connections
		"55P03", // a lock was not free in time
		"57014", // statement timeout
		"57P01", // shut down
		"58030", // I/O error
	} {
		outages = append(outages, &pq.Error{Code: code})
	}
	for _, outage := range outages {
		err := classify(fmt.Errorf("within: %w", outage))
		p, ok := errors.AsType[problem](err)
		if !ok || p.Status != 503 || p.retryAfter <= 0 || !errors.Is(err, outage) {
			t.Errorf("%v: got %v, want a 503 with Retry-After and this cause", outage, err)
		}
	}

	bugs := []error{nil}
	for _, code := range []pqerror.Code{
		"22021", // a byte that is not valid in a text
		"23505", // a duplicate of a unique value
		"42501", // a missing grant
		"42601", // a syntax error
		"42P01", // no such table
		"XX000", // a bug of PostgreSQL
	} {
		bugs = append(bugs, &pq.Error{Code: code})
	}
	for _, bug := range bugs {
		if got := classify(bug); got != bug {
			t.Errorf("%v: got %v, want the same error", bug, got)
		}
	}
}

// D1: If the database hangs, a read or a write on its connection ends after dbTimeout, and the error
// stays a time-out, so that nothing is sent again. A read that times out closes the connection, so
// that the late rest of an answer can't be taken for the answer to the next statement.
func TestHungDatabaseIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		time.AfterFunc(time.Minute, func() { ours.Close() }) // ends a call that has no deadline
		conn := deadlineConn{ours}
		for _, call := range []func([]byte) (int, error){conn.Write, conn.Read} {
			start := time.Now()
			_, err := call(make([]byte, 1))
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("got the error %v, want %v", err, os.ErrDeadlineExceeded)
			}
			if took := time.Since(start); took != dbTimeout {
				t.Errorf("got an error after %v, want it after %v", took, dbTimeout)
			}
		}
		theirs.SetWriteDeadline(time.Now().Add(time.Second))
		_, err := theirs.Write([]byte("late"))
		if !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("a late answer: got the error %v, want %v", err, io.ErrClosedPipe)
		}
	})
}

// D5: Whether the database ends a connection in order or resets it, the error is io.EOF. Only for
// io.EOF, database/sql sends a read again on another connection.
func TestLostConnectionIsEOF(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	hubstest.Must(t, err)
	defer listener.Close()
	for name, linger := range map[string]int{"an orderly end": -1, "a reset": 0} {
		ours, err := net.Dial("tcp", listener.Addr().String())
		hubstest.Must(t, err)
		theirs, err := listener.Accept()
		hubstest.Must(t, err)
		theirs.(*net.TCPConn).SetLinger(linger)
		theirs.Close()
		if _, err := (deadlineConn{ours}).Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("%s: got the error %v, want %v", name, err, io.EOF)
		}
	}
}

// fullQueue returns the address of a socket that accepts no connection, and whose queue of waiting
// connections is full. A connection attempt there gets no reply.
func fullQueue(t testing.TB) (addr string) {
	t.Helper()
	socket, addr := hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	hubstest.Must(t, syscall.Listen(int(socket.Fd()), 0)) // the shortest queue
	for {
		// Only a machine that is very slow would take so long for a queue with room.
		conn, err := net.DialTimeout("tcp", addr, 500*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { conn.Close() })
	}
}

// D1, D5: If a host name has two addresses, and the first never answers, the second is dialed after
// the first one's share of dbTimeout, whatever connect_timeout the URL permits. The test is not
// parallel, because it replaces the resolver of the whole process.
func TestDeadAddressLeavesTimeForTheNext(t *testing.T) {
	if runtime.GOOS != "linux" {
		hubstest.Skip(t, "127.0.0.2 is an address of this machine on Linux only")
	}
	dead := fullQueue(t) // on 127.0.0.1
	_, port, err := net.SplitHostPort(dead)
	hubstest.Must(t, err)
	alive, err := net.Listen("tcp", "127.0.0.2:"+port)
	hubstest.Must(t, err)
	defer alive.Close()
	real := net.DefaultResolver
	defer func() { net.DefaultResolver = real }()
	net.DefaultResolver = newResolver()

	start := time.Now()
	conn, err := deadlineDialer{}.DialTimeout("tcp", "db.example.:"+port, 10*time.Second)
	took := time.Since(start)
	if err != nil {
		t.Fatalf("got the error %v after %v, want a connection to the second address", err, took)
	}
	conn.Close()
	if took < dbTimeout/2 || took >= dbTimeout {
		t.Errorf("got a connection after %v, want it after half of %v", took, dbTimeout)
	}
}

// newResolver returns a resolver for which db.example. has the addresses 127.0.0.1 and 127.0.0.2.
func newResolver() *net.Resolver {
	return &net.Resolver{
		PreferGo: true,
		Dial: func(context.Context, string, string) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go func() {
				query := make([]byte, 512)
				theirs.Read(query) // the whole query, because the resolver writes it in one piece
				theirs.Write(answerDNS(query[2:]))
			}()
			return ours, nil
		},
	}
}

// answerDNS returns the answer to a query for db.example. (RFC 1035, 4.1), after its length. Only a
// query of type A gets the addresses.
func answerDNS(query []byte) []byte {
	const header, typeA = 12, 1
	question := query[header : header+len("\x02db\x07example\x00")+4] // name, type, class
	answer := []byte{query[0], query[1], 0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0}
	answer = append(answer, question...)
	if question[len(question)-3] == typeA {
		answer[7] = 2 // answers
		// The name of the question, type A, class IN, TTL 0, and 4 bytes.
		const record = "\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x04"
		answer = append(answer, record+"\x7f\x00\x00\x01"+record+"\x7f\x00\x00\x02"...)
	}
	return append([]byte{0, byte(len(answer))}, answer...)
}
