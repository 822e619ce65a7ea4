package api

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

const (
	formType = "multipart/form-data; boundary=edge"
	goodPart = `form-data; name="file"; filename="a.txt"`
)

// form returns a form of one part.
func form(disposition, content string) string {
	return "--edge\r\nContent-Disposition: " + disposition + "\r\n\r\n" + content + "\r\n--edge--\r\n"
}

// sendForm uploads from an address of its own. Without a length, the body comes in chunks.
func sendForm(c *hubstest.Client, body string, chunked bool, headers ...string) *hubstest.Response {
	var reader io.Reader = strings.NewReader(body)
	if chunked {
		reader = struct{ io.Reader }{reader} // hides the length
	}
	headers = append([]string{"Content-Type", formType}, headers...)
	return c.Elsewhere().Do("POST", "/files/upload", reader, headers...)
}

// An uploadCase is a form, and what becomes of it. uploads.json says what the members mean.
type uploadCase struct {
	hubstest.CorpusCase
	Filename, Part, PartType, Content string
	Form, Type                        *string
	Encoding                          string
	Disposition                       string
}

var hexByte = regexp.MustCompile(`\\x[0-9a-f]{2}`)

// unescape replaces \xff by the byte, and <x*3> by xxx.
func unescape(text string) string {
	text = hexByte.ReplaceAllStringFunc(text, func(escape string) string {
		value, _ := strconv.ParseUint(escape[2:], 16, 8)
		return string([]byte{byte(value)})
	})
	return hubstest.FillIn(text)
}

func (test uploadCase) body() string {
	if test.Form != nil {
		text := strings.ReplaceAll(*test.Form, "\n", "\r\n")
		return hubstest.FillIn(text, "<file>", "Content-Disposition: "+goodPart)
	}
	filename := `form-data; name="file"; filename="` + unescape(test.Filename) + `"`
	part := cmp.Or(test.Part, filename)
	if test.PartType != "" {
		part += "\r\nContent-Type: " + test.PartType
	}
	return form(part, unescape(test.Content))
}

func TestUploads(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	stored := 0
	for i, test := range hubstest.ReadCorpus[uploadCase](t, "uploads.json").Cases {
		var headers []string
		if test.Type != nil {
			headers = append(headers, "Content-Type", *test.Type)
		}
		if test.Encoding != "" {
			headers = append(headers, "Content-Encoding", test.Encoding)
		}
		if name, ok := test.Expect.Body["name"].(string); ok {
			test.Expect.Body["name"] = unescape(name)
		}
		t.Run(test.Name, func(t *testing.T) {
			r := sendForm(c, test.body(), i%2 == 0, headers...)
			test.Expect.Check(t, r)
			if test.Expect.Status == 201 {
				stored++
				wantStoredFile(t, c, r, unescape(test.Content), test.Disposition)
			}
		})
	}
	s.WantStored(t, stored) // what was refused has left nothing
}

// wantStoredFile fetches an uploaded file, and checks the content and every header about it.
func wantStoredFile(t *testing.T, c *hubstest.Client, uploaded *hubstest.Response, content, disposition string) {
	t.Helper()
	f := uploaded.JSON(t)
	path := f["path"].(string)
	if got := uploaded.Header.Get("Location"); got != path {
		t.Errorf("Location: got %q, want %q", got, path)
	}
	if got := f["size"]; got != float64(len(content)) {
		t.Errorf("size: got %v, want %d", got, len(content))
	}
	for _, method := range []string{"GET", "HEAD"} {
		r := c.Elsewhere().Do(method, path, nil).Want(t, 200)
		if got := string(r.Body); got != content && method == "GET" {
			t.Errorf("got %d bytes, want the %d of the file", len(got), len(content))
		}
		for name, want := range map[string]string{
			"Content-Length":          strconv.Itoa(len(content)),
			"Content-Type":            f["contentType"].(string),
			"ETag":                    `"` + f["fileId"].(string) + `"`,
			"Accept-Ranges":           "bytes",
			"Cache-Control":           "private, no-cache",
			"Content-Security-Policy": hubstest.StrictCSP + "; style-src 'unsafe-inline'; sandbox allow-downloads",
		} {
			if got := r.Header.Get(name); got != want {
				t.Errorf("%s: got %q, want %q", name, got, want)
			}
		}
		kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Disposition"))
		if err != nil || params["filename"] != f["name"] {
			t.Errorf("file name: got %q, %v, want %q", params["filename"], err, f["name"])
		}
		if disposition != "" && kind != disposition {
			t.Errorf("disposition: got %q, want %q", kind, disposition)
		}
	}
}

