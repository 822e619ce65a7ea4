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
	"testing"
	"time"
)

// startInside is startServer for what can't be brought about from outside: change
// gets at the server before its first request.
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
		s.codesUnderWay.Wait()
		endWorkers()
		s.folder.Close()
		st.db.Close()
		close(ts.done)
		ts.checkLog(t)
	})
	return ts
}

// elsewhere is the same session from another address: the limits are other ones.
func (c *testClient) elsewhere() *testClient {
	moved, n := *c, serial.Add(1)
	moved.ip = fmt.Sprintf("2001:db8:%x:%x::1", n>>16, n&0xffff)
	return &moved
}

const formType = "multipart/form-data; boundary=edge"

// form is a form of parts as given: header lines and content in turn.
func form(parts ...string) string {
	var b strings.Builder
	for pair := range slices.Chunk(parts, 2) {
		b.WriteString("--edge\r\n" + pair[0] + "\r\n\r\n" + pair[1] + "\r\n")
	}
	return b.String() + "--edge--\r\n"
}

// filePart is the header of the part with the file; the name stands in it as given.
func filePart(name string) string {
	return `Content-Disposition: form-data; name="file"; filename="` + name + `"`
}

// sendForm sends a form from an address of its own; with chunked its length is not told.
func (c *testClient) sendForm(body string, chunked bool, headers ...string) *testResponse {
	c.t.Helper()
	var reader io.Reader = strings.NewReader(body)
	if chunked {
		reader = struct{ io.Reader }{reader}
	}
	return c.elsewhere().do("POST", "/files/upload", reader, append([]string{"Content-Type", formType}, headers...)...)
}

// stored checks an upload's answer to the last member.
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
		t.Errorf("not a whole file: %v", r)
	}
	return f
}

// filesIn lists what lies in a server's FILES_DIR, but for the lock, then what lies in
// the folder of unfinished uploads, as unfinished/name.
func (s *testServer) filesIn(t testing.TB) (names []string) {
	t.Helper()
	for _, folder := range []string{"", unfinished + "/"} {
		entries, err := os.ReadDir(filepath.Join(s.env["FILES_DIR"], folder))
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			if entry.Name() != ".lock" && entry.Name() != unfinished {
				names = append(names, folder+entry.Name())
			}
		}
	}
	return names
}

// wantStored: there are n files, and the folder has them and nothing else. So no
// temporary file is left, no bytes without a row, no row without bytes.
func (s *testServer) wantStored(t testing.TB, n int) {
	t.Helper()
	ids := queryValue[string](t, s.env["DATABASE_URL"],
		`select coalesce(string_agg(file_id::text, ' ' order by file_id::text collate "C"), '') from files`)
	if names := s.filesIn(t); len(names) != n || strings.Join(names, " ") != ids {
		t.Errorf("want %d files, have %q on disk, rows of %q", n, names, ids)
	}
}

// uploading is an upload that has got as far as the disk and waits there for the rest.
type uploading struct {
	rest   *io.PipeWriter
	answer chan *testResponse // one; status 0: the connection broke
}

// startUpload sends half of a form. It returns when the server has begun to write.
func (c *testClient) startUpload(name string) *uploading {
	c.t.Helper()
	before := c.srv.tempFiles(c.t)
	u := c.beginUpload(name)
	waitUntil(c.t, "a temporary file", func() bool { return c.srv.tempFiles(c.t) > before })
	return u
}

func (c *testClient) beginUpload(name string) *uploading {
	reader, writer := io.Pipe()
	u := &uploading{writer, make(chan *testResponse, 1)}
	go func() {
		r, err := c.elsewhere().try("POST", "/files/upload", reader, "Content-Type", formType)
		reader.CloseWithError(errors.Join(err, io.ErrClosedPipe)) // frees a writer whom nobody reads any more
		u.answer <- r
	}()
	half, _, _ := strings.Cut(form(filePart(name), uploadingContent), "|")
	io.WriteString(writer, half)
	return u
}

// uploadingContent is the file of an uploading; it stops at the bar.
var uploadingContent = strings.Repeat("first half ", 8000) + "|" + strings.Repeat("second half", 8000)

