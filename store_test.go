package main

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// isUnavailable reports whether an error is a 503 that says when to try again.
func isUnavailable(err error) bool {
	answer, ok := errors.AsType[problem](err)
	return ok && answer.Status == 503 && answer.retryAfter > 0
}

// Z2: a 503 is for a database that can't serve now. A faulty statement is a bug, and no reason to
// try again.
func TestClassesOfDatabaseErrors(t *testing.T) {
	t.Parallel()
	connector, err := newConnector("postgres://nobody@127.0.0.1:1/none", nil)
	if err != nil {
		t.Fatal(err)
	}
	st := &store{db: sql.OpenDB(connector)} // it connects when it must, so never here
	defer st.db.Close()
	outages := []error{
		net.ErrClosed,
		io.ErrUnexpectedEOF,
		os.ErrDeadlineExceeded,
		sql.ErrConnDone,
		// A connection that is refused.
		&pq.Error{Code: "28000", Severity: pqerror.SeverityFatal},
		&pq.Error{Code: "3D000", Severity: pqerror.SeverityFatal},
	}
	for _, code := range []pqerror.Code{
		"08006", // connection failure
		"0A000", // a column has another type now
		"25006", // read only: a standby
		"53100", // disk full
		"53300", // too many connections
		"57014", // statement timeout
		"57P01", // shut down
		"57P03", // starting up
		"58030", // I/O error
	} {
		outages = append(outages, &pq.Error{Code: code})
	}
	for _, outage := range outages {
		err := st.classifyDBError(fmt.Errorf("within: %w", outage))
		if !isUnavailable(err) || !errors.Is(err, outage) {
			t.Errorf("%v: got %v, want a 503 with its cause", outage, err)
		}
	}
	bugs := []error{
		fmt.Errorf("%w: %w", errScan, io.EOF), // a row of another type
		nil,
	}
	for _, code := range []pqerror.Code{
		"22021", // a byte that is no text
		"23505", // a second row of its kind
		"42601", // a syntax error
		"42P01", // no such table
		"XX000", // a bug of PostgreSQL
	} {
		bugs = append(bugs, &pq.Error{Code: code})
	}
	for _, bug := range bugs {
		if got := st.classifyDBError(bug); got != bug {
			t.Errorf("%v: got %v, want it as it was", bug, got)
		}
	}
}

// D1: a read is tried again only after its connection was closed or reset. A database that hangs
// is not asked twice, which would take twice as long, nor is one that refuses connections.
func TestWhichReadsAreTriedAgain(t *testing.T) {
	t.Parallel()
	during := func(operation string, err error) error {
		return &net.OpError{Op: operation, Err: err}
	}
	for _, gone := range []error{
		during("read", syscall.ECONNRESET),
		during("write", syscall.EPIPE),
		fmt.Errorf("prepare: %w", during("read", net.ErrClosed)),
	} {
		if !isConnectionGone(gone) {
			t.Errorf("%v: got false, want that the connection is gone", gone)
		}
	}
	for _, other := range []error{
		nil,
		during("read", os.ErrDeadlineExceeded), // hung
		during("write", os.ErrDeadlineExceeded),
		during("dial", syscall.ECONNREFUSED),
		during("dial", os.ErrDeadlineExceeded),
		&pq.Error{Code: "57P01"},
		errScan,
	} {
		if isConnectionGone(other) {
			t.Errorf("%v: got true, want false", other)
		}
	}
}

// D1: a database that reads or says nothing any more is given up in time. After a read the
// connection is closed: a late rest of the answer must not be taken for the answer to the next
// statement.
func TestHungDatabaseIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		time.AfterFunc(time.Minute, func() { ours.Close() }) // ends a call without a deadline
		wantGivenUp := func(call func([]byte) (int, error)) {
			t.Helper()
			start := time.Now()
			_, err := call(make([]byte, 1))
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("got %v, want %v", err, os.ErrDeadlineExceeded)
			}
			if took := time.Since(start); took != dbTimeout {
				t.Errorf("got an end after %v, want %v", took, dbTimeout)
			}
		}
		wantGivenUp(deadlineConn{ours}.Write)
		wantGivenUp(deadlineConn{ours}.Read)
		theirs.SetWriteDeadline(time.Now().Add(time.Second))
		_, err := theirs.Write([]byte("late"))
		if !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("a late answer: got %v, want %v", err, io.ErrClosedPipe)
		}
	})
}

