//go:build moving

package main

// What a session check and a list allocate, in bytes and in number: counts, which are the
// same on a slow machine, in place of times, which are not.

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"
)

// allocationBounds are what a request with a browser's headers may allocate between the
// handler and the socket of PostgreSQL, without net/http's own server. At commit 586cb05 the
// session check took 7,740 bytes in 136 allocations, the list of 20 took 32,100 in 518. The
// list may take 70 % of that.
var allocationBounds = []struct {
	path        string
	bytes       uint64
	allocations uint64
}{
	{"/auth/session", 7_000, 115},
	{"/hubs", 22_400, 480},
}

// Not parallel: the runtime counts the allocations of the whole process. Tests that ask to run
// in parallel wait until the others have ended.
//
// The race detector makes sync.Pool forget at random. Under it the bytes say nothing, and the
// number of allocations has a margin. .ci/run runs this test without it.
func TestAllocationsOfARequest(t *testing.T) {
	requests := newRequests(t)
	underRace := raceDetectorIsOn()
	for _, bound := range allocationBounds {
		bytes, allocations := requests.allocated(bound.path)
		t.Logf("GET %s: %d bytes in %d allocations", bound.path, bytes, allocations)
		if underRace {
			bytes = 0
			allocations = allocations * 4 / 5
		}
		if bytes > bound.bytes || allocations > bound.allocations {
			t.Errorf("GET %s: %d bytes in %d allocations, more than %d in %d",
				bound.path, bytes, allocations, bound.bytes, bound.allocations)
		}
	}
}

// raceDetectorIsOn says whether this binary was built with -race.
func raceDetectorIsOn() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// BenchmarkListHubs is the list without the cost of PostgreSQL. BenchmarkSessionCheck has
// the part of it that every request with a session pays.
func BenchmarkListHubs(b *testing.B) {
	requests := newRequests(b)
	b.ReportAllocs()
	for b.Loop() {
		requests.send("/hubs")
	}
}

// requests sends requests with a browser's headers to the handler in this process. A request
// and its answer cost next to nothing besides what the handler does.
type requests struct {
	t       testing.TB
	handler http.Handler
	header  http.Header
	count   int
	clients []string
	answer  discardedAnswer
}

func newRequests(t testing.TB) *requests {
	env := serverEnv(t, map[string]string{
		"APP_ENV": "staging", "COOKIE_DOMAIN": "staging.example.com",
		"ALLOWED_ORIGINS": "https://app.staging.example.com",
		"SMTP_URL":        "smtp://127.0.0.1:25", "MAIL_FROM": "signin@example.com",
	})
	databaseURL := env["DATABASE_URL"]
	execSQL(t, databaseURL, `insert into hubs (name, description)
		select 'Harbour Station ' || n, 'Trains and trams, a bakery and a reading room, number ' || n || '.'
		from generate_series(1, 100) n`)
	email := newEmail()
	userID := testUser(t, databaseURL, email, roleMember)
	execSQL(t, databaseURL, "insert into terms_acceptances (user_id, version) values ($1, $2)", userID, TERMS_VERSION)
	cfg, err := loadConfig(lookup(env))
	if err != nil {
		t.Fatal(err)
	}
	st, err := openStore(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.db.Close() })
	s := newServer(cfg, st, io.Discard)
	now := time.Now().Unix()
	claims := fmt.Sprintf(`{"email":%q,"userId":%q,"iat":%d.123456,"exp":%d.123456}`, email, userID, now-1, now+3600)
	token := forge(hs256, claims, env["SESSION_SECRET"], sha256.New)
	r := &requests{t: t, handler: s.handler(s.routes()), header: browserHeaders(),
		answer: discardedAnswer{header: http.Header{}}}
	r.header.Set("Cookie", newTestServer(env).cookieName()+"="+token)
	for n := range 50_000 {
		r.clients = append(r.clients, fmt.Sprintf("10.0.%d.%d:4711", n>>8, n&255))
	}
	return r
}

// browserHeaders are what a browser sends for a page of an allowed origin.
func browserHeaders() http.Header {
	header := http.Header{}
	for name, value := range map[string]string{
		"User-Agent": "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 " +
			"(KHTML, like Gecko) Chrome/141.0.0.0 Safari/537.36",
		"Accept":          "application/json, text/plain, */*",
		"Accept-Language": "en-GB,en;q=0.9,de;q=0.8",
		"Accept-Encoding": "gzip, deflate, br, zstd",
		"Origin":          "https://app.staging.example.com",
		"Referer":         "https://app.staging.example.com/",
		"Sec-Fetch-Dest":  "empty",
		"Sec-Fetch-Mode":  "cors",
		"Sec-Fetch-Site":  "same-site",
	} {
		header.Set(name, value)
	}
	return header
}

// send sends one request, from the next of the clients.
func (r *requests) send(path string) {
	r.count++
	clear(r.answer.header)
	r.answer.status = http.StatusOK
	r.handler.ServeHTTP(&r.answer, &http.Request{
		Method: "GET", URL: &url.URL{Path: path}, RequestURI: path, Header: r.header, Body: http.NoBody,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Host: "api.staging.example.com",
		RemoteAddr: r.clients[r.count%len(r.clients)],
	})
	if r.answer.status != http.StatusOK {
		r.t.Fatalf("GET %s: %d", path, r.answer.status)
	}
}

// allocated is what one request allocates, as the average of many.
func (r *requests) allocated(path string) (bytes, allocations uint64) {
	const warmUp, counted = 100, 2000
	for range warmUp {
		r.send(path)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range counted {
		r.send(path)
	}
	runtime.ReadMemStats(&after)
	return (after.TotalAlloc - before.TotalAlloc) / counted, (after.Mallocs - before.Mallocs) / counted
}

// A discardedAnswer is a ResponseWriter that keeps the status only.
type discardedAnswer struct {
	header http.Header
	status int
}

func (a *discardedAnswer) Header() http.Header         { return a.header }
func (a *discardedAnswer) WriteHeader(status int)      { a.status = status }
func (a *discardedAnswer) Write(b []byte) (int, error) { return len(b), nil }
