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
		for _, name := range r.tests {
			name, _, _ = strings.Cut(name, "/")
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
