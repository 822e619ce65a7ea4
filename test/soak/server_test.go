package soak

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A server is one of the two servers. Each start makes a new process at the same address. hubstest
// keeps the log of each process in memory and checks it at the end of the test. In an hour, the
// logs grow to some hundred megabytes.
type server struct {
	*hubstest.Server
	life atomic.Int64 // goes up with each start and stop; odd while the server is stopped
}

// stoppedSince reports whether the server was stopped at some time since life had the given value.
func (v *server) stoppedSince(life int64) bool {
	wasStopped := life%2 == 1
	return wasStopped || v.life.Load() != life
}

// newServer starts a server. Both servers use the same database, FILES_DIR and mail server.
func (s *soak) newServer() *server {
	server := &server{
		Server: &hubstest.Server{
			Env: hubstest.ServerEnv(s.t, hubstest.StagingEnv(s.mail), map[string]string{
				"ADDR":         hubstest.FreeAddr(s.t),
				"DATABASE_URL": s.pg.URL,
				"FILES_DIR":    s.dir,
			}),
		},
	}
	server.life.Store(1)
	server.start(s.t)
	return server
}

// start starts a process of the server and returns when it accepts connections. It allows the
// errors in the log that the failures cause.
func (v *server) start(t *testing.T) {
	v.Server = hubstest.Start(t, v.Env)
	v.AllowErrorsWithAnyOf(
		"unavailable",
		"code not sent",
		"the sweep of",
	)
	v.life.Add(1)
}

// end sends a signal to the server, waits until it has stopped, and returns the exit status.
func (v *server) end(t *testing.T, signal syscall.Signal) int {
	v.life.Add(1)
	v.Signal(t, signal)
	return v.WaitExit(t)
}

// A size is what a server uses of memory and descriptors, which must not keep growing. Both figures
// are 0 on a system without /proc.
type size struct{ residentMB, descriptors int }

// size returns the current size of the server.
func (v *server) size() size {
	pid := v.Cmd.Process.Pid
	open, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return size{
		residentMB:  hubstest.Memory(pid, "VmRSS") >> 20,
		descriptors: len(open),
	}
}

// wantSize compares the size of a server that has never restarted with its size before the soak.
// It stops the server to count its goroutines. Too much growth is a fault.
func (s *soak) wantSize(v *server, before size) {
	const (
		moreMB          = 64  // that memory may grow
		moreDescriptors = 16  // that may be open in addition
		mostGoroutines  = 100 // at the end
	)
	after := v.size()
	// Connections of clients that have ended take some time to close.
	for end := time.Now().Add(hubstest.Patience); time.Now().Before(end); after = v.size() {
		if after.descriptors <= before.descriptors+moreDescriptors {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	v.end(s.t, syscall.SIGQUIT) // the Go runtime prints all goroutines on standard error
	goroutines := v.Stderr.Count("goroutine ", "]:")
	v.Stderr = &hubstest.Log{} // discards them: hubstest allows no output on standard error
	s.event("memory %d MB, then %d", before.residentMB, after.residentMB)
	s.event("descriptors %d, then %d; goroutines at the end %d",
		before.descriptors, after.descriptors, goroutines)
	s.wantAtMost("memory grows, in MB", after.residentMB, before.residentMB+moreMB)
	s.wantAtMost("descriptors leak", after.descriptors, before.descriptors+moreDescriptors)
	s.wantAtMost("goroutines leak", goroutines, mostGoroutines)
	if goroutines == 0 {
		s.fault("goroutines are not printed", v.Addr)
	}
}

// wantAtMost counts a fault if got is more than most.
func (s *soak) wantAtMost(fault string, got, most int) {
	if got > most {
		s.fault(fault, fmt.Sprintf("got %d, want at most %d", got, most))
	}
}
