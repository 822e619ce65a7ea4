//go:build moving

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// startInside is startServer for what can't be caused from outside: change gets the server
// before its first request.
func startInside(t testing.TB, change func(*server, *httptest.Server), overrides ...map[string]string) *testServer {
	t.Helper()
	ts := newTestServer(serverEnv(t, overrides...))
	cfg, err := loadConfig(lookup(ts.env))
	if err != nil {
		t.Fatal(err)
	}
	st, err := openStore(cfg.databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(cfg, st, ts.log)
	if err := s.openFiles(); err != nil {
		t.Fatal(err)
	}
	web := httptest.NewUnstartedServer(s.handler(s.routes()))
	change(s, web)
	ctx, endWorkers := context.WithCancel(context.Background())
	for range mailWorkers {
		go s.sendCodes(ctx)
	}
	web.Start()
	ts.addr, ts.base = web.Listener.Addr().String(), web.URL
	t.Cleanup(func() {
		web.Close()
		finishCodes(s)
		endWorkers()
		s.folder.Close()
		st.db.Close()
		close(ts.done)
		ts.checkLog(t)
	})
	return ts
}

// elsewhere returns the same session at another address, whose limits are unused.
func (c *testClient) elsewhere() *testClient {
	moved, n := *c, serial.Add(1)
	moved.ip = fmt.Sprintf("2001:db8:%x:%x::1", n>>16, n&0xffff)
	return &moved
}

const formType = "multipart/form-data; boundary=edge"

// form makes a multipart form. parts are header lines and content in turn.
func form(parts ...string) string {
	var b strings.Builder
	for pair := range slices.Chunk(parts, 2) {
		b.WriteString("--edge\r\n" + pair[0] + "\r\n\r\n" + pair[1] + "\r\n")
	}
	return b.String() + "--edge--\r\n"
}

// filePart returns the header of the part with the file. The name is not escaped.
func filePart(name string) string {
	return `Content-Disposition: form-data; name="file"; filename="` + name + `"`
}

// sendForm sends a form from a new address. If chunked, it sends no Content-Length.
func (c *testClient) sendForm(body string, chunked bool, headers ...string) *testResponse {
	c.t.Helper()
	var reader io.Reader = strings.NewReader(body)
	if chunked {
		reader = struct{ io.Reader }{reader}
	}
	return c.elsewhere().do("POST", "/files/upload", reader, append([]string{"Content-Type", formType}, headers...)...)
}

// stored checks every member of an upload's answer.
func (r *testResponse) stored(t testing.TB) (f file) {
	t.Helper()
	r.want(t, 201)
	decoder := json.NewDecoder(bytes.NewReader(r.body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&f); err != nil {
		t.Fatalf("%v: %v", err, r)
	}
	if !isUUID(f.FileID) || f.Path != "/files/"+f.FileID+"/"+url.PathEscape(f.Name) || r.header.Get("Location") != f.Path ||
		f.CreatedAt.IsZero() || f.CreatedAt.Location() != time.UTC {
		t.Errorf("got %v, want a whole file with its path as Location", r)
	}
	return f
}

// filesIn lists the entries of a server's FILES_DIR, then those of the folder of unfinished
// uploads, as unfinished/name.
func (s *testServer) filesIn(t testing.TB) (names []string) {
	t.Helper()
	for _, folder := range []string{"", unfinished + "/"} {
		entries, err := os.ReadDir(filepath.Join(s.env["FILES_DIR"], folder))
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			if entry.Name() != unfinished {
				names = append(names, folder+entry.Name())
			}
		}
	}
	return names
}

// wantStored checks that there are n files, and that the folder has these and nothing else:
// no working name, no bytes without a row, no row without bytes.
func (s *testServer) wantStored(t testing.TB, n int) {
	t.Helper()
	ids := queryValue[string](t, s.env["DATABASE_URL"],
		`select coalesce(string_agg(file_id::text, ' ' order by file_id::text collate "C"), '') from files`)
	if names := s.filesIn(t); len(names) != n || strings.Join(names, " ") != ids {
		t.Errorf("got %q on disk and rows of %q, want %d files with a row each", names, ids, n)
	}
}

// ageUnfinished makes all working names older than sweepInterval, so that the next sweep looks
// at them.
func (s *testServer) ageUnfinished(t testing.TB) {
	t.Helper()
	old := time.Now().Add(-2 * sweepInterval)
	for _, name := range s.filesIn(t) {
		if !strings.HasPrefix(name, unfinished) {
			continue
		}
		if err := os.Chtimes(filepath.Join(s.env["FILES_DIR"], name), old, old); err != nil {
			t.Fatal(err)
		}
	}
}

// An uploading is an upload of which the server has the first half.
type uploading struct {
	rest   *io.PipeWriter
	answer chan *testResponse // gets one; status 0 means that the connection broke
}

// startUpload sends half of a form. It returns when the server has begun to write the file.
func (c *testClient) startUpload(name string) *uploading {
	c.t.Helper()
	before := len(c.srv.workingFiles(c.t))
	u := c.beginUpload(name)
	waitUntil(c.t, "a working file with content", func() bool { return len(c.srv.workingFiles(c.t)) > before })
	return u
}

// beginUpload sends half of a form, and does not wait for the server.
func (c *testClient) beginUpload(name string) *uploading {
	reader, writer := io.Pipe()
	u := &uploading{writer, make(chan *testResponse, 1)}
	go func() {
		r, err := c.elsewhere().try("POST", "/files/upload", reader, "Content-Type", formType)
		reader.CloseWithError(errors.Join(err, io.ErrClosedPipe)) // else a write to the pipe would hang
		u.answer <- r
	}()
	half, _, _ := strings.Cut(form(filePart(name), uploadingContent), "|")
	io.WriteString(writer, half)
	return u
}

// uploadingContent is the file of an uploading. The first half ends at the bar.
var uploadingContent = strings.Repeat("first half ", 8000) + "|" + strings.Repeat("second half", 8000)

// finish sends the rest and returns the answer.
func (u *uploading) finish() *testResponse {
	_, rest, _ := strings.Cut(form(filePart(""), uploadingContent), "|")
	io.WriteString(u.rest, "|"+rest)
	u.rest.Close()
	return <-u.answer
}

// workingFiles returns the paths of the uploads that are being written.
func (s *testServer) workingFiles(t testing.TB) (paths []string) {
	t.Helper()
	for _, name := range s.filesIn(t) {
		path := filepath.Join(s.env["FILES_DIR"], name)
		info, err := os.Stat(path)
		if err == nil && info.Size() > 0 && strings.HasPrefix(name, unfinished) {
			paths = append(paths, path)
		}
	}
	return paths
}

// wantFile fetches a file and checks the content and every header about it.
func (c *testClient) wantFile(t testing.TB, f file, content string) {
	t.Helper()
	for _, method := range []string{"GET", "HEAD"} {
		r := c.elsewhere().do(method, f.Path, nil).want(t, 200)
		if method == "GET" && string(r.body) != content || method == "HEAD" && len(r.body) != 0 {
			t.Errorf("%s %s: got %d bytes, want the %d of the file", method, f.Path, len(r.body), len(content))
		}
		_, params, err := mime.ParseMediaType(r.header.Get("Content-Disposition"))
		for name, want := range map[string]string{
			"Content-Length": fmt.Sprint(len(content)), "Content-Type": f.ContentType, "ETag": `"` + f.FileID + `"`,
			"Content-Security-Policy": strictCSP + "; style-src 'unsafe-inline'; sandbox allow-downloads", "Cache-Control": "private, no-cache", "Accept-Ranges": "bytes",
		} {
			if r.header.Get(name) != want {
				t.Errorf("%s %s: %s: got %q, want %q", method, f.Path, name, r.header.Get(name), want)
			}
		}
		if err != nil || params["filename"] != f.Name {
			t.Errorf("%s %s: Content-Disposition: got %q, %v, want the file name %q",
				method, f.Path, r.header.Get("Content-Disposition"), err, f.Name)
		}
	}
}

func TestUploadedFileComesBack(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	big := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	tests := []struct{ sent, name, content string }{
		{"empty.txt", "empty.txt", ""},
		{"one.bin", "one.bin", "\x00"},
		{"big.txt", "big.txt", big},
		{"naïve 文件 🚀.txt", "naïve 文件 🚀.txt", "x"},
		{"a b+c&d=e#f?g.txt", "a b+c&d=e#f?g.txt", "x"},
		{`say \"hi\".txt`, `say "hi".txt`, "x"},
		{"it's.txt", "it's.txt", "x"},
		{"100%.txt", "100%.txt", "x"},
		{"a%2Fb.txt", "a%2Fb.txt", "x"},
		{"%2e%2e", "%2e%2e", "x"},
		{"semi;colon.txt", "semi;colon.txt", "x"},
		{"...", "...", "x"},
		{".hidden", ".hidden", "x"},
		{"../../etc/passwd", "passwd", "x"},
		{`C:\fakepath\photo.png`, "photo.png", "x"},
		{"upload", "upload", "x"},
		{strings.Repeat("n", 255), strings.Repeat("n", 255), "x"},
		{strings.Repeat("é", 127) + "n", strings.Repeat("é", 127) + "n", "x"},
		{"<script>.html", "<script>.html", "x"},
		{"U+202E \u202Egnp.exe", "U+202E \u202Egnp.exe", "x"},
	}
	for i, test := range tests {
		t.Run(test.name[:min(len(test.name), 30)], func(t *testing.T) {
			f := c.sendForm(form(filePart(test.sent), test.content), i%2 == 0).stored(t)
			if f.Name != test.name || f.Size != int64(len(test.content)) {
				t.Errorf("%q: got %q, %d bytes, want %q, %d bytes", test.sent, f.Name, f.Size, test.name, len(test.content))
			}
			c.wantFile(t, f, test.content)
		})
	}
	s.wantStored(t, len(tests))

	// Some clients write the name as RFC 5987 says.
	f := c.sendForm(form(`Content-Disposition: form-data; name="file"; filename*=UTF-8''na%C3%AFve.txt`, "x"), false).stored(t)
	if f.Name != "naïve.txt" {
		t.Errorf("got the name %q, want %q", f.Name, "naïve.txt")
	}
}

// Any signed-in user who knows the path of a file may read it. Nobody else may.
func TestFileIsReadByItsPath(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	f := c.upload("a.txt", []byte("content")).stored(t)
	other, _ := s.member(t, "member")
	other.wantFile(t, f, "content")

	wantProblem(t, s.client(t).do("GET", f.Path, nil), 401, "unauthenticated")
	email := newEmail()
	testUser(t, s.env["DATABASE_URL"], email, "member")
	wantProblem(t, s.signIn(t, email).do("GET", f.Path, nil), 403, "terms_not_accepted")
	for _, path := range []string{
		"/files/" + f.FileID + "/b.txt", "/files/" + f.FileID + "/A.txt", "/files/" + f.FileID + "/", "/files/" + f.FileID,
		"/files/" + strings.ToUpper(f.FileID) + "/a.txt", "/files/" + testUUID() + "/a.txt", "/files/{" + f.FileID + "}/a.txt",
		f.Path + "/", "/files//" + f.FileID + "/a.txt", "/files/",
	} {
		t.Run(path, func(t *testing.T) {
			wantProblem(t, other.do("GET", path, nil), 404, "not_found")
		})
	}
}

// F2: the server finds the type of a file itself. What a browser could run is always an
// attachment, whatever the client called it.
func TestFileTypeIsTheServersOwnFinding(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	const octets, text = "application/octet-stream", "text/plain; charset=utf-8"
	for name, test := range map[string]struct{ content, kind, disposition string }{
		"html":               {"<!DOCTYPE html><script>alert(1)</script>", octets, "attachment"},
		"html after spaces":  {"  \n<html>", octets, "attachment"},
		"tag in a text":      {"hello <script>alert(1)</script>", octets, "attachment"},
		"svg":                {`<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>`, octets, "attachment"},
		"svg with prologue":  {`<?xml version="1.0"?><svg onload="alert(1)"/>`, octets, "attachment"},
		"svg behind comment": {`<!-- c --><svg onload="alert(1)"/>`, octets, "attachment"},
		"pdf":                {"%PDF-1.7\n<script>", "application/pdf", "attachment"},
		"zip":                {"PK\x03\x04", "application/zip", "attachment"},
		"binary":             {"\x00\x01\x02", octets, "attachment"},
		"utf-16 svg":         {"\xff\xfe<\x00s\x00v\x00g\x00>\x00", octets, "attachment"},
		"utf-16 text":        {"\xff\xfea\x00b\x00", octets, "attachment"},
		"latin-1":            {"caf\xe9 au lait", octets, "attachment"},
		"latin-1 at the end": {"caf\xe9", octets, "attachment"},
		"koi8-r":             {"\xf0\xd2\xc9\xd7\xc5\xd4", octets, "attachment"},
		"utf-7 html":         {"+ADw-script+AD4-", text, "inline"}, // harmless: the charset is named
		"utf-8":              {"café au lait", text, "inline"},
		"empty":              {"", text, "inline"},
		"script":             {"alert(1)", text, "inline"}, // nosniff keeps it from being run
		"cut character":      {strings.Repeat("a", 511) + "é", text, "inline"},
		"broken character":   {strings.Repeat("a", 510) + "\xc3a" + strings.Repeat("a", 90), octets, "attachment"},
		"broken to the end":  {strings.Repeat("a", 508) + "\xe9\xe9\xe9\xe9", octets, "attachment"},
		"png":                {"\x89PNG\r\n\x1a\n\x00", "image/png", "inline"},
		"jpeg":               {"\xff\xd8\xff\xe0", "image/jpeg", "inline"},
		"gif polyglot":       {"GIF89a/*<script>alert(1)</script>*/", "image/gif", "inline"},
		"webp":               {"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp", "inline"},
		"bmp":                {"BM\x00\x00", "image/bmp", "attachment"},
		"mp4":                {"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom", "video/mp4", "attachment"},
	} {
		t.Run(name, func(t *testing.T) {
			header := filePart("photo.png") + "\r\nContent-Type: image/png"
			if test.disposition == "inline" {
				header = filePart("page.html") + "\r\nContent-Type: text/html"
			}
			f := c.sendForm(form(header, test.content), false).stored(t)
			if f.ContentType != test.kind {
				t.Errorf("type: got %q, want %q", f.ContentType, test.kind)
			}
			c.wantFile(t, f, test.content) // nosniff and the sandbox among others
			r := c.elsewhere().do("GET", f.Path, nil)
			kind, _, _ := mime.ParseMediaType(r.header.Get("Content-Disposition"))
			if kind != test.disposition {
				t.Errorf("disposition: got %q, want %q", kind, test.disposition)
			}
		})
	}
}

func TestFileRangesAndConditions(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	f := c.upload("a.txt", []byte("0123456789")).stored(t)
	etag := `"` + f.FileID + `"`
	date := func(d time.Duration) string { return f.CreatedAt.Add(d).Format(http.TimeFormat) }
	for _, test := range []struct {
		headers      []string
		status       int
		body         string
		contentRange string
	}{
		{nil, 200, "0123456789", ""},
		{[]string{"Range", "bytes=0-0"}, 206, "0", "bytes 0-0/10"},
		{[]string{"Range", "bytes=2-5"}, 206, "2345", "bytes 2-5/10"},
		{[]string{"Range", "bytes=7-"}, 206, "789", "bytes 7-9/10"},
		{[]string{"Range", "bytes=7-99"}, 206, "789", "bytes 7-9/10"},
		{[]string{"Range", "bytes=-3"}, 206, "789", "bytes 7-9/10"},
		{[]string{"Range", "bytes=10-"}, 416, "", "bytes */10"},
		{[]string{"Range", "bytes=0-0", "If-Range", etag}, 206, "0", "bytes 0-0/10"},
		{[]string{"Range", "bytes=0-0", "If-Range", `"other"`}, 200, "0123456789", ""},
		{[]string{"Range", "bytes=0-0", "If-Match", `"other"`}, 412, "", ""},
		{[]string{"If-None-Match", etag}, 304, "", ""},
		{[]string{"If-None-Match", `"other", W/` + etag}, 304, "", ""},
		{[]string{"If-None-Match", "*"}, 304, "", ""},
		{[]string{"If-None-Match", `"other"`}, 200, "0123456789", ""},
		{[]string{"If-Match", etag}, 200, "0123456789", ""},
		{[]string{"If-Match", `"other"`}, 412, "", ""},
		{[]string{"If-Modified-Since", date(time.Hour)}, 304, "", ""},
		{[]string{"If-Modified-Since", date(-time.Hour)}, 200, "0123456789", ""},
		{[]string{"If-Unmodified-Since", date(-time.Hour)}, 412, "", ""},
	} {
		for _, method := range []string{"GET", "HEAD"} {
			t.Run(method+" "+strings.Join(test.headers, " "), func(t *testing.T) {
				r := c.do(method, f.Path, nil, test.headers...)
				switch test.status {
				case 412:
					wantProblem(t, r, 412, "precondition_failed")
				case 416:
					wantProblem(t, r, 416, "range_not_satisfiable")
				default:
					if r.status != test.status || method == "GET" && string(r.body) != test.body {
						t.Errorf("got %v, want %d with the body %q", r, test.status, test.body)
					}
				}
				if got := r.header.Get("Content-Range"); got != test.contentRange {
					t.Errorf("Content-Range: got %q, want %q", got, test.contentRange)
				}
				wantTag := ""
				if test.status < 400 {
					wantTag = etag
				}
				if got := r.header.Get("ETag"); got != wantTag {
					t.Errorf("ETag: got %q, want %q", got, wantTag)
				}
			})
		}
	}

	r := c.do("GET", f.Path, nil, "Range", "bytes=0-1,8-").want(t, 206)
	_, params, _ := mime.ParseMediaType(r.header.Get("Content-Type"))
	parts := multipart.NewReader(bytes.NewReader(r.body), params["boundary"])
	for _, want := range []string{"01", "89"} {
		part, err := parts.NextPart()
		if err != nil {
			t.Fatal(err, r)
		}
		got, _ := io.ReadAll(part)
		if string(got) != want || part.Header.Get("Content-Type") != f.ContentType {
			t.Errorf("got the part %q as %v, want %q as %s", got, part.Header, want, f.ContentType)
		}
	}
}

// F3: the limits hold to the byte, whether or not the client sends a Content-Length.
func TestUploadLimits(t *testing.T) {
	t.Parallel()
	const limit = 100_000
	s := startServer(t, map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(limit)})
	c, _ := s.member(t, "member")
	frame := len(form(filePart("a.bin"), ""))
	stored := 0
	for _, test := range []struct{ content, around, status int }{
		{limit, frame, 201}, {limit + 1, frame, 413}, {2 * limit, frame, 413}, {20 * limit, frame, 413},
		{limit, maxFormBytes, 201}, {limit, maxFormBytes + 1, 413}, {10, maxFormBytes, 201}, {10, maxFormBytes + 1, 413},
		{0, maxFormBytes, 201}, {0, maxFormBytes + 1, 413}, {0, 2 * limit, 413},
	} {
		for _, chunked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d bytes, %d around them, chunked %v", test.content, test.around, chunked), func(t *testing.T) {
				// What follows the form counts as part of it.
				body := form(filePart("a.bin"), strings.Repeat("c", test.content)) + strings.Repeat("e", test.around-frame)
				r := c.sendForm(body, chunked)
				if test.status == 413 {
					wantProblem(t, r, 413, "too_large")
				} else {
					stored++
					if f := r.stored(t); f.Size != int64(test.content) {
						t.Errorf("got %d bytes, want %d", f.Size, test.content)
					}
				}
				s.wantStored(t, stored)
			})
		}
	}
	t.Run("endless form without a boundary", func(t *testing.T) {
		endless := struct{ io.Reader }{repeat("no boundary\r\n")}
		wantProblem(t, c.elsewhere().do("POST", "/files/upload", endless, "Content-Type", formType), 413, "too_large")
		s.wantStored(t, stored)
	})
	// A client that waits for "100 Continue" is refused before it sends a byte of the body.
	// (To one that does not wait, net/http answers only once it has the body.)
	t.Run("announced as too large", func(t *testing.T) {
		raw := c.uploadHead(formType, limit+maxFormBytes+1, "Expect: 100-continue\r\n")
		wantProblem(t, s.raw(t, raw), 413, "too_large")
		s.wantStored(t, stored)
	})
}

