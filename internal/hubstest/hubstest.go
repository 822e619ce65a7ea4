// Package hubstest is the harness of the tests. Only tests import it.
//
// It drives the server from outside: the binary as a process (Start), a PostgreSQL of the
// tests' own, a mail server (NewMailServer), a proxy that cuts connections (NewProxy), and
// a client that checks every answer for what all answers must have (Client).
//
// What must hold of the server is checked by functions that call t.Helper, so a failure stands
// at a line of the test. A failure at a line of this package is the harness's own: no
// PostgreSQL, no server that listens, no folder.
package hubstest

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Patience bounds each wait for something that must happen. A passing test never reaches
// it, so it can be long enough for a loaded machine. tools/prove, where most tests wait in vain,
// sets a shorter one.
var Patience = patience()

func patience() time.Duration {
	d, err := time.ParseDuration(cmp.Or(os.Getenv("HUBS_TEST_PATIENCE"), "30s"))
	if err != nil {
		panic(err)
	}
	return d
}

// WaitUntil waits for a state that nothing announces, such as a row that appears.
func WaitUntil(t testing.TB, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("after %v still not: %s", Patience, what)
		}
	}
}

// Dir outlives the single tests of a package: the PostgreSQL they share, the certificates,
// the binary.
var Dir string

// Main is the body of each package's TestMain.
func Main(m *testing.M) {
	dir, err := os.MkdirTemp("", "hubs-test-")
	if err != nil {
		panic(err)
	}
	Dir = dir
	if err := prepareDir(); err != nil {
		panic(err)
	}
	code := m.Run()
	if err := stopShared(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.RemoveAll(Dir)
	os.Exit(code)
}

// prepareDir fills Dir, and makes this process and its children trust authority alone:
// crypto/x509 reads these variables once, at the first verification.
func prepareDir() error {
	// PostgreSQL refuses to run as root. The user it runs as instead must get in.
	if err := os.Chmod(Dir, 0o755); err != nil {
		return err
	}
	file := filepath.Join(Dir, "ca.pem")
	os.Setenv("SSL_CERT_FILE", file)
	os.Setenv("SSL_CERT_DIR", file) // no other folder
	return os.WriteFile(file, encodePEM(authority), 0o644)
}

// Root is the folder of the module, which holds go.mod.
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

// ReadFile returns a file of the module, such as "deploy/nginx.conf".
func ReadFile(t testing.TB, name string) string {
	text, err := os.ReadFile(filepath.Join(Root(), name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Binary returns the path of the server's binary: HUBS_BINARY, or else one that is built
// once for each package of tests.
var Binary = sync.OnceValue(func() string {
	if path := os.Getenv("HUBS_BINARY"); path != "" {
		return path
	}
	noteSources()
	return PlainBinary()
})

// PlainBinary returns the path of a binary without the race detector and coverage, which take
// memory of their own.
var PlainBinary = sync.OnceValue(func() string {
	path := filepath.Join(Dir, "hubs")
	build := exec.Command("go", "build", "-o", path, ".")
	build.Dir = Root()
	out, err := build.CombinedOutput()
	if err != nil {
		panic(fmt.Sprintf("go build: %v\n%s", err, out))
	}
	return path
})

// noteSources looks at the files that the binary is made of. go test keeps the result of a
// package until a file changes that its tests have looked at.
func noteSources() {
	for _, pattern := range []string{"*.go", "go.mod", "schema.sql", "web/*"} {
		names, _ := filepath.Glob(filepath.Join(Root(), pattern)) // the patterns are well formed
		for _, name := range names {
			os.Stat(name)
		}
	}
}

// Run runs one command of the binary to its end. Its environment is env and nothing else
// that the server reads.
func Run(env map[string]string, args ...string) (code int, stdout, stderr string) {
	binary := Binary() // built before the time begins
	ctx, cancel := context.WithTimeout(context.Background(), 2*Patience)
	defer cancel()
	var out, errOut strings.Builder
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = processEnv(env)
	cmd.Stdout = &out
	cmd.Stderr = &errOut
	if err := cmd.Run(); cmd.ProcessState == nil {
		panic(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}

// processEnv returns the environment of a process of the server: env, and what a process
// needs besides.
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

// Need skips the test if a program is missing, and says what to install. With
// HUBS_TEST_REQUIRE=all, as in CI, the test fails instead. It returns the program's path.
func Need(t testing.TB, program, debianPackage string) string {
	path, err := exec.LookPath(program)
	if err == nil {
		return path
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} { // not in every user's PATH
		if path := filepath.Join(dir, program); exists(path) {
			return path
		}
	}
	Skip(t, program+" is missing: apt-get install "+debianPackage)
	return ""
}

// NeedRoot skips a test that only root can run.
func NeedRoot(t testing.TB) {
	if os.Getuid() != 0 {
		Skip(t, "this test needs root: sudo go test")
	}
}

// Skip skips a test that lacks something, or fails it with HUBS_TEST_REQUIRE=all.
func Skip(t testing.TB, reason string) {
	if os.Getenv("HUBS_TEST_REQUIRE") == "all" {
		t.Fatal(reason)
	}
	t.Skip(reason)
}
