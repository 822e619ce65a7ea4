//go:build moving

package main

// What deploy/ ships, run as it is shipped: the tests replace addresses, paths and the
// user in the proxies' configurations, nothing else. Clients come from addresses of
// their own in 127.0.0.0/8 (Linux has all of it), so what the server takes for the
// client's address is what the proxy really saw.

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"database/sql"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
)

const (
	haproxy = "haproxy"
	nginx   = "nginx"
)

// A tlsProxy is HAProxy or nginx as deploy/ configures it.
type tlsProxy struct {
	t    testing.TB
	addr string      // where it takes HTTPS on 127.0.0.1
	tls  *tls.Config // its certificate, for *.example.com: a test may serve other hosts by it
	dir  string
	log  *logBuffer
	// proxyAddr takes the same after a line of the PROXY protocol, by which a test can
	// come from any address. HAProxy only: it is the second bind line, see startProxy.
	proxyAddr string
}

// startProductionBehind runs one server with deploy/production.env behind the proxy
// ("haproxy" or "nginx") until the test ends. To clients it is https://api.example.com,
// at proxy.addr. Through client() of the proxy a Go test gets there, a browser with
// browserFlags().
func startProductionBehind(t testing.TB, engine string, overrides ...map[string]string) (*tlsProxy, *testServer) {
	t.Helper()
	s := startServer(t, append([]map[string]string{shippedProduction(t)}, overrides...)...)
	return startProxy(t, engine, s.addr), s
}

// shippedProduction is deploy/production.env, with what a test must have of its own.
// TRUSTED_PROXIES stays as it is shipped.
func shippedProduction(t testing.TB) map[string]string {
	env := readEnv(t, "deploy/production.env")
	delete(env, "FILES_DIR") // serverEnv has one
	env["ADDR"] = "127.0.0.1:0"
	maps.Copy(env, newMailServer(t, mailOptions{}).env())
	return env
}

