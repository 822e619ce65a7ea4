package faults

import (
	"errors"
	"fmt"
	"io"
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

// startOnSmallDisk starts a server whose FILES_DIR is a file system of 1 MiB, kept in memory.
func startOnSmallDisk(t *testing.T) (s *service, admin *hubstest.Client, dir string) {
	t.Helper()
	hubstest.NeedRoot(t)
	dir = t.TempDir()
	hubstest.Must(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() {
		syscall.Unmount(dir, syscall.MNT_DETACH)
	})
	s, admin = start(t, map[string]string{"FILES_DIR": dir})
	return s, admin, dir
}

// F3: An upload to a full disk gets a 507, and nothing is left of it. When the disk has room again,
// the same upload succeeds.
func TestUploadToAFullDiskLeavesNothing(t *testing.T) {
	t.Parallel()
	s, c, dir := startOnSmallDisk(t)
	s.AllowErrorsWithAnyOf("insufficient_storage")
	// The ballast leaves room for a small file, but not for the large one.
	ballast := filepath.Join(dir, "ballast")
	hubstest.Must(t, os.WriteFile(ballast, make([]byte, 600<<10), 0o600))
	kept := c.Store("kept.txt", "content")
	large := make([]byte, 800<<10)
	for range 2 {
		r := c.Elsewhere().Upload("large.bin", large)
		r.WantProblem(t, 507, "insufficient_storage")
		s.waitFiles(2) // the ballast and kept.txt
	}
	c.WantFile(kept, "content")
	hubstest.Must(t, os.Remove(ballast))
	c.Elsewhere().Upload("large.bin", large).Want(t, 201)
	s.WantStored(t, 2)
}

// If the disk has become read-only and holds an unfinished upload, which the sweep can't remove,
// the server still starts and serves downloads.
func TestReadOnlyDiskIsServed(t *testing.T) {
	t.Parallel()
	s, c, dir := startOnSmallDisk(t)
	kept := c.Store("kept.txt", "content")
	s.killMidUpload(c)
	err := syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
	hubstest.Must(t, err)
	second := hubstest.Start(t, s.Env)
	second.AllowErrorsWithAnyOf("read-only file system")
	second.Log.WaitFor(t, "the sweep of an unfinished upload failed", "read-only file system")
	client := second.With(t, c.Token())
	client.WantFile(kept, "content")
	sendUpload(client, "a.txt").WantProblem(t, 500, "internal")
}

// A trace is a running strace that is attached to a server.
type trace struct {
	t      *testing.T
	output string // path of the file that strace writes
	end    func() // detaches strace; may be called more than once
}

// attach attaches strace to a server. args say which system calls it traces, and what it does with
// them. When attach returns, strace controls every system call of the server.
func attach(t *testing.T, s *service, args ...string) *trace {
	t.Helper()
	strace := hubstest.Need(t, "strace", "strace")
	tr := &trace{
		t:      t,
		output: filepath.Join(t.TempDir(), "trace"),
	}
	cmd := exec.Command(strace, append(
		args,
		"-f", "-y",
		"-s", "400",
		"-o", tr.output,
		"-p", fmt.Sprint(s.Cmd.Process.Pid),
	)...)
	log := &hubstest.Log{}
	cmd.Stderr = log
	hubstest.Must(t, cmd.Start())
	tr.end = sync.OnceFunc(func() {
		cmd.Process.Signal(syscall.SIGINT)
		cmd.Wait()
	})
	t.Cleanup(tr.end)
	log.WaitFor(t, "attached")
	return tr
}

// attachFault attaches a strace that makes system calls fail. calls is a list of their names,
// separated by commas, and errno is the name of the error. args may restrict the trace further.
func attachFault(t *testing.T, s *service, calls, errno string, args ...string) *trace {
	t.Helper()
	fault := []string{
		"-e", "trace=" + calls,
		"-e", "inject=" + calls + ":error=" + errno,
	}
	return attach(t, s, append(fault, args...)...)
}

// calls ends the trace and returns the system calls in the order in which they began, one on each
// line. An example: 4711 fsync(7</var/files>) = 0
func (tr *trace) calls() string {
	tr.t.Helper()
	tr.end()
	text, err := os.ReadFile(tr.output)
	hubstest.Must(tr.t, err)
	return string(text)
}

// wantInjected ends the trace, and checks that the server has made a call which strace made fail.
func (tr *trace) wantInjected() {
	tr.t.Helper()
	if !strings.Contains(tr.calls(), "(INJECTED)") {
		tr.t.Error("got no system call that strace makes fail, want one")
	}
}

// codeOf holds the code of an error, by its status. A success has none.
var codeOf = map[int]string{500: "internal", 507: "insufficient_storage"}

// If a step of an upload fails, the client gets a 500, or a 507 if the disk has no room. Nothing of
// the upload is left on disk or in the table, and the next upload works.
func TestUploadStepFails(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrorsWithAnyOf(`"code":"internal`, `"code":"insufficient_storage`)
	// call fails with errno. target restricts this to calls on the working file ("file") or on
	// FILES_DIR ("folder").
	stored := 0
	for _, step := range []struct {
		call, target, errno string
		status              int
	}{
		{call: "write", target: "file", errno: "EIO", status: 500},
		{call: "write", target: "file", errno: "ENOSPC", status: 507}, // the disk is full
		{call: "fsync", target: "file", errno: "EIO", status: 500},
		{call: "linkat", errno: "EIO", status: 500},
		{call: "linkat", errno: "EDQUOT", status: 507}, // the folder needs another block
		{call: "linkat", errno: "EPERM", status: 500},  // a file system without hard links
		{call: "fsync", target: "folder", errno: "EIO", status: 500},
	} {
		t.Run(step.call+" "+step.target+" "+step.errno, func(t *testing.T) {
			c := c.In(t)
			failing := c.StartUpload("a.txt")
			var args []string
			switch step.target {
			case "file":
				args = []string{"-P", s.WorkingFiles(t)[0]}
			case "folder":
				args = []string{"-P", s.Env["FILES_DIR"]}
			}
			tr := attachFault(t, s, step.call, step.errno, args...)
			r := failing.Finish()
			tr.wantInjected()

			r.WantProblem(t, step.status, codeOf[step.status])
			s.WantStored(t, stored)
			c.Store("next.txt", "content")
			stored++
			s.WantStored(t, stored)
		})
	}
	s.Log.WaitFor(t, "FILES_DIR", "hard links", "operation not permitted")
}

// If the disk fails in the middle of a download, the client can see that the file is not whole, and
// the log has the reason.
func TestDiskFailsMidDownload(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	path := storeLarge(t, c)
	tr := attachFault(t, s, "sendfile", "EIO", "-P", s.onDisk(path))
	r, err := c.Elsewhere().Try("GET "+path, nil)
	tr.wantInjected()
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %d bytes and the error %v, want %v", len(r.Body), err, io.ErrUnexpectedEOF)
	}
	s.Log.WaitFor(t, "download cut off", "input/output error")
	c.Elsewhere().Get(path).Want(t, 200)
}

