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

// files returns the files of the module that fit one of the patterns.
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

// declares reports whether a source declares a function, or a method: limitKey, or with its
// type guess.limitKey.
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
	// What docs/yours.md adds to a copy is not here; test/guide follows it.
	addedCode     = regexp.MustCompile("(?ms)^```(diff|new) .*?^```$")
	namedFunction = regexp.MustCompile(`\b([a-z]+\.(?:go|html)):(\w+(?:\.\w+)?)`)
	namedLink     = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	namedScript   = regexp.MustCompile(`\./dev\.sh ([a-z]+)`)
	namedTest     = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w+`)
)

// What a document names is there: functions, linked files, commands of dev.sh, and tests.
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
			target := filepath.Join(hubstest.Root(), filepath.Dir(document),
				named[1])
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

// Each row of SECURITY.md names a function, whose comment names the row: (O3). No comment names
// a row that is not there.
func TestSecurityPage(t *testing.T) {
	t.Parallel()
	declaration := regexp.MustCompile(`(?m)((?:^//.*\n)+)func (?:\((?:\w+ )?\*?(\w+)\) )?(\w+)`)
	mark := regexp.MustCompile(`\(([A-Z][0-9]+)[;)]`)
	inComments := map[string]bool{} // rows and places: "O3 otp.go:redeem"
	ids := map[string]string{}      // of rows in comments, with a place
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
			t.Errorf("%s: SECURITY.md has no such row", place)
		}
	}
}

// The README has the route table that the command prints.
func TestRouteTableInReadme(t *testing.T) {
	t.Parallel()
	_, table, _ := hubstest.Run(nil, "routes")
	if !strings.Contains(hubstest.ReadFile(t, "README.md"), table) {
		t.Errorf("README.md lacks the table that \"go run . routes\" prints:\n%s", table)
	}
}

// The table of error codes in docs/clients.md has those of the contract.
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
		t.Errorf("docs/clients.md: got the codes\n%q, want\n%q", documented, codes)
	}
}

// example returns the code between two marks of docs/clients.md.
func example(t *testing.T, language string) string {
	t.Helper()
	text := hubstest.ReadFile(t, "docs/clients.md")
	form := regexp.MustCompile("(?s)<!-- " + language + " -->\n```\\w+\n(.*?)```\n<!-- /")
	found := form.FindStringSubmatch(text)
	if found == nil {
		t.Fatalf("docs/clients.md has no example in %s", language)
	}
	return found[1]
}

// The program around the Go example.
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

// The examples for programs sign in and read the session.
func TestClientExamples(t *testing.T) {
	t.Parallel()
	hubstest.Need(t, "curl", "curl")
	s := hubstest.Start(t)
	const email = "member@hubs.example"
	s.User(t, "add", email)
	dir := t.TempDir()
	ask, present, _ := strings.Cut(example(t, "curl"), "\n")
	shell(t, dir, "API=$1\n"+ask, s.Base)
	shell(t, dir, "API=$1 CODE=$2\n"+present,
		s.Base, s.Code(t, email))

	program := exampleStart + example(t, "go") + exampleEnd
	if err := os.WriteFile(dir+"/main.go", []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	s.Client(t).AskCode(email)
	shell(t, dir, "go run main.go $1 $2", s.Base,
		s.Code(t, email))
}
