package api

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"hubs/internal/hubstest"
)

const (
	uploadRoute = "POST /files/upload"
	formType    = "multipart/form-data; boundary=edge"
	partHeader  = `Content-Disposition: form-data; name="file"; filename="a.txt"`
	formEnd     = "\r\n--edge--\r\n"
	otherHeader = `Content-Disposition: form-data; name="other"; filename="a.txt"` // is refused
)

// form returns a form that has one part, with this header and content.
func form(header, content string) string {
	return "--edge\r\n" + header + "\r\n\r\n" + content + formEnd
}

// F3, H1: The limits of an upload are exact to the byte, whether or not the request has a
// Content-Length.
func TestUploadLimitsAreExact(t *testing.T) {
	t.Parallel()
	const maxFile = 100_000
	const maxBefore = 4 << 10  // bytes of a form before the content of its file
	const maxAround = 64 << 10 // bytes of a form before and after the content of its file
	s, c := start(t, "member", map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(maxFile)})
	x := func(length int) string {
		return strings.Repeat("x", length)
	}
	empty := form(partHeader, "")
	small := form(partHeader, "x")
	largest := form(partHeader, x(maxFile))
	around := maxAround - len(empty) // bytes that may follow a form
	// Bytes that a preamble or one more header may add to those that stand before the content.
	before := maxBefore - len(strings.TrimSuffix(empty, formEnd))
	withHeader := func(length int) string {
		const name = "\r\nX:"
		return form(partHeader+name+x(length-len(name)), "x")
	}
	withPreamble := func(length int) string {
		return x(length-len("\r\n")) + "\r\n" + small
	}

	stored := 0
	for _, test := range []struct {
		name   string
		form   string
		status int
	}{
		{"the largest file", largest, 201},
		{"a larger file", form(partHeader, x(maxFile+1)), 413},
		{"the most around the largest file", largest + x(around), 201},
		{"more around the largest file", largest + x(around+1), 413},
		{"the most around a small file", small + x(around), 201},
		{"more around a small file", small + x(around+1), 413},
		{"more around an empty file", empty + x(around+1), 413},
		{"a second part with a long header", form(partHeader, "x\r\n--edge\r\nX: "+x(around)), 413},
		{"the longest header", withHeader(before), 201},
		{"a longer header", withHeader(before + 1), 413},
		{"a malformed header", form(partHeader+"\r\nX: \x01", x(maxBefore)), 400},
		{"the longest preamble", withPreamble(before), 201},
		{"a longer preamble", withPreamble(before + 1), 413},
		{"no part at all", strings.Repeat(x(3000)+"\r\n", 3), 413},
	} {
		for _, way := range bothWays(test.form) {
			r := c.Elsewhere().Do(uploadRoute, way.body, "Content-Type", formType)
			wantEqual(t, test.name+", "+way.name+": status", r.Status, test.status)
			if test.status == 201 {
				stored++
			}
		}
	}

	s.WantStored(t, stored)
}

// F1: If a file is missing on disk, or is not the one that was uploaded, reading it is a 500, and
// no part of it is sent. Every case has a row. The folder and the target of the link have the size
// in that row, so that the size alone does not reveal them.
func TestFilesThatAreNotAsStored(t *testing.T) {
	t.Parallel()
	s, c := start(t, "member")
	s.AllowErrorsWithAnyOf(
		"file on disk is not",
		"no such file or directory",
		"path escapes from parent")
	folder, err := os.Stat(t.TempDir())
	hubstest.Must(t, err)
	content := make([]byte, folder.Size())
	outside := filepath.Join(t.TempDir(), "outside")
	hubstest.Must(t, os.WriteFile(outside, content, 0o600))

	for _, test := range []struct{ name, damage string }{
		{"removed", `rm $1`},
		{"cut", `head -c 3 $2 > $1`},
		{"extended", `echo more >> $1`},
		{"a folder", `rm $1; mkdir $1`},
		{"a link", `ln -sf $2 $1`},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := c.In(t)
			stored := c.Upload("a.txt", content).Must(t, 201)
			shell(t, s.Env["FILES_DIR"], test.damage, stored.Field(t, "fileId"), outside)

			c.Get(stored.Field(t, "path")).WantProblem(t, 500, "internal")
		})
	}
}

// uploadHead returns the head of an upload. kind is its Content-Type, length its Content-Length in
// bytes, and more holds names and values of further headers, in turn.
func uploadHead(c *hubstest.Client, kind string, length int, more ...string) string {
	headers := append(more, "Content-Type", kind, "Content-Length", fmt.Sprint(length))
	return c.Elsewhere().Head(uploadRoute, headers...)
}

