package hubstest

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
)

// A Group is a list of cases that have something in common. A table of cases is a list of groups.
//
// C is a struct. At least it has the fields Name, Rule, which is the id of a row of SECURITY.md,
// and Want, which is an Expected.
type Group[C any] struct {
	Each  C   // has the values of the fields that a case leaves out
	Cases []C // each with a name that no other case of the table has
}

// Expected describes the answer that a case must get. What is left out is not compared.
type Expected struct {
	Status  int
	Code    string            // of an error
	Fields  []string          // names in the problem's errors
	Detail  string            // sentence about the first of them
	Headers map[string]string // "": the header must be missing
	Body    map[string]any    // values by path, such as "user.permission"
	Items   []string          // names of a page's items, in order
}

// Cases returns the cases of a table, complete with the values of their groups.
//
// It fails the test unless each case has a name of its own, a rule that is a row of SECURITY.md, and
// a status. A case must expect a code if it expects an error, and only then.
func Cases[C any](t testing.TB, table []Group[C]) (all []C) {
	t.Helper()
	rows := ReadFile(t, "SECURITY.md")
	seen := map[string]bool{"": true}
	for _, group := range table {
		for _, c := range group.Cases {
			complete(reflect.ValueOf(&c).Elem(), reflect.ValueOf(group.Each))
			all = append(all, c)
			name, rule := fieldOf[string](c, "Name"), fieldOf[string](c, "Rule")
			want := fieldOf[Expected](c, "Want")
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

// RunCases runs the cases of a table, each as a subtest with the name of the case. If a subtest fails,
// its output has the line of the case, which must be in the file of the caller.
func RunCases[C any](t *testing.T, table []Group[C], test func(t *testing.T, c C)) {
	t.Helper()
	_, path, _, _ := runtime.Caller(1)
	for _, c := range Cases(t, table) {
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

// A TextCase is a case of a file of testdata that is lines of text.
type TextCase struct{ Name, Text string }

// ReadTextCases reads a file of testdata in which "== " and a name begin a case.
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
// ends the test, so that no test overlooks one.
func Decode(t testing.TB, name, text string, value any) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(value); err != nil {
		t.Fatalf("setup: %s: %v", name, err)
	}
}

// word matches a word that FillIn replaces, such as <email>.
var word = regexp.MustCompile(`<[A-Za-z+-][\w.+ -]*>`)

// FillIn replaces words in a text by values that are known only when the test runs. words are pairs
// of a word and its value, such as "<email>", "ada@example.com". FillIn panics if the text has
// another word: a case with a misspelled word could pass for another reason.
func FillIn(text string, words ...string) string {
	text = strings.NewReplacer(words...).Replace(text)
	for _, word := range word.FindAllString(text, -1) {
		if !strings.HasPrefix(word, "<now") { // Token.Sign replaces <now>
			panic("no value for " + word + " in " + text)
		}
	}
	return text
}

// contractLimit matches a word that FillInLimits replaces.
var contractLimit = regexp.MustCompile(`<maxLength (\w+)\.(\w+)( \+ 1)?>`)

// FillInLimits replaces <maxLength Hub.name> by the maxLength of the property name in the
// contract's schema Hub, and <maxLength Hub.name + 1> by one more.
func FillInLimits(text string) string {
	return contractLimit.ReplaceAllStringFunc(text, func(word string) string {
		match := contractLimit.FindStringSubmatch(word)
		limit := MaxLength(match[1], match[2])
		if match[3] != "" {
			limit++
		}
		return fmt.Sprint(limit)
	})
}

// MaxLength returns the maxLength of a property of a schema of the contract, such as Hub and name.
// It panics if there is none.
func MaxLength(schema, property string) int {
	limit := within(document(), "components", "schemas", schema, "properties", property, "maxLength")
	return int(limit.(float64))
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
// value is "" must be missing.
func (r *Response) WantHeaders(t testing.TB, headers map[string]string) {
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
