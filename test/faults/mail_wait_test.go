package faults

import (
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// askUntilRefused asks for the codes of new users, while the mail server hangs, until a request
// is refused. It returns how many were accepted.
func askUntilRefused(t *testing.T, s *hubstest.Server) (emails []string, accepted int) {
	t.Helper()
	s.AllowErrors("code not sent", "too many unfinished requests")
	emails = addUsers(t, s, 3000)
	s.Mail.Fail(hubstest.MailHangs)
	c := s.Client(t)
	for accepted < len(emails) && ask(c, emails[accepted]).Status == 200 {
		accepted++
	}
	return emails, accepted
}

func ask(c *hubstest.Client, email string) *hubstest.Response {
	body := map[string]string{"email": email}
	return c.Elsewhere().Do("POST", "/auth/otp/request", body)
}

// failed counts the requests whose mail failed.
func failed(s *hubstest.Server) int {
	return s.Log.Count(`"msg":"code not sent"`, `"level":"ERROR"`)
}

// A request for a code that has waited a minute for its mail is dropped, and the log says so:
// nobody waits for that code any more. Here the mail server hangs, and each conversation with
// it fails, so that most requests wait for longer.
func TestOldRequestsAreDropped(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	const wait = time.Minute
	begun := time.Now()
	emails, accepted := askUntilRefused(t, s)
	dropped := func() int {
		return s.Log.Count("code not sent: waited too long", `"level":"WARN"`)
	}
	for dropped() == 0 {
		if time.Since(begun) > wait+hubstest.Patience {
			t.Fatalf("no request was dropped within %v", time.Since(begun))
		}
		time.Sleep(100 * time.Millisecond)
	}
	if waited := time.Since(begun); waited < wait {
		t.Errorf("got a request dropped after %v, want at least %v", waited, wait)
	}
	hubstest.WaitUntil(t, "the end of all requests", func() bool {
		return failed(s)+dropped() == accepted
	})
	s.Mail.Release()
	s.Client(t).SignIn(emails[0])
}

// D3, O6: at most 1,000 requests for a code are unfinished. Above that each address gets the
// same 503, and each request that was accepted is worked off.
func TestUnfinishedCodeRequestsAreBounded(t *testing.T) {
	t.Parallel()
	const bound = 1000
	s := startWithMail(t)
	emails, accepted := askUntilRefused(t, s)
	unfinished := accepted - failed(s)
	if accepted < bound || unfinished > bound {
		t.Errorf("got %d requests accepted and %d of them unfinished, want %d unfinished",
			accepted, unfinished, bound)
	}
	c := s.Client(t)
	wantUnavailable(t, ask(c, emails[0]))
	wantUnavailable(t, ask(c, hubstest.NewEmail())) // of nobody
	s.Mail.Fail(hubstest.MailCloses)
	hubstest.WaitUntil(t, "a line in the log for each that was accepted", func() bool {
		return failed(s) == accepted
	})
	s.Mail.Release()
	s.Member(t, "member")
}
