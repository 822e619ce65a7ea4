package faults

import (
	"database/sql"
	"encoding/binary"
	"errors"
	"net"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// An outage is a way in which a server can lose its database.
type outage struct {
	name       string
	proxy      func(*hubstest.Proxy) // what the proxy does; nil: nothing
	locked     string                // tables that nobody can read
	begin, end string                // what an operator does
	knowsUsers bool                  // sessions and codes can still be checked
}

var outages = []outage{
	{name: "cut off", proxy: (*hubstest.Proxy).Cut},
	{name: "hung", proxy: (*hubstest.Proxy).Hang},
	{
		name:  "closed",
		begin: "alter database <name> allow_connections false; " + endConnections,
		end:   "alter database <name> allow_connections true",
	},
	{
		name:  "renamed",
		begin: endConnections + "; alter database <name> rename to <name>_away",
		end:   "alter database <name>_away rename to <name>",
	},
	{name: "users locked", locked: "users"},
	{name: "hubs and files locked", locked: "hubs, files", knowsUsers: true},
}

// takeAway takes the database away from its server. It returns what gives it back.
func (s *service) takeAway(o outage) (giveBack func()) {
	s.t.Helper()
	if o.proxy != nil {
		o.proxy(s.proxy)
		return s.proxy.Resume
	}
	if o.locked != "" {
		tx := s.lock(o.locked)
		return func() { tx.Rollback() }
	}
	s.operate(o.begin)
	return func() { s.operate(o.end) }
}

const endConnections = `select pg_terminate_backend(pid) from pg_stat_activity
	where datname = '<name>'`

// operate is an operator who is connected to another database.
func (s *service) operate(statements string) {
	s.t.Helper()
	database, err := url.Parse(s.Database)
	if err != nil {
		s.t.Fatal(err)
	}
	statements = hubstest.FillIn(statements, "<name>", database.Path[1:])
	operator := hubstest.WithDatabase(s.Database, "postgres")
	hubstest.Exec(s.t, operator, statements)
}

// lock takes tables from every reader and writer until the end of the transaction.
func (s *service) lock(tables string) *sql.Tx {
	s.t.Helper()
	tx, err := hubstest.OpenDB(s.t, s.Database).Begin()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { tx.Rollback() })
	_, err = tx.Exec("lock table " + tables + " in access exclusive mode")
	if err != nil {
		s.t.Fatal(err)
	}
	return tx
}

// A request is one of those in requests.json.
type request struct {
	Method     string
	Path       string
	Body       any
	Needs      string // tables: "accounts", which is users alone, "others", or ""
	Statements *int   // that it takes; nil: they are not counted
}

func (q request) send(c *hubstest.Client) *hubstest.Response {
	return c.Elsewhere().Do(q.Method, q.Path, q.Body)
}

// fillService makes a hub and a file, and returns requests for them.
func fillService(t *testing.T, admin *hubstest.Client) (hub, file string, requests []request) {
	t.Helper()
	hub = location(t, createHub(admin, "North"))
	file = store(t, admin, "a.txt")
	requests = hubstest.ReadCases[request](t, "test/faults/testdata/requests.json",
		"<hub>", hub,
		"<file>", file)
	return hub, file, requests
}

