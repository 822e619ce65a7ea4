package main

// One-time codes: the mutex-guarded map that holds them, and the mail that carries
// them. Neither a code nor the fact that one exists ever leaves this process by
// another way.

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
	"maps"
	"math/big"
	"net"
	"net/mail"
	"net/netip"
	"net/smtp"
	"net/url"
	"strings"
	"sync"
	"time"
)

const (
	codeLength  = 6
	codeLife    = 10 * time.Minute
	codeResend  = time.Minute // a younger code is not replaced: the mailbox can't be flooded
	mailTimeout = 10 * time.Second
	mailQueue   = 1000 // requests for a code that wait for a worker
	mailWorkers = 8    // so one hung mail server connection does not hold up the rest
)

// oneTimeCode is good once, for codeLife. Its age is read from the monotonic clock.
type oneTimeCode struct {
	code   string
	userID string
	made   time.Time
}

// oneTimeCodes holds the codes by e-mail address in lower case. Only addresses of
// active users get in, so their number bounds it. A restart forgets all.
type oneTimeCodes struct {
	mu      sync.Mutex
	byEmail map[string]oneTimeCode
	swept   time.Time
}

// issue makes a code, or says false while the last one is younger than codeResend.
func (c *oneTimeCodes) issue(email, userID string) (code string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if now.Sub(c.swept) >= codeLife {
		maps.DeleteFunc(c.byEmail, func(_ string, old oneTimeCode) bool { return now.Sub(old.made) >= codeLife })
		c.swept = now
	}
	if last, live := c.byEmail[email]; live && now.Sub(last.made) < codeResend {
		return "", false
	}
	// All of 000000 to 999999 are as likely (ASVS 6.5.3).
	n, err := rand.Int(rand.Reader, big.NewInt(1_000_000))
	if err != nil {
		panic(err) // crypto/rand never fails; a code must not be guessable if it does
	}
	code = fmt.Sprintf("%0*d", codeLength, n)
	c.byEmail[email] = oneTimeCode{code, userID, now}
	return code, true
}

// redeem uses a code up. Looking, comparing and removing are one step, so of a
// hundred requests with the right code one wins.
func (c *oneTimeCodes) redeem(email, code string) (used oneTimeCode, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	used = c.byEmail[email]
	right := subtle.ConstantTimeCompare([]byte(code), []byte(used.code)) == 1
	if !right || time.Since(used.made) >= codeLife {
		return oneTimeCode{}, false
	}
	delete(c.byEmail, email)
	return used, true
}

// restore takes back a code that was right but could not be answered for, unless
// a newer one stands.
func (c *oneTimeCodes) restore(email string, unused oneTimeCode) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, newer := c.byEmail[email]; !newer {
		c.byEmail[email] = unused
	}
}

// withdraw removes a code whose mail failed.
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

// startMail starts the workers. Closing s.codeJobs ends them once it is empty.
func (s *server) startMail() {
	for range mailWorkers {
		s.mailing.Go(func() {
			for job := range s.codeJobs {
				s.sendCode(job)
			}
		})
	}
}

// sendCode looks the address up, and makes and mails a code where it is an active
// user's. It runs after the answer, so that nobody can tell which case was met.
func (s *server) sendCode(job codeJob) {
	email := slog.String("email", job.email)
	u, err := s.userByEmail(job.email)
	if errors.Is(err, sql.ErrNoRows) || err == nil && u.suspended {
		job.log.Info("code not sent: no active user", email)
		return
	}
	if err != nil {
		job.log.Error("code not sent", email, slog.Any("error", err))
		return
	}
	code, ok := s.codes.issue(job.email, u.UserID)
	if !ok {
		job.log.Info("code not sent: the last one is fresh", email)
		return
	}
	if err := s.mail(u.Email, code); err != nil {
		s.codes.withdraw(job.email, code)
		job.log.Error("code not sent", email, slog.Any("error", err))
		return
	}
	job.log.Info("code sent", email)
}

