package main

// Tests of the limiter. Most use the fake clock of testing/synctest, so they are exact to the
// nanosecond, and fifteen minutes take no time.

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
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

// L1, L3, L4: For random sequences of requests, the limiter decides as the model does, and its
// refusals give the time to wait exactly to the nanosecond. Now and then a flood of new keys fills
// it. That can make it forget a key once, but never refuse one.
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

			isForgotten := map[string]bool{} // perhaps, since the last flood
			for step := range 600 {
				if seed%10 == 0 && random.IntN(300) == 0 {
					for i := range maxKeys {
						l.spend(fmt.Sprint("flood ", step, i))
					}
					if len(l.spent) > maxKeys {
						t.Fatalf("got %d keys in memory, want at most %d", len(l.spent), maxKeys)
					}
					isForgotten = map[string]bool{"0": true, "1": true, "2": true}
				}
				key := strconv.Itoa(random.IntN(3))
				want := model[key].wait()
				got := refusedFor(t, l, key)
				if got == 0 && want > 0 && isForgotten[key] {
					isForgotten[key] = false
					want = 0
					model[key].passed = []time.Time{time.Now()}
				}
				if got != want {
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
// refused because of other clients' keys. A known key needs no room: it pushes out no other.
//
// A limiter sweeps at most once a period, because sweeping a full limiter takes milliseconds. Until
// the next sweep, it keeps a key whose token has come back.
func TestFloodOfNewKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(2, time.Hour, "")
		kept := func(pause time.Duration, key string) int { // keys in memory after one more
			time.Sleep(pause)
			if got := refusedFor(t, l, key); got != 0 {
				t.Fatalf("new key %s: got refused for %v, want passed", key, got)
			}
			return len(l.spent)
		}
		kept(1, "early")
		kept(l.period-1, "at the sweep")
		if got := kept(1, "after the sweep"); got != 3 {
			t.Fatalf("between two sweeps: got %d keys in memory, want 3", got)
		}
		const keys = 1_000_000
		for i := range keys {
			kept(0, strconv.Itoa(i))
		}
		if got := len(l.spent); got > maxKeys {
			t.Errorf("got %d keys in memory, want at most %d", got, maxKeys)
		}
		if got := kept(0, strconv.Itoa(keys-1)); got != maxKeys {
			t.Errorf("after a known key: got %d keys in memory, want %d", got, maxKeys)
		}
		if got := kept(l.period, "at the next sweep"); got != 1 {
			t.Errorf("after the next sweep: got %d keys in memory, want 1", got)
		}
	})
}

// L1: A limit of a route without an input counts, too. It is spent before the handler is called.
func TestLimitOfARouteWithoutInput(t *testing.T) {
	t.Parallel()
	s := newServer(config{env: envLocal}, nil, &logWriter{Writer: io.Discard})
	called := 0
	limit := newLimiter(2, time.Hour, "client address")
	s.addRoute(route{pattern: "POST /counted", access: public, status: 204,
		limit: limit, limitKey: (*request).clientKey,
		handle: func(*request) (output, error) { called++; return nil, nil }})
	s.addRoute(route{pattern: "POST /uncounted", access: public, status: 204,
		limit: limit, limitKey: guessKey, // there is no address, so nothing counts
		handle: func(*request) (output, error) { return nil, nil }})
	send := func(path string) int {
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest("POST", path, strings.NewReader(`{"email":"a@b.example"}`)))
		return w.Code
	}
	got := []int{send("/uncounted"), send("/counted"), send("/counted"), send("/counted"), send("/uncounted")}
	hubstest.WantEqual(t, "statuses", got, []int{204, 204, 204, 429, 204})
	hubstest.WantEqual(t, "calls of the handler", called, 2)
}

// L2: The client is the peer, or an address of X-Forwarded-For with none but trusted addresses to
// its right. Nobody without a trusted address gets another one than their own.
func FuzzForwardedFor(f *testing.F) {
	f.Add("10.0.0.1:1", "192.0.2.1, 10.0.0.2")
	f.Add("10.0.0.1:1", "[2001:db8::1]:80,::ffff:10.0.0.3,fe80::1%eth0")
	f.Add("192.0.2.9:1", "10.0.0.1")
	trusted := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	f.Fuzz(func(t *testing.T, peer, sent string) {
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = peer
		r.Header["X-Forwarded-For"] = []string{sent}
		got := clientAddress(r, trusted)
		hops := strings.Split(sent, ",")
		for i := range hops {
			hops[i] = strings.TrimSpace(hops[i])
		}
		for _, hop := range slices.Backward(append(hops, peer)) {
			address := parseAddress(hop)
			if address == got {
				return
			}
			if !address.IsValid() || !isWithin(address, trusted) {
				break
			}
		}
		t.Errorf("peer %q, X-Forwarded-For %q: got %v, want an address behind trusted ones", peer, sent, got)
	})
}

// C1: An origin is accepted only in the form that a browser sends: package url gives the same text
// back, in lower case, without a default port, with a host of labels or an address.
func FuzzOrigin(f *testing.F) {
	for _, origin := range []string{
		"https://app.example.com", "http://[::1]:3000", "http://127.0.0.1", "https://a.example.:443",
	} {
		f.Add(origin)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if !isOrigin(text) {
			return
		}
		u, err := url.Parse(text)
		if err != nil || u.Scheme+"://"+u.Host != text || strings.ToLower(text) != text {
			t.Fatalf("got %q accepted, want what package url gives back in lower case", text)
		}
		port, _ := strconv.Atoi(u.Port())
		isDefault := u.Scheme == "http" && port == 80 || u.Scheme == "https" && port == 443
		hasBadPort := u.Port() != "" && (port < 1 || port > 65535) || strings.HasSuffix(text, ":")
		if isDefault || hasBadPort || strings.HasSuffix(u.Hostname(), ".") || strings.Contains(text, "..") {
			t.Errorf("got %q accepted", text)
		}
	})
}
