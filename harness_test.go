package main

// The harness: what the end-to-end tests stand on. They go through the real thing
// wherever they can: run() as main calls it, a PostgreSQL of their own, an SMTP
// server, TCP. In reading order: this file (database, log, server),
// harness_client_test.go (requests and what every answer must look like),
// harness_faults_test.go (mail server, TCP proxy), harness_process_test.go
// (PostgreSQL and the binary as processes), harness_self_test.go (that all of it
// can fail).

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/lib/pq"
)

// patience bounds each wait for something that must happen: never reached in a
// passing test, so it can be long enough for a loaded machine under -race.
const patience = 30 * time.Second

// waitUntil is for a state that nothing announces, such as a row that appears.
func waitUntil(t testing.TB, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("after %v still not: %s", patience, what)
		}
	}
}

// testDir outlives the single tests: the PostgreSQL they share, the test CA, the
// binary.
var testDir string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	var err error
	testDir, err = os.MkdirTemp("", "hubs-test-")
	must(err)
	defer os.RemoveAll(testDir)
	// PostgreSQL refuses to run as root; the user it runs as instead must get in.
	must(os.Chmod(testDir, 0o755))
	// crypto/x509 reads these once, at the first verification.
	must(os.Mkdir(testDir+"/ca", 0o755))
	must(os.WriteFile(testDir+"/ca/ca.pem", testCA.pem(), 0o644))
	must(os.Setenv("SSL_CERT_FILE", testDir+"/ca/ca.pem"))
	must(os.Setenv("SSL_CERT_DIR", testDir+"/ca"))

	code := m.Run()
	if sharedPostgres != nil {
		if err := sharedPostgres.stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	return code
}

// sharedPostgres is set once startShared has run: TestMain must not start one only to
// stop it.
var sharedPostgres *testPostgres

// startShared starts the PostgreSQL of this test run when the first test asks for it,
// and makes the database that all the others are copies of. HUBS_TEST_POSTGRES names one
// that runs already and is empty: prove_test.go has many test runs, one after the other.
var startShared = sync.OnceValues(func() (*testPostgres, error) {
	pg := &testPostgres{dir: testDir + "/postgres", url: os.Getenv("HUBS_TEST_POSTGRES")}
	if pg.url == "" {
		if err := pg.start(); err != nil {
			return nil, err
		}
		sharedPostgres = pg
	}
	db, err := sql.Open("postgres", pg.url)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	if _, err := db.Exec("create database template_hubs"); err != nil {
		return nil, err
	}
	return pg, applySchema(withDatabase(pg.url, "template_hubs"))
})

// applySchema is the migrate command.
func applySchema(databaseURL string) error {
	code, out, errOut := runCLI(map[string]string{"DATABASE_URL": databaseURL}, "migrate")
	if code != 0 {
		return fmt.Errorf("migrate: exit %d\n%s%s", code, out, errOut)
	}
	return nil
}

// runCLI runs one command of the binary in this process.
func runCLI(env map[string]string, args ...string) (code int, stdout, stderr string) {
	var out, errOut logBuffer
	code = run(context.Background(), args, lookup(env), &out, &errOut)
	return code, out.String(), errOut.String()
}

func lookup(env map[string]string) func(string) string {
	return func(name string) string { return env[name] }
}

// withDatabase is databaseURL with another database.
func withDatabase(databaseURL, name string) string {
	u, err := url.Parse(databaseURL)
	if err != nil {
		panic(err)
	}
	u.Path = "/" + name
	return u.String()
}

// serial makes the names of databases, users and clients differ.
var serial atomic.Int64

// newDatabase returns the URL of a new database with the schema in it, dropped when
// the test ends. Without PostgreSQL the test fails: one that skipped would be green
// where nothing was tested.
func newDatabase(t testing.TB) string {
	t.Helper()
	pg, err := startShared()
	if err != nil {
		t.Fatal("no PostgreSQL: ", err)
	}
	name := fmt.Sprintf("test_%d", serial.Add(1))
	execSQL(t, pg.url, "create database "+name+" template template_hubs")
	t.Cleanup(func() { execSQL(t, pg.url, "drop database if exists "+name+" with (force)") })
	return withDatabase(pg.url, name)
}

