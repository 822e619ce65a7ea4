package api

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"net/url"
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
		User, Key, Reason string
	}](t, "tokens.json")
	s := hubstest.Start(t, map[string]string{
		"SESSION_SECRET": file.Keys["first"] + "," + file.Keys["second"],
	})
	db := s.Env["DATABASE_URL"]
	emails := map[string]string{}
	ids := map[string]string{}
	for _, name := range []string{"active", "other", "suspended", "signedOut"} {
		emails[name], ids[name] = s.NewUser(t, "member")
	}
	s.User(t, "suspend", emails["suspended"])
	hubstest.Exec(t, db, "update users set signed_out_at = now() - interval '100 s' where email = $1",
		emails["signedOut"])
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			key, known := file.Keys[cmp.Or(c.Key, "first")]
			user := cmp.Or(c.User, "active")
			if !known || ids[user] == "" {
				t.Fatalf("no key %q or no user %q", c.Key, c.User)
			}
			token := c.Sign(key,
				"<email>", emails[user],
				"<userId>", ids[user],
				"<EMAIL>", strings.ToUpper(emails[user]),
				"<USERID>", strings.ToUpper(ids[user]),
				"<other.email>", emails["other"],
				"<other.userId>", ids["other"])
			r := s.Wire(t, "GET", "/auth/session", nil,
				"X-Forwarded-For", hubstest.NewIP(), "Cookie", "hubs_auth_local="+token)
			c.Expect.Check(t, r)
			if r.Status == 401 && c.Reason != "any" {
				reason := cmp.Or(c.Reason, "forged")
				s.Log.WaitFor(t, `"reason":"`+reason+`"`, r.Header.Get("X-Request-Id"))
			}
			if r.Status == 200 && r.Field(t, "user", "userId") != ids[user] {
				t.Errorf("got the session of another user: %v", r)
			}
		})
	}
	r := s.Client(t).Get("/auth/session")
	s.Log.WaitFor(t, `"reason":"missing"`, r.Header.Get("X-Request-Id"))
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
	servers := hubstest.StartEnvironments(t, file.Settings, map[string]string{"DATABASE_URL": db})
	tokenOf := func(server string) string {
		secret := servers[server].Env["SESSION_SECRET"]
		return hubstest.Token{}.Sign(secret, "<email>", email, "<userId>", id)
	}
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			other := cmp.Or(c.Other, "production")
			words := []string{"<token>", tokenOf(c.Server), "<other>", tokenOf(other)}
			headers := []string{"X-Forwarded-For", hubstest.NewIP()}
			for _, text := range c.Headers {
				headers = append(headers, hubstest.FillIn(text, words...))
			}
			target := hubstest.FillIn(cmp.Or(c.Target, "/auth/session"), words...)
			c.Expect.Check(t, servers[c.Server].Wire(t, "GET", target, nil, headers...))
		})
	}
}

// T1, T6, T7: the cookie to the letter, that its clearing empties a jar, and that the token has
// nothing but its four claims, with times to the microsecond.
func TestCookieAndToken(t *testing.T) {
	t.Parallel()
	const (
		local    = "Path=/; Max-Age=%d; HttpOnly; SameSite=Lax"
		deployed = "Path=/; Domain=%s; Max-Age=%%d; HttpOnly; Secure; SameSite=Lax"
	)
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	for name, test := range map[string]struct {
		env        map[string]string
		cookie     string
		attributes string
	}{
		"local": {
			cookie:     "hubs_auth_local",
			attributes: local,
		},
		"prefix": {
			env:        map[string]string{"COOKIE_PREFIX": "acme"},
			cookie:     "acme_auth_local",
			attributes: local,
		},
		"staging": {
			env:        hubstest.StagingEnv(mail),
			cookie:     "__Secure-hubs_auth_staging",
			attributes: fmt.Sprintf(deployed, "staging.example.com"),
		},
		"production": {
			env:        hubstest.ProductionEnv(mail),
			cookie:     "__Secure-hubs_auth_production",
			attributes: fmt.Sprintf(deployed, "example.com"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := hubstest.Start(t, test.env)
			email, userID := s.NewUser(t, "admin")
			c := s.Client(t)
			view := c.SignIn(email)
			token := c.Token()
			set := fmt.Sprintf(test.cookie+"="+token+"; "+test.attributes, 60*24*60*60)
			hubstest.WantHeaders(t, view, map[string]*string{"Set-Cookie": &set})
			wantClaims(t, token, view, email, userID)

			r := c.Do("POST", "/auth/logout", nil).Want(t, 204)
			clear := fmt.Sprintf(test.cookie+"=; "+test.attributes, 0)
			hubstest.WantHeaders(t, r, map[string]*string{"Set-Cookie": &clear})
			if left := c.Token(); left != "" {
				t.Errorf("got the cookie %q after sign-out, want none", left)
			}
		})
	}
}

