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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	_ "github.com/lib/pq" // the driver of the tests' own connections
)

// shared is the PostgreSQL that this package's tests have started. It is nil before the start, and
// if HUBS_TEST_POSTGRES names another PostgreSQL.
var shared *Postgres

// template is the name of a database with the schema. The database of each test is a copy of it.
// Several packages may use one PostgreSQL at the same time, so the name has the process id.
var template = fmt.Sprintf("template_%d", os.Getpid())

// sharedURL starts the shared PostgreSQL, unless HUBS_TEST_POSTGRES is the URL of one that already
// runs. It creates the template, as an operator sets up a database, and returns the URL. Further
// calls only return the URL.
var sharedURL = sync.OnceValues(func() (databaseURL string, err error) {
	databaseURL = os.Getenv("HUBS_TEST_POSTGRES")
	if databaseURL == "" {
		shared = &Postgres{Dir: filepath.Join(Dir, "postgres")}
		if err := shared.start(); err != nil {
			return "", err
		}
		databaseURL = shared.URL
	}
	if err := operate(databaseURL, "create database "+template); err != nil {
		return "", err
	}
	return databaseURL, SetUp(WithDatabase(databaseURL, template))
})

// needShared returns the URL of the shared PostgreSQL. It skips the test if PostgreSQL is not
// installed.
func needShared(t testing.TB) (databaseURL string) {
	t.Helper()
	databaseURL, err := sharedURL()
	if errors.Is(err, errNoPostgres) {
		Skip(t, "PostgreSQL is not installed: ./dev.sh test installs it")
	}
	if err != nil {
		t.Fatal("setup: can't prepare the PostgreSQL of the tests: ", err)
	}
	return databaseURL
}

// stopShared stops the shared PostgreSQL. If HUBS_TEST_POSTGRES names one, it only drops the
// template there.
func stopShared() error {
	if shared != nil {
		return shared.stop()
	}
	databaseURL := os.Getenv("HUBS_TEST_POSTGRES")
	if databaseURL == "" {
		return nil
	}
	return operate(databaseURL, "drop database if exists "+template)
}

// SetUp prepares a database as docs/deploy.md says: the command migrate, then deploy/roles.sql.
func SetUp(databaseURL string) error {
	if err := Migrate(databaseURL); err != nil {
		return err
	}
	roles, err := os.ReadFile(filepath.Join(Root(), "deploy", "roles.sql"))
	if err != nil {
		return err
	}
	// roles.sql changes rights of all databases and roles of the cluster.
	return withLock(databaseURL, "pg_advisory_lock", func() error {
		return execute(databaseURL, string(roles)+
			"alter role "+serverRole+" password '"+serverPassword+"'")
	})
}

// Migrate runs the server's command migrate on a database.
func Migrate(databaseURL string) error {
	code, out, errOut := RunBoth(map[string]string{"DATABASE_URL": databaseURL}, "migrate")
	if code != 0 {
		return fmt.Errorf("migrate: exit status %d\n%s%s", code, out, errOut)
	}
	return nil
}

// The role of deploy/roles.sql, with which servers connect, and its password in the tests.
const (
	serverRole     = "hubs_server"
	serverPassword = "password-of-the-server-role"
)

// operator is the role that owns the tests' databases. A test's own statements, migrate and the
// user commands connect as this role.
const operator = "postgres"

// AsServer returns databaseURL with the role of deploy/roles.sql in place of the operator. A test
// that gives a server another role, or no valid URL, keeps what it gives.
func AsServer(databaseURL string) string {
	u, err := url.Parse(databaseURL)
	if err != nil || u.User.Username() != operator {
		return databaseURL
	}
	u.User = url.UserPassword(serverRole, serverPassword)
	return u.String()
}

// withLock calls do while it holds an advisory lock of the whole cluster. lock is the function that
// takes the lock. Packages that share a PostgreSQL would otherwise disturb each other: roles.sql
// fails if a database or a role disappears while it runs.
func withLock(databaseURL, lock string, do func() error) error {
	db, err := sql.Open("postgres", WithDatabase(databaseURL, "postgres"))
	if err != nil {
		return err
	}
	defer db.Close() // gives the lock back
	if _, err := db.Exec("select " + lock + "(1)"); err != nil {
		return err
	}
	return do()
}