// If the server can't create the working file of an upload, the client gets a 500, or a 507 if the
// user's quota is used up. Nothing of the upload is left, and the next upload works.
func TestUploadWithoutWorkingFile(t *testing.T) {
	t.Parallel()
	for errno, status := range map[string]int{
		"EMFILE": 500, // no descriptor is left
		"EDQUOT": 507,
	} {
		t.Run(errno, func(t *testing.T) {
			t.Parallel()
			s, c := start(t)
			s.AllowErrorsWithAnyOf(`"code":"` + codeOf[status])
			c.Store("first.txt", "content") // makes the server open its connections to the database
			tr := attachFault(t, s, "openat", errno)
			r := sendUpload(c, "a.txt")
			tr.wantInjected()
			r.WantProblem(t, status, codeOf[status])
			s.WantStored(t, 1)
			c.Store("next.txt", "content")
			s.WantStored(t, 2)
		})
	}
}

// If the disk fails to remove the working name of an upload, the sweep removes it later. If the
// link to the final name failed before, the upload gets a 500, and no file is stored. Otherwise the
// upload succeeds, and the file stays.
func TestUploadWorkingNameStays(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		calls          string // that fail
		status, stored int
	}{
		{calls: "linkat,unlinkat", status: 500, stored: 0},
		{calls: "unlinkat", status: 201, stored: 1},
	} {
		t.Run(test.calls, func(t *testing.T) {
			t.Parallel()
			s, c := start(t)
			s.AllowErrorsWithAnyOf(`"code":"internal`)
			upload := c.StartUpload("a.txt")
			tr := attachFault(t, s, test.calls, "EIO")
			r := upload.Finish()
			tr.wantInjected()
			r.WantProblem(t, test.status, codeOf[test.status])
			s.waitFiles(test.stored + 1) // the final name, if any, and the working name
			s.AgeUnfinished(t)
			s.waitSwept()
			s.WantStored(t, test.stored) // the working name is gone
		})
	}
}

