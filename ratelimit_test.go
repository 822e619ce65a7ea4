//go:build moving

package main

// The limits, by a clock that the tests turn (testing/synctest): exact to the
// nanosecond, and the fifteen minutes take none.

import (
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// refusedFor takes one token and returns how long the refusal says to wait; 0: passed.
func refusedFor(t testing.TB, l *limiter, key string) time.Duration {
	t.Helper()
	err := l.take(key)
	if err == nil {
		return 0
	}
	p, ok := errors.AsType[*problem](err)
	if !ok || p.retryAfter <= 0 {
		t.Fatalf("refused with %#v", err)
	}
	return p.retryAfter
}

// keysHeld is what the bound on memory bounds.
func keysHeld(l *limiter) int { return len(l.spent) }

const keyBound = 65_536

// L1
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
		if all.Wait(); passed.Load() != int64(burst) {
			t.Errorf("%d of %d passed", passed.Load(), burst)
		}
	}
}

// L1, L4: whatever the rhythm, the limiter decides like the rule itself, written down
// as slowly and plainly as can be: fewer than N have passed within the last period.
func TestLimitSlides(t *testing.T) {
	t.Parallel()
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			burst, period := 1+random.IntN(8), time.Duration(1+random.IntN(1000))*time.Millisecond
			l := newLimiter(burst, period, "")
			passes := map[string][]time.Time{}
			for step := range 600 {
				key, now := strconv.Itoa(random.IntN(3)), time.Now()
				recent, frees := 0, time.Time{}
				for _, at := range passes[key] {
					if now.Sub(at) < period {
						if recent == 0 {
							frees = at.Add(period)
						}
						recent++
					}
				}
				switch wait := refusedFor(t, l, key); {
				case (wait == 0) != (recent < burst):
					t.Fatalf("seed %d, step %d: wait %v with %d of %d within %v", seed, step, wait, recent, burst, period)
				case wait == 0:
					passes[key] = append(passes[key], now)
				case !now.Add(wait).Equal(frees):
					t.Fatalf("seed %d, step %d: refused for %v, a token is back in %v", seed, step, wait, frees.Sub(now))
				}
				// All at once, near the period's edges, and anywhere.
				pauses := []time.Duration{0, 0, 1, period / time.Duration(burst), period - 1, period,
					time.Duration(random.Int64N(int64(2*period)/int64(burst) + 1))}
				time.Sleep(pauses[random.IntN(len(pauses))])
			}
		})
	}
}

// L4: not a moment before, and then indeed.
func TestRetryAfterIsTrue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(3, time.Minute, "")
		for range 3 {
			if refusedFor(t, l, "key") != 0 {
				t.Fatal("refused too early")
			}
			time.Sleep(7 * time.Second)
		}
		for range 9 {
			wait := refusedFor(t, l, "key")
			if wait <= 0 {
				t.Fatal("passed too early")
			}
			time.Sleep(wait - 1)
			if again := refusedFor(t, l, "key"); again != 1 {
				t.Fatalf("1 ns before its time: wait %v", again)
			}
			time.Sleep(time.Nanosecond)
			if again := refusedFor(t, l, "key"); again != 0 {
				t.Fatalf("refused for another %v", again)
			}
		}
	})
}

// L3: memory is bounded, whoever is refused stays refused, and whoever is new passes.
func TestFloodOfNewKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const refused = 200
		l := newLimiter(5, 15*time.Minute, "")
		name := func(i int) string { return "refused " + strconv.Itoa(i) }
		for i := range refused {
			for range 5 {
				l.take(name(i))
			}
		}
		time.Sleep(time.Minute)
		for i := range 1_000_000 {
			if err := l.take("new " + strconv.Itoa(i)); err != nil {
				t.Fatalf("new key %d: %v", i, err)
			}
			if i%16 != 0 {
				continue
			}
			if wait := refusedFor(t, l, name(i/16%refused)); wait != 14*time.Minute {
				t.Fatalf("after %d new keys a refused one has to wait %v", i, wait)
			}
		}
		l.take("new 999999") // a key that is there needs no room
		if n := keysHeld(l); n != keyBound {
			t.Errorf("%d keys", n)
		}
		time.Sleep(14 * time.Minute)
		for i := range refused {
			if refusedFor(t, l, name(i)) != 0 {
				t.Error("still refused when its time is over")
			}
		}
	})
}

