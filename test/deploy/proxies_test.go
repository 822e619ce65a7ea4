package deploy

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// Behind each proxy, a server with the settings of production.env signs users in and takes uploads,
// which the proxy streams. The server's limits come before those of the proxy. While the server is
// down, clients get a 503 in the server's format.
func TestProductionBehindTLSProxy(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		env := productionEnv(t)
		env["MAX_UPLOAD_BYTES"] = fmt.Sprint(uploadLimit)
		s := hubstest.Start(t, env)
		p := startProxy(t, engine, s.Addr)
		c := p.member(s, "member")
		// StartUpload returns when the server has begun to write the file, and Finish sends the
		// rest. So this fails if the proxy does not stream uploads.
		upload := c.StartUpload("a.txt")
		r := upload.Finish().Must(t, 201)
		c.WantFile(r.Header.Get("Location"), upload.Content)
		// The server refuses a body before it reaches a limit of the proxy.
		r = c.Upload("a.bin", make([]byte, uploadLimit+1))
		r.WantProblem(t, 413, "too_large")
		r = c.Do("POST /auth/otp/request", strings.Repeat("x", 20<<10))
		r.WantProblem(t, 413, "too_large")
		// Only the server knows how large a file may be: the longest upload, too, reaches it.
		conn := p.mustDial(newAddress())
		defer conn.Close()
		io.WriteString(conn, "POST /files/upload HTTP/1.1\r\nHost: api.example.com\r\n"+
			"Content-Length: 1099511627776\r\n\r\n")
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || answer.Header.Get("X-Request-Id") == "" {
			t.Errorf("1 TiB: got the error %v and %v, want an answer of the server", err, answer)
		}
		c.Get("/openapi.json", "X-Padding", strings.Repeat("x", 15<<10)).Want(t, 200)
		// The server compares Origin with Host, so the proxy must not change Host.
		c.Do("POST /auth/logout", nil, "Origin", s.Base).Want(t, 204)
		conn = p.mustDial(newAddress())
		defer conn.Close()
		io.WriteString(conn, "POST /auth/logout HTTP/1.1\r\nHost: api.example.com:8443\r\n"+
			"Origin: https://api.example.com:8443\r\nContent-Length: 0\r\n\r\n")
		answer, err = http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || answer.StatusCode != 401 {
			t.Errorf("a write from the server's own page, on another port: got the error %v and %v, want a 401", err, answer)
		}

		t.Run("server away", func(t *testing.T) {
			s.Stop(t)
			r, err := c.Try("GET /hubs", nil)
			if err != nil || r.Status != 503 || r.Code() != "unavailable" {
				t.Errorf("got the error %v and %v, want 503 unavailable", err, r)
			}
			if r.Header.Get("Retry-After") == "" {
				t.Errorf("got %v, want a Retry-After", r)
			}
		})
	})
}

// uploadLimit is in bytes, and more than nginx lets pass by default.
const uploadLimit = 2 << 20

const (
	privatePath = "/files/jane.roe@mailbox.example/482913/eyJhbGciOiJIUzI1NiJ9" +
		"?email=jane.roe%40mailbox.example&code=482913"
	privateHeaders = "Host: 482913.mailbox.example\r\n" +
		"Referer: https://mailbox.example/482913\r\n" +
		"User-Agent: jane.roe 482913\r\n" +
		"Connection: close\r\n" +
		"Cookie: __Secure-hubs_auth_production=eyJhbGciOiJIUzI1NiJ9.e30.x; " +
		"x482913=jane.roe\r\n"
	privateBody = `{"email":"jane.roe@mailbox.example","code":"482913"}`
)

