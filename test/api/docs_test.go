package api

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// files returns the files of the module that match one of the patterns, relative to its root.
func files(t *testing.T, patterns ...string) (names []string) {
	t.Helper()
	for _, pattern := range patterns {
		found, _ := fs.Glob(os.DirFS(hubstest.Root()), pattern) // the patterns are well formed
		names = append(names, found...)
	}
	return names
}

// functions returns the comment of each function of the product, by a name such as otp.go:newCode.
// A method has two names: otp.go:remove and otp.go:oneTimeCodes.remove.
func functions(t *testing.T) map[string]string {
	t.Helper()
	// The groups are the comment, the type of a method, and the name.
	declaration := regexp.MustCompile(
		`(?m)((?:^//.*\n)*)^func (?:\((?:\w+ )?\*?(\w+).*?\) )?(\w+)`)
	comments := map[string]string{}
	for _, file := range files(t, "*.go") {
		source := hubstest.ReadFile(t, file)
		for _, found := range declaration.FindAllStringSubmatch(source, -1) {
			comment, owner, name := found[1], found[2], found[3]
			comments[file+":"+name] += comment
			comments[file+":"+owner+"."+name] = comment
		}
	}
	return comments
}

var (
	// addedCode matches the code that docs/yours.md adds to a copy. This repository does not have
	// that code; test/guide tests it.
	addedCode = regexp.MustCompile("(?ms)^```(diff|new) .*?^```$")
	// auth.go:guess.limitKey
	namedFunction = regexp.MustCompile(`\b([a-z]+\.go:\w+(?:\.\w+)?)`)
	// ](docs/yours.md#a-field)
	namedLink = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
)

// A mention is a name that a document contains.
type mention struct{ document, name string }

// mentions returns what the group of a pattern matches in the documents. There must be a match.
func mentions(t *testing.T, pattern *regexp.Regexp) (all []mention) {
	t.Helper()
	for _, document := range files(t, "*.md", "docs/*.md", "testdata/*.md", "testdata/*/*.md") {
		content := addedCode.ReplaceAllString(hubstest.ReadFile(t, document), "")
		for _, found := range pattern.FindAllStringSubmatch(content, -1) {
			all = append(all, mention{document, found[1]})
		}
	}
	if len(all) == 0 {
		t.Errorf("got no match of %s in the documents, want some", pattern)
	}
	return all
}

// Every function and linked file that a document names exists.
func TestDocumentsNameWhatIsThere(t *testing.T) {
	t.Parallel()
	declared := functions(t)
	for _, m := range mentions(t, namedFunction) {
		_, exists := declared[m.name]
		if !exists {
			t.Errorf("%s names the function %s, which does not exist", m.document, m.name)
		}
	}

	for _, m := range mentions(t, namedLink) {
		folder := filepath.Join(hubstest.Root(), filepath.Dir(m.document))
		_, err := os.Stat(filepath.Join(folder, m.name))
		if err != nil {
			t.Errorf("%s links to %s: %v", m.document, m.name, err)
		}
	}
}

// securityRow matches a row of SECURITY.md's table. Its groups are the id and the column "where".
var securityRow = regexp.MustCompile(`(?m)^\| ([A-Z][0-9]+) \|.*\| (.*) \|.*\|$`)

// securityRows returns the places that each row of SECURITY.md names, by the id of the row. A place
// is a file or a function, such as otp.go:remove. No two rows may have the same id.
func securityRows(t *testing.T) map[string][]string {
	t.Helper()
	rows := map[string][]string{}
	for _, row := range securityRow.FindAllStringSubmatch(hubstest.ReadFile(t, "SECURITY.md"), -1) {
		id, where := row[1], row[2]
		if rows[id] != nil {
			t.Errorf("SECURITY.md has two rows %s", id)
		}
		rows[id] = strings.Split(strings.Trim(where, "`"), "`, `")
	}
	return rows
}

// The comment of a function names the rows of SECURITY.md that name the function, as (O3) or
// (O3; …), and each row that it names exists. If a row names only a file, the file exists.
func TestRowsAndCommentsAgree(t *testing.T) {
	t.Parallel()
	rows := securityRows(t)
	id := regexp.MustCompile(`\(([A-Z][0-9]+)[;)]`)
	isNamed := map[string]bool{} // "auth.go:checkSession T5"
	for function, comment := range functions(t) {
		for _, found := range id.FindAllStringSubmatch(comment, -1) {
			isNamed[function+" "+found[1]] = true
			if rows[found[1]] == nil {
				t.Errorf("comment of %s: got %s, want a row of SECURITY.md", function, found[0])
			}
		}
	}
	for row, places := range rows {
		for _, place := range places {
			if !strings.Contains(place, ":") {
				hubstest.ReadFile(t, place) // fails if there is no such file
			} else if !isNamed[place+" "+row] {
				t.Errorf("SECURITY.md, row %s: no comment of %s has (%s)", row, place, row)
			}
		}
	}
}

// README.md has the route table that the command routes prints.
func TestRouteTableInReadme(t *testing.T) {
	t.Parallel()
	got := section(t, "README.md", "routes")
	_, table := run(t, nil, "routes")
	want := "```\n" + table + "```\n"
	wantText(t, "the table in README.md, compared with go run . routes", got, want)
}

// section returns the part of a document that stands between two marks, such as <!-- go --> and
// <!-- /go -->.
func section(t *testing.T, document, name string) string {
	t.Helper()
	pattern := regexp.MustCompile("(?s)<!-- " + name + " -->\n(.*)<!-- /" + name + " -->\n")
	found := pattern.FindStringSubmatch(hubstest.ReadFile(t, document))
	if found == nil {
		t.Fatalf("setup: %s: got no match of %s, want one", document, pattern)
	}
	return found[1]
}

// The table of error codes in docs/clients.md has the codes of the contract, in the same order.
func TestErrorCodesInDocuments(t *testing.T) {
	t.Parallel()
	want := fmt.Sprint(hubstest.Contract[[]any](t,
		"components", "schemas", "Problem", "properties", "code", "enum"))
	got := fmt.Sprint(hubstest.Matches(t, "docs/clients.md", "(?m)^\\| `(\\w+)` \\| [0-9]{3} "))
	wantEqual(t, "error codes in docs/clients.md", got, want)
}

// example returns the code of an example in docs/clients.md. The marks around it have the name of
// its language.
func example(t *testing.T, language string) string {
	t.Helper()
	_, code, _ := strings.Cut(section(t, "docs/clients.md", language), "\n") // after the line ```go
	return strings.TrimSuffix(code, "```\n")
}

// exampleStart and exampleEnd make the Go example a program. Its arguments are the address of the
// server and a code. It fails unless the session is read with a 200.
const (
	exampleStart = `package main

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
`
	exampleEnd = `
	if err == nil && response.StatusCode != 200 {
		panic(response.Status)
	}
	return err
}
`
)

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

	program := exampleStart + example(t, "go") + exampleEnd
	hubstest.Must(t, os.WriteFile(dir+"/main.go", []byte(program), 0o600))
	s.Client(t).AskCode(email) // the Go example begins with a code
	shell(t, dir, "go run main.go $1 $2", s.Base, s.Code(t, email))
}