// H1: what a form has before its file is held in memory, so it is bounded: the part's
// headers, and a preamble.
func TestUploadPartHeaderLimit(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	oneHeader := func(length int) string {
		before := len("--edge\r\n" + filePart("a.bin") + "\r\nX-Padding: " + "\r\n\r\n")
		return form(filePart("a.bin")+"\r\nX-Padding: "+strings.Repeat("p", length-before), "content")
	}
	manyHeaders := func(length int) string {
		headers := filePart("a.bin")
		for len("--edge\r\n"+headers+"\r\n\r\n") < length {
			headers += "\r\nX: y"
		}
		return form(headers, "content")
	}
	preamble := func(length int) string {
		before := len("--edge\r\n" + filePart("a.bin") + "\r\n\r\n")
		return strings.Repeat("p", length-before-2) + "\r\n" + form(filePart("a.bin"), "content")
	}
	stored := 0
	for _, test := range []struct {
		name    string
		body    string
		refused bool
	}{
		// The server reads one byte more than its limit, no more.
		{"longest header", oneHeader(maxPartHeaders), false},
		{"longer header", oneHeader(maxPartHeaders + 2), true},
		{"header of 1 MiB", oneHeader(1 << 20), true},
		{"most headers", manyHeaders(maxPartHeaders - 6), false},
		{"more headers", manyHeaders(maxPartHeaders + 2), true},
		{"100,000 headers", manyHeaders(600_000), true},
		{"longest preamble", preamble(maxPartHeaders), false},
		{"longer preamble", preamble(maxPartHeaders + 2), true},
	} {
		for _, chunked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, chunked %v", test.name, chunked), func(t *testing.T) {
				r := c.sendForm(test.body, chunked)
				switch {
				case !test.refused:
					stored++
					c.wantFile(t, r.stored(t), "content")
				case r.status == 400: // cut by the limit within the end of the headers
					wantProblem(t, r, 400, "invalid_request", "body")
				default:
					wantProblem(t, r, 413, "too_large")
				}
				s.wantStored(t, stored)
			})
		}
	}
}

