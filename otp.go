package main

// One-time codes: the map that holds them, what a request for one does, and its
// mail. A code leaves this process only by mail or, locally without a mail
// server, on standard output.
//
// The life of a code:
//
//	the code (the first line that fits)          a request for one
//	the user was signed out in the future        does nothing
//	there is none, or it is not for this user    makes one, and mails it
//	a mail of it began within codeResend,        does nothing
//	  and has not failed
//	it is as old as codeRenew, or older          makes a new one in its place
//	it has had maxGuesses wrong guesses          does nothing
//	otherwise                                    mails it again
//
// The right code signs in once, until codeTTL, if it has had fewer wrong guesses
// than maxGuesses and validateCode finds that the account still allows it.

import (
	"bufio"
	"bytes"
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
	"net/textproto"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	codeLength = 6         // digits; codePattern and the messages say so, too
	codeCount  = 1_000_000 // codes of that length
	codeTTL    = 10 * time.Minute
	codeResend = time.Minute // time after a mail of a code in which requests send no other
	codeRenew  = codeTTL / 2 // age from which on a request makes a new code
	maxGuesses = 10          // wrong guesses that end a code

	maxCodeRequests  = 1000                   // unfinished requests for a code
	codeDelay        = 500 * time.Millisecond // longest random delay before the work
	codeMaxWait      = 50 * time.Second       // from a request to its last attempt
	mailPause        = 2 * time.Second        // longest before the second attempt; twice before the third
	maxConversations = 32                     // simultaneous conversations with the mail server
	mailTimeout      = 10 * time.Second       // for one conversation
	maxMailReply     = 64 << 10               // bytes from the mail server in one conversation

	_ = uint(codeResend - codeMaxWait - mailTimeout) // mailFailed: does not compile if negative
)

var codePattern = regexp.MustCompile("^[0-9]{6}$")

type oneTimeCode struct {
	digits     string
	issuedAt   time.Time // monotonic, so a step of the clock changes no age
	userID     string    // whom the code signs in
	userReadAt time.Time // when the account was read, by the database's clock

	// Guarded by oneTimeCodes.mu.
	mailedAt time.Time // when the last mail began; zero if its last attempt has failed
	guesses  int       // wrong guesses
}

// whyNotFor returns, in one word for the log, why a code does not sign a user in,
// or "". Before a sign-out everywhere, somebody else may have been reading the
// mailbox (S1). The account of a code was read before u, so a code that is ahead
// of u by more than slack comes from a clock that has gone back (T9). issue needs
// some slack: of two requests at once, the other may have read the account later,
// and made the code.
func (code *oneTimeCode) whyNotFor(u *user, slack time.Duration) string {
	switch {
	case code.userReadAt.After(u.now.Add(slack)), u.isSignedOutAhead():
		return "future"
	case code.userID != u.UserID, code.userReadAt.Before(u.signedOutAt):
		return "ended"
	}
	return ""
}

// oneTimeCodes maps each address, in lower case, to its current code. Strangers
// can't fill it, because only active users get codes. A restart forgets all.
type oneTimeCodes struct {
	mu      sync.Mutex
	byEmail map[string]*oneTimeCode
}

// notDue is an error that says why no mail is due.
type notDue string

func (e notDue) Error() string { return string(e) }

const (
	errJustMailed = notDue("the last mail is too young")
	errGuessedOut = notDue("wrong guesses have ended the code; the next one comes later")
	errCodeEnded  = notDue("the code was used, replaced or guessed out meanwhile")

	errSignedOutAhead = notDue("the user was signed out in the future, so no code could sign them in")
)

// issue returns the code to mail to a user, the current one or a new one, or an
// error if no mail is due.
//
// While the same code is mailed again, a stranger who asks for one voids nothing,
// and whichever mail the user opens has the right code (O7). A code that guesses
// have ended stays until codeRenew: if a new one replaced it at once, each request
// would bring maxGuesses more (L5).
func (c *oneTimeCodes) issue(email string, u *user) (*oneTimeCode, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	code := c.byEmail[email]
	isForUser := code != nil && code.whyNotFor(u, clockStep) == ""
	isJustMailed := isForUser && now.Sub(code.mailedAt) < codeResend // never, if the mail has failed
	switch {
	case u.isSignedOutAhead():
		return nil, errSignedOutAhead
	case isJustMailed:
		return nil, errJustMailed
	case !isForUser || now.Sub(code.issuedAt) >= codeRenew:
		code = c.makeCode(email, u)
	case code.guesses >= maxGuesses:
		return nil, errGuessedOut
	}
	code.mailedAt = now
	return code, nil
}

