//go:build moving

package main

import (
	"bytes"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// dbWait is how long any request may take whatever the database does: generous, yet
// far below the time for which a request would be stuck without the store's bounds.
const dbWait = 6 * dbTimeout

// emptyDatabase is a database without the schema, owned by an ordinary role.
func emptyDatabase(t testing.TB) string {
	t.Helper()
	pg, err := startShared()
	if err != nil {
		t.Fatal("no PostgreSQL: ", err)
	}
	name := fmt.Sprintf("empty_%d", serial.Add(1))
	execSQL(t, pg.url, "create role "+name+" login password 'owner'")
	execSQL(t, pg.url, "create database "+name+" owner "+name)
	t.Cleanup(func() {
		execSQL(t, pg.url, "drop database "+name+" with (force)")
		execSQL(t, pg.url, "drop role "+name)
	})
	u, err := url.Parse(withDatabase(pg.url, name))
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, "owner")
	return u.String()
}

// schemaOf is all that a migration could change, as text.
func schemaOf(t testing.TB, databaseURL string) string {
	t.Helper()
	return queryValue[string](t, databaseURL, `
		select coalesce(string_agg(line, E'\n' order by line), '') from (
			select format('%s.%s %s %s %s', table_name, column_name, data_type, is_nullable, column_default) as line
			from information_schema.columns where table_schema = 'public'
			union all select indexdef from pg_indexes where schemaname = 'public'
			union all select format('%s %s %s', conrelid::regclass, conname, pg_get_constraintdef(oid))
			from pg_constraint where connamespace = 'public'::regnamespace
			union all select extname from pg_extension) as lines`)
}