// An upload is stored in this order: its bytes are synced to disk before they get their final name,
// and that name is synced before the row makes the file visible. The folder to sync is FILES_DIR
// itself, because it contains the final name.
func TestUploadStepsAreInOrder(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	upload := c.StartUpload("a.txt")
	working := s.WorkingFiles(t)[0]
	id := filepath.Base(working)
	tr := attach(t, s, "-e", "trace=write,fsync,fdatasync,linkat,renameat,renameat2,unlinkat")
	upload.Finish().Want(t, 201)

	var steps []byte // one letter for each step
	for call := range strings.Lines(tr.calls()) {
		for step, pattern := range map[string]string{
			"w": `write\(\d+<` + working + `>`,
			"f": `fsync\(\d+<` + working + `>`,
			"l": ` linkat\(.*"` + id + `"`,
			"d": `fsync\(\d+<` + s.Env["FILES_DIR"] + `>`,
			"r": `write\(\d+<socket:[^"]*"P.*insert.*` + id, // the row
			"u": `unlinkat\(.*` + id,
			"a": `write\(\d+<socket:[^"]*"HTTP.*` + id, // the answer
		} {
			if regexp.MustCompile(pattern).MatchString(call) {
				steps = append(steps, step...)
			}
		}
	}

	// The steps are: writes, fsync, link, fsync of the folder, row, unlink, answer.
	if !regexp.MustCompile(`^w+fldrua$`).Match(steps) {
		t.Errorf("got the steps %s, want w+fldrua", steps)
	}
}

// The kernel sends the bytes of a download with sendfile, although the server wraps its connections
// and its answers in types of its own. net/http reads only the first bytes of the file itself.
func TestDownloadIsSentByTheKernel(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	path := storeLarge(t, c)
	tr := attach(t, s, "-e", "trace=sendfile,splice,read,pread64")
	get(c, path).Want(t, 200)
	calls := tr.calls()
	ofFile := `\(.*<` + s.onDisk(path) + `>`
	sent := len(regexp.MustCompile(`sendfile`+ofFile).FindAllString(calls, -1))
	read := len(regexp.MustCompile(ofFile).FindAllString(calls, -1)) - sent
	if sent == 0 || read > 1 {
		t.Errorf("got %d calls of sendfile and %d reads, want at least 1 and at most 1", sent, read)
	}
}

// openFiles returns how many files and folders the server has open in FILES_DIR.
func (s *service) openFiles() (n int) {
	s.t.Helper()
	pattern := fmt.Sprintf("/proc/%d/fd/*", s.Cmd.Process.Pid)
	links, err := filepath.Glob(pattern) // one link for each open descriptor
	hubstest.Must(s.t, err)
	for _, link := range links {
		name, _ := os.Readlink(link) // an error means that it was closed meanwhile
		if strings.HasPrefix(name, s.Env["FILES_DIR"]) {
			n++
		}
	}
	return n
}

// Every upload and every download closes its file, however the transfer ends. The test turns
// garbage collection off, because it would also close a file that the server forgot to close.
func TestFilesAreClosed(t *testing.T) {
	t.Parallel()
	s, c := start(t, map[string]string{
		"GOGC":             "off",
		"MAX_UPLOAD_BYTES": "300000",
	})
	path := c.Store("a.txt", "content")
	idle := s.openFiles() // such as FILES_DIR itself
	waitClosed := func(after string) {
		t.Helper()
		hubstest.WaitFor(t, "open files after "+after, idle, s.openFiles)
	}

	c.Store("b.txt", "content")
	waitClosed("an upload")
	c.Elsewhere().Upload("c.txt", make([]byte, 300_001)).Want(t, 413)
	waitClosed("an upload that is too large")
	upload := c.StartUpload("d.txt")
	if got := s.openFiles(); got != idle+1 {
		t.Errorf("open files during an upload: got %d, want %d", got, idle+1)
	}
	breakOff(upload).Want(t, noAnswer)
	waitClosed("an upload that broke off")

	for status, headers := range map[int][]string{ // headers of a download, by its status
		200: nil,
		206: {"Range", "bytes=1-2"},
		416: {"Range", "bytes=10-"},
		304: {"If-None-Match", "*"},
		412: {"If-Match", `"another"`},
	} {
		c.Elsewhere().Get(path, headers...).Want(t, status)
		c.Elsewhere().Do("HEAD "+path, nil, headers...).Want(t, status)
		waitClosed(fmt.Sprintf("a download %q", headers))
	}
}
