//go:build moving

package main

// The database goes and comes back: a crash, a restart, another machine in its place.
// Once it answers again nothing fails any more, whatever the pool held, and what was
// acknowledged is there, once.

import (
	"bytes"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// backWithin is how long after a promotion the service may take to be back.
const backWithin = 5 * time.Second

// A databasePair is a primary and a standby that streams from it.
type databasePair struct{ primary, standby *ownPostgres }

// newPair makes the standby with PostgreSQL's own tools, as an operator would.
func newPair(t *testing.T) *databasePair {
	t.Helper()
	pair := &databasePair{primary: newPostgres(t)}
	from, err := url.Parse(pair.primary.url)
	if err != nil {
		t.Fatal(err)
	}
	dir := pair.primary.dir + "-standby"
	if err := os.Mkdir(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	bin := queryValue[string](t, pair.primary.url, "select setting from pg_config where name = 'BINDIR'")
	password, _ := from.User.Password()
	backup := exec.Command(bin+"/pg_basebackup", "-D", dir+"/data", "-R", "-c", "fast", "-X", "stream",
		"-h", from.Hostname(), "-p", from.Port(), "-U", from.User.Username())
	backup.Env = append(os.Environ(), "PGPASSWORD="+password)
	if out, err := backup.CombinedOutput(); err != nil {
		t.Fatalf("pg_basebackup: %v\n%s", err, out)
	}
	// dev.sh goes on with a cluster that it finds. The same password; a port of its own.
	if err := os.WriteFile(dir+"/password", []byte(password+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	sameOwner(t, dir, pair.primary.dir+"/data")
	pair.standby = &ownPostgres{t, &testPostgres{dir: dir}, nil}
	pair.standby.start()
	t.Cleanup(func() {
		pair.standby.resume()
		pair.standby.stop()
	})
	return pair
}

// sameOwner gives all below dir to the owner of model: PostgreSQL's own user, where the
// tests run as root.
func sameOwner(t *testing.T, dir, model string) {
	t.Helper()
	info, err := os.Stat(model)
	if err != nil {
		t.Fatal(err)
	}
	owner := info.Sys().(*syscall.Stat_t)
	err = filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		return os.Lchown(path, int(owner.Uid), int(owner.Gid))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// synchronous makes the primary acknowledge only what the standby has on disk, too.
func (pair *databasePair) synchronous(t *testing.T) {
	t.Helper()
	execSQL(t, pair.primary.url, "alter system set synchronous_standby_names = '*'")
	execSQL(t, pair.primary.url, "select pg_reload_conf()")
	waitUntil(t, "a synchronous standby", func() bool {
		return queryValue[int](t, pair.primary.url, "select count(*) from pg_stat_replication where sync_state = 'sync'") == 1
	})
}

// promote makes the standby the primary, and returns once it takes writes.
func (pair *databasePair) promote(t *testing.T) {
	t.Helper()
	execSQL(t, pair.standby.url, "select pg_promote()")
	waitUntil(t, "the promotion", func() bool {
		return !queryValue[bool](t, pair.standby.url, "select pg_is_in_recovery()")
	})
}

// databaseURL names the hosts in that order, in the form that lib/pq takes.
func severalHosts(t *testing.T, databases ...*ownPostgres) string {
	t.Helper()
	var hosts, ports []string
	var password string
	for _, pg := range databases {
		u, err := url.Parse(pg.url)
		if err != nil {
			t.Fatal(err)
		}
		hosts, ports = append(hosts, u.Hostname()), append(ports, u.Port())
		password, _ = u.User.Password()
	}
	return fmt.Sprintf("host=%s port=%s user=postgres password=%s dbname=postgres sslmode=disable target_session_attrs=read-write",
		strings.Join(hosts, ","), strings.Join(ports, ","), password)
}

// fillPool makes the server open every connection that it may have, and leaves them all
// idle. Session checks wait for a lock until each connection has one of them.
func fillPool(t *testing.T, pg *ownPostgres, c *testClient) {
	t.Helper()
	tx, err := testDB(t, pg.url).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec("lock table users in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	var checks sync.WaitGroup
	for range poolSize {
		checks.Go(func() { c.elsewhere().do("GET", "/auth/session", nil).want(t, 200) })
	}
	waitUntil(t, "a full pool", func() bool {
		return queryValue[int](t, pg.url, "select count(*) from pg_stat_activity where wait_event_type = 'Lock'") == poolSize
	})
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	checks.Wait()
}

// A waitingGuest has a code and has not presented it yet.
type waitingGuest struct {
	*testClient
	email, code string
}

// newGuests asks for a code for each of n new users.
func newGuests(t *testing.T, s *testServer, databaseURL string, n int) (guests []waitingGuest) {
	t.Helper()
	for range n {
		guest := waitingGuest{s.client(t), newEmail(), ""}
		testUser(t, databaseURL, guest.email, "member")
		askCode(guest.testClient, guest.email)
		guest.code = s.code(t, guest.email)
		guests = append(guests, guest)
	}
	return guests
}

// D1: after a crash, a restart or a promotion that is over, no read and no sign-in
// fails, although every connection in the pool is dead.
func TestReadsOutliveTheirConnections(t *testing.T) {
	t.Parallel()
	restarts := map[string]func(pg *ownPostgres){
		"crash":             func(pg *ownPostgres) { pg.crash(syscall.SIGKILL) },
		"immediate restart": func(pg *ownPostgres) { pg.crash(syscall.SIGQUIT) },
		"loss":              func(pg *ownPostgres) { pg.lose() },
		"restart":           func(pg *ownPostgres) { pg.stop() },
	}
	for name, end := range restarts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := newPostgres(t)
			s := startProcess(t, newMailServer(t, mailOptions{noStartTLS: true}).env(), map[string]string{"DATABASE_URL": pg.url})
			admin, _ := s.member(t, "admin")
			for _, first := range []string{"reads", "sign-ins", "both"} {
				guests := newGuests(t, s.testServer, pg.url, 5)
				fillPool(t, pg, admin)
				end(pg)
				pg.start() // returns when PostgreSQL takes connections
				t.Log(name, ", first: ", first)
				nothingFails(t, s.testServer, admin, guests, first)
			}
		})
	}
	t.Run("promotion", func(t *testing.T) {
		t.Parallel()
		pair := newPair(t)
		pair.synchronous(t)
		s := startProcess(t, newMailServer(t, mailOptions{noStartTLS: true}).env(),
			map[string]string{"DATABASE_URL": severalHosts(t, pair.primary, pair.standby)})
		admin, _ := s.member(t, "admin")
		guests := newGuests(t, s.testServer, pair.primary.url, 5)
		fillPool(t, pair.primary, admin)
		pair.primary.lose()
		pair.promote(t)
		nothingFails(t, s.testServer, admin, guests, "both")
		admin.do("POST", "/hubs", map[string]string{"name": "after"}).want(t, 201)
	})
}

// nothingFails sends reads and sign-ins. Not one may fail, the very first included.
func nothingFails(t *testing.T, s *testServer, c *testClient, guests []waitingGuest, first string) {
	t.Helper()
	var all sync.WaitGroup
	both := first == "both"
	run := func(what func()) {
		if !both {
			what()
			return
		}
		all.Go(what)
	}
	reads := func() {
		for n := range 30 {
			path := []string{"/hubs", "/auth/session", "/hubs/" + testUUID()}[n%3]
			want := []int{200, 200, 404}[n%3]
			if r := c.elsewhere().do("GET", path, nil); r.status != want {
				t.Errorf("read %d after the return: %v", n, r)
			}
		}
	}
	signIns := func() {
		for n, guest := range guests {
			run(func() {
				if r := presentCode(guest.testClient, guest.email, guest.code); r.status != 200 {
					t.Errorf("sign-in %d after the return: %v", n, r)
				}
			})
		}
	}
	switch first {
	case "reads":
		reads()
		signIns()
	case "sign-ins":
		signIns()
		reads()
	default:
		for range 2 * poolSize {
			run(reads)
		}
		signIns()
		all.Wait()
	}
}

// D1, D5: a write after a crash is done, and once: the session check before it has found that
// the connections are gone, and was done again on a new one.
func TestWritesAreNotRepeatedAfterACrash(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	s := startProcess(t, map[string]string{"DATABASE_URL": pg.url})
	s.allowErrors(`"error":"unavailable`)
	admin, _ := s.member(t, "admin")
	for range 3 {
		fillPool(t, pg, admin)
		pg.lose()
		pg.start()
		for n := range 2 * poolSize {
			name := fmt.Sprintf("hub %d", serial.Add(1))
			r := admin.elsewhere().do("POST", "/hubs", map[string]string{"name": name})
			stored := queryValue[int](t, pg.url, "select count(*) from hubs where name = $1", name)
			if r.status != 201 || stored != 1 {
				t.Errorf("write %d: got %v and %d rows, want 201 and one row", n, r, stored)
			}
		}
	}
}

// O4: a code that is presented while the database is away stays good, and works once.
// The attempt stays counted: 10 in 15 minutes.
func TestCodeOutlivesTheDatabase(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	s := startProcess(t, newMailServer(t, mailOptions{noStartTLS: true}).env(), map[string]string{"DATABASE_URL": pg.url})
	s.allowErrors("unavailable")
	guests := newGuests(t, s.testServer, pg.url, 3)
	counted, racing, hung := guests[0], guests[1], guests[2]

	pg.crash(syscall.SIGKILL)
	for range 4 {
		wantProblem(t, presentCode(counted.testClient, counted.email, counted.code), 503, "unavailable")
	}
	wantProblem(t, presentCode(racing.testClient, racing.email, racing.code), 503, "unavailable")
	pg.start()

	for n := range 5 {
		wantProblem(t, presentCode(counted.testClient, counted.email, otherCode(counted.code, n+1)), 401, "invalid_code")
	}
	presentCode(counted.testClient, counted.email, counted.code).want(t, 200) // the tenth
	wantProblem(t, presentCode(counted.testClient, counted.email, counted.code), 429, "rate_limited")

	// Kept after a 503, and still good for one alone of many at once.
	if n := presentAtOnce(t, racing, 9); n != 1 {
		t.Errorf("the code of a 503 worked %d times", n)
	}

	// A database that hangs while two present the code, then goes on.
	pg.pause()
	var whileHung atomic.Int64
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() { whileHung.Add(signedIn200(t, presentCode(hung.testClient, hung.email, hung.code))) })
	}
	all.Wait()
	pg.resume()
	if n := whileHung.Load() + presentAtOnce(t, hung, 8); n != 1 {
		t.Errorf("the code of a hung database worked %d times", n)
	}
}

// presentAtOnce presents a guest's code n times in parallel and counts the sessions.
func presentAtOnce(t *testing.T, guest waitingGuest, n int) int64 {
	t.Helper()
	var sessions atomic.Int64
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			sessions.Add(signedIn200(t, presentCode(guest.testClient, guest.email, guest.code)))
		})
	}
	all.Wait()
	return sessions.Load()
}

