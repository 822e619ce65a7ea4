package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A testPostgres is a private PostgreSQL that ./dev.sh starts. It ends when the standard input
// of ./dev.sh is closed, so also when the tests are killed.
type testPostgres struct {
	dir, url string
	stdin    io.Closer
	stderr   *logBuffer // shown only when something fails
	done     chan error
}

func (pg *testPostgres) start() error {
	cmd := exec.Command("./dev.sh", "postgres", pg.dir)
	pg.stderr, pg.done = &logBuffer{}, make(chan error, 1)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	pg.stdin = stdin
	// A pipe of our own: exec.Cmd closes its pipes in Wait.
	out, outWriter, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = outWriter, pg.stderr
	cmd.WaitDelay = patience // a grandchild that keeps the pipe open must not hang the tests
	err = cmd.Start()
	outWriter.Close()
	if err != nil {
		out.Close()
		return err
	}
	first := make(chan string, 1)
	go func() {
		defer out.Close()
		line, _ := bufio.NewReader(out).ReadString('\n')
		first <- strings.TrimSpace(line)
		pg.done <- cmd.Wait()
	}()
	select {
	case pg.url = <-first:
	case <-time.After(4 * patience):
	}
	if !strings.HasPrefix(pg.url, "postgres://") {
		return errors.Join(fmt.Errorf("./dev.sh postgres printed %q\n%s", pg.url, pg.stderr), pg.stop())
	}
	return nil
}

func (pg *testPostgres) stop() error {
	pg.stdin.Close()
	select {
	case err := <-pg.done:
		pg.done <- err // for the next stop
		if err != nil {
			return fmt.Errorf("./dev.sh postgres: %w\n%s", err, pg.stderr)
		}
		return nil
	case <-time.After(2 * patience):
		return fmt.Errorf("./dev.sh postgres has not ended\n%s", pg.stderr)
	}
}

// newPostgres starts a PostgreSQL for one test, which may stop, restart (same port, same data)
// and pause it. Its url names a database that has the schema.
func newPostgres(t testing.TB) *ownPostgres {
	t.Helper()
	dir, err := os.MkdirTemp(testDir, "postgres-")
	if err != nil {
		t.Fatal(err)
	}
	// PostgreSQL runs as another user, who must get in; see testMain.
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	pg := &ownPostgres{t, &testPostgres{dir: filepath.Join(dir, "postgres")}, nil}
	pg.start()
	t.Cleanup(func() {
		pg.resume()
		pg.stop()
	})
	if err := applySchema(pg.url); err != nil {
		t.Fatal(err)
	}
	return pg
}

type ownPostgres struct {
	t testing.TB
	*testPostgres
	paused []int
}

func (pg *ownPostgres) start() {
	pg.t.Helper()
	if err := pg.testPostgres.start(); err != nil {
		pg.t.Fatal(err)
	}
}

// stop ends PostgreSQL in good order. Open connections don't delay it.
func (pg *ownPostgres) stop() {
	pg.t.Helper()
	if err := pg.testPostgres.stop(); err != nil {
		pg.t.Error(err)
	}
}

// pause stops all its processes (SIGSTOP). Connections stay open, the kernel accepts new ones,
// and nothing answers.
func (pg *ownPostgres) pause() {
	pg.t.Helper()
	postmaster := pg.postmaster()
	pg.signal(postmaster, syscall.SIGSTOP) // first, so that it starts no others
	pg.paused = []int{postmaster}
	for _, child := range pg.children(postmaster) {
		pg.signal(child, syscall.SIGSTOP)
		pg.paused = append(pg.paused, child)
	}
}

// postmaster returns the process id of PostgreSQL's first process.
func (pg *ownPostgres) postmaster() int {
	pg.t.Helper()
	pid, err := os.ReadFile(pg.dir + "/data/postmaster.pid")
	if err != nil {
		pg.t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(pid), "\n")
	postmaster, err := strconv.Atoi(line)
	if err != nil {
		pg.t.Fatal(err)
	}
	return postmaster
}

// children returns the process ids of the others.
func (pg *ownPostgres) children(postmaster int) (pids []int) {
	pg.t.Helper()
	list, err := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
	if err != nil {
		pg.t.Fatal("ps: ", err)
	}
	for line := range strings.Lines(string(list)) {
		var child, parent int
		if n, _ := fmt.Sscan(line, &child, &parent); n == 2 && parent == postmaster {
			pids = append(pids, child)
		}
	}
	return pids
}

