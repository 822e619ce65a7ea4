package main

import (
	"bytes"
	"context"
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
	testTimeout = 4 * time.Minute  // for one test; no test needs two minutes
	patience    = 15 * time.Second // for one event that a test waits for
)

// The outcomes of a removal.
const (
	proven   = "proven"
	survives = "SURVIVES" // a test that must fail passes
	broken   = "BROKEN"   // the run shows nothing
)

// proveAll proves removals, several at the same time, each in a lane. It prints each outcome, and
// returns the names of the removals that are not proven.
func proveAll(ctx context.Context, chosen []removal) (failed []string, err error) {
	dir, err := os.MkdirTemp("", "hubs-prove-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o755) // a PostgreSQL that a test starts runs as another user
	os.Setenv("TMPDIR", dir)

	asIs := &lane{ctx: ctx, dir: dir + "/as-is"}
	if err := asIs.prepare(); err != nil {
		return nil, err
	}
	lanes := make(chan *lane, 4*runtime.NumCPU()) // so many, because tests mostly wait
	for i := range cap(lanes) {
		l := &lane{ctx: ctx, dir: fmt.Sprintf("%s/%d", dir, i), asIs: asIs}
		if err := l.copyTree(); err != nil {
			return nil, err
		}
		lanes <- l
	}
	src := readSource()
	var mu sync.Mutex
	var running sync.WaitGroup
	for _, r := range chosen {
		l := <-lanes
		if ctx.Err() != nil {
			break
		}
		running.Go(func() {
			outcome, said := l.prove(src, r)
			lanes <- l
			mu.Lock()
			defer mu.Unlock()
			fmt.Printf("%-8s  %s\n  %s\n", outcome, r.name, said)
			if outcome != proven {
				failed = append(failed, r.name)
			}
		})
	}
	running.Wait()
	return failed, ctx.Err()
}

// A lane proves one removal at a time in a copy of the tree.
type lane struct {
	ctx    context.Context
	dir    string   // has the copy in the folder tree, and what was compiled
	asIs   *lane    // the lane without removals, with the compiled tests; nil in that lane itself
	passed sync.Map // in the lane without removals: for each test, a func as in passes
}

// prepare copies the tree, and compiles the server and all tests. All lanes use these tests: a
// removal changes the server that they run and the files that they read.
func (l *lane) prepare() error {
	if err := l.copyTree(); err != nil {
		return err
	}
	if err := l.build("hubs", "go", "build", "."); err != nil {
		return err
	}
	return l.build("", "go", "test", "-c", "-vet=off", ".", "./test/...")
}

// copyTree copies the files that git tracks and the new files that it does not ignore. ls leaves
// out the files that git still lists but that were deleted.
func (l *lane) copyTree() error {
	const script = `mkdir -p "$0" && git -c 'safe.directory=*' ls-files -coz --exclude-standard |
		xargs -0 ls -d 2>/dev/null | tar -T - -cf - | tar -xf - -C "$0"`
	output, err := exec.CommandContext(l.ctx, "bash", "-c", script, l.dir+"/tree").CombinedOutput()
	if err != nil {
		return fmt.Errorf("can't copy the tree: %w\n%s", err, output)
	}
	return nil
}

// build compiles the server, or with an empty name all tests of the command. nice leaves the
// processor to tests that wait for the server.
func (l *lane) build(binary string, command ...string) error {
	cmd := exec.CommandContext(l.ctx, "nice", command...)
	cmd.Dir = l.dir + "/tree"
	cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false -trimpath -gcflags=-N -o="+l.dir+"/"+binary)
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
		path := filepath.Join(l.dir, "tree", file)
		os.WriteFile(path, []byte(text), 0o644)
		defer os.WriteFile(path, []byte(src[file]), 0o644)
	}
	for _, name := range r.tests {
		folder, _, _ := splitTest(name)
		if folder == "." { // its tests include the server; the others run it
			err = l.build("", "go", "test", "-c", "-vet=off", ".")
		} else {
			err = l.build("hubs", "go", "build", ".")
		}
		if err != nil {
			return broken, err.Error()
		}
		if !l.asIs.passes(name) {
			return broken, name + " fails without the removal too"
		}
		outcome, said = l.runTest(name)
		said = name + ": " + said
		if outcome != proven {
			break
		}
	}
	return outcome, said
}

// passes reports whether a test passes without a removal. Only the first call for a test runs it.
func (l *lane) passes(name string) bool {
	run := sync.OnceValue(func() bool {
		outcome, _ := l.runTest(name)
		return outcome == survives
	})
	first, _ := l.passed.LoadOrStore(name, run)
	return first.(func() bool)()
}

// runTest runs a test against the lane's server.
func (l *lane) runTest(name string) (outcome, said string) {
	folder, _, test := splitTest(name)
	compiledBy := l
	if folder != "." && l.asIs != nil {
		compiledBy = l.asIs
	}
	binary := filepath.Base(folder) + ".test"
	if folder == "." {
		binary = "hubs.test"
	}
	pattern := "^" + strings.ReplaceAll(regexp.QuoteMeta(test), "/", "$/^") + "$"
	ctx, cancel := context.WithTimeout(l.ctx, testTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, compiledBy.dir+"/"+binary,
		"-test.run="+pattern,
		"-test.parallel=8") // subtests mostly wait, so many can run at the same time
	cmd.Dir = filepath.Join(l.dir, "tree", folder)
	cmd.Env = append(os.Environ(),
		"HUBS_BINARY="+l.dir+"/hubs",
		"HUBS_TEST_PATIENCE="+patience.String())
	// If the test is cut off, so are the programs that it has started.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	output, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return broken, fmt.Sprintf("the test does not end within %v\n%s", testTimeout, output)
	}
	return judge(output, err)
}

// failure matches the first line of a message of t.Error or t.Fatal.
var failure = regexp.MustCompile(`(?m)^\s+\w+\.go:\d+: (.*)`)

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
	for _, message := range failure.FindAllSubmatch(output, -1) {
		if !noAssertion.Match(message[1]) {
			return proven, fmt.Sprintf("%.300s", message[1])
		}
	}
	return broken, fmt.Sprintf("got no failure of an assertion: %v\n%s", err, output)
}
