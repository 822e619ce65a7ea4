package faults

import (
	"database/sql"
	"errors"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"hubs/internal/hubstest"
)

// outages holds the ways in which the proxy makes the database unavailable.
var outages = map[string]func(*faultProxy){
	"cut off": (*faultProxy).Cut,
	"hung":    (*faultProxy).Hang,
}

// lock locks tables, so that every other read and write of them waits until the transaction that
// lock returns has ended.
func (s *service) lock(tables string) *sql.Tx {
	s.t.Helper()
	tx, err := hubstest.OpenDB(s.t, s.Database).Begin()
	hubstest.Must(s.t, err)
	s.t.Cleanup(func() { tx.Rollback() })
	_, err = tx.Exec("lock table " + tables + " in access exclusive mode")
	hubstest.Must(s.t, err)
	return tx
}

// requests are bodies of requests that an admin sends, by method and path.
type requests map[string]any

// ofUsers are requests that need only the tables of users.
var ofUsers = requests{
	"GET /auth/session":      nil,
	"POST /auth/logout":      nil,
	"POST /terms/acceptance": `{"version":"any"}`,
}

// requestsTo returns requests that need the tables hubs and files, too. hub and file are the paths
// of a hub and a file.
func requestsTo(hub, file string) requests {
	return requests{
		"GET /hubs":                         nil,
		"GET /hubs?filters[name]=o&limit=7": nil,
		"GET " + hub:                        nil,
		"POST /hubs":                        `{"name":"South"}`,
		"PATCH " + hub:                      `{"name":"South"}`,
		"DELETE " + hub:                     nil,
		"GET " + file:                       nil,
		"GET /healthz":                      nil,
		"HEAD /healthz":                     nil,
	}
}

// sendAll sends requests at the same time.
func sendAll(c *hubstest.Client, all requests) (answers []*hubstest.Response) {
	received := make(chan *hubstest.Response)
	for request, body := range all {
		go func() { received <- c.Elsewhere().Do(request, body) }()
	}
	for range all {
		answers = append(answers, <-received)
	}
	return answers
}

// fillService creates a hub and a file, and returns their paths.
func fillService(t *testing.T, admin *hubstest.Client) (hub, file string) {
	t.Helper()
	return location(t, createHub(admin, "North")), admin.Store("a.txt", "content")
}

// Z2, O3: While the database is unreachable, every request that needs it gets a 503: nobody gets a
// session, and nobody loses one. Requests without a session, wrong codes and requests for a code
// get their usual answers, because those don't depend on the database. After the outage, everything
// is as before.
func TestDatabaseAwayIsUnavailable(t *testing.T) {
	t.Parallel()
	for name, beginOutage := range outages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, admin := startBehindProxy(t)
			disallowErrors := s.AllowErrorsWithAnyOf(unavailable, "code not sent")
			hub, file := fillService(t, admin)
			guest := s.NewGuest(t)

			beginOutage(s.proxy)
			// If the outage breaks connections, the first round loses those of the pool, and the
			// second round has to open new ones.
			const rounds = 2
			for range rounds {
				answers := sendAll(admin, requestsTo(hub, file))
				answers = append(answers, sendAll(admin, ofUsers)...)
				answers = append(answers, sendUpload(admin, "b.txt"), guest.Present(guest.Code))
				wantOutage(t, answers)
			}
			email := map[string]string{"email": hubstest.NewEmail()}
			guest.Do("POST /auth/otp/request", email).Want(t, 200)
			s.Log.WaitFor(t, "code not sent", "ERROR")
			// These answers need no database.
			get(admin, "/openapi.json").Want(t, 200)
			get(s.Client(t), "/hubs").WantProblem(t, 401, "unauthenticated")
			wrong := hubstest.OtherCode(guest.Code, 1)
			guest.Present(wrong).WantProblem(t, 401, "invalid_code")
			s.proxy.Resume()

			hubstest.WaitFor(t, "status of /healthz after the outage", 200, func() int {
				return get(admin, "/healthz").Status
			})
			disallowErrors()
			s.wantUnchanged(admin, hub, file)

			// The code still works, but only once. Each attempt counts against the limit of the
			// address, also one that got a 503: an outage gives nobody more guesses (O4).
			limit := hubstest.LimitOf(t, "POST /auth/otp/validate").Requests
			const before = rounds + 1 // attempts in the outage: those with a 503, and the wrong code
			hubstest.WantStatuses(t, guest.PresentAtOnce(2*limit, guest.Code), map[int]int{
				200: 1,
				401: limit - before - 1,
				429: limit + before,
			})
		})
	}
}