// A downloadCase is a request for a file. downloads.json says what the members mean.
type downloadCase struct {
	hubstest.CorpusCase
	Path    string
	Headers []string
	Content *string
}

// Any signed-in user who knows the path of a file may read it. No other path leads to
// anything, and no entry of the folder leads out of it.
func TestDownloads(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	owner, _ := s.Member(t, "member")
	f := owner.Upload("a.txt", []byte("0123456789abcdef")).Want(t, 201).JSON(t)
	id := f["fileId"].(string)
	created, err := time.Parse(time.RFC3339, f["createdAt"].(string))
	if err != nil {
		t.Fatal(err)
	}
	bare, folder, link := plantEntries(t, s)
	words := []string{
		"<id>", id, "<ID>", strings.ToUpper(id), "<etag>", `"` + id + `"`,
		"<before>", created.Add(-time.Hour).Format(http.TimeFormat),
		"<after>", created.Add(time.Hour).Format(http.TimeFormat),
		"<bare>", bare, "<folder>", folder, "<link>", link,
	}
	reader, _ := s.Member(t, "member")
	cookie := s.CookieName() + "=" + reader.Token()
	for _, test := range hubstest.ReadCorpus[downloadCase](t, "downloads.json").Cases {
		path := hubstest.FillIn(cmp.Or(test.Path, "/files/<id>/a.txt"), words...)
		for name, value := range test.Expect.Headers {
			if value != nil {
				filled := hubstest.FillIn(*value, words...)
				test.Expect.Headers[name] = &filled
			}
		}
		for _, method := range []string{"GET", "HEAD"} {
			t.Run(method+" "+test.Name, func(t *testing.T) {
				headers := []string{"Cookie", cookie, "X-Forwarded-For", hubstest.NewIP()}
				for _, header := range test.Headers {
					headers = append(headers, hubstest.FillIn(header, words...))
				}
				r := s.Wire(t, method, path, nil, headers...)
				test.Expect.Check(t, r)
				if got := string(r.Body); method == "GET" && test.Content != nil && got != *test.Content {
					t.Errorf("got %q, want %q", got, *test.Content)
				}
			})
		}
	}

	r := reader.Do("GET", "/files/"+id+"/a.txt", nil, "Range", "bytes=0-1,14-").Want(t, 206)
	_, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	parts := multipart.NewReader(bytes.NewReader(r.Body), params["boundary"])
	for _, want := range []string{"01", "ef"} {
		part, err := parts.NextPart()
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := io.ReadAll(part); string(got) != want {
			t.Errorf("got the part %q, want %q", got, want)
		}
	}

	// A row makes no difference to the folder and the link: the server has not made them.
	s.AllowErrors("breaks its contract", "path escapes from parent")
	info, err := os.Stat(filepath.Join(s.Env["FILES_DIR"], folder))
	if err != nil {
		t.Fatal(err)
	}
	for planted, size := range map[string]int64{link: 7, folder: info.Size()} {
		hubstest.Exec(t, s.Env["DATABASE_URL"], `insert into files (file_id, name, content_type, size)
			values ($1, 'a', 'text/plain', $2)`, planted, size)
		r := reader.Do("GET", "/files/"+planted+"/a", nil)
		hubstest.WantProblem(t, r, 500, "internal")
	}
}

// plantEntries puts into FILES_DIR what no upload makes, and returns the names.
func plantEntries(t *testing.T, s *hubstest.Server) (bare, folder, link string) {
	t.Helper()
	bare = hubstest.NewUUID()
	folder = hubstest.NewUUID()
	link = hubstest.NewUUID()
	dir := s.Env["FILES_DIR"]
	secret := filepath.Join(t.TempDir(), "secret")
	err := errors.Join(
		os.WriteFile(secret, []byte("secret!"), 0o600),
		os.WriteFile(filepath.Join(dir, "plain"), []byte("no id"), 0o600),
		os.WriteFile(filepath.Join(dir, bare), []byte("no row"), 0o600),
		os.Mkdir(filepath.Join(dir, folder), 0o700),
		os.Symlink(secret, filepath.Join(dir, link)),
	)
	if err != nil {
		t.Fatal(err)
	}
	return bare, folder, link
}

