package deploy

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
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

// setState sets the state of a server, in both backends of HAProxy, as an operator does: "drain"
// before a restart, "ready" after it. server counts from 0.
func (c *cluster) setState(t *testing.T, server int, state string) {
	t.Helper()
	for _, backend := range []string{"active", "by_address"} {
		c.command(t, fmt.Sprintf("set server %s/s%d state %s", backend, server+1, state))
	}
}

// waitStatus waits until a server is "UP" or "DOWN" in both backends of HAProxy. server counts from 0.
func (c *cluster) waitStatus(t *testing.T, server int, status string) {
	t.Helper()
	const column = 17 // of HAProxy's statistics
	name := fmt.Sprintf(",s%d,", server+1)
	hubstest.WaitFor(t, "backends with "+name+status, 2, func() (backends int) {
		for line := range strings.Lines(c.command(t, "show stat")) {
			if strings.Contains(line, name) && strings.Split(line, ",")[column] == status {
				backends++
			}
		}
		return backends
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
		wantNoFailure(t, c)
	})
}

// Three servers together have the limits of one server, because HAProxy sends all requests that a
// limit counts together to the same server: those of an IPv6 network, and those with an e-mail
// address, however the path is written.
func wantLimits(t *testing.T, c *cluster) {
	const more = 8 // requests over the limit
	s := c.servers[0]

	// A limit forgets a request after its period. So the clients keep their connections: a TLS
	// handshake for each request could take that long on a busy machine. Each connection has a new
	// address of the same /64, which HAProxy gets by the PROXY protocol.
	dial := func(context.Context, string, string) (net.Conn, error) {
		conn, err := net.Dial("tcp", c.proxyProtocolAddr)
		if err == nil {
			host := serial.Add(1)
			_, err = fmt.Fprintf(conn, "PROXY TCP6 2001:db8:1:1::%x 2001:db8::1 1024 443\r\n", host)
		}
		return conn, err
	}
	var network []*hubstest.Client
	for range 7 { // HAProxy would hardly send so many addresses to the same server by chance
		client := c.clientFrom(s, "")
		client.HTTP.Transport.(*http.Transport).DialContext = dial
		network = append(network, client)
	}
	wantLimit(t, "GET /hubs", more, func(n int) *hubstest.Response {
		return network[n%len(network)].Get("/hubs")
	})

	email := hubstest.NewEmail()
	guest := c.client(s)
	wantLimit(t, "POST /auth/otp/validate", more, func(n int) *hubstest.Response {
		path := []string{"/auth/otp/validate", "/auth/%6ftp/validate"}[n%2]
		return guest.Do("POST "+path, `{"code":"000000","email":"`+email+`"}`)
	})
}

// wantLimit sends as many requests as the limit of the route permits, and more, which must get a
// 429. send sends the request number n.
func wantLimit(t *testing.T, route string, more int, send func(n int) *hubstest.Response) {
	t.Helper()
	limit := hubstest.LimitOf(t, route).Requests
	for n := range limit + more {
		r := send(n)
		if (r.Status == 429) != (n >= limit) {
			t.Errorf("%s: got %v for request %d, want %d without a 429", route, r, n+1, limit)
		}
	}
}

// P1: a request that a server takes as one to /auth/otp/* must have come to the active server,
// whatever its target, its Host and its version of HTTP.
func TestProxiesTakeThePathOfTheServer(t *testing.T) {
	t.Parallel()
	t.Run("haproxy", func(t *testing.T) {
		c := startCluster(t)
		wantTargets(t, c.frontProxy, c.servers)
	})
	t.Run("nginx", func(t *testing.T) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxy(t, "nginx", s.Addr)
		wantTargets(t, p, []*hubstest.Server{s})
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

// wantTargets sends each target in four requests, by HTTP/1.0 and 1.1, with and without Host, and each
// from another address: by its address alone, a request may come to any server. It requires that a target without a path reaches no server, that a request which reaches no server
// gets a 400, and that the first server gets sign-in requests and the others get none.
func wantTargets(t *testing.T, p *frontProxy, servers []*hubstest.Server) {
	for target := range strings.FieldsSeq(targets) {
		hasPath := strings.HasPrefix(target, "/") || strings.Contains(target, "://")
		for _, rest := range []string{
			" HTTP/1.0\r\n",
			" HTTP/1.1\r\n",
			" HTTP/1.0\r\nHost: api.example.com\r\n",
			" HTTP/1.1\r\nHost: api.example.com\r\n",
		} {
			answer := p.raw(newAddress(), "POST "+target+rest+emptyObject)
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

// No request fails while one server after the other restarts with a new signing key. The active
// server comes last: only it signs sessions, so all other servers know the new key before the first
// session is signed with it. Once HAProxy has noticed that the active server was killed, no request
// fails either, and the next server signs users in.
func wantNoFailure(t *testing.T, c *cluster) {
	user := c.member(c.servers[0], "member")
	wantStored := func(while string) {
		for range 10 { // each from a new address, so that every server gets some
			r := user.Upload("a.txt", []byte("a"))
			if r.Status != 201 {
				t.Errorf("%s: got %v, want 201", while, r)
			}
		}
	}
	keys := "new-secret-of-more-than-thirty-two-bytes," + c.servers[0].Env["SESSION_SECRET"]
	for _, i := range []int{2, 1, 0} {
		c.setState(t, i, "drain")
		c.servers[i].Stop(t)
		wantStored("a server restarts")
		// The server ends with c.t, the test of the whole cluster. With t it would end before the
		// tests that follow.
		c.servers[i] = hubstest.Start(c.t, c.servers[i].Env, map[string]string{
			"ADDR":           c.servers[i].Addr,
			"SESSION_SECRET": keys,
		})
		c.setState(t, i, "ready")
		c.waitStatus(t, i, "UP")
		wantStored("a server has restarted")
	}

	c.servers[0].Signal(t, syscall.SIGKILL)
	c.servers[0].WaitExit(t)
	c.waitStatus(t, 0, "DOWN")
	wantStored("the active server is down")
	c.member(c.servers[1], "member")
	c.servers[1].Log.WaitFor(t, `"msg":"signed in"`)
	user.Get("/auth/session").Want(t, 200)
}
