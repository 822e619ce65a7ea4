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
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"hubs/tools/removals"
)

const (
	testTimeout   = 4 * time.Minute  // for one test; no test needs two minutes
	mostPatience  = 30 * time.Second // for one event that a test waits for; hubstest's own value
	leastPatience = 4 * time.Second  // for one event, in addition to the time that the test takes
)

// The outcomes of a removal.
const (
	proven   = "proven"
	survives = "SURVIVES" // a test that must fail passes
	broken   = "BROKEN"   // the run shows nothing: the code does not compile, no server starts, …
)

// A verdict is the result for one removal.
type verdict struct {
	removals.Removal
	outcome string
	said    string        // the failures of the tests, or why the removal is not proven
	took    time.Duration // to compile and to run the tests
}

// proveAll proves removals, several at the same time, each in a lane. It prints each verdict at
// once, and returns all of them. If ctx ends, it returns those it has, and an error.
func proveAll(
	ctx context.Context, source removals.Source, chosen []removals.Removal,
) ([]verdict, error) {
	dir, err := os.MkdirTemp("", "hubs-prove-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o755) // a PostgreSQL that a test starts runs as another user
	os.Setenv("TMPDIR", dir)

	asIs := &lane{ctx: ctx, source: source, dir: dir + "/as-is"}
	err = asIs.prepare(chosen)
	if err != nil {
		return nil, err
	}
	lanes := make([]*lane, 4*runtime.NumCPU()) // so many, because tests mostly wait
	for i := range lanes {
		lanes[i] = &lane{
			ctx:    ctx,
			source: source,
			dir:    fmt.Sprintf("%s/%d", dir, i),
			asIs:   asIs,
		}
		err := lanes[i].copyTree()
		if err != nil {
			return nil, err
		}
	}
	jobs := make(chan removals.Removal, len(chosen))
	for _, r := range chosen {
		jobs <- r
	}
	close(jobs)
	var mu sync.Mutex
	var all []verdict
	var running sync.WaitGroup
	for _, l := range lanes {
		running.Go(func() {
			for r := range jobs {
				if ctx.Err() != nil {
					return
				}
				v := l.prove(r)
				if v.outcome == broken { // try again: the machine may have been overloaded
					v = l.prove(r)
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
	ctx    context.Context
	source removals.Source
	dir    string
	asIs   *lane    // the lane without removals, with the compiled tests; nil in that lane itself
	seen   sync.Map // in the lane without removals only: for each test, a func as in measure
}

// folders returns the folders of the tests that removals name, sorted, each once.
func folders(chosen ...removals.Removal) []string {
	var all []string
	for _, r := range chosen {
		for _, name := range r.Tests {
			folder, _ := removals.SplitTest(name)
			all = append(all, folder)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// prepare fills the lane asIs: it copies the tree, then compiles the server and the tests of each
// folder. Other lanes use these tests too, because a removal changes the server that the tests run
// and the files that they read, not the tests.
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

// copyTree copies the files that git tracks and the new files that it does not ignore. ls leaves
// out the files that git still lists but that were deleted.
func (l *lane) copyTree() error {
	const script = `mkdir -p "$0" && git -c 'safe.directory=*' ls-files -coz --exclude-standard |
		xargs -0 ls -d 2>/dev/null | tar -T - -cf - | tar -xf - -C "$0"`
	tree := l.dir + "/tree"
	output, err := exec.CommandContext(l.ctx, "bash", "-c", script, tree).CombinedOutput()
	if err != nil {
		return fmt.Errorf("can't copy the tree: %w\n%s", err, output)
	}
	return nil
}

// testBinary returns the file name of the compiled tests of a folder.
func testBinary(folder string) string {
	return strings.ReplaceAll(folder, "/", "-") + ".test"
}

// build compiles the server with the command "build", or the tests of a folder with "test". It does
// not optimize, because that would take longer. It uses nice, because other lanes run tests at the
// same time, which must not become slow.
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
		return fmt.Errorf("the code does not compile: %w\n%s", err, output)
	}
	return nil
}

// prove applies a removal to the lane's copy, runs the tests that it names, and restores the files.
func (l *lane) prove(r removals.Removal) verdict {
	started := time.Now()
	outcome, said, err := l.try(r)
	if err != nil {
		outcome = broken
		said = err.Error()
	}
	return verdict{Removal: r, outcome: outcome, said: said, took: time.Since(started)}
}

// try applies a removal, runs its tests, and restores the files. It returns an error if the tests
// could not run or the files could not be restored.
func (l *lane) try(r removals.Removal) (outcome, said string, err error) {
	changed, err := l.source.Apply(r.Changes)
	if err != nil {
		return "", "", err
	}
	before, err := l.swap(changed)
	defer func() {
		_, restoreErr := l.swap(before)
		err = cmp.Or(err, restoreErr)
	}()
	if err != nil {
		return "", "", err
	}
	err = l.buildFor(r)
	if err != nil {
		return "", "", err
	}
	outcome, said = l.tryTests(r.Tests)
	return outcome, said, nil
}

// swap overwrites files of the lane's copy. It returns their previous text, by path, even if it
// fails after some of them.
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

// buildFor compiles what the tests of a removal run: the server, and for tests of package main, the
// tests themselves, because they include the server.
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

// tryTests runs the tests of a removal until one of them does not fail as it must.
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

// tryTest runs a test with the removal in place. The test must fail.
//
// Most tests then wait for an event that never comes. To save time, the limit of each wait is the
// time that the whole test takes without the removal, plus leastPatience. A test that took as long
// as the limit may have failed only because the limit is too short. So it runs again at once,
// without the removal and with the same limit, and must pass.
func (l *lane) tryTest(name string) (outcome, said string) {
	took, failure := l.asIs.measure(name)
	if failure != "" {
		return broken, "the test fails without the removal too: " + failure
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
		return broken, fmt.Sprintf("with waits of at most %v, the test fails without the removal "+
			"too. With the removal: %s", patience, said)
	}
	return outcome, said
}

// measure runs a test in this lane, without a removal. Only the first call for a test runs it. A
// test that fails runs a second time. If it fails again, it proves nothing, and failure is its
// output.
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

// runTest runs a test against the lane's server. Each wait in the test ends after patience. The
// outcome is proven if the test fails by an assertion; said is then the first 500 bytes of the
// failure.
//
// An assertion is a failure whose message begins neither with "setup: " nor with "side effect: ".
// "setup: " stands for a step that the test needs and is not about (hubstest.Must): no server
// starts, for example. "side effect: " stands for what no test expects: no answer, an error in the
// log. Neither counts, because otherwise every removal that breaks the server would be proven.
//
// A line that t.Log writes looks the same as a failure. So tests write their notes to t.Output.
func (l *lane) runTest(name string, patience time.Duration) (outcome, said string) {
	folder, test := removals.SplitTest(name)
	compiledBy := cmp.Or(l.asIs, l)
	if folder == "." { // tests of package main: see buildFor
		compiledBy = l
	}
	pattern := "^" + strings.ReplaceAll(regexp.QuoteMeta(test), "/", "$/^") + "$"
	ctx, cancel := context.WithTimeout(l.ctx, testTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, compiledBy.dir+"/"+testBinary(folder),
		"-test.run="+pattern,
		"-test.parallel=8") // subtests mostly wait, so many can run at the same time
	cmd.Dir = l.dir + "/tree/" + folder
	cmd.Env = append(os.Environ(),
		"HUBS_BINARY="+l.dir+"/hubs",
		"HUBS_TEST_PATIENCE="+patience.String())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	output, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return broken, fmt.Sprintf("the test does not end within %v\n%s", testTimeout, output)
	}
	return judge(output, err)
}

// failure matches the beginning of a message of t.Error or t.Fatal.
var failure = regexp.MustCompile(`(?m)^\s+\w+\.go:\d+: `)

// noAssertion matches the beginning of a message that proves nothing.
var noAssertion = regexp.MustCompile(`^(setup|side effect): `)

// judge returns the outcome of a test that has ended with err.
func judge(output []byte, err error) (outcome, said string) {
	if err == nil {
		return survives, "the test passes, want a failure"
	}
	for _, at := range failure.FindAllIndex(output, -1) {
		message := output[at[1]:]
		if !noAssertion.Match(message) {
			message, _, _ = bytes.Cut(message, []byte("\nFAIL"))
			return proven, fmt.Sprintf("%.500s", bytes.TrimSpace(message))
		}
	}
	return broken, fmt.Sprintf("got no failure of an assertion: %v\n%s", err, output)
}
