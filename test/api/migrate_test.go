package api

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"hubs/internal/hubstest"
)

// releases returns the schema.sql of each release, by its version.
func releases(t testing.TB) map[string]string {
	t.Helper()
	paths, _ := filepath.Glob(hubstest.Root() + "/testdata/schema-v*.sql") // the pattern is well formed
	schemas := map[string]string{}
	for _, path := range paths {
		name := filepath.Base(path)
		schemas[name] = hubstest.ReadFile(t, "testdata/"+name)
	}
	if len(schemas) < 2 {
		t.Fatalf("setup: got %d releases in testdata, want at least 2", len(schemas))
	}
	return schemas
}

// columns returns the names of all columns that a migration must leave as they are.
func columns(t testing.TB, database string) string {
	t.Helper()
	return hubstest.Query[string](t, database, `select string_agg(distinct column_name, ' ')
		from information_schema.columns where table_schema = 'public' and column_name <> 'name_lower'`)
}

// storedRows returns what the tables of a release have in these columns.
func storedRows(t testing.TB, database, columns string) string {
	t.Helper()
	return hubstest.Query[string](t, database, `select string_agg(line, E'\n' order by line) from (
		select (select jsonb_object_agg(key, value) from jsonb_each(line)
			where key = any (string_to_array($1, ' ')))::text from (
		select to_jsonb(h) from hubs h union all select to_jsonb(u) from users u
		union all select to_jsonb(t) from terms_acceptances t union all select to_jsonb(f) from files f
		) rows (line)) rows (line)`, columns)
}

// migrate brings the tables of each release to those of this one, twice in a row, while others read
// them. It computes the stored keys of names anew, and changes no other value. From then on, each
// change of an account is recorded.
func TestMigrateFromEachRelease(t *testing.T) {
	t.Parallel()
	for release, schema := range releases(t) {
		t.Run(release, func(t *testing.T) {
			t.Parallel()
			database := hubstest.EmptyDatabase(t, "")
			hubstest.Exec(t, database, schema)
			hubstest.Exec(t, database, `
				insert into hubs (name) select 'Straße ' || n from generate_series(1, 2000) n;
				insert into hubs (name) values ('İstanbul'), ('ﬁrst'), ('Ångström');
				insert into users (email) values ('ada@example.com');
				insert into terms_acceptances (user_id, version) select user_id, 'x' from users;
				insert into files (user_id, name, content_type, size) select user_id, 'a', 'b', 1 from users`)
			kept := columns(t, database)
			before := storedRows(t, database, kept)
			stop := readMeanwhile(t, database)
			hubstest.Must(t, hubstest.SetUp(database))
			const places = "select string_agg(ctid::text, ' ' order by hub_id) from hubs"
			after := hubstest.Query[string](t, database, places)
			hubstest.Must(t, hubstest.SetUp(database))
			stop()

			wantText(t, "rows", storedRows(t, database, kept), before)
			wantText(t, "places of the rows, which a second migration does not write again",
				hubstest.Query[string](t, database, places), after)
			hubstest.Exec(t, database, "update users set suspended = true")
			wantEqual(t, "recorded changes", hubstest.Query[int](t, database,
				"select count(*) from account_changes where after ->> 'suspended' = 'true'"), 1)
			_, c := start(t, "member", map[string]string{"DATABASE_URL": database})
			for _, search := range []string{"STRASSE 1999", "istanbul", "FIRST", "a\u030Angstro\u0308m"} {
				wantEqual(t, "hubs found by "+search, len(foundNames(t, c, search)), 1)
			}
		})
	}
}

// readMeanwhile reads the tables again and again until stop is called. A read that waits for a lock
// for a second fails the test.
func readMeanwhile(t *testing.T, database string) (stop func()) {
	t.Helper()
	var isOver atomic.Bool
	var readers sync.WaitGroup
	db := hubstest.OpenDB(t, database+"&lock_timeout=1s")
	for _, query := range []string{
		"select name from hubs order by name limit 20",
		"select name from hubs where strpos(name_lower, hub_name_key('x')) > 0",
		"select email from users",
		"select version from terms_acceptances join users using (user_id)",
		"select name from files",
	} {
		readers.Go(func() {
			for n := 0; !isOver.Load() || n == 0; n++ {
				if _, err := db.Exec(query); err != nil {
					t.Errorf("%s, while migrate runs: got the error %v, want none", query, err)
					return
				}
			}
		})
	}
	return func() {
		isOver.Store(true)
		readers.Wait()
	}
}