// readEnv reads what systemd reads of an EnvironmentFile in the form that ours have.
func readEnv(t testing.TB, path string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	env := map[string]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, value, ok := strings.Cut(line, "=")
		if !ok || strings.ContainsAny(value, `"'\`) {
			t.Fatalf("%s: not in the form NAME=value: %q", path, line)
		}
		env[name] = value
	}
	return env
}

// startProxy runs the proxy in front of the servers at these addresses (HAProxy: at most
// three, nginx: one) until the test ends. Its sockets are made here and handed down: no
// other process can take the port, and a client that is early waits in their queue.
func startProxy(t testing.TB, engine string, servers ...string) *tlsProxy {
	t.Helper()
	// A short name: HAProxy takes at most 97 bytes for the path of its socket, and "prove" has
	// a long testDir.
	dir, err := os.MkdirTemp(testDir, "p")
	if err == nil {
		err = os.Chmod(dir, 0o755) // the proxies leave root behind
	}
	if err != nil {
		t.Fatal(err)
	}
	p := &tlsProxy{t: t, tls: testCA.serverTLS(), dir: dir, log: &logBuffer{}}
	writeFile(t, dir+"/tls.pem", keyPair(t, p.tls.Certificates[0]))

	https, httpsFile := listenFile(t)
	p.addr = https
	inherited := []*os.File{httpsFile}
	path := lookProgram(t, engine)
	var cmd *exec.Cmd
	switch engine {
	case haproxy:
		proxied, file := listenFile(t)
		p.proxyAddr, inherited = proxied, append(inherited, file)
		writeFile(t, dir+"/haproxy.cfg", haproxyConfig(t, dir, servers))
		cmd = exec.Command(path, "-db", "-f", dir+"/haproxy.cfg")
	case nginx:
		writeFile(t, dir+"/nginx.conf", nginxConfig(t, dir, https, servers[0]))
		cmd = exec.Command(path, "-g", "daemon off;", "-e", "stderr", "-c", dir+"/nginx.conf")
		cmd.Env = append(os.Environ(), "NGINX=3;") // how it hands its sockets to a new version of itself
	}
	cmd.ExtraFiles = inherited // 3 and 4
	cmd.Stdout, cmd.Stderr = p.log, p.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, file := range inherited {
		file.Close()
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		select {
		case err := <-ended:
			t.Errorf("%s has ended: %v\n%s", engine, err, p.log)
			return
		default:
		}
		cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(patience):
			cmd.Process.Kill()
			t.Errorf("%s does not end\n%s", engine, p.log)
		}
		if t.Failed() {
			t.Logf("%s:\n%s", engine, p.log)
		}
	})
	return p
}

// lookProgram finds a program that the tests need. Without it the test fails: one that
// skipped would be green where nothing was tested.
func lookProgram(t testing.TB, name string) string {
	t.Helper()
	for _, place := range []string{name, "/usr/sbin/" + name, "/usr/local/sbin/" + name} {
		if path, err := exec.LookPath(place); err == nil {
			return path
		}
	}
	t.Fatalf("%s is not installed (Debian: apt-get install %[1]s); see .ci/run", name)
	return ""
}

func listenFile(t testing.TB) (addr string, file *os.File) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if file, err = ln.(*net.TCPListener).File(); err != nil {
		t.Fatal(err)
	}
	return ln.Addr().String(), file
}

func writeFile(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// keyPair is a certificate and its key in one file, as both proxies take it.
func keyPair(t testing.TB, pair tls.Certificate) string {
	t.Helper()
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]})) +
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))
}

// shipped reads a file of deploy/ and replaces values in it, each of which must be there.
func shipped(t testing.TB, name string, oldNew ...string) string {
	t.Helper()
	text, err := os.ReadFile("deploy/" + name)
	if err != nil {
		t.Fatal(err)
	}
	for pair := range slices.Chunk(oldNew, 2) {
		if !bytes.Contains(text, []byte(pair[0])) {
			t.Fatalf("deploy/%s has no %q to replace", name, pair[0])
		}
	}
	return strings.NewReplacer(oldNew...).Replace(string(text))
}

func haproxyConfig(t testing.TB, dir string, servers []string) string {
	t.Helper()
	replace := []string{
		"0.0.0.0:443 ssl", "fd@3 ssl",
		"[::]:443 v6only ssl", "fd@4 accept-proxy ssl",
		"/etc/hubs/tls.pem", dir + "/tls.pem",
		"/run/haproxy/admin.sock", dir + "/admin.sock",
		"abns@hubs-requests", "abns@" + filepath.Base(dir), // the kernel has one namespace for all
	}
	if os.Getuid() != 0 { // then it is nobody's to give up
		replace = append(replace, "    user haproxy\n", "", "    group haproxy\n", "", "    chroot /var/lib/haproxy\n", "")
	}
	for i := range 3 {
		old := fmt.Sprintf("10.0.0.1%d:8080", i+1)
		if i < len(servers) {
			replace = append(replace, old, servers[i])
		} else { // whoever has fewer servers takes the lines out
			line := fmt.Sprintf("    server s%d %s", i+1, old)
			replace = append(replace, line+" backup\n", "", line+"\n", "")
		}
	}
	return shipped(t, "haproxy.cfg", replace...)
}

func nginxConfig(t testing.TB, dir, https, server string) string {
	t.Helper()
	replace := []string{
		"0.0.0.0:443", https,
		"        listen [::]:443 ssl http2 ipv6only=on;\n", "",
		"/etc/hubs/tls.pem", dir + "/tls.pem",
		"/run/nginx.pid", dir + "/nginx.pid",
		"/var/log/nginx/hubs-faults.log", dir + "/faults.log",
		"127.0.0.1:8080", server,
		"http {\n", "http {\n",
	}
	for _, kind := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} { // else they are the system's
		replace[len(replace)-1] += fmt.Sprintf("    %s_temp_path %s/%[1]s;\n", kind, dir)
	}
	if os.Getuid() != 0 {
		replace = append(replace, "user www-data;\n", "")
	}
	return shipped(t, "nginx.conf", replace...)
}

// client is a browser that comes from the address ("127.1.2.3"). Without one, each of its
// requests comes by a connection and from an address of its own: so no limit by address
// meets it, and HAProxy spreads it over all servers.
func (p *tlsProxy) client(t testing.TB, s *testServer, address string) *testClient {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{
		TLSClientConfig: clientTLS(), DisableCompression: true,
		ForceAttemptHTTP2: address != "", DisableKeepAlives: address == "",
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			from := address
			if from == "" {
				from = newAddress()
			}
			dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
			return dialer.DialContext(ctx, "tcp", p.addr)
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &testClient{t: t, srv: s, http: &http.Client{
		Jar: jar, Transport: transport, Timeout: 2 * patience,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

func clientTLS() *tls.Config {
	roots := x509.NewCertPool()
	roots.AddCert(testCA.cert)
	return &tls.Config{RootCAs: roots}
}

// newAddress is one of this machine's that no other client has.
func newAddress() string {
	n := serial.Add(1)
	return fmt.Sprintf("127.%d.%d.%d", 100+n>>16&63, n>>8&255, n&255)
}

// dial opens a TLS connection for requests that no client library would send.
func (p *tlsProxy) dial(t testing.TB, from string) *tls.Conn {
	t.Helper()
	config := clientTLS()
	config.ServerName = "api.example.com"
	conn, err := tls.DialWithDialer(&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}, "tcp", p.addr, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(patience))
	return conn
}

// browserFlags makes Chromium reach the proxy as https://api.example.com and take its
// certificate for good. hosts maps further names to addresses: servers that use p.tls.
func (p *tlsProxy) browserFlags(hosts map[string]string) []string {
	rules := []string{"MAP api.example.com " + p.addr}
	for name, addr := range hosts {
		rules = append(rules, "MAP "+name+" "+addr)
	}
	pin := sha256.Sum256(p.tls.Certificates[0].Leaf.RawSubjectPublicKeyInfo)
	return []string{
		"--host-resolver-rules=" + strings.Join(rules, ","),
		"--ignore-certificate-errors-spki-list=" + base64.StdEncoding.EncodeToString(pin[:]),
	}
}

// command is the operator at HAProxy's socket.
func (p *tlsProxy) command(t testing.TB, line string) string {
	t.Helper()
	conn, err := net.Dial("unix", p.dir+"/admin.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	fmt.Fprintln(conn, line)
	answer, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(answer))
}

// waitState waits until HAProxy takes the server (0 to 2) for up or down in both backends.
func (p *tlsProxy) waitState(t testing.TB, server int, state string) {
	t.Helper()
	waitUntil(t, fmt.Sprintf("server %d %s", server+1, state), func() bool {
		seen := 0
		for line := range strings.Lines(p.command(t, "show stat -1 4 -1")) {
			fields := strings.Split(line, ",")
			if len(fields) > 17 && fields[1] == fmt.Sprintf("s%d", server+1) && fields[17] == state {
				seen++
			}
		}
		return seen == 2
	})
}

// member signs a new user of the role in, by way of the proxy, and accepts the terms.
func (p *tlsProxy) member(t testing.TB, s *testServer, role string) *testClient {
	t.Helper()
	c, email := p.client(t, s, ""), newEmail()
	testUser(t, s.env["DATABASE_URL"], email, role)
	c.signIn(email)
	c.acceptTerms()
	return c
}

func TestProductionBehindTLSProxy(t *testing.T) {
	t.Parallel()
	for _, engine := range []string{haproxy, nginx} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			p, s := startProductionBehind(t, engine, map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(testUploadLimit)})
			t.Run("cookie", func(t *testing.T) { testProductionCookie(t, p, s) })          // T6, T7
			t.Run("CORS", func(t *testing.T) { testProductionCORS(t, p, s) })              // C1, C2
			t.Run("client address", func(t *testing.T) { testProductionAddress(t, p, s) }) // L2
			t.Run("upload", func(t *testing.T) { testProductionUpload(t, p, s) })
			t.Run("server away", func(t *testing.T) {
				s.stop(t)
				r, err := p.client(t, s, newAddress()).try("GET", "/hubs", nil)
				if err != nil || r.status != 503 || r.field(t, "code") != "unavailable" ||
					r.header.Get("Content-Type") != "application/problem+json" || r.header.Get("Retry-After") == "" {
					t.Errorf("%v, %v", err, r)
				}
			})
		})
	}
}

func testProductionCookie(t *testing.T, p *tlsProxy, s *testServer) {
	c, email := p.client(t, s, newAddress()), newEmail()
	testUser(t, s.env["DATABASE_URL"], email, roleMember)
	set := c.signIn(email).header.Values("Set-Cookie")
	form := regexp.MustCompile(`^__Secure-hubs_auth_production=eyJ[\w.-]+; Path=/; Domain=example\.com; ` +
		`Max-Age=5184000; HttpOnly; Secure; SameSite=Lax$`)
	if len(set) != 1 || !form.MatchString(set[0]) {
		t.Errorf("Set-Cookie: %q", set)
	}
	for target, want := range map[string]int{
		"https://api.example.com/": 1, "https://app.example.com/": 1,
		"http://api.example.com/": 0, "https://example.net/": 0, "https://evil-example.com/": 0,
	} {
		u, _ := url.Parse(target)
		if got := len(c.http.Jar.Cookies(u)); got != want {
			t.Errorf("%s gets %d cookies, want %d", target, got, want)
		}
	}
	r := c.do("GET", "/auth/session", nil).want(t, 200)
	if r.field(t, "user", "email") != email || r.header.Get("Strict-Transport-Security") == "" {
		t.Error(r)
	}
	c.do("GET", "/", nil).want(t, 404) // the learner's page is local only
	c.do("POST", "/auth/logout", nil).want(t, 204)
	if c.token() != "" {
		t.Error("signed out, and the jar still has the token")
	}
	wantProblem(t, c.do("GET", "/auth/session", nil), 401, "unauthenticated")
}

func testProductionCORS(t *testing.T, p *tlsProxy, s *testServer) {
	c := p.member(t, s, roleMember)
	const app = "https://app.example.com"
	for _, r := range []*testResponse{
		c.do("GET", "/hubs", nil, "Origin", app, "Sec-Fetch-Site", "same-site").want(t, 200),
		c.do("POST", "/terms/acceptance", map[string]string{"version": TERMS_VERSION},
			"Origin", app, "Sec-Fetch-Site", "same-site").want(t, 200),
		c.do("OPTIONS", "/hubs", nil, "Origin", app, "Access-Control-Request-Method", "PATCH",
			"Access-Control-Request-Headers", "content-type,x-request-id").want(t, 204),
	} {
		if r.header.Get("Access-Control-Allow-Origin") != app || r.header.Get("Access-Control-Allow-Credentials") != "true" {
			t.Errorf("not readable by %s: %v", app, r)
		}
	}
	for _, origin := range []string{"https://evil-example.com", "https://example.com", "http://app.example.com",
		"https://app.example.com:8443", "https://app.example.com.evil.net", "null"} {
		r := c.do("GET", "/hubs", nil, "Origin", origin).want(t, 200)
		if r.header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("readable by %s", origin)
		}
		for _, site := range []string{"cross-site", ""} { // empty: a browser too old to say it
			r := c.do("POST", "/auth/logout", nil, "Origin", origin, "Sec-Fetch-Site", site)
			wantProblem(t, r, 403, "cross_origin")
		}
	}
	c.do("POST", "/auth/logout", nil, "Origin", s.base).want(t, 204)
}

// A client gives itself another address with each request, and stays one client.
func testProductionAddress(t *testing.T, p *tlsProxy, s *testServer) {
	address := newAddress()
	c := p.client(t, s, address)
	mark := s.log.mark()
	var last *testResponse
	statuses := map[int]int{}
	for i := range 110 {
		forged := []string{fmt.Sprintf("198.51.100.%d", i), fmt.Sprintf("198.51.100.%d, 127.0.0.1", i), "127.0.0.1", "x"}[i%4]
		last = c.do("GET", "/auth/session", nil, "X-Forwarded-For", forged, "Forwarded", "for="+forged, "X-Real-Ip", forged)
		statuses[last.status]++
	}
	if !maps.Equal(statuses, map[int]int{401: 100, 429: 10}) {
		t.Errorf("statuses %v", statuses)
	}
	s.log.waitAfter(t, mark, last.header.Get("X-Request-Id"))
	for _, line := range s.log.all()[mark:] {
		if strings.Contains(line, `"path":"/auth/session"`) && !strings.Contains(line, `"client":"`+address+`"`) {
			t.Errorf("not by %s: %s", address, line)
		}
	}
}

// testUploadLimit is more than nginx lets pass unless told otherwise.
const testUploadLimit = 2 << 20

// The beginning of an upload is on the server's disk while the client still has the end.
func testProductionUpload(t *testing.T, p *tlsProxy, s *testServer) {
	content := make([]byte, testUploadLimit)
	rand.Read(content)
	address := newAddress()
	for _, protocol := range []string{"HTTP/2.0", "HTTP/1.1"} {
		c := p.member(t, s, roleMember)
		if protocol == "HTTP/2.0" {
			jar := c.http.Jar
			c = p.client(t, s, address)
			c.http.Jar = jar
		}
		body, form := io.Pipe()
		w := multipart.NewWriter(form)
		answered := make(chan *testResponse, 1)
		go func() { // no length: chunked, or HTTP/2 frames
			r, _ := c.try("POST", "/files/upload", body, "Content-Type", w.FormDataContentType())
			answered <- r
		}()
		part, err := w.CreateFormFile("file", "a.bin")
		if err == nil {
			_, err = part.Write(content[:128<<10])
		}
		waitUntil(t, protocol+": half an upload on disk", func() bool {
			half, _ := filepath.Glob(s.env["FILES_DIR"] + "/" + unfinished + "/*")
			if len(half) != 1 {
				return false
			}
			info, err := os.Stat(half[0])
			return err == nil && info.Size() >= 64<<10
		})
		if err == nil {
			_, err = part.Write(content[128<<10:])
		}
		if err = errors.Join(err, w.Close(), form.Close()); err != nil {
			t.Fatal(err)
		}
		uploaded := (<-answered).want(t, 201)
		path := uploaded.field(t, "path").(string)
		if got := c.do("GET", path, nil).want(t, 200); !bytes.Equal(got.body, content) {
			t.Errorf("%s: another file came back, %d bytes", protocol, len(got.body))
		}
		if got := c.do("GET", path, nil, "Range", "bytes=10-19").want(t, 206); !bytes.Equal(got.body, content[10:20]) {
			t.Error(got)
		}
		if got := c.do("GET", path, nil, "If-None-Match", uploadedTag(path)); got.status != 304 {
			t.Error(got)
		}
	}
	// The server's own refusal, in its own words: no limit of the proxy's comes first.
	// (Of an upload much larger than that it takes no more than it must; then a proxy that
	// is still sending may miss the answer.)
	c := p.member(t, s, roleMember)
	wantProblem(t, c.upload("large.bin", append(content, 'x')), 413, "too_large")
}

func uploadedTag(path string) string { return `"` + strings.Split(path, "/")[2] + `"` }

// What a request says of its length twice must reach the server once: with both, one of
// the two sides could take the rest of the body for a request, which would then come
// from the proxy's address, past its rules.
func TestProxyFraming(t *testing.T) {
	t.Parallel()
	const smuggled = "GET /smuggled HTTP/1.1\r\nHost: api.example.com\r\nX-Forwarded-For: 198.51.100.66\r\n\r\n"
	both := "0\r\n\r\n" + smuggled
	chunk := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(smuggled), smuggled)
	length := func(body string) string { return fmt.Sprintf("Content-Length: %d\r\n", len(body)) }
	const chunked = "Transfer-Encoding: chunked\r\n"
	requests := map[string]string{
		"both, length first":    length(both) + chunked + "\r\n" + both,
		"both, chunked first":   chunked + length(both) + "\r\n" + both,
		"both, length short":    "Content-Length: 3\r\n" + chunked + "\r\n" + chunk,
		"two lengths":           "Content-Length: 0\r\n" + length(smuggled) + "\r\n" + smuggled,
		"a list of lengths":     fmt.Sprintf("Content-Length: 0, %d\r\n\r\n%s", len(smuggled), smuggled),
		"a signed length":       "Content-Length: +" + fmt.Sprint(len(smuggled)) + "\r\n\r\n" + smuggled,
		"chunked, no chunk":     length(both) + "Transfer-Encoding: xchunked\r\n\r\n" + both,
		"chunked, then another": length(both) + "Transfer-Encoding: chunked, identity\r\n\r\n" + both,
		"chunked twice":         length(both) + chunked + chunked + "\r\n" + both,
		"space before colon":    length(both) + "Transfer-Encoding : chunked\r\n\r\n" + both,
		"tab before chunked":    length(both) + "Transfer-Encoding:\tchunked\r\n\r\n" + both,
		"folded":                length(both) + "Transfer-Encoding:\r\n chunked\r\n\r\n" + both,
		"line feed alone":       length(both) + "X: y\nTransfer-Encoding: chunked\r\n\r\n" + both,
		"upgrade":               "Connection: Upgrade\r\nUpgrade: tunnel\r\n\r\n" + smuggled,
		"hop by hop":            "Connection: close, X-Forwarded-For\r\n" + length("") + "\r\n",
	}
	for _, engine := range []string{haproxy, nginx} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			backend := newRecorder(t)
			p := startProxy(t, engine, backend.addr)
			for name, rest := range requests {
				address := newAddress()
				conn := p.dial(t, address)
				io.WriteString(conn, "POST /"+strings.ReplaceAll(name, " ", "-")+" HTTP/1.1\r\nHost: api.example.com\r\n"+rest)
				conn.CloseWrite()
				answer, _ := io.ReadAll(conn) // to its end: what the server was sent is recorded
				for _, fault := range backend.faults(address) {
					t.Errorf("%s: %s\nanswer: %.300s", name, fault, answer)
				}
				if !regexp.MustCompile(`^HTTP/1.1 (200|400|501) `).Match(answer) {
					t.Errorf("%s: answer %.100q", name, answer)
				}
			}
			// The recorder is one that can see: a plain request is there.
			conn := p.dial(t, newAddress())
			io.WriteString(conn, "GET /plain HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n")
			io.ReadAll(conn)
			if !slices.ContainsFunc(backend.heads(), func(h string) bool { return strings.HasPrefix(h, "GET /plain ") }) {
				t.Error("no plain request recorded")
			}
		})
	}
}

// No log of a proxy holds anything that a client wrote: neither when the server is down nor
// when its answer is broken, which is when nginx would quote the request.
func TestProxyLogs(t *testing.T) {
	t.Parallel()
	secrets := []string{"jane.roe", "mailbox.example", "482913", "eyJhbGciOiJIUzI1NiJ9"}
	const (
		path   = "/files/jane.roe@mailbox.example/482913/eyJhbGciOiJIUzI1NiJ9?email=jane.roe%40mailbox.example&code=482913"
		body   = `{"email":"jane.roe@mailbox.example","code":"482913"}`
		head   = "Host: 482913.mailbox.example\r\nReferer: https://mailbox.example/482913\r\nUser-Agent: jane.roe 482913\r\nConnection: close\r\n"
		cookie = "Cookie: __Secure-hubs_auth_production=eyJhbGciOiJIUzI1NiJ9.e30.x; x482913=jane.roe\r\n"
	)
	length := fmt.Sprintf("Content-Length: %d\r\n", len(body))
	requests := map[string]struct{ text, status string }{
		"with a body":      {"POST " + path + " HTTP/1.1\r\n" + head + cookie + length + "\r\n" + body, "50[23]"},
		"without a body":   {"GET " + path + " HTTP/1.1\r\n" + head + cookie + "\r\n", "50[23]"},
		"odd method":       {"M482913 " + path + " HTTP/1.1\r\n" + head + "\r\n", "400|50[23]"},
		"odd version":      {"GET " + path + " HTTP/1.482913\r\n" + head + "\r\n", "400|505"},
		"odd header":       {"GET " + path + " HTTP/1.1\r\n" + head + "482913 jane.roe@mailbox.example\r\n\r\n", "400|50[23]"},
		"no request":       {"482913 jane.roe@mailbox.example eyJhbGciOiJIUzI1NiJ9\r\n\r\n", "400"},
		"too many headers": {"GET " + path + " HTTP/1.1\r\n" + head + "X: " + strings.Repeat("482913", 12000) + "\r\n\r\n", "4[0-9][0-9]"},
		"body too short":   {"POST " + path + " HTTP/1.1\r\n" + head + length + "\r\n" + body[:9], "-1|400|50[23]"},
		"two lengths":      {"POST " + path + " HTTP/1.1\r\n" + head + length + "Content-Length: 482913\r\n\r\n", "400"},
	}
	backends := map[string]string{ // what the server answers
		"down":   "down",
		"silent": "",
		"broken": "HTTP/1.1 200 OK\r\n482913 jane.roe@mailbox.example\r\n\r\n",
	}
	for _, engine := range []string{haproxy, nginx} {
		for state, answer := range backends {
			t.Run(engine+"/"+state, func(t *testing.T) {
				t.Parallel()
				p := startProxy(t, engine, newBrokenServer(t, answer))
				wait := func(what, pattern string) {
					t.Helper()
					line := regexp.MustCompile(pattern)
					waitUntil(t, what+" in the log", func() bool { return slices.ContainsFunc(p.logged(t), line.MatchString) })
				}
				for name, request := range requests {
					address := newAddress()
					conn := p.dial(t, address)
					io.WriteString(conn, request.text)
					if name == "body too short" {
						conn.CloseWrite()
					}
					io.Copy(io.Discard, conn)
					conn.Close()
					// The line that says that something failed, and for whom.
					wait(name, regexp.QuoteMeta(address)+`:.*[ =](`+request.status+`) `)
				}
				for name, text := range map[string]string{
					"plain HTTP": "GET " + path + " HTTP/1.1\r\n" + head + cookie + "\r\n",
					"no TLS":     "jane.roe@mailbox.example 482913",
				} {
					conn, err := net.Dial("tcp", p.addr)
					if err != nil {
						t.Fatal(err)
					}
					conn.SetDeadline(time.Now().Add(patience))
					io.WriteString(conn, text)
					if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) {
						t.Errorf("%s: %v", name, err)
					}
					conn.Close()
				}
				odd := clientTLS()
				odd.ServerName = "482913.mailbox.example"
				if conn, err := tls.Dial("tcp", p.addr, odd); err == nil {
					t.Error("the certificate is not for this name")
					conn.Close()
				}
				// HTTP/2 has no request line; nginx makes one.
				c := p.client(t, &testServer{base: "https://api.example.com"}, newAddress())
				r, err := c.try("POST", path, body, "Cookie", "x=eyJhbGciOiJIUzI1NiJ9", "Referer", "https://mailbox.example/482913")
				if err != nil || r.status < 500 {
					t.Errorf("HTTP/2: %v %v", err, r)
				}
				last := newAddress() // its line comes after all the others
				conn := p.dial(t, last)
				io.WriteString(conn, "GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n")
				io.Copy(io.Discard, conn)
				wait("the last request", regexp.QuoteMeta(last)+`:.*[ =](50[23]) `)
				for _, line := range p.logged(t) {
					for _, secret := range secrets {
						if strings.Contains(strings.ToLower(line), strings.ToLower(secret)) {
							t.Errorf("%q in the log: %s", secret, line)
						}
					}
				}
			})
		}
	}
}

// A server that dies after it has taken a request may have done it. The proxy sends the
// request to no other server, and does not make the client send it again.
func TestProxySendsOnce(t *testing.T) {
	t.Parallel()
	for _, engine := range []string{haproxy, nginx} {
		for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
			t.Run(engine+" "+protocol, func(t *testing.T) {
				t.Parallel()
				backend := newRecorder(t)
				p := startProxy(t, engine, backend.addr)
				c := p.client(t, &testServer{base: "https://api.example.com"}, newAddress())
				transport := c.http.Transport.(*http.Transport)
				transport.ForceAttemptHTTP2 = protocol == "HTTP/2.0"
				for i := range 3 { // the first request of a connection, and others
					r, err := c.try("POST", "/ok", "{}")
					if err != nil || r.status != 200 {
						t.Fatalf("%v %v", err, r)
					}
					path := fmt.Sprintf("/dies/%d", i)
					r, err = c.try("POST", path, "{}")
					if err != nil || r.status != 502 && r.status != 503 {
						t.Errorf("%v %v", err, r)
					}
					count := 0
					for _, head := range backend.heads() {
						if strings.HasPrefix(head, "POST "+path+" ") {
							count++
						}
					}
					if count != 1 {
						t.Errorf("%s reached the server %d times", path, count)
					}
				}
			})
		}
	}
}

// Clients that read nothing, or send nothing more, hold the server's descriptors for a
// bounded time, also where a proxy stands between; and no more of them than the bound on the
// transfers of a user allows. Others are served meanwhile. (H5)
func TestStalledTransfersBehindProxy(t *testing.T) {
	t.Parallel()
	for _, engine := range []string{haproxy, nginx} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			s := startProcess(t, shippedProduction(t))
			p := startProxy(t, engine, s.addr)
			greedy, other := p.member(t, s.testServer, roleMember), p.member(t, s.testServer, roleMember)
			content := make([]byte, 20<<20) // more than all buffers on the way take
			rand.Read(content)
			path := greedy.upload("large.bin", content).want(t, 201).field(t, "path").(string)

			head := "Host: api.example.com\r\nCookie: " + s.cookieName() + "=" + greedy.token() + "\r\n"
			var downloads []*tls.Conn
			for i := range maxUserTransfers - 1 {
				conn := p.dialUnread(t)
				fmt.Fprintf(conn, "GET %s HTTP/1.1\r\n%s\r\n", path, head)
				downloads = append(downloads, conn)
				waitUntil(t, fmt.Sprintf("%d downloads", i+1), func() bool { return s.openFiles(t) == i+1 })
			}
			upload := p.dialUnread(t)
			fmt.Fprintf(upload, "POST /files/upload HTTP/1.1\r\n%sContent-Length: 1000000\r\n"+
				"Content-Type: multipart/form-data; boundary=x\r\n\r\n"+
				"--x\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n%s", head, content[:1<<16])
			waitUntil(t, "an upload", func() bool { return s.openFiles(t) == maxUserTransfers })
			started := time.Now()

			wantProblem(t, greedy.do("GET", path, nil), 429, "rate_limited")
			wantProblem(t, greedy.upload("a.txt", []byte("a")), 429, "rate_limited")
			if r := other.do("GET", path, nil).want(t, 200); !bytes.Equal(r.body, content) {
				t.Error("another user got another content")
			}
			other.upload("a.txt", []byte("a")).want(t, 201)
			if n := s.openFiles(t); n != maxUserTransfers {
				t.Errorf("%d transfers are open, want %d: the test shows nothing", n, maxUserTransfers)
			}

			for s.openFiles(t) > 0 { // stallTimeout, which is as long as patience
				if time.Since(started) > stallTimeout+patience {
					t.Fatalf("%v later %d transfers still hold a file", time.Since(started), s.openFiles(t))
				}
				time.Sleep(50 * time.Millisecond)
			}
			t.Logf("the server let all go after %v", time.Since(started).Round(time.Second))
			waitUntil(t, "room for a transfer again", func() bool { // its handlers return a moment later
				return greedy.do("GET", path, nil).status == 200
			})
			taken := int64(0)
			for _, conn := range downloads {
				conn.SetDeadline(time.Now().Add(patience))
				n, err := io.Copy(io.Discard, conn)
				if errors.Is(err, os.ErrDeadlineExceeded) || n >= int64(len(content)) {
					t.Errorf("a download that stalled: %d bytes, %v, want its connection cut", n, err)
				}
				taken = max(taken, n)
			}
			t.Logf("all buffers on the way took at most %d kB of an unread download", taken>>10)
		})
	}
}

// dialUnread is dial from an address of its own, with a small buffer for what nobody reads.
func (p *tlsProxy) dialUnread(t testing.TB) *tls.Conn {
	t.Helper()
	dialer := net.Dialer{
		LocalAddr: &net.TCPAddr{IP: net.ParseIP(newAddress())},
		Control: func(_, _ string, raw syscall.RawConn) (err error) {
			return errors.Join(raw.Control(func(fd uintptr) {
				err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 8<<10)
			}), err)
		},
	}
	config := clientTLS()
	config.ServerName = "api.example.com"
	conn, err := tls.DialWithDialer(&dialer, "tcp", p.addr, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// openFiles is how many uploaded or unfinished files the process has open.
func (p *testProcess) openFiles(t testing.TB) (open int) {
	t.Helper()
	descriptors := fmt.Sprintf("/proc/%d/fd/", p.cmd.Process.Pid)
	entries, err := os.ReadDir(descriptors)
	if err != nil {
		t.Fatal(err)
	}
	folder, err := filepath.EvalSymlinks(p.env["FILES_DIR"])
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		// One that was closed meanwhile has no target.
		target, _ := os.Readlink(descriptors + entry.Name())
		if isUUID(filepath.Base(target)) && strings.HasPrefix(target, folder+"/") {
			open++
		}
	}
	return open
}

// logged is all that the proxy has logged so far.
func (p *tlsProxy) logged(t testing.TB) []string {
	t.Helper()
	lines := p.log.all()
	faults, err := os.ReadFile(p.dir + "/faults.log") // nginx only
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return append(lines, strings.Split(string(faults), "\n")...)
}

// newBrokenServer is a server that gives each request this answer, closes the connection,
// and is well by its health check. If the answer is "down", nothing listens.
func newBrokenServer(t testing.TB, answer string) (addr string) {
	t.Helper()
	addr, file := listenFile(t)
	if answer == "down" {
		// Bound, so that nothing else takes the port, and not listening any more.
		if err := syscall.Shutdown(int(file.Fd()), syscall.SHUT_RD); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
		return addr
	}
	ln, err := net.FileListener(file)
	file.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(patience))
				r, err := http.ReadRequest(bufio.NewReader(conn))
				switch {
				case err != nil:
				case r.URL.Path == "/healthz":
					io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
				default:
					io.Copy(io.Discard, r.Body)
					io.WriteString(conn, answer)
				}
			}()
		}
	}()
	return addr
}

// A recorder is a server that keeps the head of each request as it came, and reads
// bodies as net/http does.
type recorder struct {
	addr string
	mu   sync.Mutex
	seen []string
	read int // faults has looked at these
}

func newRecorder(t testing.TB) *recorder {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	b := &recorder{addr: ln.Addr().String()}
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go b.serve(conn)
		}
	}()
	return b
}

func (b *recorder) serve(conn net.Conn) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	var raw bytes.Buffer
	in := bufio.NewReader(io.TeeReader(conn, &raw))
	for {
		start := raw.Len() - in.Buffered()
		r, err := http.ReadRequest(in)
		head := string(raw.Bytes()[start : raw.Len()-in.Buffered()])
		if head != "" && !strings.HasPrefix(head, "GET /healthz ") {
			b.mu.Lock()
			b.seen = append(b.seen, head)
			b.mu.Unlock()
		}
		if err != nil { // the end, mostly
			return
		}
		io.Copy(io.Discard, r.Body)
		if strings.HasPrefix(r.URL.Path, "/dies/") {
			return
		}
		io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	}
}

func (b *recorder) heads() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.seen)
}

// faults are those of the requests since the last call: all must be from the address,
// by the proxy's word, for the host that was asked, and say once how long they are.
func (b *recorder) faults(address string) (faults []string) {
	heads := b.heads()
	for _, head := range heads[b.read:] {
		lower := strings.ToLower(head)
		lengths := strings.Count(lower, "\ncontent-length:") + strings.Count(lower, "\ntransfer-encoding:")
		if lengths > 1 || strings.Count(lower, "transfer-encoding") > 1 {
			faults = append(faults, fmt.Sprintf("framed twice: %q", head))
		}
		if strings.Count(lower, "\nx-forwarded-for:") != 1 || !strings.Contains(lower, "\nx-forwarded-for: "+address+"\r\n") {
			faults = append(faults, fmt.Sprintf("not from %s alone: %q", address, head))
		}
		if strings.Contains(lower, "\nupgrade:") {
			faults = append(faults, fmt.Sprintf("an upgrade: %q", head))
		}
		if !strings.Contains(lower, "\nhost: api.example.com\r\n") { // the server compares it with Origin
			faults = append(faults, fmt.Sprintf("another host: %q", head))
		}
	}
	b.read = len(heads)
	return faults
}

// A cluster is three servers on one database and one folder behind HAProxy.
type cluster struct {
	*tlsProxy
	servers [3]*testProcess // the first is the active one
	env     map[string]string
}

// clusterAddr is where its servers listen: outgoing connections of this machine are from
// 127.0.0.1, so nothing takes a port while its server is being started again.
const clusterAddr = "127.77.0.1"

func startCluster(t *testing.T) *cluster {
	c := &cluster{env: serverEnv(t, shippedProduction(t), map[string]string{"ADDR": clusterAddr + ":0"})}
	var addrs []string
	for i := range c.servers {
		c.servers[i] = startProcess(t, c.env)
		addrs = append(addrs, c.servers[i].addr)
	}
	c.tlsProxy = startProxy(t, haproxy, addrs...)
	return c
}

// restart starts a server that has ended, where it was.
func (c *cluster) restart(i int, overrides ...map[string]string) {
	c.t.Helper()
	env := append([]map[string]string{c.env}, overrides...)
	c.servers[i] = startProcess(c.t, append(env, map[string]string{"ADDR": c.servers[i].addr})...)
}

// servedBy tells which server has answered.
func (c *cluster) servedBy(t testing.TB, r *testResponse) (server int) {
	t.Helper()
	waitUntil(t, "the request in a log", func() bool {
		server = slices.IndexFunc(c.servers[:], func(p *testProcess) bool {
			return p.log.count(`"msg":"request"`, r.header.Get("X-Request-Id")) > 0
		})
		return server >= 0
	})
	return server
}

// addressElsewhere is an address whose requests another server than the active one gets.
func (c *cluster) addressElsewhere(t testing.TB) string {
	t.Helper()
	for {
		address := newAddress()
		if c.servedBy(t, c.client(t, c.servers[0].testServer, address).do("GET", "/auth/session", nil)) != 0 {
			return address
		}
	}
}

func TestCluster(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	t.Run("works as one", func(t *testing.T) { testClusterWorks(t, c) })
	t.Run("limits", func(t *testing.T) { testClusterLimits(t, c) })
	t.Run("rolling restart with a new key", func(t *testing.T) { testClusterRolls(t, c) })
	t.Run("active server killed", func(t *testing.T) { testClusterKilled(t, c) })
}

func testClusterWorks(t *testing.T, c *cluster) {
	s := c.servers[0].testServer
	admin := c.member(t, s, roleAdmin) // each request from another address
	created := admin.do("POST", "/hubs", map[string]string{"name": "North"}).want(t, 201)
	file := admin.upload("a.txt", []byte("text")).want(t, 201)
	served := map[int]bool{}
	for range 200 {
		admin.do("GET", created.header.Get("Location"), nil).want(t, 200)
		if r := admin.do("GET", file.field(t, "path").(string), nil).want(t, 200); string(r.body) != "text" {
			t.Fatal(r)
		} else if served[c.servedBy(t, r)] = true; len(served) == len(c.servers) {
			break
		}
	}
	if len(served) != len(c.servers) {
		t.Errorf("only %v served", served)
	}
	// One client stays with one server, and codes are the active one's, however written.
	home := c.client(t, s, c.addressElsewhere(t))
	first := c.servedBy(t, home.do("GET", "/auth/session", nil))
	for _, path := range []string{"/hubs", "/files/x/y", "/healthz", "/openapi.json", "/auth/session?x=/auth/otp/"} {
		if got := c.servedBy(t, home.do("GET", path, nil)); got != first {
			t.Errorf("%s by server %d, not %d", path, got, first)
		}
	}
	for _, path := range []string{"otp/request", "%6ftp/request", "ot%70/%76alidate", "otp/validate?x"} {
		if got := c.servedBy(t, home.do("POST", "/auth/"+path, "{}").want(t, 400)); got != 0 {
			t.Errorf("/auth/%s by server %d", path, got)
		}
	}
}

// statuses sends the requests at the same moment and counts the answers by status.
func statuses(n int, send func(i int) *testResponse) map[int]int {
	var mu sync.Mutex
	var all sync.WaitGroup
	count := map[int]int{}
	for i := range n {
		all.Go(func() {
			r := send(i)
			mu.Lock()
			defer mu.Unlock()
			count[r.status]++
		})
	}
	all.Wait()
	return count
}

func testClusterLimits(t *testing.T, c *cluster) {
	s := c.servers[0].testServer
	want := func(t *testing.T, got, want map[int]int) {
		t.Helper()
		if !maps.Equal(got, want) {
			t.Errorf("answers by status %v, want %v", got, want)
		}
	}
	t.Run("100 by address", func(t *testing.T) {
		one := c.client(t, s, newAddress())
		want(t, statuses(120, func(i int) *testResponse {
			return one.do("GET", []string{"/auth/session", "/hubs"}[i%2], nil)
		}), map[int]int{401: 100, 429: 20})
	})
	t.Run("100 by the /64", func(t *testing.T) {
		network := fmt.Sprintf("2001:db8:%x:1", serial.Add(1))
		many := c.client(t, s, "")
		many.http.Transport.(*http.Transport).DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", c.proxyAddr)
			if err == nil {
				_, err = fmt.Fprintf(conn, "PROXY TCP6 %s::%x 2001:db8::1 1024 443\r\n", network, serial.Add(1))
			}
			return conn, err
		}
		want(t, statuses(110, func(int) *testResponse { return many.do("GET", "/auth/session", nil) }),
			map[int]int{401: 100, 429: 10})
	})
	t.Run("5 codes by e-mail and address", func(t *testing.T) {
		email, one := map[string]string{"email": newEmail()}, c.client(t, s, c.addressElsewhere(t))
		want(t, statuses(8, func(i int) *testResponse {
			return one.do("POST", []string{"/auth/otp/request", "/auth/%6Ftp/request"}[i%2], email)
		}), map[int]int{200: 5, 429: 3})
	})
	t.Run("10 proofs by e-mail", func(t *testing.T) { // O4
		proof, many := map[string]string{"email": newEmail(), "code": "000000"}, c.client(t, s, "")
		want(t, statuses(20, func(i int) *testResponse {
			return many.do("POST", []string{"/auth/otp/validate", "/auth/otp/%76alidate"}[i%2], proof)
		}), map[int]int{401: 10, 429: 10})
	})
}

// An upload that a server has acknowledged.
type acknowledged struct{ path, content string }

// A clusterLoad is what runs through HAProxy while servers come and go: members who upload,
// read what they have uploaded, and look at their session. Each request is from another
// address, so all servers get some of each.
type clusterLoad struct {
	*cluster
	t       *testing.T
	members []*testClient
	stop    atomic.Bool
	running sync.WaitGroup
	// tolerate judges an answer other than the expected one: false is a failure.
	tolerate func(*testResponse, error) bool

	mu    sync.Mutex
	files []acknowledged
}

func startClusterLoad(t *testing.T, c *cluster, tolerate func(*testResponse, error) bool) *clusterLoad {
	l := &clusterLoad{cluster: c, t: t, tolerate: tolerate}
	for range 2 {
		l.members = append(l.members, c.member(t, c.servers[0].testServer, roleMember))
	}
	for i, member := range l.members {
		l.running.Go(func() {
			for n := 0; !l.stop.Load(); n++ {
				l.round(member, fmt.Sprintf("content %d of member %d", n, i))
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *clusterLoad) round(member *testClient, content string) {
	r, err := member.try("GET", "/auth/session", nil)
	l.judge(r, err, 200)
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	part, _ := w.CreateFormFile("file", "load.txt") // into memory: these don't fail
	io.WriteString(part, content)
	w.Close()
	r, err = member.try("POST", "/files/upload", &form, "Content-Type", w.FormDataContentType())
	if !l.judge(r, err, 201) {
		return
	}
	file := acknowledged{r.header.Get("Location"), content}
	l.mu.Lock()
	l.files = append(l.files, file)
	l.mu.Unlock()
	if r, err = member.try("GET", file.path, nil); l.judge(r, err, 200) && string(r.body) != content {
		l.t.Errorf("another content in %v", r)
	}
}

func (l *clusterLoad) judge(r *testResponse, err error, status int) bool {
	if err == nil && r.status == status {
		return true
	}
	if !l.tolerate(r, err) {
		l.t.Errorf("under load, want %d: %v, %v", status, err, r)
	}
	return false
}

func (l *clusterLoad) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.files)
}

// waitMore waits for n further uploads.
func (l *clusterLoad) waitMore(n int) {
	l.t.Helper()
	goal := l.count() + n
	waitUntil(l.t, fmt.Sprintf("%d uploads more", n), func() bool { return l.count() >= goal })
}

func (l *clusterLoad) end() {
	l.stop.Store(true)
	l.running.Wait()
}

// wantAll checks that every acknowledged upload and every session is there.
func (l *clusterLoad) wantAll() {
	l.t.Helper()
	for i, file := range l.files {
		if r := l.members[i%len(l.members)].do("GET", file.path, nil); r.status != 200 || string(r.body) != file.content {
			l.t.Errorf("acknowledged with %q: %v", file.content, r)
		}
	}
	for _, member := range l.members {
		member.do("GET", "/auth/session", nil).want(l.t, 200)
	}
}

// A new key, without one request dropped or one session lost: the active server, which
// alone signs sessions, goes last. When it signs with the new key, all others know it.
func testClusterRolls(t *testing.T, c *cluster) {
	l := startClusterLoad(t, c, func(*testResponse, error) bool { return false })
	old := l.members[0].token()
	newKey := map[string]string{"SESSION_SECRET": "new-secret-of-more-than-thirty-two-bytes," + c.env["SESSION_SECRET"]}
	s := c.servers[0].testServer // the restart puts another in its place while people sign in
	signIns := make(chan struct{})
	go func() { // people go on signing in
		defer close(signIns)
		for !l.stop.Load() {
			c.signInAnew(t, s)
		}
	}()
	for _, i := range []int{2, 1, 0} {
		name := fmt.Sprintf("/s%d state ", i+1)
		for _, backend := range []string{"active", "by_address"} {
			if answer := c.command(t, "set server "+backend+name+"drain"); answer != "" {
				t.Fatal(answer)
			}
		}
		c.servers[i].signal(t, syscall.SIGTERM)
		if code := c.servers[i].wait(t); code != 0 {
			t.Errorf("server %d: exit %d", i+1, code)
		}
		c.restart(i, newKey)
		for _, backend := range []string{"active", "by_address"} {
			c.command(t, "set server "+backend+name+"ready")
		}
		c.waitState(t, i, "UP")
		l.waitMore(5)
	}
	l.end()
	<-signIns
	l.wantAll()
	if l.members[0].token() != old {
		t.Error("a session was signed anew: then the test shows nothing")
	}
	// The new key is in use: with the old one alone the next session is no session.
	fresh := c.member(t, c.servers[0].testServer, roleMember)
	other := startServer(t, c.env, map[string]string{"ADDR": "127.0.0.1:0"})
	stranger := other.client(t)
	stranger.setToken(fresh.token())
	wantProblem(t, stranger.do("GET", "/auth/session", nil), 401, "unauthenticated")
	stranger.setToken(old)
	stranger.do("GET", "/auth/session", nil).want(t, 200)
}

// signInAnew signs a new user in. A code that was in flight when the active server
// changed is lost: then the user asks again.
func (c *cluster) signInAnew(t *testing.T, s *testServer) {
	user, email := c.client(t, s, ""), newEmail()
	testUser(t, c.env["DATABASE_URL"], email, roleMember)
	for range 5 {
		r, err := user.try("POST", "/auth/otp/request", map[string]string{"email": email})
		if err != nil || r.status != 200 {
			t.Errorf("code request: %v, %v", err, r)
			return
		}
		proof := map[string]string{"email": email, "code": user.srv.code(t, email)}
		switch r, err = user.try("POST", "/auth/otp/validate", proof); {
		case err == nil && r.status == 200:
			// Good everywhere at once, whichever key has signed it.
			user.do("GET", "/auth/session", nil).want(t, 200)
			return
		case err != nil || r.status != 401:
			t.Errorf("validate: %v, %v", err, r)
			return
		}
	}
	t.Error("five codes in a row were lost")
}

// kill -9 of the active server under load: requests under way there fail, and no more.
func testClusterKilled(t *testing.T, c *cluster) {
	var failed atomic.Int32
	l := startClusterLoad(t, c, func(r *testResponse, err error) bool {
		failed.Add(1)
		return err != nil || r.status == 502 || r.status == 503 // never 401, 403, 404, 500
	})
	user, email := c.client(t, c.servers[0].testServer, ""), newEmail()
	testUser(t, c.env["DATABASE_URL"], email, roleMember)
	user.do("POST", "/auth/otp/request", map[string]string{"email": email}).want(t, 200)
	inFlight := user.srv.code(t, email)
	l.waitMore(10)

	c.servers[0].signal(t, syscall.SIGKILL)
	if code := c.servers[0].wait(t); code != -1 {
		t.Errorf("exit %d", code)
	}
	c.waitState(t, 0, "DOWN")
	before := failed.Load()
	l.waitMore(10)
	// At the backup: the code that was in flight is lost, the next one works.
	mark := c.servers[1].log.mark()
	lost := user.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": inFlight})
	wantProblem(t, lost, 401, "invalid_code")
	user.signIn(email)
	c.servers[1].log.waitAfter(t, mark, `"msg":"signed in"`)
	l.end()
	if failed.Load() != before {
		t.Errorf("%d requests failed after the server was known to be down", failed.Load()-before)
	}
	t.Logf("%d uploads acknowledged, %d requests failed", l.count(), failed.Load())
	l.wantAll()

	c.restart(0)
	c.waitState(t, 0, "UP")
	if r := user.do("POST", "/auth/otp/validate", "{}").want(t, 400); c.servedBy(t, r) != 0 {
		t.Error("the first server is up and not the active one again")
	}
}

// hubs_server, the role of a running server, has enough for every endpoint, and no more.
func TestLeastPrivilegeRole(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t) // roles.sql changes the rights in all databases
	for _, role := range []string{"hubs_owner", "stranger"} {
		execSQL(t, pg.url, "create role "+role+" login password 'p'")
		execSQL(t, pg.url, "create database "+role+" owner "+role)
	}
	database := withDatabase(pg.url, "hubs_owner")
	ownerURL, serverURL := withUser(t, database, "hubs_owner", "p"), withUser(t, database, "hubs_server", "p")
	for range 2 { // after each migrate, so more than once
		if err := applySchema(ownerURL); err != nil {
			t.Fatal(err)
		}
		execSQL(t, database, shipped(t, "roles.sql"))
	}
	execSQL(t, database, "alter role hubs_server password 'p'")

	t.Run("server works", func(t *testing.T) { testServerRoleWorks(t, ownerURL, serverURL) })
	t.Run("server warns", func(t *testing.T) {
		for databaseURL, want := range map[string]bool{serverURL: false, ownerURL: true} {
			s := startServer(t, shippedProduction(t), map[string]string{"DATABASE_URL": databaseURL})
			s.client(t).do("GET", "/healthz", nil).want(t, 200)
			if got := s.log.count(`"level":"WARN"`, "users") > 0; got != want {
				t.Errorf("warning of a role that may write users: got %v, want %v\n%s", got, want, s.log)
			}
		}
	})
	t.Run("refused", func(t *testing.T) { testServerRoleRefused(t, serverURL) })
	t.Run("other databases", func(t *testing.T) {
		for _, name := range []string{"postgres", "template1", "stranger"} {
			if err := expectRefused(testDB(t, withDatabase(serverURL, name)), "select 1"); err != nil {
				t.Errorf("hubs_server in %s: %v", name, err)
			}
			execSQL(t, withUser(t, withDatabase(pg.url, name), "stranger", "p"), "select 1") // as before
		}
		if err := expectRefused(testDB(t, withUser(t, database, "stranger", "p")), "select 1"); err != nil {
			t.Errorf("stranger in the server's database: %v", err)
		}
	})
	t.Run("owner", func(t *testing.T) { // keeps what migrate and a dump need
		for _, statement := range []string{"select pg_advisory_xact_lock(1)", "select lo_unlink(lo_create(0))"} {
			execSQL(t, ownerURL, statement)
		}
	})
}

func testServerRoleWorks(t *testing.T, ownerURL, serverURL string) {
	s := startServer(t, map[string]string{"DATABASE_URL": serverURL})
	c, email := s.client(t), newEmail()
	ownerEnv := map[string]string{"DATABASE_URL": ownerURL}
	if code, _, errOut := runCLI(ownerEnv, "user", "add", "-role", "admin", email); code != 0 {
		t.Fatal(errOut)
	}
	c.signIn(email)
	c.acceptTerms()
	c.acceptTerms()
	hub := c.do("POST", "/hubs", map[string]string{"name": "North"}).want(t, 201).header.Get("Location")
	c.do("PATCH", hub, map[string]string{"name": "South"}).want(t, 200)
	for _, query := range []string{"", "?filters[name]=south", "?filters[status]=active&orderBy=createdAt"} {
		if items := c.do("GET", "/hubs"+query, nil).want(t, 200).field(t, "items").([]any); len(items) != 1 {
			t.Errorf("%s: %v", query, items)
		}
	}
	c.do("GET", c.upload("a.txt", []byte("a")).want(t, 201).field(t, "path").(string), nil).want(t, 200)
	c.do("DELETE", hub, nil).want(t, 204)
	c.do("GET", "/healthz", nil).want(t, 200)
	// A second start sweeps, which reads the table of files.
	startServer(t, s.env)
	execSQL(t, serverURL, "delete from files") // a failed upload is undone

	if code, _, errOut := runCLI(map[string]string{"DATABASE_URL": serverURL}, "migrate"); code != 1 {
		t.Errorf("migrate: exit %d %s", code, errOut)
	}
	if code, _, errOut := runCLI(map[string]string{"DATABASE_URL": serverURL}, "user", "role", email, "admin"); code != 1 {
		t.Errorf("user role: exit %d %s", code, errOut)
	}
}

func testServerRoleRefused(t *testing.T, serverURL string) {
	db := testDB(t, serverURL)
	for _, refused := range []string{
		"create table t ()", "create temporary table t ()", "create schema s", "create extension pgcrypto",
		"create function f() returns int language sql as 'select 1'", "create index on hubs (description)",
		"alter table users add column x int", "alter table users disable trigger all", "drop table hubs",
		"drop index users_email", "truncate hubs", "comment on table hubs is 'x'",
		"insert into users (email) values ('x@y.example')", "update users set permission = 'admin'",
		"update users set suspended = false, signed_out_at = null", "delete from users",
		"select from users for update", "do $$ begin lock table users in share mode; end $$",
		"delete from terms_acceptances", "update terms_acceptances set accepted_at = now()",
		"update terms_acceptances set user_id = gen_random_uuid()", "update terms_acceptances set version = '1', accepted_at = now()",
		"update files set name = 'x'", "alter role hubs_server createdb",
		"create role r", "create database d", "set role hubs_owner", "copy hubs to '/tmp/hubs'", "copy hubs to program 'true'",
		"select lo_create(0)", "select lo_creat(-1)", "select lo_from_bytea(0, 'x')", "select lo_open(1, 131072)",
		"select lo_put(1, 0, 'x')", "select lowrite(0, 'x')", "select lo_import('/etc/passwd')", "select lo_export(1, '/tmp/x')",
		"select pg_advisory_lock(7239104561)", "select pg_advisory_xact_lock(7239104561)", "select pg_advisory_lock_shared(1, 2)",
		"select pg_try_advisory_lock(7239104561)", "select pg_try_advisory_xact_lock(7239104561)",
	} {
		t.Run(refused, func(t *testing.T) {
			if err := expectRefused(db, refused); err != nil {
				t.Error(err)
			}
		})
	}
}

// expectRefused is nil when the statement fails for want of a right (42501).
func expectRefused(db *sql.DB, statement string) error {
	_, err := db.Exec(statement)
	if refused, ok := errors.AsType[*pq.Error](err); ok && refused.Code == "42501" {
		return nil
	}
	return fmt.Errorf("want insufficient_privilege: %v", err)
}

// PostgreSQL over TLS, as the environment files advise: verify-full.
func TestDatabaseTLS(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	ownCA, otherCA := testDir+"/ca/ca.pem", pg.dir+"-other-ca.pem"
	writeFile(t, otherCA, string(newCA().pem()))
	with := func(sslmode, rootcert string) string {
		u, err := url.Parse(pg.url)
		if err != nil {
			t.Fatal(err)
		}
		u.RawQuery = url.Values{"sslmode": {sslmode}, "sslrootcert": {rootcert}}.Encode()
		return u.String()
	}
	serve := func(databaseURL string) (code int, errOut string) {
		code, _, errOut = runCLI(serverEnv(t, map[string]string{"DATABASE_URL": databaseURL}), "serve")
		return code, errOut
	}
	// A PostgreSQL without TLS: no fall-back.
	if code, errOut := serve(with("verify-full", ownCA)); code != 1 || !strings.Contains(errOut, "SSL") {
		t.Errorf("without TLS: exit %d, %s", code, errOut)
	}
	refused := func(name, databaseURL string) {
		t.Helper()
		for _, command := range []string{"serve", "migrate"} {
			code, _, errOut := runCLI(serverEnv(t, map[string]string{"DATABASE_URL": databaseURL}), command)
			if code != 1 || !strings.Contains(errOut, "x509: ") {
				t.Errorf("%s: %s: exit %d, %s", name, command, code, errOut)
			}
		}
	}
	pg.useCertificate(testCA.sign(&x509.Certificate{DNSNames: []string{"db.example.com"}}))
	refused("another name", with("verify-full", ownCA))

	pg.useCertificate(testCA.serverTLS().Certificates[0])
	refused("another CA", with("verify-full", otherCA))
	s := startServer(t, map[string]string{"DATABASE_URL": with("verify-full", ownCA)})
	c, _ := s.member(t, roleMember)
	c.do("GET", "/hubs", nil).want(t, 200)
	plain := queryValue[int](t, pg.url, `select count(*) from pg_stat_ssl join pg_stat_activity using (pid)
		where not ssl and backend_type = 'client backend' and pid <> pg_backend_pid()`)
	encrypted := queryValue[int](t, pg.url, "select count(*) from pg_stat_ssl where ssl and version >= 'TLSv1.2'")
	if plain != 0 || encrypted == 0 {
		t.Errorf("%d connections in plain text, %d encrypted", plain, encrypted)
	}
	if err := applySchema(with("verify-full", ownCA)); err != nil {
		t.Error(err)
	}
}

// useCertificate makes it speak TLS. PostgreSQL writes the key itself: it takes none
// that other accounts can read.
func (pg *ownPostgres) useCertificate(certificate tls.Certificate) {
	pg.t.Helper()
	pair := keyPair(pg.t, certificate)
	file := pg.dir + "/data/tls.pem"
	for _, statement := range []string{
		"copy (select unnest(string_to_array(" + pq.QuoteLiteral(strings.TrimSpace(pair)) + ", e'\\n'))) " +
			"to program 'umask 077; cat > " + file + "'",
		"alter system set ssl_cert_file = '" + file + "'",
		"alter system set ssl_key_file = '" + file + "'",
		"alter system set ssl = on",
	} {
		execSQL(pg.t, pg.url, statement)
	}
	pg.stop()
	pg.start()
}

func TestEnvironmentFiles(t *testing.T) {
	t.Parallel()
	asked := map[string]bool{}
	loadConfig(func(name string) string {
		asked[name] = true
		return ""
	})
	secrets := map[string]string{
		"DATABASE_URL":   "postgres://hubs_server:p@db.example.com/hubs?sslmode=verify-full",
		"SESSION_SECRET": "a-secret-of-more-than-thirty-two-bytes",
		"SMTP_URL":       "smtps://u:p@mail.example.com:465",
	}
	docs, err := os.ReadFile("docs/deploy.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range asked {
		if !bytes.Contains(docs, []byte("\n| `"+name+"` | ")) {
			t.Errorf("docs/deploy.md does not explain %s", name)
		}
	}
	for _, env := range []string{envStaging, envProduction} {
		path := "deploy/" + env + ".env"
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for name := range asked {
			// Explained: set, or named as unset, right below a comment, maybe with another.
			if !regexp.MustCompile(`(?m)^# .*\n(#?[A-Z_]+=.*\n)?#?` + name + `=`).Match(text) {
				t.Errorf("%s does not explain %s", path, name)
			}
		}
		values := readEnv(t, path)
		for name := range values {
			if !asked[name] {
				t.Errorf("%s sets %s, which the server does not know", path, name)
			}
			if secrets[name] != "" {
				t.Errorf("%s sets %s, which is a secret", path, name)
			}
		}
		maps.Copy(values, secrets)
		cfg, err := loadConfig(lookup(values))
		if err != nil || cfg.env != env || len(cfg.trustedProxies) != 1 || !cfg.trustedProxies[0].IsSingleIP() {
			t.Errorf("%s: %v, trusted: %v", path, err, cfg.trustedProxies)
		}
		if !strings.Contains(string(text), "\n#SESSION_SECRET="+placeholderKey+"\n") {
			t.Errorf("%s has another placeholder for SESSION_SECRET than the server refuses", path)
		}
		for _, keys := range []string{placeholderKey, placeholderKey + "," + secrets["SESSION_SECRET"], secrets["SESSION_SECRET"] + "," + placeholderKey} {
			values["SESSION_SECRET"] = keys
			if _, err := loadConfig(lookup(values)); err == nil || !strings.Contains(err.Error(), "SESSION_SECRET") {
				t.Errorf("%s: the placeholder of SESSION_SECRET is no error: %v", path, err)
			}
		}
	}
}

