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
	mathrand "math/rand/v2"
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
// other authority (see prepareDir).
var authority = newAuthority()

func newAuthority() *tls.Certificate {
	return certify(nil, &x509.Certificate{
		Subject:               pkix.Name{CommonName: "test CA"},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	})
}

// certify completes the template: it returns a certificate that is valid for a day, with its key.
// The issuer signs it. If issuer is nil, the certificate signs itself.
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

// ServerPEM returns a certificate and its key. The certificate is valid for every server name that
// tests use.
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

// MailConversations is the most conversations that a server has with its mail server at a time.
const MailConversations = 32

// MailOptions configure a mail server. The zero value offers STARTTLS on 127.0.0.1 and accepts mail
// from every client.
type MailOptions struct {
	// Host is the host in the URL; "" means 127.0.0.1. With 0.0.0.0, the mail server plays a
	// remote host: connections reach this machine, but it is not a loopback address.
	Host        string
	Listener    net.Listener // nil means a free port
	ImplicitTLS bool         // smtps
	NoStartTLS  bool
	// Mechanism is the way to sign in that the mail server offers; "" means PLAIN. It understands
	// PLAIN and LOGIN.
	Mechanism string
	// Converse, if set, is called when a conversation begins, with the number of others that are
	// open. The function that it returns is called at each step of the conversation: a command, such
	// as "RCPT", "greeting" or, for the text of a mail, "mail". Its answer replaces that of the mail
	// server, unless it is "". A 421 also closes the connection.
	Converse       func(others int) (instead func(step string) string)
	Delay          time.Duration // before each answer
	Untrusted      bool          // an unknown authority has signed its certificate
	OtherName      bool          // its certificate is valid, but for another server name
	OldTLS         bool          // it supports only TLS 1.0 and 1.1
	User, Password string        // if set, clients must sign in
}

// A MailServer is an SMTP server that keeps the mails it receives. Fail makes it fail.
type MailServer struct {
	opts MailOptions
	URL  string
	tls  *tls.Config

	Passwords atomic.Int64 // received, right or wrong
	Quits     atomic.Int64 // conversations that clients have ended by QUIT
	// Flooded counts the bytes of endless answers that the kernel has accepted. The client has read
	// fewer: the rest is in the buffers of the sockets.
	Flooded atomic.Int64

	mu      sync.Mutex
	draws   *mathrand.Rand // of its world
	mails   []*Mail
	changed chan struct{} // closed and replaced by each change of mode
	mode    MailMode
	open    map[net.Conn]bool
}

// A MailMode says how a mail server works or fails.
type MailMode int

const (
	MailWorks       MailMode = iota
	MailCloses               // closes a new connection at once, an open one at DATA or QUIT
	MailHangs                // never greets
	MailHangsEnd             // receives the mail, but never confirms it
	MailTakesOddly           // confirms the mail with another number than 250
	MailRepeats              // receives the mail; its refusal repeats addresses and codes
	MailIgnoresQuit          // confirms the mail, but never answers QUIT
	MailFloods               // greets with a line that never ends
)

// A Mail is a mail that has arrived.
type Mail struct {
	From string
	To   []string
	Data string // headers and body as sent, with CRLF, without the dots of SMTP
	TLS  bool
	User string // the user name that the client has signed in with, or ""
	Helo string // the client's own name, as sent with EHLO
	read bool   // WaitMail has returned this mail
}

var mailServers sync.Map // URL → *MailServer

// NewMailServer starts a mail server that runs until the test ends.
func NewMailServer(t testing.TB, opts MailOptions) *MailServer {
	t.Helper()
	opts.Host = cmp.Or(opts.Host, "127.0.0.1")
	opts.Mechanism = cmp.Or(opts.Mechanism, "PLAIN")
	if opts.Converse == nil {
		opts.Converse = func(int) func(string) string { return func(string) string { return "" } }
	}
	m := &MailServer{
		opts:    opts,
		draws:   Draw(t),
		tls:     opts.tls(),
		changed: make(chan struct{}),
		open:    map[net.Conn]bool{},
	}
	ln := opts.Listener
	if ln == nil {
		var err error
		ln, err = net.Listen("tcp", net.JoinHostPort(opts.Host, "0"))
		Must(t, err)
	}
	m.URL = opts.url(ln.Addr().(*net.TCPAddr).Port)
	mailServers.Store(m.URL, m)
	var conversations sync.WaitGroup
	conversations.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			m.mu.Lock()
			others := len(m.open)
			m.open[conn] = true
			m.mu.Unlock()
			conversations.Go(func() { m.converse(conn, opts.Converse(others)) })
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
		conversations.Wait()
		mailServers.Delete(m.URL)
	})
	return m
}

