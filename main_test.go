package main

// The settings: every value of testdata/settings.json, in each environment, and their table in
// docs/deploy.md. The listener. At the end, the check that every removal fits the code.

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"hubs/internal/hubstest"
	"hubs/tools/removals"
)

// A settingCase has the values of one setting that are taken and refused, each with the reason.
type settingCase struct {
	Variable     string
	Environments []string
	Good, Bad    map[string]string
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

// settings returns the names of all settings: what os.Getenv and configReader.list are given.
func settings(t *testing.T) []string {
	t.Helper()
	names := matches(t, "main.go", `r\.list\("(\w+)"`)
	files, _ := filepath.Glob("*.go") // the pattern is well formed
	for _, file := range files {
		names = append(names, matches(t, file, `os\.Getenv\("(\w+)"`)...)
	}
	isSystemds := func(name string) bool { return name == "LISTEN_PID" }
	return slices.DeleteFunc(names, isSystemds)
}

// docs/deploy.md explains each setting, and no other one. settings.json has values of each that are
// taken, or refused.
func TestSettingsAreExplained(t *testing.T) {
	t.Parallel()
	read := settings(t)
	explained := matches(t, "docs/deploy.md", "(?m)^\\| `([A-Z_]+)` \\|[^|]+\\|$")
	tried := matches(t, "testdata/settings.json", `"variable": "(\w+)"`)
	for _, name := range slices.Concat(read, explained, tried) {
		for place, names := range map[string][]string{
			"the server":             read,
			"docs/deploy.md":         explained,
			"testdata/settings.json": tried,
		} {
			if !slices.Contains(names, name) {
				t.Errorf("%s does not have %s", place, name)
			}
		}
	}
}

// loadWith loads a configuration of an environment with one setting changed.
func loadWith(t *testing.T, environment, variable, value string) error {
	t.Helper()
	env := deployedEnv(environment)
	env[variable] = value
	for _, name := range settings(t) {
		t.Setenv(name, env[name])
	}
	_, err := loadConfig()
	return err
}

// A bad value is named, and no secret printed.
func TestConfiguration(t *testing.T) {
	for _, c := range hubstest.ReadCases[settingCase](t, "testdata/settings.json") {
		for _, environment := range c.Environments {
			for value := range c.Good {
				name := fmt.Sprintf("%s/good %s=%q", environment, c.Variable, value)
				t.Run(name, func(t *testing.T) {
					if err := loadWith(t, environment, c.Variable, value); err != nil {
						t.Errorf("got %v, want no error", err)
					}
				})
			}
			for value := range c.Bad {
				name := fmt.Sprintf("%s/bad %s=%q", environment, c.Variable, value)
				t.Run(name, func(t *testing.T) {
					wantRefused(t, environment, c.Variable, value)
				})
			}
		}
	}
}

// wantRefused checks that the error for a value names its setting, and shows no secret.
func wantRefused(t *testing.T, environment, variable, value string) {
	t.Helper()
	err := loadWith(t, environment, variable, value)
	if err == nil || !strings.Contains(err.Error(), variable) {
		t.Fatalf("got %v, want an error that names %s", err, variable)
	}
	secrets := []string{"secret-1", "session-secret", "password@"}
	if variable == "SESSION_SECRET" && len(value) > 5 {
		secrets = append(secrets, value)
	}
	for _, secret := range secrets {
		if strings.Contains(err.Error(), secret) {
			t.Errorf("the error shows a secret: %v", err)
		}
	}
}

// Every key in an example of deploy/ is refused: somebody would keep it.
func TestExampleKeysAreRefused(t *testing.T) {
	names, _ := filepath.Glob("deploy/*.env") // the pattern is well formed
	var keys []string
	for _, name := range names {
		keys = append(keys, matches(t, name, `SESSION_SECRET=(\S+)`)...)
	}
	if len(keys) == 0 {
		t.Error("no example of deploy/ has a key")
	}
	for _, key := range keys {
		wantRefused(t, envStaging, "SESSION_SECRET", key)
	}
}

// newDeafListener returns a listener with one slot, which listens nowhere.
func newDeafListener(stop chan struct{}) *boundedListener {
	return &boundedListener{
		TCPListener: &net.TCPListener{},
		slots:       make(chan struct{}, 1),
		stop:        stop,
	}
}

// H8: an Accept that fails takes no slot. Else a lack of descriptors would end the service for
// good.
func TestFailedAcceptTakesNoSlot(t *testing.T) {
	t.Parallel()
	l := newDeafListener(nil)
	if _, err := l.Accept(); err == nil {
		t.Error("got a connection, want an error")
	}
	if got := len(l.slots); got != 0 {
		t.Errorf("got %d slots taken, want 0", got)
	}
}

// H3: a server whose connections are all taken can stop: Accept waits for no slot then.
func TestStopWithAllConnectionsTaken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		stop := make(chan struct{})
		l := newDeafListener(stop)
		l.slots <- struct{}{}
		time.AfterFunc(time.Minute, func() { <-l.slots }) // ends a wait for a slot
		close(stop)
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v, want %v", err, net.ErrClosed)
		}
	})
}