// repeat is a reader of a text again and again, without an end.
type repeat string

func (r repeat) Read(p []byte) (n int, err error) {
	for n = copy(p, r); n < len(p)-len(r); n += copy(p[n:], r) {
	}
	return n, nil
}

// uploadHead returns the head of an upload request, up to its blank line. More header lines
// may follow the length.
func (c *testClient) uploadHead(contentType string, length int, headers ...string) string {
	return fmt.Sprintf("POST /files/upload HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n",
		c.srv.cookieName(), c.token(), contentType, length, strings.Join(headers, ""))
}

// otherPart is the header of a part that the server refuses.
const otherPart = `Content-Disposition: form-data; name="other"; filename="a.txt"`

// A client that sends its whole upload before it reads gets its answer, whatever was wrong,
// and can go on using the connection: the server reads the rest of a refused upload.
func TestRefusedUploadIsAnswered(t *testing.T) {
	t.Parallel()
	const limit = 4 << 20 // far more than the 256 KiB of a body that net/http itself reads off
	s := startServer(t, map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(limit)})
	c, _ := s.member(t, "member")
	content := strings.Repeat("c", limit)
	t.Run("refused", func(t *testing.T) { // so that all of these end before wantStored
		for name, test := range map[string]struct {
			body, contentType string
			status            int
		}{
			"wrong type":             {form(filePart("a.txt"), content), "text/plain", 415},
			"no boundary":            {form(filePart("a.txt"), content), "multipart/form-data", 400},
			"wrong field":            {form(otherPart, content), formType, 400},
			"two files":              {form(filePart("a.txt"), "x", filePart("b.txt"), content), formType, 400},
			"announced as too large": {form(filePart("a.txt"), content+strings.Repeat("c", maxFormBytes)), formType, 413},
			"found too large":        {form(filePart("a.txt"), content+"c"), formType, 413},
			"headers too long":       {form(filePart("a.txt")+"\r\nX: "+strings.Repeat("h", maxPartHeaders), content[1<<20:]), formType, 413},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				client, err := dialRaw(s.addr)
				if err != nil {
					t.Fatal(err)
				}
				defer client.conn.Close()
				client.conn.SetDeadline(time.Now().Add(patience))
				if err := client.send(c.uploadHead(test.contentType, len(test.body)) + test.body); err != nil {
					t.Error("not read to its end: ", err)
				}
				status, closes, err := client.receive()
				if status != test.status || closes || err != nil {
					t.Fatalf("got %d, closes %v, %v, want %d on a connection that stays open", status, closes, err, test.status)
				}
				client.send("GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
				if status, _, err := client.receive(); status != 200 || err != nil {
					t.Errorf("next request on the connection: got %d, %v, want 200", status, err)
				}
			})
		}
	})
	s.wantStored(t, 0)
}

