package faults

import (
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// requestCode requests a code from a new client address, so that no limit by client address is
// reached, and returns the status. Unlike AskCode, it accepts every answer.
func requestCode(c *hubstest.Client, email string) (status int) {
	body := map[string]string{"email": email}
	return c.Elsewhere().Do("POST /auth/otp/request", body).Status
}

// D3, O6: At most 1,000 requests for a code are unfinished at the same time. While there are so
// many, every new request gets a 503, whether its address has an account or not. A request whose
// mail has waited for a minute is dropped with a log line, because no user still waits for that
// code.
//
// Here the mail server hangs. Each conversation with it takes 10 s and fails, and only 32 take
// place at the same time, so most of about 1,000 requests wait for longer than a minute. So does
// the test: no other test states this number.
func TestUnfinishedCodeRequestsAreBounded(t *testing.T) {
	t.Parallel()
	const bound, wait = 1000, time.Minute
	s := startWithMail(t)
	s.AllowErrorsWithAnyOf("code not sent", "too many unfinished requests")
	emails := addUsers(t, s, 3000) // more than are accepted: 1,000, and some whose mail has failed
	s.Mail.Fail(hubstest.MailHangs)
	c := s.Client(t)
	begun := time.Now()
	accepted := 0
	for accepted < len(emails)-1 && requestCode(c, emails[accepted]) == 200 {
		accepted++
	}
	hubstest.WaitFor(t, "status for an address with an account", 503, func() int {
		status := requestCode(c, emails[accepted])
		if status == 200 {
			accepted++
		}
		return status
	})
	hubstest.WaitFor(t, "status for an address without one", 503, func() int {
		return requestCode(c, hubstest.NewEmail())
	})
	lastAccepted := time.Now()
	failed := func() int { return s.Log.Count(`"msg":"code not sent"`, `"level":"ERROR"`) }
	dropped := func() int {
		return s.Log.Count("code not sent: waited too long", `"level":"WARN"`)
	}
	if unfinished := accepted - failed(); accepted < bound || unfinished > bound {
		t.Errorf("got %d accepted and %d unfinished requests, want at least %d and at most %d",
			accepted, unfinished, bound, bound)
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
	// Each request is dropped a minute after it was made, and the last one was made at lastAccepted.
	for failed()+dropped() < accepted {
		if time.Since(lastAccepted) > wait+hubstest.Patience {
			t.Fatalf("got %d requests that have failed or were dropped, want %d", failed()+dropped(), accepted)
		}
		time.Sleep(100 * time.Millisecond)
	}

	// The server can mail codes again.
	s.Mail.Release()
	c.SignIn(emails[0])
}
