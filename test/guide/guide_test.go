// Package guide follows the steps of docs/yours.md in a copy of the working tree, as a reader
// would.
package guide

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
	"hubs/tools/removals"
)

func TestMain(m *testing.M) { hubstest.Main(m) }

// step matches the text above a step, and the step: a block of the document that begins with
// ```diff FILE, ```new FILE or ```sh.
var step = regexp.MustCompile("(?ms)(.*?)^```(diff|new|sh) ?(\\S*)\n(.*?)^```$")

// Each step of docs/yours.md fits the code that the previous steps have left. After the last step,
// go vet and ./dev.sh test pass. A step that fails ends the test.
func TestGuide(t *testing.T) {
	hubstest.NewDatabase(t) // skips the test without PostgreSQL, which ./dev.sh test would install
	document := hubstest.ReadFile(t, "docs/yours.md")
	dir := t.TempDir()
	run(t, `cd ../..; git -c safe.directory='*' ls-files -co --exclude-standard -z |
		tar --null -T - -cf - | tar -xf - -C `+dir)
	t.Chdir(dir)
	run(t, "git init -q . && git add .") // the steps use git ls-files and git mv
	steps := step.FindAllStringSubmatch(document, -1)
	if fences := strings.Count(document, "\n```"); fences != 2*len(steps) {
		t.Fatalf("got %d steps in %d blocks, want each block to be diff, new or sh",
			len(steps), fences/2)
	}
	lines := 1 // the number of the line where a step or the text above it begins
	for _, groups := range steps {
		all, above, kind, file, body := groups[0], groups[1], groups[2], groups[3], groups[4]
		line := lines + strings.Count(above, "\n")
		lines += strings.Count(all, "\n")
		fits := t.Run(fmt.Sprintf("line %d: %s %s", line, kind, file), func(t *testing.T) {
			if kind != "sh" && !strings.Contains(above, "`"+file+"`") {
				t.Errorf("the text above does not name %s, which the page shows nowhere else", file)
			}
			follow(t, kind, file, body)
		})
		if !fits {
			t.FailNow()
		}
	}
	run(t, "go vet ./...")
	run(t, "./dev.sh test")
}

// follow makes one step in the copy of the tree.
func follow(t *testing.T, kind, file, body string) {
	t.Helper()
	switch kind {
	case "sh":
		before := editedFiles(body)
		run(t, body)
		for name, text := range before {
			if now, _ := os.ReadFile(name); string(now) == text {
				t.Errorf("%s does not change in %s", name, body)
			}
		}
	case "new":
		write(t, file, body)
	case "diff":
		change(t, file, body)
	}
}

// editedFiles returns the texts of the files that the commands of perl name. It leaves out those
// that write a table again (qx), because the table may be the same.
func editedFiles(body string) map[string]string {
	texts := map[string]string{}
	for line := range strings.Lines(body) {
		if !strings.HasPrefix(line, "perl -") || strings.Contains(line, "qx(") {
			continue
		}
		for word := range strings.FieldsSeq(line) {
			if text, err := os.ReadFile(word); err == nil {
				texts[word] = string(text)
			}
		}
	}
	return texts
}

// run runs a command in bash and fails the test if the command fails.
func run(t *testing.T, command string) {
	t.Helper()
	cmd := exec.Command("bash", "-eu", "-o", "pipefail", "-c", command)
	cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false") // the copy has no commit to stamp
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, output)
	}
}

// write writes a file of the copy.
func write(t *testing.T, file, text string) {
	t.Helper()
	hubstest.Must(t, os.WriteFile(file, []byte(text), 0o644))
}

// change makes the changes of a diff in a file. They have the form of the changes of a removal:
// "@@ readJSON" begins a change within that function, and "@@" begins one within the whole file.
func change(t *testing.T, file, diff string) {
	t.Helper()
	source, err := removals.ReadSource()
	hubstest.Must(t, err)
	var changes []removals.Change
	for part := range strings.SplitSeq(strings.TrimPrefix("\n"+diff, "\n@@"), "\n@@") {
		scope, lines, _ := strings.Cut(part, "\n")
		scope = cmp.Or(strings.TrimSpace(scope), file)
		if got, _ := source.Lines(scope); got != file {
			t.Errorf("%s: got the file %q, want %q", scope, got, file)
		}
		change, err := removals.ReadChange(scope, lines)
		hubstest.Must(t, err)
		changes = append(changes, change)
	}
	files, err := source.Apply(changes)
	hubstest.Must(t, err)
	write(t, file, files[file])
}
