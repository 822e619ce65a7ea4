package deploy

import (
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/lib/pq"

	"hubs/internal/hubstest"
)

// A roleDatabase has the tables of hubs_owner, and a stranger's database beside it.
// roles.sql changes rights in all databases, so it needs a PostgreSQL of its own.
type roleDatabase struct{ superuser, owner, server, stranger string }

func newRoleDatabase(t *testing.T) roleDatabase {
	t.Helper()
	pg := hubstest.NewPostgres(t)
	for _, role := range []string{"hubs_owner", "stranger"} {
		hubstest.Exec(t, pg.URL, "create role "+role+" login password 'p'")
		hubstest.Exec(t, pg.URL, "create database "+role+" owner "+role)
	}
	database := hubstest.WithDatabase(pg.URL, "hubs_owner")
	d := roleDatabase{
		superuser: database,
		owner:     hubstest.WithUser(t, database, "hubs_owner", "p"),
		server:    hubstest.WithUser(t, database, "hubs_server", "p"),
		stranger:  hubstest.WithUser(t, database, "stranger", "p"),
	}
	if err := hubstest.Migrate(d.owner); err != nil {
		t.Fatal(err)
	}
	return d
}

// statements returns the lines of a list.
func statements(list string) []string { return strings.Split(strings.TrimSpace(list), "\n") }

// wantRefused requires that each statement fails for want of a right (42501).
func wantRefused(t *testing.T, databaseURL string, refused []string) {
	t.Helper()
	db := hubstest.OpenDB(t, databaseURL)
	for _, statement := range refused {
		if err := tryRefused(db, statement); err != nil {
			t.Errorf("%s: %v", statement, err)
		}
	}
}

func tryRefused(db *sql.DB, statement string) error {
	_, err := db.Exec(statement)
	refusal, ok := errors.AsType[*pq.Error](err)
	if ok && refusal.Code == "42501" {
		return nil
	}
	return fmt.Errorf("want insufficient_privilege, got %v", err)
}

// hubs_server, the role of a running server, has enough for every endpoint, and no more.
func TestLeastPrivilegeRole(t *testing.T) {
	t.Parallel()
	d := newRoleDatabase(t)
	for range 2 { // after each migrate, so more than once
		hubstest.Exec(t, d.superuser, shipped(t, "roles.sql"))
	}
	hubstest.Exec(t, d.superuser, "alter role hubs_server password 'p'")
	t.Run("server works", func(t *testing.T) { testServerRoleWorks(t, d) })
	t.Run("server warns", func(t *testing.T) {
		for databaseURL, want := range map[string]bool{d.server: false, d.owner: true} {
			env := productionEnv(t)
			env["DATABASE_URL"] = databaseURL
			s := hubstest.Start(t, env)
			s.Client(t).Do("GET", "/healthz", nil).Want(t, 200)
			if got := s.Log.Count(`"level":"WARN"`, "users") > 0; got != want {
				t.Errorf("got a warning %v, want %v\n%s", got, want, s.Log)
			}
		}
	})
	t.Run("refused", func(t *testing.T) { wantRefused(t, d.server, statements(refusedToServer)) })
	t.Run("other databases", func(t *testing.T) {
		for _, name := range []string{"postgres", "template1", "stranger"} {
			wantRefused(t, hubstest.WithDatabase(d.server, name), []string{"select 1"})
			hubstest.Exec(t, hubstest.WithDatabase(d.stranger, name), "select 1") // as before
		}
		wantRefused(t, d.stranger, []string{"select 1"})
	})
	t.Run("owner", func(t *testing.T) { // keeps what migrate and a dump need
		hubstest.Exec(t, d.owner, "select pg_advisory_xact_lock(1)")
		hubstest.Exec(t, d.owner, "select lo_unlink(lo_create(0))")
	})
}

