//go:build moving

package main

// ./dev.sh prove: each removal of testdata/removals, in a copy of the tree. The patch applies,
// the code compiles and passes go vet, and every test that the removal names fails by an
// assertion of its own. A test that passes has missed what was taken out.
//
// Several removals run at a time, each in a lane. A lane has a PostgreSQL, which the test
// runs in it use one after the other, and a folder, in which everything of a run lies.

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
)

const (
	buildTimeout = 10 * time.Minute
	runTimeout   = 4 * time.Minute // of the tests of one removal; none of them needs two
	ciMinutes    = 12              // --ci begins no removal later than this; PROVE_MINUTES sets another number
	ciShare      = 10              // --ci takes one of so many, and those of changed files
	ciMost       = 200             // --ci takes no more: enough for a change of any one file
	baselineSize = 6               // tests that run together without a removal
)

// The outcomes of a removal.
const (
	proven   = "proven"
	survives = "SURVIVES" // a test that should fail passes
	broken   = "BROKEN"   // the removal shows nothing: it does not apply or compile, a test panics, …
)

type verdict struct {
	removal
	outcome string
	reason  string            // of SURVIVES and BROKEN
	said    map[string]string // by test: the message of its first assertion
	build   time.Duration
	run     time.Duration
	again   bool // this is the second attempt
}

func TestProve(t *testing.T) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	removals, err := readRemovals()
	if err != nil {
		t.Fatal(err)
	}
	var verbose, ci bool
	var wanted []string
	for arg := range strings.FieldsSeq(os.Getenv("PROVE")) {
		switch arg {
		case "-v":
			verbose = true
		case "--ci":
			ci = true
		default:
			wanted = append(wanted, arg)
		}
	}
	p := &prover{ctx: ctx, dir: testDir + "/prove", broken: map[string]string{}}
	if ci {
		removals = forCI(removals)
		minutes, err := strconv.Atoi(os.Getenv("PROVE_MINUTES"))
		if err != nil {
			minutes = ciMinutes
		}
		p.until = time.Now().Add(time.Duration(minutes) * time.Minute)
	} else {
		removals, err = selectRemovals(removals, wanted)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := p.prove(t, removals, verbose); err != nil {
		t.Fatal(err)
	}
}

// selectRemovals returns those of the rows, topics and names asked for, or all.
func selectRemovals(removals []removal, wanted []string) ([]removal, error) {
	if len(wanted) == 0 {
		return removals, nil
	}
	var selected []removal
	for _, want := range wanted {
		name := strings.TrimSuffix(filepath.Base(want), ".patch")
		known := len(selected)
		for _, r := range removals {
			if r.group() == name || r.name == name {
				selected = append(selected, r)
			}
		}
		if len(selected) == known {
			return nil, fmt.Errorf("there is no row, topic or removal %q in testdata/removals", want)
		}
	}
	return selected, nil
}

// forCI returns the removals that change a file which the last commit changed, or which the
// commit changed themselves, and a random tenth of the others, in random order: the time may
// not be enough for all. PROVE_SEED repeats a choice, PROVE_BASE names another commit.
func forCI(removals []removal) []removal {
	seed, err := strconv.ParseUint(os.Getenv("PROVE_SEED"), 10, 64)
	if err != nil {
		seed = rand.Uint64N(1_000_000)
	}
	base := os.Getenv("PROVE_BASE")
	if base == "" {
		base = "HEAD~1"
	}
	out, err := exec.Command("git", "-c", "safe.directory=*", "diff", "--name-only", base).Output()
	changed := strings.Fields(string(out))
	if err != nil { // a shallow clone, or none
		fmt.Printf("What changed since %s is not known here\n", base)
	}
	var touched, others []removal
	for _, r := range removals {
		files := append(slices.Clone(r.files), "testdata/removals/"+r.name+".patch")
		if slices.ContainsFunc(files, func(file string) bool { return slices.Contains(changed, file) }) {
			touched = append(touched, r)
		} else {
			others = append(others, r)
		}
	}
	random := rand.New(rand.NewPCG(seed, 0))
	random.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	others = others[:(len(others)+ciShare-1)/ciShare]
	chosen := append(touched, others...)
	random.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
	chosen = chosen[:min(len(chosen), ciMost)]
	fmt.Printf("%d of %d removals, of %d whose files have changed since %s and %d by chance (PROVE_SEED=%d)\n",
		len(chosen), len(removals), len(touched), base, len(others), seed)
	return chosen
}

