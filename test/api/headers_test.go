package api

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// C3, C4, C1, F2: Every kind of answer has the security headers, the right Cache-Control, and the
// headers that its status needs. hubstest.Client compares the headers of each answer with those of
// its kind. So this test only gets an answer of each kind.
func TestHeadersOnEveryKindOfAnswer(t *testing.T) {
	t.Parallel()
	database, through := hubstest.FaultProxyURL(t, hubstest.NewDatabase(t))
	s, admin := start(t, "admin", map[string]string{
		"DATABASE_URL":     through,
		"MAX_UPLOAD_BYTES": "10",
	})
	s.AllowErrorsWithAnyOf("unavailable")
	admin.Do("OPTIONS /hubs", nil,
		"Origin", "http://localhost:3000",
		"Access-Control-Request-Method", "PATCH").Want(t, 204)
	admin.Get("/hubs").Want(t, 200)
	admin.Get("/openapi.json").Want(t, 200)

	file := admin.Store("a.txt", "hello")
	etag := admin.Get(file).Must(t, 200).Header.Get("ETag")
	admin.Get(file, "Range", "bytes=1-2").Want(t, 206)
	admin.Get(file, "If-None-Match", etag).Want(t, 304)
	admin.Get(file, "Range", "bytes=9-").Want(t, 416)
	admin.Upload("a.txt", []byte("more than ten")).Want(t, 413)

	const hub = `{"name":"a"}`
	admin.Do("POST /hubs", hub).Want(t, 201)
	admin.Do("POST /hubs", hub, "Sec-Fetch-Site", "cross-site").Want(t, 403)
	admin.Do("POST /hubs", hub, "If-Match", `"a"`).Want(t, 412)
	admin.Do("POST /hubs", hub, "Content-Encoding", "gzip").Want(t, 415)
	admin.Do("POST /hubs", "{}").Want(t, 400)
	accept(admin, "a").Want(t, 409)
	admin.Get("/nowhere").Want(t, 404)
	s.Client(t).Get("/hubs").Want(t, 401)
	admin.Do("DELETE /hubs", nil).Want(t, 405)
	_, refusal := exceed(t, s.Client(t), hubstest.LimitOf(t, "GET /hubs"), "GET /nowhere", nil)
	refusal.Want(t, 429)
	database.Cut()
	admin.Get("/hubs").Want(t, 503) // Z2
	admin.Get("/healthz").Want(t, 503)
}

// The steps of a request run in their order. The limit by client address comes before the check of
// the origin and before the routes, so it counts refused origins and unknown paths, too, all
// together. Headers and request id come before the limit, so a page of an allowed origin can read
// the 429. The log comes before all others, so it has a line for the 429.
func TestStepsRunInTheirOrder(t *testing.T) {
	t.Parallel()
	const origin = "https://app.example.com"
	s := hubstest.Start(t, staging(t), map[string]string{"ALLOWED_ORIGINS": origin})

	for request, headers := range map[string][]string{
		"OPTIONS /hubs":      {"Origin", origin},
		"POST /hubs":         {"Sec-Fetch-Site", "cross-site"},
		"GET /nowhere":       {"Origin", origin},
		"GET /filesystem":    nil, // begins like the path of a file
		"POST /files/upload": nil,
	} {
		t.Run(request, func(t *testing.T) {
			t.Parallel()
			id := hubstest.NewUUID()
			limit := hubstest.LimitOf(t, "GET /hubs")
			c := s.Client(t)
			passed, answer := exceed(t, c, limit, request, nil,
				append(headers, "X-Request-Id", id)...)

			wantEqual(t, "requests that passed", passed, limit.Requests)
			wantLimited(t, answer, limit)
			wantLimited(t, c.Get("/hubs"), limit)
			wantEqual(t, "X-Request-Id", answer.Header.Get("X-Request-Id"), id)
			readable := answer.Header.Get("Access-Control-Allow-Origin") == origin
			wantEqual(t, "readable by a page", readable, slices.Contains(headers, origin))
			method, _, _ := strings.Cut(request, " ")
			waitLogged(t, s, answer, `"msg":"request"`, `"status":429`, `"method":"`+method)
		})
	}
}

// Every JSON answer has a Content-Length, whatever its length, so a client notices if the end is
// missing.
func TestAnswersTellTheirLength(t *testing.T) {
	t.Parallel()
	s, c := start(t, "member")
	hubstest.Exec(t, s.Database,
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
	s := hubstest.Start(t, staging(t))
	send := func(id string) (got string) {
		answer := s.Client(t).Get("/nowhere", "X-Request-Id", id)
		// Get has compared the id in the body with that in the header.
		answer.WantProblem(t, 404, "not_found")
		waitLogged(t, s, answer, `"msg":"request"`)
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
	twice := s.Wire(t, "GET /nowhere", nil,
		"X-Request-Id", "a b",
		"X-Request-Id", "c")
	wantNew("twice", twice.Header.Get("X-Request-Id"))
}
