//go:build moving

package main

// One-time codes and the mail that carries them.

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/mail"
	"net/smtp"
	"net/url"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func newCodes() *oneTimeCodes { return &oneTimeCodes{byEmail: map[string]oneTimeCode{}} }

// mustIssue makes a code where one must be made.
func mustIssue(t testing.TB, c *oneTimeCodes, email string) string {
	t.Helper()
	code, ok := c.issue(email)
	if !ok || !regexp.MustCompile(`^[0-9]{6}$`).MatchString(code) {
		t.Fatalf("code %q, %v", code, ok)
	}
	return code
}

// otherCode is a wrong code, the n-th after the right one.
func otherCode(code string, n int) string {
	value, err := strconv.Atoi(code)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf("%06d", (value+n)%1_000_000)
}

// O1: all digits at all places alike. The bound is a chi-square (9 degrees of freedom)
// that a fair source exceeds once in 10^9 runs.
func TestCodesAreUniform(t *testing.T) {
	t.Parallel()
	const draws = 60_000
	codes, counts, pairs := newCodes(), [6][10]int{}, map[string]int{}
	for i := range draws {
		code := mustIssue(t, codes, strconv.Itoa(i))
		for place, digit := range code {
			counts[place][digit-'0']++
		}
		pairs[code]++
	}
	for place, digits := range counts {
		chi := 0.0
		for _, n := range digits {
			chi += (float64(n) - draws/10.0) * (float64(n) - draws/10.0) / (draws / 10.0)
		}
		if chi > 64 {
			t.Errorf("place %d: chi-square %.0f, counts %v", place+1, chi, digits)
		}
	}
	// 60,000 draws of 10^6 hit 58,235 different ones, give or take 41.
	if n := len(pairs); n < 57_900 || n > 58_600 {
		t.Errorf("%d different codes", n)
	}
}

// O1: the ends of the range exist, leading zeros stay, and what the source gives
// beyond the range is drawn again, not folded back into it. Not parallel: the source
// of the whole process is replaced.
func TestCodesFromKnownRandomness(t *testing.T) {
	real := rand.Reader
	defer func() { rand.Reader = real }()
	for _, c := range []struct {
		drawn []int // 20 bits each
		want  string
	}{
		{[]int{0}, "000000"}, {[]int{7}, "000007"}, {[]int{12_345}, "012345"},
		{[]int{999_999}, "999999"}, {[]int{1_000_000, 42}, "000042"}, {[]int{1<<20 - 1, 1_000_001, 5}, "000005"},
	} {
		var source bytes.Buffer
		for _, n := range c.drawn {
			source.Write([]byte{byte(n >> 16), byte(n >> 8), byte(n)})
		}
		rand.Reader = &source
		if code := mustIssue(t, newCodes(), "a"); code != c.want || source.Len() != 0 {
			t.Errorf("%d: %s, want %s (%d bytes left)", c.drawn, code, c.want, source.Len())
		}
	}
}

// O2: the last nanosecond of its life, and the first one after. Nothing else runs in
// the bubble: no sweeper helps.
func TestCodeLifetime(t *testing.T) {
	t.Parallel()
	for after, good := range map[time.Duration]bool{
		0: true, 599 * time.Second: true, 600*time.Second - 1: true, 600 * time.Second: false, 24 * time.Hour: false,
	} {
		synctest.Test(t, func(t *testing.T) {
			codes := newCodes()
			codes.byEmail["a"] = oneTimeCode{"012345", time.Now()} // issue would start a timer
			time.Sleep(after)
			if _, ok := codes.redeem("a", "012345"); ok != good {
				t.Errorf("after %v: %v", after, ok)
			}
		})
	}
}