// H1: the server reads no more of a refused upload than an upload may have.
func TestRefusedUploadIsReadWithinBounds(t *testing.T) {
	t.Parallel()
	const limit = 100_000
	var taken atomic.Int64
	s := startInside(t, func(_ *server, web *httptest.Server) {
		web.Listener = countingListener{web.Listener, &taken}
	}, map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(limit)})
	c, _ := s.member(t, "member")
	before := taken.Load()
	endless := struct{ io.Reader }{repeat("no form\r\n")}
	wantProblem(t, c.elsewhere().do("POST", "/files/upload", endless, "Content-Type", "text/plain"), 415, "unsupported_media_type")
	// On top come what net/http reads off by itself, the frames of the chunks, and buffers.
	if n := taken.Load() - before; n < limit || n > limit+1<<20 {
		t.Errorf("got %d bytes of an endless upload read, want %d to %d", n, limit, limit+1<<20)
	}
}

// countingListener counts the bytes that are read from its connections.
type countingListener struct {
	net.Listener
	taken *atomic.Int64
}

func (l countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return countingConn{conn, l.taken}, nil
}

type countingConn struct {
	net.Conn
	taken *atomic.Int64
}

func (c countingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.taken.Add(int64(n))
	return n, err
}

// H1: the server waits a few seconds only for the rest of a refused upload.
func TestRefusedUploadIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	client, err := dialRaw(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer client.conn.Close()
	half, _, _ := strings.Cut(form(otherPart, uploadingContent), "|")
	if err := client.send(c.uploadHead(formType, 200_000) + half); err != nil {
		t.Fatal(err)
	}
	client.conn.SetDeadline(time.Now().Add(4 * refusedTimeout)) // a good upload has a minute at least
	if status, _, err := client.receive(); status != 400 || err != nil {
		t.Errorf("got %d, %v, want 400", status, err)
	}
}

// A client that waits for "100 Continue" gets a refusal instead, and at once.
func TestRefusedUploadIsNotAskedFor(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	r := s.raw(t, c.uploadHead("text/plain", 1_000_000, "Expect: 100-continue\r\n"))
	wantProblem(t, r, 415, "unsupported_media_type")
}

// openIn lists what a process has open in a folder.
func (p *testProcess) openIn(t testing.TB, dir string) (names []string) {
	t.Helper()
	links := fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)
	entries, err := os.ReadDir(links)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if name, err := os.Readlink(filepath.Join(links, entry.Name())); err == nil && strings.HasPrefix(name, dir) {
			names = append(names, strings.TrimPrefix(name, dir))
		}
	}
	return names
}

// H1: every upload and every download, however it ends, closes its file at once. The server
// is a process of its own without garbage collection, which would close a lost file, too.
func TestFilesAreClosed(t *testing.T) {
	t.Parallel()
	const limit = 100_000
	p := startProcess(t, map[string]string{"GOGC": "off", "MAX_UPLOAD_BYTES": fmt.Sprint(limit)})
	c, _ := p.member(t, "member")
	f := c.upload("a.txt", []byte("content")).stored(t)
	dir := p.env["FILES_DIR"]
	idle := p.openIn(t, dir)
	if len(idle) == 0 || len(idle) > 5 {
		t.Fatalf("at rest: got %q open, want 1 to 5 entries", idle)
	}
	closed := func(after string) {
		t.Helper()
		waitUntil(t, "all closed after "+after, func() bool { return len(p.openIn(t, dir)) == len(idle) })
	}
	c.upload("b.txt", []byte("content")).stored(t)
	closed("an upload")
	for name, body := range map[string]string{
		"too large":     form(filePart("a.txt"), strings.Repeat("c", limit+1)),
		"two files":     form(filePart("a.txt"), "x", filePart("b.txt"), "y"),
		"no end":        strings.TrimSuffix(form(filePart("a.txt"), "x"), "--edge--\r\n"),
		"long epilogue": form(filePart("a.txt"), "x") + strings.Repeat("e", maxFormBytes),
	} {
		t.Run(name, func(t *testing.T) {
			if r := c.sendForm(body, true); r.status < 400 {
				t.Errorf("got %v, want a refusal", r)
			}
			closed("an upload: " + name)
		})
	}
	upload := c.startUpload("c.txt")
	if n := len(p.openIn(t, dir)); n != len(idle)+1 {
		t.Errorf("during an upload: got %d files open, want %d", n, len(idle)+1)
	}
	upload.rest.CloseWithError(io.ErrUnexpectedEOF)
	<-upload.answer
	closed("an upload that broke off")
	for name, headers := range map[string][]string{
		"whole": nil, "part": {"Range", "bytes=1-2"}, "no such part": {"Range", "bytes=10-"},
		"not modified": {"If-None-Match", `"` + f.FileID + `"`}, "other version": {"If-Match", `"x"`},
	} {
		for _, method := range []string{"GET", "HEAD"} {
			t.Run(method+" "+name, func(t *testing.T) {
				if r := c.elsewhere().do(method, f.Path, nil, headers...); r.status == 500 {
					t.Errorf("got %v, want no failure", r)
				}
				closed(method + ", " + name)
			})
		}
	}
	p.wantStored(t, 2)
}

// F3: an upload that is not one whole form with one file leaves nothing. The refusal names
// what is wrong.
func TestUploadRefusals(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	good := form(filePart("a.txt"), "content")
	part := func(params string) string { return form("Content-Disposition: form-data; "+params, "content") }
	for name, test := range map[string]struct {
		body, contentType string
		status            int
		field             string
	}{
		"no content type":      {good, "", 415, ""},
		"json":                 {`{"file":"x"}`, "application/json", 415, ""},
		"bare bytes":           {"x", "application/octet-stream", 415, ""},
		"urlencoded":           {"file=x", "application/x-www-form-urlencoded", 415, ""},
		"multipart/mixed":      {good, "multipart/mixed; boundary=edge", 415, ""},
		"bad content type":     {good, "multipart/form-data; boundary=edge; =", 415, ""},
		"no boundary":          {good, "multipart/form-data", 400, "body"},
		"empty boundary":       {good, `multipart/form-data; boundary=""`, 400, "body"},
		"other boundary":       {good, "multipart/form-data; boundary=rim", 400, "body"},
		"empty body":           {"", formType, 400, "body"},
		"no part":              {"--edge--\r\n", formType, 400, "body"},
		"no end":               {strings.TrimSuffix(good, "--edge--\r\n"), formType, 400, "body"},
		"bad second header":    {form(filePart("a.txt"), "x", "no header", "y"), formType, 400, "body"},
		"ends in the content":  {good[:len(good)-15], formType, 400, "body"},
		"ends in the header":   {good[:30], formType, 400, "body"},
		"bad header":           {form("no header", "content"), formType, 400, "body"},
		"no header":            {"--edge\r\n\r\ncontent\r\n--edge--\r\n", formType, 400, "file"},
		"wrong field":          {part(`name="upload"; filename="a.txt"`), formType, 400, "file"},
		"field of other case":  {part(`name="File"; filename="a.txt"`), formType, 400, "file"},
		"no field name":        {part(`filename="a.txt"`), formType, 400, "file"},
		"no file name":         {part(`name="file"`), formType, 400, "file"},
		"empty file name":      {part(`name="file"; filename=""`), formType, 400, "file"},
		"two files":            {form(filePart("a.txt"), "x", filePart("b.txt"), "y"), formType, 400, "file"},
		"field after the file": {form(filePart("a.txt"), "x", `Content-Disposition: form-data; name="n"`, "y"), formType, 400, "file"},
		"field before":         {form(`Content-Disposition: form-data; name="n"`, "y", filePart("a.txt"), "x"), formType, 400, "file"},
		"attachment":           {form(`Content-Disposition: attachment; name="file"; filename="a"`, "x"), formType, 400, "file"},
		"dot":                  {part(`name="file"; filename="."`), formType, 400, "file"},
		"dot dot":              {part(`name="file"; filename=".."`), formType, 400, "file"},
		"ends in dot dot":      {part(`name="file"; filename="a/.."`), formType, 400, "file"},
		"ends in a slash":      {part(`name="file"; filename="a/"`), formType, 400, "file"},
		"256 bytes":            {part(`name="file"; filename="` + strings.Repeat("n", 256) + `"`), formType, 400, "file"},
		"256 bytes, Greek":     {part(`name="file"; filename="` + strings.Repeat("λ", 128) + `"`), formType, 400, "file"},
		"bad UTF-8":            {part("name=\"file\"; filename=\"\xff\""), formType, 400, "file"},
		"bad UTF-8, encoded":   {part("name=\"file\"; filename*=UTF-8''%ff"), formType, 400, "file"},
		"NUL":                  {part("name=\"file\"; filename*=UTF-8''a%00b"), formType, 400, "file"},
		"line break":           {part("name=\"file\"; filename*=UTF-8''a%0D%0Ab"), formType, 400, "file"},
		"C1 control":           {part("name=\"file\"; filename*=UTF-8''a%C2%85b"), formType, 400, "file"},
		"encoded slash only":   {part("name=\"file\"; filename*=UTF-8''a%2F"), formType, 400, "file"},
	} {
		for _, chunked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, chunked %v", name, chunked), func(t *testing.T) {
				r := c.sendForm(test.body, chunked, "Content-Type", test.contentType)
				if test.status == 415 {
					wantProblem(t, r, 415, "unsupported_media_type")
				} else {
					wantProblem(t, r, 400, "invalid_request", test.field)
				}
			})
		}
	}
	wantProblem(t, c.sendForm(good, false, "Content-Encoding", "gzip"), 415, "unsupported_media_type")
	s.wantStored(t, 0)
	c.sendForm(good, false).stored(t) // so the client and its session were not the reason
	s.wantStored(t, 1)
}

