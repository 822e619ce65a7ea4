package api

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A cookieCase is a GET with one or more tokens. <token> is a good token, signed with the key of the
// server. <expired> is like it, but has expired. <other> is signed with the key of another server.
type cookieCase struct {
	Name, Rule string
	Server     string
	Other      string // "" means production
	Target     string // "" means /auth/session
	Headers    []string
	Want       answer
}

// cookie returns a Cookie header for each value.
func cookie(values ...string) (headers []string) {
	for _, value := range values {
		headers = append(headers, "Cookie", value)
	}
	return headers
}

// T7, T8: The server takes the token only from the cookie of its own environment. A token in
// another cookie or in another place of the request, or a token of another environment, opens no
// session. Of several cookies of the name, the first with a good token counts.
func TestTokenCountsOnlyInItsCookie(t *testing.T) {
	t.Parallel()
	db := hubstest.NewDatabase(t)
	email := hubstest.NewEmail()
	id := hubstest.Query[string](t, db, "insert into users (email) values ($1) returning user_id", email)
	servers := startEnvironments(t, map[string]map[string]string{
		"local": {
			"SESSION_SECRET": "corpus-secret-of-the-local-environment",
			"DATABASE_URL":   db,
		},
		"staging": {
			"SESSION_SECRET": "corpus-secret-of-the-staging-environment",
			"COOKIE_DOMAIN":  "staging.example.com",
			"DATABASE_URL":   db,
		},
		"production": {
			"SESSION_SECRET":        "corpus-secret-of-the-production-environment",
			"COOKIE_DOMAIN":         "example.com",
			"ALLOWED_ORIGIN_DOMAIN": "example.com",
			"DATABASE_URL":          db,
		},
	})
	tokenOf := func(s *hubstest.Server) string {
		return token{}.sign(s.Env["SESSION_SECRET"], "<email>", email, "<userId>", id)
	}
	expiredPayload := `{"email":"<email>","userId":"<userId>","iat":<now-3600>,"exp":<now-60>}`
	expiredOf := func(s *hubstest.Server) string {
		return token{Payload: &expiredPayload}.sign(s.Env["SESSION_SECRET"],
			"<email>", email, "<userId>", id)
	}

	runCases(t, cookieCases, func(t *testing.T, c cookieCase) {
		other := named(t, servers, cmp.Or(c.Other, "production"))
		s := named(t, servers, c.Server)
		words := []string{
			"<token>", tokenOf(s),
			"<expired>", expiredOf(s),
			"<other>", tokenOf(other),
		}
		headers := []string{"X-Forwarded-For", hubstest.NewIP()}
		for _, text := range c.Headers {
			headers = append(headers, fillIn(text, words...))
		}
		target := fillIn(cmp.Or(c.Target, "/auth/session"), words...)
		wantAnswer(t, onTheWire(t, s, "GET "+target, nil, headers...), c.Want)
	})
}

