package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
	t.Cleanup(func() {
		syscall.Unmount(dir, syscall.MNT_DETACH)
	})
	return dir
}

// F3: an upload to a full disk is a 507 that leaves nothing. A disk that has become read-only, with
// a leftover on it, does not keep the server from serving.
func TestDiskFullThenReadOnly(t *testing.T) {
	t.Parallel()
	dir := mount(t)
	s, c := start(t, map[string]string{"FILES_DIR": dir})
	s.AllowErrors("insufficient_storage")
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 600<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	kept := store(t, c, "kept.txt")
	large := make([]byte, 800<<10)
	for range 2 {
		r := c.Elsewhere().Upload("large.bin", large)
		hubstest.WantProblem(t, r, 507, "insufficient_storage")
		s.waitFiles(2) // the ballast and the first file
	}
	c.WantFile(kept, "content")
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	c.Elsewhere().Upload("large.bin", large).Want(t, 201)
	s.WantStored(t, 2)

	s.killMidUpload(c)
	err := syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
	if err != nil {
		t.Fatal(err)
	}
	second := hubstest.Start(t, s.Env)
	second.AllowErrors("read-only file system")
	second.Log.WaitFor(t, "the sweep of unfinished uploads failed", "read-only file system")
	client := second.With(t, c.Token())
	client.WantFile(kept, "content")
	hubstest.WantProblem(t, uploadText(client, "a.txt"), 500, "internal")
}

// A trace is a strace that is attached to a server.
type trace struct {
	t      *testing.T
	output string // the file that it writes
	end    func() // detaches it
}

