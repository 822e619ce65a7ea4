package main

// On Linux, a test can listen on 127.0.0.2 unasked.

import (
	"context"
	"net"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// D1, D5: If a host name has two addresses, and the first never answers, the second is dialed after
// the first one's share of dbTimeout, whatever connect_timeout the URL permits. The test is not
// parallel, because it replaces the resolver of the whole process.
func TestDeadAddressLeavesTimeForTheNext(t *testing.T) {
	dead := hubstest.FullQueue(t) // on 127.0.0.1
	_, port, err := net.SplitHostPort(dead)
	hubstest.Must(t, err)
	alive, err := net.Listen("tcp", "127.0.0.2:"+port)
	hubstest.Must(t, err)
	defer alive.Close()
	real := net.DefaultResolver
	defer func() { net.DefaultResolver = real }()
	net.DefaultResolver = newResolver(t)

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
func newResolver(t *testing.T) *net.Resolver {
	t.Helper()
	dns, err := net.ListenPacket("udp", "127.0.0.1:0")
	hubstest.Must(t, err)
	t.Cleanup(func() { dns.Close() })
	go func() {
		query := make([]byte, 512)
		for {
			_, client, err := dns.ReadFrom(query)
			if err != nil {
				return
			}
			dns.WriteTo(answerDNS(query), client)
		}
	}()
	return &net.Resolver{
		PreferGo: true,
		Dial: func(context.Context, string, string) (net.Conn, error) {
			return net.Dial("udp", dns.LocalAddr().String())
		},
	}
}

// answerDNS returns the answer to a query for db.example. (RFC 1035, 4.1). Only a query of type A
// gets the addresses.
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
	return answer
}
