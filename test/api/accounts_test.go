package api

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// exportedNames are names of files that need an escape in a path, in JSON or in HTML.
var exportedNames = []string{
	"plan.txt",
	"a b.txt",
	"100%.txt",
	"what?.txt",
	"q=1&r=2#s.txt",
	`say "hello".txt`,
	"it's.txt",
	"a+b;c,d:e@f.txt",
	"<b>.txt",
	"[x]{y}|z^~.txt",
	"Grüße – 日本 😀.txt",
	"e\u0301.txt", // decomposed
	"%2e%2e%2f.txt",
	"\u2028.txt", // ends a line in JavaScript
	"..txt",
	strings.Repeat("ü", 127) + "x",
}

// An export is what hubs user export prints.
type export struct {
	User             map[string]any   `json:"user"`
	TermsAcceptances []map[string]any `json:"terms_acceptances"`
	Files            []map[string]any `json:"files"`
	AccountChanges   []map[string]any `json:"account_changes"`
}

// exportOf runs user export, whose output must be one JSON object with these members.
func exportOf(t *testing.T, s *hubstest.Server, email string) (e export) {
	t.Helper()
	decodeStrict(t, "user export", s.User(t, "export", email), &e)
	return e
}

// columnsOf returns the columns of a table.
func columnsOf(t *testing.T, s *hubstest.Server, table string) []string {
	t.Helper()
	return strings.Fields(hubstest.Query[string](t, s.Database, `select
		string_agg(column_name, ' ' order by column_name collate "C") from information_schema.columns
		where table_schema = 'public' and table_name = $1`, table))
}

// user export prints all that the database has about a user: each column of each table that has a
// user_id. With the path of a file, a session of the user can read it.
func TestExportHasAllThatIsStored(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, email := s.Member(t, "member")
	other, _ := s.Member(t, "member")
	other.Store("not-theirs.txt", "other")
	stored := map[string]string{}
	for _, name := range exportedNames {
		stored[name] = c.Store(name, "content")
	}
	s.User(t, "role", email, "admin")
	upper := strings.ToUpper(email[:1]) + email[1:]
	got := exportOf(t, s, upper)

	tables := map[string][]map[string]any{
		"users":             {got.User},
		"terms_acceptances": got.TermsAcceptances,
		"files":             got.Files,
		"account_changes":   got.AccountChanges,
	}
	wantEqual(t, "tables with a user_id", slices.Sorted(maps.Keys(tables)), strings.Fields(
		hubstest.Query[string](t, s.Database, `select string_agg(table_name, ' ' order by table_name)
			from information_schema.columns where table_schema = 'public' and column_name = 'user_id'`)))
	for table, rows := range tables {
		columns := columnsOf(t, s, table)
		if table == "files" {
			columns = append(columns, "path")
			slices.Sort(columns)
		}
		for _, row := range rows {
			wantEqual(t, "columns of "+table, slices.Sorted(maps.Keys(row)), columns)
			wantEqual(t, "user_id in "+table, row["user_id"], got.User["user_id"])
		}
	}
	wantEqual(t, "address", got.User["email"], email)
	wantEqual(t, "acceptances", len(got.TermsAcceptances), 1)
	wantEqual(t, "account changes: added, role", len(got.AccountChanges), 2)
	paths := map[string]string{}
	for _, file := range got.Files {
		name, path := file["name"].(string), file["path"].(string)
		paths[name] = path
		c.WantFile(path, "content")
		wantEqual(t, "size of "+name, file["size"], float64(len("content")))
		wantEqual(t, "content type of "+name, file["content_type"], "text/plain; charset=utf-8")
	}
	wantEqual(t, "paths, compared with those of the uploads", paths, stored)
}

// An export has the whole row of an account that does and has nothing, with times in UTC, whatever the
// time zone of the database is.
func TestExportOfAQuietAccount(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	setZone(t, s, "Asia/Kolkata")
	email, _ := s.NewUser(t, "member")
	hubstest.Exec(t, s.Database, `update users set created_at = '2026-01-02 04:04:05.678901+01',
		suspended = true, signed_out_at = '2026-02-03 04:05:06+05:30'`)
	got := exportOf(t, s, email)
	delete(got.User, "user_id")
	wantEqual(t, "user", got.User, map[string]any{
		"email":         email,
		"permission":    "member",
		"suspended":     true,
		"signed_out_at": "2026-02-02T22:35:06+00:00",
		"created_at":    "2026-01-02T03:04:05.678901+00:00",
	})
	wantEqual(t, "files and acceptances", len(got.Files)+len(got.TermsAcceptances), 0)
	for _, change := range got.AccountChanges {
		at, _ := change["changed_at"].(string)
		if !strings.HasSuffix(at, "+00:00") {
			t.Errorf("changed_at: got %q, want UTC", at)
		}
	}
	status, output := run(t, s.Env, "user", "export", "nobody@example.com")
	wantEqual(t, "exit status for an unknown address", status, 1)
	wantParts(t, "output for an unknown address", output, "there is no user with this address")
}

