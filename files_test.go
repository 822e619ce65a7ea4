package main

// Tests of the time limits of transfers and of the sweep, with a fake clock.

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"hubs/internal/hubstest"
)

// A deadlineRecorder is an http.ResponseWriter that records the last deadlines that were set on it.
type deadlineRecorder struct {
	*httptest.ResponseRecorder
	read, write time.Time
}

func (d *deadlineRecorder) SetReadDeadline(t time.Time) error {
	d.read = t
	return nil
}

func (d *deadlineRecorder) SetWriteDeadline(t time.Time) error {
	d.write = t
	return nil
}

// newTransfer returns a request with this body, and what records the deadlines of its connection.
func newTransfer(body io.Reader) (*request, *deadlineRecorder) {
	d := &deadlineRecorder{ResponseRecorder: httptest.NewRecorder()}
	r := &request{
		Request:   httptest.NewRequest("POST", "/files/upload", body),
		serverLog: slog.New(slog.DiscardHandler),
	}
	r.w = &response{ResponseWriter: d}
	return r, d
}

// An upload ends when it makes no progress for stallTimeout, or when the time is up for what was
// received so far. The read deadline is the earlier of the two.
func TestUploadDeadlines(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name     string
		started  time.Duration // before now
		received int64         // bytes
		want     time.Duration // the read deadline, from now
	}{
		{name: "at the start", want: stallTimeout},
		{name: "with time left", received: 100 * transferPace, want: stallTimeout},
		{
			name:     "in its last second",
			started:  transferStart,
			received: transferPace,
			want:     time.Second,
		},
		{
			name:     "a byte short of the second's pace",
			started:  transferStart,
			received: 2*transferPace - 1,
			want:     time.Second,
		},
		{name: "25 MiB", started: transferStart, received: 25 << 20, want: stallTimeout},
		{name: "out of time", started: transferStart, want: 0},
	} {
		synctest.Test(t, func(t *testing.T) { // time stands still, so the deadline is exact
			r, d := newTransfer(strings.NewReader("x"))
			form := &uploadForm{
				request:  r,
				started:  time.Now().Add(-test.started),
				received: test.received,
				allowed:  test.received + 1,
			}
			form.Read(make([]byte, 1))
			if got := time.Until(d.read); got != test.want {
				t.Errorf("%s: got a read deadline in %v, want %v", test.name, got, test.want)
			}
		})
	}
}

// The time to write the answer to an upload begins when the upload has ended, however long it took.
// The upload of this test takes an hour, and is refused because its form is empty.
func TestAnswerToAnUploadHasItsOwnTime(t *testing.T) {
	t.Parallel()
	s, _ := newFilesServer(t, nil)
	synctest.Test(t, func(t *testing.T) {
		body, client := io.Pipe()
		time.AfterFunc(time.Hour, func() { client.Close() })
		r, d := newTransfer(body)
		r.Header.Set("Content-Type", "multipart/form-data; boundary=b")
		start := time.Now()
		s.upload(r)
		if got, want := d.write.Sub(start), time.Hour+answerTimeout; got != want {
			t.Errorf("got the write deadline %v after the start, want it after %v", got, want)
		}
	})
}

// H5: A download has the time for all of its bytes, from its start on.
func TestDownloadDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const seconds = 100
		r, d := newTransfer(nil)
		f := file{Name: "a.txt", ContentType: "text/plain", Size: seconds * transferPace}
		hubstest.Must(t, sendFile(r, f, bytes.NewReader(make([]byte, f.Size))))
		if got, want := time.Until(d.write), transferStart+seconds*time.Second; got != want {
			t.Errorf("got the write deadline in %v, want it in %v", got, want)
		}
		if d.Code != http.StatusOK || int64(d.Body.Len()) != f.Size {
			t.Errorf("got status %d and %d bytes, want 200 and %d", d.Code, d.Body.Len(), f.Size)
		}
	})
}

// newFilesServer returns a server without a database and with an empty FILES_DIR, and the path of
// that folder. Its store has no slots, so each statement fails.
func newFilesServer(t *testing.T, log io.Writer) (s *server, dir string) {
	t.Helper()
	dir = t.TempDir()
	s = newServer(config{env: envLocal, filesDir: dir}, &store{}, &logWriter{Writer: log})
	hubstest.Must(t, s.openFiles())
	t.Cleanup(func() { s.files.Close() })
	return s, dir
}

