// Mutate measures what the tests notice. It draws places in the server's code by a seed, changes one
// operator, number or statement at a time, and runs the tests: first go test ., then test/api. It
// prints each change with the first test that fails, or NOBODY. What nobody notices is a gap in the
// tests, or it has no effect: a person must look. dev.sh starts it with a PostgreSQL:
//
//	./dev.sh mutate [SEED [CHANGES]]
//
// The checkout is not touched: the go command reads each changed file from elsewhere.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// tierTimeout is longer than any tier takes. A tier that does not end has noticed the change.
const tierTimeout = 5 * time.Minute

// mostMemory is all that a process may have. Some changes make a loop endless.
const mostMemory = 8 << 30

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	seed, count := uint64(time.Now().Unix()), 100
	var err error
	if len(os.Args) > 1 {
		seed, err = strconv.ParseUint(os.Args[1], 10, 64)
	}
	if len(os.Args) > 2 && err == nil {
		count, err = strconv.Atoi(os.Args[2])
	}
	if err == nil {
		err = run(ctx, seed, count)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

// run draws and tries the changes.
func run(ctx context.Context, seed uint64, count int) error {
	syscall.Setrlimit(syscall.RLIMIT_AS, &syscall.Rlimit{Cur: mostMemory, Max: mostMemory})
	changes, err := readChanges()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "hubs-mutate-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o755) // a PostgreSQL that a test starts runs as another user
	os.Setenv("HUBS_BINARY", dir+"/hubs")
	overlay := dir + "/overlay.json"
	os.WriteFile(overlay, []byte("{}"), 0o644)

	build := []string{"go", "build", "-overlay=" + overlay, "-o", dir + "/hubs", "."}
	inside := []string{"go", "test", "-overlay=" + overlay, "-vet=off", "-failfast", "-count=1", "."}
	outside := []string{"go", "test", "-vet=off", "-failfast", "-count=1", "-parallel=8", "./test/api"}
	for _, command := range [][]string{build, inside, outside} {
		if output, passes := try(ctx, command); !passes {
			return fmt.Errorf("fails without a change: %s\n%s", strings.Join(command, " "), output)
		}
	}

	fmt.Printf("seed %d: %d changes of %d possible ones\n", seed, count, len(changes))
	rand.New(rand.NewPCG(seed, 0)).Shuffle(len(changes), func(i, j int) {
		changes[i], changes[j] = changes[j], changes[i]
	})
	noticed, tried := map[string]int{}, 0
	for _, c := range changes {
		if tried == count {
			break
		}
		path, _ := filepath.Abs(c.file)
		replace := map[string]map[string]string{"Replace": {path: dir + "/changed.go"}}
		text, _ := json.Marshal(replace) // of strings only, so there is no error
		os.WriteFile(overlay, text, 0o644)
		os.WriteFile(dir+"/changed.go", c.apply(), 0o644)
		if _, compiles := try(ctx, build); !compiles {
			continue
		}
		tried++
		by := "go test ."
		test, isNoticed := notices(ctx, inside)
		if !isNoticed {
			by = "test/api"
			test, isNoticed = notices(ctx, outside)
		}
		if !isNoticed {
			by = "NOBODY"
		}
		if ctx.Err() != nil {
			return errors.New("stopped")
		}
		noticed[by]++
		fmt.Printf("%-9s  %v\n           %s\n", by, c, test)
	}
	fmt.Printf("%d changes, seed %d: %d noticed by go test ., %d by test/api, %d by neither\n",
		tried, seed, noticed["go test ."], noticed["test/api"], noticed["NOBODY"])
	return nil
}

// notices reports whether a tier fails, and by which test. On a busy machine, a test may fail by
// itself. So a test counts if it fails alone, too. If it does not, the tier has a second chance.
func notices(ctx context.Context, tier []string) (test string, isNoticed bool) {
	for range 2 {
		output, passes := try(ctx, tier)
		if passes {
			return "-", false
		}
		failed := failure.FindSubmatch(output)
		if failed == nil {
			test = "no test by name: a panic, or no end"
			continue
		}
		test = string(failed[1])
		alone := slices.Insert(slices.Clone(tier), len(tier)-1, "-run=^"+test+"$")
		if _, passes := try(ctx, alone); !passes {
			return test, true
		}
	}
	return test, true
}

// failure matches the first line of a test that fails.
var failure = regexp.MustCompile(`(?m)^--- FAIL: (\S+)`)

// try runs a command and reports whether it ends well and in time. Whatever it has started ends too.
func try(ctx context.Context, command []string) (output []byte, passes bool) {
	ctx, cancel := context.WithTimeout(ctx, tierTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	output, err := cmd.CombinedOutput()
	return output, err == nil
}

// A change replaces the bytes from start to end of a file.
type change struct {
	file       string
	line       int
	src        []byte
	start, end int
	new        string
}

func (c change) apply() []byte {
	return []byte(string(c.src[:c.start]) + c.new + string(c.src[c.end:]))
}

// String returns the place of the change, the old and the new text, and the line.
func (c change) String() string {
	old := strings.Join(strings.Fields(string(c.src[c.start:c.end])), " ")
	line := strings.Split(string(c.src), "\n")[c.line-1]
	return fmt.Sprintf("%s:%d: %q became %q in: %s", c.file, c.line, old, c.new, strings.TrimSpace(line))
}

// readChanges returns all changes that can be made to the server's code.
func readChanges() (all []change, err error) {
	names, _ := filepath.Glob("*.go") // the pattern is well formed
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		src, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		found, err := changesIn(name, src)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// swaps are the operators and words that become others.
var swaps = map[string]string{
	"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "&&": "||", "||": "&&",
	"+": "-", "-": "+", "*": "/", "/": "*", "true": "false", "false": "true",
	"break": "continue", "continue": "break",
}

// changesIn returns the changes of a file.
func changesIn(name string, src []byte) (all []change, err error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	replace := func(from, to token.Pos, text string) {
		place := files.Position(from)
		all = append(all, change{name, place.Line, src, place.Offset, files.Position(to).Offset, text})
	}
	swap := func(at token.Pos, old string) {
		if text, ok := swaps[old]; ok {
			replace(at, at+token.Pos(len(old)), text)
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.BinaryExpr:
			swap(n.OpPos, n.Op.String())
		case *ast.BranchStmt:
			swap(n.TokPos, n.Tok.String())
		case *ast.Ident:
			swap(n.Pos(), n.Name)
		case *ast.UnaryExpr:
			if n.Op == token.NOT {
				replace(n.OpPos, n.X.Pos(), "")
			}
		case *ast.BasicLit:
			if number, err := strconv.ParseInt(n.Value, 0, 64); n.Kind == token.INT && err == nil {
				replace(n.Pos(), n.End(), fmt.Sprint(number+1))
			}
		case *ast.ReturnStmt:
			for _, result := range n.Results {
				if ident, ok := result.(*ast.Ident); ok && ident.Name == "err" {
					replace(ident.Pos(), ident.End(), "nil")
				}
			}
		case *ast.ExprStmt, *ast.DeferStmt, *ast.IncDecStmt:
			replace(n.Pos(), n.End(), "")
		case *ast.AssignStmt:
			if n.Tok != token.DEFINE {
				replace(n.Pos(), n.End(), "")
			}
		}
		return true
	})
	return all, nil
}
