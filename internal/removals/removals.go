// Package removals reads testdata/removals, and takes what a removal names out of the source. The
// form of a removal stands in testdata/removals/README.md.
package removals

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// A Removal takes one protection out of the server.
type Removal struct {
	Name    string
	Row     string   // of SECURITY.md, or a topic
	Gains   string   // who gains what by it
	Tests   []string // those that must fail, each with its folder below test/
	Changes []Change
	File    string // where it stands
	Text    string // its lines there
}

// A Change replaces lines of one scope.
type Change struct {
	Scope string // a declaration of package main, or a file
	Old   []string
	New   []string
}

// Read returns the removals of testdata/removals.
func Read() ([]Removal, error) {
	paths, err := filepath.Glob("testdata/removals/*.txt")
	if err != nil {
		return nil, err
	}
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
				return nil, fmt.Errorf("%s: %s: %w", path, r.Name, err)
			}
			r.File = path
			all = append(all, r)
		}
	}
	return all, nil
}

// parse reads one removal. Its first line is the name.
func parse(text string) (Removal, error) {
	name, text, _ := strings.Cut(strings.TrimSpace(text), "\n")
	r := Removal{Name: name, Text: text}
	values := map[string]string{}
	last := ""
	for line := range strings.SplitSeq(text, "\n") {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch {
		case strings.HasPrefix(line, " "):
			values[last] += " " + strings.TrimSpace(line)
		case key == "Row" || key == "Gains" || key == "Tests":
			values[key] = value
			last = key
		case key == "In":
			r.Changes = append(r.Changes, Change{Scope: value})
		case !r.addLine(line):
			return r, fmt.Errorf("what is the line %q?", line)
		}
	}
	r.Row = values["Row"]
	r.Gains = values["Gains"]
	r.Tests = strings.Fields(values["Tests"])
	if r.Gains == "" || len(r.Tests) == 0 || len(r.Changes) == 0 {
		return r, fmt.Errorf("Gains, Tests or In is missing")
	}
	if r.Row == "" || !strings.HasPrefix(name, r.Row+"-") {
		return r, fmt.Errorf("the name does not begin with the row %q", r.Row)
	}
	return r, nil
}

// addLine adds a line to the last change. It returns false if it can't.
func (r *Removal) addLine(line string) bool {
	if len(r.Changes) == 0 {
		return false
	}
	change := &r.Changes[len(r.Changes)-1]
	old, isOld := strings.CutPrefix(line, "-")
	added, isNew := strings.CutPrefix(line, "+")
	if isOld {
		change.Old = append(change.Old, old)
	}
	if isNew {
		change.New = append(change.New, added)
	}
	return isOld || isNew
}

// SplitTest splits the name of a test at the end of its folder: "api" and "TestCORS/local". The
// folder is "" for a test of package main.
func SplitTest(name string) (folder, test string) {
	folder, test, hasFolder := strings.Cut(name, "/")
	if !hasFolder || strings.HasPrefix(folder, "Test") {
		return "", name
	}
	return folder, test
}
