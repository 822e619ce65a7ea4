package faults

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// startOnSlowDisk starts a server whose fsyncs take 5 s each, under the unit's bound of tasks. It
// runs as a user of its own, whose tasks are counted. Only a fsync stops for strace: if every
// system call did, requests would wait for each other for so long that they end as 503s.
func startOnSlowDisk(t *testing.T) (*service, *hubstest.Client) {
	t.Helper()
	hubstest.NeedRoot(t)
	strace := hubstest.Need(t, "strace", "strace")
	prlimit := hubstest.Need(t, "prlimit", "util-linux")
	unit := hubstest.ReadFile(t, "deploy/hubs.service")
	tasks := regexp.MustCompile(`(?m)^TasksMax=(\d+)$`).FindStringSubmatch(unit)[1]
	cmd := exec.Command(
		prlimit, "--nproc="+tasks,
		strace, "-D", "-f", "-qq", "--seccomp-bpf", "-o", "/dev/null",
		"-e", "trace=fsync", "-e", "inject=fsync:delay_enter=5000000",
		hubstest.Binary(), "serve",
	)
	const user = 47_110_815
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: user, Gid: user},
	}
	owned := map[string]string{}
	for _, name := range []string{"FILES_DIR", "GOCOVERDIR"} {
		dir, err := os.MkdirTemp(hubstest.Dir, "owned-") // others may not look into t.TempDir
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(dir, user, user); err != nil {
			t.Fatal(err)
		}
		owned[name] = dir
	}
	return newService(t, hubstest.StartCommand(t, cmd, owned))
}

// N1: 400 uploads end together on a slow disk. Each fsync holds a thread of the system meanwhile.
// All are answered, and so are others.
func TestUploadsThatEndTogether(t *testing.T) {
	t.Parallel()
	s, c := startOnSlowDisk(t)
	s.AllowErrors("unavailable")
	const users, each = 40, 10
	var uploads []*hubstest.HalfUpload
	for range users {
		member, _ := s.Member(t, "member")
		for range each {
			uploads = append(uploads, member.BeginUpload("a.txt"))
		}
	}
	hubstest.WaitUntil(t, "all uploads to be written", func() bool {
		return len(s.WorkingFiles(t)) == len(uploads)
	})
	statuses := make(chan int, users*each)
	for _, upload := range uploads {
		go func() { statuses <- upload.Finish().Status }()
	}
	hubstest.WaitUntil(t, "a thread for most of the uploads, or the end", func() bool {
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.Cmd.Process.Pid))
		return err != nil || len(threads) > len(uploads)*3/4
	})
	get(c, "/healthz").Want(t, 200)
	answers := map[int]int{}
	for range uploads {
		answers[<-statuses]++
	}
	if answers[201] != len(uploads) {
		t.Errorf("got the answers %v, want %d of 201", answers, len(uploads))
	}
	get(c, "/healthz").Want(t, 200)
}
