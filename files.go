package main

// Files: taken in a stream, served with Range and ETag. The bytes are in FILES_DIR
// under the file's id, everything else about them in the table files.

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	maxFormBytes  = 64 << 10        // of a multipart form besides the file in it
	transferStart = time.Minute     // an upload or download may take this long, and
	transferPace  = 16 << 10        // a second more for each so many bytes
	refusedTime   = 5 * time.Second // for the rest of an upload that is refused already
	sniffLength   = 512             // bytes that http.DetectContentType looks at
	tempSuffix    = ".tmp"
)

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
// server ends. Who gets it alone is the only server: what lies half-done in the
// folder is then nobody's running upload, and is swept.
func (s *server) openFiles() error {
	lock := func(how int) error { return syscall.Flock(int(s.lock.Fd()), how) }
	return inOrder(
		func() error { return os.MkdirAll(s.cfg.filesDir, 0o700) },
		func() (err error) { s.files, err = os.OpenRoot(s.cfg.filesDir); return err },
		func() (err error) { s.folder, err = s.files.Open("."); return err },
		func() (err error) { s.lock, err = s.files.OpenFile(".lock", os.O_CREATE|os.O_RDWR, 0o600); return err },
		func() error {
			if lock(syscall.LOCK_EX|syscall.LOCK_NB) != nil {
				return nil
			}
			return s.sweepFiles()
		},
		func() error { return lock(syscall.LOCK_SH) },
	)
}

// sweepFiles takes back the uploads that a killed server left, but for those whose
// row is there: they only lose their temporary name. Files without such a name are
// never touched, not even when the database is another one and knows none of them.
func (s *server) sweepFiles() error {
	for {
		names, err := s.folder.Readdirnames(1000)
		if err != nil {
			return ignore(err, io.EOF)
		}
		for _, name := range names {
			id, temporary := strings.CutSuffix(name, tempSuffix)
			if !temporary || !isUUID(id) {
				continue
			}
			if err := s.takeBack(id, findFile); err != nil {
				return err
			}
			s.log.Info("swept", "fileId", id)
		}
	}
}

// takeBack undoes an upload that did not get to its end, unless its row is there once
// the statement is done: a row may have been written although its step failed. No
// statement: the row was never tried. The temporary name goes last, so that the sweep
// of the next start finds what can't be undone now.
func (s *server) takeBack(fileID, statement string) error {
	err := sql.ErrNoRows
	if statement != "" {
		err = s.store.row(statement, []any{fileID}, new(string))
	}
	if errors.Is(err, sql.ErrNoRows) || err == nil && statement == deleteFile {
		err = ignore(s.files.Remove(fileID), fs.ErrNotExist)
	}
	if err != nil {
		return err
	}
	return ignore(s.files.Remove(fileID+tempSuffix), fs.ErrNotExist)
}

const (
	findFile   = "select file_id from files where file_id = $1"
	deleteFile = "delete from files where file_id = $1 returning file_id"
)

func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