// execSQL is the operator at the psql prompt.
func execSQL(t testing.TB, databaseURL, query string, args ...any) {
	t.Helper()
	db := testDB(t, databaseURL)
	defer db.Close()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// queryValue returns the single value of a query that yields one row.
func queryValue[T any](t testing.TB, databaseURL, query string, args ...any) (value T) {
	t.Helper()
	db := testDB(t, databaseURL)
	defer db.Close()
	if err := db.QueryRow(query, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}

// testDB is for tests that keep a connection or a transaction open.
func testDB(t testing.TB, databaseURL string) *sql.DB {
	t.Helper()
	db, err := sql.Open("postgres", databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// newEmail returns an address that no other test has, and that still is the only
// one of its kind when masked: the domain differs.
func newEmail() string {
	return fmt.Sprintf("user@u%d.example.com", serial.Add(1))
}

// testUser inserts a user and returns its id.
func testUser(t testing.TB, databaseURL, email, role string) string {
	t.Helper()
	return queryValue[string](t, databaseURL,
		"insert into users (email, permission) values ($1, $2) returning user_id", email, role)
}

// A logBuffer is what a server writes to, line by line, for tests to wait on.
type logBuffer struct {
	mu      sync.Mutex
	lines   []string
	partial string
	changed chan struct{} // closed and replaced by each new line
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	lines := strings.Split(b.partial+string(p), "\n")
	last := len(lines) - 1
	b.partial = lines[last]
	if last > 0 {
		b.lines = append(b.lines, lines[:last]...)
		if b.changed != nil {
			close(b.changed)
			b.changed = nil
		}
	}
	return len(p), nil
}

// since returns the lines from number n on, and a channel closed when there are more.
func (b *logBuffer) since(n int) ([]string, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	return slices.Clone(b.lines[min(n, len(b.lines)):]), b.changed
}

// all returns every line, an unfinished one included.
func (b *logBuffer) all() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.partial != "" {
		return append(slices.Clone(b.lines), b.partial)
	}
	return slices.Clone(b.lines)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Join(append(slices.Clone(b.lines), b.partial), "\n")
}

// mark is the number of lines so far, for waitAfter.
func (b *logBuffer) mark() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.lines)
}

// count returns how many lines so far contain all the parts.
func (b *logBuffer) count(parts ...string) (n int) {
	for _, line := range b.all() {
		if containsAll(parts)(line) {
			n++
		}
	}
	return n
}

// waitFor returns the first line that contains all the parts, written already or not.
func (b *logBuffer) waitFor(t testing.TB, parts ...string) string {
	t.Helper()
	return b.waitAfter(t, 0, parts...)
}

// waitAfter is waitFor from line number mark on.
func (b *logBuffer) waitAfter(t testing.TB, mark int, parts ...string) string {
	t.Helper()
	line, _, err := b.wait(mark, nil, containsAll(parts))
	if err != nil {
		t.Fatalf("%v that contains %q", err, parts)
	}
	return line
}

func containsAll(parts []string) func(string) bool {
	return func(line string) bool {
		return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) })
	}
}

// wait returns the first line from number n on that matches, and the number of the
// one after it; it gives up early when done is closed.
func (b *logBuffer) wait(n int, done <-chan struct{}, match func(string) bool) (string, int, error) {
	timeout := time.After(patience)
	for ended := false; ; {
		lines, more := b.since(n)
		for _, line := range lines {
			n++
			if match(line) {
				return line, n, nil
			}
		}
		if ended {
			return "", n, fmt.Errorf("it ended, output:\n%s\nwithout a line", b)
		}
		select {
		case <-more:
		case <-done:
			ended = true // one more look: the last lines may have come with the end
		case <-timeout:
			return "", n, fmt.Errorf("after %v, output:\n%s\nno line", patience, b)
		}
	}
}

// A testServer is a server that runs, in this process (startServer) or in one of its
// own (startProcess).
type testServer struct {
	env  map[string]string
	addr string
	// base is how clients address it: the listener itself in local, a name within
	// COOKIE_DOMAIN over https elsewhere (see testClient).
	base    string
	log     *logBuffer // standard output
	stderr  *logBuffer
	done    chan struct{} // closed when run has returned, or the process has ended
	exit    int           // valid once done is closed
	cancel  func()
	mailbox *mailServer // where the codes go; nil: to the log

	mu       sync.Mutex
	allowed  []string       // see allowErrors
	codeLine map[string]int // masked address → first log line that code has not read
}