// issueAgain is for another attempt to mail a code.
func (c *oneTimeCodes) issueAgain(email string, code *oneTimeCode) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byEmail[email] != code || code.guesses >= maxGuesses {
		return errCodeEnded
	}
	code.mailedAt = time.Now()
	return nil
}

// makeCode makes a code; all from 000000 to 999999 are equally likely (O1). The
// caller holds the lock.
func (c *oneTimeCodes) makeCode(email string, u *user) *oneTimeCode {
	n, _ := rand.Int(rand.Reader, big.NewInt(codeCount)) // rand.Reader never fails
	code := &oneTimeCode{
		digits:     fmt.Sprintf("%0*d", codeLength, n),
		issuedAt:   time.Now(),
		userID:     u.UserID,
		userReadAt: u.now,
	}
	c.byEmail[email] = code
	// This frees memory; find checks the age itself.
	time.AfterFunc(codeTTL, func() { c.remove(email, code) })
	return code
}

// mailFailed lets the next request mail at once. The code keeps its age and its
// guesses, because a stranger can make mails fail, by filling the mailbox. No
// other mail of the code has begun meanwhile, because codeMaxWait and mailTimeout
// together are no longer than codeResend.
func (c *oneTimeCodes) mailFailed(code *oneTimeCode) {
	c.mu.Lock()
	defer c.mu.Unlock()
	code.mailedAt = time.Time{}
}

// find returns the code of an address if the digits match and it has not ended
// (O2); remove uses it up. It counts wrong guesses itself, because a flood can
// make guessLimit forget an address (L5).
func (c *oneTimeCodes) find(email, digits string) *oneTimeCode {
	c.mu.Lock()
	defer c.mu.Unlock()
	code := c.byEmail[email]
	if code == nil {
		return nil
	}
	hasExpired := time.Since(code.issuedAt) >= codeTTL
	if hasExpired || code.guesses >= maxGuesses {
		return nil
	}
	if subtle.ConstantTimeCompare([]byte(digits), []byte(code.digits)) != 1 {
		code.guesses++
		return nil
	}
	return code
}

// remove deletes a code, unless it is gone or replaced. So of several requests
// that have found it, one succeeds.
func (c *oneTimeCodes) remove(email string, code *oneTimeCode) (removed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byEmail[email] != code {
		return false
	}
	delete(c.byEmail, email)
	return true
}

// scheduleCode runs sendCode after a random delay. ok is false if
// maxCodeRequests are unfinished. Work at once would slow down the client's next
// request, and so tell that the address is known (O10).
func (s *server) scheduleCode(email string, log *slog.Logger) (ok bool) {
	select {
	case s.codeSlots <- struct{}{}:
	default:
		return false
	}
	log = log.With("email", email)
	time.AfterFunc(randomTime(codeDelay), func() {
		s.sendCode(email, log)
		s.codeSlots.free() // after the work, because stop waits for all slots
	})
	return true
}

func randomTime(limit time.Duration) time.Duration {
	n, _ := rand.Int(rand.Reader, big.NewInt(int64(limit))) // rand.Reader never fails
	return time.Duration(n.Int64())
}

// sendCode mails a code to the address as stored, if it belongs to an active
// user. Each mail has a conversation of its own, up to maxConversations. If mails
// waited in one queue, the delay of a client's own mail would tell whether
// another address has an account (M2).
func (s *server) sendCode(email string, log *slog.Logger) {
	lastStart := time.Now().Add(codeMaxWait - codeDelay)
	u, err := s.loadUser(whereEmail, email)
	if err != nil {
		log.Error("code not sent", "error", err)
		return
	}
	if u == nil || u.suspended {
		log.Info("code not sent: no active user")
		return
	}
	code, err := s.mailUntil(lastStart, email, u, log)
	_, isNotDue := errors.AsType[notDue](err)
	switch {
	case err == nil:
		log.Info("code sent")
	case isNotDue:
		log.Info("code not sent: " + err.Error())
	case errors.Is(err, errUnconfirmed):
		log.Error("code perhaps sent", "error", err)
	default:
		if code != nil {
			s.codes.mailFailed(code)
		}
		log.Error("code not sent", "error", err)
	}
}

