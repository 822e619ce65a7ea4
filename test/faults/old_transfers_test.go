//go:build moving

package main

// Transfers, which are uploads and downloads: nobody takes more than a share of them,
// one that stands still ends, and a failed upload that could not be undone is undone
// by the running server.

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	transfersPerUser = 16
	stallLimit       = 30 * time.Second // without progress
)

// waitWithin is waitUntil with another bound, for what takes its real time.
func waitWithin(t testing.TB, limit time.Duration, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !done(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("after %v still not: %s", limit, what)
		}
	}
}

// A rawDownload is a client that has asked for a file and reads as it likes.
type rawDownload struct {
	net.Conn
	body       *bufio.Reader
	status     int
	retryAfter string
}

// download asks for a file and reads the head of the answer, with as little of the body
// as can be. Its address is its own.
func (c *testClient) download(t testing.TB, path string, headers ...string) *rawDownload {
	t.Helper()
	conn, err := net.Dial("tcp", c.srv.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.(*net.TCPConn).SetReadBuffer(4096)
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nX-Forwarded-For: %s\r\n%s\r\n",
		path, c.srv.cookieName(), c.token(), c.elsewhere().ip, strings.Join(headers, ""))
	conn.SetReadDeadline(time.Now().Add(patience))
	d := &rawDownload{Conn: conn, body: bufio.NewReaderSize(conn, 512)}
	head, err := http.ReadResponse(d.body, &http.Request{Method: "GET"})
	if err != nil {
		t.Fatal("no answer to a download: ", err)
	}
	conn.SetReadDeadline(time.Time{})
	d.status, d.retryAfter = head.StatusCode, head.Header.Get("Retry-After")
	return d
}

// largeFile uploads more than the buffers of a connection take.
func (c *testClient) largeFile(t testing.TB) (f file, content []byte) {
	t.Helper()
	content = bytes.Repeat([]byte("0123456789abcdef"), 1<<20) // 16 MiB
	return c.upload("large.bin", content).stored(t), content
}

// R6: one user has 16 transfers at a time, whatever the address; the next is a 429 that
// says when to come again. Other users are served, and a transfer that ends makes room.
func TestTransfersOfOneUserAreBounded(t *testing.T) {
	t.Parallel()
	s := startProcess(t)
	greedy, _ := s.member(t, "member")
	other, _ := s.member(t, "member")
	large, _ := greedy.largeFile(t)
	small := greedy.upload("small.txt", []byte("content")).stored(t)
	for range 3 * transfersPerUser { // those that have ended don't count
		greedy.elsewhere().do("GET", small.Path, nil).want(t, 200)
		greedy.elsewhere().do("GET", small.Path, nil, "If-None-Match", `"`+small.FileID+`"`).want(t, 304)
		wantProblem(t, greedy.elsewhere().do("GET", "/files/"+testUUID()+"/x", nil), 404, "not_found")
		wantProblem(t, greedy.elsewhere().do("POST", "/files/upload", strings.NewReader("x"), "Content-Type", "text/plain"), 415, "unsupported_media_type")
	}

	var held []*rawDownload
	for n := range transfersPerUser - 2 {
		d := greedy.download(t, large.Path)
		if held = append(held, d); d.status != 200 {
			t.Fatalf("download %d: %d", n, d.status)
		}
	}
	uploads := []*uploading{greedy.startUpload("a.txt"), greedy.startUpload("b.txt")}
	refused := func() {
		t.Helper()
		wantProblem(t, greedy.elsewhere().do("GET", small.Path, nil), 429, "rate_limited")
		wantProblem(t, greedy.elsewhere().upload("c.txt", []byte("content")), 429, "rate_limited")
	}
	refused()
	// Neither another user, from the same address too, nor another request is.
	neighbour := *other
	neighbour.ip = greedy.ip
	for _, c := range []*testClient{other, &neighbour} {
		c.do("GET", small.Path, nil).want(t, 200)
		c.upload("d.txt", []byte("content")).stored(t)
	}
	greedy.do("GET", "/hubs", nil).want(t, 200)

	room := func() bool {
		r, _ := greedy.elsewhere().try("GET", small.Path, nil)
		return r.status == 200
	}
	held[0].Close()
	waitUntil(t, "room after a client has gone", room)
	held = append(held, greedy.download(t, large.Path))
	refused()
	for _, upload := range uploads {
		if r := upload.finish(); r.status != 201 {
			t.Errorf("an upload among the 16: %v", r)
		}
	}
	waitUntil(t, "room after an upload", room)
	for _, d := range held {
		d.Close()
	}
	waitUntil(t, "room for all", func() bool {
		var all sync.WaitGroup
		var mu sync.Mutex
		served := 0
		for range transfersPerUser {
			all.Go(func() {
				if r, _ := greedy.elsewhere().try("GET", small.Path, nil); r.status == 200 {
					mu.Lock()
					served++
					mu.Unlock()
				}
			})
		}
		all.Wait()
		return served == transfersPerUser
	})
}

