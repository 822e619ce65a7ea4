package main

// Tests of the settings: the values in testdata/settings.json, in each environment, and the table
// in docs/deploy.md. Tests of the listener. At the end, tests of the project itself, such as
// whether every removal fits the code.

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"go/parser"
	"go/token"
	"go/types"
	"net"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"hubs/internal/hubstest"
	"hubs/tools/removals"
)

// A settingCase has values of one setting that the server accepts and rejects, each with the
// reason.
type settingCase struct {
	Variable     string
	Complains    string // the setting of which the error complains, if that is another one
	Environments []string
	Good, Bad    map[string]string // reasons by value; the value "" means that it is unset
}

// validSettings returns valid settings for an environment. No test connects to the hosts in them.
func validSettings(name string) map[string]string {
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

// settings returns the names of all settings, which are the arguments of os.Getenv and
// configReader.list in the code.
func settings(t *testing.T) []string {
	t.Helper()
	names := hubstest.Matches(t, "main.go", `r\.list\("(\w+)"`)
	files, _ := filepath.Glob("*.go") // the pattern is well formed
	for _, file := range files {
		names = append(names, hubstest.Matches(t, file, `os\.Getenv\("(\w+)"`)...)
	}
	isFromSystemd := func(name string) bool { return name == "LISTEN_PID" }
	return slices.DeleteFunc(names, isFromSystemd)
}

// docs/deploy.md explains every setting of the server, and no other. testdata/settings.json has
// values of every setting, and of no other.
func TestSettingsAreExplained(t *testing.T) {
	t.Parallel()
	read := settings(t)
	explained := hubstest.Matches(t, "docs/deploy.md", "(?m)^\\| `([A-Z_]+)` \\|[^|]+\\|$")
	tried := hubstest.Matches(t, "testdata/settings.json", `"variable": "(\w+)"`)
	for _, name := range slices.Concat(read, explained, tried) {
		for place, names := range map[string][]string{
			"the server":             read,
			"docs/deploy.md":         explained,
			"testdata/settings.json": tried,
		} {
			if !slices.Contains(names, name) {
				t.Errorf("%s: the setting %s is missing", place, name)
			}
		}
	}
}

// loadWith loads valid settings for an environment with one of them changed, and returns the error.
func loadWith(t *testing.T, environment, variable, value string) error {
	t.Helper()
	env := validSettings(environment)
	env[variable] = value
	for _, name := range settings(t) {
		t.Setenv(name, env[name])
	}
	_, err := loadConfig()
	return err
}

// The server accepts every good value of a setting. For a bad value, the error names the setting
// and has no secret.
func TestSettingsAreChecked(t *testing.T) {
	for _, c := range hubstest.ReadCases[settingCase](t, "testdata/settings.json") {
		for _, environment := range c.Environments {
			for value, reason := range c.Good {
				name := fmt.Sprintf("%s/good %s=%q", environment, c.Variable, value)
				t.Run(name, func(t *testing.T) {
					if err := loadWith(t, environment, c.Variable, value); err != nil {
						t.Errorf("%s: got %v, want no error", reason, err)
					}
				})
			}
			for value, reason := range c.Bad {
				name := fmt.Sprintf("%s/bad %s=%q", environment, c.Variable, value)
				t.Run(name, func(t *testing.T) {
					err := loadWith(t, environment, c.Variable, value)
					wantComplaint(t, err, cmp.Or(c.Complains, c.Variable), reason)
					if c.Variable == "SESSION_SECRET" && value != "" {
						wantNoneIn(t, err, value)
					}
				})
			}
		}
	}
}

// wantComplaint checks that the error has a complaint of the setting, and no secret.
func wantComplaint(t *testing.T, err error, setting, reason string) {
	t.Helper()
	if err == nil || !strings.Contains("\n"+err.Error(), "\n"+setting+": ") {
		t.Errorf("%s: got the error %v, want one that complains of %s", reason, err, setting)
		return
	}
	wantNoneIn(t, err, "secret-1", "session-secret", "password@")
}

// wantNoneIn checks that the error has none of the secrets.
func wantNoneIn(t *testing.T, err error, secrets ...string) {
	t.Helper()
	for _, secret := range secrets {
		if strings.Contains(fmt.Sprint(err), secret) {
			t.Errorf("got the error %v, want no secret in it", err)
		}
	}
}

// Without ALLOWED_ORIGIN_DOMAIN, the server does not complain of COOKIE_DOMAIN, which is correct.
func TestOnlyTheMissingDomainIsReported(t *testing.T) {
	err := loadWith(t, envProduction, "ALLOWED_ORIGIN_DOMAIN", "")
	complaints := fmt.Sprint(err)
	if !strings.HasPrefix(complaints, "ALLOWED_ORIGIN_DOMAIN: ") || strings.Contains(complaints, "\n") {
		t.Errorf("got %q, want one complaint, of ALLOWED_ORIGIN_DOMAIN", complaints)
	}
}

// The server rejects every session key in the examples of deploy/, because an operator may forget
// to replace it.
func TestExampleKeysAreRefused(t *testing.T) {
	names, _ := filepath.Glob("deploy/*.env") // the pattern is well formed
	var keys []string
	for _, name := range names {
		keys = append(keys, hubstest.Matches(t, name, `SESSION_SECRET=(\S+)`)...)
	}
	if len(keys) == 0 {
		t.Error("got no session key in the examples of deploy/, want at least one")
	}
	for _, key := range keys {
		err := loadWith(t, envStaging, "SESSION_SECRET", key)
		wantComplaint(t, err, "SESSION_SECRET", "a placeholder")
		wantNoneIn(t, err, key)
	}
}

// newBrokenListener returns a listener with one slot and without a socket, so that it can't accept
// a connection.
func newBrokenListener(stop chan struct{}) *boundedListener {
	return &boundedListener{
		TCPListener: &net.TCPListener{},
		slots:       make(chan struct{}, 1),
		stop:        stop,
	}
}

// H8: An Accept that fails gives its slot back. Otherwise, while the process has no free
// descriptors, failed calls would take all slots, and the server would never accept a connection
// again.
func TestFailedAcceptTakesNoSlot(t *testing.T) {
	t.Parallel()
	l := newBrokenListener(nil)
	if _, err := l.Accept(); err == nil {
		t.Error("got a connection, want an error")
	}
	if got := len(l.slots); got != 0 {
		t.Errorf("got %d slots taken after Accept has failed, want 0", got)
	}
}

// H3: When the server stops, Accept does not wait for a slot. So a server can stop while all slots
// are taken.
func TestStopWithAllConnectionsTaken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		stop := make(chan struct{})
		l := newBrokenListener(stop)
		l.slots <- struct{}{}
		time.AfterFunc(time.Minute, func() { <-l.slots }) // ends a wrong wait for a slot
		close(stop)
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("got the error %v from Accept, want %v", err, net.ErrClosed)
		}
	})
}

