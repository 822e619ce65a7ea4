package main

// One-time codes: the mutex-guarded map that holds them, and the mail that carries
// them. No code leaves this process by another way, but to standard output where the local
// environment has no mail server.

import (
	"cmp"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"database/sql"
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

const codeLength = 6
const codeLife = 10 * time.Minute
const codeResend = time.Minute // a younger code is not replaced: the mailbox can't be flooded

const mailTimeout = 10 * time.Second
const mailQueue = 1000 // requests for a code that wait for a worker
const mailWorkers = 8  // so one hung mail server connection does not hold up the rest

// smtpPorts are by scheme: with STARTTLS, and encrypted from the first byte on.
var smtpPorts = map[string]string{"smtp": "587", "smtps": "465"}

// oneTimeCode is good once, for codeLife. Its age is read from the monotonic clock.
type oneTimeCode struct {
	code string
	made time.Time
}

// oneTimeCodes holds the codes by e-mail address in lower case. Only addresses of
// active users get in, so their number bounds it. A restart forgets all.
type oneTimeCodes struct {
	mu      sync.Mutex
	byEmail map[string]oneTimeCode
}

// issue makes a code, or says false while the last one is younger than codeResend.
func (c *oneTimeCodes) issue(email string) (code string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if last, live := c.byEmail[email]; live && time.Since(last.made) < codeResend {
		return "", false
	}
	// All of 000000 to 999999 are as likely (ASVS 6.5.3).
	n, _ := rand.Int(rand.Reader, big.NewInt(1_000_000)) // crypto/rand ends the process rather than fail
	code = fmt.Sprintf("%0*d", codeLength, n)
	c.byEmail[email] = oneTimeCode{code, time.Now()}
	time.AfterFunc(codeLife, func() { c.withdraw(email, code) }) // frees the memory; redeem looks at the time itself
	return code, true
}

// redeem uses a code up. Looking, comparing and removing are one step, so of a
// hundred requests with the right code one wins.
func (c *oneTimeCodes) redeem(email, code string) (ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	issued := c.byEmail[email]
	ok = subtle.ConstantTimeCompare([]byte(code), []byte(issued.code)) == 1 && time.Since(issued.made) < codeLife
	if ok {
		delete(c.byEmail, email)
	}
	return ok
}

// withdraw removes a code whose mail failed, or whose life is over.
func (c *oneTimeCodes) withdraw(email, code string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byEmail[email].code == code {
		delete(c.byEmail, email)
	}
}

// codeJob is a request for a code on its way through the queue.
type codeJob struct {
	email string // in lower case, as sent in: for the look-up only
	log   *slog.Logger
}

// sendCodes is a worker. It looks each address up, and makes and mails a code where it is
// an active user's, apart from the answer, so that nobody can tell which case was met.
// Closing s.codeJobs ends it once that is empty.
func (s *server) sendCodes() {
	for job := range s.codeJobs {
		log, code, fresh := job.log.With("email", job.email), "", false
		u, err := s.loadUser(byEmail, job.email, sql.ErrNoRows)
		if err == nil && !u.suspended {
			if code, fresh = s.codes.issue(job.email); fresh {
				err = s.mail(u.Email, code)
			}
		}
		switch {
		case errors.Is(err, sql.ErrNoRows), err == nil && u.suspended:
			log.Info("code not sent: no active user")
		case err != nil:
			s.codes.withdraw(job.email, code)
			log.Error("code not sent", "error", err)
		case !fresh:
			log.Info("code not sent: the last one is too young")
		default:
			log.Info("code sent")
		}
	}
}

// mail delivers a code to the address of the user's row. Without a mail server,
// which only the local environment permits, the code goes to standard output.
//
// The conversation ends within mailTimeout: net/smtp itself knows no limits of time.
func (s *server) mail(to, code string) error {
	server, from := s.cfg.smtpURL, s.cfg.mailFrom
	if server == nil {
		_, err := fmt.Fprintf(s.out, "Sign-in code for %s: %s\n", maskText(to), code)
		return err
	}
	host, deadline := server.Hostname(), time.Now().Add(mailTimeout)
	port := cmp.Or(server.Port(), smtpPorts[server.Scheme])
	conn, err := (&net.Dialer{Deadline: deadline}).Dial("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(deadline)
	if server.Scheme == "smtps" {
		conn = tls.Client(conn, &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12})
	}
	var client *smtp.Client
	var body io.WriteCloser
	_, domain, _ := strings.Cut(from.Address, "@")
	return inOrder(
		func() (err error) { client, err = smtp.NewClient(conn, host); return err },
		func() error { return client.Hello(domain) },
		func() error { return secureMail(client, server) },
		func() error { return client.Mail(from.Address) },
		func() error { return client.Rcpt(to) },
		func() (err error) { body, err = client.Data(); return err },
		func() (err error) { _, err = io.WriteString(body, codeMessage(from, domain, to, code)); return err },
		func() error { return body.Close() },
		func() error { client.Quit(); return nil }, // the mail is accepted, whatever the farewell
	)
}

// secureMail encrypts and signs in. STARTTLS is for the asking also where it is not
// offered, since somebody on the way may have taken the offer out: a remote server
// without it gets neither password nor mail (ASVS 12.3.1).
func secureMail(client *smtp.Client, server *url.URL) error {
	host := server.Hostname()
	offered, _ := client.Extension("STARTTLS")
	_, encrypted := client.TLSConnectionState()
	if !encrypted && (offered || !slices.Contains([]string{"localhost", "127.0.0.1", "::1"}, host)) {
		if err := client.StartTLS(&tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}); err != nil {
			return err
		}
	}
	if server.User == nil {
		return nil
	}
	password, _ := server.User.Password()
	return client.Auth(smtp.PlainAuth("", server.User.Username(), password, host))
}

// codeMessage is the mail, in RFC 5322 form. Both addresses have passed a check
// that lets no line break through.
func codeMessage(from *mail.Address, domain, to, code string) string {
	message := fmt.Sprintf(`From: %s
To: <%s>
Subject: Your sign-in code
Date: %s
Message-ID: <%s@%s>
Auto-Submitted: auto-generated
MIME-Version: 1.0
Content-Type: text/plain; charset=us-ascii

Your sign-in code is %s.

It works once, within %.0f minutes. Tell nobody. Not you? Ignore this mail.
`, from, to, time.Now().UTC().Format(time.RFC1123Z), rand.Text(), domain, code, codeLife.Minutes())
	return strings.ReplaceAll(message, "\n", "\r\n")
}