// L3: when every key is being refused, none gives way: a new one is refused with a
// wait that is true, and so is the wait of those that were there before.
func TestAllKeysRefused(t *testing.T) {
	t.Parallel()
	for _, burst := range []int{2, 5} {
		synctest.Test(t, func(t *testing.T) {
			l := newLimiter(burst, 15*time.Minute, "")
			held, missed, start := []string{}, 0, time.Now()
			for i := 0; missed < 12_000; i++ {
				if i > 2*keyBound {
					t.Fatalf("of %d keys only %d are refused", i, missed)
				}
				key := strconv.Itoa(i)
				if refusedFor(t, l, key) != 0 {
					missed++
					continue
				}
				held = append(held, key)
				for range burst - 1 {
					if wait := refusedFor(t, l, key); wait != 0 {
						t.Fatalf("key %d is held, and refused for %v", i, wait)
					}
				}
				if i%100 == 0 {
					time.Sleep(time.Millisecond)
				}
			}
			if n := keysHeld(l); n != len(held) || n > keyBound {
				t.Errorf("%d keys held, %d passed", n, len(held))
			}
			for _, key := range held {
				if refusedFor(t, l, key) == 0 {
					t.Fatal("a key that was being refused gave way")
				}
			}
			late := map[string]time.Time{}
			for i := range 20 {
				key := fmt.Sprint("late ", i)
				wait := refusedFor(t, l, key)
				if !time.Now().Add(wait).Equal(start.Add(15 * time.Minute)) {
					t.Fatalf("a new key has to wait %v", wait)
				}
				late[key] = time.Now().Add(wait)
			}
			for _, key := range slices.SortedFunc(maps.Keys(late), func(a, b string) int { return late[a].Compare(late[b]) }) {
				time.Sleep(time.Until(late[key]))
				if again := refusedFor(t, l, key); again != 0 {
					t.Errorf("refused for another %v after the wait it was told", again)
				}
				if n := keysHeld(l); n > keyBound {
					t.Fatalf("%d keys once the wait was over", n)
				}
			}
		})
	}
}

// L3: a key that has spent nearly all its tokens does not get them back from a flood, of
// keys that have spent one or two: 9 guesses and a flood are not the start of 10 more.
func TestFloodFreesNoTokens(t *testing.T) {
	t.Parallel()
	for spent := 1; spent <= 2; spent++ {
		l := newLimiter(10, 15*time.Minute, "")
		for range 9 {
			l.take("mailbox")
		}
		for i := range 4 * keyBound {
			for range spent {
				l.take(strconv.Itoa(i))
			}
		}
		if refusedFor(t, l, "mailbox") != 0 || refusedFor(t, l, "mailbox") == 0 {
			t.Error("the tenth was not the last")
		}
	}
}

// A key is forgotten once its tokens are back, else the bound would be reached by ordinary
// use, and a flood that is long over would still hold its memory.
func TestIdleKeysAreForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(5, time.Minute, "")
		for i := range 20_000 {
			l.take(strconv.Itoa(i))
		}
		for range 2 {
			time.Sleep(time.Minute)
			l.take("later")
		}
		if n := keysHeld(l); n != 1 || l.sweptAt != 2*time.Minute {
			t.Errorf("%d keys, want 1", n)
		}
	})
}

// An office is a server without a database, a mail server or a network: enough for
// whatever must be decided before those are asked, and it fits into a bubble.
// Requests for a code stay in its queue.
type office struct {
	*server
	handler http.Handler
}

func newOffice(t testing.TB) office {
	t.Helper()
	cfg, err := loadConfig(lookup(serverEnv(t, map[string]string{
		"DATABASE_URL": "postgres://nobody@127.0.0.1:1/none", "FILES_DIR": "none", "TRUSTED_PROXIES": "10.0.0.0/8"})))
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(cfg, nil, io.Discard)
	return office{s, s.handler(s.routes())}
}

