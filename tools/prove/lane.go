package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	testTimeout = 4 * time.Minute // for one test; no test needs two minutes
	patience    = 6 * time.Second // for one event that a test waits for
)

// The outcomes of a removal.
const (
	proven   = "proven"
	survives = "SURVIVES" // a test that must fail passes
	broken   = "BROKEN"   // the run shows nothing
)

// proveAll proves removals, several at the same time, each in a lane. It prints each outcome, and
// returns the names of the removals that are not proven.
func proveAll(ctx context.Context, src source, chosen []removal) (failed []string, err error) {
	dir, err := os.MkdirTemp("", "hubs-prove-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o755) // a PostgreSQL that a test starts runs as another user
	os.Setenv("TMPDIR", dir)

	jobs := make(chan removal, len(chosen))
	for _, r := range chosen {
		jobs <- r
	}
	close(jobs)
	asIs := &lane{ctx: ctx, dir: dir + "/as-is", tree: dir + "/as-is/tree"}
	if err := asIs.prepare(chosen); err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var running sync.WaitGroup
	count := 0
	for i := range 4 * runtime.NumCPU() { // so many, because tests mostly wait
		own := fmt.Sprintf("%s/%d", dir, i)
		l := &lane{ctx: ctx, dir: own, tree: own + "/tree", asIs: asIs}
		if err := l.copyTree(); err != nil {
			return nil, err
		}
		running.Go(func() {
			for r := range jobs {
				if ctx.Err() != nil {
					return
				}
				started := time.Now()
				outcome, said := l.prove(src, r)
				mu.Lock()
				count++
				fmt.Printf("%3d/%d  %-8s  %-40s  %5.1f s\n         %.300s\n", count, len(chosen),
					outcome, r.name, time.Since(started).Seconds(), strings.Join(strings.Fields(said), " "))
				if outcome != proven {
					fmt.Println(said)
					failed = append(failed, r.name)
				}
				mu.Unlock()
			}
		})
	}
	running.Wait()
	return failed, ctx.Err()
}

// A lane proves one removal at a time in a copy of the tree.
type lane struct {
	ctx       context.Context
	dir, tree string
	asIs      *lane    // the lane without removals, with the compiled tests; nil in that lane itself
	needed    sync.Map // in the lane without removals: for each test, a func as in patienceFor
}

// prepare copies the tree, and compiles the server and the tests that removals name. All lanes use
// these tests: a removal changes the server that they run and the files that they read.
func (l *lane) prepare(chosen []removal) error {
	if err := l.copyTree(); err != nil {
		return err
	}
	if err := l.build("build", "hubs", "."); err != nil {
		return err
	}
	built := map[string]bool{}
	for _, r := range chosen {
		for _, name := range r.tests {
			folder, _, _ := splitTest(name)
			if built[folder] {
				continue
			}
			built[folder] = true
			if err := l.build("test", binaryOf(folder), folder); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyTree copies the files that git tracks and the new files that it does not ignore. ls leaves
// out the files that git still lists but that were deleted.
func (l *lane) copyTree() error {
	const script = `mkdir -p "$0" && git -c 'safe.directory=*' ls-files -coz --exclude-standard |
		xargs -0 ls -d 2>/dev/null | tar -T - -cf - | tar -xf - -C "$0"`
	output, err := exec.CommandContext(l.ctx, "bash", "-c", script, l.tree).CombinedOutput()
	if err != nil {
		return fmt.Errorf("can't copy the tree: %w\n%s", err, output)
	}
	return nil
}

// binaryOf returns the file name of the compiled tests of a folder.
func binaryOf(folder string) string { return strings.ReplaceAll(folder, "/", "-") + ".test" }

// build compiles the server with the command "build", or the tests of a folder with "test". It does
// not optimize, because that would take longer. nice leaves the processor to tests that wait for
// the server.
func (l *lane) build(command, binary, folder string) error {
	args := []string{"go", command, "-trimpath", "-gcflags=-N -l", "-ldflags=-s -w"}
	if command == "test" {
		args = append(args, "-c", "-vet=off")
	}
	args = append(args, "-o", l.dir+"/"+binary, "./"+folder)
	cmd := exec.CommandContext(l.ctx, "nice", args...)
	cmd.Dir = l.tree
	cmd.Env = append(os.Environ(), "GOGC=off") // the compiler ends before it needs much memory
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("the code does not compile: %w\n%s", err, output)
	}
	return nil
}

// prove applies a removal to the lane's copy, runs the tests that it names, and restores the files.
func (l *lane) prove(src source, r removal) (outcome, said string) {
	changed, err := src.apply(r)
	if err != nil {
		return broken, err.Error()
	}
	for file, text := range changed {
		os.WriteFile(filepath.Join(l.tree, file), []byte(text), 0o644)
		restored := []byte(strings.Join(src[file], "\n"))
		defer os.WriteFile(filepath.Join(l.tree, file), restored, 0o644)
	}
	isBuilt := map[string]bool{}
	for _, name := range r.tests {
		// The tests of package main include the server. The others run it.
		folder, _, _ := splitTest(name)
		command, binary := "build", "hubs"
		if folder == "." {
			command, binary = "test", binaryOf(folder)
		}
		if !isBuilt[binary] {
			if err := l.build(command, binary, "."); err != nil {
				return broken, err.Error()
			}
		}
		isBuilt[binary] = true
		wait, err := l.asIs.patienceFor(name)
		if err != nil {
			return broken, err.Error()
		}
		outcome, saidByOne := l.runTest(name, wait)
		said += name + ": " + saidByOne + "\n"
		if outcome != proven {
			return outcome, said
		}
	}
	return proven, said
}

// patienceFor returns the limit of each wait with which a test passes without a removal. With a
// removal, most tests wait for an event that never comes, so the limit is short if it can be. Only
// the first call for a test runs it.
func (l *lane) patienceFor(name string) (time.Duration, error) {
	run := sync.OnceValues(func() (time.Duration, error) {
		said := ""
		for _, wait := range []time.Duration{patience, 5 * patience} {
			outcome := ""
			if outcome, said = l.runTest(name, wait); outcome == survives {
				return wait, nil
			}
		}
		return 0, errors.New("the test fails without the removal too: " + said)
	})
	first, _ := l.needed.LoadOrStore(name, run)
	return first.(func() (time.Duration, error))()
}

// runTest runs a test against the lane's server. Each wait in the test ends after the given time.
func (l *lane) runTest(name string, wait time.Duration) (outcome, said string) {
	folder, _, test := splitTest(name)
	compiledBy := cmp.Or(l.asIs, l)
	if folder == "." {
		compiledBy = l
	}
	pattern := "^" + strings.ReplaceAll(regexp.QuoteMeta(test), "/", "$/^") + "$"
	ctx, cancel := context.WithTimeout(l.ctx, testTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, compiledBy.dir+"/"+binaryOf(folder),
		"-test.run="+pattern,
		"-test.parallel=8") // subtests mostly wait, so many can run at the same time
	cmd.Dir = l.tree + "/" + folder
	cmd.Env = append(os.Environ(),
		"HUBS_BINARY="+l.dir+"/hubs",
		"HUBS_TEST_PATIENCE="+wait.String())
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

// noAssertion matches the beginning of a message that proves nothing. "setup: " stands for a step
// that the test needs and is not about (hubstest.Must): no server starts, for example. "side
// effect: " stands for what no test expects, such as an error in the log. If they counted, every
// removal that breaks the server would be proven.
var noAssertion = regexp.MustCompile(`^(setup|side effect): `)

// judge returns the outcome of a test that has ended with err. A line that t.Log writes looks the
// same as a failure, so tests write their notes to t.Output.
func judge(output []byte, err error) (outcome, said string) {
	if err == nil {
		if bytes.Contains(output, []byte("no tests to run")) {
			return broken, "there is no such test"
		}
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