// While a live code is younger than a minute a further request changes nothing; from
// then on the new code replaces the old one.
func TestCodeResend(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		codes := newCodes()
		first := mustIssue(t, codes, "a")
		for _, pause := range []time.Duration{0, 30 * time.Second, 30*time.Second - 1} {
			time.Sleep(pause)
			if code, ok := codes.issue("a"); ok || code != "" {
				t.Fatalf("a second code %q within the minute", code)
			}
		}
		mustIssue(t, codes, "b") // another mailbox is another matter
		time.Sleep(time.Nanosecond)
		second := mustIssue(t, codes, "a")
		if _, ok := codes.redeem("a", first); ok && first != second {
			t.Error("the replaced code works")
		}
		if _, ok := codes.redeem("a", second); !ok {
			t.Error("the new code does not work")
		}
	})
	synctest.Test(t, func(t *testing.T) {
		codes := newCodes()
		first := mustIssue(t, codes, "a")
		time.Sleep(time.Minute - 1)
		codes.issue("a")
		time.Sleep(9*time.Minute + 1 - 1)
		if _, ok := codes.redeem("a", first); !ok {
			t.Error("a refused request for a new code took the old one away")
		}
		mustIssue(t, codes, "a") // a used code is not a live one: no minute to wait
	})
}

// O3, wrong codes, other mailboxes, nothing at all.
func TestCodeWorksOnce(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	code := mustIssue(t, codes, "a")
	for _, attempt := range [][2]string{{"a", otherCode(code, 1)}, {"a", ""}, {"a", code + "0"}, {"a", code[:5]},
		{"b", code}, {"", code}, {"b", ""}, {"", ""}} {
		if _, ok := codes.redeem(attempt[0], attempt[1]); ok {
			t.Errorf("%q redeemed", attempt)
		}
	}
	var won atomic.Int64
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			if _, ok := codes.redeem("a", code); ok {
				won.Add(1)
			}
		})
	}
	if all.Wait(); won.Load() != 1 {
		t.Errorf("%d of 100 won", won.Load())
	}
}

// The same where every moment counts: look-up, comparison and removal are one step. Were they
// two, some of these pairs would both get in between.
func TestCodeIsRedeemedInOneStep(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	const rounds = 20_000
	twice := 0
	for range rounds {
		codes.byEmail["a"] = oneTimeCode{"482913", time.Now()}
		var won, ready atomic.Int64
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() {
				ready.Add(1)
				for ready.Load() < 2 { // so that both begin at once
					runtime.Gosched()
				}
				if _, ok := codes.redeem("a", "482913"); ok {
					won.Add(1)
				}
			})
		}
		both.Wait()
		if won.Load() != 1 {
			twice++
		}
	}
	if twice > 0 {
		t.Errorf("in %d of %d rounds the code did not work exactly once", twice, rounds)
	}
}

// A code whose mail failed is gone at once, and so is its minute; another's is not
// touched.
func TestCodeWithdrawn(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	code, other := mustIssue(t, codes, "a"), mustIssue(t, codes, "b")
	codes.withdraw("a", otherCode(code, 1))
	codes.withdraw("none", code)
	if len(codes.byEmail) != 2 {
		t.Error("a code was withdrawn on behalf of another")
	}
	codes.withdraw("a", code)
	if _, ok := codes.redeem("a", code); ok {
		t.Error("the withdrawn code works")
	}
	mustIssue(t, codes, "a")
	if _, ok := codes.redeem("b", other); !ok {
		t.Error("another mailbox's code is gone")
	}
}

// Codes that nobody presents do not pile up.
func TestExpiredCodesAreSwept(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		codes := newCodes()
		for i := range 1000 {
			mustIssue(t, codes, strconv.Itoa(i))
		}
		time.Sleep(5 * time.Minute)
		young := mustIssue(t, codes, "young")
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if mustIssue(t, codes, "new"); len(codes.byEmail) != 2 {
			t.Errorf("%d codes, 2 of them live", len(codes.byEmail))
		}
		if _, ok := codes.redeem("young", young); !ok {
			t.Error("a live code was swept")
		}
	})
}