// Z2: a database out of reach is a 503 of everything that needs it, never a session and never
// the lack of one. What needs no database goes on. Once it is back, all is as before.
func TestDatabaseAway(t *testing.T) {
	t.Parallel()
	for _, outage := range outages {
		t.Run(outage.name, func(t *testing.T) {
			t.Parallel()
			s, admin := startBehindProxy(t)
			outageEnds := s.AllowErrors("unavailable", "code not sent")
			hub, file, requests := fillService(t, admin)
			guest := newGuest(t, s)
			presented := 0

			giveBack := s.takeAway(outage)
			// The first requests lose the connections of the pool. The next ones have to connect.
			for range 2 {
				wantOutage(t, admin, requests, "others")
				wantUnavailable(t, uploadText(admin, "b.txt"))
				if outage.knowsUsers {
					continue
				}
				wantOutage(t, admin, requests, "accounts")
				wantUnavailable(t, guest.present(guest.code))
				presented++
			}
			if !outage.knowsUsers {
				guest.AskCode(hubstest.NewEmail())
				s.Log.WaitFor(t, "code not sent", "ERROR")
			}
			hubstest.WantProblem(t, get(s.Client(t), "/hubs"), 401, "unauthenticated")
			wrong := hubstest.OtherCode(guest.code, 1)
			hubstest.WantProblem(t, guest.present(wrong), 401, "invalid_code")
			presented++
			giveBack()

			hubstest.WaitUntil(t, "service again", func() bool {
				return get(admin, "/healthz").Status == 200
			})
			outageEnds()
			name := get(admin, hub).Want(t, 200).Field(t, "name")
			if name != "North" {
				t.Errorf("a hub after refused changes: got %q, want %q", name, "North")
			}
			admin.WantFile(file, "content")
			s.wantRows(1, "files")
			wantOneSession(t, guest, presented)
		})
	}
}

// wantOutage sends at once the requests that need such tables. None of the answers sets or clears
// the cookie.
func wantOutage(t *testing.T, c *hubstest.Client, requests []request, needs string) {
	t.Helper()
	var all sync.WaitGroup
	for _, q := range requests {
		if q.Needs != needs {
			continue
		}
		all.Go(func() {
			r := q.send(c)
			wantUnavailable(t, r)
			if cookie := r.Header.Get("Set-Cookie"); cookie != "" {
				t.Errorf("got the cookie %q with a 503, want none", cookie)
			}
		})
	}
	all.Wait()
}

