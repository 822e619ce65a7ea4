package faults

import (
	"testing"

	"hubs/internal/hubstest"
)

// A request for a code that has waited a minute for its mail is dropped, and the log says so:
// nobody waits for that code any more. While the mail server hangs, each round of 32
// conversations takes 10 s, so six rounds begin within the minute.
func TestOldRequestsAreDropped(t *testing.T) {
	t.Parallel()
	const round = 32
	s := startWithMail(t)
	s.AllowErrors("code not sent")
	emails := askCodes(t, s, 8*round)
	failed := func() int {
		return s.Log.Count(`"msg":"code not sent"`, `"level":"ERROR"`)
	}
	dropped := func() int {
		return s.Log.Count("code not sent: waited too long", `"level":"WARN"`)
	}
	for rounds := range 6 {
		hubstest.WaitUntil(t, "the end of a round", func() bool {
			return failed() >= (rounds+1)*round
		})
		if n := dropped(); rounds < 5 && n > 0 {
			t.Fatalf("got %d requests dropped after %d rounds, want none", n, rounds+1)
		}
	}
	hubstest.WaitUntil(t, "the end of all requests", func() bool {
		return failed()+dropped() == len(emails)
	})
	if n := dropped(); n < round {
		t.Errorf("got %d requests dropped, want at least %d", n, round)
	}
	s.Mail.Release()
	s.Client(t).SignIn(emails[0])
}

// D3, O6: at most 1,000 requests for a code are unfinished. Above that each address gets the
// same 503, and each request that was accepted is worked off.
func TestUnfinishedCodeRequestsAreBounded(t *testing.T) {
	t.Parallel()
	const bound = 1000
	s := startWithMail(t)
	s.AllowErrors("code not sent", "too many unfinished requests")
	emails := addUsers(t, s, 2*bound)
	s.Mail.Fail(hubstest.MailHangs)
	c := s.Client(t)
	ask := func(email string) *hubstest.Response {
		body := map[string]string{"email": email}
		return c.Elsewhere().Do("POST", "/auth/otp/request", body)
	}
	accepted := 0
	for accepted < len(emails) && ask(emails[accepted]).Status == 200 {
		accepted++
	}
	wantUnavailable(t, ask(emails[0]))
	wantUnavailable(t, ask(hubstest.NewEmail())) // of nobody
	// A few more than the bound: those whose conversation has ended meanwhile.
	if accepted < bound || accepted > bound*3/2 {
		t.Errorf("got %d accepted requests, want about %d", accepted, bound)
	}
	s.Mail.Fail(hubstest.MailCloses)
	hubstest.WaitUntil(t, "a line in the log for each that was accepted", func() bool {
		return s.Log.Count(`"msg":"code not sent"`) == accepted
	})
	s.Mail.Release()
	s.Member(t, "member")
}
