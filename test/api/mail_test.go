package api

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/mail"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A mailCase is a mail server, and whether mail gets through to it. mail.json says what the members
// mean.
type mailCase struct {
	Name    string
	Options hubstest.MailOptions
	Arrives bool
}

// D4: mail is encrypted wherever the server is not this machine, and signed in where the URL says
// so. Without encryption that holds, no password and no mail is sent.
func TestMailOnlyThroughTLS(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	for _, c := range hubstest.ReadCases[mailCase](t, "testdata/mail.json") {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			m := hubstest.NewMailServer(t, c.Options)
			s := hubstest.Start(t, hubstest.StagingEnv(m), map[string]string{
				"DATABASE_URL": database,
				"MAIL_FROM":    `"Hubs, sign-in" <signin@example.com>`,
			})
			if c.Arrives {
				wantMail(t, s, c.Options)
				return
			}
			waitNotSent(t, s, failToSend(t, s))
			if n := m.Passwords(); n != 0 {
				t.Errorf("got %d passwords, want 0", n)
			}
			n := len(m.Received())
			if n != 0 {
				t.Errorf("got %d mails, want 0", n)
			}
		})
	}
}

// wantMail signs a user in by a mail. It must go to one recipient, and that one as stored, not as
// sent in.
func wantMail(
	t *testing.T, s *hubstest.Server, opts hubstest.MailOptions,
) {
	t.Helper()
	email := hubstest.NewEmail()
	stored := strings.Replace(email, "user@u", "User@U", 1)
	upper := strings.ToUpper(email)
	s.User(t, "add", stored)
	c := s.Client(t)
	c.AskCode(upper + " ")
	got := s.Mail.WaitMail(t, stored)
	want := hubstest.Mail{
		From: "signin@example.com",
		To:   []string{stored},
		TLS:  !opts.NoStartTLS,
		User: opts.User,
		Helo: "example.com",
	}
	if envelope(got) != envelope(&want) {
		t.Errorf("got %s, want %s",
			envelope(got), envelope(&want))
	}
	wantMessage(t, got.Data, stored)
	c.PresentCode(upper, got.Code(t)).Want(t, 200)
}

func envelope(m *hubstest.Mail) string {
	return fmt.Sprintf("from %s to %q, TLS %v, user %q, helo %s",
		m.From, m.To, m.TLS, m.User, m.Helo)
}

var (
	messageID   = regexp.MustCompile(`^<[A-Z2-7]{26}@example\.com>$`)
	messageText = regexp.MustCompile(`(?s)^Your sign-in code is [0-9]{6}\..*within ([0-9]+) minutes`)
	messageLine = regexp.MustCompile(`^[ -~]{0,78}$`)
)

// wantMessage checks a mail's lines, headers and text (RFC 5322).
func wantMessage(t *testing.T, data, to string) {
	t.Helper()
	for line := range strings.SplitSeq(data, "\r\n") {
		if !messageLine.MatchString(line) {
			t.Errorf("got the line %q", line)
		}
	}
	message, err := mail.ReadMessage(strings.NewReader(data))
	if err != nil {
		t.Fatalf("%q: %v", data, err)
	}
	date, err := message.Header.Date()
	if err != nil || time.Since(date).Abs() > time.Hour {
		t.Errorf("got the date %v, %v, want now", date, err)
	}
	id := message.Header.Get("Message-Id")
	if !messageID.MatchString(id) {
		t.Errorf("got the id %q", id)
	}
	delete(message.Header, "Date")
	delete(message.Header, "Message-Id")
	want := mail.Header{
		"From":           {`"Hubs, sign-in" <signin@example.com>`},
		"To":             {"<" + to + ">"},
		"Subject":        {"Your sign-in code"},
		"Auto-Submitted": {"auto-generated"},
		"Mime-Version":   {"1.0"},
		"Content-Type":   {"text/plain; charset=us-ascii"},
	}
	if !maps.EqualFunc(message.Header, want, slices.Equal) {
		t.Errorf("got the headers %v, want %v", message.Header, want)
	}
	life := hubstest.Contract[[]any](t,
		"components", "schemas", "CodeAnswer", "properties", "expiresInSeconds", "examples")
	minutes := fmt.Sprint(life[0].(float64) / 60)
	body, _ := io.ReadAll(message.Body)
	got := messageText.FindStringSubmatch(string(body))
	if got == nil || got[1] != minutes {
		t.Errorf("got the text %q, want one that says %s minutes", body, minutes)
	}
}

