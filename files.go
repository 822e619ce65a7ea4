package main

// Files: streamed to disk on upload, served with Range and ETag. The bytes are
// in FILES_DIR, under the file's id; all else is in the table files. At the end,
// the documents that the server sends.
//
// An upload has two names on disk: its working name, unfinished/<id>, and its
// final name, <id>, a link to the same bytes. The order is: working name,
// bytes, fsync, link, fsync of the folder, row (F4). So a file with a row is
// whole and on disk. The working name goes last, because it leads the sweep to
// what an upload that was cut off has left.

import (
	"bufio"
	"crypto/rand"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	transferStart = time.Minute      // base of the time limit of an upload or a download
	transferPace  = 16 << 10         // bytes that add one second to it
	stallTimeout  = 30 * time.Second // for an upload that makes no progress
	drainTimeout  = 5 * time.Second  // for the rest of a refused upload

	maxPartHeaders = 4 << 10  // bytes before the file begins; multipart would take 10 MB
	maxFormBytes   = 64 << 10 // bytes of a form, its file not counted
	pieceSize      = 32 << 10 // bytes of an upload that are read and written at once
	sniffedBytes   = 512      // http.DetectContentType looks at no more
	maxRanges      = 16       // in a Range header; one with more is ignored

	unfinished    = "unfinished" // folder of the working names, in FILES_DIR
	sweepInterval = time.Minute
	sweepReserve  = 10 * time.Minute // for the statements of an upload, and for differing clocks
)

func transferTimeout(bytes int64) time.Duration {
	return transferStart + time.Duration(bytes/transferPace)*time.Second
}

type file struct {
	FileID      string    `json:"fileId"`
	Name        string    `json:"name"`
	ContentType string    `json:"contentType"`
	Size        int64     `json:"size"`
	Path        string    `json:"path"`
	CreatedAt   timestamp `json:"createdAt"`
}

func (f file) validate() (errs fieldErrors) {
	errs.requireFileName(f.Name)
	errs.require(f.ContentType != "", "contentType", "is empty")
	return errs
}

// directionControls override, embed or isolate a direction of text: with one of
// these, "invoice" + U+202E + "gnp.exe" is shown as "invoiceexe.png".
const directionControls = "\u202A\u202B\u202C\u202D\u202E\u2066\u2067\u2068\u2069"

