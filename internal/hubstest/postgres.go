package hubstest

import (
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
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

	_ "github.com/lib/pq" // the driver of the tests' own connections
)

// shared is the PostgreSQL of a package's tests; nil if it is not ours, or not started yet.
var shared *Postgres

// template is the database with the schema that each test's database is a copy of. Several
// packages may share one PostgreSQL.
var template = fmt.Sprintf("template_%d", os.Getpid())

// sharedURL starts the shared PostgreSQL, unless HUBS_TEST_POSTGRES names one that runs already,
// and makes the template.
var sharedURL = sync.OnceValues(func() (databaseURL string, err error) {
	databaseURL = os.Getenv("HUBS_TEST_POSTGRES")
	if databaseURL == "" {
		shared = &Postgres{Dir: filepath.Join(Dir, "postgres")}
		if err := shared.start(); err != nil {
			return "", err
		}
		databaseURL = shared.URL
	}
	if err := execute(databaseURL, "create database "+template); err != nil {
		return "", err
	}
	return databaseURL, Migrate(WithDatabase(databaseURL, template))
})

func needShared(t testing.TB) (databaseURL string) {
	databaseURL, err := sharedURL()
	if errors.Is(err, errNoPostgres) {
		Skip(t, "PostgreSQL is missing: ./dev.sh test installs it")
	}
	if err != nil {
		t.Fatal("no PostgreSQL: ", err)
	}
	return databaseURL
}

func stopShared() error {
	if shared != nil {
		return shared.stop()
	}
	databaseURL := os.Getenv("HUBS_TEST_POSTGRES")
	if databaseURL == "" {
		return nil
	}
	return execute(databaseURL, "drop database if exists "+template)
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
	return EmptyDatabase(t, "template "+template)
}

// EmptyDatabase returns the URL of a new database without tables. options follow the name in
// create database.
func EmptyDatabase(t testing.TB, options string) string {
	operator := needShared(t)
	name := fmt.Sprintf("test_%d_%d", os.Getpid(), serial.Add(1))
	Exec(t, operator, "create database "+name+" "+options)
	t.Cleanup(func() { Exec(t, operator, "drop database if exists "+name+" with (force)") })
	return WithDatabase(operator, name)
}