// wantOneSession presents the guest's code at once from many addresses: it is still good, for one
// of them. All attempts count, those that ended in a 503 too: an outage gives nobody more (O4).
func wantOneSession(t *testing.T, guest guest, before int) {
	t.Helper()
	limit := hubstest.LimitOf(t, "POST /auth/otp/validate").Requests
	statuses := map[int]int{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for range 2 * limit {
		all.Go(func() {
			r := guest.present(guest.code)
			mu.Lock()
			defer mu.Unlock()
			statuses[r.Status]++
		})
	}
	all.Wait()
	if statuses[200] != 1 {
		t.Errorf("the code of a 503: got %d sessions, want 1", statuses[200])
	}
	counted := before + statuses[200] + statuses[401]
	if counted != limit {
		t.Errorf("got %d attempts, with %d before, want %d", counted, before, limit)
	}
}

// E1: /healthz is a 503 when the server can't read its tables, though the database answers.
func TestHealthReadsTheTables(t *testing.T) {
	t.Parallel()
	s, _ := start(t)
	role, through := hubstest.NewRole(t, s.Database)
	s.exec("grant select on all tables in schema public to " + role)
	reader := hubstest.Start(t, map[string]string{"DATABASE_URL": through})
	reader.AllowErrors("unavailable")
	c := reader.Client(t)
	get(c, "/healthz").Want(t, 200)
	const lostRight = "select on terms_acceptances "
	for begin, end := range map[string]string{
		"revoke " + lostRight + "from " + role:  "grant " + lostRight + "to " + role,
		"alter table files rename to lost":      "alter table lost rename to files",
		"alter schema public rename to another": "alter schema another rename to public",
	} {
		t.Run(begin, func(t *testing.T) {
			s.exec(begin)
			wantUnavailable(t, get(c, "/healthz"))
			s.exec(end)
			get(c, "/healthz").Want(t, 200)
		})
	}
}

// D6: a column gets another type. Statements that were prepared before are of no use any more,
// on each of the connections. At most one request fails.
func TestChangedColumnType(t *testing.T) {
	t.Parallel()
	s, admin := start(t)
	s.AllowErrors("unavailable") // the one that fails
	for _, change := range []string{
		"alter table users alter column permission type varchar(10)",
		"alter table hubs alter column description type varchar(2000)",
	} {
		s.openSeveral("hubs", admin, "/hubs")
		s.exec(change)
		failed := 0
		for range 3 * several {
			if get(admin, "/hubs").Status != 200 {
				failed++
			}
		}
		if failed > 1 {
			t.Errorf("%s: got %d failed requests, want 1 at most", change, failed)
		}
	}
}

// several connections to the database are more than one, and no more than a server has.
const several = 6

// openSeveral makes the server open several connections: requests for the path wait for a locked
// table until that many connections have one of them. All are idle afterwards.
func (s *service) openSeveral(table string, c *hubstest.Client, path string) {
	s.t.Helper()
	defer s.AllowErrors("unavailable")() // one that waits for too long
	tx := s.lock(table)
	var areOpen atomic.Bool
	var all sync.WaitGroup
	for range several {
		all.Go(func() {
			for !areOpen.Load() {
				get(c, path)
			}
		})
	}
	defer all.Wait()
	defer tx.Rollback()
	defer areOpen.Store(true)
	s.waitForLocks(several)
}

// crowd sends more requests at once than the server has connections, all of which wait for the
// table hubs in vain. It returns how many waited there at a time, at most. Meanwhile it calls do,
// again and again. The database's own words reach no client.
func (s *service) crowd(c *hubstest.Client, path string, do func()) (most int) {
	s.t.Helper()
	defer s.AllowErrors(`"error":"unavailable`)()
	tx := s.lock("hubs")
	defer tx.Rollback()
	const requests = 32
	var answered atomic.Int64
	var all sync.WaitGroup
	defer all.Wait()
	for range requests {
		all.Go(func() {
			r := get(c, path)
			wantUnavailable(s.t, r)
			if strings.Contains(string(r.Body), "pq: ") {
				s.t.Errorf("got %s, want no word of the database's", r.Body)
			}
			answered.Add(1)
		})
	}
	for answered.Load() < requests {
		most = max(most, s.count(waiting))
		do()
	}
	return most
}

// waitForLocks waits until so many connections wait for a lock.
func (s *service) waitForLocks(n int) {
	s.t.Helper()
	hubstest.WaitUntil(s.t, "connections that wait for a lock", func() bool {
		return s.count(waiting) >= n
	})
}

// What count counts: connections that wait for a lock, and all but the operator's own.
const (
	waiting = "pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
	others  = "pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
)

// D2: while every connection is busy, a request that needs one waits a bounded time, and is then
// a 503. There are the 8 connections of docs/deploy.md, and no more.
func TestPoolExhausted(t *testing.T) {
	t.Parallel()
	const pool = 8
	s, c := start(t)
	if n := s.crowd(c, "/hubs", func() {}); n != pool {
		t.Errorf("got %d connections at a time, want %d", n, pool)
	}
	s.Log.WaitFor(t, "no free slot for a statement")
	get(c, "/hubs").Want(t, 200)
}

// H6: lists with a name filter, and deep pages, hold at most half of the connections. So a
// session check finds one however long they take.
func TestExpensiveStatementsLeaveConnections(t *testing.T) {
	t.Parallel()
	for _, path := range []string{
		"/hubs?filters[name]=a",
		"/hubs?offset=101",
	} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			s, c := start(t)
			all := s.crowd(c, "/hubs", func() {})
			expensive := s.crowd(c, path, func() {
				get(c, "/auth/session").Want(t, 200)
			})
			if expensive == 0 || expensive > all/2 {
				t.Errorf("got %d expensive statements at a time on %d connections, want half",
					expensive, all)
			}
			get(c, path).Want(t, 200)
		})
	}
}

