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

const (
	limiterShards = 64
	keysPerShard  = 1024 // so at most 65,536 keys a limiter
)

// limiter lets burst requests of a key pass at once; each token comes back one
// period after it was spent. So in no stretch as long as the period do more than
// burst requests pass, wherever the stretch begins.
//
// Memory: a key costs about 90 bytes, and 8 to 16 for each token it has spent lately
// (BenchmarkLimiterMemory). The keys themselves are not kept, only their hashes;
// should two collide (2^-64), they share a bucket. The shards keep the longest pause of
// a full limiter short.
type limiter struct {
	burst  int
	period time.Duration
	what   string // what is counted, for the client and the route table
	seed   maphash.Seed
	start  time.Time // spent tokens are noted as monotonic time since then
	shards [limiterShards]limiterShard
}

type limiterShard struct {
	mu    sync.Mutex
	spent map[uint64][]time.Duration // by hash of the key, oldest first
	swept time.Duration
}

func newLimiter(burst int, period time.Duration, what string) *limiter {
	return &limiter{burst: burst, period: period, what: what, seed: maphash.MakeSeed(), start: time.Now()}
}

// String is the limit in words: "5 per 15m by e-mail and client address".
func (l *limiter) String() string {
	return fmt.Sprintf("%d per %s %s", l.burst, strings.Replace(l.period.String(), "m0s", "m", 1), l.what)
}

// take spends a token of the key, or gives the 429 that says when one comes back.
func (l *limiter) take(key string) error {
	hash := maphash.String(l.seed, key)
	shard := &l.shards[hash%limiterShards]
	shard.mu.Lock()
	defer shard.mu.Unlock()

	now := time.Since(l.start)
	if shard.spent == nil {
		shard.spent = map[uint64][]time.Duration{}
	}
	if now-shard.swept >= l.period {
		maps.DeleteFunc(shard.spent, func(_ uint64, old []time.Duration) bool { return len(l.out(old, now)) == 0 })
		shard.swept = now
	}
	spent, known := shard.spent[hash]
	spent = append(spent[:0], l.out(spent, now)...)
	var wait time.Duration
	switch {
	case len(spent) == l.burst:
		wait = spent[0] + l.period - now
	case !known && len(shard.spent) == keysPerShard:
		wait = l.makeRoom(shard, now)
	}
	if wait > 0 {
		return &problem{Status: 429, Code: "rate_limited", Detail: "Over the limit of " + l.String() + ".", retryAfter: wait}
	}
	shard.spent[hash] = append(spent, now)
	return nil
}

// out is the part of spent that has not come back yet.
func (l *limiter) out(spent []time.Duration, now time.Duration) []time.Duration {
	for len(spent) > 0 && now-spent[0] >= l.period {
		spent = spent[1:]
	}
	return spent
}

// makeRoom drops the key that has spent least. A key that is being refused never
// gives way, else a flood of new keys would free it: where all are, the new one
// has to wait too, for as long as the answer says.
func (l *limiter) makeRoom(shard *limiterShard, now time.Duration) (wait time.Duration) {
	var victim uint64
	fewest, wait := l.burst, l.period
	for hash, spent := range shard.spent {
		out := l.out(spent, now)
		if len(out) < fewest {
			victim, fewest = hash, len(out)
		}
		if fewest <= 1 {
			break // a flood is made of such keys: don't look at them all
		}
		wait = min(wait, out[0]+l.period-now)
	}
	if fewest == l.burst {
		return wait
	}
	delete(shard.spent, victim)
	return 0
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
	for i := len(hops) - 1; i >= 0 && slices.ContainsFunc(trusted, isTrusted); i-- {
		hop, err := netip.ParseAddr(strings.TrimSpace(hops[i]))
		if err != nil {
			break // not an address: the last proxy is as far as we can see
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