// The units as systemd itself rates and reads them.
func TestSystemdUnits(t *testing.T) {
	t.Parallel()
	path := lookProgram(t, "systemd-analyze")
	out, err := exec.Command(path, "security", "--offline=yes", "--no-pager", "deploy/hubs.service").CombinedOutput()
	rating := regexp.MustCompile(`Overall exposure level for hubs\.service: ([0-9.]+) (SAFE|OK) `).FindSubmatch(out)
	if err != nil || rating == nil {
		t.Fatalf("%v\n%s", err, out)
	}
	// 1.1 as shipped, by systemd 252; other versions differ by a tenth.
	if exposure, _ := strconv.ParseFloat(string(rating[1]), 64); exposure > 1.3 {
		t.Errorf("exposure %s, want at most 1.3\n%s", rating[1], out)
	}
	// It takes each line of both, finds the program where the lines say, and each unit the other.
	dir := t.TempDir()
	writeFile(t, dir+"/hubs.service", shipped(t, "hubs.service", "ExecStart=/usr/local/bin/hubs ", "ExecStart=/bin/true "))
	writeFile(t, dir+"/hubs.socket", shipped(t, "hubs.socket"))
	for _, unit := range []string{"hubs.service", "hubs.socket"} {
		verify := exec.Command(path, "verify", "--man=no", dir+"/"+unit)
		verify.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
		if out, err := verify.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("systemd-analyze verify %s: %v\n%s", unit, err, out)
		}
	}
	// The socket is where the server would listen without it.
	listen := regexp.MustCompile(`(?m)^ListenStream=(.*)$`).FindAllStringSubmatch(shipped(t, "hubs.socket"), -1)
	if len(listen) != 1 || listen[0][1] != readEnv(t, "deploy/production.env")["ADDR"] {
		t.Errorf("hubs.socket listens on %q, not once on production.env's ADDR", listen)
	}
}

