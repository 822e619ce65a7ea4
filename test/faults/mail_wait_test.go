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
	m := hubstest.NewMailServer(t, hubstest.MailOptions{})
	s := hubstest.Start(t, hubstest.StagingEnv(m))
	s.AllowErrors("code not sent")
	m.Fail(hubstest.MailHangs)
	var emails []string
	for range 8 * round {
		email, _ := s.NewUser(t, "member")
		emails = append(emails, email)
		s.Client(t).AskCode(email)
	}
	failed := func() int { return s.Log.Count(`"msg":"code not sent"`, `"level":"ERROR"`) }
	dropped := func() int { return s.Log.Count("code not sent: waited too long", `"level":"WARN"`) }
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
	m.Release()
	s.Client(t).SignIn(emails[0])
}