// serverEnv is a working local configuration, overridden by each of the maps; an
// empty value unsets. Clients come from addresses of their own by X-Forwarded-For,
// so that the rate limits of one do not meet those of the next.
func serverEnv(t testing.TB, overrides ...map[string]string) map[string]string {
	t.Helper()
	env := map[string]string{
		"APP_ENV":         "local",
		"ADDR":            "127.0.0.1:0",
		"SESSION_SECRET":  "test-secret-of-more-than-thirty-two-bytes",
		"TRUSTED_PROXIES": "127.0.0.0/8",
	}
	for _, o := range overrides {
		maps.Copy(env, o)
	}
	if _, ok := env["DATABASE_URL"]; !ok {
		env["DATABASE_URL"] = newDatabase(t)
	}
	if _, ok := env["FILES_DIR"]; !ok {
		env["FILES_DIR"] = t.TempDir()
	}
	return env
}

// stagingEnv and productionEnv are what serverEnv needs besides in those environments.
func stagingEnv(m *mailServer) map[string]string {
	env := m.env()
	env["APP_ENV"], env["COOKIE_DOMAIN"] = "staging", "staging.example.com"
	return env
}

func productionEnv(m *mailServer) map[string]string {
	env := m.env()
	env["APP_ENV"], env["COOKIE_DOMAIN"], env["ALLOWED_ORIGIN_DOMAIN"] = "production", "example.com", "example.com"
	return env
}

// startServer runs the server in this process, with serverEnv, until the test ends.
// It then must stop cleanly, and its log must be clean (logFaults). A second server
// on the same data: startServer(t, first.env).
func startServer(t testing.TB, overrides ...map[string]string) *testServer {
	t.Helper()
	s := newTestServer(serverEnv(t, overrides...))
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go func() {
		defer close(s.done)
		s.exit = run(ctx, []string{"serve"}, lookup(s.env), s.log, s.stderr)
	}()
	t.Cleanup(func() {
		if code := s.stop(t); code != 0 {
			t.Errorf("serve: exit %d\n%s", code, s.stderr)
		}
		s.checkLog(t)
	})
	s.waitListening(t)
	return s
}

func newTestServer(env map[string]string) *testServer {
	return &testServer{
		env: env, log: &logBuffer{}, stderr: &logBuffer{}, done: make(chan struct{}),
		mailbox: mailServerOf(env["SMTP_URL"]), codeLine: map[string]int{},
	}
}

func (s *testServer) waitListening(t testing.TB) {
	t.Helper()
	line, _, err := s.log.wait(0, s.done, containsAll([]string{`"msg":"listening"`}))
	if err != nil {
		t.Fatalf("no server: %v that says listening\n%s", err, s.stderr)
	}
	var listening struct{ Addr string }
	if err := json.Unmarshal([]byte(line), &listening); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	s.addr, s.base = listening.Addr, "http://"+listening.Addr
	if domain := s.env["COOKIE_DOMAIN"]; domain != "" {
		s.base = "https://api." + domain
	}
}

// stop asks the server to stop and returns its exit status; again, to no harm.
func (s *testServer) stop(t testing.TB) int {
	t.Helper()
	s.cancel()
	select {
	case <-s.done:
		return s.exit
	case <-time.After(30 * time.Second):
		t.Errorf("the server has not stopped within 30 s, log:\n%s", s.log)
		return -1
	}
}

// allowErrors makes the test accept logged errors that contain one of the parts.
func (s *testServer) allowErrors(parts ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.allowed = append(s.allowed, parts...)
}

// code returns the next code that was sent to the address, each of them once.
func (s *testServer) code(t testing.TB, email string) (code string) {
	t.Helper()
	if s.mailbox != nil {
		code = s.mailbox.waitMail(t, email).code(t)
	} else {
		prefix := codeLinePrefix + email + ": "
		s.mu.Lock()
		from := s.codeLine[prefix]
		s.mu.Unlock()
		line, next, err := s.log.wait(from, s.done, func(line string) bool {
			return strings.HasPrefix(strings.ToLower(line), strings.ToLower(prefix))
		})
		if err != nil {
			t.Fatalf("%v with a code for %s", err, email)
		}
		s.mu.Lock()
		s.codeLine[prefix] = next
		s.mu.Unlock()
		code = line[len(prefix):]
	}
	if !regexp.MustCompile(`^[0-9]{6}$`).MatchString(code) {
		t.Fatalf("code for %s: %q", email, code)
	}
	return code
}