// A prover proves removals.
type prover struct {
	ctx   context.Context
	dir   string
	until time.Time     // no removal begins later; zero: no bound
	build chan struct{} // a compiler uses two processors: so many run at a time

	mu     sync.Mutex
	broken map[string]string // tests that fail without any removal, and what they said
}

// A lane has one run at a time.
type lane struct {
	p   *prover
	dir string
	pg  *testPostgres
	// lock is held by mutate_test.go, where each run is a process.
	lock *os.File
}

func (p *prover) prove(t *testing.T, removals []removal, verbose bool) error {
	started := time.Now()
	lanes := 3 * runtime.NumCPU() // the tests mostly wait
	if n, err := strconv.Atoi(os.Getenv("PROVE_LANES")); err == nil {
		lanes = n
	}
	lanes = max(1, min(lanes, len(removals)))
	p.build = make(chan struct{}, max(1, runtime.NumCPU()/2))
	work := make(chan func(*lane))
	var running sync.WaitGroup
	for i := range lanes {
		l := &lane{p: p, dir: fmt.Sprintf("%s/%d", p.dir, i)}
		if err := makeDir(l.dir); err != nil {
			return err
		}
		l.pg = &testPostgres{dir: l.dir + "/postgres"}
		if err := l.pg.start(); err != nil {
			return err
		}
		defer l.pg.stop()
		running.Go(func() {
			for f := range work {
				f(l)
			}
		})
	}
	err := p.baseline(work, removals)
	if err != nil {
		close(work)
		running.Wait()
		return err
	}
	fmt.Printf("The tests were run without a removal in %.0f s\n", time.Since(started).Seconds())

	verdicts := make(chan verdict)
	go func() {
		for _, r := range removals {
			late := !p.until.IsZero() && time.Now().After(p.until)
			if late || p.ctx.Err() != nil {
				break
			}
			work <- func(l *lane) {
				v := l.prove(r)
				if v.outcome != proven && p.ctx.Err() == nil { // a machine under load can fail a run
					v.print("again", 0, false)
					v = l.prove(r)
					v.again = true
				}
				verdicts <- v
			}
		}
		close(work)
		running.Wait()
		close(verdicts)
	}()
	var all []verdict
	begun := time.Now()
	for v := range verdicts {
		all = append(all, v)
		left := time.Since(begun) / time.Duration(len(all)) * time.Duration(len(removals)-len(all))
		if p.ctx.Err() == nil {
			v.print(fmt.Sprintf("%*d/%d", len(strconv.Itoa(len(removals))), len(all), len(removals)), left, verbose)
		}
	}
	if err := p.ctx.Err(); err != nil {
		return err
	}
	printTable(all, len(removals), time.Since(started))
	for _, v := range all {
		if v.outcome != proven {
			t.Fail()
		}
	}
	return nil
}

