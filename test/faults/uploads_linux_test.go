package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// mount puts a file system of one mebibyte into memory, and returns its folder.
func mount(t *testing.T) (dir string) {
	t.Helper()
	hubstest.NeedRoot(t)
	dir = t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

func TestDiskFull(t *testing.T) {
	t.Parallel()
	dir := mount(t)
	s := hubstest.Start(t, map[string]string{"FILES_DIR": dir})
	s.AllowErrors("insufficient_storage")
	c, _ := s.Member(t, "member")
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 600<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	kept := store(t, c, "kept.txt")
	for range 2 {
		r := c.Elsewhere().Upload("large.bin", make([]byte, 800<<10))
		hubstest.WantProblem(t, r, 507, "insufficient_storage")
		waitFiles(t, s, 2) // the ballast and the first file
	}
	c.WantFile(kept, "content")
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	c.Elsewhere().Upload("large.bin", make([]byte, 800<<10)).Want(t, 201)
	s.WantStored(t, 2)
}

// A file system that is read-only, and has a leftover, does not keep the server from serving.
func TestReadOnlyFileSystem(t *testing.T) {
	t.Parallel()
	dir := mount(t)
	s := hubstest.Start(t, map[string]string{"FILES_DIR": dir})
	c, _ := s.Member(t, "member")
	kept := store(t, c, "kept.txt")
	kill(t, s, c)
	if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	second := hubstest.Start(t, s.Env)
	client := second.With(t, c.Token())
	second.AllowErrors("read-only file system")
	second.Log.WaitFor(t, "the sweep of unfinished uploads failed", "read-only file system")
	client.WantFile(kept, "content")
	hubstest.WantProblem(t, client.Upload("a.txt", []byte("content")), 500, "internal")
}

// A trace is a strace that is attached to a server.
type trace struct {
	t      *testing.T
	output string // the file that it writes
	end    func() // detaches it
}

// attach returns when every system call of the server is under the control of strace.
func attach(t *testing.T, s *hubstest.Server, args ...string) *trace {
	t.Helper()
	strace := hubstest.Need(t, "strace", "strace")
	tr := &trace{t: t, output: filepath.Join(t.TempDir(), "trace")}
	args = append(args, "-f", "-y", "-s", "300", "-o", tr.output, "-p", fmt.Sprint(s.Cmd.Process.Pid))
	cmd := exec.Command(strace, args...)
	log := &hubstest.Log{}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	tr.end = sync.OnceFunc(func() {
		cmd.Process.Signal(syscall.SIGINT)
		cmd.Wait()
	})
	t.Cleanup(tr.end)
	log.WaitFor(t, "attached")
	return tr
}

// calls ends the trace and returns the system calls in the order in which they began. Each is a
// line such as: 4711 fsync(7</var/files>) = 0
func (tr *trace) calls() []string {
	tr.t.Helper()
	tr.end()
	text, err := os.ReadFile(tr.output)
	if err != nil {
		tr.t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	return slices.DeleteFunc(lines, func(line string) bool {
		isRest := strings.Contains(line, "<... ") // of a call that stands above
		return isRest && !strings.Contains(line, "(INJECTED)")
	})
}

// wantInjected ends the trace, which must have made a call fail.
func (tr *trace) wantInjected() {
	tr.t.Helper()
	for _, call := range tr.calls() {
		if strings.Contains(call, "(INJECTED)") {
			return
		}
	}
	tr.t.Fatal("no call has failed: this test shows nothing")
}

// A step of an upload that fails is a 500, or a 507 if there is no room. Nothing of the upload
// can be seen, nothing is left on disk, and the next upload works.
func TestUploadStepFails(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	s.AllowErrors(`"error":"internal`, `"error":"insufficient_storage`)
	c, _ := s.Member(t, "member")
	store(t, c, "first.txt") // the server has its connections to the database
	stored := 1
	for _, step := range []struct {
		name, call, errno string
		path              string // only calls on this path fail: FILES_DIR or "working"
		atOnce            bool   // before the upload begins
	}{
		{name: "making the file", call: "openat", errno: "EMFILE", atOnce: true},
		{name: "making the file over the quota", call: "openat", errno: "EDQUOT", atOnce: true},
		{name: "write", call: "write", errno: "EIO", path: "working"},
		{name: "write to a full disk", call: "write", errno: "ENOSPC", path: "working"},
		{name: "fsync of the file", call: "fsync", errno: "EIO", path: "working"},
		{name: "link", call: "linkat", errno: "EIO"},
		{name: "link over the quota", call: "linkat", errno: "EDQUOT"},
		{name: "fsync of the folder", call: "fsync", errno: "EIO", path: s.Env["FILES_DIR"]},
	} {
		t.Run(step.name, func(t *testing.T) {
			fault := "inject=" + step.call + ":error=" + step.errno
			args := []string{"-e", "trace=" + step.call, "-e", fault}
			var upload *hubstest.HalfUpload
			if !step.atOnce {
				upload = c.StartUpload(step.name)
			}
			switch step.path {
			case "":
			case "working":
				args = append(args, "-P", s.WorkingFiles(t)[0])
			default:
				args = append(args, "-P", step.path)
			}
			tr := attach(t, s, args...)
			if step.atOnce {
				upload = c.BeginUpload(step.name)
			}
			r := upload.Finish()
			tr.wantInjected()
			if step.errno == "ENOSPC" || step.errno == "EDQUOT" {
				hubstest.WantProblem(t, r, 507, "insufficient_storage")
			} else {
				hubstest.WantProblem(t, r, 500, "internal")
			}
			s.WantStored(t, stored)
			store(t, c, "next.txt")
			stored++
			s.WantStored(t, stored)
		})
	}
}

// A disk that refuses an upload may refuse its removal as well. The sweep takes what is left.
func TestUploadRollbackFails(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	s.AllowErrors(`"error":"internal`)
	c, _ := s.Member(t, "member")
	upload := c.StartUpload("lost.txt")
	tr := attach(t, s, "-e", "trace=linkat,unlinkat", "-e", "inject=linkat,unlinkat:error=EIO")
	hubstest.WantProblem(t, upload.Finish(), 500, "internal")
	tr.wantInjected()
	waitFiles(t, s, 1)
	s.AgeUnfinished(t)
	sweep(t, s)
	s.WantStored(t, 0)
}

// A working name that stays although the upload succeeded costs nothing: the file is there for
// good, and the sweep takes the name.
func TestUploadWorkingNameStays(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	upload := c.StartUpload("a.txt")
	tr := attach(t, s, "-e", "trace=unlinkat", "-e", "inject=unlinkat:error=EIO")
	upload.Finish().Want(t, 201)
	tr.wantInjected()
	waitFiles(t, s, 2)
	s.AgeUnfinished(t)
	sweep(t, s)
	s.WantStored(t, 1)
}

// The bytes are on disk before they get their final name, and this name is on disk before the row
// makes the file visible. The folder that is synced is FILES_DIR itself.
func TestUploadStepsAreInOrder(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	upload := c.StartUpload("a.txt")
	working := s.WorkingFiles(t)[0]
	id := filepath.Base(working)
	tr := attach(t, s, "-e", "trace=write,fsync,fdatasync,linkat,renameat,renameat2,unlinkat")
	upload.Finish().Want(t, 201)
	var steps strings.Builder
	for _, call := range tr.calls() {
		for step, pattern := range map[string]string{
			"w": `write\(\d+<` + working + `>`,
			"f": `fsync\(\d+<` + working + `>`,
			"l": ` linkat\(.*"` + id + `"`,
			"d": `fsync\(\d+<` + s.Env["FILES_DIR"] + `>`,
			"r": `write\(\d+<socket:.*` + id, // the row; lib/pq sends the id as text
			"u": `unlinkat\(.*` + id,
		} {
			if regexp.MustCompile(pattern).MatchString(call) {
				steps.WriteString(step)
			}
		}
	}
	// The answer to the client has the id, too.
	if !regexp.MustCompile(`^w+fldrur$`).MatchString(steps.String()) {
		t.Errorf("got the steps %s", steps.String())
	}
}

// A download goes from the file to the socket in the kernel, through all that the server puts
// around its connections.
func TestDownloadIsSentByTheKernel(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	path := storeLarge(t, c)
	tr := attach(t, s, "-e", "trace=sendfile,splice,read,pread64")
	c.Do("GET", path, nil).Want(t, 200)
	sent := 0
	read := 0
	for _, call := range tr.calls() {
		isOfFile := strings.Contains(call, "<"+onDisk(s, path)+">")
		if isOfFile && strings.Contains(call, "sendfile(") {
			sent++
		} else if isOfFile {
			read++
		}
	}
	if sent == 0 || read > 1 {
		t.Errorf("got %d calls of sendfile and %d reads, want one read at most", sent, read)
	}
}

// openIn counts what a server has open in FILES_DIR.
func openIn(t *testing.T, s *hubstest.Server) (n int) {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", s.Cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		name, _ := os.Readlink(link) // an error means that it is closed
		if strings.HasPrefix(name, s.Env["FILES_DIR"]) {
			n++
		}
	}
	return n
}

// Every upload and every download, however it ends, closes its file. There is no garbage
// collection here, which would close a lost file, too.
func TestFilesAreClosed(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, map[string]string{"GOGC": "off", "MAX_UPLOAD_BYTES": "300000"})
	c, _ := s.Member(t, "member")
	path := store(t, c, "a.txt")
	idle := openIn(t, s)
	wantClosed := func(after string) {
		t.Helper()
		hubstest.WaitUntil(t, "all closed after "+after, func() bool { return openIn(t, s) == idle })
	}
	wantClosed("an upload")
	c.Elsewhere().Upload("b.txt", make([]byte, 300_001)).Want(t, 413)
	wantClosed("an upload that is too large")
	upload := c.StartUpload("c.txt")
	if got := openIn(t, s); got != idle+1 {
		t.Errorf("during an upload: got %d open, want %d", got, idle+1)
	}
	upload.Rest.CloseWithError(os.ErrClosed)
	<-upload.Answer
	wantClosed("an upload that broke off")
	for _, headers := range [][]string{
		nil,
		{"Range", "bytes=1-2"},
		{"Range", "bytes=10-"},
		{"If-None-Match", "*"},
		{"If-Match", `"another"`},
	} {
		c.Elsewhere().Do("GET", path, nil, headers...)
		c.Elsewhere().Do("HEAD", path, nil, headers...)
		wantClosed(fmt.Sprintf("a download %q", headers))
	}
}
