//go:build moving

package main

// Socket activation: the server takes a listening socket that another process holds, so that
// its restarts refuse no connection.

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// A heldSocket is a listening socket that the test holds, as systemd would. The test
// accepts nothing on it.
type heldSocket struct {
	addr string
	file *os.File
	env  map[string]string // of all its servers
}

func holdSocket(t *testing.T, env map[string]string) *heldSocket {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return &heldSocket{addr: listener.Addr().String(), file: file, env: env}
}

// start starts a server on the socket: descriptor 3, named by LISTEN_FDS and LISTEN_PID.
func (h *heldSocket) start(t *testing.T) *testProcess {
	t.Helper()
	path, err := testBinary()
	if err != nil {
		t.Fatal(err)
	}
	// exec keeps the number of the shell's process.
	cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ exec "$0" serve`, path)
	cmd.ExtraFiles = []*os.File{h.file}
	p := startCommand(t, cmd, h.env, map[string]string{"LISTEN_FDS": "1"})
	if p.addr != h.addr {
		t.Fatalf("the server listens on %s, want the socket's %s", p.addr, h.addr)
	}
	return p
}

// A socketLoad is clients who send requests to the socket until stop: half of them over a
// new connection each time, half over one that they keep. Each request must succeed.
type socketLoad struct {
	stop    atomic.Bool
	running sync.WaitGroup
	done    atomic.Int64
}

func startSocketLoad(t *testing.T, s *testServer) *socketLoad {
	l := &socketLoad{}
	for i := range 6 {
		c, _ := s.member(t, roleMember)
		keepAlive := i%2 == 0
		c.http.Transport.(proxied).DisableKeepAlives = !keepAlive
		l.running.Go(func() {
			for n := 0; !l.stop.Load() && !t.Failed(); n++ {
				c.ip = fmt.Sprintf("2001:db8:ffff:%x::1", serial.Add(1)&0xffff) // no limit by address
				var r *testResponse
				if n%4 == 0 {
					r = c.upload("load.txt", []byte("load"))
				} else {
					r = c.do("GET", "/auth/session", nil)
				}
				if r.status != 200 && r.status != 201 {
					t.Errorf("request %d, keep-alive %v: %v", n, keepAlive, r)
				}
				l.done.Add(1)
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

// waitMore waits for n further answers.
func (l *socketLoad) waitMore(t *testing.T, n int64) {
	t.Helper()
	goal := l.done.Load() + n
	waitUntil(t, fmt.Sprintf("%d answers more", n), func() bool { return t.Failed() || l.done.Load() >= goal })
}

func (l *socketLoad) end() {
	l.stop.Store(true)
	l.running.Wait()
}

// Servers come and go on one listening socket under load: no connection is refused or
// reset, and each server finishes its requests.
func TestGenerationsOnOneSocket(t *testing.T) {
	t.Parallel()
	held := holdSocket(t, serverEnv(t, stagingEnv(newMailServer(t, mailOptions{}))))
	current := held.start(t)
	load := startSocketLoad(t, current.testServer)
	load.waitMore(t, 20)

	// The next server starts beside the old one, which then stops.
	for range 3 {
		slow := startSlowUpload(t, current.testServer)
		idle := idleConnection(t, held.addr)
		next := held.start(t)
		mark := next.log.mark()
		load.waitMore(t, 20)
		current.signal(t, syscall.SIGTERM)
		load.waitMore(t, 40) // the old server does not accept any more
		next.log.waitAfter(t, mark, `"msg":"request"`)
		// The upload outlasts the moment in which the old server ends what is idle.
		idle.conn.SetDeadline(time.Now().Add(patience))
		if _, err := idle.in.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("idle connection at the stop: got %v, want its end", err)
		}
		slow.finish(t)
		if code := current.wait(t); code != 0 {
			t.Errorf("old server: exit %d, want 0\n%s", code, current.log)
		}
		current = next
		load.waitMore(t, 20)
	}

	// The next server starts when the old one has ended, as by systemctl restart.
	for range 2 {
		current.signal(t, syscall.SIGTERM)
		if code := current.wait(t); code != 0 {
			t.Errorf("old server: exit %d, want 0\n%s", code, current.log)
		}
		early, err := net.Dial("tcp", held.addr) // nobody serves now
		if err != nil {
			t.Fatal("refused while no server runs: ", err)
		}
		defer early.Close()
		current = held.start(t)
		load.waitMore(t, 20)
	}
	load.end()
	t.Logf("%d requests, none failed", load.done.Load())
}

// idleConnection is one on which the server that runs has answered a request.
func idleConnection(t *testing.T, addr string) *rawClient {
	t.Helper()
	client, err := dialRaw(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.conn.Close() })
	client.conn.SetDeadline(time.Now().Add(patience))
	client.send("GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
	if status, _, err := client.receive(); status != 200 || err != nil {
		t.Fatalf("got %d, %v, want 200", status, err)
	}
	return client
}

// A slowUpload is a request that is under way until finish.
type slowUpload struct {
	body   *io.PipeWriter
	form   *multipart.Writer
	part   io.Writer
	answer chan *testResponse
}

func startSlowUpload(t *testing.T, s *testServer) *slowUpload {
	t.Helper()
	c, _ := s.member(t, roleMember)
	before := unfinishedUploads(t, s)
	reader, writer := io.Pipe()
	u := &slowUpload{body: writer, form: multipart.NewWriter(writer), answer: make(chan *testResponse, 1)}
	go func() {
		u.answer <- c.do("POST", "/files/upload", reader, "Content-Type", u.form.FormDataContentType())
	}()
	var err error
	u.part, err = u.form.CreateFormFile("file", "slow.bin")
	if err == nil {
		_, err = u.part.Write(bytes.Repeat([]byte("slow"), 32<<10))
	}
	if err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the upload has begun", func() bool {
		for name := range unfinishedUploads(t, s) {
			info, err := os.Stat(name)
			if !before[name] && err == nil && info.Size() > 64<<10 {
				return true
			}
		}
		return false
	})
	return u
}

func unfinishedUploads(t *testing.T, s *testServer) map[string]bool {
	t.Helper()
	names, err := filepath.Glob(s.env["FILES_DIR"] + "/" + unfinished + "/*")
	if err != nil {
		t.Fatal(err)
	}
	set := map[string]bool{}
	for _, name := range names {
		set[name] = true
	}
	return set
}

func (u *slowUpload) finish(t *testing.T) {
	t.Helper()
	io.WriteString(u.part, "the end")
	u.form.Close()
	u.body.Close()
	(<-u.answer).want(t, 201)
}

// Descriptors that are meant for another process are not taken: LISTEN_PID names a process
// that started this one and left its environment.
func TestSocketOfAnotherProcess(t *testing.T) {
	t.Parallel()
	p := startProcess(t, map[string]string{"LISTEN_PID": "1", "LISTEN_FDS": "1"})
	answer, err := http.Get("http://" + p.addr + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != 200 || !strings.HasPrefix(p.addr, "127.0.0.1:") {
		t.Errorf("%s: %s, want 200 on ADDR", p.addr, answer.Status)
	}
}

// A socket that is none of TCP, such as one with a path, is the operator's mistake and said at
// the start, not found out at the first connection.
func TestSocketMustBeTCP(t *testing.T) {
	t.Parallel()
	path, err := testBinary()
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", t.TempDir()+"/socket")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	file, err := listener.(*net.UnixListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	out, errOut, ended := &logBuffer{}, &logBuffer{}, make(chan struct{})
	cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ exec "$0" serve`, path)
	cmd.ExtraFiles = []*os.File{file}
	cmd.Stdout, cmd.Stderr = out, errOut
	cmd.Env = append(os.Environ(), "LISTEN_FDS=1")
	for name, value := range serverEnv(t) {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		cmd.Wait()
		close(ended)
	}()
	if _, _, err := out.wait(0, ended, containsAll([]string{`"msg":"listening"`})); err == nil {
		t.Error("it serves")
		cmd.Process.Kill()
	}
	<-ended
	if code := cmd.ProcessState.ExitCode(); code != 2 || !strings.HasPrefix(errOut.String(), "LISTEN_FDS: the socket must be a TCP socket") {
		t.Errorf("got exit %d, %q, want 2 and a word of the socket", code, errOut)
	}
}

// A number of sockets other than one is a mistake in the unit: the server says so, instead of
// listening on ADDR while clients wait at the sockets.
func TestSocketsOfAnotherNumber(t *testing.T) {
	t.Parallel()
	for _, number := range []string{"", "0", "2"} {
		t.Run("LISTEN_FDS="+number, func(t *testing.T) {
			env := serverEnv(t, map[string]string{"LISTEN_PID": strconv.Itoa(os.Getpid()), "LISTEN_FDS": number})
			code, _, errOut := runCLI(env, "serve")
			if code != 2 || !strings.Contains(errOut, "LISTEN_FDS: ") {
				t.Errorf("got exit status %d and %q, want 2 and a sentence about LISTEN_FDS", code, errOut)
			}
		})
	}
}
