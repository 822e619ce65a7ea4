package faults

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// onSocket returns a command that starts a server on a socket: descriptor 3, named by LISTEN_PID
// and by LISTEN_FDS, the number of sockets, as by systemd.
func onSocket(socket *os.File) *exec.Cmd {
	// exec keeps the number of the shell's process.
	script := `LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" serve`
	cmd := exec.Command("sh", "-c", script, hubstest.Binary())
	cmd.ExtraFiles = []*os.File{socket}
	return cmd
}

// A listener gives away its socket.
type listener interface {
	net.Listener
	File() (*os.File, error)
}

// holdSocket returns the listening socket as systemd would hold it: nothing here accepts on it.
func holdSocket(t *testing.T, network, addr string) (socket *os.File, bound string) {
	t.Helper()
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	socket, err = l.(listener).File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { socket.Close() })
	return socket, l.Addr().String()
}

// startLoadOn sends requests to an address until end: half of the clients over a new connection
// each time, half over one that they keep. Each request must succeed.
func startLoadOn(t *testing.T, s *hubstest.Server) (more func(n int64), end func()) {
	var stopped atomic.Bool
	var answered atomic.Int64
	var clients sync.WaitGroup
	for i := range 6 {
		c, _ := s.Member(t, "member")
		clients.Go(func() {
			for n := 0; !stopped.Load() && !t.Failed(); n++ {
				if i%2 == 0 {
					c.HTTP.CloseIdleConnections()
				}
				r := get(c, "/auth/session")
				if n%4 == 0 {
					r = c.Elsewhere().Upload("load.txt", []byte("load"))
				}
				if r.Status/100 != 2 {
					t.Errorf("request %d: got %v, want a success", n, r)
				}
				answered.Add(1)
			}
		})
	}
	more = func(n int64) {
		goal := answered.Load() + n
		hubstest.WaitUntil(t, fmt.Sprintf("%d answers more", n), func() bool {
			return t.Failed() || answered.Load() >= goal
		})
	}
	end = func() {
		stopped.Store(true)
		clients.Wait()
	}
	t.Cleanup(end)
	return more, end
}

// Servers come and go on one listening socket under load: no connection is refused or reset, and
// each server finishes its requests.
func TestGenerationsOnOneSocket(t *testing.T) {
	t.Parallel()
	socket, addr := holdSocket(t, "tcp", "127.0.0.1:0")
	env := hubstest.ServerEnv(t)
	current := hubstest.StartCommand(t, onSocket(socket), env)
	if current.Addr != addr {
		t.Fatalf("the server listens on %s, want the socket's %s", current.Addr, addr)
	}
	more, end := startLoadOn(t, current)
	more(20)
	member, _ := current.Member(t, "member")

	// The next server starts beside the old one, which then stops.
	for range 2 {
		upload := member.StartUpload("slow.txt")
		next := hubstest.StartCommand(t, onSocket(socket), env)
		more(20)
		current.Signal(t, syscall.SIGTERM)
		more(40) // the old server accepts nothing any more
		upload.Finish().Want(t, 201)
		if code := current.Wait(t); code != 0 {
			t.Errorf("the old server: got exit status %d, want 0", code)
		}
		current = next
		more(20)
	}

	// The next server starts when the old one has ended, as by systemctl restart.
	if code := current.Stop(t); code != 0 {
		t.Errorf("the old server: got exit status %d, want 0", code)
	}
	early := hubstest.Dial(t, addr) // nobody serves now
	current = hubstest.StartCommand(t, onSocket(socket), env)
	early.Exchange(t, current.Client(t).Head("GET /healthz")+"\r\n", 200)
	more(20)
	end()
}

// Descriptors that are meant for another process are not taken: LISTEN_PID names one that
// started this one and left its environment.
func TestSocketOfAnotherProcess(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, map[string]string{"LISTEN_PID": "1", "LISTEN_FDS": "1"})
	get(s.Client(t), "/healthz").Want(t, 200)
}

// A socket that can't be used is the operator's mistake. The server says so at the start, instead
// of listening on ADDR while clients wait at the socket.
func TestSocketThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	unix, _ := holdSocket(t, "unix", t.TempDir()+"/socket")
	cmd := onSocket(unix)
	for name, value := range hubstest.ServerEnv(t) {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	out, err := cmd.CombinedOutput()
	code := cmd.ProcessState.ExitCode()
	if code != 2 || !strings.Contains(string(out), "LISTEN_FDS: ") {
		t.Errorf("got %v, %q, want exit status 2 and a sentence", err, out)
	}
}
