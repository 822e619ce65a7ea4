package faults

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// A pair is a primary and a standby that streams from it.
type pair struct{ primary, standby *hubstest.Postgres }

// newPair makes the standby with PostgreSQL's own tools, as an operator would.
func newPair(t *testing.T) pair {
	t.Helper()
	primary := hubstest.NewPostgres(t)
	from, err := url.Parse(primary.URL)
	if err != nil {
		t.Fatal(err)
	}
	dir := primary.Dir + "-standby"
	if err := os.Mkdir(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	bin := hubstest.Query[string](t, primary.URL,
		"select setting from pg_config where name = 'BINDIR'")
	password, _ := from.User.Password()
	backup := exec.Command(
		bin+"/pg_basebackup",
		"--pgdata="+dir+"/data",
		"--write-recovery-conf",
		"--checkpoint=fast",
		"--host="+from.Hostname(),
		"--port="+from.Port(),
		"--username="+from.User.Username(),
	)
	backup.Env = append(os.Environ(), "PGPASSWORD="+password)
	if out, err := backup.CombinedOutput(); err != nil {
		t.Fatalf("pg_basebackup: %v\n%s", err, out)
	}
	// dev.sh goes on with a cluster that it finds, at a port of its own.
	if err := os.WriteFile(dir+"/password", []byte(password+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	sameOwner(t, dir, primary.Dir+"/data")
	return pair{primary: primary, standby: hubstest.ExistingPostgres(t, dir)}
}

// sameOwner gives a cluster and its password to the owner of another one: PostgreSQL's own user,
// where the tests run as root.
func sameOwner(t *testing.T, dir, model string) {
	t.Helper()
	info, err := os.Stat(model)
	if err != nil {
		t.Fatal(err)
	}
	owner := info.Sys().(*syscall.Stat_t)
	names := fmt.Sprintf("%d:%d", owner.Uid, owner.Gid)
	out, err := exec.Command("chown", "-R", names, dir+"/data", dir+"/password").CombinedOutput()
	if err != nil {
		t.Fatalf("chown: %v\n%s", err, out)
	}
}

// synchronous makes the primary acknowledge only what the standby has on disk, too.
func (p pair) synchronous(t *testing.T) {
	t.Helper()
	hubstest.Exec(t, p.primary.URL, "alter system set synchronous_standby_names = '*'")
	hubstest.Exec(t, p.primary.URL, "select pg_reload_conf()")
	p.waitForStandby(t)
}

func (p pair) waitForStandby(t *testing.T) {
	t.Helper()
	hubstest.WaitUntil(t, "a synchronous standby", func() bool {
		const synchronous = "select count(*) from pg_stat_replication where sync_state = 'sync'"
		return hubstest.Query[int](t, p.primary.URL, synchronous) == 1
	})
}

// promote makes the standby the primary, and returns once it takes writes.
func (p pair) promote(t *testing.T) {
	t.Helper()
	hubstest.Exec(t, p.standby.URL, "select pg_promote()")
	hubstest.WaitUntil(t, "the promotion", func() bool {
		return !hubstest.Query[bool](t, p.standby.URL, "select pg_is_in_recovery()")
	})
}

// url names both hosts in the form of docs/deploy.md, the primary first or last.
func (p pair) url(t *testing.T, primaryFirst bool) string {
	t.Helper()
	first, second := p.primary, p.standby
	if !primaryFirst {
		first, second = second, first
	}
	u, err := url.Parse(first.URL)
	if err != nil {
		t.Fatal(err)
	}
	other, err := url.Parse(second.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.RawQuery += "&target_session_attrs=read-write&port=" + u.Port() + "," + other.Port()
	u.Host = u.Hostname() + "," + other.Hostname()
	return u.String()
}

// D5: the database ends in one of these ways and is back. Every connection in the pool is dead.
// No read and no sign-in fails, not even the first, and each write is done once.
func TestConnectionsDie(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		end  func(pg *hubstest.Postgres)
	}{
		{"crash", func(pg *hubstest.Postgres) { pg.Crash(syscall.SIGKILL) }},
		{"immediate stop", func(pg *hubstest.Postgres) { pg.Crash(syscall.SIGQUIT) }},
		{"loss", (*hubstest.Postgres).Lose},
		{"stop", (*hubstest.Postgres).Stop},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			pg := hubstest.NewPostgres(t)
			s := startOn(t, pg.URL)
			admin, _ := s.Member(t, "admin")
			guest := newGuest(t, s)
			loseConnections := func() {
				occupyPool(t, s, "users", admin, "/auth/session")
				test.end(pg)
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
			for range 2 * poolSize {
				all.Go(func() { readOnce(t, admin) })
			}
			all.Wait()
		})
	}
}

func readOnce(t *testing.T, c *hubstest.Client) {
	t.Helper()
	for path, want := range map[string]int{
		"/hubs": 200, "/auth/session": 200, "/hubs/" + hubstest.NewUUID(): 404,
	} {
		if r := get(c, path); r.Status != want {
			t.Errorf("got %v, want %d", r, want)
		}
	}
}

func writeOnce(t *testing.T, s *hubstest.Server, admin *hubstest.Client) {
	t.Helper()
	name := "hub " + hubstest.NewUUID()
	r := createHub(admin, name)
	if r.Status != 201 {
		t.Errorf("got %v, want 201", r)
	}
	if n := countHubs(t, s.Env["DATABASE_URL"], name); n != 1 {
		t.Errorf("one request: got %d hubs, want 1", n)
	}
}

// D1, D2, D5: the database is away under load. Meanwhile every answer is a success or a 503.
// Once it is back, the server serves again without a restart, and everything acknowledged is
// there, once.
func TestLoadOutlivesTheDatabase(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name       string
		away, back func(pg *hubstest.Postgres)
	}{
		{
			name: "restart",
			away: (*hubstest.Postgres).Stop,
			back: (*hubstest.Postgres).Start,
		},
		{
			name: "loss",
			away: (*hubstest.Postgres).Lose,
			back: (*hubstest.Postgres).Start,
		},
		{
			name: "hang",
			away: (*hubstest.Postgres).Pause,
			back: (*hubstest.Postgres).Resume,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			pg := hubstest.NewPostgres(t)
			s := startOn(t, pg.URL)
			s.AllowErrors(`"error":"unavailable`)
			away := func() { test.away(pg) }
			back := func() { test.back(pg) }
			outlive(t, s, pg.URL, away, back)
		})
	}
}

