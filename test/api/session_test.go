package api

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// T1, T2, T4, T5: A token that this server would not have issued, or that has expired or ended,
// is a 401, and the log has the reason.
func TestOnlyValidTokensOpenSessions(t *testing.T) {
	t.Parallel()
	file := hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		hubstest.Token
		User   string
		Key    string
		Reason string
	}](t, "tokens.json")
	s := hubstest.Start(t, map[string]string{
		"SESSION_SECRET": file.Keys["first"] + "," + file.Keys["second"],
	})
	users := map[string]account{}
	for _, name := range []string{"active", "other", "suspended", "signedOut"} {
		email, id := s.NewUser(t, "member")
		users[name] = account{email, id}
	}
	s.User(t, "suspend", users["suspended"].email)
	hubstest.Exec(t, s.Database, `update users
		set signed_out_at = now() - interval '100 s' where user_id = $1`, users["signedOut"].id)

	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			key := hubstest.Named(t, file.Keys, cmp.Or(c.Key, "first"))
			user := hubstest.Named(t, users, cmp.Or(c.User, "active"))
			token := c.Sign(key, tokenWords(user, users["other"])...)
			r := s.Wire(t, "GET /auth/session", nil,
				"X-Forwarded-For", hubstest.NewIP(),
				"Cookie", s.CookieName()+"="+token)

			r.WantAnswer(t, c.Expect)
			if r.Status == 401 && c.Reason != "any" {
				waitLogged(t, s, r, `"reason":"`+cmp.Or(c.Reason, "forged")+`"`)
			}
			if r.Status == 200 {
				r.WantField(t, "user.userId", user.id)
			}
		})
	}
	waitLogged(t, s, s.Client(t).Get("/auth/session"), `"reason":"missing"`)

	// The first key signs: a server that has only this one takes the token of a sign-in.
	signed := s.SignIn(t, users["active"].email).Token()
	onlyFirst := hubstest.Start(t, s.Env, map[string]string{"SESSION_SECRET": file.Keys["first"]})
	onlyFirst.With(t, signed).Get("/auth/session").Want(t, 200)
}

// An account is a user of tokens.json.
type account struct{ email, id string }

// tokenWords returns the words of tokens.json with their values.
func tokenWords(user, other account) []string {
	return []string{
		"<user>", fmt.Sprintf(`"email":%q,"userId":%q`, user.email, user.id),
		"<times>", `"iat":<now>,"exp":<now+3600>`,
		"<email>", user.email,
		"<userId>", user.id,
		"<EMAIL>", strings.ToUpper(user.email),
		"<USERID>", strings.ToUpper(user.id),
		"<other.email>", other.email,
		"<other.userId>", other.id,
	}
}

// T7, T8: The server takes the token only from the cookie of its own environment. A token in
// another cookie or in another place of the request, or a token of another environment, opens no
// session. Of several cookies of the name, the first with a good token counts.
func TestTokenCountsOnlyInItsCookie(t *testing.T) {
	t.Parallel()
	file := hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		Server, Other, Target string
		Headers               []string
	}](t, "cookies.json")
	db := hubstest.NewDatabase(t)
	email := hubstest.NewEmail()
	id := hubstest.AddUser(t, db, email, "member")
	for _, env := range file.Settings {
		env["DATABASE_URL"] = db
	}
	servers := hubstest.StartEnvironments(t, file.Settings)
	tokenOf := func(s *hubstest.Server) string {
		return hubstest.Token{}.Sign(s.Env["SESSION_SECRET"], "<email>", email, "<userId>", id)
	}
	expiredPayload := `{"email":"<email>","userId":"<userId>","iat":<now-3600>,"exp":<now-60>}`
	expiredOf := func(s *hubstest.Server) string {
		return hubstest.Token{Payload: &expiredPayload}.Sign(s.Env["SESSION_SECRET"],
			"<email>", email, "<userId>", id)
	}

	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			other := hubstest.Named(t, servers, cmp.Or(c.Other, "production"))
			s := hubstest.Named(t, servers, c.Server)
			words := []string{
				"<token>", tokenOf(s),
				"<expired>", expiredOf(s),
				"<other>", tokenOf(other),
			}
			headers := []string{"X-Forwarded-For", hubstest.NewIP()}
			for _, text := range c.Headers {
				headers = append(headers, hubstest.FillIn(text, words...))
			}
			target := hubstest.FillIn(cmp.Or(c.Target, "/auth/session"), words...)
			s.Wire(t, "GET "+target, nil, headers...).WantAnswer(t, c.Expect)
		})
	}
}

