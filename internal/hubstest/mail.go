package hubstest

import (
	"bufio"
	"crypto"
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
	"math/big"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A certificateAuthority signs the certificates of the tests' servers. This process and its
// children trust CA and no other one (see prepareDir).
type certificateAuthority struct {
	key  crypto.Signer
	cert *x509.Certificate
}

var CA = newCA()

func newCA() *certificateAuthority {
	ca := &certificateAuthority{}
	ca.cert = ca.sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: "test CA"},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}).Leaf
	return ca
}

func (ca *certificateAuthority) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
}

// sign completes and signs a certificate. The first one is the authority's own.
func (ca *certificateAuthority) sign(template *x509.Certificate) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	parent, signer := ca.cert, ca.key
	if parent == nil {
		ca.key, parent, signer = key, template, key
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		panic(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// ServerTLS returns the configuration of a server that has all the names that tests use.
func (ca *certificateAuthority) ServerTLS() *tls.Config {
	return ca.serverTLS(&x509.Certificate{
		DNSNames:    []string{"localhost", "example.com", "*.example.com"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4zero, net.IPv6loopback},
	})
}

func (ca *certificateAuthority) serverTLS(template *x509.Certificate) *tls.Config {
	template.Subject = pkix.Name{CommonName: "test server"}
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	return &tls.Config{Certificates: []tls.Certificate{ca.sign(template)}}
}

// MailOptions configure a mail server. The zero value offers STARTTLS on 127.0.0.1 and takes
// mail of anyone.
type MailOptions struct {
	// host stands in the URL. 0.0.0.0 reaches this machine too, and is no loopback
	// address: it plays the remote host.
	Host           string
	ImplicitTLS    bool // smtps
	NoStartTLS     bool
	Untrusted      bool   // its certificate is of an unknown authority
	OtherName      bool   // its certificate is of CA, but for another server
	OldTLS         bool   // TLS 1.1 and older only
	User, Password string // if set, clients must sign in
}

// A MailServer is an SMTP server that keeps what it gets and fails on demand.
type MailServer struct {
	opts MailOptions
	URL  string
	TLS  *tls.Config

	mu      sync.Mutex
	mails   []*Mail
	changed chan struct{} // closed and replaced by each mail and each change of mode
	mode    MailMode
	delay   time.Duration
	open    map[net.Conn]bool
	peak    int // most connections that were open at a time
	total   int // connections so far
	logins  int // passwords so far, right or wrong
	flooded int // bytes of endless answers so far
}

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

type Mail struct {
	From string
	To   []string
	Data string // headers and body as sent, with CRLF, without the dots of SMTP
	TLS  bool
	User string // the user that had signed in, or ""
	Helo string // the name that the client gave itself
	read bool   // waitMail has returned it
}

var mailServers sync.Map // URL → *MailServer

func mailServerOf(smtpURL string) *MailServer {
	if m, ok := mailServers.Load(smtpURL); ok {
		return m.(*MailServer)
	}
	return nil
}

func NewMailServer(t testing.TB, opts MailOptions) *MailServer {
	t.Helper()
	if opts.Host == "" {
		opts.Host = "127.0.0.1"
	}
	ca := CA
	if opts.Untrusted {
		ca = newCA()
	}
	m := &MailServer{
		opts:    opts,
		TLS:     ca.ServerTLS(),
		changed: make(chan struct{}),
		open:    map[net.Conn]bool{},
	}
	if opts.OldTLS {
		m.TLS.MinVersion, m.TLS.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	}
	if opts.OtherName {
		m.TLS = ca.serverTLS(&x509.Certificate{DNSNames: []string{"localhost", "other.example.com"}})
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
			m.track(conn)
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

// Fail sets how the server fails from now on. Sessions that hang do so until release, or until
// a mode that closes them.
func (m *MailServer) Fail(mode MailMode) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mode = mode
	m.announce()
}

// Release ends a failure. Sessions that hang go on.
func (m *MailServer) Release() { m.Fail(MailWorks) }

// Slow delays every answer.
func (m *MailServer) Slow(delay time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delay = delay
}

func (m *MailServer) announce() {
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *MailServer) state() (MailMode, time.Duration, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mode, m.delay, m.changed
}

func (m *MailServer) track(conn net.Conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open[conn] = true
	m.total++
	m.peak = max(m.peak, len(m.open))
}

// Connections returns how many connections are open, how many were open at most, and how many
// there were in total.
func (m *MailServer) Connections() (open, peak, total int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.open), m.peak, m.total
}

// Passwords returns how many passwords clients have sent, right or wrong.
func (m *MailServer) Passwords() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.logins
}

// Received returns all mails that have arrived.
func (m *MailServer) Received() []*Mail {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.mails)
}

