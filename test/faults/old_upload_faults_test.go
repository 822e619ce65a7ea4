//go:build moving

package main

// F4: each step of an upload fails once. strace makes the system calls of a real server fail
// from outside, while one upload runs; then it lets go of the process.

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// A trace is a strace that is attached to a server.
type trace struct {
	t      testing.TB
	cmd    *exec.Cmd
	output string // the file that it writes
	stderr *logBuffer
	done   chan struct{} // closed when it has ended
	end    func()
}

// attachTrace attaches strace to a server. It returns when every system call is under its
// control. It must run as root, as the tests do in CI.
func (p *testProcess) attachTrace(t testing.TB, args ...string) *trace {
	t.Helper()
	tr := &trace{
		t: t, output: filepath.Join(t.TempDir(), "trace"),
		stderr: &logBuffer{}, done: make(chan struct{}),
	}
	args = append(args, "-f", "-y", "-s", "300", "-o", tr.output, "-p", fmt.Sprint(p.cmd.Process.Pid))
	tr.cmd = exec.Command("strace", args...)
	tr.cmd.Stderr = tr.stderr
	if err := tr.cmd.Start(); err != nil {
		t.Fatal("strace: ", err)
	}
	tr.end = sync.OnceFunc(func() {
		tr.cmd.Process.Signal(syscall.SIGINT) // it detaches, and ends
		<-tr.done
	})
	t.Cleanup(tr.end)
	go func() {
		defer close(tr.done)
		tr.cmd.Wait()
	}()
	if _, _, err := tr.stderr.wait(0, tr.done, containsAll([]string{"attached"})); err != nil {
		t.Fatalf("strace: %v that says attached", err)
	}
	return tr
}

// calls ends the trace and returns the system calls in the order in which they began. Each
// is a line such as: fsync(7</var/files>) = 0
func (tr *trace) calls() (calls []string) {
	tr.t.Helper()
	tr.end()
	file, err := os.Open(tr.output)
	if err != nil {
		tr.t.Fatal(err)
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		thread, call, _ := strings.Cut(lines.Text(), " ")
		call = strings.TrimLeft(call, " ")
		isResumed := strings.HasPrefix(call, "<... ")
		isCall := strings.Contains(call, "(")
		if thread != "" && isCall && !isResumed {
			calls = append(calls, call)
		}
	}
	return calls
}

// injected reports whether strace has made a call fail.
func (tr *trace) injected() bool {
	tr.t.Helper()
	tr.end()
	text, err := os.ReadFile(tr.output)
	if err != nil {
		tr.t.Fatal(err)
	}
	return strings.Contains(string(text), "(INJECTED)")
}

// F4: a step that fails as "not done" is a 500, or a 507 if there is no room. Nothing of the
// upload can be seen, nothing is left on disk, and the next upload works.
func TestUploadStepFails(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	p.allowErrors(`"error":"internal`, `"error":"insufficient_storage`)
	c, _ := p.member(t, "member")
	first := c.upload("first.txt", []byte("content")).stored(t)
	dir := p.env["FILES_DIR"]
	stored := 1
	for _, step := range []struct {
		name string
		call string
		path func(working string) string // only calls on this path fail; nil: all calls
	}{
		{"fsync of the file", "fsync", func(working string) string { return working }},
		{"write", "write", func(working string) string { return working }},
		{"link", "linkat", nil},
		{"fsync of the folder", "fsync", func(string) string { return dir }},
	} {
		for _, errno := range []string{"EIO", "ENOSPC", "EDQUOT"} {
			t.Run(step.name+" "+errno, func(t *testing.T) {
				upload := c.startUpload(step.name + errno)
				args := []string{"-e", "trace=" + step.call, "-e", "inject=" + step.call + ":error=" + errno}
				if step.path != nil {
					args = append(args, "-P", step.path(p.workingFiles(t)[0]))
				}
				tr := p.attachTrace(t, args...)
				r := upload.finish()
				if !tr.injected() {
					t.Fatalf("no %s has failed: this test shows nothing", step.call)
				}
				p.wantFailedUpload(t, r, errno)
				if rows := queryValue[int](t, p.env["DATABASE_URL"], "select count(*) from files where name = $1", step.name+errno); rows != 0 {
					t.Errorf("rows of the failed upload: got %d, want 0", rows)
				}
				p.wantStored(t, stored)
				c.wantFile(t, c.elsewhere().upload("next.txt", []byte("content")).stored(t), "content")
				stored++
				p.wantStored(t, stored)
			})
		}
	}
	c.wantFile(t, first, "content")
}

// The working name can't be made: the same, before the server has read anything of the file.
func TestUploadWorkingNameFails(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	p.allowErrors(`"error":"internal`, `"error":"insufficient_storage`)
	c, _ := p.member(t, "member")
	c.upload("first.txt", []byte("content")).stored(t) // so the server has its database connections
	stored := 1
	for _, errno := range []string{"EIO", "ENOSPC", "EDQUOT", "EMFILE"} {
		t.Run(errno, func(t *testing.T) {
			tr := p.attachTrace(t, "-e", "trace=openat", "-e", "inject=openat:error="+errno)
			r := c.elsewhere().upload("a.txt", []byte("content"))
			if !tr.injected() {
				t.Fatal("no openat has failed: this test shows nothing")
			}
			p.wantFailedUpload(t, r, errno)
			p.wantStored(t, stored)
			c.elsewhere().upload("next.txt", []byte("content")).stored(t)
			stored++
			p.wantStored(t, stored)
		})
	}
}

