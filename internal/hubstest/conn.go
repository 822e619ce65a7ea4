package hubstest

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A Conn is one connection to a server, on which each request is sent once. net/http's client
// repeats some requests on a new connection, which would hide a lost request.
type Conn struct {
	net.Conn
	In   *bufio.Reader // all reads from the connection go through In
	line string        // the last request line that was sent, without the version
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

// Head returns the request line and the headers of a request such as "GET /hubs", without the empty
// line after them. The request has a new client address and the client's session.
func (c *Client) Head(request string, headers ...string) string {
	lines := []string{request + " HTTP/1.1", "Host: x", "X-Forwarded-For: " + NewIP()}
	if token := c.Token(); token != "" {
		lines = append(lines, "Cookie: "+c.srv.CookieName()+"="+token)
	}
	lines = append(lines, headers...)
	return strings.Join(lines, "\r\n") + "\r\n"
}

// Write sends p. It notes which request begins in p, for the answer.
func (c *Conn) Write(p []byte) (int, error) {
	line, _, isHead := bytes.Cut(p, []byte(" HTTP/1.1\r\n"))
	if isHead {
		c.line = string(line)
	}
	return c.Conn.Write(p)
}

// Send sends a request, or the rest of one, and receives the answer. A server may refuse a request
// and close the connection before it has read all of it.
func (c *Conn) Send(t testing.TB, request string) *Response {
	t.Helper()
	io.WriteString(c, request) // if this fails, there may be an answer nevertheless
	return c.Receive(t)
}

// Receive reads an answer to its end. If no answer comes, the test fails, and the status is 0. Like
// Client.Do, it may be called from any goroutine.
func (c *Conn) Receive(t testing.TB) *Response {
	t.Helper()
	answer := &Response{}
	answer.Method, answer.Path, _ = strings.Cut(c.line, " ")
	resp, err := http.ReadResponse(c.In, &http.Request{Method: answer.Method})
	if err == nil {
		err = answer.read(resp)
	}
	if err != nil {
		t.Errorf("side effect: %s: %v", c.line, err)
	}
	return answer
}

// Wire sends a request unchanged, on a new connection. http.Client would correct or refuse some
// requests. Wire adds Host and, for a body, Content-Length. headers are names and values in turn.
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
	return conn.Send(t, request.String())
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

// FullQueue returns the address of a socket that accepts no connection, and whose queue of waiting
// connections is full. A connection attempt there gets no reply until makeRoom is called, which
// returns when the attempt has succeeded. Nobody answers on the connection.
func FullQueue(t testing.TB) (addr string, makeRoom func()) {
	t.Helper()
	socket, addr := ListeningSocket(t, "tcp", "127.0.0.1:0")
	setQueue := func(length int) {
		if err := syscall.Listen(int(socket.Fd()), length); err != nil {
			t.Error(err)
		}
	}
	setQueue(0) // the shortest
	waiting := 0
	for {
		// Only a machine that is very slow would take so long for a queue with room.
		conn, err := net.DialTimeout("tcp", addr, 500*time.Millisecond)
		if err != nil {
			break
		}
		t.Cleanup(func() { conn.Close() })
		waiting++
	}
	return addr, func() {
		setQueue(8)
		listener, err := net.FileListener(socket)
		Must(t, err)
		defer listener.Close()
		listener.(*net.TCPListener).SetDeadline(time.Now().Add(Patience))
		for range waiting + 1 {
			conn, err := listener.Accept()
			Must(t, err)
			t.Cleanup(func() { conn.Close() })
		}
	}
}
