package faults

import (
	"net"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// H8: The server's memory stays bounded while 1,000 clients ask for long lists and read nothing. The
// descriptions consist of a character that HTML reserves. In JSON it must stay one byte: measured
// were 260 MB so, and 1,200 MB with six bytes.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	s := startWithDescriptors(t)
	c, _ := s.Member(t, "member")
	hubstest.Exec(t, s.Database, `insert into hubs (name, description)
		select 'n', repeat('<', 2000) from generate_series(1, 100)`)
	for range 1000 {
		conn := hubstest.Dial(t, s.Addr)
		conn.Conn.(*net.TCPConn).SetReadBuffer(4096)
		conn.Begin(c.Elsewhere().Head("GET /hubs?limit=100"))
		line, err := conn.In.ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "HTTP/1.1 200 ") {
			t.Fatalf("setup: got the status line %q, error %v, want status 200", line, err)
		}
	}
	const bound = 400 << 20
	resident := hubstest.Memory(s.Cmd.Process.Pid, "VmHWM")
	if resident == 0 || resident > bound {
		t.Errorf("memory of the process: got %d MB (0: unknown), want at most %d MB",
			resident>>20, bound>>20)
	}
	c.Elsewhere().Get("/hubs").Want(t, 200)
}