// signedIn200 is 1 for a session, 0 for a refusal or a 503; nothing else may be.
func signedIn200(t *testing.T, r *testResponse) int64 {
	t.Helper()
	switch r.status {
	case 200:
		return 1
	case 401:
		wantProblem(t, r, 401, "invalid_code")
	default:
		wantProblem(t, r, 503, "unavailable")
	}
	return 0
}

// D2: the primary's machine is lost under load. With a synchronous standby that is
// promoted no acknowledged write is lost or doubled, and the service is back within
// seconds, without a restart.
func TestFailoverLosesNothing(t *testing.T) {
	t.Parallel()
	pair := newPair(t)
	pair.synchronous(t)
	m := newMailServer(t, mailOptions{noStartTLS: true})
	s := startProcess(t, m.env(), map[string]string{"DATABASE_URL": severalHosts(t, pair.primary, pair.standby)})
	s.allowErrors(`"error":"unavailable`, "code not sent")
	admin, _ := s.member(t, "admin")
	members := newGuests(t, s.testServer, pair.primary.url, 40)

	var created, accepted, uploaded sync.Map // name → true, user → acceptedAt, file → content
	newName := func() string { return fmt.Sprintf("hub %d", serial.Add(1)) }
	hubs := startLoad(t, 3, func() *testResponse {
		name := newName()
		r := admin.elsewhere().do("POST", "/hubs", map[string]string{"name": name})
		if r.status == 201 {
			created.Store(name, true)
		}
		return r
	})
	var patched [2]struct{ sent, acknowledged atomic.Int64 }
	var changedHubs [2]string
	var nextPatcher atomic.Int64
	for i := range changedHubs {
		changedHubs[i] = admin.do("POST", "/hubs", map[string]string{"name": newName()}).want(t, 201).field(t, "hubId").(string)
	}
	patcher := make(chan int64, len(changedHubs)) // who holds a number changes that hub alone
	for range changedHubs {
		patcher <- nextPatcher.Add(1) - 1
	}
	patches := startLoad(t, 2, func() *testResponse {
		i := <-patcher
		defer func() { patcher <- i }()
		n := patched[i].sent.Add(1)
		r := admin.elsewhere().do("PATCH", "/hubs/"+changedHubs[i], map[string]string{"description": fmt.Sprint(n)})
		if r.status == 200 {
			patched[i].acknowledged.Store(n)
		}
		return r
	})
	uploads := startLoad(t, 2, func() *testResponse {
		content := strings.Repeat(newName()+"\n", 500)
		r := admin.elsewhere().upload("f.txt", []byte(content))
		if r.status == 201 {
			uploaded.Store(r.field(t, "path"), content)
		}
		return r
	})
	var nextMember atomic.Int64
	enter := func() *testResponse {
		n := nextMember.Add(1) - 1
		if int(n) >= len(members) {
			return admin.elsewhere().do("GET", "/auth/session", nil)
		}
		guest := members[n]
		r := presentCode(guest.testClient, guest.email, guest.code)
		if r.status != 200 {
			return r
		}
		r = guest.do("POST", "/terms/acceptance", map[string]string{"version": TERMS_VERSION})
		if r.status == 200 {
			accepted.Store(strings.ToLower(guest.email), r.field(t, "acceptedAt"))
		}
		time.Sleep(20 * time.Millisecond) // so that some are left for the time of the loss
		return r
	}
	signIns := startLoad(t, 1, enter)
	loads := []*load{hubs, patches, uploads, signIns}

	hubs.wait(t, 201, 100)
	uploads.wait(t, 201, 20)
	pair.primary.lose()
	hubs.wait(t, 503, 6)
	pair.promote(t)
	promoted := time.Now()
	hubs.wait(t, 201, 1)
	if back := time.Since(promoted); back > backWithin {
		t.Errorf("back %v after the promotion", back)
	} else {
		t.Logf("back %v after the promotion", back.Round(time.Millisecond))
	}
	hubs.wait(t, 201, 100)
	patches.wait(t, 200, 20)
	uploads.wait(t, 201, 20)
	for i, what := range []string{"hubs", "changes", "uploads", "sign-ins"} {
		loads[i].end(t, what, []int{201, 200, 201, 200}[i])
	}
	for range 30 { // nothing is left of it
		admin.elsewhere().do("GET", "/hubs", nil).want(t, 200)
		admin.elsewhere().do("POST", "/hubs", map[string]string{"name": newName()}).want(t, 201)
	}

	now := pair.standby.url
	lost, doubled, n := 0, queryValue[int](t, now, "select count(*) from (select from hubs group by name having count(*) > 1) as d"), 0
	created.Range(func(name, _ any) bool {
		n++
		if queryValue[int](t, now, "select count(*) from hubs where name = $1", name) == 0 {
			lost++
		}
		return true
	})
	for i := range changedHubs {
		var stored int64
		fmt.Sscan(queryValue[string](t, now, "select description from hubs where hub_id = $1", changedHubs[i]), &stored)
		if acknowledged, sent := patched[i].acknowledged.Load(), patched[i].sent.Load(); stored < acknowledged || stored > sent {
			t.Errorf("a hub at change %d: %d was acknowledged, %d sent", stored, acknowledged, sent)
		}
		n += int(patched[i].acknowledged.Load())
	}
	uploaded.Range(func(path, content any) bool {
		n++
		r := admin.elsewhere().do("GET", path.(string), nil)
		if r.status != 200 || !bytes.Equal(r.body, []byte(content.(string))) {
			t.Errorf("an acknowledged file: %d, %d bytes of %d", r.status, len(r.body), len(content.(string)))
		}
		return true
	})
	accepted.Range(func(email, at any) bool {
		n++
		var stored time.Time
		err := testDB(t, now).QueryRow(`select accepted_at from terms_acceptances join users using (user_id)
			where lower(email) = $1`, email).Scan(&stored)
		if when, _ := time.Parse(time.RFC3339Nano, at.(string)); err != nil || !when.Equal(stored) {
			t.Errorf("terms accepted at %v, stored %v: %v", at, stored, err)
		}
		return true
	})
	if lost+doubled > 0 {
		t.Errorf("%d acknowledged hubs lost, %d doubled", lost, doubled)
	}
	t.Logf("%d acknowledged writes survived", n)
}

