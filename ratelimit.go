package main

// The rate limiter: a token bucket for each key, in bounded memory. limitClient and serveRoute in
// middleware.go spend the tokens.

import (
	"fmt"
	"sync"
	"time"
)

// maxKeys is the most keys that one limiter keeps. With the longest addresses, that is 45 MB.
const maxKeys = 65_536

// A limiter keeps a bucket of burst tokens for each key. Each token comes back one period after it
// was spent. This equals a sliding-window log: at most burst requests pass in any interval of one
// period (L1). A bucket that refills continuously would let twice as many pass. The price is 24 bytes
// for each request of the last period.
type limiter struct {
	burst  int
	period time.Duration
	by     string // description of the key

	mu      sync.Mutex
	spent   map[string][]time.Time // for each key: when its tokens were spent, oldest first
	sweptAt time.Time
}

func newLimiter(burst int, period time.Duration, by string) *limiter {
	return &limiter{burst: burst, period: period, by: by, spent: map[string][]time.Time{}}
}

// String describes the limit: "5 in 15 minutes by e-mail and client address".
func (l *limiter) String() string {
	period := fmt.Sprintf("%.0f minutes", l.period.Minutes())
	switch {
	case l.period == time.Second:
		period = "a second"
	case l.period < time.Minute:
		period = fmt.Sprintf("%.0f seconds", l.period.Seconds())
	}
	return fmt.Sprintf("%d in %s by %s", l.burst, period, l.by)
}

// spend spends a token, or returns a 429 with the exact time until the next one comes back. An empty
// key is not counted.
func (l *limiter) spend(key string) error {
	if key == "" {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.sweep(now)
	spent := l.stillSpent(key, now)
	if len(spent) == l.burst {
		tokenBack := spent[0].Add(l.period)
		return rateLimited(l.String(), tokenBack.Sub(now))
	}
	if l.spent[key] == nil && len(l.spent) >= maxKeys {
		l.dropAnyKey()
	}
	l.spent[key] = append(spent, now)
	return nil
}

// stillSpent returns when the tokens were spent that have not come back yet.
func (l *limiter) stillSpent(key string, now time.Time) []time.Time {
	spent := l.spent[key]
	for len(spent) > 0 && now.Sub(spent[0]) >= l.period {
		spent = spent[1:]
	}
	return spent
}

// sweep removes the keys whose tokens have all come back, once a period.
func (l *limiter) sweep(now time.Time) {
	if now.Sub(l.sweptAt) < l.period {
		return
	}
	for key := range l.spent {
		if len(l.stillSpent(key, now)) == 0 {
			delete(l.spent, key)
		}
	}
	l.sweptAt = now
}

// dropAnyKey makes room, so that nobody is refused because of other clients' keys (L3). A flood can
// thus free a key that is being refused. At one mailbox that gains little: find in otp.go counts, too.
func (l *limiter) dropAnyKey() {
	for key := range l.spent {
		delete(l.spent, key)
		return
	}
}
