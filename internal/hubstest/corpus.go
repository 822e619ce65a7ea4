package hubstest

import (
	"encoding/json"
	"fmt"
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
	Groups           []corpusGroup
	Cases            []C `json:"-"` // of all groups
}

// A corpusGroup is cases that have something in common.
type corpusGroup struct {
	About string
	Each  json.RawMessage // what a case has that does not say otherwise
	Cases []json.RawMessage
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

// ReadCorpus reads a file of testdata, by Decode, with the limits of the contract filled in.
func ReadCorpus[C interface{ common() CorpusCase }](t testing.TB, name string) CorpusFile[C] {
	t.Helper()
	var file CorpusFile[C]
	Decode(t, name, FillInLimits(t, ReadFile(t, "testdata/"+name)), &file)
	for _, group := range file.Groups {
		for _, text := range group.Cases {
			var c C
			Decode(t, name, string(group.Each), &c)
			Decode(t, name, string(text), &c)
			file.Cases = append(file.Cases, c)
		}
	}
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

var (
	corpusByte   = regexp.MustCompile(`\\x[0-9a-f]{2}`)
	corpusRepeat = regexp.MustCompile(`<(.|[^<>*]+)\*([0-9]+)>`)
)

// FillIn replaces \xff by that byte, <x*3> by xxx, and other words in angle brackets by their
// values: words are pairs such as "<email>", "ada@example.com".
func FillIn(text string, words ...string) string {
	text = corpusByte.ReplaceAllStringFunc(text, func(escape string) string {
		value, _ := strconv.ParseUint(escape[2:], 16, 8)
		return string([]byte{byte(value)})
	})
	text = corpusRepeat.ReplaceAllStringFunc(text, func(s string) string {
		part := corpusRepeat.FindStringSubmatch(s)
		n, _ := strconv.Atoi(part[2])
		return strings.Repeat(part[1], n)
	})
	return strings.NewReplacer(words...).Replace(text)
}

var contractLimit = regexp.MustCompile(`<maxLength (\w+)\.(\w+)( \+ 1)?>`)

// FillInLimits replaces <maxLength Hub.name> by the maxLength of that property of that schema of
// the contract, and <maxLength Hub.name + 1> by one more.
func FillInLimits(t testing.TB, text string) string {
	return contractLimit.ReplaceAllStringFunc(text, func(word string) string {
		of := contractLimit.FindStringSubmatch(word)
		limit := Contract[float64](t,
			"components", "schemas", of[1], "properties", of[2], "maxLength")
		if of[3] != "" {
			limit++
		}
		return fmt.Sprint(limit)
	})
}

// Check compares an answer with what is expected of it.
func (want Expected) Check(t testing.TB, r *Response) {
	t.Helper()
	r.Want(t, want.Status)
	if want.Status >= 400 {
		WantProblem(t, r, want.Status, want.Code, want.Fields...)
	} else if err := r.Fault(); err != nil {
		t.Error(err)
	}
	WantHeaders(t, r, want.Headers)
	for path, value := range want.Body {
		if got := r.Field(t, strings.Split(path, ".")...); got != value {
			t.Errorf("%s: got %v, want %v", path, got, value)
		}
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
