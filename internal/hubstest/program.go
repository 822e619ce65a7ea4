package hubstest

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"
)

// A Program is a program that a test runs besides the server, such as a browser.
type Program struct {
	*Log  // standard output and standard error
	cmd   *exec.Cmd
	stdin io.Closer
	done  chan struct{} // closed when the program has ended
}

// StartProgram starts a command and ends it when the test ends. The command runs under a shell,
// which kills it once the shell's standard input is closed. So the command ends even if the tests
// are killed.
func StartProgram(t testing.TB, cmd *exec.Cmd) *Program {
	t.Helper()
	cmd.Args = append([]string{"sh", "-c", `"$@" & cat; kill $!; wait`, "sh"}, cmd.Args...)
	cmd.Path = "/bin/sh"
	p, err := startProgram(cmd)
	Must(t, err)
	t.Cleanup(func() { p.end() })
	return p
}

// startProgram starts a command that ends by itself once its standard input is closed.
func startProgram(cmd *exec.Cmd) (*Program, error) {
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	p := &Program{
		Log:   &Log{},
		cmd:   cmd,
		stdin: stdin,
		done:  make(chan struct{}),
	}
	cmd.Stdout = p.Log
	cmd.Stderr = p.Log
	cmd.WaitDelay = Patience // maximum wait for a child of the command that keeps the output open
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Packages installs the packages of npm's registry that a folder's package.json and
// package-lock.json name, in a temporary folder, and returns that. What is installed has the
// checksums of the lock, and no script of a package runs. Packages skips the test if npm is missing,
// or if the registry does not answer.
func Packages(t testing.TB, locked string) (dir string) {
	t.Helper()
	npm := Need(t, "npm", "npm")
	ping := exec.Command(npm, "ping", "--fetch-retries=0", "--fetch-timeout=30000")
	if ping.Run() != nil {
		Skip(t, "npm's registry does not answer")
	}
	dir = t.TempDir()
	Must(t, os.CopyFS(dir, os.DirFS(locked)))
	install := exec.Command(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("setup: npm ci in %s: %v\n%s", locked, err, out)
	}
	return dir
}

// WaitMatch waits for a line that matches the pattern, and returns the text that the first group of
// the pattern matches. If no such line comes, WaitMatch ends the test.
func (p *Program) WaitMatch(t testing.TB, pattern string) string {
	t.Helper()
	found, err := p.waitMatch(pattern)
	Must(t, err)
	return found
}

// waitMatch is like WaitMatch, but returns an error.
func (p *Program) waitMatch(pattern string) (string, error) {
	expression := regexp.MustCompile(pattern)
	limit := 4 * Patience // some programs take long to start
	line, _, err := p.wait(limit, 0, p.done, expression.MatchString)
	if err != nil {
		return "", fmt.Errorf("want a line that matches %s: %w", pattern, err)
	}
	return expression.FindStringSubmatch(line)[1], nil
}

// end closes the program's standard input, waits until the program has ended, and returns its exit
// status. After twice Patience, end kills the program, and the status is -1. end may be called more
// than once.
func (p *Program) end() int {
	p.stdin.Close()
	late := time.AfterFunc(2*Patience, func() { p.cmd.Process.Kill() })
	defer late.Stop()
	<-p.done
	return p.cmd.ProcessState.ExitCode()
}

// Memory returns a size from /proc/PID/status in bytes: "VmRSS" is the memory that the process uses
// now, "VmHWM" the most that it has used so far. Without such a file, Memory returns 0.
func Memory(pid int, name string) (bytes int) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), name+":")
	fmt.Sscan(rest, &bytes)
	return bytes << 10 // the file counts in kB
}
