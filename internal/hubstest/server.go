package hubstest

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// A Server is a process that runs the server's binary.
type Server struct {
	// Env holds the settings. DATABASE_URL is the owner's, for the user commands. The process
	// itself connects with the role of deploy/roles.sql (serveEnv).
	Env  map[string]string
	Addr string // host:port on which the server listens
	// Base is the beginning of the URLs that clients use. In the local environment, it is http and
	// Addr. Elsewhere, it is https and a name within COOKIE_DOMAIN (see proxied).
	Base   string
	Log    *Log // standard output
	Stderr *Log // standard error
	Cmd    *exec.Cmd
	Mail   *MailServer // receives the codes; nil: the server prints them on standard output
	// Database is the owner's URL for the test's own statements, by default DATABASE_URL in Env. A
	// test sets another one if that leads through a proxy or names several hosts.
	Database string

	world    *world       // nil if the test needs a quiet one
	inFlight sync.RWMutex // read-locked by each request of a Client
	requests atomic.Int64 // of all Clients

	Done     chan struct{} // closed when the process has ended
	signaled bool          // the test has sent a signal, so it checks the exit status itself

	mu       sync.Mutex
	allowed  []*allowance
	codeLine map[string]int // by printed prefix and address: first line Code has not read
}

// An allowance is what a test accepts in the log: errors that contain one of the parts, in the
// lines before number until.
type allowance struct {
	parts []string
	until int
}

// ServerEnv returns valid settings for the local environment. Each of the overrides replaces
// some; an empty value unsets one. Without an override, database and folder are new. The server
// believes X-Forwarded-For from this machine. So each client can have its own address, and the
// requests of one client do not count toward the rate limits of another.
func ServerEnv(t testing.TB, overrides ...map[string]string) map[string]string {
	t.Helper()
	env := map[string]string{
		"APP_ENV":         "local",
		"ADDR":            "127.0.0.1:0",
		"SESSION_SECRET":  "test-secret-of-more-than-thirty-two-bytes",
		"TRUSTED_PROXIES": "127.0.0.0/8",
		"FILES_DIR":       t.TempDir(),
	}
	for _, override := range overrides {
		maps.Copy(env, override)
	}
	if _, ok := env["DATABASE_URL"]; !ok {
		env["DATABASE_URL"] = NewDatabase(t)
	}
	return env
}

// StagingEnv returns the overrides of ServerEnv for the staging environment.
func StagingEnv(m *MailServer) map[string]string {
	env := m.Env()
	env["APP_ENV"] = "staging"
	env["COOKIE_DOMAIN"] = "staging.example.com"
	return env
}

// Start starts a server with the settings of ServerEnv and stops it when the test ends. The test
// fails if the server then exits with a status other than 0, or if its log contains what no log
// may contain (wantCleanLog). Start(t, first.Env) starts a second server on the data of the first.
func Start(t testing.TB, overrides ...map[string]string) *Server {
	t.Helper()
	return StartCommand(t, exec.Command(Binary(), "serve"), overrides...)
}

// StartCommand is like Start, but starts the server by the given command.
func StartCommand(t testing.TB, cmd *exec.Cmd, overrides ...map[string]string) *Server {
	t.Helper()
	s, err := TryStart(t, cmd, overrides...)
	Must(t, err)
	return s
}

// TryStart is like StartCommand, but returns an error if the server does not start. It is for tests
// that check the start itself.
func TryStart(t testing.TB, cmd *exec.Cmd, overrides ...map[string]string) (*Server, error) {
	t.Helper()
	env := ServerEnv(t, overrides...)
	_, isQuiet := env[quiet]
	delete(env, quiet)
	known, _ := mailServers.Load(env["SMTP_URL"])
	mail, _ := known.(*MailServer) // nil if the tests run none there
	s := &Server{
		Env:      env,
		Log:      &Log{},
		Stderr:   &Log{},
		Cmd:      cmd,
		Mail:     mail,
		Database: env["DATABASE_URL"],
		Done:     make(chan struct{}),
		codeLine: map[string]int{},
	}
	cmd.Env = append(cmd.Env, processEnv(serveEnv(env))...)
	if !isQuiet {
		s.world = newWorld(t)
		s.world.apply(t, cmd)
		note(t, s.world)
	}
	cmd.Stdout = s.Log
	cmd.Stderr = s.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		cmd.Wait()
		close(s.Done)
	}()
	t.Cleanup(func() { cmd.Process.Kill() }) // an error means that the process has ended
	if err := s.waitListening(); err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		t.Helper()
		if code := s.Stop(t); code != 0 && !s.signaled {
			t.Errorf("side effect: got exit status %d, want 0; standard error ends:\n%s", code, s.Stderr.End())
		}
		s.wantCleanLog(t)
	})
	return s, nil
}

