package api

import (
	"fmt"
	"io"
	"net/mail"
	"regexp"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

var (
	messageID   = regexp.MustCompile(`^<[A-Z2-7]{26}@example\.com>$`)
	offset      = regexp.MustCompile(`^[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8} [+-][0-9]{4}$`)
	messageText = regexp.MustCompile(
		`(?s)^Your sign-in code for example\.com is [0-9]+\.\r\nDigit by digit:( [0-9])+\r\n.*within ([0-9]+) minutes`)
	messageLine = regexp.MustCompile(`^[ -~]{0,78}$`)
)

// A mail goes to the address as stored in the database, not as the client wrote it. It names
// MAIL_FROM as its sender, and its domain as the service. Its lines, headers and text are as RFC
// 5322 wants them. The headers ask other programs not to answer it.
func TestMailIsWellFormed(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t), map[string]string{
		"MAIL_FROM": `"Hubs, sign-in" <signin@example.com>`,
	})
	email := hubstest.NewEmail()
	stored := strings.ToUpper(email[:1]) + email[1:]
	s.User(t, "add", stored)
	s.Client(t).AskCode(email + " ")
	got := s.Mail.WaitMail(t, stored)

	wantEqual(t, "sender", got.From, "signin@example.com")
	wantEqual(t, "recipients", got.To, []string{stored})
	wantEqual(t, "client's own name", got.Helo, "example.com")
	for line := range strings.SplitSeq(got.Data, "\r\n") {
		if !messageLine.MatchString(line) {
			t.Errorf("got the line %q, want a match of %s", line, messageLine)
		}
	}

	message, err := mail.ReadMessage(strings.NewReader(got.Data))
	if err != nil {
		t.Fatalf("%q: %v", got.Data, err)
	}
	date, _ := message.Header.Date() // the zero time if it is malformed
	wantNow(t, "Date", date)
	if text := message.Header.Get("Date"); !offset.MatchString(text) { // RFC 5322 3.3: no name of a zone
		t.Errorf("Date: got %q, want a match of %s", text, offset)
	}
	if id := message.Header.Get("Message-Id"); !messageID.MatchString(id) {
		t.Errorf("Message-ID: got %q, want a match of %s", id, messageID)
	} else if another := s.Mail.WaitMail(t, askForNewUser(t, s)); strings.Contains(another.Data, id) {
		t.Errorf("Message-ID of another mail: got %s again, want a new one", id)
	}

	delete(message.Header, "Date")
	delete(message.Header, "Message-Id")
	wantEqual(t, "X-Entity-Ref-ID", len(message.Header.Get("X-Entity-Ref-Id")), 26)
	delete(message.Header, "X-Entity-Ref-Id")
	want := mail.Header{
		"From":           {`"Hubs, sign-in" <signin@example.com>`},
		"To":             {"<" + stored + ">"},
		"Subject":        {"Your sign-in code for example.com"},
		"Auto-Submitted": {"auto-generated"},
		"Mime-Version":   {"1.0"},
		"Content-Type":   {"text/plain; charset=us-ascii"},
	}
	wantEqual(t, "headers", message.Header, want)
	body, _ := io.ReadAll(message.Body)
	lifetimes := hubstest.Contract[[]any](t,
		"components", "schemas", "CodeAnswer", "properties", "expiresInSeconds", "examples")
	minutes := fmt.Sprint(lifetimes[0].(float64) / 60)
	said := messageText.FindSubmatch(body)
	if said == nil || string(said[2]) != minutes {
		t.Errorf("got the text %q, want a match of %s\nwith %s minutes, as the example of CodeAnswer.expiresInSeconds in web/openapi.json says",
			body, messageText, minutes)
	}
}

// startFailing starts a server on staging whose mail server fails in this way. The log of the
// server may say so.
func startFailing(t *testing.T, mode hubstest.MailMode) *hubstest.Server {
	t.Helper()
	s := hubstest.Start(t, staging(t))
	s.AllowErrorsWithAnyOf("code not sent", "code perhaps sent")
	s.Mail.Fail(mode)
	return s
}

