package faults

import (
	"os/exec"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// startWithDescriptors starts a server whose limit of open file descriptors is the given number. It
// uses the plain binary, because the race detector and coverage take memory of their own.
// GOMEMLIMIT is as in deploy/hubs.service.
func startWithDescriptors(t *testing.T, descriptors string) *hubstest.Server {
	t.Helper()
	limit := `ulimit -n ` + descriptors + ` && GOMEMLIMIT=192MiB exec "$@"`
	cmd := exec.Command("sh", "-c", limit, "sh", hubstest.PlainBinary(), "serve")
	return hubstest.StartCommand(t, cmd)
}

// dialAndRequest opens a connection and sends GET /healthz on it. isServed is false if no answer
// arrives within a second: no event shows that the server has not accepted a connection. On a very
// slow machine an answer may come later, so a missing bound may go unnoticed there, but no test
// fails without reason. The connection stays open, and the test may read the answer later.
func dialAndRequest(t *testing.T, s *hubstest.Server) (extra *hubstest.Conn, isServed bool) {
	t.Helper()
	extra = hubstest.Dial(t, s.Addr)
	extra.Begin("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
	extra.SetReadDeadline(time.Now().Add(time.Second))
	_, err := extra.In.Peek(1)
	extra.SetReadDeadline(time.Now().Add(4 * hubstest.Patience))
	return extra, err == nil
}

// H8: The server has at most as many connections as a quarter of its file descriptors, and at most
// 1,024. Further clients wait, and are served when a connection ends.
//
// Each connection of this test holds a request whose body never arrives.
func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		descriptors string // the limit of the process
		connections int
	}{
		{descriptors: "400", connections: 100}, // a quarter
		{descriptors: "8192", connections: 1024},
	} {
		t.Run(test.descriptors, func(t *testing.T) {
			t.Parallel()
			s := startWithDescriptors(t, test.descriptors)
			c := s.Client(t)
			var last *hubstest.Conn
			for range test.connections { // the 100 shows that the server has accepted the connection
				head := c.Head(
					"POST /auth/otp/request",
					"Content-Type", "application/json",
					"Content-Length", "30",
					"Expect", "100-continue",
				)
				last = beginRequest(t, s, head, 100)
			}

			extra, isServed := dialAndRequest(t, s)
			if isServed {
				t.Errorf("got an answer on one more connection, want only %d", test.connections)
			}
			last.Close()
			extra.Receive(t).Want(t, 200)
		})
	}
}

// H8: Clients that hold all connections and send nothing more keep other clients out for a limited
// time only. When the server has closed those connections, it serves others again.
// TestConnectionsAreBounded states how many connections there are: a quarter of the descriptors.
func TestIdleConnectionsEnd(t *testing.T) {
	t.Parallel()
	const head = "GET /healthz HTTP/1.1\r\nHost: x\r\n"
	const post = "POST /auth/otp/request HTTP/1.1\r\nHost: x\r\n" +
		"Content-Type: application/json\r\nContent-Length: 30\r\n\r\n"
	for name, sent := range map[string]string{ // sent on a connection before it goes idle
		"silent":          "",
		"half a head":     head,
		"half a body":     post + "{",
		"after an answer": head + "\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startWithDescriptors(t, "64")
			for range 64 / 4 {
				hubstest.Dial(t, s.Addr).Begin(sent)
			}
			extra, isServed := dialAndRequest(t, s)
			if isServed {
				t.Error("got an answer while all connections are taken, want none yet")
			}
			extra.Receive(t).Want(t, 200)
		})
	}
}
