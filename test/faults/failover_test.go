package faults

import (
	"errors"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// A pair is a primary and a standby that streams from it. The primary acknowledges only what the
// standby has on disk, too.
type pair struct {
	t       *testing.T
	primary *hubstest.Postgres
	standby *hubstest.Postgres
}

// makeStandby makes a standby with PostgreSQL's own tools, as an operator would. dev.sh goes on
// with a cluster that it finds. It belongs to PostgreSQL's own user, where the tests run as root.
const makeStandby = `set -eu
	mkdir -m 711 "$standby"
	cp -p "$primary/password" "$standby"
	"$bin/pg_basebackup" --pgdata="$standby/data" --dbname="$url" \
		--write-recovery-conf --checkpoint=fast
	owner=$(ls -ld "$primary/data" | awk '{ print $3 }')
	chown -R "$owner" "$standby/data"`

func newPair(t *testing.T) pair {
	t.Helper()
	primary := hubstest.NewPostgres(t)
	standby := primary.Dir + "-standby"
	bin := hubstest.Query[string](t, primary.URL,
		"select setting from pg_config where name = 'BINDIR'")
	cmd := exec.Command("sh", "-c", makeStandby)
	cmd.Env = append(
		os.Environ(),
		"standby="+standby,
		"primary="+primary.Dir,
		"bin="+bin,
		"url="+primary.URL,
	)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("a standby: %v\n%s", err, out)
	}
	p := pair{
		t:       t,
		primary: primary,
		standby: hubstest.ExistingPostgres(t, standby),
	}
	hubstest.Exec(t, primary.URL, "alter system set synchronous_standby_names = '*'")
	hubstest.Exec(t, primary.URL, "select pg_reload_conf()")
	p.waitForStandby()
	return p
}

func (p pair) waitForStandby() {
	p.t.Helper()
	hubstest.WaitUntil(p.t, "a synchronous standby", func() bool {
		const synchronous = "select count(*) from pg_stat_replication where sync_state = 'sync'"
		return hubstest.Query[int](p.t, p.primary.URL, synchronous) == 1
	})
}

// promote makes the standby the primary, and returns once it takes writes.
func (p pair) promote() {
	p.t.Helper()
	hubstest.Exec(p.t, p.standby.URL, "select pg_promote()")
	hubstest.WaitUntil(p.t, "the promotion", func() bool {
		return !hubstest.Query[bool](p.t, p.standby.URL, "select pg_is_in_recovery()")
	})
}

// start starts a server that knows both hosts, in the form of docs/deploy.md.
func (p pair) start(first, second *hubstest.Postgres) (*service, *hubstest.Client) {
	p.t.Helper()
	u, err := url.Parse(first.URL)
	other, otherErr := url.Parse(second.URL)
	if err := errors.Join(err, otherErr); err != nil {
		p.t.Fatal(err)
	}
	u.RawQuery += "&target_session_attrs=read-write&port=" + u.Port() + "," + other.Port()
	u.Host = u.Hostname() + "," + other.Hostname()
	server := hubstest.Start(p.t, map[string]string{"DATABASE_URL": u.String()})
	server.AllowErrors(`"error":"unavailable`)
	server.Database = p.primary.URL // the form above is lib/pq's alone
	return newService(p.t, server)
}

// D5: the database ends in one of these ways and is back. Every connection in the pool is dead.
// No read and no sign-in fails, not even the first, and each write is done once.
func TestConnectionsDie(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*hubstest.Postgres){
		"crash": func(pg *hubstest.Postgres) {
			pg.Crash(syscall.SIGKILL)
		},
		"immediate stop": func(pg *hubstest.Postgres) {
			pg.Crash(syscall.SIGQUIT)
		},
		"loss": (*hubstest.Postgres).Lose,
		"stop": (*hubstest.Postgres).Stop,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := hubstest.NewPostgres(t)
			s, admin := startOn(t, pg.URL)
			guest := newGuest(t, s)
			loseConnections := func() {
				s.openSeveral("users", admin, "/auth/session")
				end(pg)
				pg.Start()
			}
			loseConnections()
			guest.present(guest.code).Want(t, 200)
			loseConnections()
			writeOnce(t, s, admin)
			loseConnections()
			readOnce(t, admin)
			writeOnce(t, s, admin)
			loseConnections()
			var all sync.WaitGroup
			for range 2 * several {
				all.Go(func() { readOnce(t, admin) })
			}
			all.Wait()
		})
	}
}

