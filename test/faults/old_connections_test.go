//go:build moving

package main

// Connections: how many there may be, which give way, and what the most expensive of them
// cost together.

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	connectionBound = 1024
	waitingBound    = 512 // of these, without a finished request head
	memoryBound     = 256 // MiB
)

// connectAll opens n connections, each with the bytes that send returns on it.
func connectAll(t *testing.T, addr string, n int, send func(i int) string) []net.Conn {
	t.Helper()
	if limit := openFilesLimit(); limit < n+2000 {
		t.Fatalf("the limit of open files, %d, is too low for this test", limit)
	}
	conns := make([]net.Conn, n)
	var all sync.WaitGroup
	for worker := range 8 {
		all.Go(func() {
			for i := worker; i < n; i += 8 {
				conn, err := net.Dial("tcp", addr)
				if err != nil {
					t.Error(err)
					return
				}
				conn.(*net.TCPConn).SetReadBuffer(4096)
				conns[i] = conn
				// Nobody may read at the other end yet, or any more.
				conn.SetWriteDeadline(time.Now().Add(time.Second))
				io.WriteString(conn, send(i))
			}
		})
	}
	all.Wait()
	t.Cleanup(func() {
		for _, conn := range conns {
			if conn != nil {
				conn.Close()
			}
		}
	})
	return conns
}

// isClosed tells whether the server has closed a connection on which it has said nothing.
func isClosed(conn net.Conn) bool {
	conn.SetReadDeadline(time.Now().Add(time.Millisecond))
	_, err := conn.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// A withheldBody is the head of a request whose body does not come, from an address of its
// own.
func withheldBody(int) string {
	n := serial.Add(1)
	return fmt.Sprintf("POST /auth/otp/request HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 2001:db8:%x:%x::1\r\n"+
		"Content-Type: application/json\r\nContent-Length: 30\r\n\r\n", n>>16, n&0xffff)
}

// unfinishedHead is 15 kB of a request's head, in many small lines.
func unfinishedHead(int) string {
	var head strings.Builder
	head.WriteString("GET /hubs HTTP/1.1\r\nHost: x\r\n")
	for n := 0; head.Len() < 11<<10; n++ {
		fmt.Fprintf(&head, "%x:\r\n", n)
	}
	return head.String()
}

// newMembers signs n users in, some at a time.
func newMembers(t *testing.T, s *testServer, n int) []*testClient {
	t.Helper()
	members := make([]*testClient, n)
	var all sync.WaitGroup
	for worker := range 8 {
		all.Go(func() {
			for i := worker; i < n; i += 8 {
				members[i], _ = s.member(t, "member")
			}
		})
	}
	all.Wait()
	return members
}

// H8: of the connections without a request the oldest give way, whether they are silent,
// have sent a part of a head, or are idle after an answer. Others are served meanwhile.
func TestWaitingConnectionsGiveWay(t *testing.T) {
	t.Parallel()
	const n = waitingBound + 200
	for name, send := range map[string]func(int) string{
		"silent":          func(int) string { return "" },
		"unfinished head": unfinishedHead,
		"idle": func(int) string {
			n := serial.Add(1)
			return fmt.Sprintf("HEAD /openapi.json HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 2001:db8:%x:%x::1\r\n\r\n", n>>16, n&0xffff)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startProcess(t)
			c, _ := s.member(t, "member")
			conns := connectAll(t, s.addr, n, send)
			if name == "idle" {
				for _, conn := range conns {
					conn.SetReadDeadline(time.Now().Add(patience))
					// An error: it has given way before it was answered.
					if answer, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: "HEAD"}); err == nil && answer.StatusCode != 200 {
						t.Fatalf("HEAD /openapi.json: %d", answer.StatusCode)
					}
				}
			}
			// Well before the time at which unfinished heads end anyway.
			closed := 0
			waitWithin(t, headerTimeout*8/10, "the oldest to give way", func() bool {
				closed = 0
				for _, conn := range conns {
					if isClosed(conn) {
						closed++
					}
				}
				return closed >= n-waitingBound
			})
			c.elsewhere().do("GET", "/hubs", nil).want(t, 200)
			fresh := *c
			fresh.http = s.client(t).http // a new connection
			fresh.setToken(c.token())
			fresh.do("GET", "/hubs", nil).want(t, 200)
			t.Logf("%s: %d of %d gave way, %d descriptors", name, closed, n, s.descriptors(t))
			if closed > n-waitingBound+50 {
				t.Errorf("%d of %d gave way", closed, n)
			}
		})
	}
}

// H8: the bound holds when many connections begin to wait at the same moment: two of them must not
// make room by closing the same one.
func TestConnectionsThatWaitAtOnce(t *testing.T) {
	t.Parallel()
	for range 100 {
		l := newBoundedListener(nil, nil)
		begin := make(chan struct{})
		var all sync.WaitGroup
		for range cap(l.slots) - 1 {
			l.slots <- struct{}{}
			c := &connection{TCPConn: new(net.TCPConn), listener: l}
			all.Go(func() {
				<-begin
				l.startWaiting(c)
			})
		}
		close(begin)
		all.Wait()
		if got := l.waiting.Len(); got != cap(l.slots)/2 {
			t.Fatalf("got %d connections that wait, want %d", got, cap(l.slots)/2)
		}
	}
}

