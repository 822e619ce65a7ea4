package hubstest

import (
	"database/sql"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// A world is what surrounds a server and must make no difference to it: a time zone, settings of
// PostgreSQL, other people's cookies. Most defects that cases don't find are about a world that no
// test makes. So the harness draws one for each server, database, mail server and proxy.
//
// All draws follow from one seed, the name of the test and the number of the world in it. If a test
// fails, it names its worlds. HUBS_TEST_SEED repeats them.
type world struct {
	*rand.Rand
	env       map[string]string // of the process
	umask     string
	dir       string   // where the process starts; "" is the folder of the test
	asFiles   bool     // secrets are in files (NAME_FILE)
	asWords   bool     // DATABASE_URL has the form key=value, and ends in a quoted password
	killEvery int64    // before each such request, the server's idle connections are killed; 0: never
	headers   []string // names and values of headers that each request has
	cookies   [2]string
}

// Quiet, among the overrides of Start, is for a test that needs a quiet world: one that measures, or
// that compares what the world changes.
var Quiet = map[string]string{quiet: "yes"}

// quiet is no setting of the server; TryStart removes it.
const quiet = "quiet"

var worldSeed = sync.OnceValue(func() uint64 {
	text := os.Getenv("HUBS_TEST_SEED")
	if text == "" {
		return rand.Uint64N(1_000_000)
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		panic("HUBS_TEST_SEED: " + err.Error())
	}
	return seed
})

// worldNumbers counts the worlds of each test, by its name.
var worldNumbers sync.Map // name → *atomic.Int64

// Draw returns a source of random numbers for the next world of a test.
func Draw(t testing.TB) *rand.Rand {
	counter, _ := worldNumbers.LoadOrStore(t.Name(), &atomic.Int64{})
	return drawFor(fmt.Sprint(t.Name(), counter.(*atomic.Int64).Add(1)))
}

func drawFor(name string) *rand.Rand {
	hash := fnv.New64a()
	hash.Write([]byte(name))
	return rand.New(rand.NewPCG(worldSeed(), hash.Sum64()))
}

// oneOf draws one of the values.
func oneOf[V any](r *rand.Rand, values ...V) V { return values[r.IntN(len(values))] }

// zones differ from UTC by hours, by parts of an hour, and by another day.
var zones = []string{"UTC", "Europe/Berlin", "Asia/Kolkata", "America/St_Johns", "Pacific/Kiritimati"}

// drawEnv draws variables of a process.
func drawEnv(r *rand.Rand) map[string]string {
	locale := oneOf(r, "", "C", "C.UTF-8", "de_DE.UTF-8", "tr_TR.UTF-8")
	return map[string]string{
		"TZ":         oneOf(r, zones...),
		"LANG":       locale,
		"LC_ALL":     locale,
		"GOMAXPROCS": oneOf(r, "1", "2", "4", "7"),
	}
}

// newWorld draws the world of a server.
func newWorld(t testing.TB) *world {
	r := Draw(t)
	w := &world{
		Rand:  r,
		env:   drawEnv(r),
		umask: oneOf(r, "000", "022", "027", "077"),
		dir:   oneOf(r, "", "/", os.TempDir()),

		asFiles: oneOf(r, true, false),
		asWords: oneOf(r, true, false),
		headers: []string{
			"Accept-Language", oneOf(r, "de-DE,de;q=0.9", "tr", "*"),
			"Traceparent", fmt.Sprintf("00-%016x%016x-%016x-01", r.Uint64(), r.Uint64(), r.Uint64()),
			fmt.Sprintf("X-Foreign-%d", r.IntN(1000)), strings.Repeat("opaque ", r.IntN(50)),
		},
	}
	if r.IntN(2) == 0 {
		w.killEvery = 3 + r.Int64N(40)
	}
	// These stand before and after a session's cookie.
	for side := range w.cookies {
		for range oneOf(r, 0, 20) {
			w.cookies[side] += fmt.Sprintf("_ga_%d=GS1.1.%d; ", r.IntN(1000), r.Uint32())
		}
	}
	return w
}

// note names the worlds of a test, if it fails.
func note(t testing.TB, what any) {
	t.Cleanup(func() {
		if t.Failed() {
			fmt.Fprintf(t.Output(), "HUBS_TEST_SEED=%d: %v\n", worldSeed(), what)
		}
	})
}

func (w *world) String() string {
	return fmt.Sprintf("a server with %v, umask %s, in folder %q; secrets in files: %t, DATABASE_URL as words: %t; "+
		"%d bytes of cookies before the session's, %d after it; "+
		"idle connections killed before each request of number %d (0: never)",
		w.env, w.umask, w.dir, w.asFiles, w.asWords, len(w.cookies[0]), len(w.cookies[1]), w.killEvery)
}

// apply makes a command start in the world.
func (w *world) apply(t testing.TB, cmd *exec.Cmd) {
	for i, setting := range cmd.Env {
		name, value, _ := strings.Cut(setting, "=")
		if name == "DATABASE_URL" && w.asWords {
			value = asWords(value)
		}
		isSecret := name == "DATABASE_URL" || name == "SESSION_SECRET" || name == "SMTP_URL"
		if isSecret && w.asFiles && value != "" {
			path := NewPath("secret")
			Must(t, os.WriteFile(path, []byte(value+"\n"), 0o644))
			name, value = name+"_FILE", path
		}
		cmd.Env[i] = name + "=" + value
	}
	for name, value := range w.env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	if cmd.Dir == "" {
		cmd.Dir = w.dir
	}
	if cmd.Path == Binary() { // not if a program of the test starts the server
		cmd.Args = append([]string{"sh", "-c", `umask ` + w.umask + `; exec "$@"`, "sh", cmd.Path}, cmd.Args[1:]...)
		cmd.Path = "/bin/sh"
	}
}

// asWords returns the URL of a database in the form key=value. If it is none that the harness makes,
// it stays as it is.
func asWords(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.Port() == "" || u.Query().Has("password") {
		return text
	}
	password, _ := u.User.Password()
	words := []string{"host", u.Hostname(), "port", u.Port(), "user", u.User.Username(),
		"dbname", strings.TrimPrefix(u.Path, "/")}
	for name, values := range u.Query() {
		words = append(words, name, values[0])
	}
	words = append(words, "password", password)
	quote := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace
	var pairs []string
	for pair := range slices.Chunk(words, 2) {
		pairs = append(pairs, fmt.Sprintf("%s='%s'", pair[0], quote(pair[1])))
	}
	return strings.Join(pairs, " ")
}

// around returns a Cookie header with other people's cookies before and after its own.
func (w *world) around(own string) string {
	return w.cookies[0] + strings.TrimSuffix(own+"; "+w.cookies[1], "; ")
}

// drawSettings returns statements that give the server's role other settings in a database, which
// an operator may have made for other programs.
func drawSettings(t testing.TB, database string) (statements string) {
	r := Draw(t)
	settings := map[string]string{
		"timezone":            oneOf(r, zones...),
		"datestyle":           oneOf(r, "ISO, YMD", "German", "SQL, DMY", "Postgres, MDY"),
		"intervalstyle":       oneOf(r, "postgres", "iso_8601", "sql_standard"),
		"bytea_output":        oneOf(r, "hex", "escape"),
		"extra_float_digits":  oneOf(r, "0", "1", "3"),
		"lc_messages":         oneOf(r, "C", "C.UTF-8"),
		"client_min_messages": oneOf(r, "notice", "debug1", "error"),
	}
	note(t, fmt.Sprint("PostgreSQL with ", settings))
	for name, value := range settings {
		statements += fmt.Sprintf("alter role %s in database %s set %s = '%s';\n",
			serverRole, database, name, value)
	}
	return statements
}

// killer is a connection that kills others. It is open as long as the tests run.
var killer = sync.OnceValues(func() (*sql.DB, error) {
	databaseURL, err := sharedURL()
	if err != nil {
		return nil, err
	}
	return sql.Open("postgres", databaseURL)
})

// killNowAndThen kills the server's idle connections to a database of the shared PostgreSQL before
// every so many requests, unless another request is under way. It waits until they are closed.
func (s *Server) killNowAndThen(t testing.TB) {
	t.Helper()
	n := s.requests.Add(1)
	u, err := url.Parse(s.Database)
	if s.world.killEvery == 0 || n%s.world.killEvery != 0 || err != nil || !s.inFlight.TryLock() {
		return
	}
	defer s.inFlight.Unlock()
	database := strings.TrimPrefix(u.Path, "/")
	if !strings.HasPrefix(database, "test_") { // of another PostgreSQL
		return
	}
	db, err := killer()
	Must(t, err)
	var killed string // process ids
	err = db.QueryRow(`
		with idle as materialized ( -- or PostgreSQL may kill before it compares
			select pid from pg_stat_activity
			where datname = $1 and usename = $2 and state = 'idle'
			-- not between the messages of one statement, such as of a code's work
			and state_change < clock_timestamp() - interval '0.1 s')
		select coalesce(string_agg(pid::text, ','), '') from idle where pg_terminate_backend(pid)`,
		database, serverRole).Scan(&killed)
	Must(t, err)
	WaitFor(t, "killed connections", 0, func() (open int) {
		db.QueryRow(`select count(*) from pg_stat_activity
			where pid = any (string_to_array($1, ',')::int[])`, killed).Scan(&open)
		return open
	})
}
