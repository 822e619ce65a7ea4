// Package hubstest is the harness of the tests. Only tests import it.
//
// The harness drives the server from outside. It runs the binary as a process (Start), a
// PostgreSQL and a mail server (NewMailServer). Its client checks every answer for the rules that
// all answers must keep (Client, Response.Fault). When a server ends, the harness looks for errors
// and secrets in its log. The removal G2-code-logged shows that this check works: the test that
// notices it does not look for it.
//
// As in production, servers connect with the role of deploy/roles.sql. A test's own statements,
// migrate and the user commands connect as the owner of the database.
//
// The words in names:
//
//	Want, want  compares, and fails the test; the test goes on. It may request what it compares
//	Must, must  ends the test if a step fails that is not what the test is about
//	Wait, wait  waits for an event, and ends the test after Patience
//	New, Start  makes something that ends with the test
//
// Whatever belongs to one test keeps its testing.TB (Client, MailServer, HalfUpload). Whatever
// subtests share takes theirs at each call (Server, Response). Client.In moves a client to a
// subtest.
//
// Functions that may fail a test call t.Helper, so a failure is reported at a line of the test. The
// message of a failed step begins with "setup: ". Such a failure says nothing about the rule under
// test: no server has started, for example. tools/prove relies on this word.
package hubstest

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// Patience is the maximum wait for an event that must happen. A passing test never waits that
// long, so Patience can be long enough for a loaded machine. tools/prove sets a shorter one,
// because it removes protections, and most tests then wait for an event that never happens.
var Patience = patience()

func patience() time.Duration {
	d, err := time.ParseDuration(cmp.Or(os.Getenv("HUBS_TEST_PATIENCE"), "30s"))
	if err != nil {
		panic(err)
	}
	return d
}

// Must ends the test if a step has failed that is not what the test is about.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("setup: %v", err)
	}
}

// WaitUntil waits until done returns true. what names the state that is waited for.
func WaitUntil(t testing.TB, what string, done func() bool) {
	t.Helper()
	WaitFor(t, what, true, done)
}