// tls returns the mail server's side of TLS.
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
	u := url.URL{Scheme: "smtp", Host: net.JoinHostPort(opts.Host, fmt.Sprint(port))}
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

// Fail sets the mode. A conversation that hangs continues as soon as the mode changes.
func (m *MailServer) Fail(mode MailMode) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mode = mode
	close(m.changed)
	m.changed = make(chan struct{})
}

// state returns the mode, and a channel that the next Fail closes.
func (m *MailServer) state() (MailMode, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mode, m.changed
}

// Connections returns how many connections are open.
func (m *MailServer) Connections() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.open)
}

// Received returns all mails that have arrived.
func (m *MailServer) Received() []*Mail {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.mails)
}

// WaitMail waits for a mail to an address, in exactly this spelling, and returns it. Each call
// returns another mail, the oldest first.
func (m *MailServer) WaitMail(t testing.TB, to string) *Mail {
	t.Helper()
	var found *Mail
	WaitUntil(t, "a mail to "+to, func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, mail := range m.mails {
			if !mail.read && slices.Contains(mail.To, to) {
				mail.read = true
				found = mail
				return true
			}
		}
		return false
	})
	return found
}

// Codes returns the numbers in the mail's text that are as long as a code.
func (m *Mail) Codes() []string {
	_, body, _ := strings.Cut(m.Data, "\r\n\r\n")
	return regexp.MustCompile(`\b`+codePattern+`\b`).FindAllString(body, -1)
}

// An smtpConversation is the server's side of one connection.
type smtpConversation struct {
	m        *MailServer
	conn     net.Conn
	in       *bufio.Reader
	secure   bool
	user     string // "" if the client has not signed in
	helo     string
	envelope Mail                     // sender and recipients of the next mail
	instead  func(step string) string // see MailOptions.Converse
	refused  string                   // its last answer
}

// converse greets a client and answers its commands until the connection is closed.
func (m *MailServer) converse(conn net.Conn, instead func(step string) string) {
	defer func() {
		conn.Close()
		m.mu.Lock()
		delete(m.open, conn)
		m.mu.Unlock()
	}()
	c := &smtpConversation{m: m, instead: instead}
	c.use(conn)
	if m.opts.ImplicitTLS {
		c.startTLS()
	}
	if !c.sayInstead("greeting") {
		c.say(c.greet())
	}
	for {
		line, err := c.in.ReadString('\n')
		if err != nil {
			return
		}
		verb, args, _ := strings.Cut(strings.TrimRight(line, "\r\n"), " ")
		verb = strings.ToUpper(verb)
		if !c.sayInstead(verb) {
			c.say(c.answer(verb, args))
		}
	}
}

func (c *smtpConversation) use(conn net.Conn) {
	c.conn = conn
	c.in = bufio.NewReader(conn)
}

func (c *smtpConversation) startTLS() {
	c.use(tls.Server(c.conn, c.m.tls))
	c.secure = true
}

// say sends an answer, after the delay of MailOptions. If answer is "", it sends nothing.
func (c *smtpConversation) say(answer string) {
	if answer != "" {
		time.Sleep(c.m.opts.Delay)
		answer += "\r\n"
		first := c.m.intN(len(answer)) // an answer may come in two pieces
		io.WriteString(c.conn, answer[:first])
		io.WriteString(c.conn, answer[first:])
	}
}

// intN draws a number below n.
func (m *MailServer) intN(n int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.draws.IntN(n)
}

// end sends a last answer and closes the connection. If answer is "", it only closes. It returns
// "", because the caller has nothing left to say.
func (c *smtpConversation) end(answer string) (noAnswer string) {
	c.say(answer)
	c.conn.Close()
	return ""
}

// sayInstead sends the answer of MailOptions.Converse, if there is one.
func (c *smtpConversation) sayInstead(command string) bool {
	answer := c.instead(command)
	if command == "HELO" { // clients try it after a refused EHLO
		answer = c.refused
	}
	c.refused = answer
	if strings.HasPrefix(answer, "421") {
		c.end(answer)
	}
	c.say(answer)
	return answer != ""
}

// greet returns the greeting, or "" if the mode forbids one.
func (c *smtpConversation) greet() string {
	switch c.hang(MailHangs) {
	case MailCloses:
		return c.end("")
	case MailFloods:
		chunk := []byte(strings.Repeat("220 test.example.com ", 1000))
		for {
			n, err := c.conn.Write(chunk)
			c.m.Flooded.Add(int64(n))
			if err != nil { // the client has closed the connection
				return c.end("")
			}
		}
	default:
		return "220 test.example.com ESMTP"
	}
}

