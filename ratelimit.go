package main

// The limits of the specification: the token bucket, its keys, its bound on memory.

import (
	"fmt"
	"hash/maphash"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

const maxKeys = 65_536 // of a limiter

// limiter lets burst requests of a key pass at once; each token comes back one
// period after it was spent. So in no stretch as long as the period do more than
// burst requests pass, wherever the stretch begins.
//
// Memory: a key costs about 90 bytes, and 8 to 16 for each token it has spent lately
// (BenchmarkLimiterMemory). Keys whose tokens are all back go once a period: the longest
// pause of a full limiter, some milliseconds. The keys themselves are not kept, only their
// hashes; should two collide (2^-64), they share a bucket.
type limiter struct {
	burst  int
	period time.Duration
	what   string // what is counted, for the client and the route table
	seed   maphash.Seed
	start  time.Time // spent tokens are noted as monotonic time since then

	mu        sync.Mutex
	spent     map[uint64][]time.Duration // by hash of the key, oldest first; never empty
	swept     time.Duration              // when the keys without spent tokens went
	fullUntil time.Duration              // until then every one of maxKeys keys is being refused
}

func newLimiter(burst int, period time.Duration, what string) *limiter {
	return &limiter{burst: burst, period: period, what: what, seed: maphash.MakeSeed(), start: time.Now(),
		spent: map[uint64][]time.Duration{}}
}

// String is the limit in words: "5 per 15m by e-mail and client address".
func (l *limiter) String() string {
	return fmt.Sprintf("%d per %s %s", l.burst, strings.Replace(l.period.String(), "m0s", "m", 1), l.what)
}

// take spends a token of the key, or gives the 429 that says when one comes back.
func (l *limiter) take(key string) error {
	hash := maphash.String(l.seed, key)
	l.mu.Lock()
	defer l.mu.Unlock()

	now := time.Since(l.start)
	if now-l.swept >= l.period {
		maps.DeleteFunc(l.spent, func(_ uint64, spent []time.Duration) bool { return len(l.stillSpent(spent, now)) == 0 })
		l.swept = now
	}
	spent, known := l.spent[hash]
	spent = l.stillSpent(spent, now)
	var wait time.Duration
	switch {
	case len(spent) == l.burst:
		wait = spent[0] + l.period - now
	case !known && len(l.spent) == maxKeys && now < l.fullUntil:
		wait = l.fullUntil - now
	case !known && len(l.spent) == maxKeys:
		wait = l.makeRoom(now)
	}
	if wait > 0 {
		return &problem{Status: 429, Code: "rate_limited", Detail: "The limit: " + l.String() + ".", retryAfter: wait}
	}
	l.spent[hash] = append(spent, now)
	return nil
}

// stillSpent is the part of spent that has not come back yet.
func (l *limiter) stillSpent(spent []time.Duration, now time.Duration) []time.Duration {
	for len(spent) > 0 && now-spent[0] >= l.period {
		spent = spent[1:]
	}
	return spent
}

// makeRoom drops the key that has spent least, of the first 64 in the random order
// of Go's maps. One that is being refused never gives way, else a flood of new keys would
// free it: where all are, the new one has to wait too, until one is not. Where nearly all
// are, each new key is a search of a millisecond or two for which the others wait.
func (l *limiter) makeRoom(now time.Duration) (wait time.Duration) {
	victim, fewest, seen, fullUntil := uint64(0), l.burst, 0, now+l.period
	for hash, spent := range l.spent {
		left := l.stillSpent(spent, now)
		if len(left) < fewest {
			victim, fewest = hash, len(left)
		}
		if seen++; fewest < l.burst && (fewest <= 1 || seen >= 64) {
			break // a flood is made of keys that have spent one: it does not have to look at them all
		}
		fullUntil = min(fullUntil, left[0]+l.period)
	}
	if fewest < l.burst {
		delete(l.spent, victim)
		return 0
	}
	l.fullUntil = fullUntil
	return fullUntil - now
}

// addressLimit is the limit of step 4 that counts a request.
func (s *server) addressLimit(method, path string) *limiter {
	if (method == http.MethodGet || method == http.MethodHead) && strings.HasPrefix(path, "/files/") {
		return s.fileLimit
	}
	return s.globalLimit
}

// clientAddress is the address that limits and log go by. X-Forwarded-For counts
// only when a trusted proxy sent it, and is read from the right, past trusted
// proxies: what stands further left was written by the client itself.
func clientAddress(r *http.Request, trusted []netip.Prefix) netip.Addr {
	peer, _ := netip.ParseAddrPort(r.RemoteAddr)
	client := peer.Addr().Unmap().WithZone("")
	isTrusted := func(prefix netip.Prefix) bool { return prefix.Contains(client) }
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for _, text := range slices.Backward(hops) {
		hop, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil || !slices.ContainsFunc(trusted, isTrusted) {
			break // not an address, or written by one we don't trust: as far as we can see
		}
		client = hop.Unmap().WithZone("")
	}
	return client
}

// addressKey is an IPv4 address as it is, an IPv6 address by its /64: one customer
// has all of those.
func addressKey(client netip.Addr) string {
	network, _ := client.Prefix(min(client.BitLen(), 64))
	return network.String()
}
