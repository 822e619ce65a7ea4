package hubstest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// A Conn keeps one connection to a server, and sends each request once: what net/http's client
// repeats by itself would hide a lost request.
type Conn struct {
	net.Conn
	In *bufio.Reader
}

// Dial connects to a server. All reads and writes end by Patience.
func Dial(t testing.TB, addr string) *Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(Patience))
	return &Conn{Conn: conn, In: bufio.NewReader(conn)}
}

// Head returns the request line and headers of a request, without the empty line at their end.
// It comes from an address of its own, with the client's session.
func (c *Client) Head(request string, headers ...string) string {
	lines := []string{request + " HTTP/1.1", "Host: x", "X-Forwarded-For: " + NewIP()}
	if token := c.Token(); token != "" {
		lines = append(lines, "Cookie: "+c.srv.CookieName()+"="+token)
	}
	lines = append(lines, headers...)
	return strings.Join(lines, "\r\n") + "\r\n"
}

// Receive reads an answer.
func (c *Conn) Receive() (status int, closes bool, err error) {
	resp, err := http.ReadResponse(c.In, nil)
	if err != nil {
		return 0, false, err
	}
	answer := &Response{}
	err = answer.read(resp)
	return answer.Status, resp.Close, err
}

// Exchange sends a request, or the rest of one, and checks the status of the answer.
func (c *Conn) Exchange(t testing.TB, request string, want int) (closes bool) {
	t.Helper()
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	status, closes, err := c.Receive()
	if err != nil || status != want {
		t.Fatalf("got %d, %v, want %d", status, err, want)
	}
	return closes
}

// Wire sends a request byte for byte as it is written: http.Client would mend or refuse some.
// headers are names and values in turn.
func (s *Server) Wire(
	t testing.TB, method, target string, body []byte, headers ...string,
) *Response {
	t.Helper()
	var request strings.Builder
	fmt.Fprintf(&request, "%s %s HTTP/1.1\r\nHost: %s\r\n", method, target, s.url().Host)
	for pair := range slices.Chunk(headers, 2) {
		fmt.Fprintf(&request, "%s: %s\r\n", pair[0], pair[1])
	}
	if body != nil {
		noteEmail(body)
		fmt.Fprintf(&request, "Content-Length: %d\r\n", len(body))
	}
	fmt.Fprintf(&request, "\r\n%s", body)
	conn := Dial(t, s.Addr)
	defer conn.Close()
	io.WriteString(conn, request.String())
	resp, err := http.ReadResponse(conn.In, &http.Request{Method: method})
	answer := &Response{Method: method, Path: target}
	if err == nil {
		err = answer.read(resp)
	}
	if err != nil {
		t.Fatalf("%s %s: %v", method, target, err)
	}
	return answer
}