// The server reads the rest of a refused upload. So a client that sends its whole upload before it
// reads the answer gets the answer, and can use the connection again.
func TestRefusedUploadIsAnswered(t *testing.T) {
	t.Parallel()
	const maxFile = 4 << 20 // bytes; net/http by itself reads far less of a refused body
	s, c := start(t, "member", map[string]string{"MAX_UPLOAD_BYTES": fmt.Sprint(maxFile)})
	large := strings.Repeat("x", maxFile)
	more := strings.Repeat("x", 64<<10)

	for name, test := range map[string]struct {
		kind   string // Content-Type
		body   string
		status int
	}{
		"another type":           {"text/plain", form(partHeader, large), 415},
		"announced as too large": {formType, form(partHeader, large+more), 413},
		"found too large":        {formType, form(partHeader, large+"x"), 413},
	} {
		t.Run(name, func(t *testing.T) {
			conn := hubstest.Dial(t, s.Addr)
			request := uploadHead(c, test.kind, len(test.body)) + test.body
			refused := conn.Send(t, request)
			refused.Want(t, test.status)
			conn.Send(t, "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n").Want(t, 200)
		})
	}

	s.WantStored(t, 0)
}

// A client that sends "Expect: 100-continue" is refused before it sends the body, if the headers of
// the upload are reason enough. If the server has asked for the body and then refuses the upload,
// it reads the rest of the body.
func TestRefusedUploadWithExpect(t *testing.T) {
	t.Parallel()
	s, c := start(t, "member")
	headOf := func(kind string, length int) string {
		return uploadHead(c, kind, length, "Expect", "100-continue")
	}
	text := headOf("text/plain", 8<<20)
	hubstest.Dial(t, s.Addr).Send(t, text).Want(t, 415)
	large := headOf(formType, 1<<40)
	hubstest.Dial(t, s.Addr).Send(t, large).Want(t, 413)

	conn := hubstest.Dial(t, s.Addr)
	body := form(otherHeader, strings.Repeat("c", 8<<20))
	conn.Send(t, headOf(formType, len(body))).Must(t, 100)
	conn.Finish(t, body).Want(t, 400)
}

// H1: The server waits for the rest of a refused upload for less time than an accepted upload may
// pause. The test sees this because the accepted upload begins first and pauses until the other one
// is refused.
func TestRefusedUploadIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	s, c := start(t, "member")
	good := c.StartUpload("a.txt")
	head := uploadHead(c, formType, 200_000)
	refused := hubstest.Dial(t, s.Addr).Send(t, head+form(otherHeader, ""))
	refused.Want(t, 400)
	good.Finish().Want(t, 201)
}

// H1: The server does not read all of the rest of a refused upload. It reads MAX_UPLOAD_BYTES of
// it; the test allows for what the buffers of the connection hold.
func TestRefusedUploadIsReadWithinBounds(t *testing.T) {
	t.Parallel()
	const maxSent = 32 << 20 // bytes; the buffers of the connection hold a few MB of them
	_, c := start(t, "member", map[string]string{"MAX_UPLOAD_BYTES": "100000"})
	endless := &endlessReader{}
	c.Do(uploadRoute, endless, "Content-Type", "text/plain").Want(t, 415)
	if sent := endless.read.Load(); sent > maxSent {
		t.Errorf("got %d bytes sent of an endless upload, want at most %d", sent, maxSent)
	}
}

// An endlessReader is a body without end. read counts the bytes that were read from it; net/http
// may still read while the test already has the answer.
type endlessReader struct{ read atomic.Int64 }

func (r *endlessReader) Read(p []byte) (int, error) {
	r.read.Add(int64(len(p)))
	return len(p), nil
}

// The account is checked again before the row of an upload is written. If the user has lost the
// right to upload meanwhile, the upload is refused, and no part of it is kept.
func TestUploadEndsWithItsRights(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	for _, test := range []struct{ command, code string }{
		{"suspend", "account_suspended"},
		{"signout", "unauthenticated"},
		{"delete", "unauthenticated"},
	} {
		c, email := s.Member(t, "member")
		unfinished := c.StartUpload("a.txt")
		s.User(t, test.command, email)
		wantEqual(t, "upload after user "+test.command, unfinished.Finish().Code(), test.code)
		s.WantStored(t, 0)
	}
}

// H7: A Range header with more than 16 ranges is ignored, because each range would add a part to
// the answer. The file is longer than all ranges together: net/http ignores ranges that are longer
// than the file.
func TestManyRangesAreIgnored(t *testing.T) {
	t.Parallel()
	_, c := start(t, "member")
	file := c.Store("a.txt", strings.Repeat("x", 100))
	get := func(ranges int) *hubstest.Response {
		return c.Get(file, "Range", "bytes=2-2"+strings.Repeat(",2-2", ranges-1))
	}
	get(16).Want(t, 206)
	get(17).Want(t, 200)
}
