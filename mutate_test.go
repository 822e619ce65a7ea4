//go:build moving

package main

// ./dev.sh mutate: gremlins changes one operator of a file at a time, and the tests of that
// file must notice. docs/mutants.md has the result.
//
// gremlins calls `go test` in a copy of the tree, and goes by its exit status. The program
// named go that it finds first is a script, which hands these calls to TestMutant: it compiles
// the test files that are needed, has a PostgreSQL that runs already, ends with the first test
// that fails, and tells a failed assertion from an environment that is broken.

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// mutatedFiles has the files, and the tests that must notice a change: all tests of the test
// files, and single ones.
var mutatedFiles = []struct {
	file  string
	tests []string
}{
	{"otp.go", []string{"otp_test.go", "TestAddressesLookAlike"}},
	{"ratelimit.go", []string{"ratelimit_test.go", "connections_test.go", "transfers_test.go", "TestCorpusForwarded"}},
	{"auth.go", []string{"auth_test.go", "TestUserCommands", "TestUserListAndShow", "TestWrongCommandLines",
		"TestForgedTokens", "TestCookieName", "TestEmailForms", "TestCodeForms", "TestOutputsAreChecked"}},
	{"middleware.go", []string{"middleware_test.go", "log_test.go", "TestCORS", "TestHubListRefusesBadParameters", "TestStrictJSON"}},
}

// slowTests run only if all the others have passed.
var slowTests = []string{
	"TestAllKeysRefused", "TestConnectionsAreBounded",
	"TestDatabaseRefusesConnections", "TestFloodFreesNoTokens",
	"TestFloodOfNewKeys", "TestHungMailServer", "TestMailRefusedInOneAnswer", "TestMailServerFails",
	"TestNewClientGetsIn", "TestSlowAndLargeRequests", "TestWaitingConnectionsGiveWay",
}

// leftOut are tests that take half a minute or more.
var leftOut = []string{"TestMemoryIsBounded", "TestStalledTransfersEnd", "TestUploadsAreUndoneLater"}

// gremlinsKinds turns on kinds of changes that are off by default. INVERT_NEGATIVES makes the
// same changes here as ARITHMETIC_BASE. The bitwise kinds mostly make what does not compile.
var gremlinsKinds = []string{
	"--invert-assignments", "--invert-logical", "--invert-loopctrl", "--remove-self-assignments", "--invert-negatives=false",
}

func TestMutate(t *testing.T) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	files := strings.Fields(os.Getenv("MUTATE"))
	if len(files) == 0 {
		for _, mutated := range mutatedFiles {
			files = append(files, mutated.file)
		}
	}
	for _, file := range files {
		if _, _, err := testsOf(file); err != nil {
			t.Fatal(err)
		}
	}
	workers := 2
	if n, err := strconv.Atoi(os.Getenv("MUTATE_WORKERS")); err == nil {
		workers = n
	}
	p := &prover{ctx: ctx, dir: testDir + "/mutate"}
	defer endProcesses(p.dir)
	var lanes []*lane
	for i := range workers {
		l := &lane{p: p, dir: fmt.Sprintf("%s/%d", p.dir, i)}
		l.pg = &testPostgres{dir: l.dir + "/postgres"}
		if err := errors.Join(makeDir(l.dir), l.pg.start()); err != nil {
			t.Fatal(err)
		}
		defer l.pg.stop()
		if err := os.WriteFile(l.dir+"/url", []byte(l.pg.url), 0o600); err != nil {
			t.Fatal(err)
		}
		lanes = append(lanes, l)
	}
	tree, clean, err := lanes[0].newCopy()
	if err != nil {
		t.Fatal(err)
	}
	defer clean()
	if err := makeGo(p.dir + "/bin"); err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if err := p.unleash(file, tree, workers); err != nil {
			t.Fatal(err)
		}
	}
}

// testsOf returns the names of the tests that must notice a change of the file.
func testsOf(file string) (quick, slow []string, err error) {
	for _, mutated := range mutatedFiles {
		if mutated.file != file {
			continue
		}
		for _, name := range mutated.tests {
			names := []string{name}
			if strings.HasSuffix(name, ".go") {
				if names, err = testsIn(name); err != nil {
					return nil, nil, err
				}
			}
			for _, name := range names {
				switch {
				case slices.Contains(leftOut, name):
				case slices.Contains(slowTests, name):
					slow = append(slow, name)
				default:
					quick = append(quick, name)
				}
			}
		}
		return quick, slow, nil
	}
	return nil, nil, fmt.Errorf("%s is none of the files that ./dev.sh mutate knows", file)
}