// Exec is the operator at the psql prompt.
func Exec(t testing.TB, databaseURL, query string, args ...any) {
	if err := execute(databaseURL, query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func execute(databaseURL, query string, args ...any) error {
	db, err := sql.Open("postgres", databaseURL)
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = db.Exec(query, args...)
	return err
}

// Query returns the single value of a query that yields one row.
func Query[T any](t testing.TB, databaseURL, query string, args ...any) (value T) {
	db := OpenDB(t, databaseURL)
	defer db.Close()
	if err := db.QueryRow(query, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}

// OpenDB is for tests that keep a connection or a transaction open.
func OpenDB(t testing.TB, databaseURL string) *sql.DB {
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
	return Query[string](t, databaseURL,
		"insert into users (email, permission) values ($1, $2) returning user_id", email, role)
}

// NewUUID returns an id that nothing has, of version 4 (RFC 9562).
func NewUUID() string {
	return fmt.Sprintf("%08x-0000-4000-a000-%012x", rand.Uint32(), serial.Add(1))
}

// WithUser returns databaseURL with another role.
func WithUser(t testing.TB, databaseURL, name, password string) string {
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, password)
	return u.String()
}

// NewRole makes a role of PostgreSQL's without any right, and returns its name and databaseURL
// with it.
func NewRole(t testing.TB, databaseURL string) (role, roleURL string) {
	const password = "secret-1"
	role = "role_" + strings.ReplaceAll(NewUUID(), "-", "")
	Exec(t, databaseURL, "create role "+role+" login password '"+password+"'")
	t.Cleanup(func() {
		Exec(t, databaseURL, "drop owned by "+role+"; drop role "+role)
	})
	return role, WithUser(t, databaseURL, role, password)
}

// A Postgres is a private PostgreSQL that ./dev.sh starts.
type Postgres struct {
	t        testing.TB // nil: it is shared
	Dir, URL string
	program  *Program
	paused   []int
}

// noPostgres is the exit status of ./dev.sh postgres if PostgreSQL is not installed.
const noPostgres = 69

var errNoPostgres = errors.New("PostgreSQL is not installed")

func (pg *Postgres) start() (err error) {
	pg.program, err = startProgram(exec.Command(Root()+"/dev.sh", "postgres", pg.Dir))
	if err != nil {
		return err
	}
	pg.URL, err = pg.program.waitMatch("^(postgres://.*)")
	if err != nil {
		return errors.Join(err, pg.stop())
	}
	return nil
}

func (pg *Postgres) stop() error {
	switch status := pg.program.end(); status {
	case 0:
		return nil
	case noPostgres:
		return errNoPostgres
	default:
		return fmt.Errorf("./dev.sh postgres: exit status %d\n%s", status, pg.program)
	}
}

// NewPostgres starts a PostgreSQL for one test, which may stop, restart (same port, same data)
// and pause it. Its URL names a database that has the schema.
func NewPostgres(t testing.TB) *Postgres {
	needShared(t) // skips the test if there is no PostgreSQL
	pg := ExistingPostgres(t, fmt.Sprintf("%s/postgres-%d", Dir, serial.Add(1)))
	if err := Migrate(pg.URL); err != nil {
		t.Fatal(err)
	}
	return pg
}

// ExistingPostgres starts a PostgreSQL for one test from a folder that may have a cluster.
func ExistingPostgres(t testing.TB, dir string) *Postgres {
	pg := &Postgres{t: t, Dir: dir}
	pg.Start()
	t.Cleanup(func() {
		pg.Resume()
		pg.Stop()
	})
	return pg
}

// Start starts it, again on the same port with the same data.
func (pg *Postgres) Start() {
	if err := pg.start(); err != nil {
		pg.t.Fatal(err)
	}
}

// Stop ends PostgreSQL in good order. Open connections don't delay it.
func (pg *Postgres) Stop() {
	if err := pg.stop(); err != nil {
		pg.t.Error(err)
	}
}

// Pause stops all its processes (SIGSTOP). Connections stay open, the kernel accepts new ones,
// and nothing answers.
func (pg *Postgres) Pause() {
	postmaster := pg.Postmaster()
	pg.signal(syscall.SIGSTOP, postmaster) // first, so that it starts no others
	pg.paused = append(pg.Children(postmaster), postmaster)
	pg.signal(syscall.SIGSTOP, pg.paused...)
}

// Resume undoes Pause.
func (pg *Postgres) Resume() {
	pg.signal(syscall.SIGCONT, pg.paused...)
	pg.paused = nil
}

// Crash ends it by a signal to its first process, SIGKILL or SIGQUIT, without a chance to
// finish its work. The others notice, and some still tell their clients so. The next
// start recovers the data.
func (pg *Postgres) Crash(sig syscall.Signal) {
	postmaster := pg.Postmaster()
	pids := append(pg.Children(postmaster), postmaster)
	pg.signal(sig, postmaster)
	pg.waitEnd(pids)
}

// Lose ends all its processes at once, as the loss of its machine would: no client
// hears a word.
func (pg *Postgres) Lose() {
	pg.Pause()
	pids := pg.paused
	pg.paused = nil
	pg.signal(syscall.SIGKILL, pids...)
	pg.waitEnd(pids)
}

func (pg *Postgres) waitEnd(pids []int) {
	WaitUntil(pg.t, "the end of PostgreSQL", func() bool {
		return !slices.ContainsFunc(pids, isRunning)
	})
	pg.Stop() // ends the dev.sh that kept it
}

// isRunning tells whether there is such a process. Zombies hold nothing, and may stay.
func isRunning(pid int) bool {
	state, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return err == nil && !strings.HasPrefix(string(state), "Z")
}

// signal sends a signal to processes, some of which may have ended since they were listed.
func (pg *Postgres) signal(sig syscall.Signal, pids ...int) {
	for _, pid := range pids {
		if err := syscall.Kill(pid, sig); err != nil && err != syscall.ESRCH {
			pg.t.Error(err)
		}
	}
}

// Postmaster returns the process id of PostgreSQL's first process.
func (pg *Postgres) Postmaster() (pid int) {
	text, err := os.ReadFile(pg.Dir + "/data/postmaster.pid")
	if err == nil {
		_, err = fmt.Sscan(string(text), &pid)
	}
	if err != nil {
		pg.t.Fatal(err)
	}
	return pid
}

// Children returns the process ids of the others.
func (pg *Postgres) Children(postmaster int) (pids []int) {
	list, err := exec.Command("pgrep", "-P", strconv.Itoa(postmaster)).Output()
	if err != nil {
		pg.t.Fatal("pgrep: ", err)
	}
	for text := range strings.FieldsSeq(string(list)) {
		pid, err := strconv.Atoi(text)
		if err != nil {
			pg.t.Fatal("pgrep: ", err)
		}
		pids = append(pids, pid)
	}
	return pids
}
