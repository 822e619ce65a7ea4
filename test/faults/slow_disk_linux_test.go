package faults

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"

	"sync"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// H9: 400 uploads end together on a slow disk, under the unit's bound of tasks. Each fsync holds a
// thread of the system meanwhile. All are answered, and so are others.
func TestUploadsThatEndTogether(t *testing.T) {
	t.Parallel()
	hubstest.NeedRoot(t) // it runs the server as a user of its own, whose tasks are counted
	strace := hubstest.Need(t, "strace", "strace")
	unit := hubstest.ReadFile(t, "deploy/hubs.service")
	tasks := regexp.MustCompile(`(?m)^TasksMax=(\d+)$`).FindStringSubmatch(unit)[1]
	const user = 47_110_815
	owned := func() string {
		dir, err := os.MkdirTemp(hubstest.Dir, "owned-") // others may not look into t.TempDir
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(dir, user, user); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	prlimit := hubstest.Need(t, "prlimit", "util-linux")
	cmd := exec.Command(prlimit, "--nproc="+tasks, strace, "-D", "-f", "-qq", "-o", "/dev/null",
		"-e", "trace=fsync", "-e", "inject=fsync:delay_enter=5000000", hubstest.Binary(), "serve")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	s := hubstest.StartCommand(t, cmd, map[string]string{
		"FILES_DIR":  owned(),
		"GOCOVERDIR": owned(),
	})
	s.AllowErrors("unavailable") // so many statements at once may wait too long

	const users, each = 25, 16
	uploads := make(chan *hubstest.HalfUpload, users*each)
	for range users {
		c, _ := s.Member(t, "member")
		for range each {
			uploads <- c.BeginUpload("a.txt")
		}
	}
	hubstest.WaitUntil(t, "all uploads to be written", func() bool {
		return len(s.WorkingFiles(t)) == users*each
	})
	var all sync.WaitGroup
	for range users * each {
		all.Go(func() {
			if r := (<-uploads).Finish(); r.Status != 201 {
				t.Errorf("got %v, want 201", r)
			}
		})
	}
	hubstest.WaitUntil(t, "most of the threads", func() bool {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.Cmd.Process.Pid))
		return err != nil || len(entries) > users*each*3/4
	})
	get(s.Client(t), "/healthz").Want(t, 200)
	all.Wait()
	s.WantStored(t, users*each)
}
