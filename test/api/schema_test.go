package api

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"hubs/internal/hubstest"

	"github.com/lib/pq"
)

// schemaOf returns everything that a migration could change, as lines of text: the columns,
// indexes, constraints and functions of the schema public, and the extensions of the database.
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

// Several migrations of one database can run at once, from no tables and from those of each
// release. The role needs no rights beyond owning the schema public, and the result is the same as
// in a new database. If it differs, schema.sql needs an alter table that runs only if needed.
func TestMigrateAtOnce(t *testing.T) {
	t.Parallel()
	schemas := releases(t)
	schemas["no tables"] = ""
	for name, tables := range schemas {
		t.Run(name, func(t *testing.T) {
			want := schemaOf(t, hubstest.NewDatabase(t))
			database := hubstest.EmptyDatabase(t, "")
			role, asRole := hubstest.NewRole(t, database)
			hubstest.Exec(t, database,
				"drop schema public cascade; create schema public authorization "+role)
			hubstest.Exec(t, asRole, tables)
			var migrations sync.WaitGroup
			for range 8 {
				migrations.Go(func() {
					if err := hubstest.Migrate(asRole); err != nil {
						t.Error(err)
					}
				})
			}
			migrations.Wait()
			wantText(t, "schema, compared with that of a new database", schemaOf(t, database), want)
		})
	}
}

// migrate brings what is stored about the names of hubs to the form of this release, without a
// change of the hubs themselves. PostgreSQL does not compute a stored column again because its
// function changed.
func TestMigrateRenewsStoredNames(t *testing.T) {
	t.Parallel()
	database := hubstest.EmptyDatabase(t, "")
	hubstest.Exec(t, database, hubstest.ReadFile(t, "testdata/schema-v1.0.0.sql"))
	hubstest.Exec(t, database,
		"insert into hubs (name) values (E'Cafe\\u0301'), (E'A\\u030Angstr\u00f6m')")
	rows := func() string {
		return hubstest.Query[string](t, database, `select string_agg(
			concat_ws(' ', hub_id, name, created_at, updated_at), E'\n' order by name) from hubs`)
	}
	before := rows()
	hubstest.Must(t, hubstest.SetUp(database))
	wantText(t, "hubs after migrate", rows(), before)
	_, c := start(t, "member", map[string]string{"DATABASE_URL": database})
	for search, want := range map[string]int{
		"CAF%C3%89":      1,
		"cafe%CC%81":     1,
		"%C3%A5ngstr":    1,
		"ANGSTRO%CC%88M": 0, // has no ring
	} {
		page := decode[hubPage](t, c.Get("/hubs?filters[name]="+search).Must(t, 200))
		wantEqual(t, "hubs found by "+search, len(page.Items), want)
	}
}

// A migration that has nothing to change takes no lock that conflicts with reads. So it does not
// wait for reads, and no read waits for it.
func TestMigrateLetsReadsGoOn(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	reader, err := hubstest.OpenDB(t, database).Begin()
	hubstest.Must(t, err)
	defer reader.Rollback()
	// The transaction keeps the locks of its reads until it ends.
	_, err = reader.Exec("select from " + strings.Join(hubstest.Tables(t), ", "))
	hubstest.Must(t, err)
	// The migration fails if it has to wait for a lock for a second.
	if err := hubstest.Migrate(database + "&lock_timeout=1s"); err != nil {
		t.Errorf("migrate beside a transaction that has read all tables: %v", err)
	}
}

// The constraints of the tables reject every row that the server can't handle, also one that an
// operator writes with psql. The limits of lengths are those of the contract.
func TestSchemaConstraints(t *testing.T) {
	t.Parallel()
	db := hubstest.OpenDB(t, hubstest.NewDatabase(t))
	for _, c := range readTextCases(t, "constraints.txt") {
		t.Run(c.Name, func(t *testing.T) {
			statements, line, _ := strings.Cut(fillInLimits(c.Text), "\n[")
			want, _, _ := strings.Cut(line, "]")
			wantEqual(t, statements, sqlErrorOf(t, db, statements), want)
		})
	}
}

// sqlErrorOf runs statements in a transaction that it rolls back. It returns PostgreSQL's name of
// the error, or "" if there is no error. It ends the test if an error is not from PostgreSQL.
func sqlErrorOf(t testing.TB, db *sql.DB, statements string, args ...any) string {
	t.Helper()
	tx, err := db.Begin()
	hubstest.Must(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(statements, args...)
	if err == nil {
		return ""
	}
	sqlError, ok := errors.AsType[*pq.Error](err)
	if !ok {
		t.Fatalf("setup: %s: %v", statements, err)
	}
	return sqlError.Code.Name()
}

// TestPostgresVersion prints the version of PostgreSQL that the tests run against. .ci/run, which
// runs them against several versions, looks for that line.
func TestPostgresVersion(t *testing.T) {
	t.Parallel()
	major := hubstest.Query[int](t, hubstest.NewDatabase(t),
		"select current_setting('server_version_num')::int / 10000")
	fmt.Fprintln(t.Output(), "ran against PostgreSQL", major)
}