// plainEmail is the rule for an address, written without a regular expression: what
// it makes of a text, or "".
func plainEmail(text string) string {
	text = strings.Trim(text, " ")
	local, domain, found := strings.Cut(text, "@")
	alnum := func(c byte) bool { return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' }
	if !found || len(text) > 254 {
		return ""
	}
	for atom := range strings.SplitSeq(local, ".") {
		for i := range len(atom) {
			if !alnum(atom[i]) && !strings.Contains("!#$%&'*+/=?^_`{|}~-", atom[i:i+1]) {
				return ""
			}
		}
		if atom == "" {
			return ""
		}
	}
	for label := range strings.SplitSeq(domain, ".") {
		if label == "" || label[0] == '-' || label[len(label)-1] == '-' {
			return ""
		}
		for i := range len(label) {
			if !alnum(label[i]) && label[i] != '-' {
				return ""
			}
		}
	}
	return string(bytes.ToLower([]byte(text))) // ASCII by now
}

// queued waits for the random delay of a request, and returns the address that it put on the
// queue, or "". It belongs in a bubble of synctest, where the wait takes no time.
func queued(s office) string {
	time.Sleep(mailDelay)
	synctest.Wait()
	select {
	case job := <-s.codeJobs:
		return job.email
	default:
		return ""
	}
}

// O9: a code is six ASCII digits in a string, and nothing that resembles it.
func TestCodeForms(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	for _, code := range []string{`""`, `"12345"`, `"1234567"`, `" 123456"`, `"123456 "`, `"12345\n"`, `"123456\n"`, `"+12345"`, `"-12345"`,
		`"0x1234"`, `"1234.6"`, `"1e0005"`, `"１２３４５６"`, `"١٢٣٤٥٦"`, `"12345\u0000"`, `"12345O"`, `123456`, `null`, `["123456"]`, `true`} {
		r := call(t, s, one(0), "POST", "/auth/otp/validate", `{"email":"ada@example.com","code":`+code+`}`)
		wantProblem(t, r, 400, "invalid_request")
		if !strings.Contains(string(r.body), `"field":"code"`) {
			t.Errorf("%s: code is not named: %s", code, r.body)
		}
	}
}

// jsonOf is an object of texts, encoded by hand: json.Marshal would mend what is
// broken in them.
func jsonOf(pairs ...string) string {
	var b strings.Builder
	for i, text := range pairs {
		b.WriteString([]string{",", ":"}[i%2])
		b.WriteByte('"')
		for j := range len(text) {
			switch c := text[j]; {
			case c < 0x20 || c == '"' || c == '\\' || c == 0x7f:
				fmt.Fprintf(&b, `\u%04x`, c)
			default:
				b.WriteByte(c)
			}
		}
		b.WriteByte('"')
	}
	return "{" + b.String()[1:] + "}"
}

// For any text at all: an address is taken exactly when the rule says so, as the rule
// says, and then it is one recipient to a mail library too.
func FuzzEmail(f *testing.F) {
	for _, c := range readCorpus[emailCase](f, "emails.json").Cases {
		f.Add(fillIn(c.Email))
	}
	f.Add("a\xff@example.com")
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > 8<<10 {
			return // a body of it could be over the limit for bodies
		}
		var r *testResponse
		var got string
		synctest.Test(t, func(t *testing.T) {
			s := newOffice(t)
			r = call(t, s, one(0), "POST", "/auth/otp/request", jsonOf("email", text))
			got = queued(s)
		})
		want := plainEmail(text)
		if got != want || r.status != map[bool]int{true: 200, false: 400}[want != ""] {
			t.Fatalf("%q: %q is on the queue, want %q: %v", text, got, want, r)
		}
		if want == "" {
			return
		}
		if parsed, err := mail.ParseAddress(got); err != nil || parsed.Address != got || parsed.Name != "" {
			t.Errorf("%q is %+v to net/mail, %v", got, parsed, err)
		}
	})
}

// askCode requests a code; the answer is the same for every address in the world.
func askCode(c *testClient, email string) {
	c.t.Helper()
	r := c.do("POST", "/auth/otp/request", map[string]string{"email": email}).want(c.t, 200)
	if string(r.body) != "{\"codeLength\":6,\"expiresInSeconds\":600}\n" {
		c.t.Errorf("answer to a request for a code: %v", r)
	}
}

// presentCode is one attempt to sign in.
func presentCode(c *testClient, email, code string) *testResponse {
	c.t.Helper()
	return c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": code})
}

