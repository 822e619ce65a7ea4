package main

// The settings: every value of testdata/settings.json, in each environment. The listener. At the
// end, the check that every removal fits the code.

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"

	"hubs/tools/removals"
)

// A settingCase has the values of one setting that are taken and refused.
type settingCase struct {
	Variable     string
	Environments []string
	Good, Bad    []string
}

// deployedEnv is a right configuration of an environment. Nothing in it is dialled.
func deployedEnv(name string) map[string]string {
	env := map[string]string{
		"APP_ENV":        name,
		"DATABASE_URL":   "postgres://u:database-password@127.0.0.1:1/hubs",
		"SESSION_SECRET": "session-secret-of-thirty-two-byte",
		"MAIL_FROM":      "hubs@example.com",
	}
	if name != envLocal {
		env["COOKIE_DOMAIN"] = "example.com"
		env["SMTP_URL"] = "smtps://u:mail-password@127.0.0.1:465"
	}
	if name == envProduction {
		env["ALLOWED_ORIGIN_DOMAIN"] = "example.com"
	}
	return env
}

// loadWith loads a configuration of an environment with one setting changed.
func loadWith(t *testing.T, environment, variable, value string) error {
	t.Helper()
	env := deployedEnv(environment)
	for _, name := range []string{"ADDR", "COOKIE_PREFIX", "ALLOWED_ORIGINS", "TRUSTED_PROXIES", "FILES_DIR",
		"MAX_UPLOAD_BYTES", "COOKIE_DOMAIN", "SMTP_URL", "ALLOWED_ORIGIN_DOMAIN"} {
		t.Setenv(name, env[name])
	}
	maps.Copy(env, map[string]string{variable: value})
	for name, value := range env {
		t.Setenv(name, value)
	}
	_, err := loadConfig()
	return err
}

// A bad value is named, and no secret printed.
func TestConfiguration(t *testing.T) {
	text, err := os.ReadFile("testdata/settings.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Cases []settingCase }
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for _, c := range file.Cases {
		for _, environment := range c.Environments {
			for _, value := range c.Good {
				t.Run(fmt.Sprintf("%s/good %s=%q", environment, c.Variable, value), func(t *testing.T) {
					if err := loadWith(t, environment, c.Variable, value); err != nil {
						t.Errorf("got %v, want no error", err)
					}
				})
			}
			for _, value := range c.Bad {
				t.Run(fmt.Sprintf("%s/bad %s=%q", environment, c.Variable, value), func(t *testing.T) {
					wantRefused(t, loadWith(t, environment, c.Variable, value), c.Variable, value)
				})
			}
		}
	}
}

// wantRefused checks that an error names the setting, and shows no secret.
func wantRefused(t *testing.T, err error, variable, value string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), variable) {
		t.Fatalf("got %v, want an error that names %s", err, variable)
	}
	for _, secret := range []string{"secret-1", "session-secret", "password@", value} {
		isSecret := variable == "SESSION_SECRET" || secret != value
		if isSecret && len(secret) > 5 && strings.Contains(err.Error(), secret) {
			t.Errorf("the error shows a secret: %v", err)
		}
	}
}

// Every key in an example of deploy/ is refused: somebody would keep it.
func TestExampleKeysAreRefused(t *testing.T) {
	names, err := filepath.Glob("deploy/*.env")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		keys := regexp.MustCompile(`SESSION_SECRET=(\S+)`).FindAllStringSubmatch(string(text), -1)
		for _, key := range keys {
			found++
			wantRefused(t, loadWith(t, envStaging, "SESSION_SECRET", key[1]), "SESSION_SECRET", key[1])
		}
	}
	if found == 0 {
		t.Error("no example of deploy/ has a key")
	}
}

// H8: an Accept that fails takes no slot. Else a lack of descriptors would end the service for
// good.
func TestFailedAcceptTakesNoSlot(t *testing.T) {
	t.Parallel()
	l := &boundedListener{
		TCPListener: &net.TCPListener{}, // which listens nowhere
		slots:       make(chan struct{}, 1),
	}
	if _, err := l.Accept(); err == nil {
		t.Error("got a connection, want an error")
	}
	if got := len(l.slots); got != 0 {
		t.Errorf("got %d slots taken, want 0", got)
	}
}

// An address that can't be listened on is the operator's mistake.
func TestListenRefusesBadAddresses(t *testing.T) {
	t.Parallel()
	for _, addr := range []string{"8080", "localhost", "::1", "127.0.0.1:65536", "127.0.0.1:x"} {
		_, err := listen(addr, nil)
		if _, ok := errors.AsType[usageError](err); !ok {
			t.Errorf("%s: got %v, want a usage error", addr, err)
		}
	}
}

// H3: a server whose connections are all taken can stop: Accept waits for no slot then.
func TestStopWithAllConnectionsTaken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // in which a wait without end is a failure
		stop := make(chan struct{})
		l := &boundedListener{slots: make(chan struct{}), stop: stop}
		close(stop)
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v, want %v", err, net.ErrClosed)
		}
	})
}

// What a removal may be of besides a row of SECURITY.md.
var removalTopics = []string{
	"durability", "limits", "order", "start", "stop", "configuration", "commands", "session",
	"mail", "log", "files", "hubs", "store", "answers", "deploy",
}

// Each removal is of a row or topic, names tests that exist, and fits the code as it is.
// tools/prove shows that the tests notice. With -v: the tests that no removal names.
func TestRemovalsFit(t *testing.T) {
	t.Parallel()
	all, err := removals.Read()
	if err != nil {
		t.Fatal(err)
	}
	source, err := removals.ReadSource()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, topic := range removalTopics {
		known[topic] = true
	}
	for _, row := range matches(t, "SECURITY.md", `(?m)^\| ([A-Z][0-9]+) \|`) {
		known[row] = true
	}
	isNamed := testNames(t)
	for _, r := range all {
		if known[r.Name] {
			t.Errorf("%s: there are two of this name", r.Name)
		}
		known[r.Name] = true
		if !known[r.Row] || !strings.HasPrefix(r.Name, r.Row+"-") {
			t.Errorf("%s: %s is no topic and no row of SECURITY.md, or not in the name", r.Name, r.Row)
		}
		for _, name := range r.Tests {
			folder, test := removals.SplitTest(name)
			function, _, _ := strings.Cut(test, "/")
			function = filepath.Join(folder, function)
			_, exists := isNamed[function]
			if !exists {
				t.Errorf("%s: there is no test %s", r.Name, name)
			}
			isNamed[function] = true
		}
		_, err := source.Apply(r)
		if err != nil {
			t.Errorf("%s no longer fits: %v", r.Name, err)
		}
	}
	for name, named := range isNamed {
		if !named {
			t.Logf("no removal names %s", name)
		}
	}
}

// testNames returns all tests, each with its folder. The values are false.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, pattern := range []string{"*_test.go", "test/*/*_test.go"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			for _, name := range matches(t, path, `(?m)^func ((?:Test|Fuzz)\w*)\(\w+ \*testing\.[TF]\)`) {
				names[filepath.Join(filepath.Dir(path), name)] = false
			}
		}
	}
	return names
}

// matches returns what the group of an expression matches in a file.
func matches(t *testing.T, file, expression string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, match := range regexp.MustCompile(expression).FindAllSubmatch(text, -1) {
		found = append(found, string(match[1]))
	}
	return found
}