const refusedToServer = `
create table t ()
create temporary table t ()
create schema s
create extension pgcrypto
create function f() returns int language sql as 'select 1'
create index on hubs (description)
alter table users add column x int
alter table users disable trigger all
drop table hubs
drop index users_email
truncate hubs
comment on table hubs is 'x'
insert into users (email) values ('x@y.example')
update users set permission = 'admin'
update users set suspended = false, signed_out_at = null
delete from users
select from users for update
do $$ begin lock table users in share mode; end $$
do $$ begin lock table terms_acceptances in share mode; end $$
delete from terms_acceptances
update terms_acceptances set accepted_at = now()
update terms_acceptances set user_id = gen_random_uuid()
update terms_acceptances set version = '1', accepted_at = now()
update files set name = 'x'
alter role hubs_server createdb
create role r
create database d
set role hubs_owner
copy hubs to '/tmp/hubs'
copy hubs to program 'true'
select lo_create(0)
select lo_creat(-1)
select lo_from_bytea(0, 'x')
select lo_open(1, 131072)
select lo_put(1, 0, 'x')
select lowrite(0, 'x')
select lo_import('/etc/passwd')
select lo_export(1, '/tmp/x')
select pg_advisory_lock(7239104561)
select pg_advisory_xact_lock(7239104561)
select pg_advisory_lock_shared(1, 2)
select pg_try_advisory_lock(7239104561)
select pg_try_advisory_xact_lock(7239104561)
`

func testServerRoleWorks(t *testing.T, d roleDatabase) {
	s := hubstest.Start(t, map[string]string{"DATABASE_URL": d.server})
	email := hubstest.NewEmail()
	owner := map[string]string{"DATABASE_URL": d.owner}
	if code, _, errOut := hubstest.Run(owner, "user", "add", "-role", "admin", email); code != 0 {
		t.Fatal(errOut)
	}
	c := s.SignIn(t, email)
	c.AcceptTerms()
	c.AcceptTerms() // again: that is an update
	hub := c.Do("POST", "/hubs", map[string]string{"name": "North"}).Want(t, 201).Header.Get("Location")
	c.Do("PATCH", hub, map[string]string{"name": "South"}).Want(t, 200)
	for _, query := range []string{"", "?filters[name]=south", "?filters[status]=active&orderBy=createdAt"} {
		items := c.Do("GET", "/hubs"+query, nil).Want(t, 200).Field(t, "items").([]any)
		if len(items) != 1 {
			t.Errorf("/hubs%s: got %v, want one hub", query, items)
		}
	}
	c.Do("GET", c.Upload("a.txt", []byte("a")).Want(t, 201).Header.Get("Location"), nil).Want(t, 200)
	c.Do("DELETE", hub, nil).Want(t, 204)
	c.Do("GET", "/healthz", nil).Want(t, 200)
	hubstest.Exec(t, d.server, "delete from files") // a failed upload is undone
	for _, args := range [][]string{{"migrate"}, {"user", "role", email, "admin"}} {
		if code, _, errOut := hubstest.Run(map[string]string{"DATABASE_URL": d.server}, args...); code != 1 {
			t.Errorf("%q as hubs_server: exit status %d, want 1: %s", args, code, errOut)
		}
	}
}

// roles.sql takes back every right that hubs_server was given before, by mistake or by an
// earlier version of the file, and every setting that a stolen role gave itself.
func TestRolesTakeOldRightsBack(t *testing.T) {
	t.Parallel()
	d := newRoleDatabase(t)
	for _, statement := range statements(`
create role hubs_server login password 'p' createdb createrole
grant all on all tables in schema public to hubs_server
grant update (suspended) on users to hubs_server
grant all on schema public to hubs_server
grant all on database hubs_owner to hubs_server
grant execute on function lo_create(oid), pg_advisory_lock(bigint) to hubs_server
alter role hubs_server set search_path = s
alter role hubs_server in database hubs_owner set synchronous_commit = off
`) {
		hubstest.Exec(t, d.superuser, statement)
	}
	taken := statements(`
create database d
create role r
create table public.t ()
create schema s
create temporary table tt ()
update public.users set suspended = false
update public.users set permission = 'member'
delete from public.users
insert into public.users (email) values ('x@y.example')
delete from public.terms_acceptances
update public.files set name = 'x'
truncate public.hubs
select lo_create(0)
select pg_advisory_lock(1)
`)
	before := hubstest.OpenDB(t, d.server)
	for _, statement := range taken {
		if err := tryRefused(before, statement); err == nil {
			t.Errorf("%s: refused before roles.sql, so this test shows nothing", statement)
		}
	}
	before.Close()
	for _, statement := range statements("drop database d\ndrop table t\ndrop schema s\ndrop role r") {
		hubstest.Exec(t, d.superuser, statement)
	}
	hubstest.Exec(t, d.superuser, shipped(t, "roles.sql"))
	wantRefused(t, d.server, taken)
	if got := hubstest.Query[int](t, d.superuser, "select count(*) from pg_db_role_setting where setrole <> 0"); got != 0 {
		t.Errorf("hubs_server keeps %d settings of its own, want 0", got)
	}
}

