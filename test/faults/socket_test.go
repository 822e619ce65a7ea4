package faults

import (
	"net"
	"os"
	"os/exec"
	"strings"
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

// startConnecting starts six clients. Three of them connect anew for each request. A 503 would
// stand in the log as an error, which this test does not allow.
func startConnecting(t *testing.T, s *hubstest.Server) *load {
	t.Helper()
	var clients []func() *hubstest.Response
	for i := range 6 {
		c, _ := s.Member(t, "member")
		requests := 0
		clients = append(clients, func() *hubstest.Response {
			requests++
			if i%2 == 0 {
				c.HTTP.CloseIdleConnections()
			}
			if requests%4 == 0 {
				return c.Elsewhere().Upload("load.txt", []byte("load"))
			}
			return get(c, "/auth/session")
		})
	}
	return startLoad(t, clients...)
}

// Servers come and go on one listening socket under load: no connection is refused or reset, and
// each server finishes its requests.
func TestGenerationsOnOneSocket(t *testing.T) {
	t.Parallel()
	socket, addr := holdSocket(t, "tcp", "127.0.0.1:0")
	env := hubstest.ServerEnv(t)
	startNext := func() *hubstest.Server {
		return hubstest.StartCommand(t, onSocket(socket), env)
	}
	current := startNext()
	if current.Addr != addr {
		t.Fatalf("the server listens on %s, want the socket's %s", current.Addr, addr)
	}
	load := startConnecting(t, current)
	load.waitFor(4, true)
	member, _ := current.Member(t, "member")

	// The next server starts beside the old one, which then stops.
	for range 2 {
		upload := member.StartUpload("slow.txt")
		next := startNext()
		load.waitFor(4, true)
		current.Signal(t, syscall.SIGTERM)
		load.waitFor(8, true) // the old server accepts nothing any more
		upload.Finish().Want(t, 201)
		wantExit(t, current, 0)
		current = next
		load.waitFor(4, true)
	}

	// The next server starts when the old one has ended, as by systemctl restart.
	current.Stop(t)
	wantExit(t, current, 0)
	early := hubstest.Dial(t, addr) // nobody serves now
	current = startNext()
	early.Exchange(t, current.Client(t).Head("GET /healthz")+"\r\n", 200)
	load.waitFor(4, true)
	load.end()
}

// Descriptors that are meant for another process are not taken: LISTEN_PID names one that
// started this one and left its environment.
func TestSocketOfAnotherProcess(t *testing.T) {
	t.Parallel()
	socket, addr := holdSocket(t, "tcp", "127.0.0.1:0")
	cmd := exec.Command(hubstest.Binary(), "serve")
	cmd.ExtraFiles = []*os.File{socket}
	s := hubstest.StartCommand(t, cmd, map[string]string{
		"LISTEN_PID": "1",
		"LISTEN_FDS": "1",
	})
	if s.Addr == addr {
		t.Errorf("got a server on %s, which is the socket of another process", addr)
	}
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