// baseline runs the tests that the removals name on the tree as it is: a test that fails in
// any case proves nothing.
func (p *prover) baseline(work chan func(*lane), removals []removal) error {
	byTags := map[string]map[string]bool{}
	for _, r := range removals {
		if byTags[r.tags] == nil {
			byTags[r.tags] = map[string]bool{}
		}
		for _, name := range r.tests {
			byTags[r.tags][name] = true
		}
	}
	var failed []error
	var all sync.WaitGroup
	for _, tags := range slices.Sorted(maps.Keys(byTags)) {
		names := slices.Sorted(maps.Keys(byTags[tags]))
		binary := sync.OnceValues(func() (string, error) {
			path := p.dir + "/baseline" + tags + ".test"
			out, _, err := p.compile(".", path, tags, names)
			if err != nil {
				return "", fmt.Errorf("the tree does not compile: %w\n%s", err, out)
			}
			return path, nil
		})
		for some := range slices.Chunk(names, baselineSize) {
			all.Add(1)
			work <- func(l *lane) {
				defer all.Done()
				path, err := binary()
				if err == nil {
					err = l.runBaseline(path, some)
				}
				if err != nil {
					p.mu.Lock()
					failed = append(failed, err)
					p.mu.Unlock()
				}
			}
		}
	}
	all.Wait()
	return errors.Join(failed...)
}

// runBaseline notes which of the tests fail without a removal. A test must fail twice: a machine
// under load can fail a run.
func (l *lane) runBaseline(binary string, names []string) error {
	for attempt := range 2 {
		failed, err := l.failures(binary, names)
		if err != nil {
			return err
		}
		if len(failed) == 0 {
			return nil
		}
		names = slices.Sorted(maps.Keys(failed))
		if attempt == 1 {
			l.p.mu.Lock()
			maps.Copy(l.p.broken, failed)
			l.p.mu.Unlock()
		}
	}
	return nil
}

// failures returns which of the tests fail, and what they said.
func (l *lane) failures(binary string, names []string) (map[string]string, error) {
	tree, clean, err := l.newCopy()
	if err != nil {
		return nil, err
	}
	defer clean()
	results, err := l.runTests(tree, binary, names)
	if err != nil {
		return nil, err
	}
	failed := map[string]string{}
	for _, name := range names {
		if reason, fails := results.verdict(name); fails || reason != "" {
			failed[name] = firstOf(reason, results.message(name))
		}
	}
	return failed, nil
}

// prove is the whole of one removal.
func (l *lane) prove(r removal) (v verdict) {
	v = verdict{removal: r, said: map[string]string{}, outcome: broken}
	tree, clean, err := l.newCopy()
	if err != nil {
		v.reason = err.Error()
		return v
	}
	defer func() {
		if left := clean(); left > 0 {
			v.reason += fmt.Sprintf(" (%d processes of it were left and have been ended)", left)
		}
	}()
	apply := exec.CommandContext(l.p.ctx, "git", "apply", "-")
	apply.Dir = tree
	apply.Stdin = strings.NewReader(r.patch)
	apply.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(tree))
	if out, err := apply.CombinedOutput(); err != nil {
		v.reason = "the patch does not apply: " + strings.TrimSpace(string(out))
		return v
	}
	binary := l.dir + "/removal.test" // not in the tree: beside it lie parts of tests
	out, duration, err := l.p.compile(tree, binary, r.tags, r.tests)
	v.build = duration
	if err != nil {
		v.reason = "it does not compile or pass vet: " + strings.TrimSpace(string(out))
		return v
	}
	started := time.Now()
	results, err := l.runTests(tree, binary, r.tests)
	v.run = time.Since(started)
	if err != nil {
		v.reason = err.Error()
		return v
	}
	v.outcome = proven
	for _, name := range r.tests {
		l.p.mu.Lock()
		without, brokenTest := l.p.broken[name]
		l.p.mu.Unlock()
		reason, failed := results.verdict(name)
		if failed {
			v.said[name] = results.message(name)
		}
		switch {
		case brokenTest:
			v.outcome = broken
			v.reason = name + " does not pass without the removal either: " + without
			return v
		case reason != "":
			v.outcome = broken
			v.reason = name + ": " + reason
			return v
		case !failed:
			v.outcome = survives
			v.reason = name + " passes"
			return v
		}
	}
	return v
}

