package api

import (
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// R1: The steps of a request run in their order. The limit by client address comes before the check
// of the origin and before the routes, so it counts refused origins and unknown paths, too. Headers
// and request id come before the limit, so a page of an allowed origin can read the 429. The log
// comes before all others, so it has a line for the 429.
//
// Preflights of allowed origins are not counted, and so are never refused: a browser sends one
// before each new URL, and a page can't see why one was refused.
func TestStepsRunInTheirOrder(t *testing.T) {
	t.Parallel()
	const origin = "https://app.example.com"
	s := hubstest.Start(t, staging(t), map[string]string{"ALLOWED_ORIGINS": origin})
	limit := hubstest.LimitOf(t, "GET /hubs")
	asPreflight := []string{"Access-Control-Request-Method", "GET"}
	foreignPreflight := append(asPreflight, "Origin", "https://example.com")

	for name, test := range map[string]struct {
		request string
		headers []string
	}{
		"a read by a page":       {"GET /hubs", []string{"Origin", origin}},
		"an unknown path":        {"GET /nowhere", []string{"Origin", origin}},
		"no file":                {"GET /filesystem", nil},
		"another site's write":   {"POST /hubs", []string{"Sec-Fetch-Site", "cross-site"}},
		"no preflight":           {"OPTIONS /hubs", []string{"Origin", origin}},
		"no origin":              {"OPTIONS /hubs", asPreflight},
		"a preflight of another": {"OPTIONS /hubs", foreignPreflight},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := s.Client(t)
			for range limit.Requests + 20 { // are not counted
				target := "OPTIONS /hubs?" + hubstest.NewUUID()
				c.Do(target, nil, append(asPreflight, "Origin", origin)...).Want(t, 204)
			}
			id := hubstest.NewUUID()
			headers := append(test.headers, "X-Request-Id", id)
			passed, answer := exceed(t, s, c, limit, test.request, nil, headers...)

			wantEqual(t, "requests that passed", passed, limit.Requests)
			wantLimited(t, answer, limit)
			wantEqual(t, "X-Request-Id", answer.Header.Get("X-Request-Id"), id)
			isReadable := answer.Header.Get("Access-Control-Allow-Origin") == origin
			wantEqual(t, "readable by a page", isReadable, slices.Contains(test.headers, origin))
			method, _, _ := strings.Cut(test.request, " ")
			waitLogged(t, s, answer, `"msg":"request"`, `"status":429`, `"method":"`+method)
		})
	}
}

// G1: The server keeps a request id that the client has sent if it has the right form, and replaces
// any other. The header of the answer, the error in its body and the log line have the same id.
func TestRequestIDIsKeptOrReplaced(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	wantNew := func(sent, got string) {
		t.Helper()
		if got == sent || len(got) < 16 {
			t.Errorf("X-Request-Id %q: got %q, want a new id", sent, got)
		}
	}
	seen := map[string]bool{}
	for id, isKept := range map[string]bool{
		"a": true, "0": true, "A.b_c-9": true, "..": true, strings.Repeat("x", 128): true,
		"": false, "a b": false, "a\tb": false, "a,b": false, "a/b": false, "é": false,
		"\xff": false, "\u2028": false, "<script>": false, `"`: false, strings.Repeat("x", 129): false,
	} {
		answer := s.Client(t).Get("/nowhere", "X-Request-Id", id)
		// Get has compared the id in the body with that in the header.
		answer.WantProblem(t, 404, "not_found")
		waitLogged(t, s, answer, `"msg":"request"`)
		got := answer.Header.Get("X-Request-Id")
		if isKept {
			wantEqual(t, "X-Request-Id", got, id)
		} else {
			wantNew(id, got)
		}
		wantEqual(t, got+" was seen before", seen[got], false)
		seen[got] = true
	}
	// The second of two headers is never used, even if only the second has the right form.
	twice := onTheWire(t, s, "GET /nowhere", nil, "X-Request-Id", "a b", "X-Request-Id", "c")
	wantNew("c", twice.Header.Get("X-Request-Id"))
}
