package api

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A group is a list of cases that have something in common. A table of cases is a list of groups.
//
// C is a struct. At least it has the fields Name, Rule, which is the id of a row of SECURITY.md,
// and Want, which is an answer.
type group[C any] struct {
	Each  C   // has the values of the fields that a case leaves out
	Cases []C // each with a name that no other case of the table has
}

// An answer is what the server must answer to a case. What is left out is not compared.
type answer struct {
	Status  int
	Code    string   // of an error
	Fields  []string // names in the problem's errors
	Detail  string   // sentence about the first of them
	Headers headers  // "": the header must be missing
	Body    values   // values by path, such as "user.permission"
	Items   []string // names of a page's items, in order
}

// Short names for the tables.
type (
	headers = map[string]string
	values  = map[string]any
)

// ok is a 200.
var ok = answer{Status: 200}

// fails returns an error with this status and code.
func fails(status int, code string) answer {
	return answer{Status: status, Code: code}
}

// invalid returns the error about these fields of an input.
func invalid(fields ...string) answer {
	return answer{Status: 400, Code: "invalid_request", Fields: fields}
}

// items returns a page with the items of these names, in order.
func items(names ...string) answer {
	return answer{Items: append([]string{}, names...)}
}

// word matches a word that fillIn replaces, such as <email>.
var word = regexp.MustCompile(`<[A-Za-z+-][\w.+ -]*>`)

// fillIn replaces words in a text by values that are known only when the test runs. words are pairs
// of a word and its value, such as "<email>", "ada@example.com". fillIn panics if the text has
// another word: a case with a misspelled word could pass for another reason.
func fillIn(text string, words ...string) string {
	text = strings.NewReplacer(words...).Replace(text)
	for _, word := range word.FindAllString(text, -1) {
		if !strings.HasPrefix(word, "<now") { // token.sign replaces <now>
			panic("no value for " + word + " in " + text)
		}
	}
	return text
}

// onTheWire sends a request such as "GET /hubs" unchanged, on a new connection. http.Client would
// correct or refuse some requests. onTheWire adds Host and, for a body, Content-Length. headers are
// names and values in turn.
func onTheWire(
	t testing.TB, s *hubstest.Server, request string, body []byte, headers ...string,
) *hubstest.Response {
	t.Helper()
	_, host, _ := strings.Cut(s.Base, "://")
	headers = append([]string{"Host", host}, headers...)
	if body != nil {
		headers = append(headers, "Content-Length", fmt.Sprint(len(body)))
	}
	conn := hubstest.Dial(t, s.Addr)
	defer conn.Close()
	return conn.Send(t, hubstest.Head(request, headers...)+string(body))
}

// The lengths of the contract that the tables go up to.
var (
	maxName        = maxLength("Hub", "name")
	maxDescription = maxLength("Hub", "description")
)

// allCases returns the cases of a table, complete with the values of their groups.
//
// It fails the test unless each case has a name of its own, a rule that is a row of SECURITY.md, and
// a status. A case must expect a code if it expects an error, and only then.
func allCases[C any](t testing.TB, table []group[C]) (all []C) {
	t.Helper()
	rows := hubstest.ReadFile(t, "SECURITY.md")
	seen := map[string]bool{"": true}
	for _, group := range table {
		for _, c := range group.Cases {
			complete(reflect.ValueOf(&c).Elem(), reflect.ValueOf(group.Each))
			all = append(all, c)
			name, rule := fieldOf[string](c, "Name"), fieldOf[string](c, "Rule")
			want := fieldOf[answer](c, "Want")
			isError := want.Status >= 400
			if seen[name] {
				t.Errorf("the name %q is empty or is used twice", name)
			}
			if !strings.Contains(rows, "\n| "+rule+" |") {
				t.Errorf("%s: SECURITY.md has no row %q", name, rule)
			}
			if want.Status == 0 || isError != (want.Code != "") {
				t.Errorf("%s: got status %d, code %q; want a status, and a code if it is an error",
					name, want.Status, want.Code)
			}
			seen[name] = true
		}
	}
	if len(all) == 0 {
		t.Fatal("setup: the table has no cases")
	}
	return all
}