var cookieCases = []group[cookieCase]{
	// Cookies that open a session.
	{Each: cookieCase{Rule: "T6", Want: ok}, Cases: []cookieCase{
		{Name: "local", Server: "local", Headers: cookie("hubs_auth_local=<token>")},
		{Name: "staging", Server: "staging", Headers: cookie("__Secure-hubs_auth_staging=<token>")},
		{Name: "production", Server: "production",
			Headers: cookie("__Secure-hubs_auth_production=<token>")},
		{Name: "staging's and production's cookies on production", Rule: "T8", Server: "production",
			Other:   "staging",
			Headers: cookie("__Secure-hubs_auth_staging=<other>; __Secure-hubs_auth_production=<token>")},
		{Name: "others around it", Server: "local",
			Headers: cookie("theme=dark; hubs_auth_local=<token>; lang=en")},
		{Name: "others around it, no spaces", Server: "local",
			Headers: cookie("theme=dark;hubs_auth_local=<token>;lang=en")},
		{Name: "malformed ones around it", Server: "local",
			Headers: cookie(`=; ;; a b="; hubs_auth_local=<token>; =x`)},
		{Name: "in quotes, which RFC 6265 permits", Server: "local",
			Headers: cookie(`hubs_auth_local="<token>"`)},
		{Name: "two of the name: the first is good", Server: "local",
			Headers: cookie("hubs_auth_local=<token>; hubs_auth_local=<other>")},
		{Name: "two of the name: the first is of another server", Rule: "T7", Server: "local",
			Headers: cookie("hubs_auth_local=<other>; hubs_auth_local=<token>")},
		{Name: "two of the name: the first has expired", Rule: "T7", Server: "local",
			Headers: cookie("hubs_auth_local=<expired>; hubs_auth_local=<token>")},
		{Name: "three of the name: the first is empty, the second no token", Rule: "T7",
			Server: "production",
			Headers: cookie(
				"__Secure-hubs_auth_production=; theme=dark; __Secure-hubs_auth_production=old",
				"__Secure-hubs_auth_production=<token>")},
		{Name: "eight of the name: the last is good", Rule: "T7", Server: "local",
			Headers: cookie(repeat("hubs_auth_local=old; ", 7) + "hubs_auth_local=<token>")},
		{Name: "two of the name: the first is longer than any token", Rule: "T7", Server: "staging",
			Headers: cookie("__Secure-hubs_auth_staging=" + repeat("a", 3000) +
				`; __Secure-hubs_auth_staging="<token>"`)},
	}},
	// Another environment's cookie or token.
	{Each: cookieCase{Rule: "T8", Want: fails(401, "unauthenticated")}, Cases: []cookieCase{
		{Name: "local's name on staging", Server: "staging",
			Headers: cookie("hubs_auth_local=<token>")},
		{Name: "production's name on staging", Server: "staging",
			Headers: cookie("__Secure-hubs_auth_production=<token>")},
		{Name: "staging's name on production", Server: "production",
			Headers: cookie("__Secure-hubs_auth_staging=<token>")},
		{Name: "staging's name locally", Server: "local",
			Headers: cookie("hubs_auth_staging=<token>")},
		{Name: "staging's name with __Secure- locally", Server: "local",
			Headers: cookie("__Secure-hubs_auth_staging=<token>")},
		{Name: "staging's token on production", Server: "production", Other: "staging",
			Headers: cookie("__Secure-hubs_auth_production=<other>")},
		{Name: "staging's cookie on production", Server: "production", Other: "staging",
			Headers: cookie("__Secure-hubs_auth_staging=<other>")},
		{Name: "production's token on staging", Server: "staging",
			Headers: cookie("__Secure-hubs_auth_staging=<other>")},
		{Name: "name without the environment", Server: "local", Headers: cookie("hubs_auth=<token>")},
	}},
	// Other requests that have no session.
	{Each: cookieCase{Rule: "T6", Want: fails(401, "unauthenticated")}, Cases: []cookieCase{
		{Name: "production without __Secure-", Server: "production",
			Headers: cookie("hubs_auth_production=<token>")},
		{Name: "production with __Host-", Server: "production",
			Headers: cookie("__Host-hubs_auth_production=<token>")},
		{Name: "production, __secure- in lower case", Server: "production",
			Headers: cookie("__secure-hubs_auth_production=<token>")},
		{Name: "local with __Secure-", Server: "local",
			Headers: cookie("__Secure-hubs_auth_local=<token>")},
		{Name: "name in capitals", Server: "local", Headers: cookie("HUBS_AUTH_LOCAL=<token>")},
		{Name: "name with a capital", Server: "local", Headers: cookie("Hubs_auth_local=<token>")},
		{Name: "name with more before", Server: "local", Headers: cookie("xhubs_auth_local=<token>")},
		{Name: "name with more behind", Server: "local", Headers: cookie("hubs_auth_local2=<token>")},
		{Name: "name percent-encoded", Server: "local", Headers: cookie("hubs%5Fauth_local=<token>")},
		{Name: "name of the environment alone", Server: "local",
			Headers: cookie("auth_local=<token>; local=<token>; session=<token>; token=<token>")},
		{Name: "no cookie", Rule: "Z1", Server: "local",
			Want: answer{Headers: headers{"WWW-Authenticate": "Cookie", "Set-Cookie": ""}}},
		{Name: "an empty Cookie header", Rule: "Z1", Server: "local", Headers: cookie("")},
		{Name: "an empty value", Rule: "Z1", Server: "local", Headers: cookie("hubs_auth_local=")},
		{Name: "a name without a value", Rule: "Z1", Server: "local",
			Headers: cookie("hubs_auth_local")},
		{Name: "a value without a name", Rule: "Z1", Server: "local", Headers: cookie("<token>")},
		{Name: "a comma is no separator", Server: "local",
			Headers: cookie("theme=dark, hubs_auth_local=<token>")},
		{Name: "one quote", Server: "local", Headers: cookie(`hubs_auth_local="<token>`)},
		{Name: "quotes of the other kind", Server: "local",
			Headers: cookie("hubs_auth_local='<token>'")},
		{Name: "nine of the name: the ninth is not looked at", Rule: "T7", Server: "local",
			Headers: cookie(repeat("hubs_auth_local=old; ", 8) + "hubs_auth_local=<token>")},
		{Name: "two of the name, none good", Rule: "T7", Server: "local",
			Headers: cookie("hubs_auth_local=; hubs_auth_local=<other>")},
		{Name: "token as Authorization", Server: "local",
			Headers: []string{"Authorization", "Bearer <token>"}},
		{Name: "token in the query", Server: "local",
			Target: "/auth/session?hubs_auth_local=<token>&token=<token>&access_token=<token>"},
		{Name: "token in headers of other names", Server: "local",
			Headers: []string{"X-Cookie", "hubs_auth_local=<token>", "hubs_auth_local", "<token>",
				"Set-Cookie", "hubs_auth_local=<token>"}},
	}},
}

