package deploy

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

func TestProductionBehindTLSProxy(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		env := productionEnv(t)
		env["MAX_UPLOAD_BYTES"] = fmt.Sprint(uploadLimit)
		s := hubstest.Start(t, env)
		p := startProxy(t, engine, s.Addr)
		c := p.member(s, "member")
		overHTTP2 := p.client(s, newAddress())
		overHTTP2.SetToken(c.Token())
		// The beginning of an upload is on the server's disk while the client has the end.
		for _, c := range []*hubstest.Client{c, overHTTP2} {
			upload := c.StartUpload("a.txt")
			r := upload.Finish().Want(t, 201)
			c.WantFile(r.Header.Get("Location"), upload.Content)
		}
		// The server's own refusals come first.
		large := make([]byte, uploadLimit+1)
		r := c.Upload("a.bin", large)
		hubstest.WantProblem(t, r, 413, "too_large")
		r = c.Do("POST", "/auth/otp/request", large[:20<<10])
		hubstest.WantProblem(t, r, 413, "too_large")
		// It compares Origin with Host, which is as the browser wrote it.
		c.Do("POST", "/auth/logout", nil, "Origin", s.Base).Want(t, 204)

		t.Run("server away", func(t *testing.T) {
			s.Stop(t)
			r, err := c.Try("GET", "/hubs", nil)
			if err != nil || r.Status != 503 || r.Code() != "unavailable" {
				t.Errorf("want a 503 unavailable: %v, %v", err, r)
			}
			if r.Header.Get("Retry-After") == "" {
				t.Errorf("no Retry-After in %v", r)
			}
		})
	})
}

// uploadLimit is more than nginx lets pass unless told otherwise.
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

// privateRequests have in each place of a request what a log must not show. The log has this
// status of each, a regular expression.
var privateRequests = map[string]string{
	// With a body.
	"POST <path> HTTP/1.1\r\n<headers>Content-Length: <length>\r\n\r\n<body>": "50[23]",
	// Without a body.
	"GET <path> HTTP/1.1\r\n<headers>\r\n": "50[23]",
	// A method that nobody has.
	"M482913 <path> HTTP/1.1\r\n<headers>\r\n": "400|50[23]",
	// A method that begins as one.
	"GETJANE_ROE / HTTP/1.1\r\n<headers>Content-Length: 0\r\n\r\n": "50[23]",
	// A method that ends as one.
	"JANE_ROE-GET / HTTP/1.1\r\n<headers>Content-Length: 0\r\n\r\n": "50[23]",
	// A version that nobody has.
	"GET <path> HTTP/1.482913\r\n<headers>\r\n": "400|505",
	// A header without a colon.
	"GET <path> HTTP/1.1\r\n<headers>482913 jane.roe@mailbox.example\r\n\r\n": "400|50[23]",
	// No request.
	"482913 jane.roe@mailbox.example eyJhbGciOiJIUzI1NiJ9\r\n\r\n": "400",
	// Too many headers.
	"GET <path> HTTP/1.1\r\n<headers>X: <482913*12000>\r\n\r\n": "4[0-9][0-9]",
	// Two lengths.
	"POST <path> HTTP/1.1\r\n<headers>Content-Length: 0\r\nContent-Length: 482913\r\n\r\n": "400",
	// A target without a path.
	"GET x:<path> HTTP/1.0\r\n\r\n": "400",
}

// G5: no log of a proxy holds anything that a client wrote, whatever fails. nginx would
// quote the request with each fault.
func TestProxyLogs(t *testing.T) {
	const broken = "HTTP/1.1 200 OK\r\n482913 jane.roe@mailbox.example\r\n\r\n"
	servers := map[string]string{
		"down":        "127.0.0.1:1",
		"unreachable": "[fe80::1]:9", // EINVAL, since no link is named
		"silent":      newRecorder(t, "").addr,
		"broken":      newRecorder(t, broken).addr,
	}
	forEachProxy(t, func(t *testing.T, engine string) {
		for name, server := range servers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				testLog(t, startProxy(t, engine, server))
			})
		}
	})
}

func testLog(t *testing.T, p *proxy) {
	for request, status := range privateRequests {
		request = hubstest.FillIn(request,
			"<path>", privatePath,
			"<headers>", privateHeaders,
			"<body>", privateBody,
			"<length>", fmt.Sprint(len(privateBody)))
		address := newAddress()
		p.raw(t, address, request)
		p.waitLine(t, address, status)
	}
	// With HTTP/2 nginx makes a request line.
	s := &hubstest.Server{Base: "https://api.example.com"}
	address := newAddress()
	c := p.client(s, address)
	r, err := c.Try("POST", "/jane.roe@mailbox.example", "{}", "Cookie", "x=482913")
	if err != nil || r.Status < 500 {
		t.Errorf("HTTP/2: %v %v", err, r)
	}
	p.waitLine(t, address, "50[23]")
	secret := regexp.MustCompile(`(?i)jane|roe|mailbox|482913|eyJ`)
	for _, line := range p.logged() {
		if secret.MatchString(line) {
			t.Errorf("in the log: %s", line)
		}
	}
}

// logged returns all that the proxy has logged so far.
func (p *proxy) logged() []string {
	faults, _ := os.ReadFile(p.dir + "/faults.log") // nginx only
	return append(p.log.All(), strings.Split(string(faults), "\n")...)
}

