package faults

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// remoteMail are the options of a mail server that plays another machine and wants a password, so a
// conversation has every step that there is.
var remoteMail = hubstest.MailOptions{Host: "0.0.0.0", User: "hubs", Password: "secret-of-mail"}

// startWithRemoteMail starts a server that sends its mail to a mail server with these options.
func startWithRemoteMail(t *testing.T, opts hubstest.MailOptions) *hubstest.Server {
	t.Helper()
	s := hubstest.Start(t, hubstest.StagingEnv(hubstest.NewMailServer(t, opts)))
	s.AllowErrorsWithAnyOf("code not sent")
	return s
}

// refusals are answers that mail servers give for now, by the steps of a conversation. "mail" is the
// answer to the whole mail.
var refusals = map[string]string{
	"greeting": "421 4.3.2 concurrent connections limit exceeded",
	"EHLO":     "450 4.3.2 try again later",
	"STARTTLS": "454 4.7.0 TLS is not available for now",
	"AUTH":     "454 4.7.0 temporary authentication failure",
	"MAIL":     "451 4.3.0 try again later",
	"RCPT":     "450 4.2.1 greylisted",
	"DATA":     "421 4.3.2 the system is not accepting messages",
	"mail":     "432 4.3.2 sender thread limit exceeded",
}

// A refuser makes a mail server refuse for a while, and notes when conversations begin.
type refuser struct {
	mu    sync.Mutex
	next  map[string][]string // answers, by the step of a conversation
	begun []time.Time
}

// startWithRefuser starts a server whose mail server, a remoteMail, has a refuser.
func startWithRefuser(t *testing.T) (*hubstest.Server, *refuser) {
	t.Helper()
	r := &refuser{next: map[string][]string{}}
	opts := remoteMail
	opts.Converse = func(int) func(string) string {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.begun = append(r.begun, time.Now())
		return r.answer
	}
	return startWithRemoteMail(t, opts), r
}

// refuse makes the mail server send these answers, one after the other, the next times that clients
// come to this step.
func (r *refuser) refuse(step string, answers ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.next[step] = append(r.next[step], answers...)
}

// answer returns the next answer that refuse has asked for, or "".
func (r *refuser) answer(step string) (answer string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if answers := r.next[step]; len(answers) > 0 {
		answer, r.next[step] = answers[0], answers[1:]
	}
	return answer
}

// conversations returns when the conversations so far have begun.
func (r *refuser) conversations() []time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.begun)
}

// D3: A mail server that takes three conversations at once, and refuses more for now at whatever
// step, gets the mail of twelve people who ask in the same second, one each and within a minute.
func TestBusyMailServerGetsEveryMail(t *testing.T) {
	t.Parallel()
	for step, answer := range refusals {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			opts := remoteMail
			opts.Converse = func(others int) func(string) string {
				return func(at string) string {
					if at == step && others >= 3 {
						return answer
					}
					return ""
				}
			}
			opts.Delay = 20 * time.Millisecond // so conversations take place at the same time
			s := startWithRemoteMail(t, opts)
			wantMailForAll(t, s)
			s.Log.WaitFor(t, "refused for now", `"level":"WARN"`)
		})
	}
}

// D3: So does a mail server that takes one mail a second.
func TestSlowMailServerGetsEveryMail(t *testing.T) {
	t.Parallel()
	opts := remoteMail
	var mu sync.Mutex
	var last time.Time // of a mail that it has taken
	opts.Converse = func(int) func(string) string {
		return func(step string) string {
			mu.Lock()
			defer mu.Unlock()
			if step != "mail" {
				return ""
			}
			if time.Since(last) < time.Second {
				return "454 4.7.0 maximum sending rate exceeded"
			}
			last = time.Now()
			return ""
		}
	}
	wantMailForAll(t, startWithRemoteMail(t, opts))
}

// wantMailForAll lets twelve people ask for codes at once. Each must get one mail within a minute.
func wantMailForAll(t *testing.T, s *hubstest.Server) {
	t.Helper()
	emails := addUsers(t, s, 12)
	asked := time.Now()
	var all sync.WaitGroup
	for _, email := range emails {
		all.Go(func() { s.Client(t).AskCode(email) })
	}
	all.Wait()
	for len(s.Mail.Received()) < len(emails) && time.Since(asked) < time.Minute {
		time.Sleep(20 * time.Millisecond)
	}
	wantOneMailEach(t, s, emails...)
	for _, email := range emails {
		if !t.Failed() {
			s.Client(t).PresentCode(email, s.Code(t, email)).Want(t, 200)
		}
	}
}

// domain returns the domain of an address. Each user has another one, and the log does not mask it.
func domain(email string) string { return email[strings.LastIndex(email, "@"):] }

// D3: A mail that is refused for now is tried again, at whatever step that was. The user gets one
// mail and one code, and the next request within a minute sends none.
func TestMailRefusedForNowIsTriedAgain(t *testing.T) {
	t.Parallel()
	s, refuser := startWithRefuser(t)
	for step, answer := range refusals {
		email, _ := s.NewUser(t, "member")
		refuser.refuse(step, answer, answer)
		c := s.Client(t)
		c.AskCode(email)
		code := s.Code(t, email)
		c.Elsewhere().AskCode(email)
		s.Log.WaitFor(t, "code not sent: the last mail", domain(email))
		c.PresentCode(email, code).Want(t, 200)
		if n := s.Log.Count("refused for now", domain(email)); n != 2 {
			t.Errorf("%s: got %d lines about a mail that is refused for now, want 2", step, n)
		}
		wantOneMailEach(t, s, email)
	}
}

