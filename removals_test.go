//go:build moving

package main

// The removals in testdata/removals: how they are read, and that each is well formed.
// prove_test.go, with the tag prove, takes them one by one and shows that the tests notice.

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A removal is a patch that takes one protection out of the server.
type removal struct {
	name  string   // of the file, without .patch
	row   string   // of SECURITY.md; "" if it has a topic
	topic string   // what the name begins with; "" if it has a row
	gains string   // who gains what by it
	tests []string // those that must fail
	tags  string   // build tags of these tests
	patch string
	files []string // that it changes
}

var removalTopics = []string{
	"durability", "limits", "order", "start", "stop", "configuration", "commands", "session",
	"mail", "log", "files", "hubs", "store", "answers", "deploy",
}

// readRemovals returns all removals, by name.
func readRemovals() ([]removal, error) {
	paths, err := filepath.Glob("testdata/removals/*.patch")
	if err != nil {
		return nil, err
	}
	var removals []removal
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		r, err := parseRemoval(strings.TrimSuffix(filepath.Base(path), ".patch"), string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		removals = append(removals, r)
	}
	return removals, nil
}

var changedFile = regexp.MustCompile(`(?m)^\+\+\+ (?:b/)?(\S+)`)

// parseRemoval reads the form that testdata/removals/README.md describes.
func parseRemoval(name, text string) (removal, error) {
	start := regexp.MustCompile(`(?m)^(diff|---) `).FindStringIndex(text)
	if start == nil {
		return removal{}, fmt.Errorf("there is no diff in it")
	}
	head := regexp.MustCompile(`\n[ \t]+`).ReplaceAllString(text[:start[0]], " ")
	r := removal{name: name, patch: text[start[0]:]}
	for line := range strings.Lines(head) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		value = strings.TrimSpace(value)
		switch key {
		case "":
		case "Row":
			r.row = value
		case "Gains":
			r.gains = value
		case "Tests":
			r.tests = strings.Fields(value)
		case "Tags":
			r.tags = value
		default:
			return removal{}, fmt.Errorf("a line begins with %q", key)
		}
	}
	for _, found := range changedFile.FindAllStringSubmatch(r.patch, -1) {
		r.files = append(r.files, found[1])
	}
	first, _, _ := strings.Cut(name, "-")
	switch {
	case r.row == "-" && slices.Contains(removalTopics, first):
		r.row = ""
		r.topic = first
	case r.row == "-":
		return removal{}, fmt.Errorf("the name begins with no topic of %q", removalTopics)
	case r.row != first:
		return removal{}, fmt.Errorf("it is of row %q, but the name begins with %q", r.row, first)
	}
	if r.gains == "" || len(r.tests) == 0 || len(r.files) == 0 {
		return removal{}, fmt.Errorf("Gains, Tests or a changed file is missing")
	}
	return r, nil
}

// group is the row or the topic.
func (r removal) group() string { return r.row + r.topic }

// Each removal is of a row that exists, names tests that exist, and changes no test.
func TestRemovalsAreWellFormed(t *testing.T) {
	t.Parallel()
	removals, err := readRemovals()
	if err != nil {
		t.Fatal(err)
	}
	if len(removals) == 0 {
		t.Error("there are no removals")
	}
	rows := removalCounts(nil, readText(t, "SECURITY.md"))
	tests := testSources(t)
	for _, r := range removals {
		if _, ok := rows[r.row]; r.row != "" && !ok {
			t.Errorf("%s: SECURITY.md has no row %s", r.name, r.row)
		}
		for _, name := range r.testFunctions() {
			if !strings.Contains(tests, "\nfunc "+name+"(") {
				t.Errorf("%s: there is no test %s", r.name, name)
			}
		}
		for _, file := range r.files {
			if strings.HasSuffix(file, "_test.go") || strings.HasPrefix(file, "testdata/") {
				t.Errorf("%s changes %s, which is no part of the server", r.name, file)
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s changes %s, which is not there", r.name, file)
			}
		}
	}
}

// Each test is needed: a removal names it, or the table in testdata/removals/README.md says
// what else it guards.
func TestEveryTestIsNeeded(t *testing.T) {
	t.Parallel()
	removals, err := readRemovals()
	if err != nil {
		t.Fatal(err)
	}
	isNamed := map[string]bool{}
	for _, r := range removals {
		for _, name := range r.testFunctions() {
			isNamed[name] = true
		}
	}
	isListed := testsWithoutRemoval(t)
	exists := map[string]bool{}
	for _, found := range testFunction.FindAllStringSubmatch(testSources(t), -1) {
		name := found[1]
		exists[name] = true
		switch {
		case !isNamed[name] && !isListed[name]:
			t.Errorf("%s is named by no removal, and testdata/removals/README.md does not list it", name)
		case isNamed[name] && isListed[name]:
			t.Errorf("%s is named by a removal, and testdata/removals/README.md lists it as named by none", name)
		}
	}
	if !exists["TestEveryTestIsNeeded"] {
		t.Errorf("found %d tests, and not this one", len(exists))
	}
	for _, name := range slices.Sorted(maps.Keys(isListed)) {
		if !exists[name] {
			t.Errorf("testdata/removals/README.md lists %s, which is not there", name)
		}
	}
}

