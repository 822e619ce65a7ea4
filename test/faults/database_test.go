package faults

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// An ownDatabase is one of a test's own, which the test can take away from its server.
type ownDatabase struct {
	t     *testing.T
	url   string // as the operator reaches it
	proxy *hubstest.Proxy
}

// Each of these takes it away, and returns what gives it back.

func (d ownDatabase) cut() func() {
	d.proxy.Cut()
	return d.proxy.Resume
}

func (d ownDatabase) hang() func() {
	d.proxy.Hang()
	return d.proxy.Resume
}

func (d ownDatabase) refuse() func() {
	name := databaseName(d.t, d.url)
	return d.operate(
		"alter database "+name+" allow_connections false",
		"alter database "+name+" allow_connections true",
	)
}

func (d ownDatabase) rename() func() {
	name := databaseName(d.t, d.url)
	return d.operate(
		"alter database "+name+" rename to "+name+"_away",
		"alter database "+name+"_away rename to "+name,
	)
}

func (d ownDatabase) lockAccounts() func() { return lock(d.t, d.url, "users") }
func (d ownDatabase) lockOthers() func()   { return lock(d.t, d.url, "hubs, files") }

func databaseName(t *testing.T, databaseURL string) string {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	return u.Path[1:]
}

// operate does what an operator does beside the database, and ends all connections to it.
func (d ownDatabase) operate(begin, end string) func() {
	d.t.Helper()
	operator := hubstest.WithDatabase(d.url, "postgres")
	name := databaseName(d.t, d.url)
	const terminate = `select count(pg_terminate_backend(pid)) from pg_stat_activity
		where datname like $1`
	hubstest.Query[int](d.t, operator, terminate, name+"%")
	hubstest.Exec(d.t, operator, begin)
	hubstest.Query[int](d.t, operator, terminate, name+"%")
	return func() { hubstest.Exec(d.t, operator, end) }
}

// lock takes tables from every reader and writer until unlock.
func lock(t *testing.T, databaseURL, tables string) (unlock func()) {
	t.Helper()
	tx, err := hubstest.OpenDB(t, databaseURL).Begin()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tx.Rollback() })
	if _, err := tx.Exec("lock table " + tables + " in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	return func() { tx.Rollback() }
}

// Z2: a database out of reach is a 503 of everything that needs it, never a session and never
// the lack of one. What needs no database goes on. Once it is back, all is as before.
func TestDatabaseAway(t *testing.T) {
	t.Parallel()
	for _, outage := range []struct {
		name     string
		begin    func(ownDatabase) (end func())
		accounts bool // sessions can be checked meanwhile
	}{
		{name: "cut off", begin: ownDatabase.cut},
		{name: "hung", begin: ownDatabase.hang},
		{name: "closed", begin: ownDatabase.refuse},
		{name: "renamed", begin: ownDatabase.rename},
		{name: "accounts locked", begin: ownDatabase.lockAccounts},
		{name: "others locked", begin: ownDatabase.lockOthers, accounts: true},
	} {
		t.Run(outage.name, func(t *testing.T) {
			t.Parallel()
			direct := hubstest.NewDatabase(t)
			proxy, through := hubstest.ProxyURL(t, direct)
			s := startOn(t, through)
			s.AllowErrors("unavailable", "code not sent")
			admin, _ := s.Member(t, "admin")
			hub := location(t, createHub(admin, "North"))
			file := location(t, admin.Upload("a.txt", []byte("content")))
			guest := newGuest(t, s)

			end := outage.begin(ownDatabase{t: t, url: direct, proxy: proxy})
			// The first requests lose the connections of the pool. The next ones have to connect.
			for range 2 {
				wantOutage(t, admin, otherCalls(hub, file))
				wantUnavailable(t, admin.Elsewhere().Upload("b.txt", []byte("content")))
				if !outage.accounts {
					wantOutage(t, admin, accountCalls)
					wantUnavailable(t, guest.present(guest.code))
				}
			}
			if !outage.accounts {
				guest.AskCode(hubstest.NewEmail())
				s.Log.WaitFor(t, "code not sent", "ERROR")
			}
			hubstest.WantProblem(t, get(s.Client(t), "/hubs"), 401, "unauthenticated")
			wrong := hubstest.OtherCode(guest.code, 1)
			hubstest.WantProblem(t, guest.present(wrong), 401, "invalid_code")
			end()

			hubstest.WaitUntil(t, "service again", func() bool {
				return get(admin, "/healthz").Status == 200
			})
			name := get(admin, hub).Want(t, 200).Field(t, "name")
			if name != "North" {
				t.Errorf("a hub after refused changes: got %q, want %q", name, "North")
			}
			admin.WantFile(file, "content")
			files := hubstest.Query[int](t, direct, "select count(*) from files")
			if files != 1 {
				t.Errorf("after refused uploads: got %d files, want 1", files)
			}
			wantOneSession(t, guest)
		})
	}
}

