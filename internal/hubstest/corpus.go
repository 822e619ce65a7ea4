package hubstest

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The corpus is the cases of testdata/*.json, which any implementation could run.
// testdata/README.md says how to read the files.

// A CorpusFile is one of them. C is what its cases have: a CorpusCase and more.
type CorpusFile[C any] struct {
	About            []string                     // for people
	Settings         map[string]map[string]string // by server: its environment variables
	Keys             map[string]string            // tokens.json
	Hubs             []map[string]string          // queries.json
	CORSHeaders      map[string]*string           // origins.json
	PreflightHeaders map[string]*string           // origins.json
	Cases            []C
}

// A CorpusCase is what every case has.
type CorpusCase struct {
	Name   string
	Rule   string
	Expect Expected
}

func (c CorpusCase) common() CorpusCase { return c }

// Expected is what a case says about an answer. What it leaves out is not compared.
type Expected struct {
	Status  int
	Code    string             // of an error
	Fields  []string           // that the error names
	Headers map[string]*string // nil: not there
	Body    map[string]any     // by path, "user.permission"
	Items   []string           // the names of a page's items
}

// ReadCorpus reads a file of testdata, by Decode.
func ReadCorpus[C interface{ common() CorpusCase }](t testing.TB, name string) CorpusFile[C] {
	t.Helper()
	var file CorpusFile[C]
	Decode(t, name, ReadFile(t, "testdata/"+name), &file)
	if len(file.Cases) == 0 {
		t.Fatalf("%s has no cases", name)
	}
	rows := ReadFile(t, "SECURITY.md")
	seen := map[string]bool{"": true}
	for _, c := range file.Cases {
		c := c.common()
		isError := c.Expect.Status >= 400
		if seen[c.Name] {
			t.Errorf("%s: the name %q is missing or stands twice", name, c.Name)
		}
		if !strings.Contains(rows, "\n| "+c.Rule+" |") {
			t.Errorf("%s: %s: SECURITY.md has no row %q", name, c.Name, c.Rule)
		}
		if c.Expect.Status == 0 || isError != (c.Expect.Code != "") {
			t.Errorf("%s: %s: expects %+v", name, c.Name, c.Expect)
		}
		seen[c.Name] = true
	}
	return file
}

// ReadCases reads the cases of a file of the module, by Decode, that have no rule and no
// expected answer. words are filled in first (FillIn).
func ReadCases[C any](t testing.TB, name string, words ...string) []C {
	t.Helper()
	var file struct {
		About []string // for people
		Cases []C
	}
	Decode(t, name, FillIn(ReadFile(t, name), words...), &file)
	if len(file.Cases) == 0 {
		t.Fatalf("%s has no cases", name)
	}
	return file.Cases
}

// Decode decodes the text of a JSON file into value. A member that value does not have fails
// the test: else a misspelled member would make its case pass.
func Decode(t testing.TB, name, text string, value any) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(value); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

var corpusRepeat = regexp.MustCompile(`<(.)\*([0-9]+)>`)

// FillIn replaces <x*3> by xxx, and other words in angle brackets by their values: words are
// pairs such as "<email>", "ada@example.com".
func FillIn(text string, words ...string) string {
	text = corpusRepeat.ReplaceAllStringFunc(text, func(s string) string {
		part := corpusRepeat.FindStringSubmatch(s)
		n, _ := strconv.Atoi(part[2])
		return strings.Repeat(part[1], n)
	})
	return strings.NewReplacer(words...).Replace(text)
}

// Check compares an answer with what is expected of it.
func (want Expected) Check(t testing.TB, r *Response) {
	t.Helper()
	r.Want(t, want.Status)
	if want.Status >= 400 {
		WantProblem(t, r, want.Status, want.Code)
	} else if err := r.Fault(); err != nil {
		t.Error(err)
	}
	WantHeaders(t, r, want.Headers)
	for path, value := range want.Body {
		if got := r.Field(t, strings.Split(path, ".")...); got != value {
			t.Errorf("%s: got %v, want %v", path, got, value)
		}
	}
	got := slices.Compact(r.problem().fields())
	if want.Fields != nil && !slices.Equal(got, slices.Sorted(slices.Values(want.Fields))) {
		t.Errorf("got the fields %q, want %q, in %v", got, want.Fields, r)
	}
	if want.Items == nil {
		return
	}
	var body struct{ Items []struct{ Name string } }
	json.Unmarshal(r.Body, &body) // what is missing then is a fault
	isNamed := func(item struct{ Name string }, name string) bool { return item.Name == name }
	if !slices.EqualFunc(body.Items, want.Items, isNamed) {
		t.Errorf("got %v, want the items %q", r, want.Items)
	}
}

// WantHeaders checks that each header stands there once with its value, or, if that is nil,
// that it is missing.
func WantHeaders(t testing.TB, r *Response, headers map[string]*string) {
	t.Helper()
	for name, value := range headers {
		var want []string
		if value != nil {
			want = []string{*value}
		}
		if got := r.Header.Values(name); !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q, in %v", name, got, want, r)
		}
	}
}

// Wire sends a request byte for byte as it is written: http.Client would mend or refuse some.
// headers are names and values in turn.
func (s *Server) Wire(
	t testing.TB, method, target string, body []byte, headers ...string,
) *Response {
	t.Helper()
	var request strings.Builder
	fmt.Fprintf(&request, "%s %s HTTP/1.1\r\nHost: %s\r\n", method, target, s.url().Host)
	for pair := range slices.Chunk(headers, 2) {
		fmt.Fprintf(&request, "%s: %s\r\n", pair[0], pair[1])
	}
	if body != nil {
		noteEmail(body)
		fmt.Fprintf(&request, "Content-Length: %d\r\n", len(body))
	}
	fmt.Fprintf(&request, "\r\n%s", body)
	conn := Dial(t, s.Addr)
	defer conn.Close()
	io.WriteString(conn, request.String())
	resp, err := http.ReadResponse(conn.In, &http.Request{Method: method})
	answer := &Response{Method: method, Path: target}
	if err == nil {
		err = answer.read(resp)
	}
	if err != nil {
		t.Fatalf("%s %s: %v", method, target, err)
	}
	return answer
}

// NewIP returns a client address that nobody else has, so that the rate limits of one case
// don't meet those of the next.
func NewIP() string {
	n := serial.Add(1)
	return fmt.Sprintf("2001:db8:%x:%x::1", n>>16, n&0xffff)
}

// Elsewhere returns the client at another address, with the same cookies.
func (c *Client) Elsewhere() *Client {
	moved := *c
	moved.IP = NewIP()
	return &moved
}

// StartEnvironments starts a server for each of the settings, by their names. A name is the
// server's environment, unless its settings say another.
func StartEnvironments(
	t testing.TB, settings map[string]map[string]string, common map[string]string,
) map[string]*Server {
	mail := NewMailServer(t, MailOptions{})
	servers := map[string]*Server{}
	for name, values := range settings {
		env := map[string]string{"APP_ENV": name}
		maps.Copy(env, values)
		if env["APP_ENV"] != "local" {
			maps.Copy(env, mail.Env())
		}
		servers[name] = Start(t, common, env)
	}
	return servers
}