// What a removal may be of besides a row of SECURITY.md.
var removalTopics = strings.Fields(`durability limits order start stop configuration commands
	session mail log files hubs store answers deploy`)

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
	known := matches(t, "SECURITY.md", `(?m)^\| ([A-Z][0-9]+) \|`)
	known = append(known, removalTopics...)
	isNamed := map[string]bool{}
	for _, r := range all {
		if slices.Contains(known, r.Name) {
			t.Errorf("%s: there are two of this name", r.Name)
		}
		known = append(known, r.Name)
		if !slices.Contains(known, r.Row) || !strings.HasPrefix(r.Name, r.Row+"-") {
			t.Errorf("%s: %s is no topic and no row of SECURITY.md, or not in the name", r.Name, r.Row)
		}
		for _, name := range r.Tests {
			function := removals.TestFunction(name)
			if _, exists := source[function]; !exists {
				t.Errorf("%s: there is no test %s", r.Name, name)
			}
			isNamed[function] = true
		}
		if _, err := source.Apply(r.Changes); err != nil {
			t.Errorf("%s no longer fits: %v", r.Name, err)
		}
	}
	for name := range source {
		isTest := strings.HasPrefix(filepath.Base(name), "Test")
		if isTest && !isNamed[name] && testing.Verbose() {
			fmt.Println("no removal names", name)
		}
	}
}

// The one example in each of these pages is a removal as it stands: people copy it.
func TestExamplesAreRemovals(t *testing.T) {
	all, _ := removals.Read() // TestRemovalsFit reports an error
	pages := hubstest.ReadFile(t, "docs/CONTRIBUTING.md") +
		hubstest.ReadFile(t, "testdata/removals/README.md")
	examples := 0
	for _, r := range all {
		examples += strings.Count(pages, "\n== "+r.Text+"\n```")
	}
	if examples != 2 {
		t.Errorf("got %d examples that are a removal, want one in each page", examples)
	}
}

// To tools/prove, a line of t.Log looks like a failure. So what a test notes goes to t.Output.
func TestNotesGoToOutput(t *testing.T) {
	own, _ := filepath.Glob("*_test.go") // the patterns are well formed
	others, _ := filepath.Glob("test/*/*_test.go")
	for _, file := range append(own, others...) {
		if matches(t, file, `\bt\.(Logf?)\(`) != nil {
			t.Errorf("%s has t.Log: write to t.Output", file)
		}
	}
}

// matches returns what the group of an expression matches in a file.
func matches(t *testing.T, file, expression string) []string {
	t.Helper()
	var found []string
	text := hubstest.ReadFile(t, file)
	for _, match := range regexp.MustCompile(expression).FindAllStringSubmatch(text, -1) {
		found = append(found, match[1])
	}
	return found
}
