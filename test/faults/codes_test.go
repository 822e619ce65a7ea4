package faults

import (
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// D3: A request for a code whose mail has waited for most of a minute is dropped with a log line,
// because no user still waits for that code.
//
// Here the mail server hangs. Each conversation with it takes 10 s and fails, and only 32 take
// place at the same time, so many of the requests wait for longer than a minute. So does the test:
// no other test states this number.
func TestLateCodesAreDropped(t *testing.T) {
	t.Parallel()
	// The wait is codeMaxWait, of which codeDelay may have gone by in no time.
	const wait = 50*time.Second - 500*time.Millisecond
	s := startWithMail(t)
	s.AllowErrorsWithAnyOf("code not sent")
	s.Mail.Fail(hubstest.MailHangs)
	begun := time.Now()
	emails := askCodes(t, s, 12*hubstest.MailConversations)

	// WaitUntil is not enough here: the wait is longer than hubstest.Patience.
	for s.Log.Count("code not sent", "waited too long") == 0 {
		if time.Since(begun) > wait+hubstest.Patience {
			t.Fatalf("no request was dropped within %v, want one after %v", time.Since(begun), wait)
		}
		time.Sleep(100 * time.Millisecond)
	}
	if waited := time.Since(begun); waited < wait {
		t.Errorf("a request was dropped %v after the first one, want at least %v", waited, wait)
	}
	hubstest.WaitFor(t, "requests that have failed or were dropped", len(emails), func() int {
		return s.Log.Count("code not sent")
	})

	// The server can mail codes again.
	s.Mail.Fail(hubstest.MailWorks)
	s.Client(t).SignIn(emails[0])
}
