package faults

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// E2: A folder that hangs costs one thread, however often /healthz is asked: the questions are 503s,
// and other requests are served. When the folder is back, so is /healthz.
func TestHangingFolderCostsOneThread(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrorsWithAnyOf(unavailable)
	// Threads that the server needs anyway.
	hubstest.CountStatuses(getAtOnce(t, 150, c, "/healthz"))
	before := s.threads()
	const calls = "newfstatat,statx,openat"
	tr := attach(t, s, "-e", "trace="+calls, "-e", "inject="+calls+":delay_enter=20000000",
		"-P", s.Env["FILES_DIR"]+"/"+hubstest.Unfinished, "-P", s.Env["FILES_DIR"])
	asked := time.Now()
	answers := getAtOnce(t, 150, c, "/healthz")
	for range 20 {
		get(c, "/hubs").Want(t, 200)
	}
	// Every question is answered while the folder still hangs.
	hubstest.WantStatuses(t, answers, map[int]int{503: 150})
	if took := time.Since(asked); took > 15*time.Second {
		t.Errorf("the answers took %v, want them while the folder hangs", took)
	}
	if n := s.threads() - before; n > 20 {
		t.Errorf("got %d more threads after 150 questions, want a few", n)
	}
	tr.end()
	hubstest.WaitFor(t, "status of /healthz afterwards", 200, func() int { return get(c, "/healthz").Status })
}

// threads returns how many threads the server has.
func (s *service) threads() int {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.Cmd.Process.Pid))
	hubstest.Must(s.t, err)
	return len(entries)
}

// If the file system of FILES_DIR can't do what an upload needs, the server does not start, and names
// the step that has failed.
func TestStartTriesAnUpload(t *testing.T) {
	t.Parallel()
	strace := hubstest.Need(t, "strace", "strace")
	for name, test := range map[string]struct {
		call, errno string
		onFolder    bool // restricts the call to FILES_DIR itself
		says        []string
	}{
		"no hard links":   {call: "linkat", errno: "EPERM", says: []string{"link"}},
		"no sync":         {call: "fsync", errno: "EINVAL", says: []string{"sync"}},
		"no folder sync":  {call: "fsync", errno: "EINVAL", onFolder: true, says: []string{"sync"}},
		"no removal":      {call: "unlinkat", errno: "EACCES", says: []string{"RemoveAll"}},
		"input or output": {call: "linkat", errno: "EIO", says: []string{"link", "input/output error"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			env := hubstest.ServerEnv(t)
			args := []string{"-f", "-o", "/dev/null", "-e", "trace=" + test.call,
				"-e", "inject=" + test.call + ":error=" + test.errno}
			if test.onFolder {
				args = append(args, "-P", env["FILES_DIR"])
			}
			cmd := exec.Command(strace, append(args, hubstest.Binary(), "serve")...)
			wantNoStart(t, cmd, env, test.says...)
		})
	}
	t.Run("no bytes", func(t *testing.T) {
		t.Parallel()
		cmd := exec.Command("sh", "-c", `ulimit -f 0; exec "$0" serve`, hubstest.Binary())
		wantNoStart(t, cmd, hubstest.ServerEnv(t), "write")
	})
}

// wantNoStart fails the test unless a server does not start and says so, in one line that names
// FILES_DIR and what it must say.
func wantNoStart(t *testing.T, cmd *exec.Cmd, env map[string]string, says ...string) {
	t.Helper()
	_, err := hubstest.TryStart(t, cmd, env)
	if err == nil {
		t.Fatal("the server has started")
	}
	for _, part := range append(says, "FILES_DIR") {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("got the error %v, want %q in it", err, part)
		}
	}
	if code := cmd.ProcessState.ExitCode(); code != 2 {
		t.Errorf("got exit status %d, want 2", code)
	}
}