// D5: the primary's machine is lost under load. With a synchronous standby that is promoted no
// acknowledged write is lost.
func TestFailoverLosesNothing(t *testing.T) {
	t.Parallel()
	pair := newPair(t)
	pair.synchronous(t)
	s := startOn(t, pair.url(t, true))
	s.AllowErrors(`"error":"unavailable`)
	s.Env["DATABASE_URL"] = pair.primary.URL
	promote := func() { pair.promote(t) }
	outlive(t, s, pair.standby.URL, pair.primary.Lose, promote)
}

// outlive runs a load of writes while the database goes away and comes back, then compares what
// was acknowledged with what is at the database that came back.
func outlive(t *testing.T, s *hubstest.Server, databaseURL string, away, back func()) {
	t.Helper()
	admin, _ := s.Member(t, "admin")
	guests := make(chan guest, 30)
	for range cap(guests) {
		guests <- newGuest(t, s)
	}
	version := get(admin, "/auth/session").Field(t, "terms", "version").(string)
	ledger := hubstest.TestLedger(t)
	loads := []*load{
		startLoad(t, 4, func() *hubstest.Response {
			return ledger.WriteHub(admin.Elsewhere())
		}),
		startLoad(t, 2, func() *hubstest.Response {
			return ledger.Upload(admin.Elsewhere())
		}),
		startLoad(t, 1, func() *hubstest.Response {
			return enter(ledger, guests, admin, version)
		}),
	}
	for _, load := range loads {
		load.waitGood(t, 10)
	}
	away()
	for _, load := range loads {
		load.waitRefused(t, 2)
	}
	back()
	for _, load := range loads {
		load.waitGood(t, 20)
	}
	for _, load := range loads {
		load.end()
	}
	ledger.Check(t, databaseURL)
	ledger.CheckFiles(t, admin.Elsewhere(), databaseURL, 0)
	t.Logf("%d acknowledged writes survived", ledger.Acknowledged())
}