// These numbers stand in the documents. Most other tests take them from the code, or from the
// contract, which is made from the code; TestSlowRequestsEnd and TestTokenTimesAreExact repeat three
// of them. TestRequestLimits has the limits of requests. A number that only one test is about stands
// in that test, such as the lifetime of a code in TestCodesExpire.
func TestNumbersAreAsDocumented(t *testing.T) {
	t.Parallel()
	for _, number := range []struct {
		name      string
		got, want any
	}{
		{"time of a mail", mailTimeout, 10 * time.Second},
		{"time of request headers", headerTimeout, 10 * time.Second},
		{"time of headers and a JSON body", bodyTimeout, 15 * time.Second},
		{"time of an idle connection", idleTimeout, time.Minute},
		{"time of a refused upload", refusedTimeout, 5 * time.Second},
		{"time of a database operation", dbTimeout, 2 * time.Second},
		{"Retry-After of a 503", unavailable(nil).retryAfter, 2 * time.Second},
		{"difference between clocks", clockSkew, time.Minute},
		{"unfinished requests for a code", maxCodeRequests, 1000},
		{"bytes from a mail server", maxMailReply, 64 << 10},
		{"errors in an answer", maxErrors, 20},
		{"characters of a hub's name", maxHubName, 100},
		{"characters of a hub's description", maxHubDescription, 2000},
		{"hubs on a page", maxPageLimit, 100},
		{"hubs before a page", maxPageOffset, 10_000},
	} {
		hubstest.WantEqual(t, number.name, number.got, number.want)
	}
	if mailTimeout >= stopTimeout {
		t.Errorf("got %v for a mail, want less than the stop's %v", mailTimeout, stopTimeout)
	}
}