// F3: The sweep leaves a working name alone for as long as an upload may take, and sweeps it then.
// Each sweep of this test fails, because the database is away. So the working name stays, and the
// sweep tries again. If the folder of working names is gone, this is an error, not an empty folder.
func TestSweepSparesRunningUploads(t *testing.T) {
	t.Parallel()
	var log hubstest.Log
	s, dir := newFilesServer(t, &log)
	id, other := hubstest.NewUUID(), hubstest.NewUUID()
	working := filepath.Join(dir, unfinished, id)
	synctest.Test(t, func(t *testing.T) {
		for _, path := range []string{working, filepath.Join(dir, unfinished, other)} {
			hubstest.Must(t, os.WriteFile(path, nil, 0o600))
			hubstest.Must(t, os.Chtimes(path, time.Now(), time.Now()))
		}
		go s.sweepUploads()
		time.Sleep(transferTimeout(s.cfg.maxUploadBytes+maxFormBytes) + sweepReserve)
		if got := log.Count(id); got != 0 {
			t.Errorf("got %d lines about an upload that may be running, want 0:\n%s", got, &log)
		}
		time.Sleep(3 * sweepInterval)
		if _, err := os.Stat(working); err != nil {
			t.Error("the working name was removed although the database was away: ", err)
		}
		hubstest.Must(t, os.RemoveAll(filepath.Dir(working)))
		time.Sleep(2 * sweepInterval)
		before := log.Count(`"the sweep of an unfinished upload failed"`, id)
		hubstest.Must(t, os.Mkdir(filepath.Dir(working), 0o700))
		hubstest.Must(t, os.WriteFile(working, nil, 0o600))
		hubstest.Must(t, os.Chtimes(working, time.Time{}, time.Unix(0, 0)))
		time.Sleep(2 * sweepInterval)
		if got := log.Count(`"the sweep of an unfinished upload failed"`, id); got == before {
			t.Error("got no sweep after one without the folder, want the next ones")
		}
		close(s.stopping)
		time.Sleep(2 * sweepInterval) // sweepUploads ends
	})
	for _, id := range []string{id, other} { // the failure at one does not end a round
		if got := log.Count(`"the sweep of an unfinished upload failed"`, id); got < 2 {
			t.Errorf("got %d failed sweeps of an abandoned upload, want 2 or more:\n%s", got, &log)
		}
	}
	if log.Count("the sweep of unfinished uploads failed") == 0 {
		t.Errorf("got no failed sweep without the folder, want some:\n%s", &log)
	}
}

// F4: removeUpload removes the working name last. As long as the bytes can't be removed, the next
// sweep must find them by their working name. The id of this test leads out of FILES_DIR, so the
// removal of the final name fails. The removal of the working name would succeed.
func TestWorkingNameGoesLast(t *testing.T) {
	t.Parallel()
	s, dir := newFilesServer(t, nil)
	working := filepath.Join(dir, "x") // which is unfinished/../x
	hubstest.Must(t, os.WriteFile(working, nil, 0o600))
	if err := removeUpload(s.files, "../x"); err == nil {
		t.Error("got no error from removeUpload, want one: the bytes can't be removed")
	}
	if _, err := os.Stat(working); err != nil {
		t.Error("the working name was removed although the bytes were not: ", err)
	}
}

// F3: A form is accepted only if package multipart reads the same single file from it, within the
// limit, and its name can be stored.
func FuzzUploadForm(f *testing.F) {
	const head = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\n\r\n"
	f.Add([]byte(head + "text\r\n--b--\r\n"))
	f.Add([]byte(head + "\r\n--b\r\n" + head))
	f.Add([]byte("preamble\r\n" + head + "text\r\n--b--"))
	const maxFile = 100
	f.Fuzz(func(t *testing.T, body []byte) {
		r, _ := newTransfer(bytes.NewReader(body))
		r.Header.Set("Content-Type", "multipart/form-data; boundary=b")
		form := &uploadForm{request: r, maxFile: maxFile, started: time.Now(), allowed: maxPartHeaders}
		name, err := form.readHead()
		if err != nil {
			return
		}
		var stored bytes.Buffer
		size, err := form.readFile(&stored)
		if err != nil {
			return
		}
		parts := multipart.NewReader(bytes.NewReader(body), "b")
		part, err := parts.NextRawPart()
		if err != nil {
			t.Fatalf("got a form accepted that package multipart refuses: %v", err)
		}
		content, err := io.ReadAll(part)
		if err != nil || !bytes.Equal(content, stored.Bytes()) || size != int64(len(content)) {
			t.Errorf("got %d bytes %q, want %q, error %v", size, stored.Bytes(), content, err)
		}
		if size > maxFile || len(name) == 0 || len(name) > 255 || strings.ContainsAny(name, "/\\\x00\n") {
			t.Errorf("got %d bytes with the name %q accepted", size, name)
		}
		if _, err := parts.NextRawPart(); err == nil {
			t.Error("got a form of two parts accepted")
		}
	})
}

// H7: Whatever the Range header says, an answer has the whole file, or the bytes of its
// Content-Range, or is a 416.
func FuzzRange(f *testing.F) {
	const content = "0123456789"
	for _, header := range []string{"bytes=0-3", "bytes=-2", "bytes=2-,0-0", "bytes=9-3", "items=0-1"} {
		f.Add(header)
	}
	f.Fuzz(func(t *testing.T, header string) {
		r, d := newTransfer(nil)
		r.Method = "GET"
		r.Header.Set("Range", header)
		f := file{FileID: hubstest.NewUUID(), Name: "a.txt", ContentType: "text/plain", Size: int64(len(content))}
		err := sendFile(r, f, strings.NewReader(content))
		body := d.Body.String()
		var from, to int
		switch {
		case err != nil && toProblem(err).Status == 416:
		case d.Code == 200 && body == content:
		case d.Code == 206 && strings.HasPrefix(d.Header().Get("Content-Type"), "multipart/byteranges"):
			if strings.Count(body, "Content-Range:") > maxRanges {
				t.Errorf("%q: got %d ranges", header, strings.Count(body, "Content-Range:"))
			}
		case d.Code == 206:
			// net/http takes a suffix of 0 bytes for bytes 10-9.
			n, _ := fmt.Sscanf(d.Header().Get("Content-Range"), "bytes %d-%d/10", &from, &to)
			if n == 2 && from <= to+1 && to < len(content) && body == content[from:to+1] {
				return
			}
			fallthrough
		default:
			t.Errorf("%q: got status %d, %q, error %v", header, d.Code, body, err)
		}
	})
}