// A call is a request and what it sends.
type call struct{ method, path, body string }

// accountCalls need the table of users, and no other one.
var accountCalls = []call{
	{"GET", "/auth/session", ""},
	{"POST", "/auth/logout", ""},
	{"POST", "/terms/acceptance", `{"version":"any"}`},
}

// otherCalls need the tables of hubs and files.
func otherCalls(hub, file string) []call {
	return []call{
		{"GET", "/hubs", ""},
		{"GET", hub, ""},
		{"POST", "/hubs", `{"name":"South"}`},
		{"PATCH", hub, `{"name":"South"}`},
		{"DELETE", hub, ""},
		{"GET", file, ""},
		{"GET", "/healthz", ""},
		{"HEAD", "/healthz", ""},
	}
}

// wantOutage sends the calls at once. None of the answers sets or clears the cookie.
func wantOutage(t *testing.T, c *hubstest.Client, calls []call) {
	t.Helper()
	var all sync.WaitGroup
	for _, call := range calls {
		all.Go(func() {
			r := c.Elsewhere().Do(call.method, call.path, call.body)
			wantUnavailable(t, r)
			if cookie := r.Header.Get("Set-Cookie"); cookie != "" {
				t.Errorf("got the cookie %q with a 503, want none", cookie)
			}
		})
	}
	all.Wait()
}

// wantOneSession presents the guest's code at once from several addresses: it is still good,
// for one of them.
func wantOneSession(t *testing.T, guest guest) {
	t.Helper()
	var mu sync.Mutex
	sessions := 0
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			r := guest.present(guest.code)
			mu.Lock()
			defer mu.Unlock()
			if r.Status == 200 {
				sessions++
				return
			}
			hubstest.WantProblem(t, r, 401, "invalid_code")
		})
	}
	all.Wait()
	if sessions != 1 {
		t.Errorf("the code of a 503: got %d sessions, want 1", sessions)
	}
}

// O4: an attempt that ends in a 503 stays counted. So an outage gives nobody more guesses.
func TestAttemptsCountWhileTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	proxy, through := hubstest.ProxyURL(t, hubstest.NewDatabase(t))
	s := startOn(t, through)
	s.AllowErrors("unavailable")
	attempts := func(g guest) (n int) {
		wrong := hubstest.OtherCode(g.code, 1)
		for g.present(wrong).Status != 429 && n < 100 {
			n++
		}
		return n
	}
	want := attempts(newGuest(t, s))
	guest := newGuest(t, s)
	proxy.Cut()
	const away = 4
	for range away {
		wantUnavailable(t, guest.present(guest.code))
	}
	proxy.Resume()
	if got := away + attempts(guest); got != want {
		t.Errorf("got %d attempts, want %d as without an outage", got, want)
	}
}

// E1: /healthz is a 503 when the server can't read its tables, though the database answers.
func TestHealthReadsTheTables(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	role := "reader_of_" + databaseName(t, database)
	hubstest.Exec(t, database, "create role "+role+" login password 'reader'")
	hubstest.Exec(t, database, "grant select on all tables in schema public to "+role)
	t.Cleanup(func() {
		hubstest.Exec(t, database, "drop owned by "+role)
		hubstest.Exec(t, database, "drop role "+role)
	})
	reader := hubstest.WithUser(t, database, role, "reader")
	s := startOn(t, reader)
	s.AllowErrors("unavailable")
	c := s.Client(t)
	get(c, "/healthz").Want(t, 200)
	for _, change := range []struct{ name, begin, end string }{
		{
			name:  "a right is lost",
			begin: "revoke select on terms_acceptances from " + role,
			end:   "grant select on terms_acceptances to " + role,
		},
		{
			name:  "a table is lost",
			begin: "alter table files rename to lost",
			end:   "alter table lost rename to files",
		},
		{
			name:  "the tables are in another schema",
			begin: "alter schema public rename to other",
			end:   "alter schema other rename to public",
		},
	} {
		hubstest.Exec(t, database, change.begin)
		t.Log(change.name)
		wantUnavailable(t, get(c, "/healthz"))
		hubstest.Exec(t, database, change.end)
		get(c, "/healthz").Want(t, 200)
	}
}