// The mail and its way: encrypted wherever the server is not this machine, signed in
// where the URL says so, one recipient, and that one as stored, not as sent in.
func TestMailArrives(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	for name, opts := range map[string]mailOptions{
		"STARTTLS at a remote server":     {host: "0.0.0.0", user: "hubs", password: "p:@/%20 w"},
		"implicit TLS at a remote server": {host: "0.0.0.0", implicitTLS: true, user: "hubs", password: "p:@/%20 w"},
		"STARTTLS at this machine":        {user: "hubs", password: "p:@/%20 w"},
		"plain at this machine":           {noStartTLS: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMailServer(t, opts)
			srv := startServer(t, stagingEnv(m), map[string]string{
				"DATABASE_URL": database, "MAIL_FROM": `"Hubs, sign-in" <signin@example.com>`})
			sent := newEmail()
			stored := strings.Replace(sent, "user@u", "User@U", 1)
			testUser(t, database, stored, "member")
			c := srv.client(t)
			askCode(c, strings.ToUpper(sent)+" ")
			got := m.waitMail(t, stored)
			if !slices.Equal(got.to, []string{stored}) || got.from != "signin@example.com" ||
				got.tls == opts.noStartTLS || got.user != opts.user || got.helo != "example.com" {
				t.Errorf("envelope %+v", got)
			}
			checkMail(t, got.data, stored)
			presentCode(c, strings.ToUpper(sent), got.code(t)).want(t, 200)
			if n := len(m.received()); n != 1 {
				t.Errorf("%d mails", n)
			}
		})
	}
}

// checkMail holds a message against RFC 5322: its lines, its headers, its code.
func checkMail(t *testing.T, data, to string) {
	t.Helper()
	rest, ended := strings.CutSuffix(data, "\r\n")
	for line := range strings.SplitSeq(rest, "\r\n") {
		if len(line) > 78 || strings.ContainsFunc(line, func(c rune) bool { return c < ' ' || c > '~' }) {
			t.Errorf("line %q", line)
		}
	}
	message, err := mail.ReadMessage(strings.NewReader(data))
	if err != nil || !ended {
		t.Fatalf("%q: %v", data, err)
	}
	for name, want := range map[string]string{
		"From": `"Hubs, sign-in" <signin@example.com>`, "To": "<" + to + ">", "Subject": "Your sign-in code",
		"Auto-Submitted": "auto-generated", "Mime-Version": "1.0", "Content-Type": "text/plain; charset=us-ascii",
		"Date": "", "Message-Id": "",
	} {
		if got := message.Header[name]; len(got) != 1 || want != "" && got[0] != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
		delete(message.Header, name)
	}
	if len(message.Header) > 0 {
		t.Errorf("more headers: %v", message.Header)
	}
	full, _ := mail.ReadMessage(strings.NewReader(data))
	if date, err := full.Header.Date(); err != nil || time.Since(date).Abs() > time.Hour {
		t.Errorf("date %v, %v", date, err)
	}
	if id := full.Header.Get("Message-Id"); !regexp.MustCompile(`^<[A-Z2-7]{26}@example\.com>$`).MatchString(id) {
		t.Errorf("message id %q", id)
	}
	body, _ := io.ReadAll(full.Body)
	if !regexp.MustCompile(`(?s)^Your sign-in code is [0-9]{6}\.\r\n\r\n.*once, within 10 minutes`).Match(body) {
		t.Errorf("text %q", body)
	}
}

// D4: no encryption that holds, no password and no mail. The answer is as ever.
func TestMailOnlyThroughTLS(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	for name, opts := range map[string]mailOptions{
		"no STARTTLS at a remote server":             {host: "0.0.0.0", noStartTLS: true, user: "u", password: "secret-word"},
		"no STARTTLS, no password":                   {host: "0.0.0.0", noStartTLS: true},
		"a certificate of nobody, STARTTLS":          {untrusted: true, user: "u", password: "secret-word"},
		"a certificate of nobody, implicit TLS":      {untrusted: true, implicitTLS: true, user: "u", password: "secret-word"},
		"a certificate of nobody, remote STARTTLS":   {untrusted: true, host: "0.0.0.0"},
		"TLS 1.1, STARTTLS":                          {oldTLS: true, host: "0.0.0.0", user: "u", password: "secret-word"},
		"TLS 1.1, implicit TLS":                      {oldTLS: true, host: "0.0.0.0", implicitTLS: true, user: "u", password: "secret-word"},
		"another server's certificate, STARTTLS":     {otherName: true, host: "0.0.0.0", user: "u", password: "secret-word"},
		"another server's certificate, implicit TLS": {otherName: true, host: "0.0.0.0", implicitTLS: true, user: "u", password: "secret-word"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMailServer(t, opts)
			srv := startServer(t, stagingEnv(m), map[string]string{"DATABASE_URL": database})
			srv.allowErrors("code not sent")
			email := newEmail()
			testUser(t, database, email, "member")
			askCode(srv.client(t), email)
			srv.log.waitFor(t, "code not sent", "ERROR", maskedEmail(email))
			if m.passwords() != 0 || len(m.received()) != 0 {
				t.Errorf("%d passwords, %d mails", m.passwords(), len(m.received()))
			}
		})
	}
}

