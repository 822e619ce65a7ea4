package api

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// T1, T2, T4, T5: what is not exactly a token of this server, of now, is none.
func TestForgedTokens(t *testing.T) {
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
	emails := map[string]string{}
	ids := map[string]string{}
	for _, name := range []string{"active", "other", "suspended", "signedOut"} {
		emails[name], ids[name] = s.NewUser(t, "member")
	}
	life := sessionLife(t, s.Client(t).SignIn(emails["active"]))
	s.User(t, "suspend", emails["suspended"])
	hubstest.Exec(t, s.Database, `update users
		set signed_out_at = now() - interval '100 s' where user_id = $1`, ids["signedOut"])
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			key, isKey := file.Keys[cmp.Or(c.Key, "first")]
			user := cmp.Or(c.User, "active")
			email := emails[user]
			id := ids[user]
			if !isKey || email == "" {
				t.Fatalf("no key %q or no user %q", c.Key, c.User)
			}
			token := c.Sign(key,
				"<user>", fmt.Sprintf(`"email":%q,"userId":%q`, email, id),
				"<times>", `"iat":<now>,"exp":<now+3600>`,
				"<life>", fmt.Sprint(int(life.Seconds())),
				"<email>", email,
				"<userId>", id,
				"<EMAIL>", strings.ToUpper(email),
				"<USERID>", strings.ToUpper(id),
				"<other.email>", emails["other"],
				"<other.userId>", ids["other"])
			r := s.Wire(t, "GET", "/auth/session", nil,
				"X-Forwarded-For", hubstest.NewIP(),
				"Cookie", s.CookieName()+"="+token)
			c.Expect.Check(t, r)
			if r.Status == 401 && c.Reason != "any" {
				wantLogged(t, s, r,
					`"reason":"`+cmp.Or(c.Reason, "forged")+`"`)
			}
			if r.Status == 200 && r.Field(t, "user", "userId") != id {
				t.Errorf("got the session of another user: %v", r)
			}
		})
	}
	none := s.Client(t).Get("/auth/session")
	wantLogged(t, s, none, `"reason":"missing"`)
}

// T6, T8: a session is in the one cookie of its environment, and nowhere else.
func TestCookieName(t *testing.T) {
	t.Parallel()
	file := hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		Server, Other, Target string
		Headers               []string
	}](t, "cookies.json")
	db := hubstest.NewDatabase(t)
	email := hubstest.NewEmail()
	id := hubstest.AddUser(t, db, email, "member")
	servers := hubstest.StartEnvironments(t, file.Settings,
		map[string]string{"DATABASE_URL": db})
	tokenOf := func(server string) string {
		secret := servers[server].Env["SESSION_SECRET"]
		return hubstest.Token{}.Sign(secret,
			"<email>", email,
			"<userId>", id)
	}
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			other := cmp.Or(c.Other, "production")
			words := []string{
				"<token>", tokenOf(c.Server),
				"<other>", tokenOf(other),
			}
			headers := []string{"X-Forwarded-For", hubstest.NewIP()}
			for _, text := range c.Headers {
				headers = append(headers, hubstest.FillIn(text, words...))
			}
			target := hubstest.FillIn(cmp.Or(c.Target, "/auth/session"), words...)
			r := servers[c.Server].Wire(t, "GET", target, nil, headers...)
			c.Expect.Check(t, r)
		})
	}
}

// T6, T7, T8: the cookie to the letter when it is set and when it is cleared, which empties a jar.
func TestSessionCookie(t *testing.T) {
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
				hubstest.WantHeaders(t, r, map[string]*string{"Set-Cookie": &cookie})
			}

			in := c.SignIn(email)
			wantCookie(in, c.Token(), "5184000") // 60 days

			out := c.Send("POST /auth/logout", nil).Want(t, 204)
			wantCookie(out, "", "0")
			if left := c.Token(); left != "" {
				t.Errorf("got the cookie %q after sign-out, want none", left)
			}
		})
	}
}

// sessionLife returns the life of the cookie of a sign-in.
func sessionLife(t *testing.T, view *hubstest.Response) time.Duration {
	t.Helper()
	cookie, err := http.ParseSetCookie(view.Header.Get("Set-Cookie"))
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(cookie.MaxAge) * time.Second
}

