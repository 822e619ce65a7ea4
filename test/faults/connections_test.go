package faults

import (
	"bufio"
	"io"
	"net/http"
	"os/exec"
	"sync"
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

// connectAll opens n connections, each with what head returns on it.
func connectAll(t *testing.T, s *hubstest.Server, n int, head func() string) []*hubstest.Conn {
	t.Helper()
	conns := make([]*hubstest.Conn, n)
	for i := range conns {
		conns[i] = hubstest.Dial(t, s.Addr)
		io.WriteString(conns[i], head())
	}
	return conns
}

// H8: the server takes a quarter of its descriptors as connections at a time, and no more than
// 1,024. Further clients wait, and are served when there is room.
func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		descriptors string
		want        int
	}{
		{descriptors: "400", want: 100},
		{descriptors: "8192", want: 1024},
	} {
		t.Run(test.descriptors, func(t *testing.T) {
			t.Parallel()
			s := startWithDescriptors(t, test.descriptors)
			c := s.Client(t)
			conns := connectAll(t, s, test.want+50, func() string {
				return c.Head("POST /auth/otp/request", "Content-Type: application/json",
					"Content-Length: 30", "Expect: 100-continue") + "\r\n"
			})
			late := hubstest.Dial(t, s.Addr)
			io.WriteString(late, c.Head("GET /healthz")+"\r\n")
			if got := countAsked(conns, test.want); got != test.want {
				t.Errorf("got %d connections at a time, want %d", got, test.want)
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

// countAsked counts the connections on which the server asks for the body. It waits as long as
// fewer than want have been asked, and then for a moment: nothing announces that no more will be.
func countAsked(conns []*hubstest.Conn, want int) (asked int) {
	var mu sync.Mutex
	var all sync.WaitGroup
	enough := make(chan struct{})
	for _, conn := range conns {
		all.Go(func() {
			r, err := http.ReadResponse(bufio.NewReader(conn), nil)
			mu.Lock()
			defer mu.Unlock()
			if err != nil || r.StatusCode != http.StatusContinue {
				return
			}
			asked++
			if asked == want {
				close(enough)
			}
		})
	}
	select {
	case <-enough:
		time.Sleep(300 * time.Millisecond)
	case <-time.After(hubstest.Patience):
	}
	for _, conn := range conns {
		conn.SetReadDeadline(time.Now())
	}
	all.Wait()
	return asked
}

// H8: clients that take all connections and do nothing with them keep others out for a time, no
// longer. Then the server has recovered by itself.
func TestIdleConnectionsEnd(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		begin func(c *hubstest.Client) string // what a client sends at first
	}{
		{name: "silent", begin: func(*hubstest.Client) string { return "" }},
		{name: "half a head", begin: func(c *hubstest.Client) string { return c.Head("GET /healthz") }},
		{name: "half a body", begin: func(c *hubstest.Client) string {
			return c.Head("POST /auth/otp/request", "Content-Type: application/json",
				"Content-Length: 30") + "\r\n{"
		}},
		{name: "after an answer", begin: func(c *hubstest.Client) string {
			return c.Head("GET /healthz") + "\r\n"
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := startWithDescriptors(t, "64")
			c := s.Client(t)
			connectAll(t, s, 16, func() string { return test.begin(c) })
			late := hubstest.Dial(t, s.Addr)
			late.SetDeadline(time.Now().Add(4 * hubstest.Patience))
			late.Exchange(t, c.Head("GET /healthz")+"\r\n", 200)
		})
	}
}