// privateRequests have private data in every place of a request that a client fills. Most break
// HTTP: a method, a version, a header, a length or a target.
var privateRequests = []string{
	"POST " + privatePath + " HTTP/1.1\r\n" + privateHeaders +
		"Content-Length: " + fmt.Sprint(len(privateBody)) + "\r\n\r\n" + privateBody,
	"GET " + privatePath + " HTTP/1.1\r\n" + privateHeaders + "\r\n",
	"M482913 " + privatePath + " HTTP/1.1\r\n" + privateHeaders + "\r\n",
	"GETJANE_ROE / HTTP/1.1\r\n" + privateHeaders + "Content-Length: 0\r\n\r\n",
	"JANE_ROE-GET / HTTP/1.1\r\n" + privateHeaders + "Content-Length: 0\r\n\r\n",
	"GET " + privatePath + " HTTP/1.482913\r\n" + privateHeaders + "\r\n",
	"GET " + privatePath + " HTTP/1.1\r\n" + privateHeaders + "482913 jane.roe@mailbox.example\r\n\r\n",
	"482913 jane.roe@mailbox.example eyJhbGciOiJIUzI1NiJ9\r\n\r\n",
	"GET " + privatePath + " HTTP/1.1\r\n" + privateHeaders +
		"X: " + strings.Repeat("482913", 12000) + "\r\n\r\n",
	"POST " + privatePath + " HTTP/1.1\r\n" + privateHeaders +
		"Content-Length: 0\r\nContent-Length: 482913\r\n\r\n",
	"GET x:" + privatePath + " HTTP/1.0\r\n\r\n",
}

// private matches a part of the private data.
var private = regexp.MustCompile(`(?i)jane|roe|mailbox|482913|eyJ`)

// G5: no log of a proxy has private data from a request, whatever fails. By default, nginx would
// quote the request in each message about an error.
func TestProxyLogs(t *testing.T) {
	closes := func(*http.Request) string { return "" }
	breaks := func(*http.Request) string {
		return "HTTP/1.1 200 OK\r\n482913 jane.roe@mailbox.example\r\n\r\n"
	}
	servers := map[string]string{
		"down":        "127.0.0.1:1",
		"unreachable": "[fe80::1]:9", // EINVAL: the address names no interface
		"silent":      newRecorder(t, closes).addr,
		"broken":      newRecorder(t, breaks).addr,
	}
	forEachProxy(t, func(t *testing.T, engine string) {
		for name, server := range servers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				p := startProxy(t, engine, server)
				sendPrivateRequests(t, p)
				for _, line := range p.logged() {
					if private.MatchString(line) {
						t.Errorf("got the log line %s, want none with private data", line)
					}
				}
			})
		}
	})
}

// sendPrivateRequests sends all privateRequests, and a request by HTTP/2. It returns when the proxy
// has logged each of them.
func sendPrivateRequests(t *testing.T, p *frontProxy) {
	t.Helper()
	for _, request := range privateRequests {
		address := newAddress()
		p.raw(address, request)
		p.waitLine(address)
	}
	// With HTTP/2, nginx builds a request line of its own, which could be in a log.
	address := newAddress()
	c := p.clientFrom(publicServer, address)
	r, err := c.Try("POST /jane.roe@mailbox.example", "{}", "Cookie", "x=482913")
	if err != nil || r.Status < 500 {
		t.Errorf("HTTP/2: got the error %v and %v, want a status of 500 or more", err, r)
	}
	p.waitLine(address)
}

// logged returns all lines that the proxy has logged so far.
func (p *frontProxy) logged() []string {
	faults, _ := os.ReadFile(p.dir + "/faults.log") // nginx only
	return append(p.log.All(), strings.Split(string(faults), "\n")...)
}

// waitLine waits for the log line of a request from the address.
func (p *frontProxy) waitLine(address string) {
	p.t.Helper()
	hubstest.WaitUntil(p.t, "the log has a line of "+address, func() bool {
		return strings.Contains(strings.Join(p.logged(), "\n"), address+":")
	})
}

