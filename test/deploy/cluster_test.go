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

// A cluster is three servers behind HAProxy. They share a database and a folder of files.
type cluster struct {
	*proxy
	servers []*hubstest.Server // the first is the active one: it gets all requests to /auth/otp/*
}

func startCluster(t *testing.T) *cluster {
	c := &cluster{}
	env := productionEnv(t)
	env["DATABASE_URL"] = hubstest.NewDatabase(t)
	// Tests start a server again on its old port. No outgoing connection of this machine has this
	// address, so none can take the port while the server is down.
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

// addressElsewhere returns the address of a client. HAProxy sends the client's requests outside
// /auth/otp/ to another server than the active one.
func (c *cluster) addressElsewhere(t *testing.T) string {
	for range 100 { // HAProxy sends two of three addresses to another server
		address := newAddress()
		r := c.clientFrom(c.servers[0], address).Get("/auth/session")
		hasSeen := func(s *hubstest.Server) bool {
			return s.Log.Count(`"msg":"request"`, r.Header.Get("X-Request-Id")) > 0
		}
		hubstest.WaitUntil(t, "a server has logged the request", func() bool {
			return slices.ContainsFunc(c.servers, hasSeen)
		})
		if !hasSeen(c.servers[0]) {
			return address
		}
	}
	t.Fatal("HAProxy sends 100 addresses to the active server, want some at another one")
	return ""
}

// command sends a line to HAProxy's admin socket, as an operator would, and returns the answer.
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

// setState sets the state of a server, in both backends of HAProxy, as an operator does: "drain"
// before a restart, "ready" after it. server counts from 0.
func (c *cluster) setState(t *testing.T, server int, state string) {
	for _, backend := range []string{"active", "by_address"} {
		c.command(t, fmt.Sprintf("set server %s/s%d state %s", backend, server+1, state))
	}
}

// waitState waits until HAProxy reports a server as "UP" or "DOWN" in both backends. server counts
// from 0.
func (c *cluster) waitState(t *testing.T, server int, state string) {
	name := fmt.Sprintf("s%d", server+1)
	hubstest.WaitUntil(t, "HAProxy reports "+name+" as "+state+" in both backends", func() bool {
		seen := 0
		for line := range strings.Lines(c.command(t, "show stat -1 4 -1")) {
			fields := strings.Split(line, ",")
			// In a line of "show stat", field 1 is the server's name and field 17 its state.
			if len(fields) > 17 && fields[1] == name && fields[17] == state {
				seen++
			}
		}
		return seen == 2
	})
}

// Three servers behind HAProxy have the limits of one, and no request fails while servers come and
// go. Both parts use the same servers, because starting them takes long.
func TestServersOfAClusterActAsOne(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	t.Run("limits", func(t *testing.T) {
		testLimits(t, c)
	})
	t.Run("servers come and go", func(t *testing.T) {
		testServersComeAndGo(t, c)
	})
}

// Three servers together have the limits of one server, because HAProxy sends all requests that a
// limit counts together to the same server.
func testLimits(t *testing.T, c *cluster) {
	s := c.servers[0]
	oneNetwork := c.client(s)
	oneNetwork.HTTP.Transport.(*http.Transport).DialContext = c.dialFromNetwork
	sessionPaths := []string{"/auth/session", "/hubs"}
	email := hubstest.NewEmail()
	for _, requests := range []limitedRequests{
		{
			route:  "GET /hubs", // counts by client address
			client: c.clientFrom(s, newAddress()),
			paths:  sessionPaths,
		},
		{
			route:  "GET /hubs", // counts an IPv6 address by its network
			client: oneNetwork,
			paths:  sessionPaths,
		},
		{
			route:  "POST /auth/otp/request", // counts by client address, at the active server
			client: c.clientFrom(s, c.addressElsewhere(t)),
			paths:  []string{"/auth/otp/request", "/auth/%6Ftp/request"},
			body:   map[string]string{"email": email},
		},
		{
			route:  "POST /auth/otp/validate", // counts by e-mail address
			client: c.client(s),
			paths:  []string{"/auth/otp/validate", "/auth/otp/%76alidate"},
			body:   map[string]string{"email": email, "code": "000000"},
		},
	} {
		requests.wantLimit(t)
	}
}

// limitedRequests are requests that one limit counts together.
type limitedRequests struct {
	route  string // the limit is the one of this route
	client *hubstest.Client
	paths  []string // two, taken in turn
	body   any
}

// wantLimit sends eight requests more than the limit permits. It fails the test unless exactly the
// requests over the limit get a 429.
func (q limitedRequests) wantLimit(t *testing.T) {
	limit := hubstest.LimitOf(t, q.route).Requests
	method, _, _ := strings.Cut(q.route, " ")
	for i := range limit + 8 {
		r := q.client.Do(method, q.paths[i%2], q.body)
		refused := r.Status == 429
		if refused != (i >= limit) {
			t.Errorf("%s: request %d: got %d, want a 429 only after %d requests",
				r.Path, i+1, r.Status, limit)
		}
	}
}

// dialFromNetwork connects to HAProxy as a new client. Each call takes a new address of the same
// /64, and gives it to HAProxy by the PROXY protocol.
func (c *cluster) dialFromNetwork(context.Context, string, string) (net.Conn, error) {
	conn, err := net.Dial("tcp", c.proxied)
	if err == nil {
		host := serial.Add(1)
		_, err = fmt.Fprintf(conn, "PROXY TCP6 2001:db8:1:1::%x 2001:db8::1 1024 443\r\n", host)
	}
	return conn, err
}

// P1: a request that a server takes as one to /auth/otp/* must have come to the active server,
// whatever its target, its Host and its version of HTTP.
func TestProxiesTakeThePathOfTheServer(t *testing.T) {
	t.Parallel()
	t.Run("haproxy", func(t *testing.T) {
		c := startCluster(t)
		wantTargetsAtTheFirst(t, c.proxy, c.addressElsewhere(t), c.servers)
	})
	t.Run("nginx", func(t *testing.T) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxy(t, "nginx", s.Addr)
		wantTargetsAtTheFirst(t, p, newAddress(), []*hubstest.Server{s})
	})
}