// finish sends the rest and returns the answer.
func (u *uploading) finish() *testResponse {
	_, rest, _ := strings.Cut(form(filePart(""), uploadingContent), "|")
	io.WriteString(u.rest, "|"+rest)
	u.rest.Close()
	return <-u.answer
}

// tempFiles counts the uploads that are being written.
func (s *testServer) tempFiles(t testing.TB) (n int) {
	t.Helper()
	for _, name := range s.filesIn(t) {
		if info, err := os.Stat(filepath.Join(s.env["FILES_DIR"], name)); err == nil && info.Size() > 0 && strings.HasPrefix(name, unfinished) {
			n++
		}
	}
	return n
}

// wantFile fetches a file and holds everything that the answer says against it.
func (c *testClient) wantFile(t testing.TB, f file, content string) {
	t.Helper()
	for _, method := range []string{"GET", "HEAD"} {
		r := c.elsewhere().do(method, f.Path, nil).want(t, 200)
		if method == "GET" && string(r.body) != content || method == "HEAD" && len(r.body) != 0 {
			t.Errorf("%s: %d bytes came back of %d", f.Path, len(r.body), len(content))
		}
		_, params, err := mime.ParseMediaType(r.header.Get("Content-Disposition"))
		for name, got := range map[string]string{
			"Content-Length": fmt.Sprint(len(content)), "Content-Type": f.ContentType, "ETag": `"` + f.FileID + `"`,
			"Content-Security-Policy": strictCSP + "; sandbox", "Cache-Control": "private, no-cache", "Accept-Ranges": "bytes",
		} {
			if r.header.Get(name) != got {
				t.Errorf("%s %s: %s: %q, want %q", method, f.Path, name, r.header.Get(name), got)
			}
		}
		if err != nil || params["filename"] != f.Name {
			t.Errorf("%s: Content-Disposition %q: %v", f.Path, r.header.Get("Content-Disposition"), err)
		}
	}
}

func TestUploadedFileComesBack(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	big := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	n := 0
	for _, test := range []struct{ sent, name, content string }{
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
	} {
		f := c.sendForm(form(filePart(test.sent), test.content), n%2 == 0).stored(t)
		n++
		if f.Name != test.name || f.Size != int64(len(test.content)) {
			t.Errorf("%q: stored as %q, %d bytes", test.sent, f.Name, f.Size)
		}
		c.wantFile(t, f, test.content)
	}
	s.wantStored(t, n)

	// Content-Disposition as RFC 5987 has it, which some clients send.
	f := c.sendForm(form(`Content-Disposition: form-data; name="file"; filename*=UTF-8''na%C3%AFve.txt`, "x"), false).stored(t)
	if f.Name != "naïve.txt" {
		t.Errorf("stored as %q", f.Name)
	}
}

// Any signed-in user who knows the path may read, and nobody else.
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
		wantProblem(t, other.do("GET", path, nil), 404, "not_found")
	}
}

// F2: what a browser could run is never shown in place, whatever the client called it.
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
		header := filePart("photo.png") + "\r\nContent-Type: image/png"
		if test.disposition == "inline" {
			header = filePart("page.html") + "\r\nContent-Type: text/html"
		}
		f := c.sendForm(form(header, test.content), false).stored(t)
		if f.ContentType != test.kind {
			t.Errorf("%s: %q, want %q", name, f.ContentType, test.kind)
		}
		c.wantFile(t, f, test.content) // nosniff and the sandbox among others
		r := c.elsewhere().do("GET", f.Path, nil)
		if kind, _, _ := mime.ParseMediaType(r.header.Get("Content-Disposition")); kind != test.disposition {
			t.Errorf("%s: %q, want %q", name, kind, test.disposition)
		}
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
			r := c.do(method, f.Path, nil, test.headers...)
			switch test.status {
			case 412:
				wantProblem(t, r, 412, "precondition_failed")
			case 416:
				wantProblem(t, r, 416, "range_not_satisfiable")
			default:
				if r.status != test.status || method == "GET" && string(r.body) != test.body {
					t.Errorf("%s %q: %v", method, test.headers, r)
				}
			}
			if got := r.header.Get("Content-Range"); got != test.contentRange {
				t.Errorf("%s %q: Content-Range %q, want %q", method, test.headers, got, test.contentRange)
			}
			if wantTag := map[bool]string{true: etag}[test.status < 400]; r.header.Get("ETag") != wantTag {
				t.Errorf("%s %q: ETag %q", method, test.headers, r.header.Get("ETag"))
			}
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
		if got, _ := io.ReadAll(part); string(got) != want || part.Header.Get("Content-Type") != f.ContentType {
			t.Errorf("part %q as %v, want %q", got, part.Header, want)
		}
	}
}

