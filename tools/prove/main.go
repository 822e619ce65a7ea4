// Prove shows that the tests notice when a protection is missing. It applies each removal of
// testdata/removals to a copy of the server, and runs the tests that the removal names. All of them
// must fail. dev.sh starts Prove with a PostgreSQL and the settings that it needs:
//
//	./dev.sh prove                    all removals
//	./dev.sh prove O3 TestCommands    those of a row of SECURITY.md, and those that name a test
//	./dev.sh prove -ci                those whose files the last commit changed, and a tenth
//
// SURVIVES means that a test passes with the removal in place. BROKEN means that the run shows
// nothing: the code does not compile, or no server starts. Either makes the exit status 1.
package main

import (
	"context"
	"errors"
	"flag"
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

// ciShare is what -ci takes of the removals whose files the last commit does not change: one in
// ciShare.
const ciShare = 10

var ci = flag.Bool("ci", false, "those whose files the last commit changed, and a tenth of the others")

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, flag.Args()); err != nil {
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
	src := readSource()
	var chosen []removal
	if *ci {
		chosen, err = chooseForCI(src, all)
	} else {
		chosen, err = choose(all, wanted)
	}
	if err != nil {
		return err
	}
	started := time.Now()
	failed, err := proveAll(ctx, src, chosen)
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
func choose(all []removal, wanted []string) (chosen []removal, err error) {
	if len(wanted) == 0 {
		return all, nil
	}
	for _, want := range wanted {
		before := len(chosen)
		for _, r := range all {
			namesTest := slices.ContainsFunc(r.tests, func(name string) bool {
				_, function, _ := splitTest(name)
				return function == want
			})
			if r.row == want || r.name == want || namesTest {
				chosen = append(chosen, r)
			}
		}
		if len(chosen) == before {
			return nil, fmt.Errorf("testdata/removals has no row, removal or test %q", want)
		}
	}
	return chosen, nil
}

// chooseForCI returns the removals whose files the last commit changed, and one in ciShare of the
// others, which differ from commit to commit.
func chooseForCI(src source, all []removal) (chosen []removal, err error) {
	head, err := git("rev-parse", "HEAD")
	if err != nil {
		return nil, err
	}
	changed, err := git("diff", "--name-only", "HEAD~1", "HEAD")
	if err != nil {
		return nil, err
	}
	hash := func(text string) uint32 { return crc32.ChecksumIEEE([]byte(text)) }
	for _, r := range all {
		isChosen := hash(r.name)%ciShare == hash(head)%ciShare ||
			strings.Contains(changed, r.file+"\n")
		for _, c := range r.changes {
			file, _, _ := src.find(c.scope)
			isChosen = isChosen || strings.Contains(changed, file+"\n")
		}
		if isChosen {
			chosen = append(chosen, r)
		}
	}
	return chosen, nil
}

// git runs a command of git and returns its output.
func git(args ...string) (string, error) {
	cmd := exec.Command("git", append([]string{"-c", "safe.directory=*"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w", args[0], err)
	}
	return string(out), nil
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