// upload stores a file. The row makes it visible, and is written when the bytes are
// on disk under their name for good. The temporary name stays beside that name until
// the row is there: it is a second link to the bytes, and tells the sweep that the
// upload is not at its end.
func (s *server) upload(x *exchange, _ nothing) (f file, err error) {
	defer func() {
		// A connection that is closed over bytes still on their way loses the answer.
		if err != nil && x.r.Header.Get("Expect") == "" {
			http.NewResponseController(x).SetReadDeadline(time.Now().Add(refusedTime))
			io.CopyN(io.Discard, x.r.Body, s.cfg.maxUploadBytes)
		}
	}()
	form, err := s.openForm(x)
	if err != nil {
		return f, err
	}
	f.FileID, f.Name = newUUID(), form.name
	f.Path = "/files/" + f.FileID + "/" + url.PathEscape(f.Name)
	temporary := f.FileID + tempSuffix
	var out *os.File
	undo := ""
	step := func(name string, run func() error) func() error {
		return func() error { return s.uploadStep(name, run) }
	}
	err = inOrder(
		step("create", func() (err error) {
			out, err = s.files.OpenFile(temporary, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			return err
		}),
		step("write", func() (err error) { f.ContentType, f.Size, err = form.receive(out); return err }),
		step("sync", func() error { return errors.Join(out.Sync(), out.Close()) }),
		step("link", func() error { return s.files.Link(temporary, f.FileID) }),
		step("sync folder", s.folder.Sync), // the new name shall last a power cut, too
		step("row", func() error {
			undo = deleteFile
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
	s.files.Remove(temporary) // should this fail, the next sweep does it
	x.Header().Set("Location", f.Path)
	return f, nil
}

// uploadForm is the form that a file comes in. It gives the upload as long as it
// keeps its pace, and the answer after it the time that every answer has.
type uploadForm struct {
	body       io.Reader
	connection *http.ResponseController
	started    time.Time
	parts      *multipart.Reader
	file       *multipart.Part
	name       string // of the file

	// Bytes: of the body so far; of the file at most; of the body what may be the file's.
	received, maxFile, inFile int64
}

// openForm checks the headers of an upload before a byte of it is read, then those
// of its file.
func (s *server) openForm(x *exchange) (*uploadForm, error) {
	kind, params := mediaType(x.r.Header)
	limit := s.cfg.maxUploadBytes + maxFormBytes
	switch {
	case kind != "multipart/form-data":
		return nil, errMediaType
	case params["boundary"] == "":
		return nil, invalid(fieldError{"body", "must name its boundary in the Content-Type"})
	case x.r.ContentLength > limit:
		return nil, errTooLarge
	}
	f := &uploadForm{body: http.MaxBytesReader(x.ResponseWriter, x.r.Body, limit),
		connection: http.NewResponseController(x), started: time.Now(), maxFile: s.cfg.maxUploadBytes}
	f.parts = multipart.NewReader(f, params["boundary"])
	var err error
	if f.file, err = f.parts.NextRawPart(); err != nil {
		return nil, bodyProblem(err)
	}
	f.inFile = f.maxFile
	_, disposition, _ := mime.ParseMediaType(f.file.Header.Get("Content-Disposition"))
	sent := disposition["filename"]
	f.name = sent[strings.LastIndexAny(sent, `/\`)+1:] // some clients send the folders, too
	if f.file.FormName() != "file" || !isFileName(f.name) {
		return nil, invalid(fieldError{"file", "must be the form's only part, named by 1 to 255 bytes of printable UTF-8"})
	}
	return f, nil
}

// Read is what the multipart reader reads the body by. That reader would hold 10 MB of
// a part's headers in memory.
func (f *uploadForm) Read(p []byte) (int, error) {
	if f.received-f.inFile > maxFormBytes {
		return 0, errTooLarge
	}
	deadline := f.started.Add(transferTime(f.received))
	f.connection.SetReadDeadline(deadline)
	f.connection.SetWriteDeadline(deadline.Add(answerTimeout))
	n, err := f.body.Read(p)
	f.received += int64(n)
	return n, err
}

func transferTime(bytes int64) time.Duration {
	return transferStart + time.Duration(bytes/transferPace)*time.Second
}

// receive writes the file to out, finds its type and size, and sees to it that
// nothing follows.
func (f *uploadForm) receive(out io.Writer) (kind string, size int64, err error) {
	file := bufio.NewReader(io.LimitReader(f.file, f.maxFile+1))
	head, err := file.Peek(sniffLength)
	if kind = contentType(head); err == nil || err == io.EOF {
		size, err = file.WriteTo(out)
	}
	if err != nil {
		return kind, size, bodyProblem(err)
	}
	if size > f.maxFile {
		return kind, size, errTooLarge
	}
	f.inFile = size
	if _, err = f.parts.NextRawPart(); err == nil {
		return kind, size, invalid(fieldError{"file", "must be the form's only part"})
	}
	if err == io.EOF { // of the form; the body may go on
		_, err = io.Copy(io.Discard, f)
	}
	if err != nil {
		return kind, size, bodyProblem(err)
	}
	if f.received-size > maxFormBytes {
		return kind, size, errTooLarge
	}
	return kind, size, nil
}

// contentType is the server's own finding, whatever the client said. Text with a
// tag in it could be SVG or HTML, which Go does not always see: it is no text here.
func contentType(head []byte) string {
	found := http.DetectContentType(head)
	if strings.HasPrefix(found, "text/") && (bytes.ContainsRune(head, '<') || !startsUTF8(head)) {
		return "application/octet-stream"
	}
	return found
}

// startsUTF8 lets the last character be cut off where the text goes on.
func startsUTF8(head []byte) bool {
	valid := bytes.ToValidUTF8(head, nil)
	cut := len(head) - len(valid)
	return cut == 0 || len(head) == sniffLength && cut < utf8.UTFMax && bytes.HasPrefix(head, valid)
}

func newUUID() string {
	b := make([]byte, 16)
	rand.Read(b)            // never fails
	b[6] = b[6]&0x0f | 0x40 // version 4, RFC 9562
	b[8] = b[8]&0x3f | 0x80 // variant
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// fileContent is a file on its way to the client.
type fileContent struct {
	file
	content *os.File
}

// check holds the bytes on disk against the row.
func (c fileContent) check() bool {
	info, err := c.content.Stat()
	whole := err == nil && info.Mode().IsRegular() && info.Size() == c.Size && c.file.check()
	if !whole {
		c.content.Close()
	}
	return whole
}

// getFile finds the file by id and name. Any signed-in user may read a file whose
// path he knows; ids can't be guessed.
func (s *server) getFile(x *exchange, _ nothing) (c fileContent, err error) {
	err = s.store.row("select file_id, name, content_type, size, created_at from files where file_id = $1",
		[]any{x.pathID("fileId")}, &c.FileID, &c.Name, &c.ContentType, &c.Size, &c.CreatedAt)
	switch {
	case err != nil:
		return c, err
	case c.Name != x.r.PathValue("name"):
		return c, errNotFound
	}
	c.content, err = s.files.Open(c.FileID)
	return c, err
}

// inlineTypes are what a browser may show in place; everything else is offered for
// saving. nosniff and a sandbox hold in either case.
var inlineTypes = []string{"image/png", "image/jpeg", "image/gif", "image/webp", "text/plain; charset=utf-8"}

// send serves the bytes with Range and conditional requests (RFC 9110). A file
// never changes, so its id is its ETag.
func (c fileContent) send(x *exchange) {
	defer c.content.Close()
	disposition := "attachment"
	if slices.Contains(inlineTypes, c.ContentType) {
		disposition = "inline"
	}
	h := x.Header()
	h.Set("Content-Type", c.ContentType)
	h.Set("Content-Disposition", mime.FormatMediaType(disposition, map[string]string{"filename": c.Name}))
	h.Set("Content-Security-Policy", contentPolicy+"; sandbox")
	h.Set("Cache-Control", "private, no-cache")
	h.Set("ETag", `"`+c.FileID+`"`)
	http.NewResponseController(x).SetWriteDeadline(time.Now().Add(transferTime(c.Size)))
	http.ServeContent(x, x.r, "", c.CreatedAt, c.content)
}