// H8: however many connect, the server holds a bounded number of connections. The others
// wait, and are served when there is room.
func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	s := startProcess(t)
	before := s.descriptors(t)
	conns := connectAll(t, s.addr, connectionBound+200, withheldBody)
	waitUntil(t, "all that the server takes", func() bool { return s.descriptors(t)-before >= connectionBound })
	late, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	io.WriteString(late, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
	if n := s.descriptors(t) - before; n > connectionBound+poolSize {
		t.Errorf("%d connections", n)
	}
	for _, conn := range conns {
		conn.Close()
	}
	late.SetReadDeadline(time.Now().Add(patience))
	if r, err := http.ReadResponse(bufio.NewReader(late), nil); err != nil || r.StatusCode != 200 {
		t.Errorf("a client that had to wait: %v %v", r, err)
	}
	waitUntil(t, "the connections to be gone", func() bool { return s.descriptors(t)-before < 50 })
}

// A brokenListener accepts nothing, as when the process has no descriptors left.
type brokenListener struct{ net.Listener }

func (brokenListener) Accept() (net.Conn, error) { return nil, syscall.EMFILE }

// H8: an Accept that fails takes no slot, else a lack of descriptors would end the service for good.
func TestFailedAcceptTakesNoSlot(t *testing.T) {
	t.Parallel()
	l := newBoundedListener(brokenListener{}, nil)
	if _, err := l.Accept(); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("got %v, want %v", err, syscall.EMFILE)
	}
	if got := len(l.slots); got != 0 {
		t.Errorf("got %d slots taken, want 0", got)
	}
}

// H8: the kernel holds at most 192 kB for a client that does not read. By itself it would take
// megabytes, which no measure of the process shows.
func TestSendBufferIsBounded(t *testing.T) {
	t.Parallel()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer inner.Close()
	client, err := net.Dial("tcp", inner.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := newBoundedListener(inner, nil).Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		size, err := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF)
		if err != nil || size > 192<<10 {
			t.Errorf("got a send buffer of %d bytes, %v; want at most %d", size, err, 192<<10)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// H8: requests under way and silent connections together can't keep a new client out until
// the silent ones' time is over.
func TestNewClientGetsIn(t *testing.T) {
	t.Parallel()
	s := startProcess(t)
	connectAll(t, s.addr, connectionBound-waitingBound, withheldBody)
	connectAll(t, s.addr, waitingBound+200, func(int) string { return "" })
	start := time.Now()
	r := s.client(t).do("GET", "/openapi.json", nil).want(t, 200)
	if wait := time.Since(start); wait > headerTimeout/2 {
		t.Errorf("%s answered after %v", r.path, wait)
	}
}

// H8: what the most expensive connections cost together: unfinished heads, uploads whose
// part has long headers, files that nobody reads.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	s := startProcess(t)
	s.allowErrors("unavailable") // so many session checks at once may wait too long for PostgreSQL
	const users = 32
	members := newMembers(t, s.testServer, users)
	large, _ := members[0].largeFile(t)
	var mu sync.Mutex
	most := 0
	measure := func(what string) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		mib := s.residentMiB(t)
		most = max(most, mib)
		t.Logf("%s: %d MiB resident, %d descriptors", what, mib, s.descriptors(t))
	}
	measure("at rest")

	// Part headers over their bound are refused while they arrive.
	long := "Content-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n" + manyLines(60<<10)
	for range 4 {
		r := members[0].sendForm(form(strings.TrimSuffix(long, "\r\n"), "content"), false)
		if r.status != 413 && r.status != 400 {
			t.Errorf("60 kB of part headers: %v", r)
		}
	}
	head := func(i int, request string) string {
		c := members[i%users]
		n := serial.Add(1)
		return fmt.Sprintf("%s HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nX-Forwarded-For: 2001:db8:%x:%x::1\r\n",
			request, s.cookieName(), c.token(), n>>16, n&0xffff)
	}
	const each = (connectionBound - waitingBound) / 2
	connectAll(t, s.addr, each, func(i int) string { return head(i, "GET "+large.Path) + "\r\n" })
	measure("and downloads that nobody reads")
	connectAll(t, s.addr, each, func(i int) string {
		return head(i, "POST /files/upload") + "Content-Type: " + formType + "\r\nContent-Length: 100000\r\n\r\n" +
			"--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n" + manyLines(3900)
	})
	measure("and uploads with long part headers")
	for wave := range 6 {
		connectAll(t, s.addr, 2*waitingBound, unfinishedHead)
		measure(fmt.Sprintf("and unfinished heads, wave %d", wave))
	}
	if most > memoryBound {
		t.Errorf("%d MiB resident, the bound is %d", most, memoryBound)
	}
	members[0].elsewhere().do("GET", "/hubs", nil).want(t, 200)
}

// manyLines is so many bytes of header lines.
func manyLines(size int) string {
	var lines strings.Builder
	for n := 0; lines.Len() < size-80; n++ {
		fmt.Fprintf(&lines, "%x:\r\n", n)
	}
	return lines.String()
}
