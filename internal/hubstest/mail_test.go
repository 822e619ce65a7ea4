package hubstest

import (
	"crypto/tls"
	"io"
	"net/smtp"
	"net/url"
	"strings"
	"testing"
)

func TestMain(m *testing.M) { Main(m) }

// send mails as any client would.
func send(t *testing.T, m *MailServer) error {
	t.Helper()
	u, err := url.Parse(m.URL)
	if err != nil {
		t.Fatal(err)
	}
	c, err := smtp.Dial(u.Host)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.StartTLS(&tls.Config{ServerName: u.Hostname()}); err != nil {
		return err
	}
	if u.User != nil {
		password, _ := u.User.Password()
		auth := smtp.PlainAuth("", u.User.Username(), password, u.Hostname())
		if err := c.Auth(auth); err != nil {
			return err
		}
	}
	if err := c.Mail("from@example.com"); err != nil {
		return err
	}
	if err := c.Rcpt("to@example.com"); err != nil {
		return err
	}
	w, err := c.Data()
	if err != nil {
		return err
	}
	io.WriteString(w, "Subject: s\r\n\r\n.123456\r\n")
	if err := w.Close(); err != nil {
		return err
	}
	return c.Quit()
}

func TestMailServer(t *testing.T) {
	t.Parallel()
	m := NewMailServer(t, MailOptions{User: "u", Password: "p"})
	if err := send(t, m); err != nil {
		t.Fatal(err)
	}
	got := m.WaitMail(t, "TO@example.com")
	if !got.TLS || got.User != "u" || got.Data != "Subject: s\r\n\r\n.123456\r\n" {
		t.Errorf("got %+v, want the mail as it was sent", got)
	}
	if code := got.Code(t); code != "123456" {
		t.Errorf("got the code %s, want 123456", code)
	}
	m.URL = strings.Replace(m.URL, "u:p", "u:wrong", 1)
	if err := send(t, m); err == nil {
		t.Error("got no error for a wrong password")
	}
	if err := send(t, NewMailServer(t, MailOptions{Untrusted: true})); err == nil {
		t.Error("got no error for a certificate of an unknown authority")
	}
}

func TestMailServerFails(t *testing.T) {
	t.Parallel()
	for mode := MailCloses; mode <= MailFloodsLines; mode++ {
		m := NewMailServer(t, MailOptions{})
		m.Fail(mode)
		sent := make(chan error, 1)
		go func() { sent <- send(t, m) }()
		switch mode {
		case MailHangs, MailHangsData, MailHangsEnd, MailIgnoresQuit:
			WaitUntil(t, "a connection", func() bool {
				open, _, _ := m.Connections()
				return open == 1
			})
			m.Release()
			if err := <-sent; err != nil {
				t.Errorf("mode %d, released: got %v, want no error", mode, err)
			}
		case MailFloods, MailFloodsLines:
			WaitUntil(t, "a flood", func() bool { return m.Flooded() > 16<<20 })
		default:
			if err := <-sent; err == nil {
				t.Errorf("mode %d: got no error, want one", mode)
			}
		}
	}
}
