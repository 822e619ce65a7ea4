package api

import (
	"cmp"
	"net/http"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A downloadCase is a GET and a HEAD of a file with the content 0123456789abcdef. <id> is its id,
// <digits> is the id without its dashes, <ID> is the id in capitals, and <etag> is the tag of the
// file. <before> and <after> are the times an hour before and an hour after its upload.
type downloadCase struct {
	Name, Rule string
	Path       string   // "" means /files/<id>/a.txt
	Headers    []string // names and values in turn
	Content    *string  // of the answer to GET; nil: not compared
	Want       answer
}

// F1, G3: Downloads obey conditions and ranges. Any signed-in user may read a file whose path they
// know. Every other path is a 404.
func TestDownloadsObeyConditionsAndRanges(t *testing.T) {
	t.Parallel()
	s, owner := start(t, "member")
	stored := owner.Upload("a.txt", []byte("0123456789abcdef")).Must(t, 201)
	id := stored.Field(t, "fileId")
	created := timeOf(t, stored, "createdAt")
	words := []string{
		"<id>", id,
		"<ID>", strings.ToUpper(id),
		"<digits>", strings.ReplaceAll(id, "-", ""),
		"<etag>", `"` + id + `"`,
		"<before>", created.Add(-time.Hour).Format(http.TimeFormat),
		"<after>", created.Add(time.Hour).Format(http.TimeFormat),
	}
	reader, _ := s.Member(t, "member")
	cookie := s.CookieName() + "=" + reader.Token()

	runCases(t, downloadCases, func(t *testing.T, c downloadCase) {
		path := fillIn(cmp.Or(c.Path, "/files/<id>/a.txt"), words...)
		headers := []string{
			"Cookie", cookie,
			"X-Forwarded-For", hubstest.NewIP(),
		}
		for _, header := range c.Headers {
			headers = append(headers, fillIn(header, words...))
		}
		wantAnswer(t, onTheWire(t, s, "HEAD "+path, nil, headers...), c.Want)
		r := onTheWire(t, s, "GET "+path, nil, headers...)
		wantAnswer(t, r, c.Want)
		if c.Content != nil {
			wantEqual(t, "content", string(r.Body), *c.Content)
		}
	})
}

var downloadCases = []group[downloadCase]{
	// The whole file.
	{Each: downloadCase{Rule: "F1", Content: new("0123456789abcdef"), Want: ok},
		Cases: []downloadCase{
			{Name: "the whole file"},
			{Name: "the whole file if the tag is another", Rule: "H7",
				Headers: []string{"Range", "bytes=0-0", "If-Range", `"other"`}},
			{Name: "a range in another unit", Rule: "H7", Headers: []string{"Range", "items=0-1"}},
			{Name: "If-None-Match: another tag", Headers: []string{"If-None-Match", `"other"`}},
			{Name: "If-Match: the tag", Headers: []string{"If-Match", "<etag>"}},
			{Name: "modified since", Headers: []string{"If-Modified-Since", "<before>"}},
		}},
	// A part of the file.
	{Each: downloadCase{Rule: "H7", Want: answer{Status: 206}}, Cases: []downloadCase{
		{Name: "the first byte", Headers: []string{"Range", "bytes=0-0"}, Content: new("0"),
			Want: answer{Headers: headers{"Content-Range": "bytes 0-0/16"}}},
		{Name: "a part", Headers: []string{"Range", "bytes=2-5"}, Content: new("2345"),
			Want: answer{Headers: headers{"Content-Range": "bytes 2-5/16"}}},
		{Name: "from a byte on", Headers: []string{"Range", "bytes=7-"}, Content: new("789abcdef"),
			Want: answer{Headers: headers{"Content-Range": "bytes 7-15/16"}}},
		{Name: "a part that ends after the file", Headers: []string{"Range", "bytes=7-99"},
			Content: new("789abcdef"),
			Want:    answer{Headers: headers{"Content-Range": "bytes 7-15/16"}}},
		{Name: "the last bytes", Headers: []string{"Range", "bytes=-3"}, Content: new("def"),
			Want: answer{Headers: headers{"Content-Range": "bytes 13-15/16"}}},
		{Name: "a part if the tag is this one",
			Headers: []string{"Range", "bytes=0-0", "If-Range", "<etag>"}, Content: new("0"),
			Want: answer{Headers: headers{"Content-Range": "bytes 0-0/16"}}},
	}},
	// A part that the file does not have.
	{Each: downloadCase{Rule: "H7",
		Want: answer{Status: 416, Code: "range_not_satisfiable",
			Headers: headers{"Content-Range": "bytes */16", "ETag": ""}}},
		Cases: []downloadCase{
			{Name: "a part behind the end", Headers: []string{"Range", "bytes=16-"}},
		}},
	// A file that the client already has.
	{Each: downloadCase{Rule: "F1", Content: new(""), Want: answer{Status: 304}},
		Cases: []downloadCase{
			{Name: "If-None-Match: the tag", Headers: []string{"If-None-Match", "<etag>"}},
			{Name: "If-None-Match: the weak tag among others",
				Headers: []string{"If-None-Match", `"other", W/<etag>`}},
			{Name: "If-None-Match: any tag", Headers: []string{"If-None-Match", "*"}},
			{Name: "not modified", Headers: []string{"If-Modified-Since", "<after>"}},
		}},
	// A condition that does not hold.
	{Each: downloadCase{Rule: "F1", Want: fails(412, "precondition_failed")}, Cases: []downloadCase{
		{Name: "If-Match: another tag", Headers: []string{"If-Match", `"other"`},
			Want: answer{Headers: headers{"ETag": "", "Content-Disposition": ""}}},
		{Name: "a condition comes before the range",
			Headers: []string{"If-Match", `"other"`, "Range", "bytes=0-0"}},
		{Name: "not unmodified", Headers: []string{"If-Unmodified-Since", "<before>"}},
	}},
	// Paths that don't lead to a file.
	{Each: downloadCase{Rule: "F1", Want: fails(404, "not_found")}, Cases: []downloadCase{
		{Name: "another name", Path: "/files/<id>/b.txt"},
		{Name: "the name in another case", Path: "/files/<id>/A.txt"},
		{Name: "no name", Path: "/files/<id>/"},
		{Name: "no name and no slash", Path: "/files/<id>"},
		{Name: "the id in capitals", Path: "/files/<ID>/a.txt"},
		{Name: "an id that nothing has", Path: "/files/00000000-0000-4000-8000-000000000000/a.txt"},
		{Name: "the id in braces", Path: "/files/{<id>}/a.txt"},
		{Name: "the id without its dashes", Path: "/files/<digits>/a.txt"},
		{Name: "the id with one more digit", Path: "/files/<id>0/a.txt"},
		{Name: "a line break after the id", Path: "/files/<id>%0A/a.txt"},
		{Name: "an id that begins with a g",
			Path: "/files/g0000000-0000-4000-8000-000000000000/a.txt"},
		{Name: "an id that ends with a g", Path: "/files/00000000-0000-4000-8000-00000000000g/a.txt"},
		{Name: "a digit in place of a dash",
			Path: "/files/00000000-0000-40000800-000000000000/a.txt"},
		{Name: "a dash that stands a digit too early",
			Path: "/files/0000000-00000-4000-8000-000000000000/a.txt"},
		{Name: "a slash at the end", Path: "/files/<id>/a.txt/"},
		{Name: "an empty element", Path: "/files//<id>/a.txt"},
		{Name: "no id", Path: "/files/"},
		{Name: "a dot", Path: "/files/./a.txt"},
		{Name: "the folder of working names", Path: "/files/unfinished/unfinished"},
		{Name: "a working name", Path: "/files/unfinished/<id>"},
		{Name: "a working name, escaped", Path: "/files/unfinished%2f<id>/a.txt"},
		{Name: "an escaped dot", Path: "/files/%2e/a.txt"},
		{Name: "dot dot", Path: "/files/../a.txt"},
		{Name: "escaped dot dot", Path: "/files/%2e%2e/a.txt"},
		{Name: "escaped slashes", Path: "/files/..%2f..%2fetc%2fpasswd/x"},
		{Name: "an escaped absolute path", Path: "/files/%2fetc%2fpasswd/passwd"},
		{Name: "escaped backslashes", Path: "/files/..%5c..%5cx/x"},
		{Name: "NUL for an id", Path: "/files/%00/x"},
		{Name: "bad UTF-8 for an id", Path: "/files/%ff/x"},
		{Name: "NUL after the id", Path: "/files/<id>%00/a.txt"},
		{Name: "dot dot for a name", Path: "/files/<id>/.."},
		{Name: "escaped dot dot for a name", Path: "/files/<id>/%2e%2e"},
		{Name: "a path for a name", Path: "/files/<id>/..%2f<id>"},
		{Name: "NUL for a name", Path: "/files/<id>/%00"},
		{Name: "NUL after the name", Path: "/files/<id>/a.txt%00"},
		{Name: "bad UTF-8 for a name", Path: "/files/<id>/%ff"},
		{Name: "half a character", Path: "/files/<id>/%c3"},
		{Name: "a slash after the name", Path: "/files/<id>/a.txt%2f"},
		{Name: "a slash before the name", Path: "/files/<id>/%2fa.txt"},
		{Name: "a direction mark in the name", Path: "/files/<id>/a%E2%80%AE.txt"},
		{Name: "a name of 4,000 bytes", Path: "/files/<id>/" + repeat("n", 4000)},
		{Name: "two slashes at the start", Path: "//files/<id>/a.txt"},
		{Name: "two slashes in the middle", Path: "/files/<id>//a.txt"},
		{Name: "a way back", Path: "/files/x/../<id>/a.txt"},
	}},
}
