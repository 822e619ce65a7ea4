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
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// waitSwept starts another server on the same data, and returns when its first sweep is over. A
// server sweeps the working names in alphabetical order. So this method makes the last working name
// that there can be, and waits until it is gone.
func (s *service) waitSwept() {
	s.t.Helper()
	last := hubstest.Unfinished + "/ffffffff-ffff-4fff-bfff-ffffffffffff"
	s.putFiles(time.Hour, last)
	hubstest.Start(s.t, s.Env)
	hubstest.WaitUntil(s.t, "the end of the sweep", func() bool {
		return !slices.Contains(s.FilesIn(s.t), last)
	})
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

// If a client disconnects in the middle of an upload, nothing of the upload is left, even while the
// database is unreachable. The test closes one connection and resets the other.
func TestClientGoneMidUpload(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	head := c.Head(
		"POST /files/upload",
		"Content-Type", "multipart/form-data; boundary=edge",
		"Content-Length", "200000",
	)
	half := "--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\n\r\n" +
		strings.Repeat("first half ", 8000)
	for _, reset := range []bool{false, true} {
		conn := hubstest.Dial(t, s.Addr)
		conn.Begin(head + half)
		hubstest.WaitFor(t, "number of working files", 1, func() int {
			return len(s.WorkingFiles(t))
		})
		s.proxy.Cut()
		if reset {
			conn.Conn.(*net.TCPConn).SetLinger(0) // Close sends a reset
		}
		conn.Close()
		s.waitFiles(0)
		s.proxy.Resume()
	}
	c.Store("b.txt", "content")
	s.WantStored(t, 1)
}

// breakOff closes the connection of an upload before the form is complete. It fails the test if an
// answer comes.
func breakOff(t *testing.T, upload *hubstest.HalfUpload) {
	t.Helper()
	upload.Rest.CloseWithError(io.ErrUnexpectedEOF)
	if r := <-upload.Answer; r.Status != 0 {
		t.Errorf("got the answer %v to an upload that was broken off, want none", r)
	}
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

// ageUnfinished sets the age of the files that WorkingFiles returns to an hour, so that the next sweep
// takes them for abandoned.
func (s *service) ageUnfinished() {
	s.t.Helper()
	old := time.Now().Add(-time.Hour)
	for _, path := range s.WorkingFiles(s.t) {
		hubstest.Must(s.t, os.Chtimes(path, old, old))
	}
}

// longestUpload is the time in which an upload of maxUpload bytes must end: a minute, and a second for
// each 16 KiB of the file and of the form around it, which may have 64 KiB.
const (
	maxUpload     = 16 << 20
	longestUpload = time.Minute + (maxUpload+64<<10)/(16<<10)*time.Second
)

// The sweep removes what is left of uploads whose server was killed, and nothing else. It waits for
// ten minutes more than an upload can take.
func TestUnfinishedUploadsAreSwept(t *testing.T) {
	t.Parallel()
	s, _ := start(t, map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(maxUpload)})
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

// If the insert of an upload's row gets no answer, the client gets a 503. The server can't know
// whether the row was written, so it keeps the bytes, and does not send the insert again.
func TestUploadRowIsUnanswered(t *testing.T) {
	t.Parallel()
	for name, breakAtInsert := range map[string]func(s *service){
		"broken before the answer reaches the server": func(s *service) {
			s.loseAnswerTo("a.txt")
		},
		"hung before the answer reaches the server": func(s *service) {
			s.proxy.When("a.txt", func() { s.proxy.WhenAnswered("", s.proxy.Hang) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, c := startBehindProxy(t)
			s.AllowErrorsWithAnyOf(unavailable)
			breakAtInsert(s)
			wantUnavailable(t, sendUpload(c, "a.txt"))
			s.proxy.Resume()
			s.wantKept(c)
		})
	}
}

// wantKept checks that the bytes of an upload are kept though its answer was a failure, because its row
// was written: the file is served, also after a sweep.
func (s *service) wantKept(c *hubstest.Client) {
	s.t.Helper()
	s.waitFiles(2) // the final and the working name
	id := filepath.Base(s.WorkingFiles(s.t)[0])
	path := "/files/" + id + "/a.txt"
	c.WantFile(path, "content")
	s.ageUnfinished()
	s.waitSwept()
	s.WantStored(s.t, 1)
	c.WantFile(path, "content")
}

// A FATAL error can end a connection after the row was written, such as at a stop of PostgreSQL. So it
// proves nothing about the row, in whatever language PostgreSQL writes the word.
func TestFatalErrorProvesNothing(t *testing.T) {
	t.Parallel()
	for _, word := range []string{"FATAL", "ВАЖНО"} {
		t.Run(word, func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			broken, through := newBrokenPostgres(t, database)
			s, c := startOn(t, through)
			s.AllowErrorsWithAnyOf(unavailable)
			s.Database = database
			fatal := "S" + word + "\x00VFATAL\x00C57P01\x00Mstopped\x00\x00"
			broken.Break(flaw{Kinds: "D", Break: instead('E', fatal)}, "insert into files")
			wantUnavailable(t, sendUpload(c, "a.txt"))
			broken.Mend()
			s.wantKept(c)
		})
	}
}

// An upload whose insert was not sent leaves nothing. A read-only database answers reads, so every
// upload comes so far, and their bytes would fill the disk.
func TestUnsentRowLeavesNoBytes(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	s.AllowErrorsWithAnyOf(unavailable)
	s.exec(`do $$ begin
		execute format('alter database %I set default_transaction_read_only = on', current_database());
	end $$`)
	s.dropConnections()
	wantUnavailable(t, sendUpload(c, "a.txt"))
	s.WantStored(t, 0)
}

// In the local environment, the server creates FILES_DIR. TestCommands shows that it does not start
// elsewhere.
func TestFilesDirMissing(t *testing.T) {
	t.Parallel()
	missing := filepath.Join(t.TempDir(), "missing")
	hubstest.Start(t, map[string]string{"FILES_DIR": missing})
	info, err := os.Stat(filepath.Join(missing, hubstest.Unfinished))
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("got %v, error %v, want a folder with the mode 0700", info, err)
	}
}

// E1: While FILES_DIR is missing, or another folder has taken its place, /healthz is a 503.
func TestFilesDirDisappears(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrorsWithAnyOf(unavailable)
	get(c, "/healthz").Want(t, 200)
	dir := s.Env["FILES_DIR"]
	os.Rename(dir, dir+"-moved")
	wantUnavailable(t, get(c, "/healthz"))
	hubstest.Must(t, os.CopyFS(dir, os.DirFS(dir+"-moved")))
	wantUnavailable(t, get(c, "/healthz"))
	hubstest.Must(t, os.RemoveAll(dir))
	os.Rename(dir+"-moved", dir)
	get(c, "/healthz").Want(t, 200)
}
