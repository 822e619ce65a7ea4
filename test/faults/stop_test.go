package faults

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

func startWithMail(t *testing.T) *hubstest.Server {
	t.Helper()
	m := hubstest.NewMailServer(t, hubstest.MailOptions{})
	return hubstest.Start(t, m.Env())
}

// addUsers adds n users at once.
func addUsers(t *testing.T, s *hubstest.Server, n int) (emails []string) {
	t.Helper()
	domain := "@" + strings.ToLower(hubstest.NewUUID()) + ".example"
	hubstest.Exec(t, s.Database,
		"insert into users (email) select n || $1 from generate_series(1, $2::int) n", domain, n)
	for i := range n {
		emails = append(emails, fmt.Sprint(i+1, domain))
	}
	return emails
}

// askCodes asks for the codes of n new users, while the mail server hangs. It returns when the
// first conversation has begun.
func askCodes(t *testing.T, s *hubstest.Server, n int) (emails []string) {
	t.Helper()
	emails = addUsers(t, s, n)
	s.Mail.Fail(hubstest.MailHangs)
	c := s.Client(t)
	for _, email := range emails {
		c.Elsewhere().AskCode(email)
	}
	hubstest.WaitUntil(t, "a conversation", func() bool {
		return s.Mail.Connections() > 0
	})
	return emails
}

// manyMails is more than there are conversations at a time: some wait for others.
const manyMails = 100

// H3: SIGTERM under load. Every request that was taken is answered, and its client is told that
// the connection ends. Every mail that was promised is sent. The exit status is 0.
func TestStopAnswersEveryRequest(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	member, _ := s.Member(t, "member")
	upload := member.StartUpload("a.txt")
	stranger := s.Client(t)
	idle := hubstest.Dial(t, s.Addr)
	idle.Exchange(t, stranger.Head("GET /healthz")+"\r\n", 200)
	late, _ := s.NewUser(t, "member")
	body := fmt.Sprintf(`{"email":%q}`, late)
	asking := hubstest.Dial(t, s.Addr)
	head := stranger.Head(
		"POST /auth/otp/request",
		"Content-Type: application/json",
		fmt.Sprintf("Content-Length: %d", len(body)),
	)
	io.WriteString(asking, head+"\r\n"+body[:5])
	clients := startKeepAlive(t, s)
	emails := askCodes(t, s, manyMails)
	emails = append(emails, late)

	s.Signal(t, syscall.SIGTERM)
	wantEnd(t, idle) // from here on, the server waits for the requests under way
	asking.Exchange(t, body[5:], 200)
	clients.Wait()
	wantRunning(t, s, "with an upload under way")
	upload.Finish().Want(t, 201)
	wantRunning(t, s, "with mail unsent")
	s.Mail.Release()
	wantExit(t, s, 0)
	mails := map[string]int{}
	for _, mail := range s.Mail.Received() {
		mails[mail.To[0]]++
	}
	for _, email := range emails {
		if mails[email] != 1 {
			t.Errorf("to %s: got %d mails, want 1", email, mails[email])
		}
	}
	s.WantStored(t, 1)
}

// wantExit waits for the end of a server.
func wantExit(t *testing.T, s *hubstest.Server, want int) {
	t.Helper()
	if code := s.Wait(t); code != want {
		t.Errorf("got exit status %d, want %d", code, want)
	}
}

// wantEnd waits until the server has closed the connection.
func wantEnd(t *testing.T, conn *hubstest.Conn) {
	t.Helper()
	_, err := io.Copy(io.Discard, conn.In)
	if os.IsTimeout(err) {
		t.Errorf("after %v the connection is still open", hubstest.Patience)
	}
}

// wantRunning checks that the server does not end for a while. Nothing announces what it waits
// for. The while is longer than its steps of half a second.
func wantRunning(t *testing.T, s *hubstest.Server, why string) {
	t.Helper()
	select {
	case <-s.Done():
		t.Fatalf("the server has ended %s\n%s", why, s.Log)
	case <-time.After(1500 * time.Millisecond):
	}
}

// startKeepAlive starts clients that send one request after the other on a connection that they
// keep, until the server tells them that it ends. It returns when they have had many answers.
func startKeepAlive(t *testing.T, s *hubstest.Server) (clients *sync.WaitGroup) {
	t.Helper()
	clients = &sync.WaitGroup{}
	var answered atomic.Int64
	c := s.Client(t)
	for range 8 {
		conn := hubstest.Dial(t, s.Addr)
		clients.Go(func() {
			for {
				io.WriteString(conn, c.Head("GET /openapi.json")+"\r\n")
				status, closes, err := conn.Receive()
				if err != nil || status != 200 {
					t.Errorf("a request was lost: got %d, %v, want 200", status, err)
					return
				}
				answered.Add(1)
				if closes {
					return
				}
			}
		})
	}
	hubstest.WaitUntil(t, "load", func() bool {
		return answered.Load() > 500
	})
	return clients
}

// A mail server that never answers does not keep a stopping server for ever. The mail is given
// up, the log says so, and so does the exit status.
func TestStopGivesUpOnMail(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	s.AllowErrors("code not sent")
	askCodes(t, s, manyMails) // the last conversations begin when the first have ended
	s.Signal(t, syscall.SIGTERM)
	wantExit(t, s, 1)
	s.WantStderr(t, "mail unsent")
}

// A request that does not end does not keep a stopping server. It is cut off, the log says so,
// and so does the exit status.
func TestStopCutsOffWhatDoesNotEnd(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	upload := c.StartUpload("a.txt")
	s.Signal(t, syscall.SIGTERM)
	wantExit(t, s.Server, 1)
	s.Log.WaitFor(t, `"msg":"stopped"`, `"requestsCutOff":true`)
	s.WantStderr(t, "cut off")
	breakOff(t, upload)
	s.AgeUnfinished(t)
	hubstest.Start(t, s.Env)
	s.waitFiles(0)
}

// Ctrl-C stops the server as SIGTERM does.
func TestInterruptStopsInOrder(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	s.Signal(t, syscall.SIGINT)
	wantExit(t, s, 0)
	s.Log.WaitFor(t, `"msg":"stopped"`, `"requestsCutOff":false`)
}

// A second signal ends at once a server that is about to stop: here it waits for its mail.
func TestSecondInterruptEndsAtOnce(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	s.AllowErrors("code not sent")
	askCodes(t, s, manyMails)
	s.Signal(t, syscall.SIGINT)
	// Perhaps the server has not heard of the first signal yet.
	hubstest.WaitUntil(t, "the end of the process", func() bool {
		return s.Cmd.Process.Signal(syscall.SIGINT) != nil
	})
	wantExit(t, s, -1) // by the signal
}

// H1: a client that does not read its answers is cut off.
func TestUnreadAnswersEnd(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.exec(`insert into hubs (name, description)
		select 'n', repeat('😀', 2000) from generate_series(1, 100)`)
	conn := hubstest.Dial(t, s.Addr)
	conn.SetDeadline(time.Now().Add(4 * hubstest.Patience))
	request := c.Head("GET /hubs?limit=100") + "\r\n"
	requests := strings.Repeat(request, 80) // 64 MB of answers
	_, err := io.WriteString(conn, requests)
	for err == nil {
		time.Sleep(100 * time.Millisecond) // nothing announces the end to one who does not read
		_, err = io.WriteString(conn, request)
	}
	hasEnded := errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
	if !hasEnded {
		t.Fatalf("got %v, want the end of the connection", err)
	}
}