// A name that another client has stored by the function of the last release, and commits only while
// migrate runs, gets its new key, too.
func TestMigrateRenewsNamesOfOthers(t *testing.T) {
	t.Parallel()
	for release, schema := range releases(t) {
		t.Run(release, func(t *testing.T) {
			t.Parallel()
			database := hubstest.EmptyDatabase(t, "")
			hubstest.Exec(t, database, schema)
			hubstest.Exec(t, database, "insert into hubs (name) values ('Straße')")
			db := hubstest.OpenDB(t, database)
			other, err := db.Begin()
			hubstest.Must(t, err)
			defer other.Rollback()
			// migrate waits for the first row. It can't see the second one.
			_, err = other.Exec("update hubs set description = 'x'; insert into hubs (name) values ('Meßstelle')")
			hubstest.Must(t, err)
			migration := make(chan error)
			go func() { migration <- hubstest.Migrate(database) }()
			hubstest.WaitUntil(t, "migrate waits", func() bool {
				return hubstest.Query[int](t, database, `select count(*) from pg_stat_activity
					where datname = current_database() and wait_event_type = 'Lock'`) > 0
			})
			hubstest.Must(t, other.Commit())
			hubstest.Must(t, <-migration)
			wantEqual(t, "stored keys", hubstest.Query[string](t, database,
				"select string_agg(name_lower, ' ' order by name_lower) from hubs"), "messstelle strasse")
		})
	}
}

// migrate names the schema that it has written to, and serve the search_path in which it finds no
// tables. So an operator sees it if the two differ, such as in a database whose owner has a schema of
// its own name, or without a schema public.
func TestSchemaIsNamed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ setUp, schema, searched string }{
		"a schema named like the owner": {
			setUp:    "create schema OWNER authorization OWNER",
			schema:   "OWNER",
			searched: `"$user", public`,
		},
		"a search_path of the database": {
			setUp: "create schema app authorization OWNER; drop schema public; " +
				"alter database DATABASE set search_path = app",
			schema:   "app",
			searched: "other",
		},
		"a search_path of the owner": {
			setUp: "create schema elsewhere authorization OWNER; " +
				"alter role OWNER in database DATABASE set search_path = nowhere, elsewhere",
			schema:   "elsewhere",
			searched: `"$user", public`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			database := hubstest.EmptyDatabase(t, "")
			owner, asOwner := hubstest.NewRole(t, database)
			reader, asReader := hubstest.NewRole(t, database)
			databaseName := hubstest.Query[string](t, database, "select current_database()")
			words := []string{"OWNER", owner, "DATABASE", databaseName}
			hubstest.Exec(t, database, replace(c.setUp, words...))
			if c.searched == "other" {
				hubstest.Exec(t, database, fmt.Sprintf("alter role %s set search_path = other", reader))
			}
			schema := replace(c.schema, words...)

			status, output := run(t, map[string]string{"DATABASE_URL": asOwner}, "migrate")
			wantEqual(t, "migrate", fmt.Sprint(status, " ", output),
				"0 the tables are up to date, in the schema "+schema+", by "+owner+"\n")
			env := hubstest.ServerEnv(t, map[string]string{"DATABASE_URL": asReader})
			status, output = run(t, env, "serve")
			wantEqual(t, "exit status of serve", status, 1)
			wantParts(t, "serve", output, "lacks the tables in the search_path of its role, "+c.searched,
				"run hubs migrate, which names its schema")
		})
	}
}

// Without a schema, migrate says so.
func TestMigrateNeedsASchema(t *testing.T) {
	t.Parallel()
	database := hubstest.EmptyDatabase(t, "")
	hubstest.Exec(t, database, "drop schema public")
	status, output := run(t, map[string]string{"DATABASE_URL": database}, "migrate")
	wantEqual(t, "exit status", status, 1)
	wantParts(t, "migrate", output, "no schema to work in", "search_path")
}

// The tables work in whatever schema they are, and so does the record of account changes.
func TestTablesInAnotherSchema(t *testing.T) {
	t.Parallel()
	database := hubstest.EmptyDatabase(t, "")
	owner, asOwner := hubstest.NewRole(t, database)
	name := hubstest.Query[string](t, database, "select current_database()")
	hubstest.Exec(t, database, fmt.Sprintf(`create schema "Über app" authorization %s; drop schema public;
		alter database %s set search_path = "Über app"`, owner, name))
	hubstest.Must(t, hubstest.Migrate(asOwner))
	hubstest.Must(t, hubstest.Migrate(asOwner))
	s := hubstest.Start(t, map[string]string{"DATABASE_URL": asOwner})
	email := hubstest.NewEmail()
	s.User(t, "add", email)
	// Nor does a table of a session, which PostgreSQL finds first unless told otherwise, hide the record.
	hubstest.Exec(t, database, `create temporary table account_changes (like "Über app".account_changes);
		set search_path = pg_temp; update "Über app".users set suspended = true`)
	hubstest.Exec(t, asOwner, "update users set suspended = false")
	wantParts(t, "user history", s.User(t, "history", email),
		"suspended: false → true", "suspended: true → false")
	s.SignIn(t, email).Get("/auth/session").Want(t, 200)
}

// replace replaces words in a text. words are pairs of a word and what stands in its place.
func replace(text string, words ...string) string {
	return strings.NewReplacer(words...).Replace(text)
}

// wantParts checks that a text contains each of the parts.
func wantParts(t testing.TB, what, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%s: got\n%s\nwant %q in it", what, text, part)
		}
	}
}