// waitLine waits for the line about a client's request that got the status.
func (p *proxy) waitLine(t *testing.T, address, status string) {
	line := regexp.MustCompile(regexp.QuoteMeta(address) + `:.*[ =](` + status + `) `)
	hubstest.WaitUntil(t, "the log says: "+line.String(), func() bool {
		return slices.ContainsFunc(p.logged(), line.MatchString)
	})
}

// A server that dies after it has taken a request may have done it. The proxy sends the
// request to no other server, and does not make the client send it again. Nor does it send
// one on a connection that the server might be closing just then, because it was idle.
func TestProxySendsOnce(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		backend := newRecorder(t, emptyAnswer)
		p := startProxy(t, engine, backend.addr)
		for _, address := range []string{"", newAddress()} { // HTTP/1.1, then HTTP/2
			c := p.client(backend.Server, address)
			c.HTTP.Transport.(*http.Transport).DisableKeepAlives = false
			for i := range 3 {
				r, err := c.Try("POST", "/lives", "{}")
				if err != nil || r.Status != 200 {
					t.Errorf("%v %v", err, r)
				}
				path := fmt.Sprintf("/dies/%s/%d", address, i)
				r, err = c.Try("POST", path, "{}")
				if err != nil || r.Status != 502 && r.Status != 503 {
					t.Errorf("want 502 or 503: %v %v", err, r)
				}
				got := backend.seen("POST " + path + " ")
				if len(got) != 1 {
					t.Errorf("%s reached the server %d times", path, len(got))
				}
			}
		}
		if backend.reused > 0 {
			t.Errorf("%d requests came on a connection that was used before", backend.reused)
		}
	})
}

// H8: one address opens thousands of connections, idle or with half a head or half a body,
// and keeps nobody out. Of its requests those over the bound get a clear refusal.
func TestOneAddressKeepsNobodyOut(t *testing.T) {
	var files syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files)
	if err != nil || files.Cur < 16384 {
		hubstest.Skip(t, "this test needs 16,384 descriptors: ulimit -n")
	}
	const head = "POST /auth/otp/validate HTTP/1.1\r\nHost: api.example.com\r\n" +
		"Content-Type: application/json\r\nConnection: close\r\n"
	const halfBody = head + "Content-Length: 2\r\n\r\n{"
	size := 16 << 10 // of the largest body that the server takes
	length := fmt.Sprintf("Content-Length: %d\r\n\r\n", size)
	almost := head + length + strings.Repeat("x", size-1)
	forEachProxy(t, func(t *testing.T, engine string) {
		s := hubstest.Start(t, productionEnv(t))
		between := hubstest.NewProxy(t, s.Addr)
		p := startProxy(t, engine, between.Addr)
		const bound, more = 100, 50 // requests under way
		few := p.flood(t, bound+more, halfBody)
		hubstest.WaitUntil(t, "the refusal of all requests over the bound", func() bool {
			return few.refused.Load() == more
		})
		few.close()
		for _, sent := range []string{"", head, almost} {
			f := p.flood(t, 5000, sent)
			for range 10 {
				answer := p.raw(t, newAddress(), head+"Content-Length: 2\r\n\r\n{}")
				isBad := strings.HasPrefix(answer, "HTTP/1.1 400 ")
				if !isBad || !strings.Contains(answer, "invalid_request") {
					t.Errorf("another client, with %.9q… on 5,000 connections: %.100q", sent, answer)
				}
			}
			// 200 at a time; some end by their limit of time meanwhile.
			if engine == "haproxy" && len(f.conns) > 1000 {
				t.Errorf("of 5,000 connections only %d were refused", 5000-len(f.conns))
			}
			f.close()
			hubstest.WaitUntil(t, "the server has answered all", func() bool {
				return between.Connections() == 0
			})
			got := s.Log.Count(`"client":"` + f.address + `"`)
			if got > 0 {
				t.Errorf("%d requests that were not whole reached the server", got)
			}
		}
	})
}

// A flood is a client's many connections.
type flood struct {
	address string
	mu      sync.Mutex
	conns   []*tls.Conn
	refused atomic.Int64 // with a 429
}

// flood opens connections from one address and sends the same text on each. Some may be
// refused.
func (p *proxy) flood(t *testing.T, connections int, text string) *flood {
	f := &flood{address: newAddress()}
	t.Cleanup(f.close)
	var opening sync.WaitGroup
	const workers = 10
	for range workers {
		opening.Go(func() {
			for range connections / workers {
				conn, err := p.dial(f.address)
				if err != nil {
					continue
				}
				f.mu.Lock()
				f.conns = append(f.conns, conn)
				f.mu.Unlock()
				io.WriteString(conn, text)
				go f.read(conn)
			}
		})
	}
	opening.Wait()
	return f
}

func (f *flood) read(conn *tls.Conn) {
	answer := make([]byte, len("HTTP/1.1 429"))
	io.ReadFull(conn, answer)
	if string(answer) == "HTTP/1.1 429" {
		f.refused.Add(1)
	}
}

func (f *flood) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, conn := range f.conns {
		conn.NetConn().Close() // no alert, which would wait for a reader
	}
}