// WaitFor calls get every 5 ms until it returns want, and ends the test after Patience. It is for a
// state that can only be polled, such as a row that appears. what names the value of get.
func WaitFor[T comparable](t testing.TB, what string, want T, get func() T) {
	t.Helper()
	got := get()
	for end := time.Now().Add(Patience); got != want; got = get() {
		if time.Now().After(end) {
			t.Fatalf("%s: got %v after %v, want %v", what, got, Patience, want)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// WantEqual compares two values of the same type. what is for messages.
func WantEqual(t testing.TB, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		complain(t, "%s: got %s, want %s", what, show(got), show(want))
	}
}

// show returns a value for a message: in Go's syntax, but durations as 20m0s.
func show(value any) string {
	if strings.Contains(fmt.Sprintf("%T", value), "time.") {
		return fmt.Sprintf("%v", value)
	}
	return fmt.Sprintf("%#v", value)
}

// complain is t.Errorf, but once for each message of a test: one fault may show in forty answers. Ids, and
// lines after the first, make no other message.
func complain(t testing.TB, format string, args ...any) {
	t.Helper()
	text := fmt.Sprintf(format, args...)
	line, _, _ := strings.Cut(text, "\n")
	complaint := t.Name() + ": " + anyID.ReplaceAllString(line, "")
	if _, isKnown := complaints.LoadOrStore(complaint, true); isKnown {
		t.Fail()
		return
	}
	t.Cleanup(func() { complaints.Delete(complaint) }) // for -count
	t.Error(text)
}

var (
	complaints sync.Map // messages that tests have got
	anyID      = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)
)

// WantText compares two long texts. It shows where they begin to differ.
func WantText(t testing.TB, what, got, want string) {
	t.Helper()
	same := 0 // bytes at the beginning
	for same < min(len(got), len(want)) && got[same] == want[same] {
		same++
	}
	if got != want {
		t.Errorf("%s: after %d bytes: got %.99q, want %.99q", what, same, got[same:], want[same:])
	}
}

// Dir is a temporary folder for what the tests of a package share: PostgreSQL, the certificates
// and the binary. Main creates and removes it.
var Dir string

// Main runs the tests of a package and exits with their status. It is the body of TestMain. After
// all tests of the package have passed, it also runs the checks. A run of some tests has none.
func Main(m *testing.M, checks ...func() error) {
	dir, err := os.MkdirTemp("", "hubs-test-")
	if err != nil {
		panic(err)
	}
	Dir = dir
	if err := prepareDir(); err != nil {
		panic(err)
	}
	code := m.Run()
	ends := []func() error{stopShared}
	if code == 0 && isWholePackage() {
		ends = append(ends, checks...)
	}
	for _, end := range ends {
		if err := end(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	if code != 0 {
		fmt.Fprintf(os.Stderr, "HUBS_TEST_SEED=%d repeats what the harness has drawn\n", worldSeed())
	}
	os.RemoveAll(Dir)
	os.Exit(code)
}

// isWholePackage reports whether go test was asked for all tests of the package.
func isWholePackage() bool {
	for _, name := range []string{"test.run", "test.skip", "test.list"} {
		if flag.Lookup(name).Value.String() != "" {
			return false
		}
	}
	return true
}

// prepareDir makes this process and its children trust no certificate authority but authority. It
// must run before any certificate is verified: crypto/x509 reads the two variables only once.
func prepareDir() error {
	// PostgreSQL refuses to run as root, so it may run as another user, who needs access to Dir.
	if err := os.Chmod(Dir, 0o755); err != nil {
		return err
	}
	file := filepath.Join(Dir, "ca.pem")
	os.Setenv("SSL_CERT_FILE", file)
	os.Setenv("SSL_CERT_DIR", file) // not a folder, so it adds no certificates
	return os.WriteFile(file, encodePEM(authority), 0o644)
}

// Root returns the folder of the module, which contains go.mod.
var Root = sync.OnceValue(func() string {
	dir, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	for !exists(filepath.Join(dir, "go.mod")) {
		dir = filepath.Dir(dir)
	}
	return dir
})

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// ReadFile returns the text of a file of the module, such as "deploy/nginx.conf".
func ReadFile(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(Root(), name))
	Must(t, err)
	return string(text)
}

// WriteFile writes a file, in a folder that it makes if there is none, and returns the path.
func WriteFile(t testing.TB, path, text string) string {
	t.Helper()
	Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
	Must(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// Matches returns the text of the group in a regular expression for each of its matches in a file
// of the module.
func Matches(t testing.TB, file, expression string) (found []string) {
	t.Helper()
	text := ReadFile(t, file)
	for _, match := range regexp.MustCompile(expression).FindAllStringSubmatch(text, -1) {
		found = append(found, match[1])
	}
	return found
}

// Tables returns the names of the tables in schema.sql.
func Tables(t testing.TB) []string {
	t.Helper()
	names := Matches(t, "schema.sql", `create table if not exists (\w+)`)
	if len(names) == 0 {
		t.Fatal("setup: schema.sql: got no tables")
	}
	return names
}

// Binary returns the path of the server's binary: HUBS_BINARY if it is set, otherwise
// PlainBinary.
var Binary = sync.OnceValue(func() string {
	if path := os.Getenv("HUBS_BINARY"); path != "" {
		return path
	}
	return PlainBinary()
})

// PlainBinary builds the server, once for each package of tests, and returns the binary's path.
// This binary never has the race detector or coverage, which use memory. HUBS_BINARY may have both.
//
// go test reuses the result of a package until a file changes that its tests have opened or called
// os.Stat on. So PlainBinary calls os.Stat on the sources of the binary.
var PlainBinary = sync.OnceValue(func() string {
	for _, pattern := range []string{"*.go", "go.mod", "schema.sql", "web/*"} {
		names, _ := filepath.Glob(filepath.Join(Root(), pattern)) // fails only on a bad pattern
		for _, name := range names {
			os.Stat(name)
		}
	}
	path := filepath.Join(Dir, "hubs")
	build := exec.Command("go", "build", "-o", path, ".")
	build.Dir = Root()
	out, err := build.CombinedOutput()
	if err != nil {
		panic(fmt.Sprintf("go build: %v\n%s", err, out))
	}
	return path
})

// Run runs a command of the binary, as RunBoth does, and returns its exit status and its output.
//
// A command that succeeds must print on standard output only, and one that fails on standard error
// only. No output may contain the password of NewRole.
func Run(t testing.TB, env map[string]string, args ...string) (status int, output string) {
	t.Helper()
	status, output, other := RunBoth(env, args...)
	if status != 0 {
		output, other = other, output
	}
	if other != "" {
		t.Errorf("%q: exit status %d: got %q on the wrong output, want nothing there",
			args, status, other)
	}
	if strings.Contains(output, rolePassword) {
		t.Errorf("%q: got the secret %s in %q, want no secret", args, rolePassword, output)
	}
	return status, output
}

// RunBoth runs a command of the binary, and waits until it ends. All its settings come from env. A
// command that takes longer than twice Patience is killed, and its exit status is -1.
func RunBoth(env map[string]string, args ...string) (status int, stdout, stderr string) {
	binary := Binary() // may take long, so it comes before the timeout begins
	ctx, cancel := context.WithTimeout(context.Background(), 2*Patience)
	defer cancel()
	var out, errOut strings.Builder
	cmd := exec.CommandContext(ctx, binary, args...)
	if len(args) == 0 || args[0] == "serve" {
		env = serveEnv(env)
	}
	cmd.Env = processEnv(env)
	for name, value := range drawEnv(drawFor(strings.Join(args, " "))) {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Stdout = &out
	cmd.Stderr = &errOut
	if err := cmd.Run(); cmd.ProcessState == nil {
		panic(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}

// serveEnv returns the settings of the command serve, which connects to the database with the role
// of deploy/roles.sql, as in production.
func serveEnv(env map[string]string) map[string]string {
	env = maps.Clone(env)
	env["DATABASE_URL"] = AsServer(env["DATABASE_URL"])
	return env
}

// processEnv returns the environment of a server process: the settings in env, and the variables
// of this process that are not settings but that a process needs.
func processEnv(env map[string]string) []string {
	var list []string
	kept := []string{"PATH", "HOME", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "GOCOVERDIR"}
	for _, name := range kept {
		if value, ok := os.LookupEnv(name); ok {
			list = append(list, name+"="+value)
		}
	}
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	return list
}

// Need returns the path of a program. If the program is missing, Need skips the test and names the
// Debian package to install. With HUBS_TEST_REQUIRE=all, as in CI, the test fails instead.
func Need(t testing.TB, program, debianPackage string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err == nil {
		return path
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} { // the PATH of some users lacks these
		if path := filepath.Join(dir, program); exists(path) {
			return path
		}
	}
	Skip(t, program+" is missing: apt-get install "+debianPackage)
	return ""
}

// Skip skips the test for this reason. With HUBS_TEST_REQUIRE=all, the test fails instead.
func Skip(t testing.TB, reason string) {
	t.Helper()
	if os.Getenv("HUBS_TEST_REQUIRE") == "all" {
		t.Fatal("setup: ", reason)
	}
	t.Skip(reason)
}
