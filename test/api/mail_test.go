package api

import (
	"cmp"
	"fmt"
	"io"
	"net/mail"
	"regexp"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// D4: Codes are mailed over TLS to another machine, and in plain text to this one, where nobody
// stands in between. A mail that is not sent is reported with the step that has failed, the mail
// server's own words and the usual cause: by the command mail-test, and in the log.
func TestMailServers(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	for _, c := range hubstest.ReadCases[struct {
		Name, URL, Step string
		Options         hubstest.MailOptions
		TLS             bool
		Says            []string
	}](t, "testdata/mail.json") {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			m := hubstest.NewMailServer(t, c.Options)
			env := hubstest.StagingEnv(m)
			_, address, _ := strings.Cut(m.URL, "://")
			env["SMTP_URL"] = cmp.Or(strings.Replace(c.URL, "HOST", address, 1), m.URL)
			s := hubstest.Start(t, env, map[string]string{"DATABASE_URL": database})
			if c.Step != "" {
				s.AllowErrorsWithAnyOf("code not sent")
			}
			email := askForNewUser(t, s)
			logged := s.Log.WaitFor(t, `"msg":"code `, hubstest.MaskedEmail(email))
			status, said := run(t, env, "mail-test", email)

			if c.Step == "" {
				wantEqual(t, "exit status", status, 0)
				hubstest.WaitFor(t, "QUITs", 2, m.Quits)
				for _, got := range m.Received() {
					wantEqual(t, "TLS", got.TLS, c.TLS)
					wantEqual(t, "user", got.User, c.Options.User)
				}
				return
			}
			wantEqual(t, "exit status", status, 1)
			for _, text := range []string{said, logged} {
				_, text, _ = strings.Cut(text, "sent") // the mail was not sent; code not sent
				for _, part := range append(c.Says, c.Step) {
					if !strings.Contains(text, part) {
						t.Errorf("got %q, want %q in it", text, part)
					}
				}
			}
			wantEqual(t, "passwords at the mail server", m.Passwords(), 0)
			wantEqual(t, "mails at the mail server", len(m.Received()), 0)
		})
	}
}

// A code is mailed to the address as stored in the database, not as the client wrote it.
func TestMailGoesToTheStoredAddress(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	email := hubstest.NewEmail()
	stored := strings.ToUpper(email[:1]) + email[1:]
	s.User(t, "add", stored)
	c := s.Client(t)
	c.AskCode(email + " ")
	got := s.Mail.WaitMail(t, stored)
	wantEqual(t, "recipients", got.To, []string{stored})
	c.PresentCode(email, got.Code(t)).Want(t, 200)
}

var (
	messageID   = regexp.MustCompile(`^<[A-Z2-7]{26}@example\.com>$`)
	messageText = regexp.MustCompile(
		`(?s)^Your sign-in code for example\.com is [0-9]+\..*within ([0-9]+) minutes`)
	messageLine = regexp.MustCompile(`^[ -~]{0,78}$`)
)

// A mail names MAIL_FROM as its sender, and its domain as the service. Its lines, headers and text
// are as RFC 5322 wants them. The headers ask other programs not to answer it.
func TestMailIsWellFormed(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t), map[string]string{
		"MAIL_FROM": `"Hubs, sign-in" <signin@example.com>`,
	})
	email := askForNewUser(t, s)
	got := s.Mail.WaitMail(t, email)

	wantEqual(t, "sender", got.From, "signin@example.com")
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
	if id := message.Header.Get("Message-Id"); !messageID.MatchString(id) {
		t.Errorf("Message-ID: got %q, want a match of %s", id, messageID)
	} else if another := s.Mail.WaitMail(t, askForNewUser(t, s)); strings.Contains(another.Data, id) {
		t.Errorf("Message-ID of another mail: got %s again, want a new one", id)
	}

	delete(message.Header, "Date")
	delete(message.Header, "Message-Id")
	want := mail.Header{
		"From":           {`"Hubs, sign-in" <signin@example.com>`},
		"To":             {"<" + email + ">"},
		"Subject":        {"Your sign-in code for example.com"},
		"Auto-Submitted": {"auto-generated"},
		"Mime-Version":   {"1.0"},
		"Content-Type":   {"text/plain; charset=us-ascii"},
	}
	wantEqual(t, "headers", message.Header, want)
	body, _ := io.ReadAll(message.Body)
	lifetimes := hubstest.Contract[[]any](t,
		"components", "schemas", "CodeAnswer", "properties", "expiresInSeconds", "examples")
	wantMessageText(t, string(body), int(lifetimes[0].(float64))/60)
}

// wantMessageText checks that the text of a mail names the service, and the minutes that the code
// has left.
func wantMessageText(t *testing.T, text string, minutes int) {
	t.Helper()
	said := messageText.FindStringSubmatch(text)
	if said == nil || said[1] != fmt.Sprint(minutes) {
		t.Errorf("got the text %q, want a match of %s with %d minutes", text, messageText, minutes)
	}
}