// D3: whatever the mail server does, the answer is the same, the log knows, and the
// code that did not arrive is gone: the next request, a moment later, mails a new one.
func TestMailServerFails(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{})
	srv := startServer(t, stagingEnv(m))
	srv.allowErrors("code not sent")
	for _, mode := range []mailMode{mailCloses, mailRefuses, mailDefers, mailHangsEnd} {
		email, mark := newEmail(), srv.log.mark()
		testUser(t, srv.env["DATABASE_URL"], email, "member")
		m.fail(mode)
		c := srv.client(t)
		askCode(c, email)
		lost := ""
		if mode == mailHangsEnd { // taken, and the connection is gone before it says so
			lost = m.waitMail(t, email).code(t)
			m.fail(mailCloses)
		}
		srv.log.waitAfter(t, mark, "code not sent", "ERROR", maskedEmail(email))
		m.release()
		if lost != "" {
			wantProblem(t, presentCode(c, email, lost), 401, "invalid_code")
		}
		c.signIn(email)
	}
}

// D3: one refusal in the conversation is enough, of the recipient or of the sender alone:
// nothing more is sent, the log says so, and the code is withdrawn.
func TestMailRefusedInOneAnswer(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{})
	srv := startServer(t, stagingEnv(m))
	srv.allowErrors("code not sent")
	for _, mode := range []mailMode{mailRefusesRecipient, mailRefusesSender} {
		email, before := newEmail(), len(m.received())
		testUser(t, srv.env["DATABASE_URL"], strings.Replace(email, "user@u", "User@U", 1), "member") // as stored, not as asked for
		m.fail(mode)
		c, mark := srv.client(t), srv.log.mark()
		askCode(c, email)
		srv.log.waitAfter(t, mark, "code not sent", "ERROR", "550", maskedEmail(email))
		if n := len(m.received()); n != before {
			t.Errorf("mode %d: the text was sent all the same", mode)
		}
		m.release()
		c.signIn(email) // at once, so no code of a minute was left
	}
}

// The mail is sent once the server has said so, whatever the farewell.
func TestMailServerLeavesWithoutFarewell(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{})
	srv := startServer(t, stagingEnv(m))
	m.fail(mailLeaves)
	email := newEmail()
	testUser(t, srv.env["DATABASE_URL"], email, "member")
	c := srv.client(t)
	askCode(c, email)
	code := m.waitMail(t, email).code(t)
	srv.log.waitFor(t, `"msg":"code sent"`, maskedEmail(email))
	presentCode(c, email, code).want(t, 200)
}

// D3: a mail server that says nothing holds up neither an answer nor the next mail
// for ever: each attempt has a worker and an end of its own.
func TestHungMailServer(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{})
	// A process: one whose workers hang for ever could not stop, and would end the tests.
	srv := startProcess(t, stagingEnv(m))
	srv.allowErrors("code not sent")
	m.fail(mailHangs)
	var emails []string
	for range 4 {
		emails = append(emails, newEmail())
		testUser(t, srv.env["DATABASE_URL"], emails[len(emails)-1], "member")
		askCode(srv.client(t), emails[len(emails)-1])
	}
	waitUntil(t, "four connections at once", func() bool { open, _, _ := m.connections(); return open == 4 })
	start := time.Now()
	askCode(srv.client(t), newEmail())
	for _, email := range emails {
		srv.log.waitFor(t, "code not sent", "ERROR", maskedEmail(email))
	}
	waitUntil(t, "no connection", func() bool { open, _, _ := m.connections(); return open == 0 })
	if wait := time.Since(start); wait > 17*time.Second { // an attempt has 10
		t.Errorf("attempts of %v", wait)
	}
	m.release()
	srv.client(t).signIn(emails[0])
}

