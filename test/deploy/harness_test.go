package deploy

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A frontProxy is a running HAProxy or nginx, configured by the file in deploy/.
type frontProxy struct {
	t    testing.TB
	addr string // for HTTPS
	// proxyProtocolAddr is for HTTPS after a line of the PROXY protocol. With that line, a test
	// sends requests from any address. Only HAProxy listens there, by the second bind line of
	// haproxy.cfg.
	proxyProtocolAddr string
	dir               string // folder of its configuration, certificate, sockets and logs
	log               *hubstest.Program
}

var bothProxies = []string{"haproxy", "nginx"}

// forEachProxy runs a test once with each proxy. engine is "haproxy" or "nginx".
func forEachProxy(t *testing.T, test func(t *testing.T, engine string)) {
	t.Parallel()
	for _, engine := range bothProxies {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			test(t, engine)
		})
	}
}

// startProxy runs a proxy until the test ends. It stands in front of one server or, with HAProxy
// only, of three. The test opens the listening sockets and hands them to the proxy, so that no
// other process can take the ports.
func startProxy(t testing.TB, engine string, servers ...string) *frontProxy {
	t.Helper()
	return startProxyWith(t, engine, nil, servers...)
}

// startProxyWith is startProxy with values of the configuration replaced, as shipped does it.
func startProxyWith(t testing.TB, engine string, oldNew []string, servers ...string) *frontProxy {
	t.Helper()
	if os.Getuid() != 0 {
		hubstest.Skip(t, "the proxies change their user, and HAProxy its root folder: be root")
	}
	program := hubstest.Need(t, engine, engine)
	// Not t.TempDir: its path is too long for a socket, and only its owner may enter it. A proxy
	// that root has started runs as another user.
	dir := fmt.Sprintf("%s/p%d", hubstest.Dir, serial.Add(1))
	hubstest.Must(t, os.Mkdir(dir, 0o755))
	p := &frontProxy{t: t, dir: dir}
	hubstest.WriteFile(t, dir+"/tls.pem", string(hubstest.ServerPEM()))
	var sockets [2]*os.File
	sockets[0], p.addr = hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	sockets[1], p.proxyProtocolAddr = hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	var cmd *exec.Cmd
	if engine == "haproxy" {
		config := hubstest.WriteFile(t, dir+"/haproxy.cfg", haproxyConfig(t, dir, servers, oldNew))
		cmd = exec.Command(program, "-db", "-f", config)
	} else {
		config := hubstest.WriteFile(t, dir+"/nginx.conf", nginxConfig(t, p, servers[0], oldNew))
		cmd = exec.Command(program, "-g", "daemon off;", "-e", "stderr", "-c", config)
		// nginx takes over descriptor 3 as its listening socket, as in an upgrade of its program.
		cmd.Env = append(os.Environ(), "NGINX=3;")
	}
	cmd.ExtraFiles = sockets[:] // descriptors 3 and 4
	p.log = hubstest.StartProgram(t, cmd)
	t.Cleanup(func() {
		if t.Failed() {
			fmt.Fprintf(t.Output(), "%s:\n%s\n", engine, p.log)
		}
	})
	for _, socket := range sockets {
		// Handing a socket over makes it blocking. A worker of nginx could then block in accept, if
		// another worker has taken the connection, and would no longer serve its own connections.
		syscall.SetNonblock(int(socket.Fd()), true)
		socket.Close()
	}
	p.mustDial(newAddress()).Close() // returns when the proxy runs
	return p
}

// haproxyConfig returns haproxy.cfg with the addresses and paths of the test.
func haproxyConfig(t testing.TB, dir string, servers, replace []string) string {
	t.Helper()
	replace = append(replace,
		"0.0.0.0:443 ssl", "fd@3 ssl",
		"[::]:443 v6only ssl", "fd@4 accept-proxy ssl",
		"/etc/hubs/tls.pem", dir+"/tls.pem",
		"/run/haproxy/admin.sock", dir+"/admin.sock",
		"/var/lib/haproxy/hubs.sock", dir+"/hubs.sock",
		"chroot /var/lib/haproxy", "chroot "+dir)
	for i := range 3 {
		replace = append(replace, fmt.Sprintf("10.0.0.1%d:8080", i+1), servers[i%len(servers)])
	}
	return shipped(t, "haproxy.cfg", replace...)
}

// nginxConfig returns nginx.conf with the addresses and paths of the test. It adds folders for
// temporary files below p.dir.
func nginxConfig(t testing.TB, p *frontProxy, server string, oldNew []string) string {
	t.Helper()
	folders := []byte("http {\n")
	for kind := range strings.FieldsSeq("client_body proxy fastcgi uwsgi scgi") {
		folders = fmt.Appendf(folders, "    %s_temp_path %s/%s;\n", kind, p.dir, kind)
	}
	return shipped(t, "nginx.conf", append(oldNew,
		"0.0.0.0:443", p.addr,
		"        listen [::]:443 ssl http2 ipv6only=on;\n", "",
		"/etc/hubs/tls.pem", p.dir+"/tls.pem",
		"/run/nginx.pid", p.dir+"/nginx.pid",
		"/var/log/nginx/hubs-faults.log", p.dir+"/faults.log",
		"127.0.0.1:8080", server,
		"http {\n", string(folders))...)
}

// client returns a client that connects to the proxy and uses HTTP/1.1. Each request has a
// connection and an address of its own.
func (p *frontProxy) client(s *hubstest.Server) *hubstest.Client {
	return p.newClient(s, &http.Transport{DisableKeepAlives: true}, newAddress)
}