// newCopy makes a copy of the tree, without what git and dev.sh keep. clean ends every process
// that a run has left behind, and removes the copy.
func (l *lane) newCopy() (tree string, clean func() (left int), err error) {
	tree = l.dir + "/tree"
	tmp := l.dir + "/tmp"
	clean = func() int {
		left := endProcesses(l.dir+"/tmp", l.dir+"/tree")
		unmount(tmp)
		os.RemoveAll(tree)
		os.RemoveAll(tmp)
		return left
	}
	err = errors.Join(l.emptyPostgres(), makeDir(tree), makeDir(tmp))
	if err != nil {
		return "", nil, err
	}
	err = filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if slices.Contains([]string{".git", ".dev", "data", "examples/node_modules", "hubs"}, path) {
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		target := tree + "/" + path
		if path == "testdata/removals" { // hundreds of files that no removal changes
			original, err := filepath.Abs(path)
			return cmp.Or(err, os.Symlink(original, target), filepath.SkipDir)
		}
		if entry.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(target, content, info.Mode().Perm())
	})
	return tree, clean, err
}

// makeDir makes a folder that PostgreSQL's user may enter.
func makeDir(path string) error {
	return errors.Join(os.MkdirAll(path, 0o755), os.Chmod(path, 0o755))
}

// emptyPostgres drops what an earlier run has left in the lane's PostgreSQL.
func (l *lane) emptyPostgres() error {
	db, err := sql.Open("postgres", l.pg.url)
	if err != nil {
		return err
	}
	defer db.Close()
	drop := func(names, statement string) error {
		rows, err := db.Query(names)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var name string
			if err := rows.Scan(&name); err != nil {
				return err
			}
			if _, err := db.Exec(fmt.Sprintf(statement, pq.QuoteIdentifier(name))); err != nil {
				return err
			}
		}
		return rows.Err()
	}
	return errors.Join(
		drop("select datname from pg_database where datname not in ('postgres', 'template0', 'template1')",
			"drop database if exists %s with (force)"),
		drop("select rolname from pg_roles where rolname not like 'pg\\_%' and rolname <> 'postgres'", "drop role %s"))
}

// compile makes the test binary of a tree, with the parts of the tests that the named ones need: a
// third of the time. go vet looks at the server's files, which are all that a removal changes.
func (p *prover) compile(tree, binary, tags string, names []string) (output []byte, duration time.Duration, err error) {
	p.build <- struct{}{}
	defer func() { <-p.build }()
	started := time.Now()
	ctx, cancel := context.WithTimeout(p.ctx, buildTimeout)
	defer cancel()
	sources, err := filepath.Glob(tree + "/*.go")
	if err != nil {
		return nil, 0, err
	}
	vet := []string{"vet"}
	for _, source := range sources {
		if !strings.HasSuffix(source, "_test.go") {
			vet = append(vet, filepath.Base(source))
		}
	}
	cmd := exec.CommandContext(ctx, "go", vet...)
	cmd.Dir = tree
	output, err = cmd.CombinedOutput()
	if err == nil {
		output, err = compileTests(ctx, tree, binary, names, "-tags="+tags)
	}
	return output, time.Since(started), err
}

// compileTests makes the test binary that the named tests need. flags are those of go test.
func compileTests(ctx context.Context, tree, binary string, names []string, flags ...string) (output []byte, err error) {
	overlay := binary + ".json"
	if err := leaveOutTests(tree, overlay, names); err != nil {
		return nil, err
	}
	// No vet of the tests, no path of the copy in what is compiled, nothing for a debugger, and no
	// optimization, which takes longer than the tests gain by it.
	args := []string{"test", "-c", "-overlay=" + overlay, "-vet=off", "-trimpath", "-buildvcs=false",
		"-gcflags=-N -l -dwarf=false", "-ldflags=-s -w", "-o", binary}
	args = append(args, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, ".")...)
	cmd.Dir = tree
	return cmd.CombinedOutput()
}

