package faults

import (
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// askUntilRefused makes the mail server hang, and requests a code for one new user after another
// until a request is refused. It returns the addresses of all new users and the number of requests
// that were accepted: those for the first addresses.
func askUntilRefused(t *testing.T, s *hubstest.Server) (emails []string, accepted int) {
	t.Helper()
	s.AllowErrorsWithAnyOf("code not sent", "too many unfinished requests")
	emails = addUsers(t, s, 3000) // more than are accepted: 1,000, and some whose mail has failed
	s.Mail.Fail(hubstest.MailHangs)
	c := s.Client(t)
	for accepted < len(emails) && requestCode(c, emails[accepted]).Status == 200 {
		accepted++
	}
	return emails, accepted
}

// requestCode requests a code from a new client address, so that no limit by client address is
// reached. Unlike AskCode, it accepts every answer.
func requestCode(c *hubstest.Client, email string) *hubstest.Response {
	body := map[string]string{"email": email}
	return c.Elsewhere().Do("POST /auth/otp/request", body)
}

// failedMails returns the number of requests so far whose mail failed. It does not count requests
// that waited too long.
func failedMails(s *hubstest.Server) int {
	return s.Log.Count(`"msg":"code not sent"`, `"level":"ERROR"`)
}

// A request for a code whose mail has waited for a minute is dropped with a log line, because no
// user still waits for that code.
//
// Here the mail server hangs. Each conversation with it takes 10 s and fails, and only 32 take
// place at the same time, so most of about 1,000 requests wait for longer than a minute. So does
// the test: no other test states this number.
func TestOldRequestsAreDropped(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	const wait = time.Minute
	begun := time.Now()
	emails, accepted := askUntilRefused(t, s)
	dropped := func() int {
		return s.Log.Count("code not sent: waited too long", `"level":"WARN"`)
	}

	// WaitUntil is not enough here: the wait is longer than hubstest.Patience.
	for dropped() == 0 {
		if time.Since(begun) > wait+hubstest.Patience {
			t.Fatalf("no request was dropped within %v, want one after %v", time.Since(begun), wait)
		}
		time.Sleep(100 * time.Millisecond)
	}
	if waited := time.Since(begun); waited < wait {
		t.Errorf("a request was dropped %v after the first one, want at least %v", waited, wait)
	}
	hubstest.WaitFor(t, "requests that have failed or were dropped", accepted, func() int {
		return failedMails(s) + dropped()
	})

	// The server can mail codes again.
	s.Mail.Release()
	s.Client(t).SignIn(emails[0])
}

// D3, O6: At most 1,000 requests for a code are unfinished at the same time. While there are so
// many, every new request gets a 503, whether its address has an account or not. Every accepted
// request is finished.
func TestUnfinishedCodeRequestsAreBounded(t *testing.T) {
	t.Parallel()
	const bound = 1000
	s := startWithMail(t)
	emails, accepted := askUntilRefused(t, s)
	unfinished := accepted - failedMails(s)
	if accepted < bound || unfinished > bound {
		t.Errorf("got %d accepted and %d unfinished requests, want at least %d and at most %d",
			accepted, unfinished, bound, bound)
	}
	// A request is finished when its mail fails, and makes room for another one.
	c := s.Client(t)
	hubstest.WaitFor(t, "status for an address with an account", 503, func() int {
		status := requestCode(c, emails[accepted]).Status
		if status == 200 {
			accepted++
		}
		return status
	})
	hubstest.WaitFor(t, "status for an address without one", 503, func() int {
		return requestCode(c, hubstest.NewEmail()).Status
	})
	s.Mail.Fail(hubstest.MailCloses)
	hubstest.WaitFor(t, "requests whose mail failed", accepted, func() int {
		return failedMails(s)
	})
	s.Mail.Release()
	c.SignIn(emails[0])
}