// D1: the driver never sees io.EOF. It would take that for a connection on which the statement was
// not sent, and send it again.
func TestOrderlyEndIsAnError(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	theirs.Close()
	_, err := deadlineConn{ours}.Read(make([]byte, 1))
	if errors.Is(err, io.EOF) || !isConnectionGone(err) {
		t.Errorf("got %v, want the loss of the connection", err)
	}
}

// newFullStore returns a store without a database, whose slots are taken.
func newFullStore(expensive int, connections int) *store {
	st := &store{
		slots:          make(chan struct{}, poolSize),
		expensiveSlots: make(chan struct{}, expensiveSize),
	}
	for range connections {
		st.slots <- struct{}{}
	}
	for range expensive {
		st.expensiveSlots <- struct{}{}
	}
	return st
}

// runExpensive runs so many expensive statements at once, which must end in a 503. wait returns
// when they have.
func runExpensive(t *testing.T, st *store, n int) (wait func()) {
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			err := st.rows(statement{text: "select 1", expensive: true}, nil)
			if !isUnavailable(err) {
				t.Errorf("got %v, want a 503", err)
			}
		})
	}
	synctest.Wait()
	return all.Wait
}

// H6: an expensive statement that waits for its turn holds no connection.
func TestWaitingExpensiveStatementsHoldNoConnection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		st := newFullStore(expensiveSize, 0)
		wait := runExpensive(t, st, 2*poolSize)
		if got := len(st.slots); got != 0 {
			t.Errorf("got %d connections held, want 0", got)
		}
		wait()
	})
}

// H6: one that finds no connection gives its turn back. Otherwise a busy moment would end all
// expensive statements for good.
func TestExpensiveStatementsGiveTheirTurnBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		st := newFullStore(0, poolSize)
		wait := runExpensive(t, st, expensiveSize)
		wait()
		if got := len(st.expensiveSlots); got != 0 {
			t.Errorf("got %d turns taken, want 0", got)
		}
	})
}

// A slowConnector makes connections that close only when the gate is open.
type slowConnector struct {
	gate   chan struct{}
	made   int
	closed chan int
}

func (c *slowConnector) Connect(context.Context) (driver.Conn, error) {
	c.made++
	return &slowConn{connector: c, number: c.made}, nil
}

func (c *slowConnector) Driver() driver.Driver { return nil }

// A slowConn does nothing but close.
type slowConn struct {
	driver.Conn
	connector *slowConnector
	number    int
}

func (c *slowConn) Close() error {
	<-c.connector.gate
	c.connector.closed <- c.number
	return nil
}

// D5: of two drops at once, the idle connections are closed, and not those that come into the
// pool while the first drop still closes.
func TestDropsAtOnceCloseIdleConnections(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		connector := &slowConnector{
			gate:   make(chan struct{}),
			closed: make(chan int, 8),
		}
		st := &store{db: sql.OpenDB(connector)}
		defer st.db.Close()
		st.db.SetMaxIdleConns(poolSize)
		useTwo := func() {
			first, _ := st.db.Conn(t.Context())
			second, _ := st.db.Conn(t.Context())
			for _, conn := range []*sql.Conn{first, second} {
				go conn.Close()
			}
			synctest.Wait()
		}
		useTwo()
		go st.dropIdle()
		synctest.Wait()
		st.dropIdle()
		useTwo()
		close(connector.gate)
		synctest.Wait()
		closed := map[int]bool{}
		for range len(connector.closed) {
			closed[<-connector.closed] = true
		}
		if !closed[1] || !closed[2] {
			t.Errorf("got %v closed, want the idle ones, 1 and 2", closed)
		}
	})
}
