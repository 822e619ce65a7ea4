package api

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// securityHeaders are the headers of every answer, as patterns of their whole values. An empty
// pattern means that the header is missing.
var securityHeaders = map[string]string{
	"Strict-Transport-Security":    "max-age=63072000; includeSubDomains",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
	"Referrer-Policy":              "no-referrer",
	"Cross-Origin-Resource-Policy": "same-site",
	"Content-Security-Policy":      hubstest.StrictCSP,
	"Cache-Control":                "no-store",
	"Vary":                         "Origin",
	"X-Request-Id":                 ".+",
	"WWW-Authenticate":             "",
	"Allow":                        "",
	"Retry-After":                  "",
}

// wantHeaders checks the status of an answer and its security headers. The headers in differs, at
// most one map, must have other values.
func wantHeaders(t *testing.T, r *hubstest.Response, status int, differs ...map[string]string) {
	t.Helper()
	wantEqual(t, r.Method+" "+r.Path+": status", r.Status, status)
	want := maps.Clone(securityHeaders)
	for _, headers := range differs {
		maps.Copy(want, headers)
	}
	for name, pattern := range want {
		got := strings.Join(r.Header.Values(name), " and ")
		if !regexp.MustCompile("^(" + pattern + ")$").MatchString(got) {
			t.Errorf("%s %s, %d: %s: got %q, want %q", r.Method, r.Path, status, name, got, pattern)
		}
	}
}

// C3, C4, C1, F2: Every kind of answer has the security headers and the right Cache-Control.
func TestHeadersOnEveryKindOfAnswer(t *testing.T) {
	t.Parallel()
	database, through := hubstest.FaultProxyURL(t, hubstest.NewDatabase(t))
	srv, admin := start(t, "admin", map[string]string{
		"DATABASE_URL":     through,
		"MAX_UPLOAD_BYTES": "10",
	})
	srv.AllowErrorsWithAnyOf("unavailable")
	preflight := admin.Send("OPTIONS /hubs", nil,
		"Origin", "http://localhost:3000",
		"Access-Control-Request-Method", "PATCH")
	wantHeaders(t, preflight, 204)
	wantHeaders(t, admin.Get("/hubs"), 200)
	wantHeaders(t, admin.Get("/openapi.json"), 200)

	ofFiles := map[string]string{
		"Content-Security-Policy": hubstest.StrictCSP + ".*; sandbox .*",
		"Cache-Control":           "private, no-cache",
	}
	file := upload(t, admin, "hello")
	whole := admin.Get(file)
	wantHeaders(t, whole, 200, ofFiles)
	wantHeaders(t, admin.Get(file, "Range", "bytes=1-2"), 206, ofFiles)
	wantHeaders(t, admin.Get(file, "If-None-Match", whole.Header.Get("ETag")), 304, ofFiles)
	wantHeaders(t, admin.Get(file, "Range", "bytes=9-"), 416)

	wantHeaders(t, admin.Upload("a.txt", []byte("more than ten")), 413)
	wantHeaders(t, admin.Send("POST /hubs", `{"name":"a"}`), 201)
	wantHeaders(t, admin.Send("POST /hubs", `{"name":"a"}`, "Sec-Fetch-Site", "cross-site"), 403)
	wantHeaders(t, admin.Send("POST /hubs", `{"name":"a"}`, "If-Match", `"a"`), 412)
	wantHeaders(t, admin.Send("POST /hubs", `{"name":"a"}`, "Content-Encoding", "gzip"), 415)
	wantHeaders(t, admin.Send("POST /hubs", "{}"), 400)
	wantHeaders(t, admin.Send("POST /terms/acceptance", `{"version":"a"}`), 409)
	wantHeaders(t, admin.Get("/nowhere"), 404)
	wantHeaders(t, srv.Client(t).Get("/hubs"), 401, map[string]string{"WWW-Authenticate": "Cookie"})
	wantHeaders(t, admin.Send("DELETE /hubs", nil), 405, map[string]string{"Allow": "GET, HEAD, POST"})
	later := map[string]string{"Retry-After": "[1-9][0-9]*"}
	limit := hubstest.LimitOf(t, "GET /hubs")
	_, refusal := spend(srv.Client(t), limit, "GET /nowhere", nil)
	wantHeaders(t, refusal, 429, later)
	database.Cut()
	wantHeaders(t, admin.Get("/hubs"), 503, later) // Z2
	wantHeaders(t, admin.Get("/healthz"), 503, later)
}

