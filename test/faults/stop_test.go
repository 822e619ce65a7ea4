package faults

import (
	"errors"
	"fmt"
	"io"
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
	head := stranger.Head("POST /auth/otp/request",
		"Content-Type: application/json",
		fmt.Sprintf("Content-Length: %d", len(body)))
	io.WriteString(asking, head+"\r\n"+body[:5])
	clients := startKeepAlive(t, s, 8)
	s.Mail.Fail(hubstest.MailHangs) // until the server waits for the mail alone
	emails := []string{late}
	for range 40 { // more than there are conversations at a time: some wait for others
		email, _ := s.NewUser(t, "member")
		s.Client(t).AskCode(email)
		emails = append(emails, email)
	}

	s.Signal(t, syscall.SIGTERM)
	idle.WantEnd(t) // from here on, the server waits for the requests under way
	asking.Exchange(t, body[5:], 200)
	clients.waitTold(t)
	wantRunning(t, s, "with an upload under way")
	upload.Finish().Want(t, 201)
	wantRunning(t, s, "with mail unsent")
	s.Mail.Release()
	if code := s.Wait(t); code != 0 {
		t.Errorf("got exit status %d, want 0", code)
	}
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

// keepAlive is clients that send one request after the other on a connection that they keep.
type keepAlive struct {
	clients        sync.WaitGroup
	answered, told atomic.Int64
	want           int64
}

// startKeepAlive returns when the clients have had many answers.
func startKeepAlive(t *testing.T, s *hubstest.Server, clients int) *keepAlive {
	t.Helper()
	k := &keepAlive{want: int64(clients)}
	c := s.Client(t)
	for range clients {
		conn := hubstest.Dial(t, s.Addr)
		k.clients.Go(func() {
			for {
				io.WriteString(conn, c.Head("GET /openapi.json")+"\r\n")
				status, closes, err := conn.Receive()
				if err != nil || status != 200 {
					t.Errorf("a request was lost: got %d, %v, want 200", status, err)
					return
				}
				k.answered.Add(1)
				if closes {
					k.told.Add(1)
					return
				}
			}
		})
	}
	hubstest.WaitUntil(t, "load", func() bool {
		return k.answered.Load() > 500
	})
	return k
}

func (k *keepAlive) waitTold(t *testing.T) {
	t.Helper()
	k.clients.Wait()
	if got := k.told.Load(); got != k.want {
		t.Errorf("got %d clients that were told of the end, want %d", got, k.want)
	}
}

// hungCodes lets n requests for a code hang in a conversation with the mail server.
func hungCodes(t *testing.T, s *hubstest.Server, n int) {
	t.Helper()
	s.Mail.Fail(hubstest.MailHangs)
	for range n {
		email, _ := s.NewUser(t, "member")
		s.Client(t).AskCode(email)
	}
	hubstest.WaitUntil(t, "a conversation", func() bool {
		open, _, _ := s.Mail.Connections()
		return open > 0
	})
}

// A mail server that never answers does not keep a stopping server for ever. The mail is given
// up, the log says so, and so does the exit status.
func TestStopGivesUpOnMail(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	s.AllowErrors("code not sent")
	hungCodes(t, s, 40) // the last conversations begin when the first have ended
	s.Signal(t, syscall.SIGTERM)
	if code := s.Wait(t); code != 1 {
		t.Errorf("got exit status %d, want 1", code)
	}
	s.Stderr.WaitFor(t, "mail unsent")
	s.Stderr = &hubstest.Log{} // a running server writes nothing there
}

// A request that does not end does not keep a stopping server. It is cut off, the log says so,
// and so does the exit status.
func TestStopCutsOffWhatDoesNotEnd(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	upload := c.StartUpload("a.txt")
	s.Signal(t, syscall.SIGTERM)
	if code := s.Wait(t); code != 1 {
		t.Errorf("got exit status %d, want 1", code)
	}
	s.Log.WaitFor(t, `"msg":"stopped"`, `"requestsCutOff":true`)
	s.Stderr.WaitFor(t, "cut off")
	s.Stderr = &hubstest.Log{} // a running server writes nothing there
	upload.Rest.Close()
	if r := <-upload.Answer; r.Status != 0 {
		t.Errorf("got %v, want no answer", r)
	}
	s.AgeUnfinished(t)
	again := hubstest.Start(t, s.Env)
	hubstest.WaitUntil(t, "the sweep", func() bool {
		return len(again.FilesIn(t)) == 0
	})
}

// Ctrl-C stops the server as SIGTERM does. Meanwhile a second signal ends it at once.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	s.Signal(t, syscall.SIGINT)
	if code := s.Wait(t); code != 0 {
		t.Errorf("got exit status %d, want 0", code)
	}
	s.Log.WaitFor(t, `"msg":"stopped"`, `"requestsCutOff":false`)

	s = startWithMail(t)
	s.AllowErrors("code not sent")
	hungCodes(t, s, 40)
	s.Signal(t, syscall.SIGINT)
	// Perhaps the server has not heard of the first signal yet.
	hubstest.WaitUntil(t, "the end of the process", func() bool {
		s.Cmd.Process.Signal(syscall.SIGINT)
		select {
		case <-s.Done():
			return true
		default:
			return false
		}
	})
	if code := s.Wait(t); code != -1 {
		t.Errorf("got exit status %d, want an end by the signal", code)
	}
}

// D3, O6: at most 1,000 requests for a code are unfinished. Above that each address gets the
// same 503, and each request that was accepted is worked off.
func TestUnfinishedCodeRequestsAreBounded(t *testing.T) {
	t.Parallel()
	const bound = 1000
	s := startWithMail(t)
	s.AllowErrors("code not sent", "too many unfinished requests")
	domain := "@" + strings.ToLower(hubstest.NewUUID()) + ".example"
	hubstest.Exec(t, s.Env["DATABASE_URL"],
		"insert into users (email) select n || $1 from generate_series(1, 2000) n", domain)
	s.Mail.Fail(hubstest.MailHangs)
	c := s.Client(t)
	ask := func(email string) *hubstest.Response {
		body := map[string]string{"email": email}
		return c.Elsewhere().Do("POST", "/auth/otp/request", body)
	}
	accepted := 0
	for accepted < 2*bound {
		email := fmt.Sprintf("%d%s", accepted+1, domain)
		if ask(email).Status != 200 {
			break
		}
		accepted++
	}
	wantUnavailable(t, ask("1"+domain))
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

// H1: a client that does not read its answers is cut off.
func TestUnreadAnswersEnd(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	hubstest.Exec(t, s.Env["DATABASE_URL"], `insert into hubs (name, description)
		select 'n', repeat('😀', 2000) from generate_series(1, 100)`)
	c, _ := s.Member(t, "member")
	conn := hubstest.Dial(t, s.Addr)
	conn.SetDeadline(time.Now().Add(4 * hubstest.Patience))
	request := c.Head("GET /hubs?limit=100") + "\r\n"
	io.WriteString(conn, strings.Repeat(request, 80)) // 64 MB of answers
	for {
		if _, err := io.WriteString(conn, request); err != nil {
			if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
				return
			}
			t.Fatalf("got %v, want the end of the connection", err)
		}
		time.Sleep(100 * time.Millisecond) // nothing announces the end to one who does not read
	}
}
