// Package removals reads the removals in testdata/removals and applies them to the source.
// testdata/removals/README.md describes the form of a removal. The changes in docs/yours.md have
// the form of a removal's changes, and this package applies them too.
package removals

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// A Removal takes one protection out of the server.
type Removal struct {
	Name    string
	File    string   // of the removal
	Row     string   // a row of SECURITY.md, or a topic
	Tests   []string // the tests that must fail, each with its folder below test/
	Changes []Change
	Text    string // the whole removal, as in its file, with what an attacker or a fault gains
}

// A Change replaces lines of one scope, or a part of one line.
type Change struct {
	Scope     string   // a declaration, by its name in a Source, or the path of a file
	Old       []string // lines that the scope has exactly once
	New       []string // lines that replace them
	InOneLine bool     // Old and New are the same part of a line, not whole lines
}

// Read returns the removals of testdata/removals, in the order of the files.
func Read() ([]Removal, error) {
	paths, _ := filepath.Glob("testdata/removals/*.txt") // the pattern is well formed
	var all []Removal
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		parts := strings.Split("\n"+string(text), "\n== ")
		for _, part := range parts[1:] {
			r, err := parse(part)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			r.File = path
			all = append(all, r)
		}
	}
	return all, nil
}

var form = regexp.MustCompile(
	`(?s)^(\S+)\nRow:\s+(\S+)\nGains:\s+.+?\nTests:\s+(.+?)(\nIn:\s.+)$`)

// parse reads one removal. text is the removal without the "== " at its beginning.
func parse(text string) (Removal, error) {
	text = strings.TrimSpace(text)
	parts := form.FindStringSubmatch(text)
	if parts == nil {
		return Removal{}, fmt.Errorf("this text does not have the form of a removal:\n%s", text)
	}
	r := Removal{
		Name:  parts[1],
		Row:   parts[2],
		Tests: strings.Fields(parts[3]),
		Text:  text,
	}
	for block := range strings.SplitSeq(parts[4][1:], "\nIn:") {
		scope, lines, _ := strings.Cut(strings.TrimPrefix(block, "In:"), "\n")
		change, err := ReadChange(strings.TrimSpace(scope), lines)
		if err != nil {
			return r, fmt.Errorf("%s: %w", r.Name, err)
		}
		r.Changes = append(r.Changes, change)
	}
	return r, nil
}

// ReadChange reads the lines of a change. The lines that begin with - are replaced by the lines
// that begin with +. The lines that begin with a space stay: they show where the change is made.
// A change of a part of a line is one line instead: "~ old => new".
func ReadChange(scope, lines string) (Change, error) {
	change := Change{Scope: scope}
	if part, ok := strings.CutPrefix(strings.TrimSpace(lines), "~ "); ok {
		before, after, _ := strings.Cut(part, " =>")
		change.Old = []string{before}
		change.New = []string{strings.TrimPrefix(after, " ")}
		change.InOneLine = true
		return change, nil
	}
	for line := range strings.Lines(lines) {
		sign, text := line[0], strings.TrimRight(line[1:], "\n")
		if !strings.ContainsRune("-+ \n", rune(sign)) {
			return change, fmt.Errorf("a change has the line %q, want -, + or a space first", line)
		}
		if sign != '+' {
			change.Old = append(change.Old, text)
		}
		if sign != '-' {
			change.New = append(change.New, text)
		}
	}
	return change, nil
}

// SplitTest splits the name of a test, such as api/TestCommands/local, into the folder of its
// source, test/api, and the name that go test prints, TestCommands/local. The folder of a test of
// package main is ".".
func SplitTest(name string) (folder, test string) {
	folder, test, hasFolder := strings.Cut(name, "/")
	if !hasFolder || strings.HasPrefix(folder, "Test") {
		return ".", name
	}
	return "test/" + folder, test
}

// TestFunction returns the name that the function of a test or subtest has in a Source: for
// api/TestCommands/local, test/api/TestCommands.
func TestFunction(name string) string {
	folder, test := SplitTest(name)
	function, _, _ := strings.Cut(test, "/")
	return filepath.Join(folder, function)
}
