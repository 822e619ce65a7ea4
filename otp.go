package main

// One-time codes: the map that holds them, what happens after a request for a code, and the mail
// that carries it. A code leaves this process only by mail. Without a mail server, which only the
// local environment permits, the code is printed on standard output instead. The command mail-test
// comes last.

import (
	"cmp"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"errors"
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
	codeLength = 6 // digits, as told to clients; issue and codeRule must agree with it
	codeTTL    = 10 * time.Minute
	codeResend = time.Minute // minimum age of a code before a new one replaces it

	maxCodeRequests  = 1000                   // unfinished requests for a code
	codeDelay        = 500 * time.Millisecond // maximum random delay before work on a request
	codeMaxWait      = time.Minute            // maximum wait for a mail slot before giving up
	maxConversations = 32                     // simultaneous conversations with the mail server
	mailTimeout      = 10 * time.Second       // for one whole conversation with the mail server
	maxMailReply     = 64 << 10               // bytes from the mail server in one conversation
)

// A oneTimeCode works once, within codeTTL of issuedAt.
type oneTimeCode struct {
	digits   string
	issuedAt time.Time // includes monotonic time, so a step of the clock changes no age
	// userReadAt is when the account was read, by the database's clock. If the user was
	// signed out everywhere after that, the code is refused.
	userReadAt time.Time
}

// oneTimeCodes maps each e-mail address, in lower case, to its current code. Strangers can't fill
// it, because sendCode issues codes only to active users. A restart forgets all codes.
type oneTimeCodes struct {
	mu      sync.Mutex
	byEmail map[string]*oneTimeCode
}

// issue makes a code for an address. If the current code is younger than codeResend, issue keeps
// it and returns nil.
//
// All codes from 000000 to 999999 are equally likely (O1). However many clients ask, a mailbox gets
// at most one mail per codeResend, unless the code was used or its mail failed (O7).
func (c *oneTimeCodes) issue(email string, userReadAt time.Time) *oneTimeCode {
	c.mu.Lock()
	defer c.mu.Unlock()
	current := c.byEmail[email]
	if current != nil && time.Since(current.issuedAt) < codeResend {
		return nil
	}
	// rand.Reader never returns an error: if the system has no random numbers, the process crashes.
	n, _ := rand.Int(rand.Reader, big.NewInt(1_000_000))
	issued := &oneTimeCode{
		digits:     fmt.Sprintf("%06d", n),
		issuedAt:   time.Now(),
		userReadAt: userReadAt,
	}
	c.byEmail[email] = issued
	// This only frees memory. find checks the age itself.
	time.AfterFunc(codeTTL, func() { c.remove(email, issued) })
	return issued
}

// find returns the issued code if the given one matches. It returns nil if the code is wrong,
// expired or was never issued. find compares in constant time, and checks the age itself, so an
// expired code fails even if its timer has not removed it yet (O2). On Linux, time in which the
// machine is suspended does not count.
func (c *oneTimeCodes) find(email, code string) *oneTimeCode {
	c.mu.Lock()
	defer c.mu.Unlock()
	issued := c.byEmail[email]
	if issued == nil {
		return nil
	}
	matches := subtle.ConstantTimeCompare([]byte(code), []byte(issued.digits)) == 1
	expired := time.Since(issued.issuedAt) >= codeTTL
	if !matches || expired {
		return nil
	}
	return issued
}

// remove deletes a code that was used or has expired, or whose mail failed. removed is false if the
// code was already removed or replaced by a newer one. So if many requests find the same code at
// once, only one of them removes it and succeeds (O3).
func (c *oneTimeCodes) remove(email string, code *oneTimeCode) (removed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byEmail[email] != code {
		return false
	}
	delete(c.byEmail, email)
	return true
}

// scheduleCode runs sendCode in a goroutine of its own, after a random delay. ok is false if
// maxCodeRequests requests are unfinished.
//
// Only a known address causes the work of a mail, which slows down other requests meanwhile.
// Without the delay, a client could measure that in its next request, and learn that the address is
// known (O10).
func (s *server) scheduleCode(email string, log *slog.Logger) (ok bool) {
	select {
	case s.codeSlots <- struct{}{}:
	default:
		return false
	}
	log = log.With("email", email) // masked by maskAttr
	delay, _ := rand.Int(rand.Reader, big.NewInt(int64(codeDelay)))
	time.AfterFunc(time.Duration(delay.Int64()), func() {
		s.sendCode(email, log)
		<-s.codeSlots // released after the work, because stop waits for all slots
	})
	return true
}