func readOnce(t *testing.T, c *hubstest.Client) {
	t.Helper()
	for path, want := range map[string]int{
		"/hubs":                       200,
		"/auth/session":               200,
		"/hubs/" + hubstest.NewUUID(): 404,
	} {
		if r := get(c, path); r.Status != want {
			t.Errorf("got %v, want %d", r, want)
		}
	}
}

func writeOnce(t *testing.T, s *service, admin *hubstest.Client) {
	t.Helper()
	name := "hub " + hubstest.NewUUID()
	createHub(admin, name).Want(t, 201)
	s.wantRows(1, "hubs where name = $1", name)
}

// D1, D2, D5: the database is away under load. Meanwhile every answer is a success or a 503.
// Once it is back, the server serves again without a restart, and everything acknowledged is
// there, once.
func TestLoadOutlivesTheDatabase(t *testing.T) {
	t.Parallel()
	type postgres = *hubstest.Postgres
	for _, test := range []struct {
		name       string
		away, back func(postgres)
	}{
		{name: "restart", away: postgres.Stop, back: postgres.Start},
		{name: "loss", away: postgres.Lose, back: postgres.Start},
		{name: "hang", away: postgres.Pause, back: postgres.Resume},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			pg := hubstest.NewPostgres(t)
			s, admin := startOn(t, pg.URL)
			s.AllowErrors(`"error":"unavailable`)
			s.outlive(admin, pg.URL, func() { test.away(pg) }, func() { test.back(pg) })
		})
	}
}

// D5: the primary's machine is lost under load. With a synchronous standby that is promoted no
// acknowledged write is lost.
func TestFailoverLosesNothing(t *testing.T) {
	t.Parallel()
	pair := newPair(t)
	s, admin := pair.start(pair.primary, pair.standby)
	s.outlive(admin, pair.standby.URL, pair.primary.Lose, pair.promote)
}

// outlive runs a load of writes while the database goes away and comes back, then compares what
// was acknowledged with what is at the database that came back.
func (s *service) outlive(admin *hubstest.Client, databaseURL string, away, back func()) {
	t := s.t
	t.Helper()
	guests := make(chan guest, 30)
	for range cap(guests) {
		guests <- newGuest(t, s)
	}
	version := get(admin, "/auth/session").Field(t, "terms", "version").(string)
	fault := func(kind, detail string) { t.Errorf("%s: %s", kind, detail) }
	ledger := hubstest.NewLedger(fault)
	write := func() *hubstest.Response {
		return ledger.WriteHub(admin.Elsewhere())
	}
	upload := func() *hubstest.Response {
		return ledger.Upload(admin.Elsewhere())
	}
	signIn := func() *hubstest.Response {
		return enter(ledger, guests, admin, version)
	}
	load := startLoad(t, write, write, write, write, upload, upload, signIn)
	load.waitFor(10, true)
	away()
	load.waitFor(2, false)
	back()
	load.waitFor(20, true)
	load.end()
	ledger.Check(t, databaseURL)
	ledger.CheckFiles(t, admin.Elsewhere(), databaseURL)
}

// enter signs a guest in and accepts the terms, one step a call. Without a guest it reads. It
// reads first, too: a code that is presented while the database is away counts as an attempt,
// and a guest has few.
func enter(
	ledger *hubstest.Ledger,
	guests chan guest,
	admin *hubstest.Client,
	version string,
) *hubstest.Response {
	session := get(admin, "/auth/session")
	if session.Status != 200 {
		return session
	}
	select {
	case guest := <-guests:
		if guest.Token() == "" {
			r := guest.present(guest.code)
			guests <- guest
			return r
		}
		return ledger.AcceptTerms(guest.Elsewhere(), guest.email, version)
	default:
		return session
	}
}