// failToSend asks for a code that can't be sent, which changes no answer.
func failToSend(t *testing.T, s *hubstest.Server) (email string) {
	t.Helper()
	s.AllowErrors("code not sent")
	email = hubstest.NewEmail()
	// Stored in capitals: what is undone later must be found all the same.
	s.User(t, "add", strings.ToUpper(email))
	s.Client(t).AskCode(email)
	return email
}

// waitNotSent waits for the end of a mail, which must be an error.
func waitNotSent(t *testing.T, s *hubstest.Server, email string) {
	t.Helper()
	line := s.Log.WaitFor(t, `"msg":"code `, hubstest.MaskedEmail(email))
	if !strings.Contains(line, `"level":"ERROR","msg":"code not sent"`) {
		t.Errorf("got %s, want an error", line)
	}
}

// D3: whatever the mail server does, the answer is the same, the log says so, and the code is
// gone: the next request, a moment later, mails a new one.
func TestMailServerFails(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	for name, mode := range map[string]hubstest.MailMode{
		"closes":                hubstest.MailCloses,
		"refuses":               hubstest.MailRefuses,
		"defers":                hubstest.MailDefers,
		"refuses the recipient": hubstest.MailRefusesRecipient,
		"refuses the sender":    hubstest.MailRefusesSender,
	} {
		t.Run(name, func(t *testing.T) {
			before := len(s.Mail.Received())
			s.Mail.Fail(mode)
			email := failToSend(t, s)
			waitNotSent(t, s, email)
			n := len(s.Mail.Received())
			if n != before {
				t.Errorf("got %d mails, want %d", n, before)
			}
			s.Mail.Release()
			s.SignIn(t, email)
		})
	}
	s.Mail.Fail(hubstest.MailHangsEnd)
	email := failToSend(t, s)
	lost := s.Code(t, email) // taken, and never confirmed
	s.Mail.Fail(hubstest.MailCloses)
	waitNotSent(t, s, email)
	s.Mail.Release()
	wantNoSession(t, s.Client(t).PresentCode(email, lost), 401, "invalid_code")
	s.SignIn(t, email)
}

// A mail counts as sent once the mail server has taken it, whatever it says to QUIT. Nobody
// waits for that (M1): a conversation that hangs, and began before, ends later.
func TestFarewellCountsNothing(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]hubstest.MailMode{
		"leaves":       hubstest.MailLeaves,
		"ignores QUIT": hubstest.MailIgnoresQuit,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hung := startHung(t)
			s := hubstest.Start(t, staging(t))
			s.Mail.Fail(mode)
			email, _ := s.NewUser(t, "member")
			s.SignIn(t, email)
			s.Log.WaitFor(t,
				`"msg":"code sent"`, hubstest.MaskedEmail(email))
			waitConnections(t, s, 0)
			if hung.Mail.Connections() == 0 {
				t.Error("the conversation took as long as one that hangs")
			}
		})
	}
}

// startHung starts a server whose mail has just begun, and hangs: it takes all the time that a
// mail may take.
func startHung(t *testing.T) *hubstest.Server {
	t.Helper()
	s := hubstest.Start(t, staging(t))
	s.Mail.Fail(hubstest.MailHangs)
	t.Cleanup(s.Mail.Release) // else its end would wait for the mail
	failToSend(t, s)
	waitConnections(t, s, 1)
	return s
}

func waitConnections(t *testing.T, s *hubstest.Server, want int) {
	t.Helper()
	hubstest.WaitUntil(t, fmt.Sprint(want, " conversations"), func() bool {
		return s.Mail.Connections() == want
	})
}

