package hubstest

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// A Conn is one connection to a server, on which each request is sent once. net/http's client
// repeats some requests on a new connection, which would hide a lost request.
type Conn struct {
	net.Conn
	In   *bufio.Reader // all reads from the connection go through In
	sent string        // what Begin and Finish have sent of the last request
}

// Dial connects to a server. All reads and writes fail once Patience has passed.
func Dial(t testing.TB, addr string) *Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	Must(t, err)
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(Patience))
	return &Conn{Conn: conn, In: bufio.NewReader(conn)}
}

// Head returns the head of a request such as "GET /hubs": its line, its headers and the empty line.
// The request has the client's address and session. headers are names and values in turn.
func (c *Client) Head(request string, headers ...string) string {
	headers = append([]string{"Host", "x", "X-Forwarded-For", c.IP}, headers...)
	own := c.srv.CookieName() + "=" + c.Token()
	if c.srv.world != nil {
		headers = append(headers, c.srv.world.headers...)
		own = c.srv.world.around(own)
	}
	if c.Token() != "" {
		headers = append(headers, "Cookie", own)
	}
	return Head(request, headers...)
}

// Head returns the head of a request with these headers, which are names and values in turn, and no
// others.
func Head(request string, headers ...string) string {
	lines := []string{request + " HTTP/1.1"}
	for pair := range slices.Chunk(headers, 2) {
		lines = append(lines, pair[0]+": "+pair[1])
	}
	return strings.Join(lines, "\r\n") + "\r\n\r\n"
}

// Begin sends the beginning of a request: its head, or a part of it, and perhaps a part of its body.
// A server may refuse a request and close the connection before it has read all of it. So Begin
// ignores a failure: there may be an answer nevertheless.
func (c *Conn) Begin(text string) {
	c.sent = text
	io.WriteString(c, text)
}

// Finish sends the rest of a request that Begin has begun, and receives the answer.
func (c *Conn) Finish(t testing.TB, rest string) *Response {
	t.Helper()
	c.sent += rest
	io.WriteString(c, rest)
	return c.Receive(t)
}

// Send sends a request and receives the answer.
func (c *Conn) Send(t testing.TB, request string) *Response {
	t.Helper()
	c.Begin(request)
	return c.Receive(t)
}

// Receive reads an answer to its end and checks it, as Client.Do does. If no answer comes, the test
// fails, and the status is 0. Receive may be called from any goroutine.
func (c *Conn) Receive(t testing.TB) *Response {
	t.Helper()
	answer := &Response{}
	request, _, _ := strings.Cut(c.sent, " HTTP/1.1\r\n")
	answer.Method, answer.Path, _ = strings.Cut(request, " ")
	// Only a request that the server accepts is compared, and that can be read.
	if sent, err := http.ReadRequest(bufio.NewReader(strings.NewReader(c.sent))); err == nil {
		answer.sent = sent.Header
		body, _ := io.ReadAll(sent.Body)
		answer.sentBody = string(body)
	}
	resp, err := http.ReadResponse(c.In, &http.Request{Method: answer.Method})
	if err == nil {
		err = answer.read(resp)
	}
	if err != nil {
		t.Errorf("side effect: %s: %v", request, err)
		return answer
	}
	// net/http itself sends 100 (Continue) and 431, the latter in a format of its own.
	if answer.Status != 100 && answer.Status != 431 {
		answer.check(t)
	}
	return answer
}

// ListeningSocket listens as net.Listen does, and returns the socket and its address. This process
// accepts no connections on it: the kernel queues them.
func ListeningSocket(t testing.TB, network, address string) (socket *os.File, addr string) {
	t.Helper()
	listener, err := net.Listen(network, address)
	Must(t, err)
	defer listener.Close()
	socket, err = listener.(interface{ File() (*os.File, error) }).File()
	Must(t, err)
	t.Cleanup(func() { socket.Close() })
	return socket, listener.Addr().String()
}
