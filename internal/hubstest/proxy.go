package hubstest

import (
	"bytes"
	"net"
	"net/url"
	"sync"
	"testing"
)

// A Proxy stands between a server and its PostgreSQL or mail server. It fails on demand.
type Proxy struct {
	Addr, target string

	mu       sync.Mutex
	mode     proxyMode
	changed  chan struct{} // closed and replaced by each change of mode
	pairs    map[*proxyPair]bool
	triggers map[trigger]func()
	sent     []byte // nil: not recorded
}

type trigger struct {
	text     string
	isAnswer bool
}

type proxyMode int

const (
	proxyPasses proxyMode = iota
	proxyCut
	proxyHangs
	proxyDropsReplies
)

type proxyPair struct {
	client, server net.Conn
	ended          chan struct{}
	close          func()
	tainted        bool // a reply was lost, so the connection can't be used any more
}

// NewProxy starts a proxy that passes everything to target (host:port).
func NewProxy(t testing.TB, target string) *Proxy {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{
		Addr:     ln.Addr().String(),
		target:   target,
		changed:  make(chan struct{}),
		pairs:    map[*proxyPair]bool{},
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
		p.Cut()
		work.Wait()
	})
	return p
}

// ProxyURL starts a proxy for the server that a URL names. It returns the URL with the proxy's
// address.
func ProxyURL(t testing.TB, through string) (*Proxy, string) {
	u, err := url.Parse(through)
	if err != nil {
		t.Fatal(err)
	}
	p := NewProxy(t, u.Host)
	u.Host = p.Addr
	return p, u.String()
}

// Cut closes all connections and refuses new ones.
func (p *Proxy) Cut() { p.set(proxyCut) }

// Hang keeps connections open and accepts new ones, but passes nothing.
func (p *Proxy) Hang() { p.set(proxyHangs) }

// DropReplies passes what the client sends and drops what the server answers: a statement is
// done, and the client can't know.
func (p *Proxy) DropReplies() { p.set(proxyDropsReplies) }

// Resume passes everything again, also what was held back. A connection that has lost a reply
// is closed.
func (p *Proxy) Resume() { p.set(proxyPasses) }

// When calls do once, as soon as a client sends the text and before the text is passed on. With
// Cut, the statement is not done; with DropReplies, it is done and the client can't know.
func (p *Proxy) When(text string, do func()) { p.when(trigger{text, false}, do) }

// WhenAnswered is When for what the server answers.
func (p *Proxy) WhenAnswered(text string, do func()) {
	p.when(trigger{text, true}, do)
}

func (p *Proxy) when(on trigger, do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.triggers[on] = do
}

// Drop closes all connections. New ones pass.
func (p *Proxy) Drop() {
	p.Cut()
	p.Resume()
}

// Sent returns what clients have sent since the last call. The first call begins the record.
func (p *Proxy) Sent() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	sent := p.sent
	p.sent = []byte{}
	return sent
}

// Connections returns how many connections are open.
func (p *Proxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.pairs)
}

func (p *Proxy) set(mode proxyMode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode = mode
	close(p.changed)
	p.changed = make(chan struct{})
	for pair := range p.pairs {
		if mode == proxyCut || pair.tainted {
			pair.close()
		}
	}
}

func (p *Proxy) serve(client net.Conn) {
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		client.Close()
		return
	}
	pair := &proxyPair{client: client, server: server, ended: make(chan struct{})}
	pair.close = sync.OnceFunc(func() {
		close(pair.ended)
		// A reset, as from a machine that is gone, not an orderly end.
		client.(*net.TCPConn).SetLinger(0)
		client.Close()
		server.Close()
	})
	p.mu.Lock()
	p.pairs[pair] = true
	if p.mode == proxyCut {
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

// pump copies one direction until either end is closed. Then it closes both.
func (p *Proxy) pump(pair *proxyPair, fromClient bool) {
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
		if !p.mayPass(pair, fromClient) {
			continue
		}
		if _, err := to.Write(chunk[:n]); err != nil {
			return
		}
	}
}

// mayPass waits while the proxy hangs, then reports whether data may pass in this direction.
func (p *Proxy) mayPass(pair *proxyPair, fromClient bool) bool {
	for {
		p.mu.Lock()
		mode, changed := p.mode, p.changed
		if mode == proxyDropsReplies && !fromClient {
			pair.tainted = true
		}
		p.mu.Unlock()
		if mode != proxyHangs {
			return mode == proxyPasses || mode == proxyDropsReplies && fromClient
		}
		select {
		case <-changed:
		case <-pair.ended:
			return false
		}
	}
}

// runTriggers runs the triggers that a chunk sets off.
func (p *Proxy) runTriggers(chunk []byte, fromClient bool) {
	var due []func()
	p.mu.Lock()
	if fromClient && p.sent != nil {
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