// F3: the limit holds to the byte, whether or not the length is told beforehand.
func TestUploadLimits(t *testing.T) {
	t.Parallel()
	const limit = 100_000
	s := startServer(t, map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(limit)})
	c, _ := s.member(t, "member")
	frame := len(form(filePart("a.bin")+"\r\nX-Padding: ", ""))
	n := 0
	for _, test := range []struct{ content, around, status int }{
		{limit, frame, 201}, {limit + 1, frame, 413}, {2 * limit, frame, 413}, {20 * limit, frame, 413},
		{limit, maxFormBytes, 201}, {limit, maxFormBytes + 1, 413}, {10, maxFormBytes, 201}, {10, maxFormBytes + 1, 413},
		{0, maxFormBytes, 201}, {0, maxFormBytes + 1, 413}, {0, 2 * limit, 413},
	} {
		for _, chunked := range []bool{false, true} {
			padding := strings.Repeat("p", test.around-frame)
			r := c.sendForm(form(filePart("a.bin")+"\r\nX-Padding: "+padding, strings.Repeat("c", test.content)), chunked)
			if test.status == 413 {
				wantProblem(t, r, 413, "too_large")
			} else if f := r.stored(t); f.Size != int64(test.content) {
				t.Errorf("%d bytes of %d", f.Size, test.content)
			} else {
				n++
			}
			s.wantStored(t, n)
		}
	}
	for _, more := range []int{0, 1} { // after the form
		body := form(filePart("a.bin"), "content")
		r := c.sendForm(body+strings.Repeat("e", maxFormBytes+len("content")-len(body)+more), true)
		if more == 0 {
			r.stored(t)
			n++
		} else {
			wantProblem(t, r, 413, "too_large")
		}
		s.wantStored(t, n)
	}
	// What never comes to an end is not read to its end.
	endless := struct{ io.Reader }{repeat("no boundary\r\n")}
	wantProblem(t, c.elsewhere().do("POST", "/files/upload", endless, "Content-Type", formType), 413, "too_large")
	s.wantStored(t, n)
	// Told too large: refused before a byte of it is sent. (To a client that does not
	// wait for the word to go on, net/http answers only once it has the body.)
	raw := fmt.Sprintf("POST /files/upload HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nContent-Type: %s\r\n"+
		"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n",
		s.cookieName(), c.token(), formType, limit+maxFormBytes+1)
	wantProblem(t, s.raw(t, raw), 413, "too_large")
	s.wantStored(t, n)
}

// repeat is a reader of that text again and again, without an end.
type repeat string

func (r repeat) Read(p []byte) (n int, err error) {
	for n = copy(p, r); n < len(p)-len(r); n += copy(p[n:], r) {
	}
	return n, nil
}

// A client that sends its upload to the end before it reads has its answer, whatever was
// wrong with it, and the connection goes on: the rest of a refused upload is read.
func TestRefusedUploadIsAnswered(t *testing.T) {
	t.Parallel()
	const limit = 4 << 20 // far more than the 256 KiB of a body that net/http itself reads off
	s := startServer(t, map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(limit)})
	c, _ := s.member(t, "member")
	content := strings.Repeat("c", limit)
	for name, test := range map[string]struct {
		body, contentType string
		status            int
	}{
		"wrong type":      {form(filePart("a.txt"), content), "text/plain", 415},
		"no boundary":     {form(filePart("a.txt"), content), "multipart/form-data", 400},
		"wrong field":     {form(`Content-Disposition: form-data; name="other"; filename="a.txt"`, content), formType, 400},
		"two files":       {form(filePart("a.txt"), "x", filePart("b.txt"), content), formType, 400},
		"told too large":  {form(filePart("a.txt"), content+strings.Repeat("c", maxFormBytes)), formType, 413},
		"found too large": {form(filePart("a.txt"), content+"c"), formType, 413},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, err := dialRaw(s.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer client.conn.Close()
			client.conn.SetDeadline(time.Now().Add(patience))
			if err := client.send(fmt.Sprintf("POST /files/upload HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n",
				s.cookieName(), c.token(), test.contentType, len(test.body)) + test.body); err != nil {
				t.Error("not read to its end: ", err)
			}
			if status, closes, err := client.receive(); status != test.status || closes || err != nil {
				t.Fatalf("%d, closes %v, %v, want %d", status, closes, err, test.status)
			}
			client.send("GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
			if status, _, err := client.receive(); status != 200 || err != nil {
				t.Errorf("the next request on the connection: %d, %v", status, err)
			}
		})
	}
	s.wantStored(t, 0)
}

