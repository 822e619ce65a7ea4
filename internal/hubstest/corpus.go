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

// The corpus is a set of cases in testdata. The tests of any other implementation of the server
// could use it too. testdata/README.md describes the files and their members.

// A CorpusFile is one file of the corpus. C is the type of its cases, a struct that embeds
// CorpusCase.
type CorpusFile[C any] struct {
	About            []string                     // for readers of the file
	Settings         map[string]map[string]string // environment variables, by name of the server
	Keys             map[string]string            // tokens.json
	Hubs             []map[string]string          // queries.json
	CORSHeaders      map[string]*string           // origins.json
	PreflightHeaders map[string]*string           // origins.json
	Groups           []corpusGroup
	Cases            []C `json:"-"` // of all groups
}

// A corpusGroup is a list of cases that have members in common.
type corpusGroup struct {
	About string
	Each  json.RawMessage // members of every case; a case may override them
	Cases []json.RawMessage
}

// A CorpusCase contains the members that every case has.
type CorpusCase struct {
	Name   string
	Rule   string // row of SECURITY.md
	Expect Expected
}

// common gives ReadCorpus access to these members, whatever the type of the case.
func (c CorpusCase) common() CorpusCase { return c }

// Expected describes the answer that a case must get. Members that are left out are not compared.
type Expected struct {
	Status  int
	Code    string             // of an error
	Fields  []string           // names in the problem's errors
	Detail  string             // sentence about the first of them
	Headers map[string]*string // nil: the header must be missing
	Body    map[string]any     // values by path, such as "user.permission"
	Items   []string           // names of a page's items, in order
}

// ReadCorpus reads a file of the corpus and fills in the limits of the contract (FillInLimits).
//
// It fails the test unless the file has cases, and each case has a name that no other case has, a
// rule that is a row of SECURITY.md, and a status. A case must expect a code if it expects an
// error, and only then.
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
		t.Fatalf("setup: %s has no cases", name)
	}
	rows := ReadFile(t, "SECURITY.md")
	seen := map[string]bool{"": true}
	for _, c := range file.Cases {
		c := c.common()
		isError := c.Expect.Status >= 400
		if seen[c.Name] {
			t.Errorf("%s: the name %q is empty or is used twice", name, c.Name)
		}
		if !strings.Contains(rows, "\n| "+c.Rule+" |") {
			t.Errorf("%s: %s: SECURITY.md has no row %q", name, c.Name, c.Rule)
		}
		if c.Expect.Status == 0 || isError != (c.Expect.Code != "") {
			t.Errorf("%s: %s: got status %d, code %q; want a status, and a code if it is an error",
				name, c.Name, c.Expect.Status, c.Expect.Code)
		}
		seen[c.Name] = true
	}
	return file
}

// ReadCases reads a file of the module whose cases have neither a rule nor an expected answer. It
// first replaces the words in the file's text (FillIn).
func ReadCases[C any](t testing.TB, name string, words ...string) []C {
	t.Helper()
	var file struct {
		About []string // for readers of the file
		Cases []C
	}
	Decode(t, name, FillIn(ReadFile(t, name), words...), &file)
	if len(file.Cases) == 0 {
		t.Fatalf("setup: %s has no cases", name)
	}
	return file.Cases
}

// A TextCase is a case of a file of the corpus that is not JSON, but lines of text.
type TextCase struct{ Name, Text string }

// ReadTextCases reads a file of the corpus in which "== " and a name begin a case.
func ReadTextCases(t testing.TB, name string) []TextCase {
	t.Helper()
	var cases []TextCase
	for _, part := range strings.Split(ReadFile(t, "testdata/"+name), "\n== ")[1:] {
		title, text, _ := strings.Cut(part, "\n")
		cases = append(cases, TextCase{title, text})
	}
	if len(cases) == 0 {
		t.Fatalf("setup: %s has no cases", name)
	}
	return cases
}

// Named returns the value that has a name which a case uses. It ends the test if there is none: a
// misspelled name would otherwise stand for a zero value.
func Named[V any](t testing.TB, values map[string]V, name string) V {
	t.Helper()
	value, exists := values[name]
	if !exists {
		t.Fatalf("setup: got the name %q, want one that exists", name)
	}
	return value
}