// D2: while the synchronous standby is away a write is a 503, which may mean "done", and
// reads go on. Each such write holds a connection of PostgreSQL's until the standby is
// back, and is then done, once.
func TestStandbyAway(t *testing.T) {
	t.Parallel()
	pair := newPair(t)
	pair.synchronous(t)
	s := startProcess(t, map[string]string{"DATABASE_URL": severalHosts(t, pair.primary, pair.standby)})
	s.allowErrors(`"error":"unavailable`)
	admin, _ := s.member(t, "admin")
	pair.standby.stop()
	names := []string{"first", "second", "third"}
	for _, name := range names {
		wantProblem(t, admin.elsewhere().do("POST", "/hubs", map[string]string{"name": name}), 503, "unavailable")
		admin.elsewhere().do("GET", "/hubs", nil).want(t, 200)
		admin.elsewhere().do("GET", "/auth/session", nil).want(t, 200)
	}
	waiting := queryValue[int](t, pair.primary.url, "select count(*) from pg_stat_activity where wait_event = 'SyncRep'")
	if waiting != len(names) {
		t.Errorf("%d connections of PostgreSQL's wait for the standby, want %d", waiting, len(names))
	}
	pair.standby.start()
	waitUntil(t, "the standby back", func() bool {
		return queryValue[int](t, pair.primary.url, "select count(*) from pg_stat_replication where sync_state = 'sync'") == 1
	})
	admin.elsewhere().do("POST", "/hubs", map[string]string{"name": "after"}).want(t, 201)
	for _, name := range append(names, "after") {
		if n := queryValue[int](t, pair.primary.url, "select count(*) from hubs where name = $1", name); n != 1 {
			t.Errorf("%s is there %d times", name, n)
		}
	}
}

