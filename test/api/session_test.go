package api

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// T1, T2, T4, T5, T9: A token that this server would not have issued, or that has expired or ended,
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
	life := sessionLife(t, s.Client(t).SignIn(users["active"].email))
	s.User(t, "suspend", users["suspended"].email)
	hubstest.Exec(t, s.Database, `update users
		set signed_out_at = now() - interval '100 s' where user_id = $1`, users["signedOut"].id)

	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			key := hubstest.Named(t, file.Keys, cmp.Or(c.Key, "first"))
			user := hubstest.Named(t, users, cmp.Or(c.User, "active"))
			token := c.Sign(key, tokenWords(user, users["other"], life)...)
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
}

// An account is a user of tokens.json.
type account struct{ email, id string }

// tokenWords returns the words of tokens.json with their values. life is how long a session lasts.
func tokenWords(user, other account, life time.Duration) []string {
	return []string{
		"<user>", fmt.Sprintf(`"email":%q,"userId":%q`, user.email, user.id),
		"<times>", `"iat":<now>,"exp":<now+3600>`,
		"<life>", fmt.Sprint(int(life.Seconds())),
		"<email>", user.email,
		"<userId>", user.id,
		"<EMAIL>", strings.ToUpper(user.email),
		"<USERID>", strings.ToUpper(user.id),
		"<other.email>", other.email,
		"<other.userId>", other.id,
	}
}

// T8: The server takes the token only from the cookie of its own environment. A token in another
// cookie or in another place of the request, or a token of another environment, opens no session.
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

	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			other := hubstest.Named(t, servers, cmp.Or(c.Other, "production"))
			s := hubstest.Named(t, servers, c.Server)
			words := []string{
				"<token>", tokenOf(s),
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
			name:   "prefix", // of a deployment that shares a domain with another one
			env:    map[string]string{"COOKIE_PREFIX": "acme"},
			cookie: "acme_auth_local=<token>; Path=/; Max-Age=<age>; HttpOnly; SameSite=Lax",
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
			wantCookie(in, token, "5184000") // 60 days

			out := c.Do("POST /auth/logout", nil).Must(t, 204)
			wantCookie(out, "", "0")
			wantEqual(t, "token in the jar after sign-out", c.Token(), "")
			s.With(t, token).Get("/auth/session").Want(t, 200)
		})
	}
}

// sessionLife returns the Max-Age of the cookie in the answer to a sign-in.
func sessionLife(t *testing.T, answer *hubstest.Response) time.Duration {
	t.Helper()
	cookie, err := http.ParseSetCookie(answer.Header.Get("Set-Cookie"))
	hubstest.Must(t, err)
	return time.Duration(cookie.MaxAge) * time.Second
}

// T1: A token has exactly these four claims. Its times are exact to the microsecond: iat is the
// time of the sign-in, and exp is the time in the answer.
func TestTokenHasFourClaims(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, userID := s.NewUser(t, "admin")
	c := s.Client(t)
	view := c.SignIn(email)
	header, claims := hubstest.ReadToken(t, c.Token())
	wantEqual(t, "header", header, map[string]any{
		"alg": "HS256",
		"typ": "JWT",
	})
	expires := timeOf(t, view, "expiresAt")
	issued := expires.Add(-sessionLife(t, view))
	wantNow(t, "the token's start", issued)
	wantEqual(t, "claims", claims, map[string]any{
		"email":  email,
		"userId": userID,
		"iat":    float64(issued.UnixMicro()) / 1e6,
		"exp":    float64(expires.UnixMicro()) / 1e6,
	})
}