// call sends one request to the handler itself, from an address.
func call(t testing.TB, s office, from, method, path, body string, headers ...string) *testResponse {
	t.Helper()
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.RemoteAddr = netip.AddrPortFrom(netip.MustParseAddr(from), 4711).String()
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	s.handler.ServeHTTP(w, r)
	answer := &testResponse{method: method, path: path, status: w.Code, header: w.Result().Header, body: w.Body.Bytes()}
	if err := answer.answerFault(); err != nil {
		t.Errorf("%s %s: %v", method, path, err)
	}
	return answer
}

// one is the n-th IPv4 address of its kind.
func one(n int) string { return fmt.Sprintf("198.%d.%d.%d", 18+n>>16, n>>8&255, n&255) }

func codeBody(email, code string) string { return fmt.Sprintf(`{"email":%q,"code":%q}`, email, code) }

func emailBody(email string) string { return fmt.Sprintf(`{"email":%q}`, email) }

// limitCases are the limits of the specification, each with a request that it counts.
var limitCases = []struct {
	name, method, path, body string
	n                        int
	period                   time.Duration
	byAddress                bool // else the key is in the body
}{
	{"global", "GET", "/hubs", "", 100, 10 * time.Second, true},
	{"global, no such route", "GET", "/none", "", 100, 10 * time.Second, true},
	{"global, preflight", "OPTIONS", "/hubs", "", 100, 10 * time.Second, true},
	{"upload", "POST", "/files/upload", "", 100, 10 * time.Second, true},
	{"files", "GET", "/files/a/b", "", 500, time.Second, true},
	{"global, no file", "GET", "/filesystem", "", 100, 10 * time.Second, true},
	{"files, HEAD", "HEAD", "/files/a/b", "", 500, time.Second, true},
	{"code request", "POST", "/auth/otp/request", emailBody("ada@example.com"), 5, 15 * time.Minute, false},
	{"validation", "POST", "/auth/otp/validate", codeBody("ada@example.com", "012345"), 10, 15 * time.Minute, false},
}

// L1, L4: each limit at the outside: N pass at once in parallel, the next does not,
// Retry-After is true, and the answer names the limit.
func TestLimitsAnswer(t *testing.T) {
	t.Parallel()
	for _, c := range limitCases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newOffice(t)
			synctest.Test(t, func(t *testing.T) {
				try := func() *testResponse { return call(t, s, "192.0.2.1", c.method, c.path, c.body) }
				burst := func() (passed int) {
					var n atomic.Int64
					var all sync.WaitGroup
					for range c.n + 40 {
						all.Go(func() {
							if r := try(); r.status != 429 {
								n.Add(1)
							}
						})
					}
					all.Wait()
					return int(n.Load())
				}
				if c.byAddress {
					if n := burst(); n != c.n {
						t.Fatalf("%d passed, want %d", n, c.n)
					}
				} else {
					for i := range c.n {
						if r := try(); r.status == 429 {
							t.Fatalf("number %d: %v", i+1, r)
						}
					}
				}
				time.Sleep(c.period / 3)
				r := try()
				wantProblem(t, r, 429, "rate_limited")
				if c.method != "HEAD" && !strings.Contains(r.field(t, "detail").(string), fmt.Sprintf("%d per ", c.n)) {
					t.Errorf("detail does not name the limit: %v", r)
				}
				seconds, _ := strconv.Atoi(r.header.Get("Retry-After"))
				left := c.period - c.period/3
				if want := int(math.Ceil(left.Seconds())); seconds != want {
					t.Errorf("Retry-After %d, want %d", seconds, want)
				}
				time.Sleep(left - 1)
				wantProblem(t, try(), 429, "rate_limited")
				time.Sleep(time.Duration(seconds)*time.Second - left + 1)
				if r := try(); r.status == 429 {
					t.Errorf("after %d s as told: %v", seconds, r)
				}
			})
		})
	}
}