// Z2: While the tables hubs and files can't be read, every request that needs them gets a 503.
// Sessions work, because they need other tables. Afterwards, everything is as before: no request that
// failed keeps the place of another (H6, D2).
func TestLockedTablesAreUnavailable(t *testing.T) {
	t.Parallel()
	s, admin := start(t)
	s.AllowErrorsWithAnyOf(unavailable)
	hub, file := fillService(t, admin)
	tx := s.lock("hubs, files")
	for range mostSearches {
		wantOutage(t, sendAll(admin, requestsTo(hub, file)))
		wantUnavailable(t, sendUpload(admin, "b.txt"))
	}
	get(admin, "/auth/session").Want(t, 200)
	tx.Rollback()
	s.wantUnchanged(admin, hub, file)
	for request := range requestsTo(hub, file) {
		if path, isRead := strings.CutPrefix(request, "GET "); isRead {
			get(admin, path).Want(t, 200)
		}
	}
}

// wantUnchanged fails the test if the hub or the file of fillService has changed, or if there is
// another file.
func (s *service) wantUnchanged(c *hubstest.Client, hub, file string) {
	s.t.Helper()
	name := get(c, hub).Must(s.t, 200).Field(s.t, "name")
	if name != "North" {
		s.t.Errorf("name of the hub, after changes that got a 503: got %q, want %q", name, "North")
	}
	c.WantFile(file, "content")
	s.wantRows(1, "files")
}

// wantOutage fails the test unless each answer is a 503 that neither sets nor clears the cookie.
func wantOutage(t *testing.T, answers []*hubstest.Response) {
	t.Helper()
	for _, r := range answers {
		wantUnavailable(t, r)
		if cookie := r.Header.Get("Set-Cookie"); cookie != "" {
			t.Errorf("got the cookie %q, want none, in the answer to %v", cookie, r)
		}
	}
}

// rightsOfServer is a query for the rights that deploy/roles.sql gives, as in "select on users".
const rightsOfServer = `select string_agg(operation || ' on ' || name, ';') from (
	select privilege_type, table_name from information_schema.table_privileges
		where grantee = 'hubs_server'
	union all select format('%s (%s)', privilege_type, column_name), table_name
		from information_schema.column_privileges c where grantee = 'hubs_server' and not exists
			(select from information_schema.table_privileges t where t.grantee = c.grantee
				and (t.table_name, t.privilege_type) = (c.table_name, c.privilege_type))
	) granted (operation, name)`

// E1: /healthz is a 503 while a table is missing, or one of the rights that the server needs, even if
// the database answers.
func TestHealthReadsTheTables(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrorsWithAnyOf(unavailable)
	// Statements that break the server's access, and those that restore it.
	losses := map[string]string{
		"alter table files rename to lost":                                 "alter table lost rename to files",
		"alter schema public rename to another":                            "alter schema another rename to public",
		"revoke execute on function hub_name_key from public, hubs_server": "grant execute on function hub_name_key to hubs_server",
	}
	for right := range strings.SplitSeq(hubstest.Query[string](t, s.Database, rightsOfServer), ";") {
		losses["revoke "+right+" from hubs_server"] = "grant " + right + " to hubs_server"
	}
	for begin, end := range losses {
		s.exec(begin)
		if r := get(c, "/healthz"); r.Status != 503 {
			t.Errorf("%s: got status %d, want 503", begin, r.Status)
		}
		s.exec(end)
		get(c, "/healthz").Want(t, 200)
	}
}

// Z2: When the type of a column changes, the prepared statements that use it fail on every
// connection. Still, at most one request fails, because the first failure makes the server replace
// its idle connections.
func TestChangedColumnFailsOneRequest(t *testing.T) {
	t.Parallel()
	s, admin := start(t)
	s.AllowErrorsWithAnyOf(unavailable) // of the request that fails
	for _, change := range []string{
		"alter table users alter column permission type varchar(10)",
		"alter table hubs alter column description type varchar(2000)",
	} {
		s.openConns(admin)
		s.exec(change)
		failed := 0
		for range 3 * severalConns {
			if get(admin, "/hubs").Status != 200 {
				failed++
			}
		}
		if failed > 1 {
			t.Errorf("after %q: got %d failed requests, want at most 1", change, failed)
		}
	}
}

// severalConns is how many connections openConns opens: all that a server has.
const severalConns = 8