// mailUntil mails a code and, if the next attempt may succeed, mails it again after
// growing pauses, in which it holds no slot. They are random, so that mails refused
// together don't come back together. A stop of this process cuts a pause short, and
// the attempt after it is the last. The code is nil if none was made.
func (s *server) mailUntil(lastStart time.Time, email string, u *user, log *slog.Logger) (
	code *oneTimeCode, err error) {
	for longest := mailPause; ; longest += mailPause {
		if !s.mailSlots.take(time.Until(lastStart)) {
			return code, errors.New("waited too long for other mail")
		}
		code, err = s.attemptMail(email, u, code) // only now: a dropped request makes no code
		s.mailSlots.free()
		if !mayPass(err) { // it is sent, or refused for good
			return code, err
		}
		pause := longest/2 + randomTime(longest/2)
		if s.isStopping() || time.Now().Add(pause).After(lastStart) {
			return code, err
		}
		log.Warn("code delayed, and tried again soon", "error", err)
		select {
		case <-time.After(pause):
		case <-s.stopping:
		}
	}
}

// attemptMail issues a code, or issues the given one again, and mails it.
func (s *server) attemptMail(email string, u *user, code *oneTimeCode) (*oneTimeCode, error) {
	var err error
	if code == nil {
		code, err = s.codes.issue(email, u)
	} else {
		err = s.codes.issueAgain(email, code)
	}
	if err != nil {
		return code, err
	}
	return code, s.mailCode(u.Email, code)
}

// isRefusedForNow reports whether the mail server has answered 4yz (RFC 5321
// 4.2.1).
func isRefusedForNow(err error) bool {
	reply, hasReplied := errors.AsType[*textproto.Error](err)
	return hasReplied && reply.Code/100 == 4
}

// mayPass reports whether the next attempt may succeed: the mail server refuses for
// now, or does not listen, as while it restarts.
func mayPass(err error) bool {
	return isRefusedForNow(err) || errors.Is(err, syscall.ECONNREFUSED)
}

func (s *server) mailCode(to string, code *oneTimeCode) error {
	if s.cfg.mail.server == nil {
		_, err := fmt.Fprintf(s.out, "\nSign-in code for %s: %s\n\n", to, code.digits)
		return err
	}
	service := s.cfg.mail.domain()
	left := (codeTTL - time.Since(code.issuedAt)).Round(time.Second)
	// Screen readers read the code as one number.
	text := fmt.Sprintf(`Your sign-in code for %s is %s.
Digit by digit: %s

It works once, within %d minutes. A newer code replaces it.
Do not tell it to anyone. If you did not ask for it, ignore this mail.
`, service, code.digits, strings.Join(strings.Split(code.digits, ""), " "), left/time.Minute)
	return s.cfg.mail.send(to, "Your sign-in code for "+service, text)
}

// A mailer sends mail through one server.
type mailer struct {
	server *url.URL // SMTP_URL; nil only in the local environment: codes are printed
	from   *mail.Address
}

// domain names the service to users, and this machine to mail servers.
func (m mailer) domain() string {
	_, domain, _ := strings.Cut(m.from.Address, "@")
	return domain
}

// smtpPorts are the default ports. smtp begins in plain text, smtps with TLS.
var smtpPorts = map[string]string{"smtp": "587", "smtps": "465"}