// startFailing starts a server on staging whose mail server fails in this way. The log of the
// server may have the error "code not sent".
func startFailing(t *testing.T, mode hubstest.MailMode) *hubstest.Server {
	t.Helper()
	s := hubstest.Start(t, staging(t))
	s.AllowErrorsWithAnyOf("code not sent")
	s.Mail.Fail(mode)
	return s
}

// waitNotSent waits for the log line that says what became of the code for an address. The line
// must be the error "code not sent".
func waitNotSent(t *testing.T, s *hubstest.Server, email string) {
	t.Helper()
	line := s.Log.WaitFor(t, `"msg":"code `, hubstest.MaskedEmail(email))
	if !strings.Contains(line, `"level":"ERROR","msg":"code not sent"`) {
		t.Errorf("got the log line %s, want the error \"code not sent\"", line)
	}
}

// D3: If the mail server fails, the client gets the same answer as always, the log has the failure,
// and the code does not count as mailed. So the next request mails a code, although it comes a
// moment later. The database has the address in capitals, which must make no difference.
func TestFailedMailRemovesTheCode(t *testing.T) {
	t.Parallel()
	s := startFailing(t, hubstest.MailWorks)
	for _, mode := range []hubstest.MailMode{hubstest.MailCloses, hubstest.MailRefuses} {
		email := hubstest.NewEmail()
		s.User(t, "add", strings.ToUpper(email))
		s.Mail.Fail(mode)
		s.Client(t).AskCode(email)
		waitNotSent(t, s, email)
		s.Mail.Release()
		s.Client(t).SignIn(email)
	}
}

// If the mail server has the whole mail, but closes the connection instead of confirming it, the
// mail may still arrive. So its code works. If the mail server refuses the mail, its code does not.
func TestUnconfirmedCodeWorks(t *testing.T) {
	t.Parallel()
	s := startFailing(t, hubstest.MailHangsEnd)
	unconfirmed := s.NewGuest(t)
	s.Mail.Fail(hubstest.MailCloses)
	waitNotSent(t, s, unconfirmed.Email)
	unconfirmed.Present(unconfirmed.Code).Want(t, 200)

	s.Mail.Fail(hubstest.MailRepeats)
	refused := s.NewGuest(t)
	waitNotSent(t, s, refused.Email)
	wantNoSession(t, refused.Present(refused.Code), 401, "invalid_code")
	s.Mail.Release()
	refused.SignIn(refused.Email)
}

// M1: A mail counts as sent once the mail server has accepted it, whatever the mail server does
// after QUIT. The server does not wait for the answer to QUIT.
func TestMailIsSentBeforeQUIT(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]hubstest.MailMode{
		"leaves":       hubstest.MailLeaves,
		"ignores QUIT": hubstest.MailIgnoresQuit,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := hubstest.Start(t, staging(t))
			s.Mail.Fail(mode)
			email, _ := s.NewUser(t, "member")
			clockIsRunning := startMailClock(t)
			c := s.Client(t)
			c.AskCode(email)
			c.PresentCode(email, s.Code(t, email)).Want(t, 200)
			s.Log.WaitFor(t, `"msg":"code sent"`, hubstest.MaskedEmail(email))
			waitConnections(t, s, 0)
			if !clockIsRunning() {
				t.Error("the server waited for the answer to QUIT, want it to go at once")
			}
		})
	}
}

// startMailClock begins a conversation of another server, with a mail server that never greets. The
// clock runs until that conversation ends, which is when every conversation must end that has begun
// at the same time.
func startMailClock(t *testing.T) (isRunning func() bool) {
	t.Helper()
	s := startFailing(t, hubstest.MailHangs)
	beginHung(t, s)
	return func() bool { return s.Mail.Connections() > 0 }
}

// beginHung begins to send a mail by a server whose mail server never greets. The conversation has
// just begun when beginHung returns.
func beginHung(t *testing.T, s *hubstest.Server) {
	t.Helper()
	t.Cleanup(s.Mail.Release) // otherwise the server, when it stops, would wait for the mail
	askForNewUser(t, s)
	waitConnections(t, s, 1)
}

// waitConnections waits until want connections to the server's mail server are open.
func waitConnections(t *testing.T, s *hubstest.Server, want int) {
	t.Helper()
	hubstest.WaitFor(t, "open connections to the mail server", want, s.Mail.Connections)
}

