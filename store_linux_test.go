package main

// On Linux, a test can listen on 127.0.0.2 unasked.

import (
	"context"
	"net"
	"slices"
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
	net.DefaultResolver = newResolver(t, net.IPv4(127, 0, 0, 1), net.IPv4(127, 0, 0, 2))

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

// newResolver returns a resolver for which every name has these two addresses.
func newResolver(t *testing.T, first, second net.IP) *net.Resolver {
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
			dns.WriteTo(answerDNS(query, first, second), client)
		}
	}()
	return &net.Resolver{
		PreferGo: true,
		Dial: func(context.Context, string, string) (net.Conn, error) {
			return net.Dial("udp", dns.LocalAddr().String())
		},
	}
}

// answerDNS returns the answer to a query (RFC 1035, 4.1). Only a query of type A gets addresses.
func answerDNS(query []byte, addresses ...net.IP) []byte {
	const header, typeA = 12, 1
	name := slices.Index(query[header:], 0) + 1
	question := query[header : header+name+4] // name, type, class
	if question[name+1] != typeA {
		addresses = nil
	}
	answer := []byte{query[0], query[1], 0x81, 0x80, 0, 1, 0, byte(len(addresses)), 0, 0, 0, 0}
	answer = append(answer, question...)
	for _, ip := range addresses {
		// The name of the question, type A, class IN, TTL 0, and 4 bytes.
		answer = append(answer, 0xc0, header, 0, typeA, 0, 1, 0, 0, 0, 0, 0, 4)
		answer = append(answer, ip.To4()...)
	}
	return answer
}