// T1: the token has four claims and no more. Its times are to the microsecond, it begins now, and
// ends when the answer says.
func TestTokenClaims(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, userID := s.NewUser(t, "admin")
	c := s.Client(t)
	view := c.SignIn(email)
	header, claims := hubstest.ReadToken(t, c.Token())
	wantHeader := map[string]any{
		"alg": "HS256",
		"typ": "JWT",
	}
	if !maps.Equal(header, wantHeader) {
		t.Errorf("got the header %v, want %v", header, wantHeader)
	}
	end := view.Field(t, "expiresAt").(string)
	expires, err := time.Parse(time.RFC3339Nano, end)
	if err != nil {
		t.Fatal(err)
	}
	issued := expires.Add(-sessionLife(t, view))
	age := time.Since(issued)
	if age.Abs() > time.Minute {
		t.Errorf("got a token of %v ago, want one of now", age)
	}
	want := map[string]any{
		"email":  email,
		"userId": userID,
		"iat":    float64(issued.UnixMicro()) / 1e6,
		"exp":    float64(expires.UnixMicro()) / 1e6,
	}
	if !maps.Equal(claims, want) {
		t.Errorf("got the claims %v, want %v", claims, want)
	}
}

// The rotation of keys: the first signs, all verify, one that is gone does not.
func TestSessionKeys(t *testing.T) {
	t.Parallel()
	const older = "the-older-key-of-thirty-two-bytes"
	const newer = "the-newer-key-of-thirty-two-bytes"
	before := hubstest.Start(t, map[string]string{"SESSION_SECRET": older})
	email, _ := before.NewUser(t, "member")
	withKeys := func(keys string) *hubstest.Server {
		return hubstest.Start(t, before.Env,
			map[string]string{"SESSION_SECRET": keys})
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

// T5, S1: what happens to an account shows at the next request of a session that began before,
// and in what a code is worth that was made before.
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
				r := client.Send("POST /hubs", `{"name":"North"}`)
				c.Expect.Check(t, r)
			}
			r := s.Client(t).PresentCode(email, code)
			c.Validate.Check(t, r)
			if c.Validate.Code == "account_suspended" {
				// The code proves whose attempt it is, so the log may tell.
				wantLogged(t, s, r, `"msg":"refused"`, `"userId"`)
			}
			if c.Validate.Status != 200 && r.Header.Get("Set-Cookie") != "" {
				t.Errorf("got a cookie with %v", r)
			}
			if c.NextCode {
				s.SignIn(t, email)
			}
		})
	}
}

// T5: "sign out everywhere" is exact to the microsecond, both ways: it spares no older session
// that began in the same second, and ends no later one.
func TestSignOutIsExact(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, userID := s.NewUser(t, "member")
	start := time.Now().Add(-time.Minute).UnixMicro()
	for round := range int64(20) {
		issued := start + round*47_111 // so many different fractions of a second
		payload := hubstest.FillIn(
			`{"email":"<email>","userId":"<userId>","iat":<iat>,"exp":<now+1000>}`,
			"<email>", email,
			"<userId>", userID,
			"<iat>", fmt.Sprintf("%.6f", float64(issued)/1e6))
		c := s.With(t, hubstest.Forge(s.Env["SESSION_SECRET"], payload))
		for shift, want := range map[int64]int{
			-1: 200,
			0:  200,
			1:  401,
		} {
			hubstest.Exec(t, s.Database, `update users set signed_out_at =
				'epoch'::timestamptz + $1 * interval '1 microsecond'`, issued+shift)
			got := c.Get("/auth/session").Status
			if got != want {
				t.Errorf("issued at %d, signed out %+d µs: got %d, want %d", issued, shift, got, want)
			}
		}
	}
}

// shiftedClock starts a server whose database has another clock, until restore is called.
func shiftedClock(
	t *testing.T, shift string,
) (s *hubstest.Server, restore func()) {
	t.Helper()
	database := hubstest.NewDatabase(t)
	hubstest.Exec(t, database, "create schema shifted")
	hubstest.Exec(t, database, `create function shifted.clock_timestamp() returns timestamptz
		language sql return pg_catalog.clock_timestamp() + interval '`+shift+`'`)
	// Of two functions of one name, PostgreSQL takes the first.
	shifted := database + "&search_path=shifted,pg_catalog,public"
	s = hubstest.Start(t, map[string]string{"DATABASE_URL": shifted})
	return s, func() {
		hubstest.Exec(t, database, "drop function shifted.clock_timestamp()")
	}
}

// T5: a session is dated by the database's clock, as "sign out everywhere" is. So the two are
// in their order although the clocks of server and database differ.
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
				t.Errorf("got a token of %.0f seconds ago: the clock is not shifted", age)
			}
		})
	}
}