// crash ends it by a signal to its first process, SIGKILL or SIGQUIT, without a chance to
// finish its work. The others notice, and some still tell their clients so. The next
// start recovers the data.
func (pg *ownPostgres) crash(sig syscall.Signal) {
	pg.t.Helper()
	postmaster := pg.postmaster()
	pids := append(pg.children(postmaster), postmaster)
	pg.signal(postmaster, sig)
	pg.waitEnd(pids)
}

// lose ends all its processes at once, as the loss of its machine would: no client
// hears a word.
func (pg *ownPostgres) lose() {
	pg.t.Helper()
	pg.pause()
	pids := pg.paused
	pg.paused = nil
	for _, pid := range pids {
		pg.signal(pid, syscall.SIGKILL)
	}
	pg.waitEnd(pids)
}

func (pg *ownPostgres) waitEnd(pids []int) {
	pg.t.Helper()
	waitUntil(pg.t, "the end of PostgreSQL", func() bool {
		// Ended children may stay as zombies for a moment; they hold nothing.
		return !slices.ContainsFunc(pids, isRunning)
	})
	pg.stop() // ends the dev.sh that kept it
}

// isRunning tells whether there is such a process, zombies excepted.
func isRunning(pid int) bool {
	state, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return err == nil && !strings.HasPrefix(string(state), "Z")
}

// resume undoes pause.
func (pg *ownPostgres) resume() {
	for _, pid := range pg.paused {
		pg.signal(pid, syscall.SIGCONT)
	}
	pg.paused = nil
}

func (pg *ownPostgres) signal(pid int, sig syscall.Signal) {
	// A backend may have ended since it was listed.
	if err := syscall.Kill(pid, sig); err != nil && err != syscall.ESRCH {
		pg.t.Error(err)
	}
}

// testBinary builds the program once, as users get it, and returns its path.
var testBinary = sync.OnceValues(func() (string, error) {
	path := testDir + "/hubs"
	out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// A testProcess is a server in a process of its own, for what only a process has: signals, and
// an end at which it can't clean up.
type testProcess struct {
	*testServer
	cmd   *exec.Cmd
	ended bool // the test has sent a signal, and checks the exit status itself
}

// startProcess is startServer in a process of its own.
func startProcess(t testing.TB, overrides ...map[string]string) *testProcess {
	t.Helper()
	return startThrough(t, nil, overrides...)
}

// startThrough is startProcess by way of another command, such as one that sets a
// limit, which must end in exec of its last arguments.
func startThrough(t testing.TB, wrapper []string, overrides ...map[string]string) *testProcess {
	t.Helper()
	path, err := testBinary()
	if err != nil {
		t.Fatal(err)
	}
	args := append(slices.Clone(wrapper), path, "serve")
	return startCommand(t, exec.Command(args[0], args[1:]...), overrides...)
}

// startCommand is startProcess for another way to start the binary.
func startCommand(t testing.TB, cmd *exec.Cmd, overrides ...map[string]string) *testProcess {
	t.Helper()
	p := &testProcess{testServer: newTestServer(serverEnv(t, overrides...)), cmd: cmd}
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"} {
		p.cmd.Env = append(p.cmd.Env, name+"="+os.Getenv(name))
	}
	for name, value := range p.env {
		p.cmd.Env = append(p.cmd.Env, name+"="+value)
	}
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.cancel = func() { p.cmd.Process.Signal(syscall.SIGTERM) }
	go func() {
		defer close(p.done)
		p.cmd.Wait()
		p.exit = p.cmd.ProcessState.ExitCode() // -1: by a signal
	}()
	t.Cleanup(func() {
		if code := p.stop(t); code != 0 && !p.ended {
			t.Errorf("serve: got exit status %d, want 0\n%s", code, p.stderr)
		}
		p.cmd.Process.Kill() // an error means that it has ended
		p.checkLog(t)
	})
	p.waitListening(t)
	return p
}

func (p *testProcess) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	p.ended = true
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// wait returns the exit status, -1 after a signal that killed it.
func (p *testProcess) wait(t testing.TB) int {
	t.Helper()
	select {
	case <-p.done:
		return p.exit
	case <-time.After(patience):
		t.Fatalf("the process has not ended, log:\n%s", p.log)
		return -1
	}
}
