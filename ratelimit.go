package main

// The rate limiter: a token bucket for each key, refilled like a sliding window, in bounded memory.
// newServer in main.go creates the limiters; limitByClient and serveRoute in middleware.go spend
// their tokens.

import (
	"fmt"
	"hash/maphash"
	"strings"
	"sync"
	"time"
)

const (
	maxKeys    = 65_536 // most keys that one limiter keeps
	sampleSize = 64     // keys that makeRoom compares
)

// A limiter keeps a token bucket for each key. A bucket holds burst tokens, and each token
// comes back one period after it was spent. While a key has no tokens left, it is refused.
//
// This is equivalent to a sliding-window log: at most burst requests pass in any interval of one
// period. A bucket that refills continuously would let up to twice as many pass. The cost is
// memory: about 90 bytes for each key, and up to 16 bytes for each request that passed in the last
// period. At 60,000 requests a second, that is 10 MB for a limit of 10 s.
//
// A limiter stores only the hash of a key, so that a long key costs no more memory. Two keys whose
// hashes collide (probability 2^-64) share a bucket.
type limiter struct {
	burst  int
	period time.Duration
	by     string // description of the key, such as "client address"
	seed   maphash.Seed
	start  time.Time // origin of all times below, which are monotonic durations since start

	mu sync.Mutex
	// byKey maps the hash of a key to the times at which its tokens were spent, oldest first.
	// Each key has at least one time and at most burst.
	byKey   map[uint64][]time.Duration
	sweptAt time.Duration // when sweep last ran
}

func newLimiter(burst int, period time.Duration, by string) *limiter {
	return &limiter{
		burst:  burst,
		period: period,
		by:     by,
		seed:   maphash.MakeSeed(),
		start:  time.Now(),
		byKey:  map[uint64][]time.Duration{},
	}
}

// String describes the limit: "5 per 15m by e-mail and client address".
func (l *limiter) String() string {
	period := strings.Replace(l.period.String(), "m0s", "m", 1) // 15m0s becomes 15m
	return fmt.Sprintf("%d per %s by %s", l.burst, period, l.by)
}

// spend spends one token of the key. If the key has none left, it returns a 429.
//
// The limit is exact for parallel requests and for any interval of one period (L1), unless
// makeRoom discards the key. Retry-After is the exact time until the next token comes back (L4).
func (l *limiter) spend(key string) error {
	hash := maphash.String(l.seed, key)
	l.mu.Lock()
	defer l.mu.Unlock()

	now := time.Since(l.start)
	l.sweep(now)
	spent, isKept := l.byKey[hash]
	spent = l.stillSpent(spent, now)
	if len(spent) == l.burst {
		firstTokenBack := spent[0] + l.period
		return rateLimited(l.String(), firstTokenBack-now)
	}
	if !isKept && len(l.byKey) >= maxKeys {
		l.makeRoom(now)
	}
	l.byKey[hash] = append(spent, now)
	return nil
}

// sweep discards the keys whose tokens have all come back, at most once per period. The caller
// holds the lock, so a sweep of a full limiter blocks it for some milliseconds.
func (l *limiter) sweep(now time.Duration) {
	if now-l.sweptAt < l.period {
		return
	}
	for hash, spent := range l.byKey {
		if len(l.stillSpent(spent, now)) == 0 {
			delete(l.byKey, hash)
		}
	}
	l.sweptAt = now
}

// stillSpent returns the times in spent whose tokens have not come back yet.
func (l *limiter) stillSpent(spent []time.Duration, now time.Duration) []time.Duration {
	for len(spent) > 0 && now-spent[0] >= l.period {
		spent = spent[1:]
	}
	return spent
}

// makeRoom discards one key, so that memory stays bounded and no client is refused because of other
// clients' keys. It looks at sampleSize keys, and discards the one with the fewest spent tokens.
//
// These keys are a random sample: Go places keys by a seeded hash, and begins a loop over a map at
// a random position. The language does not promise this, so a test measures what depends on it.
//
// A refused key is discarded only if every key in the sample is refused, so a flood of new keys
// with one request each does not free it (L3). SECURITY.md states what a flood of refused keys
// gains (L5).
func (l *limiter) makeRoom(now time.Duration) {
	var victim uint64
	fewest := l.burst + 1 // more than any key has
	seen := 0
	for hash, spent := range l.byKey {
		if n := len(l.stillSpent(spent, now)); n < fewest {
			victim = hash
			fewest = n
		}
		seen++
		if seen == sampleSize {
			break
		}
	}
	delete(l.byKey, victim)
}
