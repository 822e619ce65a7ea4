package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// The most removals that a row may have, and all together: more of them cost more than they show.
const (
	mostOfARow = 3
	mostInAll  = 220
)

// number matches a number that a removal must not quote, because it would change with it. A status
// such as 503 does not change.
var number = regexp.MustCompile(`\b([0-9]{2}|[0-9_]{4,})\b`)

// Each removal has a name of its own, belongs to a row of SECURITY.md or a file of deploy/, names
// tests that exist, quotes no number, and fits the code.
func TestRemovalsFit(t *testing.T) {
	// Not in TestMain, where go test would not see it: it would repeat an old result although files
	// have changed.
	t.Chdir(hubstest.Root())
	all, err := readRemovals()
	hubstest.Must(t, err)
	src := readSource()
	page := hubstest.ReadFile(t, "SECURITY.md")
	if len(all) > mostInAll {
		t.Errorf("got %d removals, want at most %d", len(all), mostInAll)
	}
	names := map[string]bool{}
	rows := map[string]int{}
	for _, r := range all {
		if names[r.name] {
			t.Errorf("%s: two removals have this name", r.name)
		}
		names[r.name] = true
		rows[r.row]++
		if rows[r.row] == mostOfARow+1 {
			t.Errorf("%s: got more than %d removals of %s", r.name, mostOfARow, r.row)
		}
		_, err := os.Stat(r.row)
		isFile := strings.HasPrefix(r.row, "deploy/") && err == nil
		if !isFile && !strings.Contains(page, "\n| "+r.row+" |") {
			t.Errorf("%s: got the row %s, want one of SECURITY.md or a file of deploy/", r.name, r.row)
		}
		for _, name := range r.tests {
			if !hasTest(name) {
				t.Errorf("%s: there is no test %s", r.name, name)
			}
		}
		quoted := []string{r.gains}
		for _, c := range r.changes {
			quoted = append(quoted, c.old)
		}
		if found := number.FindString(strings.Join(quoted, "\n")); found != "" {
			t.Errorf("%s: got the number %s in what it quotes, want none", r.name, found)
		}
		if _, err := src.apply(r); err != nil {
			t.Errorf("%s no longer fits: %v", r.name, err)
		}
	}
}

// hasTest reports whether the function of a test exists.
func hasTest(name string) bool {
	folder, function, _ := splitTest(name)
	paths, _ := filepath.Glob(filepath.Join(folder, "*_test.go"))
	for _, path := range paths {
		text, _ := os.ReadFile(path)
		if strings.Contains(string(text), "\nfunc "+function+"(t ") {
			return true
		}
	}
	return false
}

// A removal is proven only by an assertion that fails, not by a step of the set-up or a side effect.
func TestOnlyAnAssertionProves(t *testing.T) {
	failed := errors.New("exit status 1")
	for _, test := range []struct {
		output string
		err    error
		want   string
	}{
		{"    x_test.go:7: got 1, want 2\nFAIL\n", failed, proven},
		{"    x_test.go:7: setup: no\n    x_test.go:8: got 1\n", failed, proven},
		{"    x_test.go:7: setup: no server\nFAIL\n", failed, broken},
		{"    log.go:7: side effect: EOF\nFAIL\n", failed, broken},
		{"panic: x\n\ngoroutine 1:\n\tx_test.go:7 +0x1\n", failed, broken},
		{"testing: warning: no tests to run\nPASS\n", nil, broken},
		{"PASS\n", nil, survives},
	} {
		got, said := judge([]byte(test.output), test.err)
		if got != test.want {
			t.Errorf("%q: got %s (%s), want %s", test.output, got, said, test.want)
		}
	}
}