// waitNotSent waits for the error in the log that the code for an address was not sent.
func waitNotSent(t *testing.T, s *hubstest.Server, email string) {
	t.Helper()
	s.Log.WaitFor(t, `"level":"ERROR","msg":"code not sent"`, maskedEmail(email))
}

// D3: If the mail server has the whole mail, but closes the connection instead of confirming it, or
// confirms it in an odd way, the mail may still arrive. If the mail server refuses the mail, it
// counts as not sent: the next request mails the same code, although it comes a moment later. The
// refusal repeats the address and the code, so the harness sees that both are masked.
func TestUnconfirmedCodeWorks(t *testing.T) {
	t.Parallel()
	s := startFailing(t, hubstest.MailHangsEnd)
	unconfirmed := s.NewGuest(t)
	s.Mail.Fail(hubstest.MailCloses)
	s.Log.WaitFor(t, `"msg":"code perhaps sent"`, maskedEmail(unconfirmed.Email))
	unconfirmed.Present(unconfirmed.Code).Want(t, 200)

	s.Mail.Fail(hubstest.MailTakesOddly)
	odd := s.NewGuest(t)
	s.Log.WaitFor(t, `"msg":"code perhaps sent"`, maskedEmail(odd.Email))
	odd.Present(odd.Code).Want(t, 200)

	s.Mail.Fail(hubstest.MailRepeats)
	refused := s.NewGuest(t)
	waitNotSent(t, s, refused.Email)
	s.Mail.Fail(hubstest.MailWorks)
	refused.AskCode(refused.Email)
	wantEqual(t, "the code that is mailed again", s.Code(t, refused.Email), refused.Code)
	refused.Present(refused.Code).Want(t, 200)
}

// M1: A mail counts as sent once the mail server has accepted it, even if the mail server never
// answers QUIT. The server does not wait for that answer.
func TestMailIsSentBeforeQUIT(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	s.Mail.Fail(hubstest.MailIgnoresQuit)
	email, _ := s.NewUser(t, "member")
	clockIsRunning := startMailClock(t)
	s.Client(t).SignIn(email)
	s.Log.WaitFor(t, `"msg":"code sent"`, maskedEmail(email))
	waitConnections(t, s, 0)
	if !clockIsRunning() {
		t.Error("the server waited for the answer to QUIT, want it to go at once")
	}
}

// startMailClock begins a conversation of another server, with a mail server that never greets. The
// clock runs until that conversation ends, which is when every conversation must end that has begun
// at the same time.
func startMailClock(t *testing.T) (isRunning func() bool) {
	t.Helper()
	s := startFailing(t, hubstest.MailHangs)
	t.Cleanup(func() { s.Mail.Fail(hubstest.MailWorks) }) // otherwise the server, when it stops, would wait for the mail
	askForNewUser(t, s)
	waitConnections(t, s, 1)
	return func() bool { return s.Mail.Connections() > 0 }
}

// waitConnections waits until want connections to the server's mail server are open.
func waitConnections(t *testing.T, s *hubstest.Server, want int) {
	t.Helper()
	hubstest.WaitFor(t, "open connections to the mail server", want, s.Mail.Connections)
}

// D3: A conversation with the mail server ends in time, whether the mail server never greets or
// answers too slowly. Neither a client's answer nor another mail waits for that.
func TestHungMailServerDelaysNobody(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode  hubstest.MailMode
		delay time.Duration // before each answer of the mail server
	}{
		"no greeting": {mode: hubstest.MailHangs},
		"slow":        {delay: 3 * time.Second}, // all eight answers would take 24 s
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := hubstest.NewMailServer(t, hubstest.MailOptions{Delay: c.delay})
			m.Fail(c.mode)
			s := hubstest.Start(t, hubstest.StagingEnv(m))
			s.AllowErrorsWithAnyOf("code not sent", "code perhaps sent")
			var emails []string
			for range 3 {
				emails = append(emails, askForNewUser(t, s))
			}

			waitConnections(t, s, len(emails))
			for _, email := range emails {
				waitNotSent(t, s, email)
			}
		})
	}
}

