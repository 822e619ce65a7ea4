// Package removals reads testdata/removals, and takes what a removal names out of the source. The
// form of a removal stands in testdata/removals/README.md. The changes of docs/yours.md have the
// form of its changes, and are made by this package too.
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
	Row     string   // of SECURITY.md, or a topic
	Gains   string   // who gains what by it
	Tests   []string // those that must fail, each with its folder below test/
	Changes []Change
	Text    string // as it stands there
}

// A Change replaces lines of one scope.
type Change struct {
	Scope string // a declaration, by its name in a Source, or a file
	Old   []string
	New   []string
}

// Read returns the removals of testdata/removals.
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
			all = append(all, r)
		}
	}
	return all, nil
}

var form = regexp.MustCompile(
	`(?s)^(\S+)\nRow:\s+(\S+)\nGains:\s+(.+?)\nTests:\s+(.+?)(\nIn:\s.+)$`)

func parse(text string) (Removal, error) {
	text = strings.TrimSpace(text)
	parts := form.FindStringSubmatch(text)
	if parts == nil {
		return Removal{}, fmt.Errorf("this has not the form of a removal:\n%s", text)
	}
	r := Removal{
		Name:  parts[1],
		Row:   parts[2],
		Gains: parts[3],
		Tests: strings.Fields(parts[4]),
		Text:  text,
	}
	for block := range strings.SplitSeq(parts[5][1:], "\nIn:") {
		scope, lines, _ := strings.Cut(strings.TrimPrefix(block, "In:"), "\n")
		change, err := ReadChange(strings.TrimSpace(scope), lines)
		if err != nil {
			return r, fmt.Errorf("%s: %w", r.Name, err)
		}
		r.Changes = append(r.Changes, change)
	}
	return r, nil
}

// ReadChange reads the lines of a change. Those that begin with - are replaced by those that begin
// with +. Those that begin with a space stay: they say where.
func ReadChange(scope, lines string) (Change, error) {
	change := Change{Scope: scope}
	for line := range strings.Lines(lines) {
		sign, text := line[0], strings.TrimRight(line[1:], "\n")
		if !strings.ContainsRune("-+ \n", rune(sign)) {
			return change, fmt.Errorf("a line of a change begins with -, + or a space, not as %q", line)
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

// SplitTest splits the name of a test into the folder of its source, such as test/api, and what
// go test -run takes, such as TestCORS/local. The folder is "." for a test of package main.
func SplitTest(name string) (folder, test string) {
	folder, test, hasFolder := strings.Cut(name, "/")
	if !hasFolder || strings.HasPrefix(folder, "Test") {
		return ".", name
	}
	return "test/" + folder, test
}

// TestFunction returns the name in a Source of a test, or of the test that a subtest is part of.
func TestFunction(name string) string {
	folder, test := SplitTest(name)
	function, _, _ := strings.Cut(test, "/")
	return filepath.Join(folder, function)
}
