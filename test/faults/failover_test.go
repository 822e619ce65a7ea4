package faults

import (
	"net/url"
	"os"
	"os/exec"
	"testing"

	"hubs/internal/hubstest"
)

// A pair is a primary and a synchronous standby: the primary acknowledges a commit only when the
// standby has it on disk, too.
type pair struct {
	t       *testing.T
	primary *postgres
	standby *hubstest.Postgres
}

// makeStandby is a shell script that makes the folder of a standby with PostgreSQL's own tools, as
// an operator would. dev.sh, which starts it later, uses the cluster that it finds in the folder.
// The cluster gets the owner of the primary's cluster: if the tests run as root, that is another
// user, because PostgreSQL refuses to run as root.
const makeStandby = `set -eu
	mkdir -m 711 "$standby"
	cp -p "$primary/password" "$standby"
	"$bin/pg_basebackup" --pgdata="$standby/data" --dbname="$url" \
		--write-recovery-conf --checkpoint=fast
	owner=$(ls -ld "$primary/data" | awk '{ print $3 }')
	chown -R "$owner" "$standby/data"`

// newPair starts a primary with the schema, and a standby. It returns when the standby is in sync.
func newPair(t *testing.T) pair {
	t.Helper()
	primary := newPostgres(t)
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
		t.Fatalf("setup: making a standby: %v\n%s", err, out)
	}
	p := pair{t, primary, hubstest.StartPostgres(t, standby)}
	hubstest.Exec(t, primary.URL, "alter system set synchronous_standby_names = '*'")
	hubstest.Exec(t, primary.URL, "select pg_reload_conf()")
	p.waitForStandby()
	return p
}

// waitForStandby waits until the primary has a synchronous standby.
func (p pair) waitForStandby() {
	p.t.Helper()
	hubstest.WaitFor(p.t, "number of synchronous standbys", 1, func() int {
		const synchronous = "select count(*) from pg_stat_replication where sync_state = 'sync'"
		return hubstest.Query[int](p.t, p.primary.URL, synchronous)
	})
}

// promote promotes the standby. It returns when the standby accepts writes.
func (p pair) promote() {
	p.t.Helper()
	hubstest.Exec(p.t, p.standby.URL, "select pg_promote()")
	hubstest.WaitFor(p.t, "pg_is_in_recovery() of the standby", false, func() bool {
		return hubstest.Query[bool](p.t, p.standby.URL, "select pg_is_in_recovery()")
	})
}

// start starts a server whose DATABASE_URL names both hosts, in the order given, in the form that
// docs/deploy.md describes. It also signs an admin in. The log may have errors of requests that got
// a 503.
func (p pair) start(firstURL, secondURL string) (*service, *hubstest.Client) {
	p.t.Helper()
	u, _ := url.Parse(firstURL) // both are valid URLs
	other, _ := url.Parse(secondURL)
	u.RawQuery += "&target_session_attrs=read-write&port=" + u.Port() + "," + other.Port()
	u.Host = u.Hostname() + "," + other.Hostname()
	server := hubstest.Start(p.t, map[string]string{"DATABASE_URL": u.String()})
	server.AllowErrorsWithAnyOf(unavailable)
	// The test's own statements go to one host.
	server.Database = p.primary.URL
	return newService(p.t, server)
}

// D5: When the database is back after a stop or the loss of its machine, every connection in the
// server's pool is dead. Still no read and no sign-in fails, not even the first one, and each write
// is done exactly once.
func TestNoRequestFailsWhenConnectionsDie(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*postgres){
		"loss": (*postgres).lose,
		"stop": (*postgres).Stop,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := newPostgres(t)
			s, admin := startOn(t, pg.URL)
			guest := s.NewGuest(t)
			// loseConnections makes the server open connections, and restarts the database.
			loseConnections := func() {
				s.openConns(admin)
				end(pg)
				pg.Start()
			}

			// The first request after each restart is of another kind. A write also succeeds:
			// its session check, which is a read, finds the dead connections first.
			loseConnections()
			guest.Present(guest.Code).Want(t, 200)
			loseConnections()
			createHub(admin, "first").Want(t, 201)
			loseConnections()
			get(admin, "/hubs").Want(t, 200)
			get(admin, "/auth/session").Want(t, 200)
			get(admin, "/hubs/"+hubstest.NewUUID()).Want(t, 404)
			createHub(admin, "second").Want(t, 201)
			s.wantRows(1, "hubs where name = 'first'")
			s.wantRows(1, "hubs where name = 'second'")

			loseConnections()
			hubs := getAtOnce(t, manyRequests, admin, "/hubs")
			sessions := getAtOnce(t, manyRequests, admin, "/auth/session")
			for range manyRequests {
				(<-hubs).Want(t, 200)
				(<-sessions).Want(t, 200)
			}
		})
	}
}

// D5: If the primary's machine is lost under load, and its synchronous standby is promoted, no
// acknowledged write is lost.
func TestFailoverLosesNothing(t *testing.T) {
	t.Parallel()
	pair := newPair(t)
	_, admin := pair.start(pair.primary.URL, pair.standby.URL)
	ledger := newLedger(t)
	clients := startWriting(t, admin, ledger)
	clients.waitForSuccesses(10)
	pair.primary.lose()
	clients.waitForOutage(2)
	pair.promote()
	clients.waitForSuccesses(20)
	clients.end()
	ledger.checkRows(pair.standby.URL)
	ledger.checkFiles(admin, pair.standby.URL)
}

// D2: While the synchronous standby is unreachable, a write gets a 503, although it may be done
// later, and reads succeed. When the standby is back, each write has been done exactly once.
//
// The server has to pass over the standby, the first host of DATABASE_URL, with and without an
// answer of it.
func TestWritesNeedTheStandby(t *testing.T) {
	t.Parallel()
	pair := newPair(t)
	s, admin := pair.start(pair.standby.URL, pair.primary.URL)

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
		s.wantRows(1, "hubs where name = $1", name)
	}
}

// D5: When a primary hangs or becomes read-only and its standby is promoted, the server switches to
// the new primary, although the connections to the old one are still open. A read-only primary says
// so before each write, so no write fails. Each connection to a hung one may fail one request.
func TestDeposedPrimaryIsLeft(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		depose func(pair)
		fail   int // writes that may fail
	}{
		{name: "hung", depose: func(p pair) { p.primary.pause() }, fail: severalConns},
		{name: "read-only", depose: pair.makeReadOnly, fail: 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			pair := newPair(t)
			s, admin := pair.start(pair.primary.URL, pair.standby.URL)
			s.openConns(admin)
			test.depose(pair)
			pair.promote()

			const writes = 3 * severalConns
			failed := 0
			for range writes {
				r := createHub(admin, "North")
				if r.Status != 201 {
					wantUnavailable(t, r)
					failed++
				}
			}

			if failed > test.fail {
				t.Errorf("got %d failed writes, want at most %d", failed, test.fail)
			}
			s.Database = pair.standby.URL
			s.wantRows(writes-failed, "hubs where name = 'North'")
		})
	}
}

// makeReadOnly makes the primary refuse writes, on open connections too.
func (p pair) makeReadOnly() {
	p.t.Helper()
	primary := p.primary.URL
	hubstest.Exec(p.t, primary, "alter system set default_transaction_read_only = on")
	hubstest.Exec(p.t, primary, "select pg_reload_conf()")
	const setting = "default_transaction_read_only"
	hubstest.WaitFor(p.t, setting, "on", func() string {
		return hubstest.Query[string](p.t, primary, "show "+setting)
	})
}