// A file whose length on disk is not that of its row is not served, not even in part.
func TestFileThatLostItsBytes(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	s.AllowErrors("breaks its contract", "no such file or directory")
	c, _ := s.Member(t, "member")
	for name, damage := range map[string]func(path string) error{
		"removed":  os.Remove,
		"cut":      func(path string) error { return os.Truncate(path, 3) },
		"extended": func(path string) error { return os.Truncate(path, 30) },
	} {
		t.Run(name, func(t *testing.T) {
			f := c.Upload("a.txt", []byte("content")).Want(t, 201).JSON(t)
			if err := damage(filepath.Join(s.Env["FILES_DIR"], f["fileId"].(string))); err != nil {
				t.Fatal(err)
			}
			for _, method := range []string{"GET", "HEAD"} {
				r := c.Do(method, f["path"].(string), nil)
				hubstest.WantProblem(t, r, 500, "internal")
				hubstest.WantHeaders(t, r, map[string]*string{"ETag": nil, "Content-Disposition": nil})
			}
		})
	}
}

const (
	maxFile        = 100_000
	maxAroundFile  = 64 << 10
	maxPartHeaders = 4 << 10
)

// sized returns a form of a file, with so many bytes around it: the end of the body, behind the
// form, counts as part of the form.
func sized(file, around int) string {
	body := form(goodPart, strings.Repeat("c", file))
	return body + strings.Repeat("e", around-len(form(goodPart, "")))
}

// headed returns a form whose part begins after so many bytes.
func headed(length int, header string) string {
	headers := goodPart
	short := length - len("--edge\r\nContent-Disposition: "+goodPart+"\r\n\r\n")
	for range short / len(header) {
		headers += header
	}
	headers += strings.Repeat("x", short%len(header)) // the end of the last value
	return form(headers, "content")
}

// The limits hold to the byte, with a Content-Length and without. What comes before the file is
// held in memory, so it has a limit of its own.
func TestUploadLimits(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, map[string]string{"MAX_UPLOAD_BYTES": strconv.Itoa(maxFile)})
	c, _ := s.Member(t, "member")
	frame := len(form(goodPart, ""))
	longHeader := "\r\nX-Padding: " + strings.Repeat("p", 3000)
	preamble := func(length int) string {
		return strings.Repeat("p", length-len("\r\n")) + "\r\n" + form(goodPart, "content")
	}
	head := len("--edge\r\nContent-Disposition: " + goodPart + "\r\n\r\n")
	stored := 0
	for _, test := range []struct {
		name    string
		body    string
		refused bool
	}{
		{name: "largest file", body: sized(maxFile, frame)},
		{name: "a byte more", body: sized(maxFile+1, frame), refused: true},
		{name: "twenty times as much", body: sized(20*maxFile, frame), refused: true},
		{name: "largest file, largest form", body: sized(maxFile, maxAroundFile)},
		{name: "largest file, a byte more around it", body: sized(maxFile, maxAroundFile+1), refused: true},
		{name: "small file, largest form", body: sized(10, maxAroundFile)},
		{name: "small file, a byte more around it", body: sized(10, maxAroundFile+1), refused: true},
		{name: "no bytes, a byte more around them", body: sized(0, maxAroundFile+1), refused: true},
		{name: "no bytes, a lot around them", body: sized(0, 2*maxFile), refused: true},
		{name: "long headers", body: headed(maxPartHeaders, longHeader)},
		{name: "longer headers", body: headed(maxPartHeaders+2, longHeader), refused: true},
		{name: "a mebibyte of headers", body: headed(1<<20, longHeader), refused: true},
		{name: "many headers", body: headed(maxPartHeaders, "\r\nX: y")},
		{name: "too many headers", body: headed(maxPartHeaders+2, "\r\nX: y"), refused: true},
		{name: "long preamble", body: preamble(maxPartHeaders - head)},
		{name: "longer preamble", body: preamble(maxPartHeaders - head + 2), refused: true},
		{name: "no boundary at all", body: strings.Repeat("no boundary\r\n", 100_000), refused: true},
	} {
		for _, chunked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, chunked %v", test.name, chunked), func(t *testing.T) {
				r := sendForm(c, test.body, chunked)
				if !test.refused {
					r.Want(t, 201)
					stored++
				} else {
					hubstest.WantProblem(t, r, 413, "too_large")
				}
				s.WantStored(t, stored)
			})
		}
	}
}

