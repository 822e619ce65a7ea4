package api

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// An originCase is the origin of a request, and whether its pages may read and write.
type originCase struct {
	Name, Rule string
	Server     string  // "" means all of them
	Origin     *string // nil: no such header; <host> is the server's own host and port
	FetchSite  string  // Sec-Fetch-Site; "": no such header
	CORS       bool    // answers have CORS headers, and a preflight is accepted
	Want       answer  // to a write
}

// originSettings are the settings of the servers, by their names.
var originSettings = map[string]map[string]string{
	"local":          {},
	"local, set":     {"APP_ENV": "local", "ALLOWED_ORIGINS": "http://127.0.0.1:9"},
	"staging, unset": {"APP_ENV": "staging", "COOKIE_DOMAIN": "staging.example.com"},
	"staging": {
		"COOKIE_DOMAIN": "staging.example.com",
		"ALLOWED_ORIGINS": "https://app.staging.example.com," +
			"https://preview.example.net:8443,http://localhost:3000",
	},
	"production": {"COOKIE_DOMAIN": "example.com", "ALLOWED_ORIGIN_DOMAIN": "example.com"},
	"production, in capitals": {
		"APP_ENV":               "production",
		"COOKIE_DOMAIN":         "example.com",
		"ALLOWED_ORIGIN_DOMAIN": "Example.COM",
	},
}

// C1: The CORS headers are sent to exactly the allowed origins of each server. A write from any
// other origin but the server's own is refused.
func TestOnlyAllowedOriginsGetCORS(t *testing.T) {
	t.Parallel()
	all := startEnvironments(t, originSettings)

	runCases(t, originCases, func(t *testing.T, c originCase) {
		servers := all
		if c.Server != "" {
			servers = map[string]*hubstest.Server{c.Server: named(t, all, c.Server)}
		}
		for _, name := range slices.Sorted(maps.Keys(servers)) {
			s := servers[name]
			t.Run(name, func(t *testing.T) {
				sent := []string{"X-Forwarded-For", hubstest.NewIP()}
				var origin string
				if c.Origin != nil {
					_, host, _ := strings.Cut(s.Base, "://")
					origin = fillIn(*c.Origin, "<host>", host)
					sent = append(sent, "Origin", origin)
				}
				if c.FetchSite != "" {
					sent = append(sent, "Sec-Fetch-Site", c.FetchSite)
				}
				var cors headers
				if c.CORS {
					cors = headers{
						"Access-Control-Allow-Origin":      origin,
						"Access-Control-Allow-Credentials": "true",
						"Access-Control-Expose-Headers":    "X-Request-Id, Retry-After, Location",
					}
				}

				wantCORS(t, s, sent, cors, c.Want)
			})
		}
	})
}

// longHost returns a subdomain of example.com of this many bytes, up to 267.
func longHost(bytes int) string {
	labels := strings.Repeat(strings.Repeat("a", 63)+".", 3)
	return labels + strings.Repeat("b", bytes-len(labels+".example.com")) + ".example.com"
}