// A proxy sends each request to a server once, because a server that dies after it has taken a
// request may have carried it out. The proxy does not send the request again, and does not make the
// client send it again. It opens a new connection for each request, because the server may be
// closing a connection that was idle.
func TestProxySendsOnce(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		backend := newRecorder(t, func(r *http.Request) string {
			if strings.Contains(r.URL.Path, "/dies/") {
				return ""
			}
			return emptyAnswer
		})
		p := startProxy(t, engine, backend.addr)

		for _, c := range []*hubstest.Client{
			p.client(publicServer),
			p.clientFrom(publicServer, newAddress()),
		} {
			c.HTTP.Transport.(*http.Transport).DisableKeepAlives = false
			for range 3 {
				lives, _ := c.Try("POST /lives", "{}")
				lives.Want(t, 200)
				for _, folder := range []string{"/dies/", "/auth/otp/dies/"} { // for both backends of HAProxy
					path := folder + hubstest.NewUUID()
					r, err := c.Try("POST "+path, "{}")
					if err != nil || r.Status != 502 && r.Status != 503 || r.Code() != "unavailable" {
						t.Errorf("POST %s: got the error %v and %v, want 502 or 503 unavailable",
							path, err, r)
					}
					got := backend.seen("POST " + path + " ")
					if len(got) != 1 {
						t.Errorf("%s: got %d requests at the server, want 1", path, len(got))
					}
				}
			}
		}

		if backend.reused > 0 {
			t.Errorf("got %d requests on a connection that was used before, want 0", backend.reused)
		}
	})
}

// H5: a client that neither sends nor takes a byte is cut off after 60 s. The test shortens this
// time.
func TestSilentClientsAreCutOff(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		backend := newRecorder(t, func(r *http.Request) string {
			if r.Method == "POST" {
				return emptyAnswer // after the whole body
			}
			const size = 32 << 20 // more than all buffers on the way hold
			head := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", size)
			return head + strings.Repeat("x", size)
		})
		p := startProxyWith(t, engine, []string{"60s", "2s"}, backend.addr)

		unread := "GET /files/unread HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
		stalled := "POST /files/upload HTTP/1.1\r\nHost: api.example.com\r\n" +
			"Content-Length: 9\r\n\r\nhalf"
		for _, request := range []string{unread, stalled} {
			conn := p.mustDial(newAddress())
			defer conn.NetConn().Close()
			io.WriteString(conn, request)
		}
		overHTTP2 := p.clientFrom(publicServer, newAddress())
		answer, err := overHTTP2.HTTP.Get(publicServer.Base + "/files/unread")
		hubstest.Must(t, err)
		defer answer.Body.Close()

		hubstest.WaitFor(t, "requests at the server", 3, func() int { return len(backend.seen("")) })
		hubstest.WaitFor(t, "connections to the server", 0, backend.open.Load)
	})
}

// signIn is the head of a request, without a length and the empty line at its end.
const signIn = "POST /auth/otp/validate HTTP/1.1\r\nHost: api.example.com\r\n" +
	"Content-Type: application/json\r\nConnection: close\r\n"

// H8: an address may have 200 requests under way, and each further request gets a 429.
func TestRequestsOfOneAddressAreBounded(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		const bound, more = 200, 50 // requests that may be under way, and requests over that
		backend := newRecorder(t, func(*http.Request) string {
			<-t.Context().Done() // keeps the request under way
			return ""
		})
		p := startProxy(t, engine, backend.addr)
		whole := p.flood(newAddress(), bound+more, signIn+"Content-Length: 2\r\n\r\n{}")
		hubstest.WaitFor(t, "requests that are at the server or refused", bound+more, func() int {
			return len(backend.seen("POST ")) + int(whole.refused.Load())
		})
		got := whole.refused.Load()
		if got != more {
			t.Errorf("got %d requests with a 429, want %d", got, more)
		}
		// A request is under way before its body is whole.
		half := p.flood(newAddress(), bound+more, signIn+"Content-Length: 2\r\n\r\n{")
		hubstest.WaitFor(t, "requests with half a body and a 429", more, func() int {
			return int(half.refused.Load())
		})
	})
}

