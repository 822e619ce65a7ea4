package api

import (
	"database/sql"
	"errors"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"hubs/internal/hubstest"

	"github.com/lib/pq"
)

// emptyDatabase returns a database without tables, owned by an ordinary role. The role may
// connect to it and no more.
func emptyDatabase(t testing.TB) string {
	t.Helper()
	database := hubstest.NewDatabase(t)
	role, roleURL := hubstest.NewRole(t, database)
	hubstest.Exec(t, database,
		"drop schema public cascade; create schema public authorization "+role)
	return roleURL
}

// tables returns the names of the tables.
func tables(t testing.TB) (names []string) {
	t.Helper()
	table := regexp.MustCompile(`create table if not exists (\w+)`)
	schema := hubstest.ReadFile(t, "schema.sql")
	for _, match := range table.FindAllStringSubmatch(schema, -1) {
		names = append(names, match[1])
	}
	return names
}

// schemaOf returns all that a migration could change, as text.
func schemaOf(t testing.TB, databaseURL string) string {
	t.Helper()
	return hubstest.Query[string](t, databaseURL, `
		select coalesce(string_agg(line, E'\n' order by line), '') from (
			select format('%s.%s %s %s %s',
				table_name, column_name, data_type, is_nullable, column_default) as line
			from information_schema.columns where table_schema = 'public'
			union all select indexdef from pg_indexes where schemaname = 'public'
			union all select format('%s %s', conrelid::regclass, pg_get_constraintdef(oid))
			from pg_constraint where connamespace = 'public'::regnamespace
			union all select pg_get_functiondef(oid)
			from pg_proc where pronamespace = 'public'::regnamespace
			union all select extname from pg_extension) as lines`)
}

// wantSchema checks that a database that was migrated has the schema of a new one.
func wantSchema(t testing.TB, database string) {
	t.Helper()
	got := strings.Split(schemaOf(t, database), "\n")
	want := schemaOf(t, hubstest.NewDatabase(t))
	for line := range strings.SplitSeq(want, "\n") {
		i := slices.Index(got, line)
		if i < 0 {
			t.Errorf("only a new database has this; schema.sql needs a guarded alter table: %s", line)
			continue
		}
		got = slices.Delete(got, i, i+1)
	}
	for _, line := range got {
		t.Errorf("only an old database has this; schema.sql must take it away: %s", line)
	}
}

// Servers that start together may migrate together, as a role that owns its schema and no more.
func TestMigrateAtOnce(t *testing.T) {
	t.Parallel()
	database := emptyDatabase(t)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if err := hubstest.Migrate(database); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	wantSchema(t, database)
}

// A database of the last release gets the tables of this one, and keeps its rows. "create table
// if not exists" changes no table that is there: a changed table needs a statement of its own in
// schema.sql. A release copies schema.sql to testdata/last-release.sql.
func TestMigrateFromTheLastRelease(t *testing.T) {
	t.Parallel()
	database := emptyDatabase(t)
	hubstest.Exec(t, database,
		hubstest.ReadFile(t, "testdata/last-release.sql"))
	user := hubstest.AddUser(t, database, hubstest.NewEmail(), "admin")
	hubstest.Exec(t, database, "insert into hubs (name) values ('North')")
	if err := hubstest.Migrate(database); err != nil {
		t.Fatal(err)
	}
	wantSchema(t, database)
	const roleOf = "select permission from users where user_id = $1"
	role := hubstest.Query[string](t, database, roleOf, user)
	if role != "admin" {
		t.Errorf("role: got %q, want admin", role)
	}
	got := hubstest.Query[string](t, database, "select name from hubs")
	if got != "North" {
		t.Errorf("hub: got %q, want North", got)
	}
}

// With nothing to change, a migrate waits for no reader, and so no reader waits for it.
func TestMigrateLetsReadsGoOn(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	reader, err := hubstest.OpenDB(t, database).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Rollback()
	// The transaction keeps the locks of its reads until it ends.
	if _, err := reader.Exec("select from " + strings.Join(tables(t), ", ")); err != nil {
		t.Fatal(err)
	}
	// A second for a lock that it should not even ask for.
	if err := hubstest.Migrate(database + "&lock_timeout=1s"); err != nil {
		t.Errorf("beside a transaction that has read all tables: %v", err)
	}
}

// What the server relies on, the tables keep to whoever writes: their limits are those of the
// contract.
func TestSchemaConstraints(t *testing.T) {
	t.Parallel()
	db := hubstest.OpenDB(t, hubstest.NewDatabase(t))
	file := hubstest.ReadFile(t, "testdata/constraints.txt")
	for _, part := range strings.Split(file, "\n== ")[1:] {
		name, text, _ := strings.Cut(part, "\n")
		t.Run(name, func(t *testing.T) {
			statements, want, _ := strings.Cut(hubstest.FillInLimits(t, text), "[")
			got := sqlErrorOf(t, db, statements)
			if want = strings.TrimRight(want, "]\n"); got != want {
				t.Errorf("%s: got %q, want %q", statements, got, want)
			}
		})
	}
}

// A user who is deleted takes their acceptances along, and leaves their files.
func TestDeletedUserLeavesFiles(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	user := hubstest.AddUser(t, database, hubstest.NewEmail(), "member")
	for _, statement := range []string{
		"insert into terms_acceptances (user_id, version) values ($1, 'v')",
		"insert into files (name, content_type, size, user_id) values ('n', 't', 1, $1)",
		"delete from users where user_id = $1",
	} {
		hubstest.Exec(t, database, statement, user)
	}
	for statement, want := range map[string]int{
		"select count(*) from terms_acceptances":           0,
		"select count(*) from files where user_id is null": 1,
	} {
		got := hubstest.Query[int](t, database, statement)
		if got != want {
			t.Errorf("%s: got %d, want %d", statement, got, want)
		}
	}
}

// sqlErrorOf runs statements in a transaction that it rolls back. It returns the name of
// PostgreSQL's error, or "".
func sqlErrorOf(t testing.TB, db *sql.DB, statements string, args ...any) string {
	t.Helper()
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	_, err = tx.Exec(statements, args...)
	if err == nil {
		return ""
	}
	refused, ok := errors.AsType[*pq.Error](err)
	if !ok {
		t.Fatalf("%s: %v", statements, err)
	}
	return refused.Code.Name()
}

// The table takes the addresses that a request may name, and no others. Otherwise a user could be
// added whom no request can name, or mail be sent to a text that was never checked.
func TestTableTakesTheSameAddresses(t *testing.T) {
	t.Parallel()
	db := hubstest.OpenDB(t, hubstest.NewDatabase(t))
	for _, c := range hubstest.ReadCorpus[emailCase](t, "emails.json").Cases {
		email := strings.Trim(hubstest.FillIn(c.Email), " ") // as the server does
		if strings.Contains(email, "\x00") {
			continue // no text of PostgreSQL's has a NUL
		}
		want := "check_violation"
		if c.Expect.Status == 200 {
			want = ""
		}
		got := sqlErrorOf(t, db, "insert into users (email) values ($1)", email)
		if got != want {
			t.Errorf("%q: got the error %q, want %q", email, got, want)
		}
	}
}
