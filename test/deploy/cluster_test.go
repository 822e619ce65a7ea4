package deploy

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// A cluster is three servers behind HAProxy. They share a database and a folder of files.
type cluster struct {
	*frontProxy
	servers []*hubstest.Server // the first is the active one: it gets all requests to /auth/otp/*
}

func startCluster(t *testing.T) *cluster {
	t.Helper()
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
	c.frontProxy = startProxy(t, "haproxy", addrs...)
	return c
}

// addressElsewhere returns the address of a client. HAProxy sends the client's requests outside
// /auth/otp/ to another server than the active one.
func (c *cluster) addressElsewhere(t *testing.T) string {
	t.Helper()
	for range 100 { // HAProxy sends two of three addresses to another server
		address := newAddress()
		c.clientFrom(c.servers[0], address).Get("/auth/session")
		line := c.log.WaitFor(t, address+":", " by_address/")
		if !strings.Contains(line, " by_address/s1 ") {
			return address
		}
	}
	t.Fatal("setup: got 100 addresses at the active server, want some at another one")
	return ""
}

// setState sets the state of a server, in both backends of HAProxy, as an operator does: "drain"
// before a restart, "ready" after it. server counts from 0.
func (c *cluster) setState(t *testing.T, server int, state string) {
	t.Helper()
	for _, backend := range []string{"active", "by_address"} {
		c.command(t, fmt.Sprintf("set server %s/s%d state %s", backend, server+1, state))
	}
}

// waitStat waits until HAProxy's statistics have a value for a server in both backends. column is
// its name there. server counts from 0.
func (c *cluster) waitStat(t *testing.T, server int, column, value string) {
	t.Helper()
	name := fmt.Sprintf("s%d", server+1)
	hubstest.WaitFor(t, column+" of "+name+" in both backends", value+" "+value, func() string {
		return c.stats(t, name, column)
	})
}

// Three servers behind HAProxy have the limits of one, and no request fails while servers come and
// go. Both parts use the same servers, because starting them takes long.
func TestServersOfAClusterActAsOne(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	t.Run("limits", func(t *testing.T) {
		wantLimits(t, c)
	})
	t.Run("servers come and go", func(t *testing.T) {
		user := startTraffic(t, c)
		testRollingRestart(t, c, user)
		testKill(t, c, user)
		user.client.Get("/auth/session").Want(t, 200)
	})
}

// Three servers together have the limits of one server, because HAProxy sends all requests that a
// limit counts together to the same server.
//
// What a limit has counted, it forgets after its period, 10 s in two of the cases. A test that took
// longer would see more requests pass. So the clients of these cases keep their connections: a TLS
// handshake for each request could take that long on a busy machine.
func wantLimits(t *testing.T, c *cluster) {
	s := c.servers[0]
	var oneNetwork []*hubstest.Client
	for range 7 { // HAProxy would hardly send so many addresses to the same server by chance
		client := c.clientFrom(s, "")
		client.HTTP.Transport.(*http.Transport).DialContext = c.dialFromNetwork
		oneNetwork = append(oneNetwork, client)
	}
	sessionPaths := []string{"/auth/session", "/hubs"}
	email := hubstest.NewEmail()
	for _, q := range []limitedRequests{
		{
			name:    "by client address",
			route:   "GET /hubs",
			clients: []*hubstest.Client{c.clientFrom(s, newAddress())},
			paths:   sessionPaths,
		},
		{
			name:    "by IPv6 network",
			route:   "GET /hubs",
			clients: oneNetwork,
			paths:   sessionPaths,
		},
		{
			name:    "by e-mail address",
			route:   "POST /auth/otp/validate",
			clients: []*hubstest.Client{c.client(s)},
			paths:   []string{"/auth/otp/validate", "/auth/%6ftp/validate"},
			body:    `{"code":"000000","email":"` + email + `"}`,
		},
	} {
		limit := hubstest.LimitOf(t, q.route).Requests
		const more = 8 // requests over the limit
		passed, refused := q.send(limit + more)
		if passed != limit || refused != more {
			t.Errorf("%s: got a 429 after %d requests, %d in all, want one after %d, %d in all",
				q.name, passed, refused, limit, more)
		}
	}
}

// limitedRequests are requests that one limit counts together.
type limitedRequests struct {
	name    string             // how the limit counts
	route   string             // the limit is the one of this route
	clients []*hubstest.Client // taken in turn
	paths   []string           // two, taken in turn
	body    any
}

// send sends n requests, one after the other. It returns how many passed before the first 429, and
// how many got a 429.
func (q limitedRequests) send(n int) (passed, refused int) {
	method, _, _ := strings.Cut(q.route, " ")
	for i := range n {
		r := q.clients[i%len(q.clients)].Do(method+" "+q.paths[i%2], q.body)
		if r.Status == 429 {
			refused++
		} else if refused == 0 {
			passed++
		}
	}
	return passed, refused
}

