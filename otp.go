package main

// One-time codes: the mutex-guarded map that holds them, the work on a request for one,
// and the mail that carries it. A code leaves this process by mail only; without a mail
// server, which only the local environment permits, it is printed on standard output.

import (
	"cmp"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/mail"
	"net/smtp"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	codeLength = 6
	codeTTL    = 10 * time.Minute
	codeResend = time.Minute // a code younger than this is not replaced: no one can flood a mailbox

	maxCodeRequests  = 1000                   // unfinished ones
	codeDelay        = 500 * time.Millisecond // before the work on one begins; random, up to this
	codeMaxWait      = time.Minute            // for a conversation; then the request is dropped
	maxConversations = 32                     // with the mail server, at a time
	mailTimeout      = 10 * time.Second       // of one conversation
	maxMailReply     = 64 << 10               // bytes that the mail server may say in one
)

// A oneTimeCode is good once, for codeTTL.
type oneTimeCode struct {
	code     string
	issuedAt time.Time // with monotonic time
	// userReadAt is when the account was read, by the database's clock. If the user was
	// signed out everywhere after it, the code is refused.
	userReadAt time.Time
}

// oneTimeCodes holds the codes by e-mail address in lower case. Only addresses of active users
// get in, so there are never more codes than users. A restart forgets all codes.
type oneTimeCodes struct {
	mu      sync.Mutex
	byEmail map[string]oneTimeCode
}

// issue makes a code. ok is false if the last one is younger than codeResend: then the last
// one stays valid.
//
// All of 000000 to 999999 are equally likely (O1). A mailbox gets at most one mail a minute,
// however many clients ask; sooner only if the last code was used or its mail failed (O7).
func (c *oneTimeCodes) issue(email string, userReadAt time.Time) (issued oneTimeCode, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// An address without a code has the zero time, which is long ago.
	if time.Since(c.byEmail[email].issuedAt) < codeResend {
		return oneTimeCode{}, false
	}
	// crypto/rand never returns an error here: it ends the process.
	n, _ := rand.Int(rand.Reader, big.NewInt(1_000_000))
	issued = oneTimeCode{
		code:       fmt.Sprintf("%0*d", codeLength, n),
		issuedAt:   time.Now(),
		userReadAt: userReadAt,
	}
	c.byEmail[email] = issued
	// Only to free memory: find checks the age.
	time.AfterFunc(codeTTL, func() { c.remove(email, issued) })
	return issued, true
}

// find returns a right code. ok is false if the code is wrong, expired or was never issued. The age
// is checked here, whether or not anything was swept (O2).
func (c *oneTimeCodes) find(email, code string) (found oneTimeCode, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	issued, exists := c.byEmail[email]
	matches := subtle.ConstantTimeCompare([]byte(code), []byte(issued.code)) == 1
	expired := time.Since(issued.issuedAt) >= codeTTL
	if !exists || !matches || expired {
		return oneTimeCode{}, false
	}
	return issued, true
}

// remove ends the life of a code: it is used, its mail failed, or it is old. removed is false if it
// was removed before, or replaced by a newer one. So of a hundred requests that have found the right
// code, one removes it and succeeds (O3).
func (c *oneTimeCodes) remove(email string, code oneTimeCode) (removed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byEmail[email] != code {
		return false
	}
	delete(c.byEmail, email)
	return true
}

// startCode begins the work on a request for a code, after a random delay and in a goroutine of
// its own. ok is false if maxCodeRequests are unfinished.
//
// Without the delay, the work for a known address would slow the client's next request, which
// could be measured (O10).
func (s *server) startCode(email string, log *slog.Logger) (ok bool) {
	select {
	case s.codeSlots <- struct{}{}:
	default:
		return false
	}
	log = log.With("email", email) // maskAttr masks it
	delay, _ := rand.Int(rand.Reader, big.NewInt(int64(codeDelay)))
	time.AfterFunc(time.Duration(delay.Int64()), func() {
		s.sendCode(email, log)
		<-s.codeSlots // after the work: a stop waits for the slots
	})
	return true
}

// sendCode mails a code if the address is an active user's, and logs what became of the
// request. The client has had its answer. The mail goes to the address as it is stored, never
// to the text that a client sent.
//
// Nothing that the mail server does changes an answer, until maxCodeRequests wait for it (D3).
// A mail waits for another one only while maxConversations are under way, so that mail to one
// address does not show in the time of mail to another (M2).
func (s *server) sendCode(email string, log *slog.Logger) {
	u, found, err := s.loadUser(whereEmail, email)
	if err != nil {
		log.Error("code not sent", "error", err)
		return
	}
	if !found || u.suspended {
		log.Info("code not sent: no active user")
		return
	}
	select {
	case s.mailSlots <- struct{}{}:
		defer func() { <-s.mailSlots }()
	case <-time.After(codeMaxWait):
		log.Warn("code not sent: waited too long")
		return
	}
	code, ok := s.codes.issue(email, u.now)
	if !ok {
		log.Info("code not sent: the last one is less than a minute old")
		return
	}
	if err := s.mailCode(u.Email, code.code); err != nil {
		s.codes.remove(email, code)
		log.Error("code not sent", "error", err)
		return
	}
	log.Info("code sent")
}

