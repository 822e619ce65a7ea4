package main

import (
	"bufio"
	"bytes"
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
// children trust testCA and no other one (see testMain).
type certificateAuthority struct {
	key  crypto.Signer
	cert *x509.Certificate
}

var testCA = newCA()

func newCA() *certificateAuthority {
	ca := &certificateAuthority{}
	ca.cert = ca.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}).Leaf
	return ca
}

func (ca *certificateAuthority) pem() []byte {
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

// serverTLS returns the configuration of a server that has all the names that tests use.
func (ca *certificateAuthority) serverTLS() *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{ca.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: "test server"},
		DNSNames:    []string{"localhost", "example.com", "*.example.com"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4zero, net.IPv6loopback},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})}}
}

// mailOptions configure a mail server. The zero value offers STARTTLS on 127.0.0.1 and takes
// mail of anyone.
type mailOptions struct {
	// host stands in the URL. 0.0.0.0 reaches this machine too, and is no loopback
	// address: it plays the remote host.
	host           string
	implicitTLS    bool // smtps
	noStartTLS     bool
	untrusted      bool   // its certificate is of an unknown authority
	otherName      bool   // its certificate is of testCA, but for another server
	oldTLS         bool   // TLS 1.1 and older only
	user, password string // if set, clients must sign in
}

// A mailServer is an SMTP server that keeps what it gets and fails on demand.
type mailServer struct {
	opts mailOptions
	url  string
	tls  *tls.Config

	mu      sync.Mutex
	mails   []*receivedMail
	changed chan struct{} // closed and replaced by each mail and each change of mode
	mode    mailMode
	delay   time.Duration
	open    map[net.Conn]bool
	peak    int // most connections that were open at a time
	total   int // connections so far
	logins  int // passwords so far, right or wrong
}

type mailMode int

const (
	mailWorks            mailMode = iota
	mailCloses                    // closes each connection at once
	mailRefuses                   // greets with 554
	mailHangs                     // never greets
	mailHangsData                 // never answers DATA
	mailHangsEnd                  // takes the mail, never confirms it
	mailDefers                    // 451 to each recipient
	mailRefusesRecipient          // 550 to each recipient, but takes the mail nevertheless
	mailRefusesSender             // 550 to each sender, but takes the mail nevertheless
	mailLeaves                    // takes and confirms the mail, closes before QUIT
)

type receivedMail struct {
	from string
	to   []string
	data string // headers and body as sent, with CRLF, without the dots of SMTP
	tls  bool
	user string // the user that had signed in, or ""
	helo string // the name that the client gave itself
	read bool   // waitMail has returned it
}

var mailServers sync.Map // URL → *mailServer

func mailServerOf(smtpURL string) *mailServer {
	if m, ok := mailServers.Load(smtpURL); ok {
		return m.(*mailServer)
	}
	return nil
}

func newMailServer(t testing.TB, opts mailOptions) *mailServer {
	t.Helper()
	if opts.host == "" {
		opts.host = "127.0.0.1"
	}
	ca := testCA
	if opts.untrusted {
		ca = newCA()
	}
	m := &mailServer{opts: opts, tls: ca.serverTLS(), changed: make(chan struct{}), open: map[net.Conn]bool{}}
	if opts.oldTLS {
		m.tls.MinVersion, m.tls.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	}
	if opts.otherName {
		m.tls = &tls.Config{Certificates: []tls.Certificate{ca.sign(&x509.Certificate{
			Subject: pkix.Name{CommonName: "other server"}, DNSNames: []string{"localhost", "other.example.com"},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		})}}
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(opts.host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	u := url.URL{Scheme: "smtp", Host: net.JoinHostPort(opts.host, fmt.Sprint(ln.Addr().(*net.TCPAddr).Port))}
	if opts.implicitTLS {
		u.Scheme = "smtps"
	}
	if opts.user != "" {
		u.User = url.UserPassword(opts.user, opts.password)
	}
	m.url = u.String()
	mailServers.Store(m.url, m)
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
		m.fail(mailCloses)
		m.mu.Lock()
		for conn := range m.open {
			conn.Close()
		}
		m.mu.Unlock()
		sessions.Wait()
		mailServers.Delete(m.url)
	})
	return m
}

