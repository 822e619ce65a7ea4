package faults

import (
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// startClocked starts a server on staging whose database's clock the test can set. Staging logs
// requests.
func startClocked(t *testing.T) (*hubstest.Server, *clockedPostgres) {
	t.Helper()
	pg := newClockedPostgres(t)
	s := hubstest.Start(t, hubstest.StagingEnv(hubstest.NewMailServer(t, hubstest.MailOptions{})),
		map[string]string{"DATABASE_URL": pg.URL})
	return s, pg
}

const step = 2 * time.Hour // of a clock

// T9: A session of a time in which the database's clock was ahead is refused when the clock is right
// again, and so are its copies. The user can sign in again, in the same browser.
func TestSessionOfAClockAhead(t *testing.T) {
	t.Parallel()
	s, pg := startClocked(t)
	pg.SetClock(t, step)
	c, email := s.Member(t, "member")
	copied := s.With(t, c.Token())
	get(c, "/auth/session").Want(t, 200)

	pg.SetClock(t, 0)
	get(c, "/auth/session").WantProblem(t, 401, "unauthenticated")
	s.Log.WaitFor(t, "future")
	c.SignIn(email)
	get(c, "/auth/session").Want(t, 200)
	get(copied, "/auth/session").WantProblem(t, 401, "unauthenticated")
}

// T9: "Sign out everywhere" ends the sessions of a time in which the clock was ahead, until the clock
// reaches that time. Then another one ends them for good.
func TestSignOutEndsSessionsOfAClockAhead(t *testing.T) {
	t.Parallel()
	s, pg := startClocked(t)
	pg.SetClock(t, step)
	c, email := s.Member(t, "member")
	pg.SetClock(t, 0)
	s.User(t, "signout", email)
	get(c, "/auth/session").WantProblem(t, 401, "unauthenticated")
	pg.SetClock(t, step+time.Minute) // as if the time had passed
	s.User(t, "signout", email)
	get(c, "/auth/session").WantProblem(t, 401, "unauthenticated")
}

// T9, S1: A code whose account was read while the clock was ahead is refused when the clock is right
// again: nobody could tell whether it was made before a sign-out. The next request mails a new one at
// once.
func TestCodeOfAClockAhead(t *testing.T) {
	t.Parallel()
	for _, isSignedOut := range []bool{false, true} {
		s, pg := startClocked(t)
		pg.SetClock(t, step)
		guest := s.NewGuest(t)
		pg.SetClock(t, 0)
		if isSignedOut {
			s.User(t, "signout", guest.Email)
		}
		guest.Present(guest.Code).WantProblem(t, 401, "invalid_code")
		s.Log.WaitFor(t, "future")
		guest.SignIn(guest.Email)
	}
}

// A code's life is counted by a clock that no step changes: neither a step ahead ends it, nor does a
// small step back.
func TestClockStepsInACodesLife(t *testing.T) {
	t.Parallel()
	for name, step := range map[string]time.Duration{"ahead": step, "back by a second": -time.Second} {
		s, pg := startClocked(t)
		guest := s.NewGuest(t)
		time.Sleep(2 * time.Second)
		pg.SetClock(t, step)
		r := guest.Present(guest.Code)
		if r.Status != 200 {
			t.Errorf("%s: got the answer %v, want 200", name, r)
		}
		get(guest.Client, "/auth/session").Want(t, 200)
	}
}

// A user who was signed out while the clock was ahead can't sign in until then. The log says why no
// code comes, and so does "user show". The runbook's statement mends it.
func TestSignOutOfAClockAhead(t *testing.T) {
	t.Parallel()
	s, pg := startClocked(t)
	c, email := s.Member(t, "member")
	pg.SetClock(t, step)
	s.User(t, "signout", email)
	pg.SetClock(t, 0)

	get(c, "/auth/session").WantProblem(t, 401, "unauthenticated")
	s.Client(t).AskCode(email)
	s.Log.WaitFor(t, `"msg":"code not sent`, "future")
	if shown := s.User(t, "show", email); !strings.Contains(shown, "in the future") {
		t.Errorf("user show: got %q, want the sign-out marked as in the future", shown)
	}
	hubstest.Exec(t, s.Database, runbookStatement(t))
	s.Client(t).SignIn(email)
	get(c, "/auth/session").WantProblem(t, 401, "unauthenticated")
}

// runbookStatement returns the statement of docs/runbook.md that sets sign-outs of the future to now.
func runbookStatement(t *testing.T) string {
	t.Helper()
	found := hubstest.Matches(t, "docs/runbook.md", `(update users set signed_out_at = [^;]*;)`)
	if len(found) != 1 {
		t.Fatalf("docs/runbook.md: got the statements %q about signed_out_at, want one", found)
	}
	return found[0]
}

// T2, T9: All times of a session are the database's. So a server whose clock is an hour ahead of the
// database's, or behind it, serves as any other: sign-in, session and sign-out work, a token expires
// by the database's clock, and of two cookies the newer counts.
func TestServerWithAnotherClock(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ ahead time.Duration }{
		"server an hour behind": {time.Hour},
		"server an hour ahead":  {-time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, pg := startClocked(t)
			pg.SetClock(t, test.ahead)
			c, email := s.Member(t, "member")
			get(c, "/auth/session").Want(t, 200)
			old := c.Token()
			s.User(t, "signout", email)
			get(c, "/auth/session").WantProblem(t, 401, "unauthenticated")
			time.Sleep(time.Second) // a token has whole seconds
			c.SignIn(email)
			get(c, "/auth/session").Want(t, 200)

			name := s.CookieName()
			both := s.With(t, "")
			for _, header := range []string{
				name + "=" + old + "; " + name + "=" + c.Token(),
				name + "=" + c.Token() + "; " + name + "=" + old,
			} {
				both.Elsewhere().Get("/auth/session", "Cookie", header).Want(t, 200)
			}
			wantExpiry(t, s, email, test.ahead)
		})
	}
}

// wantExpiry checks that a token expires by the database's clock.
func wantExpiry(t *testing.T, s *hubstest.Server, email string, ahead time.Duration) {
	t.Helper()
	id := hubstest.Query[string](t, s.Database, "select user_id from users where email = $1", email)
	hubstest.Exec(t, s.Database, "update users set signed_out_at = null where email = $1", email)
	now := time.Now().Add(ahead)
	for left, status := range map[time.Duration]int{-time.Minute: 401, time.Minute: 200} {
		token := hubstest.NewToken(s.Env["SESSION_SECRET"], email, id, now.Add(-time.Hour), now.Add(left))
		get(s.With(t, token), "/auth/session").Want(t, status)
	}
}