// D6: a column gets another type. Statements that were prepared before are of no use any more,
// on each of the connections. At most one request fails.
func TestChangedColumnType(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	s.AllowErrors("unavailable")
	admin, _ := s.Member(t, "admin")
	for _, change := range []string{
		"alter table users alter column permission type varchar(10)",
		"alter table hubs alter column description type varchar(2000)",
	} {
		occupyPool(t, s, "hubs", admin, "/hubs")
		hubstest.Exec(t, s.Env["DATABASE_URL"], change)
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
func occupyPool(
	t *testing.T, s *hubstest.Server, table string, c *hubstest.Client, path string,
) {
	t.Helper()
	s.AllowErrors("unavailable") // one that waits for too long
	database := s.Env["DATABASE_URL"]
	unlock := lock(t, database, table)
	full := make(chan struct{})
	var all sync.WaitGroup
	for range poolSize {
		all.Go(func() {
			for isOpen(full) {
				get(c, path)
			}
		})
	}
	waitForLocks(t, database, poolSize)
	close(full)
	unlock()
	all.Wait()
}

func isOpen(c chan struct{}) bool {
	select {
	case <-c:
		return false
	default:
		return true
	}
}

// waitForLocks waits until so many connections wait for a lock.
func waitForLocks(t *testing.T, database string, n int) {
	t.Helper()
	hubstest.WaitUntil(t, "connections that wait for a lock", func() bool {
		return waiting(t, database) >= n
	})
}

// waiting counts the connections that wait for a lock.
func waiting(t *testing.T, database string) int {
	t.Helper()
	return hubstest.Query[int](t, database, `select count(*) from pg_stat_activity
		where datname = current_database() and wait_event_type = 'Lock'`)
}

// D2: while every connection is busy, a request that needs one waits a bounded time, and is then
// a 503. There are never more connections than the pool has, and the database's own words
// reach no client.
func TestPoolExhausted(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	s.AllowErrors(`"error":"unavailable`)
	database := s.Env["DATABASE_URL"]
	c, _ := s.Member(t, "member")
	unlock := lock(t, database, "hubs, users")
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
	const ours = 2 // this one, and the one with the lock
	open := hubstest.Query[int](t, database,
		"select count(*) from pg_stat_activity where datname = current_database()")
	if open > poolSize+ours {
		t.Errorf("got %d connections of the server, want %d at most", open-ours, poolSize)
	}
	unlock()
	get(c, "/hubs").Want(t, 200)
}

// H6: lists with a name filter, and deep pages, hold at most half of the connections. So a
// session check finds one however long they take.
func TestExpensiveStatementsLeaveConnections(t *testing.T) {
	t.Parallel()
	for _, query := range []string{"filters[name]=a", "offset=101"} {
		t.Run(query, func(t *testing.T) {
			t.Parallel()
			s := hubstest.Start(t)
			s.AllowErrors(`"error":"unavailable`)
			database := s.Env["DATABASE_URL"]
			c, _ := s.Member(t, "member")
			unlock := lock(t, database, "hubs")
			var all sync.WaitGroup
			for range 2 * poolSize {
				all.Go(func() { get(c, "/hubs?"+query) })
			}
			const half = poolSize / 2
			waitForLocks(t, database, half)
			for range poolSize {
				get(c, "/auth/session").Want(t, 200)
			}
			if got := waiting(t, database); got > half {
				t.Errorf("got %d expensive statements at a time, want %d at most", got, half)
			}
			unlock()
			all.Wait()
			for range poolSize {
				get(c, "/hubs?"+query).Want(t, 200)
			}
		})
	}
}

// A row that the server can't take is a fault inside, and no outage. The statement gives its
// connection back, however often that happens.
func TestBrokenRowsAreNoOutage(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	s.AllowErrors(`"error":"internal`, "unavailable")
	database := s.Env["DATABASE_URL"]
	admin, _ := s.Member(t, "admin")
	hubstest.Exec(t, database, "insert into hubs (name) select n::text from generate_series(1, 100) n")
	hubstest.Exec(t, database, "alter table hubs alter column created_at drop default")
	hubstest.Exec(t, database, "alter table hubs drop constraint hubs_created_at_check")
	hubstest.Exec(t, database, "alter table hubs alter column created_at type text using 'no time'")
	get(admin, "/hubs?limit=100") // may be the 503 of a changed column
	for range 3 * poolSize {
		r := get(admin, "/hubs?limit=100")
		hubstest.WantProblem(t, r, 500, "internal")
	}
	get(admin, "/auth/session").Want(t, 200)
	open := hubstest.Query[int](t, database, `select count(*) from pg_stat_activity
		where datname = current_database() and pid <> pg_backend_pid()`)
	if open > poolSize {
		t.Errorf("got %d connections, want %d at most", open, poolSize)
	}
}

// D5: an answer that breaks off in the middle of its rows is a 503. It is neither taken for the
// whole, nor asked for again: its first rows would be there twice.
func TestBrokenAnswerIsNoAnswer(t *testing.T) {
	t.Parallel()
	direct := hubstest.NewDatabase(t)
	hubstest.Exec(t, direct, `insert into hubs (name, description)
		select 'hub ' || to_char(n, 'FM000'), repeat('ü', 2000) from generate_series(1, 100) n`)
	proxy, through := hubstest.ProxyURL(t, direct)
	s := startOn(t, through)
	s.AllowErrors("unavailable")
	c, _ := s.Member(t, "member")
	proxy.WhenAnswered("hub 090", proxy.Drop)
	r := get(c, "/hubs?limit=100")
	wantUnavailable(t, r)
	get(c, "/hubs?limit=100").Want(t, 200)
}

// D1: a connection that ends after a statement is done and before its answer. A read is sent
// again. A write is not: the client gets a 503, and the write is there once.
func TestWriteIsNotDoneTwice(t *testing.T) {
	t.Parallel()
	direct := hubstest.NewDatabase(t)
	proxy, through := hubstest.ProxyURL(t, direct)
	s := startOn(t, through)
	s.AllowErrors("unavailable")
	admin, _ := s.Member(t, "admin")
	first := createHub(admin, "first").Want(t, 201)
	id := first.Field(t, "hubId").(string)
	admin.Upload("first.txt", nil).Want(t, 201)
	// loseAnswerTo drops the connection on which the text is sent, once the answer begins.
	loseAnswerTo := func(text string) {
		proxy.When(text, func() { proxy.WhenAnswered("", proxy.Drop) })
	}

	loseAnswerTo(id)
	get(admin, "/hubs/"+id).Want(t, 200)
	loseAnswerTo("once")
	wantUnavailable(t, createHub(admin, "once"))
	if n := countHubs(t, direct, "once"); n != 1 {
		t.Errorf("one request, whose answer was lost: got %d hubs, want 1", n)
	}
	loseAnswerTo("once.txt")
	wantUnavailable(t, admin.Upload("once.txt", []byte("content")))
	files := hubstest.Query[int](t, direct, "select count(*) from files")
	if files != 2 {
		t.Errorf("one more upload, whose answer was lost: got %d files, want 2", files)
	}
	// A second DELETE would find nothing. The client would be told that there was no such hub.
	loseAnswerTo(id)
	wantUnavailable(t, admin.Do("DELETE", "/hubs/"+id, nil))
	hubstest.WantProblem(t, get(admin, "/hubs/"+id), 404, "not_found")

	// A second "user add" would find the user of the first one, and say that nothing was changed.
	email := hubstest.NewEmail()
	loseAnswerTo(email)
	code, out, errOut := hubstest.Run(s.Env, "user", "add", email)
	if code != 1 || out != "" || strings.Contains(errOut, "nothing") {
		t.Errorf("user add: got exit status %d, %q, %q, want 1 and an open outcome", code, out, errOut)
	}
	n := hubstest.Query[int](t, direct, "select count(*) from users where email = $1", email)
	if n != 1 {
		t.Errorf("user add: got %d users, want 1", n)
	}
}

func countHubs(t *testing.T, database, name string) int {
	t.Helper()
	return hubstest.Query[int](t, database, "select count(*) from hubs where name = $1", name)
}

// messages counts what clients have sent to PostgreSQL by the type of the message. There must
// be no start of a connection in it.
func messages(sent []byte) map[string]int {
	count := map[string]int{}
	for len(sent) >= 5 {
		count[string(sent[:1])]++
		sent = sent[1+binary.BigEndian.Uint32(sent[1:5]):]
	}
	return count
}

// A request is one exchange of messages for each statement: nothing is parsed anew, and nothing
// is sent besides.
func TestStatementsArePreparedOnce(t *testing.T) {
	t.Parallel()
	proxy, through := hubstest.ProxyURL(t, hubstest.NewDatabase(t))
	s := startOn(t, through)
	c, _ := s.Member(t, "admin")
	hub := location(t, createHub(c, "North"))
	file := location(t, c.Upload("a.txt", []byte("content")))
	for _, test := range []struct {
		call
		statements int
	}{
		{call{"GET", "/auth/session", ""}, 1},
		{call{"GET", "/hubs?filters[name]=o&limit=7", ""}, 2},
		{call{"GET", hub, ""}, 2},
		{call{"PATCH", hub, `{"name":"South"}`}, 2},
		{call{"GET", file, ""}, 2},
		{call{"GET", "/healthz", ""}, 1},
		{call{"GET", "/openapi.json", ""}, 0},
	} {
		c.Elsewhere().Do(test.method, test.path, test.body) // it may prepare
		proxy.Sent()
		c.Elsewhere().Do(test.method, test.path, test.body)
		got := messages(proxy.Sent())
		want := map[string]int{}
		if n := test.statements; n > 0 {
			want = map[string]int{"B": n, "E": n, "S": n} // Bind, Execute, Sync; no Parse
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%v: got the messages %v, want %v", test.call, got, want)
		}
	}
}

// Whatever DATABASE_URL and the settings of the role say, the server's connections have these
// settings. search_path and synchronous_commit are DATABASE_URL's if it has them, and never
// the role's.
func TestSettingsOfConnections(t *testing.T) {
	t.Parallel()
	fixed := map[string]string{
		"timezone":           "UTC",
		"plan_cache_mode":    "force_generic_plan",
		"search_path":        `"$user", public`,
		"synchronous_commit": "on",
	}
	chosen := map[string]string{
		"search_path":        "public",
		"synchronous_commit": "local",
	}
	others := "statement_timeout=0&timezone=Asia/Tokyo&plan_cache_mode=force_custom_plan"
	for _, test := range []struct {
		name, query string
		want        map[string]string
	}{
		{name: "none", query: "", want: fixed},
		{name: "lower case", query: others, want: fixed},
		{name: "upper case", query: strings.ToUpper(others), want: fixed},
		{name: "chosen", query: "search_path=public&synchronous_commit=local", want: chosen},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			proxy, through := hubstest.ProxyURL(t, hubstest.NewDatabase(t))
			proxy.Sent()
			startOn(t, through+"&"+test.query)
			sent := strings.Split(string(proxy.Sent()), "\x00")
			limit := startParameter(sent, "statement_timeout")
			if limit == "" || limit == "0" {
				t.Errorf("statement_timeout: got %q, want a limit", limit)
			}
			for name, want := range test.want {
				if got := startParameter(sent, name); got != want {
					t.Errorf("%s: got %q, want %q", name, got, want)
				}
			}
		})
	}
}