// enter signs a guest in and accepts the terms, one step a call. Without a guest it reads. It
// reads first, too: a code that is presented while the database is away counts as an attempt,
// and a guest has ten.
func enter(
	ledger *hubstest.Ledger, guests chan guest, admin *hubstest.Client, version string,
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
	pair.synchronous(t)
	hubstest.Exec(t, pair.primary.URL, "create schema evil")
	hubstest.Exec(t, pair.primary.URL, "create table evil.hubs (like public.hubs including all)")
	hubstest.Exec(t, pair.primary.URL, "alter role postgres set search_path = evil, public")
	hubstest.Exec(t, pair.primary.URL, "alter role postgres set synchronous_commit = off")
	s := startOn(t, pair.url(t, false))
	s.AllowErrors(`"error":"unavailable`)
	s.Env["DATABASE_URL"] = pair.primary.URL
	admin, _ := s.Member(t, "admin")

	pair.standby.Stop()
	names := []string{"first", "second", "third"}
	for _, name := range names {
		r := createHub(admin, name)
		wantUnavailable(t, r)
		get(admin, "/hubs").Want(t, 200)
	}
	pair.standby.Start()
	pair.waitForStandby(t)
	createHub(admin, "after").Want(t, 201)
	for _, name := range append(names, "after") {
		n := hubstest.Query[int](t, pair.primary.URL,
			"select count(*) from public.hubs where name = $1", name)
		if n != 1 {
			t.Errorf("%s: got %d hubs, want 1", name, n)
		}
	}
}

// D5: a primary that hangs, or that was made read-only, is left for the one that was promoted,
// though its connections live on. At most a few requests fail, not one for each connection.
func TestDeposedPrimaryIsLeft(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		depose func(t *testing.T, primary *hubstest.Postgres)
	}{
		{name: "hung", depose: func(_ *testing.T, primary *hubstest.Postgres) {
			primary.Pause()
		}},
		{name: "read-only", depose: func(t *testing.T, primary *hubstest.Postgres) {
			hubstest.Exec(t, primary.URL, "alter system set default_transaction_read_only = on")
			hubstest.Exec(t, primary.URL, "select pg_reload_conf()")
			hubstest.WaitUntil(t, "a read-only primary", func() bool {
				const setting = "show default_transaction_read_only"
				return hubstest.Query[string](t, primary.URL, setting) == "on"
			})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			pair := newPair(t)
			s := startOn(t, pair.url(t, true))
			s.AllowErrors(`"error":"unavailable`)
			s.Env["DATABASE_URL"] = pair.primary.URL
			admin, _ := s.Member(t, "admin")
			hubstest.WaitUntil(t, "the standby up to date", func() bool {
				const accepted = "select exists (select from terms_acceptances)"
				return hubstest.Query[bool](t, pair.standby.URL, accepted)
			})
			occupyPool(t, s, "users", admin, "/auth/session")
			test.depose(t, pair.primary)
			pair.promote(t)
			failed := 0
			for created := 0; created < 2*poolSize && failed < poolSize; {
				r := createHub(admin, "North")
				if r.Status == 201 {
					created++
					continue
				}
				wantUnavailable(t, r)
				failed++
			}
			if failed > poolSize/2 {
				t.Errorf("got %d failed writes, want at most %d", failed, poolSize/2)
			}
			if n := countHubs(t, pair.standby.URL, "North"); n != 2*poolSize {
				t.Errorf("got %d hubs at the promoted one, want %d", n, 2*poolSize)
			}
		})
	}
}

// A DATABASE_URL that is none, or that leads nowhere, ends every command. The password is not shown.
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
				t.Errorf("%s: %s: got exit status %d, %q, want an error", command, form, code, errOut)
			}
			if strings.Contains(out+errOut, password) {
				t.Errorf("%s: %s: the password is shown: %s%s", command, form, out, errOut)
			}
		}
	}
}
