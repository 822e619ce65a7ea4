package hubstest

import (
	"bufio"
	"cmp"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// authority signs the certificates of the tests' servers. This process and its children trust no
// other one (see prepareDir).
var authority = newAuthority()

func newAuthority() *tls.Certificate {
	return certify(nil, &x509.Certificate{
		Subject:               pkix.Name{CommonName: "test CA"},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	})
}

// certify makes a certificate. Without an issuer it signs itself.
func certify(issuer *tls.Certificate, template *x509.Certificate) *tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	made := &tls.Certificate{PrivateKey: key, Leaf: template}
	if issuer == nil {
		issuer = made
	}
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(24 * time.Hour)
	der, err := x509.CreateCertificate(
		rand.Reader, template, issuer.Leaf, key.Public(), issuer.PrivateKey)
	if err != nil {
		panic(err)
	}
	made.Certificate = [][]byte{der}
	made.Leaf, err = x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	return made
}

// ServerPEM returns a certificate and its key for a server that has all the names that tests use.
func ServerPEM() []byte { return encodePEM(serverCertificate(authority)) }

func encodePEM(made *tls.Certificate) []byte {
	key, err := x509.MarshalPKCS8PrivateKey(made.PrivateKey)
	if err != nil {
		panic(err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: made.Certificate[0]})
	return append(text, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})...)
}

func serverCertificate(issuer *tls.Certificate) *tls.Certificate {
	return certify(issuer, &x509.Certificate{
		DNSNames:    []string{"localhost", "example.com", "*.example.com"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4zero, net.IPv6loopback},
	})
}

// MailOptions configure a mail server. The zero value offers STARTTLS on 127.0.0.1 and takes
// mail of anyone.
type MailOptions struct {
	// Host stands in the URL. 0.0.0.0 reaches this machine too, and is no loopback
	// address: it plays the remote host.
	Host           string
	ImplicitTLS    bool // smtps
	NoStartTLS     bool
	Untrusted      bool   // its certificate is of an unknown authority
	OtherName      bool   // its certificate is good, but for another server
	OldTLS         bool   // TLS 1.1 and older only
	User, Password string // if set, clients must sign in
}

// A MailServer is an SMTP server that keeps what it gets and fails on demand.
type MailServer struct {
	opts MailOptions
	URL  string
	tls  *tls.Config

	logins  atomic.Int64 // passwords so far, right or wrong
	flooded atomic.Int64 // bytes of endless answers so far

	mu      sync.Mutex
	mails   []*Mail
	changed chan struct{} // closed and replaced by each change of mode
	mode    MailMode
	delay   time.Duration
	open    map[net.Conn]bool
}

// A MailMode is how a mail server works or fails.
type MailMode int

const (
	MailWorks            MailMode = iota
	MailCloses                    // closes each connection at once
	MailRefuses                   // greets with 554
	MailHangs                     // never greets
	MailHangsData                 // never answers DATA
	MailHangsEnd                  // takes the mail, never confirms it
	MailDefers                    // 451 to each recipient
	MailRefusesRecipient          // 550 to each recipient, but takes the mail nevertheless
	MailRefusesSender             // 550 to each sender, but takes the mail nevertheless
	MailRepeats                   // takes the mail, refuses it in its own words
	MailLeaves                    // takes and confirms the mail, closes before QUIT
	MailIgnoresQuit               // takes and confirms the mail, never answers QUIT
	MailFloods                    // greets without ever ending the line
	MailFloodsLines               // answers EHLO with lines without end
)

// A Mail is one that has arrived.
type Mail struct {
	From string
	To   []string
	Data string // headers and body as sent, with CRLF, without the dots of SMTP
	TLS  bool
	User string // the user that had signed in, or ""
	Helo string // the name that the client gave itself
	read bool   // WaitMail has returned it
}

var mailServers sync.Map // URL → *MailServer

func mailServerOf(smtpURL string) *MailServer {
	m, _ := mailServers.Load(smtpURL)
	server, _ := m.(*MailServer)
	return server
}

