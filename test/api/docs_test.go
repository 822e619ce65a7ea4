package api

import (
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
		found, err := filepath.Glob(filepath.Join(hubstest.Root(), pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			names = append(names, strings.TrimPrefix(path, hubstest.Root()+"/"))
		}
	}
	return names
}

// declares reports whether source declares a function or method. The name limitKey stands for a
// function, or for a method of any type; guess.limitKey stands for the method of that type.
func declares(source, function string) bool {
	receiver := `(\([^)]*\) )?`
	owner, name, isMethod := strings.Cut(function, ".")
	if isMethod {
		receiver = `\((\w+ )?\*?` + owner + `\) `
		function = name
	}
	declaration := `(?m)^\s*(async )?func(tion)? ` + receiver + function + `[\[(]`
	return regexp.MustCompile(declaration).MatchString(source)
}

var (
	// addedCode matches the code that docs/yours.md adds to a copy. This repository does not have
	// that code; test/guide tests it.
	addedCode     = regexp.MustCompile("(?ms)^```(diff|new) .*?^```$")
	namedFunction = regexp.MustCompile(`\b([a-z]+\.(?:go|html)):(\w+(?:\.\w+)?)`)
	namedLink     = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	namedScript   = regexp.MustCompile(`\./dev\.sh ([a-z]+)`)
	namedTest     = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w+`)
)

// Every function, linked file, command of dev.sh and test that a document names exists.
func TestDocumentsNameWhatIsThere(t *testing.T) {
	t.Parallel()
	script := hubstest.ReadFile(t, "dev.sh")
	var tests strings.Builder
	for _, name := range files(t, "*_test.go", "test/*/*_test.go", "internal/*/*_test.go") {
		tests.WriteString(hubstest.ReadFile(t, name))
	}
	for _, document := range files(t, "*.md", "docs/*.md", "testdata/*.md") {
		content := addedCode.ReplaceAllString(hubstest.ReadFile(t, document), "")
		for _, named := range namedFunction.FindAllStringSubmatch(content, -1) {
			source := strings.Replace(named[1], "index.html", "web/index.html", 1)
			if !declares(hubstest.ReadFile(t, source), named[2]) {
				t.Errorf("%s: there is no function %s in %s", document, named[2], source)
			}
		}
		for _, named := range namedLink.FindAllStringSubmatch(content, -1) {
			target := filepath.Join(hubstest.Root(), filepath.Dir(document), named[1])
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: there is no file %s", document, named[1])
			}
		}
		for _, named := range namedScript.FindAllStringSubmatch(content, -1) {
			command := regexp.MustCompile(`(?m)^[a-z |-]*\b` + named[1] + `\b[a-z |-]*\)`)
			if !command.MatchString(script) {
				t.Errorf("%s: there is no ./dev.sh %s", document, named[1])
			}
		}
		for _, named := range namedTest.FindAllString(content, -1) {
			if !strings.Contains(tests.String(), "\nfunc "+named+"(") {
				t.Errorf("%s: there is no test %s", document, named)
			}
		}
	}
}

// securityRow is a row of SECURITY.md's table: id, file and function.
var securityRow = regexp.MustCompile("(?m)^\\| ([A-Z][0-9]+) \\|.*?\\| `([a-z./]+)(?::([\\w.]+))?`")

// If a row of SECURITY.md names a function, the comment of that function has the id of the row in
// brackets, such as (O3). Every id in the comment of a function is the id of a row. No two rows
// have the same id.
func TestSecurityRowsAndCommentsMatch(t *testing.T) {
	t.Parallel()
	declaration := regexp.MustCompile(`(?m)((?:^//.*\n)+)func (?:\((?:\w+ )?\*?(\w+)\) )?(\w+)`)
	mark := regexp.MustCompile(`\(([A-Z][0-9]+)[;)]`)
	// inComments has each id with the function whose comment names it, without and with the type of
	// a method: "O3 otp.go:remove" and "O3 otp.go:oneTimeCodes.remove".
	inComments := map[string]bool{}
	ids := map[string]string{} // for each id, one such function: "O3": "O3 otp.go:remove"
	for _, file := range files(t, "*.go") {
		source := hubstest.ReadFile(t, file)
		for _, found := range declaration.FindAllStringSubmatch(source, -1) {
			for _, id := range mark.FindAllStringSubmatch(found[1], -1) {
				place := id[1] + " " + file + ":"
				inComments[place+found[3]] = true
				inComments[place+found[2]+"."+found[3]] = true
				ids[id[1]] = place + found[3]
			}
		}
	}
	seen := map[string]bool{}
	page := hubstest.ReadFile(t, "SECURITY.md")
	for _, row := range securityRow.FindAllStringSubmatch(page, -1) {
		id, file, function := row[1], row[2], row[3]
		if seen[id] {
			t.Errorf("SECURITY.md has two rows %s", id)
		}
		seen[id] = true
		if function != "" && !inComments[id+" "+file+":"+function] {
			t.Errorf("SECURITY.md: the comment of %s in %s does not name %s", function, file, id)
		}
	}
	for id, place := range ids {
		if !seen[id] {
			t.Errorf("the comment at %s names a row that SECURITY.md does not have", place)
		}
	}
}

// README.md has the route table that the command routes prints.
func TestRouteTableInReadme(t *testing.T) {
	t.Parallel()
	_, table, _ := hubstest.Run(nil, "routes")
	if !strings.Contains(hubstest.ReadFile(t, "README.md"), table) {
		t.Errorf("README.md lacks the table that \"go run . routes\" prints:\n%s", table)
	}
}

// The table of error codes in docs/clients.md has the codes of the contract, in the same order.
func TestErrorCodesInDocuments(t *testing.T) {
	t.Parallel()
	codes := hubstest.Contract[[]any](t,
		"components", "schemas", "Problem", "properties", "code", "enum")
	_, table, _ := strings.Cut(hubstest.ReadFile(t, "docs/clients.md"), "<!-- codes -->\n")
	table, _, _ = strings.Cut(table, "<!-- /codes -->")
	var documented []any
	row := regexp.MustCompile("(?m)^\\| `(\\w+)` \\| [0-9]")
	for _, match := range row.FindAllStringSubmatch(table, -1) {
		documented = append(documented, match[1])
	}
	if !slices.Equal(documented, codes) {
		t.Errorf("docs/clients.md: got the codes\n%q\nwant those of the contract:\n%q",
			documented, codes)
	}
}

// example returns the code of an example in docs/clients.md. It stands below a mark with the name
// of its language, such as <!-- go -->.
func example(t *testing.T, language string) string {
	t.Helper()
	text := hubstest.ReadFile(t, "docs/clients.md")
	pattern := regexp.MustCompile("(?s)<!-- " + language + " -->\n```\\w+\n(.*?)```\n<!-- /")
	found := pattern.FindStringSubmatch(text)
	if found == nil {
		t.Fatalf("docs/clients.md has no example in %s", language)
	}
	return found[1]
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
