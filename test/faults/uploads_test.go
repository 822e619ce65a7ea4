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

// onDisk returns where the bytes of a file are on disk. path is its path in the API.
func (s *service) onDisk(path string) string {
	id := strings.Split(path, "/")[2]
	return filepath.Join(s.Env["FILES_DIR"], id)
}

// waitSwept starts another server on the same data, and returns it when its first sweep is over. A
// server sweeps the working names in alphabetical order. So this method makes the last working name
// that there can be, and waits until it is gone.
func (s *service) waitSwept() *hubstest.Server {
	s.t.Helper()
	last := hubstest.Unfinished + "/ffffffff-ffff-4fff-bfff-ffffffffffff"
	s.putFiles(time.Hour, last)
	second, err := hubstest.TryStart(s.t, hubstest.Serve(), s.Env)
	if err != nil { // not marked as setup: no leftover may prevent a start, which is a rule
		s.t.Fatal("starting another server: ", err)
	}
	hubstest.WaitUntil(s.t, "the end of the sweep", func() bool {
		return !slices.Contains(s.FilesIn(s.t), last)
	})
	return second
}

// waitFiles waits until there are n names in FILES_DIR, final names and working names together.
func (s *service) waitFiles(n int) {
	s.t.Helper()
	want := fmt.Sprint(n, " names")
	hubstest.WaitFor(s.t, "names in FILES_DIR", want, func() string {
		names := s.FilesIn(s.t)
		if len(names) == n {
			return want
		}
		return fmt.Sprintf("%q", names)
	})
}

// killMidUpload kills the server in the middle of an upload. It makes the working file that is left
// old enough to be swept.
func (s *service) killMidUpload(c *hubstest.Client) {
	s.t.Helper()
	upload := c.StartUpload("lost.txt")
	s.Signal(s.t, syscall.SIGKILL)
	s.WaitExit(s.t)
	breakOff(upload).Want(s.t, noAnswer)
	s.AgeUnfinished(s.t)
}

// breakOff ends the client's side of an upload before the form is complete.
func breakOff(upload *hubstest.HalfUpload) *hubstest.Response {
	upload.Rest.CloseWithError(io.ErrUnexpectedEOF)
	return <-upload.Answer
}

// noAnswer is the status of a Response if no answer came.
const noAnswer = 0

// If a client disconnects in the middle of an upload, nothing of the upload is left. The test
// closes and resets connections, with Content-Length and with chunked bodies.
func TestClientGoneMidUpload(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	half := "--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\n\r\n" +
		strings.Repeat("first half ", 8000)
	for framing, body := range map[string]string{
		"Content-Length: 200000":     half,
		"Transfer-Encoding: chunked": "30000\r\n" + half, // the size of the chunk is hexadecimal
	} {
		name, value, _ := strings.Cut(framing, ": ")
		head := c.Head(
			"POST /files/upload",
			"Content-Type", "multipart/form-data; boundary=edge",
			name, value,
		)
		for _, reset := range []bool{false, true} {
			conn := hubstest.Dial(t, s.Addr)
			conn.Begin(head + body)
			hubstest.WaitFor(t, "number of working files", 1, func() int {
				return len(s.WorkingFiles(t))
			})
			if reset {
				conn.Conn.(*net.TCPConn).SetLinger(0) // Close sends a reset
			}
			conn.Close()
			s.waitFiles(0)
		}
	}
	c.Store("b.txt", "content")
	s.WantStored(t, 1)
}

// putFiles creates files in FILES_DIR. age is the time since their last modification.
func (s *service) putFiles(age time.Duration, names ...string) {
	s.t.Helper()
	modified := time.Now().Add(-age)
	for _, name := range names {
		path := filepath.Join(s.Env["FILES_DIR"], name)
		err := os.WriteFile(path, []byte("x"), 0o600)
		err = errors.Join(err, os.Chtimes(path, modified, modified))
		hubstest.Must(s.t, err)
	}
}