// The first key in SESSION_SECRET signs new tokens, and every key in it verifies tokens. A token
// whose key is no longer in SESSION_SECRET is a 401.
func TestFirstKeySignsAllVerify(t *testing.T) {
	t.Parallel()
	const older = "the-older-key-of-thirty-two-bytes"
	const newer = "the-newer-key-of-thirty-two-bytes"
	// before, during and after are the servers of a change from the older key to the newer one.
	before := hubstest.Start(t, map[string]string{"SESSION_SECRET": older})
	email, _ := before.NewUser(t, "member")
	withKeys := func(keys string) *hubstest.Server {
		return hubstest.Start(t, before.Env, map[string]string{"SESSION_SECRET": keys})
	}
	during := withKeys(newer + "," + older)
	after := withKeys(newer)
	oldToken := before.SignIn(t, email).Token()
	newToken := during.SignIn(t, email).Token()
	wantSession := func(s *hubstest.Server, token string, status int) {
		t.Helper()
		s.With(t, token).Get("/auth/session").Want(t, status)
	}
	wantSession(during, oldToken, 200)
	wantSession(after, oldToken, 401)
	wantSession(before, newToken, 401)
	wantSession(during, newToken, 200)
	wantSession(after, newToken, 200)
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

// T5: "Sign out everywhere" is exact to the microsecond. It ends every session that began before
// it, even in the same second, and no session that began at the same microsecond or later.
func TestSignOutIsExact(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, userID := s.NewUser(t, "member")
	start := time.Now().Add(-time.Minute).UnixMicro()
	for round := range int64(20) {
		issued := start + round*47_111 // another fraction of a second in each round
		payload := hubstest.FillIn(
			`{"email":"<email>","userId":"<userId>","iat":<iat>,"exp":<now+1000>}`,
			"<email>", email,
			"<userId>", userID,
			"<iat>", fmt.Sprintf("%.6f", float64(issued)/1e6))
		c := s.With(t, hubstest.Forge(s.Env["SESSION_SECRET"], payload))
		// signOut sets the time of the sign-out, in microseconds after the start of the session.
		signOut := func(later int64) *hubstest.Response {
			hubstest.Exec(t, s.Database, `update users set signed_out_at =
				'epoch'::timestamptz + $1 * interval '1 microsecond'`, issued+later)
			return c.Get("/auth/session")
		}
		what := fmt.Sprintf("issued at %d µs, signed out ", issued)
		wantEqual(t, what+"1 µs before", signOut(-1).Status, 200)
		wantEqual(t, what+"then", signOut(0).Status, 200)
		wantEqual(t, what+"1 µs later", signOut(1).Status, 401)
	}
}

// shiftedClock starts a server whose database has a clock that is ahead by shift, an interval of
// PostgreSQL such as "30 seconds". restore corrects the clock.
func shiftedClock(t *testing.T, shift string) (s *hubstest.Server, restore func()) {
	t.Helper()
	database := hubstest.NewDatabase(t)
	hubstest.Exec(t, database, "create schema shifted; grant usage on schema shifted to public")
	hubstest.Exec(t, database, `create function shifted.clock_timestamp() returns timestamptz
		language sql return pg_catalog.clock_timestamp() + interval '`+shift+`'`)
	// PostgreSQL takes clock_timestamp from the first schema in search_path that has it.
	shifted := database + "&search_path=shifted,pg_catalog,public"
	s = hubstest.Start(t, map[string]string{"DATABASE_URL": shifted})
	return s, func() {
		hubstest.Exec(t, database, "drop function shifted.clock_timestamp()")
	}
}

// T5: The start of a session and the time of a "sign out everywhere" both come from the database's
// clock. So the server knows which of them was first, although its own clock differs.
func TestSessionsAreDatedByTheDatabase(t *testing.T) {
	t.Parallel()
	for _, shift := range []string{"-30 seconds", "30 seconds"} {
		t.Run(shift, func(t *testing.T) {
			t.Parallel()
			s, _ := shiftedClock(t, shift)
			email, _ := s.NewUser(t, "member")
			before := s.SignIn(t, email)
			before.Get("/auth/session").Want(t, 200)
			s.User(t, "signout", email)
			before.Get("/auth/session").Want(t, 401)
			s.SignIn(t, email).Get("/auth/session").Want(t, 200)
			_, claims := hubstest.ReadToken(t, before.Token())
			age := float64(time.Now().Unix()) - claims["iat"].(float64)
			if math.Abs(age) < 15 {
				t.Errorf("got a token issued %.0f s ago, want about 30 s before or after now: "+
					"the database's clock is not shifted", age)
			}
		})
	}
}

// T9: While the clocks of server and database are more than a minute apart, a sign-in is a 503, and
// the code stays valid. The log has the difference.
func TestSignInNeedsClocksThatAgree(t *testing.T) {
	t.Parallel()
	for shift, difference := range map[string]string{
		"-65 seconds": "the server's: -1m",
		"65 seconds":  "the server's: 1m",
	} {
		t.Run(shift, func(t *testing.T) {
			t.Parallel()
			s, restore := shiftedClock(t, shift)
			s.AllowErrorsWithAnyOf(difference)
			g := s.NewGuest(t)
			wantNoSession(t, g.Present(g.Code), 503, "unavailable")
			s.Log.WaitFor(t, "ERROR", difference)
			restore()
			g.Present(g.Code).Want(t, 200)
		})
	}
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
// and an acceptance that an older or newer release has recorded does not count.
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
	c.AcceptTerms()
	wantTerms(t, c, true)
	// After a release with new terms, the accepted version is no longer the current one.
	hubstest.Exec(t, s.Database,
		"update terms_acceptances set version = '2025-01-01' where version = $1", current)
	wantTerms(t, c, false)
	c.AcceptTerms()
	wantTerms(t, c, true)
}

// A user who accepts the terms again, at the same time or later, gets the time of the first
// acceptance.
func TestFirstAcceptanceIsKept(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _, current := newcomer(t, s)
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
}

// wantTerms checks that the session says whether the terms are accepted. If they are, an admin may
// read hubs. If not, reads and writes of hubs are a 403.
func wantTerms(t *testing.T, c *hubstest.Client, accepted bool) {
	t.Helper()
	view := c.Get("/auth/session").Must(t, 200)
	view.WantField(t, "terms.accepted", accepted)
	read := c.Get("/hubs")
	if accepted {
		read.Want(t, 200)
		return
	}
	read.WantProblem(t, 403, "terms_not_accepted")
	write := c.Do("POST /hubs", `{"name":"North"}`)
	write.WantProblem(t, 403, "terms_not_accepted")
}