// env returns the settings that make a server use this mail server.
func (m *mailServer) env() map[string]string {
	return map[string]string{"SMTP_URL": m.url, "MAIL_FROM": "signin@example.com"}
}

// fail sets how the server fails from now on. Sessions that hang do so until release, or until
// a mode that closes them.
func (m *mailServer) fail(mode mailMode) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mode = mode
	m.announce()
}

// release ends a failure. Sessions that hang go on.
func (m *mailServer) release() { m.fail(mailWorks) }

// slow delays every answer.
func (m *mailServer) slow(delay time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delay = delay
}

func (m *mailServer) announce() {
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *mailServer) state() (mailMode, time.Duration, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mode, m.delay, m.changed
}

func (m *mailServer) track(conn net.Conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open[conn] = true
	m.total++
	m.peak = max(m.peak, len(m.open))
}

// connections returns how many connections are open, how many were open at most, and how many
// there were in total.
func (m *mailServer) connections() (open, peak, total int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.open), m.peak, m.total
}

// passwords returns how many passwords clients have sent, right or wrong.
func (m *mailServer) passwords() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.logins
}

// received returns all mails that have arrived.
func (m *mailServer) received() []*receivedMail {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.mails)
}

// waitMail waits for a mail to an address, and returns each mail once, the oldest first.
func (m *mailServer) waitMail(t testing.TB, to string) *receivedMail {
	t.Helper()
	timeout := time.After(patience)
	for {
		m.mu.Lock()
		for _, mail := range m.mails {
			if !mail.read && slices.ContainsFunc(mail.to, func(a string) bool { return strings.EqualFold(a, to) }) {
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
			t.Fatalf("no mail to %s after %v", to, patience)
		}
	}
}

// code returns the one-time code in the mail's text.
func (m *receivedMail) code(t testing.TB) string {
	t.Helper()
	codes := m.codes()
	if len(codes) != 1 {
		t.Fatalf("codes %q in %q", codes, m.data)
	}
	return codes[0]
}

func (m *receivedMail) codes() []string {
	_, body, _ := strings.Cut(m.data, "\r\n\r\n")
	return regexp.MustCompile(`\b[0-9]{6}\b`).FindAllString(body, -1)
}

// session talks to one client.
func (m *mailServer) session(conn net.Conn) {
	defer func(conn net.Conn) {
		conn.Close()
		m.mu.Lock()
		delete(m.open, conn)
		m.mu.Unlock()
	}(conn)
	if m.opts.implicitTLS {
		conn = tls.Server(conn, m.tls)
	}
	r := bufio.NewReader(conn)
	reply := func(lines ...string) {
		_, delay, _ := m.state()
		time.Sleep(delay)
		io.WriteString(conn, strings.Join(lines, "\r\n")+"\r\n")
	}
	switch m.hang(conn, r, mailHangs) {
	case mailCloses:
		return
	case mailRefuses:
		reply("554 no service")
		return
	}
	reply("220 test.example.com ESMTP")

	secure, user, helo := m.opts.implicitTLS, "", ""
	envelope := &receivedMail{}
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		line = strings.TrimRight(line, "\r\n")
		verb, args, _ := strings.Cut(line, " ")
		switch verb = strings.ToUpper(verb); {
		case verb == "EHLO":
			helo = args
			extensions := []string{"250-test.example.com"}
			if !secure && !m.opts.noStartTLS {
				extensions = append(extensions, "250-STARTTLS")
			}
			if m.opts.user != "" {
				extensions = append(extensions, "250-AUTH PLAIN")
			}
			reply(append(extensions, "250 8BITMIME")...)
		case verb == "STARTTLS" && !secure && !m.opts.noStartTLS:
			reply("220 go ahead")
			conn = tls.Server(conn, m.tls)
			r, secure = bufio.NewReader(conn), true
		case verb == "AUTH":
			if user = m.login(args); user == "" {
				reply("535 wrong user or password")
			} else {
				reply("235 signed in")
			}
		case verb == "MAIL" && m.opts.user != "" && user == "":
			reply("530 sign in first")
		case verb == "MAIL":
			if mode, _, _ := m.state(); mode == mailRefusesSender {
				reply("550 not from you")
				continue
			}
			envelope = &receivedMail{from: between(args), tls: secure, user: user, helo: helo}
			reply("250 ok")
		case verb == "RCPT":
			if mode, _, _ := m.state(); mode == mailDefers {
				reply("451 try again later")
				continue
			} else if mode == mailRefusesRecipient {
				reply("550 no such mailbox")
				continue
			}
			envelope.to = append(envelope.to, between(args))
			reply("250 ok")
		case verb == "DATA" && len(envelope.to) == 0 && !m.takesAnything():
			reply("503 no recipient")
		case verb == "DATA":
			if m.hang(conn, r, mailHangsData) == mailCloses {
				return
			}
			reply("354 go ahead")
			if envelope.data, err = readData(r); err != nil {
				return
			}
			m.mu.Lock()
			m.mails = append(m.mails, envelope)
			m.announce()
			m.mu.Unlock()
			if m.hang(conn, r, mailHangsEnd) == mailCloses {
				return
			}
			envelope = &receivedMail{}
			reply("250 taken")
			if mode, _, _ := m.state(); mode == mailLeaves {
				return
			}
		case verb == "RSET" || verb == "NOOP":
			reply("250 ok")
		case verb == "QUIT":
			reply("221 bye")
			return
		default:
			reply("502 no such command")
		}
	}
}

