package faults

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// onSocket returns a command that starts a server on a socket, in the same way as systemd: the
// socket is descriptor 3, LISTEN_FDS is the number of sockets, and LISTEN_PID is the process id of
// the server.
func onSocket(socket *os.File) *exec.Cmd {
	// exec keeps the process id of the shell.
	script := `LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" serve`
	cmd := exec.Command("sh", "-c", script, hubstest.Binary())
	cmd.ExtraFiles = []*os.File{socket}
	return cmd
}

// startConnecting starts six clients, of which three open a new connection for each request. They do
// not use http.Client, which silently sends a GET again if its connection was closed.
func startConnecting(t *testing.T, s *hubstest.Server) *clients {
	t.Helper()
	var functions []func() *hubstest.Response
	for i := range 6 {
		c, _ := s.Member(t, "member")
		conn := hubstest.Dial(t, s.Addr)
		functions = append(functions, func() *hubstest.Response {
			conn.SetDeadline(time.Now().Add(hubstest.Patience))
			r := conn.Send(t, c.Elsewhere().Head("GET /auth/session"))
			if r.Closes || i%2 == 0 {
				conn.Close()
				conn = hubstest.Dial(t, s.Addr)
			}
			return r
		})
	}
	return startClients(t, functions...)
}

// H3: When one server replaces another on the same listening socket under load, no connection is
// refused or reset, no request gets a 503, and each server answers all its requests before it ends.
func TestReplacedServersShareASocket(t *testing.T) {
	t.Parallel()
	socket, addr := hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	env := hubstest.ServerEnv(t)
	startNext := func() *hubstest.Server {
		return hubstest.StartCommand(t, onSocket(socket), env)
	}
	current := startNext()
	if current.Addr != addr {
		t.Fatalf("address of the server: got %s, want the socket's address %s", current.Addr, addr)
	}
	clients := startConnecting(t, current)
	clients.waitForSuccesses(4)
	member, _ := current.Member(t, "member")

	// The next server starts while the old one still runs. Then the old one stops.
	for range 2 {
		upload := member.StartUpload("slow.txt")
		next := startNext()
		clients.waitForSuccesses(4)
		current.Signal(t, syscall.SIGTERM)
		clients.waitForSuccesses(8) // the old server accepts no connections now
		upload.Finish().Want(t, 201)
		wantExit(t, current, 0)
		current = next
		clients.waitForSuccesses(4)
	}

	// The next server starts after the old one has ended, as with systemctl restart. Connections
	// wait in the socket's queue meanwhile.
	current.Stop(t)
	waiting := hubstest.Dial(t, addr) // no server runs now
	current = startNext()
	waiting.Send(t, current.Client(t).Head("GET /healthz")).Want(t, 200)
	clients.waitForSuccesses(4)
	clients.end()
	hubstest.WantEqual(t, "503s of each client", clients.outages, make([]int, len(clients.outages)))
}

// The server does not use a socket that is meant for another process, which LISTEN_PID names. This
// happens if that process started the server, and the server has inherited its environment.
func TestSocketOfAnotherProcess(t *testing.T) {
	t.Parallel()
	socket, addr := hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	cmd := exec.Command(hubstest.Binary(), "serve")
	cmd.ExtraFiles = []*os.File{socket}
	s := hubstest.StartCommand(t, cmd, map[string]string{
		"LISTEN_PID": "1",
		"LISTEN_FDS": "1",
	})
	if s.Addr == addr {
		t.Errorf("got a server on %s, the socket of another process, want another address", addr)
	}
}

// If the server can't use the socket that it gets, it does not start, and it says why. It must not
// listen on ADDR instead, because clients would wait at the socket.
func TestSocketThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	unix, _ := hubstest.ListeningSocket(t, "unix", t.TempDir()+"/socket")
	cmd := onSocket(unix)
	wantRefusedSocket(t, cmd)
}

// Nor does it start if it gets two sockets: clients would wait at the second.
func TestTwoSockets(t *testing.T) {
	t.Parallel()
	first, _ := hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	second, _ := hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	cmd := exec.Command("sh", "-c", `LISTEN_FDS=2 LISTEN_PID=$$ exec "$0" serve`, hubstest.Binary())
	cmd.ExtraFiles = []*os.File{first, second}
	wantRefusedSocket(t, cmd)
}

func wantRefusedSocket(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	_, err := hubstest.TryStart(t, cmd)
	if err == nil || !strings.Contains(err.Error(), "LISTEN_FDS: ") {
		t.Fatalf("got the error %v, want one that names LISTEN_FDS", err)
	}
	if code := cmd.ProcessState.ExitCode(); code != 2 {
		t.Errorf("got exit status %d, want 2", code)
	}
}