// R6: all transfers together take at most half of the descriptors that the process may
// have (two each), so that everything else goes on.
func TestTransfersLeaveDescriptors(t *testing.T) {
	t.Parallel()
	const descriptors = 128
	s := startThrough(t, []string{"sh", "-c", fmt.Sprintf(`ulimit -n %d && exec "$@"`, descriptors), "sh"})
	first, _ := s.member(t, "member")
	large, _ := first.largeFile(t)
	small := first.upload("small.txt", []byte("content")).stored(t)
	var held []*rawDownload
	refused := 0
	for range 4 {
		c, _ := s.member(t, "member")
		for range transfersPerUser {
			d := c.download(t, large.Path)
			switch {
			case d.status == 200:
				held = append(held, d)
			case d.status == 429 && d.retryAfter != "" && d.retryAfter != "0":
				refused++
				d.Close()
			default:
				t.Fatalf("a download: %d, Retry-After %q", d.status, d.retryAfter)
			}
		}
	}
	open := s.descriptors(t)
	t.Logf("%d downloads at once, %d refused, %d of %d descriptors in use", len(held), refused, open, descriptors)
	if refused == 0 || len(held)*2 > descriptors/2 || len(held) < transfersPerUser {
		t.Errorf("%d downloads at once, %d refused", len(held), refused)
	}
	late, _ := s.member(t, "admin") // a sign-in, the terms
	wantProblem(t, late.do("GET", small.Path, nil), 429, "rate_limited")
	wantProblem(t, late.upload("a.txt", []byte("content")), 429, "rate_limited")
	late.do("POST", "/hubs", map[string]string{"name": "n"}).want(t, 201)
	late.do("GET", "/hubs", nil).want(t, 200)
	late.do("GET", "/healthz", nil).want(t, 200)
	for _, d := range held {
		d.Close()
	}
	waitUntil(t, "room again", func() bool {
		r, _ := late.elsewhere().try("GET", small.Path, nil)
		return r.status == 200
	})
}

