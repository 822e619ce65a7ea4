package faults

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// onDisk returns the place of a file's bytes.
func (s *service) onDisk(path string) string {
	id := strings.Split(path, "/")[2]
	return filepath.Join(s.Env["FILES_DIR"], id)
}

// sweep starts another server on the same data, and returns it when its first sweep is over. A
// sweep goes through the names in their order, so it is over when the last one is gone.
func (s *service) sweep() *hubstest.Server {
	s.t.Helper()
	last := hubstest.Unfinished + "/ffffffff-ffff-4fff-bfff-ffffffffffff"
	s.put(time.Hour, last)
	if after := slices.Max(s.FilesIn(s.t)); after != last {
		s.t.Fatalf("%s is swept after %s, which is to be the last", after, last)
	}
	second, err := hubstest.TryStart(s.t, hubstest.Serve(), s.Env)
	if err != nil {
		s.t.Fatal("the next server does not start: ", err)
	}
	hubstest.WaitUntil(s.t, "the end of the sweep", func() bool {
		return !slices.Contains(s.FilesIn(s.t), last)
	})
	return second
}

// waitFiles waits until FILES_DIR has n files, those with a working name included.
func (s *service) waitFiles(n int) {
	s.t.Helper()
	hubstest.WaitUntil(s.t, fmt.Sprint(n, " files"), func() bool {
		return len(s.FilesIn(s.t)) == n
	})
}

// killMidUpload ends a server in the middle of an upload.
func (s *service) killMidUpload(c *hubstest.Client) {
	s.t.Helper()
	upload := c.StartUpload("lost.txt")
	s.Signal(s.t, syscall.SIGKILL)
	s.Wait(s.t)
	breakOff(s.t, upload)
	s.AgeUnfinished(s.t)
}

// breakOff breaks an upload off, which then has no answer.
func breakOff(t *testing.T, upload *hubstest.HalfUpload) {
	t.Helper()
	upload.Rest.CloseWithError(io.ErrUnexpectedEOF)
	if r := <-upload.Answer; r.Status != 0 {
		t.Errorf("got %v, want no answer", r)
	}
}

// A client that goes away in the middle of an upload, in order or not, leaves nothing.
func TestClientGoneMidUpload(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	head := c.Head("POST /files/upload", "Content-Type: multipart/form-data; boundary=edge")
	half := "--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\n\r\n" +
		strings.Repeat("first half ", 8000)
	for _, framing := range []string{
		"Content-Length: 200000\r\n\r\n",
		"Transfer-Encoding: chunked\r\n\r\n30000\r\n",
	} {
		for _, reset := range []bool{false, true} {
			conn := hubstest.Dial(t, s.Addr)
			io.WriteString(conn, head+framing+half)
			hubstest.WaitUntil(t, "a working file", func() bool {
				return len(s.WorkingFiles(t)) == 1
			})
			if reset {
				conn.Conn.(*net.TCPConn).SetLinger(0)
			}
			conn.Close()
			s.waitFiles(0)
		}
	}
	store(t, c, "b.txt")
	s.WantStored(t, 1)
}

// A server that is killed in the middle of an upload leaves no part of it to the next one, which
// has all the others.
func TestKilledMidUpload(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	kept := store(t, c, "kept.txt")
	s.killMidUpload(c)
	second := s.sweep()
	client := second.With(t, c.Token())
	s.WantStored(t, 1)
	client.WantFile(kept, "content")
	store(t, client, "next.txt")
	s.WantStored(t, 2)
}

