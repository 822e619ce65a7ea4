package main

// Files: streamed to disk on upload, served with Range and ETag. The bytes are in FILES_DIR, under
// the file's id. Everything else about a file is in the table files.
//
// An upload has two names on disk. Its working name, unfinished/<id>, exists while the upload runs,
// and the upload holds a lock (flock) on that file. Its final name, <id>, is a second link to the
// same bytes. The row in the table is written last and makes the file visible.
//
// A working name that is a minute old and not locked belongs to no running upload. Every server
// that uses the folder sweeps such names once a minute. If the table has a row with the id, the
// upload is complete, and the sweep removes only the working name. Otherwise it also removes the
// bytes.

import (
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
	// Uploads and downloads.
	maxUserTransfers = 16               // simultaneous uploads and downloads of one user
	stallTimeout     = 30 * time.Second // longest time that a transfer may make no progress

	// An upload.
	maxPartHeaders = 4 << 10         // bytes of a form before its file begins
	maxFormBytes   = 64 << 10        // bytes of a form, its file not counted
	uploadStart    = time.Minute     // time that every upload may take
	uploadPace     = 16 << 10        // bytes that add one second to the time of an upload
	refusedTimeout = 5 * time.Second // for reading the rest of a refused upload

	// A download.
	maxRanges     = 16       // ranges in a Range header; a header with more is ignored
	transferPiece = 64 << 10 // bytes that count as progress

	// Working names.
	unfinished    = "unfinished" // their folder in FILES_DIR
	sweepInterval = time.Minute  // also the minimum age of one that is swept
)

// A file describes an uploaded file. All fields but Path are columns of the table files.
type file struct {
	FileID      string    `json:"fileId"`
	Name        string    `json:"name"`
	ContentType string    `json:"contentType"`
	Size        int64     `json:"size"` // bytes
	Path        string    `json:"path"`
	CreatedAt   time.Time `json:"createdAt"`
}

func (f file) isValid() bool {
	return isFileName(f.Name) && f.ContentType != "" && f.Size >= 0
}

