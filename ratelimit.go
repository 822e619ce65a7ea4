package main

// The rate limiter: a token bucket for each key, in bounded memory.

import (
	"fmt"
	"hash/maphash"
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