// sendCode mails a code if the address belongs to an active user, and logs the result. It mails to
// the address as stored in the database, never to the text that a client sent.
//
// The client's answer does not wait for sendCode, so it does not depend on the mail server, until
// maxCodeRequests requests are unfinished (D3).
//
// sendCode reads the account before it waits for a mail slot, so an unknown address takes none.
// Each mail has a conversation of its own, at most maxConversations at a time. In one queue, a
// client could ask for another address and then for its own, and tell from the delay of its own
// mail whether the other one has an account (M2).
func (s *server) sendCode(email string, log *slog.Logger) {
	u, err := s.loadUser(whereEmail, email)
	if err != nil {
		log.Error("code not sent", "error", err)
		return
	}
	if u == nil || u.suspended {
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
	code := s.codes.issue(email, u.now)
	if code == nil {
		log.Info("code not sent: the last one is less than a minute old")
		return
	}
	if err := s.mailCode(u.Email, code.digits); err != nil {
		s.codes.remove(email, code)
		log.Error("code not sent", "error", err)
		return
	}
	log.Info("code sent")
}

// mailCode mails a code, or prints it if no mail server is configured.
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
	server *url.URL // SMTP_URL; nil only in the local environment: codes are printed
	from   *mail.Address
}

// smtpPorts holds the default port of each scheme. smtp starts in plain text and upgrades with
// STARTTLS. smtps uses TLS from the first byte.
var smtpPorts = map[string]string{"smtp": "587", "smtps": "465"}

// send delivers a mail. net/smtp bounds neither time nor memory, so send bounds the connection: the
// whole conversation ends within mailTimeout, and send reads at most maxMailReply bytes from the
// server, before and after TLS begins (M1).
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
	if m.server.Scheme == "smtps" { // otherwise, TLS begins in encryptAndLogIn
		conn = tls.Client(conn, tlsConfig(host))
	}
	client, err := smtp.NewClient(conn, host)
	if err != nil {
		return err
	}
	return m.deliver(client, to, subject, text)
}

// A boundedReply is a connection whose Read reports io.EOF once the limit of reply is reached.
type boundedReply struct {
	net.Conn
	reply io.Reader
}

func (c boundedReply) Read(p []byte) (int, error) { return c.reply.Read(p) }

// deliver holds the conversation: our name, TLS and SMTP AUTH, sender, recipient, mail. The mail
// server has accepted the mail when body.Close returns nil.
func (m mailer) deliver(client *smtp.Client, to, subject, text string) error {
	_, domain, _ := strings.Cut(m.from.Address, "@")
	if err := client.Hello(domain); err != nil {
		return err
	}
	if err := m.encryptAndLogIn(client); err != nil {
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
	client.Text.Cmd("QUIT") // the mail is already accepted, so don't wait for the reply
	return nil
}

func tlsConfig(host string) *tls.Config {
	return &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
}

// encryptAndLogIn encrypts the conversation with STARTTLS, unless smtps has done so. Then it sends
// user and password, if SMTP_URL has them.
//
// It requires STARTTLS even if the server does not offer it, because an attacker on the network may
// have removed the offer. If STARTTLS fails, neither mail nor password is sent (D4). Only a server
// on loopback may lack STARTTLS. If such a server offers STARTTLS, it is used, too.
func (m mailer) encryptAndLogIn(client *smtp.Client) error {
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

// message returns a mail in the format of RFC 5322. No address can inject a header line: m.from was
// validated with the settings, and client.Rcpt has already rejected a recipient with a line break.
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

// mailTest sends a test mail in the same way as the server sends codes.
func mailTest(args []string) error {
	if len(args) != 1 {
		return usageError("mail-test: takes one address\n\n" + usage)
	}
	r := &configReader{} // without APP_ENV, which its mailer method does not need
	m := r.mailer()
	if r.errors != nil {
		return errors.Join(r.errors...)
	}
	err := m.send(args[0], "A test", "This mail shows that the server can send mail.\n")
	if err != nil {
		return fmt.Errorf("the mail was not sent: %w", err)
	}
	fmt.Println(m.server.Host, "has accepted the mail")
	return nil
}
