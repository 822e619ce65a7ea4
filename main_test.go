package main

// Tests of the settings: the values in testdata/settings.json, in each environment, and the table
// in docs/deploy.md. At the end, tests of the project itself: the table of limits, the unit, the
// send buffer, requirements, the page.

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"flag"
	"fmt"
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A settingCase has values of one setting that the server accepts and rejects, each with the
// reason.
type settingCase struct {
	Variable     string
	Environments []string
	Good, Bad    map[string]string // reasons by value; the value "" means that it is unset
}

// validSettings returns valid settings for an environment. No test connects to the hosts in them.
func validSettings(name string) map[string]string {
	env := map[string]string{
		"APP_ENV":        name,
		"DATABASE_URL":   "postgres://u:database-password@127.0.0.1:1/hubs",
		"SESSION_SECRET": "session-secret-of-thirty-two-byte",
		"SMTP_URL":       "smtps://u:mail-password@127.0.0.1:465",
		"MAIL_FROM":      "hubs@example.com",
	}
	if name != envLocal {
		env["COOKIE_DOMAIN"] = "example.com"
	}
	if name == envProduction {
		env["ALLOWED_ORIGIN_DOMAIN"] = "example.com"
	}
	return env
}

// matchesInProduct is hubstest.Matches in all files of the server.
func matchesInProduct(t *testing.T, expression string) (found []string) {
	t.Helper()
	paths, _ := filepath.Glob("*.go") // the pattern is well formed
	for _, path := range paths {
		if !strings.HasSuffix(path, "_test.go") {
			found = append(found, hubstest.Matches(t, path, expression)...)
		}
	}
	return found
}

// settings returns the names of all settings, which are the arguments of setting and list in the
// code.
func settings(t *testing.T) []string {
	t.Helper()
	names := matchesInProduct(t, `settings\.(?:get|list|secret)\("(\w+)"`)
	slices.Sort(names)
	return slices.Compact(names)
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
	document := hubstest.ReadFile(t, "docs/deploy.md")
	for _, value := range matchesInProduct(t, `settings\.get\("\w+", "([^"]+)"`) {
		if !strings.Contains(document, value) {
			t.Errorf("docs/deploy.md: the default %s is missing", value)
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
					if err == nil || !strings.Contains("\n"+err.Error(), "\n"+c.Variable+": ") {
						t.Errorf("%s: got the error %v, want one that complains of %s",
							reason, err, c.Variable)
					}
					wantNoneIn(t, err, "secret-1", "session-secret", "-password")
					if c.Variable == "SESSION_SECRET" && value != "" {
						wantNoneIn(t, err, value)
					}
				})
			}
		}
	}
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

// Whatever the setting, a value with quotes or white space around it is refused, by a sentence that
// says so. docker --env-file keeps quotes, and secrets from files end in a line break.
func TestQuotesAndBlanksAreRefused(t *testing.T) {
	for _, environment := range []string{envLocal, envStaging, envProduction} {
		for _, name := range settings(t) {
			forms := []string{`"_"`, "'_'", " _", "\t_", "_ ", "_\n", "_\r\n"}
			if name != "MAIL_FROM" { // which may begin with a name in quotes
				forms = append(forms, `"_`, "'_")
			}
			if name != "DATABASE_URL" { // which may end in a password in quotes
				forms = append(forms, `_"`, "_'")
			}
			value := cmp.Or(validSettings(environment)[name], "x")
			var accepted []string // or refused in other words
			for _, form := range forms {
				err := loadWith(t, environment, name, strings.Replace(form, "_", value, 1))
				sentence := "\n" + name + ": must not be in quotes, or begin or end with"
				if !strings.Contains(fmt.Sprint("\n", err), sentence) {
					accepted = append(accepted, form)
				}
				wantNoneIn(t, err, "session-secret", "-password")
			}
			if accepted != nil {
				t.Errorf("%s: %s: got no sentence about quotes and spaces for these forms: %q",
					environment, name, accepted)
			}
		}
	}
}

// The session keys in the examples of deploy/ are the placeholder that the server refuses, because an
// operator may forget to replace it.
func TestExampleKeysAreRefused(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"deploy/production.env", "deploy/staging.env"} {
		keys := hubstest.Matches(t, name, `SESSION_SECRET=(\S+)`)
		hubstest.WantEqual(t, name, keys, []string{placeholderKey})
	}
}

// documentedRow matches a row of a table whose third column names a constant or a limiter.
var documentedRow = regexp.MustCompile("(?m)^\\| [^|]+ \\| ([^|]+) \\| `(\\w+)` \\|$")