// waitListening waits until the server listens, and sets Addr and Base.
func (s *Server) waitListening() error {
	line, _, err := s.Log.wait(Patience, 0, s.Done, containsAll([]string{`"msg":"listening"`}))
	if err != nil {
		return fmt.Errorf("the server has not started: %w\nstandard error ends:\n%s", err, s.Stderr.End())
	}
	var listening struct{ Addr string }
	if err := json.Unmarshal([]byte(line), &listening); err != nil {
		return fmt.Errorf("%s: %w", line, err)
	}
	s.Addr = listening.Addr
	s.Base = "http://" + listening.Addr
	if domain := s.Env["COOKIE_DOMAIN"]; domain != "" {
		s.Base = "https://api." + domain
	}
	return nil
}

// Stop sends SIGTERM to the server, waits until it ends, and returns its exit status. The server
// may have ended already.
func (s *Server) Stop(t testing.TB) int {
	t.Helper()
	s.Cmd.Process.Signal(syscall.SIGTERM) // an error means that the process has ended
	return s.WaitExit(t)
}

// Signal sends a signal to the server. After that, the harness no longer checks the exit status:
// the test must.
func (s *Server) Signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	s.signaled = true
	Must(t, s.Cmd.Process.Signal(sig))
}

// WaitExit waits until the process ends, and returns its exit status, or -1 if a signal has killed
// it. It waits for twice Patience, because a server that stops may wait first for requests and then
// for mail.
func (s *Server) WaitExit(t testing.TB) int {
	t.Helper()
	select {
	case <-s.Done:
		return s.Cmd.ProcessState.ExitCode()
	case <-time.After(2 * Patience):
		t.Fatalf("after %v, the server has not ended; its log ends:\n%s", 2*Patience, s.Log.End())
		return 0
	}
}

// AllowErrorsWithAnyOf makes the test accept logged errors that contain one of the parts. If end is
// called, the test accepts only those logged before that call.
func (s *Server) AllowErrorsWithAnyOf(parts ...string) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := &allowance{parts, math.MaxInt}
	s.allowed = append(s.allowed, a)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		a.until = len(s.Log.All())
	}
}

// codeLinePrefix begins the line with a code, which the server prints if it has no mail server.
// This is the only text in the log that is not JSON.
const codeLinePrefix = "Sign-in code for "

// codePattern matches a code. No other place in the harness knows how long a code is.
const codePattern = "[0-9]{6}"

// Code waits for the next code that the server sends to the address as stored in the database, and
// returns it. It returns each code once.
func (s *Server) Code(t testing.TB, email string) string {
	t.Helper()
	if s.Mail != nil {
		mail := s.Mail.WaitMail(t, email)
		codes := mail.Codes()
		if len(codes) != 1 {
			t.Fatalf("got the codes %q, want one, in the mail %q", codes, mail.Data)
		}
		return codes[0]
	}
	prefix := codeLinePrefix + email + ": "
	s.mu.Lock()
	from := s.codeLine[prefix]
	s.mu.Unlock()
	line, next, err := s.Log.wait(Patience, from, s.Done, func(line string) bool {
		return strings.HasPrefix(line, prefix)
	})
	if err != nil {
		t.Fatalf("want a printed code for %s: %v", email, err)
	}
	s.mu.Lock()
	s.codeLine[prefix] = next
	s.mu.Unlock()
	return line[len(prefix):]
}

// User runs the operator's command "user …" with the server's settings, and returns its standard
// output. A command that fails ends the test.
func (s *Server) User(t testing.TB, args ...string) string {
	t.Helper()
	status, output := Run(t, s.Env, append([]string{"user"}, args...)...)
	if status != 0 {
		t.Fatalf("setup: user %q: got exit status %d, want 0\n%s", args, status, output)
	}
	return output
}
