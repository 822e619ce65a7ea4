package main

import (
	"bytes"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"hubs/internal/hubstest"
)

// A deadlineRecorder is an http.ResponseWriter that records the deadlines that are set on it.
type deadlineRecorder struct {
	http.ResponseWriter
	read, write time.Time       // the last deadlines
	left        []time.Duration // the time left until each write deadline when it was set
}

// Write takes a second, so that time passes between the pieces of a download.
func (d *deadlineRecorder) Write(b []byte) (int, error) {
	time.Sleep(time.Second)
	return d.ResponseWriter.Write(b)
}

func (d *deadlineRecorder) SetReadDeadline(t time.Time) error {
	d.read = t
	return nil
}

func (d *deadlineRecorder) SetWriteDeadline(t time.Time) error {
	d.write = t
	d.left = append(d.left, time.Until(t))
	return nil
}

// An upload may take a minute, and one second more for each 16 KiB that the server has received. An
// upload without progress ends after 30 s. So the read deadline is the earlier of the two.
func TestUploadDeadlines(t *testing.T) {
	t.Parallel()
	const stall = 30 * time.Second
	const pace = 16 << 10 // bytes
	for _, test := range []struct {
		name     string
		started  time.Duration // before now
		received int64         // bytes
		want     time.Duration // the read deadline, from now
	}{
		{name: "at the start", want: stall},
		{name: "with time left", received: 100 * pace, want: stall},
		{name: "in its last second", started: time.Minute, received: pace, want: time.Second},
		{
			name:     "a byte short of the second's pace",
			started:  time.Minute,
			received: 2*pace - 1,
			want:     time.Second,
		},
		{name: "25 MiB", started: time.Minute, received: 25 << 20, want: stall},
		{
			name:     "25 MiB, late",
			started:  time.Minute + 25<<20/pace*time.Second,
			received: 25 << 20,
			want:     0, // the time is up
		},
		{name: "at its limit", started: time.Minute, want: 0},
	} {
		synctest.Test(t, func(t *testing.T) { // time stands still, so the deadline is exact
			d := &deadlineRecorder{}
			form := &uploadForm{
				state:    &requestState{ResponseWriter: d},
				started:  time.Now().Add(-test.started),
				received: test.received,
				part:     &multipart.Part{},
				body:     io.NopCloser(strings.NewReader("x")),
			}

			form.Read(make([]byte, 1))
			want := time.Now().Add(test.want)
			if !d.read.Equal(want) {
				t.Errorf("%s: got the read deadline %v, want %v", test.name, d.read, want)
			}
		})
	}
}

// The time to write the answer to an upload begins when the upload has ended, however long it took.
// The upload of this test takes an hour, and is refused because its form is empty.
func TestAnswerToAnUploadHasItsOwnTime(t *testing.T) {
	t.Parallel()
	s, _ := newFilesServer(t, io.Discard)
	synctest.Test(t, func(t *testing.T) {
		body, client := io.Pipe()
		time.AfterFunc(time.Hour, func() { client.Close() })
		request := httptest.NewRequest("POST", "/files/upload", body)
		request.Header.Set("Content-Type", "multipart/form-data; boundary=b")
		d := &deadlineRecorder{}
		start := time.Now()
		s.upload(&requestState{ResponseWriter: d, request: request, user: &user{}})
		if got, want := d.write.Sub(start), time.Hour+30*time.Second; got != want {
			t.Errorf("got the write deadline %v after the start, want it after %v", got, want)
		}
	})
}

// H5: Each piece of a download gets 30 s to be sent, whatever the size of the file.
func TestDownloadDeadlines(t *testing.T) {
	t.Parallel()
	s, dir := newFilesServer(t, io.Discard)
	const pieces = 10
	err := os.WriteFile(filepath.Join(dir, "id"), make([]byte, pieces*transferPiece), 0o600)
	hubstest.Must(t, err)
	synctest.Test(t, func(t *testing.T) {
		d := &deadlineRecorder{ResponseWriter: httptest.NewRecorder()}
		f := file{FileID: "id", Name: "a.txt", ContentType: "text/plain", Size: pieces * transferPiece}
		request := httptest.NewRequest("GET", "/", nil)
		err := s.sendFile(&requestState{ResponseWriter: d, request: request, user: &user{}}, f)
		if err != nil {
			t.Error("sendFile: ", err)
		}
		for _, left := range d.left {
			if want := 30 * time.Second; left != want {
				t.Errorf("got a write deadline in %v, want it in %v", left, want)
			}
		}
		if len(d.left) < pieces {
			t.Errorf("got %d write deadlines, want %d or more, one a piece", len(d.left), pieces)
		}
	})
}