// requireFileName requires that a name is safe in a path and in a header.
func (errs *fieldErrors) requireFileName(name string) {
	isFolder := name == "." || name == ".." || strings.ContainsAny(name, `/\`)
	errs.require(name != "", "file", "must have a file name")
	errs.require(!isFolder, "file", "must have the name of a file, not of a folder")
	errs.require(len(name) <= 255, "file", "must have a name of at most 255 bytes in UTF-8")
	errs.require(utf8.ValidString(name), "file", "must have a name in UTF-8")
	errs.require(!strings.ContainsFunc(name, unicode.IsControl), "file",
		"must have a name without control characters")
	errs.require(!strings.ContainsAny(name, directionControls), "file",
		"must not have a name that changes the direction of text")
}

// openFiles opens FILES_DIR as an os.Root, so that no name leads outside (F1).
// It makes the folder only locally. Elsewhere, a missing folder may be a
// missing mount, which would later hide what was uploaded meanwhile.
func (s *server) openFiles() error {
	if s.cfg.env == envLocal {
		os.MkdirAll(s.cfg.filesDir, 0o700) // if this fails, OpenRoot fails as well
	}
	files, err := os.OpenRoot(s.cfg.filesDir)
	if err == nil {
		err = files.MkdirAll(unfinished, 0o700)
	}
	if err != nil {
		return usageError("FILES_DIR: must be a folder that the server may write to (only the " +
			"local environment makes it): " + err.Error())
	}
	s.files = files
	err = s.tryUpload()
	if isDiskFull(err) { // all else works without room
		s.log.Error("FILES_DIR has no room for uploads", "error", err)
		return nil
	}
	if err != nil {
		return usageError("FILES_DIR: its file system can't keep uploads: " + err.Error())
	}
	return nil
}

// tryUpload does once what an upload does with FILES_DIR.
func (s *server) tryUpload() error {
	id := newUUID()
	working, err := s.createWorking(id)
	if err != nil {
		return err
	}
	defer working.Close()
	_, err = working.WriteString("x")
	if err == nil {
		err = s.makeDurable(working, id)
	}
	return errors.Join(err, removeUpload(s.files, id))
}

func (s *server) createWorking(id string) (*os.File, error) {
	return s.files.OpenFile(path.Join(unfinished, id), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
}

// openFilesDir opens FILES_DIR for a command. A folder without unfinished is no
// FILES_DIR.
func openFilesDir() (*os.Root, error) {
	var settings settingReader
	dir := settings.get("FILES_DIR", defaultFilesDir)
	files, err := os.OpenRoot(dir)
	if err == nil {
		_, err = files.Stat(unfinished)
	}
	if err != nil {
		return nil, usageError("FILES_DIR: must be the folder of uploads: " + err.Error())
	}
	return files, errors.Join(settings...)
}

// probeFiles returns an error if FILES_DIR is gone, or is not the folder that
// s.files still has: its mount is lost, or a copy has taken its place. FILES_DIR
// must lie inside its mount (docs/deploy.md), or a start without the mount would
// pass.
func (s *server) probeFiles() error {
	atPath, err := os.Stat(path.Join(s.cfg.filesDir, unfinished))
	if err != nil {
		return err
	}
	opened, err := s.files.Stat(unfinished)
	if err == nil && !os.SameFile(atPath, opened) {
		err = errors.New("FILES_DIR is another folder than at the start (restart the server)")
	}
	return err
}

func (s *server) upload(r *request) (output, error) {
	form := &uploadForm{
		request: r,
		maxFile: s.cfg.maxUploadBytes,
		started: time.Now(),
		allowed: maxPartHeaders,
	}
	f, err := s.storeUpload(r, form)
	// The upload may have used up the time to write the answer, which began
	// before it.
	http.NewResponseController(r.w).SetWriteDeadline(time.Now().Add(answerTimeout))
	if err != nil {
		form.drain()
		return nil, err
	}
	r.w.Header().Set("Location", f.Path)
	return f, nil
}

// storeUpload receives a file and stores it. If it fails, it removes both
// names, unless the row may exist. Then the sweep decides.
func (s *server) storeUpload(r *request, form *uploadForm) (file, error) {
	name, err := form.readHead()
	if err != nil {
		return file{}, err
	}
	id := newUUID()
	f := file{FileID: id, Name: name, Path: filePath(id, name)}
	working, err := s.createWorking(id)
	if err != nil {
		return file{}, err
	}
	defer working.Close()
	rowMayExist := false
	defer func() {
		if !rowMayExist {
			removeUpload(s.files, id)
		}
	}()
	f.Size, err = form.readFile(working)
	if err != nil {
		return file{}, bodyProblem(err)
	}
	f.ContentType, err = contentType(working, f.Size)
	if err != nil {
		return file{}, err
	}
	if err := s.makeDurable(working, id); err != nil {
		return file{}, err
	}
	if err := s.authorize(r); err != nil { // again: the account may have changed meanwhile
		return file{}, err
	}
	err = s.store.write(`insert into files (file_id, user_id, name, content_type, size)
		values ($1, $2, $3, $4, $5) returning created_at`,
		[]any{f.FileID, r.user.UserID, f.Name, f.ContentType, f.Size}, &f.CreatedAt.Time)
	rowMayExist = !isCertainlyNotStored(err) // on success, too
	if err != nil {
		return file{}, endedIfUserGone(err)
	}
	s.files.Remove(path.Join(unfinished, id)) // if this fails, the sweep does it
	return f, nil
}

// refusals are the classes of SQLSTATEs that PostgreSQL reports only before a
// commit: values, constraints, rights and names, resources, locks. Other errors
// may end a connection after one.
var refusals = []string{"22", "23", "42", "53", "55"}

// isCertainlyNotStored reports whether a write with this error has left no row.
func isCertainlyNotStored(err error) bool {
	state := sqlState(err)
	isRefused := state == "57014" || slices.ContainsFunc(refusals, func(class string) bool {
		return strings.HasPrefix(state, class)
	})
	return isRefused || errors.Is(err, errNotSent) || errors.Is(err, sql.ErrNoRows)
}

func filePath(id, name string) string { return "/files/" + id + "/" + url.PathEscape(name) }

// newUUID returns a random UUID (RFC 9562, version 4).
func newUUID() string {
	id := make([]byte, 16)
	rand.Read(id)
	id[6] = id[6]&0x0f | 0x40
	id[8] = id[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// makeDurable gives the bytes of an upload their final name. When it returns
// nil, both survive a power cut.
func (s *server) makeDurable(working *os.File, id string) error {
	if err := working.Sync(); err != nil {
		return fmt.Errorf("fsync of a file: %w", err)
	}
	if err := s.files.Link(path.Join(unfinished, id), id); err != nil {
		return fmt.Errorf("hard link to a file: %w", err)
	}
	return syncFolder(s.files)
}

func syncFolder(files *os.Root) error {
	folder, err := files.Open(".")
	if err != nil {
		return err
	}
	defer folder.Close()
	if err := folder.Sync(); err != nil {
		return fmt.Errorf("fsync of the folder: %w", err)
	}
	return nil
}

// removeUpload removes the working name last, because the sweep finds both by it.
func removeUpload(files *os.Root, id string) error {
	if err := files.RemoveAll(id); err != nil {
		return err
	}
	return files.RemoveAll(path.Join(unfinished, id))
}

// An uploadForm reads a multipart form with one file, within these bounds.
// Package multipart reads the body through Read, which enforces them, but for
// maxFile, which readFile enforces.
//
//	maxPartHeaders    bytes before the file begins              413
//	maxFile           bytes of the file                         413
//	maxFormBytes      bytes of the form, its file not counted   413
//	stallTimeout      time without progress                     400
//	transferTimeout   time for what was received so far         400
type uploadForm struct {
	request *request
	maxFile int64 // bytes
	started time.Time

	received int64 // bytes of the body
	// Most of received: maxPartHeaders before the file, maxFile and maxFormBytes in
	// it, its size and maxFormBytes after it.
	allowed int64
	isCut   bool // Read has refused to go beyond allowed
	parts   *multipart.Reader
	part    *multipart.Part // the file
}

func (form *uploadForm) Read(p []byte) (int, error) {
	timeLeft := transferTimeout(form.received) - time.Since(form.started)
	form.setReadTimeout(min(stallTimeout, timeLeft))
	rest := max(form.allowed-form.received, 1) // then one byte more shows an excess
	n, err := form.request.Body.Read(p[:min(int64(len(p)), rest)])
	form.received += int64(n)
	if form.received > form.allowed {
		form.isCut = true
		return 0, errTooLarge
	}
	return n, err
}

func (form *uploadForm) setReadTimeout(timeout time.Duration) {
	http.NewResponseController(form.request.w).SetReadDeadline(time.Now().Add(timeout))
}

func (form *uploadForm) readHead() (name string, err error) {
	kind, params := mediaType(form.request.Header)
	if kind != "multipart/form-data" {
		return "", wrongMediaType("multipart/form-data")
	}
	if params["boundary"] == "" {
		return "", invalid(fieldError{"body", "has no boundary between its parts: a script must " +
			"leave that to the browser"})
	}
	if form.request.ContentLength > form.maxFile+maxFormBytes { // -1 if unknown
		return "", errTooLarge
	}
	// Package multipart alone would read 4 kB at a time.
	form.parts = multipart.NewReader(bufio.NewReaderSize(form, pieceSize), params["boundary"])
	form.part, err = form.parts.NextRawPart() // NextPart would decode quoted-printable
	// If the headers were cut, err may say that they are malformed.
	if form.isCut {
		return "", errTooLarge
	}
	if err == io.EOF {
		return "", invalid(fieldError{"file", "is missing: the form is empty"})
	}
	if err != nil {
		return "", bodyProblem(err)
	}
	return fileName(form.part)
}

func fileName(part *multipart.Part) (string, error) {
	name := part.FileName()
	isFile := part.FormName() == "file"
	var errs fieldErrors
	errs.require(isFile || name != "", "file", "must come before all other parts of the form")
	errs.require(isFile, "file", "must be the name of the part with the file")
	if name != "" {
		name = path.Base(strings.ReplaceAll(name, `\`, "/"))
	}
	errs.requireFileName(name)
	if errs != nil {
		return "", invalid(errs...)
	}
	return name, nil
}

// readFile writes the file to out, and reads the form to its end, which may
// still refuse it.
func (form *uploadForm) readFile(out io.Writer) (size int64, err error) {
	form.allowed = form.maxFile + maxFormBytes
	// Hide the *os.File, whose ReadFrom would be called instead of the buffer.
	buffer := bufio.NewWriterSize(struct{ io.Writer }{out}, pieceSize)
	size, err = io.Copy(buffer, io.LimitReader(form.part, form.maxFile+1)) // +1 detects an excess
	if err == nil {
		err = buffer.Flush()
	}
	if err != nil {
		return 0, err
	}
	if size > form.maxFile {
		return 0, errTooLarge
	}
	form.allowed = size + maxFormBytes
	_, err = form.parts.NextRawPart()
	if err == nil {
		return 0, invalid(fieldError{"file", "must be the only part of the form"})
	}
	// Package multipart wraps io.EOF if the form is cut off at the end of the file.
	if err != io.EOF {
		return 0, err
	}
	_, err = io.Copy(io.Discard, form)
	return size, err
}

// drain reads the rest of a refused upload for a while, or a browser that is still
// sending would show a network error instead of the answer. A client that sent
// "Expect: 100-continue" sends nothing until something is read.
func (form *uploadForm) drain() {
	if form.received == 0 && form.request.Header.Get("Expect") != "" {
		return
	}
	form.setReadTimeout(drainTimeout)
	io.CopyN(io.Discard, form.request.Body, form.maxFile)
}

// contentType finds the type of a file by its first bytes, whatever the client
// says. Text with a "<", which could be SVG or HTML, does not count as text.
// Nor do bytes that are not UTF-8. A character that is cut off at the end counts.
func contentType(content io.ReaderAt, size int64) (string, error) {
	head := make([]byte, min(size, sniffedBytes))
	if _, err := content.ReadAt(head, 0); err != nil {
		return "", err
	}
	found := http.DetectContentType(head)
	if !strings.HasPrefix(found, "text/") {
		return found, nil
	}
	for utf8.FullRune(head) { // false at the end, also for a character that is cut off
		char, width := utf8.DecodeRune(head)
		isInvalid := char == utf8.RuneError && width == 1
		if isInvalid || char == '<' {
			return "application/octet-stream", nil
		}
		head = head[width:]
	}
	return found, nil
}

// sweepUploads sweeps working names that are older than the longest upload, now
// and once a minute. All servers that share the folder must have the same
// MAX_UPLOAD_BYTES.
func (s *server) sweepUploads() {
	longest := transferTimeout(s.cfg.maxUploadBytes+maxFormBytes) + sweepReserve
	for !s.isStopping() {
		entries, err := fs.ReadDir(s.files.FS(), unfinished)
		if err != nil {
			s.log.Error("the sweep of unfinished uploads failed", "error", err)
		}
		for _, entry := range entries {
			info, err := entry.Info()
			isAbandoned := err == nil && time.Since(info.ModTime()) > longest
			if !isAbandoned || !isUUID(entry.Name()) {
				continue
			}
			if err := s.sweepUpload(entry.Name()); err != nil {
				s.log.Error("the sweep of an unfinished upload failed",
					"fileId", entry.Name(), "error", err)
			}
		}
		time.Sleep(sweepInterval)
	}
}

// sweepUpload removes what is left of an upload, but not the bytes if there is
// a row (F3).
func (s *server) sweepUpload(id string) error {
	s.log.Info("sweeping an unfinished upload", "fileId", id)
	var hasRow, isFiltered bool
	err := s.store.read(`select exists (select from files where file_id = $1),
		row_security_active('files')`, []any{id}, &hasRow, &isFiltered)
	switch {
	case err != nil:
		return err
	case isFiltered: // the row may be hidden, if row_security=off was lost on the way (D8)
		return errors.New("row-level security is active on the table files")
	case hasRow:
		return s.files.RemoveAll(path.Join(unfinished, id))
	}
	return removeUpload(s.files, id)
}

// inlineTypes are the types that a browser may display. It downloads all
// others.
var inlineTypes = []string{
	"image/png", "image/jpeg", "image/gif", "image/webp", "text/plain; charset=utf-8",
}

// filePolicy lets a browser show and download a picture. Scripts stay forbidden
// (F2).
const filePolicy = contentPolicy + "; style-src 'unsafe-inline'; sandbox allow-downloads"

// getFile sends a file. Any user who has accepted the terms may read a file whose
// path they know; its id can't be guessed.
func (s *server) getFile(r *request) (output, error) {
	f := file{Name: r.PathValue("name")}
	var errs fieldErrors
	errs.requireFileName(f.Name)
	if errs != nil {
		return nil, errNotFound
	}
	err := s.store.read(`select file_id, content_type, size, created_at
		from files where file_id = $1 and name = $2`, []any{r.pathID("fileId"), f.Name},
		&f.FileID, &f.ContentType, &f.Size, &f.CreatedAt.Time)
	if err != nil {
		return nil, orNotFound(err)
	}
	content, err := s.files.Open(f.FileID)
	if errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("FILES_DIR, %s, lacks a file that the database has (is it the folder of all "+
			"servers, mounted, and restored?): %w", s.cfg.filesDir, err)
	}
	if err != nil {
		return nil, err
	}
	defer content.Close()
	info, err := content.Stat()
	if err != nil {
		return nil, err
	}
	isWhole := info.Mode().IsRegular() && info.Size() == f.Size
	if !isWhole || f.validate() != nil { // nothing of a broken file is sent (I5)
		return nil, errors.New("the file on disk is not what was uploaded, or its row is invalid")
	}
	return sent{}, sendFile(r, f, content)
}

// sendFile leaves Range and conditional requests to http.ServeContent. A file
// never changes, so its id is its ETag. No cache may keep it: after a sign-out,
// the next person could go back to it (C4).
func sendFile(r *request, f file, content io.ReadSeeker) error {
	disposition := "attachment"
	if slices.Contains(inlineTypes, f.ContentType) {
		disposition = "inline"
	}
	header := r.w.Header()
	header.Set("Content-Type", f.ContentType)
	header.Set("Content-Disposition",
		mime.FormatMediaType(disposition, map[string]string{"filename": f.Name}))
	header.Set("Content-Security-Policy", filePolicy)
	header.Set("Cache-Control", "private, no-store")
	header.Set("ETag", `"`+f.FileID+`"`)
	// An older net/http would serve 4,500 ranges of one byte, in 90 ms (H7). One comma
	// means two ranges. http.ServeContent knows no other unit, and would send a range of an
	// empty file.
	ranges, isBytes := strings.CutPrefix(r.Header.Get("Range"), "bytes=")
	if !isBytes || f.Size == 0 || strings.Count(ranges, ",") >= maxRanges {
		r.Header.Del("Range")
	}
	deadline := time.Now().Add(transferTimeout(f.Size))
	http.NewResponseController(r.w).SetWriteDeadline(deadline)
	catcher := &errorCatcher{response: r.w}
	http.ServeContent(catcher, r.Request, "", f.CreatedAt.Time, content)
	if err := r.w.copyErr; err != nil {
		level := slog.LevelInfo // the client is gone
		if errors.Is(err, syscall.EIO) {
			level = slog.LevelError
		}
		r.log().Log(r.Context(), level, "download cut off", "error", err)
		panic(http.ErrAbortHandler)
	}
	return catcher.toError()
}

// The documents that the server sends.

//go:embed web/openapi.json
var openAPI string

//go:embed web/index.html
var indexPage string

func (s *server) getOpenAPI(r *request) (output, error) {
	text := strings.ReplaceAll(openAPI, `"hubs_auth_local"`, strconv.Quote(s.cfg.cookieName))
	sendDocument(r, "application/json", contentPolicy, text)
	return sent{}, nil
}

// getPage sends the local page. A meta element in it has the rest of its
// policy.
func getPage(r *request) (output, error) {
	sendDocument(r, "text/html; charset=utf-8", "frame-ancestors 'none'", indexPage)
	return sent{}, nil
}

func sendDocument(r *request, contentType, policy, text string) {
	r.w.Header().Set("Content-Type", contentType)
	r.w.Header().Set("Content-Security-Policy", policy)
	r.w.WriteHeader(200)
	io.WriteString(r.w, text)
}