// longestUpload is the time in which the largest upload must end: a minute, and a second for each
// 16 KiB of the file and of the form around it, which may have 64 KiB.
const longestUpload = time.Minute + (26214400+64<<10)/(16<<10)*time.Second

// The sweep removes what is left of uploads whose server was killed, and nothing else. It waits for
// ten minutes more than an upload can take.
func TestUnfinishedUploadsAreSwept(t *testing.T) {
	t.Parallel()
	s, _ := start(t)
	s.Stop(t)
	const working = hubstest.Unfinished + "/"
	const old = longestUpload + 11*time.Minute
	newID := hubstest.NewUUID
	partial := newID()  // killed before the link to the final name
	rowless := newID()  // killed before the row was written
	complete := newID() // killed after the row was written
	young := newID()    // may be under way, on another server
	s.putFiles(old, working+partial, working+rowless, rowless, working+complete, complete)
	s.putFiles(longestUpload+9*time.Minute, working+young, young)
	s.exec(`insert into files (file_id, name, content_type, size)
		values ($1, 'a.txt', 'text/plain', 1)`, complete)
	foreign := []string{
		newID(), // no working name: the file may belong to another database
		newID() + ".bak",
		strings.ToUpper(newID()),
		"notes.txt",
		working + newID() + ".bak",
		working + strings.ToUpper(newID()),
		working + "a note",
	}
	s.putFiles(old, foreign...)

	s.waitSwept()

	got := s.FilesIn(t)
	want := append(foreign, complete, working+young, young)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("names after the sweep: got\n%q\nwant\n%q", got, want)
	}
}

// The sweep of another server does not touch an upload that goes on, however long ago it began.
func TestSweepSparesUploadsOfOtherServers(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	running := c.StartUpload("running.txt")
	s.AgeUnfinished(t)
	running.Send(64 << 10)
	hubstest.WaitUntil(t, "more bytes on disk", func() bool {
		info, err := os.Stat(s.WorkingFiles(t)[0])
		return err == nil && time.Since(info.ModTime()) < time.Minute
	})
	s.waitSwept()
	running.Finish().Want(t, 201)
	s.WantStored(t, 1)
}

// If the sweep can't ask the database whether an upload has a row, it removes nothing of that
// upload. A later sweep does so.
func TestSweepWithoutDatabase(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	s.killMidUpload(c)
	id := filepath.Base(s.WorkingFiles(t)[0])
	s.proxy.When(id, s.proxy.Cut) // when the sweep asks for the row
	second := hubstest.Start(t, s.Env)
	second.AllowErrorsWithAnyOf("the sweep of an unfinished upload failed")
	second.Log.WaitFor(t, "the sweep of an unfinished upload failed", "unavailable")
	s.waitFiles(1)
	s.proxy.Resume()
	s.waitSwept()
	s.WantStored(t, 0)
}

// If a client disconnects in the middle of an upload, nothing of the upload is left, even while the
// database is unreachable.
func TestClientGoneWithoutDatabase(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	upload := c.StartUpload("broken.txt")
	s.proxy.Cut()
	breakOff(upload).Want(t, noAnswer)
	s.waitFiles(0)
}

// If the insert of an upload's row gets no answer, the client gets a 503. The server can't know
// whether the row was written, so it keeps the bytes, and does not send the insert again. The sweep
// keeps the bytes if it finds the row, and removes them otherwise.
func TestUploadRowIsUnanswered(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name          string
		breakAtInsert func(s *service)
		stored        int
	}{
		{
			name:          "broken before the insert reaches the database",
			breakAtInsert: func(s *service) { s.proxy.When("a.txt", s.proxy.Cut) },
			stored:        0,
		},
		{
			name:          "broken before the answer reaches the server",
			breakAtInsert: func(s *service) { s.loseAnswerTo("a.txt") },
			stored:        1,
		},
		{
			name: "hung before the answer reaches the server",
			breakAtInsert: func(s *service) {
				s.proxy.When("a.txt", func() { s.proxy.WhenAnswered("", s.proxy.Hang) })
			},
			stored: 1,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s, c := startBehindProxy(t)
			s.AllowErrorsWithAnyOf(unavailable)
			test.breakAtInsert(s)
			wantUnavailable(t, sendUpload(c, "a.txt"))
			s.proxy.Resume()
			s.waitFiles(2) // the final and the working name
			id := filepath.Base(s.WorkingFiles(t)[0])
			s.wantRows(test.stored, "files where file_id = $1", id)
			wantServed := func() {
				t.Helper()
				if test.stored == 1 {
					c.WantFile("/files/"+id+"/a.txt", "content")
				}
			}
			wantServed()
			s.AgeUnfinished(t)
			s.waitSwept()
			s.WantStored(t, test.stored)
			wantServed()
		})
	}
}