// Which requests share a bucket, and which do not. Each case spends all of the first
// request's tokens, then tries the second.
func TestLimitKeys(t *testing.T) {
	t.Parallel()
	type request struct{ from, method, path, body, forwarded string }
	get := func(from, forwarded string) request { return request{from, "GET", "/hubs", "", forwarded} }
	file := func(path string) request { return request{"192.0.2.1", "GET", path, "", ""} }
	ask := func(from, email string) request {
		return request{from, "POST", "/auth/otp/request", emailBody(email), ""}
	}
	prove := func(from, email string) request {
		return request{from, "POST", "/auth/otp/validate", codeBody(email, "012345"), ""}
	}
	const a, b, proxy = "192.0.2.1", "192.0.2.2", "10.1.2.3"
	for name, c := range map[string]struct {
		n           int
		first, then request
		shared      bool
	}{
		"two addresses":               {100, get(a, ""), get(b, ""), false},
		"v4-mapped":                   {100, get(a, ""), get("::ffff:192.0.2.1", ""), true},
		"one /64":                     {100, get("2001:db8:1:2::1", ""), get("2001:db8:1:2:ffff::9", ""), true},
		"two /64":                     {100, get("2001:db8:1:2::1", ""), get("2001:db8:1:3::1", ""), false},
		"files and the rest":          {100, get(a, ""), file("/files/a/b"), false},
		"the rest and files":          {500, file("/files/a/b"), get(a, ""), false},
		"two files":                   {500, file("/files/a/b"), file("/files/c/d"), true},
		"upload is no file":           {500, file("/files/a/b"), request{a, "POST", "/files/upload", "", ""}, false},
		"upload and the rest":         {100, get(a, ""), request{a, "POST", "/files/upload", "", ""}, true},
		"L2 peer is not trusted":      {100, get(a, "203.0.113.1"), get(a, "203.0.113.2"), true},
		"L2 two behind a proxy":       {100, get(proxy, "203.0.113.1"), get(proxy, "203.0.113.2"), false},
		"L2 forged on the left":       {100, get(proxy, "203.0.113.1"), get(proxy, "203.0.113.2, 203.0.113.1"), true},
		"L2 through two proxies":      {100, get(proxy, "203.0.113.1"), get("10.9.9.9", "203.0.113.1, 10.8.8.8"), true},
		"L2 forged trusted":           {100, get(proxy, "203.0.113.1"), get(proxy, "10.1.1.1, 203.0.113.1"), true},
		"L2 garbage is the proxy":     {100, get(proxy, "nobody"), get(proxy, ""), true},
		"L2 garbage, another garbage": {100, get(proxy, "nobody"), get(proxy, "203.0.113.1, someone"), true},
		"O7 another address":          {5, ask(a, "ada@example.com"), ask(b, "ada@example.com"), false},
		"another e-mail":              {5, ask(a, "ada@example.com"), ask(a, "bob@example.com"), false},
		"e-mail in another case":      {5, ask(a, "ada@example.com"), ask(a, " ADA@Example.COM "), true},
		"one /64, one e-mail":         {5, ask("2001:db8::1", "ada@example.com"), ask("2001:db8::2", "ada@example.com"), true},
		"O4 validation, elsewhere":    {10, prove(a, "ada@example.com"), prove(b, "ADA@example.com"), true},
		"validation, another e-mail":  {10, prove(a, "ada@example.com"), prove(a, "bob@example.com"), false},
		"requests and validations":    {5, ask(a, "ada@example.com"), prove(a, "ada@example.com"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newOffice(t)
			synctest.Test(t, func(t *testing.T) {
				send := func(r request) *testResponse {
					var headers []string
					if r.forwarded != "" {
						headers = []string{"X-Forwarded-For", r.forwarded}
					}
					return call(t, s, r.from, r.method, r.path, r.body, headers...)
				}
				for i := range c.n {
					if r := send(c.first); r.status == 429 {
						t.Fatalf("number %d: %v", i+1, r)
					}
				}
				wantProblem(t, send(c.first), 429, "rate_limited")
				if r := send(c.then); (r.status == 429) != c.shared {
					t.Errorf("shared should be %v: %v", c.shared, r)
				}
			})
		})
	}
}

