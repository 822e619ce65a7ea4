package hubstest

import (
	"bufio"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	_ "github.com/lib/pq" // the driver of the tests' own connections
)

// shared is the PostgreSQL of a package's tests. Its first test starts it, and makes the
// database that all others are copies of. HUBS_TEST_POSTGRES names one that runs already.
var shared struct {
	once    sync.Once
	started *testPostgres // nil if it is not ours
	url     string
	err     error
}

// template is the database with the schema that each test's database is a copy of. Several
// packages may share one PostgreSQL.
var template = fmt.Sprintf("template_%d", os.Getpid())

func sharedPostgres(t testing.TB) (databaseURL string) {
	t.Helper()
	shared.once.Do(func() { shared.err = startShared() })
	if errors.Is(shared.err, errNoPostgres) {
		Skip(t, "PostgreSQL is missing: ./dev.sh test installs it")
	}
	if shared.err != nil {
		t.Fatal("no PostgreSQL: ", shared.err)
	}
	return shared.url
}

func startShared() error {
	shared.url = os.Getenv("HUBS_TEST_POSTGRES")
	if shared.url == "" {
		pg := &testPostgres{Dir: filepath.Join(Dir, "postgres")}
		if err := pg.Start(); err != nil {
			return err
		}
		shared.started = pg
		shared.url = pg.URL
	}
	db, err := sql.Open("postgres", shared.url)
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.Exec("create database " + template); err != nil {
		return err
	}
	return Migrate(WithDatabase(shared.url, template))
}

func stopShared() error {
	if shared.started != nil {
		return shared.started.Stop()
	}
	if shared.url == "" {
		return nil
	}
	db, err := sql.Open("postgres", shared.url)
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = db.Exec("drop database if exists " + template)
	return err
}

// Migrate runs the command migrate.
func Migrate(databaseURL string) error {
	code, out, errOut := Run(map[string]string{"DATABASE_URL": databaseURL}, "migrate")
	if code != 0 {
		return fmt.Errorf("migrate: exit status %d\n%s%s", code, out, errOut)
	}
	return nil
}

// WithDatabase returns databaseURL with another database.
func WithDatabase(databaseURL, name string) string {
	u, err := url.Parse(databaseURL)
	if err != nil {
		panic(err)
	}
	u.Path = "/" + name
	return u.String()
}

// serial makes the names of databases, users and clients differ.
var serial atomic.Int64

// NewDatabase returns the URL of a new database with the schema in it. It is dropped when
// the test ends.
func NewDatabase(t testing.TB) string {
	t.Helper()
	return EmptyDatabase(t, "template "+template)
}

// EmptyDatabase returns the URL of a new database without tables. options follow the name in
// create database.
func EmptyDatabase(t testing.TB, options string) string {
	t.Helper()
	operator := sharedPostgres(t)
	name := fmt.Sprintf("test_%d_%d", os.Getpid(), serial.Add(1))
	Exec(t, operator, "create database "+name+" "+options)
	t.Cleanup(func() { Exec(t, operator, "drop database if exists "+name+" with (force)") })
	return WithDatabase(operator, name)
}