// systemd-socket-activate hands the socket down as systemd does: it listens, and runs the
// server at the first connection, which waits for it.
func TestSystemdSocket(t *testing.T) {
	t.Parallel()
	path, err := testBinary()
	if err != nil {
		t.Fatal(err)
	}
	addr := newAddress() + ":8080"
	args := []string{"--listen=" + addr}
	for name, value := range serverEnv(t, map[string]string{"ADDR": "127.0.0.1:0"}) {
		args = append(args, "--setenv="+name+"="+value)
	}
	cmd := exec.Command(lookProgram(t, "systemd-socket-activate"), append(args, path, "serve")...)
	log := &logBuffer{}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	log.waitFor(t, "Listening on "+addr)
	client := http.Client{Timeout: patience}
	answer, err := client.Get("http://" + addr + "/healthz")
	if err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	answer.Body.Close()
	client.CloseIdleConnections()
	if answer.StatusCode != 200 {
		t.Errorf("%s\n%s", answer.Status, log)
	}
	log.waitFor(t, `"msg":"listening"`, `"addr":"`+addr+`"`)
	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, log)
	}
}

// H3: systemd lets a stop take its time: the requests under way, then the mail. Only a server
// that does not end by itself is killed.
func TestUnitWaitsForTheStop(t *testing.T) {
	t.Parallel()
	line := regexp.MustCompile(`(?m)^TimeoutStopSec=([0-9]+)$`).FindStringSubmatch(shipped(t, "hubs.service"))
	if line == nil {
		t.Fatal("hubs.service has no TimeoutStopSec")
	}
	seconds, err := strconv.Atoi(line[1])
	if err != nil {
		t.Fatal(err)
	}
	got, want := time.Duration(seconds)*time.Second, drainTime+2*stopTimeout
	if got <= want {
		t.Errorf("got TimeoutStopSec %v, want more than %v", got, want)
	}
}