// M3: A mail server that does not listen, as while it restarts, gets the mail when it listens again.
func TestMailServerIsBackSoon(t *testing.T) {
	t.Parallel()
	// Nobody else can take the port of a socket that is bound and does not listen.
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	hubstest.Must(t, err)
	syscall.CloseOnExec(socket)
	hubstest.Must(t, syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	bound, err := syscall.Getsockname(socket)
	hubstest.Must(t, err)
	away := &hubstest.MailServer{URL: fmt.Sprintf("smtp://127.0.0.1:%d", bound.(*syscall.SockaddrInet4).Port)}
	s := hubstest.Start(t, hubstest.StagingEnv(away))
	email, _ := s.NewUser(t, "member")
	c := s.Client(t)
	c.AskCode(email)
	s.Log.WaitFor(t, `"level":"WARN","msg":"code delayed`, domain(email))

	hubstest.Must(t, syscall.Listen(socket, 16))
	listener, err := net.FileListener(os.NewFile(uintptr(socket), "socket"))
	hubstest.Must(t, err)
	s.Mail = hubstest.NewMailServer(t, hubstest.MailOptions{Listener: listener})
	c.PresentCode(email, s.Code(t, email)).Want(t, 200)
	wantOneMailEach(t, s, email)
}

// A mail that is refused for good is not tried again, at whatever step that was.
func TestMailRefusedForGoodIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	for step := range refusals {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			s, refuser := startWithRefuser(t)
			email, _ := s.NewUser(t, "member")
			refuser.refuse(step, "550 5.7.1 not for you")
			s.Client(t).AskCode(email)
			s.Log.WaitFor(t, `"level":"ERROR","msg":"code not sent"`, domain(email))
			time.Sleep(3 * time.Second) // a second attempt would begin sooner
			if n := len(refuser.conversations()); n != 1 {
				t.Errorf("got %d conversations, want 1", n)
			}
		})
	}
}

// The pauses between attempts grow. The last attempt begins within a minute of the request, and the
// log then says why no code was sent.
func TestPausesBetweenAttemptsGrow(t *testing.T) {
	t.Parallel()
	s, refuser := startWithRefuser(t)
	refuser.refuse("mail", slices.Repeat([]string{refusals["mail"]}, 1000)...) // more than attempts
	email, _ := s.NewUser(t, "member")
	asked := time.Now()
	s.Client(t).AskCode(email)
	for s.Log.Count(`"level":"ERROR","msg":"code `, "thread limit") == 0 {
		if time.Since(asked) > time.Minute+hubstest.Patience {
			t.Fatalf("a minute later, the log does not say what became of the code:\n%s", s.Log.End())
		}
		time.Sleep(100 * time.Millisecond)
	}
	begun := refuser.conversations()
	n := len(begun)
	first, last := begun[1].Sub(begun[0]), begun[n-1].Sub(begun[n-2])
	if n < 4 || last < 2*first {
		t.Errorf("got %d attempts, a first pause of %v and a last one of %v, want a longer one", n, first, last)
	}
	if latest := begun[n-1].Sub(asked); latest > time.Minute {
		t.Errorf("the last attempt began %v after the request, want it within a minute", latest)
	}
	s.Log.WaitFor(t, "code not sent", "thread limit") // not "perhaps sent": it was refused
	s.Client(t).AskCode(email)
	hubstest.WaitUntil(t, "another attempt, at once", func() bool { return len(refuser.conversations()) > n })
}

// D3: Mail that waits for its next attempt holds up no other mail.
func TestPausesHoldUpNoOtherMail(t *testing.T) {
	t.Parallel()
	s, refuser := startWithRefuser(t)
	const attempts = 3 // so that the next pause is long
	waiting := addUsers(t, s, 2*hubstest.MailConversations)
	for range attempts * len(waiting) {
		refuser.refuse("RCPT", refusals["RCPT"])
	}
	for _, email := range waiting {
		s.Client(t).AskCode(email)
	}
	hubstest.WaitFor(t, "refusals", attempts*len(waiting), func() int { return s.Log.Count("refused for now") })

	email, _ := s.NewUser(t, "member")
	s.Client(t).AskCode(email)
	s.Code(t, email)
	if n := len(s.Mail.Received()); n > hubstest.MailConversations {
		t.Errorf("got the mail after %d others that were to wait, want it before them", n-1)
	}
}

// H3: A stop does not wait for the end of a pause: it makes one last attempt at once.
func TestStopEndsThePauses(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		refusals, mails int
	}{
		"that succeeds": {refusals: 3, mails: 1},
		"that fails":    {refusals: 10, mails: 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, refuser := startWithRefuser(t)
			email, _ := s.NewUser(t, "member")
			for range test.refusals {
				refuser.refuse("MAIL", refusals["MAIL"])
			}
			s.Client(t).AskCode(email)
			hubstest.WaitFor(t, "refusals", 3, func() int { return s.Log.Count("refused for now") })
			s.Signal(t, syscall.SIGTERM)
			wantExit(t, s, 0)
			hubstest.WantEqual(t, "conversations", len(refuser.conversations()), 4)
			hubstest.WantEqual(t, "mails", len(s.Mail.Received()), test.mails)
		})
	}
}