// removalTopics are the topics that the line Row of a removal may have, instead of a row of
// SECURITY.md.
var removalTopics = strings.Fields(`durability limits order start stop configuration commands
	session mail log files hubs store answers deploy`)

// unproven are the tests that no removal names, because each of them tests something else.
var unproven = map[string]string{
	"TestAllocationsOfARequest":    "the cost",
	"TestClientExamples":           "a document",
	"TestDocumentsNameWhatIsThere": "a document",
	"TestErrorCodesInDocuments":    "a document",
	"TestExampleInBrowser":         "an example",
	"TestFloodMatchesSecurityMD":   "a document",
	"TestGuide":                    "a document",
	"TestLedgerNoticesDamage":      "the harness",
	"TestMain":                     "nothing: it begins the tests",
	"TestOnlyAnAssertionProves":    "the proof",
	"TestPageIsAccessible":         "another program's rules",
	"TestPostgresVersion":          "the harness",
	"TestRemovalsFit":              "the removals",
	"TestRouteTableInReadme":       "a document",
	"TestRowsAndCommentsAgree":     "a document",
	"TestSettingsAreExplained":     "a document",
	"TestSoak":                     "everything, for minutes",
}

// Each removal has a name of its own, belongs to a row of SECURITY.md or to a topic, names tests
// that exist, and fits the current code. tools/prove shows that these tests fail. Each test is
// named by a removal or stands in unproven.
func TestRemovalsFit(t *testing.T) {
	t.Parallel()
	all, err := removals.Read()
	hubstest.Must(t, err)
	source, err := removals.ReadSource()
	hubstest.Must(t, err)
	rows := hubstest.Matches(t, "SECURITY.md", `(?m)^\| ([A-Z][0-9]+) \|`)
	rows = append(rows, removalTopics...)
	seen := map[string]bool{}  // names of removals
	named := map[string]bool{} // functions of tests that removals name

	for _, r := range all {
		if seen[r.Name] {
			t.Errorf("%s: two removals have this name", r.Name)
		}
		seen[r.Name] = true
		if !slices.Contains(rows, r.Row) {
			t.Errorf("%s: got the row %s, want one of SECURITY.md or a topic", r.Name, r.Row)
		}
		if want := r.Row + "-"; !strings.HasPrefix(r.Name, want) {
			t.Errorf("got the name %s, want it to begin with %s", r.Name, want)
		}
		for _, name := range r.Tests {
			function := removals.TestFunction(name)
			if _, exists := source[function]; !exists {
				t.Errorf("%s: there is no test %s", r.Name, name)
			}
			named[function] = true
		}
		wantFit(t, source, r)
	}

	for function := range source {
		test := path.Base(function)
		isTest := strings.HasPrefix(test, "Test")
		hasReason := unproven[test] != ""
		if isTest && !named[function] && !hasReason {
			t.Errorf("%s: no removal names it, and unproven has no reason", function)
		}
		if named[function] && hasReason {
			t.Errorf("%s: a removal names it, so it is not unproven", function)
		}
	}
}

