package main

// Tests of the limiter. Most use the fake clock of testing/synctest, so they are exact to the
// nanosecond, and fifteen minutes take no time.

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"hubs/internal/hubstest"
)

// refusedFor takes a token. It returns 0 if the key had one left, and otherwise the time after
// which the refusal says to try again.
func refusedFor(t *testing.T, l *limiter, key string) time.Duration {
	t.Helper()
	err := l.spend(key)
	if err == nil {
		return 0
	}
	p, ok := errors.AsType[problem](err)
	if !ok || p.retryAfter <= 0 {
		t.Fatalf("got the error %#v, want a problem with a positive retryAfter", err)
	}
	return p.retryAfter
}

// spendTokens takes n tokens of a key. It ignores refusals.
func spendTokens(l *limiter, key string, n int) {
	for range n {
		l.spend(key)
	}
}

// L1: Of many requests with one key at once, exactly burst pass.
func TestLimitIsExactInParallel(t *testing.T) {
	t.Parallel()
	for _, burst := range []int{1, 5, 50} {
		l := newLimiter(burst, time.Hour, "")
		passed := contend(&l.mu, func() bool { return l.spend("key") == nil })
		if passed != int64(burst) {
			t.Errorf("got %d requests passed, want %d", passed, burst)
		}
	}
}

// A window is a plain model of a limit: a request passes if fewer than burst requests have passed
// within the last period.
type window struct {
	burst  int
	period time.Duration
	passed []time.Time
}

// wait returns 0 and counts the request if it passes now. Otherwise it returns the time until a
// request can pass.
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

// For random sequences of requests, the limiter decides as the model does, and its refusals give
// the time to wait exactly to the nanosecond.
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
					t.Fatalf("seed %d, step %d: got a wait of %v, want %v", seed, step, got, want)
				}
				// No pause, a nanosecond, a share of the period, about a period, or a random time.
				pauses := []time.Duration{
					0, 0, 1, period / time.Duration(burst), period - 1, period,
					time.Duration(random.Int64N(int64(2*period)/int64(burst) + 1)),
				}
				time.Sleep(pauses[random.IntN(len(pauses))])
			}
		})
	}
}

// While new keys flood a limiter, its memory stays bounded, a refused key stays refused, and every
// new key passes.
func TestFloodOfNewKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const refused = 200
		const pause = 16    // new keys for each request of a refused key
		const most = 65_536 // keys that a limiter may keep, as SECURITY.md says
		l := newServer(config{}, nil, io.Discard).codeRequestLimit
		for i := range refused {
			spendTokens(l, fmt.Sprint("refused ", i), l.burst)
		}

		time.Sleep(time.Minute)
		for i := range 3 * most {
			if got := refusedFor(t, l, fmt.Sprint("new ", i)); got != 0 {
				t.Fatalf("new key %d: got refused for %v, want passed", i, got)
			}
			if i%pause != 0 {
				continue
			}
			inTurn := i / pause % refused
			got := refusedFor(t, l, fmt.Sprint("refused ", inTurn))
			if want := l.period - time.Minute; got != want {
				t.Fatalf("a refused key after %d new ones: got a wait of %v, want %v", i, got, want)
			}
		}

		if got := len(l.byKey); got > most {
			t.Errorf("got %d keys in memory, want at most %d", got, most)
		}
	})
}

// A flood of keys that have spent one or two tokens gives no token back to keys that have only one
// left. With several such keys, chance alone does not save all of them.
func TestFloodFreesNoTokens(t *testing.T) {
	t.Parallel()
	mailboxes := strings.Fields("a b c d e f g h")
	for spent := 1; spent <= 2; spent++ {
		l := newServer(config{}, nil, io.Discard).guessLimit
		for _, mailbox := range mailboxes {
			spendTokens(l, mailbox, l.burst-1)
		}
		for i := range 2 * maxKeys {
			spendTokens(l, strconv.Itoa(i), spent)
		}
		for _, mailbox := range mailboxes {
			if got := refusedFor(t, l, mailbox); got != 0 {
				t.Errorf("the last guess at %s: got refused for %v, want passed", mailbox, got)
			}
			if got := refusedFor(t, l, mailbox); got == 0 {
				t.Errorf("one guess more at %s: got passed, want refused", mailbox)
			}
		}
	}
}

