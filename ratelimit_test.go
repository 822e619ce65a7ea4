package main

// Tests of the limiter. Most use the fake clock of testing/synctest, so they are exact to the
// nanosecond, and fifteen minutes take no time.

import (
	"errors"
	"io"
	"math/rand/v2"
	"strconv"
	"testing"
	"testing/synctest"
	"time"
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
	if !ok || p.Status != 429 || p.retryAfter <= 0 {
		t.Fatalf("got the error %#v, want a 429 with a positive retryAfter", err)
	}
	return p.retryAfter
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

// L1, L4: For random sequences of requests, the limiter decides as the model does, and its refusals
// give the time to wait exactly to the nanosecond.
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

// L3: A million new keys leave the memory of a limiter bounded, and each of them passes: nobody is
// refused because of other clients' keys.
func TestFloodOfNewKeys(t *testing.T) {
	t.Parallel()
	l := newLimiter(1, time.Hour, "")
	for i := range 1_000_000 {
		if got := refusedFor(t, l, strconv.Itoa(i)); got != 0 {
			t.Fatalf("new key %d: got refused for %v, want passed", i, got)
		}
	}
	if got := len(l.spent); got > maxKeys {
		t.Errorf("got %d keys in memory, want at most %d", got, maxKeys)
	}
}

// A known key of a full limiter needs no room: it pushes out no other key, and is refused itself.
func TestKnownKeyNeedsNoRoom(t *testing.T) {
	t.Parallel()
	l := newLimiter(2, time.Hour, "")
	for i := range maxKeys {
		l.spend(strconv.Itoa(i))
	}
	for range 100 {
		l.spend("0")
	}
	if got := len(l.spent); got != maxKeys {
		t.Errorf("got %d keys in memory, want %d", got, maxKeys)
	}
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
			{at: 0, key: "a", kept: 1},
			{at: 30 * time.Second, key: "b", kept: 2},
			{at: time.Minute - 1, key: "c", kept: 3},
			{at: time.Minute, key: "d", kept: 3}, // a sweep, which discards a
			{at: 100 * time.Second, key: "e", kept: 4},
			{at: 2 * time.Minute, key: "f", kept: 2}, // a sweep, which keeps only e
		} {
			time.Sleep(time.Until(start.Add(step.at)))
			l.spend(step.key)
			if got := len(l.spent); got != step.kept {
				t.Errorf("at %v: got %d keys in memory, want %d", step.at, got, step.kept)
			}
		}
	})
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