// PostgreSQL over TLS as production.env advises: verify-full, and nothing less.
func TestDatabaseTLS(t *testing.T) {
	t.Parallel()
	pg := hubstest.NewPostgres(t)
	dir := t.TempDir()
	certificate := hubstest.CA.ServerTLS().Certificates[0]
	trusted := writeFile(t, dir, "ca.pem", string(hubstest.CA.PEM()))
	other := writeFile(t, dir, "other.pem", keyPair(t, hubstest.CA.ServerTLS().Certificates[0]))
	with := func(host, rootCert string) string {
		u, err := url.Parse(pg.URL)
		if err != nil {
			t.Fatal(err)
		}
		u.RawQuery = url.Values{
			"host": {host}, "hostaddr": {u.Hostname()}, "sslmode": {"verify-full"}, "sslrootcert": {rootCert},
		}.Encode()
		return u.String()
	}
	refused := func(databaseURL, reason string) {
		t.Helper()
		for _, command := range []string{"serve", "migrate"} {
			env := hubstest.ServerEnv(t, map[string]string{"DATABASE_URL": databaseURL})
			code, _, errOut := hubstest.Run(env, command)
			if code != 1 || !strings.Contains(errOut, reason) {
				t.Errorf("%s: exit status %d, want 1 and %q: %s", command, code, reason, errOut)
			}
		}
	}
	refused(with("db.example.com", trusted), "SSL") // a PostgreSQL without TLS
	useCertificate(t, pg, keyPair(t, certificate))
	refused(with("db.example.net", trusted), "x509: ") // the certificate is for example.com
	refused(with("db.example.com", other), "x509: ")

	s := hubstest.Start(t, map[string]string{"DATABASE_URL": with("db.example.com", trusted)})
	s.Client(t).Do("GET", "/healthz", nil).Want(t, 200)
	plain := hubstest.Query[int](t, pg.URL, `select count(*) from pg_stat_ssl join pg_stat_activity using (pid)
		where not ssl and backend_type = 'client backend' and pid <> pg_backend_pid()`)
	encrypted := hubstest.Query[int](t, pg.URL, "select count(*) from pg_stat_ssl where ssl and version >= 'TLSv1.2'")
	if plain != 0 || encrypted == 0 {
		t.Errorf("%d connections in plain text, %d encrypted", plain, encrypted)
	}
}

// useCertificate makes PostgreSQL speak TLS. PostgreSQL writes the key itself, because it
// takes none that other accounts can read.
func useCertificate(t *testing.T, pg *hubstest.Postgres, pair string) {
	t.Helper()
	file := pg.Dir + "/data/tls.pem"
	for _, statement := range []string{
		"copy (select unnest(string_to_array(" + pq.QuoteLiteral(strings.TrimSpace(pair)) + ", e'\\n'))) " +
			"to program 'umask 077; cat > " + file + "'",
		"alter system set ssl_cert_file = '" + file + "'",
		"alter system set ssl_key_file = '" + file + "'",
		"alter system set ssl = on",
	} {
		hubstest.Exec(t, pg.URL, statement)
	}
	pg.Stop()
	pg.Start()
}
