package hubstest

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Unfinished is the folder of working names in FILES_DIR.
const Unfinished = "unfinished"

// A HalfUpload is an upload whose beginning was sent, and whose rest waits for the test.
type HalfUpload struct {
	Content string         // of the whole file
	Rest    *io.PipeWriter // takes the rest of the form
	Answer  chan *Response // receives one answer; its status is 0 if the connection broke

	t      testing.TB
	unsent []byte // the rest of the form
}

// StartUpload sends the first 96 kB of a form with a file of 200 kB. It returns when the server has
// begun to write the file. The server writes 32 kB at once, and a proxy that buffers requests holds
// back some more: through one that holds back more than 64 kB, StartUpload fails.
func (c *Client) StartUpload(name string) *HalfUpload {
	c.t.Helper()
	before := len(c.srv.WorkingFiles(c.t))
	reader, writer := io.Pipe()
	u := &HalfUpload{
		Content: strings.Repeat("0123456789", 20_000),
		Rest:    writer,
		Answer:  make(chan *Response, 1),
		t:       c.t,
	}
	form, contentType := Form(name, []byte(u.Content))
	text, _ := io.ReadAll(form) // the form is in memory, so there is no error
	const first = 96 << 10
	u.unsent = text[first:]
	go func() {
		r, err := c.Elsewhere().Try("POST /files/upload", reader, "Content-Type", contentType)
		// After the answer, a write to Rest fails instead of blocking.
		reader.CloseWithError(errors.Join(err, io.ErrClosedPipe))
		u.Answer <- r
	}()
	writer.Write(text[:first])
	WaitUntil(c.t, "the first bytes of the upload under a working name", func() bool {
		return len(c.srv.WorkingFiles(c.t)) > before
	})
	return u
}

// Finish sends the rest of the form, and receives the answer as Client.Do does.
func (u *HalfUpload) Finish() *Response {
	u.t.Helper()
	u.Rest.Write(u.unsent)
	u.Rest.Close()
	r := <-u.Answer
	if r.Status == 0 {
		u.t.Error("side effect: POST /files/upload: no answer")
		return r
	}
	r.check(u.t)
	return r
}

// FilesIn lists FILES_DIR: first the final names, then the working names as unfinished/<id>.
func (s *Server) FilesIn(t testing.TB) (names []string) {
	t.Helper()
	for _, folder := range []string{"", Unfinished} {
		entries, err := os.ReadDir(filepath.Join(s.Env["FILES_DIR"], folder))
		Must(t, err)
		for _, entry := range entries {
			if entry.Name() != Unfinished {
				names = append(names, filepath.Join(folder, entry.Name()))
			}
		}
	}
	return names
}

// WorkingFiles returns the paths of the working names under which the server has written at least
// one byte.
func (s *Server) WorkingFiles(t testing.TB) (paths []string) {
	t.Helper()
	for _, name := range s.FilesIn(t) {
		path := filepath.Join(s.Env["FILES_DIR"], name)
		info, err := os.Stat(path)
		if err == nil && info.Size() > 0 && strings.HasPrefix(name, Unfinished) {
			paths = append(paths, path)
		}
	}
	return paths
}

// WantStored checks that n files are stored, each with a final name and a row, and that there is no
// other row and no working name.
func (s *Server) WantStored(t testing.TB, n int) {
	t.Helper()
	rows := Query[string](t, s.Database, `select coalesce(
		string_agg(file_id::text, ' ' order by file_id::text collate "C"), '') from files`)
	names := s.FilesIn(t)
	if len(names) != n || strings.Join(names, " ") != rows {
		t.Errorf("got the names %q and the rows %q, want the same %d ids in both", names, rows, n)
	}
}

// WantFile downloads a file and checks its content.
func (c *Client) WantFile(path, content string) {
	c.t.Helper()
	r := c.Elsewhere().Get(path)
	r.Want(c.t, 200)
	WantText(c.t, path, string(r.Body), content)
}
