package removals

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A Source is what changes are made in: declarations by name, and files by path. The name of a
// declaration in test/api, say, has the folder before it.
type Source map[string]scope

// A scope is the lines of a file from number start to number end, without the latter.
type scope struct {
	file  string
	lines []string // of the whole file
	start int
	end   int
}

// ReadSource finds the declarations of package main and of the tests.
func ReadSource() (Source, error) {
	source := Source{}
	paths, _ := filepath.Glob("*.go") // the patterns are well formed
	tests, _ := filepath.Glob("test/*/*_test.go")
	for _, path := range append(paths, tests...) {
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		whole, err := source.find(path)
		if err != nil {
			return nil, err
		}
		for _, declaration := range file.Decls {
			for name, node := range named(declaration) {
				part := whole
				part.start = set.Position(node.Pos()).Line - 1
				part.end = set.Position(node.End()).Line
				source[filepath.Join(filepath.Dir(path), name)] = part
			}
		}
	}
	return source, nil
}

// find returns a declaration, or else a whole file.
func (source Source) find(name string) (scope, error) {
	found, isDeclared := source[name]
	if isDeclared {
		return found, nil
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return scope{}, fmt.Errorf("there is no declaration and no file %s", name)
	}
	lines := strings.Split(string(text), "\n")
	return scope{file: name, lines: lines, end: len(lines)}, nil
}

// named returns what a declaration declares: a function, or the specs of a group.
func named(declaration ast.Decl) map[string]ast.Node {
	f, isFunction := declaration.(*ast.FuncDecl)
	if isFunction {
		return map[string]ast.Node{functionName(f): f}
	}
	nodes := map[string]ast.Node{}
	group := declaration.(*ast.GenDecl)
	for _, spec := range group.Specs {
		var node ast.Node = spec
		if len(group.Specs) == 1 {
			node = group // with its keyword
		}
		switch spec := spec.(type) {
		case *ast.TypeSpec:
			nodes[spec.Name.Name] = node
		case *ast.ValueSpec:
			for _, name := range spec.Names {
				nodes[name.Name] = node
			}
		}
	}
	return nodes
}

// functionName returns the name of a function, or type.name of a method.
func functionName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	receiver, _, _ := strings.Cut(types.ExprString(f.Recv.List[0].Type), "[")
	return strings.TrimPrefix(receiver, "*") + "." + f.Name.Name
}

// Lines returns the lines of a scope, and the file in which they stand.
func (source Source) Lines(name string) (file, text string) {
	s, err := source.find(name)
	if err != nil {
		return "", err.Error()
	}
	return s.file, strings.Join(s.lines[s.start:s.end], "\n")
}

// gone marks a line that is taken out. It stays until all changes are made: the lines below keep
// their numbers.
const gone = "\x00"

// Apply returns the files that some changes change, as they are afterwards. It writes none.
func (source Source) Apply(changes []Change) (map[string]string, error) {
	changed := map[string][]string{}
	for _, change := range changes {
		s, err := source.find(change.Scope)
		if err != nil {
			return nil, err
		}
		if changed[s.file] == nil {
			changed[s.file] = slices.Clone(s.lines)
		}
		numbers, err := s.fit(change)
		if err != nil {
			return nil, err
		}
		for _, number := range numbers {
			changed[s.file][number] = gone
		}
		if len(change.New) > 0 {
			changed[s.file][numbers[0]] = strings.Join(change.New, "\n")
		}
	}
	files := map[string]string{}
	for file, lines := range changed {
		lines = slices.DeleteFunc(lines, func(line string) bool { return line == gone })
		files[file] = strings.Join(lines, "\n")
	}
	return files, nil
}

// shown is how many lines of a scope an error shows.
const shown = 40

// fit returns the numbers of the lines that a change replaces. They must stand in the scope once.
func (s scope) fit(change Change) ([]int, error) {
	old, _ := s.code(change.Old)
	if len(old) == 0 {
		return nil, fmt.Errorf("%s: no line of code says where the change is made", change.Scope)
	}
	code, numbers := s.code(s.lines[s.start:s.end])
	var found [][]int
	for i := 0; i+len(old) <= len(code); i++ {
		if slices.Equal(code[i:i+len(old)], old) {
			found = append(found, numbers[i:i+len(old)])
		}
	}
	if len(found) != 1 {
		start := s.start
		if s.end-start > shown { // from a line on that begins with the same word
			word, _, _ := strings.Cut(old[0], " ")
			begins := func(line string) bool { return strings.HasPrefix(line, word) }
			start = numbers[max(0, slices.IndexFunc(code, begins))]
		}
		now := s.lines[start:min(s.end, start+shown)]
		return nil, fmt.Errorf("in %s (%s) these lines stand %d times, not once:\n%s\nThere is now:\n%s",
			change.Scope, s.file, len(found), strings.Join(change.Old, "\n"), strings.Join(now, "\n"))
	}
	return found[0], nil
}

// code returns lines without comments, indentation and empty lines, which make no difference, and
// the number in the file of each line of code.
func (s scope) code(lines []string) (code []string, numbers []int) {
	mark := " # "
	switch filepath.Ext(s.file) {
	case ".go":
		mark = " // "
	case ".sql":
		mark = " -- "
	}
	for i, line := range lines {
		line, _, _ = strings.Cut(" "+strings.Join(strings.Fields(line), " ")+" ", mark)
		line = strings.TrimSpace(line)
		if line != "" {
			code = append(code, line)
			numbers = append(numbers, s.start+i)
		}
	}
	return code, numbers
}
