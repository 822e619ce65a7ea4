package faults

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// H8: what the most expensive connections cost together: files that nobody reads, uploads that
// stand still, requests without an end. The process stays below 256 MB, and so do the kernel's
// buffers. Once the connections are gone, others are served.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	s := startWithDescriptors(t, "8192")
	owner, _ := s.Member(t, "member")
	large := strings.Repeat("0123456789abcdef", 1<<19) // 8 MiB
	path := location(t, owner.Upload("large.txt", []byte(large)))
	var heads []string
	for range 44 {
		member, _ := s.Member(t, "member")
		for range 8 { // of the 16 transfers that a user may have
			heads = append(heads, member.Head("GET "+path)+"\r\n", longPart(member))
		}
	}
	for range 1024 - len(heads) {
		heads = append(heads, unfinishedHead())
	}
	conns := make([]*hubstest.Conn, len(heads))
	for i, head := range heads {
		conns[i] = hubstest.Dial(t, s.Addr)
		io.WriteString(conns[i], head)
	}
	hubstest.WaitUntil(t, "all downloads to stand still", func() bool {
		_, full := sendQueues(t, s.Addr)
		return full >= len(heads)/3
	})
	queued, _ := sendQueues(t, s.Addr)
	resident := residentMemory(t, s.Cmd.Process.Pid)
	const bound = 256 << 20
	t.Logf("%d MB of the process, %d MB in the kernel", resident>>20, queued>>20)
	if resident > bound || queued > bound {
		t.Errorf("got %d bytes resident and %d in the kernel, want at most %d", resident, queued, bound)
	}
	for _, conn := range conns {
		conn.Close()
	}
	owner.WantFile(path, large)
}

// longPart is the begin of an upload whose part has long headers.
func longPart(c *hubstest.Client) string {
	return c.Head("POST /files/upload", "Content-Length: 100000",
		"Content-Type: multipart/form-data; boundary=edge") + "\r\n" +
		"--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n" + manyLines(3900)
}

// unfinishedHead is 11 kB of a request's head.
func unfinishedHead() string { return "GET /hubs HTTP/1.1\r\nHost: x\r\n" + manyLines(11<<10) }

// manyLines is so many bytes of small header lines.
func manyLines(size int) string {
	var lines strings.Builder
	for n := 0; lines.Len() < size-80; n++ {
		fmt.Fprintf(&lines, "%x:\r\n", n)
	}
	return lines.String()
}

// sendQueues returns what the kernel holds for the clients of a listener, and for how many.
func sendQueues(t *testing.T, addr string) (bytes, clients int) {
	t.Helper()
	var port int
	fmt.Sscanf(addr, "127.0.0.1:%d", &port)
	sockets, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(sockets)) {
		var number, remote, state string
		var local, localPort, queue int
		fmt.Sscanf(line, "%s %x:%x %s %s %x:", &number, &local, &localPort, &remote, &state, &queue)
		if localPort == port && queue > 0 {
			bytes += queue
			clients++
		}
	}
	return bytes, clients
}

// residentMemory returns the bytes of a process that are in memory.
func residentMemory(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	var kilobytes int
	if _, err := fmt.Sscan(rest, &kilobytes); err != nil {
		t.Fatal(err)
	}
	return kilobytes << 10
}
