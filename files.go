package main

// Files: taken in a stream, served with Range and ETag. The bytes are in FILES_DIR under the
// file's id; everything else about a file is in the table files.
//
// An upload has two names on disk. Its working name, unfinished/<id>, exists while it runs,
// and the upload holds a lock (flock) on that file. Its final name, <id>, is a second link to the
// same bytes. The row in the table comes last and makes the file visible.
//
// A working name that is a minute old and whose lock is free belongs to no running upload. The
// sweep looks at such names once a minute, in every server that uses the folder. If it has a row,
// the upload is complete, and only the working name is removed; if not, the bytes are, too.

import (
	"bytes"
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
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	maxPartHeaders = 4 << 10         // bytes of a form before the file in it begins
	maxFormBytes   = 64 << 10        // bytes of a form besides the file in it
	uploadStart    = time.Minute     // the least time that an upload has
	uploadPace     = 16 << 10        // bytes that give an upload one more second
	refusedTimeout = 5 * time.Second // for reading the rest of a refused upload
	sniffLength    = 512             // bytes that http.DetectContentType looks at
	maxRanges      = 16              // of a Range header; one with more is ignored

	maxUserTransfers = 16 // uploads and downloads of a user at a time

	unfinished    = "unfinished" // the folder of the working names, in FILES_DIR
	sweepInterval = time.Minute  // also the least age of what is swept
)

// A file is what the table knows about a file.
type file struct {
	FileID      string    `json:"fileId"`
	Name        string    `json:"name"`
	ContentType string    `json:"contentType"`
	Size        int64     `json:"size"` // bytes
	Path        string    `json:"path"`
	CreatedAt   time.Time `json:"createdAt"`
}

func (f file) isValid() bool {
	return isUUID(f.FileID) && isFileName(f.Name) && f.ContentType != "" && f.Size >= 0 &&
		!f.CreatedAt.IsZero()
}