// What is refused for its form is not counted by the endpoint's own limit: a typing
// error locks nobody out. By the global limit it is.
func TestMalformedAttemptsAreFree(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	synctest.Test(t, func(t *testing.T) {
		n := 0
		send := func(path, body string) *testResponse {
			n++
			return call(t, s, one(0), "POST", path, body)
		}
		for _, body := range []string{`{}`, `{"email":"ada@example.com","x":"y"}`, `{"email":"ada"}`, `[]`, `{"email":null}`} {
			for range 3 {
				wantProblem(t, send("/auth/otp/request", body), 400, "invalid_request")
			}
		}
		for range 5 {
			send("/auth/otp/request", emailBody("ada@example.com")).want(t, 200)
		}
		wantProblem(t, send("/auth/otp/request", emailBody("ada@example.com")), 429, "rate_limited")
		for _, code := range []string{"", "12345", "1234567", "12345x", " 12345", "１２３４５６"} {
			for range 3 {
				wantProblem(t, send("/auth/otp/validate", codeBody("ada@example.com", code)), 400, "invalid_request", "code")
			}
		}
		for range 10 {
			wantProblem(t, send("/auth/otp/validate", codeBody("ada@example.com", "123456")), 401, "invalid_code")
		}
		wantProblem(t, send("/auth/otp/validate", codeBody("ada@example.com", "123456")), 429, "rate_limited")
		for n < 100 {
			send("/auth/otp/request", `{}`).want(t, 400)
		}
		wantProblem(t, send("/auth/otp/request", `{}`), 429, "rate_limited")
	})
}

// L2, for any header at all: what a client puts before the words of the proxies
// changes nothing, and no result escapes the key's two forms.
func FuzzClientAddress(f *testing.F) {
	for _, forwarded := range []string{"", "203.0.113.1", "1.1.1.1, 203.0.113.1", "a, 10.0.0.1", "2001:db8::1%z, ::ffff:10.0.0.1",
		",,", "203.0.113.1:80", "[::1]:80", "::ffff:0:0", "10.0.0.1\x00", "0x7f.1", "for=1.2.3.4"} {
		f.Add("10.0.0.1:80", forwarded)
		f.Add("192.0.2.1:80", forwarded)
		f.Add("[2001:db8::1%z]:80", forwarded)
		f.Add("@", forwarded)
	}
	trusted := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	f.Fuzz(func(t *testing.T, peer, forwarded string) {
		walk := func(lines ...string) netip.Addr {
			return clientAddress(&http.Request{RemoteAddr: peer, Header: http.Header{"X-Forwarded-For": lines}}, trusted)
		}
		got := walk(forwarded)
		if got.Is4In6() || got.Zone() != "" {
			t.Errorf("%v is not in its plain form", got)
		}
		from, _ := netip.ParseAddrPort(peer)
		if at := from.Addr().Unmap().WithZone(""); !at.IsValid() || !trusted[0].Contains(at) {
			if got != at {
				t.Errorf("%v, though the peer %v is no proxy of ours", got, at)
			}
		} else if !strings.Contains(forwarded, got.String()) && got != at && !got.Is6() && !strings.Contains(forwarded, ":") {
			t.Errorf("%v stands nowhere in %q", got, forwarded)
		}
		if !trusted[0].Contains(got) || forwarded == "" {
			for _, forged := range []string{"203.0.113.77", "10.0.0.7", "x"} {
				if again := walk(forged, forwarded); forwarded != "" && again != got {
					t.Errorf("%q before %q: %v, was %v", forged, forwarded, again, got)
				}
			}
		}
		key := clientKey(got)
		if prefix, err := netip.ParsePrefix(key); got.Is6() && (err != nil || prefix.Bits() != 64 || !prefix.Contains(got)) {
			t.Errorf("key %q of %v", key, got)
		}
		if got.Is4() && strings.TrimSuffix(key, "/32") != got.String() {
			t.Errorf("key %q of %v", key, got)
		}
	})
}

// fullLimiter returns one that holds as many keys as it ever does.
func fullLimiter(burst int, period time.Duration) *limiter {
	l := newLimiter(burst, period, "")
	for i := range 2 * keyBound {
		l.take(strconv.Itoa(i))
	}
	return l
}

