package hubstest

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A Server is a running server: the binary in a process of its own.
type Server struct {
	Env  map[string]string // its settings
	Addr string            // where it listens, host:port
	// Base is how clients address it: the listener itself in the local environment, a name
	// within COOKIE_DOMAIN over https elsewhere (see Client).
	Base   string
	Log    *Log // standard output
	Stderr *Log
	Cmd    *exec.Cmd
	Mail   *MailServer // where the codes go; nil: to the log
	// Database is the URL that the test's own statements go to: the server's own. A test sets
	// another one if the server's leads through a proxy, or to several hosts.
	Database string

	done     chan struct{} // closed when the process has ended
	signaled bool          // the test has sent a signal, and looks at the exit status itself

	mu           sync.Mutex
	allowed      []allowance
	wantedStderr string         // see WantStderr
	codeLine     map[string]int // by address: the first line of the log that Code has not read
}

// An allowance is logged errors that a test accepts: those with the part, before the line until.
type allowance struct {
	part  string
	until *int
}

// ServerEnv returns a working local configuration, overridden by each of the maps. An empty
// value unsets. Clients come from addresses of their own by X-Forwarded-For, so that the
// rate limits of one do not meet those of the next.
func ServerEnv(t testing.TB, overrides ...map[string]string) map[string]string {
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

// StagingEnv returns what ServerEnv needs besides on staging.
func StagingEnv(m *MailServer) map[string]string {
	env := m.Env()
	env["APP_ENV"] = "staging"
	env["COOKIE_DOMAIN"] = "staging.example.com"
	return env
}

// ProductionEnv returns what ServerEnv needs besides on production.
func ProductionEnv(m *MailServer) map[string]string {
	env := m.Env()
	env["APP_ENV"] = "production"
	env["COOKIE_DOMAIN"] = "example.com"
	env["ALLOWED_ORIGIN_DOMAIN"] = "example.com"
	return env
}

// Start runs the server with ServerEnv until the test ends. It then must stop cleanly, and
// its log must be clean (checkLog). A second server on the same data is Start(t, first.Env).
func Start(t testing.TB, overrides ...map[string]string) *Server {
	t.Helper()
	return StartCommand(t, Serve(), overrides...)
}

// Serve is the command that starts the binary.
func Serve() *exec.Cmd { return exec.Command(Binary(), "serve") }

// StartCommand is Start for another way to start the binary.
func StartCommand(t testing.TB, cmd *exec.Cmd, overrides ...map[string]string) *Server {
	t.Helper()
	s, err := TryStart(t, cmd, overrides...)
	mustStart(t, err)
	return s
}

// mustStart is no t.Helper: that there is no server is not what the test looks for.
func mustStart(t testing.TB, err error) {
	if err != nil {
		t.Fatalf("no server: %v", err)
	}
}

// TryStart is StartCommand for tests of the start itself. The error says why there is no server.
func TryStart(
	t testing.TB, cmd *exec.Cmd, overrides ...map[string]string,
) (*Server, error) {
	t.Helper()
	env := ServerEnv(t, overrides...)
	s := &Server{
		Env:      env,
		Log:      &Log{},
		Stderr:   &Log{},
		Cmd:      cmd,
		Mail:     mailServerOf(env["SMTP_URL"]),
		Database: env["DATABASE_URL"],
		done:     make(chan struct{}),
		codeLine: map[string]int{},
	}
	cmd.Env = append(cmd.Env, processEnv(env)...)
	cmd.Stdout = s.Log
	cmd.Stderr = s.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		cmd.Wait()
		close(s.done)
	}()
	t.Cleanup(func() { cmd.Process.Kill() }) // an error means that it has ended
	if err := s.waitListening(); err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		t.Helper()
		if code := s.Stop(t); code != 0 && !s.signaled {
			t.Errorf("serve: exit status %d, want 0\n%s", code, s.Stderr)
		}
		s.checkLog(t)
	})
	return s, nil
}

