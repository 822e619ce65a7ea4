package faults

import (
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
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

// takeAway takes the database away from its server. It returns what gives it back.
func (s *service) takeAway(how string) (back func()) {
	s.t.Helper()
	if tables, isLocked := strings.CutSuffix(how, " locked"); isLocked {
		tx := s.lock(tables)
		return func() { tx.Rollback() }
	}
	switch how {
	case "cut off":
		s.proxy.Cut()
		return s.proxy.Resume
	case "hung":
		s.proxy.Hang()
		return s.proxy.Resume
	case "closed":
		s.operate("alter database <name> allow_connections false; " + endConnections)
		return func() { s.operate("alter database <name> allow_connections true") }
	default: // renamed
		s.operate(endConnections + "; alter database <name> rename to <name>_away")
		return func() { s.operate("alter database <name>_away rename to <name>") }
	}
}

const endConnections = `select pg_terminate_backend(pid) from pg_stat_activity
	where datname = '<name>'`

// operate is an operator who is connected to another database.
func (s *service) operate(statements string) {
	s.t.Helper()
	database, err := url.Parse(s.database)
	if err != nil {
		s.t.Fatal(err)
	}
	statements = hubstest.FillIn(statements, "<name>", database.Path[1:])
	operator := hubstest.WithDatabase(s.database, "postgres")
	hubstest.Exec(s.t, operator, statements)
}

// lock takes tables from every reader and writer until the end of the transaction.
func (s *service) lock(tables string) *sql.Tx {
	s.t.Helper()
	tx, err := hubstest.OpenDB(s.t, s.database).Begin()
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
	for _, how := range []string{
		"cut off",
		"hung",
		"closed",
		"renamed",
		"users locked",
		"hubs, files locked",
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			s, admin := startBehindProxy(t)
			s.AllowErrors("code not sent")
			hub, file, requests := fillService(t, admin)
			guest := newGuest(t, s)
			knowsUsers := how == "hubs, files locked"
			presented := 0

			back := s.takeAway(how)
			// The first requests lose the connections of the pool. The next ones have to connect.
			for range 2 {
				wantOutage(t, admin, requests, "others")
				wantUnavailable(t, uploadText(admin, "b.txt"))
				if knowsUsers {
					continue
				}
				wantOutage(t, admin, requests, "accounts")
				wantUnavailable(t, guest.present(guest.code))
				presented++
			}
			if !knowsUsers {
				guest.AskCode(hubstest.NewEmail())
				s.Log.WaitFor(t, "code not sent", "ERROR")
			}
			hubstest.WantProblem(t, get(s.Client(t), "/hubs"), 401, "unauthenticated")
			wrong := hubstest.OtherCode(guest.code, 1)
			hubstest.WantProblem(t, guest.present(wrong), 401, "invalid_code")
			presented++
			back()

			hubstest.WaitUntil(t, "service again", func() bool {
				return get(admin, "/healthz").Status == 200
			})
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
	const attempts = 20
	statuses := map[int]int{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for range attempts {
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
	limit := hubstest.Contract[string](t, "paths", "/auth/otp/validate", "post", "description")
	if !strings.Contains(limit, fmt.Sprintf(" %d per 15m by e-mail", counted)) {
		t.Errorf("got %d attempts, with %d before, want: %s", counted, before, limit)
	}
}

// E1: /healthz is a 503 when the server can't read its tables, though the database answers.
func TestHealthReadsTheTables(t *testing.T) {
	t.Parallel()
	s, _ := start(t)
	role := "reader_" + strings.ReplaceAll(hubstest.NewUUID(), "-", "_")
	s.exec("create role " + role + " login password 'reader'")
	s.exec("grant select on all tables in schema public to " + role)
	t.Cleanup(func() {
		s.exec("drop owned by " + role)
		s.exec("drop role " + role)
	})
	reader := hubstest.Start(t, map[string]string{
		"DATABASE_URL": hubstest.WithUser(t, s.database, role, "reader"),
	})
	reader.AllowErrors("unavailable")
	c := reader.Client(t)
	get(c, "/healthz").Want(t, 200)
	const lostRight = "select on terms_acceptances "
	for begin, end := range map[string]string{
		"revoke " + lostRight + "from " + role:  "grant " + lostRight + "to " + role,
		"alter table files rename to lost":      "alter table lost rename to files",
		"alter schema public rename to another": "alter schema another rename to public",
	} {
		t.Log(begin)
		s.exec(begin)
		wantUnavailable(t, get(c, "/healthz"))
		s.exec(end)
		get(c, "/healthz").Want(t, 200)
	}
}

// D6: a column gets another type. Statements that were prepared before are of no use any more,
// on each of the connections. At most one request fails.
func TestChangedColumnType(t *testing.T) {
	t.Parallel()
	s, admin := start(t)
	s.AllowErrors("unavailable")
	for _, change := range []string{
		"alter table users alter column permission type varchar(10)",
		"alter table hubs alter column description type varchar(2000)",
	} {
		s.occupyPool("hubs", admin, "/hubs")
		s.exec(change)
		failed := 0
		for range 3 * poolSize {
			if get(admin, "/hubs").Status != 200 {
				failed++
			}
		}
		if failed > 1 {
			t.Errorf("%s: got %d failed requests, want 1 at most", change, failed)
		}
	}
}

// occupyPool makes the server open every connection that it may have: requests for the path wait
// for a locked table until each connection has one of them. All are idle afterwards.
func (s *service) occupyPool(table string, c *hubstest.Client, path string) {
	s.t.Helper()
	s.AllowErrors("unavailable") // one that waits for too long
	tx := s.lock(table)
	var isFull atomic.Bool
	var all sync.WaitGroup
	for range poolSize {
		all.Go(func() {
			for !isFull.Load() {
				get(c, path)
			}
		})
	}
	defer all.Wait()
	defer tx.Rollback()
	defer isFull.Store(true)
	s.waitForLocks(poolSize)
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
// a 503. There are never more connections than the pool has, and the database's own words
// reach no client.
func TestPoolExhausted(t *testing.T) {
	t.Parallel()
	s, c := start(t)
	s.AllowErrors(`"error":"unavailable`)
	tx := s.lock("hubs, users")
	var all sync.WaitGroup
	for range 4 * poolSize {
		all.Go(func() {
			r := get(c, "/hubs")
			wantUnavailable(t, r)
			if strings.Contains(string(r.Body), "pq: ") {
				t.Errorf("got %s, want no word of the database's", r.Body)
			}
		})
	}
	all.Wait()
	s.Log.WaitFor(t, "no free database connection")
	const locking = 1
	if n := s.count(others) - locking; n > poolSize {
		t.Errorf("got %d connections of the server, want %d at most", n, poolSize)
	}
	tx.Rollback()
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
			s.AllowErrors(`"error":"unavailable`)
			tx := s.lock("hubs")
			var all sync.WaitGroup
			for range 2 * poolSize {
				all.Go(func() { get(c, path) })
			}
			const half = poolSize / 2
			s.waitForLocks(half)
			for range poolSize {
				get(c, "/auth/session").Want(t, 200)
			}
			if got := s.count(waiting); got > half {
				t.Errorf("got %d expensive statements at a time, want %d at most", got, half)
			}
			tx.Rollback()
			all.Wait()
			for range poolSize {
				get(c, path).Want(t, 200)
			}
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
	for range 3 * poolSize {
		r := get(c, "/hubs?limit=100")
		hubstest.WantProblem(t, r, 500, "internal")
	}
	get(c, "/auth/session").Want(t, 200)
	if n := s.count(others); n > poolSize {
		t.Errorf("got %d connections, want %d at most", n, poolSize)
	}
}

// D5: an answer that breaks off in the middle of its rows is a 503. It is neither taken for the
// whole, nor asked for again: its first rows would be there twice.
func TestBrokenAnswerIsNoAnswer(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
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
		want := map[string]int{}
		for _, message := range []string{"Bind", "Execute", "Sync"} { // no Parse
			want[message[:1]] += *q.Statements
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s %s: got the messages %v, want %v", q.Method, q.Path, got, want)
		}
	}
}

// messages counts what clients have sent to PostgreSQL by the type of the message. There must
// be no start of a connection in it.
func messages(sent []byte) map[string]int {
	count := map[string]int{
		"B": 0,
		"E": 0,
		"S": 0,
	}
	for len(sent) >= 5 {
		count[string(sent[:1])]++
		sent = sent[1+binary.BigEndian.Uint32(sent[1:5]):]
	}
	return count
}

// Whatever DATABASE_URL and the settings of the role say, the server's connections have these
// settings. search_path and synchronous_commit are DATABASE_URL's if it has them, and never
// the role's.
func TestSettingsOfConnections(t *testing.T) {
	t.Parallel()
	for _, test := range hubstest.ReadCases[struct {
		Name  string
		Query string
		Want  map[string]string // regular expressions
	}](t, "test/faults/testdata/settings.json") {
		t.Run(test.Name, func(t *testing.T) {
			t.Parallel()
			proxy, through := hubstest.ProxyURL(t, hubstest.NewDatabase(t))
			proxy.Sent()
			hubstest.Start(t, map[string]string{
				"DATABASE_URL": through + "&" + test.Query,
			})
			sent := string(proxy.Sent())
			for name, want := range test.Want {
				setting := regexp.MustCompile(`(?i)\x00` + name + `\x00([^\x00]*)`)
				got := setting.FindAllStringSubmatch(sent, -1)
				isRight := regexp.MustCompile(`^(?:` + want + `)$`).MatchString
				if len(got) != 1 || !isRight(got[0][1]) {
					t.Errorf("got %q, want one %s: %s", got, name, want)
				}
			}
		})
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