// What a decision costs on a full limiter under a flood of new keys, and the longest
// that one has taken, by 1 and by 32 goroutines.
func BenchmarkLimiterFlood(b *testing.B) {
	for _, goroutines := range []int{1, 32} {
		b.Run(fmt.Sprint(goroutines), func(b *testing.B) {
			l := fullLimiter(100, 10*time.Second)
			if goroutines == 1 {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
			}
			b.SetParallelism(max(1, goroutines/runtime.GOMAXPROCS(0)))
			var serial, longest atomic.Int64
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				var mine time.Duration
				prefix := strconv.FormatInt(serial.Add(1), 10) + " "
				for i := 0; pb.Next(); i++ {
					key, start := prefix+strconv.Itoa(i), time.Now()
					l.take(key)
					mine = max(mine, time.Since(start))
				}
				for old := longest.Load(); int64(mine) > old && !longest.CompareAndSwap(old, int64(mine)); old = longest.Load() {
				}
			})
			b.ReportMetric(float64(longest.Load())/1e6, "longest-ms")
		})
	}
}

// The longest decision while every key of a full limiter has to go, as the median of
// the runs: the worst of them all is the scheduler's or the garbage collector's.
func BenchmarkLimiterSweep(b *testing.B) {
	var pauses []time.Duration
	for b.Loop() {
		b.StopTimer()
		l := fullLimiter(5, 500*time.Millisecond)
		time.Sleep(500 * time.Millisecond)
		b.StartTimer()
		var longest time.Duration
		for i := range 1000 {
			key, start := strconv.Itoa(-i), time.Now()
			l.take(key)
			longest = max(longest, time.Since(start))
		}
		pauses = append(pauses, longest)
	}
	slices.Sort(pauses)
	b.ReportMetric(float64(pauses[len(pauses)/2])/1e6, "pause-ms")
}

// The worst case of a new key: all others are being refused, but for the one that the last
// new key has become.
func BenchmarkLimiterNearlyAllRefused(b *testing.B) {
	l := newLimiter(2, time.Hour, "")
	for i := range keyBound - 1 {
		l.take(strconv.Itoa(i))
		l.take(strconv.Itoa(i))
	}
	for i := 0; b.Loop(); i++ {
		l.take("new " + strconv.Itoa(i))
	}
}

// What a full limiter keeps: a flood of keys that have spent one token, and at its
// worst, of keys that have spent them all.
func BenchmarkLimiterMemory(b *testing.B) {
	for name, c := range map[string]struct{ burst, spent int }{"5/1": {5, 1}, "5/5": {5, 5}, "100/100": {100, 100}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				before := heapInUse()
				l := newLimiter(c.burst, time.Hour, "")
				for i := range 2 * keyBound {
					key := strconv.Itoa(i)
					for range c.spent {
						if l.take(key) != nil {
							break
						}
					}
				}
				b.ReportMetric(float64(heapInUse()-before)/float64(keysHeld(l)), "B/key")
				runtime.KeepAlive(l)
			}
		})
	}
}

func heapInUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// L3: a key gives way as soon as one of its tokens is back, and no moment before.
func TestKeyWithATokenBackGivesWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(2, 15*time.Minute, "")
		for range 2 {
			for i := range keyBound {
				l.take(strconv.Itoa(i))
			}
			time.Sleep(time.Minute)
		}
		if refusedFor(t, l, "new") == 0 {
			t.Error("a refused key gave way")
		}
		time.Sleep(13 * time.Minute)
		if wait := refusedFor(t, l, "new"); wait != 0 {
			t.Errorf("refused for %v", wait)
		}
	})
}

