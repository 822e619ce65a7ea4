package removals

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// A Source holds the declarations of the server and its tests, by name. The name of a declaration
// outside package main begins with its folder, such as test/api/TestCommands. A change can also be
// made in a whole file: find reads it by its path.
type Source map[string]scope

// A scope is the part of a file that a change is made in: a declaration, or the whole file.
type scope struct {
	file  string
	lines []string // of the whole file
	start int      // index of the first line of the scope
	end   int      // index of the line after the last
}

// ReadSource returns the declarations of package main, and of the tests in test/ and tools/.
func ReadSource() (Source, error) {
	source := Source{}
	paths, _ := filepath.Glob("*.go")           // the patterns are well formed
	tests, _ := filepath.Glob("t*/*/*_test.go") // in test/ and tools/
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

// find returns the declaration of that name. If there is none, it returns the file of that path.
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

// named returns the parts of a declaration by name: one function, or each name of a group of
// constants, variables or types.
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
			node = group // so that the scope includes the keyword
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

// functionName returns the name of a function, such as main, or of a method, such as limiter.take.
func functionName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	receiver, _, _ := strings.Cut(types.ExprString(f.Recv.List[0].Type), "[")
	return strings.TrimPrefix(receiver, "*") + "." + f.Name.Name
}

// Lines returns the path of a scope's file, and the scope's lines. If there is no such scope, file
// is "" and text is the error.
func (source Source) Lines(name string) (file, text string) {
	s, err := source.find(name)
	if err != nil {
		return "", err.Error()
	}
	return s.file, strings.Join(s.lines[s.start:s.end], "\n")
}

// gone marks a line that Apply removes. The line stays until all changes are made, so that the
// lines below it keep their indices.
const gone = "\x00"

// Apply makes changes, and returns the new text of each file that they affect, by path. It writes
// no file. Each change must fit the scope as it was before the first change.
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
		numbers, text, err := s.fit(change)
		if err != nil {
			return nil, err
		}
		for _, number := range numbers {
			changed[s.file][number] = gone
		}
		if len(change.New) > 0 {
			changed[s.file][numbers[0]] = text
		}
	}
	files := map[string]string{}
	for file, lines := range changed {
		lines = slices.DeleteFunc(lines, func(line string) bool { return line == gone })
		files[file] = strings.Join(lines, "\n")
	}
	return files, nil
}

// shown is the number of lines of a scope that an error shows.
const shown = 40

// fit returns the indices, in the file, of the lines that a change replaces, and the text that
// replaces them. The scope must have what is replaced exactly once.
func (s scope) fit(change Change) (at []int, text string, err error) {
	old, _ := s.code(change.Old)
	if len(old) == 0 {
		return nil, "", fmt.Errorf("%s: the change has no line of code with - or a space, "+
			"so its place is unknown", change.Scope)
	}
	code, numbers := s.code(s.lines[s.start:s.end])
	var found [][]int
	text = strings.Join(change.New, "\n")
	if change.InOneLine {
		// gofmt aligns code, so one blank stands for any number of them.
		part := regexp.MustCompile(strings.ReplaceAll(regexp.QuoteMeta(change.Old[0]), " ", " +"))
		for i, number := range numbers {
			line := s.lines[number]
			for _, at := range part.FindAllStringIndex(line, -1) {
				found = append(found, numbers[i:i+1])
				text = line[:at[0]] + change.New[0] + line[at[1]:]
			}
		}
	}
	for i := 0; !change.InOneLine && i+len(old) <= len(code); i++ {
		if slices.Equal(code[i:i+len(old)], old) {
			found = append(found, numbers[i:i+len(old)])
		}
	}
	if len(found) != 1 {
		start := s.start
		if s.end-start > shown { // then show lines from the one that has most of the words
			most := 0
			for i, line := range code {
				same := 0
				for word := range strings.FieldsSeq(old[0]) {
					same += min(1, strings.Count(line, word))
				}
				if same > most {
					most = same
					start = numbers[i]
				}
			}
		}
		now := s.lines[start:min(s.end, start+shown)]
		return nil, "", fmt.Errorf("%s (%s) has these lines %d times, want once:\n%s\nIt has:\n%s",
			change.Scope, s.file, len(found),
			strings.Join(change.Old, "\n"), strings.Join(now, "\n"))
	}
	return found[0], text, nil
}

// code returns the lines of code, and for each of them its index in the file if lines are those of
// the scope. It leaves out comments, indentation and empty lines, because they make no difference.
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