// D3, M1: a conversation ends, wherever the mail server stops talking, and however slowly it
// talks. Neither the answer nor another mail waits for it.
func TestHungMailServer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode  hubstest.MailMode
		delay time.Duration // of each answer
	}{
		"no greeting":     {mode: hubstest.MailHangs},
		"no word at DATA": {mode: hubstest.MailHangsData},
		"no confirmation": {mode: hubstest.MailHangsEnd},
		"slow":            {delay: 3 * time.Second}, // all answers: 24 s
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := hubstest.Start(t, staging(t))
			s.Mail.Fail(c.mode)
			s.Mail.Slow(c.delay)
			emails := []string{failToSend(t, s), failToSend(t, s), failToSend(t, s)}
			waitConnections(t, s, len(emails))
			for _, email := range emails {
				waitNotSent(t, s, email)
			}
		})
	}
}

// D3: connecting is a part of the time. A mail server that is slow to accept holds nothing twice
// as long: a conversation that hangs, and began while it was not yet connected, ends later.
func TestConnectingIsPartOfTheMailsTime(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	socket, err := listener.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	setQueue := func(length int) {
		if err := syscall.Listen(int(socket.Fd()), length); err != nil {
			t.Fatal(err)
		}
	}
	setQueue(0)
	addr := listener.Addr().String()
	for { // nobody accepts, so the queue soon is full
		conn, err := net.DialTimeout("tcp", addr, 100*time.Millisecond)
		if err != nil {
			break
		}
		defer conn.Close()
	}
	s := hubstest.Start(t, map[string]string{
		"SMTP_URL":  "smtp://" + addr,
		"MAIL_FROM": "signin@example.com",
	})
	email := failToSend(t, s)
	time.Sleep(2 * time.Second) // TCP tries to connect, again and again
	hung := startHung(t)
	time.Sleep(2 * time.Second)
	// Now there is room, and TCP's next attempt connects. Nobody ever says a word.
	setQueue(8)
	waitNotSent(t, s, email)
	if hung.Mail.Connections() == 0 {
		t.Error("the time to connect did not count: a conversation that began later has ended")
	}
}

// M1: a mail server that talks without end, or somebody on the way to it, is soon left.
func TestTalkativeMailServer(t *testing.T) {
	t.Parallel()
	const much = 32 << 20 // more than any socket's buffers, and far less than comes in a second
	for name, mode := range map[string]hubstest.MailMode{
		"line":  hubstest.MailFloods,
		"lines": hubstest.MailFloodsLines,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := hubstest.Start(t, staging(t))
			s.Mail.Fail(mode)
			waitNotSent(t, s, failToSend(t, s))
			waitConnections(t, s, 0)
			if n := s.Mail.Flooded(); n > much {
				t.Errorf("the mail server could say %d bytes", n)
			}
		})
	}
}

// D3, M2: mail waits for other people's mail only while 32 conversations are under way. So a
// mail server that hangs holds up no answer, and a mail's time tells nothing of other addresses.
func TestMailsDoNotWaitForEachOther(t *testing.T) {
	t.Parallel()
	const bound = 32
	s := hubstest.Start(t, staging(t))
	s.AllowErrors("code not sent")
	s.Mail.Fail(hubstest.MailHangs)
	const requests = bound + 8
	for range requests {
		email, _ := s.NewUser(t, "member")
		s.Client(t).AskCode(email)
	}
	open := 0
	hubstest.WaitUntil(t, "the end of a conversation", func() bool {
		now := s.Mail.Connections()
		if s.Log.Count("code not sent") > 0 { // another may have begun before now was counted
			return true
		}
		open = max(open, now)
		return false
	})
	if open != bound {
		t.Errorf("got %d conversations at a time, want %d", open, bound)
	}
	s.Mail.Release()
	hubstest.WaitUntil(t, "the end of all", func() bool {
		return s.Log.Count(`"msg":"code `) == requests
	})
}
