package api

import (
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// readFiles returns the text of all files of the module that match one of the patterns.
func readFiles(t *testing.T, patterns ...string) string {
	t.Helper()
	var all strings.Builder
	for _, pattern := range patterns {
		names, _ := fs.Glob(os.DirFS(hubstest.Root()), pattern) // the patterns are well formed
		for _, name := range names {
			all.WriteString(hubstest.ReadFile(t, name))
		}
	}
	return all.String()
}

// Every function that a document names exists.
func TestDocumentsNameFunctions(t *testing.T) {
	t.Parallel()
	place := regexp.MustCompile(`\b[a-z]+\.go:\w+`)
	named := place.FindAllString(readFiles(t, "*.md", "docs/*.md"), -1)
	if len(named) == 0 {
		t.Error("got no function in the documents, want some")
	}
	for _, place := range named {
		file, name, _ := strings.Cut(place, ":")
		declared := hubstest.Matches(t, file, `(?m)^func (?:\(.*?\) )?(\w+)`)
		if !slices.Contains(declared, name) {
			t.Errorf("a document names %s, which does not exist", place)
		}
	}
}

// The diagrams of README.md have no semicolon, which Mermaid takes for the end of a line: GitHub then
// shows an error in place of the diagram. In a diagram of states, a label has no colon either.
func TestDiagramsAreShown(t *testing.T) {
	t.Parallel()
	diagrams := hubstest.Matches(t, "README.md", "(?s)\n```mermaid\n(.*?)```")
	if len(diagrams) == 0 {
		t.Error("README.md: got no diagram, want some")
	}
	for _, diagram := range diagrams {
		areStates := strings.HasPrefix(diagram, "stateDiagram")
		for line := range strings.SplitSeq(diagram, "\n") {
			if strings.Contains(line, ";") || areStates && strings.Count(line, ":") > 1 {
				t.Errorf("README.md: Mermaid can't read the line %q", line)
			}
		}
	}
}

// README.md says how many lines the server has, without comments and blank lines, in hundreds.
func TestLinesAreCounted(t *testing.T) {
	t.Parallel()
	names, _ := fs.Glob(os.DirFS(hubstest.Root()), "*.go") // the pattern is well formed
	code := regexp.MustCompile(`(?m)^\s*[^\s/].*$|^\s*/[^/].*$`)
	lines := 0
	for _, name := range names {
		if !strings.HasSuffix(name, "_test.go") {
			lines += len(code.FindAllString(hubstest.ReadFile(t, name), -1))
		}
	}
	said := hubstest.Matches(t, "README.md", `about ([0-9],[0-9]+)\s+lines`)
	n, err := strconv.Atoi(strings.Replace(strings.Join(said, " "), ",", "", 1))
	if err != nil || n < lines-100 || n > lines+100 {
		t.Errorf("README.md: got about %q lines, want %d", said, lines)
	}
}

// Each row of SECURITY.md has an id of its own and a test that exists. Each id in a comment of the
// code, such as (O3), is that of a row.
func TestRowsAndCommentsAgree(t *testing.T) {
	t.Parallel()
	tests := readFiles(t, "*_test.go", "test/*/*_test.go", "tools/*/*_test.go")
	testName := regexp.MustCompile("`(Test\\w+)`")
	ids := hubstest.Matches(t, "SECURITY.md", `(?m)^\| ([A-Z][0-9]+) \|`)
	rows := hubstest.Matches(t, "SECURITY.md", `(?m)^(\| [A-Z][0-9]+ \|.*\|)$`)
	for i, row := range rows {
		if slices.Contains(ids[:i], ids[i]) {
			t.Errorf("SECURITY.md has two rows %s", ids[i])
		}
		named := testName.FindAllStringSubmatch(row, -1)
		if named == nil {
			t.Errorf("SECURITY.md: the row %s names no test", ids[i])
		}
		for _, test := range named {
			if !strings.Contains(tests, "\nfunc "+test[1]+"(") {
				t.Errorf("SECURITY.md: the row %s names %s, which does not exist", ids[i], test[1])
			}
		}
	}

	comment := regexp.MustCompile(`(?m)(?://|--) .*$`)
	id := regexp.MustCompile(`\(([A-Z][0-9]+)\)`)
	for _, text := range comment.FindAllString(readFiles(t, "*.go", "schema.sql"), -1) {
		for _, found := range id.FindAllStringSubmatch(text, -1) {
			if !slices.Contains(ids, found[1]) {
				t.Errorf("%s: got the id %s, want that of a row of SECURITY.md", text, found[1])
			}
		}
	}
}

// The table of error codes in docs/clients.md has the codes of the contract, in the same order.
func TestErrorCodesInDocuments(t *testing.T) {
	t.Parallel()
	want := fmt.Sprint(hubstest.Contract[[]any](t,
		"components", "schemas", "Problem", "properties", "code", "enum"))
	got := fmt.Sprint(hubstest.Matches(t, "docs/clients.md", "(?m)^\\| `(\\w+)` \\| [0-9]{3} "))
	wantEqual(t, "error codes in docs/clients.md", got, want)
}

// example returns the code of an example in docs/clients.md. The marks around it, such as
// <!-- go --> and <!-- /go -->, have the name of its language.
func example(t *testing.T, language string) string {
	t.Helper()
	pattern := fmt.Sprintf("(?s)<!-- %s -->\n```\\w+\n(.*)```\n<!-- /%[1]s -->", language)
	return strings.Join(hubstest.Matches(t, "docs/clients.md", pattern), "")
}

// program makes a program of the Go example. It fails unless the session is read with a 200.
const program = `package main

import (
	"net/http"
	"net/http/cookiejar"
	"os"
	"strings"
)

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		panic(err)
	}
}

func run(api, code string) error {
	EXAMPLE
	if err == nil && response.StatusCode != 200 {
		panic(response.Status)
	}
	return err
}
`

// The curl and Go examples in docs/clients.md sign a user in and read the session.
func TestClientExamples(t *testing.T) {
	t.Parallel()
	hubstest.Need(t, "curl", "curl")
	s := hubstest.Start(t)
	const email = "member@hubs.example"
	s.User(t, "add", email)
	dir := t.TempDir()
	// The first line asks for a code. The others need it.
	ask, present, _ := strings.Cut(example(t, "curl"), "\n")
	shell(t, dir, "API=$1\n"+ask, s.Base)
	shell(t, dir, "API=$1 CODE=$2\n"+present, s.Base, s.Code(t, email))

	source := strings.Replace(program, "EXAMPLE", example(t, "go"), 1)
	hubstest.Must(t, os.WriteFile(dir+"/main.go", []byte(source), 0o600))
	s.Client(t).AskCode(email) // the Go example begins with a code
	shell(t, dir, "go run main.go $1 $2", s.Base, s.Code(t, email))
}
