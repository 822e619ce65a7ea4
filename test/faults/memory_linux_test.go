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
	const members, each = 60, 6 // each has as many downloads and as many uploads
	var conns []*hubstest.Conn
	for range members {
		member, _ := s.Member(t, "member")
		for range each {
			download := open(t, s, member.Head("GET "+path), 200)
			upload := open(t, s, longUpload(member), 100)
			io.WriteString(upload, longPart)
			conns = append(conns, download, upload)
		}
	}
	const connections = 1500 // more than the server takes: the last ones wait
	for len(conns) < connections {
		conn := hubstest.Dial(t, s.Addr)
		io.WriteString(conn, unfinishedHead)
		conns = append(conns, conn)
	}
	hubstest.WaitUntil(t, "all downloads to stand still", func() bool {
		_, full := sendQueues(t, s.Addr)
		return full >= members*each*9/10
	})
	queued, _ := sendQueues(t, s.Addr)
	resident := hubstest.Memory(s.Cmd.Process.Pid, "VmRSS")
	const bound = 256 << 20
	if resident == 0 || resident > bound || queued > bound {
		t.Errorf("got %d MB of the process and %d MB in the kernel, want at most %d MB of each",
			resident>>20, queued>>20, bound>>20)
	}
	for _, conn := range conns {
		conn.Close()
	}
	owner.WantFile(path, large)
}

func longUpload(c *hubstest.Client) string {
	return c.Head("POST /files/upload",
		"Content-Length: 100000",
		"Content-Type: multipart/form-data; boundary=edge",
		"Expect: 100-continue")
}

// longPart is the begin of a form whose part has long headers.
var longPart = "--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n" +
	manyLines(3900)

// unfinishedHead is 11 kB of a request's head.
var unfinishedHead = "GET /hubs HTTP/1.1\r\nHost: x\r\n" + manyLines(11<<10)

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
