package faults

import (
	"bytes"
	"math/rand/v2"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A faultProxy passes data between a server and its PostgreSQL or mail server. Its methods make it
// fail.
type faultProxy struct {
	Addr, target string

	gate sync.RWMutex // locked while the proxy hangs

	mu       sync.Mutex
	draws    *rand.Rand // of its world
	isCut    bool
	isHung   bool
	pairs    map[*faultPair]bool
	triggers map[trigger]func()
	sent     []byte // data of clients since the last call of Record
}

// A trigger is a text that the proxy looks for in the data it reads.
type trigger struct {
	text     string
	isAnswer bool // sent by the server, not by a client
}

// A faultPair is a client's connection to the proxy, and the proxy's own to the server.
type faultPair struct {
	client, server net.Conn
	close          func() // closes both connections; may be called again
}

// newFaultProxy starts a proxy that passes all data to target (host:port). It runs until the test
// ends.
func newFaultProxy(t testing.TB, target string) *faultProxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	hubstest.Must(t, err)
	p := &faultProxy{
		Addr:     ln.Addr().String(),
		target:   target,
		draws:    hubstest.Draw(t),
		pairs:    map[*faultPair]bool{},
		triggers: map[trigger]func(){},
	}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			work.Go(func() { p.serve(conn) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		p.Resume()
		p.Cut()
		work.Wait()
	})
	return p
}

// faultProxyURL starts a proxy for the server at a URL. It returns the proxy, and the URL with the
// proxy's address in place of the server's.
func faultProxyURL(t testing.TB, serverURL string) (*faultProxy, string) {
	t.Helper()
	u, err := url.Parse(serverURL)
	hubstest.Must(t, err)
	p := newFaultProxy(t, u.Host)
	u.Host = p.Addr
	return p, u.String()
}

// Cut closes all connections, and each new one at once.
func (p *faultProxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.isCut = true
	for pair := range p.pairs {
		pair.close()
	}
}

// Hang holds all data back. Connections stay open, and the proxy accepts new ones.
func (p *faultProxy) Hang() {
	p.gate.Lock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.isHung = true
}

// Resume passes all data again, including the data that Hang held back.
func (p *faultProxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isHung {
		p.gate.Unlock()
	}
	p.isCut, p.isHung = false, false
}

// When calls do once, when a client sends the text, before the proxy passes the text on. If do is
// Cut, the statement is not executed. A text that arrives in two pieces is not found.
func (p *faultProxy) When(text string, do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.triggers[trigger{text, false}] = do
}

// WhenAnswered is like When, for a text that the server sends. Any data contains the text "".
func (p *faultProxy) WhenAnswered(text string, do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.triggers[trigger{text, true}] = do
}

// Record begins a new record of the data that clients send.
func (p *faultProxy) Record() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent = []byte{}
}

// Sent returns a copy of the record that Record has begun.
func (p *faultProxy) Sent() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return bytes.Clone(p.sent)
}

// Connections returns how many connections are open.
func (p *faultProxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.pairs)
}

// serve connects a client to the target. It returns when both connections are closed.
func (p *faultProxy) serve(client net.Conn) {
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		client.Close()
		return
	}
	pair := &faultPair{client: client, server: server}
	pair.close = sync.OnceFunc(func() {
		// With a linger of 0, Close sends a reset, as after the loss of the server's machine.
		client.(*net.TCPConn).SetLinger(0)
		client.Close()
		server.Close()
	})
	p.mu.Lock()
	p.pairs[pair] = true
	if p.isCut {
		pair.close()
	}
	p.mu.Unlock()
	var pumps sync.WaitGroup
	pumps.Go(func() { p.pump(pair, true) })
	pumps.Go(func() { p.pump(pair, false) })
	pumps.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pairs, pair)
}

// pump copies data in one direction until either connection is closed. Then it closes both.
func (p *faultProxy) pump(pair *faultPair, fromClient bool) {
	defer pair.close()
	from, to := pair.client, pair.server
	if !fromClient {
		from, to = to, from
	}
	chunk := make([]byte, 64<<10)
	for {
		n, err := from.Read(chunk)
		if err != nil {
			return
		}
		p.runTriggers(chunk[:n], fromClient)
		time.Sleep(p.delay())
		p.gate.RLock()
		_, err = to.Write(chunk[:n])
		p.gate.RUnlock()
		if err != nil {
			return
		}
	}
}

// delay draws a delay of up to 2 ms for one piece of data in eight, and no delay for the others.
func (p *faultProxy) delay() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(0, time.Duration(p.draws.Int64N(int64(16*time.Millisecond))-int64(14*time.Millisecond)))
}

// runTriggers calls the functions whose text a chunk contains, each once. It also records a
// client's chunk for Sent.
func (p *faultProxy) runTriggers(chunk []byte, fromClient bool) {
	var due []func()
	p.mu.Lock()
	if fromClient && p.sent != nil { // after a call of Record
		p.sent = append(p.sent, chunk...)
	}
	for on, do := range p.triggers {
		if on.isAnswer != fromClient && bytes.Contains(chunk, []byte(on.text)) {
			due = append(due, do)
			delete(p.triggers, on)
		}
	}
	p.mu.Unlock()
	for _, do := range due {
		do()
	}
}
