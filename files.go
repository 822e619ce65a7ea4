package main

// Files: taken in a stream, served with Range and ETag. The bytes are in FILES_DIR
// under the file's id, everything else about them in the table files.

import (
	"bytes"
	"cmp"
	"database/sql"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

const maxFormBytes = 64 << 10       // of a multipart form besides the file in it
const transferStart = time.Minute   // an upload or download may take this long, and
const transferPace = 16 << 10       // a second more for each so many bytes
const refusedTime = 5 * time.Second // for the rest of an upload that is refused already
const sniffLength = 512             // bytes that http.DetectContentType looks at

// unfinished is the folder in FILES_DIR where an upload has its working name until its
// row is there. Only what has a name there is ever swept. This folder is not synced: a
// power cut may cost such a name, and leave bytes that nobody can reach and nothing sweeps.
const unfinished = "unfinished"

// file is what the table has about a file.
type file struct {
	FileID      string    `json:"fileId"`
	Name        string    `json:"name"`
	ContentType string    `json:"contentType"`
	Size        int64     `json:"size"` // bytes
	Path        string    `json:"path"`
	CreatedAt   time.Time `json:"createdAt"`
}

func (f file) check() bool {
	return isUUID(f.FileID) && isFileName(f.Name) && f.ContentType != "" && f.Size >= 0 && !f.CreatedAt.IsZero()
}

// isFileName keeps out what a path or a header could trip over.
func isFileName(name string) bool {
	return name != "" && name != "." && name != ".." && len(name) <= 255 && utf8.ValidString(name) &&
		!strings.ContainsAny(name, `/\`) && !strings.ContainsFunc(name, unicode.IsControl)
}

// openFiles opens FILES_DIR. Nothing reached through s.files lies outside the folder,
// whatever the name (os.Root).
//
// Every server holds the lock shared while it runs; the kernel frees it however the
// server ends. Who gets it alone is the only server: what lies unfinished in the
// folder is then nobody's running upload, and is swept.
func (s *server) openFiles() error {
	return inOrder(
		func() error { return os.MkdirAll(s.cfg.filesDir+"/"+unfinished, 0o700) },
		func() (err error) { s.files, err = os.OpenRoot(s.cfg.filesDir); return err },
		func() (err error) { s.folder, err = s.files.Open("."); return err },
		func() (err error) { s.lock, err = s.files.OpenFile(".lock", os.O_CREATE|os.O_RDWR, 0o600); return err },
		s.sweepFiles,
		func() error { return s.flock(syscall.LOCK_SH) },
	)
}

func (s *server) flock(how int) error { return syscall.Flock(int(s.lock.Fd()), how) }

// sweepFiles takes back the uploads that a killed server left. Those whose row is there
// only lose their working name.
func (s *server) sweepFiles() error {
	if s.flock(syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return nil // another server runs
	}
	left, err := os.ReadDir(s.cfg.filesDir + "/" + unfinished)
	for _, entry := range left {
		if id := entry.Name(); err == nil && isUUID(id) {
			s.log.Info("sweeping", "fileId", id)
			err = s.takeBack(id, findRow)
		}
	}
	return err
}

// A row means that the bytes are needed. dropRow gives none: once it is done, they may go.
const findRow = "select file_id from files where file_id = $1"
const dropRow = "with dropped as (delete from files where file_id = $1) select file_id from files where false"

// takeBack removes the bytes of an upload, unless the statement gives a row, and then
// its working name: last, so that the sweep of the next start finds what can't be taken
// back now. No statement: the row was never tried.
func (s *server) takeBack(fileID, statement string) error {
	err := sql.ErrNoRows
	if statement != "" {
		err = s.store.row(statement, []any{fileID}, new(string))
	}
	if errors.Is(err, sql.ErrNoRows) {
		err = s.files.RemoveAll(fileID)
	}
	if err != nil {
		return err
	}
	return s.files.RemoveAll(unfinished + "/" + fileID)
}

// upload stores a file. The row makes it visible, and is written when the bytes are
// on disk under their name for good. The working name is a second link to them and
// stays until the row is there.
func (s *server) upload(x *exchange, _ nothing) (f file, err error) {
	form, err := s.openForm(x)
	defer func() {
		// A connection that is closed over bytes still on their way loses the answer. Who
		// said Expect sends them once openForm asks for the first: where it did not, to
		// read would be to ask for them.
		if err != nil && (form != nil || x.r.Header.Get("Expect") == "") {
			http.NewResponseController(x).SetReadDeadline(time.Now().Add(refusedTime))
			io.CopyN(io.Discard, x.r.Body, s.cfg.maxUploadBytes)
		}
	}()
	if err != nil {
		return f, err
	}
	if err := s.store.row("select gen_random_uuid()", nil, &f.FileID); err != nil {
		return f, err
	}
	f.Name, f.Path = form.name, "/files/"+f.FileID+"/"+url.PathEscape(form.name)
	workName, undo := unfinished+"/"+f.FileID, ""
	var out *os.File
	err = inOrder(
		s.uploadStep("create", func() (err error) {
			out, err = s.files.OpenFile(workName, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
			return err
		}),
		s.uploadStep("write", func() (err error) { f.ContentType, f.Size, err = form.receive(out); return err }),
		s.uploadStep("sync", func() error { return errors.Join(out.Sync(), out.Close()) }),
		s.uploadStep("link", func() error { return s.files.Link(workName, f.FileID) }),
		s.uploadStep("sync folder", func() error { return s.folder.Sync() }), // the name shall last a power cut, too
		s.uploadStep("row", func() error {
			undo = dropRow // it may be there although this step fails
			return s.store.row(`insert into files (file_id, user_id, name, content_type, size)
				values ($1, $2, $3, $4, $5) returning created_at`,
				[]any{f.FileID, x.user.UserID, f.Name, f.ContentType, f.Size}, &f.CreatedAt)
		}),
	)
	if err != nil {
		out.Close() // a nil or closed one says so, no more
		if left := s.takeBack(f.FileID, undo); left != nil {
			x.log.Warn("failed upload left for the next sweep", "fileId", f.FileID, "error", left)
		}
		return f, err
	}
	s.files.Remove(workName) // should this fail, the next sweep does it
	x.Header().Set("Location", f.Path)
	return f, nil
}

// uploadForm is the form that a file comes in. It gives the upload as long as it
// keeps its pace, and the answer after it the time that every answer has.
type uploadForm struct {
	x        *exchange
	started  time.Time
	parts    *multipart.Reader
	file     *multipart.Part
	name     string // of the file
	received int64  // bytes of the body so far
	allowed  int64  // of these: first for the headers of the file, then with any file, then with this one
}

// openForm checks the headers of an upload before a byte of it is read, then those of its
// file: with an error it gives the form only where it has begun to read.
func (s *server) openForm(x *exchange) (*uploadForm, error) {
	kind, params := mediaType(x.r.Header)
	switch {
	case kind != "multipart/form-data":
		return nil, errMediaType
	case params["boundary"] == "":
		return nil, invalid(fieldError{"body", "must name its boundary in the Content-Type"})
	case x.r.ContentLength > maxFormBytes+s.cfg.maxUploadBytes:
		return nil, errTooLarge
	}
	f := &uploadForm{x: x, started: time.Now(), allowed: maxFormBytes}
	f.parts = multipart.NewReader(f, params["boundary"])
	var err error
	if f.file, err = f.parts.NextRawPart(); err != nil {
		return f, bodyProblem(err)
	}
	f.allowed += s.cfg.maxUploadBytes
	_, disposition, _ := mime.ParseMediaType(f.file.Header.Get("Content-Disposition"))
	sent := disposition["filename"]
	f.name = sent[strings.LastIndexAny(sent, `/\`)+1:] // some clients send the folders, too
	if f.file.FormName() != "file" || !isFileName(f.name) {
		return f, invalid(fieldError{"file", "must be the form's only part, its name 1 to 255 bytes of printable UTF-8"})
	}
	return f, nil
}

// Read is what the multipart reader reads the body by. That reader would hold 10 MB of
// a part's headers in memory.
func (f *uploadForm) Read(p []byte) (int, error) {
	if f.received > f.allowed {
		return 0, errTooLarge
	}
	connection, deadline := http.NewResponseController(f.x), f.started.Add(transferTime(f.received))
	connection.SetReadDeadline(deadline)
	connection.SetWriteDeadline(deadline.Add(answerTimeout))
	n, err := f.x.r.Body.Read(p[:min(int64(len(p)), f.allowed-f.received+1)])
	f.received += int64(n)
	return n, err
}

func transferTime(size int64) time.Duration {
	return transferStart + time.Duration(size/transferPace)*time.Second
}

// receive writes the file to out, finds its type and size, and sees to it that
// nothing follows.
func (f *uploadForm) receive(out io.Writer) (kind string, size int64, err error) {
	maxFile := f.allowed - maxFormBytes
	head, err := io.ReadAll(io.LimitReader(f.file, sniffLength))
	if err == nil {
		size, err = io.Copy(out, io.MultiReader(bytes.NewReader(head), f.file))
	}
	if err == nil {
		f.allowed = maxFormBytes + min(size, maxFile)
		if _, err = f.parts.NextRawPart(); err == nil {
			return kind, size, invalid(fieldError{"file", "must be the form's only part"})
		}
	}
	// The form's own end is io.EOF as it is (a body that breaks off gives one that is wrapped).
	// The body may go on after it, and counts as far as it does.
	if err == io.EOF {
		_, err = io.Copy(io.Discard, f)
	}
	switch {
	case err != nil:
		return kind, size, bodyProblem(err)
	case size > maxFile, f.received > f.allowed:
		return kind, size, errTooLarge
	}
	return contentType(head), size, nil
}

// contentType is the server's own finding, whatever the client said. Text with a
// tag in it could be SVG or HTML, which Go does not always see: it is no text here.
// Where a text goes on, its last character here may be cut off.
func contentType(head []byte) string {
	found, valid := http.DetectContentType(head), bytes.ToValidUTF8(head, nil)
	cut := len(head) - len(valid)
	isUTF8 := cut == 0 || len(head) == sniffLength && cut < utf8.UTFMax && bytes.HasPrefix(head, valid)
	if strings.HasPrefix(found, "text/") && (bytes.ContainsRune(head, '<') || !isUTF8) {
		return "application/octet-stream"
	}
	return found
}

// fileContent is a file on its way to the client.
type fileContent struct {
	file
	content *os.File
}

// check holds the bytes on disk against the row. (The runtime closes a file that fails.)
func (c fileContent) check() bool {
	info, err := c.content.Stat()
	return err == nil && info.Mode().IsRegular() && info.Size() == c.Size && c.file.check()
}

// getFile finds the file by id and name. Any signed-in user may read a file whose
// path he knows; ids can't be guessed.
func (s *server) getFile(x *exchange, _ nothing) (c fileContent, err error) {
	name := x.r.PathValue("name")
	err = s.store.row("select file_id, name, content_type, size, created_at from files where file_id = $1 and name = $2",
		[]any{x.pathID("fileId"), sql.Null[string]{V: name, Valid: isFileName(name)}},
		&c.FileID, &c.Name, &c.ContentType, &c.Size, &c.CreatedAt)
	if err == nil {
		c.content, err = s.files.Open(c.FileID)
	}
	return c, err
}

// dispositions are of what a browser may show in place; everything else is offered for
// saving. nosniff and a sandbox hold in either case.
var dispositions = map[string]string{"image/png": "inline", "image/jpeg": "inline", "image/gif": "inline",
	"image/webp": "inline", "text/plain; charset=utf-8": "inline"}

// send serves the bytes with Range and conditional requests (RFC 9110, as far as
// http.ServeContent keeps it). A file never changes, so its id is its ETag.
func (c fileContent) send(x *exchange) {
	defer c.content.Close()
	disposition := cmp.Or(dispositions[c.ContentType], "attachment")
	x.Header().Set("Content-Type", c.ContentType)
	x.Header().Set("Content-Disposition", mime.FormatMediaType(disposition, map[string]string{"filename": c.Name}))
	x.Header().Set("Content-Security-Policy", contentPolicy+"; sandbox")
	x.Header().Set("Cache-Control", "private, no-cache")
	x.Header().Set("ETag", `"`+c.FileID+`"`)
	http.NewResponseController(x).SetWriteDeadline(time.Now().Add(transferTime(c.Size)))
	http.ServeContent(x, x.r, "", c.CreatedAt, c.content)
}
