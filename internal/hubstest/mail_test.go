package hubstest

import (
	"net/smtp"
	"net/url"
	"testing"
)

func TestMain(m *testing.M) { Main(m) }

const message = "Subject: s\r\n\r\n.123456\r\n"

// send mails as any client would. net/smtp asks for STARTTLS where it is offered.
func send(through, password string) error {
	u, err := url.Parse(through)
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

func TestMailServer(t *testing.T) {
	t.Parallel()
	m := NewMailServer(t, MailOptions{User: "u", Password: "p"})
	if err := send(m.URL, "p"); err != nil {
		t.Fatal(err)
	}
	got := m.WaitMail(t, "TO@example.com")
	if !got.TLS || got.User != "u" || got.Data != message {
		t.Errorf("got %+v, want the mail as it was sent", got)
	}
	if code := got.Code(t); code != "123456" {
		t.Errorf("got the code %s, want 123456", code)
	}
	if err := send(m.URL, "wrong"); err == nil {
		t.Error("got no error for a wrong password")
	}
	untrusted := NewMailServer(t, MailOptions{Untrusted: true})
	if err := send(untrusted.URL, ""); err == nil {
		t.Error("got no error for a certificate of an unknown authority")
	}
	m.Fail(MailLeaves) // which the server counts as success
	if err := send(m.URL, "p"); err == nil {
		t.Error("got no error for a mail server that leaves")
	}
}
