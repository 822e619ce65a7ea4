package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"hubs/tools/removals"
)

const (
	testTimeout   = 4 * time.Minute  // of one test; none needs two
	mostPatience  = 30 * time.Second // for one event that a test waits for, as hubstest has it
	leastPatience = 4 * time.Second
)

// The outcomes of a removal.
const (
	proven   = "proven"
	survives = "SURVIVES" // a test that should fail passes
	broken   = "BROKEN"   // it shows nothing: it does not compile, no server starts, …
)

type verdict struct {
	removals.Removal
	outcome string
	said    string // what the tests said, or why it is not proven
	took    time.Duration
}

// proveAll proves removals in several lanes.
func proveAll(
	ctx context.Context, source removals.Source, chosen []removals.Removal,
) ([]verdict, error) {
	dir, err := os.MkdirTemp("", "hubs-prove-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o755) // a test's own PostgreSQL runs as another user
	os.Setenv("TMPDIR", dir)

	asIs := &lane{ctx: ctx, dir: dir + "/as-is"}
	asIs.asIs = asIs
	err = asIs.prepare(chosen)
	if err != nil {
		return nil, err
	}
	jobs := make(chan removals.Removal, len(chosen))
	for _, r := range chosen {
		jobs <- r
	}
	close(jobs)
	var mu sync.Mutex
	var all []verdict
	var running sync.WaitGroup
	for i := range *lanes {
		l := &lane{ctx: ctx, dir: fmt.Sprintf("%s/%d", dir, i), asIs: asIs}
		err := l.copyTree()
		if err != nil {
			return nil, err
		}
		running.Go(func() {
			for r := range jobs {
				if ctx.Err() != nil {
					return
				}
				v := l.prove(source, r)
				if v.outcome == broken { // a machine under load can fail a run
					v = l.prove(source, r)
				}
				mu.Lock()
				all = append(all, v)
				v.print(source, fmt.Sprintf("%3d/%d", len(all), len(chosen)))
				mu.Unlock()
			}
		})
	}
	running.Wait()
	return all, ctx.Err()
}

// A lane proves one removal at a time in a copy of the tree.
type lane struct {
	ctx  context.Context
	dir  string
	asIs *lane    // the lane without any removal, with the tests of all folders
	seen sync.Map // of asIs, by test: how long it takes
}

// folders returns the folders of the removals' tests.
func folders(some ...removals.Removal) []string {
	var all []string
	for _, r := range some {
		for _, name := range r.Tests {
			folder, _ := removals.SplitTest(name)
			all = append(all, folder)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// prepare makes asIs: the tests of each folder are compiled once, since a removal changes only what
// they run and read.
func (l *lane) prepare(chosen []removals.Removal) error {
	err := l.copyTree()
	if err == nil {
		err = l.build("build", "hubs", ".")
	}
	for _, folder := range folders(chosen...) {
		if err == nil {
			err = l.build("test", testBinary(folder), folder)
		}
	}
	return err
}

// copyTree copies what git knows, and what it would add. ls leaves out what was deleted.
func (l *lane) copyTree() error {
	const script = `mkdir -p "$0" && git -c 'safe.directory=*' ls-files -coz --exclude-standard |
		xargs -0 ls -d 2>/dev/null | tar -T - -cf - | tar -xf - -C "$0"`
	tree := l.dir + "/tree"
	output, err := exec.CommandContext(l.ctx, "bash", "-c", script, tree).CombinedOutput()
	if err != nil {
		return fmt.Errorf("the tree can't be copied: %w\n%s", err, output)
	}
	return nil
}

// testBinary is the name of the compiled tests of a folder.
func testBinary(folder string) string {
	return strings.ReplaceAll(folder, "/", "-") + ".test"
}

// build builds the server, or with "test" the tests of a folder: as quickly as it can be, and so
// without optimization. It gives way to the tests that run meanwhile.
func (l *lane) build(command, binary, folder string) error {
	args := []string{"go", command, "-trimpath", "-gcflags=-N -l", "-ldflags=-s -w"}
	if command == "test" {
		args = append(args, "-c", "-vet=off")
	}
	args = append(args, "-o", l.dir+"/"+binary, "./"+folder)
	cmd := exec.CommandContext(l.ctx, "nice", args...)
	cmd.Dir = l.dir + "/tree"
	cmd.Env = append(os.Environ(), "GOGC=off") // the compiler ends before it needs much memory
	output, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("it does not compile: %w\n%s", err, output)
	}
	return nil
}

// prove takes a removal out of the lane's copy, runs its tests, and puts the files back.
func (l *lane) prove(source removals.Source, r removals.Removal) verdict {
	v := verdict{Removal: r, outcome: broken}
	changed, err := source.Apply(r.Changes)
	before, writeErr := l.swap(changed)
	err = cmp.Or(err, writeErr)
	started := time.Now()
	if err == nil {
		err = l.buildFor(r)
	}
	if err == nil {
		v.outcome, v.said = l.tryTests(r.Tests)
	}
	v.took = time.Since(started)
	_, writeErr = l.swap(before)
	err = cmp.Or(err, writeErr)
	if err != nil {
		v.outcome = broken
		v.said = err.Error()
	}
	return v
}

// swap writes files of the lane's copy, and returns what stood in them before.
func (l *lane) swap(files map[string]string) (before map[string]string, err error) {
	before = map[string]string{}
	for file, text := range files {
		path := filepath.Join(l.dir, "tree", file)
		old, err := os.ReadFile(path)
		if err != nil {
			return before, err
		}
		before[file] = string(old)
		err = os.WriteFile(path, []byte(text), 0o644)
		if err != nil {
			return before, err
		}
	}
	return before, nil
}

// buildFor builds what the tests of a removal run: the server, or the tests of package main.
func (l *lane) buildFor(r removals.Removal) error {
	for _, folder := range folders(r) {
		var err error
		if folder == "." {
			err = l.build("test", testBinary(folder), folder)
		} else {
			err = l.build("build", "hubs", ".")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// tryTests runs the tests of a removal. Each of them must fail.
func (l *lane) tryTests(names []string) (outcome, said string) {
	for _, name := range names {
		one, saidByOne := l.tryTest(name)
		said += name + ": " + saidByOne + "\n"
		if one != proven {
			return one, said
		}
	}
	return proven, said
}

// tryTest runs a test without the protection. It mostly waits for what never comes. So it waits for
// one event no longer than all of it takes with the protection, and leastPatience. If it may have
// failed for want of time, it must pass with the protection, given as little time, at once.
func (l *lane) tryTest(name string) (outcome, said string) {
	took, failure := l.asIs.measure(name)
	if failure != "" {
		return broken, "it fails without the removal too: " + failure
	}
	patience := min(took+leastPatience, mostPatience)
	started := time.Now()
	outcome, said = l.runTest(name, patience)
	isLate := patience < mostPatience && time.Since(started) >= patience
	if outcome != proven || !isLate {
		return outcome, said
	}
	again, _ := l.asIs.runTest(name, patience)
	if again != survives {
		return broken, fmt.Sprintf("in %v it fails without the removal too: %s", patience, said)
	}
	return outcome, said
}

// measure returns how long a test takes in this lane, once. One that fails twice proves nothing:
// failure is what it said.
func (l *lane) measure(name string) (took time.Duration, failure string) {
	run := sync.OnceValues(func() (took time.Duration, failure string) {
		for range 2 {
			started := time.Now()
			outcome, said := l.runTest(name, mostPatience)
			if outcome == survives {
				return time.Since(started), ""
			}
			failure = said
		}
		return 0, failure
	})
	first, _ := l.seen.LoadOrStore(name, run)
	return first.(func() (time.Duration, string))()
}

// assertion is a line of a test's own. A wait in vain stands there too, and so does what the server
// has logged (t.Helper). A line of internal/hubstest alone says that no server starts, say, or that
// the harness itself fails: that would prove every removal that breaks much. What a test notes goes
// to t.Output, since a line of t.Log looks the same: TestNotesGoToOutput.
var assertion = regexp.MustCompile(`(?m)^\s+\w+_test\.go:\d+: `)

// runTest runs a test on the lane's server. The removal is proven if it fails by an assertion; said
// is then the first lines of that.
func (l *lane) runTest(name string, patience time.Duration) (outcome, said string) {
	folder, test := removals.SplitTest(name)
	compiledBy := l.asIs
	if folder == "." {
		compiledBy = l
	}
	pattern := "^" + strings.ReplaceAll(regexp.QuoteMeta(test), "/", "$/^") + "$"
	ctx, cancel := context.WithTimeout(l.ctx, testTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, compiledBy.dir+"/"+testBinary(folder),
		"-test.run="+pattern,
		"-test.parallel=8") // most subtests wait
	cmd.Dir = l.dir + "/tree/" + folder
	cmd.Env = append(os.Environ(),
		"HUBS_BINARY="+l.dir+"/hubs",
		"HUBS_TEST_PATIENCE="+patience.String())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	output, err := cmd.CombinedOutput()
	start := assertion.FindIndex(output)
	switch {
	case ctx.Err() != nil:
		return broken, fmt.Sprintf("it does not end within %v\n%s", testTimeout, output)
	case err == nil:
		return survives, "it passes"
	case start == nil:
		return broken, fmt.Sprintf("it fails by no assertion of its own: %v\n%s", err, output)
	}
	output, _, _ = bytes.Cut(output[start[0]:], []byte("\nFAIL"))
	return proven, fmt.Sprintf("%.500s", bytes.TrimSpace(output))
}
