package api

import (
	"cmp"
	"fmt"
	"mime"
	"strconv"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// An uploadCase is a form of one part, or whatever Form says. It is sent twice: with its length, and
// in chunks. What is stored must come back byte for byte.
type uploadCase struct {
	Name, Rule  string
	Filename    string // as it stands in the header of the part
	Part        string // Content-Disposition of the part; "" means a file with the Filename
	PartType    string // Content-Type of the part
	Content     string
	Form        *string  // the whole body, with \n for a line break
	Type        *string  // Content-Type of the request; nil means formType, and "" none
	Headers     []string // further ones, names and values in turn
	Stored      string   // the name under which it is stored; "" means the Filename
	Disposition string   // of the download; "" means inline
	Want        answer
}

// body returns the body of the request: Form if the case has one, otherwise a form of one part.
func (test uploadCase) body() string {
	if test.Form != nil {
		text := strings.ReplaceAll(*test.Form, "\n", "\r\n")
		return fillIn(text, partHeader, partHeader)
	}
	part := `form-data; name="file"; filename="` + test.Filename + `"`
	header := "Content-Disposition: " + cmp.Or(test.Part, part)
	if test.PartType != "" {
		header += "\r\nContent-Type: " + test.PartType
	}
	return form(header, test.Content)
}

// headers returns the headers of the request, names and values in turn.
func (test uploadCase) headers() []string {
	kind := formType
	if test.Type != nil {
		kind = *test.Type
	}
	if kind == "" {
		return test.Headers
	}
	return append(test.Headers, "Content-Type", kind)
}

// F1, F2, F3: A stored file comes back with the bytes that were sent, under its name, with the
// content type that the server has detected. A refused upload leaves neither bytes nor a row.
func TestUploadsAreStoredAsSent(t *testing.T) {
	t.Parallel()
	s, c := start(t, "member")
	stored := 0
	runCases(t, uploadCases, func(t *testing.T, test uploadCase) {
		c := c.In(t)
		for _, way := range bothWays(test.body()) {
			r := c.Elsewhere().Do(uploadRoute, way.body, test.headers()...)
			wantAnswer(t, r, test.Want)
			if r.Status == 201 {
				stored++
				wantStoredFile(t, c, r, test)
			}
		}
	})
	s.WantStored(t, stored)
}

// wantStoredFile fetches an uploaded file. It checks the content and every header that describes
// the file. stored is the answer to the upload.
func wantStoredFile(
	t *testing.T, c *hubstest.Client, stored *hubstest.Response, test uploadCase,
) {
	t.Helper()
	filename := cmp.Or(test.Stored, test.Filename)
	stored.WantField(t, "name", filename)
	stored.WantField(t, "size", float64(len(test.Content)))
	path := stored.Field(t, "path")
	want := map[string]string{
		"Content-Length": fmt.Sprint(len(test.Content)),
		"Content-Type":   stored.Field(t, "contentType"),
		"ETag":           strconv.Quote(stored.Field(t, "fileId")),
		"Accept-Ranges":  "bytes",
	}
	r := c.Elsewhere().Get(path).Must(t, 200)
	wantText(t, path, string(r.Body), test.Content)
	for name, value := range want {
		wantEqual(t, name, r.Header.Get(name), value)
	}
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Disposition"))
	wantEqual(t, "error of Content-Disposition", err, nil)
	wantEqual(t, "name in Content-Disposition", params["filename"], filename)
	wantEqual(t, "Content-Disposition", kind, cmp.Or(test.Disposition, "inline"))
}

// fieldHeader is the header of a part that is a field of the form.
const fieldHeader = `Content-Disposition: form-data; name="n"`

var uploadCases = []group[uploadCase]{
	// Names that are kept as they are.
	{Each: uploadCase{Rule: "F1", Want: answer{Status: 201}}, Cases: []uploadCase{
		{Name: "spaces and other scripts", Filename: "naïve 文件 🚀.txt"},
		{Name: "characters of a URL", Filename: "a b+c&d=e#f?g.txt"},
		{Name: "an apostrophe", Filename: "it's.txt"},
		{Name: "a percent sign", Filename: "100%.txt"},
		{Name: "an escaped slash stays as it is", Filename: "a%2Fb.txt"},
		{Name: "escaped dots stay as they are", Filename: "%2e%2e"},
		{Name: "a semicolon", Filename: "semi;colon.txt"},
		{Name: "three dots", Filename: "..."},
		{Name: "a leading dot", Filename: ".hidden"},
		{Name: "the name of a route", Filename: "upload"},
		{Name: "255 bytes", Filename: repeat("n", 255)},
		{Name: "255 bytes in 128 characters", Filename: repeat("é", 127) + "n"},
		{Name: "characters of patterns", Filename: "{x}*[]|$.txt"},
		{Name: "a word as mail encodes it stays as it is", Filename: "=?utf-8?q?x?="},
		{Name: "blanks at the ends", Filename: " a "},
		{Name: "a part that says its bytes are encoded: they stay as they are",
			Part: `form-data; name="file"; filename="a.txt"` +
				"\r\nContent-Transfer-Encoding: quoted-printable",
			Filename: "a.txt", Content: "a=3Db"},
		{Name: "a tag", Filename: "<img src=x>.html"},
		{Name: "a mark that says left to right, as Persian needs", Filename: "a\u200eb.txt"},
	}},
	// Names that are decoded, or reduced to the last element of a path.
	{Each: uploadCase{Rule: "F1", Want: answer{Status: 201}}, Cases: []uploadCase{
		{Name: "escaped quotes", Filename: `\"hi\".txt`, Stored: `"hi".txt`},
		{Name: "a path: the last element is the name", Filename: "../../etc/passwd",
			Stored: "passwd"},
		{Name: "a path of Windows", Filename: `C:\fakepath\photo.png`, Stored: "photo.png"},
		{Name: "a name as RFC 5987 writes it",
			Part: `form-data; name="file"; filename*=UTF-8''na%C3%AFve.txt`, Stored: "naïve.txt"},
	}},
	// Declared as an image, but possibly HTML, SVG, or text in an unknown charset.
	{Each: uploadCase{Rule: "F2", Filename: "photo.png", PartType: "image/png", Disposition: "attachment",
		Want: answer{Status: 201, Body: values{"contentType": "application/octet-stream"}}},
		Cases: []uploadCase{
			{Name: "HTML", Content: "<!DOCTYPE html><script src=x>alert(1)</script>"},
			{Name: "HTML after blanks", Content: "  \n<html lang=x>"},
			{Name: "a tag in a text", Content: "hello <script src=x>alert(1)</script>"},
			{Name: "SVG", Content: `<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>`},
			{Name: "SVG with a prologue", Content: `<?xml version="1.0"?><svg onload="alert(1)"/>`},
			{Name: "SVG behind a comment", Content: `<!-- c --><svg onload="alert(1)"/>`},
			{Name: "binary", Content: "\x00\x01\x02"},
			{Name: "SVG in UTF-16", Content: "\xff\xfe<\x00s\x00v\x00g\x00>\x00"},
			{Name: "text in UTF-16", Content: "\xff\xfea\x00b\x00"},
			{Name: "Latin-1", Content: "caf\xe9 au lait"},
			{Name: "KOI8-R", Content: "\xf0\xd2\xc9\xd7\xc5\xd4"},
			{Name: "a broken character before the end of the sniffed part",
				Content: repeat("a", 510) + "\xc3a" + repeat("a", 90)},
			{Name: "broken up to the end of the sniffed part",
				Content: repeat("a", 508) + "\xe9\xe9\xe9\xe9"},
		}},
	// Declared as a PNG image, but of another type, which a browser may run or save.
	{Each: uploadCase{Rule: "F2", Filename: "photo.png", PartType: "image/png", Disposition: "attachment",
		Want: answer{Status: 201}},
		Cases: []uploadCase{
			{Name: "PDF: browsers show none in a sandbox", Content: "%PDF-1.7\n<script src=x>",
				Want: answer{Body: values{"contentType": "application/pdf"}}},
			{Name: "ZIP", Content: "PK\x03\x04",
				Want: answer{Body: values{"contentType": "application/zip"}}},
			{Name: "BMP", Content: "BM\x00\x00", Want: answer{Body: values{"contentType": "image/bmp"}}},
			{Name: "MP4", Content: "\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom",
				Want: answer{Body: values{"contentType": "video/mp4"}}},
		}},
	// Declared as HTML, but recognized as text in UTF-8.
	{Each: uploadCase{Rule: "F2", Filename: "page.html", PartType: "text/html", Disposition: "inline",
		Want: answer{Status: 201, Body: values{"contentType": "text/plain; charset=utf-8"}}},
		Cases: []uploadCase{
			{Name: "HTML in UTF-7: harmless, because the charset is named", Content: "+ADw-script+AD4-"},
			{Name: "UTF-8", Content: "café au lait"},
			{Name: "nothing", Content: ""},
			{Name: "a script: nosniff keeps it from being run", Content: "alert(1)"},
			{Name: "a character that the sniffed part cuts", Content: repeat("a", 511) + "é"},
			{Name: "Latin-1 at the very end: it might be cut", Content: "caf\xe9"},
		}},
	// Declared as HTML, but recognized as an image that a browser shows.
	{Each: uploadCase{Rule: "F2", Filename: "page.html", PartType: "text/html", Disposition: "inline",
		Want: answer{Status: 201}},
		Cases: []uploadCase{
			{Name: "PNG", Content: "\x89PNG\r\n\x1a\n\x00",
				Want: answer{Body: values{"contentType": "image/png"}}},
			{Name: "JPEG", Content: "\xff\xd8\xff\xe0",
				Want: answer{Body: values{"contentType": "image/jpeg"}}},
			{Name: "a GIF that is also a script", Content: "GIF89a/*<script src=x>alert(1)</script>*/",
				Want: answer{Body: values{"contentType": "image/gif"}}},
			{Name: "WebP", Content: "RIFF\x00\x00\x00\x00WEBPVP8 ",
				Want: answer{Body: values{"contentType": "image/webp"}}},
		}},
	// Names that are refused.
	{Each: uploadCase{Rule: "F1", Want: invalid("file")}, Cases: []uploadCase{
		{Name: "no name", Filename: "", Want: answer{Detail: "must have a file name"}},
		{Name: "dot", Filename: ".",
			Want: answer{Detail: "must have the name of a file, not of a folder"}},
		{Name: "dot dot", Filename: ".."},
		{Name: "a path that ends in dot dot", Filename: "a/..",
			Want: answer{Detail: "must have the name of a file, not of a folder"}},
		{Name: "256 bytes", Filename: repeat("n", 256)},
		{Name: "256 bytes in 128 characters", Filename: repeat("λ", 128),
			Want: answer{Detail: "must have a name of at most 255 bytes in UTF-8"}},
		{Name: "bad UTF-8", Filename: "\xff", Want: answer{Detail: "must have a name in UTF-8"}},
		{Name: "a C1 control character", Filename: "a\u0085b",
			Want: answer{Detail: "must have a name without control characters"}},
		{Name: "U+202A embeds left to right", Filename: "invoice\u202agnp.exe",
			Want: answer{Detail: "must not have a name that changes the direction of text"}},
		{Name: "U+202B embeds right to left", Filename: "invoice\u202bgnp.exe"},
		{Name: "U+202C ends an override", Filename: "invoice\u202cgnp.exe"},
		{Name: "U+202D overrides left to right", Filename: "invoice\u202dgnp.exe"},
		{Name: "U+202E overrides right to left: invoice<U+202E>gnp.exe is shown as invoiceexe.png",
			Filename: "invoice\u202egnp.exe"},
		{Name: "U+2066 isolates left to right", Filename: "invoice\u2066gnp.exe"},
		{Name: "U+2067 isolates right to left", Filename: "invoice\u2067gnp.exe"},
		{Name: "U+2068 isolates", Filename: "invoice\u2068gnp.exe"},
		{Name: "U+2069 ends an isolate", Filename: "invoice\u2069gnp.exe"},
	}},
	// Parts that are not a file, or have an invalid name.
	{Each: uploadCase{Rule: "F1", Want: invalid("file")}, Cases: []uploadCase{
		{Name: "bad UTF-8, escaped", Part: `form-data; name="file"; filename*=UTF-8''%ff`},
		{Name: "NUL", Part: `form-data; name="file"; filename*=UTF-8''a%00b`},
		{Name: "a line break", Part: `form-data; name="file"; filename*=UTF-8''a%0D%0Ab`},
		{Name: "no file name", Part: `form-data; name="file"`},
		{Name: "another field", Part: `form-data; name="upload"; filename="a.txt"`,
			Want: answer{Detail: "must be the name of the part with the file"}},
		{Name: "the field in another case", Part: `form-data; name="File"; filename="a.txt"`},
		{Name: "no field", Part: `form-data; filename="a.txt"`},
		{Name: "an attachment", Part: `attachment; name="file"; filename="a.txt"`},
	}},
	// Forms that are cut off or malformed.
	{Each: uploadCase{Rule: "F3", Want: invalid("body")}, Cases: []uploadCase{
		{Name: "an empty body", Form: new("")},
		{Name: "no end", Form: new("--edge\n" + partHeader + "\n\ncontent\n")},
		{Name: "an end within the content", Form: new("--edge\n" + partHeader + "\n\ncont")},
		{Name: "an end within the headers", Form: new("--edge\nContent-Disp")},
		{Name: "a bad header", Form: new("--edge\nno header\n\ncontent\n--edge--\n")},
		{Name: "a bad header of a second part",
			Form: new("--edge\n" + partHeader + "\n\nx\n--edge\nno header\n\ny\n--edge--\n")},
	}},
	// Forms that do not contain exactly one file and nothing else.
	{Each: uploadCase{Rule: "F3", Want: invalid("file")}, Cases: []uploadCase{
		{Name: "no part", Form: new("--edge--\n"),
			Want: answer{Detail: "is missing: the form is empty"}},
		{Name: "no header", Form: new("--edge\n\ncontent\n--edge--\n")},
		{Name: "two files", Form: new("--edge\n" + partHeader + "\n\nx\n--edge\n" + partHeader + "\n\ny\n--edge--\n"),
			Want: answer{Detail: "must be the only part of the form"}},
		{Name: "a field after the file",
			Form: new("--edge\n" + partHeader + "\n\nx\n--edge\n" + fieldHeader + "\n\ny\n--edge--\n"),
			Want: answer{Detail: "must be the only part of the form"}},
		{Name: "a field before the file",
			Form: new("--edge\n" + fieldHeader + "\n\ny\n--edge\n" + partHeader + "\n\nx\n--edge--\n"),
			Want: answer{Detail: "must come before all other parts of the form"}},
	}},
	// Content types without the boundary of the body.
	{Each: uploadCase{Rule: "F3", Want: invalid("body")}, Cases: []uploadCase{
		{Name: "no boundary", Type: new("multipart/form-data"),
			Want: answer{Detail: "has no boundary " +
				"between its parts: a script must leave that to the browser"}},
		{Name: "an empty boundary", Type: new(`multipart/form-data; boundary=""`)},
		{Name: "another boundary", Type: new("multipart/form-data; boundary=rim")},
	}},
	// Other content types, and a compressed form.
	{Each: uploadCase{Rule: "F3", Want: fails(415, "unsupported_media_type")}, Cases: []uploadCase{
		{Name: "no content type", Type: new("")},
		{Name: "an empty content type", Type: new(""), Headers: []string{"Content-Type", ""}},
		{Name: "JSON", Type: new("application/json")},
		{Name: "bare bytes", Type: new("application/octet-stream")},
		{Name: "a form without parts", Type: new("application/x-www-form-urlencoded")},
		{Name: "multipart/mixed", Type: new("multipart/mixed; boundary=edge")},
		{Name: "a bad content type", Type: new("multipart/form-data; boundary=edge; =")},
		{Name: "a compressed form", Headers: []string{"Content-Encoding", "gzip"}},
	}},
}