// put makes files of that age in FILES_DIR.
func (s *service) put(age time.Duration, names ...string) {
	s.t.Helper()
	modified := time.Now().Add(-age)
	for _, name := range names {
		path := filepath.Join(s.Env["FILES_DIR"], name)
		err := os.WriteFile(path, []byte("x"), 0o600)
		err = errors.Join(err, os.Chtimes(path, modified, modified))
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

// A sweep removes what killed uploads have left, and nothing else. What it can't open keeps
// neither the server from starting nor the rest from being swept.
func TestSweep(t *testing.T) {
	t.Parallel()
	s, _ := start(t)
	s.Stop(t)
	const working = hubstest.Unfinished + "/"
	newID := hubstest.NewUUID
	partial := newID()  // killed before the file was whole
	rowless := newID()  // killed before its row
	complete := newID() // killed after its row
	young := newID()    // its upload may be about to lock its file
	s.put(time.Hour, working+partial, working+rowless, rowless, working+complete, complete)
	s.put(0, working+young, young)
	s.exec(`insert into files (file_id, name, content_type, size)
		values ($1, 'a.txt', 'text/plain', 1)`, complete)
	foreign := []string{
		newID(), // has no working name: of another database
		newID() + ".bak",
		strings.ToUpper(newID()),
		"notes.txt",
		working + newID() + ".bak",
		working + strings.ToUpper(newID()),
		working + "a note",
	}
	s.put(time.Hour, foreign...)
	// A folder can't be swept. It is the first by its name.
	const folder = working + "00000000-0000-4000-8000-000000000000"
	err := os.Mkdir(filepath.Join(s.Env["FILES_DIR"], folder), 0o700)
	if err != nil {
		t.Fatal(err)
	}

	second := s.sweep()
	second.AllowErrors("the sweep of unfinished uploads failed")

	got := s.FilesIn(t)
	want := append(foreign, complete, working+young, young, folder)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("left:\n%q\nwant:\n%q", got, want)
	}
	second.Log.WaitFor(t, "the sweep of unfinished uploads failed", "is a directory")
}

// A sweep by another server spares an upload that runs, however old its file.
func TestSweepSparesUploadsOfOtherServers(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	running := c.StartUpload("running.txt")
	s.AgeUnfinished(t)
	s.sweep()
	running.Finish().Want(t, 201)
	s.WantStored(t, 1)
}

// A sweep removes nothing that it could not ask the database about.
func TestSweepWithoutDatabase(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	s.killMidUpload(c)
	id := filepath.Base(s.WorkingFiles(t)[0])
	s.proxy.When(id, s.proxy.Cut)
	second := hubstest.Start(t, s.Env)
	second.AllowErrors("the sweep of unfinished uploads failed")
	second.Log.WaitFor(t, "the sweep of unfinished uploads failed", "unavailable")
	s.waitFiles(1)
	s.proxy.Resume()
	s.sweep()
	s.WantStored(t, 0)
}

// A client that goes away in the middle of an upload leaves nothing, also without a database.
func TestClientGoneWithoutDatabase(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	upload := c.StartUpload("broken.txt")
	s.proxy.Cut()
	breakOff(t, upload)
	s.waitFiles(0)
}

// An upload whose row did not get to the database is a 503. The server can't know this, so it
// leaves the bytes to the sweep, which removes them.
func TestUploadRowIsLost(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	s.AllowErrors("unavailable")
	s.proxy.When("lost.txt", s.proxy.Cut)
	wantUnavailable(t, uploadText(c, "lost.txt"))
	s.proxy.Resume()
	s.waitFiles(2) // the final and the working name
	s.AgeUnfinished(t)
	s.sweep()
	s.WantStored(t, 0)
}

// An upload whose row was made is a 503 too if the database's answer is lost. The row is not sent
// again, and the sweep finds it and keeps the bytes.
func TestUploadRowIsUnanswered(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	s.AllowErrors("unavailable")
	s.proxy.When("done.txt", s.proxy.DropReplies)
	answer := make(chan *hubstest.Response, 1)
	go func() {
		answer <- uploadText(c, "done.txt")
	}()
	hubstest.WaitUntil(t, "the row", func() bool {
		return s.count("files where name = 'done.txt'") == 1
	})
	s.proxy.Resume()
	wantUnavailable(t, <-answer)
	s.waitFiles(2) // the final and the working name
	s.AgeUnfinished(t)
	s.sweep()
	s.WantStored(t, 1)
}

// A link that is made but reported as failed, as a network file system may do: here the test has
// made it, so the server's own call fails.
func TestUploadLinkDoneButReportedAsFailed(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrors(`"error":"internal`)
	upload := c.StartUpload("a.txt")
	working := s.WorkingFiles(t)[0]
	final := filepath.Join(s.Env["FILES_DIR"], filepath.Base(working))
	if err := os.Link(working, final); err != nil {
		t.Fatal(err)
	}
	hubstest.WantProblem(t, upload.Finish(), 500, "internal")
	s.WantStored(t, 0)
}

// Only the local environment makes FILES_DIR. A folder that goes away later is a 503 of /healthz.
func TestFilesDirMissing(t *testing.T) {
	t.Parallel()
	missing := filepath.Join(t.TempDir(), "missing")
	file := hubstest.Binary()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	env := hubstest.ServerEnv(t, hubstest.StagingEnv(mail))
	for _, dir := range []string{
		missing,
		file,
		filepath.Join(file, "within"),
	} {
		env["FILES_DIR"] = dir
		code, _, stderr := hubstest.Run(env, "serve")
		if code != 2 || !strings.HasPrefix(stderr, "FILES_DIR: ") {
			t.Errorf("%s: got %d, %q, want 2 and the name of the setting", dir, code, stderr)
		}
	}
	s := hubstest.Start(t, map[string]string{"FILES_DIR": missing})
	s.AllowErrors("unavailable")
	info, err := os.Stat(filepath.Join(missing, hubstest.Unfinished))
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("got %v, %v, want a folder for the server alone", info, err)
	}
	c := s.Client(t)
	get(c, "/healthz").Want(t, 200)
	os.Rename(missing, missing+"-moved")
	wantUnavailable(t, get(c, "/healthz"))
	os.Rename(missing+"-moved", missing)
	get(c, "/healthz").Want(t, 200)
}