// openConns makes the server open severalConns connections to the database. It locks the table
// hubs, and sends requests whose statements wait for it, until that many connections wait. When it
// returns, the lock is released, all requests have been answered, and the connections are idle.
func (s *service) openConns(c *hubstest.Client) {
	s.t.Helper()
	disallowErrors := s.AllowErrorsWithAnyOf(unavailable) // a request may wait for the lock too long
	defer disallowErrors()
	tx := s.lock("hubs")
	var areOpen atomic.Bool
	var all sync.WaitGroup
	for range severalConns {
		all.Go(func() {
			for !areOpen.Load() {
				get(c, "/hubs")
			}
		})
	}
	defer func() {
		areOpen.Store(true) // the clients send no more requests
		tx.Rollback()       // the statements that wait get their rows
		all.Wait()
	}()
	s.waitForLocks(severalConns)
}

// waitForLocks waits until n connections to the database wait for a lock, or more.
func (s *service) waitForLocks(n int) {
	s.t.Helper()
	hubstest.WaitFor(s.t, "connections that wait for a lock", n, func() int {
		return min(n, s.count(lockWaiters))
	})
}

// These are arguments of count. lockWaiters selects the connections that wait for a lock.
// otherConns selects all connections except the one that counts.
const (
	lockWaiters = "pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
	otherConns  = "pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
)

// pool is the most connections that the server has to the database, as docs/deploy.md says.
const pool = 8

// manyRequests is more than the connections that the server has.
const manyRequests = 4 * pool

// D2: While every connection is in use, a request that needs one waits for a limited time and then
// gets a 503. Each request gives its connection back.
func TestBusyPoolIsUnavailable(t *testing.T) {
	t.Parallel()
	s, c := start(t, hubstest.Quiet) // it counts connections that stay open
	disallowErrors := s.AllowErrorsWithAnyOf(unavailable)
	tx := s.lock("hubs")
	answers := getAtOnce(t, manyRequests, c, "/hubs")
	most := 0
	for len(answers) < cap(answers) {
		most = max(most, s.count(lockWaiters))
	}
	tx.Rollback()
	if most != pool {
		t.Errorf("maximum number of connections: got %d, want %d", most, pool)
	}
	for range cap(answers) {
		wantUnavailable(t, <-answers)
	}
	s.Log.WaitFor(t, "all connections to the database are busy")
	disallowErrors()
	for range 2 * pool {
		get(c, "/hubs").Want(t, 200)
	}
	// They stay open: a new connection for each burst of requests would cost more than they do.
	s.wantRows(pool, "pg_stat_activity where datname = current_database() and usename = 'hubs_server'")
}

// A row that the server can't scan is a bug (500), not an outage (503). Each such statement still
// gives its connection back to the pool.
func TestBrokenRowsAreNoOutage(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrorsWithAnyOf(`"code":"internal"`, unavailable)
	s.exec(`insert into hubs (name) select n::text from generate_series(1, 100) n;
		alter table hubs alter column created_at drop default;
		alter table hubs drop constraint hubs_created_at_check;
		alter table hubs alter column created_at type text using 'no time'`)
	// The first request may get a 503, because the type of a column has changed.
	get(c, "/hubs?limit=100")
	const requests = 30
	for range requests {
		get(c, "/hubs?limit=100").WantProblem(t, 500, "internal")
	}
	// A statement that kept its connection would make the next request open another one.
	if n := s.count(otherConns); n >= requests {
		t.Errorf("got %d connections after %d requests, sent one after another, want fewer",
			n, requests)
	}
	get(c, "/auth/session").Want(t, 200)
}

// D5: If the database's answer breaks off in the middle of its rows, the request gets a 503. The
// server does not treat the rows it has as the whole list. It does not retry the statement either,
// because the list would then contain its first rows twice.
func TestPartialResultIsUnavailable(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	s.AllowErrorsWithAnyOf(unavailable)
	s.exec(`insert into hubs (name, description)
		select 'hub ' || to_char(n, 'FM000'), repeat('ü', 2000) from generate_series(1, 100) n`)
	s.proxy.WhenAnswered("hub 090", s.dropConnections)
	wantUnavailable(t, get(c, "/hubs?limit=100"))
	get(c, "/hubs?limit=100").Want(t, 200)
}

// dropConnections closes all connections to the database.
func (s *service) dropConnections() {
	s.proxy.Cut()
	s.proxy.Resume()
}

// loseAnswerTo makes the proxy close all connections when the database begins to answer the next
// statement that contains the text. The database has run the statement by then. isLost reports
// whether that has happened.
func (s *service) loseAnswerTo(text string) (isLost func() bool) {
	var lost atomic.Bool
	s.proxy.When(text, func() {
		s.proxy.WhenAnswered("", func() {
			lost.Store(true)
			s.dropConnections()
		})
	})
	return lost.Load
}