// mailCode sends a code by mail, or prints it if there is no mail server.
func (s *server) mailCode(to, code string) error {
	if s.cfg.mail.server == nil {
		_, err := fmt.Fprintf(s.out, "\nSign-in code for %s: %s\n\n", to, code)
		return err
	}
	return s.cfg.mail.send(to, "Your sign-in code", fmt.Sprintf(`Your sign-in code is %s.

It works once, within %.0f minutes. Do not tell it to anyone.
If you did not ask for it, ignore this mail.
`, code, codeTTL.Minutes()))
}

// A mailer sends mail through one server.
type mailer struct {
	server *url.URL // nil, in the local environment only: codes are printed
	from   *mail.Address
}

// smtpPorts has the default port of each scheme. smtp begins in plain text and then does
// STARTTLS; smtps is TLS from the first byte on.
var smtpPorts = map[string]string{"smtp": "587", "smtps": "465"}

// send delivers a mail. net/smtp bounds neither time nor memory, so the connection does:
// everything ends within mailTimeout, and the server may say maxMailReply bytes, before TLS
// too (M1).
func (m mailer) send(to, subject, text string) error {
	host := m.server.Hostname()
	port := cmp.Or(m.server.Port(), smtpPorts[m.server.Scheme])
	deadline := time.Now().Add(mailTimeout)
	dialed, err := net.DialTimeout("tcp", net.JoinHostPort(host, port), mailTimeout)
	if err != nil {
		return err
	}
	defer dialed.Close()
	dialed.SetDeadline(deadline)
	var conn net.Conn = boundedReply{dialed, io.LimitReader(dialed, maxMailReply)}
	if m.server.Scheme == "smtps" {
		conn = tls.Client(conn, tlsConfig(host))
	}
	client, err := smtp.NewClient(conn, host)
	if err != nil {
		return err
	}
	return m.deliver(client, to, subject, text)
}

// A boundedReply is a connection that reads as if it ended after its bound.
type boundedReply struct {
	net.Conn
	reply io.Reader
}

func (c boundedReply) Read(p []byte) (int, error) { return c.reply.Read(p) }

func (m mailer) deliver(client *smtp.Client, to, subject, text string) error {
	_, domain, _ := strings.Cut(m.from.Address, "@")
	if err := client.Hello(domain); err != nil {
		return err
	}
	if err := m.secure(client); err != nil {
		return err
	}
	if err := client.Mail(m.from.Address); err != nil {
		return err
	}
	if err := client.Rcpt(to); err != nil {
		return err
	}
	body, err := client.Data()
	if err != nil {
		return err
	}
	if _, err := io.WriteString(body, m.message(domain, to, subject, text)); err != nil {
		return err
	}
	if err := body.Close(); err != nil {
		return err
	}
	client.Text.Cmd("QUIT") // the mail is accepted, so nobody waits for the answer
	return nil
}

func tlsConfig(host string) *tls.Config {
	return &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
}

// secure encrypts the conversation and signs in.
//
// Every host except loopback must do STARTTLS. If the server does not offer it, an attacker
// on the way may have removed the offer. Then neither mail nor password is sent (D4). What loopback
// offers is used, too, and its certificate is checked.
func (m mailer) secure(client *smtp.Client) error {
	host := m.server.Hostname()
	isLoopback := slices.Contains([]string{"localhost", "127.0.0.1", "::1"}, host)
	offered, _ := client.Extension("STARTTLS")
	_, encrypted := client.TLSConnectionState()
	if !encrypted && (offered || !isLoopback) {
		if err := client.StartTLS(tlsConfig(host)); err != nil {
			return err
		}
	}
	if m.server.User == nil {
		return nil
	}
	password, _ := m.server.User.Password()
	return client.Auth(smtp.PlainAuth("", m.server.User.Username(), password, host))
}

// message is a mail in the form of RFC 5322. No line break gets into it by an address: m.from has
// passed a check, and client.Rcpt refuses a to that has one.
func (m mailer) message(domain, to, subject, text string) string {
	date := time.Now().UTC().Format(time.RFC1123Z)
	message := fmt.Sprintf(`From: %s
To: <%s>
Subject: %s
Date: %s
Message-ID: <%s@%s>
Auto-Submitted: auto-generated
MIME-Version: 1.0
Content-Type: text/plain; charset=us-ascii

%s`, m.from, to, subject, date, rand.Text(), domain, text)
	return strings.ReplaceAll(message, "\n", "\r\n")
}