// A client that sends its whole upload before it reads gets its answer, whatever was wrong,
// and can go on using the connection: the server reads the rest of a refused upload.
func TestRefusedUploadIsAnswered(t *testing.T) {
	t.Parallel()
	const limit = 4 << 20 // far more than the 256 kB that net/http reads by itself
	s := hubstest.Start(t, map[string]string{"MAX_UPLOAD_BYTES": strconv.Itoa(limit)})
	c, _ := s.Member(t, "member")
	content := strings.Repeat("c", limit)
	wrongField := form(`form-data; name="other"; filename="a.txt"`, content)
	twoFiles := strings.Replace(form(goodPart, "x"), "--\r\n", "\r\n", 1)
	twoFiles += strings.TrimPrefix(form(goodPart, content), "--edge\r\n")
	for _, test := range []struct {
		name, body, kind string
		expects          bool // the client waits for "100 Continue"
		status           int
	}{
		{name: "wrong type", body: form(goodPart, content), kind: "text/plain", status: 415},
		{name: "no boundary", body: form(goodPart, content), kind: "multipart/form-data", status: 400},
		{name: "wrong field", body: wrongField, status: 400},
		{name: "wrong field, asked for", body: wrongField, expects: true, status: 400},
		{name: "two files", body: twoFiles, status: 400},
		{name: "announced as too large", body: form(goodPart, content+content[:maxAroundFile]), status: 413},
		{name: "found too large", body: form(goodPart, content+"c"), status: 413},
		{name: "long headers", body: headed(1<<20, "\r\nX: "+content[:3000]), status: 413},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			conn := hubstest.Dial(t, s.Addr)
			head := c.Head("POST /files/upload", "Content-Type: "+cmp.Or(test.kind, formType),
				"Content-Length: "+strconv.Itoa(len(test.body)))
			if test.expects {
				conn.Exchange(t, head+"Expect: 100-continue\r\n\r\n", 100)
				head = ""
			} else {
				head += "\r\n"
			}
			if closes := conn.Exchange(t, head+test.body, test.status); closes {
				t.Error("the connection closes, want it open")
			}
			conn.Exchange(t, "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n", 200)
		})
	}
	t.Cleanup(func() { s.WantStored(t, 0) }) // after all of these
}

// A client that waits for "100 Continue" is refused at once, and is not asked for the body. So
// the largest size that is announced costs nothing.
func TestRefusedUploadIsNotAskedFor(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	for _, test := range []struct {
		name, kind string
		status     int
	}{
		{name: "wrong type", kind: "text/plain", status: 415},
		{name: "announced as too large", kind: formType, status: 413},
	} {
		t.Run(test.name, func(t *testing.T) {
			head := c.Head("POST /files/upload", "Content-Type: "+test.kind,
				"Content-Length: 999999999", "Expect: 100-continue")
			hubstest.Dial(t, s.Addr).Exchange(t, head+"\r\n", test.status)
		})
	}
}

// The server waits only a few seconds for the rest of a refused upload: less than it waits for
// the next bytes of a good one.
func TestRefusedUploadIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	conn := hubstest.Dial(t, s.Addr)
	conn.SetDeadline(time.Now().Add(stallTimeout * 2 / 3))
	wrongField, _, _ := strings.Cut(form(`form-data; name="other"; filename="a.txt"`, "|"), "|")
	head := c.Head("POST /files/upload", "Content-Type: "+formType, "Content-Length: 200000")
	conn.Exchange(t, head+"\r\n"+wrongField, 400)
}

const stallTimeout = 30 * time.Second

// The server reads no more of a refused upload than an upload may have.
func TestRefusedUploadIsReadWithinBounds(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, map[string]string{"MAX_UPLOAD_BYTES": strconv.Itoa(maxFile)})
	c, _ := s.Member(t, "member")
	endless := &endlessReader{}
	c.Try("POST", "/files/upload", endless, "Content-Type", "text/plain")
	const most = 32 << 20 // a few MB are the buffers of the connection
	if endless.read > most {
		t.Errorf("got %d bytes of an endless upload read, want %d at most", endless.read, most)
	}
}

type endlessReader struct{ read int }

func (r *endlessReader) Read(p []byte) (int, error) {
	r.read += len(p)
	return len(p), nil
}

// The account is checked again before the row of an upload is written. An upload of a user who
// has lost the right while it ran is refused, and nothing of it is left.
func TestUploadOutlivesItsSession(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	for _, test := range []struct {
		name   string
		change string // SQL
		status int
		code   string
	}{
		{"suspended", "update users set suspended = true where email = $1", 403, "account_suspended"},
		{"deleted", "delete from users where email = $1", 401, "unauthenticated"},
		{"signed out", "update users set signed_out_at = clock_timestamp() where email = $1", 401, "unauthenticated"},
		{"other address", "update users set email = 'new-' || email where email = $1", 401, "unauthenticated"},
		{"terms withdrawn", `delete from terms_acceptances
			where user_id = (select user_id from users where email = $1)`, 403, "terms_not_accepted"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, email := s.Member(t, "member")
			upload := c.StartUpload("a.txt")
			hubstest.Exec(t, s.Env["DATABASE_URL"], test.change, email)
			hubstest.WantProblem(t, upload.Finish(), test.status, test.code)
			s.WantStored(t, 0)
		})
	}
}