// NewMailServer starts a mail server that ends with the test.
func NewMailServer(t testing.TB, opts MailOptions) *MailServer {
	opts.Host = cmp.Or(opts.Host, "127.0.0.1")
	m := &MailServer{
		opts:    opts,
		tls:     opts.tls(),
		changed: make(chan struct{}),
		open:    map[net.Conn]bool{},
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(opts.Host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	m.URL = opts.url(ln.Addr().(*net.TCPAddr).Port)
	mailServers.Store(m.URL, m)
	var sessions sync.WaitGroup
	sessions.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			m.mu.Lock()
			m.open[conn] = true
			m.mu.Unlock()
			sessions.Go(func() { m.session(conn) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		m.Fail(MailCloses)
		m.mu.Lock()
		for conn := range m.open {
			conn.Close()
		}
		m.mu.Unlock()
		sessions.Wait()
		mailServers.Delete(m.URL)
	})
	return m
}

func (opts MailOptions) tls() *tls.Config {
	certificate := serverCertificate(authority)
	if opts.Untrusted {
		certificate = serverCertificate(newAuthority())
	}
	if opts.OtherName {
		certificate = certify(authority, &x509.Certificate{DNSNames: []string{"other.example.com"}})
	}
	config := &tls.Config{Certificates: []tls.Certificate{*certificate}}
	if opts.OldTLS {
		config.MinVersion = tls.VersionTLS10
		config.MaxVersion = tls.VersionTLS11
	}
	return config
}

func (opts MailOptions) url(port int) string {
	u := url.URL{Scheme: "smtp", Host: fmt.Sprintf("%s:%d", opts.Host, port)}
	if opts.ImplicitTLS {
		u.Scheme = "smtps"
	}
	if opts.User != "" {
		u.User = url.UserPassword(opts.User, opts.Password)
	}
	return u.String()
}

// Env returns the settings that make a server use this mail server.
func (m *MailServer) Env() map[string]string {
	return map[string]string{"SMTP_URL": m.URL, "MAIL_FROM": "signin@example.com"}
}

// Fail sets how the server fails from now on. Sessions that hang go on once the mode is
// another.
func (m *MailServer) Fail(mode MailMode) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mode = mode
	close(m.changed)
	m.changed = make(chan struct{})
}

// Release ends a failure.
func (m *MailServer) Release() { m.Fail(MailWorks) }

// Slow delays every answer.
func (m *MailServer) Slow(delay time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delay = delay
}

func (m *MailServer) state() (MailMode, time.Duration, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mode, m.delay, m.changed
}

// Connections returns how many connections are open.
func (m *MailServer) Connections() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.open)
}

// Passwords returns how many passwords clients have sent, right or wrong.
func (m *MailServer) Passwords() int { return int(m.logins.Load()) }

// Received returns all mails that have arrived.
func (m *MailServer) Received() []*Mail {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.mails)
}

// WaitMail waits for a mail to an address, and returns each mail once, the oldest first.
func (m *MailServer) WaitMail(t testing.TB, to string) *Mail {
	t.Helper()
	isTo := func(address string) bool { return strings.EqualFold(address, to) }
	var found *Mail
	WaitUntil(t, "a mail to "+to, func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, mail := range m.mails {
			if !mail.read && slices.ContainsFunc(mail.To, isTo) {
				mail.read = true
				found = mail
				return true
			}
		}
		return false
	})
	return found
}

// Code returns the one-time code in the mail's text.
func (m *Mail) Code(t testing.TB) string {
	t.Helper()
	codes := m.Codes()
	if len(codes) != 1 {
		t.Fatalf("codes %q in %q", codes, m.Data)
	}
	return codes[0]
}

// Codes returns all numbers in the mail's text that have the form of a code.
func (m *Mail) Codes() []string {
	_, body, _ := strings.Cut(m.Data, "\r\n\r\n")
	return regexp.MustCompile(`\b[0-9]{6}\b`).FindAllString(body, -1)
}

// An smtpSession talks to one client.
type smtpSession struct {
	m        *MailServer
	conn     net.Conn
	in       *bufio.Reader
	secure   bool
	user     string // "": has not signed in
	helo     string
	envelope Mail // of the mail that comes next
}

func (m *MailServer) session(conn net.Conn) {
	defer func() {
		conn.Close()
		m.mu.Lock()
		delete(m.open, conn)
		m.mu.Unlock()
	}()
	c := &smtpSession{m: m}
	c.use(conn)
	if m.opts.ImplicitTLS {
		c.startTLS()
	}
	c.say(c.greet())
	for {
		line, err := c.in.ReadString('\n')
		if err != nil {
			return
		}
		verb, args, _ := strings.Cut(strings.TrimRight(line, "\r\n"), " ")
		c.say(c.answer(strings.ToUpper(verb), args))
	}
}

func (c *smtpSession) use(conn net.Conn) {
	c.conn = conn
	c.in = bufio.NewReader(conn)
}

func (c *smtpSession) startTLS() {
	c.use(tls.Server(c.conn, c.m.tls))
	c.secure = true
}

func (c *smtpSession) mode() MailMode {
	mode, _, _ := c.m.state()
	return mode
}

// say sends an answer; "" is none.
func (c *smtpSession) say(answer string) {
	if answer != "" {
		_, delay, _ := c.m.state()
		time.Sleep(delay)
		io.WriteString(c.conn, answer+"\r\n")
	}
}

// end says the last words and closes the connection.
func (c *smtpSession) end(words string) (noAnswer string) {
	c.say(words)
	c.conn.Close()
	return ""
}

func (c *smtpSession) greet() string {
	switch c.hang(MailHangs) {
	case MailCloses:
		return c.end("")
	case MailRefuses:
		return c.end("554 no service")
	case MailFloods:
		return c.flood("220 test.example.com ")
	default:
		return "220 test.example.com ESMTP"
	}
}

