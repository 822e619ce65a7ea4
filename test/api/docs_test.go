package api

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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

// declares reports whether a file of the module declares a function or method. The name limitKey
// stands for a function, or for a method of any type; guess.limitKey stands for the method of that
// type.
func declares(t *testing.T, file, function string) bool {
	t.Helper()
	owner, method, isMethod := strings.Cut(function, ".")
	// func newLimiter(, func endpoint[ or func (g guess) limitKey(
	declaration := `(?m)^func (\([^)]*\) )?` + function + `[\[(]`
	if isMethod { // func (g guess) limitKey(
		declaration = `(?m)^func \((\w+ )?\*?` + owner + `(\[.*\])?\) ` + method + `\(`
	}
	return regexp.MustCompile(declaration).MatchString(hubstest.ReadFile(t, file))
}

var (
	// addedCode matches the code that docs/yours.md adds to a copy. This repository does not have
	// that code; test/guide tests it.
	addedCode = regexp.MustCompile("(?ms)^```(diff|new) .*?^```$")
	// auth.go:guess.limitKey
	namedFunction = regexp.MustCompile(`\b([a-z]+\.go):(\w+(?:\.\w+)?)`)
	// ](docs/yours.md#a-field)
	namedLink = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	// ./dev.sh prove
	namedScript = regexp.MustCompile(`\./dev\.sh ([a-z]+)`)
	// TestCodeWorksOnce
	namedTest = regexp.MustCompile(`\b((?:Test|Fuzz|Benchmark)[A-Z]\w+)`)
)

// Every function, linked file, command of dev.sh and test that a document names exists.
func TestDocumentsNameWhatIsThere(t *testing.T) {
	t.Parallel()
	script := hubstest.ReadFile(t, "dev.sh")
	var tests strings.Builder
	for _, name := range files(t, "*_test.go", "test/*/*_test.go", "internal/*/*_test.go") {
		tests.WriteString(hubstest.ReadFile(t, name))
	}
	for pattern, exists := range map[*regexp.Regexp]func(document string, named []string) bool{
		namedFunction: func(_ string, named []string) bool {
			return declares(t, named[1], named[2])
		},
		namedLink: func(document string, named []string) bool {
			_, err := os.Stat(filepath.Join(hubstest.Root(), filepath.Dir(document), named[1]))
			return err == nil
		},
		namedScript: func(_ string, named []string) bool {
			command := `(?m)^[a-z |-]*\b` + named[1] + `\b[a-z |-]*\)`
			return regexp.MustCompile(command).MatchString(script)
		},
		namedTest: func(_ string, named []string) bool {
			return strings.Contains(tests.String(), "\nfunc "+named[1]+"(")
		},
	} {
		found := 0
		for _, document := range files(t, "*.md", "docs/*.md", "testdata/*.md", "testdata/*/*.md") {
			content := addedCode.ReplaceAllString(hubstest.ReadFile(t, document), "")
			for _, named := range pattern.FindAllStringSubmatch(content, -1) {
				found++
				if !exists(document, named) {
					t.Errorf("%s names %s, which does not exist", document, named[0])
				}
			}
		}
		if found == 0 {
			t.Errorf("got no match of %s in the documents, want some", pattern)
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

// markedFunctions returns the functions of the product whose comments have an id in brackets, such
// as (O3), by that id. It names each method without and with its type, as otp.go:remove and
// otp.go:oneTimeCodes.remove.
func markedFunctions(t *testing.T) map[string][]string {
	t.Helper()
	declaration := regexp.MustCompile(`(?m)((?:^//.*\n)+)func (?:\((?:\w+ )?\*?(\w+).*?\) )?(\w+)`)
	mark := regexp.MustCompile(`\(([A-Z][0-9]+)[;)]`)
	marked := map[string][]string{}
	for _, file := range files(t, "*.go") {
		source := hubstest.ReadFile(t, file)
		for _, found := range declaration.FindAllStringSubmatch(source, -1) {
			comment, owner, name := found[1], found[2], found[3]
			for _, id := range mark.FindAllStringSubmatch(comment, -1) {
				marked[id[1]] = append(marked[id[1]], file+":"+name, file+":"+owner+"."+name)
			}
		}
	}
	return marked
}

// If a row of SECURITY.md names a function, the comment of that function has the id of the row. If
// it names only a file, the file exists.
func TestRowsAreNamedInComments(t *testing.T) {
	t.Parallel()
	marked := markedFunctions(t)
	for id, places := range securityRows(t) {
		for _, place := range places {
			if !strings.Contains(place, ":") {
				hubstest.ReadFile(t, place) // fails if there is no such file
			} else if !slices.Contains(marked[id], place) {
				t.Errorf("SECURITY.md: the comment of %s does not name %s", place, id)
			}
		}
	}
}

// Every id in the comment of a function is the id of a row of SECURITY.md.
func TestCommentsNameRows(t *testing.T) {
	t.Parallel()
	rows := securityRows(t)
	for id, functions := range markedFunctions(t) {
		if rows[id] == nil {
			t.Errorf("%s: the comment names %s, which is no row of SECURITY.md", functions[0], id)
		}
	}
}

// README.md has the route table that the command routes prints.
func TestRouteTableInReadme(t *testing.T) {
	t.Parallel()
	got := marked(t, "README.md", "routes")
	want := "```\n" + run(t, nil, "routes") + "```\n"
	if got != want {
		t.Errorf("README.md: got the table\n%swant what \"go run . routes\" prints:\n%s", got, want)
	}
}

// marked returns the part of a document that stands between two marks, such as <!-- go --> and
// <!-- /go -->.
func marked(t *testing.T, document, name string) string {
	t.Helper()
	pattern := regexp.MustCompile("(?s)<!-- " + name + " -->\n(.*)<!-- /" + name + " -->\n")
	found := pattern.FindStringSubmatch(hubstest.ReadFile(t, document))
	if found == nil {
		t.Fatalf("%s: got no match of %s, want one", document, pattern)
	}
	return found[1]
}

// The table of error codes in docs/clients.md has the codes of the contract, in the same order.
func TestErrorCodesInDocuments(t *testing.T) {
	t.Parallel()
	want := fmt.Sprint(hubstest.Contract[[]any](t,
		"components", "schemas", "Problem", "properties", "code", "enum"))
	got := fmt.Sprint(hubstest.Matches(t, "docs/clients.md", "(?m)^\\| `(\\w+)` \\| [0-9]{3} "))
	if got != want {
		t.Errorf("docs/clients.md: got the codes\n%s\nwant those of the contract:\n%s", got, want)
	}
}

// example returns the code of an example in docs/clients.md. The marks around it have the name of
// its language.
func example(t *testing.T, language string) string {
	t.Helper()
	_, code, _ := strings.Cut(marked(t, "docs/clients.md", language), "\n") // after the line ```go
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
	if err := os.WriteFile(dir+"/main.go", []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	s.Client(t).AskCode(email) // the Go example begins with a code
	shell(t, dir, "go run main.go $1 $2", s.Base, s.Code(t, email))
}