var originCases = []group[originCase]{
	// Every server: an empty Origin header is the same as none.
	{Each: originCase{Rule: "C1", Want: ok}, Cases: []originCase{
		{Name: "each: an empty origin", Origin: new("")},
	}},
	// Every server: origins that no server allows.
	{Each: originCase{Rule: "C1", Want: fails(403, "cross_origin")}, Cases: []originCase{
		{Name: "each: null", Origin: new("null")},
		{Name: "each: a star", Origin: new("*")},
		{Name: "each: a scheme alone", Origin: new("https://")},
		{Name: "each: a file", Origin: new("file://")},
		{Name: "each: a dot behind the domain", Origin: new("https://app.example.com.")},
	}},
	// Production: HTTPS subdomains of ALLOWED_ORIGIN_DOMAIN are allowed.
	{Each: originCase{Rule: "C1", Server: "production", CORS: true, Want: ok}, Cases: []originCase{
		{Name: "subdomain", Origin: new("https://app.example.com")},
		{Name: "subdomain of a subdomain", Origin: new("https://a.b-c.example.com")},
		{Name: "subdomain with a hyphen", Origin: new("https://a-b.example.com")},
		{Name: "subdomain in punycode", Origin: new("https://xn--bcher-kva.example.com")},
		{Name: "subdomain, from a page of the same site", Rule: "C2",
			Origin: new("https://app.example.com"), FetchSite: "same-site"},
		{Name: "staging's subdomain is one of the domain",
			Origin: new("https://app.staging.example.com")},
		{Name: "the longest name, 253 bytes", Origin: new("https://" + longHost(253))},
	}},
	// Production: requests without an Origin header, which no page has sent.
	{Each: originCase{Rule: "C1", Server: "production", Want: ok}, Cases: []originCase{
		{Name: "no origin: no browser"},
		{Name: "no origin, typed by the user", Rule: "C2", FetchSite: "none"},
	}},
	// Production: writes that Sec-Fetch-Site marks as coming from another origin.
	{Each: originCase{Rule: "C2", Server: "production", Want: fails(403, "cross_origin")},
		Cases: []originCase{
			{Name: "foreign, of the same site", Origin: new("https://evil.net"), FetchSite: "same-site"},
			{Name: "foreign, as browsers say it", Origin: new("https://evil.net"),
				FetchSite: "cross-site"},
			{Name: "http page of the server's own name, as browsers say it",
				Origin: new("http://<host>"), FetchSite: "cross-site"},
			{Name: "no origin, but cross-site", FetchSite: "cross-site"},
			{Name: "no origin, but same-site", FetchSite: "same-site"},
		}},
	// Production: other origins are refused, however similar.
	{Each: originCase{Rule: "C1", Server: "production", Want: fails(403, "cross_origin")},
		Cases: []originCase{
			{Name: "the bare domain", Origin: new("https://example.com")},
			{Name: "a name of 254 bytes", Origin: new("https://" + longHost(254))},
			{Name: "a dot before the domain", Origin: new("https://.example.com")},
			{Name: "the domain as an ending", Origin: new("https://evil-example.com")},
			{Name: "the domain as an ending, no hyphen", Origin: new("https://evilexample.com")},
			{Name: "the domain as a beginning", Origin: new("https://example.com.evil")},
			{Name: "a subdomain as a beginning", Origin: new("https://app.example.com.evil.net")},
			{Name: "a subdomain as a beginning, one label behind",
				Origin: new("https://app.example.com.evil")},
			{Name: "another character for the dot", Origin: new("https://app.exampleXcom")},
			{Name: "http", Origin: new("http://app.example.com")},
			{Name: "another scheme", Origin: new("ftp://app.example.com")},
			{Name: "a scheme that ends in https", Origin: new("xhttps://app.example.com")},
			{Name: "no scheme", Origin: new("app.example.com")},
			{Name: "another port", Origin: new("https://app.example.com:8443")},
			{Name: "the default port, which no browser writes",
				Origin: new("https://app.example.com:443")},
			{Name: "a colon without a port", Origin: new("https://app.example.com:")},
			{Name: "capitals, which no browser writes", Origin: new("https://app.EXAMPLE.com")},
			{Name: "capitals in the scheme", Origin: new("HTTPS://app.example.com")},
			{Name: "a label of a hyphen", Origin: new("https://-.example.com")},
			{Name: "two dots", Origin: new("https://app..example.com")},
			{Name: "a slash behind", Origin: new("https://app.example.com/")},
			{Name: "a path that ends in the domain", Origin: new("https://evil.net/.example.com")},
			{Name: "a query that ends in the domain", Origin: new("https://evil.net?.example.com")},
			{Name: "a fragment that ends in the domain", Origin: new("https://evil.net#.example.com")},
			{Name: "a backslash", Origin: new(`https://evil.net\.example.com`)},
			{Name: "user information", Origin: new("https://user@app.example.com")},
			{Name: "the domain as user information", Origin: new("https://app.example.com@evil.net")},
			{Name: "a port of letters that ends in the domain",
				Origin: new("https://evil.net:x.example.com")},
			{Name: "an underscore", Origin: new("https://a_b.example.com")},
			{Name: "a label that begins with a hyphen", Origin: new("https://-a.example.com")},
			{Name: "a percent escape", Origin: new("https://evil.net%2F.example.com")},
			{Name: "a star for the subdomain", Origin: new("https://*.example.com")},
			{Name: "letters beyond ASCII", Origin: new("https://bücher.example.com")},
			{Name: "a full stop beyond ASCII", Origin: new("https://app\u3002example.com")},
			{Name: "a Cyrillic letter in the domain", Origin: new("https://app.ex\u0430mple.com")},
			{Name: "a space within", Origin: new("https://evil.net .example.com")},
			{Name: "two origins, the good one first",
				Origin: new("https://app.example.com https://evil.net")},
			{Name: "two origins, the good one last",
				Origin: new("https://evil.net,https://app.example.com")},
			{Name: "two origins, both good",
				Origin: new("https://app.example.com https://x.example.com")},
			{Name: "localhost in production", Origin: new("http://localhost:3000")},
		}},
	// Production, the domain in capitals: its subdomains are allowed.
	{Each: originCase{Rule: "C1", Want: ok}, Cases: []originCase{
		{Name: "domain set in capitals: subdomain", Server: "production, in capitals",
			Origin: new("https://app.example.com"), CORS: true},
	}},
	// Production, the domain in capitals: other origins are refused.
	{Each: originCase{Rule: "C1", Server: "production, in capitals", Want: fails(403, "cross_origin")},
		Cases: []originCase{
			{Name: "domain set in capitals: the bare domain", Origin: new("https://example.com")},
			{Name: "domain set in capitals: the domain as an ending",
				Origin: new("https://evil-example.com")},
		}},
	// Staging: the origins in ALLOWED_ORIGINS are allowed.
	{Each: originCase{Rule: "C1", Server: "staging", CORS: true, Want: ok}, Cases: []originCase{
		{Name: "staging: listed", Origin: new("https://app.staging.example.com")},
		{Name: "staging: listed with a port", Origin: new("https://preview.example.net:8443")},
		{Name: "staging: listed with http", Origin: new("http://localhost:3000")},
	}},
	// Staging: the server's own page may write.
	{Each: originCase{Rule: "C2", Want: ok}, Cases: []originCase{
		{Name: "staging: the server's own page needs no CORS", Server: "staging",
			Origin: new("https://<host>"), FetchSite: "same-origin"},
	}},
	// Staging: other origins are refused, however similar.
	{Each: originCase{Rule: "C1", Server: "staging", Want: fails(403, "cross_origin")},
		Cases: []originCase{
			{Name: "staging: listed, other port", Origin: new("https://app.staging.example.com:8443")},
			{Name: "staging: listed, port left out", Origin: new("https://preview.example.net")},
			{Name: "staging: listed, the default port written",
				Origin: new("https://app.staging.example.com:443")},
			{Name: "staging: listed with http and a port, sent with https and none",
				Origin: new("https://localhost")},
			{Name: "staging: listed, other scheme", Origin: new("http://app.staging.example.com")},
			{Name: "staging: listed, in capitals", Origin: new("https://APP.staging.example.com")},
			{Name: "staging: listed, slash behind", Origin: new("https://app.staging.example.com/")},
			{Name: "staging: a part of the list", Origin: new("https://app.staging.example.co")},
			{Name: "staging: another subdomain", Origin: new("https://evil.staging.example.com")},
			{Name: "staging: a subdomain of a listed one",
				Origin: new("https://x.app.staging.example.com")},
			{Name: "staging: production's page", Origin: new("https://app.example.com")},
			{Name: "staging: local's other default", Origin: new("http://localhost:5173")},
		}},
	// Staging without ALLOWED_ORIGINS: no origin is allowed.
	{Each: originCase{Rule: "C1", Server: "staging, unset", Want: fails(403, "cross_origin")},
		Cases: []originCase{
			{Name: "staging, unset: local's default", Origin: new("http://localhost:3000")},
			{Name: "staging, unset: a subdomain", Origin: new("https://app.staging.example.com")},
			{Name: "staging, unset: the cookie's domain", Origin: new("https://staging.example.com")},
		}},
	// Local: the usual ports of this machine are allowed.
	{Each: originCase{Rule: "C1", Server: "local", CORS: true, Want: ok}, Cases: []originCase{
		{Name: "local: localhost, port 3000", Origin: new("http://localhost:3000")},
		{Name: "local: localhost, port 5173", Origin: new("http://localhost:5173")},
		{Name: "local: localhost, port 4200", Origin: new("http://localhost:4200")},
		{Name: "local: localhost, port 8081", Origin: new("http://localhost:8081")},
		{Name: "local: 127.0.0.1, port 3000", Origin: new("http://127.0.0.1:3000")},
		{Name: "local: 127.0.0.1, port 4200", Origin: new("http://127.0.0.1:4200")},
		{Name: "local: 127.0.0.1, port 5173", Origin: new("http://127.0.0.1:5173")},
		{Name: "local: 127.0.0.1, port 8081", Origin: new("http://127.0.0.1:8081")},
	}},
	// Local: the server's own page may write.
	{Each: originCase{Rule: "C2", Want: ok}, Cases: []originCase{
		{Name: "local: the server's own page needs no CORS", Server: "local",
			Origin: new("http://<host>")},
	}},
	// Local: other origins are refused, however similar.
	{Each: originCase{Rule: "C1", Server: "local", Want: fails(403, "cross_origin")},
		Cases: []originCase{
			{Name: "local: another port", Origin: new("http://localhost:3001")},
			{Name: "local: a port that begins alike", Origin: new("http://localhost:30000")},
			{Name: "local: localhost in capitals", Origin: new("http://LOCALHOST:3000")},
			{Name: "local: a slash behind", Origin: new("http://localhost:3000/")},
			{Name: "local: no port", Origin: new("http://localhost")},
			{Name: "local: https", Origin: new("https://localhost:3000")},
			{Name: "local: the number, another port", Origin: new("http://127.0.0.1:3001")},
			{Name: "local: the number, https", Origin: new("https://127.0.0.1:3000")},
			{Name: "local: another number of this machine", Origin: new("http://127.0.0.2:3000")},
			{Name: "local: the number in IPv6", Origin: new("http://[::1]:3000")},
			{Name: "local: localhost as a beginning", Origin: new("http://localhost:3000.evil.net")},
			{Name: "local: a subdomain of localhost", Origin: new("http://evil.localhost:3000")},
			{Name: "local: a deployed page", Origin: new("https://app.example.com")},
		}},
	// Local with ALLOWED_ORIGINS: the listed origins are allowed.
	{Each: originCase{Rule: "C1", Want: ok}, Cases: []originCase{
		{Name: "local, set: listed", Server: "local, set", Origin: new("http://127.0.0.1:9"),
			CORS: true},
	}},
	// Local with ALLOWED_ORIGINS: all other origins are refused.
	{Each: originCase{Rule: "C1", Want: fails(403, "cross_origin")}, Cases: []originCase{
		{Name: "local, set: the default is gone", Server: "local, set",
			Origin: new("http://localhost:3000")},
	}},
}