// takesAnything reports whether the mode takes mail that it has refused in words.
func (m *mailServer) takesAnything() bool {
	mode, _, _ := m.state()
	return mode == mailRefusesRecipient || mode == mailRefusesSender
}

// hang waits while the mode is the given one and the client is connected. It reads nothing that
// the client sends. It returns the mode after that, or mailCloses if the client is gone.
func (m *mailServer) hang(conn net.Conn, r *bufio.Reader, while mailMode) mailMode {
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
				return mailCloses
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
func (m *mailServer) login(args string) string {
	mechanism, initial, _ := strings.Cut(args, " ")
	decoded, err := base64.StdEncoding.DecodeString(initial)
	parts := strings.Split(string(decoded), "\x00")
	if !strings.EqualFold(mechanism, "PLAIN") || err != nil || len(parts) != 3 {
		return ""
	}
	m.mu.Lock()
	m.logins++
	m.mu.Unlock()
	if parts[1] != m.opts.user || parts[2] != m.opts.password {
		return ""
	}
	return m.opts.user
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

// A tcpProxy stands between a server and its PostgreSQL or mail server. It fails on demand.
type tcpProxy struct {
	addr, target string

	mu       sync.Mutex
	mode     proxyMode
	changed  chan struct{} // closed and replaced by each change of mode
	pairs    map[*proxyPair]bool
	total    int
	triggers map[string]func()
}

type proxyMode int

const (
	proxyPasses proxyMode = iota
	proxyCut
	proxyHangs
	proxyDropsReplies
)

type proxyPair struct {
	client, server net.Conn
	done           chan struct{}
	close          func()
	tainted        bool // a reply was lost, so the connection can't be used any more
}

// newProxy starts a proxy that passes everything to target (host:port).
func newProxy(t testing.TB, target string) *tcpProxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &tcpProxy{
		addr: ln.Addr().String(), target: target, changed: make(chan struct{}),
		pairs: map[*proxyPair]bool{}, triggers: map[string]func(){},
	}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			work.Go(func() { p.serve(conn) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		p.cut()
		work.Wait()
	})
	return p
}

// proxyURL starts a proxy for the server that a URL names. It returns the URL with the proxy's
// address.
func proxyURL(t testing.TB, through string) (*tcpProxy, string) {
	t.Helper()
	u, err := url.Parse(through)
	if err != nil {
		t.Fatal(err)
	}
	p := newProxy(t, u.Host)
	u.Host = p.addr
	return p, u.String()
}

// cut closes all connections and refuses new ones.
func (p *tcpProxy) cut() { p.set(proxyCut) }

// hang keeps connections open and accepts new ones, but passes nothing.
func (p *tcpProxy) hang() { p.set(proxyHangs) }

// dropReplies passes what the client sends and drops what the server answers: a statement is
// done, and the client can't know.
func (p *tcpProxy) dropReplies() { p.set(proxyDropsReplies) }

// resume passes everything again, also what was held back. A connection that has lost a reply
// is closed.
func (p *tcpProxy) resume() { p.set(proxyPasses) }

// when calls do once, as soon as a client sends the text and before the text is passed on. With
// cut, the statement is not done; with dropReplies, it is done and the client can't know.
func (p *tcpProxy) when(text string, do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.triggers[text] = do
}

// connections returns how many connections are open, and how many there were in total.
func (p *tcpProxy) connections() (open, total int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.pairs), p.total
}