// T9: clocks more than a minute apart let nobody sign in, since each token would be refused.
// The log says how far, at the start and at each attempt. The code stays good.
func TestClocksApart(t *testing.T) {
	t.Parallel()
	for shift, apart := range map[string]string{
		"-95 seconds": "minus this server's is -9", // 90 to 99 s
		"95 seconds":  "minus this server's is 9",
	} {
		t.Run(shift, func(t *testing.T) {
			t.Parallel()
			s, restore := shiftedClock(t, shift)
			s.AllowErrors(apart)
			s.Log.WaitFor(t, "WARN", apart)
			email, _ := s.NewUser(t, "member")
			c := s.Client(t)
			c.AskCode(email)
			code := s.Code(t, email)
			wantNoSession(t, c.PresentCode(email, code), 503, "unavailable")
			s.Log.WaitFor(t, "ERROR", apart)
			restore()
			hubstest.WaitUntil(t, "sign-in", func() bool {
				return c.Elsewhere().PresentCode(email, code).Status == 200
			})
		})
	}
}

// T5: a write is decided by the account as it is when its body has arrived: whoever withholds
// the body keeps no rights by it.
func TestWithheldBodyOutlivesNoRights(t *testing.T) {
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
			head := c.Head("POST /hubs", "Content-Type: application/json",
				fmt.Sprint("Content-Length: ", len(body)), "Expect: 100-continue")
			conn := hubstest.Dial(t, s.Addr)
			// The server asks for the body, so it has begun to read.
			conn.Exchange(t, head+"\r\n", 100)
			io.WriteString(conn, body[:5])
			line := hubstest.FillIn(command, "<email>", email)
			s.User(t, strings.Fields(line)...)
			conn.Exchange(t, body[5:], status)
		})
	}
}

// newcomer returns a client of an admin who has accepted no terms, and the current version.
func newcomer(t *testing.T, s *hubstest.Server) (c *hubstest.Client, userID, current string) {
	t.Helper()
	email, userID := s.NewUser(t, "admin")
	c = s.Client(t)
	view := c.SignIn(email)
	return c, userID, view.Field(t, "terms", "version").(string)
}

func accept(c *hubstest.Client, version string) *hubstest.Response {
	return c.Send("POST /terms/acceptance",
		map[string]string{"version": version})
}

// Only the current version of the terms opens the gate: not one that was never current, nor one
// that another release has recorded, older or newer.
func TestOnlyTheCurrentTermsCount(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, userID, current := newcomer(t, s)
	for _, version := range []string{"2026-10-31", current + " ", "9999-01-01", "x"} {
		hubstest.WantProblem(t, accept(c, version), 409, "conflict")
		hubstest.Exec(t, s.Database,
			"insert into terms_acceptances (user_id, version) values ($1, $2)", userID, version)
		wantTerms(t, c, false)
	}
	c.AcceptTerms()
	wantTerms(t, c, true)
	// To raise the version turns what was accepted into another version.
	hubstest.Exec(t, s.Database,
		"update terms_acceptances set version = '2025-01-01' where version = $1", current)
	wantTerms(t, c, false)
	c.AcceptTerms()
	wantTerms(t, c, true)
}

// Who accepts the terms again, at once or later, gets the time of the first acceptance.
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
	later := accept(c, current).Want(t, 200)
	if second != first || string(later.Body) != first {
		t.Errorf("accepted again: got %s and %s, want %s", second, later.Body, first)
	}
	year := time.Now().UTC().Format("2006-")
	begin := `{"version":"` + current + `","acceptedAt":"` + year
	if !strings.HasPrefix(first, begin) {
		t.Errorf("got %s, want %s…", first, begin)
	}
}

// wantTerms checks what an admin may do with the terms accepted, or without.
func wantTerms(t *testing.T, c *hubstest.Client, accepted bool) {
	t.Helper()
	session := c.Get("/auth/session").Want(t, 200)
	got := session.Field(t, "terms", "accepted")
	if got != accepted {
		t.Errorf("accepted: got %v, want %v", got, accepted)
	}
	if accepted {
		c.Get("/hubs").Want(t, 200)
		return
	}
	hubstest.WantProblem(t, c.Get("/hubs"), 403, "terms_not_accepted")
	made := c.Send("POST /hubs", `{"name":"North"}`)
	hubstest.WantProblem(t, made, 403, "terms_not_accepted")
}