// wantCORS sends reads, a preflight and a write with these headers, and checks the answers. cors
// holds the CORS headers that each answer must have; if it is nil, no answer may have any. write is
// the answer to the write.
func wantCORS(t *testing.T, s *hubstest.Server, sent []string, cors headers, write answer) {
	t.Helper()
	send := func(want answer, method, path, body string, more ...string) {
		t.Helper()
		r := onTheWire(t, s, method+" "+path, []byte(body), slices.Concat(sent, more)...)
		wantAnswer(t, r, want)
		wantHeaders(t, r, cors)
		for name := range r.Header {
			if cors == nil && strings.HasPrefix(name, "Access-Control-") {
				t.Errorf("got the header %s: %q, want no CORS header, in %v", name, r.Header[name], r)
			}
		}
	}
	send(ok, "GET", "/healthz", "")
	send(fails(404, "not_found"), "GET", "/nowhere", "")

	// The origin is trusted, so its pages may send whatever headers they ask for. A monitoring
	// service adds some to each request.
	const wanted = "baggage,cache-control,content-type,sentry-trace,traceparent,x-requested-with"
	notAllowed := fails(405, "method_not_allowed")
	preflight := notAllowed
	if cors != nil {
		preflight = answer{Status: 204, Headers: headers{
			"Access-Control-Allow-Methods": "GET, HEAD, POST, PATCH, DELETE",
			"Access-Control-Allow-Headers": wanted,
			"Access-Control-Max-Age":       "7200",
		}}
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
	// page returns the headers of a write by a page of an origin.
	page := func(origin, site string) []string {
		return []string{"Origin", origin, "Sec-Fetch-Site", site}
	}
	for name, test := range map[string]struct {
		Headers []string
		Allowed bool
	}{
		"cross-site form":          {Headers: page("https://evil.test", "cross-site")},
		"same site":                {Headers: page("http://app.example.com", "same-site")},
		"same site, no origin":     {Headers: []string{"Sec-Fetch-Site", "same-site"}},
		"old browser":              {Headers: []string{"Origin", "https://evil.test"}},
		"opaque origin":            {Headers: []string{"Origin", "null"}},
		"same site, allowed":       {page("https://app.example.com", "same-site"), true},
		"cross-site, allowed":      {page("https://app.example.com", "cross-site"), true},
		"same origin":              {page("https://api.example.com", "same-origin"), true},
		"old browser, same origin": {[]string{"Origin", "https://api.example.com"}, true},
		"typed in":                 {[]string{"Sec-Fetch-Site", "none"}, true},
		"no browser":               {nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, r := range routes {
				q := maker{s, admin, admin}.validCall(t, r)
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