func (p *testProcess) wantFailedUpload(t testing.TB, r *testResponse, errno string) {
	t.Helper()
	if errno == "ENOSPC" || errno == "EDQUOT" {
		wantProblem(t, r, 507, "insufficient_storage")
		return
	}
	wantProblem(t, r, 500, "internal")
}

// A rollback that fails leaves the working name to the sweep: an upload that was refused
// because of its disk may find that the disk refuses the removal as well.
func TestUploadRollbackFails(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	p.allowErrors(`"error":"internal`)
	c, _ := p.member(t, "member")
	kept := c.upload("kept.txt", []byte("content")).stored(t)
	upload := c.startUpload("lost.txt")
	tr := p.attachTrace(t, "-e", "trace=linkat,unlinkat", "-e", "inject=linkat,unlinkat:error=EIO")
	wantProblem(t, upload.finish(), 500, "internal")
	if !tr.injected() {
		t.Fatal("nothing has failed: this test shows nothing")
	}
	p.log.waitFor(t, `"level":"WARN"`, "a failed upload is left to the sweep")
	if working := p.workingFiles(t); len(working) != 1 {
		t.Fatalf("got the working files %q, want one", working)
	}
	p.stop(t)
	p.ageUnfinished(t)
	again := startProcess(t, p.env)
	again.wantLeft(t, []string{kept.FileID})
	again.wantStored(t, 1)
}

// A working name that stays although the upload succeeded costs nothing: the upload is there
// for good, and the sweep takes the name.
func TestUploadWorkingNameStays(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	c, _ := p.member(t, "member")
	upload := c.startUpload("a.txt")
	tr := p.attachTrace(t, "-e", "trace=unlinkat", "-e", "inject=unlinkat:error=EIO")
	f := upload.finish().stored(t)
	if !tr.injected() {
		t.Fatal("no unlinkat has failed: this test shows nothing")
	}
	p.wantLeft(t, []string{f.FileID, unfinished + "/" + f.FileID})
	c.wantFile(t, f, uploadingContent)
	p.stop(t)
	p.ageUnfinished(t)
	again := startProcess(t, p.env)
	again.wantStored(t, 1)
	client := again.client(t)
	client.setToken(c.token())
	client.wantFile(t, f, uploadingContent)
}

// F4: the bytes are on disk before they get their name for good, and this name is on disk
// before the row makes the file visible. The folder that is synced is FILES_DIR itself.
func TestUploadStepsAreInOrder(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	c, _ := p.member(t, "member")
	upload := c.startUpload("a.txt")
	working := p.workingFiles(t)[0]
	id := filepath.Base(working)
	tr := p.attachTrace(t, "-e", "trace=write,sendto,sendmsg,fsync,fdatasync,linkat,renameat,renameat2,unlinkat")
	f := upload.finish().stored(t)
	if f.FileID != id {
		t.Fatalf("got the id %q, want %q", f.FileID, id)
	}
	calls := tr.calls()
	dir := p.env["FILES_DIR"]
	steps := []struct {
		name  string
		match func(call string) bool
	}{
		{"last write of the file", containsAll([]string{"write(", "<" + working + ">"})},
		{"fsync of the file", containsAll([]string{"fsync(", "<" + working + ">"})},
		{"link", containsAll([]string{"linkat(", `"` + id + `"`})},
		{"fsync of FILES_DIR", containsAll([]string{"fsync(", "<" + dir + ">"})},
		// lib/pq sends the parameters as text, the id among them.
		{"row", containsAll([]string{"write(", "<socket:", id})},
		{"removal of the working name", containsAll([]string{"unlinkat(", id})},
	}
	at := -1
	for _, step := range steps {
		next := -1
		for i, call := range calls {
			if step.match(call) {
				next = i
				if step.name != "last write of the file" {
					break
				}
			}
		}
		if next <= at {
			t.Errorf("%s: got call %d, want one after call %d", step.name, next, at)
		}
		at = max(at, next)
	}
	if t.Failed() {
		t.Logf("the calls:\n%s", strings.Join(calls, "\n"))
	}
	synced := slices.DeleteFunc(slices.Clone(calls), func(call string) bool { return !strings.Contains(call, "sync(") })
	if len(synced) != 2 {
		t.Errorf("got %q, want two calls of fsync", synced)
	}
}

// A download goes from the file to the socket in the kernel, with the listener and the
// wrappers that the real server puts around its connections.
func TestDownloadIsSentByTheKernel(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	c, _ := p.member(t, "member")
	content := strings.Repeat("0123456789abcdef", 1<<16)
	f := c.upload("a.txt", []byte(content)).stored(t)
	tr := p.attachTrace(t, "-e", "trace=sendfile,splice,read,pread64")
	r := c.do("GET", f.Path, nil).want(t, 200)
	if string(r.body) != content {
		t.Errorf("got %d bytes, want the %d of the file", len(r.body), len(content))
	}
	path := filepath.Join(p.env["FILES_DIR"], f.FileID)
	sent, read := 0, 0
	for _, call := range tr.calls() {
		if !strings.Contains(call, "<"+path+">") {
			continue
		}
		if strings.HasPrefix(call, "sendfile(") {
			sent++
		} else {
			read++
		}
	}
	if sent == 0 || read > 1 {
		t.Errorf("got %d calls of sendfile and %d reads of the file, want sendfile, and one read at most", sent, read)
	}
}
