package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// A removal takes one protection out of the server. testdata/removals/README.md describes its form.
type removal struct {
	name    string
	row     string   // of SECURITY.md, or a file of deploy/
	gains   string   // what an attacker or a fault gains
	tests   []string // those that must fail, each with its folder below test/
	changes []change
	file    string // of the removal
}

// A change replaces lines of a declaration or a file, or a part of one line.
type change struct {
	scope    string   // the name of a function, method, type, variable or constant, or a path
	old      []string // lines that stand together in the scope, exactly once
	new      []string // lines that replace them
	isInline bool     // old and new are the same part of one line
}

var form = regexp.MustCompile(
	`(?s)^(\S+)\nRow:\s+(\S+)\nGains:\s+([^\n]+)\nTests:\s+([^\n]+)\n(In:\s.+)$`)

// readRemovals returns the removals of testdata/removals, in the order of the files.
func readRemovals() (all []removal, err error) {
	paths, _ := filepath.Glob("testdata/removals/*.txt") // the pattern is well formed
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		parts := strings.Split("\n"+string(text), "\n== ")
		for _, part := range parts[1:] {
			r, err := parseRemoval(strings.TrimSpace(part))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			r.file = path
			all = append(all, r)
		}
	}
	return all, nil
}

// parseRemoval reads one removal. text is the removal without the "== " at its beginning.
func parseRemoval(text string) (removal, error) {
	parts := form.FindStringSubmatch(text)
	if parts == nil {
		return removal{}, fmt.Errorf("this text does not have the form of a removal:\n%s", text)
	}
	r := removal{
		name:  parts[1],
		row:   parts[2],
		gains: parts[3],
		tests: strings.Fields(parts[4]),
	}
	for block := range strings.SplitSeq(parts[5][len("In:"):], "\nIn:") {
		scope, lines, _ := strings.Cut(block, "\n")
		r.changes = append(r.changes, parseChange(strings.TrimSpace(scope), lines))
	}
	return r, nil
}

// parseChange reads the lines of a change. Lines that begin with - are replaced by lines that begin
// with +. Other lines stay: they show the place. "~ old => new" replaces a part of a line.
func parseChange(scope, lines string) change {
	if part, ok := strings.CutPrefix(lines, "~ "); ok {
		before, after, _ := strings.Cut(strings.TrimSpace(part), " =>")
		after = strings.TrimPrefix(after, " ")
		return change{scope: scope, old: []string{before}, new: []string{after}, isInline: true}
	}
	c := change{scope: scope}
	for line := range strings.SplitSeq(lines, "\n") {
		if !strings.HasPrefix(line, "+") {
			c.old = append(c.old, strings.TrimPrefix(line, "-"))
		}
		if !strings.HasPrefix(line, "-") {
			c.new = append(c.new, strings.TrimPrefix(strings.TrimPrefix(line, "+"), " "))
		}
	}
	return c
}

// A source holds the lines of the product's files, by path.
type source map[string][]string

// readSource reads the files that removals change.
func readSource() source {
	src := source{}
	for _, pattern := range []string{"*.go", "go.mod", "schema.sql", "web/*", "deploy/*"} {
		paths, _ := filepath.Glob(pattern) // the patterns are well formed
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err == nil && !strings.HasSuffix(path, "_test.go") {
				src[path] = strings.Split(string(text), "\n")
			}
		}
	}
	return src
}

// find returns the place of a scope: a file, and the indices of its first line and of the line
// after its last. The file is "" unless there is one declaration or file of that name.
func (src source) find(scope string) (file string, start, end int) {
	if lines, isFile := src[scope]; isFile {
		return scope, 0, len(lines)
	}
	begin := declaration(scope)
	found := 0
	for path, lines := range src {
		for i, line := range lines {
			if filepath.Ext(path) == ".go" && begin.MatchString(line) {
				found++
				file, start, end = path, i, endOf(lines, i)
			}
		}
	}
	if found != 1 {
		return "", 0, 0
	}
	return file, start, end
}

// declaration matches the first line of a declaration: of a function or a method such as
// server.stop, or of a name that stands alone or in a group.
func declaration(name string) *regexp.Regexp {
	receiver, method, isMethod := strings.Cut(name, ".")
	if isMethod {
		return regexp.MustCompile(`^func \((\w+ )?\*?` + receiver + `(\[.*\])?\) ` + method + `\(`)
	}
	return regexp.MustCompile(`^((func|type|var|const) |\t)` + name + `(\[.*\])?(\(| +[^:]*=| \w)`)
}

// endOf returns the index of the line after a declaration, which ends with the first line that is
// not indented. A line of a group is a declaration of its own.
func endOf(lines []string, start int) int {
	end := start + 1
	if strings.HasPrefix(lines[start], "\t") {
		return end
	}
	isInside := func(line string) bool {
		// The signature of a function may take several lines: ") error {" is not its end.
		return line == "" || line[0] == '\t' || line[0] == ')' && strings.HasSuffix(line, "{")
	}
	for end < len(lines) && isInside(lines[end]) {
		end++
	}
	if end < len(lines) && strings.ContainsAny(lines[end][:1], "})") {
		end++
	}
	return end
}

// apply makes the changes of a removal one after the other. It returns the new text of each file
// that they affect, by path, and writes no file.
func (src source) apply(r removal) (map[string]string, error) {
	src = maps.Clone(src)
	texts := map[string]string{}
	for _, c := range r.changes {
		file, start, end := src.find(c.scope)
		if file == "" {
			return nil, fmt.Errorf("want one declaration or file %s", c.scope)
		}
		from, to, text, found := c.fit(src[file][start:end])
		if found != 1 {
			return nil, fmt.Errorf("%s (%s) has these lines %d times, want once:\n%s",
				c.scope, file, found, strings.Join(c.old, "\n"))
		}
		src[file] = slices.Replace(slices.Clone(src[file]), start+from, start+to, text...)
		texts[file] = strings.Join(src[file], "\n")
	}
	return texts, nil
}

// fit finds the lines that the change replaces, from the index from to before to, and returns what
// replaces them. found is how often they occur.
func (c change) fit(lines []string) (from, to int, text []string, found int) {
	// gofmt aligns code, so one blank of an inline change stands for any number of them.
	part := regexp.MustCompile(strings.ReplaceAll(regexp.QuoteMeta(c.old[0]), " ", " +"))
	var have []string
	var numbers []int // of the lines in have
	for i, line := range lines {
		if code(line) == "" {
			continue
		}
		have = append(have, code(line))
		numbers = append(numbers, i)
		for _, at := range part.FindAllStringIndex(line, -1) {
			if c.isInline {
				found++
				from, to = i, i+1
				text = []string{line[:at[0]] + c.new[0] + line[at[1]:]}
			}
		}
	}
	if c.isInline {
		return from, to, text, found
	}
	var want []string
	for _, line := range c.old {
		if code(line) != "" {
			want = append(want, code(line))
		}
	}
	for i := 0; len(want) > 0 && i+len(want) <= len(have); i++ {
		if slices.Equal(have[i:i+len(want)], want) {
			found++
			from, to = numbers[i], numbers[i+len(want)-1]+1
		}
	}
	return from, to, c.new, found
}

var comment = regexp.MustCompile(`(^| )(//|--|#) .*`)

// code returns a line without its comment, and with one blank for each run of blanks. Lines that
// differ only in these are the same.
func code(line string) string {
	line = strings.Join(strings.Fields(line), " ")
	return strings.TrimSpace(comment.ReplaceAllString(line, ""))
}