// startParameter returns the values of a parameter in a message that starts a connection.
func startParameter(sent []string, name string) string {
	var values []string
	for i, text := range sent {
		if strings.EqualFold(text, name) && i+1 < len(sent) {
			values = append(values, sent[i+1])
		}
	}
	return strings.Join(values, ", ")
}

// D1: a database that does not even take connections, because its machine is gone or its queue
// is full, is given up in time, whatever connect_timeout says.
func TestConnectingEndsInTime(t *testing.T) {
	t.Parallel()
	addr := fullQueue(t)
	env := hubstest.ServerEnv(t, map[string]string{
		"DATABASE_URL": "postgres://nobody@" + addr + "/none?sslmode=disable&connect_timeout=600",
	})
	code, _, errOut := hubstest.Run(env, "serve") // killed after a while: status -1
	if code != 1 {
		t.Errorf("got exit status %d, want 1\n%s", code, errOut)
	}
}

// fullQueue returns an address where nobody accepts, and whose queue of connections is full.
func fullQueue(t *testing.T) string {
	t.Helper()
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(socket) })
	loopback := &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	err = errors.Join(syscall.Bind(socket, loopback), syscall.Listen(socket, 0))
	if err != nil {
		t.Fatal(err)
	}
	bound, err := syscall.Getsockname(socket)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", bound.(*syscall.SockaddrInet4).Port)
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
	s := hubstest.Start(t)
	c, email := s.Member(t, "member")
	tx, err := hubstest.OpenDB(t, s.Env["DATABASE_URL"]).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec("lock table files in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	answer := make(chan *hubstest.Response)
	go func() { answer <- c.Upload("a.txt", []byte("content")) }()
	waitForLocks(t, s.Env["DATABASE_URL"], 1)
	if _, err := tx.Exec("delete from users where lower(email) = lower($1)", email); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	hubstest.WantProblem(t, <-answer, 401, "unauthenticated")
}