// unsafeInName has what could lead out of a folder, and the characters that set the direction of
// text: with one of these, "invoice" + U+202E + "gnp.exe" is shown as "invoiceexe.png".
const unsafeInName = `/\` + "\u202A\u202B\u202C\u202D\u202E\u2066\u2067\u2068\u2069"

// isFileName refuses names that are unsafe in a path, in a header or on a screen.
func isFileName(name string) bool {
	if name == "" || name == "." || name == ".." || len(name) > 255 || !utf8.ValidString(name) {
		return false
	}
	return !strings.ContainsAny(name, unsafeInName) && !strings.ContainsFunc(name, unicode.IsControl)
}

// openFiles opens FILES_DIR. Only the local environment makes that folder. Elsewhere a missing
// folder may be a missing mount, which would later hide what was uploaded meanwhile.
//
// Nothing that is reached through s.files lies outside the folder, whatever the name: it is an
// os.Root (F1).
func (s *server) openFiles() error {
	dir := s.cfg.filesDir
	if s.cfg.env == envLocal {
		os.MkdirAll(dir, 0o700) // if this fails, OpenRoot says why
	}
	files, err := os.OpenRoot(dir)
	if err == nil {
		err = files.MkdirAll(unfinished, 0o700)
	}
	if err != nil {
		return usageError("FILES_DIR: must be a folder that the server may write to (only the local " +
			"environment makes it): " + err.Error())
	}
	s.files = files
	return nil
}

// checkFiles fails if FILES_DIR is gone, or if the mount that held it is: the empty folder below
// the mount does not have the folder of the working names.
func (s *server) checkFiles() error {
	_, err := os.Stat(path.Join(s.cfg.filesDir, unfinished))
	return err
}

// sweepUploads looks at every working name at once, then every sweepInterval until the server
// stops. One that can't be swept does not keep the others.
func (s *server) sweepUploads() {
	for !s.stopping.Load() {
		entries, err := fs.ReadDir(s.files.FS(), unfinished)
		for _, entry := range entries {
			err = errors.Join(err, s.sweepUpload(entry.Name()))
		}
		if err != nil {
			s.log.Error("the sweep of unfinished uploads failed", "error", err)
		}
		time.Sleep(sweepInterval)
	}
}

// sweepUpload cleans up after one upload, unless it still runs. Of an upload that was cut off,
// killed or refused, nothing is kept (F3).
func (s *server) sweepUpload(id string) error {
	if !isUUID(id) {
		return nil
	}
	workingName := path.Join(unfinished, id)
	working, err := s.files.OpenFile(workingName, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // its upload, or another server's sweep, was first
	}
	if err != nil {
		return err
	}
	defer working.Close()
	info, err := working.Stat()
	if err != nil {
		return err
	}
	// The age comes first: an upload that has just made its file is about to lock it. The lock
	// comes before the look-up: a running upload may still write its row.
	isYoung := time.Since(info.ModTime()) < sweepInterval
	if isYoung || lockFile(working) != nil {
		return nil
	}
	s.log.Info("sweeping an unfinished upload", "fileId", id)
	hasRow, err := s.store.row(read("select file_id from files where file_id = $1", id), new(string))
	if err != nil {
		return err
	}
	if hasRow { // the bytes are needed
		return s.files.RemoveAll(workingName)
	}
	return s.removeUpload(id)
}

// lockFile takes the lock on a working file, or fails if an upload holds it. The kernel
// frees the lock when the file is closed, however its process ends.
func lockFile(working *os.File) error {
	return syscall.Flock(int(working.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}

// removeUpload removes the bytes, then the working name: without it no sweep would find what is
// left. The bytes are removed whether or not the upload got as far as the link, because a call
// may fail after it has done its work.
func (s *server) removeUpload(id string) error {
	if err := s.files.RemoveAll(id); err != nil {
		return err
	}
	return s.files.RemoveAll(path.Join(unfinished, id))
}

// transfers counts the running uploads and downloads of each user. Each holds a connection and
// a file.
type transfers struct {
	mu     sync.Mutex
	byUser map[string]int
}

// begin counts a transfer, or returns the 429. The caller calls end when it is over. So one user
// can't take all connections (H5).
func (t *transfers) begin(userID string) (end func(), err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byUser[userID] >= maxUserTransfers {
		limit := fmt.Sprintf("%d transfers at a time by user", maxUserTransfers)
		return nil, rateLimited(limit, time.Second)
	}
	t.byUser[userID]++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.byUser[userID]--
		if t.byUser[userID] == 0 {
			delete(t.byUser, userID)
		}
	}, nil
}

// upload takes a file.
func (s *server) upload(state *requestState, _ nothing) (f file, err error) {
	form := &uploadForm{state: state, started: time.Now(), maxFile: s.cfg.maxUploadBytes}
	defer func() { // runs after end: a refused upload no longer counts
		if err != nil {
			form.drain()
		}
	}()
	end, err := s.transfers.begin(state.user.UserID)
	if err != nil {
		return file{}, err
	}
	defer end() // whatever happens below
	if err := form.readHead(); err != nil {
		return file{}, err
	}
	f, err = s.storeUpload(state, form)
	if err != nil {
		return file{}, err
	}
	state.Header().Set("Location", f.Path)
	return f, nil
}

// storeUpload receives a file and stores it. It returns when the bytes are on disk under their
// final name and the row is written. If it fails, nothing of the upload is left, or the
// sweep removes the rest. Only if the database fails while it writes the row may the file be there
// all the same.
//
// The order is: working name, bytes, fsync, link, fsync of the folder, then the row (F4). The
// working name's own folder is not synced: a power cut may cost that name, and then leave bytes
// that no row names and no sweep finds.
func (s *server) storeUpload(state *requestState, form *uploadForm) (f file, err error) {
	var id string // asked of the database, which also shows early that it is away
	if _, err := s.store.row(read("select gen_random_uuid()"), &id); err != nil {
		return file{}, err
	}
	working, err := s.files.OpenFile(
		path.Join(unfinished, id), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return file{}, err
	}
	defer working.Close() // deferred first, so it runs last: it frees the lock
	rowMayExist := false
	defer func() {
		if err != nil && !rowMayExist { // else the sweep asks the database
			s.removeUpload(id) // if this fails, the sweep does it
		}
	}()
	if err := lockFile(working); err != nil {
		return file{}, err
	}
	kind, size, err := form.readFile(working)
	if err != nil {
		return file{}, bodyProblem(err)
	}
	if err := s.makeDurable(working, id); err != nil {
		return file{}, err
	}
	// The account may have changed while the file arrived.
	if err := s.authorize(state); err != nil {
		return file{}, err
	}
	f = file{
		FileID:      id,
		Name:        form.name,
		ContentType: kind,
		Size:        size,
		Path:        "/files/" + id + "/" + url.PathEscape(form.name),
	}
	rowMayExist = true // from here on, also if the statement fails
	_, err = s.store.row(write(`insert into files (file_id, user_id, name, content_type, size)
		values ($1, $2, $3, $4, $5) returning created_at`,
		f.FileID, state.user.UserID, f.Name, f.ContentType, f.Size), &f.CreatedAt)
	if err != nil {
		return file{}, endedIfUserGone(err)
	}
	s.files.Remove(path.Join(unfinished, id)) // if this fails, the sweep does it
	return f, nil
}

// makeDurable gives the bytes of an upload their final name. Bytes and name then survive a power
// cut.
func (s *server) makeDurable(working *os.File, id string) error {
	if err := working.Sync(); err != nil {
		return err
	}
	if err := s.files.Link(path.Join(unfinished, id), id); err != nil {
		return err
	}
	folder, err := s.files.Open(".")
	if err != nil {
		return err
	}
	defer folder.Close()
	return folder.Sync()
}

// An uploadForm reads the multipart form that a file comes in. It bounds the bytes and the time:
// stallTimeout without progress, uploadTimeout in all.
type uploadForm struct {
	state   *requestState
	maxFile int64     // bytes of the file
	started time.Time // the pace counts from here

	body     io.Reader // the request's body, with a bound
	received int64     // bytes of the body so far
	parts    *multipart.Reader
	part     *multipart.Part // the file; nil until its headers are read
	name     string          // the file's name
}

// readHead checks the headers of an upload before it reads a byte of it, then reads the form up
// to the beginning of the file.
func (form *uploadForm) readHead() error {
	r := form.state.request
	kind, params := mediaType(r.Header)
	if kind != "multipart/form-data" {
		return wrongMediaType("multipart/form-data")
	}
	maxBody := form.maxFile + maxFormBytes
	if r.ContentLength > maxBody {
		return errTooLarge
	}
	form.body = http.MaxBytesReader(nil, r.Body, maxBody)
	form.parts = multipart.NewReader(form, params["boundary"])
	part, err := form.parts.NextRawPart()
	if err != nil {
		return bodyProblem(err)
	}
	form.part = part
	form.name = part.FileName() // drops folders with /; the next line drops those with \
	form.name = form.name[strings.LastIndex(form.name, `\`)+1:]
	if part.FormName() != "file" || !isFileName(form.name) {
		return invalid(fieldError{"file", "must be the only part, its file name 1 to 255 bytes of " +
			"UTF-8 without control characters and without U+202A to U+202E and U+2066 to U+2069"})
	}
	return nil
}

// Read is how the multipart reader reads the body.
//
// An upload that is slower than uploadPace is cut off after its first minute (H1), one that does
// not move after stallTimeout (H5). What comes before the file has maxPartHeaders; package
// multipart alone would keep 10 MB of headers.
func (form *uploadForm) Read(p []byte) (int, error) {
	if form.part == nil {
		left := maxPartHeaders - form.received
		if left == 0 {
			return 0, errTooLarge
		}
		p = p[:min(int64(len(p)), left)]
	}
	timeLeft := min(stallTimeout, uploadTimeout(form.received)-time.Since(form.started))
	deadline := time.Now().Add(timeLeft)
	deadlines := http.NewResponseController(form.state)
	deadlines.SetReadDeadline(deadline)
	deadlines.SetWriteDeadline(deadline.Add(answerTimeout))
	n, err := form.body.Read(p)
	form.received += int64(n)
	return n, err
}

// uploadTimeout returns how long an upload of so many bytes may take.
func uploadTimeout(received int64) time.Duration {
	return uploadStart + time.Duration(received/uploadPace)*time.Second
}

// readFile writes the file to out and finds its type and size. Nothing may follow the file in
// the form; bytes after the end of the form count as bytes of the form.
func (form *uploadForm) readFile(out *os.File) (kind string, size int64, err error) {
	size, err = io.Copy(out, io.LimitReader(form.part, form.maxFile+1)) // 1: to see an excess
	if err != nil {
		return "", 0, err
	}
	if size > form.maxFile {
		return "", 0, errTooLarge
	}
	_, err = form.parts.NextRawPart()
	if err == nil {
		return "", 0, invalid(fieldError{"file", "must be the form's only part"})
	}
	if err != io.EOF { // a body that breaks off gives another error
		return "", 0, err
	}
	if _, err := io.Copy(io.Discard, form); err != nil {
		return "", 0, err
	}
	if form.received > size+maxFormBytes {
		return "", 0, errTooLarge
	}
	head := make([]byte, min(size, sniffLength))
	if _, err := out.ReadAt(head, 0); err != nil {
		return "", 0, err
	}
	return contentType(head), size, nil
}

// drain reads the rest of a refused upload, within bounds. If the connection were closed while
// the client still sends, the client would lose the answer: a browser shows a network error in
// place of the 413. A client that sent "Expect: 100-continue" sends nothing until we read. So if
// we have not read, there is nothing to drain.
func (form *uploadForm) drain() {
	if form.received == 0 && form.state.request.Header.Get("Expect") != "" {
		return
	}
	http.NewResponseController(form.state).SetReadDeadline(time.Now().Add(refusedTimeout))
	io.CopyN(io.Discard, form.state.request.Body, form.maxFile)
}

// contentType finds the type of a file from its first bytes, whatever the client said. Text
// with a "<" could be SVG or HTML, which Go does not always recognize, so it does not count
// as text. In a head of full length, the last character may be cut off.
func contentType(head []byte) string {
	found := http.DetectContentType(head)
	if !strings.HasPrefix(found, "text/") {
		return found
	}
	// What is broken at the end of head; all of head if something else is broken.
	broken := bytes.TrimPrefix(head, bytes.ToValidUTF8(head, nil))
	isCutOff := len(head) == sniffLength && len(broken) < utf8.UTFMax
	isUTF8 := len(broken) == 0 || isCutOff
	if !isUTF8 || bytes.ContainsRune(head, '<') {
		return "application/octet-stream"
	}
	return found
}

// fileContent is a file on its way to the client.
type fileContent struct {
	file
	content *os.File
	end     func() // of the transfer
}

// isValid compares the size on disk with the row.
func (c fileContent) isValid() bool {
	info, err := c.content.Stat()
	return err == nil && info.Mode().IsRegular() && info.Size() == c.Size && c.file.isValid()
}

// Close is called by serveRoute when the answer has been sent, or refused. The transfer ends last,
// when it holds nothing any more.
func (c fileContent) Close() error {
	defer c.end()
	return c.content.Close()
}

// getFile finds a file by its id and name. Any signed-in user may read a file whose path
// they know; ids can't be guessed. No path leads anywhere but to a file with a row (F1).
func (s *server) getFile(state *requestState, _ nothing) (fileContent, error) {
	var c fileContent
	name := state.request.PathValue("name")
	found, err := s.store.row(
		read(`select file_id, name, content_type, size, created_at
			from files where file_id = $1 and name = $2`,
			state.pathID("fileId"), sql.Null[string]{V: name, Valid: isFileName(name)}),
		&c.FileID, &c.Name, &c.ContentType, &c.Size, &c.CreatedAt)
	c, err = orNotFound(c, found, err)
	if err != nil {
		return fileContent{}, err
	}
	c.end, err = s.transfers.begin(state.user.UserID)
	if err != nil {
		return fileContent{}, err
	}
	c.content, err = s.files.Open(c.FileID)
	if err != nil {
		c.end()
		return fileContent{}, err
	}
	return c, nil
}

// inlineTypes may be shown in place by a browser. All others are offered for saving. nosniff
// and a sandbox hold in either case.
var inlineTypes = []string{
	"image/png", "image/jpeg", "image/gif", "image/webp", "text/plain; charset=utf-8",
}

// filePolicy is contentPolicy with what browsers need to show a picture in a tab (the inline
// style of their viewer) and to start a download from such a tab. Scripts stay forbidden.
const filePolicy = contentPolicy + "; style-src 'unsafe-inline'; sandbox allow-downloads"

// send serves the bytes with Range and conditional requests (RFC 9110, as far as
// http.ServeContent keeps it, which chooses the status). A file never changes, so its id is its
// ETag.
//
// The answer is private, because a shared cache may store answers to requests with cookies (C4).
// What a browser could run is an attachment, and sandboxed (F2). A Range header with many ranges
// is ignored, as RFC 9110 14.2 permits; each would cost a part of its own (H7).
func (c fileContent) send(state *requestState) {
	disposition := "attachment"
	if slices.Contains(inlineTypes, c.ContentType) {
		disposition = "inline"
	}
	header := state.Header()
	header.Set("Content-Type", c.ContentType)
	header.Set("Content-Disposition",
		mime.FormatMediaType(disposition, map[string]string{"filename": c.Name}))
	header.Set("Content-Security-Policy", filePolicy)
	header.Set("Cache-Control", "private, no-cache")
	header.Set("ETag", `"`+c.FileID+`"`)
	if strings.Count(state.request.Header.Get("Range"), ",") >= maxRanges {
		state.request.Header.Del("Range")
	}
	http.ServeContent(state, state.request, "", c.CreatedAt, c.content)
}
