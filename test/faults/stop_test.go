package faults

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// startWithMail starts a server that sends its mail to a mail server of the test.
func startWithMail(t *testing.T) *hubstest.Server {
	t.Helper()
	return hubstest.Start(t, hubstest.NewMailServer(t, hubstest.MailOptions{}).Env())
}

// addUsers adds n users with one statement, and returns their addresses.
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

// askCodes requests codes for n new users. It returns their addresses, after the first conversation
// with the mail server has begun.
func askCodes(t *testing.T, s *hubstest.Server, n int) (emails []string) {
	t.Helper()
	emails = addUsers(t, s, n)
	c := s.Client(t)
	for _, email := range emails {
		c.Elsewhere().AskCode(email)
	}
	hubstest.WaitUntil(t, "a conversation with the mail server", func() bool {
		return s.Mail.Connections() > 0
	})
	return emails
}

// beginCodeRequest begins a request for a code, and returns its body, which is still to be sent. A
// stopping server closes a connection of which it has not begun to read the request, so
// beginCodeRequest waits for the 100 (Continue) that net/http sends when the body is to be read.
func beginCodeRequest(t *testing.T, s *hubstest.Server, email string) (conn *hubstest.Conn, body string) {
	t.Helper()
	body = fmt.Sprintf(`{"email":%q}`, email)
	conn = hubstest.Dial(t, s.Addr)
	conn.Send(t, s.Client(t).Head(
		"POST /auth/otp/request",
		"Content-Type", "application/json",
		"Content-Length", fmt.Sprint(len(body)),
		"Expect", "100-continue",
	)).Must(t, 100)
	return conn, body
}

// manyMails is more than the conversations that the server has with the mail server at the same
// time, so some mails wait for others.
const manyMails = hubstest.MailConversations + 8

// H3: On SIGTERM, the server answers every request that it has accepted, if the request ends in
// time. Then it ends with exit status 0. TestReplacedServersShareASocket shows this under load.
//
// When the server gets the signal, there is an upload of which it has the first half, an idle
// connection, and a request for a code without its body.
func TestStopAnswersEveryRequest(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	member, _ := s.Member(t, "member")
	email, _ := s.NewUser(t, "member")
	upload := member.StartUpload("a.txt")
	idle := hubstest.Dial(t, s.Addr)
	idle.Send(t, member.Elsewhere().Head("GET /healthz")).Must(t, 200)
	begun, body := beginCodeRequest(t, s, email)

	s.Signal(t, syscall.SIGTERM)
	// Afterwards, the server only waits for the requests that are not finished.
	wantClosed(t, idle)
	begun.Finish(t, body).Want(t, 200)
	// Nothing shows what the server waits for, so the test can only give it time to end too early. A
	// stopping server looks every half a second, or more often, whether it can go on; 1.5 s is longer.
	select {
	case <-s.Done:
		t.Errorf("the server has ended, want it to wait for the upload\n%s", s.Log.End())
	case <-time.After(1500 * time.Millisecond):
	}
	upload.Finish().Want(t, 201)
	wantExit(t, s, 0)
	s.WantStored(t, 1)
	wantOneMailEach(t, s, email)
}

// H3: At whatever moment of a request for a code the server gets the signal, the mail is sent. Here
// the last requests are answered when the server only waits for them, so that their codes are still
// in their delay when it could end.
func TestStopMailsTheLastCodes(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	emails := addUsers(t, s, 20)
	c := s.Client(t)
	idle := hubstest.Dial(t, s.Addr)
	idle.Send(t, c.Elsewhere().Head("GET /healthz")).Must(t, 200)
	finish := map[*hubstest.Conn]string{} // the bodies
	for _, email := range emails {
		conn, body := beginCodeRequest(t, s, email)
		finish[conn] = body
	}

	s.Signal(t, syscall.SIGTERM)
	wantClosed(t, idle)
	for conn, body := range finish {
		conn.Finish(t, body).Want(t, 200)
	}
	wantExit(t, s, 0)
	wantOneMailEach(t, s, emails...)
}

// H3: On SIGINT (Ctrl-C), as on SIGTERM, the server sends the mail of every request for a code that
// it has accepted. Then it ends with exit status 0.
func TestStopSendsMailUnderWay(t *testing.T) {
	t.Parallel()
	slow := hubstest.MailOptions{Delay: 200 * time.Millisecond} // so a mail takes more than a second
	s := hubstest.Start(t, hubstest.NewMailServer(t, slow).Env())
	emails := askCodes(t, s, manyMails)
	s.Signal(t, syscall.SIGINT)
	if len(s.Mail.Received()) == manyMails {
		t.Fatal("setup: got every mail by the time of the signal, want some under way")
	}
	wantExit(t, s, 0)
	s.Log.WaitFor(t, `"msg":"stopped"`, `"requestsCutOff":false`)
	wantOneMailEach(t, s, emails...)
}

// wantOneMailEach checks that the mail server has received one mail for each address.
func wantOneMailEach(t *testing.T, s *hubstest.Server, emails ...string) {
	t.Helper()
	mails := map[string]int{}
	for _, mail := range s.Mail.Received() {
		mails[mail.To[0]]++
	}
	for _, email := range emails {
		if mails[email] != 1 {
			t.Errorf("mails to %s: got %d, want 1", email, mails[email])
		}
	}
}