// Exec is the operator at the psql prompt.
func Exec(t testing.TB, databaseURL, query string, args ...any) {
	t.Helper()
	db := OpenDB(t, databaseURL)
	defer db.Close()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// Query returns the single value of a query that yields one row.
func Query[T any](t testing.TB, databaseURL, query string, args ...any) (value T) {
	t.Helper()
	db := OpenDB(t, databaseURL)
	defer db.Close()
	if err := db.QueryRow(query, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}

// OpenDB is for tests that keep a connection or a transaction open.
func OpenDB(t testing.TB, databaseURL string) *sql.DB {
	t.Helper()
	db, err := sql.Open("postgres", databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// NewEmail returns an address that no other test has, and that still is the only
// one of its kind when masked: the domain differs.
func NewEmail() string {
	return fmt.Sprintf("user@u%d.example.com", serial.Add(1))
}

// AddUser inserts a user and returns its id.
func AddUser(t testing.TB, databaseURL, email, role string) string {
	t.Helper()
	return Query[string](t, databaseURL,
		"insert into users (email, permission) values ($1, $2) returning user_id", email, role)
}

// NewUUID returns an id that nothing has.
func NewUUID() string {
	b := make([]byte, 16)
	rand.Read(b)
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // version 4, RFC 9562
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// WithUser returns databaseURL with another role.
func WithUser(t testing.TB, databaseURL, name, password string) string {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, password)
	return u.String()
}

// A testPostgres is a private PostgreSQL that ./dev.sh starts. It ends when the standard input
// of ./dev.sh is closed, so also when the tests are killed.
type testPostgres struct {
	Dir, URL string
	stdin    io.Closer
	stderr   *Log // shown only when something fails
	done     chan error
}

// noPostgres is the exit status of ./dev.sh postgres if PostgreSQL is not installed.
const noPostgres = 69

var errNoPostgres = errors.New("PostgreSQL is not installed")

func (pg *testPostgres) Start() error {
	cmd := exec.Command(filepath.Join(Root(), "dev.sh"), "postgres", pg.Dir)
	pg.stderr = &Log{}
	pg.done = make(chan error, 1)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	pg.stdin = stdin
	// A pipe of our own: exec.Cmd closes its pipes in Wait.
	out, outWriter, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = outWriter, pg.stderr
	cmd.WaitDelay = Patience // a grandchild that keeps the pipe open must not hang the tests
	err = cmd.Start()
	outWriter.Close()
	if err != nil {
		out.Close()
		return err
	}
	first := make(chan string, 1)
	go func() {
		defer out.Close()
		line, _ := bufio.NewReader(out).ReadString('\n')
		first <- strings.TrimSpace(line)
		pg.done <- cmd.Wait()
	}()
	select {
	case pg.URL = <-first:
	case <-time.After(4 * Patience):
	}
	if !strings.HasPrefix(pg.URL, "postgres://") {
		return errors.Join(fmt.Errorf("./dev.sh postgres printed %q\n%s", pg.URL, pg.stderr), pg.Stop())
	}
	return nil
}

func (pg *testPostgres) Stop() error {
	pg.stdin.Close()
	select {
	case err := <-pg.done:
		pg.done <- err // for the next Stop
		if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == noPostgres {
			return errNoPostgres
		}
		if err != nil {
			return fmt.Errorf("./dev.sh postgres: %w\n%s", err, pg.stderr)
		}
		return nil
	case <-time.After(2 * Patience):
		return fmt.Errorf("./dev.sh postgres has not ended\n%s", pg.stderr)
	}
}

// NewPostgres starts a PostgreSQL for one test, which may stop, restart (same port, same data)
// and pause it. Its url names a database that has the schema.
func NewPostgres(t testing.TB) *Postgres {
	t.Helper()
	sharedPostgres(t) // skips the test if there is no PostgreSQL
	dir, err := os.MkdirTemp(Dir, "postgres-")
	if err != nil {
		t.Fatal(err)
	}
	// PostgreSQL runs as another user, who must get in; see prepareDir.
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	pg := ExistingPostgres(t, filepath.Join(dir, "postgres"))
	if err := Migrate(pg.URL); err != nil {
		t.Fatal(err)
	}
	return pg
}

// ExistingPostgres starts a PostgreSQL for one test from a folder that may have a cluster.
func ExistingPostgres(t testing.TB, dir string) *Postgres {
	t.Helper()
	pg := &Postgres{t: t, testPostgres: &testPostgres{Dir: dir}}
	pg.Start()
	t.Cleanup(func() {
		pg.Resume()
		pg.Stop()
	})
	return pg
}

// A Postgres is the PostgreSQL of one test.
type Postgres struct {
	t testing.TB
	*testPostgres
	paused []int
}

func (pg *Postgres) Start() {
	pg.t.Helper()
	if err := pg.testPostgres.Start(); err != nil {
		pg.t.Fatal(err)
	}
}

// Stop ends PostgreSQL in good order. Open connections don't delay it.
func (pg *Postgres) Stop() {
	pg.t.Helper()
	if err := pg.testPostgres.Stop(); err != nil {
		pg.t.Error(err)
	}
}

// Pause stops all its processes (SIGSTOP). Connections stay open, the kernel accepts new ones,
// and nothing answers.
func (pg *Postgres) Pause() {
	pg.t.Helper()
	postmaster := pg.Postmaster()
	pg.Signal(postmaster, syscall.SIGSTOP) // first, so that it starts no others
	pg.paused = []int{postmaster}
	for _, child := range pg.Children(postmaster) {
		pg.Signal(child, syscall.SIGSTOP)
		pg.paused = append(pg.paused, child)
	}
}

// Postmaster returns the process id of PostgreSQL's first process.
func (pg *Postgres) Postmaster() int {
	pg.t.Helper()
	pid, err := os.ReadFile(pg.Dir + "/data/postmaster.pid")
	if err != nil {
		pg.t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(pid), "\n")
	postmaster, err := strconv.Atoi(line)
	if err != nil {
		pg.t.Fatal(err)
	}
	return postmaster
}

// Children returns the process ids of the others.
func (pg *Postgres) Children(postmaster int) (pids []int) {
	pg.t.Helper()
	list, err := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
	if err != nil {
		pg.t.Fatal("ps: ", err)
	}
	for line := range strings.Lines(string(list)) {
		var child, parent int
		if n, _ := fmt.Sscan(line, &child, &parent); n == 2 && parent == postmaster {
			pids = append(pids, child)
		}
	}
	return pids
}

// Crash ends it by a signal to its first process, SIGKILL or SIGQUIT, without a chance to
// finish its work. The others notice, and some still tell their clients so. The next
// start recovers the data.
func (pg *Postgres) Crash(sig syscall.Signal) {
	pg.t.Helper()
	postmaster := pg.Postmaster()
	pids := append(pg.Children(postmaster), postmaster)
	pg.Signal(postmaster, sig)
	pg.waitEnd(pids)
}

// Lose ends all its processes at once, as the loss of its machine would: no client
// hears a word.
func (pg *Postgres) Lose() {
	pg.t.Helper()
	pg.Pause()
	pids := pg.paused
	pg.paused = nil
	for _, pid := range pids {
		pg.Signal(pid, syscall.SIGKILL)
	}
	pg.waitEnd(pids)
}

func (pg *Postgres) waitEnd(pids []int) {
	pg.t.Helper()
	WaitUntil(pg.t, "the end of PostgreSQL", func() bool {
		// Ended children may stay as zombies for a moment; they hold nothing.
		return !slices.ContainsFunc(pids, IsRunning)
	})
	pg.Stop() // ends the dev.sh that kept it
}

// IsRunning tells whether there is such a process, zombies excepted.
func IsRunning(pid int) bool {
	state, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return err == nil && !strings.HasPrefix(string(state), "Z")
}

// Resume undoes Pause.
func (pg *Postgres) Resume() {
	for _, pid := range pg.paused {
		pg.Signal(pid, syscall.SIGCONT)
	}
	pg.paused = nil
}

func (pg *Postgres) Signal(pid int, sig syscall.Signal) {
	// A backend may have ended since it was listed.
	if err := syscall.Kill(pid, sig); err != nil && err != syscall.ESRCH {
		pg.t.Error(err)
	}
}