// D1: If a connection ends after the database has run a statement, but before its answer arrives,
// the server retries a read. It does not retry a write: the client gets a 503, and the write is
// done exactly once.
func TestWriteIsNotDoneTwice(t *testing.T) {
	t.Parallel()
	s, admin := startBehindProxy(t)
	s.AllowErrorsWithAnyOf(unavailable)
	first := location(t, createHub(admin, "first"))
	id := strings.TrimPrefix(first, "/hubs/")
	isLost := s.loseAnswerTo(id)
	get(admin, first).Want(t, 200)
	if !isLost() {
		t.Error("no answer to the read was lost")
	}
	s.loseAnswerTo("once")
	wantUnavailable(t, createHub(admin, "once"))
	s.wantRows(1, "hubs where name = 'once'")
	s.loseAnswerTo("once.txt")
	wantUnavailable(t, sendUpload(admin, "once.txt"))
	s.wantRows(1, "files")
	// If the server sent the DELETE again, it would find no hub, and the client would get a 404.
	s.loseAnswerTo(id)
	wantUnavailable(t, admin.Do("DELETE "+first, nil))
	get(admin, first).WantProblem(t, 404, "not_found")
}

// D1: If the database hangs before a write, the write is not tried on one connection after another.
func TestHungWriteIsTriedOnce(t *testing.T) {
	t.Parallel()
	s, admin := startBehindProxy(t)
	s.AllowErrorsWithAnyOf(unavailable)
	s.openConns(admin)
	const question = "show transaction_read_only"
	s.proxy.Record()
	s.proxy.When(question, s.proxy.Hang)
	wantUnavailable(t, createHub(admin, "North"))
	s.proxy.Resume()
	if n := strings.Count(string(s.proxy.Sent()), question); n != 1 {
		t.Errorf("got %d connections that were asked whether they can write, want 1", n)
	}
}

// D1: A write that fails when it is committed is no success, although its row has arrived.
func TestFailedCommitIsNoSuccess(t *testing.T) {
	t.Parallel()
	s, admin := start(t)
	s.AllowErrorsWithAnyOf(unavailable)
	s.exec(`create function fail() returns trigger language plpgsql as
		$$ begin raise exception using errcode = 'serialization_failure'; end $$;
		create constraint trigger late after insert on hubs deferrable initially deferred
		for each row execute function fail()`)
	wantUnavailable(t, createHub(admin, "North"))
	s.wantRows(0, "hubs")
}

// Every connection sets what the server's statements need, whatever DATABASE_URL says, and nothing
// that is the operator's choice, such as search_path and synchronous_commit.
func TestSettingsOfConnections(t *testing.T) {
	t.Parallel()
	proxy, through := faultProxyURL(t, hubstest.NewDatabase(t))
	proxy.Record()
	hubstest.Start(t, map[string]string{
		"DATABASE_URL": through + "&statement_timeout=0&plan_cache_mode=auto&lock_timeout=1",
	})
	sent := string(proxy.Sent()) // begins with the start of a connection: names and values
	if !strings.Contains(sent, "\x00lock_timeout\x001\x00") {
		t.Error("got no lock_timeout at the start of a connection, want that of DATABASE_URL")
	}
	got := map[string]string{}
	set := regexp.MustCompile(`set (\w+) = (\w+)`)
	for _, found := range set.FindAllStringSubmatch(sent, -1) {
		name, value := found[1], found[2]
		if name == "statement_timeout" && value != "0" {
			value = "not 0"
		}
		got[name] = value
	}
	hubstest.WantEqual(t, "settings of a connection", got, map[string]string{
		"statement_timeout": "not 0",
		"plan_cache_mode":   "force_generic_plan",
		"enable_seqscan":    "off",
		"jit":               "off",
		"row_security":      "off",
	})
}

// T5: If a user is deleted between the session check of a request and its write, the request gets a
// 401, not a 500.
func TestUserDeletedDuringARequest(t *testing.T) {
	t.Parallel()
	s, _ := start(t)
	c, email := s.Member(t, "member")
	tx := s.lock("files")
	answer := make(chan *hubstest.Response)
	go func() {
		answer <- sendUpload(c, "a.txt")
	}()
	s.waitForLocks(1) // the insert of the file's row waits for the locked table
	_, err := tx.Exec("delete from users where lower(email) = lower($1)", email)
	hubstest.Must(t, errors.Join(err, tx.Commit()))
	(<-answer).WantProblem(t, 401, "unauthenticated")
}