// A row that the server can't take is a fault inside, and no outage. The statement gives its
// connection back, however often that happens.
func TestBrokenRowsAreNoOutage(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrors(`"error":"internal`, "unavailable")
	s.exec(`insert into hubs (name) select n::text from generate_series(1, 100) n;
		alter table hubs alter column created_at drop default;
		alter table hubs drop constraint hubs_created_at_check;
		alter table hubs alter column created_at type text using 'no time'`)
	get(c, "/hubs?limit=100") // may be the 503 of a changed column
	const requests = 30
	for range requests {
		hubstest.WantProblem(t, get(c, "/hubs?limit=100"), 500, "internal")
	}
	if n := s.count(others); n >= requests {
		t.Errorf("got %d connections after %d requests, one after the other", n, requests)
	}
	get(c, "/auth/session").Want(t, 200)
}

// D5: an answer that breaks off in the middle of its rows is a 503. It is neither taken for the
// whole, nor asked for again: its first rows would be there twice.
func TestBrokenAnswerIsNoAnswer(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	s.AllowErrors("unavailable")
	s.exec(`insert into hubs (name, description)
		select 'hub ' || to_char(n, 'FM000'), repeat('ü', 2000) from generate_series(1, 100) n`)
	s.proxy.WhenAnswered("hub 090", s.proxy.Drop)
	wantUnavailable(t, get(c, "/hubs?limit=100"))
	get(c, "/hubs?limit=100").Want(t, 200)
}

// loseAnswerTo drops the connection on which the text is sent, once the answer begins.
func (s *service) loseAnswerTo(text string) {
	s.proxy.When(text, func() {
		s.proxy.WhenAnswered("", s.proxy.Drop)
	})
}

// D1: a connection that ends after a statement is done and before its answer. A read is sent
// again. A write is not: the client gets a 503, and the write is there once.
func TestWriteIsNotDoneTwice(t *testing.T) {
	t.Parallel()
	s, admin := startBehindProxy(t)
	s.AllowErrors("unavailable")
	first := location(t, createHub(admin, "first"))
	id := strings.TrimPrefix(first, "/hubs/")
	store(t, admin, "first.txt")

	s.loseAnswerTo(id)
	get(admin, first).Want(t, 200)
	s.loseAnswerTo("once")
	wantUnavailable(t, createHub(admin, "once"))
	s.wantRows(1, "hubs where name = 'once'")
	s.loseAnswerTo("once.txt")
	wantUnavailable(t, uploadText(admin, "once.txt"))
	s.wantRows(2, "files")
	// A second DELETE would find nothing. The client would be told that there was no such hub.
	s.loseAnswerTo(id)
	wantUnavailable(t, admin.Do("DELETE", first, nil))
	hubstest.WantProblem(t, get(admin, first), 404, "not_found")

	// A second "user add" would find the user of the first one, and say that nothing was changed.
	email := hubstest.NewEmail()
	s.loseAnswerTo(email)
	code, out, errOut := hubstest.Run(s.Env, "user", "add", email)
	if code != 1 || out != "" || strings.Contains(errOut, "nothing") {
		t.Errorf("user add: got %d, %q, %q, want 1 and an open outcome", code, out, errOut)
	}
	s.wantRows(1, "users where email = $1", email)
}

// A request is one exchange of messages for each statement: nothing is parsed anew, and nothing
// is sent besides.
func TestStatementsArePreparedOnce(t *testing.T) {
	t.Parallel()
	s, admin := startBehindProxy(t)
	_, _, requests := fillService(t, admin)
	for _, q := range requests {
		if q.Statements == nil {
			continue
		}
		q.send(admin) // it may prepare
		s.proxy.Sent()
		q.send(admin)
		got := messages(s.proxy.Sent())
		want := strings.Repeat("BES", *q.Statements) // Bind, Execute, Sync
		if got != want {
			t.Errorf("%s %s: got the messages %s, want %s", q.Method, q.Path, got, want)
		}
	}
}