// leaveOutTests writes an overlay for go test (see go help build): of the test files it has the
// declarations that the named tests use, and nothing else. The lines keep their numbers.
func leaveOutTests(tree, overlay string, names []string) error {
	paths, err := filepath.Glob(tree + "/*_test.go")
	if err != nil {
		return err
	}
	files := map[string]*ast.File{}
	set := token.NewFileSet()
	declared := map[string][]ast.Decl{} // by name: several, where files have build tags
	for _, path := range paths {
		if files[path], err = parser.ParseFile(set, path, nil, 0); err != nil {
			return err
		}
		for _, declaration := range files[path].Decls {
			for _, name := range namesOf(declaration) {
				declared[name] = append(declared[name], declaration)
			}
		}
	}
	needed := map[ast.Decl]bool{}
	todo := []string{"TestMain", "init", "_"}
	for _, name := range names {
		name, _, _ = strings.Cut(name, "/")
		todo = append(todo, name)
	}
	for len(todo) > 0 {
		for _, declaration := range declared[todo[0]] {
			if !needed[declaration] {
				needed[declaration] = true
				todo = slices.AppendSeq(todo, maps.Keys(usedBy(declaration)))
			}
		}
		todo = todo[1:]
	}
	replace := map[string]string{}
	for i, path := range paths {
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		absolute, err := filepath.Abs(path)
		if err != nil {
			return err
		}
		replace[absolute] = "" // not there
		if text, some := without(set, files[path], source, needed); some {
			replace[absolute] = fmt.Sprintf("%s.%d.go", overlay, i)
			text = append([]byte("//line "+filepath.Base(path)+":1\n"), text...) // for the messages
			if err := os.WriteFile(replace[absolute], text, 0o644); err != nil {
				return err
			}
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	return os.WriteFile(overlay, text, 0o644)
}

// namesOf returns what makes a declaration needed: its names, and the receiver's of a method.
func namesOf(declaration ast.Decl) (names []string) {
	switch d := declaration.(type) {
	case *ast.FuncDecl:
		if d.Recv == nil {
			return []string{d.Name.Name}
		}
		return slices.Collect(maps.Keys(usedBy(d.Recv.List[0].Type)))
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				names = append(names, spec.Name.Name)
			case *ast.ValueSpec:
				for _, name := range spec.Names {
					names = append(names, name.Name)
				}
			}
		}
	}
	return names
}

// usedBy returns the names in a piece of code, without those that follow a dot.
func usedBy(node ast.Node) map[string]bool {
	names := map[string]bool{}
	ast.Inspect(node, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.SelectorExpr:
			maps.Copy(names, usedBy(node.X))
			return false
		case *ast.Ident:
			names[node.Name] = true
		}
		return true
	})
	return names
}

var majorVersion = regexp.MustCompile(`/v[0-9]+$`)

// without returns a source in which the declarations that are not needed, and the imports that
// only they use, are blank. some is false if nothing is left.
func without(set *token.FileSet, file *ast.File, source []byte, needed map[ast.Decl]bool) (text []byte, some bool) {
	text = bytes.Clone(source)
	blank := func(node ast.Node) {
		part := text[set.Position(node.Pos()).Offset:set.Position(node.End()).Offset]
		for i := range part {
			if part[i] != '\n' {
				part[i] = ' '
			}
		}
	}
	used := map[string]bool{} // of the names that the file does not declare: imports among them
	for _, declaration := range file.Decls {
		if d, ok := declaration.(*ast.GenDecl); ok && d.Tok == token.IMPORT {
			continue
		}
		if !needed[declaration] {
			blank(declaration)
			continue
		}
		some = true
		for _, name := range file.Unresolved {
			if declaration.Pos() <= name.Pos() && name.Pos() < declaration.End() {
				used[name.Name] = true
			}
		}
	}
	for _, imported := range file.Imports {
		name := filepath.Base(majorVersion.ReplaceAllString(strings.Trim(imported.Path.Value, `"`), ""))
		if imported.Name != nil {
			name = imported.Name.Name
		}
		if name != "_" && !used[name] {
			blank(imported)
		}
	}
	return text, some
}