// M1: If a mail server, or an attacker on the way to it, sends an endless answer, the server soon
// closes the connection, before and within TLS.
func TestEndlessMailAnswerIsCutOff(t *testing.T) {
	t.Parallel()
	// Bytes: more than the buffers of a connection hold, and far less than arrives in a second.
	const maxSent = 32 << 20
	for name, options := range map[string]hubstest.MailOptions{
		"line in plain text": {},
		"line within TLS":    {ImplicitTLS: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := hubstest.NewMailServer(t, options)
			m.Fail(hubstest.MailFloods)
			s := hubstest.Start(t, hubstest.StagingEnv(m))
			s.AllowErrorsWithAnyOf("code not sent")
			waitNotSent(t, s, askForNewUser(t, s))
			waitConnections(t, s, 0)
			if n := m.Flooded.Load(); n > maxSent {
				t.Errorf("the mail server sent %d bytes, want at most %d", n, maxSent)
			}
		})
	}
}

// M2: A mail waits for mails to other addresses only while 32 conversations are under way. So the
// time at which a mail arrives reveals nothing about other addresses. A mail server that hangs
// delays no client's answer.
func TestMailsDoNotWaitForEachOther(t *testing.T) {
	t.Parallel()
	s := startFailing(t, hubstest.MailHangs)
	const mails = hubstest.MailConversations + 8
	var emails []string
	for range mails {
		email, _ := s.NewUser(t, "member")
		emails = append(emails, email)
	}
	clockIsRunning := startMailClock(t) // begins first, so it ends first
	for _, email := range emails {
		s.Client(t).AskCode(email)
	}
	open := 0
	hubstest.WaitUntil(t, "the end of a conversation", func() bool {
		now := s.Mail.Connections()
		if !clockIsRunning() { // conversations may have ended, and others begun
			return true
		}
		open = max(open, now)
		return false
	})
	wantEqual(t, "the most conversations at once", open, hubstest.MailConversations)
	s.Mail.Fail(hubstest.MailWorks)
	hubstest.WaitFor(t, "log lines about codes", mails, func() int {
		return s.Log.Count(`"msg":"code `)
	})
}

// O7: A code is made when its mail can begin. While all conversations are taken, a request makes no
// code. Otherwise a request that is dropped after a long wait would replace the code that the user
// has by one that is never mailed.
func TestWaitingRequestMakesNoCode(t *testing.T) {
	t.Parallel()
	s := startFailing(t, hubstest.MailHangs)
	t.Cleanup(func() { s.Mail.Fail(hubstest.MailWorks) })
	for range hubstest.MailConversations {
		askForNewUser(t, s)
	}
	waitConnections(t, s, hubstest.MailConversations)
	email := askForNewUser(t, s)
	s.Client(t).AskCode(email)
	masked := maskedEmail(email)

	// If the first request had made a code, the second would be answered by it, at once. No event
	// marks the beginning of the wait.
	time.Sleep(2 * time.Second)
	early := s.Log.Count("code", masked)
	hasEnded := s.Log.Count(`"msg":"code not sent"`) > 0 // a conversation, on a slow machine
	if early > 0 && !hasEnded {
		t.Error("got a log line about a request that waits, want none before its mail can begin")
	}
	s.Mail.Fail(hubstest.MailWorks)
	s.Log.WaitFor(t, `"msg":"code sent"`, masked)
	s.Log.WaitFor(t, "code not sent: the last mail", masked)
	s.Client(t).PresentCode(email, s.Code(t, email)).Want(t, 200)
}
