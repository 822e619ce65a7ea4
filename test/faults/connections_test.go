package faults

import (
	"io"
	"os/exec"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// startWithDescriptors starts a server that may have so many descriptors.
func startWithDescriptors(t *testing.T, descriptors string) *hubstest.Server {
	t.Helper()
	limit := `ulimit -n ` + descriptors + ` && exec "$@"`
	cmd := exec.Command("sh", "-c", limit, "sh", hubstest.PlainBinary(), "serve")
	return hubstest.StartCommand(t, cmd)
}

// knock sends a request on a new connection. isServed is false if no answer comes for a while:
// there is no room for the connection.
func knock(t *testing.T, s *hubstest.Server) (late *hubstest.Conn, isServed bool) {
	t.Helper()
	late = hubstest.Dial(t, s.Addr)
	io.WriteString(late, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
	late.SetReadDeadline(time.Now().Add(time.Second))
	_, err := late.In.Peek(1)
	late.SetReadDeadline(time.Now().Add(4 * hubstest.Patience))
	return late, err == nil
}

// H8: the server takes a quarter of its descriptors as connections at a time, and no more than
// 1,024. Further clients wait, and are served when there is room.
func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	for descriptors, want := range map[string]int{
		"400":  100,
		"8192": 1024,
	} {
		t.Run(descriptors, func(t *testing.T) {
			t.Parallel()
			s := startWithDescriptors(t, descriptors)
			c := s.Client(t)
			var conns []*hubstest.Conn
			for range want {
				head := c.Head(
					"POST /auth/otp/request",
					"Content-Type: application/json",
					"Content-Length: 30",
					"Expect: 100-continue",
				)
				conns = append(conns, open(t, s, head, 100))
			}
			late, isServed := knock(t, s)
			if isServed {
				t.Errorf("got more than %d connections at a time", want)
			}
			for _, conn := range conns {
				conn.Close()
			}
			if status, _, err := late.Receive(); status != 200 {
				t.Errorf("a client that had to wait: got %d, %v, want 200", status, err)
			}
		})
	}
}

// H8: clients that take all connections and do nothing with them keep others out for a time, no
// longer. Then the server has recovered by itself.
func TestIdleConnectionsEnd(t *testing.T) {
	t.Parallel()
	const head = "GET /healthz HTTP/1.1\r\nHost: x\r\n"
	const post = "POST /auth/otp/request HTTP/1.1\r\nHost: x\r\n" +
		"Content-Type: application/json\r\nContent-Length: 30\r\n\r\n"
	for name, sent := range map[string]string{
		"silent":          "",
		"half a head":     head,
		"half a body":     post + "{",
		"after an answer": head + "\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startWithDescriptors(t, "64")
			late, isServed := knock(t, s)
			for isServed {
				late.Close()
				io.WriteString(hubstest.Dial(t, s.Addr), sent)
				late, isServed = knock(t, s)
			}
			// The late client is kept out now.
			if status, _, err := late.Receive(); status != 200 {
				t.Errorf("got %d, %v, want 200 once the others have ended", status, err)
			}
		})
	}
}