// A flood of refused keys allows about as many guesses a day at one mailbox as SECURITY.md says.
// The attacker sends a guess whenever the limiter lets one pass.
//
// In this test, the limiter discards the keys of mailboxes some 400 times, so chance changes the
// result by about a twentieth. The test accepts a difference of a third, which chance does not
// reach.
func TestFloodMatchesSecurityMD(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const attempts = 10_000 // a second, at mailboxes of no interest
		const mailboxes = 200   // that the attacker wants to enter; the result is their mean
		const minutes = 2
		said := hubstest.Matches(t, "SECURITY.md", `(?m)^\| 10,000 \|[^|]*\| about (\d+),000 \|`)
		if len(said) != 1 {
			t.Fatalf("SECURITY.md: got %q for 10,000 attempts a second, want one figure", said)
		}
		want, _ := strconv.Atoi(said[0] + "000") // digits, so there is no error
		l := newServer(config{}, nil, io.Discard).guessLimit
		for i := range maxKeys {
			spendTokens(l, fmt.Sprint("first ", i), l.burst)
		}
		for i := range mailboxes {
			spendTokens(l, fmt.Sprint("mailbox ", i), l.burst)
		}

		guesses := 0
		for second := range minutes * 60 {
			for i := range attempts / l.burst {
				spendTokens(l, fmt.Sprint(second, " ", i), l.burst)
			}
			for i := range mailboxes {
				for l.spend(fmt.Sprint("mailbox ", i)) == nil {
					guesses++
				}
			}
			time.Sleep(time.Second)
		}

		perDay := guesses * 24 * 60 / minutes / mailboxes
		if perDay < want*2/3 || perDay > want*4/3 {
			t.Errorf("got %d guesses a day at one mailbox, want %d ± a third", perDay, want)
		}
	})
}

// A limiter sweeps at most once a period, because sweeping a full limiter takes milliseconds. Until
// the next sweep, it keeps a key whose token has come back.
func TestSweepIsOnceAPeriod(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(1, time.Minute, "")
		start := time.Now()
		for _, step := range []struct {
			at   time.Duration // since the start
			key  string
			kept int // keys in memory after this request
		}{
			{at: 90 * time.Second, key: "a", kept: 1}, // a sweep, which finds no key
			{at: 120 * time.Second, key: "b", kept: 2},
			{at: 150*time.Second - 1, key: "c", kept: 3},
			{at: 150 * time.Second, key: "d", kept: 3}, // a sweep, which discards a
			{at: 190 * time.Second, key: "e", kept: 4}, // b's token is back, but there is no sweep
			{at: 210 * time.Second, key: "f", kept: 2}, // a sweep, which discards b, c and d
		} {
			time.Sleep(time.Until(start.Add(step.at)))
			spendTokens(l, step.key, 1)
			if got := len(l.byKey); got != step.kept {
				t.Errorf("at %v: got %d keys in memory, want %d", step.at, got, step.kept)
			}
		}
	})
}

// The limits of requests are those of the specification. Other tests take a limit from the contract,
// which is made from the code. So only this test notices a changed number.
func TestRequestLimits(t *testing.T) {
	t.Parallel()
	s := newServer(config{}, nil, io.Discard)
	for want, limit := range map[string]*limiter{
		"100 per 10s by client address":          s.requestLimit,
		"500 per 1s by client address":           s.fileLimit,
		"5 per 15m by e-mail and client address": s.codeRequestLimit,
		"10 per 15m by e-mail":                   s.guessLimit,
	} {
		if got := limit.String(); got != want {
			t.Errorf("got the limit %q, want %q", got, want)
		}
	}
}

// Downloads count against a limit of their own, also for a client that has spent the limit of other
// requests. Those within it are refused only later, because they have no session.
func TestDownloadsAreLimited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		s := newServer(config{env: envLocal}, &store{}, io.Discard)
		for range s.requestLimit.burst {
			statusOf(s, "GET", "/nowhere")
		}
		if got := statusOf(s, "GET", "/filesystem"); got != 429 { // begins like the path of a file
			t.Errorf("one more request: got status %d, want 429", got)
		}
		for n := range s.fileLimit.burst {
			method := []string{"GET", "HEAD"}[n%2]
			if got := statusOf(s, method, "/files/id/a.txt"); got != 401 {
				t.Fatalf("%s, download %d: got status %d, want 401", method, n+1, got)
			}
		}
		if got := statusOf(s, "GET", "/files/id/a.txt"); got != 429 {
			t.Errorf("one more download: got status %d, want 429", got)
		}
	})
}
