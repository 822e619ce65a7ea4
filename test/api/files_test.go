package api

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"mime"
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
	formType   = "multipart/form-data; boundary=edge"
	partHeader = "Content-Disposition: form-data; name=\"file\"; filename=\"a.txt\""
	otherPart  = "Content-Disposition: form-data; name=\"other\"; filename=\"a.txt\""
)

// form returns a form of one part.
func form(header, content string) string {
	return "--edge\r\n" + header + "\r\n\r\n" + content + "\r\n--edge--\r\n"
}

// An uploadCase is a form, and what becomes of it. uploads.json says what the members mean.
type uploadCase struct {
	hubstest.CorpusCase
	Filename    string
	Part        string
	PartType    string
	Content     string
	Form        *string
	Type        *string
	Encoding    string
	Chunked     bool
	Disposition string
}

var hexByte = regexp.MustCompile(`\\x[0-9a-f]{2}`)

// fill replaces \xff by the byte, and <x*3> by xxx.
func fill(text string) string {
	text = hexByte.ReplaceAllStringFunc(text, func(escape string) string {
		value, _ := strconv.ParseUint(escape[2:], 16, 8)
		return string([]byte{byte(value)})
	})
	return hubstest.FillIn(text)
}

func (test uploadCase) body() string {
	if test.Form != nil {
		text := strings.ReplaceAll(*test.Form, "\n", "\r\n")
		return hubstest.FillIn(text, "<file>", partHeader)
	}
	part := `form-data; name="file"; filename="` + fill(test.Filename) + `"`
	header := "Content-Disposition: " + cmp.Or(test.Part, part)
	if test.PartType != "" {
		header += "\r\nContent-Type: " + test.PartType
	}
	return form(header, fill(test.Content))
}

func (test uploadCase) headers() []string {
	kind := formType
	if test.Type != nil {
		kind = *test.Type
	}
	headers := []string{"Content-Type", kind}
	if test.Encoding != "" {
		headers = append(headers, "Content-Encoding", test.Encoding)
	}
	return headers
}

// What is stored comes back as it was sent, under its name, with the type that the server has
// found. What is refused leaves nothing. The limits hold to the byte.
func TestUploads(t *testing.T) {
	t.Parallel()
	corpus := hubstest.ReadCorpus[uploadCase](t, "uploads.json")
	s := hubstest.Start(t, corpus.Settings["local"])
	c, _ := s.Member(t, "member")
	stored := 0
	for _, test := range corpus.Cases {
		t.Run(test.Name, func(t *testing.T) {
			var body io.Reader = strings.NewReader(test.body())
			if test.Chunked {
				body = struct{ io.Reader }{body} // hides the length
			}
			if name, ok := test.Expect.Body["name"].(string); ok {
				test.Expect.Body["name"] = fill(name)
			}
			r := c.Elsewhere().Do("POST", "/files/upload", body, test.headers()...)
			test.Expect.Check(t, r)
			if r.Status == 201 {
				stored++
			}
			if r.Status == 201 && test.Form == nil {
				wantStoredFile(t, c, r.JSON(t), test)
			}
		})
	}
	s.WantStored(t, stored)
}