// messages returns the types of the messages that clients have sent to PostgreSQL, a letter each.
// There must be no start of a connection among them.
func messages(sent []byte) (types string) {
	for len(sent) >= 5 {
		types += string(sent[:1])
		sent = sent[1+binary.BigEndian.Uint32(sent[1:5]):]
	}
	return types
}

// Whatever DATABASE_URL and the settings of the role say, the server's connections have these
// settings. search_path and synchronous_commit are DATABASE_URL's if it has them, and never
// the role's.
func TestSettingsOfConnections(t *testing.T) {
	t.Parallel()
	always := map[string]string{ // regular expressions
		"statement_timeout": "[1-9][0-9]*",
		"timezone":          "UTC",
		"plan_cache_mode":   "force_generic_plan",
		"enable_seqscan":    "off",
		"jit":               "off",

		"max_parallel_workers_per_gather": "0",
	}
	for query, want := range map[string]map[string]string{
		"statement_timeout=0&timezone=Asia/Tokyo&plan_cache_mode=auto": {
			"search_path":        `"\$user", public`,
			"synchronous_commit": "on",
		},
		"search_path=public&synchronous_commit=local": {
			"search_path":        "public",
			"synchronous_commit": "local",
		},
	} {
		t.Run(query, func(t *testing.T) {
			t.Parallel()
			proxy, through := hubstest.ProxyURL(t, hubstest.NewDatabase(t))
			proxy.Sent()
			hubstest.Start(t, map[string]string{"DATABASE_URL": through + "&" + query})
			sent := string(proxy.Sent())
			wantSettings(t, sent, always)
			wantSettings(t, sent, want)
		})
	}
}

// wantSettings checks that the start of a connection has each setting once.
func wantSettings(t *testing.T, sent string, settings map[string]string) {
	t.Helper()
	for name, want := range settings {
		setting := regexp.MustCompile(`\x00` + name + `\x00([^\x00]*)`)
		got := setting.FindAllStringSubmatch(sent, -1)
		isRight := regexp.MustCompile(`^(?:` + want + `)$`).MatchString
		if len(got) != 1 || !isRight(got[0][1]) {
			t.Errorf("got %q, want one %s: %s", got, name, want)
		}
	}
}

// D1: a database that does not even take connections, because its machine is gone or its queue
// is full, is given up in time, whatever connect_timeout says.
func TestConnectingEndsInTime(t *testing.T) {
	t.Parallel()
	env := hubstest.ServerEnv(t, map[string]string{
		"DATABASE_URL": "postgres://nobody@" + fullQueue(t) +
			"/none?sslmode=disable&connect_timeout=600",
	})
	code, _, errOut := hubstest.Run(env, "serve") // killed after a while: status -1
	if code != 1 {
		t.Errorf("got exit status %d, want 1\n%s", code, errOut)
	}
}

// fullQueue returns an address where nobody accepts, and whose queue of connections is full.
func fullQueue(t *testing.T) (addr string) {
	t.Helper()
	socket, addr := holdSocket(t, "tcp", "127.0.0.1:0")
	if err := syscall.Listen(int(socket.Fd()), 0); err != nil { // the length of the queue
		t.Fatal(err)
	}
	for {
		conn, err := net.DialTimeout("tcp", addr, 100*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { conn.Close() })
	}
}

// T5: a user who is deleted between the session check and the write of a request has no session:
// 401, and no fault inside.
func TestUserDeletedDuringARequest(t *testing.T) {
	t.Parallel()
	s, _ := start(t)
	c, email := s.Member(t, "member")
	tx := s.lock("files")
	answer := make(chan *hubstest.Response)
	go func() {
		answer <- uploadText(c, "a.txt")
	}()
	s.waitForLocks(1)
	_, err := tx.Exec("delete from users where lower(email) = lower($1)", email)
	if err := errors.Join(err, tx.Commit()); err != nil {
		t.Fatal(err)
	}
	hubstest.WantProblem(t, <-answer, 401, "unauthenticated")
}