// testResults is what a test run said, by test.
type testResults struct {
	action map[string]string // pass, fail or skip
	output map[string]string
	ended  string // why the whole binary ended early, or ""
}

func newTestResults() testResults {
	return testResults{action: map[string]string{}, output: map[string]string{}}
}

// add takes a line of test2json. failed is the test that failed by it, or "".
func (r *testResults) add(line []byte) (failed string) {
	var event struct{ Action, Test, Output string }
	if json.Unmarshal(line, &event) != nil {
		return ""
	}
	switch event.Action {
	case "pass", "fail", "skip":
		r.action[event.Test] = event.Action
	case "output":
		r.output[event.Test] += event.Output
		r.ended = firstOf(r.ended, endOfBinary(event.Output))
	}
	if event.Action == "fail" {
		return event.Test
	}
	return ""
}

// runTests runs tests of a binary in a tree. An error is none of the tests'.
func (l *lane) runTests(tree, binary string, names []string) (testResults, error) {
	ctx, cancel := context.WithTimeout(l.p.ctx, runTimeout+time.Minute)
	defer cancel()
	cmd := l.testCommand(ctx, tree, binary, names, "-test.timeout="+runTimeout.String())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if l.p.ctx.Err() != nil {
		return testResults{}, l.p.ctx.Err()
	}
	if _, isExit := errors.AsType[*exec.ExitError](err); err != nil && !isExit {
		return testResults{}, err
	}
	results := newTestResults()
	for line := range bytes.Lines(out) {
		results.add(line)
	}
	results.ended = firstOf(results.ended, endOfBinary(stderr.String()))
	if results.ended == "" && results.action[""] == "" {
		results.ended = "the tests did not end in time"
	}
	return results, nil
}

// testCommand is a run of tests of a binary, in a process group of its own, with the lane's
// PostgreSQL. flags are those of the binary.
func (l *lane) testCommand(ctx context.Context, tree, binary string, names []string, flags ...string) *exec.Cmd {
	var patterns []string
	for _, name := range names {
		var parts []string
		for part := range strings.SplitSeq(name, "/") {
			parts = append(parts, "^"+regexp.QuoteMeta(part)+"$")
		}
		patterns = append(patterns, strings.Join(parts, "/"))
	}
	args := []string{"tool", "test2json", binary, "-test.v=test2json", "-test.count=1", "-test.parallel=4",
		"-test.run=" + strings.Join(patterns, "|")}
	cmd := exec.CommandContext(ctx, "go", append(args, flags...)...)
	cmd.Dir = tree
	cmd.Env = append(os.Environ(), "TMPDIR="+l.dir+"/tmp", "HUBS_TEST_POSTGRES="+l.pg.url,
		"GOFLAGS=-buildvcs=false", "PROVE=")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	return cmd
}

var runtimeEnd = regexp.MustCompile(`(?m)^(panic: |fatal error: ).*`)

// endOfBinary returns the line by which the Go runtime ended a test binary, or "".
func endOfBinary(output string) string { return runtimeEnd.FindString(output) }

// ofTest joins what a test and its subtests said.
func (r testResults) ofTest(name string) string {
	var text strings.Builder
	text.WriteString(r.output[name])
	for _, test := range slices.Sorted(maps.Keys(r.output)) {
		if strings.HasPrefix(test, name+"/") {
			text.WriteString(r.output[test])
		}
	}
	return text.String()
}

var (
	assertion = regexp.MustCompile(`(?m)^\s+\w+_test\.go:\d+: `)
	// What the harness says when it lacks something: no finding of a test.
	harnessFault = regexp.MustCompile(`no PostgreSQL: .*|\./dev\.sh postgres printed .*|\./dev\.sh postgres has not ended|go build: .*`)
)