// unsafeInName holds the path separators and the characters that change the direction of text:
// with one of these, "invoice" + U+202E + "gnp.exe" is shown as "invoiceexe.png".
const unsafeInName = `/\` + "\u202A\u202B\u202C\u202D\u202E\u2066\u2067\u2068\u2069"

// isFileName reports whether name is safe in a path and in a header, and has no character of
// unsafeInName.
func isFileName(name string) bool {
	if name == "" || name == "." || name == ".." || len(name) > 255 || !utf8.ValidString(name) {
		return false
	}
	return !strings.ContainsAny(name, unsafeInName) && !strings.ContainsFunc(name, unicode.IsControl)
}

// openFiles opens FILES_DIR. It creates the folder only in the local environment. Elsewhere, the
// folder may be missing because it is not mounted. The mount would later hide all files uploaded
// into a new folder.
//
// s.files is an os.Root, so no name can lead outside the folder (F1).
func (s *server) openFiles() error {
	dir := s.cfg.filesDir
	if s.cfg.env == envLocal {
		os.MkdirAll(dir, 0o700) // if this fails, OpenRoot fails as well
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

// checkFiles returns an error if FILES_DIR is missing, as after its mount was lost. It looks by
// path, because s.files would still see a folder that is no longer mounted.
//
// It relies on docs/deploy.md: FILES_DIR must be a folder inside its mount, not the mount point.
// Otherwise a start without the mount would make the folder of working names on the disk beneath,
// and this check would pass.
func (s *server) checkFiles() error {
	_, err := os.Stat(path.Join(s.cfg.filesDir, unfinished))
	return err
}

// transfers counts the running uploads and downloads of each user. Each holds a connection and
// an open file.
type transfers struct {
	mu     sync.Mutex
	byUser map[string]int
}

// begin counts a transfer, or returns a 429 if the user has maxUserTransfers already (H5). It does
// not bound the user's connections: see boundedListener. The caller must call end when the transfer
// is over.
func (t *transfers) begin(userID string) (end func(), err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byUser[userID] >= maxUserTransfers {
		return nil, rateLimited(
			fmt.Sprintf("%d transfers at a time by user", maxUserTransfers), time.Second)
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

// upload receives and stores one file. It is the handler of POST /files/upload.
func (s *server) upload(state *requestState) (file, error) {
	form := &uploadForm{state: state, started: time.Now(), maxFile: s.cfg.maxUploadBytes}
	f, err := s.storeUpload(state, form)
	// The time to write the answer began before the upload, which may have used it up.
	http.NewResponseController(state).SetWriteDeadline(time.Now().Add(answerTimeout))
	if err != nil {
		form.drain() // not counted as a transfer: storeUpload has ended that
		return file{}, err
	}
	state.Header().Set("Location", f.Path)
	return f, nil
}

// storeUpload receives a file and stores it. When it returns without an error, the bytes are on
// disk under their final name and the row is written. If it fails before the insert, it removes
// what it has stored, and the sweep removes what it could not. If the insert fails, it leaves
// everything to the sweep, because the row may have been committed.
//
// The order is: working name, lock, bytes, fsync, link, fsync of the folder, row (F4). The folder
// of the working names is not synced: after a power cut, the working name may be missing, and
// bytes may remain that no row names and no sweep finds.
func (s *server) storeUpload(state *requestState, form *uploadForm) (file, error) {
	end, err := s.transfers.begin(state.user.UserID)
	if err != nil {
		return file{}, err
	}
	defer end()
	if err := form.readHead(); err != nil {
		return file{}, err
	}
	id, working, err := s.newWorkingFile()
	if err != nil {
		return file{}, err
	}
	defer working.Close()
	rowMayExist := false
	defer func() { // runs before working.Close, so the lock is still held
		if !rowMayExist {
			s.removeUpload(id) // if this fails, the sweep does it
		}
	}()
	if err := lockFile(working); err != nil { // working.Close releases the lock
		return file{}, err
	}
	kind, size, err := form.readFile(working)
	if err != nil {
		return file{}, bodyProblem(err)
	}
	if err := s.makeDurable(working, id); err != nil {
		return file{}, err
	}
	if err := s.authorize(state); err != nil { // again: the account may have changed meanwhile
		return file{}, err
	}
	f := file{
		FileID: id, Name: form.name, ContentType: kind, Size: size,
		Path: "/files/" + id + "/" + url.PathEscape(form.name),
	}
	rowMayExist = true // from here on, even if the insert returns an error
	_, err = s.store.row(readWrite(`insert into files (file_id, user_id, name, content_type, size)
		values ($1, $2, $3, $4, $5) returning created_at`,
		f.FileID, state.user.UserID, f.Name, f.ContentType, f.Size), &f.CreatedAt)
	if err != nil {
		return file{}, endedIfUserGone(err)
	}
	s.files.Remove(path.Join(unfinished, id)) // if this fails, the sweep does it
	return f, nil
}

// newWorkingFile creates the working file of a new upload. PostgreSQL makes the id, because Go's
// library has no UUIDs.
func (s *server) newWorkingFile() (id string, working *os.File, err error) {
	if _, err := s.store.row(readOnly("select gen_random_uuid()"), &id); err != nil {
		return "", nil, err
	}
	working, err = s.files.OpenFile(path.Join(unfinished, id), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	return id, working, err
}

// makeDurable links the bytes of an upload to their final name. When it returns without an error,
// bytes and name survive a power cut.
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

// lockFile takes the lock on a working file. It does not wait: it returns an error if the lock is
// held. The kernel releases the lock when the file is closed, even if the process is killed.
func lockFile(working *os.File) error {
	return syscall.Flock(int(working.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}

// removeUpload removes the final name and then the working name. RemoveAll returns no error for a
// missing file. The working name goes last, because the sweep finds leftovers by it. The final name
// is removed even if Link has failed, because a call may return an error after it has done its
// work.
func (s *server) removeUpload(id string) error {
	if err := s.files.RemoveAll(id); err != nil {
		return err
	}
	return s.files.RemoveAll(path.Join(unfinished, id))
}

// sweepUploads checks all working names now, and again every sweepInterval until the server stops.
// If one can't be swept, it goes on with the others.
func (s *server) sweepUploads() {
	for !s.stopping.Load() {
		entries, err := fs.ReadDir(s.files.FS(), unfinished)
		if err != nil {
			s.log.Error("the sweep of unfinished uploads failed", "error", err)
		}
		for _, entry := range entries {
			if err := s.sweepUpload(entry.Name()); err != nil {
				s.log.Error("the sweep of unfinished uploads failed", "fileId", entry.Name(), "error", err)
			}
		}
		time.Sleep(sweepInterval)
	}
}

// sweepUpload cleans up after one upload, unless it is still running. So no part is kept of an
// upload that was cut off or refused, or whose server was killed (F3).
func (s *server) sweepUpload(id string) error {
	if !isUUID(id) {
		return nil
	}
	workingName := path.Join(unfinished, id)
	working, err := s.files.OpenFile(workingName, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the upload itself or another server's sweep has removed it
	}
	if err != nil {
		return err
	}
	defer working.Close()
	info, err := working.Stat()
	if err != nil {
		return err
	}
	// Check the age before taking the lock: an upload that has just created its file is about to
	// lock it. Take the lock before looking for the row: a running upload may still write it.
	isYoung := time.Since(info.ModTime()) < sweepInterval
	if isYoung {
		return nil
	}
	if err := lockFile(working); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) { // the upload is still running
			return nil
		}
		return err
	}
	hasRow, err := s.store.row(readOnly("select from files where file_id = $1", id))
	if err != nil {
		return err
	}
	s.log.Info("sweeping an unfinished upload", "fileId", id)
	if hasRow { // the bytes are needed
		return s.files.RemoveAll(workingName)
	}
	return s.removeUpload(id)
}

// An uploadForm reads a multipart form that contains one file. Package multipart reads the body
// through Read, which counts and times it. The bounds:
//
//	bound             of what                                    where       answer
//
//	maxPartHeaders    bytes before the file begins               readHead    413
//	maxFile           bytes of the file                          readFile    413
//	maxFormBytes      bytes of the form, its file not counted    readEnd     413
//	maxFile +         Content-Length, if the client sent it      readHead    413
//	maxFormBytes
//	stallTimeout      time without progress                      Read        400
//	uploadStart and   time of the whole upload, which grows      Read        400
//	uploadPace        with what was received
//	refusedTimeout    time to read the rest of a refused upload  drain       that of the refusal
type uploadForm struct {
	state   *requestState
	maxFile int64     // maximum size of the file in bytes
	started time.Time // when the upload began

	// body is the request's body. It is limited by readHead, then unlimited, because readFile
	// counts the file, then limited again by readEnd.
	body     io.Reader
	received int64             // body bytes received so far
	readErr  error             // what Read has returned last
	parts    *multipart.Reader // reads the body through Read
	part     *multipart.Part   // the file
	name     string            // name of the file, as sent by the client without folders
}

// readHead reads the form up to the beginning of the file. It checks the request's headers before
// it reads any of the body.
func (form *uploadForm) readHead() error {
	r := form.state.request
	kind, params := mediaType(r.Header)
	if kind != "multipart/form-data" {
		return wrongMediaType("multipart/form-data")
	}
	if r.ContentLength > form.maxFile+maxFormBytes { // -1 if unknown
		return errTooLarge
	}
	// Package multipart alone would keep up to 10 MB of headers in memory (H1). The bytes read here
	// may include the first of the file. A LimitReader reports its end only to a further read; a
	// MaxBytesReader may report it with the last bytes, and multipart would keep that error.
	form.body = io.LimitReader(r.Body, maxPartHeaders)
	form.parts = multipart.NewReader(form, params["boundary"])
	part, err := form.parts.NextRawPart() // NextPart would decode quoted-printable
	if err != nil {
		// Package multipart reports some headers that the limit cuts off as malformed. They are
		// told from malformed ones by what Read has returned.
		if form.received == maxPartHeaders && form.readErr == io.EOF {
			return errTooLarge
		}
		return bodyProblem(err)
	}
	form.part = part
	form.body = r.Body
	form.name = path.Base(strings.ReplaceAll(part.FileName(), `\`, "/")) // without folders
	if part.FormName() != "file" || !isFileName(form.name) {
		return invalid(fieldError{"file", "must be the only part, with a file name of 1 to 255 bytes " +
			"of UTF-8 without control characters and without U+202A to U+202E and U+2066 to U+2069"})
	}
	return nil
}

// Read reads the body. Package multipart calls it, and readEnd calls it for what follows the form.
// It cuts off an upload that takes longer than uploadStart, plus a second for each uploadPace
// received (H1), or that makes no progress for stallTimeout (H5).
func (form *uploadForm) Read(p []byte) (int, error) {
	uploadTimeout := uploadStart + time.Duration(form.received/uploadPace)*time.Second
	timeLeft := min(stallTimeout, uploadTimeout-time.Since(form.started))
	http.NewResponseController(form.state).SetReadDeadline(time.Now().Add(timeLeft))
	n, err := form.body.Read(p)
	form.received += int64(n)
	form.readErr = err
	return n, err
}

// readFile writes the file to out, and reads the form to its end, which may still refuse it. It
// returns the content type and the size of the file.
func (form *uploadForm) readFile(out *os.File) (kind string, size int64, err error) {
	size, err = io.Copy(out, io.LimitReader(form.part, form.maxFile+1)) // +1 detects an excess
	if err != nil {
		return "", 0, err
	}
	if size > form.maxFile {
		return "", 0, errTooLarge
	}
	if err := form.readEnd(size); err != nil {
		return "", 0, err
	}
	head := make([]byte, min(size, 512)) // http.DetectContentType considers no more
	if _, err := out.ReadAt(head, 0); err != nil {
		return "", 0, err
	}
	return contentType(head), size, nil
}

// readEnd reads what follows the file: the end of the form, and not another part. Bytes after the
// end of the form count as bytes of the form.
//
// readEnd limits the rest of the body, because package multipart alone would keep 10 MB of the
// headers of a second part (H1). What multipart has read ahead, some kB, counts as form already.
func (form *uploadForm) readEnd(fileSize int64) error {
	formBytes := form.received - fileSize
	form.body = http.MaxBytesReader(nil, form.state.request.Body, maxFormBytes-formBytes)
	_, err := form.parts.NextRawPart()
	if err == nil {
		return invalid(fieldError{"file", "must be the form's only part"})
	}
	// A complete form ends in io.EOF itself. If the form is cut off, package multipart wraps
	// io.EOF, so errors.Is would be wrong here.
	if err != io.EOF {
		return err
	}
	_, err = io.Copy(io.Discard, form)
	return err
}

// drain reads the rest of a refused upload, for at most refusedTimeout and maxFile bytes. If the
// connection were closed while the client is still sending, the client would lose the answer: a
// browser would show a network error instead of the 413. A client that sent "Expect: 100-continue"
// sends nothing until we read, so if nothing was read, there is nothing to drain. drain reads from
// the request, not through Read, whose limits may be used up.
func (form *uploadForm) drain() {
	if form.received == 0 && form.state.request.Header.Get("Expect") != "" {
		return
	}
	http.NewResponseController(form.state).SetReadDeadline(time.Now().Add(refusedTimeout))
	io.CopyN(io.Discard, form.state.request.Body, form.maxFile)
}

// contentType detects the type of a file from its first bytes. It ignores the type that the client
// sent. Text with a "<" could be SVG or HTML, which Go does not always recognize, so it does not
// count as text, and neither do bytes that are not UTF-8.
func contentType(head []byte) string {
	found := http.DetectContentType(head)
	if !strings.HasPrefix(found, "text/") {
		return found
	}
	// FullRune is false at the end, and for a character that is cut off there, which is ignored.
	for utf8.FullRune(head) {
		char, size := utf8.DecodeRune(head)
		isInvalid := char == utf8.RuneError && size == 1
		if isInvalid || char == '<' {
			return "application/octet-stream"
		}
		head = head[size:]
	}
	return found
}

// getFile sends a file, found by its id and name. Any signed-in user may read a file whose path
// they know. The id is random, so a path can't be guessed. A path without a row is a 404, whatever
// is on disk (F1).
func (s *server) getFile(state *requestState) (sent, error) {
	name := state.request.PathValue("name")
	if !isFileName(name) {
		return sent{}, errNotFound
	}
	var f file
	found, err := s.store.row(
		readOnly(`select file_id, name, content_type, size, created_at
			from files where file_id = $1 and name = $2`,
			state.pathID("fileId"), name),
		&f.FileID, &f.Name, &f.ContentType, &f.Size, &f.CreatedAt)
	f, err = orNotFound(f, found, err)
	if err != nil {
		return sent{}, err
	}
	return sent{}, s.sendFile(state, f)
}

// inlineTypes are the types that a browser may display. It offers files of all other types for
// download. nosniff and a sandbox apply to both.
var inlineTypes = []string{
	"image/png", "image/jpeg", "image/gif", "image/webp", "text/plain; charset=utf-8",
}

// filePolicy is contentPolicy plus what a browser needs to show a picture in a tab (the inline
// style of its viewer) and to start a download from that tab. Scripts stay forbidden.
const filePolicy = contentPolicy + "; style-src 'unsafe-inline'; sandbox allow-downloads"

// sendFile sends the bytes of a file, if the row is valid and the file on disk has its size (I5).
// http.ServeContent chooses the status, and handles Range and conditional requests (RFC 9110). A
// file never changes, so its id is its ETag.
//
// The answer is private, because a shared cache may otherwise store an answer to a request with a
// cookie (C4). A file that a browser could run is sent as an attachment and sandboxed (F2).
// sendFile ignores a Range header with more than maxRanges ranges, as RFC 9110 14.2 permits,
// because each range would add a part to the answer (H7).
func (s *server) sendFile(state *requestState, f file) error {
	end, err := s.transfers.begin(state.user.UserID)
	if err != nil {
		return err
	}
	defer end()
	content, err := s.files.Open(f.FileID)
	if err != nil {
		return err
	}
	defer content.Close()
	info, err := content.Stat()
	if err != nil {
		return err
	}
	if !f.isValid() || !info.Mode().IsRegular() || info.Size() != f.Size {
		return errors.New("the file on disk is not the one that was uploaded, or its row is invalid")
	}
	disposition := "attachment"
	if slices.Contains(inlineTypes, f.ContentType) {
		disposition = "inline"
	}
	header := state.Header()
	header.Set("Content-Type", f.ContentType)
	header.Set("Content-Disposition",
		mime.FormatMediaType(disposition, map[string]string{"filename": f.Name}))
	header.Set("Content-Security-Policy", filePolicy)
	header.Set("Cache-Control", "private, no-cache")
	header.Set("ETag", `"`+f.FileID+`"`)
	// One comma means two ranges.
	if strings.Count(state.request.Header.Get("Range"), ",") >= maxRanges {
		state.request.Header.Del("Range")
	}
	http.ServeContent(fileWriter{problemWriter{state}}, state.request, "", f.CreatedAt, content)
	return nil
}

// A fileWriter is the problemWriter of sendFile. It also sends the bytes of the file.
type fileWriter struct{ problemWriter }

// ReadFrom sends a file in pieces, and extends the write deadline before each. The total time of a
// download is not limited, but each piece must be sent within stallTimeout. So a client that stops
// reading is cut off (H5).
//
// Package net uses sendfile only if the file is in one io.LimitedReader at most. Without it, a file
// of 1 MB costs 1.85 times the processor time. http.ServeContent has put the file into one, and the
// io.CopyN below adds one, so ReadFrom takes the file out of the first.
func (w fileWriter) ReadFrom(src io.Reader) (int64, error) {
	// http.ServeContent calls ReadFrom through io.CopyN. Any other src would panic, which cuts the
	// download off. R is the file, or a pipe if there are several ranges. N is what is left to
	// send.
	limited := src.(*io.LimitedReader)
	var written int64
	for limited.N > 0 {
		http.NewResponseController(w.state).SetWriteDeadline(time.Now().Add(stallTimeout))
		n, err := io.CopyN(w.state.ResponseWriter, limited.R, min(limited.N, transferPiece))
		written += n
		w.state.bytes += n
		limited.N -= n
		if err != nil { // of the client's connection, or of the disk
			w.state.log().Info("download cut off", "error", err)
			return written, err
		}
	}
	return written, nil
}