// answer returns the answer to a command, or "" if none is left to send.
func (c *smtpConversation) answer(verb, args string) string {
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
		c.user = c.login(args)
		if c.user == "" {
			return "535 wrong user or password"
		}
		return "235 signed in"
	case "MAIL":
		if c.m.opts.User != "" && c.user == "" {
			return "530 sign in first"
		}
		if strings.Contains(args, "SMTPUTF8") {
			return "550 5.6.7 the next mail server lacks SMTPUTF8"
		}
		c.envelope = Mail{From: address, TLS: c.secure, User: c.user, Helo: c.helo}
		return "250 ok"
	case "RCPT":
		c.envelope.To = append(c.envelope.To, address)
		return "250 ok"
	case "DATA":
		return c.data()
	case "QUIT":
		c.m.Quits.Add(1)
		if c.hang(MailIgnoresQuit) == MailCloses {
			return c.end("")
		}
		return c.end("221 bye")
	default:
		return "502 no such command"
	}
}

// extensions returns the answer to EHLO: what clients look for stands among other extensions.
func (c *smtpConversation) extensions() string {
	list := []string{"SMTPUTF8", "8BITMIME", "SIZE 10485760", "DSN", "PIPELINING"}
	list = list[:1+c.m.intN(len(list))]
	if !c.secure && !c.m.opts.NoStartTLS {
		list = append(list, "STARTTLS")
	}
	if c.m.opts.User != "" {
		mechanisms := []string{c.m.opts.Mechanism, strings.ToLower(c.m.opts.Mechanism)}
		list = append(list, "AUTH "+mechanisms[c.m.intN(2)]) // their case means nothing (RFC 4422)
	}
	first := c.m.intN(len(list))
	list = append(list[first:], list[:first]...)
	lines := append([]string{"test.example.com"}, list...)
	last := len(lines) - 1
	return "250-" + strings.Join(lines[:last], "\r\n250-") + "\r\n250 " + lines[last]
}

// data receives a mail. It also receives a mail whose sender or recipient was refused, so that a
// test notices a client that ignores the refusal.
func (c *smtpConversation) data() string {
	if mode, _ := c.m.state(); mode == MailCloses {
		return c.end("")
	}
	c.say("354 go ahead")
	text, err := readData(c.in)
	if err != nil {
		return c.end("")
	}
	if c.sayInstead("mail") {
		return ""
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
	case MailTakesOddly:
		return "251 taken"
	case MailRepeats:
		private := append(mail.To, mail.Codes()...)
		return "554 no: " + strings.Join(private, " ")
	default:
		return "250 taken"
	}
}

// hang waits until the mode is no longer the given one, then returns the new mode. If the client
// disconnects first, hang returns MailCloses. It consumes nothing that the client sends.
func (c *smtpConversation) hang(while MailMode) MailMode {
	mode, changed := c.m.state()
	if mode != while {
		return mode
	}
	gone := make(chan error, 1)
	go func() {
		// The client waits for an answer and sends nothing, so Peek ends when it disconnects.
		_, err := c.in.Peek(1)
		gone <- err
	}()
	for mode == while {
		select {
		case <-gone:
			return MailCloses
		case <-changed:
			mode, changed = c.m.state()
		}
	}
	// The mode has changed. A deadline in the past ends the Peek; clearing it permits reads again.
	c.conn.SetReadDeadline(time.Now())
	<-gone
	c.conn.SetReadDeadline(time.Time{})
	return mode
}

// login returns the user that an AUTH command signs in, or "" if user or password is wrong.
func (c *smtpConversation) login(args string) string {
	mechanism, initial, _ := strings.Cut(args, " ")
	var user, password string
	switch strings.ToUpper(mechanism) {
	case "PLAIN":
		parts := strings.Split(fromBase64(initial), "\x00")
		if len(parts) == 3 {
			user, password = parts[1], parts[2]
		}
	case "LOGIN":
		user = c.ask("Username:")
		password = c.ask("Password:")
	}
	isOffered := slices.Contains(strings.Fields(c.m.opts.Mechanism), mechanism)
	if password != "" {
		c.m.Passwords.Add(1)
	}
	if !isOffered || user != c.m.opts.User || password != c.m.opts.Password {
		return ""
	}
	return user
}

// ask asks a question of AUTH LOGIN, and returns the client's answer.
func (c *smtpConversation) ask(question string) string {
	c.say("334 " + base64.StdEncoding.EncodeToString([]byte(question)))
	line, _ := c.in.ReadString('\n')
	return fromBase64(strings.TrimRight(line, "\r\n"))
}

// fromBase64 decodes a text. A malformed one is "".
func fromBase64(text string) string {
	decoded, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return ""
	}
	return string(decoded)
}

// readData reads a mail up to the line that is a single dot. It does not use net/textproto, which
// turns CRLF into LF: a test could then not see a bare LF.
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
