// Prove takes each protection of testdata/removals out of a copy of the server, and shows that the
// tests which the removal names fail. dev.sh gives it a PostgreSQL and its settings:
//
//	./dev.sh prove                all removals
//	./dev.sh prove O3 order       those of a row of SECURITY.md, and of a topic
//	./dev.sh prove TestSweep      those that name a test, or a part of it
//	./dev.sh prove -v O3          for readers: protection, removal, and what the tests said
//	./dev.sh prove -ci            those of changed code and tests, and a tenth of the others
//	./dev.sh prove -lanes 3       three at a time
//
// At the end it names each removal that no test notices, and each that shows nothing. If there is
// one, the exit status is 1.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"hubs/tools/removals"
)

const ciShare = 10 // -ci takes one of so many whose functions have not changed

var (
	verbose = flag.Bool("v", false, "show the code, the removal, and what the tests said")
	ci      = flag.Bool("ci", false, "only those of changed code and tests, and a tenth of the others")
	lanes   = flag.Int("lanes", 4*runtime.NumCPU(), "how many removals at a time: most tests wait")
)

func main() {
	flag.Parse()
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	defer stop()
	err := run(ctx, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "prove:", err)
		os.Exit(1)
	}
}

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
	slices.SortFunc(chosen, func(a, b removals.Removal) int {
		return cmp.Compare(turn(a), turn(b))
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
		err = errors.New("some are not proven")
	}
	return err
}

// turn orders the removals: at random, since neighbours that name the same test both wait for its
// first run, and those that wait longest in the first half, so that none is left over at the end.
func turn(r removals.Removal) uint64 {
	isSlow := strings.HasPrefix(r.Tests[0], "faults/")
	if isSlow {
		return number(r.Name) / 2
	}
	return number(r.Name)
}

// number looks random, and is always the same for a name.
func number(name string) uint64 {
	hash := fnv.New64a()
	hash.Write([]byte(name))
	return hash.Sum64()
}

// choose returns the removals of the rows, topics, names and tests, or all.
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

// chooseForCI returns the removals that the last commit has changed, or whose functions, files or
// tests it has changed, and a tenth of the others, not the same one with each commit. PROVE_BASE
// names an earlier commit to compare with.
func chooseForCI(source removals.Source, all []removals.Removal) ([]removals.Removal, error) {
	base := cmp.Or(os.Getenv("PROVE_BASE"), "HEAD~1")
	before, err := git("grep", "-I", "-h", "", base) // every line of every file
	if err != nil {
		return nil, err
	}
	head, err := git("rev-parse", "HEAD")
	if err != nil {
		return nil, err
	}
	share := number(head) % ciShare
	isChanged := func(scope string) bool {
		_, now := source.Lines(scope)
		return !strings.Contains(before, now)
	}
	var chosen []removals.Removal
	for _, r := range all {
		isTouched := !strings.Contains(before, r.Text)
		for _, change := range r.Changes {
			isTouched = isTouched || isChanged(change.Scope)
		}
		for _, test := range r.Tests {
			isTouched = isTouched || isChanged(removals.TestFunction(test))
		}
		if isTouched || number(r.Name)%ciShare == share {
			chosen = append(chosen, r)
		}
	}
	return chosen, nil
}

// git returns what a command of git prints.
func git(args ...string) (string, error) {
	cmd := exec.Command("git", append([]string{"-c", "safe.directory=*"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w", args[0], err)
	}
	return string(out), nil
}

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
