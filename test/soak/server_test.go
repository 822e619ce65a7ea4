package soak

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A server is one of the two processes. It keeps its address when it is started again. Its log
// goes to a file: in an hour it grows too long for the memory.
type server struct {
	*hubstest.Server
	log  string
	cmd  *exec.Cmd
	done chan struct{}
	life atomic.Int64 // odd while the server is down: no answer is then no fault
}

func isStopped(life int64) bool {
	return life%2 == 1
}

func (s *soak) newServer() *server {
	env := hubstest.ServerEnv(s.t, hubstest.StagingEnv(s.mail), map[string]string{
		"ADDR":         hubstest.FreeAddr(s.t),
		"DATABASE_URL": s.pg.URL,
		"FILES_DIR":    s.dir,
	})
	server := &server{
		Server: &hubstest.Server{
			Env:      env,
			Addr:     env["ADDR"],
			Base:     "https://api." + env["COOKIE_DOMAIN"],
			Database: s.pg.URL,
		},
		log: filepath.Join(s.t.TempDir(), "log"),
	}
	server.life.Store(1)
	server.start(s.t)
	s.t.Cleanup(func() {
		server.cmd.Process.Kill()
		<-server.done
	})
	return server
}

// start returns when the server takes connections.
func (v *server) start(t *testing.T) {
	log, err := os.OpenFile(v.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	v.cmd = exec.Command(hubstest.Binary(), "serve")
	v.done = make(chan struct{})
	for name, value := range v.Env {
		v.cmd.Env = append(v.cmd.Env, name+"="+value)
	}
	v.cmd.Stdout = log
	v.cmd.Stderr = log
	if err := v.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		v.cmd.Wait()
		close(v.done)
	}()
	hubstest.WaitListening(t, v.Addr)
	v.life.Add(1)
}

// end stops the server by a signal and returns the exit status.
func (v *server) end(t *testing.T, signal syscall.Signal) int {
	v.life.Add(1)
	v.cmd.Process.Signal(signal)
	select {
	case <-v.done:
	case <-time.After(hubstest.Patience):
		t.Errorf("a server has not ended %v after %v", hubstest.Patience, signal)
		v.cmd.Process.Kill()
		<-v.done
	}
	return v.cmd.ProcessState.ExitCode()
}

// A size is what must not grow. Both are 0 on a system without /proc.
type size struct{ residentMB, descriptors int }

func (v *server) size() size {
	pid := v.cmd.Process.Pid
	open, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return size{
		residentMB:  hubstest.Memory(pid, "VmRSS") >> 20,
		descriptors: len(open),
	}
}

// checkSize checks that the server that ran all the time is about as small as at its start.
func (s *soak) checkSize(v *server, before size) {
	const (
		moreMB          = 64
		moreDescriptors = 16
		mostGoroutines  = 100
	)
	after := v.size()
	// The clients' idle connections end within a minute or so.
	for range 20 {
		if after.descriptors <= before.descriptors+moreDescriptors {
			break
		}
		time.Sleep(10 * time.Second)
		after = v.size()
	}
	v.end(s.t, syscall.SIGQUIT) // the Go runtime prints its goroutines
	text, err := os.ReadFile(v.log)
	if err != nil {
		s.t.Fatal(err)
	}
	goroutines := len(regexp.MustCompile(`(?m)^goroutine \d+ `).FindAll(text, -1))
	s.event("memory %d MB, then %d", before.residentMB, after.residentMB)
	s.event(
		"descriptors %d, then %d; goroutines at the end %d",
		before.descriptors,
		after.descriptors,
		goroutines,
	)
	if after.residentMB > before.residentMB+moreMB {
		s.fault("memory grows", after)
	}
	if after.descriptors > before.descriptors+moreDescriptors {
		s.fault("descriptors leak", after)
	}
	if goroutines == 0 || goroutines > mostGoroutines {
		s.fault("goroutines leak", goroutines)
	}
}

var (
	wholeAddress = regexp.MustCompile(`[A-Za-z0-9._%+-]{2,}@[A-Za-z0-9.-]+\.[a-z]+`)
	sixDigits    = regexp.MustCompile(`\b[0-9]{6}\b`)
	jsonNumber   = regexp.MustCompile(`":[0-9.]+|"time":"[^"]*"`)
	explained    = []string{
		"unavailable",
		"code not sent",
		"insufficient_storage",
		"sweep of unfinished uploads failed",
	}
)

// checkLog checks that a log has nothing secret, nothing that is no JSON, and no error that the
// failures do not explain.
func (s *soak) checkLog(v *server) {
	text, err := os.ReadFile(v.log)
	if err != nil {
		s.t.Fatal(err)
	}
	text, _, _ = bytes.Cut(text, []byte("SIGQUIT")) // see checkSize
	database, err := url.Parse(s.pg.URL)
	if err != nil {
		s.t.Fatal(err)
	}
	password, _ := database.User.Password()
	secrets := []string{"eyJ", "postgres://", password, v.Env["SESSION_SECRET"]}
	lines := 0
	for line := range strings.Lines(string(text)) {
		lines++
		contains := func(part string) bool { return strings.Contains(line, part) }
		var entry struct{ Level string }
		if json.Unmarshal([]byte(line), &entry) != nil {
			s.fault("a log line that is no JSON", line)
		}
		if entry.Level == "ERROR" && !slices.ContainsFunc(explained, contains) {
			s.fault("an unexpected error in the log", line)
		}
		if slices.ContainsFunc(secrets, contains) {
			s.fault("a secret in the log", line)
		}
		if contains("@") && wholeAddress.MatchString(line) {
			s.fault("an address in the log", line)
		}
		for _, digits := range sixDigits.FindAllString(jsonNumber.ReplaceAllString(line, ""), -1) {
			if s.codes[digits] {
				s.fault("a code in the log", line)
			}
		}
		if len(line) > 2048 {
			s.fault("a log line over 2 kB", line[:300])
		}
	}
	s.event("log lines of %s: %d", v.Addr, lines)
}
