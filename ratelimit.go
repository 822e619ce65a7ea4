package main

// The rate limiter: a token bucket for each key, in bounded memory.

import (
	"fmt"
	"hash/maphash"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

const maxKeys = 65_536

// A limiter keeps a bucket of burst tokens for each key. Each token comes back
// one period after it was spent. This equals a sliding-window log: at most
// burst requests pass in any interval of one period (L1), unless dropAnyKey has
// dropped the key. A bucket that refills continuously would let twice as many
// pass. The price is memory: about 100 bytes for each key, and up to 16 for
// each request of the last period.
//
// It keeps only the hash of a key, so that long keys cost no more. Two keys
// share one with a probability of 2^-64.
type limiter struct {
	burst  int
	period time.Duration
	by     string // description of the key
	seed   maphash.Seed
	start  time.Time // origin of all times below

	mu      sync.Mutex
	spent   map[uint64][]time.Duration // by key: when its tokens were spent, oldest first
	sweptAt time.Duration
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

// String describes the limit: "5 in 15 minutes by e-mail and client address".
func (l *limiter) String() string {
	period := fmt.Sprintf("%.0f minutes", l.period.Minutes())
	if l.period < time.Minute {
		period = fmt.Sprintf("%.0f s", l.period.Seconds())
	}
	return fmt.Sprintf("%d in %s by %s", l.burst, period, l.by)
}

// spend spends a token, or returns a 429 with the exact time until the next one
// comes back. An empty key is not counted.
func (l *limiter) spend(key string) error {
	if key == "" {
		return nil
	}
	hash := maphash.String(l.seed, key)
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Since(l.start) // monotonic
	l.sweep(now)
	spent := l.stillSpent(hash, now)
	if len(spent) == l.burst {
		tokenBack := spent[0] + l.period
		return rateLimited(l.String(), tokenBack-now)
	}
	if l.spent[hash] == nil && len(l.spent) >= maxKeys {
		l.dropAnyKey()
	}
	l.spent[hash] = append(spent, now)
	return nil
}

func (l *limiter) stillSpent(hash uint64, now time.Duration) []time.Duration {
	spent := l.spent[hash]
	for len(spent) > 0 && now-spent[0] >= l.period {
		spent = spent[1:]
	}
	return spent
}

// sweep removes the keys whose tokens have all come back, once a period.
func (l *limiter) sweep(now time.Duration) {
	if now-l.sweptAt < l.period {
		return
	}
	for hash := range l.spent {
		if len(l.stillSpent(hash, now)) == 0 {
			delete(l.spent, hash)
		}
	}
	l.sweptAt = now
}

// dropAnyKey makes room, so that nobody is refused because of other clients'
// keys (L3). A flood can drop the key of an address, and so allow more guesses
// at its code. Therefore a code counts them, too (see find in otp.go).
func (l *limiter) dropAnyKey() {
	for hash := range l.spent {
		delete(l.spent, hash)
		return
	}
}

// Who is counted.

// clientAddress reads X-Forwarded-For from the right, because each proxy
// appends its client's address. All to the left of the first untrusted address
// can be forged (L2).
func clientAddress(r *http.Request, trusted []netip.Prefix) netip.Addr {
	client := parseAddress(r.RemoteAddr)
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for _, text := range slices.Backward(hops) {
		hop := parseAddress(strings.TrimSpace(text))
		if !hop.IsValid() || !isWithin(client, trusted) {
			break
		}
		client = hop
	}
	return client
}

func isWithin(addr netip.Addr, networks []netip.Prefix) bool {
	return slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(addr) })
}

// parseAddress parses an address with or without a port. It returns the zero
// Addr for other text.
func parseAddress(text string) netip.Addr {
	addr, err := netip.ParseAddr(text)
	if err != nil {
		withPort, _ := netip.ParseAddrPort(text)
		addr = withPort.Addr()
	}
	return addr.Unmap().WithZone("")
}

// clientKey returns an IPv4 address, or the /64 of an IPv6 address, which one
// customer usually has.
func (r *request) clientKey() string {
	bits := 64
	if r.client.Is4() {
		bits = 32
	}
	network, _ := r.client.Prefix(bits)
	return network.String()
}

// limitClient counts the request, unless it is a preflight of an allowed
// origin. A browser sends one before each new URL. If it were refused, the page
// could not see why.
func (s *server) limitClient(r *request) error {
	if r.isPreflight() && r.originAllowed {
		return nil
	}
	return s.clientLimit(r.Method, r.URL.Path).spend(r.clientKey())
}

func (s *server) clientLimit(method, path string) *limiter {
	if isRead(method) && strings.HasPrefix(path, "/files/") {
		return s.fileLimit
	}
	return s.requestLimit
}