// T8: browsers send no cookie of production to staging, and allow no page of the one on the
// other: the domains in the two files are strangers.
func TestStagingAndProductionShareNoDomain(t *testing.T) {
	t.Parallel()
	domains := func(env string) (domains []string) {
		values := readEnv(t, "deploy/"+env+".env")
		text := values["COOKIE_DOMAIN"] + "," + values["ALLOWED_ORIGIN_DOMAIN"] + "," + values["ALLOWED_ORIGINS"]
		for domain := range strings.SplitSeq(text, ",") {
			if domain = strings.TrimPrefix(domain, "https://"); domain != "" {
				domains = append(domains, domain)
			}
		}
		return domains
	}
	staging, production := domains(envStaging), domains(envProduction)
	if len(staging) < 2 || len(production) < 2 {
		t.Fatalf("got %q and %q, want a cookie's domain and origins in each", staging, production)
	}
	for _, a := range staging {
		for _, b := range production {
			if strings.HasSuffix("."+a, "."+b) || strings.HasSuffix("."+b, "."+a) {
				t.Errorf("staging has %s, production %s: one holds the other", a, b)
			}
		}
	}
}

// roles.sql leaves hubs_server no right that it was given before, by mistake or by an earlier
// version of the file.
func TestRolesTakeOldRightsBack(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t) // roles.sql changes the rights in all databases
	execSQL(t, pg.url, "create role hubs_owner login password 'p'")
	execSQL(t, pg.url, "create database hubs_owner owner hubs_owner")
	database := withDatabase(pg.url, "hubs_owner")
	if err := applySchema(withUser(t, database, "hubs_owner", "p")); err != nil {
		t.Fatal(err)
	}
	for _, statement := range []string{
		"create role hubs_server login password 'p' createdb createrole",
		"grant all on all tables in schema public to hubs_server",
		"grant update (suspended) on users to hubs_server",
		"grant all on schema public to hubs_server",
		"grant all on database hubs_owner to hubs_server",
		"grant execute on function lo_create(oid), pg_advisory_lock(bigint) to hubs_server",
	} {
		execSQL(t, database, statement)
	}
	serverURL := withUser(t, database, "hubs_server", "p")
	taken := []string{
		"create database d", "create role r", "create table t ()", "create schema s", "create temporary table tt ()",
		"update users set suspended = false", "update users set permission = 'member'", "delete from users",
		"insert into users (email) values ('x@y.example')", "delete from terms_acceptances", "update files set name = 'x'",
		"truncate hubs", "select lo_create(0)", "select pg_advisory_lock(1)",
	}
	before := testDB(t, serverURL)
	for _, statement := range taken {
		if err := expectRefused(before, statement); err == nil {
			t.Errorf("%s: refused before roles.sql, so this test shows nothing", statement)
		}
	}
	before.Close()
	for _, statement := range []string{"drop database d", "drop table t", "drop schema s", "drop role r"} {
		execSQL(t, database, statement)
	}
	execSQL(t, database, shipped(t, "roles.sql"))
	after := testDB(t, serverURL)
	for _, statement := range taken {
		if err := expectRefused(after, statement); err != nil {
			t.Errorf("%s: %v", statement, err)
		}
	}
}

