package hubstest

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Unfinished is the folder of working names in FILES_DIR.
const Unfinished = "unfinished"

// A HalfUpload is an upload of which the server has the beginning.
type HalfUpload struct {
	Content string
	Rest    *io.PipeWriter // CloseWithError: the client goes away
	Answer  chan *Response // gets one; status 0 means that the connection broke
	unsent  []byte
}

// StartUpload sends the first 32 kB of a form with a file of 200 kB, which is less than some
// proxies would hold back. It returns when the server has begun to write the file.
func (c *Client) StartUpload(name string) *HalfUpload {
	c.t.Helper()
	before := len(c.srv.WorkingFiles(c.t))
	u := c.BeginUpload(name)
	WaitUntil(c.t, "a file that is being written", func() bool {
		return len(c.srv.WorkingFiles(c.t)) > before
	})
	return u
}

// BeginUpload is StartUpload that does not wait for the server.
func (c *Client) BeginUpload(name string) *HalfUpload {
	reader, writer := io.Pipe()
	u := &HalfUpload{
		Content: strings.Repeat("0123456789", 20_000),
		Rest:    writer,
		Answer:  make(chan *Response, 1),
	}
	form, contentType := Form(name, []byte(u.Content))
	text, _ := io.ReadAll(form) // it is in memory
	const first = 32 << 10
	u.unsent = text[first:]
	go func() {
		r, err := c.Elsewhere().Try("POST", "/files/upload", reader, "Content-Type", contentType)
		reader.CloseWithError(errors.Join(err, io.ErrClosedPipe)) // so that no write hangs
		u.Answer <- r
	}()
	writer.Write(text[:first])
	return u
}

// Finish sends the rest and returns the answer.
func (u *HalfUpload) Finish() *Response {
	u.Rest.Write(u.unsent)
	u.Rest.Close()
	return <-u.Answer
}

// FilesIn lists FILES_DIR: the stored files, then the working names as unfinished/name.
func (s *Server) FilesIn(t testing.TB) (names []string) {
	for _, folder := range []string{"", Unfinished} {
		entries, err := os.ReadDir(filepath.Join(s.Env["FILES_DIR"], folder))
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			if entry.Name() != Unfinished {
				names = append(names, filepath.Join(folder, entry.Name()))
			}
		}
	}
	return names
}

// WorkingFiles returns the paths of the uploads that are being written.
func (s *Server) WorkingFiles(t testing.TB) (paths []string) {
	for _, name := range s.FilesIn(t) {
		path := filepath.Join(s.Env["FILES_DIR"], name)
		info, err := os.Stat(path)
		if err == nil && info.Size() > 0 && strings.HasPrefix(name, Unfinished) {
			paths = append(paths, path)
		}
	}
	return paths
}

// AgeUnfinished makes all working names so old that the next sweep looks at them.
func (s *Server) AgeUnfinished(t testing.TB) {
	old := time.Now().Add(-time.Hour)
	for _, path := range s.WorkingFiles(t) {
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
	}
}

// WantStored checks that there are n files, and nothing besides: no working name, no bytes
// without a row, no row without bytes.
func (s *Server) WantStored(t testing.TB, n int) {
	t.Helper()
	rows := Query[string](t, s.Database, `select coalesce(
		string_agg(file_id::text, ' ' order by file_id::text collate "C"), '') from files`)
	names := s.FilesIn(t)
	if len(names) != n || strings.Join(names, " ") != rows {
		t.Errorf("got %q on disk and the rows %q, want %d files with a row each", names, rows, n)
	}
}

// WantFile fetches a file and checks its content.
func (c *Client) WantFile(path, content string) {
	c.t.Helper()
	r := c.Elsewhere().Get(path).Want(c.t, 200)
	if got := string(r.Body); got != content {
		c.t.Errorf("%s: got %d bytes, want the %d of the file", path, len(got), len(content))
	}
}