// L5: when all keys of the limit of code requests are being refused, one of them gives way to
// a new key, so that they can't lock everyone out. The limit of validations lets none go: a
// guess at a mailbox is never had back.
func TestWhichLimitForgetsRefusedKeys(t *testing.T) {
	t.Parallel()
	limits := map[string]*limiter{}
	for _, r := range newServer(config{env: envLocal}, nil, io.Discard).routes() {
		if r.limit != nil {
			limits[r.path] = r.limit
		}
	}
	for path, forgets := range map[string]bool{"/auth/otp/request": true, "/auth/otp/validate": false} {
		t.Run(path, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLimiter(limits[path].burst, limits[path].period, "")
				l.forgetsRefused = limits[path].forgetsRefused // of the table; the clock is the bubble's
				for i := range keyBound {
					for range l.burst {
						l.take(strconv.Itoa(i))
					}
				}
				const newcomers = 300
				passed := 0
				for i := range newcomers {
					if refusedFor(t, l, fmt.Sprint("new ", i)) == 0 {
						passed++
					}
				}
				stillRefused := 0
				for i := range keyBound {
					if spent := l.spent[maphash.String(l.seed, strconv.Itoa(i))]; len(spent) == l.burst {
						stillRefused++
					}
				}
				wantPassed, wantRefused := 0, keyBound
				if forgets {
					wantPassed = newcomers
					wantRefused = keyBound - 1 // the first newcomer took its place, the others each other's
				}
				if passed != wantPassed || stillRefused < keyBound-passed || forgets && stillRefused > wantRefused || !forgets && stillRefused != wantRefused {
					t.Errorf("got %d of %d new keys passed, %d old ones still refused; want %d and %d", passed, newcomers, stillRefused, wantPassed, wantRefused)
				}
				if n := keysHeld(l); n != keyBound {
					t.Errorf("got %d keys, want %d", n, keyBound)
				}
			})
		})
	}
}

// L4: when a limiter is full of refused keys, the wait of the first new key is as true as that
// of the next ones, which is kept, however long the limiter has been there.
func TestFullLimiterTellsEachNewKeyTheTruth(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(1, time.Minute, "")
		time.Sleep(time.Hour)
		for i := range keyBound {
			l.take(strconv.Itoa(i))
		}
		for second := range 3 {
			want := time.Minute - time.Duration(second)*time.Second
			if got := refusedFor(t, l, "new"); got != want {
				t.Errorf("after %d s: got a wait of %v, want %v", second, got, want)
			}
			time.Sleep(time.Second)
		}
	})
}

// L5: a limiter that has looked at all its keys, and found all of them refused, does not look again
// until the first token is back: to look takes a millisecond, which each new key would cost.
func TestFullLimiterIsSearchedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(1, time.Minute, "")
		for i := range keyBound {
			l.take(strconv.Itoa(i))
		}
		time.Sleep(time.Second)
		refusedFor(t, l, "new")
		if l.fullUntil != time.Minute {
			t.Errorf("got %v as the time of the next search, want 1m0s", l.fullUntil)
		}
	})
}

// The sweep of a full limiter takes milliseconds. So there is one a period, not one a request: a
// key whose token came back since the last sweep is still held.
func TestSweepIsOnceAPeriod(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(1, time.Minute, "")
		start := time.Now()
		for _, step := range []struct {
			at   time.Duration
			key  string
			held int
		}{
			{90 * time.Second, "a", 1}, // the first request: a sweep, of nothing
			{120 * time.Second, "b", 2},
			{150*time.Second - 1, "c", 3},
			{150 * time.Second, "d", 3}, // a sweep: a is forgotten
			{190 * time.Second, "e", 4}, // b's token is back
			{210 * time.Second, "f", 2}, // a sweep: b, c and d are forgotten
		} {
			time.Sleep(time.Until(start.Add(step.at)))
			l.take(step.key)
			if got := keysHeld(l); got != step.held {
				t.Errorf("at %v: got %d keys, want %d", step.at, got, step.held)
			}
		}
	})
}

// L3: keys whose tokens are all back give way to new ones, also while no sweep has forgotten them.
func TestIdleKeysGiveWayBeforeTheSweep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(1, time.Minute, "")
		time.Sleep(30 * time.Second)
		for i := range keyBound {
			l.take(strconv.Itoa(i))
		}
		time.Sleep(30 * time.Second)
		if got := refusedFor(t, l, "early"); got != 30*time.Second { // it sweeps, and finds nothing
			t.Errorf("got a wait of %v, want 30s", got)
		}
		time.Sleep(30 * time.Second)
		for i := range 100 {
			if got := refusedFor(t, l, fmt.Sprint("late ", i)); got != 0 {
				t.Fatalf("key %d: got a wait of %v, want none", i, got)
			}
		}
		if got := keysHeld(l); got != keyBound || l.sweptAt != time.Minute {
			t.Errorf("got %d keys, swept at %v; want %d, swept at 1m0s", got, l.sweptAt, keyBound)
		}
	})
}
