// Prove shows that the tests notice when a protection is missing. It applies each removal of
// testdata/removals to a copy of the server, and runs the tests that the removal names. All of them
// must fail. dev.sh starts Prove with a PostgreSQL and the settings that it needs:
//
//	./dev.sh prove                    all removals
//	./dev.sh prove O3 TestCommands    those of a row of SECURITY.md, and those that name a test
//	./dev.sh prove -ci                those of files that the last commit changed, and a tenth
//
// SURVIVES means that a test passes with the removal in place. BROKEN means that the run shows
// nothing: the code does not compile, or no server starts. Either makes the exit status 1.
package main

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "prove:", err)
		os.Exit(1)
	}
}

// run proves the wanted removals. It returns an error if one is not proven.
func run(ctx context.Context, wanted []string) error {
	all, err := readRemovals()
	if err != nil {
		return err
	}
	chosen, err := choose(all, wanted)
	if err != nil {
		return err
	}
	started := time.Now()
	failed, err := proveAll(ctx, chosen)
	if err != nil {
		return err
	}
	fmt.Printf("%d of %d removals are proven, in %.1f minutes\n",
		len(chosen)-len(failed), len(chosen), time.Since(started).Minutes())
	if len(failed) > 0 {
		return errors.New("not proven: " + strings.Join(failed, " "))
	}
	return nil
}

// choose returns the removals that wanted selects by row, name or test, or all if wanted is empty.
// With -ci, it returns those of files whose part of the server the last commit changed, and a tenth
// of the others, which differ from commit to commit.
func choose(all []removal, wanted []string) (chosen []removal, err error) {
	isChosen := func(r removal) bool {
		return len(wanted) == 0 || slices.ContainsFunc(wanted, r.isNamed)
	}
	if slices.Equal(wanted, []string{"-ci"}) {
		// The id of the commit, and the paths that it changed, a line each.
		last, err := exec.Command("git", "-c", "safe.directory=*",
			"log", "-1", "-m", "--first-parent", "--name-only", "--format=%H").Output()
		if err != nil {
			return nil, fmt.Errorf("git log: %w", err)
		}
		isChosen = func(r removal) bool {
			part := strings.TrimSuffix(path.Base(r.file), ".txt") // auth stands for auth.go
			return strings.Contains(string(last), "\n"+part) ||
				strings.Contains(string(last), "\n"+r.file) ||
				crc32.ChecksumIEEE([]byte(r.name+string(last)))%10 == 0
		}
	}
	for _, r := range all {
		if isChosen(r) {
			chosen = append(chosen, r)
		}
	}
	if chosen == nil {
		return nil, fmt.Errorf("testdata/removals has no row, removal or test %q", wanted)
	}
	return chosen, nil
}

// isNamed reports whether a name is that of the removal, of its row, or of one of its tests.
func (r removal) isNamed(name string) bool {
	isOfTest := func(test string) bool {
		_, function, _ := splitTest(test)
		return function == name
	}
	return r.name == name || r.row == name || slices.ContainsFunc(r.tests, isOfTest)
}

// splitTest splits the name of a test, such as api/TestCommands/local, into the folder of its
// source, test/api, the function, TestCommands, and what go test calls the test,
// TestCommands/local. The folder of a test of package main is ".".
func splitTest(name string) (folder, function, test string) {
	folder, test = ".", name
	if !strings.HasPrefix(name, "Test") {
		folder, test, _ = strings.Cut(name, "/")
		folder = path.Join("test", folder)
	}
	function, _, _ = strings.Cut(test, "/")
	return folder, function, test
}