// wantClaims checks a token that was issued with the session view.
func wantClaims(t *testing.T, token string, view *hubstest.Response, email, userID string) {
	t.Helper()
	header, claims := hubstest.ReadToken(t, token)
	if want := map[string]any{"alg": "HS256", "typ": "JWT"}; !maps.Equal(header, want) {
		t.Errorf("got the header %v, want %v", header, want)
	}
	expires, err := time.Parse(time.RFC3339Nano, view.Field(t, "expiresAt").(string))
	if err != nil {
		t.Fatal(err)
	}
	issued := expires.AddDate(0, 0, -60)
	if age := time.Since(issued); age.Abs() > time.Minute {
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
	during := hubstest.Start(t, before.Env, map[string]string{"SESSION_SECRET": newer + "," + older})
	after := hubstest.Start(t, before.Env, map[string]string{"SESSION_SECRET": newer})
	email, _ := before.NewUser(t, "member")
	oldToken := before.SignIn(t, email).Token()
	newToken := during.SignIn(t, email).Token()

	wantStatus := func(s *hubstest.Server, token string, want int) {
		t.Helper()
		c := s.Client(t)
		c.SetToken(token)
		c.Get("/auth/session").Want(t, want)
	}
	wantStatus(during, oldToken, 200)
	wantStatus(after, oldToken, 401)
	wantStatus(before, newToken, 401)
	wantStatus(during, newToken, 200)
	wantStatus(after, newToken, 200)
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
				r := client.Do("POST", "/hubs", map[string]string{"name": "North"})
				c.Expect.Check(t, r)
			}
			r := s.Client(t).PresentCode(email, code)
			c.Validate.Check(t, r)
			if c.Validate.Code == "account_suspended" {
				// The code proves whose attempt it is, so the log may tell.
				s.Log.WaitFor(t, `"msg":"refused"`, `"userId"`, r.Header.Get("X-Request-Id"))
			}
			if c.Validate.Status != 200 && r.Header.Get("Set-Cookie") != "" {
				t.Errorf("got a cookie with %v", r)
			}
		})
	}
}

// S1: a code that somebody else may have read is worth nothing once the operator has done what
// the runbook says. The user gets the next one without a minute to wait.
func TestSignOutEndsCodesInFlight(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, _ := s.NewUser(t, "member")
	thief := s.Client(t)
	thief.AskCode(email)
	code := s.Code(t, email)
	for _, command := range []string{"suspend", "signout", "activate"} {
		s.User(t, command, email)
	}
	wantNoSession(t, thief.PresentCode(email, code), 401, "invalid_code")
	s.SignIn(t, email)
}

// T5: "sign out everywhere" is exact to the microsecond, both ways: it spares no older session
// that began in the same second, and ends no later one.
func TestSignOutIsExact(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	db := s.Env["DATABASE_URL"]
	email, userID := s.NewUser(t, "member")
	start := time.Now().Add(-time.Minute).UnixMicro()
	for round := range int64(20) {
		issued := start + round*47_111 // so many different fractions of a second
		c := s.Client(t)
		c.SetToken(hubstest.Forge(s.Env["SESSION_SECRET"], hubstest.FillIn(
			`{"email":"<email>","userId":"<userId>","iat":<iat>,"exp":<now+1000>}`,
			"<email>", email, "<userId>", userID, "<iat>", fmt.Sprintf("%.6f", float64(issued)/1e6))))
		for shift, want := range map[int64]int{-1: 200, 0: 200, 1: 401} {
			hubstest.Exec(t, db, `update users set signed_out_at =
				'epoch'::timestamptz + $2 * interval '1 microsecond' where email = $1`,
				email, issued+shift)
			if got := c.Get("/auth/session").Status; got != want {
				t.Errorf("issued at %d, signed out %+d µs: got %d, want %d", issued, shift, got, want)
			}
		}
	}
}