// wantExit waits until a server has ended, and fails the test if its exit status is not want.
func wantExit(t *testing.T, s *hubstest.Server, want int) {
	t.Helper()
	if code := s.WaitExit(t); code != want {
		t.Errorf("got exit status %d, want %d", code, want)
	}
}

// expectStderr checks that a server, which has ended, has written lines with this part on standard
// error, and no others. The harness then finds none.
func expectStderr(t *testing.T, s *hubstest.Server, part string) {
	t.Helper()
	s.Stderr.WaitFor(t, part)
	for _, line := range s.Stderr.All() {
		if !strings.Contains(line, part) {
			t.Errorf("standard error: got the line %q, want only such with %q", line, part)
		}
	}
	s.Stderr = &hubstest.Log{}
}

// wantClosed waits until the server has closed the connection. It fails the test if that takes
// longer than hubstest.Patience.
func wantClosed(t *testing.T, conn *hubstest.Conn) {
	t.Helper()
	_, err := io.Copy(io.Discard, conn.In)
	if os.IsTimeout(err) {
		t.Errorf("the connection is still open after %v, want it closed", hubstest.Patience)
	}
}

// If the mail server hangs, a server that is stopping waits for its mail only for a limited time.
// Then it ends without having sent the mail. It says so on standard error, and ends with exit
// status 1.
func TestStopGivesUpOnMail(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	s.AllowErrorsWithAnyOf("code not sent")
	// The last conversations begin only when the first ones have failed. All together take longer
	// than the server waits.
	s.Mail.Fail(hubstest.MailHangs)
	askCodes(t, s, manyMails)
	s.Signal(t, syscall.SIGTERM)
	wantExit(t, s, 1)
	expectStderr(t, s, "mail unsent")
}

// A server that is stopping gives its time to requests, and then again to mail. It cuts off a request
// that does not end, says so in the log and on standard error, and ends with exit status 1.
func TestStopWaitsForRequestsThenMail(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	s.AllowErrorsWithAnyOf("code not sent")
	c, _ := s.Member(t, "member")
	s.Mail.Fail(hubstest.MailHangs)
	upload := c.StartUpload("a.txt")
	askCodes(t, s, manyMails)
	s.Signal(t, syscall.SIGTERM)
	wantExit(t, s, 1)
	s.Log.WaitFor(t, `"msg":"stopped"`, `"requestsCutOff":true`)
	expectStderr(t, s, "cut off")
	breakOff(t, upload)
}

// A server whose standard output is a pipe that nobody reads stands still when the pipe is full.
// SIGTERM ends it all the same, after the time that it gives to requests and then to mail.
func TestStopEndsThoughNobodyReadsTheLog(t *testing.T) {
	t.Parallel()
	unread, output, err := os.Pipe()
	hubstest.Must(t, err)
	t.Cleanup(func() { unread.Close() })
	cmd := exec.Command(hubstest.Binary(), "serve")
	for name, value := range hubstest.ServerEnv(t) {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Stdout = output
	hubstest.Must(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill() })
	_, err = unread.Read(make([]byte, 4096)) // the line that the server listens
	hubstest.Must(t, err)
	fillPipe(t, output)

	cmd.Process.Signal(syscall.SIGTERM)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-ended:
	case <-time.After(2 * hubstest.Patience):
		t.Errorf("the server has not ended within %v of the signal", 2*hubstest.Patience)
	}
}

// fillPipe writes into a pipe until nothing more fits, so that the next write to it blocks.
func fillPipe(t *testing.T, pipe *os.File) {
	t.Helper()
	fd := int(pipe.Fd())
	hubstest.Must(t, syscall.SetNonblock(fd, true))
	for {
		_, err := syscall.Write(fd, []byte("x"))
		if err == syscall.EAGAIN {
			break
		}
		hubstest.Must(t, err)
	}
	hubstest.Must(t, syscall.SetNonblock(fd, false))
}

// A second signal ends a server at once, even if it is stopping and still waits for its mail.
func TestSecondInterruptEndsAtOnce(t *testing.T) {
	t.Parallel()
	s := startWithMail(t)
	s.AllowErrorsWithAnyOf("code not sent")
	s.Mail.Fail(hubstest.MailHangs)
	askCodes(t, s, manyMails)
	s.Signal(t, syscall.SIGINT)
	// Repeat the signal: the server may not have received the first one yet.
	hubstest.WaitUntil(t, "the end of the process", func() bool {
		return s.Cmd.Process.Signal(syscall.SIGINT) != nil
	})
	wantExit(t, s, -1) // -1: ended by a signal
}

// H1: The server closes the connection of a client that does not read its answers.
func TestUnreadAnswersEnd(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.exec(`insert into hubs (name, description)
		select 'n', repeat('😀', 2000) from generate_series(1, 100)`)
	conn := hubstest.Dial(t, s.Addr)
	conn.SetDeadline(time.Now().Add(4 * hubstest.Patience))
	request := c.Head("GET /hubs?limit=100")
	requests := strings.Repeat(request, 80) // 64 MB of answers, more than fits into buffers
	_, err := io.WriteString(conn, requests)
	for err == nil {
		// A client that does not read is not told of the end, so try until a write fails.
		time.Sleep(100 * time.Millisecond)
		_, err = io.WriteString(conn, request)
	}
	hasEnded := errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
	if !hasEnded {
		t.Fatalf("got the error %v, want one of a closed connection", err)
	}
}