// sessionLife is the Max-Age of the cookie, and the life of the token in it.
const sessionLife = 60 * 24 * time.Hour

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
				cookie := hubstest.FillIn(test.cookie, "<token>", token, "<age>", age)
				r.WantHeaders(t, map[string]*string{"Set-Cookie": &cookie})
			}

			in := c.SignIn(email)
			token := c.Token()
			wantCookie(in, token, fmt.Sprintf("%.0f", sessionLife.Seconds()))

			out := c.Do("POST /auth/logout", nil).Must(t, 204)
			wantCookie(out, "", "0")
			wantEqual(t, "token in the jar after sign-out", c.Token(), "")
			s.With(t, token).Get("/auth/session").Want(t, 200)
		})
	}
}

// T5, S1: A change of an account takes effect at the next request of each session that began before
// the change, and at a sign-in with a code that was sent before it.
func TestSessionFollowsAccount(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	file := hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		Role     string
		Commands []string
		Validate hubstest.Expected
		NextCode bool
	}](t, "accounts.json")

	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			one, email := s.Member(t, cmp.Or(c.Role, "admin"))
			other := s.SignIn(t, email)
			other.AskCode(email)
			code := s.Code(t, email)
			for _, command := range c.Commands {
				command = hubstest.FillIn(command, "<email>", email)
				s.User(t, strings.Fields(command)...)
			}

			for _, client := range []*hubstest.Client{one, other} {
				client.Do("POST /hubs", `{"name":"North"}`).WantAnswer(t, c.Expect)
			}
			r := s.Client(t).PresentCode(email, code)
			r.WantAnswer(t, c.Validate)
			if c.Validate.Code == "account_suspended" {
				// The right code proves that the attempt is the user's own, so the log has the id.
				waitLogged(t, s, r, `"msg":"refused"`, `"userId"`)
			}
			if c.Validate.Status != 200 && r.Header.Get("Set-Cookie") != "" {
				t.Errorf("got a cookie, want none with a refused sign-in: %v", r)
			}
			if c.NextCode {
				s.Client(t).SignIn(email)
			}
		})
	}
}

// T5: "Sign out everywhere" ends every session that began before it, or in the same second, and no
// session that began in a later second.
func TestSignOutIsExactToTheSecond(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, userID := s.NewUser(t, "member")
	issued := time.Now().Add(-time.Minute).Truncate(time.Second)
	c := s.With(t, hubstest.Token{}.Sign(s.Env["SESSION_SECRET"],
		"<email>", email, "<userId>", userID, "<now>", fmt.Sprint(issued.Unix())))

	for signedOut, status := range map[time.Duration]int{ // after the token's iat
		-time.Microsecond:              200,
		0:                              401,
		time.Second - time.Microsecond: 401,
	} {
		hubstest.Exec(t, s.Database, "update users set signed_out_at = $1", issued.Add(signedOut))
		got := c.Get("/auth/session")
		wantEqual(t, fmt.Sprint("signed out ", signedOut, " after the start"), got.Status, status)
	}
}

// T1, T5: A token has exactly these four claims. Its times are whole seconds: exp is the time in the
// answer, and iat is the time of the sign-in by the database's clock, which also dates a "sign out
// everywhere". So the server knows which of them was first, although its own clock is an hour off.
func TestSessionsAreDatedByTheDatabase(t *testing.T) {
	t.Parallel()
	const shift = time.Hour
	// PostgreSQL takes clock_timestamp from the first schema in search_path that has it.
	database := hubstest.NewDatabase(t)
	hubstest.Exec(t, database, "create schema shifted; grant usage on schema shifted to public")
	hubstest.Exec(t, database, `create function shifted.clock_timestamp() returns timestamptz
		language sql return pg_catalog.clock_timestamp() + interval '1 hour'`)
	shifted := database + "&search_path=shifted,pg_catalog,public"
	s := hubstest.Start(t, map[string]string{"DATABASE_URL": shifted})
	email, userID := s.NewUser(t, "member")

	c := s.Client(t)
	view := c.SignIn(email)
	c.Get("/auth/session").Want(t, 200)
	header, claims := hubstest.ReadToken(t, c.Token())
	wantEqual(t, "header", header, map[string]any{
		"alg": "HS256",
		"typ": "JWT",
	})
	expires := timeOf(t, view, "expiresAt")
	issued := expires.Add(-sessionLife)
	wantNow(t, "the token's start, less the difference of the clocks", issued.Add(-shift))
	wantEqual(t, "claims", claims, map[string]any{
		"email":  email,
		"userId": userID,
		"iat":    float64(issued.Unix()),
		"exp":    float64(expires.Unix()),
	})
	wantEqual(t, "whole seconds", expires, expires.Truncate(time.Second))
	s.User(t, "signout", email)
	c.Get("/auth/session").Want(t, 401)
}