// The steps of a request run in their order. The limit by client address comes before the check of
// the origin and before the routes, so it also counts preflights, refused origins and unknown
// paths. Headers and request id come before the limit, so a page of an allowed origin can read the
// 429. The log comes before all others, so it has a line for the 429.
func TestStepsRunInTheirOrder(t *testing.T) {
	t.Parallel()
	const origin = "https://app.example.com"
	srv := hubstest.Start(t, staging(t), map[string]string{"ALLOWED_ORIGINS": origin})
	for request, headers := range map[string][]string{
		"OPTIONS /hubs":  {"Origin", origin, "Access-Control-Request-Method", "POST"},
		"POST /hubs":     {"Sec-Fetch-Site", "cross-site"},
		"GET /nowhere":   {"Origin", origin},
		"DELETE /hubs/x": nil,
	} {
		t.Run(request, func(t *testing.T) {
			t.Parallel()
			id := hubstest.NewUUID()
			limit := hubstest.LimitOf(t, "GET /hubs")
			passed, answer := spend(srv.Client(t), limit, request, nil,
				append(headers, "X-Request-Id", id)...)
			wantEqual(t, "requests that passed", passed, limit.Requests)
			wantLimited(t, answer, limit)
			wantEqual(t, "X-Request-Id", answer.Header.Get("X-Request-Id"), id)
			readable := answer.Header.Get("Access-Control-Allow-Origin") == origin
			wantEqual(t, "readable by a page", readable, slices.Contains(headers, origin))
			method, _, _ := strings.Cut(request, " ")
			waitLogged(t, srv, answer, `"msg":"request"`, `"status":429`, `"method":"`+method)
		})
	}
}

// Every JSON answer has a Content-Length, whatever its length, so a client notices if the end is
// missing.
func TestAnswersTellTheirLength(t *testing.T) {
	t.Parallel()
	srv, c := start(t, "member")
	hubstest.Exec(t, srv.Database,
		"insert into hubs (name) select 'hub ' || n from generate_series(1, 100) n")
	for _, path := range []string{"/auth/session", "/hubs?limit=100", "/nowhere"} {
		answer := c.Get(path)
		length := strconv.Itoa(len(answer.Body))
		wantEqual(t, path+": Content-Length", answer.Header.Get("Content-Length"), length)
	}
}

// G1: The server keeps a request id that the client has sent if it has the right form, and replaces
// any other. The header of the answer, the error in its body and the log line have the same id.
func TestRequestIDIsKeptOrReplaced(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t, staging(t))
	send := func(id string) (got string) {
		answer := srv.Client(t).Get("/nowhere", "X-Request-Id", id)
		// WantProblem also compares the id in the body with that in the header.
		hubstest.WantProblem(t, answer, 404, "not_found")
		waitLogged(t, srv, answer, `"msg":"request"`)
		return answer.Header.Get("X-Request-Id")
	}
	for _, id := range []string{
		"a", "0", "A.b_c-9", "..",
		strings.Repeat("x", 128),
	} {
		wantEqual(t, "X-Request-Id", send(id), id)
	}
	wantNew := func(sent, got string) {
		t.Helper()
		if len(got) < 16 {
			t.Errorf("X-Request-Id %q: got %q, want a new id", sent, got)
		}
	}
	seen := map[string]bool{}
	for _, id := range []string{
		"", "a b", "a\tb", "a,b", "a/b", "é", "\xff", "\u2028", "<script>", `"`,
		strings.Repeat("x", 129),
	} {
		seen[id] = true
		got := send(id)
		if seen[got] {
			t.Errorf("X-Request-Id %q: got %q, want another one", id, got)
		}
		wantNew(id, got)
		seen[got] = true
	}
	// The second of two headers is never used, even if only the second has the right form.
	twice := srv.Wire(t, "GET", "/nowhere", nil,
		"X-Request-Id", "a b",
		"X-Request-Id", "c")
	wantNew("twice", twice.Header.Get("X-Request-Id"))
}
