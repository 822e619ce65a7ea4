package faults

import (
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
		beginRequest(t, s, c.Head("GET /hubs?limit=100"), 200)
	}
	const bound = 400 << 20
	resident := hubstest.Memory(s.Cmd.Process.Pid, "VmHWM")
	if resident == 0 || resident > bound {
		t.Errorf("memory of the process: got %d MB (0: unknown), want at most %d MB",
			resident>>20, bound>>20)
	}
	c.Elsewhere().Get("/hubs").Want(t, 200)
}
