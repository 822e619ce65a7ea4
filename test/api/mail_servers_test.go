package api

import (
	"cmp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A mailCase is a mail server. By default, it is on this machine, offers STARTTLS and PLAIN, and has a
// certificate for its name.
type mailCase struct {
	name    string
	options mailOptions
	answers headers  // that replace those of the mail server, by step
	url     string   // SMTP_URL, with HOST for host and port; "" means that of the mail server
	tls     bool     // the mail comes over TLS
	step    string   // at which the mail fails; "": it is sent
	says    []string // what command and log say: words of the mail server or the system, the usual cause
}

type mailOptions = hubstest.MailOptions

var mailCases = []mailCase{
	{name: "remote, STARTTLS",
		options: mailOptions{Host: "0.0.0.0", User: "hubs", Password: "p:@/%20 w"}, tls: true},
	{name: "remote, implicit TLS",
		options: mailOptions{Host: "0.0.0.0", ImplicitTLS: true, User: "hubs", Password: "p:@/%20 w"},
		tls:     true},
	{name: "remote, LOGIN among others",
		options: mailOptions{Host: "0.0.0.0", User: "hubs", Password: "secret-word",
			Mechanism: "LOGIN XOAUTH2"},
		tls: true},
	{name: "implicit TLS, LOGIN alone",
		options: mailOptions{ImplicitTLS: true, User: "hubs", Password: "p:@/%20 w", Mechanism: "LOGIN"},
		tls:     true},
	{name: "this machine, PLAIN", options: mailOptions{User: "hubs", Password: "p:@/%20 w"}},
	{name: "this machine, LOGIN",
		options: mailOptions{User: "hubs", Password: "secret-word", Mechanism: "NTLM LOGIN"}},
	{name: "this machine, LOGIN and PLAIN",
		options: mailOptions{User: "hubs", Password: "secret-word", Mechanism: "LOGIN PLAIN"}},
	{name: "this machine, by name, with a certificate of its own",
		options: mailOptions{Host: "localhost", Untrusted: true, OtherName: true}},
	{name: "this machine, by IPv6", options: mailOptions{Host: "::1", Untrusted: true}},
	{name: "this machine, no STARTTLS", options: mailOptions{NoStartTLS: true}},
	{name: "nobody listens", url: "smtp://127.0.0.1:1", step: "connect",
		says: []string{"refused", "SMTP_URL"}},
	{name: "implicit TLS at a port without it", url: "smtps://HOST", step: "greeting",
		says: []string{"tls:", "smtps://"}},
	{name: "no service",
		answers: headers{"greeting": "554 5.3.2 no service"},
		step:    "greeting", says: []string{"5.3.2 no service", "smtps://"}},
	{name: "implicit TLS, unknown authority",
		options: mailOptions{ImplicitTLS: true, Untrusted: true, User: "hubs", Password: "secret-word"},
		step:    "greeting", says: []string{"unknown authority", "SSL_CERT_FILE"}},
	{name: "implicit TLS, TLS 1.1",
		options: mailOptions{ImplicitTLS: true, OldTLS: true, User: "hubs", Password: "secret-word"},
		step:    "greeting", says: []string{"protocol version"}},
	{name: "implicit TLS, name of another server",
		options: mailOptions{Host: "0.0.0.0", ImplicitTLS: true, OtherName: true,
			User: "hubs", Password: "secret-word"},
		step: "greeting", says: []string{"certificate for 0.0.0.0"}},
	{name: "busy", answers: headers{"EHLO": "421 4.3.2 come later"},
		step: "EHLO", says: []string{"4.3.2 come later", "refused for now"}},
	{name: "a refusal of two lines",
		answers: headers{"EHLO": "550-5.7.1 not\r\n550 5.7.1 you"},
		step:    "EHLO", says: []string{"you", "this machine"}},
	{name: "remote, no STARTTLS",
		options: mailOptions{Host: "0.0.0.0", NoStartTLS: true, User: "hubs", Password: "secret-word"},
		step:    "STARTTLS", says: []string{"no such command", "SMTP_URL"}},
	{name: "remote, unknown authority",
		options: mailOptions{Host: "0.0.0.0", Untrusted: true, User: "hubs", Password: "secret-word"},
		step:    "STARTTLS", says: []string{"unknown authority", "SSL_CERT_FILE"}},
	{name: "remote, TLS 1.1",
		options: mailOptions{Host: "0.0.0.0", OldTLS: true, User: "hubs", Password: "secret-word"},
		step:    "STARTTLS", says: []string{"protocol version"}},
	{name: "remote, name of another server",
		options: mailOptions{Host: "0.0.0.0", OtherName: true, User: "hubs", Password: "secret-word"},
		step:    "STARTTLS", says: []string{"certificate for 0.0.0.0"}},
	{name: "wrong password",
		options: mailOptions{User: "hubs", Password: "secret-word"},
		answers: headers{"AUTH": "535 5.7.3 unsuccessful"},
		step:    "AUTH", says: []string{"5.7.3 unsuccessful", "password"}},
	{name: "XOAUTH2 alone",
		options: mailOptions{User: "hubs", Password: "secret-word", Mechanism: "XOAUTH2"},
		step:    "AUTH", says: []string{"XOAUTH2", "PLAIN or LOGIN"}},
	{name: "two mechanisms, none known",
		options: mailOptions{User: "hubs", Password: "secret-word", Mechanism: "GSSAPI CRAM-MD5"},
		step:    "AUTH", says: []string{"CRAM-MD5", "PLAIN or LOGIN"}},
	{name: "sender", answers: headers{"MAIL": "553 5.7.1 not yours"},
		step: "sender", says: []string{"not yours", "MAIL_FROM"}},
	{name: "recipient",
		answers: headers{"RCPT": "554 5.7.1 relay access denied"},
		step:    "recipient", says: []string{"relay access denied", "SMTP_URL"}},
	{name: "data", answers: headers{"DATA": "452 4.2.2 disk is full"},
		step: "data", says: []string{"disk is full", "refused for now"}},
	{name: "text",
		answers: headers{"mail": "550 5.7.509 looks like spam"},
		step:    "data", says: []string{"looks like spam", "MAIL_FROM"}},
}

// D4: Codes are mailed over TLS to another machine, and in plain text to this one, where nobody
// stands in between. A mail that is not sent is reported with the step that has failed, the mail
// server's own words and the usual cause: by the command mail-test, and in the log.
func TestMailServers(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	for _, c := range mailCases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.options.Converse = func(int) func(string) string {
				return func(step string) string { return c.answers[step] }
			}
			m := hubstest.NewMailServer(t, c.options)
			env := hubstest.StagingEnv(m)
			_, address, _ := strings.Cut(m.URL, "://")
			env["SMTP_URL"] = cmp.Or(strings.Replace(c.url, "HOST", address, 1), m.URL)
			s := hubstest.Start(t, env, map[string]string{"DATABASE_URL": database})
			if c.step != "" {
				s.AllowErrorsWithAnyOf("code not sent")
			}
			email := askForNewUser(t, s)
			logged := s.Log.WaitFor(t, `"msg":"code `, maskedEmail(email))
			status, said := run(t, env, "mail-test", email)

			if c.step == "" {
				wantEqual(t, "exit status", status, 0)
				server, _, isAccepted := strings.Cut(said, " has accepted the mail")
				isNamed := isAccepted && strings.HasSuffix(m.URL, server)
				wantEqual(t, "the mail server is named in "+said, isNamed, true)
				hubstest.WaitFor(t, "QUITs", 2, m.Quits.Load)
				for _, got := range m.Received() {
					wantEqual(t, "TLS", got.TLS, c.tls)
					wantEqual(t, "user", got.User, c.options.User)
				}
				return
			}
			wantEqual(t, "exit status", status, 1)
			for _, text := range []string{said, logged} {
				for _, part := range append(c.says, c.step) {
					if !strings.Contains(text, part) {
						t.Errorf("got %q, want %q in it", text, part)
					}
				}
			}
			wantEqual(t, "passwords at the mail server", m.Passwords.Load(), int64(0))
			wantEqual(t, "mails at the mail server", len(m.Received()), 0)
		})
	}
}