// H8: The bound holds for all addresses of an IPv6 network together, and not for those of another.
func TestRequestsOfANetworkAreBounded(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		const bound, more = 200, 50
		backend := newRecorder(t, func(*http.Request) string {
			<-t.Context().Done()
			return ""
		})
		behindEdge := map[string][]string{"nginx": {
			"#set_real_ip_from 192.0.2.0/24", "set_real_ip_from 127.0.0.0/8",
			"#real_ip_header", "real_ip_header",
		}}
		p := startProxyWith(t, engine, behindEdge[engine], backend.addr)
		// HAProxy gets the client's address by the PROXY protocol, nginx in a header.
		from := func(network string) func() (*tls.Conn, error) {
			return func() (*tls.Conn, error) {
				address := fmt.Sprintf("2001:db8:1:%s::%x", network, serial.Add(1))
				if engine == "nginx" {
					conn, err := p.dial(newAddress())
					if err == nil {
						_, err = io.WriteString(conn, signIn+"X-Forwarded-For: "+address+"\r\n")
					}
					return conn, err
				}
				plain, err := net.Dial("tcp", p.proxyProtocolAddr)
				if err != nil {
					return nil, err
				}
				fmt.Fprintf(plain, "PROXY TCP6 %s 2001:db8::1 1024 443\r\n", address)
				conn := tls.Client(plain, &tls.Config{InsecureSkipVerify: true})
				_, err = io.WriteString(conn, signIn)
				return conn, err
			}
		}
		one := p.floodBy(from("1"), bound+more, "Content-Length: 2\r\n\r\n{}")
		other := p.floodBy(from("2"), more, "Content-Length: 2\r\n\r\n{}")
		hubstest.WaitFor(t, "requests that are at the server or refused", bound+2*more, func() int {
			return len(backend.seen("POST ")) + int(one.refused.Load()+other.refused.Load())
		})
		hubstest.WantEqual(t, "requests of a network with a 429", int(one.refused.Load()), more)
		hubstest.WantEqual(t, "requests of another one with a 429", int(other.refused.Load()), 0)
	})
}

// H8: one address that opens thousands of connections, with half a head or half a body, keeps no
// other client out. HAProxy keeps them all from the server, nginx those with half a head.
func TestOneAddressKeepsNobodyOut(t *testing.T) {
	var files syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files)
	if err != nil || files.Cur < 16384 {
		hubstest.Skip(t, "this test needs 16,384 file descriptors: raise ulimit -n")
	}
	// 16 KiB is the largest body that the server takes. The last byte is missing.
	almost := signIn + "Content-Length: 16384\r\n\r\n" + strings.Repeat("x", 16383)
	forEachProxy(t, func(t *testing.T, engine string) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxy(t, engine, s.Addr)
		address := newAddress()

		for _, sent := range []string{signIn, almost} {
			f := p.flood(address, 3000, sent)
			opened := f.opened.Load()
			if opened < 400 || engine == "haproxy" && opened > 450 { // 400, and some that it just refuses
				t.Errorf("got %d connections of the flood open, want some 400, or more with nginx", opened)
			}
			for range 10 {
				r := p.client(s).Do("POST /auth/otp/validate", "{}")
				if r.Status != 400 || r.Code() != "invalid_request" {
					t.Errorf("another client, with %.9q… on 3,000 connections: "+
						"got %v, want 400 invalid_request", sent, r)
				}
			}
			f.close()
			hubstest.WaitFor(t, "connections to the server", 0, func() int { return connectionsTo(t, s) })
		}

		s.Stop(t) // it logs a request only after its connection has ended
		got := s.Log.Count(`"client":"` + address + `"`)
		if engine == "haproxy" && got > 0 {
			t.Errorf("got %d unfinished requests at the server, want 0", got)
		}
	})
}

// connectionsTo returns how many connections to a server neither side has closed.
func connectionsTo(t *testing.T, s *hubstest.Server) (open int) {
	t.Helper()
	server, err := netip.ParseAddrPort(s.Addr)
	hubstest.Must(t, err)
	table, err := os.ReadFile("/proc/net/tcp")
	hubstest.Must(t, err)
	ip := server.Addr().As4()
	local := fmt.Sprintf("%02X%02X%02X%02X:%04X", ip[3], ip[2], ip[1], ip[0], server.Port())
	states := map[string]int{}
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line) // number, local address, remote address, state and more
		if fields[1] == local {
			states[fields[3]]++
		}
	}
	const listens, isOpen = "0A", "01"
	if states[listens] == 0 {
		t.Fatalf("setup: /proc/net/tcp has no socket that listens at %s", s.Addr)
	}
	return states[isOpen]
}

// A flood is many connections from one address.
type flood struct {
	close   context.CancelFunc // closes the connections
	opened  atomic.Int64       // connections that the proxy has accepted
	refused atomic.Int64       // connections with a 429
}

