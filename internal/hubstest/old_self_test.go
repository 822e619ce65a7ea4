//go:build moving

package main

// A harness that can't fail proves nothing. Here each of its checks sees something that it
// must refuse, and each of its faults must cause what it is for.

import (
	"bufio"
	"crypto/tls"
	"database/sql"
	"errors"
	"io"
	"net"
	"net/http"
	"net/smtp"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestHarnessProblem(t *testing.T) {
	good := func() *testResponse {
		r := &testResponse{method: "GET", path: "/hubs", status: 400, header: http.Header{
			"X-Request-Id": {"id1"}, "Vary": {"Origin"}, "Content-Security-Policy": {strictCSP},
			"Cache-Control": {"no-store"}, "Content-Type": {"application/problem+json"},
		}}
		for name, value := range everyAnswer {
			r.header.Set(name, value)
		}
		r.body = []byte(`{"title":"t","status":400,"detail":"d","code":"invalid_request","requestId":"id1",` +
			`"errors":[{"field":"limit","detail":"d"},{"field":"email","detail":"d"}]}`)
		return r
	}
	if err := good().problemFault(400, "invalid_request", []string{"email", "limit"}); err != nil {
		t.Fatal(err)
	}
	replace := func(old, new string) func(*testResponse) {
		return func(r *testResponse) {
			if !strings.Contains(string(r.body), old) {
				t.Fatalf("nothing to replace: %s", old)
			}
			r.body = []byte(strings.Replace(string(r.body), old, new, 1))
		}
	}
	spoiled := map[string]func(*testResponse){
		"status":       func(r *testResponse) { r.status = 422 },
		"no JSON":      replace(`{"title"`, `"title"`),
		"body status":  replace(`"status":400`, `"status":401`),
		"code":         replace("invalid_request", "internal"),
		"request id":   replace("id1", "id2"),
		"no detail":    replace(`"detail":"d",`, ``),
		"extra member": replace(`{"title"`, `{"stack":"main.go:1","title"`),
		"token":        replace(`"t"`, `"eyJ"`),
		"field":        replace("limit", "offset"),
		"error detail": replace(`"limit","detail":"d"`, `"limit","detail":""`),
		"content type": func(r *testResponse) { r.header.Set("Content-Type", "application/json") },
		"retry after":  func(r *testResponse) { r.header.Set("Retry-After", "1") },
		"doubled header": func(r *testResponse) {
			r.header.Add("X-Frame-Options", "DENY")
		},
	}
	for name := range good().header {
		spoiled["no "+name] = func(r *testResponse) { r.header.Del(name) }
	}
	for name, spoil := range spoiled {
		t.Run(name, func(t *testing.T) {
			r := good()
			spoil(r)
			if err := r.problemFault(400, "invalid_request", []string{"email", "limit"}); err == nil {
				t.Error("got no fault, want one")
			}
		})
	}
	r := good()
	r.status = 429
	replace("400", "429")(r)
	replace("invalid_request", "rate_limited")(r)
	replace(`,"errors":[{"field":"limit","detail":"d"},{"field":"email","detail":"d"}]`, "")(r)
	for after, ok := range map[string]bool{"": false, "0": false, "1.5": false, "7": true} {
		t.Run("Retry-After "+after, func(t *testing.T) {
			r.header.Set("Retry-After", after)
			if err := r.problemFault(429, "rate_limited", nil); (err == nil) != ok {
				t.Errorf("got the fault %v, want none: %v", err, ok)
			}
		})
	}
}

func TestHarnessLogFaults(t *testing.T) {
	rules := logRules{
		allowed: []string{"database is away"}, secrets: []string{"eyJ", "Ada@example.com"},
		codes: []string{"012345"}, codeLines: true,
	}
	wantFaults := func(t *testing.T, line string, want int) {
		t.Helper()
		if got := rules.faults([]string{line}); len(got) != want {
			t.Errorf("%s: got the faults %q, want %d", line, got, want)
		}
	}
	const codeLine = "Sign-in code for ada@example.com: 012345"
	for line, want := range map[string]int{
		`{"level":"INFO","msg":"code sent","email":"a***@example.com"}`: 0,
		`{"level":"ERROR","msg":"database is away"}`:                    0,
		`{"level":"ERROR","msg":"panic"}`:                               1,
		`{"level":"INFO","email":"ada@EXAMPLE.com"}`:                    1,
		`{"level":"INFO","cookie":"eyJhbGciOi"}`:                        1,
		`{"level":"INFO","body":"{\"code\":\"012345\"}"}`:               1,
		`{"level":"INFO","msg":"code 012345"}`:                          1,
		`{"level":"INFO","msg":"` + codeLine + `"}`:                     2, // the address and the code
		`{"level":"INFO","time":"10:00:00.012345Z","bytes":1012345}`:    0,
		`{"level":"INFO","duration":012345}`:                            1, // no JSON
		`panic: runtime error`:                                          1,
		codeLine:                                                        0, // locally: there is no mail server
		"":                                                              0, // frames it
		" " + codeLine:                                                  3, // no such line: no JSON, address, code
	} {
		t.Run(line, func(t *testing.T) { wantFaults(t, line, want) })
	}
	// With a mail server, nothing of it may be printed.
	rules.codeLines = false
	wantFaults(t, codeLine, 3)
	wantFaults(t, "", 1)
	// A code is always a string in the server, so a bare number is not one (see bareNumber).
	rules.codes = []string{"123456"}
	wantFaults(t, `{"duration":123456}`, 0)
}

func TestHarnessLogBuffer(t *testing.T) {
	log, done := &logBuffer{}, make(chan struct{})
	io.WriteString(log, "one a\ntwo ")
	if got := log.waitFor(t, "one", "a"); got != "one a" || log.mark() != 1 {
		t.Errorf("got %q, %d lines, want %q and 1", got, log.mark(), "one a")
	}
	mark := log.mark()
	go func() {
		io.WriteString(log, "a\nthree")
		close(done)
	}()
	if got := log.waitAfter(t, mark, "a"); got != "two a" {
		t.Errorf("got %q, want %q", got, "two a")
	}
	if _, _, err := log.wait(0, done, containsAll([]string{"one", "two"})); err == nil {
		t.Error("got a line that is not there, want an error")
	}
	if log.count("a") != 2 || log.count("three") != 1 {
		t.Errorf("got %d and %d lines of %q, want 2 and 1", log.count("a"), log.count("three"), log)
	}
}

func TestHarnessMailServer(t *testing.T) {
	t.Parallel()
	send := func(m *mailServer, user, password string) error {
		u, _ := url.Parse(m.url)
		dial := net.Dial
		if m.opts.implicitTLS {
			dial = func(network, addr string) (net.Conn, error) { return tls.Dial(network, addr, nil) }
		}
		conn, err := dial("tcp", u.Host)
		if err != nil {
			return err
		}
		defer conn.Close()
		c, err := smtp.NewClient(conn, u.Hostname())
		if err != nil {
			return err
		}
		if ok, _ := c.Extension("STARTTLS"); ok {
			if err := c.StartTLS(&tls.Config{ServerName: u.Hostname()}); err != nil {
				return err
			}
		}
		if user != "" {
			if err := c.Auth(smtp.PlainAuth("", user, password, u.Hostname())); err != nil {
				return err
			}
		}
		if err := c.Mail("from@example.com"); err != nil {
			return err
		}
		if err := c.Rcpt("to@example.com"); err != nil {
			return err
		}
		w, err := c.Data()
		if err != nil {
			return err
		}
		io.WriteString(w, "Subject: s\r\n\r\n.123456\r\n")
		return w.Close()
	}
	for name, opts := range map[string]mailOptions{
		"STARTTLS": {user: "u", password: "p"},
		"implicit": {user: "u", password: "p", implicitTLS: true},
		"remote":   {user: "u", password: "p", host: "0.0.0.0"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMailServer(t, opts)
			if err := send(m, "u", "p"); err != nil {
				t.Fatal(err)
			}
			got := m.waitMail(t, "TO@example.com")
			if got.data != "Subject: s\r\n\r\n.123456\r\n" || got.from != "from@example.com" || !got.tls || got.user != "u" {
				t.Errorf("got %+v, want the mail as it was sent, by TLS, from the user", got)
			}
			if code := got.code(t); code != "123456" {
				t.Errorf("got the code %q, want 123456", code)
			}
			if send(m, "u", "wrong") == nil || send(m, "", "") == nil || m.passwords() != 2 {
				t.Error("mail without the password: got no error, want one")
			}
		})
	}
	if send(newMailServer(t, mailOptions{untrusted: true}), "", "") == nil {
		t.Error("certificate of an unknown authority: got no error, want one")
	}

	m := newMailServer(t, mailOptions{noStartTLS: true})
	m.slow(50 * time.Millisecond)
	start := time.Now()
	if err := send(m, "", ""); err != nil || time.Since(start) < 250*time.Millisecond {
		t.Errorf("six answers of 50 ms: got %v after %v, want no error and more than 250 ms", err, time.Since(start))
	}
	m.slow(0)
	m.waitMail(t, "to@example.com")
	for _, mode := range []mailMode{mailCloses, mailRefuses, mailDefers, mailRefusesRecipient, mailRefusesSender} {
		m.fail(mode)
		if send(m, "", "") == nil || len(m.received()) != 1 {
			t.Errorf("mode %d: got %d mails and no error, want 1 and an error", mode, len(m.received()))
		}
	}
	for i, mode := range []mailMode{mailHangs, mailHangsData, mailHangsEnd} {
		m.fail(mode)
		sent := make(chan error)
		go func() { sent <- send(m, "", "") }()
		select {
		case err := <-sent:
			t.Errorf("mode %d: got %v, want nothing while it hangs", mode, err)
		case <-time.After(100 * time.Millisecond):
		}
		waitUntil(t, "one connection", func() bool { open, _, _ := m.connections(); return open == 1 })
		m.release()
		if err := <-sent; err != nil || len(m.received()) != i+2 {
			t.Errorf("mode %d after release: got %v and %d mails, want %d", mode, err, len(m.received()), i+2)
		}
	}
}

