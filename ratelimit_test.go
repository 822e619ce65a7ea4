package main

// The token bucket by a clock that the tests turn (testing/synctest): exact to the nanosecond,
// and fifteen minutes take none.

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// refusedFor takes a token and returns how long the refusal says to wait; 0: it passed.
func refusedFor(t *testing.T, l *limiter, key string) time.Duration {
	t.Helper()
	err := l.take(key)
	if err == nil {
		return 0
	}
	p, ok := errors.AsType[problem](err)
	if !ok || p.retryAfter <= 0 {
		t.Fatalf("refused with %#v", err)
	}
	return p.retryAfter
}

// spend takes n tokens of a key.
func spend(l *limiter, key string, n int) {
	for range n {
		l.take(key)
	}
}

func TestLimitIsExactInParallel(t *testing.T) {
	t.Parallel()
	for _, burst := range []int{1, 5, 100} {
		l := newLimiter(burst, time.Hour, "")
		var passed atomic.Int64
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				for range 50 {
					if l.take("key") == nil {
						passed.Add(1)
					}
				}
			})
		}
		all.Wait()
		if got := passed.Load(); got != int64(burst) {
			t.Errorf("%d of %d passed", got, burst)
		}
	}
}

// A window is the rule of a limit written down as plainly as can be: a request passes if fewer
// than burst have passed within the last period.
type window struct {
	burst  int
	period time.Duration
	passed []time.Time
}

// wait returns 0 if a request passes now, else the time until one passes.
func (w *window) wait() time.Duration {
	now := time.Now()
	var recent []time.Time
	for _, at := range w.passed {
		if now.Sub(at) < w.period {
			recent = append(recent, at)
		}
	}
	if len(recent) == w.burst {
		return w.period - now.Sub(recent[0])
	}
	w.passed = append(w.passed, now)
	return 0
}

// Whatever the rhythm, the limiter decides like the rule itself, and Retry-After is true to the
// nanosecond.
func TestLimitSlides(t *testing.T) {
	t.Parallel()
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			burst := 1 + random.IntN(8)
			period := time.Duration(1+random.IntN(1000)) * time.Millisecond
			l := newLimiter(burst, period, "")
			model := map[string]*window{}
			for _, key := range []string{"0", "1", "2"} {
				model[key] = &window{burst: burst, period: period}
			}
			for step := range 600 {
				key := strconv.Itoa(random.IntN(3))
				want := model[key].wait()
				if got := refusedFor(t, l, key); got != want {
					t.Fatalf("seed %d, step %d: wait %v, want %v", seed, step, got, want)
				}
				// All at once, near the period's edges, and anywhere.
				pauses := []time.Duration{
					0, 0, 1, period / time.Duration(burst), period - 1, period,
					time.Duration(random.Int64N(int64(2*period)/int64(burst) + 1)),
				}
				time.Sleep(pauses[random.IntN(len(pauses))])
			}
		})
	}
}

// Memory is bounded, a key that is refused stays refused, and a new one passes.
func TestFloodOfNewKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const refused = 200
		const pause = 16     // new keys between two refused ones
		const most = 100_000 // keys, of some hundred bytes each
		l := newServer(config{}, nil, io.Discard).codeRequestLimit
		for i := range refused {
			spend(l, fmt.Sprint("refused ", i), l.burst)
		}
		time.Sleep(time.Minute)
		for i := range 3 * most {
			if got := refusedFor(t, l, fmt.Sprint("new ", i)); got != 0 {
				t.Fatalf("new key %d: refused for %v", i, got)
			}
			if i%pause != 0 {
				continue
			}
			inTurn := i / pause % refused
			got := refusedFor(t, l, fmt.Sprint("refused ", inTurn))
			if want := l.period - time.Minute; got != want {
				t.Fatalf("after %d new keys: a refused one waits %v, want %v", i, got, want)
			}
		}
		if got := len(l.spent); got > most {
			t.Errorf("%d keys, want %d at most", got, most)
		}
	})
}