// D3, O6: the queue is bounded, and when it is full every address gets the same 503.
// That a request asks no database goes without saying: this server has none.
func TestFullQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newOffice(t)
		n := 0
		ask := func() *testResponse {
			n++
			return call(t, s, one(n), "POST", "/auth/otp/request", emailBody(fmt.Sprintf("a%d@example.com", n)), "X-Request-Id", "x")
		}
		r := ask()
		for ; r.status == 200 && n <= 100_000; r = ask() {
		}
		wantProblem(t, r, 503, "unavailable")
		if n != mailQueue+1 {
			t.Errorf("the queue is full after %d, want %d", n-1, mailQueue)
		}
		wantSame := func() {
			t.Helper()
			again := ask()
			if again.status != 503 || string(again.body) != string(r.body) || !maps.EqualFunc(again.header, r.header, slices.Equal) {
				t.Errorf("one address: %v\nanother: %v", r, again)
			}
		}
		for range 3 {
			wantSame()
		}
		// The requests come out in an order of their own, each of them once. One that a
		// worker has taken still counts until it is done.
		left := map[string]bool{}
		for range mailQueue {
			left[queued(s)] = true
		}
		if len(left) != mailQueue || !left["a1@example.com"] || !left[fmt.Sprintf("a%d@example.com", mailQueue)] {
			t.Errorf("got %d addresses from the queue, want %d", len(left), mailQueue)
		}
		wantSame()
		<-s.codeSlots // as a worker does when it is done
		ask().want(t, 200)
		wantSame()
	})
}

// awayOffice is an office with a database that is out of reach, so that workers can try: each
// request for a code ends with a line in the log.
func awayOffice(t *testing.T) (office, *logBuffer) {
	t.Helper()
	s := newOffice(t)
	connector, err := newConnector("postgres://nobody@127.0.0.1:1/none", nil)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(connector)
	db.Close() // out of reach at once, without a network
	s.store = &store{db: db, slots: make(chan struct{}, poolSize), expensiveSlots: make(chan struct{}, expensiveSize)}
	log := &logBuffer{}
	logging := newServer(config{}, nil, log)
	s.log, s.requestLog = logging.log, logging.requestLog
	return s, log
}

// A request that has waited longer than a minute is dropped: nobody waits for that code any
// more. The log says so; a request that has waited a minute is still worked on.
func TestOldRequestsAreDropped(t *testing.T) {
	t.Parallel()
	for wait, dropped := range map[time.Duration]bool{
		mailDelay: false, time.Minute: false, time.Minute + 1: true, time.Hour: true,
	} {
		t.Run(wait.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, log := awayOffice(t)
				call(t, s, one(1), "POST", "/auth/otp/request", emailBody("ada@example.com"), "X-Request-Id", "asked").want(t, 200)
				time.Sleep(wait) // all workers are busy
				ctx, end := context.WithCancel(t.Context())
				go s.sendCodes(ctx)
				finishCodes(s.server)
				end()
				got := log.count(`"msg":"code not sent: waited too long"`, `"level":"WARN"`, `"requestId":"asked"`, `"email":"a***@example.com"`)
				tried := log.count(`"msg":"code not sent"`, `"level":"ERROR"`)
				if (got == 1) != dropped || (tried == 1) == dropped || len(s.codeSlots) != 0 {
					t.Errorf("got dropped %d, tried %d, %d still counted; want dropped: %v\n%s", got, tried, len(s.codeSlots), dropped, log)
				}
			})
		})
	}
}