// flood opens connections from an address and sends the same text on each. They close when the test
// ends, if not before.
func (p *frontProxy) flood(address string, connections int, text string) *flood {
	return p.floodBy(func() (*tls.Conn, error) { return p.dial(address) }, connections, text)
}

func (p *frontProxy) floodBy(dial func() (*tls.Conn, error), connections int, text string) *flood {
	ctx, cancel := context.WithCancel(p.t.Context())
	f := &flood{close: cancel}
	var opening sync.WaitGroup
	const workers = 10
	for range workers {
		opening.Go(func() {
			for range connections / workers {
				conn, err := dial()
				if err != nil { // the proxy has refused the connection
					continue
				}
				f.opened.Add(1)
				context.AfterFunc(ctx, func() {
					// The Close of TLS would send an alert, and could wait for a reader.
					conn.NetConn().Close()
				})
				io.WriteString(conn, text)
				go f.read(conn)
			}
		})
	}
	opening.Wait()
	return f
}

// read counts the connection if its answer is a 429.
func (f *flood) read(conn *tls.Conn) {
	status := make([]byte, 12)
	io.ReadFull(conn, status)
	if string(status) == "HTTP/1.1 429" {
		f.refused.Add(1)
	}
}

// H8: a client that sends a JSON body byte by byte is cut off. Each byte would start the time of a
// proxy that counts silence anew.
func TestDrippingBodyEnds(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxy(t, engine, s.Addr)
		conn := p.mustDial(newAddress())
		defer conn.Close()
		ended := make(chan string, 1)
		go func() {
			answer, _ := io.ReadAll(conn)
			ended <- string(answer)
		}()
		io.WriteString(conn, signIn+"Content-Length: 16384\r\n\r\n")
		for start := time.Now(); ; time.Sleep(200 * time.Millisecond) {
			io.WriteString(conn, "x") // fails when the proxy has closed the connection
			select {
			case answer := <-ended:
				if !strings.HasPrefix(answer, "HTTP/1.1 4") {
					t.Errorf("got %.100q, want a status of 400 or more", answer)
				}
				return
			default:
			}
			if time.Since(start) > hubstest.Patience {
				t.Fatalf("the connection is open after %v, want it closed", hubstest.Patience)
			}
		}
	})
}

// H9: a program on HAProxy's machine that calls the API uses up the limit of its address. The health
// checks come from the same address, and do not share the limit.
func TestHealthChecksShareNoLimit(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, productionEnv(t))
	p := startProxy(t, "haproxy", s.Addr)
	program := p.clientFrom(s, "127.0.0.1")
	visit := func() *hubstest.Response { return program.Get("/hubs") }
	limit := hubstest.LimitOf(t, "GET /hubs").Requests
	hubstest.WaitUntil(t, "the limit is used up", func() bool { return inParallel(limit+20, visit)[429] > 0 })
	// A check comes every second, and two that fail take a server out. The time in between can only
	// be waited for.
	statuses := map[int]int{}
	for start := time.Now(); time.Since(start) < 3*time.Second; time.Sleep(10 * time.Millisecond) {
		statuses[visit().Status]++
	}
	hubstest.WantEqual(t, "requests while no server is up", statuses[503], 0)
	got := s.Log.Count(`"route":"/healthz"`)
	hubstest.WantEqual(t, "health checks that failed", got, 0)
}

// inParallel sends as many requests, and returns how many answers have each status.
func inParallel(requests int, send func() *hubstest.Response) map[int]int {
	statuses := make(chan int, requests)
	for range requests {
		go func() { statuses <- send().Status }()
	}
	counts := map[int]int{}
	for range requests {
		counts[<-statuses]++
	}
	return counts
}

