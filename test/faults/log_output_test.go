package faults

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// fifoScript starts a reader of a FIFO, which passes the log on to the test, and a server that writes
// its log into the FIFO, as in "hubs serve | reader".
const fifoScript = `cat "$1" & echo "{\"msg\":\"reader\",\"pid\":$!}"; exec "$0" serve >"$1"`

// startWithReader starts a server on staging, whose log has a line for each request. It returns the
// path of its FIFO and the process id of the reader.
func startWithReader(t *testing.T) (s *hubstest.Server, fifo string, reader int) {
	t.Helper()
	fifo = t.TempDir() + "/log"
	hubstest.Must(t, syscall.Mkfifo(fifo, 0o600))
	cmd := exec.Command("sh", "-c", fifoScript, hubstest.Binary(), fifo)
	s = hubstest.StartCommand(t, cmd, hubstest.StagingEnv(hubstest.NewMailServer(t, hubstest.MailOptions{})))
	var line struct{ PID int }
	hubstest.Must(t, json.Unmarshal([]byte(s.Log.WaitFor(t, `"msg":"reader"`)), &line))
	return s, fifo, line.PID
}

// H3: A server whose log loses its reader goes on: requests get their answers, and an upload is
// finished. /healthz is a 503 until somebody reads the log again.
func TestServerOutlivesTheReaderOfItsLog(t *testing.T) {
	t.Parallel()
	s, fifo, reader := startWithReader(t)
	c, _ := s.Member(t, "admin")
	upload := c.StartUpload("a.txt")
	hubstest.Must(t, syscall.Kill(reader, syscall.SIGKILL))

	hubstest.WaitFor(t, "status of /healthz without a reader", 503, func() int {
		createHub(c, "North").Must(t, 201)
		return get(c, "/healthz").Status
	})
	upload.Finish().Want(t, 201)
	for range 20 {
		get(c, "/auth/session").Want(t, 200)
	}

	next := &hubstest.Log{}
	cmd := exec.Command("cat", fifo)
	cmd.Stdout = next
	hubstest.Must(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill() // or it would wait for the server, which ends later
		cmd.Wait()
	})
	hubstest.WaitFor(t, "status of /healthz with a reader", 200, func() int { return get(c, "/healthz").Status })
	get(c, "/auth/session").Want(t, 200)
	next.WaitFor(t, "/auth/session", `"status":200`)
	hubstest.WantEqual(t, "exit status", s.Stop(t), 0)
}

// E1: While the reader of the log reads nothing, and so a write to it hangs, /healthz does not say
// that all is well. Each request is answered as soon as the log is read again.
func TestLogHangs(t *testing.T) {
	t.Parallel()
	s, _, reader := startWithReader(t)
	c, _ := s.Member(t, "member")
	s.AllowErrorsWithAnyOf("failed") // the checks of health that did not end
	hubstest.Must(t, syscall.Kill(reader, syscall.SIGSTOP))
	t.Cleanup(func() { syscall.Kill(reader, syscall.SIGCONT) }) // or the server could not stop

	const requests = 400 // so that their lines fill the pipe
	var all sync.WaitGroup
	for range requests {
		other := c.Elsewhere()
		all.Go(func() { other.Get("/auth/session") })
	}
	hubstest.WaitUntil(t, "/healthz says nothing", func() bool {
		asking := c.Elsewhere()
		asking.HTTP = &http.Client{Transport: asking.HTTP.Transport, Timeout: 3 * time.Second}
		_, err := asking.Try("GET /healthz", nil)
		return err != nil // a 503 would be logged, and so can't come
	})
	hubstest.Must(t, syscall.Kill(reader, syscall.SIGCONT))
	all.Wait()
	hubstest.WaitFor(t, "status of /healthz", 200, func() int { return get(c, "/healthz").Status })
}

// H3: So does a server whose log is on a full disk, from its first line on.
func TestServerWithALogOnAFullDisk(t *testing.T) {
	t.Parallel()
	socket, addr := hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	// The test can't read the log, so the shell tells it that the server listens.
	script := `echo "{\"msg\":\"listening\",\"addr\":\"$1\"}"; LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" serve >/dev/full`
	cmd := exec.Command("sh", "-c", script, hubstest.Binary(), addr)
	cmd.ExtraFiles = []*os.File{socket}
	s := hubstest.StartCommand(t, cmd, hubstest.StagingEnv(hubstest.NewMailServer(t, hubstest.MailOptions{})))
	c, _ := s.Member(t, "admin")
	createHub(c, "North").Want(t, 201)
	c.WantFile(c.Store("a.txt", "content"), "content")
	get(c, "/healthz").WantProblem(t, 503, "unavailable")
	hubstest.WantEqual(t, "exit status", s.Stop(t), 0)
}