// setZone gives all later connections to a database, of whatever role, another time zone.
func setZone(t *testing.T, s *hubstest.Server, zone string) {
	t.Helper()
	hubstest.Exec(t, s.Database, `do $$ begin execute format('alter database %I set timezone to ''`+zone+
		`''', current_database()); end $$`)
}

// historyOf returns the lines of user history, without their times, which must be of now and in UTC.
func historyOf(t *testing.T, s *hubstest.Server, email string) (lines []string) {
	t.Helper()
	for line := range strings.Lines(s.User(t, "history", email)) {
		at, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		changed, err := time.Parse("2006-01-02 15:04:05.999999-07", at)
		if err != nil || !strings.HasSuffix(at, "+00") {
			t.Errorf("got the time %q in %q, want UTC", at, line)
		}
		wantNow(t, "time of a change", changed)
		lines = append(lines, rest)
	}
	return lines
}

// user history has a line for each change of an account, whoever makes it and with whatever program,
// and none for a statement that changes nothing. It finds the account by each address that it has ever
// had, also after it was deleted.
func TestHistoryHasEveryChange(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	setZone(t, s, "America/St_Johns")
	operator := hubstest.Query[string](t, s.Database, "select session_user")
	support, asSupport := hubstest.NewRole(t, s.Database)
	hubstest.Exec(t, s.Database, "grant select, insert, update, delete on users to "+support)
	first, second := hubstest.NewEmail(), hubstest.NewEmail()
	s.User(t, "add", first)
	s.User(t, "role", first, "admin")
	s.User(t, "role", first, "admin") // changes nothing
	s.User(t, "suspend", first)
	psql := s.Database + "&application_name=psql"
	hubstest.Exec(t, psql, "update users set suspended = false where email = $1", first)
	hubstest.Exec(t, psql, "update users set suspended = suspended, permission = permission")
	hubstest.Exec(t, asSupport+"&application_name=console%20of%20support&timezone=Asia/Tokyo",
		"update users set signed_out_at = '2026-01-02 09:00:00+09'")
	// The same time in another zone changes nothing.
	hubstest.Exec(t, asSupport+"&timezone=Europe/Berlin", "update users set signed_out_at = '2026-01-02 01:00:00+01'")
	hubstest.Exec(t, asSupport+"&application_name=", "update users set email = $1", second)
	hubstest.Exec(t, psql, "set session authorization "+support+"; delete from users")

	want := []string{
		operator + "  hubs user add  email: - → " + first + ", permission: - → member, suspended: - → false",
		operator + "  hubs user role  permission: member → admin",
		operator + "  hubs user suspend  suspended: false → true",
		operator + "  psql  suspended: true → false",
		support + "  console of support  signed_out_at: - → 2026-01-02T00:00:00+00:00",
		support + "    email: " + first + " → " + second,
		support + "  psql  email: " + second + " → -, permission: admin → -, " +
			"signed_out_at: 2026-01-02T00:00:00+00:00 → -, suspended: false → -",
	}
	for _, email := range []string{first, second, strings.ToUpper(second)} {
		wantEqual(t, "history of "+email, historyOf(t, s, email), want)
	}
	s.User(t, "add", "-role", "admin", first) // another account
	added := operator + "  hubs user add  email: - → " + first + ", permission: - → admin, suspended: - → false"
	wantEqual(t, "history of an address of two accounts", historyOf(t, s, first), append(want, added))
	wantEqual(t, "history of the deleted one", historyOf(t, s, second), want)
	wantParts(t, "history of nobody", s.User(t, "history", "nobody@example.com"),
		"no change of this account is on record")
}

// The history finds a former address whatever its letter case, by that of ASCII, also in a database
// with a Turkish locale, where the lower case of I is ı.
func TestHistoryInATurkishDatabase(t *testing.T) {
	t.Parallel()
	version := hubstest.Query[int](t, hubstest.NewDatabase(t),
		"select current_setting('server_version_num')::int")
	if version < 150000 {
		t.Skip("PostgreSQL before version 15 has no databases with an ICU locale")
	}
	database := hubstest.EmptyDatabase(t, `template template0 encoding utf8
		locale_provider icu icu_locale 'tr-TR' locale 'C'`)
	hubstest.Must(t, hubstest.SetUp(database))
	s := &hubstest.Server{Env: map[string]string{"DATABASE_URL": database}}
	s.User(t, "add", "INFO@IRIS.EXAMPLE")
	s.User(t, "email", "info@iris.example", "zoe@example.com")
	for _, email := range []string{"INFO@IRIS.EXAMPLE", "info@iris.example", "Info@Iris.Example"} {
		wantEqual(t, "changes of "+email, len(historyOf(t, s, email)), 2)
	}
	s.User(t, "delete", "ZOE@EXAMPLE.COM")
	wantEqual(t, "changes of the deleted user", len(historyOf(t, s, "info@iris.example")), 3)
}

