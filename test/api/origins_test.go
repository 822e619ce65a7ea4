package api

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

type originCase struct {
	hubstest.CorpusCase
	Server    string
	Origin    *string
	FetchSite string
	CORS      bool
}

// C1, C2: exactly the allowed origins, on each server.
func TestCORS(t *testing.T) {
	t.Parallel()
	file := hubstest.ReadCorpus[originCase](t, "origins.json")
	for name, srv := range hubstest.StartEnvironments(t, file.Settings, nil) {
		for _, c := range file.Cases {
			if c.Server != "" && c.Server != name {
				if file.Settings[c.Server] == nil {
					t.Fatalf("%s: there is no server %q", c.Name, c.Server)
				}
				continue
			}
			t.Run(name+"/"+c.Name, func(t *testing.T) {
				headers := []string{"X-Forwarded-For", hubstest.NewIP()}
				var cors map[string]*string
				if c.Origin != nil {
					_, host, _ := strings.Cut(srv.Base, "://")
					origin := hubstest.FillIn(*c.Origin, "<host>", host)
					headers = append(headers, "Origin", origin)
					cors = map[string]*string{"Access-Control-Allow-Origin": &origin}
					maps.Copy(cors, file.CORSHeaders)
				}
				if c.FetchSite != "" {
					headers = append(headers, "Sec-Fetch-Site", c.FetchSite)
				}
				if !c.CORS {
					cors = nil
				}
				checkOrigin(t, srv, headers,
					cors, file.PreflightHeaders, c.Expect)
			})
		}
	}
}

// checkOrigin sends the requests of a case. cors are the headers that let the origin's pages
// read the answers; nil: they may not.
func checkOrigin(
	t *testing.T, srv *hubstest.Server, headers []string,
	cors, preflightHeaders map[string]*string, write hubstest.Expected,
) {
	t.Helper()
	send := func(want hubstest.Expected, method, path, body string, more ...string) {
		t.Helper()
		r := srv.Wire(t, method, path,
			[]byte(body), slices.Concat(headers, more)...)
		want.Check(t, r) // looks at Vary, too
		hubstest.WantHeaders(t, r, cors)
		for name := range r.Header {
			if cors == nil && strings.HasPrefix(name, "Access-Control-") {
				t.Errorf("got %s: %q, in %v",
					name, r.Header[name], r)
			}
		}
	}
	served := hubstest.Expected{Status: 200}
	send(served, "GET", "/healthz", "")
	send(served, "GET", "/openapi.json", "")
	notFound := hubstest.Expected{
		Status: 404,
		Code:   "not_found",
	}
	send(notFound, "GET", "/nowhere", "")

	notAllowed := hubstest.Expected{
		Status: 405,
		Code:   "method_not_allowed",
	}
	preflight := notAllowed
	if cors != nil {
		preflight = hubstest.Expected{
			Status:  204,
			Headers: preflightHeaders,
		}
	}
	send(preflight, "OPTIONS", "/hubs", "", "Access-Control-Request-Method", "POST")
	send(preflight, "OPTIONS", "/hubs/x", "", "Access-Control-Request-Method", "PATCH",
		"Access-Control-Request-Headers", "content-type,x-request-id")
	send(notAllowed, "OPTIONS", "/hubs/x", "")
	send(write, "POST", "/auth/otp/request", `{"email":"nobody@example.com"}`,
		"Content-Type", "application/json")
}

// C2: SameSite=Lax alone would let a page of the same site but another origin write.
func TestCrossSiteWrites(t *testing.T) {
	t.Parallel()
	srv, admin := start(t, "admin", production(t))
	for _, test := range hubstest.ReadCases[struct {
		Name    string
		Headers []string
		Allowed bool
	}](t, "testdata/cross-site.json") {
		t.Run(test.Name, func(t *testing.T) {
			for _, r := range contractRoutes(t) {
				q := sample(t, srv,
					admin.In(t).Elsewhere(), r.name)
				q.headers = append(q.headers, test.Headers...)
				answer := q.send(srv.With(t, admin.Token()))
				isRead := strings.HasPrefix(r.name, "GET ")
				if test.Allowed || isRead { // CORS keeps foreign pages from reading
					answer.Want(t, r.status)
				} else {
					hubstest.WantProblem(t, answer, 403, "cross_origin")
				}
			}
		})
	}
}

// A refused origin, of a write or of a preflight, is one line that names the setting that would
// allow it. Other requests say nothing of it. Only the local environment shows the origin.
func TestRefusedOriginNamesTheSetting(t *testing.T) {
	t.Parallel()
	wantRefusedOrigins(t, hubstest.Start(t),
		"http://127.0.0.1:5173", "ALLOWED_ORIGINS", foreignOrigin)
	length := len(strings.TrimPrefix(foreignOrigin, "https://"))
	wantRefusedOrigins(t, hubstest.Start(t, production(t)),
		"https://app.example.com", "ALLOWED_ORIGIN_DOMAIN",
		fmt.Sprintf("(host of %d characters)", length))
}

const foreignOrigin = "https://front-end.example.org"

// wantRefusedOrigins writes from an allowed origin and from a foreign one. The log must name the
// setting that would allow the foreign one, which is shown as it says.
func wantRefusedOrigins(
	t *testing.T, srv *hubstest.Server, allowed, setting, shown string,
) {
	t.Helper()
	c := srv.Client(t)
	send := func(id, method, origin string, more ...string) {
		headers := append(more, "Origin", origin, "X-Request-Id", id)
		c.Do(method, "/auth/logout", nil, headers...)
	}
	preflight := []string{"Access-Control-Request-Method", "POST"}
	send("refused-write", "POST", foreignOrigin)
	send("refused-form", "POST", foreignOrigin, "Sec-Fetch-Site", "cross-site")
	send("refused-preflight", "OPTIONS", foreignOrigin, preflight...)
	send("read", "GET", foreignOrigin)
	send("options", "OPTIONS", foreignOrigin)
	send("write", "POST", allowed)
	send("preflight", "OPTIONS", allowed, preflight...)
	srv.Stop(t)

	refused := []string{"origin refused", setting, `"origin":"` + shown, `"requestId":"refused-`}
	got := srv.Log.Count(refused...)
	if got != 3 {
		t.Errorf("got %d lines that contain %q, want 3:\n%s", got, refused, srv.Log)
	}
	got = srv.Log.Count("ALLOWED_")
	if got != 3 {
		t.Errorf("got %d lines that name a setting, want 3:\n%s", got, srv.Log)
	}
}
