// Prove shows that the tests notice when a protection is missing. It applies each removal of
// testdata/removals to a copy of the server, and runs the tests that the removal names. All of them
// must fail. dev.sh starts Prove with a PostgreSQL and the settings that it needs:
//
//	./dev.sh prove                all removals
//	./dev.sh prove O3 order       the removals of a row of SECURITY.md and of a topic
//	./dev.sh prove TestCommands   the removals that name this test or a subtest of it
//	./dev.sh prove -v O3          also prints the protection, the removal and the tests' failures
//	./dev.sh prove -ci            those whose functions or tests the last commit changed, and a
//	                              tenth of the others
//
// At the end it lists the removals that are not proven. SURVIVES means that a test passes with the
// removal in place. BROKEN means that the run shows nothing. If there is one of either, the exit
// status is 1.
package main

import (
	"cmp"
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

	"hubs/tools/removals"
)

// ciShare is what -ci takes of the removals that the last commit does not change: one in ciShare.
const ciShare = 10

var (
	verbose = flag.Bool("v", false, "print the protection, the removal and the tests' failures")
	ci      = flag.Bool("ci", false, "those of changed functions, and a tenth of the others")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(),
		syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err := run(ctx, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "prove:", err)
		os.Exit(1)
	}
}

// run proves the wanted removals and prints the result. It returns an error if one is not proven.
func run(ctx context.Context, wanted []string) error {
	all, err := removals.Read()
	if err != nil {
		return err
	}
	source, err := removals.ReadSource()
	if err != nil {
		return err
	}
	var chosen []removals.Removal
	if *ci {
		chosen, err = chooseForCI(source, all)
	} else {
		chosen, err = choose(all, wanted)
	}
	if err != nil {
		return err
	}
	// Neighbours in a file often name the same test, and would all wait for its first run
	// (measure).
	slices.SortFunc(chosen, func(a, b removals.Removal) int {
		return cmp.Compare(number(a.Name), number(b.Name))
	})
	started := time.Now()
	verdicts, err := proveAll(ctx, source, chosen)
	count := 0
	for _, v := range verdicts {
		if v.outcome == proven {
			count++
		} else {
			fmt.Println(v.outcome, v.Name)
		}
	}
	fmt.Printf("%d of %d removals are proven, in %.1f minutes\n",
		count, len(chosen), time.Since(started).Minutes())
	if err == nil && count < len(chosen) {
		err = errors.New("some removals are not proven")
	}
	return err
}

// number returns a hash of a name. It looks random, but is always the same for the same name.
func number(name string) uint32 {
	return crc32.ChecksumIEEE([]byte(name))
}

// choose returns the removals that wanted selects, or all if wanted is empty. Each element is a
// row, a topic, the name of a removal, or a test. An element that selects nothing is an error.
func choose(all []removals.Removal, wanted []string) ([]removals.Removal, error) {
	if len(wanted) == 0 {
		return all, nil
	}
	var chosen []removals.Removal
	for _, want := range wanted {
		before := len(chosen)
		isWanted := func(test string) bool {
			return path.Base(removals.TestFunction(test)) == want
		}
		for _, r := range all {
			if r.Row == want || r.Name == want || slices.ContainsFunc(r.Tests, isWanted) {
				chosen = append(chosen, r)
			}
		}
		if len(chosen) == before {
			return nil, fmt.Errorf("testdata/removals has no row, topic, removal or test %q", want)
		}
	}
	return chosen, nil
}

// chooseForCI returns the removals that the last commit changed, those whose functions, files or
// tests it changed, and one in ciShare of the others, which differ from commit to commit.
func chooseForCI(source removals.Source, all []removals.Removal) ([]removals.Removal, error) {
	before, err := git("grep", "-I", "-h", "", "HEAD~1") // every line of every file
	if err != nil {
		return nil, err
	}
	head, err := git("rev-parse", "HEAD")
	if err != nil {
		return nil, err
	}
	isNew := func(text string) bool { return !strings.Contains(before, text) }
	isChanged := func(scope string) bool {
		_, text := source.Lines(scope)
		return isNew(text)
	}
	var chosen []removals.Removal
	for _, r := range all {
		isChosen := isNew(r.Text) ||
			number(r.Name)%ciShare == number(head)%ciShare
		for _, change := range r.Changes {
			isChosen = isChosen || isChanged(change.Scope)
		}
		for _, test := range r.Tests {
			isChosen = isChosen || isChanged(removals.TestFunction(test))
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

// print prints a verdict and the beginning of the failures. With -v, it first prints the row of
// SECURITY.md, the protection, the removal and the failures. number is the count, such as "3/200".
func (v verdict) print(source removals.Source, number string) {
	if *verbose {
		page, _ := os.ReadFile("SECURITY.md")
		_, row, _ := strings.Cut(string(page), "\n| "+v.Row+" |")
		row, _, _ = strings.Cut(row, "\n")
		fmt.Printf("\n======== %s\n\n%s\n", v.Row, row)
		for _, change := range v.Changes {
			file, text := source.Lines(change.Scope)
			if file != change.Scope {
				fmt.Printf("\n-------- The protection, in %s\n\n%s\n", file, text)
			}
		}
		fmt.Printf("\n-------- The removal\n\n%s\n\n-------- The tests\n\n%s\n", v.Text, v.said)
	}
	fmt.Printf("%s  %-8s  %-40s  %5.1f s\n", number, v.outcome, v.Name, v.took.Seconds())
	if v.outcome == proven {
		fmt.Printf("         %.150s\n", strings.Join(strings.Fields(v.said), " "))
	} else {
		fmt.Println(v.said)
	}
}