// A change that is rolled back leaves no line, and one of many rows leaves a line for each. A line has
// the role that has connected, not the one that it has become.
func TestHistoryIsOfTheTransaction(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	emails := []string{hubstest.NewEmail(), hubstest.NewEmail(), hubstest.NewEmail()}
	for _, email := range emails {
		s.User(t, "add", email)
	}
	role, _ := hubstest.NewRole(t, s.Database)
	hubstest.Exec(t, s.Database, "grant select, update on users to "+role)
	operator := hubstest.Query[string](t, s.Database, "select session_user")
	tx, err := hubstest.OpenDB(t, s.Database).Begin()
	hubstest.Must(t, err)
	_, err = tx.Exec("update users set suspended = true")
	hubstest.Must(t, err)
	hubstest.Must(t, tx.Rollback())
	hubstest.Exec(t, s.Database+"&application_name=psql", "set role "+role+`;
		update users set permission = 'admin'`)
	for _, email := range emails {
		lines := historyOf(t, s, email)
		wantEqual(t, "lines", len(lines), 2)
		wantEqual(t, "last line", lines[len(lines)-1], operator+"  psql  permission: member → admin")
	}
	hubstest.Exec(t, s.Database, "insert into users (email) values ($1) on conflict do nothing", emails[0])
	wantEqual(t, "lines after an insert of nothing", len(historyOf(t, s, emails[0])), 2)
}

// Neither the owner of the tables nor the server can change or remove what is recorded of accounts, and
// the server can't read it. The trigger's function serves its own table only.
func TestAccountChangesStay(t *testing.T) {
	t.Parallel()
	database := hubstest.EmptyDatabase(t, "")
	owner, asOwner := hubstest.NewRole(t, database)
	ownDatabase(t, database, owner)
	hubstest.Must(t, hubstest.Migrate(asOwner))
	hubstest.Must(t, hubstest.SetUp(database)) // runs roles.sql, as a superuser
	hubstest.Exec(t, asOwner, "insert into users (email) values ('ada@example.com')")
	for _, role := range []string{owner, "hubs_server"} {
		for _, statement := range []string{
			"update account_changes set database_role = 'somebody'",
			"update account_changes set after = null where false",
			"delete from account_changes",
			"truncate account_changes",
			"truncate users, account_changes cascade",
			"create trigger t before insert on account_changes execute function record_account_change()",
			"select 1 from account_changes for update",
		} {
			got := sqlErrorOf(t, hubstest.OpenDB(t, database), "set local role "+role+"; "+statement)
			wantEqual(t, role+": "+statement, got, "insufficient_privilege")
		}
	}
	for _, statement := range []string{
		"select from account_changes",
		"select user_id from account_changes",
		"copy account_changes to stdout",
		"insert into account_changes (user_id) values (gen_random_uuid())",
		"insert into account_changes (user_id) select user_id from users",
		"select record_account_change()",
		"create temp table t (user_id int); create trigger t after insert on t for each row " +
			"execute function record_account_change()",
	} {
		got := sqlErrorOf(t, hubstest.OpenDB(t, database), "set local role hubs_server; "+statement)
		wantEqual(t, "hubs_server: "+statement, got, "insufficient_privilege")
	}
	// The owner's commands still work, and what they do is recorded.
	s := &hubstest.Server{Env: map[string]string{"DATABASE_URL": asOwner}}
	s.User(t, "suspend", "ada@example.com")
	hubstest.Must(t, hubstest.Migrate(asOwner))
	wantEqual(t, "changes", len(historyOf(t, s, "ada@example.com")), 2)
	// An old row can be removed by a superuser, as docs/deploy.md says.
	hubstest.Exec(t, database, "delete from account_changes where changed_at < now()")
	wantEqual(t, "changes after that", s.User(t, "history", "ada@example.com"),
		"no change of this account is on record\n")
}

// ownDatabase makes a role the owner of a database and of its schema public, until the test ends.
func ownDatabase(t *testing.T, database, owner string) {
	t.Helper()
	alter := func(role string) {
		hubstest.Exec(t, database, `do $$ begin execute format('alter database %I owner to `+role+
			`', current_database()); end $$`)
	}
	operator := hubstest.Query[string](t, database, "select session_user")
	alter(owner)
	t.Cleanup(func() { alter(operator) }) // or the role could not be dropped
	hubstest.Exec(t, database, "drop schema public cascade; create schema public authorization "+owner)
}