// send delivers a mail. It bounds the time and the bytes of the conversation,
// which net/smtp does not (M1).
func (m mailer) send(to, subject, text string) error {
	host := m.server.Hostname()
	port := cmp.Or(m.server.Port(), smtpPorts[m.server.Scheme])
	deadline := time.Now().Add(mailTimeout)
	dialed, err := net.DialTimeout("tcp", net.JoinHostPort(host, port), mailTimeout)
	if err != nil {
		return failedStep("connect", err)
	}
	defer dialed.Close()
	dialed.SetDeadline(deadline)
	bounded := &mailConn{Conn: dialed}
	var conn net.Conn = bounded
	if m.server.Scheme == "smtps" {
		conn = tls.Client(bounded, tlsConfig(host))
	}
	client, err := smtp.NewClient(conn, host)
	if err != nil {
		return failedStep("greeting", err)
	}
	if err := client.Hello(m.domain()); err != nil {
		// net/smtp tries HELO next, and err has only the answer to that. Within
		// TLS, the answer to EHLO is lost.
		if m.server.Scheme == "smtp" {
			err = errors.Join(replyToEHLO(bounded.heard), err)
		}
		return failedStep("EHLO", err)
	}
	if err := m.encryptAndLogIn(client); err != nil {
		return err
	}
	return m.deliver(client, to, m.message(to, subject, text))
}

// replyToEHLO returns the second reply of a mail server, behind its greeting.
func replyToEHLO(heard []byte) error {
	reader := textproto.NewReader(bufio.NewReader(bytes.NewReader(heard)))
	reader.ReadResponse(0)
	code, text, err := reader.ReadResponse(0)
	if err != nil {
		return fmt.Errorf("all that it has said: %q", heard)
	}
	return &textproto.Error{Code: code, Msg: text}
}

// A mailConn bounds what the mail server says, and keeps it.
type mailConn struct {
	net.Conn
	heard []byte
}

var errEndlessReply = errors.New("the mail server says more than a mail server should")

func (c *mailConn) Read(p []byte) (int, error) {
	left := maxMailReply - len(c.heard)
	if left == 0 {
		return 0, errEndlessReply
	}
	n, err := c.Conn.Read(p[:min(len(p), left)])
	c.heard = append(c.heard, p[:n]...)
	return n, err
}

func tlsConfig(host string) *tls.Config {
	return &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
}

var usualCauses = map[string]string{
	"connect":   "host and port of SMTP_URL; a firewall",
	"greeting":  "smtps:// for port 465, else smtp://; SSL_CERT_FILE for a private authority",
	"EHLO":      "whether the mail server serves this machine",
	"STARTTLS":  "host name and port of SMTP_URL; SSL_CERT_FILE for a private authority",
	"AUTH":      "user and password of SMTP_URL",
	"sender":    "whether this user may send from MAIL_FROM",
	"recipient": "whether the mail server wants a user and a password in SMTP_URL",
	"data":      "whether the mail server trusts the domain of MAIL_FROM",
}

func failedStep(step string, err error) error {
	if isRefusedForNow(err) { // no setting is wrong
		return fmt.Errorf("%s (refused for now): %w", step, err)
	}
	return fmt.Errorf("%s (check %s): %w", step, usualCauses[step], err)
}

func (m mailer) encryptAndLogIn(client *smtp.Client) error {
	host := m.server.Hostname()
	// Require STARTTLS even if the server does not offer it: an attacker may
	// have removed the offer (D4). On loopback nobody stands in between, and
	// the certificate has another name.
	isLoopback := slices.Contains([]string{"localhost", "127.0.0.1", "::1"}, host)
	if m.server.Scheme == "smtp" && !isLoopback {
		if err := client.StartTLS(tlsConfig(host)); err != nil {
			return failedStep("STARTTLS", err)
		}
	}
	if m.server.User == nil {
		return nil
	}
	if err := client.Auth(m.auth(client)); err != nil {
		return failedStep("AUTH", err)
	}
	return nil
}

// auth returns AUTH PLAIN, or else AUTH LOGIN, because Microsoft 365 offers
// only that.
func (m mailer) auth(client *smtp.Client) smtp.Auth {
	user := m.server.User.Username()
	password, _ := m.server.User.Password()
	_, offered := client.Extension("AUTH")
	mechanisms := strings.Fields(strings.ToUpper(offered))
	if slices.Contains(mechanisms, "PLAIN") {
		return smtp.PlainAuth("", user, password, m.server.Hostname())
	}
	return &loginAuth{offered: mechanisms, answers: []string{user, password}}
}

// A loginAuth is AUTH LOGIN: the server asks for user and password in turn.
type loginAuth struct {
	offered []string
	answers []string
}

