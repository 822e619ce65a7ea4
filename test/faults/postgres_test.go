package faults

import (
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// A postgres is a PostgreSQL of one test that can be paused and lost.
type postgres struct {
	*hubstest.Postgres
	t      testing.TB
	paused []int // process ids
}

// newPostgres starts a postgres whose database has the schema and the server's role.
func newPostgres(t testing.TB) *postgres {
	t.Helper()
	pg := &postgres{Postgres: hubstest.NewPostgres(t), t: t}
	t.Cleanup(pg.resume) // before the stop, which waits for the processes
	return pg
}

// pause suspends all processes of PostgreSQL (SIGSTOP). Connections stay open and the kernel accepts
// new ones, but no process answers.
func (pg *postgres) pause() {
	pg.t.Helper()
	pg.signal(syscall.SIGSTOP, pg.Processes()[0]) // first, so that it starts no more processes
	pg.paused = pg.Processes()
	pg.signal(syscall.SIGSTOP, pg.paused...)
}

// resume lets the processes that pause suspended go on.
func (pg *postgres) resume() {
	pg.signal(syscall.SIGCONT, pg.paused...)
	pg.paused = nil
}

// lose kills all processes of PostgreSQL at once, as if its machine were lost: none of them can send
// its client an error. It returns when they and ./dev.sh have ended.
func (pg *postgres) lose() {
	pg.t.Helper()
	pg.pause()
	pids := pg.paused
	pg.paused = nil
	pg.signal(syscall.SIGKILL, pids...)
	hubstest.WaitUntil(pg.t, "the end of all processes of PostgreSQL", func() bool {
		return !slices.ContainsFunc(pids, isRunning)
	})
	pg.Stop()
}

// isRunning reports whether a process exists and is not a zombie. A zombie holds no connection and
// no file.
func isRunning(pid int) bool {
	state, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return err == nil && !strings.HasPrefix(string(state), "Z")
}

// signal sends a signal to processes. A process that has ended since it was listed is no error.
func (pg *postgres) signal(sig syscall.Signal, pids ...int) {
	pg.t.Helper()
	for _, pid := range pids {
		if err := syscall.Kill(pid, sig); err != nil && err != syscall.ESRCH {
			pg.t.Error(err)
		}
	}
}
