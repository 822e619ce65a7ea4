package hubstest

import (
	"net/smtp"
	"net/url"
	"testing"
)

func TestMain(m *testing.M) { Main(m) }

const message = "Subject: s\r\n\r\n.123456\r\n"

// send mails message to to@example.com through the server at an SMTP URL. It signs in if the
// password is not "". net/smtp uses STARTTLS if the server offers it.
func send(smtpURL, password string) error {
	u, err := url.Parse(smtpURL)
	if err != nil {
		return err
	}
	var auth smtp.Auth
	if password != "" {
		auth = smtp.PlainAuth("", "u", password, u.Hostname())
	}
	to := []string{"to@example.com"}
	return smtp.SendMail(u.Host, auth, "from@example.com", to, []byte(message))
}

// The mail server keeps a mail as it was sent, and offers TLS. It fails as its options and its mode
// say, so that a client gets an error.
func TestMailServer(t *testing.T) {
	t.Parallel()
	m := NewMailServer(t, MailOptions{User: "u", Password: "p"})
	if err := send(m.URL, "p"); err != nil {
		t.Fatal(err)
	}
	got := m.WaitMail(t, "TO@example.com")
	if !got.TLS || got.User != "u" || got.Data != message {
		t.Errorf("got %+v, want TLS, the user u and the data %q", got, message)
	}
	if code := got.Code(t); code != "123456" {
		t.Errorf("got the code %s, want 123456", code)
	}
	if err := send(m.URL, "wrong"); err == nil {
		t.Error("got no error for a wrong password, want one")
	}
	untrusted := NewMailServer(t, MailOptions{Untrusted: true})
	if err := send(untrusted.URL, ""); err == nil {
		t.Error("got no error for a certificate of an unknown authority, want one")
	}
	m.Fail(MailLeaves) // the product ignores the reply to QUIT, but smtp.SendMail waits for it
	if err := send(m.URL, "p"); err == nil {
		t.Error("got no error for a connection that closes before QUIT, want one")
	}
}