// If a link to the final name is made but reported as failed, as on a network file system, the
// upload gets a 500, and the server removes both names. Here the test makes the link first, so the
// server's own call fails.
func TestUploadLinkDoneButReportedAsFailed(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrorsWithAnyOf(`"code":"internal`)
	upload := c.StartUpload("a.txt")
	working := s.WorkingFiles(t)[0]
	final := filepath.Join(s.Env["FILES_DIR"], filepath.Base(working))
	hubstest.Must(t, os.Link(working, final)) // the server will make the same link
	upload.Finish().WantProblem(t, 500, "internal")
	s.WantStored(t, 0)
}

// The server creates FILES_DIR in the local environment only. Elsewhere, it does not start if the
// folder is missing or is not a folder.
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
			t.Errorf("%s: got exit status %d, error %q, want 2 and the name of the setting",
				dir, code, stderr)
		}
	}
	hubstest.Start(t, map[string]string{"FILES_DIR": missing}) // in the local environment
	info, err := os.Stat(filepath.Join(missing, hubstest.Unfinished))
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("got %v, error %v, want a folder with the mode 0700", info, err)
	}
}

// E1: While FILES_DIR is missing, /healthz is a 503.
func TestFilesDirDisappears(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrorsWithAnyOf(unavailable)
	get(c, "/healthz").Want(t, 200)
	dir := s.Env["FILES_DIR"]
	os.Rename(dir, dir+"-moved")
	wantUnavailable(t, get(c, "/healthz"))
	os.Rename(dir+"-moved", dir)
	get(c, "/healthz").Want(t, 200)
}

// largeSize is more than the buffers of a connection hold.
const largeSize = 16 << 20

// storeLarge uploads a file of largeSize and returns its path.
func storeLarge(t *testing.T, c *hubstest.Client) (path string) {
	t.Helper()
	large := make([]byte, largeSize)
	return location(t, c.Upload("large.bin", large))
}

// beginDownload begins a download and does not read its bytes.
func (s *service) beginDownload(c *hubstest.Client, path string) *hubstest.Conn {
	s.t.Helper()
	return beginRequest(s.t, s.Server, c.Head("GET "+path), 200)
}

// The server bounds no user's transfers: a page loads its 40 pictures at once. Here, all begin before
// the first one ends.
func TestOneUserHasManyTransfers(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	path := storeLarge(t, c)
	for range 40 {
		s.beginDownload(c, path)
	}
	upload := c.StartUpload("a.txt")
	get(c, path).Want(t, 200)
	upload.Finish().Want(t, 201)
}

// H1: The server ends an upload that makes no progress. A slow one that began before goes on.
func TestStalledUploadEnds(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	slow := c.StartUpload("slow.txt")
	stalled := c.StartUpload("stalled.txt")
	for range 40 { // longer than the server waits for progress
		time.Sleep(time.Second)
		slow.Send(1 << 10)
	}
	select {
	case ended := <-stalled.Answer:
		ended.WantProblem(t, 400, "invalid_request")
	default:
		t.Error("the stalled upload has not ended")
	}
	slow.Finish().Want(t, 201)
	s.WantStored(t, 1)
}