// Each test that a row of SECURITY.md names notices a removal of that very row, unless no
// removal names it at all.
func TestEveryTestOfARowIsNeeded(t *testing.T) {
	t.Parallel()
	removals, err := readRemovals()
	if err != nil {
		t.Fatal(err)
	}
	named := map[string][]string{} // by row
	for _, r := range removals {
		named[r.row] = append(named[r.row], r.testFunctions()...)
	}
	isListed := testsWithoutRemoval(t)
	for _, row := range securityRow.FindAllStringSubmatch(readText(t, "SECURITY.md"), -1) {
		for _, test := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(row[4], -1) {
			if !slices.Contains(named[row[1]], test[1]) && !isListed[test[1]] {
				t.Errorf("%s names %s, but no removal of %s does", row[1], test[1], row[1])
			}
		}
	}
}

// testFunction is a test with its name. TestMain is none: it takes a *testing.M.
var testFunction = regexp.MustCompile(`(?m)^func (Test\w*)\(\w+ \*testing\.T\)`)

// testFunctions returns the removal's tests without the names of subtests.
func (r removal) testFunctions() []string {
	var functions []string
	for _, test := range r.tests {
		function, _, _ := strings.Cut(test, "/")
		functions = append(functions, function)
	}
	return functions
}

// testsWithoutRemoval reads the table "Tests that no removal names" of
// testdata/removals/README.md. Each row of it says what the test guards.
func testsWithoutRemoval(t *testing.T) map[string]bool {
	t.Helper()
	const title = "\n## Tests that no removal names\n"
	_, table, found := strings.Cut(readText(t, "testdata/removals/README.md"), title)
	if !found {
		t.Fatalf("testdata/removals/README.md lacks the title%s", title)
	}
	listed := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\|(.*)\\|$").FindAllStringSubmatch(table, -1) {
		name, guards := row[1], strings.TrimSpace(row[2])
		if guards == "" {
			t.Errorf("testdata/removals/README.md does not say what %s guards", name)
		}
		if listed[name] {
			t.Errorf("testdata/removals/README.md lists %s twice", name)
		}
		listed[name] = true
	}
	return listed
}

var updateRemovals = flag.Bool("update-removals", false, "write the numbers of removals into SECURITY.md")

// SECURITY.md's last column is the number of removals of each row. ./dev.sh prove --count
// writes it.
func TestSecurityPageCountsRemovals(t *testing.T) {
	removals, err := readRemovals()
	if err != nil {
		t.Fatal(err)
	}
	page := readText(t, "SECURITY.md")
	counts := removalCounts(removals, page)
	want := withRemovalCounts(page, counts)
	if *updateRemovals {
		if err := os.WriteFile("SECURITY.md", []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if page != want {
		t.Error("SECURITY.md's last column is not the number of removals: run ./dev.sh prove --count")
	}
	for _, row := range slices.Sorted(maps.Keys(counts)) {
		if counts[row] == 0 {
			t.Logf("%s has no removal", row)
		}
	}
}

// removalCounts returns how many removals each row of SECURITY.md has.
func removalCounts(removals []removal, page string) map[string]int {
	counts := map[string]int{}
	for _, row := range securityRow.FindAllStringSubmatch(page, -1) {
		counts[row[1]] = 0
	}
	for _, r := range removals {
		if r.row != "" {
			counts[r.row]++
		}
	}
	return counts
}

// withRemovalCounts returns SECURITY.md with the column "removals" in its table, filled.
func withRemovalCounts(page string, counts map[string]int) string {
	const title, before = " removals |", "| id | source | what this server does | where | tests |"
	hasColumn := strings.Contains(page, before+title)
	if !hasColumn {
		page = strings.Replace(page, before+"\n|---|---|---|---|---|\n", before+title+"\n|---|---|---|---|---|---|\n", 1)
	}
	lines := strings.Split(page, "\n")
	for i, line := range lines {
		row := securityRow.FindStringSubmatch(line)
		if row == nil {
			continue
		}
		line = strings.TrimRight(line, " ")
		if hasColumn { // drop the old number
			line = line[:strings.LastIndex(strings.TrimSuffix(line, "|"), "|")+1]
		}
		lines[i] = fmt.Sprintf("%s %d |", line, counts[row[1]])
	}
	return strings.Join(lines, "\n")
}
