// Package removals reads testdata/removals, and takes what a removal names out of the source. The
// form of a removal stands in testdata/removals/README.md.
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
	Scope string // a declaration of package main, or a file
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
		lines := strings.Split(strings.TrimPrefix(block, "In:"), "\n")
		change := Change{Scope: strings.TrimSpace(lines[0])}
		for _, line := range lines[1:] {
			old, isOld := strings.CutPrefix(line, "-")
			added, isNew := strings.CutPrefix(line, "+")
			switch {
			case isOld:
				change.Old = append(change.Old, old)
			case isNew:
				change.New = append(change.New, added)
			default:
				return r, fmt.Errorf("%s: a line of a change begins with - or +, not as %q", r.Name, line)
			}
		}
		r.Changes = append(r.Changes, change)
	}
	return r, nil
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