// H1: no more of a refused upload is read than an upload may have, however long it goes on.
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
	// Besides it, what net/http reads off by itself, the frame of chunks, and buffers.
	if n := taken.Load() - before; n < limit || n > limit+1<<20 {
		t.Errorf("%d bytes of an endless upload were read, limit %d", n, limit)
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

// H1: a refused upload that stops halfway is not waited for as long as a good one.
func TestRefusedUploadIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	client, err := dialRaw(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer client.conn.Close()
	half, _, _ := strings.Cut(form(`Content-Disposition: form-data; name="other"; filename="a.txt"`, uploadingContent), "|")
	if err := client.send(fmt.Sprintf("POST /files/upload HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nContent-Type: %s\r\nContent-Length: 200000\r\n\r\n%s",
		s.cookieName(), c.token(), formType, half)); err != nil {
		t.Fatal(err)
	}
	client.conn.SetDeadline(time.Now().Add(4 * refusedTimeout)) // an upload that is not refused has a minute at least
	if status, _, err := client.receive(); status != 400 || err != nil {
		t.Errorf("%d, %v", status, err)
	}
}

// A client that has asked whether to send (Expect) is told no before it does, and nothing
// is waited for.
func TestRefusedUploadIsNotAskedFor(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	wantProblem(t, s.raw(t, fmt.Sprintf("POST /files/upload HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nContent-Type: text/plain\r\n"+
		"Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n", s.cookieName(), c.token())), 415, "unsupported_media_type")
}

// openIn is what a process has open in a folder.
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

// H1: every upload and every download, however it ends, closes its file at once. In a
// process of its own without garbage collection, which would hide what it was to clean up.
func TestFilesAreClosed(t *testing.T) {
	t.Parallel()
	const limit = 100_000
	p := startProcess(t, map[string]string{"GOGC": "off", "MAX_UPLOAD_BYTES": fmt.Sprint(limit)})
	c, _ := p.member(t, "member")
	f := c.upload("a.txt", []byte("content")).stored(t)
	dir := p.env["FILES_DIR"]
	idle := p.openIn(t, dir)
	if len(idle) == 0 || len(idle) > 5 {
		t.Fatalf("at rest %q is open: the test shows nothing, or leaks already", idle)
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
		if r := c.sendForm(body, true); r.status < 400 {
			t.Errorf("%s: %v", name, r)
		}
		closed("an upload: " + name)
	}
	upload := c.startUpload("c.txt")
	if n := len(p.openIn(t, dir)); n != len(idle)+1 {
		t.Errorf("%d files open during an upload, %d at rest", n, len(idle))
	}
	upload.rest.CloseWithError(io.ErrUnexpectedEOF)
	<-upload.answer
	closed("an upload that broke off")
	for name, headers := range map[string][]string{
		"whole": nil, "part": {"Range", "bytes=1-2"}, "no such part": {"Range", "bytes=10-"},
		"not modified": {"If-None-Match", `"` + f.FileID + `"`}, "other version": {"If-Match", `"x"`},
	} {
		for _, method := range []string{"GET", "HEAD"} {
			if r := c.elsewhere().do(method, f.Path, nil, headers...); r.status == 500 {
				t.Error(r)
			}
			closed(method + ", " + name)
		}
	}
	p.wantStored(t, 2)
}

// F3: an upload that is not one whole form with one file is refused by name, and
// leaves nothing.
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
		"bad UTF-8":            {part("name=\"file\"; filename=\"\xff\""), formType, 400, "file"},
		"bad UTF-8, encoded":   {part("name=\"file\"; filename*=UTF-8''%ff"), formType, 400, "file"},
		"NUL":                  {part("name=\"file\"; filename*=UTF-8''a%00b"), formType, 400, "file"},
		"line break":           {part("name=\"file\"; filename*=UTF-8''a%0D%0Ab"), formType, 400, "file"},
		"C1 control":           {part("name=\"file\"; filename*=UTF-8''a%C2%85b"), formType, 400, "file"},
		"encoded slash only":   {part("name=\"file\"; filename*=UTF-8''a%2F"), formType, 400, "file"},
	} {
		for _, chunked := range []bool{false, true} {
			r := c.sendForm(test.body, chunked, "Content-Type", test.contentType)
			if test.status == 415 {
				wantProblem(t, r, 415, "unsupported_media_type")
			} else {
				wantProblem(t, r, 400, "invalid_request", test.field)
			}
			if t.Failed() {
				t.Fatalf("%s, chunked %v", name, chunked)
			}
		}
	}
	wantProblem(t, c.sendForm(good, false, "Content-Encoding", "gzip"), 415, "unsupported_media_type")
	s.wantStored(t, 0)
	c.sendForm(good, false).stored(t) // so it was no fault of theirs
	s.wantStored(t, 1)
}

