//go:build moving

package main

// What hostile texts in a request cost, by growth: fifteen times the text may cost some
// fifteen times the CPU, not two hundred times. The log is on, since it once was what made
// the cost grow with the square of the length.

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// hostileHeaders are repeated until they have the length that is asked for. Each of them once
// met, or might meet, an expression that looks for secrets.
var hostileHeaders = []string{
	"key\u0080", "key,123456,", "\xff", "a@a.", "code=", "://a:a@", "eyJa.", "0-0,", `"a",`, "127.0.0.1,", "a=a;", "a=a&",
}

// hostilePlaces are where a client can put a long text. {text} is the text, {session} a
// cookie of a session, {file} the path of a file.
var hostilePlaces = []struct{ name, line, header string }{
	{"path", "GET /hubs/{text}", ""},
	{"path with a session", "GET /hubs/{text}", "Cookie: {session}"},
	{"query", "GET /hubs?{text}", "Cookie: {session}"},
	{"name of a parameter", "GET /hubs?filters[{text}]=a", "Cookie: {session}"},
	{"name filter", "GET /hubs?filters[name]={text}", "Cookie: {session}"},
	{"User-Agent", "GET /auth/session", "Cookie: {session}\r\nUser-Agent: {text}"},
	{"Cookie", "GET /auth/session", "Cookie: {session}; {text}"},
	{"session cookie", "GET /auth/session", "Cookie: {session}.{text}"},
	{"Authorization", "GET /auth/session", "Authorization: {text}"},
	{"Origin", "GET /auth/session", "Origin: https://{text}"},
	{"Origin of a preflight", "OPTIONS /hubs", "Origin: https://{text}\r\nAccess-Control-Request-Method: POST"},
	{"Origin of a write", "POST /auth/logout", "Cookie: {session}\r\nOrigin: https://{text}"},
	{"Sec-Fetch-Site", "POST /auth/logout", "Cookie: {session}\r\nSec-Fetch-Site: {text}"},
	{"X-Forwarded-For", "GET /auth/session", "X-Forwarded-For: {text}"},
	{"Content-Type", "POST /auth/otp/request", "Content-Type: application/json; {text}"},
	{"Content-Type of a form", "POST /files/upload", "Cookie: {session}\r\nContent-Type: multipart/form-data; boundary=a; {text}"},
	{"X-Request-Id", "GET /auth/session", "X-Request-Id: {text}"},
	{"Range", "GET {file}", "Cookie: {session}\r\nRange: bytes={text}"},
	{"If-None-Match", "GET {file}", "Cookie: {session}\r\nIf-None-Match: {text}"},
	{"If-Match", "GET {file}", "Cookie: {session}\r\nIf-Match: {text}"},
	{"If-Range", "GET {file}", "Cookie: {session}\r\nRange: bytes=0-0\r\nIf-Range: {text}"},
	{"If-Modified-Since", "GET {file}", "Cookie: {session}\r\nIf-Modified-Since: {text}"},
}

// The method takes letters and digits only: net/http refuses all else before any handler.
const hostileMethod = "KEY123456"

const (
	shortHostile = 1000
	longHostile  = 15_000 // with the other headers just below 16 KiB
)

// hostileRequest is a request with a text of that size at one place.
func hostileRequest(line, header, text string, size int, session, file string) string {
	text = strings.Repeat(text, size/len(text))
	fill := strings.NewReplacer("{text}", text, "{session}", session, "{file}", file)
	if header != "" {
		header += "\r\n"
	}
	return fill.Replace(line) + " HTTP/1.1\r\nHost: api.staging.example.com\r\n" + fill.Replace(header)
}