// operate executes statements that make or drop a database or a role.
func operate(databaseURL string, statements ...string) error {
	return withLock(databaseURL, "pg_advisory_lock_shared", func() error {
		for _, statement := range statements {
			if err := execute(databaseURL, statement); err != nil {
				return err
			}
		}
		return nil
	})
}

// WithDatabase returns databaseURL with the name of another database.
func WithDatabase(databaseURL, name string) string {
	u, err := url.Parse(databaseURL)
	if err != nil {
		panic(err)
	}
	u.Path = "/" + name
	return u.String()
}

// serial counts databases, users, clients and more, so that each gets a name of its own.
var serial atomic.Int64

// NewPath returns a path in Dir that is not in use. PostgreSQL and PgBouncer may run as another user, who
// can't enter t.TempDir.
func NewPath(name string) string { return fmt.Sprintf("%s/%s-%d", Dir, name, serial.Add(1)) }

// NewDatabase creates a database that has the schema and the server's role, and returns its URL. The
// database is dropped when the test ends.
func NewDatabase(t testing.TB) string {
	t.Helper()
	return EmptyDatabase(t, "template "+template)
}

// EmptyDatabase creates a database without tables, and returns its URL. options follow the name in
// the statement create database. The database is dropped when the test ends.
func EmptyDatabase(t testing.TB, options string) string {
	t.Helper()
	cluster := needShared(t)
	name := fmt.Sprintf("test_%d_%d", os.Getpid(), serial.Add(1))
	// The rights on a database itself are not copied from its template.
	Must(t, operate(cluster,
		"create database "+name+" "+options,
		"revoke all on database "+name+" from public; grant connect on database "+name+" to "+serverRole+
			"; "+drawSettings(t, name)))
	t.Cleanup(func() {
		Must(t, operate(cluster, "drop database if exists "+name+" with (force)"))
	})
	return WithDatabase(cluster, name)
}