// O10: the work on a request begins after a random delay of up to mailDelay, and the delays
// hold up neither workers nor each other: a full queue is worked off within mailDelay.
func TestDelayHoldsUpNoQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, log := awayOffice(t)
		ctx, end := context.WithCancel(t.Context())
		defer end()
		for range mailWorkers {
			go s.sendCodes(ctx)
		}
		start := time.Now()
		for n := range mailQueue {
			call(t, s, one(n), "POST", "/auth/otp/request", emailBody(fmt.Sprintf("a%d@example.com", n))).want(t, 200)
		}
		done := func() int {
			synctest.Wait()
			return log.count(`"msg":"code not sent"`)
		}
		if n := done(); n > mailQueue/10 {
			t.Errorf("%d of %d were worked on without a delay", n, mailQueue)
		}
		time.Sleep(mailDelay / 2)
		if n := done(); n < mailQueue*4/10 || n > mailQueue*6/10 { // half of them, give or take 16
			t.Errorf("%d of %d were worked on after half of the longest delay", n, mailQueue)
		}
		finishCodes(s.server)
		if took := time.Since(start); took > mailDelay {
			t.Errorf("the queue took %v, want at most %v", took, mailDelay)
		}
	})
}

// O7: fifty addresses, all at once, and one mail in the mailbox.
func TestOneMailForManyRequests(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	email := newEmail()
	testUser(t, srv.env["DATABASE_URL"], email, "member")
	var all sync.WaitGroup
	for range 50 {
		c := srv.client(t)
		all.Go(func() { c.do("POST", "/auth/otp/request", map[string]string{"email": email}) })
	}
	all.Wait()
	waitUntil(t, "all of them worked off", func() bool {
		return srv.log.count(`"code sent"`)+srv.log.count("code not sent", "less than a minute old") == 50
	})
	if n := srv.log.count(codeLinePrefix + email + ": "); n != 1 {
		t.Errorf("got %d codes sent, want 1", n)
	}
	presentCode(srv.client(t), email, srv.code(t, email)).want(t, 200)
}

// O7: a hundred workers that make a code for one mailbox at once make one.
func TestOneCodeForManyAtOnce(t *testing.T) {
	t.Parallel()
	codes, made, all := newCodes(), atomic.Int64{}, sync.WaitGroup{}
	for range 100 {
		all.Go(func() {
			if _, ok := codes.issue("a"); ok {
				made.Add(1)
			}
		})
	}
	if all.Wait(); made.Load() != 1 {
		t.Errorf("%d codes", made.Load())
	}
}

// D4: only the loopback host itself is excused from STARTTLS. A private address, another
// name of this machine, or a name that looks like localhost is not. The test speaks to a mail
// server without STARTTLS, under a URL that names the host: nothing else is dialled.
func TestOnlyLoopbackIsExcusedFromTLS(t *testing.T) {
	t.Parallel()
	for host, excused := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "[::1]": true,
		"10.0.0.1": false, "10.255.255.255": false, "172.16.0.1": false, "172.31.255.255": false, "192.168.0.1": false,
		"192.168.178.20": false, "169.254.1.1": false, "100.64.0.1": false, "0.0.0.0": false, "[::]": false, "[fd00::1]": false,
		"[fe80::1]": false, "[::ffff:10.0.0.1]": false, "mail": false, "mail.local": false, "mail.internal": false,
		"mail.example.com": false, "localhost.example.com": false, "mylocalhost": false, "127.0.0.1.example.com": false,
	} {
		for _, user := range []string{"", "hubs:secret-word@"} {
			t.Run(user+host, func(t *testing.T) {
				t.Parallel()
				m := newMailServer(t, mailOptions{noStartTLS: true, user: "hubs", password: "secret-word"})
				address, err := url.Parse(m.url)
				if err != nil {
					t.Fatal(err)
				}
				conn, err := net.Dial("tcp", address.Host)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				named, err := url.Parse("smtp://" + user + host + ":587")
				if err != nil {
					t.Fatal(err)
				}
				client, err := smtp.NewClient(conn, named.Hostname())
				if err != nil {
					t.Fatal(err)
				}
				err = secureMail(client, named)
				if (err == nil) != excused {
					t.Errorf("got %v, want excused from STARTTLS: %v", err, excused)
				}
				want := 0
				if excused && user != "" {
					want = 1
				}
				if n := m.passwords(); n != want {
					t.Errorf("got %d passwords sent in the clear, want %d", n, want)
				}
			})
		}
	}
}

