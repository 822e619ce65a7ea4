// Package guide follows docs/yours.md in a copy of the working tree, as a reader would.
package guide

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }

// A step is a fence of the document: ```diff FILE, ```new FILE or ```sh.
var step = regexp.MustCompile("(?ms)^```(diff|new|sh) ?(\\S*)\n(.*?)^```$")

// Each step fits what the steps before it have left, and then the first two tiers pass.
func TestGuide(t *testing.T) {
	hubstest.NewDatabase(t) // PostgreSQL is there: ./dev.sh test would install it
	dir := t.TempDir()
	run(t, hubstest.Root(), `git -c safe.directory='*' ls-files -co --exclude-standard -z |
		tar --null -T - -cf - | tar -xf - -C `+dir)
	run(t, dir, "git init -q . && git add .") // the steps use git ls-files and git mv
	document := hubstest.ReadFile(t, "docs/yours.md")
	steps := step.FindAllStringSubmatchIndex(document, -1)
	if fences := strings.Count(document, "\n```"); fences != 2*len(steps) {
		t.Fatalf("got %d steps, want %d: a fence is none of diff, new and sh", len(steps), fences/2)
	}
	end := 0
	for _, at := range steps {
		above := document[end:at[0]]
		end = at[1]
		kind, file, body := document[at[2]:at[3]], document[at[4]:at[5]], document[at[6]:at[7]]
		line := 1 + strings.Count(document[:at[0]], "\n")
		fits := t.Run(fmt.Sprintf("line %d: %s %s", line, kind, file), func(t *testing.T) {
			if kind != "sh" && !strings.Contains(above, "`"+file+"`") {
				t.Errorf("the text above does not name %s: a reader does not see the fence", file)
			}
			follow(t, dir, kind, file, body)
		})
		if !fits {
			t.FailNow()
		}
	}
	run(t, dir, "go vet ./...")
	run(t, dir, "./dev.sh test")
}

// follow takes one step in a copy of the tree.
func follow(t *testing.T, dir, kind, file, body string) {
	t.Helper()
	path := filepath.Join(dir, file)
	switch kind {
	case "sh":
		run(t, dir, body)
	case "new":
		write(t, path, body)
	case "diff":
		for hunk := range strings.SplitSeq(body, "@@\n") {
			patch(t, path, hunk)
		}
	}
}

func run(t *testing.T, dir, command string) {
	t.Helper()
	cmd := exec.Command("bash", "-eu", "-o", "pipefail", "-c", command)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false") // the copy has no commit
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, output)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// patch replaces the lines that begin with "-" or " " by those that begin with "+" or " ". The
// former must stand in the file once, together.
func patch(t *testing.T, path, hunk string) {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text := "\n" + string(content)
	before, after := "\n", "\n"
	for line := range strings.Lines(hunk) {
		if line == "\n" {
			line = " \n" // editors take blanks at the end of a line away
		}
		mark, rest := line[0], line[1:]
		if mark != '+' {
			before += rest
		}
		if mark != '-' {
			after += rest
		}
	}
	if n := strings.Count(text, before); n != 1 {
		t.Fatalf("%s: this stands there %d times, not once:%s%s", path, n, before, nearest(text, before))
	}
	write(t, path, strings.Replace(text, before, after, 1)[1:])
}

// nearest says which line of a run is not in a text, and what stands there: what follows the line
// before it, or the lines that begin with the same word.
func nearest(text, run string) string {
	there := ""
	for line := range strings.Lines(run[1:]) {
		_, rest, found := strings.Cut(text, "\n"+line)
		if found {
			there = rest
			continue
		}
		word, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		for other := range strings.Lines(text) {
			if there == "" && strings.HasPrefix(strings.TrimSpace(other), word) {
				there = other
			}
		}
		return fmt.Sprintf("There is no line\n%sbut there is\n%.300s", line, there)
	}
	return "Each line is there, but not together."
}