// clientFrom returns a client that connects to the proxy from an address and uses HTTP/2.
func (p *frontProxy) clientFrom(s *hubstest.Server, address string) *hubstest.Client {
	fixed := func() string { return address }
	return p.newClient(s, &http.Transport{ForceAttemptHTTP2: true}, fixed)
}

func (p *frontProxy) newClient(
	s *hubstest.Server, transport *http.Transport, address func() string,
) *hubstest.Client {
	transport.DisableCompression = true
	transport.DialContext = func(context.Context, string, string) (net.Conn, error) {
		return dialer(address()).Dial("tcp", p.addr)
	}
	c := s.Client(p.t)
	c.IP = ""
	c.HTTP.Transport = transport
	return c
}

// serial makes the addresses of clients and the folders of proxies differ.
var serial atomic.Int64

// newAddress returns an address of this machine that no other client uses.
func newAddress() string {
	n := serial.Add(1)
	return fmt.Sprintf("127.100.%d.%d", n>>8, n&255)
}

// dialer connects from an address of this machine.
func dialer(address string) *net.Dialer {
	return &net.Dialer{
		LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)},
		Timeout:   2 * hubstest.Patience,
	}
}

// dial opens a TLS connection from an address, for requests that no client library would send.
func (p *frontProxy) dial(address string) (*tls.Conn, error) {
	config := &tls.Config{ServerName: "api.example.com"}
	conn, err := tls.DialWithDialer(dialer(address), "tcp", p.addr, config)
	if err == nil {
		conn.SetDeadline(time.Now().Add(2 * hubstest.Patience))
	}
	return conn, err
}

// mustDial is like dial, but ends the test if there is no connection.
func (p *frontProxy) mustDial(address string) *tls.Conn {
	p.t.Helper()
	conn, err := p.dial(address)
	hubstest.Must(p.t, err)
	return conn
}

// raw sends a request unchanged, and returns everything that the proxy sends before it closes the
// connection. It fails the test if the proxy does not close the connection in time.
func (p *frontProxy) raw(address, request string) string {
	p.t.Helper()
	conn := p.mustDial(address)
	defer conn.Close() // nginx writes its log line only after this
	io.WriteString(conn, request)
	answer, err := io.ReadAll(conn)
	if os.IsTimeout(err) {
		p.t.Errorf("the connection stays open after %.200q, want it closed after the answer", request)
	}
	return string(answer)
}

// command sends a line to HAProxy's admin socket, as an operator would, and returns the answer.
func (p *frontProxy) command(t testing.TB, line string) string {
	t.Helper()
	conn, err := net.Dial("unix", p.dir+"/admin.sock")
	hubstest.Must(t, err)
	defer conn.Close()
	fmt.Fprintln(conn, line)
	answer, err := io.ReadAll(conn)
	hubstest.Must(t, err)
	return string(answer)
}

// member adds a user with a role, and returns a client that has signed in through the proxy and
// accepted the terms.
func (p *frontProxy) member(s *hubstest.Server, role string) *hubstest.Client {
	c := p.client(s)
	email, _ := s.NewUser(p.t, role)
	c.SignIn(email)
	c.AcceptTerms()
	return c
}

// A recorder is a server that keeps the head of each request unchanged. It answers health checks,
// and does not keep them.
type recorder struct {
	addr   string
	answer func(*http.Request) string // "" closes the connection without an answer
	open   atomic.Int64               // open connections

	mu     sync.Mutex
	heads  []string
	reused int // requests that were not the first on their connection
}

// publicServer is for the clients of a recorder, which need the public URL of a server.
var publicServer = &hubstest.Server{Base: "https://api.example.com"}

const emptyAnswer = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

func newRecorder(t testing.TB, answer func(*http.Request) string) *recorder {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	hubstest.Must(t, err)
	t.Cleanup(func() { listener.Close() })
	r := &recorder{
		addr:   listener.Addr().String(),
		answer: answer,
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go r.serve(conn)
		}
	}()
	return r
}

func (r *recorder) serve(conn net.Conn) {
	defer conn.Close()
	r.open.Add(1)
	defer r.open.Add(-1)
	conn.SetDeadline(time.Now().Add(2 * hubstest.Patience)) // later than any test waits
	var raw strings.Builder
	in := bufio.NewReader(io.TeeReader(conn, &raw))
	for {
		// What in has buffered is of the next request, so it does not count.
		start := raw.Len() - in.Buffered()
		request, err := http.ReadRequest(in)
		head := raw.String()[start : raw.Len()-in.Buffered()]
		if head == "" { // no further request
			return
		}
		if strings.HasPrefix(head, "GET /healthz ") {
			io.WriteString(conn, emptyAnswer)
			return
		}
		r.mu.Lock()
		r.heads = append(r.heads, head)
		if start > 0 {
			r.reused++
		}
		r.mu.Unlock()
		if err != nil {
			return
		}
		answer := r.answer(request)
		if answer == "" {
			return
		}
		io.Copy(io.Discard, request.Body)
		io.WriteString(conn, answer)
	}
}

// seen returns the heads that begin with the prefix, of all requests so far.
func (r *recorder) seen(prefix string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	isOther := func(head string) bool { return !strings.HasPrefix(head, prefix) }
	return slices.DeleteFunc(slices.Clone(r.heads), isOther)
}
