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

// A server is one of the two. Each start is a process of its own at the same address. At the end of
// the test, hubstest checks the log of each: in an hour, they grow to some hundred megabytes.
type server struct {
	*hubstest.Server
	life atomic.Int64 // odd while the server is down: no answer is then no fault
}

func isStopped(life int64) bool {
	return life%2 == 1
}

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

// start returns when the server takes connections.
func (v *server) start(t *testing.T) {
	v.Server = hubstest.Start(t, v.Env)
	v.AllowErrors(
		"unavailable",
		"code not sent",
		"insufficient_storage",
		"sweep of unfinished uploads failed",
	)
	v.life.Add(1)
}

// end stops the server by a signal and returns the exit status.
func (v *server) end(t *testing.T, signal syscall.Signal) int {
	v.life.Add(1)
	v.Signal(t, signal)
	return v.Wait(t)
}

// A size is what must not grow. Both are 0 on a system without /proc.
type size struct{ residentMB, descriptors int }

func (v *server) size() size {
	pid := v.Cmd.Process.Pid
	open, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return size{
		residentMB:  hubstest.Memory(pid, "VmRSS") >> 20,
		descriptors: len(open),
	}
}

// checkSize checks that the server that ran all the time is about as small as at its start.
func (s *soak) checkSize(v *server, before size) {
	const (
		moreMB          = 64
		moreDescriptors = 16
		mostGoroutines  = 100
	)
	after := v.size()
	// The clients' idle connections end within a minute or so.
	for range 20 {
		if after.descriptors <= before.descriptors+moreDescriptors {
			break
		}
		time.Sleep(10 * time.Second)
		after = v.size()
	}
	v.end(s.t, syscall.SIGQUIT) // the Go runtime prints its goroutines
	goroutines := v.Stderr.Count("goroutine ", "]:")
	v.Stderr = &hubstest.Log{} // so hubstest takes them for no fault
	s.event("memory %d MB, then %d", before.residentMB, after.residentMB)
	s.event(
		"descriptors %d, then %d; goroutines at the end %d",
		before.descriptors,
		after.descriptors,
		goroutines,
	)
	if after.residentMB > before.residentMB+moreMB {
		s.fault("memory grows", after)
	}
	if after.descriptors > before.descriptors+moreDescriptors {
		s.fault("descriptors leak", after)
	}
	if goroutines == 0 || goroutines > mostGoroutines {
		s.fault("goroutines leak", goroutines)
	}
}