// descriptors counts the open ones.
func (p *testProcess) descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// R6: a download or an upload that makes no progress for 30 s ends. A slow one that
// does goes on, for longer than that.
func TestStalledTransfersEnd(t *testing.T) {
	t.Parallel()
	s := startProcess(t)
	stalled, _ := s.member(t, "member")
	slow, _ := s.member(t, "member")
	large, content := stalled.largeFile(t)
	small := stalled.upload("small.txt", []byte("content")).stored(t)
	var all sync.WaitGroup

	// They fill their user's share; room comes when the first of them is given up.
	start := time.Now()
	for range transfersPerUser - 1 {
		if d := stalled.download(t, large.Path); d.status != 200 {
			t.Fatalf("a download: %d", d.status)
		}
	}
	upload := stalled.startUpload("stalled.txt")
	began := time.Now()
	all.Go(func() {
		waitWithin(t, 2*stallLimit, "the end of stalled downloads", func() bool {
			r, _ := stalled.elsewhere().try("GET", small.Path, nil)
			return r.status == 200
		})
		if ended := time.Since(start); ended < stallLimit-2*time.Second {
			t.Errorf("stalled transfers ended after %v", ended)
		}
		t.Logf("room %v after the stall", time.Since(start).Round(time.Second))
		waitWithin(t, 2*stallLimit, "the end of all that stalled", func() bool {
			var served sync.WaitGroup
			ok := make(chan bool, transfersPerUser)
			for range transfersPerUser {
				served.Go(func() {
					r, _ := stalled.elsewhere().try("GET", small.Path, nil)
					ok <- r.status == 200
				})
			}
			served.Wait()
			for range transfersPerUser {
				if !<-ok {
					return false
				}
			}
			return true
		})
		t.Logf("all ended %v after the stall", time.Since(start).Round(time.Second))
		var r *testResponse
		select {
		case r = <-upload.answer:
		case <-time.After(2 * stallLimit):
			t.Error("a stalled upload has not ended")
			return
		}
		t.Logf("the upload answered %d, %v after its stall", r.status, time.Since(began).Round(time.Second))
		if r.status != 0 && r.status != 400 && r.status != 408 {
			t.Errorf("a stalled upload: %v", r)
		}
		if ended := time.Since(began); ended < stallLimit-2*time.Second {
			t.Errorf("a stalled upload ended after %v", ended)
		}
	})

	// At most 16 KiB a second each, for longer than the limit of a stall.
	const piece = 16 << 10
	slowUntil := time.Now().Add(stallLimit * 3 / 2)
	all.Go(func() {
		d := slow.download(t, large.Path)
		got := make([]byte, 0, len(content))
		for time.Now().Before(slowUntil) {
			part := make([]byte, piece)
			n, err := io.ReadFull(d.body, part)
			if got = append(got, part[:n]...); err != nil {
				t.Errorf("a slow download ends after %d bytes: %v", len(got), err)
				return
			}
			time.Sleep(time.Second)
		}
		if !bytes.Equal(got, content[:len(got)]) {
			t.Errorf("a slow download: other bytes than those of the file")
		}
		d.Close() // with so small a buffer the rest would take minutes
	})
	all.Go(func() {
		reader, writer := io.Pipe()
		go func() {
			head, _, _ := strings.Cut(form(filePart("slow.bin"), "|"), "|")
			io.WriteString(writer, head)
			for time.Now().Before(slowUntil) {
				if _, err := writer.Write(content[:piece]); err != nil {
					return
				}
				time.Sleep(time.Second)
			}
			io.WriteString(writer, "\r\n--edge--\r\n")
			writer.Close()
		}()
		r, err := slow.elsewhere().try("POST", "/files/upload", reader, "Content-Type", formType)
		reader.CloseWithError(errors.Join(err, io.ErrClosedPipe))
		if r.status != 201 {
			t.Errorf("a slow upload: %v %v", err, r)
		}
	})
	all.Wait()
	if left := s.workingFiles(t); len(left) != 0 {
		t.Errorf("working files left: %q", left)
	}
}