// W1: A client can't keep its rights by withholding the end of a body: the account is read after
// the body has arrived.
func TestAccountIsReadAfterTheBody(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	for command, status := range map[string]int{
		"role <email> member": 403,
		"suspend <email>":     403,
		"signout <email>":     401,
		"delete <email>":      401,
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			c, email := s.Member(t, "admin")
			body := `{"name":"withheld"}`
			head := c.Head("POST /hubs",
				"Content-Type", "application/json",
				"Content-Length", fmt.Sprint(len(body)),
				"Expect", "100-continue")
			conn := hubstest.Dial(t, s.Addr)
			// The status 100 shows that the server has begun to read the body.
			conn.Send(t, head).Must(t, 100)
			io.WriteString(conn, body[:5])
			line := hubstest.FillIn(command, "<email>", email)
			s.User(t, strings.Fields(line)...)
			conn.Finish(t, body[5:]).Want(t, status)
		})
	}
}

// newcomer returns a client of a new admin who has not accepted the terms, the admin's id, and the
// current version of the terms.
func newcomer(t *testing.T, s *hubstest.Server) (c *hubstest.Client, userID, current string) {
	t.Helper()
	email, userID := s.NewUser(t, "admin")
	c = s.Client(t)
	view := c.SignIn(email)
	return c, userID, view.Field(t, "terms.version")
}

// accept sends an acceptance of a version of the terms.
func accept(c *hubstest.Client, version string) *hubstest.Response {
	return c.Do("POST /terms/acceptance", map[string]string{"version": version})
}

// Only an acceptance of the current version of the terms counts. No other version can be accepted,
// and an acceptance that an older or newer release has recorded does not count. A user who accepts
// the terms again, at the same time or later, gets the time of the first acceptance.
func TestOnlyTheCurrentTermsCount(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, userID, current := newcomer(t, s)
	for _, version := range []string{"2026-10-31", current + " ", "9999-01-01", "x"} {
		accept(c, version).WantProblem(t, 409, "conflict")
		hubstest.Exec(t, s.Database,
			"insert into terms_acceptances (user_id, version) values ($1, $2)", userID, version)
		wantTerms(t, c, false)
	}
	answers := make(chan string, 2)
	for range 2 {
		go func() {
			answers <- string(accept(c, current).Body)
		}()
	}
	first := <-answers
	second := <-answers
	later := accept(c, current).Must(t, 200)
	wantEqual(t, "accepted at the same time", second, first)
	wantEqual(t, "accepted again later", string(later.Body), first)
	later.WantField(t, "version", current)
	wantNow(t, "acceptedAt", timeOf(t, later, "acceptedAt"))
	wantTerms(t, c, true)
	// After a release with new terms, the accepted version is no longer the current one.
	hubstest.Exec(t, s.Database,
		"update terms_acceptances set version = '2025-01-01' where version = $1", current)
	wantTerms(t, c, false)
	c.AcceptTerms()
	wantTerms(t, c, true)
}

// wantTerms checks that the session says whether the terms are accepted, and that the user may read
// hubs only then.
func wantTerms(t *testing.T, c *hubstest.Client, accepted bool) {
	t.Helper()
	view := c.Get("/auth/session").Must(t, 200)
	view.WantField(t, "terms.accepted", accepted)
	status := 403
	if accepted {
		status = 200
	}
	c.Get("/hubs").Want(t, status)
}