// mail delivers a code to the address of the user's row. Without a mail server,
// which only the local environment permits, the code goes to standard output.
func (s *server) mail(to, code string) error {
	if s.cfg.smtpURL == nil {
		_, err := fmt.Fprintf(s.out, "Sign-in code for %s: %s\n", maskText(to), code)
		return err
	}
	client, err := dialMail(s.cfg.smtpURL, s.cfg.mailFrom)
	if err != nil {
		return fmt.Errorf("reach the mail server: %w", err)
	}
	defer client.Close()
	if err := client.Mail(s.cfg.mailFrom.Address); err != nil {
		return err
	}
	if err := client.Rcpt(to); err != nil {
		return err
	}
	body, err := client.Data()
	if err != nil {
		return err
	}
	if _, err := io.WriteString(body, codeMessage(s.cfg.mailFrom, to, code)); err != nil {
		return err
	}
	if err := body.Close(); err != nil {
		return err
	}
	client.Quit() // the mail is accepted, whatever the farewell
	return nil
}

// dialMail opens an authenticated conversation that ends within mailTimeout. A
// remote server that does not offer STARTTLS gets neither password nor mail (ASVS
// 12.3.1): it may be an attacker who took the offer out.
func dialMail(server *url.URL, from *mail.Address) (*smtp.Client, error) {
	host, port := server.Hostname(), cmp.Or(server.Port(), map[string]string{"smtp": "587", "smtps": "465"}[server.Scheme])
	deadline := time.Now().Add(mailTimeout)
	conn, err := (&net.Dialer{Deadline: deadline}).Dial("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, err
	}
	conn.SetDeadline(deadline)
	tlsConfig := &tls.Config{ServerName: host}
	if server.Scheme == "smtps" {
		conn = tls.Client(conn, tlsConfig)
	}
	client, err := smtp.NewClient(conn, host)
	if err != nil {
		conn.Close()
		return nil, err
	}
	if err := secureMail(client, server, from, tlsConfig); err != nil {
		client.Close()
		return nil, err
	}
	return client, nil
}

func secureMail(client *smtp.Client, server *url.URL, from *mail.Address, tlsConfig *tls.Config) error {
	_, domain, _ := strings.Cut(from.Address, "@")
	if err := client.Hello(domain); err != nil {
		return err
	}
	if server.Scheme == "smtp" {
		if offered, _ := client.Extension("STARTTLS"); offered {
			if err := client.StartTLS(tlsConfig); err != nil {
				return err
			}
		} else if !isLoopback(server.Hostname()) {
			return errors.New("the mail server does not offer STARTTLS")
		}
	}
	if server.User == nil {
		return nil
	}
	password, _ := server.User.Password()
	return client.Auth(smtp.PlainAuth("", server.User.Username(), password, server.Hostname()))
}

func isLoopback(host string) bool {
	address, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && address.IsLoopback()
}

// codeMessage is the mail, in RFC 5322 form. Both addresses have passed a check
// that lets no line break through.
func codeMessage(from *mail.Address, to, code string) string {
	_, domain, _ := strings.Cut(from.Address, "@")
	return strings.Join([]string{
		"From: " + from.String(),
		"To: <" + to + ">",
		"Subject: Your sign-in code",
		"Date: " + time.Now().UTC().Format(time.RFC1123Z),
		"Message-ID: <" + rand.Text() + "@" + domain + ">",
		"Auto-Submitted: auto-generated", // RFC 3834: no automatic replies, please
		"MIME-Version: 1.0",
		"Content-Type: text/plain; charset=us-ascii",
		"",
		"Your sign-in code is " + code + ".",
		"",
		fmt.Sprintf("It works once, within %.0f minutes. If you did not ask for it,", codeLife.Minutes()),
		"ignore this mail: nobody can sign in without the code. Tell it to nobody.",
		"",
	}, "\r\n")
}