// D2: a primary that hangs, or that has been made read-only, is left for the one that
// was promoted, though its connections live on.
func TestDeposedPrimaryIsLeft(t *testing.T) {
	t.Parallel()
	for name, depose := range map[string]func(t *testing.T, primary *ownPostgres){
		"hung": func(_ *testing.T, primary *ownPostgres) { primary.pause() },
		"read-only": func(t *testing.T, primary *ownPostgres) {
			execSQL(t, primary.url, "alter system set default_transaction_read_only = on")
			execSQL(t, primary.url, "select pg_reload_conf()")
			waitUntil(t, "a read-only primary", func() bool {
				return queryValue[string](t, primary.url, "show default_transaction_read_only") == "on"
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pair := newPair(t)
			s := startProcess(t, map[string]string{"DATABASE_URL": severalHosts(t, pair.primary, pair.standby)})
			s.allowErrors(`"error":"unavailable`)
			admin, _ := s.member(t, "admin")
			waitUntil(t, "the standby up to date", func() bool {
				return queryValue[bool](t, pair.standby.url, "select exists (select from terms_acceptances)")
			})
			fillPool(t, pair.primary, admin)
			depose(t, pair.primary)
			pair.promote(t)
			start, failures := time.Now(), 0
			waitUntil(t, "a write", func() bool {
				r := admin.elsewhere().do("POST", "/hubs", map[string]string{"name": "first"})
				if r.status != 201 {
					failures++
					wantProblem(t, r, 503, "unavailable")
				}
				return r.status == 201
			})
			t.Logf("%s: written after %v, %d answers 503", name, time.Since(start).Round(time.Millisecond), failures)
			if wait := time.Since(start); wait > dbWait {
				t.Errorf("%s: written after %v", name, wait)
			}
			const more = 30
			for range more {
				admin.elsewhere().do("POST", "/hubs", map[string]string{"name": "more"}).want(t, 201)
				admin.elsewhere().do("GET", "/hubs", nil).want(t, 200)
			}
			if n := queryValue[int](t, pair.standby.url, "select count(*) from hubs"); n != more+1 {
				t.Errorf("%d hubs at the promoted one, want %d", n, more+1)
			}
		})
	}
}

// D2: with several hosts the server takes the one that takes writes, in whatever order
// they stand; a form that the driver would misread is refused at the start.
func TestSeveralHosts(t *testing.T) {
	t.Parallel()
	pair := newPair(t)
	for _, databaseURL := range []string{
		severalHosts(t, pair.standby, pair.primary),
		byURL(t, pair.standby, pair.primary),
	} {
		s := startProcess(t, map[string]string{"DATABASE_URL": databaseURL})
		admin, _ := s.member(t, "admin")
		admin.do("POST", "/hubs", map[string]string{"name": "n"}).want(t, 201)
	}
	const password = "not-to-be-shown"
	for _, form := range []string{
		"postgres://u:" + password + "@a.example:5432,b.example:5433/db?target_session_attrs=read-write",
		"postgres://u:" + password + "@a.example:5432,b.example/db?target_session_attrs=read-write",
		"host=a.example:5432,b.example:5433 user=u password=" + password + " target_session_attrs=read-write",
		"host=a.example,b.example port=1,2,3 user=u password=" + password + " target_session_attrs=read-write",
	} {
		code, stdout, stderr := tryServe(t, serverEnv(t, map[string]string{"DATABASE_URL": form}))
		if code != 2 || !strings.Contains(stderr, "DATABASE_URL") {
			t.Errorf("%s: exit %d\n%s", form, code, stderr)
		}
		driverTakesIt := strings.Contains(form, "a.example:5432,b.example:5433") // and dials nonsense
		if driverTakesIt && !strings.Contains(stderr, "several hosts") {
			t.Errorf("%s: does not say how several hosts are written: %s", form, stderr)
		}
		if strings.Contains(stdout+stderr, password) {
			t.Errorf("%s: the password is shown: %s%s", form, stdout, stderr)
		}
	}
}

// byURL is severalHosts in the form of a URL that lib/pq takes.
func byURL(t *testing.T, databases ...*ownPostgres) string {
	t.Helper()
	first, err := url.Parse(databases[0].url)
	if err != nil {
		t.Fatal(err)
	}
	var ports []string
	for _, pg := range databases {
		u, err := url.Parse(pg.url)
		if err != nil {
			t.Fatal(err)
		}
		ports = append(ports, u.Port())
	}
	first.Host = strings.Repeat(","+first.Hostname(), len(databases))[1:]
	first.RawQuery += "&target_session_attrs=read-write&port=" + strings.Join(ports, ",")
	return first.String()
}

// D1: after a crash that is over, the first write finds its connection dead, and all others
// that are idle go with it: the next write works.
func TestOneWriteFindsAllDeadConnections(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	st, err := openStore(pg.url)
	if err != nil {
		t.Fatal(err)
	}
	defer st.db.Close()
	var pool []*sql.Conn
	for range poolSize {
		conn, err := st.db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		pool = append(pool, conn)
	}
	for _, conn := range pool {
		conn.Close() // idle now
	}
	pg.lose()
	pg.start()
	change := func() error {
		_, err := st.row(write("delete from hubs"))
		return err
	}
	if p, ok := errors.AsType[*problem](change()); !ok || p.Status != 503 {
		t.Errorf("the first write: got %v, want a 503", p)
	}
	waitUntil(t, "an empty pool", func() bool { return st.db.Stats().Idle == 0 })
	if err := change(); err != nil {
		t.Errorf("the second write: got %v, want it done", err)
	}
}