const emptyObject = "Content-Type: application/json\r\n" +
	"Connection: close\r\n" +
	"Content-Length: 2\r\n\r\n{}"

// targets holds request targets by which a client may try to reach /auth/otp/validate: the path
// itself, encoded, without its first slash, after a scheme and a host or only one of them, after
// other parts of a path, and in capitals. The last two are targets of CONNECT and OPTIONS.
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

// wantTargetsAtTheFirst sends each target in four requests: by HTTP/1.0 and 1.1, with and without
// Host. It requires that a target without a path reaches no server, that a request which reaches no
// server gets a 400, and that the first server gets sign-in requests and the others get none.
func wantTargetsAtTheFirst(t *testing.T, p *proxy, address string, servers []*hubstest.Server) {
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
				t.Errorf("POST %s%q reached a server, want a 400 of the proxy", target, rest)
			}
			if !reached && !strings.HasPrefix(answer, "HTTP/1.1 400 ") {
				t.Errorf("POST %s%q: got %.100q, want a 400 or the answer of a server",
					target, rest, answer)
			}
		}
	}
	for i, s := range servers {
		got := s.Log.Count(`"route":"/auth/otp/validate","status":400`)
		if (got > 0) != (i == 0) {
			t.Errorf("server %d: got %d sign-in requests, want them at server 1 only", i+1, got)
		}
	}
}

// A load is a user who reads the session and uploads files through HAProxy while servers stop and
// start. Each request comes from a new address, so that every server gets some.
type load struct {
	t      *testing.T
	client *hubstest.Client
	ledger *hubstest.Ledger
	stop   atomic.Bool
	ended  chan struct{}
	rounds atomic.Int64 // each is one read of the session and one upload
	failed atomic.Int64 // requests that got 502, 503 or no answer
}

func startLoad(t *testing.T, c *cluster) *load {
	fault := func(kind, detail string) { t.Errorf("%s: %s", kind, detail) }
	l := &load{
		t:      t,
		client: c.member(c.servers[0], "member"),
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

// Do sends a request of the load. It counts a request that gets no answer, a 502 or a 503, because
// a server may be down. Any other error fails the test.
func (l *load) Do(method, path string, body any, headers ...string) *hubstest.Response {
	r, err := l.client.Try(method, path, body, headers...)
	switch {
	case err != nil || r.Status == 502 || r.Status == 503:
		l.failed.Add(1)
	case r.Status >= 400:
		l.t.Errorf("the load: want an answer below 400, a 502 or a 503, got %v", r)
	}
	return r
}

// waitMore waits until the load has finished five more rounds.
func (l *load) waitMore() {
	goal := l.rounds.Load() + 5
	hubstest.WaitUntil(l.t, "the load has finished five more rounds", func() bool {
		return l.rounds.Load() >= goal
	})
}

// end stops the load after its current round. It may be called again.
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
	l.client.Do("GET", "/auth/session", nil).Must(t, 200)
}

// rollOut restarts one server after the other with a new signing key, and requires that no
// request fails. The active server comes last: only it signs sessions, so all other servers know
// the new key before the first session is signed with it.
func rollOut(t *testing.T, c *cluster, l *load) {
	keys := "new-secret-of-more-than-thirty-two-bytes," + c.servers[0].Env["SESSION_SECRET"]
	for _, i := range []int{2, 1, 0} {
		c.setState(t, i, "drain")
		code := c.servers[i].Stop(t)
		if code != 0 {
			t.Errorf("server %d: got exit status %d, want 0", i+1, code)
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
		t.Errorf("got %d failed requests during the rolling restart, want 0", got)
	}
}

// killActive kills the active server with SIGKILL. Requests under way at that server may fail. Once
// HAProxy reports the server as down, no request may fail, and users can sign in again.
func killActive(t *testing.T, c *cluster, l *load) {
	c.servers[0].Signal(t, syscall.SIGKILL)
	c.servers[0].Wait(t)
	c.waitState(t, 0, "DOWN")
	before := l.failed.Load()
	l.waitMore()
	got := l.failed.Load()
	if got != before {
		t.Errorf("got %d failed requests after the active server was reported as down, want 0",
			got-before)
	}
	c.member(c.servers[1], "member") // signs in at the next server, which is active now
	c.servers[1].Log.WaitFor(t, `"msg":"signed in"`)
}