// F4: what an upload could not undo because the database was away is undone by the
// running servers, though none of them ever has the folder to itself; so is what a
// killed server left. An upload that runs is spared, however old its file.
func TestUploadsAreUndoneLater(t *testing.T) {
	t.Parallel()
	direct := newDatabase(t)
	away, awayURL := proxyURL(t, direct)
	silent, silentURL := proxyURL(t, direct)
	first := startProcess(t, map[string]string{"DATABASE_URL": awayURL})
	second := startProcess(t, first.env, map[string]string{"DATABASE_URL": silentURL})
	killed := startProcess(t, first.env, map[string]string{"DATABASE_URL": direct})
	for _, s := range []*testProcess{first, second} {
		s.allowErrors("unavailable")
	}
	c, _ := first.member(t, "member")
	at := func(s *testProcess) *testClient {
		client := s.client(t)
		client.setToken(c.token())
		return client
	}
	kept := c.upload("kept.txt", []byte("content")).stored(t)

	// The row is not there, and the server can't know. (A prepared statement's text is not
	// sent again; the name of the file is.)
	away.when("lost.txt", away.cut)
	wantProblem(t, c.upload("lost.txt", []byte("content")), 503, "unavailable")
	// The row is there, but its answer is lost, and the database with it.
	silent.when("unanswered.txt", silent.dropReplies)
	wantProblem(t, at(second).upload("unanswered.txt", []byte("content")), 503, "unavailable")
	at(killed).startUpload("killed.txt")
	killed.signal(t, syscall.SIGKILL)
	killed.wait(t)
	if n := queryValue[int](t, direct, "select count(*) from files"); n != 2 {
		t.Errorf("%d rows, the test wants that of a file and one that nobody was told of", n)
	}
	if names := first.unfinishedFiles(t); len(names) != 3 {
		t.Errorf("left: %q, the test wants 3", names)
	}
	away.resume()
	silent.resume()
	running := at(second).startUpload("running.txt")
	enough, moved := make(chan struct{}), make(chan struct{})
	go func() { // it must move, or it would end as one that stalls
		defer close(moved)
		for {
			select {
			case <-enough:
				return
			case <-time.After(time.Second):
				io.WriteString(running.rest, "still there")
			}
		}
	}()
	before := 0
	// As if all of it had happened some minutes ago.
	old := time.Now().Add(-10 * time.Minute)
	for _, name := range first.unfinishedFiles(t) {
		if err := os.Chtimes(filepath.Join(first.env["FILES_DIR"], unfinished, name), old, old); err != nil {
			t.Error(err)
		}
	}
	waitWithin(t, 150*time.Second, "all undone but the upload that runs", func() bool {
		left := first.unfinishedFiles(t)
		if len(left) != before {
			before = len(left)
			t.Logf("unfinished: %q", left)
		}
		return len(left) == 1
	})
	close(enough)
	<-moved
	if r := running.finish(); r.status != 201 {
		t.Errorf("an upload that ran during the sweep: %v", r)
	}
	at(second).wantFile(t, kept, "content")
	waitUntil(t, "no working name left", func() bool { return len(first.unfinishedFiles(t)) == 0 })
	first.wantStored(t, 2)
}

// unfinishedFiles lists what has a working name.
func (s *testServer) unfinishedFiles(t testing.TB) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(s.env["FILES_DIR"], unfinished))
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// H5: an upload counts before any of its form has arrived.
func TestUploadWithoutItsFormIsATransfer(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	small := c.upload("small.txt", []byte("content")).stored(t)
	for range transfersPerUser {
		conn, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		io.WriteString(conn, c.uploadHead(formType, 1000))
	}
	waitUntil(t, "uploads without a form that fill the user's share", func() bool {
		r, _ := c.elsewhere().try("GET", small.Path, nil)
		return r.status == 429
	})
}

// H5: a download that ends because the file has lost its bytes gives its place back.
func TestLostFileKeepsNoTransfer(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.allowErrors("no such file or directory")
	c, _ := s.member(t, "member")
	lost := c.upload("lost.txt", []byte("content")).stored(t)
	kept := c.upload("kept.txt", []byte("content")).stored(t)
	if err := os.Remove(filepath.Join(s.env["FILES_DIR"], lost.FileID)); err != nil {
		t.Fatal(err)
	}
	for range transfersPerUser {
		wantProblem(t, c.elsewhere().do("GET", lost.Path, nil), 500, "internal")
	}
	c.elsewhere().do("GET", kept.Path, nil).want(t, 200)
}
