package deploy

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// A cluster is three servers on one database and one folder behind HAProxy.
type cluster struct {
	*proxy
	servers []*hubstest.Server // the first is the active one
}

func startCluster(t *testing.T) *cluster {
	c := &cluster{}
	env := productionEnv(t)
	env["DATABASE_URL"] = hubstest.NewDatabase(t)
	// No outgoing connection of this machine takes a port of this address while its server is
	// away.
	env["ADDR"] = "127.77.0.1:0"
	var addrs []string
	for range 3 {
		s := hubstest.Start(t, env)
		c.servers = append(c.servers, s)
		addrs = append(addrs, s.Addr)
	}
	c.proxy = startProxy(t, "haproxy", addrs...)
	return c
}

// addressElsewhere returns an address whose requests go to another server than the active
// one.
func (c *cluster) addressElsewhere(t *testing.T) string {
	for {
		address := newAddress()
		r := c.client(c.servers[0], address).Get("/auth/session")
		hasSeen := func(s *hubstest.Server) bool {
			return s.Log.Count(`"msg":"request"`, r.Header.Get("X-Request-Id")) > 0
		}
		hubstest.WaitUntil(t, "the request in a log", func() bool {
			return slices.ContainsFunc(c.servers, hasSeen)
		})
		if !hasSeen(c.servers[0]) {
			return address
		}
	}
}

// command is the operator at HAProxy's socket.
func (c *cluster) command(t *testing.T, line string) string {
	conn, err := net.Dial("unix", c.dir+"/admin.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintln(conn, line)
	answer, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	return string(answer)
}

// setState is what the operator does before and after a restart.
func (c *cluster) setState(t *testing.T, server int, state string) {
	for _, backend := range []string{"active", "by_address"} {
		c.command(t, fmt.Sprintf("set server %s/s%d state %s", backend, server+1, state))
	}
}

// waitState waits until HAProxy takes the server for UP or DOWN in both backends.
func (c *cluster) waitState(t *testing.T, server int, state string) {
	name := fmt.Sprintf("s%d", server+1)
	hubstest.WaitUntil(t, name+" "+state, func() bool {
		seen := 0
		for line := range strings.Lines(c.command(t, "show stat -1 4 -1")) {
			fields := strings.Split(line, ",")
			if len(fields) > 17 && fields[1] == name && fields[17] == state {
				seen++
			}
		}
		return seen == 2
	})
}

func TestCluster(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	t.Run("limits", func(t *testing.T) {
		testLimits(t, c)
	})
	t.Run("servers come and go", func(t *testing.T) {
		testServersComeAndGo(t, c)
	})
}

// Three servers have together the limits of one: each client stays with one server.
func testLimits(t *testing.T, c *cluster) {
	s := c.servers[0]
	network := c.client(s, "")
	network.HTTP.Transport.(*http.Transport).DialContext = c.dialFromNetwork
	paths := []string{"/auth/session", "/hubs"}
	alone := c.client(s, newAddress())
	wantLimit(t, "GET /hubs", alone, paths, nil)
	wantLimit(t, "GET /hubs", network, paths, nil)

	body := map[string]string{"email": hubstest.NewEmail()}
	paths = []string{"/auth/otp/request", "/auth/%6Ftp/request"}
	elsewhere := c.client(s, c.addressElsewhere(t))
	wantLimit(t, "POST /auth/otp/request", elsewhere, paths, body)
	body["code"] = "000000"
	paths = []string{"/auth/otp/validate", "/auth/otp/%76alidate"}
	everywhere := c.client(s, "")
	wantLimit(t, "POST /auth/otp/validate", everywhere, paths, body)
}

// wantLimit requires that of the requests to the paths in turn as many are counted as the limit
// of the route says, and then none.
func wantLimit(
	t *testing.T, route string, c *hubstest.Client, paths []string, body any,
) {
	limit := hubstest.LimitOf(t, route).Requests
	method, _, _ := strings.Cut(route, " ")
	for i := range limit + 8 {
		r := c.Do(method, paths[i%2], body)
		refused := r.Status == 429
		if refused != (i >= limit) {
			t.Errorf("%s: request %d: got %d, the limit is %d", r.Path, i+1, r.Status, limit)
		}
	}
}

// dialFromNetwork comes from a new address of one /64 each time.
func (c *cluster) dialFromNetwork(context.Context, string, string) (net.Conn, error) {
	conn, err := net.Dial("tcp", c.proxied)
	if err == nil {
		host := addresses.Add(1)
		_, err = fmt.Fprintf(conn, "PROXY TCP6 2001:db8:1:1::%x 2001:db8::1 1024 443\r\n", host)
	}
	return conn, err
}

// P1: what a server takes for /auth/otp/* has come to the active one, in all forms of target,
// Host and version.
func TestProxiesTakeThePathOfTheServer(t *testing.T) {
	t.Parallel()
	t.Run("haproxy", func(t *testing.T) {
		c := startCluster(t)
		sendTargets(t, c.proxy, c.addressElsewhere(t), c.servers)
	})
	t.Run("nginx", func(t *testing.T) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxy(t, "nginx", s.Addr)
		sendTargets(t, p, newAddress(), []*hubstest.Server{s})
	})
}

const emptyObject = "Content-Type: application/json\r\n" +
	"Connection: close\r\n" +
	"Content-Length: 2\r\n\r\n{}"