// L2: behind a CDN, each visitor has a limit of their own. Who goes around the CDN does not choose
// an address by X-Forwarded-For.
func TestVisitorsOfAnEdgeHaveLimitsOfTheirOwn(t *testing.T) {
	const edgeAddress = "127.99.0.1"
	behindEdge := map[string][]string{
		"haproxy": {"#acl edge src 192.0.2.0/24", "acl edge src " + edgeAddress},
		"nginx": {
			"#set_real_ip_from 192.0.2.0/24", "set_real_ip_from " + edgeAddress,
			"#real_ip_header", "real_ip_header",
			"#real_ip_recursive", "real_ip_recursive",
		},
	}
	forEachProxy(t, func(t *testing.T, engine string) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxyWith(t, engine, behindEdge[engine], s.Addr)
		origin := &url.URL{Scheme: "https", Host: "api.example.com"}
		edge := httptest.NewTLSServer(&httputil.ReverseProxy{
			Rewrite: func(r *httputil.ProxyRequest) {
				r.Out.Header["X-Forwarded-For"] = r.In.Header["X-Forwarded-For"]
				r.SetXForwarded() // adds the visitor's address
				r.SetURL(origin)
			},
			Transport: p.clientFrom(s, edgeAddress).HTTP.Transport,
		})
		t.Cleanup(edge.Close)
		visit := func(address string) *hubstest.Response {
			c := p.clientFrom(s, "")
			c.HTTP.Transport = &http.Transport{
				TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
				DialContext: func(context.Context, string, string) (net.Conn, error) {
					return dialer(address).Dial("tcp", edge.Listener.Addr().String())
				},
			}
			return c.Get("/hubs", "X-Forwarded-For", "198.51.100.1")
		}

		limit := hubstest.LimitOf(t, "GET /hubs").Requests
		var visitors []string
		for range 8 {
			visitors = append(visitors, newAddress())
		}
		refusals := 0
		for range limit / 4 {
			for _, address := range visitors { // together twice the limit
				if visit(address).Status == 429 {
					refusals++
				}
			}
		}
		hubstest.WantEqual(t, "requests with a 429, of visitors below their limits", refusals, 0)
		refused := func() bool {
			return inParallel(limit, func() *hubstest.Response { return visit(visitors[0]) })[429] > 0
		}
		hubstest.WaitUntil(t, "a visitor has reached the limit", refused)
		visit(visitors[1]).Want(t, 401)

		direct := newAddress()
		p.raw(direct, "GET /hubs HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n"+
			"X-Forwarded-For: 198.51.100.2\r\n\r\n")
		s.Log.WaitFor(t, `"msg":"request"`, `"client":"`+direct+`"`)
		got := s.Log.Count(`"client":"198.51.100.`)
		hubstest.WantEqual(t, "requests from addresses that a client chose", got, 0)
	})
}

// L2: nginx counts an IPv6 client by its /64, whatever bytes its address has. Its pattern matches
// bytes, among them those of a line break.
func TestEveryByteOfAnAddress(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, productionEnv(t))
	p := startProxyWith(t, "nginx", []string{
		"#set_real_ip_from 192.0.2.0/24", "set_real_ip_from 127.0.0.0/8",
		"#real_ip_header", "real_ip_header",
		"rate=1200r/s", "rate=1r/m", // so the second request of a client is a 429
		"limit_req zone=rates burst=1200 nodelay", "limit_req zone=rates",
	}, s.Addr)
	c := p.clientFrom(s, newAddress())
	random := rand.New(rand.NewPCG(1, 2))
	for _, place := range []int{0, 1, 7, 8, 15} {
		for value := range 256 {
			var one, other [16]byte // of one network
			binary.BigEndian.PutUint64(one[:], random.Uint64())
			binary.BigEndian.PutUint64(one[8:], random.Uint64())
			one[0] = 0x20 // or it could be an IPv4 address
			one[place] = byte(value)
			copy(other[:], one[:8])
			binary.BigEndian.PutUint64(other[8:], random.Uint64())
			if place == 0 && value == 0 {
				continue
			}
			for i, address := range [][16]byte{one, other} {
				r, err := c.Try("GET /auth/session", nil, "X-Forwarded-For", netip.AddrFrom16(address).String())
				hubstest.Must(t, err)
				if (r.Status == 429) != (i == 1) {
					t.Errorf("got %d for request %d of the /64 of %v, want a 429 for the second only",
						r.Status, i+1, netip.AddrFrom16(address))
				}
			}
		}
	}
}
