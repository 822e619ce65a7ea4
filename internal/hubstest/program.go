package hubstest

import (
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"testing"
	"time"
)

// A Program is what a test runs besides the server, such as a browser.
type Program struct {
	*Log  // all that it writes
	cmd   *exec.Cmd
	stdin io.Closer
	done  chan struct{} // closed when it has ended
}

// StartProgram runs a command until the test ends. The shell ends it when its standard input is
// closed, so it also ends when the tests are killed.
func StartProgram(t testing.TB, cmd *exec.Cmd) *Program {
	cmd.Args = append([]string{"sh", "-c", `"$@" & cat; kill $!; wait`, "sh"}, cmd.Args...)
	cmd.Path = "/bin/sh"
	p, err := startProgram(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.end() })
	return p
}

// startProgram runs a command that ends with its standard input.
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
	cmd.WaitDelay = Patience // a grandchild that keeps the output open must not hang the tests
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// WaitMatch waits for a line that matches, and returns what the group in the pattern matches.
func (p *Program) WaitMatch(t testing.TB, pattern string) string {
	found, err := p.waitMatch(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func (p *Program) waitMatch(pattern string) (string, error) {
	expression := regexp.MustCompile(pattern)
	limit := 4 * Patience // some programs take long to start
	line, _, err := p.wait(limit, 0, p.done, expression.MatchString)
	if err != nil {
		return "", fmt.Errorf("%w that matches %s", err, pattern)
	}
	return expression.FindStringSubmatch(line)[1], nil
}

// end returns the exit status, or -1 if the program had to be killed. It may be called again.
func (p *Program) end() int {
	p.stdin.Close()
	late := time.AfterFunc(2*Patience, func() { p.cmd.Process.Kill() })
	defer late.Stop()
	<-p.done
	return p.cmd.ProcessState.ExitCode()
}