// testsIn returns the tests of a test file.
func testsIn(path string) (names []string, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		return nil, err
	}
	for _, declaration := range file.Decls {
		function, ok := declaration.(*ast.FuncDecl)
		if !ok || function.Recv != nil {
			continue
		}
		name := function.Name.Name
		if strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz") {
			names = append(names, name)
		}
	}
	return names, nil
}

// makeGo writes the script named go.
func makeGo(dir string) error {
	goProgram, err := exec.LookPath("go")
	if err != nil {
		return err
	}
	path := os.Getenv("PATH")
	script := fmt.Sprintf(`#!/bin/sh
PATH='%s'
case $1 in
test) MUTANT="$*" exec '%s' -test.run='^TestMutant$' ;;
*) exec '%s' "$@" ;;
esac
`, path, os.Args[0], goProgram)
	return errors.Join(makeDir(dir), os.WriteFile(dir+"/go", []byte(script), 0o755), os.Setenv("PATH", dir+":"+path))
}

// unleash runs gremlins over one file. What the tests said of each change goes to .dev/mutants.
func (p *prover) unleash(file, tree string, workers int) error {
	sources, err := filepath.Glob("*.go")
	if err != nil {
		return err
	}
	args := []string{"unleash", "--workers=" + strconv.Itoa(workers), "--timeout-coefficient=4", "--exclude-files=/"}
	for _, source := range sources {
		if source != file && !strings.HasSuffix(source, "_test.go") {
			args = append(args, "--exclude-files=^"+source+"$")
		}
	}
	args = append(args, gremlinsKinds...)
	log, err := filepath.Abs(".dev/mutants/" + file + ".txt")
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(filepath.Dir(log), 0o755), os.WriteFile(log, nil, 0o644), makeDir(p.dir+"/gremlins")); err != nil {
		return err
	}
	fmt.Printf("\n%s: what the tests said of each change is in .dev/mutants/%s.txt\n", file, file)
	cmd := exec.CommandContext(p.ctx, "gremlins", append(args, ".")...)
	cmd.Dir = tree
	cmd.Env = append(os.Environ(), "TMPDIR="+p.dir+"/gremlins", "MUTATE_DIR="+p.dir, "MUTATE_FILE="+file,
		"MUTATE_TREE="+tree, "MUTATE_LOG="+log)
	cmd.Stdout = os.Stdout
	cmd.Stderr = os.Stderr
	return cmd.Run()
}

// The exit statuses by which gremlins tells what became of a change.
const (
	exitLived     = 0
	exitKilled    = 1
	exitNotViable = 2 // it does not compile
	exitUnclear   = 3 // gremlins counts it as lived
)

// TestMutant is `go test` for gremlins. It ends the process with the exit status.
func TestMutant(t *testing.T) {
	command := flag.NewFlagSet("go test", flag.ContinueOnError)
	command.Bool("cover", false, "") // gremlins is told that all of the file is covered: nothing is left out
	command.Bool("failfast", false, "")
	profile := command.String("coverprofile", "", "")
	timeout := command.Duration("timeout", buildTimeout, "")
	args := strings.Fields(os.Getenv("MUTANT"))
	if len(args) == 0 {
		t.Fatal("this is no test: ./dev.sh mutate uses it")
	}
	if err := command.Parse(args[1:]); err != nil {
		t.Fatal(err)
	}
	// gremlins ends this process after its timeout, and nothing that it has started.
	ctx, cancel := context.WithTimeout(context.Background(), *timeout-15*time.Second)
	defer cancel()
	l, err := takeLane(ctx)
	if err != nil {
		t.Fatal(err)
	}
	file := os.Getenv("MUTATE_FILE")
	status, said := l.runMutant(file, *profile)
	if ctx.Err() != nil {
		logMutant(file, "timed out", said)
		time.Sleep(time.Minute) // until gremlins has seen it
	}
	if *profile == "" {
		words := []string{exitLived: "LIVED", exitKilled: "killed", exitNotViable: "not viable", exitUnclear: "UNCLEAR"}
		logMutant(file, words[status], said)
	} else {
		fmt.Println(said) // gremlins prints it if the tests fail without any change
	}
	os.RemoveAll(testDir)
	os.Exit(status)
}