// D2: while the synchronous standby is away a write is a 503, which may mean "done", and reads go
// on. Once the standby is back, each write is there, once. The settings of the role, which a
// thief of its password can change, don't change this.
func TestStandbyAway(t *testing.T) {
	t.Parallel()
	pair := newPair(t)
	hubstest.Exec(t, pair.primary.URL, `create schema evil;
		create table evil.hubs (like public.hubs including all);
		alter role postgres set search_path = evil, public;
		alter role postgres set synchronous_commit = off`)
	s, admin := pair.start(pair.standby, pair.primary)

	pair.standby.Stop()
	names := []string{"first", "second", "third"}
	for _, name := range names {
		wantUnavailable(t, createHub(admin, name))
		get(admin, "/hubs").Want(t, 200)
	}
	pair.standby.Start()
	pair.waitForStandby()
	createHub(admin, "fourth").Want(t, 201)
	for _, name := range append(names, "fourth") {
		s.wantRows(1, "public.hubs where name = $1", name)
	}
}

// D5: a primary that hangs, or that was made read-only, is left for the one that was promoted,
// though its connections live on. At most a few requests fail, not one for each connection.
func TestDeposedPrimaryIsLeft(t *testing.T) {
	t.Parallel()
	for name, depose := range map[string]func(pair){
		"hung":      func(p pair) { p.primary.Pause() },
		"read-only": pair.makeReadOnly,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pair := newPair(t)
			s, admin := pair.start(pair.primary, pair.standby)
			s.openSeveral("users", admin, "/auth/session")
			depose(pair)
			pair.promote()
			failed := 0
			for created := 0; created < 2*several && failed < several; {
				r := createHub(admin, "North")
				if r.Status == 201 {
					created++
					continue
				}
				wantUnavailable(t, r)
				failed++
			}
			if failed == several {
				t.Errorf("got %d failed writes, one for each connection", failed)
			}
			s.Database = pair.standby.URL
			s.wantRows(2*several, "hubs where name = 'North'")
		})
	}
}

func (p pair) makeReadOnly() {
	p.t.Helper()
	primary := p.primary.URL
	hubstest.Exec(p.t, primary, "alter system set default_transaction_read_only = on")
	hubstest.Exec(p.t, primary, "select pg_reload_conf()")
	hubstest.WaitUntil(p.t, "a read-only primary", func() bool {
		const setting = "show default_transaction_read_only"
		return hubstest.Query[string](p.t, primary, setting) == "on"
	})
}

// A DATABASE_URL that is none, or that leads nowhere, ends every command. The password is not
// shown.
func TestDatabaseURLIsNotShown(t *testing.T) {
	t.Parallel()
	const password = "not-to-be-shown"
	for _, form := range []string{
		"host=a.example,b.example port=1,2,3 user=u password=" + password,
		"postgres://u:" + password + "@127.0.0.1:port/db",
		"postgres://u:" + password + "@127.0.0.1:1/db?sslmode=" + password,
		"postgres://u:" + password + "@127.0.0.1:1/db?sslmode=disable",
		"password=" + password + " " + password,
		password,
	} {
		for _, command := range []string{"serve", "migrate"} {
			env := hubstest.ServerEnv(t, map[string]string{"DATABASE_URL": form})
			code, out, errOut := hubstest.Run(env, command)
			if code == 0 || errOut == "" {
				t.Errorf("%s: %s: got %d, %q, want an error", command, form, code, errOut)
			}
			if strings.Contains(out+errOut, password) {
				t.Errorf("%s: %s: the password is shown: %s%s", command, form, out, errOut)
			}
		}
	}
}