// F1: no path leads out of the table files, and no entry of the folder out of it.
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
		"/files/.lock/.lock", "/files/./a.txt", "/files/%2e/a.txt", "/files/../a.txt", "/files/%2e%2e/a.txt",
		"/files/..%2f..%2fetc%2fpasswd/x", "/files/..%5c..%5cx/x", "/files/%00/x", "/files/%ff/x", "/files/" + f.FileID + "%00/a.txt",
		"/files/" + f.FileID + "/..", "/files/" + f.FileID + "/%2e%2e", "/files/" + f.FileID + "/..%2f" + f.FileID,
		"/files/" + f.FileID + "/%00", "/files/" + f.FileID + "/a.txt%00", "/files/" + f.FileID + "/%ff", "/files/" + f.FileID + "/%c3",
		"/files/" + f.FileID + "/a.txt%2f", "/files/" + f.FileID + "/%2fa.txt", "/files/" + f.FileID + "/" + strings.Repeat("n", 4000),
		"/files/unfinished%2f" + f.FileID + "/a.txt", "/files/unfinished/" + f.FileID, "/files/plain/plain", "/files/" + bare + "/" + bare,
		"/files/" + link + "/secret", "/files/" + folder + "/" + folder, "/files/%2fetc%2fpasswd/passwd",
		"//files/" + f.FileID + "/a.txt", "/files/" + f.FileID + "//a.txt", "/files/x/../" + f.FileID + "/a.txt",
	} {
		raw := fmt.Sprintf("GET %s HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\n\r\n", path, s.cookieName(), c.token())
		wantProblem(t, s.raw(t, raw), 404, "not_found")
	}
	// Even with a row: such entries are none of the server's making.
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

// A file whose bytes are not those of its row is not served in part.
func TestFileThatLostItsBytes(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	for _, damage := range []func(string) error{
		os.Remove,
		func(path string) error { return os.Truncate(path, 3) },
		func(path string) error { return os.Truncate(path, 30) },
	} {
		f := c.upload("a.txt", []byte("content")).stored(t)
		if err := damage(filepath.Join(s.env["FILES_DIR"], f.FileID)); err != nil {
			t.Fatal(err)
		}
		s.allowErrors("breaks its contract", "no such file or directory")
		for _, method := range []string{"GET", "HEAD"} {
			r := c.do(method, f.Path, nil)
			wantProblem(t, r, 500, "internal")
			if r.header.Get("ETag")+r.header.Get("Content-Disposition") != "" || strings.Contains(string(r.body), "con") {
				t.Errorf("something of the file in %v", r)
			}
		}
	}
}

