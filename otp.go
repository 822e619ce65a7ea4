package main

// One-time codes: the mutex-guarded map that holds them, the queue of requests for them,
// and the mail that carries them. A code leaves this process by mail only; without a mail
// server, which only the local environment permits, it is printed on standard output.

import (
	"cmp"
	"context"
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

	mailQueue   = 1000                   // unfinished requests for a code
	mailWorkers = 8                      // one hung connection does not hold up the rest
	mailMaxWait = time.Minute            // a request that waited longer is dropped
	mailTimeout = 10 * time.Second       // of one conversation with the mail server
	mailDelay   = 500 * time.Millisecond // of a request before its work begins; random, up to this
)

// A oneTimeCode is good once, for codeTTL.
type oneTimeCode struct {
	code     string
	issuedAt time.Time // with monotonic time
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
// O1: all of 000000 to 999999 are equally likely.
// O7: a mailbox gets at most one mail a minute, however many clients ask; sooner only if the last
// code was used or its mail failed.
func (c *oneTimeCodes) issue(email string) (code string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// An address without a code has the zero time, which is long ago.
	if time.Since(c.byEmail[email].issuedAt) < codeResend {
		return "", false
	}
	// crypto/rand never returns an error here: it ends the process.
	n, _ := rand.Int(rand.Reader, big.NewInt(1_000_000))
	code = fmt.Sprintf("%0*d", codeLength, n)
	c.byEmail[email] = oneTimeCode{code, time.Now()}
	// Only to free memory: redeem checks the age.
	time.AfterFunc(codeTTL, func() { c.withdraw(email, code) })
	return code, true
}

// redeem uses a code up and returns it. ok is false if the code is wrong, expired or was
// never issued.
//
// O2: the age is checked here, whether or not anything was swept.
// O3: look-up, comparison and removal are one step, so of a hundred requests with the right code
// one succeeds.
func (c *oneTimeCodes) redeem(email, code string) (redeemed oneTimeCode, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	issued, exists := c.byEmail[email]
	matches := subtle.ConstantTimeCompare([]byte(code), []byte(issued.code)) == 1
	expired := time.Since(issued.issuedAt) >= codeTTL
	if !exists || !matches || expired {
		return oneTimeCode{}, false
	}
	delete(c.byEmail, email)
	return issued, true
}

// restore puts back a redeemed code that could not be exchanged for a session, because the
// database was away. It keeps its age. If there is a newer code by now, that one stays.
func (c *oneTimeCodes) restore(email string, code oneTimeCode) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, exists := c.byEmail[email]; !exists {
		c.byEmail[email] = code
	}
}

// withdraw removes a code whose mail failed, or whose life is over.
func (c *oneTimeCodes) withdraw(email, code string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byEmail[email].code == code {
		delete(c.byEmail, email)
	}
}

// A codeJob is a request for a code on its way to a worker.
type codeJob struct {
	email    string // what the client sent, in lower case; mail goes to the stored address
	queuedAt time.Time
	log      *slog.Logger
}

// queueCode hands a request for a code to the workers, after a random delay. ok is false if
// the queue is full.
//
// O10: without the delay, the work for a known address would slow the client's next request,
// which could be measured. No worker waits during the delay.
func (s *server) queueCode(email string, log *slog.Logger) (ok bool) {
	select {
	case s.codeSlots <- struct{}{}:
	default:
		return false
	}
	job := codeJob{email, time.Now(), log.With("email", email)} // maskAttr masks it
	delay, _ := rand.Int(rand.Reader, big.NewInt(int64(mailDelay)))
	time.AfterFunc(time.Duration(delay.Int64()), func() {
		s.codeJobs <- job // never blocks: it has room for as many jobs as there are slots
	})
	return true
}

// sendCodes is a worker. It ends when ctx does.
func (s *server) sendCodes(ctx context.Context) {
	for {
		select {
		case job := <-s.codeJobs:
			s.sendCode(job)
			<-s.codeSlots
		case <-ctx.Done():
			return
		}
	}
}