// D3: A conversation with the mail server ends in time, wherever the mail server stops answering
// and however slowly it answers. Neither a client's answer nor another mail waits for that.
func TestHungMailServerDelaysNobody(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode  hubstest.MailMode
		delay time.Duration // before each answer of the mail server
	}{
		"no greeting":     {mode: hubstest.MailHangs},
		"no word at DATA": {mode: hubstest.MailHangsData},
		"no confirmation": {mode: hubstest.MailHangsEnd},
		"slow":            {delay: 3 * time.Second}, // all eight answers would take 24 s
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startFailing(t, c.mode)
			s.Mail.Slow(c.delay)
			var emails []string
			for range 3 {
				email := askForNewUser(t, s)
				emails = append(emails, email)
			}

			waitConnections(t, s, len(emails))
			for _, email := range emails {
				waitNotSent(t, s, email)
			}
			if c.mode != hubstest.MailHangsEnd {
				return
			}
			// The mail server has the whole mail, so it may still arrive: the code stays good.
			for _, email := range emails {
				s.Client(t).PresentCode(email, s.Code(t, email)).Want(t, 200)
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
	for name, mode := range map[string]hubstest.MailMode{
		"line":  hubstest.MailFloods,
		"lines": hubstest.MailFloodsLines,
	} {
		for end, options := range map[string]hubstest.MailOptions{
			"in plain text": {},
			"within TLS":    {ImplicitTLS: true},
		} {
			t.Run(name+" "+end, func(t *testing.T) {
				t.Parallel()
				m := hubstest.NewMailServer(t, options)
				m.Fail(mode)
				s := hubstest.Start(t, hubstest.StagingEnv(m))
				s.AllowErrorsWithAnyOf("code not sent")
				waitNotSent(t, s, askForNewUser(t, s))
				waitConnections(t, s, 0)
				if n := m.Flooded(); n > maxSent {
					t.Errorf("the mail server sent %d bytes, want at most %d", n, maxSent)
				}
			})
		}
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
		open = max(open, s.Mail.Connections())
		return !clockIsRunning()
	})
	wantEqual(t, "the most conversations at once", open, hubstest.MailConversations)
	s.Mail.Release()
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
	t.Cleanup(s.Mail.Release)
	for range hubstest.MailConversations {
		askForNewUser(t, s)
	}
	waitConnections(t, s, hubstest.MailConversations)
	email := askForNewUser(t, s)
	s.Client(t).AskCode(email)
	masked := hubstest.MaskedEmail(email)

	// If the first request had made a code, the second would be answered by it, at once. No event
	// marks the beginning of the wait.
	time.Sleep(2 * time.Second)
	early := s.Log.Count("code", masked)
	hasEnded := s.Log.Count(`"msg":"code not sent"`) > 0 // a conversation, on a slow machine
	if early > 0 && !hasEnded {
		t.Error("got a log line about a request that waits, want none before its mail can begin")
	}
	s.Mail.Release()
	s.Log.WaitFor(t, `"msg":"code sent"`, masked)
	s.Log.WaitFor(t, "code not sent: the last mail", masked)
	s.Client(t).PresentCode(email, s.Code(t, email)).Want(t, 200)
}

// O7, L5: A code that is asked for again is the same, with the minutes that it has left. A failure
// of the second mail does not end it. A "sign out everywhere" does, and so do ten wrong guesses,
// from wherever they come; after these, there is no new code for some minutes.
func TestCodeIsMailedAgain(t *testing.T) {
	t.Parallel()
	s := startFailing(t, hubstest.MailWorks)
	var guests []hubstest.Guest
	for range 4 {
		guests = append(guests, s.NewGuest(t))
	}
	patient, unlucky, signedOut, attacked := guests[0], guests[1], guests[2], guests[3]
	for n := range hubstest.LimitOf(t, guessRoute).Requests {
		attacked.Present(hubstest.OtherCode(attacked.Code, n+1)).Want(t, 401)
	}
	// No event marks the end of the minute in which an address gets no second mail.
	time.Sleep(61 * time.Second)

	patient.AskCode(patient.Email)
	again := s.Mail.WaitMail(t, patient.Email)
	wantEqual(t, "code of the second mail", again.Code(t), patient.Code)
	_, text, _ := strings.Cut(again.Data, "\r\n\r\n")
	wantMessageText(t, text, 9)
	patient.Present(patient.Code).Want(t, 200)

	signedOut.AskCode(signedOut.Email)
	wantEqual(t, "code of the second mail", s.Code(t, signedOut.Email), signedOut.Code)
	s.User(t, "signout", signedOut.Email)
	wantNoSession(t, signedOut.Present(signedOut.Code), 401, "invalid_code")
	signedOut.SignIn(signedOut.Email) // with a new code, at once

	attacked.AskCode(attacked.Email)
	s.Log.WaitFor(t, "wrong guesses have ended the code", hubstest.MaskedEmail(attacked.Email))

	s.Mail.Fail(hubstest.MailRefuses)
	unlucky.AskCode(unlucky.Email)
	s.Log.WaitFor(t, `"level":"ERROR","msg":"code not sent"`, hubstest.MaskedEmail(unlucky.Email))
	unlucky.Present(unlucky.Code).Want(t, 200)
}