// A download goes from the file to the socket in the kernel: the connection itself
// is asked to read from the file, through every wrapper on the way.
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
	// net/http may write the first 512 bytes along with the headers; and the server
	// counts a little later than the client has it all.
	want := int64(2*len(content) - 6)
	waitUntil(t, "nearly all bytes by sendfile", func() bool { return fromFile.Load() >= want-1024 })
	if n := fromFile.Load(); n > want {
		t.Errorf("%d bytes of %d went by sendfile", n, want)
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

// sendfileConn counts what it is given straight from a file.
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

// F4, the row for real: PostgreSQL goes away before the statement reaches it, or
// after it has done it and before it could say so.
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

	// Broken off while the database is away: nothing needs it, and nothing is left.
	upload := c.startUpload("broken.txt")
	proxy.cut()
	upload.rest.CloseWithError(io.ErrUnexpectedEOF)
	<-upload.answer
	waitUntil(t, "nothing of the broken upload", func() bool { return len(s.filesIn(t)) == 1 })
	proxy.resume()
	waitUntil(t, "service again", func() bool { return c.elsewhere().do("GET", "/hubs", nil).status == 200 })

	// Not done, and the deletion can't be either: the bytes wait for the next sweep.
	proxy.when("not-done.txt", proxy.cut)
	wantProblem(t, c.upload("not-done.txt", []byte("content")), 503, "unavailable")
	if rows("not-done.txt") != 0 {
		t.Error("a row in spite of the cut")
	}
	s.log.waitFor(t, `"level":"WARN"`, "failed upload left for the next sweep", `"fileId":"`)
	proxy.resume()
	waitUntil(t, "service again", func() bool { return c.elsewhere().do("GET", "/hubs", nil).status == 200 })

	// Done, the answer lost, and the database soon there again: taken back.
	proxy.when("done.txt", proxy.dropReplies)
	answer := make(chan *testResponse, 1)
	go func() { answer <- c.upload("done.txt", []byte("content")) }()
	waitUntil(t, "the row", func() bool { return rows("done.txt") == 1 })
	proxy.resume()
	wantProblem(t, <-answer, 503, "unavailable")
	if rows("done.txt") != 0 {
		t.Error("the row of a refused upload is still there")
	}
	waitUntil(t, "service again", func() bool { return c.elsewhere().do("GET", "/hubs", nil).status == 200 })

	// Done, and no answer any more, neither to it nor to the deletion: the bytes stay,
	// a row without them would be half a file.
	proxy.when("silent.txt", proxy.dropReplies)
	start := time.Now()
	wantProblem(t, c.upload("silent.txt", []byte("content")), 503, "unavailable")
	if wait := time.Since(start); wait > dbWait {
		t.Errorf("a 503 after %v", wait)
	} else {
		t.Logf("an upload whose row hangs: 503 after %v", wait.Round(time.Millisecond))
	}
	if rows("silent.txt") != 1 {
		t.Error("the row was not done: the test shows nothing")
	}
	proxy.cut()
	proxy.resume()
	waitUntil(t, "service again", func() bool { return c.elsewhere().do("GET", "/hubs", nil).status == 200 })

	f := c.upload("last.txt", []byte("content")).stored(t)
	s.stop(t)
	s = startServer(t, s.env)
	s.wantStored(t, 3)
	again := s.client(t)
	again.setToken(c.token())
	again.wantFile(t, f, "content")
}