// O2: a code that became valid again, because the database was away when it was presented,
// keeps its age, and no timer has to end it. A code that was issued meanwhile stays.
func TestRestoredCode(t *testing.T) {
	t.Parallel()
	for after, good := range map[time.Duration]bool{codeTTL - 1: true, codeTTL: false, 2 * codeTTL: false} {
		t.Run(fmt.Sprintf("after %v", after), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				codes := newCodes()
				issued := oneTimeCode{"012345", time.Now()}
				time.Sleep(after - time.Second)
				codes.restore("a", issued)
				time.Sleep(time.Second)
				if _, ok := codes.redeem("a", "012345"); ok != good {
					t.Errorf("got %v, want %v", ok, good)
				}
			})
		})
	}
	t.Run("beside a newer one", func(t *testing.T) {
		codes := newCodes()
		newer := mustIssue(t, codes, "a")
		codes.restore("a", oneTimeCode{otherCode(newer, 1), time.Now()})
		if _, ok := codes.redeem("a", newer); !ok {
			t.Error("the newer code was lost")
		}
	})
}

// Times are compared by the monotonic clock: setting the system's clock back makes no code
// live longer, frees no limit, and keeps no old request. Only the text of a time tells whether
// it has a monotonic reading.
func TestSteppedClockChangesNothing(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	code := mustIssue(t, codes, "a")
	redeemed, ok := codes.redeem("a", code)
	if !ok {
		t.Fatal("the code does not work")
	}
	s := newOffice(t)
	call(t, s, one(0), "POST", "/auth/otp/request", emailBody("ada@example.com")).want(t, 200)
	for what, at := range map[string]time.Time{
		"a code":               redeemed.issuedAt,
		"a limit":              newLimiter(1, time.Minute, "").start,
		"a request for a code": (<-s.codeJobs).queuedAt,
	} {
		if !strings.Contains(at.String(), " m=") {
			t.Errorf("the time of %s, %v, has no monotonic reading", what, at)
		}
	}
}

// The timer of a code that was used or replaced does not touch the next code of its mailbox.
func TestOldTimersSpareNewCodes(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(codes *oneTimeCodes, code string){
		"used":     func(codes *oneTimeCodes, code string) { codes.redeem("a", code) },
		"replaced": func(*oneTimeCodes, string) {},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				codes := newCodes()
				old := mustIssue(t, codes, "a")
				end(codes, old)
				time.Sleep(codeTTL / 2)
				next := mustIssue(t, codes, "a")
				time.Sleep(codeTTL - 1)
				synctest.Wait() // the timer of the old code is long done
				if _, ok := codes.redeem("a", next); !ok {
					t.Errorf("the code does not work %v after it was made", codeTTL-1)
				}
			})
		})
	}
}

// D3: an attempt to send a mail ends within mailTimeout, of which connecting is a part. A worker
// that had the time twice would outlast a stop.
func TestConnectingIsPartOfTheMailsTime(t *testing.T) {
	t.Parallel()
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(socket)
	err = errors.Join(
		syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}),
		syscall.Listen(socket, 0),
		syscall.SetNonblock(socket, true),
	)
	if err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(socket)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	for { // nobody accepts, so the queue soon is full
		conn, err := net.DialTimeout("tcp", addr, 100*time.Millisecond)
		if err != nil {
			break
		}
		defer conn.Close()
	}
	// Halfway there is room, and TCP's next attempt connects. The server never says a word.
	halfway := time.AfterFunc(mailTimeout/2, func() {
		for {
			waiting, _, err := syscall.Accept(socket)
			if err != nil {
				return
			}
			syscall.Close(waiting)
		}
	})
	defer halfway.Stop()
	s := &server{cfg: config{
		smtpURL:  &url.URL{Scheme: "smtp", Host: addr},
		mailFrom: &mail.Address{Address: "signin@example.com"},
	}}
	start := time.Now()
	err = s.mail("a@b.example", "012345")
	if got := time.Since(start); err == nil || got > mailTimeout+mailTimeout/4 {
		t.Errorf("got %v after %v, want an error within %v", err, got, mailTimeout)
	}
}