// sendCode mails a code if the address is an active user's, and logs what became of the
// request. The client has had its answer.
//
// D3: a mail server that refuses or hangs changes no answer, until the queue is full. The mail
// goes to the address as it is stored, never to the text that a client sent.
func (s *server) sendCode(job codeJob) {
	if time.Since(job.queuedAt) > mailMaxWait {
		job.log.Warn("code not sent: waited too long")
		return
	}
	u, found, err := s.loadUser(whereEmail, job.email)
	if err != nil {
		job.log.Error("code not sent", "error", err)
		return
	}
	if !found || u.suspended {
		job.log.Info("code not sent: no active user")
		return
	}
	code, ok := s.codes.issue(job.email)
	if !ok {
		job.log.Info("code not sent: the last one is less than a minute old")
		return
	}
	if err := s.mail(u.Email, code); err != nil {
		s.codes.withdraw(job.email, code)
		job.log.Error("code not sent", "error", err)
		return
	}
	job.log.Info("code sent")
}

// smtpPorts has the default port of each scheme. smtp begins in plain text and then does
// STARTTLS; smtps is TLS from the first byte on.
var smtpPorts = map[string]string{"smtp": "587", "smtps": "465"}

// mail delivers a code. Connection and conversation end within mailTimeout; net/smtp has no
// time limits of its own.
func (s *server) mail(to, code string) error {
	relay := s.cfg.smtpURL
	if relay == nil {
		_, err := fmt.Fprintf(s.out, "\nSign-in code for %s: %s\n\n", to, code)
		return err
	}
	host := relay.Hostname()
	port := cmp.Or(relay.Port(), smtpPorts[relay.Scheme])
	deadline := time.Now().Add(mailTimeout)
	conn, err := net.DialTimeout("tcp", net.JoinHostPort(host, port), mailTimeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(deadline)
	if relay.Scheme == "smtps" {
		conn = tls.Client(conn, tlsConfig(host))
	}
	client, err := smtp.NewClient(conn, host)
	if err != nil {
		return err
	}
	return s.deliver(client, to, code)
}

func (s *server) deliver(client *smtp.Client, to, code string) error {
	from := s.cfg.mailFrom
	_, domain, _ := strings.Cut(from.Address, "@")
	if err := client.Hello(domain); err != nil {
		return err
	}
	if err := secureMail(client, s.cfg.smtpURL); err != nil {
		return err
	}
	if err := client.Mail(from.Address); err != nil {
		return err
	}
	if err := client.Rcpt(to); err != nil {
		return err
	}
	body, err := client.Data()
	if err != nil {
		return err
	}
	if _, err := io.WriteString(body, codeMessage(from, domain, to, code)); err != nil {
		return err
	}
	if err := body.Close(); err != nil {
		return err
	}
	client.Quit() // the mail is accepted, whatever the server says now
	return nil
}

func tlsConfig(host string) *tls.Config {
	return &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
}

// secureMail encrypts the conversation and signs in.
//
// D4: every host except loopback must do STARTTLS. If the server does not offer it, an attacker
// on the way may have removed the offer. Then neither mail nor password is sent.
func secureMail(client *smtp.Client, relay *url.URL) error {
	host := relay.Hostname()
	isLoopback := slices.Contains([]string{"localhost", "127.0.0.1", "::1"}, host)
	offered, _ := client.Extension("STARTTLS")
	_, encrypted := client.TLSConnectionState()
	if !encrypted && (offered || !isLoopback) {
		if err := client.StartTLS(tlsConfig(host)); err != nil {
			return err
		}
	}
	if relay.User == nil {
		return nil
	}
	password, _ := relay.User.Password()
	return client.Auth(smtp.PlainAuth("", relay.User.Username(), password, host))
}

// codeMessage is the mail in the form of RFC 5322. Both addresses have passed a check that
// lets no line break through.
func codeMessage(from *mail.Address, domain, to, code string) string {
	date := time.Now().UTC().Format(time.RFC1123Z)
	message := fmt.Sprintf(`From: %s
To: <%s>
Subject: Your sign-in code
Date: %s
Message-ID: <%s@%s>
Auto-Submitted: auto-generated
MIME-Version: 1.0
Content-Type: text/plain; charset=us-ascii

Your sign-in code is %s.

It works once, within %.0f minutes. Do not tell it to anyone.
If you did not ask for it, ignore this mail.
`, from, to, date, rand.Text(), domain, code, codeTTL.Minutes())
	return strings.ReplaceAll(message, "\n", "\r\n")
}