// What a killed server left goes at the next start, and nothing else does.
func TestSweepAtStart(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	f := c.upload("a.txt", []byte("content")).stored(t)
	if code := s.stop(t); code != 0 {
		t.Fatal(code)
	}
	dir := s.env["FILES_DIR"]
	write := func(name string) string {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	for range 500 {
		write(unfinished + "/" + testUUID()) // ended before it was whole
		id := testUUID()                     // ended before its row
		write(id)
		write(unfinished + "/" + id)
	}
	write(unfinished + "/" + f.FileID)
	// A whole file without a row is of another database, or of one that was restored.
	kept := []string{f.FileID, write(testUUID()), write("notes.txt"), write("notes.tmp"), write(unfinished + "/notes"), write(strings.ToUpper(testUUID())),
		write(testUUID() + ".bak"), write("x" + testUUID()), write(testUUID() + "\n"), "folder"}
	if err := os.Mkdir(filepath.Join(dir, "folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	// Nobody else of this machine may read them.
	for name, want := range map[string]os.FileMode{f.FileID: 0o600, unfinished: 0o700 | os.ModeDir} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	s = startServer(t, s.env)
	s.log.waitFor(t, `"msg":"sweeping"`, `"fileId":"`+f.FileID)
	slices.Sort(kept)
	got := s.filesIn(t)
	if slices.Sort(got); !slices.Equal(got, kept) {
		t.Errorf("%d left: %.20q, want %q", len(got), got, kept)
	}
	again := s.client(t)
	again.setToken(c.token())
	again.wantFile(t, f, "content")
}

// A second server on the same folder sweeps nothing of the first one's.
func TestSweepSparesRunningUploads(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	orphan := filepath.Join(s.env["FILES_DIR"], unfinished, testUUID())
	if err := os.WriteFile(orphan, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	upload := c.startUpload("a.txt")
	second := startServer(t, s.env)
	if n := s.tempFiles(t); n != 2 {
		t.Errorf("%d temporary files after the second start", n)
	}
	f := upload.finish().stored(t)
	other := second.client(t)
	other.setToken(c.token())
	other.wantFile(t, f, uploadingContent)

	// The first is gone, the second has the folder still.
	s.stop(t)
	upload = other.startUpload("b.txt")
	third := startServer(t, s.env)
	if n := third.tempFiles(t); n != 2 {
		t.Errorf("%d temporary files after the third start", n)
	}
	upload.finish().stored(t)
	second.stop(t)
	third.stop(t)
	startServer(t, s.env).wantStored(t, 2)
}

// A sweep that can't ask what is needed ends the start, and takes nothing: not when the
// database goes away as it asks, and not when only the first of its questions fails.
func TestSweepFails(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(p *tcpProxy, first string){
		"database away":   func(p *tcpProxy, first string) { p.when("select file_id from files where file_id", p.cut) },
		"only a question": func(p *tcpProxy, first string) { p.when(first, func() { p.cut(); p.resume() }) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, through := proxyURL(t, newDatabase(t))
			env := serverEnv(t, map[string]string{"DATABASE_URL": through})
			folder := filepath.Join(env["FILES_DIR"], unfinished)
			if err := os.Mkdir(folder, 0o700); err != nil {
				t.Fatal(err)
			}
			ids := []string{testUUID(), testUUID(), testUUID()}
			slices.Sort(ids) // the order in which they are swept
			for _, id := range ids {
				if err := errors.Join(os.WriteFile(filepath.Join(env["FILES_DIR"], id), []byte("x"), 0o600),
					os.WriteFile(filepath.Join(folder, id), []byte("x"), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			fail(proxy, ids[0])
			// In a process of its own: its end frees the lock on the folder.
			path, err := testBinary()
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, path)
			for name, value := range env {
				cmd.Env = append(cmd.Env, name+"="+value)
			}
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "\nFILES_DIR: ") || strings.Contains(string(out), `"listening"`) {
				t.Errorf("%v, %s", err, out)
			}
			if _, err := os.Stat(filepath.Join(folder, ids[0])); err != nil {
				t.Error("swept unasked: ", err)
			}
			if _, err := os.Stat(filepath.Join(env["FILES_DIR"], ids[0])); err != nil {
				t.Error("swept unasked: ", err)
			}
			proxy.resume()
			if left := startServer(t, env).filesIn(t); len(left) != 0 {
				t.Errorf("left by the next start: %q", left)
			}
		})
	}
}

// A folder of unfinished uploads that can't be read is no empty one.
func TestSweepOfNoFolderFails(t *testing.T) {
	t.Parallel()
	var s *server
	startInside(t, func(srv *server, _ *httptest.Server) { s = srv })
	folder := filepath.Join(s.cfg.filesDir, unfinished)
	if err := s.sweepOnce(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(folder); err != nil {
		t.Fatal(err)
	}
	if err := s.sweepOnce(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a sweep of no folder: %v", err)
	}
}

// The working name goes last: while the bytes can't be taken back, the next sweep must
// still find them. (The id leads out of the folder, and unfinished/id does not: so the
// first removal fails, and the second would not.)
func TestWorkingNameGoesLast(t *testing.T) {
	t.Parallel()
	var s *server
	startInside(t, func(srv *server, _ *httptest.Server) { s = srv })
	working := filepath.Join(s.cfg.filesDir, "x")
	if err := os.WriteFile(working, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.rollbackUpload("../x", "x", false); err == nil {
		t.Error("taken back, it says")
	}
	if _, err := os.Stat(working); err != nil {
		t.Error("the working name went first: ", err)
	}
}

// FILES_DIR that can't be used ends the start, with a word of which setting it is.
func TestFilesDirUnusable(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "token=secret-1")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{path, filepath.Join(path, "within")} {
		code, _, stderr := runCLI(serverEnv(t, map[string]string{"FILES_DIR": dir}), "serve")
		if code != 1 || !strings.Contains(stderr, "FILES_DIR") || strings.Contains(stderr, "secret-1") {
			t.Errorf("%s: exit %d, %q", dir, code, stderr)
		}
	}
}

// Whatever file name a form holds: it is refused, or it comes back as it is by the
// path that the server gives out, in a header that has one line.
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
		if !strings.HasSuffix(strings.NewReplacer("\r", "%0D", "\n", "%0A").Replace(sent), name) { // so mime/multipart sends line breaks
			t.Errorf("%q was given the file name %q", sent, name)
		}
		got = ""
		if mux.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/files/"+testUUID()+"/"+url.PathEscape(name), nil)); got != name {
			t.Errorf("%q comes back as %q", name, got)
		}
		disposition := mime.FormatMediaType("attachment", map[string]string{"filename": name})
		if _, params, err := mime.ParseMediaType(disposition); err != nil || params["filename"] != name || strings.ContainsAny(disposition, "\r\n") {
			t.Errorf("%q: Content-Disposition %q, %v", name, disposition, err)
		}
	})
}

// deadlines notes the last ones that were set.
type deadlines struct {
	http.ResponseWriter
	read, write time.Time
	writes      int // how often the write deadline was set
}

func (d *deadlines) SetReadDeadline(t time.Time) error  { d.read = t; return nil }
func (d *deadlines) SetWriteDeadline(t time.Time) error { d.write = t; d.writes++; return nil }

// H1: a minute, and a second more for each 16 KiB.
func TestTransferTime(t *testing.T) {
	t.Parallel()
	for size, want := range map[int64]time.Duration{0: time.Minute, 16383: time.Minute, 16384: 61 * time.Second, 25 << 20: 1660 * time.Second} {
		if got := uploadTimeout(size); got != want {
			t.Errorf("%d bytes: %v, want %v", size, got, want)
		}
	}
}

// H1: an upload has a second more for each 16 KiB that have come, and the answer after it
// has its own time.
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
		t.Errorf("read %v, write %v, want %v", d.read, d.write, want)
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
		t.Errorf("the deadline moved %d times for 10 pieces", d.writes)
	}
}