// Decode decodes a JSON text into value. name is for messages. A member that value does not have
// ends the test. Otherwise a misspelled member would be ignored, and its case would pass.
func Decode(t testing.TB, name, text string, value any) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(value); err != nil {
		t.Fatalf("setup: %s: %v", name, err)
	}
}

// The words that FillIn replaces in every text.
var (
	corpusByte   = regexp.MustCompile(`\\x[0-9a-f]{2}`)          // \xff
	corpusRepeat = regexp.MustCompile(`<(.|[^<>*]+)\*([0-9]+)>`) // <x*3>
	corpusWord   = regexp.MustCompile(`<[A-Za-z+-][\w.+ -]*>`)   // <email>
)

// FillIn replaces \xff by the byte 0xff, <x*3> by xxx, and words by their values. words are pairs
// of a word and its value, such as "<email>", "ada@example.com". FillIn panics if the text has
// another word: a case with a misspelled word could pass for another reason.
func FillIn(text string, words ...string) string {
	text = corpusByte.ReplaceAllStringFunc(text, func(escape string) string {
		value, _ := strconv.ParseUint(escape[2:], 16, 8)
		return string([]byte{byte(value)})
	})
	text = corpusRepeat.ReplaceAllStringFunc(text, func(s string) string {
		match := corpusRepeat.FindStringSubmatch(s)
		n, _ := strconv.Atoi(match[2])
		return strings.Repeat(match[1], n)
	})
	text = strings.NewReplacer(words...).Replace(text)
	for _, word := range corpusWord.FindAllString(text, -1) {
		if !strings.HasPrefix(word, "<now") { // Token.Sign replaces <now>
			panic("no value for " + word + " in " + text)
		}
	}
	return text
}

// contractLimit matches a word that FillInLimits replaces.
var contractLimit = regexp.MustCompile(`<(maxLength|maximum) (\w+)\.(\w+)( \+ 1)?>`)

// FillInLimits replaces <maxLength Hub.name> by the maxLength of the property name in the
// contract's schema Hub, and <maxLength Hub.name + 1> by one more. The limit of a number is its
// maximum.
func FillInLimits(t testing.TB, text string) string {
	return contractLimit.ReplaceAllStringFunc(text, func(word string) string {
		match := contractLimit.FindStringSubmatch(word)
		limit := Contract[float64](t,
			"components", "schemas", match[2], "properties", match[3], match[1])
		if match[4] != "" {
			limit++
		}
		return fmt.Sprint(limit)
	})
}

// WantAnswer compares an answer with the expected one.
func (r *Response) WantAnswer(t testing.TB, want Expected) {
	t.Helper()
	if want.Status >= 400 {
		r.WantProblem(t, want.Status, want.Code, want.Fields...)
	} else {
		r.Want(t, want.Status)
	}
	if r.Status != want.Status {
		return
	}
	if want.Detail != "" {
		WantEqual(t, "detail", r.problem().Errors[0].Detail, want.Detail)
	}
	r.WantHeaders(t, want.Headers)
	for path, value := range want.Body {
		r.WantField(t, path, value)
	}
	if want.Items == nil {
		return
	}
	var body struct{ Items []struct{ Name string } }
	json.Unmarshal(r.Body, &body) // Fault has reported a body that is not JSON
	isNamed := func(item struct{ Name string }, name string) bool { return item.Name == name }
	if !slices.EqualFunc(body.Items, want.Items, isNamed) {
		t.Errorf("got the items %q, want %q, in the answer to %v", body.Items, want.Items, r)
	}
}

// WantHeaders checks that the answer has each header once, with the given value. A header whose
// value is nil must be missing.
func (r *Response) WantHeaders(t testing.TB, headers map[string]*string) {
	t.Helper()
	for name, value := range headers {
		var want []string
		if value != nil {
			want = []string{*value}
		}
		if got := r.Header.Values(name); !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q, in the answer to %v", name, got, want, r)
		}
	}
}