// The numbers of all limits and lifetimes stand in the code and in one table of docs/runbook.md,
// which this test compares. The limits of requests are those of the server; the others are
// constants.
func TestNumbersAreAsDocumented(t *testing.T) {
	t.Parallel()
	runbook := hubstest.ReadFile(t, "docs/runbook.md")
	_, section, _ := strings.Cut(runbook, "\n## Limits and lifetimes\n")
	section, _, _ = strings.Cut(section, "\n## ")
	rows := documentedRow.FindAllStringSubmatch(section, -1)
	if lines := strings.Count(section, "\n|") - 2; len(rows) != lines || lines < 1 {
		t.Errorf("docs/runbook.md: got %d rows with a constant, want all of %d", len(rows), lines)
	}
	s := newServer(config{}, nil, nil)
	limits := map[string]*limiter{
		"requestLimit":     s.requestLimit,
		"fileLimit":        s.fileLimit,
		"codeRequestLimit": s.codeRequestLimit,
		"guessLimit":       s.guessLimit,
	}
	constants := constantsOfProduct(t)
	for _, row := range rows {
		text, name := row[1], row[2]
		if limit := limits[name]; limit != nil {
			burst, period, _ := strings.Cut(text, " in ")
			hubstest.WantEqual(t, "requests of "+name, int64(limit.burst), parseNumber(t, burst))
			hubstest.WantEqual(t, "period of "+name, int64(limit.period), parseNumber(t, period))
			continue
		}
		value, isThere := constants[name]
		if !isThere {
			t.Errorf("docs/runbook.md: got the constant %s, which the code lacks", name)
			continue
		}
		hubstest.WantEqual(t, "docs/runbook.md: "+name, value, parseNumber(t, text))
	}
}

// documentedUnits are the units of the table, in nanoseconds or bytes.
var documentedUnits = map[string]int64{
	"":      1,
	"ms":    int64(time.Millisecond),
	"s":     int64(time.Second),
	"min":   int64(time.Minute),
	"days":  24 * int64(time.Hour),
	"bytes": 1,
	"KiB":   1 << 10,
	"MiB":   1 << 20,
}

// parseNumber parses a value of the table, such as "10,000", "64 KiB" or "2 s each".
func parseNumber(t *testing.T, text string) int64 {
	t.Helper()
	digits, unit, _ := strings.Cut(strings.TrimSuffix(text, " each"), " ")
	n, err := strconv.ParseInt(strings.ReplaceAll(digits, ",", ""), 10, 64)
	factor := documentedUnits[unit]
	if err != nil || factor == 0 {
		t.Errorf("docs/runbook.md: got the value %q, want a number and one of the units", text)
	}
	return n * factor
}

// constantDeclaration matches constants of a package, or one that is a number.
const constantDeclaration = `(?ms)^(const (?:\(.*?^\)|\w+ = [0-9][^\n]*))`

// constantsOfProduct returns the whole numbers among the constants of this package, by name. It
// looks at the constants alone, because to import all that the rest needs would take seconds.
func constantsOfProduct(t *testing.T) map[string]int64 {
	t.Helper()
	source := []string{"package hubs", `import "time"`}
	paths, _ := filepath.Glob("*.go") // the pattern is well formed
	for _, path := range paths {
		if !strings.HasSuffix(path, "_test.go") {
			source = append(source, hubstest.Matches(t, path, constantDeclaration)...)
		}
	}
	positions := token.NewFileSet()
	file, err := parser.ParseFile(positions, "", strings.Join(source, "\n"), 0)
	hubstest.Must(t, err)
	checker := types.Config{
		Importer: importer.ForCompiler(positions, "source", nil),
		Error:    func(error) {}, // no number needs the types that are missing
	}
	checked, _ := checker.Check("hubs", positions, []*ast.File{file}, nil)
	values := map[string]int64{}
	for _, name := range checked.Scope().Names() {
		if c, ok := checked.Scope().Lookup(name).(*types.Const); ok {
			if n, isWhole := constant.Int64Val(constant.ToInt(c.Val())); isWhole {
				values[name] = n
			}
		}
	}
	return values
}

// H3: systemd gives a stop as long as the server takes, and a second more. A mail that is under way
// when the server stops has time to end.
func TestUnitLeavesTheServerRoom(t *testing.T) {
	t.Parallel()
	least := int((arrivalTime+2*stopTimeout)/time.Second) + 2
	set := hubstest.Matches(t, "deploy/hubs.service", `(?m)^TimeoutStopSec=([0-9]+)$`)
	got, err := strconv.Atoi(strings.Join(set, " "))
	if err != nil || got < least {
		t.Errorf("deploy/hubs.service: got TimeoutStopSec=%q, want at least %d", set, least)
	}
	if mailTimeout >= stopTimeout {
		t.Errorf("got %v for a mail, want less than the stop's %v", mailTimeout, stopTimeout)
	}
}

// H8: The kernel keeps little for a client that reads nothing. Linux doubles the size that is set.
func TestSendBufferIsBounded(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	hubstest.Must(t, err)
	defer listener.Close()
	conn, err := net.Dial("tcp", listener.Addr().String())
	hubstest.Must(t, err)
	defer conn.Close()
	s := newServer(config{}, nil, nil).newHTTPServer()
	s.ConnContext(t.Context(), conn)
	raw, err := conn.(*net.TCPConn).SyscallConn()
	hubstest.Must(t, err)
	size := 0
	raw.Control(func(fd uintptr) {
		size, err = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF)
	})
	if err != nil || size < sendBuffer || size > 2*sendBuffer {
		t.Errorf("got a send buffer of %d bytes, error %v, want at most %d", size, err, 2*sendBuffer)
	}
}

var twoRequirements = regexp.MustCompile(`^module \S+

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