// targets are forms in which a client may write the path of a sign-in.
const targets = `
	/auth/otp/validate
	/auth/%6ftp/validate
	/auth/otp%2Fvalidate
	auth/otp/validate
	%2Fauth/otp/validate
	x:/auth/otp/validate
	x:/auth/%6ftp/validate
	x:auth/otp/validate
	http:/auth/otp/validate
	http:///auth/otp/validate
	http://api.example.com/auth/otp/validate
	x://a@b/auth/otp/validate
	http://api.example.com?/auth/otp/validate
	//auth/otp/validate
	/x/../auth/otp/validate
	/AUTH/OTP/VALIDATE
	api.example.com:443
	*
`

// sendTargets sends them all. A target in which the proxy finds no path reaches no server.
func sendTargets(t *testing.T, p *proxy, address string, servers []*hubstest.Server) {
	for target := range strings.FieldsSeq(targets) {
		hasPath := strings.HasPrefix(target, "/") || strings.Contains(target, "://")
		for _, rest := range []string{
			" HTTP/1.0\r\n",
			" HTTP/1.1\r\n",
			" HTTP/1.0\r\nHost: api.example.com\r\n",
			" HTTP/1.1\r\nHost: api.example.com\r\n",
		} {
			answer := p.raw(t, address, "POST "+target+rest+emptyObject)
			reached := strings.Contains(strings.ToLower(answer), "\nx-request-id:")
			if reached && !hasPath {
				t.Errorf("POST %s%q reached a server", target, rest)
			}
			if !reached && !strings.HasPrefix(answer, "HTTP/1.1 400 ") {
				t.Errorf("POST %s%q: want 400, got %.100q", target, rest, answer)
			}
		}
	}
	for i, s := range servers {
		got := s.Log.Count(`"route":"/auth/otp/validate","status":400`)
		if (got > 0) != (i == 0) {
			t.Errorf("server %d has seen %d attempts to sign in", i+1, got)
		}
	}
}

// A load is a member who uploads and reads through HAProxy while servers come and go. Each
// request is from another address, so all servers get some.
type load struct {
	*hubstest.Client
	t      *testing.T
	ledger *hubstest.Ledger
	stop   atomic.Bool
	ended  chan struct{}
	rounds atomic.Int64
	failed atomic.Int64 // requests that got 502, 503 or no answer
}

func startLoad(t *testing.T, c *cluster) *load {
	fault := func(kind, detail string) { t.Errorf("%s: %s", kind, detail) }
	l := &load{
		Client: c.member(c.servers[0], "member"),
		t:      t,
		ledger: hubstest.NewLedger(fault),
		ended:  make(chan struct{}),
	}
	go func() {
		defer close(l.ended)
		for !l.stop.Load() {
			l.Do("GET", "/auth/session", nil)
			l.ledger.Upload(l)
			l.rounds.Add(1)
		}
	}()
	t.Cleanup(l.end)
	return l
}

// Do sends a request of the load, which may fail for want of a server and for nothing else.
func (l *load) Do(method, path string, body any, headers ...string) *hubstest.Response {
	r, err := l.Try(method, path, body, headers...)
	switch {
	case err != nil || r.Status == 502 || r.Status == 503:
		l.failed.Add(1)
	case r.Status >= 400:
		l.t.Errorf("under load: %v", r)
	}
	return r
}

// waitMore waits for five further rounds.
func (l *load) waitMore() {
	goal := l.rounds.Load() + 5
	hubstest.WaitUntil(l.t, "five rounds more", func() bool {
		return l.rounds.Load() >= goal
	})
}

func (l *load) end() {
	l.stop.Store(true)
	<-l.ended
}

func testServersComeAndGo(t *testing.T, c *cluster) {
	l := startLoad(t, c)
	rollOut(t, c, l)
	killActive(t, c, l)
	l.end()
	l.ledger.CheckFiles(t, l, c.servers[0].Database)
	l.Client.Do("GET", "/auth/session", nil).Want(t, 200)
}

// rollOut brings a new key without one request dropped. The active server, which alone signs
// sessions, goes last: when it signs with the new key, all others know it.
func rollOut(t *testing.T, c *cluster, l *load) {
	keys := "new-secret-of-more-than-thirty-two-bytes," + c.servers[0].Env["SESSION_SECRET"]
	for _, i := range []int{2, 1, 0} {
		c.setState(t, i, "drain")
		code := c.servers[i].Stop(t)
		if code != 0 {
			t.Errorf("server %d: exit status %d", i+1, code)
		}
		env := maps.Clone(c.servers[i].Env)
		env["ADDR"] = c.servers[i].Addr
		env["SESSION_SECRET"] = keys
		c.servers[i] = hubstest.Start(c.t, env)
		c.setState(t, i, "ready")
		c.waitState(t, i, "UP")
		l.waitMore()
	}
	got := l.failed.Load()
	if got != 0 {
		t.Errorf("%d requests failed during a rolling restart", got)
	}
}

// killActive ends the active server with kill -9. Requests under way there fail, and no
// others.
func killActive(t *testing.T, c *cluster, l *load) {
	c.servers[0].Signal(t, syscall.SIGKILL)
	c.servers[0].Wait(t)
	c.waitState(t, 0, "DOWN")
	before := l.failed.Load()
	l.waitMore()
	got := l.failed.Load()
	if got != before {
		t.Errorf("%d requests failed after the server was known to be down", got-before)
	}
	c.member(c.servers[1], "member") // signs in at the next server
	c.servers[1].Log.WaitFor(t, `"msg":"signed in"`)
}