// A flood of keys that have spent one or two gives nothing back to a key with a single guess left.
func TestFloodFreesNoTokens(t *testing.T) {
	t.Parallel()
	for spent := 1; spent <= 2; spent++ {
		l := newServer(config{}, nil, io.Discard).guessLimit
		spend(l, "mailbox", l.burst-1)
		for i := range 2 * maxKeys {
			spend(l, strconv.Itoa(i), spent)
		}
		if got := refusedFor(t, l, "mailbox"); got != 0 {
			t.Errorf("the last guess waits %v", got)
		}
		if got := refusedFor(t, l, "mailbox"); got == 0 {
			t.Error("got a guess more than the limit")
		}
	}
}

// What SECURITY.md says of a flood of refused keys: how many guesses a day it allows at one
// mailbox. The attacker presents a guess whenever one is free. Chance moves the result by a
// twentieth: some 400 times a mailbox gives way here. So a third is well apart from chance.
func TestFloodOfRefusedKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const attempts, minutes, mailboxes = 10_000, 2, 200 // attempts a second; the mean of mailboxes
		said := matches(t, "SECURITY.md", `(?m)^\| 10,000 \|[^|]*\| about (\d+),000 \|`)
		if len(said) != 1 {
			t.Fatalf("SECURITY.md says %q of a flood of 10,000 attempts a second, want one figure", said)
		}
		want, _ := strconv.Atoi(said[0] + "000") // it is digits
		l := newServer(config{}, nil, io.Discard).guessLimit
		for i := range maxKeys {
			spend(l, fmt.Sprint("first ", i), l.burst)
		}
		for i := range mailboxes {
			spend(l, fmt.Sprint("mailbox ", i), l.burst)
		}
		guesses := 0
		for second := range minutes * 60 {
			for i := range attempts / l.burst {
				spend(l, fmt.Sprint(second, " ", i), l.burst)
			}
			for i := range mailboxes {
				for l.take(fmt.Sprint("mailbox ", i)) == nil {
					guesses++
				}
			}
			time.Sleep(time.Second)
		}
		perDay := guesses * 24 * 60 / minutes / mailboxes
		if perDay < want*2/3 || perDay > want*4/3 {
			t.Errorf("got %d guesses a day, want %d or so", perDay, want)
		}
	})
}

// The sweep of a full limiter takes milliseconds, so there is one a period. A key whose token
// came back since the last one is still kept.
func TestSweepIsOnceAPeriod(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(1, time.Minute, "")
		start := time.Now()
		for _, step := range []struct {
			at   time.Duration
			key  string
			kept int
		}{
			{at: 90 * time.Second, key: "a", kept: 1}, // the first request: a sweep, of nothing
			{at: 120 * time.Second, key: "b", kept: 2},
			{at: 150*time.Second - 1, key: "c", kept: 3},
			{at: 150 * time.Second, key: "d", kept: 3}, // a sweep: a is forgotten
			{at: 190 * time.Second, key: "e", kept: 4}, // b's token is back
			{at: 210 * time.Second, key: "f", kept: 2}, // a sweep: b, c and d are forgotten
		} {
			time.Sleep(time.Until(start.Add(step.at)))
			spend(l, step.key, 1)
			if got := len(l.spent); got != step.kept {
				t.Errorf("at %v: %d keys, want %d", step.at, got, step.kept)
			}
		}
	})
}

// The limits of the specification. All other tests take them from the contract.
func TestLimitsAreThoseOfTheSpecification(t *testing.T) {
	t.Parallel()
	s := newServer(config{}, nil, io.Discard)
	for limit, want := range map[*limiter]string{
		s.requestLimit:     "100 per 10s by client address",
		s.fileLimit:        "500 per 1s by client address",
		s.codeRequestLimit: "5 per 15m by e-mail and client address",
		s.guessLimit:       "10 per 15m by e-mail",
	} {
		if got := limit.String(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