// wantStoredFile fetches an uploaded file, and checks the content and every header about it.
func wantStoredFile(t *testing.T, c *hubstest.Client, file map[string]any, test uploadCase) {
	t.Helper()
	content := fill(test.Content)
	if got := file["size"]; got != float64(len(content)) {
		t.Errorf("size: got %v, want %d", got, len(content))
	}
	path := file["path"].(string)
	c.WantFile(path, content)
	for _, method := range []string{"GET", "HEAD"} {
		r := c.Elsewhere().Do(method, path, nil).Want(t, 200)
		policy := hubstest.StrictCSP + "; style-src 'unsafe-inline'; sandbox allow-downloads"
		for name, want := range map[string]any{
			"Content-Length":          fmt.Sprint(len(content)),
			"Content-Type":            file["contentType"],
			"ETag":                    fmt.Sprintf("%q", file["fileId"]),
			"Accept-Ranges":           "bytes",
			"Cache-Control":           "private, no-cache",
			"Content-Security-Policy": policy,
		} {
			if got := r.Header.Get(name); got != want {
				t.Errorf("%s: got %q, want %q", name, got, want)
			}
		}
		kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Disposition"))
		if err != nil || params["filename"] != file["name"] {
			t.Errorf("file name: got %q, %v, want %q", params["filename"], err, file["name"])
		}
		if test.Disposition != "" && kind != test.Disposition {
			t.Errorf("disposition: got %q, want %q", kind, test.Disposition)
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

// Any signed-in user who knows the path of a file may read it. No other path leads to anything.
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
	folder, link := plantEntries(t, s)
	words := []string{
		"<id>", id, "<ID>", strings.ToUpper(id), "<etag>", `"` + id + `"`,
		"<before>", created.Add(-time.Hour).Format(http.TimeFormat),
		"<after>", created.Add(time.Hour).Format(http.TimeFormat),
		"<folder>", folder, "<link>", link,
	}
	reader, _ := s.Member(t, "member")
	cookie := s.CookieName() + "=" + reader.Token()
	for _, test := range hubstest.ReadCorpus[downloadCase](t, "downloads.json").Cases {
		path := hubstest.FillIn(cmp.Or(test.Path, "/files/<id>/a.txt"), words...)
		headers := []string{"Cookie", cookie, "X-Forwarded-For", hubstest.NewIP()}
		for _, header := range test.Headers {
			headers = append(headers, hubstest.FillIn(header, words...))
		}
		t.Run(test.Name, func(t *testing.T) {
			test.Expect.Check(t, s.Wire(t, "HEAD", path, nil, headers...))
			r := s.Wire(t, "GET", path, nil, headers...)
			test.Expect.Check(t, r)
			if got := string(r.Body); test.Content != nil && got != *test.Content {
				t.Errorf("got %q, want %q", got, *test.Content)
			}
		})
	}
}

// plantEntries puts into FILES_DIR what no upload makes: a file without an id, and a folder and a
// link by ids.
func plantEntries(t *testing.T, s *hubstest.Server) (folder, link string) {
	t.Helper()
	dir := s.Env["FILES_DIR"]
	folder = hubstest.NewUUID()
	link = hubstest.NewUUID()
	secret := filepath.Join(t.TempDir(), "secret")
	err := errors.Join(
		os.WriteFile(secret, []byte("secret!"), 0o600),
		os.WriteFile(filepath.Join(dir, "plain"), []byte("no id"), 0o600),
		os.Mkdir(filepath.Join(dir, folder), 0o700),
		os.Symlink(secret, filepath.Join(dir, link)),
	)
	if err != nil {
		t.Fatal(err)
	}
	return folder, link
}

// What the server has not made is not served, even if it has a row: a folder, or a link that leads
// out of FILES_DIR.
func TestPlantedEntriesAreNotServed(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	s.AllowErrors("breaks its contract", "path escapes from parent")
	c, _ := s.Member(t, "member")
	folder, link := plantEntries(t, s)
	info, err := os.Stat(filepath.Join(s.Env["FILES_DIR"], folder))
	if err != nil {
		t.Fatal(err)
	}
	for id, size := range map[string]int64{link: int64(len("secret!")), folder: info.Size()} {
		hubstest.Exec(t, s.Env["DATABASE_URL"], `insert into files (file_id, name, content_type, size)
			values ($1, 'a', 'text/plain', $2)`, id, size)
		hubstest.WantProblem(t, c.Do("GET", "/files/"+id+"/a", nil), 500, "internal")
	}
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

// A client that sends its whole upload before it reads gets its answer, whatever was wrong,
// and can go on using the connection: the server reads the rest of a refused upload.
func TestRefusedUploadIsAnswered(t *testing.T) {
	t.Parallel()
	const limit = 4 << 20 // far more than the 256 kB that net/http reads by itself
	s := hubstest.Start(t, map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(limit)})
	c, _ := s.Member(t, "member")
	content := strings.Repeat("c", limit)
	good := form(partHeader, content)
	for _, test := range []struct {
		name   string
		body   string
		kind   string
		status int
	}{
		{name: "wrong type", body: good, kind: "text/plain", status: 415},
		{name: "no boundary", body: good, kind: "multipart/form-data", status: 400},
		{name: "wrong field", body: form(otherPart, content), status: 400},
		{name: "announced as too large", body: good + content[:64<<10], status: 413},
		{name: "found too large", body: form(partHeader, content+"c"), status: 413},
		{name: "headers too long", body: form(partHeader+content, ""), status: 413},
	} {
		t.Run(test.name, func(t *testing.T) {
			head := c.Head("POST /files/upload",
				"Content-Type: "+cmp.Or(test.kind, formType),
				fmt.Sprintf("Content-Length: %d", len(test.body)))
			conn := hubstest.Dial(t, s.Addr)
			if closes := conn.Exchange(t, head+"\r\n"+test.body, test.status); closes {
				t.Error("the connection closes, want it open")
			}
			conn.Exchange(t, "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n", 200)
		})
	}
	s.WantStored(t, 0)
}

// A client that waits for "100 Continue" is refused at once, if its headers suffice for that. If
// it was told to send, the server reads what it asked for.
func TestRefusedUploadWithExpect(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	body := form(otherPart, strings.Repeat("c", 8<<20))
	head := func(kind string, length int) string {
		return c.Head("POST /files/upload", "Content-Type: "+kind,
			fmt.Sprintf("Content-Length: %d", length), "Expect: 100-continue") + "\r\n"
	}
	hubstest.Dial(t, s.Addr).Exchange(t, head("text/plain", len(body)), 415)
	hubstest.Dial(t, s.Addr).Exchange(t, head(formType, 1<<40), 413)
	conn := hubstest.Dial(t, s.Addr)
	conn.Exchange(t, head(formType, len(body)), 100)
	conn.Exchange(t, body, 400)
}

// The server waits only a few seconds for the rest of a refused upload: less than the 30 that it
// waits for the next bytes of a good one.
func TestRefusedUploadIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	conn := hubstest.Dial(t, s.Addr)
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	head := c.Head("POST /files/upload", "Content-Type: "+formType, "Content-Length: 200000")
	conn.Exchange(t, head+"\r\n--edge\r\n"+otherPart+"\r\n\r\n", 400)
}

// The server reads no more of a refused upload than an upload may have.
func TestRefusedUploadIsReadWithinBounds(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, map[string]string{"MAX_UPLOAD_BYTES": "100000"})
	c, _ := s.Member(t, "member")
	endless := &endlessReader{}
	c.Try("POST", "/files/upload", endless, "Content-Type", "text/plain")
	const most = 32 << 20 // a few MB are in the buffers of the connection
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
	for command, want := range map[string]string{
		"suspend": "account_suspended",
		"signout": "unauthenticated",
		"delete":  "unauthenticated",
	} {
		c, email := s.Member(t, "member")
		upload := c.StartUpload("a.txt")
		s.User(t, command, email)
		r := upload.Finish()
		if got := r.Field(t, "code"); got != want {
			t.Errorf("after user %s: got %v, want %s", command, got, want)
		}
		s.WantStored(t, 0)
	}
}

// Each range would cost a part of its own. (net/http ignores ranges that are longer together than
// the file, so the file is longer.)
func TestManyRangesAreIgnored(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	path := c.Upload("a.txt", []byte(strings.Repeat("x", 100))).Want(t, 201).Field(t, "path").(string)
	for ranges, status := range map[int]int{16: 206, 17: 200} {
		header := "bytes=" + strings.TrimSuffix(strings.Repeat("2-2,", ranges), ",")
		c.Do("GET", path, nil, "Range", header).Want(t, status)
	}
}