// sessionLife returns the Max-Age of the cookie, and the life of the token in it, as the contract has it.
func sessionLife(t testing.TB) time.Duration {
	t.Helper()
	found := hubstest.Matches(t, "web/openapi.json", `session cookie, which lasts ([0-9]+) days`)
	if len(found) != 1 {
		t.Fatalf("setup: web/openapi.json: got %q for the life of a session in days, want one number", found)
	}
	days, err := strconv.Atoi(found[0])
	hubstest.Must(t, err)
	return time.Duration(days) * 24 * time.Hour
}

// T6, T7, T8, T2: Sign-in and sign-out send exactly these cookies, and the second removes the
// cookie from a browser's jar. A copy of the token stays valid, as SECURITY.md says.
func TestCookiesAreExact(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		env    map[string]string
		cookie string
	}{
		{
			name:   "local", // has no TLS, so the cookie is not Secure
			cookie: "hubs_auth_local=<token>; Path=/; Max-Age=<age>; HttpOnly; SameSite=Lax",
		},
		{
			name: "staging",
			env:  staging(t),
			cookie: "__Secure-hubs_auth_staging=<token>; Path=/; Domain=staging.example.com; " +
				"Max-Age=<age>; HttpOnly; Secure; SameSite=Lax",
		},
		{
			name: "production",
			env:  production(t),
			cookie: "__Secure-hubs_auth_production=<token>; Path=/; Domain=example.com; " +
				"Max-Age=<age>; HttpOnly; Secure; SameSite=Lax",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := hubstest.Start(t, test.env)
			email, _ := s.NewUser(t, "admin")
			c := s.Client(t)
			wantCookie := func(r *hubstest.Response, token, age string) {
				t.Helper()
				cookie := fillIn(test.cookie, "<token>", token, "<age>", age)
				wantHeaders(t, r, headers{"Set-Cookie": cookie})
			}

			in := c.SignIn(email)
			token := c.Token()
			wantCookie(in, token, fmt.Sprintf("%.0f", sessionLife(t).Seconds()))

			out := c.Do("POST /auth/logout", nil).Must(t, 204)
			wantCookie(out, "", "0")
			wantEqual(t, "token in the jar after sign-out", c.Token(), "")
			s.With(t, token).Get("/auth/session").Want(t, 200)
		})
	}
}

// A sign-in at a host that COOKIE_DOMAIN does not cover is reported, once: its cookie is dropped by the
// browser, and the next request is a 401. The host, which the client has written, is in no log.
func TestHostOutsideTheCookieDomainIsReported(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	const warning = "COOKIE_DOMAIN does not cover"
	domain := s.Env["COOKIE_DOMAIN"]
	for _, host := range []string{domain, strings.ToUpper("api." + domain + ":8443")} {
		signInAt(t, s, host)
		wantEqual(t, "warnings after a sign-in at "+host, s.Log.Count(warning), 0)
	}
	for _, host := range []string{"api.corp.example", "x" + domain} {
		signInAt(t, s, host)
		wantEqual(t, "warnings after a sign-in at "+host, s.Log.Count(`"level":"WARN"`, warning), 1)
		wantEqual(t, "lines with "+host, s.Log.Count(host), 0)
	}
}

// signInAt signs a new user in at a host, and waits for the line of the log that comes after a warning.
func signInAt(t *testing.T, s *hubstest.Server, host string) {
	t.Helper()
	email, _ := s.NewUser(t, "member")
	c := s.Client(t)
	c.AskCode(email)
	body := fmt.Sprintf(`{"email":%q,"code":%q}`, email, s.Code(t, email))
	r := hubstest.Dial(t, s.Addr).Send(t, hubstest.Head("POST /auth/otp/validate",
		"Host", host,
		"X-Forwarded-For", c.IP,
		"Content-Type", "application/json",
		"Content-Length", fmt.Sprint(len(body)),
	)+body).Must(t, 200)
	waitLogged(t, s, r, `"msg":"signed in"`)
}
