package main

// The token bucket: its keys, and its bound on memory. main.go makes the limits, middleware.go
// (limitByClient and serveRoute) takes from them.

import (
	"fmt"
	"hash/maphash"
	"strings"
	"sync"
	"time"
)

const (
	maxKeys    = 65_536 // keys that one limiter keeps
	sampleSize = 64     // keys that makeRoom looks at
)

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

	mu sync.Mutex
	// spent has, for the hash of each key, when its tokens were spent. Invariants: the
	// oldest is first; there is at least one, at most burst.
	spent   map[uint64][]time.Duration
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

// String is the limit in words: "5 per 15m by e-mail and client address".
func (l *limiter) String() string {
	period := strings.Replace(l.period.String(), "m0s", "m", 1)
	return fmt.Sprintf("%d per %s by %s", l.burst, period, l.by)
}

// take spends a token of the key. If the key has none, the error is the 429 that says when
// the next one comes back.
//
// The count is exact under parallel requests, wherever the period begins (L1). Retry-After is
// true: by then a token is back (L4).
func (l *limiter) take(key string) error {
	hash := maphash.String(l.seed, key)
	l.mu.Lock()
	defer l.mu.Unlock()

	now := time.Since(l.start)
	l.sweep(now)
	spent, isKept := l.spent[hash]
	spent = l.stillSpent(spent, now)
	if len(spent) == l.burst {
		firstTokenBack := spent[0] + l.period
		return rateLimited(l.String(), firstTokenBack-now)
	}
	if !isKept && len(l.spent) >= maxKeys {
		l.makeRoom(now)
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

// makeRoom forgets one key: of sampleSize keys from a random place in the map, the one that
// has spent least. So memory is bounded, and nobody is refused because of other people's keys.
//
// A key that is being refused gives way only if the whole sample is being refused. A flood of
// new keys with one request each frees none (L3). What a flood of refused keys gains stands in
// SECURITY.md (L5).
func (l *limiter) makeRoom(now time.Duration) {
	var victim uint64
	fewest := l.burst + 1
	seen := 0
	for hash, spent := range l.spent {
		if n := len(l.stillSpent(spent, now)); n < fewest {
			victim = hash
			fewest = n
		}
		seen++
		if seen == sampleSize {
			break
		}
	}
	delete(l.spent, victim)
}