// The schema may be applied again and again, by many at once, by a role that owns
// the database and no more, and leaves what is there as it is.
func TestSchemaAppliesAgain(t *testing.T) {
	t.Parallel()
	database := emptyDatabase(t)
	if _, err := openStore(database); err == nil || !strings.Contains(err.Error(), "migrate") {
		t.Errorf("a database without the schema: %v", err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := applySchema(database); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got, want := schemaOf(t, database), schemaOf(t, newDatabase(t)); got != want || !strings.Contains(got, "files") {
		t.Errorf("the schema is\n%s\nwant\n%s", got, want)
	}
	before := schemaOf(t, database)
	id := testUser(t, database, newEmail(), "admin")
	execSQL(t, database, "insert into hubs (name) values ('North')")
	if err := applySchema(database); err != nil {
		t.Error(err)
	}
	if schemaOf(t, database) != before || queryValue[string](t, database, "select permission from users where user_id = $1", id) != "admin" ||
		queryValue[int](t, database, "select count(*) from hubs") != 1 {
		t.Error("the second time has changed something")
	}
}

// What the code relies on, the tables keep to whoever writes.
func TestSchemaConstraints(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	const check, unique, foreign, null = "23514", "23505", "23503", "23502"
	for _, test := range []struct{ statement, code string }{
		{"insert into users (email) values ('a@b.example')", ""}, // enough at the psql prompt
		{"insert into users (email) values ('A@B.EXAMPLE')", unique},
		{"insert into users (email) values (null)", null},
		{"insert into users (email) values (repeat('a', 244) || '@b.example')", ""},
		{"insert into users (email) values (repeat('a', 245) || '@b.example')", check},
		{"insert into users (email, permission) values ('c@b.example', 'root')", check},
		{"insert into users (email, permission) values ('c@b.example', 'Admin')", check},
		{"insert into hubs (name) values ('North')", ""},
		{"insert into hubs (name) values ('North')", ""}, // two hubs may share a name
		{"insert into hubs (name) values ('')", check},
		{"insert into hubs (name) values (repeat('ü', 100))", ""},
		{"insert into hubs (name) values (repeat('n', 101))", check},
		{"insert into hubs (name, description) values ('n', repeat('ü', 2000))", ""},
		{"insert into hubs (name, description) values ('n', repeat('d', 2001))", check},
		{"insert into hubs (name, status) values ('n', 'gone')", check},
		{"insert into files (name, content_type, size) values (repeat('n', 255), 't', 0)", ""},
		{"insert into files (name, content_type, size) values (repeat('ü', 128), 't', 0)", check},
		{"insert into files (name, content_type, size) values ('', 't', 0)", check},
		{"insert into files (name, content_type, size) values ('n', 't', -1)", check},
		{"insert into files (name, content_type, size, user_id) values ('n', 't', 1, gen_random_uuid())", foreign},
		{"insert into files (name, content_type, size, created_at) values ('n', 't', 1, null)", null},
		{"insert into files (name, content_type, size) values ('n', null, 1)", null},
		{"insert into hubs (name, updated_at) values ('n', null)", null},
		{"insert into users (email, suspended) values ('c@b.example', null)", null},
		{"insert into terms_acceptances (user_id, version) values (gen_random_uuid(), 'v')", foreign},
		{"insert into terms_acceptances (user_id, version) select user_id, 'v' from users where email = 'a@b.example'", ""},
		{"insert into terms_acceptances (user_id, version) select user_id, 'v' from users where email = 'a@b.example'", unique},
		{"insert into files (name, content_type, size, user_id) select 'kept', 't', 1, user_id from users where email = 'a@b.example'", ""},
		{"delete from users where email = 'a@b.example'", ""},
	} {
		_, err := testDB(t, database).Exec(test.statement)
		refused, _ := errors.AsType[*pq.Error](err)
		if err != nil && refused == nil || refused != nil && string(refused.Code) != test.code || refused == nil && test.code != "" {
			t.Errorf("%s: %v, want %q", test.statement, err, test.code)
		}
	}
	// With the user go his acceptances; his files stay for those who know the path.
	if n := queryValue[int](t, database, "select count(*) from terms_acceptances"); n != 0 {
		t.Errorf("%d acceptances of a user who is gone", n)
	}
	if n := queryValue[int](t, database, "select count(*) from files where name = 'kept' and user_id is null"); n != 1 {
		t.Errorf("%d files of a user who is gone", n)
	}
	// The two forms of an address are one: else a user could be added whom no request
	// can name, or mail be sent to a text that was never checked.
	for _, address := range []string{
		"a@b", "a.b@c.d", "a+b@c.example", "o'hara@c.example", "a@b-c.example", "a@1.2", "A@B.C", "{a}|b~@c.d", "a`b@c.d",
		"", "a", "@", "a@", "@b", ".a@b.c", "a.@b.c", "a..b@c.d", "a@b..c", "a@.b", "a@b.", "a@-b.c", "a@b-.c", "a@b_c.d", "a b@c.d",
		"a@b c.d", " a@b.c", "a@b.c ", "a@b.c\n", "\na@b.c", "a@b.c\r\nBcc: x@y.z", "a@@b.c", "a@b@c.d", `"a b"@c.d`, "a@[1.2.3.4]",
		"Ada <a@b.c>", "a@b.c,d@e.f", "a;b@c.d", "ä@b.c", "a@ä.b", "a@xn--4ca.b", "\u212a@b.c", "a@\u0130.c", "a(b)@c.d", "a\\@b.c", "a@b.c\t",
	} {
		_, err := testDB(t, database).Exec("insert into users (email) values ($1)", address)
		if taken := err == nil; taken != emailForm.MatchString(address) {
			t.Errorf("%q: the table says %v, the code %v", address, taken, !taken)
		}
	}
}

// 503 is for a database out of reach; a faulty statement is a bug, and no reason
// to try again.
func TestReachable(t *testing.T) {
	t.Parallel()
	idle, err := openStore(newDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	defer idle.db.Close()
	classify := idle.classifyDBError
	isUnavailable := func(err error) bool {
		p, ok := errors.AsType[*problem](err)
		return ok && p.Status == 503 && p.retryAfter > 0
	}
	for code, want := range map[pqerror.Code]bool{
		"08006": true, // connection failure
		"25006": true, // read only: a standby
		"53100": true, // disk full
		"53300": true, // too many connections
		"57014": true, // statement timeout
		"57P01": true, // shut down
		"57P03": true, // starting up
		"58030": true, // I/O error
		"22021": false, "23505": false, "23514": false, "42601": false, "42P01": false, "40001": false, "XX000": false,
	} {
		err := &pq.Error{Code: code}
		if got := classify(fmt.Errorf("within: %w", err)); isUnavailable(got) != want || !want && !errors.Is(got, err) {
			t.Errorf("%s: %v", code, got)
		}
	}
	// The user was deleted between the session check and the statement.
	if p, ok := errors.AsType[*problem](classify(&pq.Error{Code: "23503"})); !ok || p.Status != 401 {
		t.Errorf("a row of a user who is gone: got %v, want a 401", p)
	}
	for _, code := range []pqerror.Code{"28000", "28P01", "3D000", "55000"} {
		if !isUnavailable(classify(&pq.Error{Code: code, Severity: "FATAL"})) {
			t.Errorf("a connection refused with %s counts as a faulty statement", code)
		}
	}
	for _, err := range []error{io.EOF, net.ErrClosed, os.ErrDeadlineExceeded, sql.ErrConnDone} {
		if !isUnavailable(classify(err)) {
			t.Errorf("%v counts as a faulty statement", err)
		}
	}
	if classify(nil) != nil {
		t.Error("an outcome counts as an error")
	}

	database := newDatabase(t)
	st, err := openStore(database)
	if err != nil {
		t.Fatal(err)
	}
	defer st.db.Close()
	var n int
	for query, want := range map[string]bool{"select pg_sleep(300)": true, "select 1/0": false, "select 'x'": false, "selec": false, "select no_such_thing": false} {
		start := time.Now()
		if err := readOnce(st, query, nil, &n); err == nil || isUnavailable(err) != want || time.Since(start) > dbWait {
			t.Errorf("%s: %v after %v", query, err, time.Since(start))
		}
	}
	// Who gave up waiting does not leave the statement to go on.
	waitUntil(t, "no statement under way", func() bool {
		return queryValue[int](t, database, `select count(*) from pg_stat_activity
			where datname = current_database() and state = 'active' and pid <> pg_backend_pid()`) == 0
	})
	if found, err := st.row(read("select 1 where false"), &n); found || err != nil {
		t.Errorf("a statement without a row: found %v, %v", found, err)
	}
	if err := readOnce(st, "select 1", nil, &n); err != nil {
		t.Error("no service after the errors: ", err)
	}
}

// readOnce is row without the word whether there was a row.
func readOnce(st *store, text string, args []any, dest ...any) error {
	_, err := st.row(read(text, args...), dest...)
	return err
}

// A statement whose rows can't be read gives its connection back, and its slot, whatever
// becomes of the request: an error, or a panic.
func TestConnectionsComeBack(t *testing.T) {
	t.Parallel()
	st, err := openStore(newDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	defer st.db.Close()
	var n int
	for what, run := range map[string]func() error{
		"a row of another type": func() error { return readOnce(st, "select 'x' from generate_series(1, 10000)", nil, &n) },
		"too many columns":      func() error { return readOnce(st, "select 1, 2 from generate_series(1, 10000)", nil, &n) },
		"a fault while running": func() error { return readOnce(st, "select 1 / (n - 5000) from generate_series(1, 10000) n", nil, &n) },
		"a faulty statement":    func() error { return readOnce(st, "selec", nil, &n) },
		"a wrong argument":      func() error { return readOnce(st, "select $1::int", []any{"x"}, &n) },
		"a panic": func() (err error) {
			defer func() { err = fmt.Errorf("%v", recover()) }()
			return st.rows(read("select 1 from generate_series(1, 10000)"), func(*sql.Rows) error { panic("in scan") })
		},
	} {
		for range 2 * poolSize {
			if err := run(); err == nil {
				t.Errorf("%s: no error", what)
			}
		}
		if pool := st.db.Stats(); pool.InUse != 0 || len(st.slots) != 0 {
			t.Errorf("%s: %d connections and %d slots are still taken", what, pool.InUse, len(st.slots))
		}
	}
	if err := readOnce(st, "select 1", nil, &n); err != nil {
		t.Error("no service after the errors: ", err)
	}
}

// DATABASE_URL may say what it likes: the bounds of the store hold.
func TestBoundsOverrideTheURL(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	overrides := map[string]string{"statement_timeout": "0", "timezone": "Asia/Tokyo", "plan_cache_mode": "force_custom_plan"}
	bounds := map[string]string{"statement_timeout": "2s", "timezone": "UTC", "plan_cache_mode": "force_generic_plan"}
	// PostgreSQL takes the name of a setting in any letter case.
	for name, inCase := range map[string]func(string) string{"lower case": strings.ToLower, "upper case": strings.ToUpper} {
		t.Run(name, func(t *testing.T) {
			u, err := url.Parse(database)
			if err != nil {
				t.Fatal(err)
			}
			query := u.Query()
			for setting, value := range overrides {
				query.Set(inCase(setting), value)
			}
			u.RawQuery = query.Encode()
			st, err := openStore(u.String())
			if err != nil {
				t.Fatal(err)
			}
			defer st.db.Close()
			for setting, want := range bounds {
				var got string
				err := readOnce(st, "select current_setting($1)", []any{setting}, &got)
				if err != nil || got != want {
					t.Errorf("%s: got %q, want %q, %v", setting, got, want, err)
				}
			}
		})
	}
}

// D1: a database that does not even take connections (its machine is gone, its queue is
// full) is given up in time, whatever connect_timeout says.
func TestConnectingEndsInTime(t *testing.T) {
	t.Parallel()
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(socket)
	if err := errors.Join(syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(socket, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(socket)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	for full := false; !full; { // nobody accepts, so the queue soon is
		conn, err := net.DialTimeout("tcp", addr, 100*time.Millisecond)
		if full = err != nil; !full {
			t.Cleanup(func() { conn.Close() })
		}
	}
	for _, limit := range []string{"", "&connect_timeout=60"} {
		start := time.Now()
		st, err := openStore("postgres://nobody@" + addr + "/none?sslmode=disable" + limit)
		if wait := time.Since(start); err == nil || wait > dbWait {
			t.Errorf("%q: %v, %v after %v", limit, st, err, wait)
		}
	}
}

// Where many requests prepare a statement at the same moment, one of them is kept, and
// the others are closed: no connection holds it twice.
func TestOneStatementIsKept(t *testing.T) {
	t.Parallel()
	proxy, through := proxyURL(t, newDatabase(t))
	st, err := openStore(through)
	if err != nil {
		t.Fatal(err)
	}
	defer st.db.Close()
	const text = "select 4711 + $1::int"
	proxy.hang()
	var all sync.WaitGroup
	for range poolSize {
		all.Go(func() { readOnce(st, text, []any{1}, new(int)) }) // on a machine too slow it may fail: no matter
	}
	waitUntil(t, "all of them at it", func() bool { return len(st.slots) == poolSize })
	proxy.resume()
	all.Wait()
	for range poolSize { // each connection of the pool, once
		conn, err := st.db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var n int
		if err := conn.QueryRowContext(t.Context(), "select count(*) from pg_prepared_statements where statement = $1", text).Scan(&n); err != nil || n > 1 {
			t.Errorf("a connection holds the statement %d times, %v", n, err)
		}
	}
}

// A setting that is no connection string ends the start without a word of it: it may
// hold a password.
func TestDatabaseURLIsNotShown(t *testing.T) {
	t.Parallel()
	for _, databaseURL := range []string{
		"postgres://u:hunter2@127.0.0.1:port/db", "postgres://u:hunter2@127.0.0.1:1/db?sslmode=disable", "hunter2",
		"postgres://u:hunter2@127.0.0.1:1/db?sslmode=hunter2", "password=hunter2 hunter2",
	} {
		for _, command := range []string{"serve", "migrate"} {
			env := serverEnv(t, map[string]string{"DATABASE_URL": databaseURL})
			code, stdout, stderr := runCLI(env, command)
			if code == 0 || stderr == "" || strings.Contains(stdout+stderr, "hunter2") {
				t.Errorf("%s with %s: exit %d, %s%s", command, databaseURL, code, stdout, stderr)
			}
		}
	}
}

// A request is one message exchange a statement: nothing is parsed or planned anew,
// nothing sent besides the statements themselves. Seen on the wire.
func TestRequestsUsePreparedStatements(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	tap := newWireTap(t, database)
	s := startServer(t, map[string]string{"DATABASE_URL": tap.url})
	c, _ := s.member(t, "admin")
	hubID := c.do("POST", "/hubs", map[string]string{"name": "North"}).want(t, 201).field(t, "hubId").(string)
	f := c.upload("a.txt", []byte("content")).stored(t)
	for name, test := range map[string]struct {
		statements int
		run        func()
	}{
		"session":  {1, func() { c.do("GET", "/auth/session", nil).want(t, 200) }},
		"list":     {2, func() { c.do("GET", "/hubs?filters[name]=o&filters[status]=active&limit=7", nil).want(t, 200) }},
		"hub":      {2, func() { c.do("GET", "/hubs/"+hubID, nil).want(t, 200) }},
		"change":   {2, func() { c.do("PATCH", "/hubs/"+hubID, map[string]string{"name": "South"}).want(t, 200) }},
		"terms":    {2, func() { c.acceptTerms() }},
		"upload":   {4, func() { c.upload("a.txt", nil).want(t, 201) }},
		"download": {2, func() { c.do("GET", f.Path, nil).want(t, 200) }},
		"health":   {1, func() { c.do("GET", "/healthz", nil).want(t, 200) }},
		"logout":   {1, func() { c.elsewhere().do("POST", "/auth/logout", nil, "Cookie", s.cookieName()+"="+c.token()) }},
		"contract": {0, func() { c.do("GET", "/openapi.json", nil).want(t, 200) }},
	} {
		token := c.token()
		test.run() // the first may prepare
		c.setToken(token)
		tap.reset()
		test.run()
		c.setToken(token)
		// Bind, Execute and Sync for each statement, and nothing else: no Parse, no Query.
		want := map[string]int{}
		if n := test.statements; n > 0 {
			want = map[string]int{"B": n, "E": n, "S": n}
		}
		if got := tap.reset(); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: messages %v, want %v", name, got, want)
		}
	}
}

// D1: a connection that ends after the statement is done and before the answer, as
// when a backend is killed or terminated while it waits for a standby. lib/pq calls
// that driver.ErrBadConn, upon which database/sql sends the statement again.
func TestWriteIsNotDoneTwice(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	tap := newWireTap(t, database)
	s := startServer(t, map[string]string{"DATABASE_URL": tap.url})
	s.allowErrors(`"error":"unavailable`)
	s.env["DATABASE_URL"] = database // for the checks
	c, _ := s.member(t, "admin")
	c.do("POST", "/hubs", map[string]string{"name": "first"}).want(t, 201)
	c.upload("first", nil).want(t, 201)

	tap.endAfter("once")
	r := c.do("POST", "/hubs", map[string]string{"name": "once"})
	if n := queryValue[int](t, database, "select count(*) from hubs where name = 'once'"); n != 1 || r.status != 201 && r.status != 503 {
		t.Errorf("%d hubs by one request: %v", n, r)
	}
	tap.endAfter("once.txt")
	stored := 1
	if r := c.upload("once.txt", []byte("content")); r.status == 201 {
		stored++
		c.wantFile(t, r.stored(t), "content")
	} else {
		wantProblem(t, r, 503, "unavailable")
	}
	s.wantStored(t, stored)

	// A delete that is sent again finds nothing: the client would be told that there was no such hub.
	id := queryValue[string](t, database, "select hub_id from hubs where name = 'first'")
	tap.endAfter(id)
	wantProblem(t, c.do("DELETE", "/hubs/"+id, nil), 503, "unavailable")
	wantProblem(t, c.do("GET", "/hubs/"+id, nil), 404, "not_found")
}

// A wireTap counts the messages that clients send to PostgreSQL, by type, and can
// end a connection.
type wireTap struct {
	url   string
	mu    sync.Mutex
	count map[string]int
	last  string // see endAfter
}

// endAfter makes the next connection on which the text is sent end in an orderly way
// as soon as PostgreSQL begins to answer; the answer does not arrive.
func (tap *wireTap) endAfter(text string) {
	tap.mu.Lock()
	defer tap.mu.Unlock()
	tap.last = text
}

func newWireTap(t testing.TB, databaseURL string) *wireTap {
	t.Helper()
	tap := &wireTap{count: map[string]int{}}
	tap.url = standBetween(t, databaseURL, func(client, server net.Conn) {
		var last atomic.Bool
		var answers sync.WaitGroup
		answers.Go(func() {
			defer client.Close()
			for answer := make([]byte, 64<<10); ; {
				n, err := server.Read(answer)
				if err != nil || last.Load() {
					return
				}
				client.Write(answer[:n])
			}
		})
		tap.pass(server, client, &last)
		server.Close()
		answers.Wait()
	})
	return tap
}

// standBetween gives a connection string whose connections are what pass makes of them:
// it gets both ends of each, and closes them before it returns.
func standBetween(t testing.TB, databaseURL string, pass func(client, server net.Conn)) string {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	target := u.Host
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u.Host = ln.Addr().String()
	var work sync.WaitGroup
	work.Go(func() {
		for {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				t.Error(err)
				client.Close()
				continue
			}
			work.Go(func() { pass(client, server) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		work.Wait()
	})
	return u.String()
}

// pass counts before it passes on: who has an answer finds its message counted.
func (tap *wireTap) pass(server io.Writer, client io.Reader, last *atomic.Bool) {
	header := make([]byte, 4) // of the first message, which has no type
	for {
		if _, err := io.ReadFull(client, header); err != nil {
			return
		}
		message := make([]byte, binary.BigEndian.Uint32(header[len(header)-4:])-4)
		if _, err := io.ReadFull(client, message); err != nil {
			return
		}
		if len(header) == 5 {
			tap.mu.Lock()
			tap.count[string(header[:1])]++
			if tap.last != "" && bytes.Contains(message, []byte(tap.last)) {
				tap.last = ""
				last.Store(true)
			}
			tap.mu.Unlock()
		}
		if _, err := server.Write(slices.Concat(header, message)); err != nil {
			return
		}
		header = make([]byte, 5)
	}
}

// reset returns the counts and starts again.
func (tap *wireTap) reset() map[string]int {
	tap.mu.Lock()
	defer tap.mu.Unlock()
	old := tap.count
	tap.count = map[string]int{}
	return old
}

// D2: with every connection busy, who waits for one waits a bounded time.
func TestPoolExhausted(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.allowErrors(`"error":"unavailable`)
	c, _ := s.member(t, "member")
	c.do("GET", "/hubs", nil).want(t, 200)

	lock := lockTables(t, s.env["DATABASE_URL"], "hubs, users")
	defer lock.Rollback()
	var wg sync.WaitGroup
	for range 4 * poolSize {
		wg.Go(func() {
			start := time.Now()
			wantProblem(t, c.elsewhere().do("GET", "/hubs", nil), 503, "unavailable")
			if wait := time.Since(start); wait > dbWait {
				t.Errorf("a 503 after %v", wait)
			}
		})
	}
	wg.Wait()
	if s.log.count("no free database connection") == 0 {
		t.Error("the pool was not exhausted")
	}
	if n := queryValue[int](t, s.env["DATABASE_URL"], "select count(*) from pg_stat_activity where datname = current_database()"); n > poolSize+2 {
		t.Errorf("%d connections, the pool has %d", n, poolSize)
	}
	lock.Rollback()
	c.elsewhere().do("GET", "/hubs", nil).want(t, 200)
	if text := regexp.MustCompile(`postgres://|pq: |sqlstate`); text.MatchString(c.elsewhere().do("GET", "/hubs", nil).String()) {
		t.Error("the database's own words reach a client")
	}
}

// D1: an answer that breaks off after an error, and goes on when its time is over, is not
// taken for the answer to the next statement. (lib/pq 1.12 does not look whether it could
// read what follows an error.)
func TestLateRestOfAnAnswerIsNobodys(t *testing.T) {
	t.Parallel()
	holds := make(chan chan struct{}, 1) // what follows the next error waits for the end of this one
	st, err := openStore(standBetween(t, newDatabase(t), func(client, server net.Conn) {
		var statements sync.WaitGroup
		statements.Go(func() {
			io.Copy(server, client)
			server.Close()
		})
		for header := make([]byte, 5); ; {
			if _, err := io.ReadFull(server, header); err != nil {
				break
			}
			client.Write(header)
			io.CopyN(client, server, int64(binary.BigEndian.Uint32(header[1:]))-4)
			if header[0] == 'E' && len(holds) > 0 {
				<-<-holds
			}
		}
		client.Close()
		statements.Wait()
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.db.Close()
	// The first fails as it is prepared, the second as it runs.
	for _, statement := range []string{"no statement", "select 1/(select count(*) from users)"} {
		release := make(chan struct{})
		holds <- release
		if err := readOnce(st, statement, nil, new(int)); err == nil {
			t.Errorf("%s: no error", statement)
		}
		if len(holds) > 0 {
			t.Fatal("nothing was held back")
		}
		close(release)
		for n := range 3 * poolSize {
			var got int
			if err := readOnce(st, fmt.Sprintf("select %d", n), nil, &got); err != nil || got != n {
				t.Errorf("%s, then select %d: %d, %v", statement, n, got, err)
			}
		}
	}
}

// H6: lists with a name filter, and deep pages, hold at most half of the connections, so that
// a session check finds one however long they take.
func TestExpensiveStatementsLeaveConnections(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.allowErrors(`"error":"unavailable`)
	database := s.env["DATABASE_URL"]
	c, _ := s.member(t, "member")
	lock := lockTables(t, database, "hubs")
	defer lock.Rollback()
	waiting := func() int {
		return queryValue[int](t, database, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock'`)
	}
	var wg sync.WaitGroup
	for _, query := range []string{"filters[name]=a", "offset=101"} {
		for range 2 * poolSize {
			wg.Go(func() { c.elsewhere().do("GET", "/hubs?"+query, nil) })
		}
	}
	waitUntil(t, "expensive statements that wait for the lock", func() bool { return waiting() >= expensiveSize })
	c.elsewhere().do("GET", "/auth/session", nil).want(t, 200)
	if got := waiting(); got > expensiveSize {
		t.Errorf("got %d expensive statements at a time, want at most %d", got, expensiveSize)
	}
	lock.Rollback()
	wg.Wait()
}

// D5: a read whose connection is lost after its first row is not tried once more: the rows
// would be there twice. It is a 503.
func TestReadIsNotRepeatedAfterARow(t *testing.T) {
	t.Parallel()
	var breaks atomic.Bool // the next row is the last message of its connection
	st, err := openStore(standBetween(t, newDatabase(t), func(client, server net.Conn) {
		var statements sync.WaitGroup
		statements.Go(func() {
			io.Copy(server, client)
			server.Close()
		})
		for header := make([]byte, 5); ; {
			if _, err := io.ReadFull(server, header); err != nil {
				break
			}
			client.Write(header)
			io.CopyN(client, server, int64(binary.BigEndian.Uint32(header[1:]))-4)
			if header[0] == 'D' && breaks.CompareAndSwap(true, false) {
				break
			}
		}
		client.Close()
		statements.Wait()
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.db.Close()
	breaks.Store(true)
	var got []int
	err = st.rows(read("select n from generate_series(1, 3) n"), func(rows *sql.Rows) error {
		var n int
		err := rows.Scan(&n)
		got = append(got, n)
		return err
	})
	if p, ok := errors.AsType[*problem](err); !ok || p.Status != 503 || !slices.Equal(got, []int{1}) {
		t.Errorf("got the rows %v, %v; want the first one and a 503", got, err)
	}
}

// D1: a database that reads nothing any more is left in time.
func TestWritingToAHungDatabaseEnds(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe() // nobody reads
	defer theirs.Close()
	ended := make(chan error, 1)
	go func() {
		_, err := deadlineConn{ours}.Write([]byte("statement"))
		ended <- err
	}()
	select {
	case err := <-ended:
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("got %v, want %v", err, os.ErrDeadlineExceeded)
		}
	case <-time.After(dbWait):
		t.Errorf("still writing after %v", dbWait)
	}
}

// Z2: a table that another session keeps locked is a 503 of each request that needs it: neither
// a 404 nor a 500.
func TestLockedTableIsUnavailable(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.allowErrors(`"error":"unavailable`)
	c, _ := s.member(t, "admin")
	hub := c.do("POST", "/hubs", map[string]string{"name": "North"}).want(t, 201).header.Get("Location")
	f := c.upload("a.txt", []byte("content")).stored(t)
	lock := lockTables(t, s.env["DATABASE_URL"], "hubs, files")
	defer lock.Rollback()
	var all sync.WaitGroup
	for _, request := range []struct{ method, path, body string }{
		{"GET", hub, ""},
		{"PATCH", hub, `{"name":"South"}`},
		{"DELETE", hub, ""},
		{"GET", "/hubs", ""},
		{"POST", "/hubs", `{"name":"South"}`},
		{"GET", f.Path, ""},
	} {
		all.Go(func() {
			wantProblem(t, c.elsewhere().do(request.method, request.path, request.body), 503, "unavailable")
		})
	}
	all.Go(func() { wantProblem(t, c.elsewhere().upload("b.txt", []byte("content")), 503, "unavailable") })
	all.Wait()
	lock.Rollback()
	if name := c.do("GET", hub, nil).want(t, 200).field(t, "name"); name != "North" {
		t.Errorf("got the name %q, want what it was", name)
	}
}

// lockTables takes tables from every reader and writer until the transaction ends.
func lockTables(t testing.TB, databaseURL, tables string) *sql.Tx {
	t.Helper()
	lock, err := testDB(t, databaseURL).Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lock.Exec("lock table " + tables + " in access exclusive mode"); err != nil {
		lock.Rollback()
		t.Fatal(err)
	}
	return lock
}

// H6: an expensive statement that waits for its turn holds no connection while it waits.
func TestWaitingExpensiveStatementsHoldNoConnection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		st := &store{ // without a database: no statement gets as far
			slots:          make(chan struct{}, poolSize),
			expensiveSlots: make(chan struct{}, expensiveSize),
		}
		for range expensiveSize {
			st.expensiveSlots <- struct{}{}
		}
		var waiting sync.WaitGroup
		for range 2 * poolSize {
			waiting.Go(func() {
				if err := st.rows(statement{text: "select 1", expensive: true}, nil); err == nil {
					t.Error("got no error without a free place")
				}
			})
		}
		synctest.Wait()
		if got := len(st.slots); got != 0 {
			t.Errorf("got %d connections held, want 0", got)
		}
		waiting.Wait()
	})
}

// D1: a read is tried again only after its connection was closed or reset. A database that hangs
// is not asked twice, which would take twice as long, nor is one that refuses connections.
func TestWhichReadsAreTriedAgain(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err  error
		want bool
	}{
		"none":               {nil, false},
		"reset":              {&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}, true},
		"closed":             {&net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)}, true},
		"wrapped":            {fmt.Errorf("prepare: %w", &net.OpError{Op: "read", Err: net.ErrClosed}), true},
		"hung at a read":     {&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, false},
		"hung at a write":    {&net.OpError{Op: "write", Err: os.ErrDeadlineExceeded}, false},
		"refused":            {&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}, false},
		"dial without end":   {&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, false},
		"answer of another":  {errScan, false},
		"PostgreSQL's error": {&pq.Error{Code: "57P01"}, false},
	} {
		if got := isConnectionGone(test.err); got != test.want {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}

// With nothing to change, a migrate waits for no reader, and so no reader waits for it.
func TestMigrateLetsReadsGoOn(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	reader, err := testDB(t, database).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Rollback()
	// The transaction keeps the locks of its reads until it ends.
	if _, err := reader.Exec("select from users, terms_acceptances, hubs, files"); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	query.Set("lock_timeout", "1s") // of a lock that it should not even ask for
	u.RawQuery = query.Encode()
	if err := applySchema(u.String()); err != nil {
		t.Errorf("beside a transaction that has read all tables: %v", err)
	}
}

// The sample by which a search chooses its way takes \, % and _ for plain characters, as the
// search does. Otherwise it would gather names that most hubs have, or walk for one that none has.
func TestSampleOfASearchTakesPlainCharacters(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	const most = 21 // where the sample stops
	execSQL(t, database, `insert into hubs (name) select 'a\b%c_d' from generate_series(1, $1)`, most)
	for part, want := range map[string]int{
		`\`: most, `%`: most, `_`: most, `a\b`: most, `\b%`: most, `b%c`: most, `c_d`: most, `A\B%C_D`: most,
		`a%d`: 0, `a_b`: 0, `\%`: 0, `\_`: 0, `\\`: 0, `__`: 0, `%%`: 0, `ab`: 0,
	} {
		for _, counted := range []string{"candidates", "matches"} {
			if got := queryValue[int](t, database, "select "+counted+" from hub_name_sample($1)", part); got != want {
				t.Errorf("%s of %s: got %d, want %d", counted, part, got, want)
			}
		}
	}
}