// attach returns when every system call of the server is under the control of strace.
func attach(t *testing.T, s *service, args ...string) *trace {
	t.Helper()
	strace := hubstest.Need(t, "strace", "strace")
	tr := &trace{
		t:      t,
		output: filepath.Join(t.TempDir(), "trace"),
	}
	cmd := exec.Command(strace, args...)
	cmd.Args = append(
		cmd.Args,
		"-f", "-y",
		"-s", "300",
		"-o", tr.output,
		"-p", fmt.Sprint(s.Cmd.Process.Pid),
	)
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

// attachFault attaches a strace that makes system calls fail.
func attachFault(t *testing.T, s *service, calls, errno string, args ...string) *trace {
	t.Helper()
	fault := []string{
		"-e", "trace=" + calls,
		"-e", "inject=" + calls + ":error=" + errno,
	}
	return attach(t, s, append(fault, args...)...)
}

// calls ends the trace and returns the system calls in the order in which they began. Each is a
// line such as: 4711 fsync(7</var/files>) = 0
func (tr *trace) calls() string {
	tr.t.Helper()
	tr.end()
	text, err := os.ReadFile(tr.output)
	if err != nil {
		tr.t.Fatal(err)
	}
	return string(text)
}

// wantInjected ends the trace, which must have made a call fail.
func (tr *trace) wantInjected() {
	tr.t.Helper()
	if !strings.Contains(tr.calls(), "(INJECTED)") {
		tr.t.Fatal("no call has failed: this test shows nothing")
	}
}

// A step of an upload that fails is a 500, or a 507 if there is no room. Nothing of the upload
// can be seen, nothing is left on disk, and the next upload works.
func TestUploadStepFails(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrors(`"error":"internal`, `"error":"insufficient_storage`)
	store(t, c, "first.txt") // the server has its connections to the database
	stored := 1
	for _, step := range []struct{ call, of, errno string }{
		{"openat", "", "EMFILE"}, // no descriptor is left for the file
		{"openat", "", "EDQUOT"}, // the user's quota is used up
		{"write", "file", "EIO"},
		{"write", "file", "ENOSPC"}, // the disk is full
		{"fsync", "file", "EIO"},
		{"linkat", "", "EIO"},
		{"linkat", "", "EDQUOT"}, // the folder needs another block
		{"fsync", "folder", "EIO"},
	} {
		t.Run(step.call+" "+step.of+" "+step.errno, func(t *testing.T) {
			c := c.In(t)
			atOnce := step.call == "openat" // before the body is read
			var upload *hubstest.HalfUpload
			if !atOnce {
				upload = c.StartUpload("a.txt")
			}
			var args []string
			switch step.of {
			case "file":
				args = []string{"-P", s.WorkingFiles(t)[0]}
			case "folder":
				args = []string{"-P", s.Env["FILES_DIR"]}
			}
			tr := attachFault(t, s, step.call, step.errno, args...)
			if atOnce {
				upload = c.BeginUpload("a.txt")
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

// A disk may refuse to remove the working name. If it has refused the upload as well, nothing of
// it can be seen. Else the file is there for good. The sweep takes the name.
func TestUploadWorkingNameStays(t *testing.T) {
	t.Parallel()
	for calls, stored := range map[string]int{
		"linkat,unlinkat": 0,
		"unlinkat":        1,
	} {
		t.Run(calls, func(t *testing.T) {
			t.Parallel()
			s, c := start(t)
			s.AllowErrors(`"error":"internal`)
			upload := c.StartUpload("a.txt")
			tr := attachFault(t, s, calls, "EIO")
			r := upload.Finish()
			tr.wantInjected()
			if stored == 1 {
				r.Want(t, 201)
			} else {
				hubstest.WantProblem(t, r, 500, "internal")
			}
			s.waitFiles(stored + 1)
			s.AgeUnfinished(t)
			s.sweep()
			s.WantStored(t, stored)
		})
	}
}

// The bytes are on disk before they get their final name, and this name is on disk before the row
// makes the file visible. The folder that is synced is FILES_DIR itself.
func TestUploadStepsAreInOrder(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	upload := c.StartUpload("a.txt")
	working := s.WorkingFiles(t)[0]
	id := filepath.Base(working)
	tr := attach(t, s, "-e", "trace=write,fsync,fdatasync,linkat,renameat,renameat2,unlinkat")
	upload.Finish().Want(t, 201)
	var steps strings.Builder
	for call := range strings.Lines(tr.calls()) {
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
	// Writes, fsync, link, fsync of the folder, the row, unlink, and the answer. The answer looks
	// like the row: it has the id, too.
	if !regexp.MustCompile(`^w+fldrur$`).MatchString(steps.String()) {
		t.Errorf("got the steps %s", steps.String())
	}
}

// A download goes from the file to the socket in the kernel, through all that the server puts
// around its connections.
func TestDownloadIsSentByTheKernel(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	path := storeLarge(t, c)
	tr := attach(t, s, "-e", "trace=sendfile,splice,read,pread64")
	get(c, path).Want(t, 200)
	sent := 0
	read := 0
	for call := range strings.Lines(tr.calls()) {
		isOfFile := strings.Contains(call, "<"+s.onDisk(path)+">")
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

// openFiles counts what a server has open in FILES_DIR.
func (s *service) openFiles() (n int) {
	s.t.Helper()
	pattern := fmt.Sprintf("/proc/%d/fd/*", s.Cmd.Process.Pid)
	links, err := filepath.Glob(pattern)
	if err != nil {
		s.t.Fatal(err)
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
	s, c := start(t, map[string]string{
		"GOGC":             "off",
		"MAX_UPLOAD_BYTES": "300000",
	})
	path := store(t, c, "a.txt")
	idle := s.openFiles()
	wantClosed := func(after string) {
		t.Helper()
		hubstest.WaitUntil(t, "all closed after "+after, func() bool {
			return s.openFiles() == idle
		})
	}
	wantClosed("an upload")
	c.Elsewhere().Upload("b.txt", make([]byte, 300_001)).Want(t, 413)
	wantClosed("an upload that is too large")
	upload := c.StartUpload("c.txt")
	if got := s.openFiles(); got != idle+1 {
		t.Errorf("during an upload: got %d open, want %d", got, idle+1)
	}
	breakOff(t, upload)
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