// verdict says whether a test failed by an assertion of its own. reason says why it is neither
// a pass nor such a failure.
func (r testResults) verdict(name string) (reason string, failed bool) {
	text := r.ofTest(name)
	switch {
	case r.ended != "":
		return "the test binary ended: " + r.ended, false
	case r.action[name] == "":
		return "there is no such test, or it did not end", false
	case r.action[name] == "skip":
		return "it was skipped", false
	case r.action[name] == "pass":
		return "", false
	case !assertion.MatchString(text):
		return "it failed without an assertion of its own:\n" + text, false
	case harnessFault.MatchString(text):
		return "the harness failed: " + harnessFault.FindString(text), false
	}
	return "", true
}

// message returns what the first failing assertion of a test said, a few lines at most.
func (r testResults) message(name string) string {
	var text strings.Builder
	text.WriteString(r.output[name])
	for _, test := range slices.Sorted(maps.Keys(r.output)) {
		if strings.HasPrefix(test, name+"/") && r.action[test] == "fail" {
			text.WriteString(r.output[test])
		}
	}
	start := assertion.FindStringIndex(text.String())
	if start == nil {
		return ""
	}
	var kept []string
	for line := range strings.Lines(strings.TrimLeft(text.String()[start[0]:], " \n")) {
		line = strings.TrimRight(line, "\n")
		isNext := len(kept) > 0 && (assertion.MatchString(line) || strings.HasPrefix(strings.TrimSpace(line), "--- "))
		if isNext || len(kept) == 6 {
			break
		}
		kept = append(kept, line[:min(len(line), 240)])
	}
	return strings.Join(kept, "\n")
}

func firstOf(texts ...string) string {
	for _, text := range texts {
		if text != "" {
			return text
		}
	}
	return ""
}

// endProcesses waits a moment for the processes that have one of the folders in their
// environment or command line, then ends those that are left. Linux only: elsewhere there
// is no /proc to look in.
func endProcesses(folders ...string) (left int) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		pids := processesIn(folders)
		if len(pids) == 0 {
			return left
		}
		if time.Now().Before(end) {
			continue
		}
		left = max(left, len(pids))
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		if time.Since(end) > 10*time.Second {
			return left
		}
	}
}

