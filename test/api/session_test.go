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

// An accountCase is what an operator does to the account of a user who has two sessions and has asked
// for a code.
type accountCase struct {
	Name, Rule string
	Role       string   // "" means admin
	Commands   []string // of hubs user; <email> is the user's address
	Want       answer   // to POST /hubs after that, by each of the sessions
	Validate   answer   // to the code
	NextCode   bool     // the user can ask for another code at once
}

// T5, S1: A change of an account takes effect at the next request of each session that began before
// the change, and at a sign-in with a code that was sent before it.
func TestSessionFollowsAccount(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	runCases(t, accountCases, func(t *testing.T, c accountCase) {
		t.Parallel()
		one, email := s.Member(t, cmp.Or(c.Role, "admin"))
		other := s.SignIn(t, email)
		other.AskCode(email)
		code := s.Code(t, email)
		for _, command := range c.Commands {
			command = fillIn(command, "<email>", email)
			s.User(t, strings.Fields(command)...)
		}

		for _, client := range []*hubstest.Client{one, other} {
			wantAnswer(t, client.Do("POST /hubs", `{"name":"North"}`), c.Want)
		}
		r := s.Client(t).PresentCode(email, code)
		wantAnswer(t, r, c.Validate)
		if c.Validate.Code == "account_suspended" {
			// The right code proves that the attempt is the user's own, so the log has the id.
			waitLogged(t, s, r, `"msg":"refused"`, `"userId"`)
			// It is used up: it does not wait until the account is active again (O3).
			s.User(t, "activate", email)
			s.Client(t).PresentCode(email, code).WantProblem(t, 401, "invalid_code")
		}
		if c.Validate.Status != 200 && r.Header.Get("Set-Cookie") != "" {
			t.Errorf("got a cookie, want none with a refused sign-in: %v", r)
		}
		if c.NextCode {
			s.Client(t).SignIn(email)
		}
	})
}

var accountCases = []group[accountCase]{
	// An active account: its sessions have its current role.
	{Each: accountCase{Rule: "T5"}, Cases: []accountCase{
		{Name: "nothing", Validate: ok, Want: answer{Status: 201}},
		{Name: "made an admin", Role: "member", Commands: []string{"role <email> admin"},
			Validate: answer{Status: 200, Body: values{"user.permission": "admin"}},
			Want:     answer{Status: 201}},
		{Name: "made a member", Commands: []string{"role <email> member"},
			Validate: answer{Status: 200, Body: values{"user.permission": "member"}},
			Want:     fails(403, "forbidden")},
	}},
	// A suspended account can do nothing until it is active again.
	{Each: accountCase{Rule: "T5"}, Cases: []accountCase{
		{Name: "suspended", Commands: []string{"suspend <email>"},
			Validate: fails(403, "account_suspended"), Want: fails(403, "account_suspended")},
		{Name: "suspended and activated", Commands: []string{"suspend <email>", "activate <email>"},
			Validate: ok, Want: answer{Status: 201}},
	}},
	// Changes that end all earlier sessions, and make the code invalid.
	{Each: accountCase{Rule: "T5", Want: fails(401, "unauthenticated")}, Cases: []accountCase{
		{Name: "deleted", Commands: []string{"delete <email>"}, Validate: fails(401, "invalid_code")},
		{Name: "deleted and added again",
			Commands: []string{"delete <email>", "add -role admin <email>"},
			Validate: fails(401, "invalid_code"), NextCode: true},
		{Name: "other address", Commands: []string{"email <email> other-<email>"},
			Validate: fails(401, "invalid_code")},
		{Name: "other address and back", Rule: "S1",
			Commands: []string{"email <email> other-<email>", "email other-<email> <email>"},
			Validate: fails(401, "invalid_code")},
		{Name: "signed out everywhere", Rule: "S1", Commands: []string{"signout <email>"},
			Validate: fails(401, "invalid_code")},
		{Name: "signed out and suspended: an ended session is not told of it",
			Commands: []string{"signout <email>", "suspend <email>"},
			Validate: fails(401, "invalid_code")},
		{Name: "suspended, signed out and activated, as after a stolen mailbox", Rule: "S1",
			Commands: []string{"suspend <email>", "signout <email>", "activate <email>"},
			Validate: fails(401, "invalid_code"), NextCode: true},
	}},
}

// T5: "Sign out everywhere" ends every session that began before it, or in the same second, and no
// session that began in a later second.
func TestSignOutIsExactToTheSecond(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, userID := s.NewUser(t, "member")
	issued := time.Now().Add(-time.Minute).Truncate(time.Second)
	c := s.With(t, token{}.sign(s.Env["SESSION_SECRET"],
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
	issued := expires.Add(-sessionLife(t))
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
			line := fillIn(command, "<email>", email)
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
