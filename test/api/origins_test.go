package api

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// C1: The CORS headers are sent to exactly the allowed origins of each server. A write from any
// other origin but the server's own is refused.
func TestOnlyAllowedOriginsGetCORS(t *testing.T) {
	t.Parallel()
	file := hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		Server, FetchSite string
		Origin            *string
		CORS              bool
	}](t, "origins.json")
	all := hubstest.StartEnvironments(t, file.Settings)

	for _, c := range file.Cases {
		servers := all
		if c.Server != "" {
			servers = map[string]*hubstest.Server{c.Server: hubstest.Named(t, all, c.Server)}
		}
		for _, name := range slices.Sorted(maps.Keys(servers)) {
			s := servers[name]
			t.Run(name+"/"+c.Name, func(t *testing.T) {
				headers := []string{"X-Forwarded-For", hubstest.NewIP()}
				var origin string
				if c.Origin != nil {
					_, host, _ := strings.Cut(s.Base, "://")
					origin = hubstest.FillIn(*c.Origin, "<host>", host)
					headers = append(headers, "Origin", origin)
				}
				if c.FetchSite != "" {
					headers = append(headers, "Sec-Fetch-Site", c.FetchSite)
				}
				var cors map[string]*string
				if c.CORS {
					cors = maps.Clone(file.CORSHeaders)
					cors["Access-Control-Allow-Origin"] = &origin
				}

				wantCORS(t, s, headers, cors, file.PreflightHeaders, c.Expect)
			})
		}
	}
}

// wantCORS sends reads, a preflight and a write with these headers, and checks the answers. cors
// holds the CORS headers that each answer must have; if it is nil, no answer may have any.
// preflightHeaders holds the further headers of an accepted preflight. write is the answer to the
// write.
func wantCORS(
	t *testing.T, s *hubstest.Server, headers []string,
	cors, preflightHeaders map[string]*string, write hubstest.Expected,
) {
	t.Helper()
	send := func(want hubstest.Expected, method, path, body string, more ...string) {
		t.Helper()
		r := s.Wire(t, method+" "+path, []byte(body), slices.Concat(headers, more)...)
		r.WantAnswer(t, want)
		r.WantHeaders(t, cors)
		for name := range r.Header {
			if cors == nil && strings.HasPrefix(name, "Access-Control-") {
				t.Errorf("got the header %s: %q, want no CORS header, in %v", name, r.Header[name], r)
			}
		}
	}
	served := hubstest.Expected{Status: 200}
	send(served, "GET", "/healthz", "")
	notFound := hubstest.Expected{
		Status: 404,
		Code:   "not_found",
	}
	send(notFound, "GET", "/nowhere", "")

	notAllowed := hubstest.Expected{
		Status: 405,
		Code:   "method_not_allowed",
	}
	// The origin is trusted, so its pages may send whatever headers they ask for. A monitoring
	// service adds some to each request.
	wanted := "baggage,cache-control,content-type,sentry-trace,traceparent,x-requested-with"
	preflight := notAllowed
	if cors != nil {
		preflight = hubstest.Expected{Status: 204, Headers: maps.Clone(preflightHeaders)}
		preflight.Headers["Access-Control-Allow-Headers"] = &wanted
	}
	send(preflight, "OPTIONS", "/hubs/x", "", "Access-Control-Request-Method", "PATCH",
		"Access-Control-Request-Headers", wanted)
	send(notAllowed, "OPTIONS", "/hubs/x", "")
	send(write, "POST", "/auth/otp/request", `{"email":"nobody@example.com"}`,
		"Content-Type", "application/json")
}

// C2: A write by a page of another origin is refused, even if the page is of the same site:
// SameSite=Lax alone would let that page write.
func TestCrossSiteWritesAreRefused(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin", production(t))
	for _, test := range hubstest.ReadCases[struct {
		Name    string
		Headers []string
		Allowed bool
	}](t, "testdata/cross-site.json") {
		t.Run(test.Name, func(t *testing.T) {
			for _, r := range routes {
				q := validCall(t, s, admin.In(t).Elsewhere(), r)
				answer := q.send(s.With(t, admin.Token()), test.Headers...)
				isRead := strings.HasPrefix(r.Route, "GET ")
				if test.Allowed || isRead { // CORS keeps the page from seeing the answer
					answer.Want(t, r.Status)
				} else {
					answer.WantProblem(t, 403, "cross_origin")
				}
			}
		})
	}
}

// G4: Each write or preflight from a refused origin has a log line that names the origin, and the
// setting which would allow it. Other requests have no such line.
func TestRefusedOriginNamesTheSetting(t *testing.T) {
	t.Parallel()
	const allowed = "http://127.0.0.1:5173"
	const foreign = "https://front-end.example.org:8443"
	s := hubstest.Start(t)
	c := s.Client(t)
	send := func(id, method, origin string, more ...string) {
		headers := append(more, "Origin", origin, "X-Request-Id", id)
		c.Do(method+" /auth/logout", nil, headers...)
	}
	preflight := []string{"Access-Control-Request-Method", "POST"}
	send("refused-write", "POST", foreign)
	send("refused-form", "POST", foreign, "Sec-Fetch-Site", "cross-site")
	send("refused-preflight", "OPTIONS", foreign, preflight...)
	send("read", "GET", foreign)
	send("options", "OPTIONS", foreign)
	send("write", "POST", allowed)
	send("preflight", "OPTIONS", allowed, preflight...)
	s.Stop(t)

	const settings = "ALLOWED_ORIGINS (in production: ALLOWED_ORIGIN_DOMAIN)"
	for _, id := range []string{"refused-write", "refused-form", "refused-preflight"} {
		s.Log.WaitFor(t, settings, `"origin":"`+foreign+`"`, `"requestId":"`+id)
	}
	wantEqual(t, "lines that name a setting", s.Log.Count("ALLOWED_"), 3)
}