func (p *tcpProxy) set(mode proxyMode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode = mode
	close(p.changed)
	p.changed = make(chan struct{})
	for pair := range p.pairs {
		if mode == proxyCut || pair.tainted {
			pair.close()
		}
	}
}

func (p *tcpProxy) serve(client net.Conn) {
	pair := &proxyPair{client: client, done: make(chan struct{})}
	pair.close = sync.OnceFunc(func() {
		close(pair.done)
		// A reset, as from a machine that is gone, not an orderly end.
		client.(*net.TCPConn).SetLinger(0)
		client.Close()
		if pair.server != nil {
			pair.server.Close()
		}
	})
	p.mu.Lock()
	p.total++
	p.pairs[pair] = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		pair.close()
		delete(p.pairs, pair)
	}()
	if !p.pass(pair, true) {
		return
	}
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	p.mu.Lock()
	pair.server = server
	p.mu.Unlock()
	select {
	case <-pair.done: // closed before it could close the server's side too
		server.Close()
		return
	default:
	}
	var pumps sync.WaitGroup
	pumps.Go(func() { p.pump(pair, server, client, true) })
	pumps.Go(func() { p.pump(pair, client, server, false) })
	pumps.Wait()
}

// pump copies one direction until either end is closed. Then it closes both.
func (p *tcpProxy) pump(pair *proxyPair, to io.Writer, from io.Reader, fromClient bool) {
	defer func() {
		p.mu.Lock() // close reads pair.server
		defer p.mu.Unlock()
		pair.close()
	}()
	chunk := make([]byte, 64<<10)
	for {
		n, err := from.Read(chunk)
		if fromClient {
			p.trigger(chunk[:n])
		}
		if n > 0 && p.pass(pair, fromClient) {
			if _, err := to.Write(chunk[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// pass waits while the proxy hangs, then reports whether data may pass in this direction.
func (p *tcpProxy) pass(pair *proxyPair, fromClient bool) bool {
	for {
		p.mu.Lock()
		mode, changed := p.mode, p.changed
		if mode == proxyDropsReplies && !fromClient {
			pair.tainted = true
		}
		p.mu.Unlock()
		if mode != proxyHangs {
			return mode == proxyPasses || mode == proxyDropsReplies && fromClient
		}
		select {
		case <-changed:
		case <-pair.done:
			return false
		}
	}
}

func (p *tcpProxy) trigger(chunk []byte) {
	var due []func()
	p.mu.Lock()
	for text, do := range p.triggers {
		if bytes.Contains(chunk, []byte(text)) {
			due = append(due, do)
			delete(p.triggers, text)
		}
	}
	p.mu.Unlock()
	for _, do := range due {
		do()
	}
}