// takeLane takes a lane that no other process has, until this process ends.
func takeLane(ctx context.Context) (*lane, error) {
	urls, err := filepath.Glob(os.Getenv("MUTATE_DIR") + "/*/url")
	if err != nil {
		return nil, err
	}
	for ; ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		for _, name := range urls {
			f, err := os.Open(name)
			if err != nil {
				return nil, err
			}
			if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
				f.Close()
				continue
			}
			url, err := os.ReadFile(name)
			pg := &testPostgres{url: string(url)}
			return &lane{p: &prover{ctx: ctx}, dir: filepath.Dir(name), pg: pg, lock: f}, err
		}
	}
	return nil, ctx.Err()
}

// runMutant runs the tests of a file in the working directory, the quick ones first. said is the
// first assertion that failed, or why there is none. A test that fails has to fail a second time,
// alone: on a busy machine a test may fail by itself.
func (l *lane) runMutant(file, profile string) (status int, said string) {
	quick, slow, err := testsOf(file)
	if err != nil {
		return exitUnclear, err.Error()
	}
	binary := l.dir + "/mutant.test"
	all := slices.Concat(quick, slow)
	if out, err := compileTests(l.p.ctx, ".", binary, all, "-gcflags=-N -l"); err != nil { // quick to compile
		return exitNotViable, string(out)
	}
	if profile != "" { // the start, without a change
		if err := os.WriteFile(profile, []byte("mode: set\n"+file+":1.1,99999.1 1 1\n"), 0o644); err != nil {
			return exitUnclear, err.Error()
		}
	}
	for _, names := range [][]string{quick, slow} {
		for len(names) > 0 {
			var failed string
			status, failed, said = l.runUntilFailure(binary, names)
			if status == exitLived {
				break
			}
			failed, _, _ = strings.Cut(failed, "/")
			if !slices.Contains(names, failed) {
				return status, said
			}
			status, _, said = l.runUntilFailure(binary, []string{failed})
			if status != exitLived {
				return status, said
			}
			names = slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == failed })
		}
	}
	return exitLived, ""
}

// runUntilFailure runs tests, and ends them all when one has failed.
func (l *lane) runUntilFailure(binary string, names []string) (status int, failed, said string) {
	defer func() {
		endProcesses(l.dir + "/tmp")
		unmount(l.dir + "/tmp")
		os.RemoveAll(l.dir + "/tmp")
	}()
	if err := errors.Join(l.emptyPostgres(), makeDir(l.dir+"/tmp")); err != nil {
		return exitUnclear, "", err.Error()
	}
	cmd := l.testCommand(l.p.ctx, ".", binary, names, "-test.failfast", "-test.timeout=0")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return exitUnclear, "", err.Error()
	}
	if err := cmd.Start(); err != nil {
		return exitUnclear, "", err.Error()
	}
	results := newTestResults()
	reader := bufio.NewReader(out)
	var reason string
	byAssertion := false
	for !byAssertion && err == nil {
		var line []byte
		line, err = reader.ReadBytes('\n')
		if name := results.add(line); name != "" { // without an assertion: the words of a panic follow
			failed = name
			reason, byAssertion = results.verdict(name)
		}
	}
	cmd.Cancel()
	cmd.Wait()
	results.ended = firstOf(results.ended, endOfBinary(stderr.String()))
	switch {
	case byAssertion:
		return exitKilled, failed, failed + ": " + results.message(failed)
	case results.ended != "":
		return exitKilled, failed, failed + ": " + results.ended
	case failed == "" && results.action[""] == "pass":
		return exitLived, "", ""
	}
	return exitUnclear, failed, failed + ": " + reason + stderr.String()
}

// logMutant writes a line: the change, what became of it, the first line of what was said.
func logMutant(file, outcome, said string) {
	changed, _ := os.ReadFile(file)
	source, _ := os.ReadFile(os.Getenv("MUTATE_TREE") + "/" + file)
	before := strings.Split(string(source), "\n")
	place := file
	for i, line := range strings.Split(string(changed), "\n") {
		// gremlins writes the file anew; blanks may differ.
		if i >= len(before) || !slices.Equal(strings.Fields(line), strings.Fields(before[i])) {
			place = fmt.Sprintf("%s:%d: %s", file, i+1, strings.TrimSpace(line))
			break
		}
	}
	said = strings.Join(strings.Fields(said), " ")
	text := fmt.Sprintf("%-10s  %s\n            %s\n", outcome, place, said[:min(len(said), 300)])
	log, err := os.OpenFile(os.Getenv("MUTATE_LOG"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return
	}
	defer log.Close()
	log.WriteString(text)
}