// newFilesServer returns a server without a database and with an empty FILES_DIR, and the path of
// that folder.
func newFilesServer(t *testing.T, log io.Writer) (s *server, dir string) {
	t.Helper()
	dir = t.TempDir()
	s = serverWithoutDatabase(log)
	s.cfg.filesDir = dir
	hubstest.Must(t, s.openFiles())
	t.Cleanup(func() { s.files.Close() })
	return s, dir
}

// After a sweep that fails, the server sweeps again at the next interval. A folder of working names
// that can't be read is an error, not an empty folder.
func TestSweepGoesOnAfterAFailure(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s, dir := newFilesServer(t, &log)
	hubstest.Must(t, os.Remove(filepath.Join(dir, unfinished)))
	synctest.Test(t, func(t *testing.T) {
		go s.sweepUploads()
		time.Sleep(2*sweepInterval + time.Second)
		s.stopping.Store(true)
		time.Sleep(sweepInterval) // sweepUploads ends
	})
	if got := strings.Count(log.String(), "the sweep of unfinished uploads failed"); got != 3 {
		t.Errorf("got %d failed sweeps, want 3: at the start and after each of 2 intervals", got)
	}
}

// newWorkingName creates a file with a working name. It returns the id and the open file.
func newWorkingName(t *testing.T, dir string) (id string, working *os.File) {
	t.Helper()
	id = hubstest.NewUUID()
	working, err := os.Create(filepath.Join(dir, unfinished, id))
	hubstest.Must(t, err)
	t.Cleanup(func() { working.Close() })
	return id, working
}

// A sweep never locks a young file, not even for a moment, because the upload that has just created
// the file may be about to lock it.
//
// This is a race of 20,000 sweeps: a failure is certain to be a fault, but a pass is only likely to
// be right.
func TestSweepNeverLocksAYoungFile(t *testing.T) {
	t.Parallel()
	s, dir := newFilesServer(t, io.Discard)
	id, working := newWorkingName(t, dir)
	const sweeps = 20_000
	done := make(chan error, 1)
	go func() {
		var err error
		for n := 0; n < sweeps && err == nil; n++ {
			err = s.sweepUpload(id)
		}
		done <- err
	}()
	for len(done) == 0 {
		if err := lockFile(working); err != nil {
			t.Errorf("the upload locks its file: got the error %v, want none", err)
			break
		}
		syscall.Flock(int(working.Fd()), syscall.LOCK_UN)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A sweep does not remove the working name of a running upload of its own server, however old the
// file is.
func TestSweepSparesRunningUploads(t *testing.T) {
	t.Parallel()
	s, dir := newFilesServer(t, io.Discard)
	id, working := newWorkingName(t, dir)
	hubstest.Must(t, lockFile(working))
	old := time.Now().Add(-2 * sweepInterval)
	hubstest.Must(t, os.Chtimes(working.Name(), old, old))
	// Without the lock of the upload, the sweep would ask the database, and return an error here.
	if err := s.sweepUpload(id); err != nil {
		t.Error("the sweep of a running upload: ", err)
	}
	if _, err := os.Stat(working.Name()); err != nil {
		t.Error("the working name of a running upload was swept: ", err)
	}
}

// removeUpload removes the working name last. As long as the bytes can't be removed, the next sweep
// must find them by their working name. The id of this test leads out of FILES_DIR, so the removal
// of the final name fails. The removal of the working name would succeed.
func TestWorkingNameGoesLast(t *testing.T) {
	t.Parallel()
	s, dir := newFilesServer(t, io.Discard)
	working := filepath.Join(dir, "x") // which is unfinished/../x
	hubstest.Must(t, os.WriteFile(working, nil, 0o600))
	if err := s.removeUpload("../x"); err == nil {
		t.Error("got no error from removeUpload, want one: the bytes can't be removed")
	}
	if _, err := os.Stat(working); err != nil {
		t.Error("the working name was removed although the bytes were not: ", err)
	}
}
