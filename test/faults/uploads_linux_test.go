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
	s.AllowErrorsWithAnyOf(`"code":"internal"`, `"code":"insufficient_storage"`)
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
	s.Log.WaitFor(t, "hard link", "operation not permitted")
}

// If the disk fails in the middle of a download, the client can see that the file is not whole, and
// the log has the reason. The call that fails is sendfile: the kernel sends the bytes, although the
// server wraps its connections and its answers in types of its own.
func TestDiskFailsMidDownload(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrorsWithAnyOf("download cut off")
	large := make([]byte, 16<<20) // more than the buffers of a connection hold
	path := location(t, c.Upload("large.bin", large))
	onDisk := filepath.Join(s.Env["FILES_DIR"], s.FilesIn(t)[0])
	tr := attachFault(t, s, "sendfile", "EIO", "-P", onDisk)
	r, err := c.Elsewhere().Try("GET "+path, nil)
	tr.wantInjected()
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %d bytes and the error %v, want %v", len(r.Body), err, io.ErrUnexpectedEOF)
	}
	s.Log.WaitFor(t, `"level":"ERROR","msg":"download cut off"`, "input/output error")
	c.Elsewhere().Get(path).Want(t, 200)
}

// If the server can't create the working file of an upload, because the quota of its user is used
// up, the client gets a 507. Nothing of the upload is left, and the next upload works.
func TestUploadWithoutWorkingFile(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrorsWithAnyOf(`"code":"insufficient_storage"`)
	tr := attachFault(t, s, "openat", "EDQUOT")
	r := sendUpload(c, "a.txt")
	tr.wantInjected()
	r.WantProblem(t, 507, "insufficient_storage")
	s.WantStored(t, 0)
	c.Store("next.txt", "content")
	s.WantStored(t, 1)
}

// If the disk fails to remove the working name of an upload, the upload succeeds all the same. The
// sweep removes the name later, and the file stays.
func TestUploadWorkingNameStays(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	upload := c.StartUpload("a.txt")
	tr := attachFault(t, s, "unlinkat", "EIO")
	r := upload.Finish()
	tr.wantInjected()
	r.Want(t, 201)
	s.waitFiles(2) // the final and the working name
	s.ageUnfinished()
	s.waitSwept()
	s.WantStored(t, 1)
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
	s, c := start(t, map[string]string{"GOGC": "off"})
	path := c.Store("a.txt", "content")
	idle := s.openFiles() // such as FILES_DIR itself
	waitClosed := func(after string) {
		t.Helper()
		hubstest.WaitFor(t, "open files after "+after, idle, s.openFiles)
	}

	c.Store("b.txt", "content")
	waitClosed("an upload")
	upload := c.StartUpload("c.txt")
	if got := s.openFiles(); got != idle+1 {
		t.Errorf("open files during an upload: got %d, want %d", got, idle+1)
	}
	breakOff(t, upload)
	waitClosed("an upload that broke off")

	c.WantFile(path, "content")
	waitClosed("a download")
}
