package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"regexp"
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
	scope    string // the name of a function, method, type, variable or constant, or a path
	old, new string // old stands in the scope exactly once
	isInline bool   // old and new are parts of one line
}

var form = regexp.MustCompile(
	`(?s)^(\S+)\nRow:\s+(\S+)\nGains:\s+([^\n]+)\nTests:\s+([^\n]+)\nIn:(\s.+)$`)

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
			found := form.FindStringSubmatch(strings.TrimSpace(part))
			if found == nil {
				return nil, fmt.Errorf("%s: this is not the form of a removal:\n%s", path, part)
			}
			r := removal{
				name:  found[1],
				row:   found[2],
				gains: found[3],
				tests: strings.Fields(found[4]),
				file:  path,
			}
			for block := range strings.SplitSeq(found[5], "\nIn:") {
				scope, lines, _ := strings.Cut(block, "\n")
				r.changes = append(r.changes, parseChange(strings.TrimSpace(scope), lines))
			}
			all = append(all, r)
		}
	}
	return all, nil
}

// parseChange reads the lines of a change. Lines that begin with - are replaced by lines that begin
// with +. Other lines stay: they show the place. "~ old => new" replaces a part of a line.
func parseChange(scope, lines string) change {
	if part, ok := strings.CutPrefix(lines, "~ "); ok {
		before, after, _ := strings.Cut(strings.TrimSpace(part), " =>")
		return change{scope: scope, old: before, new: strings.TrimPrefix(after, " "), isInline: true}
	}
	var old, new []string
	for line := range strings.SplitSeq(lines, "\n") {
		if !strings.HasPrefix(line, "+") {
			old = append(old, strings.TrimPrefix(line, "-"))
		}
		if !strings.HasPrefix(line, "-") {
			new = append(new, strings.TrimPrefix(strings.TrimPrefix(line, "+"), " "))
		}
	}
	return change{scope: scope, old: strings.Join(old, "\n"), new: strings.Join(new, "\n")}
}

const comment = `(//|--|#) .*`

var trailingComment = regexp.MustCompile(`(^| )` + comment)

// pattern matches the old text. Indentation, runs of blanks, empty lines and comments make no
// difference.
func (c change) pattern() *regexp.Regexp {
	const between = `([\t ]+` + comment + `)?\n(\s*(` + comment + `)?\n)*[\t ]*`
	var lines []string
	for line := range strings.Lines(c.old) {
		line = strings.Join(strings.Fields(line), " ")
		if !c.isInline {
			line = strings.TrimSpace(trailingComment.ReplaceAllString(line, ""))
		}
		if line != "" {
			lines = append(lines, strings.ReplaceAll(regexp.QuoteMeta(line), " ", `[\t ]+`))
		}
	}
	if c.isInline {
		return regexp.MustCompile(lines[0])
	}
	all := strings.Join(lines, between)
	return regexp.MustCompile(`(?m)^[\t ]*` + all + `([\t ]+` + comment + `)?$`)
}

// A source holds the texts of the product's files, by path.
type source map[string]string

// readSource reads the files that removals change.
func readSource() source {
	src := source{}
	for _, pattern := range []string{"*.go", "go.mod", "schema.sql", "web/*", "deploy/*"} {
		paths, _ := filepath.Glob(pattern) // the patterns are well formed
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err == nil && !strings.HasSuffix(path, "_test.go") {
				src[path] = string(text)
			}
		}
	}
	return src
}

// find returns the place of a scope: a file, and the offsets of its beginning and its end. The file
// is "" unless there is such a file or declaration.
func (src source) find(scope string) (file string, start, end int) {
	if text, isFile := src[scope]; isFile {
		return scope, 0, len(text)
	}
	for path, text := range src {
		if filepath.Ext(path) != ".go" {
			continue
		}
		positions := token.NewFileSet()
		tree, err := parser.ParseFile(positions, path, text, 0)
		if err != nil {
			continue
		}
		for _, declaration := range tree.Decls {
			if found := declared(declaration)[scope]; found != nil {
				offset := func(at token.Pos) int { return positions.Position(at).Offset }
				return path, offset(found.Pos()), offset(found.End())
			}
		}
	}
	return "", 0, 0
}

// declared returns what a declaration declares, by name: a function, a method such as server.stop,
// or types, variables and constants.
func declared(declaration ast.Decl) map[string]ast.Node {
	all := map[string]ast.Node{}
	switch d := declaration.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil {
			receiver := types.ExprString(d.Recv.List[0].Type)
			name = strings.TrimPrefix(receiver, "*") + "." + name
		}
		all[name] = d
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			var node ast.Node = spec
			if !d.Lparen.IsValid() {
				node = d // with the word type, var or const
			}
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				all[spec.Name.Name] = node
			case *ast.ValueSpec:
				all[spec.Names[0].Name] = node
			}
		}
	}
	return all
}

// apply makes the changes of a removal one after the other. It returns the new text of each file
// that they affect, and writes no file.
func (src source) apply(r removal) (source, error) {
	src = maps.Clone(src)
	changed := source{}
	for _, c := range r.changes {
		file, start, end := src.find(c.scope)
		if file == "" {
			return nil, fmt.Errorf("there is no declaration or file %s", c.scope)
		}
		text := src[file]
		found := c.pattern().FindAllStringIndex(text[start:end], -1)
		if len(found) != 1 {
			return nil, fmt.Errorf("%s (%s) has these lines %d times, want once:\n%s",
				c.scope, file, len(found), c.old)
		}
		from, to := start+found[0][0], start+found[0][1]
		src[file] = text[:from] + c.new + text[to:]
		changed[file] = src[file]
	}
	return changed, nil
}
