//go:build moving

package main

// The checks of the documents: what README.md, SECURITY.md and docs/ say about the code is
// true of the code.

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// serverSources has the files that the README's reading order lists.
var serverSources = []string{
	"main.go", "middleware.go", "auth.go", "otp.go", "ratelimit.go", "store.go", "hubs.go", "files.go",
}

func readText(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// declares reports whether a source declares a function or a method of that name. Methods of the
// same name are told apart by their type: guess.limitKey.
func declares(source, function string) bool {
	receiver := `(\([^)]*\) )?`
	if of, name, isMethod := strings.Cut(function, "."); isMethod {
		receiver = `\((\w+ )?\*?` + of + `\) `
		function = name
	}
	declaration := `(?m)^\s*(async )?func(tion)? ` + receiver + function + `[\[(]`
	return regexp.MustCompile(declaration).MatchString(source)
}

// documents are README.md, SECURITY.md, CONTRIBUTING.md and the pages under docs/.
func documents(t *testing.T) []string {
	t.Helper()
	pages, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	return append(pages, "README.md", "SECURITY.md", "CONTRIBUTING.md")
}

// Every place in the code that a document names as file:function exists.
func TestDocumentsNameWhatIsThere(t *testing.T) {
	t.Parallel()
	place := regexp.MustCompile(`\b([a-z]+\.(?:go|html)):(\w+(?:\.\w+)?)`)
	for _, document := range documents(t) {
		t.Run(document, func(t *testing.T) {
			places := place.FindAllStringSubmatch(readText(t, document), -1)
			if document == "README.md" && len(places) < 15 {
				t.Errorf("got %d places in the code, want the sign-in's 15 or more", len(places))
			}
			for _, named := range places {
				if !declares(readText(t, named[1]), named[2]) {
					t.Errorf("no function %s in %s", named[2], named[1])
				}
			}
		})
	}
}

// Every link from one document to a file of this repository leads to a file.
func TestDocumentsLinkToFiles(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	for _, document := range documents(t) {
		for _, found := range link.FindAllStringSubmatch(readText(t, document), -1) {
			target := filepath.Join(filepath.Dir(document), found[1])
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", document, found[1], err)
			}
		}
	}
}

// The README is a page that one reads: at most 200 lines, and its first screen links every
// other document.
func TestReadmeIsOnePage(t *testing.T) {
	t.Parallel()
	lines := strings.Split(readText(t, "README.md"), "\n")
	if len(lines) > 200 {
		t.Errorf("README.md: got %d lines, want at most 200", len(lines))
	}
	firstScreen := strings.Join(lines[:30], "\n")
	for _, document := range documents(t) {
		if document != "README.md" && !strings.Contains(firstScreen, "("+document+")") {
			t.Errorf("the README's first screen does not link %s", document)
		}
	}
}

// The exercises in the README quote conditions of the code as they are.
func TestExercisesQuoteTheCode(t *testing.T) {
	t.Parallel()
	quoted := regexp.MustCompile("`(if [^`{]*)\\{").FindAllStringSubmatch(readText(t, "README.md"), -1)
	if len(quoted) == 0 {
		t.Error("the README quotes no condition")
	}
	var sources strings.Builder
	for _, file := range serverSources {
		sources.WriteString(readText(t, file))
	}
	for _, found := range quoted {
		if !strings.Contains(sources.String(), found[1]) {
			t.Errorf("no source has %q", found[1])
		}
	}
}

// securityRow is a row of SECURITY.md's table: id, file and function (none for deploy/ and
// go.mod), tests.
var securityRow = regexp.MustCompile("(?m)^\\| ([A-Z][0-9]+) \\|.*?\\| `([a-z./]+)(?::([\\w.]+))?`[^|]*\\| (`[^|]*) \\|")

// SECURITY.md names the function and the tests of each row: all of them exist.
func TestSecurityPage(t *testing.T) {
	t.Parallel()
	tests := testSources(t)
	rows := securityRow.FindAllStringSubmatch(readText(t, "SECURITY.md"), -1)
	const want = 60
	if len(rows) != want {
		t.Errorf("SECURITY.md: got %d rows, want %d", len(rows), want)
	}
	seen := map[string]bool{}
	for _, row := range rows {
		id, file, function, named := row[1], row[2], row[3], row[4]
		if seen[id] {
			t.Errorf("%s is there twice", id)
		}
		seen[id] = true
		if source := readText(t, file); function != "" && !declares(source, function) {
			t.Errorf("%s: no function %s in %s", id, function, file)
		}
		for _, test := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(named, -1) {
			if !strings.Contains(tests, "\nfunc "+test[1]+"(") {
				t.Errorf("%s: no test %s", id, test[1])
			}
		}
	}
}

func testSources(t *testing.T) string {
	t.Helper()
	names, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, name := range names {
		all.WriteString(readText(t, name))
	}
	return all.String()
}

// Each row of SECURITY.md that names a function is named in that function's comment ("// O3:
// …"), and no comment names a row that is not there.
func TestCommentsNameTheRowsTheyKeep(t *testing.T) {
	t.Parallel()
	want := map[string]bool{}
	for _, row := range securityRow.FindAllStringSubmatch(readText(t, "SECURITY.md"), -1) {
		if row[3] != "" {
			want[row[1]+" at "+row[2]+":"+row[3]] = true
		}
	}
	declaration := regexp.MustCompile(`(?m)((?:^//.*\n)+)func (?:\((?:\w+ )?\*?(\w+)\) )?(\w+)`)
	mark := regexp.MustCompile(`(?:// |[.;] )([A-Z][0-9]+): `)
	inComments := map[string]bool{}
	for _, file := range serverSources {
		for _, found := range declaration.FindAllStringSubmatch(readText(t, file), -1) {
			for _, id := range mark.FindAllStringSubmatch(found[1], -1) {
				place := id[1] + " at " + file + ":"
				if want[place+found[2]+"."+found[3]] { // a method that SECURITY.md names with its type
					place += found[2] + "."
				}
				inComments[place+found[3]] = true
			}
		}
	}
	for _, row := range slices.Sorted(maps.Keys(want)) {
		if !inComments[row] {
			t.Errorf("no comment names row %s", row)
		}
	}
	known := map[string]bool{}
	for row := range want {
		id, _, _ := strings.Cut(row, " ")
		known[id] = true
	}
	for _, mark := range slices.Sorted(maps.Keys(inComments)) {
		id, _, _ := strings.Cut(mark, " ")
		if !known[id] {
			t.Errorf("a comment names row %s, which SECURITY.md lacks", mark)
		}
	}
}

// The table of error codes in docs/clients.md is that of the source.
func TestErrorCodesInDocuments(t *testing.T) {
	t.Parallel()
	var source, documented []string
	code := regexp.MustCompile(`(?:newProblem\(|Status: )(\d{3}), (?:Code: )?"(\w+)"`)
	for _, file := range serverSources {
		for _, found := range code.FindAllStringSubmatch(readText(t, file), -1) {
			source = append(source, found[1]+" "+found[2])
		}
	}
	_, table, _ := strings.Cut(readText(t, "docs/clients.md"), "<!-- codes -->\n")
	table, _, _ = strings.Cut(table, "<!-- /codes -->")
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (\\d{3}) \\|").FindAllStringSubmatch(table, -1) {
		documented = append(documented, row[2]+" "+row[1])
	}
	slices.Sort(source)
	slices.Sort(documented)
	source = slices.Compact(source)
	if len(source) < 15 || !slices.Equal(source, documented) {
		t.Errorf("docs/clients.md: got the codes\n%q, want\n%q", documented, source)
	}
}