// WaitMail waits for a mail to an address, and returns each mail once, the oldest first.
func (m *MailServer) WaitMail(t testing.TB, to string) *Mail {
	t.Helper()
	timeout := time.After(Patience)
	for {
		m.mu.Lock()
		for _, mail := range m.mails {
			isTo := func(address string) bool { return strings.EqualFold(address, to) }
			if !mail.read && slices.ContainsFunc(mail.To, isTo) {
				mail.read = true
				m.mu.Unlock()
				return mail
			}
		}
		more := m.changed
		m.mu.Unlock()
		select {
		case <-more:
		case <-timeout:
			t.Fatalf("no mail to %s after %v", to, Patience)
		}
	}
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
	envelope *Mail
}

func (m *MailServer) session(conn net.Conn) {
	defer func() {
		conn.Close()
		m.mu.Lock()
		delete(m.open, conn)
		m.mu.Unlock()
	}()
	c := &smtpSession{m: m, secure: m.opts.ImplicitTLS}
	c.use(conn)
	if c.secure {
		c.use(tls.Server(conn, m.TLS))
	}
	for goesOn := c.greet(); goesOn; {
		line, err := c.in.ReadString('\n')
		if err != nil {
			return
		}
		verb, args, _ := strings.Cut(strings.TrimRight(line, "\r\n"), " ")
		goesOn = c.command(strings.ToUpper(verb), args)
	}
}

func (c *smtpSession) use(conn net.Conn) {
	c.conn = conn
	c.in = bufio.NewReader(conn)
}

func (c *smtpSession) mode() MailMode {
	mode, _, _ := c.m.state()
	return mode
}

// reply answers, and reports that the session goes on.
func (c *smtpSession) reply(lines ...string) (goesOn bool) {
	_, delay, _ := c.m.state()
	time.Sleep(delay)
	io.WriteString(c.conn, strings.Join(lines, "\r\n")+"\r\n")
	return true
}

func (c *smtpSession) greet() (goesOn bool) {
	switch c.m.hang(c.conn, c.in, MailHangs) {
	case MailCloses:
		return false
	case MailRefuses:
		c.reply("554 no service")
		return false
	case MailFloods:
		c.m.flood(c.conn, "220 test.example.com ")
		return false
	default:
		return c.reply("220 test.example.com ESMTP")
	}
}

func (c *smtpSession) command(verb, args string) (goesOn bool) {
	switch verb {
	case "EHLO":
		c.helo = args
		return c.listExtensions()
	case "STARTTLS":
		if c.m.opts.NoStartTLS {
			return c.reply("502 no such command")
		}
		c.reply("220 go ahead")
		c.use(tls.Server(c.conn, c.m.TLS))
		c.secure = true
		return true
	case "AUTH":
		c.user = c.m.login(args)
		if c.user == "" {
			return c.reply("535 wrong user or password")
		}
		return c.reply("235 signed in")
	case "MAIL":
		return c.sender(between(args))
	case "RCPT":
		return c.recipient(between(args))
	case "DATA":
		return c.data()
	case "QUIT":
		if c.m.hang(c.conn, c.in, MailIgnoresQuit) != MailCloses {
			c.reply("221 bye")
		}
		return false
	default:
		return c.reply("502 no such command")
	}
}

