package faults

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// H8: With as many connections as the server takes, all of the most expensive kinds, the memory of
// the process stays below 256 MB, and so do the kernel's buffers of data to send. The kinds are
// downloads that the client does not read, uploads that make no progress, and requests whose
// headers never end. When the connections are closed, the server serves other clients.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	s := startWithDescriptors(t, "8192")
	owner, _ := s.Member(t, "member")
	large := strings.Repeat("0123456789abcdef", 1<<19) // 8 MiB
	path := location(t, owner.Upload("large.txt", []byte(large)))
	conns := beginTransfers(t, s, path)
	downloads := len(conns) / 2
	const connections = 1500 // more than the 1,024 that the server accepts: the last ones wait
	for len(conns) < connections {
		conn := hubstest.Dial(t, s.Addr)
		io.WriteString(conn, unfinishedHead)
		conns = append(conns, conn)
	}
	hubstest.WaitUntil(t, "at least 90 % of the downloads with unsent data", func() bool {
		_, full := sendQueues(t, s.Addr)
		return full >= downloads*9/10
	})

	queued, _ := sendQueues(t, s.Addr)
	resident := hubstest.Memory(s.Cmd.Process.Pid, "VmRSS")
	const bound = 256 << 20
	if resident == 0 || resident > bound {
		t.Errorf("memory of the process: got %d MB (0: unknown), want at most %d MB",
			resident>>20, bound>>20)
	}
	if queued > bound {
		t.Errorf("data to send: got %d MB, want at most %d MB", queued>>20, bound>>20)
	}

	for _, conn := range conns {
		conn.Close()
	}
	owner.WantFile(path, large)
}

// beginTransfers begins six downloads and as many uploads of each of 60 users, who may have 16
// transfers each.
func beginTransfers(t *testing.T, s *hubstest.Server, path string) (conns []*hubstest.Conn) {
	t.Helper()
	for range 60 {
		member, _ := s.Member(t, "member")
		for range 6 {
			download := beginRequest(t, s, member.Head("GET "+path), 200)
			form := member.Head("POST /files/upload",
				"Content-Length", "100000",
				"Content-Type", "multipart/form-data; boundary=edge",
				"Expect", "100-continue") // the server says 100 when it begins to read the form
			upload := beginRequest(t, s, form, 100)
			io.WriteString(upload, longPart)
			conns = append(conns, download, upload)
		}
	}
	return conns
}

// longPart is the beginning of a form whose part has long headers. They never end, and stay below
// the 4 kB that the server accepts before the file.
var longPart = "--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n" +
	manyLines(3900)

// unfinishedHead is a request line and 11 kB of headers, without the empty line that ends them.
var unfinishedHead = "GET /hubs HTTP/1.1\r\nHost: x\r\n" + manyLines(11<<10)

// manyLines returns small header lines, together a little less than size bytes. Many small lines
// take more memory than few long ones.
func manyLines(size int) string {
	var lines strings.Builder
	for n := 0; lines.Len() < size-80; n++ {
		fmt.Fprintf(&lines, "%x:\r\n", n)
	}
	return lines.String()
}

// sendQueues adds up the data that the kernel holds for the clients of a server, because they have
// not received it yet. It returns the sum in bytes, and the number of clients with such data.
func sendQueues(t *testing.T, addr string) (bytes, clients int) {
	t.Helper()
	var port int
	fmt.Sscanf(addr, "127.0.0.1:%d", &port)
	local := fmt.Sprintf(":%04X", port)
	sockets, err := os.ReadFile("/proc/net/tcp")
	hubstest.Must(t, err)
	for line := range strings.Lines(string(sockets)) {
		// The fields are a number, the local and the remote address, the state, and the bytes to
		// send and received: 0: 0100007F:1F90 0100007F:C350 01 00002A00:00000000 …
		fields := strings.Fields(line)
		var queue int
		fmt.Sscanf(fields[4], "%x:", &queue)
		if strings.HasSuffix(fields[1], local) && queue > 0 {
			bytes += queue
			clients++
		}
	}
	return bytes, clients
}