// codeLinePrefix begins the one line that is no JSON: the code, where there is no
// mail server.
const codeLinePrefix = "Sign-in code for "

func maskedEmail(email string) string {
	return email[:1] + "***" + email[strings.LastIndex(email, "@"):]
}

// checkLog fails the test for what no log may hold.
func (s *testServer) checkLog(t testing.TB) {
	t.Helper()
	s.mu.Lock()
	rules := logRules{allowed: s.allowed, codeLines: s.env["APP_ENV"] == "local" && s.mailbox == nil}
	s.mu.Unlock()
	lines := s.log.all()
	for _, line := range lines {
		if strings.HasPrefix(line, codeLinePrefix) {
			rules.codes = append(rules.codes, line[strings.LastIndex(line, " ")+1:])
		}
	}
	if s.mailbox != nil {
		for _, mail := range s.mailbox.received() {
			rules.codes = append(rules.codes, mail.codes()...)
		}
	}
	rules.secrets = append(strings.Split(s.env["SESSION_SECRET"], ","), "eyJ", "postgres://")
	if u, err := url.Parse(s.env["SMTP_URL"]); err == nil && u.User != nil {
		password, _ := u.User.Password()
		rules.secrets = append(rules.secrets, password)
	}
	usedEmails.Range(func(email, _ any) bool {
		rules.secrets = append(rules.secrets, email.(string))
		return true
	})
	for _, fault := range rules.faults(lines) {
		t.Error(fault)
	}
	if text := s.stderr.String(); text != "" {
		t.Errorf("on standard error, where a running server writes nothing: %s", text)
	}
}

// usedEmails are all the addresses that any client has sent: none may stand in any
// log in full.
var usedEmails sync.Map

type logRules struct {
	allowed   []string // parts of errors that the test expects
	secrets   []string
	codes     []string
	codeLines bool // codes are printed, for want of a mail server
}

// faults returns what is wrong with a server's log: errors that the test has not
// allowed, lines that are no JSON, and whatever must not stand in a log.
func (r logRules) faults(lines []string) (faults []string) {
	var codes *regexp.Regexp
	if len(r.codes) > 0 {
		// A code by itself, not part of a longer number or of a fraction of a second.
		codes = regexp.MustCompile(`(?:^|[^0-9A-Za-z.])(` + strings.Join(r.codes, "|") + `)(?:$|[^0-9A-Za-z])`)
	}
	for _, line := range lines {
		if r.codeLines && (line == "" || strings.HasPrefix(line, codeLinePrefix)) {
			continue // set off by blank lines, with the whole address: there is no mail server
		} else {
			var entry struct{ Level string }
			if err := json.Unmarshal([]byte(line), &entry); err != nil {
				faults = append(faults, "log line that is no JSON: "+line)
			}
			expected := func(part string) bool { return strings.Contains(line, part) }
			if entry.Level == "ERROR" && !slices.ContainsFunc(r.allowed, expected) {
				faults = append(faults, "unexpected error: "+line)
			}
		}
		lower := strings.ToLower(line)
		for _, secret := range r.secrets {
			within := line
			if strings.Contains(secret, "@") {
				within, secret = lower, strings.ToLower(secret) // an address is one in any case
			}
			if secret != "" && strings.Contains(within, secret) {
				faults = append(faults, fmt.Sprintf("%q in the log: %s", secret, line))
			}
		}
		if codes != nil && codes.MatchString(bareNumber.ReplaceAllString(line, `":0`)) {
			faults = append(faults, "a one-time code in the log: "+line)
		}
	}
	return faults
}

// bareNumber is a number as a member's value: a duration may well have a code's six
// digits, while a code is a string wherever the server holds one.
var bareNumber = regexp.MustCompile(`":[0-9]+`)

// newUUID is an id that nothing has.
func testUUID() string {
	b := make([]byte, 16)
	rand.Read(b)
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // version 4, RFC 9562
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// withUser is databaseURL with another role.
func withUser(t testing.TB, databaseURL, name, password string) string {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, password)
	return u.String()
}

// finishCodes waits until no request for a code is under way.
func finishCodes(s *server) {
	for range mailQueue {
		s.codeSlots <- struct{}{}
	}
	for range mailQueue {
		<-s.codeSlots
	}
}