// Exec executes a statement as the role in databaseURL. Without args, query may be several
// statements.
func Exec(t testing.TB, databaseURL, query string, args ...any) {
	t.Helper()
	if err := execute(databaseURL, query, args...); err != nil {
		t.Fatalf("setup: %s: %v", query, err)
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

// Query returns the value of a query that yields one row with one column.
func Query[T any](t testing.TB, databaseURL, query string, args ...any) (value T) {
	t.Helper()
	db := OpenDB(t, databaseURL)
	defer db.Close()
	if err := db.QueryRow(query, args...).Scan(&value); err != nil {
		t.Fatalf("setup: %s: %v", query, err)
	}
	return value
}

// OpenDB opens a database until the test ends, for tests that keep a connection or a transaction
// open.
func OpenDB(t testing.TB, databaseURL string) *sql.DB {
	t.Helper()
	db, err := sql.Open("postgres", databaseURL)
	Must(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

// NewEmail returns an address that no other test of the package uses. The log masks all but the
// first letter and the domain, so each address has a domain of its own.
func NewEmail() string {
	return fmt.Sprintf("%s%d.example.com", emailPrefix, serial.Add(1))
}

// emailPrefix begins each address of NewEmail. No log may contain it.
const emailPrefix = "user@u"

// NewUUID returns a UUID of version 4 (RFC 9562) that is not in use.
func NewUUID() string {
	return fmt.Sprintf("%08x-0000-4000-a000-%012x", rand.Uint32(), serial.Add(1))
}

// WithUser returns databaseURL with the name and the password of another role.
func WithUser(t testing.TB, databaseURL, name, password string) string {
	t.Helper()
	u, err := url.Parse(databaseURL)
	Must(t, err)
	u.User = url.UserPassword(name, password)
	return u.String()
}

// rolePassword is the password of the roles that NewRole makes. No command may print it.
const rolePassword = "secret-1"

// NewRole creates a role of PostgreSQL that may connect and name tables, and no more. It returns the role's name, and
// databaseURL with the role in it. The role is dropped when the test ends.
func NewRole(t testing.TB, databaseURL string) (role, roleURL string) {
	t.Helper()
	u, err := url.Parse(databaseURL)
	Must(t, err)
	role = "role_" + strings.ReplaceAll(NewUUID(), "-", "")
	Must(t, operate(databaseURL,
		"create role "+role+" login password '"+rolePassword+"'",
		"grant connect on database "+strings.TrimPrefix(u.Path, "/")+" to "+role,
		"grant usage on schema public to "+role))
	t.Cleanup(func() {
		// This changes rights of the whole cluster, as roles.sql does.
		Must(t, withLock(databaseURL, "pg_advisory_lock", func() error {
			return execute(databaseURL, "drop owned by "+role+"; drop role "+role)
		}))
	})
	return role, WithUser(t, databaseURL, role, rolePassword)
}

// A Postgres is a private PostgreSQL that ./dev.sh starts.
type Postgres struct {
	t        testing.TB // nil for the shared PostgreSQL
	Dir, URL string     // Dir is the folder that ./dev.sh postgres gets
	env      []string   // further variables for ./dev.sh, and so for PostgreSQL
	program  *Program   // ./dev.sh
}

// noPostgres is the exit status of ./dev.sh postgres if PostgreSQL is not installed.
const noPostgres = 69

var errNoPostgres = errors.New("PostgreSQL is not installed")

// start runs ./dev.sh until it has started PostgreSQL and printed its URL.
func (pg *Postgres) start() (err error) {
	cmd := exec.Command(Root()+"/dev.sh", "postgres", pg.Dir)
	cmd.Env = append(os.Environ(), pg.env...)
	pg.program, err = startProgram(cmd)
	if err != nil {
		return err
	}
	pg.URL, err = pg.program.waitMatch("^(postgres://.*)")
	if err != nil {
		return errors.Join(err, pg.stop())
	}
	return nil
}

// stop ends ./dev.sh, which stops PostgreSQL. It returns errNoPostgres if PostgreSQL is not
// installed.
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

// NewPostgres starts a PostgreSQL for one test, which may stop and restart it. The database in its
// URL has the schema and the server's role.
func NewPostgres(t testing.TB) *Postgres {
	t.Helper()
	pg := StartPostgres(t, NewPath("postgres"))
	Must(t, SetUp(pg.URL))
	return pg
}

// StartPostgres starts a PostgreSQL for one test. It uses the cluster in the folder dir, or creates
// one if dir has none, with no tables and no role besides the operator. env has further variables of
// its environment. PostgreSQL stops when the test ends.
func StartPostgres(t testing.TB, dir string, env ...string) *Postgres {
	t.Helper()
	needShared(t) // skips the test if PostgreSQL is not installed
	pg := &Postgres{t: t, Dir: dir, env: env}
	pg.Start()
	t.Cleanup(pg.Stop)
	return pg
}

// Start starts PostgreSQL. After a stop, it starts with the same data, and on the same port unless
// that is in use.
func (pg *Postgres) Start() {
	Must(pg.t, pg.start())
}

// Stop shuts PostgreSQL down cleanly. It closes open connections and does not wait for clients.
func (pg *Postgres) Stop() {
	pg.t.Helper()
	if err := pg.stop(); err != nil {
		pg.t.Error(err)
	}
}

// Processes returns the process ids of PostgreSQL, first that of the parent of all others.
func (pg *Postgres) Processes() (pids []int) {
	pg.t.Helper()
	file, err := os.ReadFile(pg.Dir + "/data/postmaster.pid")
	Must(pg.t, err)
	parent, _, _ := strings.Cut(string(file), "\n")
	children, err := exec.Command("pgrep", "-P", parent).Output()
	if err != nil {
		pg.t.Fatal("setup: pgrep: ", err)
	}
	for text := range strings.FieldsSeq(parent + " " + string(children)) {
		pid, err := strconv.Atoi(text)
		Must(pg.t, err)
		pids = append(pids, pid)
	}
	return pids
}
