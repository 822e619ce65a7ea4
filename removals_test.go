package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"hubs/tools/removals"
)

// What a removal may be of besides a row of SECURITY.md.
var removalTopics = []string{
	"durability", "limits", "order", "start", "stop", "configuration", "commands", "session",
	"mail", "log", "files", "hubs", "store", "answers", "deploy",
}

// Each removal is of a row or topic, names tests that exist, and fits the code as it is.
// tools/prove shows that the tests notice. With -v: the tests that no removal names.
func TestRemovalsFit(t *testing.T) {
	t.Parallel()
	all, err := removals.Read()
	if err != nil {
		t.Fatal(err)
	}
	source, err := removals.ReadSource()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, topic := range removalTopics {
		known[topic] = true
	}
	for _, row := range matches(t, "SECURITY.md", `(?m)^\| ([A-Z][0-9]+) \|`) {
		known[row] = true
	}
	isNamed := testNames(t)
	for _, r := range all {
		if known[r.Name] {
			t.Errorf("%s: there are two of this name", r.Name)
		}
		known[r.Name] = true
		if !known[r.Row] || !strings.HasPrefix(r.Name, r.Row+"-") {
			t.Errorf("%s: %s is no topic and no row of SECURITY.md, or not in the name", r.Name, r.Row)
		}
		for _, name := range r.Tests {
			folder, test := removals.SplitTest(name)
			function, _, _ := strings.Cut(test, "/")
			function = filepath.Join(folder, function)
			_, exists := isNamed[function]
			if !exists {
				t.Errorf("%s: there is no test %s", r.Name, name)
			}
			isNamed[function] = true
		}
		_, err := source.Apply(r)
		if err != nil {
			t.Errorf("%s no longer fits: %v", r.Name, err)
		}
	}
	for name, named := range isNamed {
		if !named {
			t.Logf("no removal names %s", name)
		}
	}
}

// testNames returns all tests, each with its folder. The values are false.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, pattern := range []string{"*_test.go", "test/*/*_test.go"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			for _, name := range matches(t, path, `(?m)^func ((?:Test|Fuzz)\w*)\(\w+ \*testing\.[TF]\)`) {
				names[filepath.Join(filepath.Dir(path), name)] = false
			}
		}
	}
	return names
}

// matches returns what the group of an expression matches in a file.
func matches(t *testing.T, file, expression string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, match := range regexp.MustCompile(expression).FindAllSubmatch(text, -1) {
		found = append(found, string(match[1]))
	}
	return found
}