func processesIn(folders []string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		environment, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // "" for a zombie
		for _, folder := range folders {
			inEnvironment := bytes.Contains(environment, []byte("="+folder+"\x00")) || bytes.Contains(environment, []byte("="+folder+"/"))
			if len(command) > 0 && (inEnvironment || bytes.Contains(command, []byte(folder+"/"))) {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

// unmount ends the mounts that a killed test has left in a folder.
func unmount(dir string) {
	mounts, _ := os.ReadFile("/proc/self/mounts")
	for line := range strings.Lines(string(mounts)) {
		if words := strings.Fields(line); len(words) > 1 && strings.HasPrefix(words[1], dir+"/") {
			exec.Command("umount", words[1]).Run()
		}
	}
}

// --- what is printed ---

func (v verdict) print(number string, left time.Duration, verbose bool) {
	if verbose {
		v.explain()
	}
	fmt.Printf("%s  %-8s  %-40s  %5.1f s build, %5.1f s tests, %.0f min left\n",
		number, v.outcome, v.name, v.build.Seconds(), v.run.Seconds(), left.Minutes())
	if v.outcome != proven {
		fmt.Println("    " + strings.ReplaceAll(v.reason, "\n", "\n    "))
	}
}

// explain shows a removal to a reader.
func (v verdict) explain() {
	fmt.Printf("\n======== %s\n", v.name)
	if v.row != "" {
		page, _ := os.ReadFile("SECURITY.md")
		for line := range strings.Lines(string(page)) {
			if cells := strings.Split(line, "|"); strings.HasPrefix(line, "| "+v.row+" |") && len(cells) > 5 {
				fmt.Printf("\n%s (%s): %s.\n", v.row, strings.TrimSpace(cells[2]), strings.TrimSpace(cells[3]))
			}
		}
	}
	for _, function := range v.functions() {
		fmt.Printf("\n-------- The protection\n\n%s\n", function)
	}
	fmt.Printf("\n-------- The removal\n\n%s\n-------- What it gains\n\n%s\n", v.patch, v.gains)
	for _, name := range v.tests {
		fmt.Printf("\n-------- %s\n\n%s\n", name, firstOf(v.said[name], "(passes)"))
	}
	fmt.Println()
}

// functions returns the source of the declarations that a removal changes, with their
// comments.
func (r removal) functions() []string {
	var found []string
	for part := range strings.SplitSeq(r.patch, "\n+++ ") {
		head, rest, _ := strings.Cut(part, "\n")
		name := strings.TrimPrefix(strings.TrimSpace(head), "b/")
		if !strings.HasSuffix(name, ".go") || strings.HasPrefix(head, "diff ") {
			continue
		}
		source, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		files := token.NewFileSet()
		tree, err := parser.ParseFile(files, name, source, parser.ParseComments)
		if err != nil {
			continue
		}
		for _, offset := range hunkOffsets(rest, string(source)) {
			for _, declaration := range tree.Decls {
				start, end := declaration.Pos(), declaration.End()
				if f, ok := declaration.(*ast.FuncDecl); ok && f.Doc != nil {
					start = f.Doc.Pos()
				}
				if g, ok := declaration.(*ast.GenDecl); ok && g.Doc != nil {
					start = g.Doc.Pos()
				}
				from, to := files.Position(start).Offset, files.Position(end).Offset
				text := name + ":\n\n" + string(source[from:to])
				if from <= offset && offset < to && !slices.Contains(found, text) {
					found = append(found, text)
				}
			}
		}
	}
	return found
}

// hunkOffsets returns where in a source the first changed line of each hunk is.
func hunkOffsets(hunks, source string) (offsets []int) {
	for hunk := range strings.SplitSeq("\n"+hunks, "\n@@") {
		var old strings.Builder
		changed := -1
		_, lines, _ := strings.Cut(hunk, "\n")
		for line := range strings.Lines(lines) {
			switch line[0] {
			case '-', '+':
				if changed < 0 {
					changed = old.Len()
				}
				if line[0] == '-' {
					old.WriteString(line[1:])
				}
			case ' ':
				old.WriteString(line[1:])
			}
		}
		if start := strings.Index(source, strings.TrimSuffix(old.String(), "\n")); old.Len() > 0 && start >= 0 {
			offsets = append(offsets, start+max(changed, 0))
		}
	}
	return offsets
}

// printTable shows the outcomes by row and topic.
func printTable(all []verdict, asked int, duration time.Duration) {
	counts := map[string]map[string]int{}
	total := map[string]int{}
	for _, v := range all {
		if counts[v.group()] == nil {
			counts[v.group()] = map[string]int{}
		}
		counts[v.group()][v.outcome]++
		total[v.outcome]++
	}
	fmt.Printf("\n%-14s %7s %9s %7s\n", "row or topic", proven, "survives", "broken")
	for _, group := range slices.Sorted(maps.Keys(counts)) {
		c := counts[group]
		fmt.Printf("%-14s %7d %9d %7d\n", group, c[proven], c[survives], c[broken])
	}
	fmt.Printf("%-14s %7d %9d %7d   in %.1f minutes\n", "all", total[proven], total[survives], total[broken], duration.Minutes())
	if missing := asked - len(all); missing > 0 {
		fmt.Printf("%d were not begun: the time was over\n", missing)
	}
	for _, v := range all {
		switch {
		case v.outcome != proven:
			reason, _, _ := strings.Cut(v.reason, "\n")
			fmt.Printf("%s %s: %s\n", v.outcome, v.name, reason)
		case v.again:
			fmt.Printf("%s at the second attempt: %s\n", v.outcome, v.name)
		}
	}
}