// F1: no path leads to anything but a file with a row, and no entry of the folder leads out
// of the folder.
func TestFilePathsLeadNowhereElse(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	f := c.upload("a.txt", []byte("content")).stored(t)
	dir := s.env["FILES_DIR"]
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("secret!"), 0o600); err != nil {
		t.Fatal(err)
	}
	link, folder, bare := testUUID(), testUUID(), testUUID()
	if err := errors.Join(os.Symlink(secret, filepath.Join(dir, link)), os.Mkdir(filepath.Join(dir, folder), 0o700),
		os.WriteFile(filepath.Join(dir, bare), []byte("no row"), 0o600),
		os.WriteFile(filepath.Join(dir, "plain"), []byte("no id"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{
		"/files/.lock/.lock", "/files/./a.txt", "/files/unfinished/unfinished", "/files/%2e/a.txt", "/files/../a.txt", "/files/%2e%2e/a.txt",
		"/files/..%2f..%2fetc%2fpasswd/x", "/files/..%5c..%5cx/x", "/files/%00/x", "/files/%ff/x", "/files/" + f.FileID + "%00/a.txt",
		"/files/" + f.FileID + "/..", "/files/" + f.FileID + "/%2e%2e", "/files/" + f.FileID + "/..%2f" + f.FileID,
		"/files/" + f.FileID + "/%00", "/files/" + f.FileID + "/a.txt%00", "/files/" + f.FileID + "/%ff", "/files/" + f.FileID + "/%c3",
		"/files/" + f.FileID + "/a.txt%2f", "/files/" + f.FileID + "/%2fa.txt", "/files/" + f.FileID + "/" + strings.Repeat("n", 4000),
		"/files/unfinished%2f" + f.FileID + "/a.txt", "/files/unfinished/" + f.FileID, "/files/plain/plain", "/files/" + bare + "/" + bare,
		"/files/" + link + "/secret", "/files/" + folder + "/" + folder, "/files/%2fetc%2fpasswd/passwd",
		"//files/" + f.FileID + "/a.txt", "/files/" + f.FileID + "//a.txt", "/files/x/../" + f.FileID + "/a.txt",
	} {
		t.Run(path[:min(len(path), 80)], func(t *testing.T) {
			raw := fmt.Sprintf("GET %s HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\n\r\n", path, s.cookieName(), c.token())
			wantProblem(t, s.raw(t, raw), 404, "not_found")
		})
	}
	// A row makes no difference: the server has not made these entries.
	s.allowErrors("breaks its contract", "path escapes from parent")
	for id, size := range map[string]int64{link: 7, folder: dirSize(t, filepath.Join(dir, folder))} {
		execSQL(t, s.env["DATABASE_URL"], "insert into files (file_id, name, content_type, size) values ($1, 'a', 'text/plain', $2)", id, size)
		wantProblem(t, c.do("GET", "/files/"+id+"/a", nil), 500, "internal")
	}
	c.wantFile(t, f, "content")
}

func dirSize(t testing.TB, path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// A file whose length on disk is not that of its row is not served, not even in part.
func TestFileThatLostItsBytes(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	for name, damage := range map[string]func(path string) error{
		"removed":  os.Remove,
		"cut":      func(path string) error { return os.Truncate(path, 3) },
		"extended": func(path string) error { return os.Truncate(path, 30) },
	} {
		t.Run(name, func(t *testing.T) {
			f := c.upload("a.txt", []byte("content")).stored(t)
			if err := damage(filepath.Join(s.env["FILES_DIR"], f.FileID)); err != nil {
				t.Fatal(err)
			}
			s.allowErrors("breaks its contract", "no such file or directory")
			for _, method := range []string{"GET", "HEAD"} {
				r := c.do(method, f.Path, nil)
				wantProblem(t, r, 500, "internal")
				if r.header.Get("ETag")+r.header.Get("Content-Disposition") != "" || strings.Contains(string(r.body), "con") {
					t.Errorf("got something of the file: %v", r)
				}
			}
		})
	}
}

// A download goes from the file to the socket in the kernel (sendfile): every wrapper around
// the connection hands the file on to it.
func TestDownloadKeepsSendfile(t *testing.T) {
	t.Parallel()
	var fromFile atomic.Int64
	s := startInside(t, func(_ *server, web *httptest.Server) {
		web.Listener = sendfileListener{web.Listener, &fromFile}
	})
	c, _ := s.member(t, "member")
	content := strings.Repeat("0123456789abcdef", 1<<12)
	f := c.upload("a.txt", []byte(content)).stored(t)
	c.wantFile(t, f, content)
	c.do("GET", f.Path, nil, "Range", "bytes=6-").want(t, 206)
	// net/http may write the first 512 bytes with the headers. The server counts a little
	// later than the client has it all.
	want := int64(2*len(content) - 6)
	waitUntil(t, "nearly all bytes by sendfile", func() bool { return fromFile.Load() >= want-1024 })
	if n := fromFile.Load(); n > want {
		t.Errorf("got %d bytes by sendfile, want at most %d", n, want)
	}
}

type sendfileListener struct {
	net.Listener
	fromFile *atomic.Int64
}

func (l sendfileListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return sendfileConn{conn, l.fromFile}, nil
}

// sendfileConn counts the bytes that come straight from a file.
type sendfileConn struct {
	net.Conn
	fromFile *atomic.Int64
}

func (c sendfileConn) ReadFrom(src io.Reader) (int64, error) {
	n, err := io.Copy(c.Conn, src)
	if limited, ok := src.(*io.LimitedReader); ok {
		src = limited.R
	}
	if _, ok := src.(*os.File); ok {
		c.fromFile.Add(n)
	}
	return n, err
}

// F4, the step of the row: PostgreSQL goes away before the statement reaches it, or after it
// has done the statement and before it could say so.
func TestUploadRowFails(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	proxy, through := proxyURL(t, database)
	s := startServer(t, map[string]string{"DATABASE_URL": through})
	s.allowErrors(`"error":"unavailable`)
	s.env["DATABASE_URL"] = database // for the checks
	c, _ := s.member(t, "member")
	c.upload("first.txt", []byte("content")).stored(t)
	rows := func(name string) int {
		return queryValue[int](t, database, "select count(*) from files where name = $1", name)
	}
	wantRows := func(t *testing.T, name string, want int) {
		t.Helper()
		if got := rows(name); got != want {
			t.Errorf("rows of %s: got %d, want %d", name, got, want)
		}
	}
	undoable := func() (names []string) {
		for _, name := range s.filesIn(t) {
			if strings.HasSuffix(name, undoSuffix) {
				names = append(names, name)
			}
		}
		return names
	}
	serviceAgain := func() {
		waitUntil(t, "service again", func() bool { return c.elsewhere().do("GET", "/hubs", nil).status == 200 })
	}

	t.Run("broken off while the database is away", func(t *testing.T) { // undoing it needs no database
		upload := c.startUpload("broken.txt")
		proxy.cut()
		upload.rest.CloseWithError(io.ErrUnexpectedEOF)
		<-upload.answer
		waitUntil(t, "nothing of the broken upload", func() bool { return len(s.filesIn(t)) == 1 })
		proxy.resume()
		serviceAgain()
	})
	t.Run("not done, database away", func(t *testing.T) {
		proxy.when("not-done.txt", proxy.cut)
		wantProblem(t, c.upload("not-done.txt", []byte("content")), 503, "unavailable")
		wantRows(t, "not-done.txt", 0)
		s.log.waitFor(t, `"level":"WARN"`, "a failed upload is left to the sweep", `"fileId":"`)
		if names := undoable(); len(names) != 1 {
			t.Errorf("left to undo: got %q, want one", names)
		}
		proxy.resume()
		serviceAgain()
	})
	t.Run("done, answer lost", func(t *testing.T) {
		proxy.when("done.txt", proxy.dropReplies)
		answer := make(chan *testResponse, 1)
		go func() { answer <- c.upload("done.txt", []byte("content")) }()
		waitUntil(t, "the row", func() bool { return rows("done.txt") == 1 })
		proxy.resume()
		wantProblem(t, <-answer, 503, "unavailable")
		wantRows(t, "done.txt", 0) // undone at once: the database was there again
		serviceAgain()
	})
	t.Run("done, database away", func(t *testing.T) {
		proxy.when("silent.txt", proxy.dropReplies)
		start := time.Now()
		wantProblem(t, c.upload("silent.txt", []byte("content")), 503, "unavailable")
		if wait := time.Since(start); wait > dbWait {
			t.Errorf("503 after %v, want at most %v", wait, dbWait)
		} else {
			t.Logf("503 after %v", wait.Round(time.Millisecond))
		}
		wantRows(t, "silent.txt", 1) // else this test shows nothing
		// The bytes stay while the row does: a row without them would be half a file.
		names := undoable()
		if len(names) != 2 {
			t.Errorf("left to undo: got %q, want two", names)
		}
		for _, name := range names {
			id := strings.TrimSuffix(filepath.Base(name), undoSuffix)
			content, err := os.ReadFile(filepath.Join(s.env["FILES_DIR"], id))
			if err != nil || string(content) != "content" {
				t.Errorf("bytes of a row that is left: got %q, %v, want %q", content, err, "content")
			}
		}
		proxy.cut()
		proxy.resume()
		serviceAgain()
	})

	f := c.upload("last.txt", []byte("content")).stored(t)
	s.stop(t)
	s.ageUnfinished(t)
	s = startServer(t, s.env)
	wantRows(t, "silent.txt", 0) // what was refused never comes back
	s.wantStored(t, 2)
	again := s.client(t)
	again.setToken(c.token())
	again.wantFile(t, f, "content")
}

// F4: the link is made, but reported as failed, as a network file system may do. This is the
// one fault that nothing outside the process can cause.
func TestUploadLinkDoneButReportedAsFailed(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err    error
		status int
		code   string
	}{
		"input or output error": {syscall.EIO, 500, "internal"},
		"no room":               {syscall.ENOSPC, 507, "insufficient_storage"},
		"quota":                 {syscall.EDQUOT, 507, "insufficient_storage"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var fails, done atomic.Bool
			s := startInside(t, func(s *server, _ *httptest.Server) {
				link := s.linkFile
				s.linkFile = func(oldname, newname string) error {
					err := link(oldname, newname)
					if fails.Load() && err == nil {
						done.Store(true)
						return &os.LinkError{Op: "linkat", Old: oldname, New: newname, Err: test.err}
					}
					return err
				}
			})
			s.allowErrors(`"error":"` + test.code)
			c, _ := s.member(t, "member")
			first := c.upload("first.txt", []byte("content")).stored(t)
			fails.Store(true)
			wantProblem(t, c.upload("a.txt", []byte("content")), test.status, test.code)
			if !done.Load() {
				t.Fatal("no link was made: this test shows nothing")
			}
			s.wantStored(t, 1)
			fails.Store(false)
			second := c.upload("b.txt", []byte("content")).stored(t)
			s.wantStored(t, 2)
			c.wantFile(t, first, "content")
			c.wantFile(t, second, "content")
		})
	}
}

// wantLeft checks what a sweep has left.
func (s *testServer) wantLeft(t testing.TB, want []string) {
	t.Helper()
	got := s.filesIn(t)
	slices.Sort(got)
	if !slices.Equal(got, slices.Sorted(slices.Values(want))) {
		t.Errorf("%d left: got %.40q, want %q", len(got), got, want)
	}
}

// F3: what a killed server has left goes at the next start, and nothing else does.
func TestSweepAtStart(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	f := c.upload("a.txt", []byte("content")).stored(t)
	if code := s.stop(t); code != 0 {
		t.Fatalf("stop: got exit status %d, want 0", code)
	}
	dir := s.env["FILES_DIR"]
	write := func(name string) string {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	insert := func(id string) {
		execSQL(t, s.env["DATABASE_URL"],
			"insert into files (file_id, name, content_type, size) values ($1, 'refused.txt', 'text/plain', 1)", id)
	}
	for range 500 {
		write(unfinished + "/" + testUUID()) // ended before it was whole
		id := testUUID()                     // ended before its row
		write(id)
		write(unfinished + "/" + id)
	}
	for range 20 {
		refused := testUUID() // its row may exist, and does
		insert(refused)
		write(refused)
		write(unfinished + "/" + refused + undoSuffix)
		refused = testUUID() // its row may exist, and does not
		write(refused)
		write(unfinished + "/" + refused + undoSuffix)
		refused = testUUID() // the sweep that undid it was killed after the row
		write(unfinished + "/" + refused + undoSuffix)
	}
	write(unfinished + "/" + f.FileID) // ended after its row
	kept := []string{
		f.FileID,
		write(testUUID()), // without a row, and of another database or of one that was restored
		write("notes.txt"), write("notes.tmp"), write(unfinished + "/notes"), write(unfinished + "/notes" + undoSuffix),
		write(unfinished + "/" + strings.ToUpper(testUUID())), write(unfinished + "/" + testUUID() + undoSuffix + undoSuffix),
		write(strings.ToUpper(testUUID())), write(testUUID() + ".bak"), write("x" + testUUID()), write(testUUID() + "\n"),
		write(testUUID() + undoSuffix), "folder",
	}
	if err := os.Mkdir(filepath.Join(dir, "folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.ageUnfinished(t)
	young := testUUID() // so young that another server's upload may be about to lock it
	kept = append(kept, write(young), write(unfinished+"/"+young))
	young = testUUID()
	insert(young)
	kept = append(kept, write(young), write(unfinished+"/"+young+undoSuffix))

	// No other user of this machine may read them.
	for name, want := range map[string]os.FileMode{f.FileID: 0o600, unfinished: 0o700 | os.ModeDir} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != want {
			t.Errorf("mode of %s: got %v, %v, want %v", name, info.Mode(), err, want)
		}
	}
	s = startServer(t, s.env)
	s.log.waitFor(t, `"msg":"sweeping an unfinished upload"`, `"fileId":"`+f.FileID)
	s.wantLeft(t, kept)
	if rows := queryValue[int](t, s.env["DATABASE_URL"], "select count(*) from files"); rows != 2 {
		t.Errorf("rows: got %d, want 2, those of the upload and of the young one", rows)
	}
	again := s.client(t)
	again.setToken(c.token())
	again.wantFile(t, f, "content")
}

// F3: a sweep spares what an upload of any server holds, however old it looks, and takes
// what nobody holds, although other servers use the folder.
func TestSweepSparesRunningUploads(t *testing.T) {
	t.Parallel()
	var own *server // sweeps when the test says so
	first := startInside(t, func(s *server, _ *httptest.Server) { own = s })
	c, _ := first.member(t, "member")
	orphan := func() {
		t.Helper()
		path := filepath.Join(first.env["FILES_DIR"], unfinished, testUUID())
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wantWorking := func(when string, want int) {
		t.Helper()
		if got := first.workingFiles(t); len(got) != want {
			t.Errorf("%s: got the working files %q, want %d", when, got, want)
		}
	}
	upload := c.startUpload("a.txt")
	orphan()
	wantWorking("before any sweep", 2)
	if err := own.sweepOnce(); err != nil {
		t.Fatal(err)
	}
	wantWorking("after a sweep while both are young", 2)
	first.ageUnfinished(t)
	second := startServer(t, first.env)
	wantWorking("after the start of a second server", 1)
	first.ageUnfinished(t)
	if err := own.sweepOnce(); err != nil {
		t.Fatal(err)
	}
	wantWorking("after a sweep of the upload's own server", 1)
	f := upload.finish().stored(t)
	other := second.client(t)
	other.setToken(c.token())
	other.wantFile(t, f, uploadingContent)

	// The same the other way round: the upload runs in the server that started last.
	upload = other.startUpload("b.txt")
	orphan()
	first.ageUnfinished(t)
	if err := own.sweepOnce(); err != nil {
		t.Fatal(err)
	}
	wantWorking("after a sweep of the other server", 1)
	f = upload.finish().stored(t)
	c.wantFile(t, f, uploadingContent)
	first.ageUnfinished(t)
	if err := own.sweepOnce(); err != nil {
		t.Fatal(err)
	}
	first.wantStored(t, 2)
}

// F3: a running server sweeps by itself, once a minute.
func TestSweepWhileServing(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	f := c.upload("a.txt", []byte("content")).stored(t)
	orphan := testUUID()
	for _, path := range []string{orphan, unfinished + "/" + orphan} {
		if err := os.WriteFile(filepath.Join(s.env["FILES_DIR"], path), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.ageUnfinished(t)
	// The server has just swept: this wait takes most of a minute, longer than any other.
	for end := time.Now().Add(sweepInterval + patience); len(s.filesIn(t)) != 1 && time.Now().Before(end); {
		time.Sleep(100 * time.Millisecond)
	}
	s.wantLeft(t, []string{f.FileID})
	c.wantFile(t, f, "content")
}

// A sweep that can't ask the database ends the start. It removes nothing that it could not
// ask about: neither if the database goes away, nor if one of its questions fails, twice.
func TestSweepFails(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(p *tcpProxy, first string){
		"database away": func(p *tcpProxy, _ string) {
			p.when("select file_id from files where file_id", p.cut)
		},
		"only a question": func(p *tcpProxy, first string) {
			cut := func() { p.cut(); p.resume() }
			p.when(first, func() {
				p.when(first, cut) // a read is tried once more
				cut()
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, through := proxyURL(t, newDatabase(t))
			s := newTestServer(serverEnv(t, map[string]string{"DATABASE_URL": through}))
			dir := s.env["FILES_DIR"]
			if err := os.Mkdir(filepath.Join(dir, unfinished), 0o700); err != nil {
				t.Fatal(err)
			}
			ids := []string{testUUID(), testUUID(), testUUID()}
			slices.Sort(ids) // the order in which they are swept
			for _, id := range ids {
				for _, name := range []string{id, unfinished + "/" + id} {
					if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			s.ageUnfinished(t)
			fail(proxy, ids[0])
			// In a process of its own, which is gone with all that it holds when it ends.
			path, err := testBinary()
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, path)
			for name, value := range s.env {
				cmd.Env = append(cmd.Env, name+"="+value)
			}
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "\nFILES_DIR: ") || strings.Contains(string(out), `"listening"`) {
				t.Errorf("got %v, %s, want exit status 1 and the name of the setting", err, out)
			}
			left := s.filesIn(t)
			for _, name := range []string{ids[0], unfinished + "/" + ids[0]} {
				if !slices.Contains(left, name) {
					t.Errorf("removed without an answer of the database: %s", name)
				}
			}
			proxy.resume()
			startServer(t, s.env).wantLeft(t, nil)
		})
	}
}

// A folder of unfinished uploads that can't be read is an error, not an empty folder.
func TestSweepOfNoFolderFails(t *testing.T) {
	t.Parallel()
	var s *server
	startInside(t, func(srv *server, _ *httptest.Server) { s = srv })
	if err := s.sweepOnce(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(s.cfg.filesDir, unfinished)); err != nil {
		t.Fatal(err)
	}
	if err := s.sweepOnce(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("sweep without the folder: got %v, want %v", err, os.ErrNotExist)
	}
}

// F3: an upload that can't be swept does not keep those after it from being swept.
func TestSweepGoesOnToTheNextUpload(t *testing.T) {
	t.Parallel()
	var s *server
	ts := startInside(t, func(srv *server, _ *httptest.Server) { s = srv })
	const first, last = "00000000-0000-4000-8000-000000000000", "ffffffff-ffff-4fff-bfff-ffffffffffff"
	dir := filepath.Join(s.cfg.filesDir, unfinished)
	if err := os.Mkdir(filepath.Join(dir, first), 0o700); err != nil { // can't be opened as a file
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, last), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	ts.ageUnfinished(t)
	if err := s.sweepOnce(); err == nil {
		t.Error("sweep of a folder among the uploads: got no error")
	}
	if _, err := os.Stat(filepath.Join(dir, last)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the upload after it: got %v, want it swept", err)
	}
}

// F3: a sweep that fails is not the last one.
func TestSweepGoesOnAfterAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		s := newServer(config{}, nil, &log)
		files, err := os.OpenRoot(t.TempDir()) // has no folder of unfinished uploads: each sweep fails
		if err != nil {
			t.Fatal(err)
		}
		defer files.Close()
		s.files = files
		ended := make(chan struct{})
		go func() {
			s.sweepUploads()
			close(ended)
		}()
		time.Sleep(3*sweepInterval + time.Second)
		s.stopping.Store(true)
		<-ended
		if got := strings.Count(log.String(), "the sweep of unfinished uploads failed"); got != 3 {
			t.Errorf("got %d failed sweeps in three intervals, want 3", got)
		}
	})
}

// F3: a sweep does not lock the file of a young upload, not even to find out that it is young: the
// upload may be about to lock it, and would fail.
func TestSweepLocksNoYoungUpload(t *testing.T) {
	t.Parallel()
	var s *server
	startInside(t, func(srv *server, _ *httptest.Server) { s = srv })
	young, err := os.Create(filepath.Join(s.cfg.filesDir, unfinished, testUUID()))
	if err != nil {
		t.Fatal(err)
	}
	defer young.Close()
	swept := make(chan error, 1)
	go func() {
		for range 2000 {
			if err := s.sweepOnce(); err != nil {
				swept <- err
				return
			}
		}
		swept <- nil
	}()
	for {
		if err := lockFile(young); err != nil {
			t.Fatal("a sweep has locked the file of a young upload: ", err)
		}
		if err := syscall.Flock(int(young.Fd()), syscall.LOCK_UN); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-swept:
			if err != nil {
				t.Error(err)
			}
			return
		default:
		}
	}
}

// The working name goes last: while the bytes can't be removed, the next sweep must still
// find them. (The id leads out of the folder, and unfinished/id does not: so the first
// removal fails, and the second would succeed.)
func TestWorkingNameGoesLast(t *testing.T) {
	t.Parallel()
	var s *server
	startInside(t, func(srv *server, _ *httptest.Server) { s = srv })
	working := filepath.Join(s.cfg.filesDir, unfinished, "x")
	if err := os.WriteFile(working, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.rollbackUpload("../x", "x", false); err == nil {
		t.Error("rollback of bytes that can't be removed: got no error")
	}
	if _, err := os.Stat(working); err != nil {
		t.Error("the working name went first: ", err)
	}
}

// A FILES_DIR that can't be used ends the start, and the message names the setting.
func TestFilesDirUnusable(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "token=secret-1")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{path, filepath.Join(path, "within")} {
		code, _, stderr := runCLI(serverEnv(t, map[string]string{"FILES_DIR": dir}), "serve")
		if code != 1 || !strings.Contains(stderr, "FILES_DIR") || strings.Contains(stderr, "secret-1") {
			t.Errorf("%s: got exit status %d, %q, want 1 and the name of the setting", dir, code, stderr)
		}
	}
}

// A file name in a form is refused, or the path that the server gives out leads back to
// exactly this name, and the Content-Disposition has one line.
func FuzzFileName(f *testing.F) {
	for _, seed := range []string{"a.txt", `"`, `\`, "a/b", "%", "%2f", "..", ";", "é", "\xff", "\x00", "a\r\nb", "{x}", "$", "?#", "\u2028",
		"a'b", "UTF-8''x", "=?utf-8?q?x?=", " ", "a ", strings.Repeat("n", 255), strings.Repeat("n", 256), "\u202e", "*", "[]", "|"} {
		f.Add(seed)
	}
	s := newServer(config{env: envLocal, maxUploadBytes: 1 << 20}, nil, io.Discard)
	var got string
	mux := http.NewServeMux()
	for _, route := range s.routes() {
		if strings.HasPrefix(route.path, "/files/{") {
			mux.HandleFunc(route.method+" "+route.path, func(_ http.ResponseWriter, r *http.Request) { got = r.PathValue("name") })
		}
	}
	f.Fuzz(func(t *testing.T, sent string) {
		var body bytes.Buffer
		w := multipart.NewWriter(&body)
		w.CreateFormFile("file", sent)
		w.Close()
		request := httptest.NewRequest("POST", "/files/upload", &body)
		request.Header.Set("Content-Type", w.FormDataContentType())
		form := &uploadForm{
			state:   &requestState{ResponseWriter: httptest.NewRecorder(), request: request},
			maxFile: 1 << 20, started: time.Now(),
		}
		if err := form.open(); err != nil {
			if p, ok := errors.AsType[*problem](err); !ok || p.Status != 400 {
				t.Fatalf("%q: %v", sent, err)
			}
			return
		}
		name := form.name
		if strings.ContainsAny(name, "/\\\r\n\x00") || name == "" || name == "." || name == ".." || len(name) > 255 {
			t.Fatalf("%q gives the file name %q", sent, name)
		}
		asSent := strings.NewReplacer("\r", "%0D", "\n", "%0A").Replace(sent) // by mime/multipart
		if !strings.HasSuffix(asSent, name) {
			t.Errorf("got the file name %q, want the end of %q", name, asSent)
		}
		got = ""
		mux.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/files/"+testUUID()+"/"+url.PathEscape(name), nil))
		if got != name {
			t.Errorf("by its path: got the name %q, want %q", got, name)
		}
		disposition := mime.FormatMediaType("attachment", map[string]string{"filename": name})
		if _, params, err := mime.ParseMediaType(disposition); err != nil || params["filename"] != name || strings.ContainsAny(disposition, "\r\n") {
			t.Errorf("%q: Content-Disposition %q, %v", name, disposition, err)
		}
	})
}

// deadlines is an http.ResponseWriter that notes the deadlines set last.
type deadlines struct {
	http.ResponseWriter
	read, write time.Time
	writes      int // how often the write deadline was set
}

func (d *deadlines) SetReadDeadline(t time.Time) error  { d.read = t; return nil }
func (d *deadlines) SetWriteDeadline(t time.Time) error { d.write = t; d.writes++; return nil }

// H1: an upload may take a minute, and a second more for each 16 KiB.
func TestUploadTimeout(t *testing.T) {
	t.Parallel()
	for size, want := range map[int64]time.Duration{0: time.Minute, 16383: time.Minute, 16384: 61 * time.Second, 25 << 20: 1660 * time.Second} {
		if got := uploadTimeout(size); got != want {
			t.Errorf("%d bytes: got %v, want %v", size, got, want)
		}
	}
}

// H1: each 16 KiB that have arrived give an upload a second more. The answer has its own time
// after that.
func TestUploadDeadlinesFollowItsPace(t *testing.T) {
	t.Parallel()
	d := &deadlines{}
	body := strings.NewReader(strings.Repeat("x", 10*uploadPace))
	f := &uploadForm{
		state: &requestState{ResponseWriter: d, request: httptest.NewRequest("POST", "/", body)},
		// Begun so long ago that its pace ends it before a stall would.
		started: time.Now().Add(-uploadStart), limit: 1 << 30,
	}
	io.Copy(io.Discard, f)
	if want := f.started.Add(uploadStart + 10*time.Second); !d.read.Equal(want) || !d.write.Equal(want.Add(answerTimeout)) {
		t.Errorf("deadlines: got read %v, write %v, want %v and %v", d.read, d.write, want, want.Add(answerTimeout))
	}
}

// H5: an upload that does not move ends after stallTimeout, however much time its pace leaves.
func TestStalledUploadHasADeadline(t *testing.T) {
	t.Parallel()
	d := &deadlines{}
	f := &uploadForm{
		state:   &requestState{ResponseWriter: d, request: httptest.NewRequest("POST", "/", strings.NewReader("x"))},
		started: time.Now(), limit: 1 << 30, received: 100 * uploadPace,
	}
	before := time.Now().Add(stallTimeout)
	f.Read(make([]byte, 1))
	if d.read.Before(before) || d.read.After(time.Now().Add(stallTimeout)) {
		t.Errorf("read deadline: got %v, want %v from now", d.read, stallTimeout)
	}
}

// H5: each piece of a download has stallTimeout, whatever the size of the file.
func TestDownloadDeadlineFollowsItsProgress(t *testing.T) {
	t.Parallel()
	content, err := os.Create(filepath.Join(t.TempDir(), "content"))
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()
	const size = 10 * transferPiece
	if err := content.Truncate(size); err != nil {
		t.Fatal(err)
	}
	d := &deadlines{ResponseWriter: httptest.NewRecorder()}
	before := time.Now().Add(stallTimeout)
	c := fileContent{file{FileID: testUUID(), Name: "a.txt", Size: size}, content, func() {}}
	c.send(&requestState{ResponseWriter: d, request: httptest.NewRequest("GET", "/", nil)})
	if d.write.Before(before) || d.write.After(time.Now().Add(stallTimeout)) {
		t.Errorf("write deadline: got %v, want %v from now", d.write, stallTimeout)
	}
	if d.writes < 10 {
		t.Errorf("write deadlines for 10 pieces: got %d, want at least 10", d.writes)
	}
}

// The account is checked again before the row of an upload is written. An upload of a user
// who has lost the right while it ran is refused, and nothing of it is left.
func TestUploadOutlivesItsSession(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	for name, test := range map[string]struct {
		change string // SQL
		status int
		code   string
	}{
		"suspended":     {"update users set suspended = true where email = $1", 403, "account_suspended"},
		"deleted":       {"delete from users where email = $1", 401, "unauthenticated"},
		"signed out":    {"update users set signed_out_at = clock_timestamp() where email = $1", 401, "unauthenticated"},
		"other address": {"update users set email = 'new-' || email where email = $1", 401, "unauthenticated"},
		"terms withdrawn": {"delete from terms_acceptances where user_id = (select user_id from users where email = $1)",
			403, "terms_not_accepted"},
	} {
		t.Run(name, func(t *testing.T) {
			c, email := s.member(t, "member")
			upload := c.startUpload("a.txt")
			execSQL(t, s.env["DATABASE_URL"], test.change, email)
			wantProblem(t, upload.finish(), test.status, test.code)
			s.wantStored(t, 0)
		})
	}
}

// A client that was told to send (100 Continue) and is refused then gets its answer: the
// server reads what it asked for.
func TestRefusedUploadThatWasAskedFor(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	body := form(otherPart, strings.Repeat("c", 8<<20))
	client, err := dialRaw(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer client.conn.Close()
	client.conn.SetDeadline(time.Now().Add(patience))
	client.send(c.uploadHead(formType, len(body), "Expect: 100-continue\r\n"))
	if status, _, err := client.receive(); status != 100 || err != nil {
		t.Fatalf("got %d, %v, want 100", status, err)
	}
	if err := client.send(body); err != nil {
		t.Error("not read to its end: ", err)
	}
	if status, _, err := client.receive(); status != 400 || err != nil {
		t.Errorf("got %d, %v, want 400", status, err)
	}
}

// H7: a Range header with 16 ranges is served, one with 17 is ignored: each range would cost a
// part of its own.
func TestManyRangesAreIgnored(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	content := strings.Repeat("0123456789", 1000)
	f := c.upload("a.txt", []byte(content)).stored(t)
	for ranges, want := range map[int]int{16: 206, 17: 200, 2000: 200} {
		t.Run(fmt.Sprint(ranges), func(t *testing.T) {
			value := "bytes=0-0" + strings.Repeat(",2-2", ranges-1)
			r := c.elsewhere().do("GET", f.Path, nil, "Range", value)
			if r.status != want {
				t.Errorf("got status %d, want %d", r.status, want)
			}
			if want == 200 && string(r.body) != content {
				t.Errorf("got %d bytes, want the whole file", len(r.body))
			}
		})
	}
}
