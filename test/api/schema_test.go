package api

import (
	"database/sql"
	"errors"
	"fmt"
	"slices"
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

// A column is a column of a table that has an id or another key. The table account_changes has none.
type column struct {
	Table, Name, Type string
	Key               string // the table's id, such as hub_id; "" if its key has several columns
	schema            map[string]any
	isRequired        bool
}

// keyedColumns returns those columns of a database. Each has the schema that the contract has for it: that of
// the member of its name, in the schema of which the table's id is the first member.
func keyedColumns(t testing.TB, databaseURL string) (columns []column) {
	t.Helper()
	text := hubstest.Query[string](t, databaseURL, `
		select json_agg(json_build_object('Table', conrelid::regclass, 'Name', c.attname,
			'Type', format_type(c.atttypid, null),
			'Key', case cardinality(conkey) when 1 then k.attname else '' end))
		from pg_constraint
		join pg_attribute k on k.attrelid = conrelid and k.attnum = conkey[1]
		join pg_attribute c on c.attrelid = conrelid and c.attnum > 0 and not c.attisdropped
		where contype = 'p' and connamespace = 'public'::regnamespace`)
	decodeStrict(t, "columns", text, &columns)
	shown := 0
	for i, c := range columns {
		for name, schema := range hubstest.Contract[object](t, "components", "schemas") {
			required, _ := schema.(object)["required"].([]any)
			if len(required) == 0 || c.Key == "" || snakeCase(required[0]) != c.Key || c.Name == c.Key {
				continue
			}
			members := hubstest.Contract[object](t, "components", "schemas", name, "properties")
			for member := range members {
				if snakeCase(member) == c.Name {
					columns[i].schema = hubstest.Contract[object](t, "components", "schemas", name, "properties", member)
					columns[i].isRequired = slices.Contains(required, any(member))
					shown++
				}
			}
		}
	}
	if shown < 10 {
		t.Fatalf("setup: got %d columns that the contract shows, want at least ten", shown)
	}
	return columns
}

// snakeCase returns the name of a column for that of a member: hub_id for hubId.
func snakeCase(member any) string {
	return strings.ToLower(capital.ReplaceAllString(member.(string), "_$0"))
}

// The constraints of the tables are those of the contract, also for an operator who writes with psql:
// a value that the contract permits can be stored, and no other. A time is finite, and a column with the
// name of another table's id refers to that table.
func TestConstraintsAreThoseOfTheContract(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	for _, r := range routes {
		_, template, _ := strings.Cut(r.Route, " ")
		maker{s, admin, admin}.newPath(t, template) // so that each table has a row
	}
	db := hubstest.OpenDB(t, s.Database)
	columns := keyedColumns(t, s.Database)
	for _, c := range columns {
		good, bad := valuesOf(c.schema)
		fault := "check_violation"
		isKeyOf := func(other column) bool { return other.Key == c.Name && other.Table != c.Table }
		switch {
		case slices.ContainsFunc(columns, isKeyOf):
			good, bad, fault = nil, []any{hubstest.NewUUID()}, "foreign_key_violation"
		case c.Type == "timestamp with time zone":
			good, bad = []any{"2026-01-01Z"}, []any{"infinity", "-infinity"}
		case c.schema == nil:
			continue
		}
		t.Run(c.Table+"."+c.Name, func(t *testing.T) {
			wantError := func(value any, want string) {
				t.Helper()
				if value != nil {
					value = fmt.Sprint(value)
				}
				change := fmt.Sprintf("update %s set %s = $1::text::%s where ctid = (select min(ctid) from %[1]s)",
					c.Table, c.Name, c.Type)
				if got := sqlErrorOf(t, db, change, value); got != want {
					t.Errorf("the value %.80v: got the error %q, want %q", value, got, want)
				}
			}
			for _, value := range good {
				wantError(value, "")
			}
			for _, value := range bad {
				wantError(value, fault)
			}
			if c.isRequired {
				wantError(nil, "not_null_violation")
			}
		})
	}
}

// What an operator may leave out, and what the tables keep apart and together.
func TestSchemaAsOperatorsUseIt(t *testing.T) {
	t.Parallel()
	db := hubstest.OpenDB(t, hubstest.NewDatabase(t))
	const (
		user     = "insert into users (email) values ('a@b.example');"
		accepted = user + "insert into terms_acceptances (user_id, version) select user_id, 'v' from users;"
	)
	for name, c := range map[string]struct{ statements, want string }{
		"a user by the address alone": {user, ""},
		"an address in another case": {
			user + "insert into users (email) values ('A@B.EXAMPLE')", "unique_violation"},
		"suspended or not: unknown":  {user + "update users set suspended = null", "not_null_violation"},
		"two hubs by one name alone": {"insert into hubs (name) values ('North'), ('North')", ""},
		"a second acceptance of a version": {
			accepted + "insert into terms_acceptances select * from terms_acceptances", "unique_violation"},
		"a deleted user leaves their files, and none of their acceptances": {
			accepted + `insert into files (name, content_type, size, user_id) select 'n', 't', 1, user_id from users;
				delete from users;
				select 1 / count(*) from files
					where user_id is null and not exists (select from terms_acceptances)`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			wantEqual(t, c.statements, sqlErrorOf(t, db, c.statements), c.want)
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
