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

// startOnSlowDisk starts a server on which strace delays each fsync by 5 s. The server may have as
// many tasks (threads) as the systemd unit in deploy/ permits. The system counts the tasks of a
// user, so the server runs as a user that has no other process.
//
// With --seccomp-bpf, only fsync stops for strace. If every system call did, requests would become
// so slow that they get a 503. With -D, the server keeps the process id that the test signals.
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
	dirs := map[string]string{}
	for _, name := range []string{"FILES_DIR", "GOCOVERDIR"} {
		// Other users can't enter t.TempDir.
		dir, err := os.MkdirTemp(hubstest.Dir, "owned-")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(dir, user, user); err != nil {
			t.Fatal(err)
		}
		dirs[name] = dir
	}
	return newService(t, hubstest.StartCommand(t, cmd, dirs))
}

// beginUploads begins 10 uploads of each of 40 users, and waits until each has a working file.
func (s *service) beginUploads() (uploads []*hubstest.HalfUpload) {
	s.t.Helper()
	// All users sign in before the first upload begins: an upload ends after 30 s without progress.
	var members []*hubstest.Client
	for range 40 {
		member, _ := s.Member(s.t, "member")
		members = append(members, member)
	}
	for i, member := range members {
		for range 10 {
			uploads = append(uploads, member.BeginUpload("a.txt"))
		}
		if i%10 == 0 {
			// A byte now and then, because the first uploads would end while the last ones begin.
			for _, upload := range uploads {
				upload.SendByte()
			}
		}
		// If all uploads began at once, some would wait too long for the database, and get a 503.
		hubstest.WaitUntil(s.t, "a working file of each upload", func() bool {
			return len(s.WorkingFiles(s.t)) == len(uploads)
		})
	}
	return uploads
}

// N1: when 400 uploads end at the same time on a slow disk, all of them succeed, and the server
// answers other requests meanwhile. Each upload holds a thread of the system during its fsync, so
// the unit must permit enough threads.
func TestUploadsThatEndTogether(t *testing.T) {
	t.Parallel()
	s, c := startOnSlowDisk(t)
	uploads := s.beginUploads()
	statuses := make(chan int, len(uploads))
	for _, upload := range uploads {
		go func() { statuses <- upload.Finish().Status }()
	}
	// If the server has too few threads, it crashes: then its folder in /proc is missing.
	hubstest.WaitUntil(t, "a thread for most of the uploads", func() bool {
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.Cmd.Process.Pid))
		return err != nil || len(threads) > len(uploads)*3/4
	})
	get(c, "/healthz").Must(t, 200)
	answers := map[int]int{}
	for range uploads {
		answers[<-statuses]++
	}
	if answers[201] != len(uploads) {
		t.Errorf("number of answers by status: got %v, want %d with a 201", answers, len(uploads))
	}
	get(c, "/healthz").Must(t, 200)
}