// The user who is deleted while his upload runs is told that his session is over, and
// nothing of it is left.
func TestUploadOfDeletedUser(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, email := s.member(t, "member")
	upload := c.startUpload("a.txt")
	execSQL(t, s.env["DATABASE_URL"], "delete from users where email = $1", email)
	wantProblem(t, upload.finish(), 401, "unauthenticated")
	s.wantStored(t, 0)
}

// A client that was told to send (100 Continue) and is refused then has its answer like
// any other: what it was told to send is read.
func TestRefusedUploadThatWasAskedFor(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	body := form(`Content-Disposition: form-data; name="other"; filename="a.txt"`, strings.Repeat("c", 8<<20))
	client, err := dialRaw(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer client.conn.Close()
	client.conn.SetDeadline(time.Now().Add(patience))
	client.send(fmt.Sprintf("POST /files/upload HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nContent-Type: %s\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n",
		s.cookieName(), c.token(), formType, len(body)))
	if status, _, err := client.receive(); status != 100 || err != nil {
		t.Fatalf("%d, %v", status, err)
	}
	if err := client.send(body); err != nil {
		t.Error("not read to its end: ", err)
	}
	if status, _, err := client.receive(); status != 400 || err != nil {
		t.Errorf("%d, %v", status, err)
	}
}