func (c *smtpSession) answer(verb, args string) string {
	_, address, _ := strings.Cut(args, "<")
	address, _, _ = strings.Cut(address, ">")
	switch verb {
	case "EHLO":
		c.helo = args
		return c.extensions()
	case "STARTTLS":
		if c.m.opts.NoStartTLS {
			return "502 no such command"
		}
		c.say("220 go ahead")
		c.startTLS()
		return ""
	case "AUTH":
		c.user = c.m.login(args)
		if c.user == "" {
			return "535 wrong user or password"
		}
		return "235 signed in"
	case "MAIL":
		return c.sender(address)
	case "RCPT":
		return c.recipient(address)
	case "DATA":
		return c.data()
	case "QUIT":
		if c.hang(MailIgnoresQuit) == MailCloses {
			return c.end("")
		}
		return c.end("221 bye")
	default:
		return "502 no such command"
	}
}

func (c *smtpSession) extensions() string {
	if c.mode() == MailFloodsLines {
		return c.flood("250-8BITMIME\r\n")
	}
	list := "250-test.example.com\r\n"
	if !c.secure && !c.m.opts.NoStartTLS {
		list += "250-STARTTLS\r\n"
	}
	if c.m.opts.User != "" {
		list += "250-AUTH PLAIN\r\n"
	}
	return list + "250 8BITMIME"
}

func (c *smtpSession) sender(address string) string {
	if c.m.opts.User != "" && c.user == "" {
		return "530 sign in first"
	}
	if c.mode() == MailRefusesSender {
		return "550 not from you"
	}
	c.envelope = Mail{
		From: address,
		TLS:  c.secure,
		User: c.user,
		Helo: c.helo,
	}
	return "250 ok"
}

func (c *smtpSession) recipient(address string) string {
	switch c.mode() {
	case MailDefers:
		return "451 try again later"
	case MailRefusesRecipient:
		return "550 no such mailbox"
	}
	c.envelope.To = append(c.envelope.To, address)
	return "250 ok"
}

// data takes a mail, also after it has refused it in words: no client should send it then.
func (c *smtpSession) data() string {
	if c.hang(MailHangsData) == MailCloses {
		return c.end("")
	}
	c.say("354 go ahead")
	text, err := readData(c.in)
	if err != nil {
		return c.end("")
	}
	mail := c.envelope
	c.envelope = Mail{}
	mail.Data = text
	c.m.mu.Lock()
	c.m.mails = append(c.m.mails, &mail)
	c.m.mu.Unlock()
	switch c.hang(MailHangsEnd) {
	case MailCloses:
		return c.end("")
	case MailRepeats:
		words := append(mail.To, mail.Codes()...)
		return "554 password=hunter2 " + strings.Join(words, " ")
	case MailLeaves:
		return c.end("250 taken")
	default:
		return "250 taken"
	}
}

// flood writes the text again and again, until the client closes the connection.
func (c *smtpSession) flood(text string) (noAnswer string) {
	chunk := []byte(strings.Repeat(text, 1000))
	for {
		n, err := c.conn.Write(chunk)
		c.m.flooded.Add(int64(n))
		if err != nil {
			return c.end("")
		}
	}
}

// Flooded returns how many bytes of endless answers the kernel has taken.
func (m *MailServer) Flooded() int { return int(m.flooded.Load()) }

// hang waits while the mode is the given one and the client is connected. It reads nothing that
// the client sends. It returns the mode after that, or MailCloses if the client is gone.
func (c *smtpSession) hang(while MailMode) MailMode {
	mode, _, changed := c.m.state()
	if mode != while {
		return mode
	}
	gone := make(chan error, 1)
	go func() {
		_, err := c.in.Peek(1) // nobody sends anything before the answer
		gone <- err
	}()
	for mode == while {
		select {
		case <-gone:
			return MailCloses
		case <-changed:
			mode, _, changed = c.m.state()
		}
	}
	// A deadline that has passed ends the read. Without one, reads work again.
	c.conn.SetReadDeadline(time.Now())
	<-gone
	c.conn.SetReadDeadline(time.Time{})
	return mode
}

// login returns the user of an AUTH PLAIN command, or "" if the password is wrong.
func (m *MailServer) login(args string) string {
	mechanism, initial, _ := strings.Cut(args, " ")
	decoded, err := base64.StdEncoding.DecodeString(initial)
	parts := strings.Split(string(decoded), "\x00")
	if !strings.EqualFold(mechanism, "PLAIN") || err != nil || len(parts) != 3 {
		return ""
	}
	m.logins.Add(1)
	if parts[1] != m.opts.User || parts[2] != m.opts.Password {
		return ""
	}
	return m.opts.User
}

// readData reads a message up to the line that is a single dot. net/textproto would turn CRLF
// into LF and so hide a bare LF, which is what a test may look for.
func readData(r *bufio.Reader) (string, error) {
	var data strings.Builder
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return "", err
		}
		if line == ".\r\n" {
			return data.String(), nil
		}
		data.WriteString(strings.TrimPrefix(line, "."))
	}
}