// storeLarge uploads more than the buffers of a connection take.
func storeLarge(t *testing.T, c *hubstest.Client) (path string) {
	t.Helper()
	large := make([]byte, 16<<20)
	return location(t, c.Upload("large.bin", large))
}

// open begins a request, and waits for the status of the answer. Of a download it reads next to
// nothing.
func open(t *testing.T, s *hubstest.Server, head string, want int) *hubstest.Conn {
	t.Helper()
	conn := hubstest.Dial(t, s.Addr)
	conn.Conn.(*net.TCPConn).SetReadBuffer(4096)
	io.WriteString(conn, head+"\r\n")
	line, err := conn.In.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, fmt.Sprintf("HTTP/1.1 %d ", want)) {
		t.Fatalf("got %q, %v, want %d", line, err, want)
	}
	conn.SetDeadline(time.Time{})
	return conn
}

// hold begins a download.
func (s *service) hold(c *hubstest.Client, path string) *hubstest.Conn {
	s.t.Helper()
	return open(s.t, s.Server, c.Head("GET "+path), 200)
}

// One user has 16 transfers at a time, as docs/deploy.md says, whatever the address; the next is
// a 429. Others are served, and a transfer that ends makes room, however it ends.
func TestTransfersOfOneUserAreBounded(t *testing.T) {
	t.Parallel()
	const limit = 16
	s, greedy := start(t)
	s.AllowErrors("no such file or directory")
	neighbour, _ := s.Member(t, "member")
	large := storeLarge(t, greedy)
	small := store(t, greedy, "small.txt")
	lost := store(t, greedy, "lost.txt")
	os.Remove(s.onDisk(lost))
	for range limit { // those that have ended don't count
		greedy.WantFile(small, "content")
		get(greedy, lost).Want(t, 500)
		greedy.Elsewhere().Get(small, "If-None-Match", "*").Want(t, 304)
		greedy.Elsewhere().Do("POST", "/files/upload", nil).Want(t, 415)
	}

	var held []*hubstest.Conn
	for range limit - 2 {
		held = append(held, s.hold(greedy, large))
	}
	started := greedy.StartUpload("a.txt")
	empty := hubstest.Dial(t, s.Addr) // an upload counts before any of its form has come
	head := greedy.Head(
		"POST /files/upload",
		"Content-Type: multipart/form-data; boundary=edge",
		"Content-Length: 1000",
	)
	io.WriteString(empty, head+"\r\n")
	served := func() bool {
		r, _ := greedy.Elsewhere().Try("GET", small, nil)
		return r.Status == 200
	}
	hubstest.WaitUntil(t, "as many transfers as the user may have", func() bool {
		return !served()
	})
	hubstest.WantProblem(t, get(greedy, small), 429, "rate_limited")
	hubstest.WantProblem(t, uploadText(greedy, "b.txt"), 429, "rate_limited")
	greedy.Get("/hubs").Want(t, 200)
	neighbour.IP = greedy.IP
	neighbour.Get(small).Want(t, 200)

	held[0].Close()
	hubstest.WaitUntil(t, "room after a client has gone", served)
	s.hold(greedy, large)
	get(greedy, small).Want(t, 429)
	started.Finish().Want(t, 201)
	hubstest.WaitUntil(t, "room after an upload", served)
}

// A transfer that makes no progress ends. A slow one, which began before it, goes on.
func TestStalledTransfersEnd(t *testing.T) {
	t.Parallel()
	s, stalled := start(t)
	slow, _ := s.Member(t, "member")
	large := storeLarge(t, stalled)
	small := store(t, stalled, "small.txt")
	download := s.hold(slow, large)
	moving := slow.StartUpload("slow.txt")
	upload := stalled.StartUpload("stalled.txt")
	hubstest.WaitUntil(t, "a user who has no transfer left", func() bool {
		if get(stalled, small).Status == 429 {
			return true
		}
		s.hold(stalled, large)
		return false
	})

	piece := make([]byte, 16<<10)
	var ended *hubstest.Response
	for ended == nil {
		select {
		case ended = <-upload.Answer:
		case <-time.Tick(time.Second):
		}
		_, readErr := io.ReadFull(download.In, piece)
		_, writeErr := moving.Rest.Write(piece)
		if err := errors.Join(readErr, writeErr); err != nil {
			t.Fatal("a slow transfer ends before the stalled one, or with it: ", err)
		}
	}
	ended.Want(t, 400)
	s.hold(stalled, large) // has the place of the upload
	hubstest.WaitUntil(t, "room after a stalled download", func() bool {
		return get(stalled, small).Status == 200
	})
	moving.Finish().Want(t, 201)
	s.WantStored(t, 3)
}