func (c *smtpSession) listExtensions() (goesOn bool) {
	if c.mode() == MailFloodsLines {
		c.m.flood(c.conn, "250-8BITMIME\r\n")
		return false
	}
	extensions := []string{"250-test.example.com"}
	if !c.secure && !c.m.opts.NoStartTLS {
		extensions = append(extensions, "250-STARTTLS")
	}
	if c.m.opts.User != "" {
		extensions = append(extensions, "250-AUTH PLAIN")
	}
	return c.reply(append(extensions, "250 8BITMIME")...)
}

func (c *smtpSession) sender(address string) (goesOn bool) {
	if c.m.opts.User != "" && c.user == "" {
		return c.reply("530 sign in first")
	}
	if c.mode() == MailRefusesSender {
		return c.reply("550 not from you")
	}
	c.envelope = &Mail{From: address, TLS: c.secure, User: c.user, Helo: c.helo}
	return c.reply("250 ok")
}

func (c *smtpSession) recipient(address string) (goesOn bool) {
	switch c.mode() {
	case MailDefers:
		return c.reply("451 try again later")
	case MailRefusesRecipient:
		return c.reply("550 no such mailbox")
	}
	if c.envelope != nil {
		c.envelope.To = append(c.envelope.To, address)
	}
	return c.reply("250 ok")
}

// data takes a mail, also after it has refused it in words: no client should send it then.
func (c *smtpSession) data() (goesOn bool) {
	if c.m.hang(c.conn, c.in, MailHangsData) == MailCloses {
		return false
	}
	c.reply("354 go ahead")
	text, err := readData(c.in)
	if err != nil {
		return false
	}
	mail := &Mail{}
	if c.envelope != nil {
		mail = c.envelope
	}
	c.envelope = nil
	mail.Data = text
	c.m.mu.Lock()
	c.m.mails = append(c.m.mails, mail)
	c.m.announce()
	c.m.mu.Unlock()
	switch c.m.hang(c.conn, c.in, MailHangsEnd) {
	case MailCloses:
		return false
	case MailRepeats:
		words := append(mail.To, mail.Codes()...)
		return c.reply("554 password=hunter2 " + strings.Join(words, " "))
	case MailLeaves:
		c.reply("250 taken")
		return false
	default:
		return c.reply("250 taken")
	}
}

// flood writes the text again and again, until the client closes the connection.
func (m *MailServer) flood(conn io.Writer, text string) {
	chunk := []byte(strings.Repeat(text, 1000))
	for {
		n, err := conn.Write(chunk)
		m.mu.Lock()
		m.flooded += n
		m.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Flooded returns how many bytes of endless answers the kernel has taken.
func (m *MailServer) Flooded() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.flooded
}

// hang waits while the mode is the given one and the client is connected. It reads nothing that
// the client sends. It returns the mode after that, or MailCloses if the client is gone.
func (m *MailServer) hang(conn net.Conn, r *bufio.Reader, while MailMode) MailMode {
	for {
		mode, _, changed := m.state()
		if mode != while {
			return mode
		}
		gone := make(chan error, 1)
		go func() {
			_, err := r.Peek(1)
			gone <- err
		}()
		select {
		case err := <-gone:
			if err != nil {
				return MailCloses
			}
			<-changed // the client has sent something; it stays unread
		case <-changed:
			// A deadline that has passed ends the read. Without one, reads work again.
			conn.SetReadDeadline(time.Now())
			<-gone
			conn.SetReadDeadline(time.Time{})
		}
	}
}

// login returns the user of an AUTH PLAIN command, or "" if the password is wrong.
func (m *MailServer) login(args string) string {
	mechanism, initial, _ := strings.Cut(args, " ")
	decoded, err := base64.StdEncoding.DecodeString(initial)
	parts := strings.Split(string(decoded), "\x00")
	if !strings.EqualFold(mechanism, "PLAIN") || err != nil || len(parts) != 3 {
		return ""
	}
	m.mu.Lock()
	m.logins++
	m.mu.Unlock()
	if parts[1] != m.opts.User || parts[2] != m.opts.Password {
		return ""
	}
	return m.opts.User
}

// between returns the address of "FROM:<address> …".
func between(args string) string {
	_, rest, _ := strings.Cut(args, "<")
	address, _, _ := strings.Cut(rest, ">")
	return address
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