func (s *Server) waitListening() error {
	line, _, err := s.Log.wait(Patience, 0, s.done, containsAll([]string{`"msg":"listening"`}))
	if err != nil {
		return fmt.Errorf("%w that says listening\n%s", err, s.Stderr)
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

// StartEnvironments starts a server for each of the settings, by their names. A name is the
// server's environment, unless its settings say another.
func StartEnvironments(
	t testing.TB, settings map[string]map[string]string, common map[string]string,
) map[string]*Server {
	t.Helper()
	mail := NewMailServer(t, MailOptions{})
	servers := map[string]*Server{}
	for name, values := range settings {
		env := map[string]string{"APP_ENV": name}
		maps.Copy(env, values)
		if env["APP_ENV"] != "local" {
			maps.Copy(env, mail.Env())
		}
		servers[name] = Start(t, common, env)
	}
	return servers
}

// Stop asks the server to stop (SIGTERM), if it still runs, and returns its exit status.
func (s *Server) Stop(t testing.TB) int {
	t.Helper()
	s.Cmd.Process.Signal(syscall.SIGTERM) // an error means that it has ended
	return s.Wait(t)
}

// Signal sends a signal. From then on the test answers for the exit status.
func (s *Server) Signal(t testing.TB, sig syscall.Signal) {
	s.signaled = true
	if err := s.Cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// Wait waits for the end of the process and returns its exit status, or -1 after a signal
// that killed it.
func (s *Server) Wait(t testing.TB) int {
	t.Helper()
	select {
	case <-s.done:
		return s.Cmd.ProcessState.ExitCode()
	case <-time.After(2 * Patience):
		t.Errorf("the server has not ended after %v, log:\n%s", 2*Patience, s.Log)
		return -1
	}
}

// Done is closed when the process has ended.
func (s *Server) Done() <-chan struct{} { return s.done }

// AllowErrors makes the test accept logged errors that contain one of the parts, until end is
// called, if it is.
func (s *Server) AllowErrors(parts ...string) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	until := math.MaxInt
	for _, part := range parts {
		s.allowed = append(s.allowed, allowance{part, &until})
	}
	return func() { until = len(s.Log.All()) }
}

// WantStderr waits for a line on standard error that contains the part: the server ends with an
// error. Any other line there fails the test.
func (s *Server) WantStderr(t testing.TB, part string) {
	t.Helper()
	s.Stderr.WaitFor(t, part)
	s.wantedStderr = part
}

// codeLinePrefix begins the one line that is no JSON: the code, if there is no mail server.
const codeLinePrefix = "Sign-in code for "

var codeForm = regexp.MustCompile(`^[0-9]{6}$`)

// Code returns the next code that was sent to the address, each of them once.
func (s *Server) Code(t testing.TB, email string) string {
	t.Helper()
	code := ""
	if s.Mail != nil {
		code = s.Mail.WaitMail(t, email).Code(t)
	} else {
		code = s.printedCode(t, email)
	}
	if !codeForm.MatchString(code) {
		t.Fatalf("code for %s: %q", email, code)
	}
	return code
}

func (s *Server) printedCode(t testing.TB, email string) string {
	t.Helper()
	prefix := strings.ToLower(codeLinePrefix + email + ": ")
	s.mu.Lock()
	from := s.codeLine[prefix]
	s.mu.Unlock()
	line, next, err := s.Log.wait(Patience, from, s.done, func(line string) bool {
		return strings.HasPrefix(strings.ToLower(line), prefix)
	})
	if err != nil {
		t.Fatalf("%v with a code for %s", err, email)
	}
	s.mu.Lock()
	s.codeLine[prefix] = next
	s.mu.Unlock()
	return line[len(prefix):]
}

// MaskedEmail is how the log shows an address: a***@example.com.
func MaskedEmail(email string) string {
	return email[:1] + "***" + email[strings.LastIndex(email, "@"):]
}

// User runs the command "user …" on the server's database, as the operator would, and returns
// what it printed.
func (s *Server) User(t testing.TB, args ...string) string {
	t.Helper()
	code, out, errOut := Run(s.Env, append([]string{"user"}, args...)...)
	if code != 0 {
		t.Fatalf("user %q: exit status %d\n%s%s", args, code, out, errOut)
	}
	return out
}