// G5: the method in a proxy's log is one that the server has, and never another text of the
// client's. nginx takes letters, "_" and "-" for a method, which is enough for a name.
func TestProxyLogsKnownMethodsOnly(t *testing.T) {
	t.Parallel()
	for _, engine := range []string{haproxy, nginx} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			p := startProxy(t, engine, newBrokenServer(t, "down"))
			for method, want := range map[string]string{
				"POST": "POST", "GETJANE_ROE": "-", "JANE_ROE-GET": "-", "JANE_ROE": "-", "PATCH-JANE_ROE": "-",
			} {
				address := newAddress()
				conn := p.dial(t, address)
				io.WriteString(conn, method+" / HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
				io.Copy(io.Discard, conn)
				var line string
				waitUntil(t, method+" in the log", func() bool {
					lines := p.logged(t)
					i := slices.IndexFunc(lines, func(line string) bool { return strings.Contains(line, address+":") })
					if i >= 0 {
						line = lines[i]
					}
					return i >= 0
				})
				if strings.Contains(line, "JANE") || !slices.Contains(strings.Fields(line), want) {
					t.Errorf("%s: got %q, want %q for the method", method, line, want)
				}
			}
		})
	}
}

// G5: nginx reports some faults, such as an address that no socket can connect to, above the
// level "error", and quotes the request in each.
func TestNginxQuotesNoRequestAtAnyLevel(t *testing.T) {
	t.Parallel()
	p := startProxy(t, nginx, "[fe80::1]:9") // a link-local address without its link: EINVAL
	address := newAddress()
	conn := p.dial(t, address)
	io.WriteString(conn, "GET /jane.roe?code=482913 HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n")
	io.Copy(io.Discard, conn)
	waitUntil(t, "the fault in the log", func() bool {
		return slices.ContainsFunc(p.logged(t), func(line string) bool {
			return strings.Contains(line, address+":") && strings.Contains(line, " status=50")
		})
	})
	for _, line := range p.logged(t) {
		if strings.Contains(line, "jane.roe") || strings.Contains(line, "482913") {
			t.Errorf("the request in the log: %s", line)
		}
	}
}