// TestHostileTextsCostByTheirLength is not parallel: it reads the CPU time of the process.
func TestHostileTextsCostByTheirLength(t *testing.T) {
	srv := startServer(t, stagingEnv(newMailServer(t, mailOptions{})))
	client, _ := srv.member(t, roleMember)
	file := client.upload("a.txt", []byte("some text")).want(t, 201).field(t, "path").(string)
	session := srv.cookieName() + "=" + client.token()
	raw := &hostileClient{t: t, addr: srv.addr}
	defer raw.close()
	compare := func(name, line, header, text string) {
		short := raw.cost(hostileRequest(line, header, text, shortHostile, session, file))
		long := raw.cost(hostileRequest(line, header, text, longHostile, session, file))
		const most = 40 // measured: at most 20
		if long > most*short {
			t.Errorf("%q at %s: %v of CPU for %d bytes, %v for %d: more than %d times",
				text, name, long, longHostile, short, shortHostile, most)
		}
	}
	for _, place := range hostilePlaces {
		for _, text := range hostileHeaders {
			compare(place.name, place.line, place.header, text)
		}
	}
	compare("method", "{text} /hubs", "", hostileMethod)

	const longestLine = 2048
	for _, line := range srv.log.all() {
		if len(line) > longestLine {
			t.Fatalf("a line of the log has %d bytes, more than %d: %.500q", len(line), longestLine, line)
		}
	}
}

// BenchmarkHostileTexts tells the CPU of each, with the time that passes beside it.
func BenchmarkHostileTexts(b *testing.B) {
	srv := startServer(b, stagingEnv(newMailServer(b, mailOptions{})))
	client, _ := srv.member(b, roleMember)
	file := client.upload("a.txt", []byte("some text")).want(b, 201).field(b, "path").(string)
	session := srv.cookieName() + "=" + client.token()
	raw := &hostileClient{t: b, addr: srv.addr}
	defer raw.close()
	for _, place := range hostilePlaces {
		for _, text := range hostileHeaders {
			for _, size := range []int{shortHostile, longHostile} {
				request := hostileRequest(place.line, place.header, text, size, session, file)
				b.Run(fmt.Sprintf("%s/%q/%d", place.name, text, size), func(b *testing.B) {
					started := processCPU(b)
					for b.Loop() {
						raw.send(request)
					}
					b.ReportMetric(float64(processCPU(b)-started)/float64(b.N), "cpu-ns/op")
				})
			}
		}
	}
}

// A hostileClient writes requests as they are, on one connection as long as the server keeps it.
// Each comes from a client address of its own.
type hostileClient struct {
	t      testing.TB
	addr   string
	conn   net.Conn
	reader *bufio.Reader
}

func (c *hostileClient) close() {
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

// send sends a request, given without the empty line that ends its headers, and returns the
// status of the answer.
func (c *hostileClient) send(request string) int {
	c.t.Helper()
	n := serial.Add(1)
	return c.exchange(request + fmt.Sprintf("X-Forwarded-For: 10.%d.%d.%d\r\n\r\n", n>>16&255, n>>8&255, n&255))
}

// exchange sends bytes and reads an answer.
func (c *hostileClient) exchange(request string) int {
	c.t.Helper()
	if c.conn == nil {
		conn, err := net.Dial("tcp", c.addr)
		if err != nil {
			c.t.Fatal(err)
		}
		c.conn, c.reader = conn, bufio.NewReader(conn)
	}
	c.conn.SetDeadline(time.Now().Add(4 * patience))
	if _, err := io.WriteString(c.conn, request); err != nil {
		c.t.Fatalf("%.80q: %v", request, err)
	}
	method, _, _ := strings.Cut(request, " ")
	answer, err := http.ReadResponse(c.reader, &http.Request{Method: method})
	if err != nil {
		c.t.Fatalf("%.80q: %v", request, err)
	}
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		c.t.Fatalf("%.80q: %v", request, err)
	}
	if answer.StatusCode == http.StatusRequestHeaderFieldsTooLarge {
		c.t.Fatalf("%.80q: the headers are too large to get to the handler", request)
	}
	if answer.Close {
		c.close()
	}
	return answer.StatusCode
}

// cost is the CPU time of a request in this process, server and client: the least of a few
// rounds, since other things go on in the process now and then.
func (c *hostileClient) cost(request string) time.Duration {
	c.t.Helper()
	const rounds, most = 3, 500 * time.Millisecond
	var costs []time.Duration
	c.send(request)
	for started := processCPU(c.t); len(costs) < rounds && processCPU(c.t)-started < most; {
		const requests = 3
		before := processCPU(c.t)
		for range requests {
			c.send(request)
		}
		costs = append(costs, (processCPU(c.t)-before)/requests)
	}
	return slices.Min(costs)
}

// processCPU is what this process has used so far.
func processCPU(t testing.TB) time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