// dialFromNetwork connects to HAProxy as a new client. Each call takes a new address of the same
// /64, and gives it to HAProxy by the PROXY protocol.
func (c *cluster) dialFromNetwork(context.Context, string, string) (net.Conn, error) {
	conn, err := net.Dial("tcp", c.proxyProtocolAddr)
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
		wantTargets(t, c.frontProxy, c.addressElsewhere(t), c.servers)
	})
	t.Run("nginx", func(t *testing.T) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxy(t, "nginx", s.Addr)
		wantTargets(t, p, newAddress(), []*hubstest.Server{s})
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

// wantTargets sends each target in four requests: by HTTP/1.0 and 1.1, with and without Host. It
// requires that a target without a path reaches no server, that a request which reaches no server
// gets a 400, and that the first server gets sign-in requests and the others get none.
func wantTargets(t *testing.T, p *frontProxy, address string, servers []*hubstest.Server) {
	for target := range strings.FieldsSeq(targets) {
		hasPath := strings.HasPrefix(target, "/") || strings.Contains(target, "://")
		for _, rest := range []string{
			" HTTP/1.0\r\n",
			" HTTP/1.1\r\n",
			" HTTP/1.0\r\nHost: api.example.com\r\n",
			" HTTP/1.1\r\nHost: api.example.com\r\n",
		} {
			answer := p.raw(address, "POST "+target+rest+emptyObject)
			reached := strings.Contains(strings.ToLower(answer), "\nx-request-id:")
			switch {
			case reached && !hasPath:
				t.Errorf("POST %s%q: got a server's answer, want a 400 of the proxy", target, rest)
			case !reached && !strings.HasPrefix(answer, "HTTP/1.1 400 "):
				t.Errorf("POST %s%q: got %.100q, want a 400 or the answer of a server",
					target, rest, answer)
			}
		}
	}
	for i, s := range servers {
		s.Stop(t) // it logs its last request only after the answer
		got := s.Log.Count(`"route":"/auth/otp/validate"`, `"status":400`)
		if (got > 0) != (i == 0) {
			t.Errorf("server %d: got %d sign-in requests, want them at server 1 only", i+1, got)
		}
	}
}

// traffic is what a user sends through HAProxy while servers stop and start: one request after the
// other, each from a new address, so that every server gets some.
type traffic struct {
	t      *testing.T
	client *hubstest.Client
	stop   atomic.Bool
	work   sync.WaitGroup
	rounds atomic.Int64 // requests that have ended
	failed atomic.Int64 // requests that got 502, 503 or no answer
}

func startTraffic(t *testing.T, c *cluster) *traffic {
	t.Helper()
	u := &traffic{t: t, client: c.member(c.servers[0], "member")}
	u.work.Go(func() {
		for !u.stop.Load() {
			u.round()
		}
	})
	t.Cleanup(u.end)
	return u
}

// round stores a file.
func (u *traffic) round() {
	form, contentType := hubstest.Form("a.txt", []byte("a"))
	r, err := u.client.Try("POST /files/upload", form, "Content-Type", contentType)
	switch {
	case err != nil || r.Status == 502 || r.Status == 503:
		u.failed.Add(1)
	case r.Status != 201:
		u.t.Errorf("the traffic: got %v, want 201, 502 or 503", r)
	}
	u.rounds.Add(1)
}

// waitMore waits until ten more rounds have ended.
func (u *traffic) waitMore() {
	u.t.Helper()
	goal := u.rounds.Load() + 10
	hubstest.WaitUntil(u.t, "ten more rounds have ended", func() bool {
		return u.rounds.Load() >= goal
	})
}

// end stops the traffic after its current round. It may be called again.
func (u *traffic) end() {
	u.stop.Store(true)
	u.work.Wait()
}

// No request fails while one server after the other restarts with a new signing key. The active
// server comes last: only it signs sessions, so all other servers know the new key before the first
// session is signed with it.
func testRollingRestart(t *testing.T, c *cluster, user *traffic) {
	keys := "new-secret-of-more-than-thirty-two-bytes," + c.servers[0].Env["SESSION_SECRET"]
	for _, i := range []int{2, 1, 0} {
		c.setState(t, i, "drain")
		// A request that HAProxy has just sent may wait in the kernel until the server accepts its
		// connection. It would be lost if the server stopped now. TestStopAnswersEveryRequest stops
		// a server with requests under way.
		c.waitStat(t, i, "scur", "0") // sessions under way
		s := c.servers[i]
		s.Stop(t)
		// The server ends with c.t, the test of the whole cluster. With t it would end before the
		// tests that follow.
		c.servers[i] = hubstest.Start(c.t, s.Env, map[string]string{
			"ADDR":           s.Addr,
			"SESSION_SECRET": keys,
		})
		c.setState(t, i, "ready")
		c.waitStat(t, i, "status", "UP")
		user.waitMore()
	}
	got := user.failed.Load()
	if got != 0 {
		t.Errorf("got %d failed requests during the rolling restart, want 0", got)
	}
}

// If the active server is killed, requests under way there may fail. Once HAProxy reports the
// server as down, no request may fail, and users can sign in again.
func testKill(t *testing.T, c *cluster, user *traffic) {
	c.servers[0].Signal(t, syscall.SIGKILL)
	c.servers[0].WaitExit(t)
	c.waitStat(t, 0, "status", "DOWN")
	user.end() // the current round may have begun before the server was down
	before := user.failed.Load()
	for range 5 {
		user.round()
	}
	got := user.failed.Load() - before
	if got != 0 {
		t.Errorf("got %d failed requests after the active server was reported as down, want 0", got)
	}
	c.member(c.servers[1], "member") // signs in at the next server, which is active now
	c.servers[1].Log.WaitFor(t, `"msg":"signed in"`)
}