// wantFit checks that a removal can be made, and that the changed files know each name in them.
func wantFit(t *testing.T, source removals.Source, r removals.Removal) {
	t.Helper()
	changed, err := source.Apply(r.Changes)
	if err != nil {
		t.Errorf("%s: %s no longer fits: %v", r.File, r.Name, err)
	}
	for file, text := range changed {
		for _, name := range unknownNames(source, file, text) {
			t.Errorf("%s: %s uses %s, which %s does not know", r.File, r.Name, name, file)
		}
	}
}

// unknownNames returns the names in a Go file that are neither declared in package main, nor imported
// by the file, nor a part of the language. A removal can have such a name after a function was moved
// or renamed.
func unknownNames(source removals.Source, path, text string) (names []string) {
	if !strings.HasSuffix(path, ".go") {
		return nil
	}
	file, err := parser.ParseFile(token.NewFileSet(), path, text, 0)
	if err != nil {
		return []string{err.Error()}
	}
	isImported := map[string]bool{} // each part of a path: jwt is not the last one of its path
	for _, spec := range file.Imports {
		for part := range strings.SplitSeq(strings.Trim(spec.Path.Value, `"`), "/") {
			isImported[part] = true
		}
	}
	for _, name := range file.Unresolved {
		_, isDeclared := source[name.Name]
		if !isDeclared && !isImported[name.Name] && types.Universe.Lookup(name.Name) == nil {
			names = append(names, name.Name)
		}
	}
	return names
}

// N1: The unit allows a thread for each connection, because each may wait for the disk. It allows
// four descriptors for each, because listen uses a quarter of them for connections.
// H3: systemd gives a stop as long as the server takes, and a second more.
func TestUnitLeavesTheServerRoom(t *testing.T) {
	t.Parallel()
	for name, least := range map[string]int{
		"TasksMax":       maxConnections + 100,
		"LimitNOFILE":    4 * maxConnections,
		"TimeoutStopSec": int((arrivalTime+2*stopTimeout)/time.Second) + 2,
	} {
		set := hubstest.Matches(t, "deploy/hubs.service", `(?m)^`+name+`=([0-9]+)$`)
		got, err := strconv.Atoi(strings.Join(set, " "))
		if err != nil || got < least {
			t.Errorf("deploy/hubs.service: got %s=%q, want at least %d", name, set, least)
		}
	}
}

var twoRequirements = regexp.MustCompile(`^module hubs

go \S+

require \(
	github.com/golang-jwt/jwt/v5 v\S+
	github.com/lib/pq v\S+
\)
$`)

// go.mod has two requirements, no indirect requirement, and no replacement for one.
func TestTwoRequirements(t *testing.T) {
	t.Parallel()
	text := hubstest.ReadFile(t, "go.mod")
	if !twoRequirements.MatchString(text) {
		t.Errorf("go.mod: got\n%s\nwant it to match\n%s", text, twoRequirements)
	}
}

var update = flag.Bool("update", false, "write the hashes of web/index.html anew")

// The policy in web/index.html has the hashes of the page's script and style. With a wrong hash, a
// browser ignores the script or the style. With -update, the test writes the hashes.
func TestPageHashes(t *testing.T) {
	page := indexPage
	for _, tag := range []string{"script", "style"} {
		content := hubstest.Matches(t, "web/index.html", "(?s)<"+tag+">(.*)</"+tag+">")
		if len(content) != 1 {
			t.Fatalf("web/index.html: got %d elements %s without attributes, want 1", len(content), tag)
		}
		sum := sha256.Sum256([]byte(content[0]))
		want := tag + "-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
		page = regexp.MustCompile(tag+"-src '[^']*'").ReplaceAllLiteralString(page, want)
		if !strings.Contains(indexPage, want) && !*update {
			t.Errorf("web/index.html: want %s in the policy of its meta element\n"+
				"If the change is intended, run: go test -run TestPageHashes -update .", want)
		}
	}
	if *update {
		hubstest.Must(t, os.WriteFile("web/index.html", []byte(page), 0o644))
	}
}