func (a *loginAuth) Start(*smtp.ServerInfo) (mechanism string, first []byte, err error) {
	if !slices.Contains(a.offered, "LOGIN") {
		return "", nil, fmt.Errorf("the mail server offers %q, not PLAIN or LOGIN", a.offered)
	}
	return "LOGIN", nil, nil
}

func (a *loginAuth) Next(_ []byte, more bool) ([]byte, error) {
	if !more {
		return nil, nil
	}
	if len(a.answers) == 0 {
		return nil, errors.New("the mail server asks for more than user and password")
	}
	answer := a.answers[0]
	a.answers = a.answers[1:]
	return []byte(answer), nil
}

var errUnconfirmed = errors.New(
	"the mail server has neither accepted nor refused the mail")

func (m mailer) deliver(client *smtp.Client, to, message string) error {
	// client.Mail would ask for SMTPUTF8 if this server has it. Then the mail could
	// not pass a later one that lacks it, though it needs none (RFC 6531 3.4).
	id, err := client.Text.Cmd("MAIL FROM:<%s>", m.from.Address)
	if err == nil {
		client.Text.StartResponse(id)
		_, _, err = client.Text.ReadResponse(250)
		client.Text.EndResponse(id)
	}
	if err != nil {
		return failedStep("sender", err)
	}
	if err := client.Rcpt(to); err != nil {
		return failedStep("recipient", err)
	}
	body, err := client.Data()
	if err != nil {
		return failedStep("data", err)
	}
	if _, err := io.WriteString(body, message); err != nil {
		return failedStep("data", err)
	}
	err = body.Close()
	reply, hasReplied := errors.AsType[*textproto.Error](err)
	if hasReplied && reply.Code >= 400 {
		return failedStep("data", err)
	}
	if err != nil {
		return fmt.Errorf("data: %w: %w", errUnconfirmed, err)
	}
	client.Text.Cmd("QUIT") // don't wait for the reply
	return nil
}

// message returns a mail (RFC 5322). The settings and the table users keep line
// breaks out of both addresses (I4). X-Entity-Ref-ID is said to keep Gmail from
// folding a mail under an older one.
func (m mailer) message(to, subject, text string) string {
	date := time.Now().UTC().Format(time.RFC1123Z)
	message := fmt.Sprintf(`From: %s
To: <%s>
Subject: %s
Date: %s
Message-ID: <%s@%s>
X-Entity-Ref-ID: %s
Auto-Submitted: auto-generated
MIME-Version: 1.0
Content-Type: text/plain; charset=us-ascii

%s`, m.from, to, subject, date, rand.Text(), m.domain(), rand.Text(), text)
	return strings.ReplaceAll(message, "\n", "\r\n")
}

// The settings of mail, and the command that tries them.

var smtpPattern = regexp.MustCompile(
	`^smtps?://([^/?#]*@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]+)?/?$`)

func readMailer(settings *settingReader) mailer {
	text := settings.secret("SMTP_URL")
	smtpURL, err := url.Parse(text)
	isValid := err == nil && smtpPattern.MatchString(text)
	settings.require(isValid, "SMTP_URL: must be smtp:// or smtps:// with a host and no path, "+
		"special characters in the password percent-encoded; it may be unset locally only")
	settings.require(!isValid || isPortOrEmpty(smtpURL.Port()),
		"SMTP_URL: the port must be 1 to 65535")
	from, err := mail.ParseAddress(settings.get("MAIL_FROM", ""))
	settings.require(err == nil && isEmail(from.Address), "MAIL_FROM: must be an e-mail address")
	return mailer{server: smtpURL, from: from}
}

func mailTest(args []string) error {
	if len(args) != 1 {
		return usageError("mail-test: takes one address\n\n" + usage)
	}
	var settings settingReader
	m := readMailer(&settings)
	if settings != nil {
		return errors.Join(settings...)
	}
	if !isEmail(args[0]) {
		return usageError("mail-test: \"" + args[0] + "\" is not an ASCII e-mail address")
	}
	err := m.send(args[0], "A test", "This mail shows that the server can send mail.\n")
	if errors.Is(err, errUnconfirmed) {
		return fmt.Errorf("the mail was perhaps sent: %w", err)
	}
	if err != nil {
		return fmt.Errorf("the mail was not sent: %w", err)
	}
	fmt.Println(m.server.Host, "has accepted the mail")
	return nil
}
