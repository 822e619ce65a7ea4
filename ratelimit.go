package main

// The limits: the token bucket with its keys and its bound on memory, and connections.

import (
	"container/list"
	"context"
	"fmt"
	"hash/maphash"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const maxKeys = 65_536 // keys that one limiter keeps

// A limiter is a token bucket for each key. A bucket holds burst tokens, and each token
// comes back one period after it was spent. A key without a token is being refused.
//
// Such a bucket equals a sliding window: at most burst requests pass in any stretch of time as
// long as a period. A bucket that refills continuously would let up to twice as many
// pass. The price is memory: up to 16 bytes for each token of a bucket, besides about 90 bytes for
// each key.
//
// Only the hash of a key is kept. Two keys whose hashes collide (2^-64) share a bucket.
type limiter struct {
	burst  int
	period time.Duration
	by     string // what the key is, in words
	seed   maphash.Seed
	start  time.Time // times are kept as monotonic time since then

	// forgetsRefused says whether a key that is being refused may be forgotten for a new key when
	// maxKeys are kept. If false, a new key is refused while all of them are: no flood frees a
	// refused key.
	forgetsRefused bool

	mu sync.Mutex
	// spent has, for the hash of each key, when its tokens were spent. Invariants: the
	// oldest is first; there is at least one, at most burst.
	spent     map[uint64][]time.Duration
	sweptAt   time.Duration
	fullUntil time.Duration // until then, all maxKeys keys are being refused
}

func newLimiter(burst int, period time.Duration, by string) *limiter {
	return &limiter{
		burst:  burst,
		period: period,
		by:     by,
		seed:   maphash.MakeSeed(),
		start:  time.Now(),
		spent:  map[uint64][]time.Duration{},
	}
}

// String is the limit in words: "5 per 15m by e-mail and client address".
func (l *limiter) String() string {
	period := strings.Replace(l.period.String(), "m0s", "m", 1)
	return fmt.Sprintf("%d per %s by %s", l.burst, period, l.by)
}

// take spends a token of the key. If the key has none, the error is the 429 that says when
// the next one comes back.
//
// L1: exact under parallel requests, wherever the period begins.
// L4: Retry-After is true: by then a token is back.
func (l *limiter) take(key string) error {
	hash := maphash.String(l.seed, key)
	l.mu.Lock()
	defer l.mu.Unlock()

	now := time.Since(l.start)
	l.sweep(now)
	spent, known := l.spent[hash]
	spent = l.stillSpent(spent, now)
	var wait time.Duration
	switch {
	case len(spent) == l.burst:
		wait = l.firstTokenBack(spent) - now
	case !known && len(l.spent) >= maxKeys:
		wait = l.makeRoom(now)
	}
	if wait > 0 {
		return rateLimited(l.String(), wait)
	}
	l.spent[hash] = append(spent, now)
	return nil
}

// sweep forgets, once a period, the keys whose tokens are all back. For a full limiter this
// is a pause of some milliseconds.
func (l *limiter) sweep(now time.Duration) {
	if now-l.sweptAt < l.period {
		return
	}
	for hash, spent := range l.spent {
		if len(l.stillSpent(spent, now)) == 0 {
			delete(l.spent, hash)
		}
	}
	l.sweptAt = now
}

// stillSpent returns the part of spent that has not come back.
func (l *limiter) stillSpent(spent []time.Duration, now time.Duration) []time.Duration {
	for len(spent) > 0 && now-spent[0] >= l.period {
		spent = spent[1:]
	}
	return spent
}

// firstTokenBack returns when the first token of a key comes back.
func (l *limiter) firstTokenBack(spent []time.Duration) time.Duration {
	return spent[0] + l.period
}

// makeRoom forgets one key, or returns how long a new one has to wait because every key is
// being refused.
//
// L3: bounded memory; a flood of new keys frees no key that is being refused, unless
// forgetsRefused.
// L5: what it takes to fill a limiter stands in SECURITY.md.
func (l *limiter) makeRoom(now time.Duration) (wait time.Duration) {
	if now < l.fullUntil {
		return l.fullUntil - now
	}
	victim, allRefused, firstBack := l.findVictim(now)
	if allRefused && !l.forgetsRefused {
		l.fullUntil = firstBack
		return firstBack - now
	}
	delete(l.spent, victim)
	return 0
}

// findVictim chooses the key to forget: of the keys it looks at, the one that has spent least.
// It looks at 64 keys, from a random place in the map. If all 64 are being refused and
// forgetsRefused is false, it goes on until it finds one that is not.
//
// allRefused: every key that it has looked at is being refused. firstBack: when the first of
// their tokens comes back.
//
// If nearly all keys are being refused, the search takes a millisecond or two.
func (l *limiter) findVictim(now time.Duration) (
	victim uint64, allRefused bool, firstBack time.Duration,
) {
	fewest := l.burst
	firstBack = now + l.period
	seen := 0
	for hash, spent := range l.spent {
		spent = l.stillSpent(spent, now)
		if len(spent) < fewest || seen == 0 { // the first one even if it is being refused
			victim = hash
			fewest = len(spent)
		}
		if len(spent) > 0 {
			firstBack = min(firstBack, l.firstTokenBack(spent))
		}
		seen++
		if seen >= 64 && (fewest < l.burst || l.forgetsRefused) {
			break
		}
	}
	return victim, fewest == l.burst, firstBack
}

// clientLimit returns the limit of step 4 that counts a request. Reading files has a
// bucket of its own instead of requestLimit, which would let only 100 in 10 s pass.
func (s *server) clientLimit(method, path string) *limiter {
	if isRead(method) && strings.HasPrefix(path, "/files/") {
		return s.fileLimit
	}
	return s.requestLimit
}

// clientAddress returns the address that limits and the log go by. X-Forwarded-For is read
// from the right: each element was written by the hop to its right, and counts only if that
// hop is trusted.
//
// What is no address ends the reading.
//
// L2: what stands further left may have been written by the client itself.
func clientAddress(r *http.Request, trusted []netip.Prefix) netip.Addr {
	client := parseAddress(r.RemoteAddr)
	isTrusted := func(prefix netip.Prefix) bool { return prefix.Contains(client) }
	rest := strings.Join(r.Header.Values("X-Forwarded-For"), ",")
	for rest != "" && slices.ContainsFunc(trusted, isTrusted) {
		comma := strings.LastIndexByte(rest, ',')
		hop := parseAddress(strings.TrimSpace(rest[comma+1:]))
		if !hop.IsValid() {
			break
		}
		client = hop
		rest = rest[:max(comma, 0)]
	}
	return client
}

// parseAddress reads 1.2.3.4, 1.2.3.4:80, 2001:db8::1 and [2001:db8::1]:80. The result is not
// valid if text is none of these.
func parseAddress(text string) netip.Addr {
	addr, err := netip.ParseAddr(text)
	if err != nil {
		withPort, _ := netip.ParseAddrPort(text)
		addr = withPort.Addr()
	}
	return addr.Unmap().WithZone("")
}

// clientKey returns an IPv4 address as its /32, and an IPv6 address as its /64, since one
// customer usually has all the addresses of a /64.
func clientKey(client netip.Addr) string {
	network, _ := client.Prefix(min(client.BitLen(), 64))
	return network.String()
}

// maxDescriptors returns how many files and connections the process may have open.
func maxDescriptors() uint64 {
	var limit syscall.Rlimit
	syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) // can't fail
	return min(limit.Cur, 1<<20)
}