func TestHarnessProxy(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	heard := make(chan string, 10)
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for lines := bufio.NewReader(conn); ; {
					line, err := lines.ReadString('\n')
					if err != nil {
						return
					}
					heard <- line
					io.WriteString(conn, line)
				}
			}()
		}
	}()
	p, through := proxyURL(t, "echo://user@"+ln.Addr().String()+"/db?x=y")
	if through != "echo://user@"+p.addr+"/db?x=y" {
		t.Errorf("got the URL %s, want the same with the address of the proxy", through)
	}
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", p.addr)
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
	ask := func(conn net.Conn, line, want string) {
		t.Helper()
		io.WriteString(conn, line+"\n")
		wait := patience
		if want == "" {
			wait = 100 * time.Millisecond
		}
		conn.SetReadDeadline(time.Now().Add(wait))
		defer conn.SetReadDeadline(time.Now().Add(patience))
		buf := make([]byte, 100)
		n, err := conn.Read(buf)
		if string(buf[:n]) != want || want == "" && !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: got %q, %v, want %q", line, buf[:n], err, want)
		}
	}
	expect := func(got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	conn := dial()
	ask(conn, "one", "one\n")
	p.hang()
	ask(conn, "two", "")
	p.resume()
	reply, _ := bufio.NewReader(conn).ReadString('\n')
	expect(reply, "two\n")
	p.when("three", p.dropReplies)
	ask(conn, "three", "")
	for _, want := range []string{"one\n", "two\n", "three\n"} {
		expect(<-heard, want)
	}
	p.resume()
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("connection that has lost a reply: got no error, want its end")
	}
	conn = dial()
	ask(conn, "four", "four\n")
	expect(<-heard, "four\n")
	p.when("five", p.cut)
	if _, err := io.WriteString(conn, "five\n"); err != nil {
		t.Error(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || len(heard) > 0 {
		t.Error("after cut: got something through")
	}
	waitUntil(t, "two connections, all closed", func() bool { open, total := p.connections(); return open == 0 && total == 2 })
}

func TestHarnessPostgres(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	before := pg.url
	db := testDB(t, pg.url)
	if _, err := db.Exec("insert into hubs (name) values ('North')"); err != nil {
		t.Fatal(err)
	}
	ask := func(db *sql.DB) <-chan error {
		answered := make(chan error, 1)
		go func() { answered <- db.Ping() }()
		return answered
	}
	pg.pause()
	answered, anew := ask(db), ask(testDB(t, pg.url))
	select {
	case err := <-answered:
		t.Error("paused, on an old connection: got an answer, ", err)
	case err := <-anew:
		t.Error("paused, on a new connection: got an answer, ", err)
	case <-time.After(300 * time.Millisecond):
	}
	pg.resume()
	if err := <-answered; err != nil {
		t.Error(err)
	}
	if err := <-anew; err != nil {
		t.Error(err)
	}
	pg.stop()
	if db.Ping() == nil {
		t.Error("stopped: got an answer, want an error")
	}
	pg.start()
	if pg.url != before {
		t.Errorf("started again: got %s, want %s", pg.url, before)
	}
	if n := queryValue[int](t, pg.url, "select count(*) from hubs"); n != 1 {
		t.Errorf("after a restart: got %d hubs, want 1", n)
	}
}

// The harness as a whole: both ways to run a server, both ways that a code takes, two servers
// on the same data.
func TestHarnessServer(t *testing.T) {
	t.Parallel()
	local := startServer(t)
	c, _ := local.member(t, "member")
	c.do("GET", "/hubs", nil).want(t, 200)

	second := startServer(t, local.env)
	other := second.client(t)
	other.setToken(c.token())
	other.do("GET", "/hubs", nil).want(t, 200)
	other.setToken(c.token() + "x")
	wantProblem(t, other.do("GET", "/hubs", nil), 401, "unauthenticated")

	m := newMailServer(t, mailOptions{})
	p := startProcess(t, local.env, productionEnv(m))
	c, email := p.member(t, "admin")
	if c.token() == "" || c.do("GET", "/auth/session", nil).want(t, 200).field(t, "user", "email") != email {
		t.Error("got no session of the user who signed in")
	}
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t); code != 0 {
		t.Errorf("got exit status %d, want 0", code)
	}
}