// shiftedClock returns the URL of a new database whose clock differs.
func shiftedClock(t *testing.T, shift string) (databaseURL, direct string) {
	t.Helper()
	direct = hubstest.NewDatabase(t)
	hubstest.Exec(t, direct, "create schema shifted")
	hubstest.Exec(t, direct, `create function shifted.clock_timestamp() returns timestamptz
		language sql return pg_catalog.clock_timestamp() + interval '`+shift+`'`)
	u, err := url.Parse(direct)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	query.Set("search_path", "shifted, pg_catalog, public") // of two functions, the first
	u.RawQuery = query.Encode()
	return u.String(), direct
}

// T5: a session is dated by the database's clock, as "sign out everywhere" is. So the two are
// in their order although the clocks of server and database differ.
func TestSessionsAreDatedByTheDatabase(t *testing.T) {
	t.Parallel()
	for _, shift := range []string{"-30 seconds", "30 seconds"} {
		t.Run(shift, func(t *testing.T) {
			t.Parallel()
			database, _ := shiftedClock(t, shift)
			s := hubstest.Start(t, map[string]string{"DATABASE_URL": database})
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
		"-90 seconds": "the database's clock is -1m",
		"90 seconds":  "the database's clock is 1m",
	} {
		t.Run(shift, func(t *testing.T) {
			t.Parallel()
			database, direct := shiftedClock(t, shift)
			s := hubstest.Start(t, map[string]string{"DATABASE_URL": database})
			s.AllowErrors(apart)
			s.Log.WaitFor(t, "WARN", apart, " ahead of this server's")
			email, _ := s.NewUser(t, "member")
			c := s.Client(t)
			c.AskCode(email)
			code := s.Code(t, email)
			wantNoSession(t, c.PresentCode(email, code), 503, "unavailable")
			s.Log.WaitFor(t, "ERROR", apart, " ahead of this server's")
			hubstest.Exec(t, direct, "drop function shifted.clock_timestamp()")
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
			s.User(t, strings.Fields(hubstest.FillIn(command, "<email>", email))...)
			conn.Exchange(t, body[5:], status)
		})
	}
}

// The terms: the gate before, the first time kept, and no other version counts.
func TestTerms(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	db := s.Env["DATABASE_URL"]
	email, userID := s.NewUser(t, "admin")
	c := s.Client(t)
	current := c.SignIn(email).Field(t, "terms", "version").(string)
	accept := func(version string) *hubstest.Response {
		return c.Do("POST", "/terms/acceptance", map[string]string{"version": version})
	}
	wantAccepted := func(want bool) {
		t.Helper()
		got := c.Get("/auth/session").Want(t, 200).Field(t, "terms", "accepted")
		if got != want {
			t.Errorf("accepted: got %v, want %v", got, want)
		}
		if want {
			c.Get("/hubs").Want(t, 200)
			return
		}
		hubstest.WantProblem(t, c.Get("/hubs"), 403, "terms_not_accepted")
		r := c.Do("POST", "/hubs", map[string]string{"name": "North"})
		hubstest.WantProblem(t, r, 403, "terms_not_accepted")
	}
	for _, version := range []string{"2026-10-31", current + " ", "9999-01-01", "x"} {
		hubstest.WantProblem(t, accept(version), 409, "conflict")
		// One that another release has recorded does not count either.
		hubstest.Exec(t, db, "insert into terms_acceptances (user_id, version) values ($1, $2)",
			userID, version)
		wantAccepted(false)
	}

	answers := make(chan string, 2) // two at once: one time
	for range 2 {
		go func() { answers <- string(accept(current).Body) }()
	}
	first := <-answers
	for _, again := range []string{<-answers, string(accept(current).Want(t, 200).Body)} {
		if again != first {
			t.Errorf("accepted again: got %s, want %s", again, first)
		}
	}
	begin := `{"version":"` + current + `","acceptedAt":"` + time.Now().UTC().Format("2006-")
	if !strings.HasPrefix(first, begin) {
		t.Errorf("got %s, want %s…", first, begin)
	}
	wantAccepted(true)
	// To raise the version turns what was accepted into another version.
	hubstest.Exec(t, db, "update terms_acceptances set version = '2025-01-01' where version = $1",
		current)
	wantAccepted(false)
	accept(current).Want(t, 200)
	wantAccepted(true)
}