// The most expensive connection holds less than 250 kB, most of it the kernel's buffer for
// what the client does not read. All together stay below 256 MB.
const (
	maxConnections = 1024
	sendBuffer     = 96 << 10 // bytes; Linux makes it twice as large
)

// A boundedListener bounds the number of open connections: each holds a slot. A connection waits
// while it is idle or its request head is unfinished. Waiting connections may hold up to half of
// the slots. When all slots are taken, they may hold only an eighth, because a new connection needs
// time to send its request. If more wait, the one that has waited longest is closed. If all slots
// are taken and none is closed, new connections wait in the kernel.
type boundedListener struct {
	net.Listener
	stop  <-chan struct{} // closed when the server stops
	slots chan struct{}   // one for each open connection, and one for Accept

	mu      sync.Mutex
	waiting list.List // of *connection, the longest wait first
}

func newBoundedListener(inner net.Listener, stop <-chan struct{}) *boundedListener {
	size := min(maxConnections, maxDescriptors()/2)
	return &boundedListener{Listener: inner, stop: stop, slots: make(chan struct{}, size)}
}

func (l *boundedListener) Accept() (net.Conn, error) {
	l.closeLongest()
	select {
	case l.slots <- struct{}{}:
	case <-l.stop: // http.Server.Shutdown waits until Accept has returned
		return nil, net.ErrClosed
	}
	conn, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	c := &connection{TCPConn: conn.(*net.TCPConn), listener: l}
	c.SetWriteBuffer(sendBuffer)
	l.startWaiting(c)
	return c, nil
}

// startWaiting notes that a connection has no finished request head.
//
// H8: of 1,024 connections, 512 may wait. A new client gets in unless almost all of them
// serve requests.
func (l *boundedListener) startWaiting(c *connection) {
	l.mu.Lock()
	c.place = l.waiting.PushBack(c)
	l.mu.Unlock()
	l.closeLongest()
}

// closeLongest closes the connection that has waited longest, as long as too many wait. It looks
// again after each, because another call may have chosen the same one.
func (l *boundedListener) closeLongest() {
	for {
		share := 2 // one slot in so many may hold a connection that waits
		if len(l.slots) == cap(l.slots) {
			share = 8
		}
		l.mu.Lock()
		longest := l.waiting.Front()
		waiting := l.waiting.Len()
		l.mu.Unlock()
		if waiting <= cap(l.slots)/share {
			return
		}
		longest.Value.(*connection).Close()
	}
}

func (l *boundedListener) stopWaiting(c *connection) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.place != nil {
		l.waiting.Remove(c.place)
		c.place = nil
	}
}

// A connection is one that a boundedListener has accepted. The *net.TCPConn in it has the
// ReadFrom by which net/http sends files (sendfile); embedding a net.Conn would hide it.
type connection struct {
	*net.TCPConn
	listener *boundedListener
	place    *list.Element // in listener.waiting; nil while a request is handled
	closed   sync.Once
}

func (c *connection) Close() error {
	err := c.TCPConn.Close()
	c.listener.stopWaiting(c)
	c.closed.Do(func() { <-c.listener.slots })
	return err
}

type connectionKey struct{}

// keepConnection is the http.Server.ConnContext: each request's context knows its connection.
func keepConnection(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, c)
}

// finishRequestHead is called when a handler begins: net/http has read the head then.
func finishRequestHead(r *http.Request) {
	if c, ok := r.Context().Value(connectionKey{}).(*connection); ok {
		c.listener.stopWaiting(c)
	}
}

// trackConnection is the http.Server.ConnState: a connection that becomes idle starts to wait.
func trackConnection(conn net.Conn, state http.ConnState) {
	if c, ok := conn.(*connection); ok && state == http.StateIdle {
		c.listener.startWaiting(c)
	}
}
