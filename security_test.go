package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// README.md names a place in the code for each arrow of the sign-in's diagram: all of
// them exist.
func TestReadmeNamesWhatIsThere(t *testing.T) {
	t.Parallel()
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	places := regexp.MustCompile(`\b([a-z]+\.(?:go|html)):(\w+)`).FindAllStringSubmatch(read("README.md"), -1)
	if len(places) < 20 {
		t.Errorf("only %d places", len(places))
	}
	for _, place := range places {
		declared := regexp.MustCompile(`(?m)^\s*(async )?func(tion)? (\([^)]*\) )?` + place[2] + `[\[(]`)
		if !declared.MatchString(read(place[1])) {
			t.Errorf("no %s in %s", place[2], place[1])
		}
	}
}

// SECURITY.md names the function and the tests of each row: all of them exist, and
// none of the rows of the list is missing.
func TestSecurityPage(t *testing.T) {
	t.Parallel()
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	names, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	var tests strings.Builder
	for _, name := range names {
		tests.WriteString(read(name))
	}
	page := read("SECURITY.md")
	rows := regexp.MustCompile("(?m)^\\| ([A-Z][0-9]) \\|.*\\| `([a-z.]+)(?::(\\w+))?` \\| (.*) \\|$").FindAllStringSubmatch(page, -1)
	if len(rows) != 50 {
		t.Errorf("%d rows of the form of a row, not 50", len(rows))
	}
	seen := map[string]bool{}
	for _, row := range rows {
		id, file, function, named := row[1], row[2], row[3], row[4]
		if seen[id] {
			t.Errorf("%s is there twice", id)
		}
		seen[id] = true
		declared := regexp.MustCompile(`(?m)^func (\([^)]*\) )?` + function + `[\[(]`)
		if source := read(file); function != "" && !declared.MatchString(source) {
			t.Errorf("%s: no function %s in %s", id, function, file)
		}
		found := regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(named, -1)
		if len(found) == 0 {
			t.Errorf("%s names no test", id)
		}
		for _, test := range found {
			if !strings.Contains(tests.String(), "\nfunc "+test[1]+"(") {
				t.Errorf("%s: no test %s", id, test[1])
			}
		}
	}
}