// complete sets the fields of a case that have no value to those of its group.
func complete(c, group reflect.Value) {
	for i := range c.NumField() {
		field := c.Field(i)
		if field.Kind() == reflect.Struct {
			complete(field, group.Field(i))
		} else if field.IsZero() {
			field.Set(group.Field(i))
		}
	}
}

// fieldOf returns a field of a case. It panics if the case has no such field.
func fieldOf[V any](c any, name string) V {
	return reflect.ValueOf(c).FieldByName(name).Interface().(V)
}

// runCases runs the cases of a table, each as a subtest with the name of the case. If a subtest fails,
// its output has the line of the case, which must be in the file of the caller.
func runCases[C any](t *testing.T, table []group[C], test func(t *testing.T, c C)) {
	t.Helper()
	_, path, _, _ := runtime.Caller(1)
	for _, c := range allCases(t, table) {
		name := fieldOf[string](c, "Name")
		t.Run(name, func(t *testing.T) {
			t.Cleanup(func() {
				if t.Failed() {
					fmt.Fprintln(t.Output(), "the case:", lineOf(filepath.Base(path), name))
				}
			})
			test(t, c)
		})
	}
}

// lineOf returns the place of a case in a file of the package, such as "emails_test.go:12".
func lineOf(file, name string) string {
	text, _ := os.ReadFile(file)
	before, _, _ := strings.Cut(string(text), "{Name: "+strconv.Quote(name))
	return fmt.Sprintf("%s:%d", file, 1+strings.Count(before, "\n"))
}

// A textCase is a case of a file of testdata that is lines of text.
type textCase struct{ Name, Text string }

// readTextCases reads a file of testdata in which "== " and a name begin a case.
func readTextCases(t testing.TB, name string) []textCase {
	t.Helper()
	var cases []textCase
	for _, part := range strings.Split(hubstest.ReadFile(t, "testdata/"+name), "\n== ")[1:] {
		title, text, _ := strings.Cut(part, "\n")
		cases = append(cases, textCase{title, text})
	}
	if len(cases) == 0 {
		t.Fatalf("setup: %s has no cases", name)
	}
	return cases
}

// named returns the value that has a name which a case uses. It ends the test if there is none: a
// misspelled name would otherwise stand for a zero value.
func named[V any](t testing.TB, values map[string]V, name string) V {
	t.Helper()
	value, exists := values[name]
	if !exists {
		t.Fatalf("setup: got the name %q, want one that exists", name)
	}
	return value
}

// wantAnswer compares an answer of the server.
func wantAnswer(t testing.TB, r *hubstest.Response, want answer) {
	t.Helper()
	if want.Status >= 400 {
		r.WantProblem(t, want.Status, want.Code, want.Fields...)
	} else {
		r.Want(t, want.Status)
	}
	if r.Status != want.Status {
		return
	}
	wantHeaders(t, r, want.Headers)
	for path, value := range want.Body {
		r.WantField(t, path, value)
	}
	var body struct {
		Items  []struct{ Name string }
		Errors []struct{ Detail string }
	}
	json.Unmarshal(r.Body, &body) // Fault has reported a body that is not JSON
	if want.Detail != "" {
		wantEqual(t, "detail", body.Errors[0].Detail, want.Detail)
	}
	if want.Items != nil {
		names := []string{}
		for _, item := range body.Items {
			names = append(names, item.Name)
		}
		wantEqual(t, "items", names, want.Items)
	}
}

// wantHeaders checks that an answer has each header once, with the given value. A header whose value
// is "" must be missing.
func wantHeaders(t testing.TB, r *hubstest.Response, headers headers) {
	t.Helper()
	for name, value := range headers {
		var want []string
		if value != "" {
			want = []string{value}
		}
		if got := r.Header.Values(name); !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q, in the answer to %v", name, got, want, r)
		}
	}
}
