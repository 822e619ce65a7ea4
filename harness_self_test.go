package main

// A harness that can't fail proves nothing: each of its checks is shown here one
// thing that it must refuse, and each of its faults one that it must cause.

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
	bad := map[string]func(*testResponse){
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
		"doubled header": func(r *testResponse) {
			r.header.Add("X-Frame-Options", "DENY")
		},
	}
	for name := range good().header {
		bad[name] = func(r *testResponse) { r.header.Del(name) }
	}
	for name, spoil := range bad {
		r := good()
		if spoil(r); r.problemFault(400, "invalid_request", []string{"email", "limit"}) == nil {
			t.Errorf("%s: taken for good", name)
		}
	}
	r := good()
	r.status = 429
	replace("400", "429")(r)
	replace("invalid_request", "rate_limited")(r)
	replace(`,"errors":[{"field":"limit","detail":"d"},{"field":"email","detail":"d"}]`, "")(r)
	for after, ok := range map[string]bool{"": false, "0": false, "1.5": false, "7": true} {
		r.header.Set("Retry-After", after)
		if err := r.problemFault(429, "rate_limited", nil); (err == nil) != ok {
			t.Errorf("Retry-After %q: %v", after, err)
		}
	}
}

func TestHarnessLogFaults(t *testing.T) {
	rules := logRules{
		allowed: []string{"database is away"}, secrets: []string{"eyJ", "Ada@example.com"},
		codes: []string{"012345"}, codeLines: true,
	}
	for line, faults := range map[string]int{
		`{"level":"INFO","msg":"code sent","email":"a***@example.com"}`: 0,
		`{"level":"ERROR","msg":"database is away"}`:                    0,
		`{"level":"ERROR","msg":"panic"}`:                               1,
		`{"level":"INFO","email":"ada@EXAMPLE.com"}`:                    1,
		`{"level":"INFO","cookie":"eyJhbGciOi"}`:                        1,
		`{"level":"INFO","body":"{\"code\":\"012345\"}"}`:               1,
		`{"level":"INFO","msg":"code 012345"}`:                          1,
		`{"level":"INFO","time":"10:00:00.012345Z","bytes":1012345}`:    0,
		`{"level":"INFO","duration":012345}`:                            1, // no JSON
		`panic: runtime error`:                                          1,
		"Sign-in code for a***@example.com: 012345":                     0,
		"Sign-in code for ada@example.com: 012345":                      1,
	} {
		if got := rules.faults([]string{line}); len(got) != faults {
			t.Errorf("%s: %q, want %d", line, got, faults)
		}
	}
	rules.codeLines = false
	if len(rules.faults([]string{"Sign-in code for a***@example.com: 012345"})) == 0 {
		t.Error("a code on standard output, in spite of a mail server")
	}
	// A number as a member's value is no code, see bareNumber.
	rules.codes = []string{"123456"}
	if got := rules.faults([]string{`{"duration":123456}`}); len(got) != 0 {
		t.Error(got)
	}
}

func TestHarnessLogBuffer(t *testing.T) {
	log, done := &logBuffer{}, make(chan struct{})
	io.WriteString(log, "one a\ntwo ")
	if got := log.waitFor(t, "one", "a"); got != "one a" || log.mark() != 1 {
		t.Errorf("%q, %d lines", got, log.mark())
	}
	mark := log.mark()
	go func() {
		io.WriteString(log, "a\nthree")
		close(done)
	}()
	if got := log.waitAfter(t, mark, "a"); got != "two a" {
		t.Errorf("%q", got)
	}
	if _, _, err := log.wait(0, done, containsAll([]string{"one", "two"})); err == nil {
		t.Error("found a line that is not there")
	}
	if log.count("a") != 2 || log.count("three") != 1 {
		t.Errorf("counts in %q", log)
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
		m := newMailServer(t, opts)
		if err := send(m, "u", "p"); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got := m.waitMail(t, "TO@example.com")
		if got.data != "Subject: s\r\n\r\n.123456\r\n" || got.from != "from@example.com" || !got.tls || got.user != "u" {
			t.Errorf("%s: %+v", name, got)
		}
		if code := got.code(t); code != "123456" {
			t.Errorf("code %q", code)
		}
		if send(m, "u", "wrong") == nil || send(m, "", "") == nil || m.passwords() != 2 {
			t.Errorf("%s: took mail without the password", name)
		}
	}
	if send(newMailServer(t, mailOptions{untrusted: true}), "", "") == nil {
		t.Error("a certificate that no one trusts was accepted")
	}

	m := newMailServer(t, mailOptions{noStartTLS: true})
	m.slow(50 * time.Millisecond)
	if start := time.Now(); send(m, "", "") != nil || time.Since(start) < 250*time.Millisecond {
		t.Errorf("six answers of 50 ms within %v", time.Since(start))
	}
	m.slow(0)
	m.waitMail(t, "to@example.com")
	for _, mode := range []mailMode{mailCloses, mailRefuses, mailDefers, mailRefusesRecipient, mailRefusesSender} {
		m.fail(mode)
		if send(m, "", "") == nil || len(m.received()) != 1 {
			t.Errorf("mode %d: took mail", mode)
		}
	}
	for i, mode := range []mailMode{mailHangs, mailHangsData, mailHangsEnd} {
		m.fail(mode)
		sent := make(chan error)
		go func() { sent <- send(m, "", "") }()
		select {
		case err := <-sent:
			t.Errorf("mode %d does not hang: %v", mode, err)
		case <-time.After(100 * time.Millisecond):
		}
		waitUntil(t, "one connection", func() bool { open, _, _ := m.connections(); return open == 1 })
		m.release()
		if err := <-sent; err != nil || len(m.received()) != i+2 {
			t.Errorf("mode %d after release: %v, %d mails", mode, err, len(m.received()))
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
		t.Error(through)
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
			t.Errorf("%s: %q, %v, want %q", line, buf[:n], err, want)
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
		t.Error("a connection that has lost a reply lives on")
	}
	conn = dial()
	ask(conn, "four", "four\n")
	expect(<-heard, "four\n")
	p.when("five", p.cut)
	if _, err := io.WriteString(conn, "five\n"); err != nil {
		t.Error(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || len(heard) > 0 {
		t.Error("passed in spite of cut")
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
		t.Error("a paused connection answers: ", err)
	case err := <-anew:
		t.Error("a paused server takes connections: ", err)
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
		t.Error("stopped, and answers")
	}
	pg.start()
	if pg.url != before {
		t.Errorf("started again as %s, was %s", pg.url, before)
	}
	if n := queryValue[int](t, pg.url, "select count(*) from hubs"); n != 1 {
		t.Errorf("%d hubs after a restart", n)
	}
}

// The whole of it once: both ways to run a server, both ways of a code, two servers
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
		t.Error("no session")
	}
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t); code != 0 {
		t.Errorf("exit %d", code)
	}
}
