package deploy

import (
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/lib/pq"

	"hubs/internal/hubstest"
)

// A roleDatabase holds URLs of the database hubs, one for each role. The role stranger has a
// database beside it. Both are in a PostgreSQL of the test's own, because roles.sql changes rights
// in all databases.
type roleDatabase struct{ administrator, owner, server, stranger string }

const rolePassword = "the-password-of-each-role"

// newRoleDatabase follows docs/deploy.md as an administrator with these attributes.
func newRoleDatabase(t *testing.T, attributes string) roleDatabase {
	t.Helper()
	d := newEmptyRoleDatabase(t, attributes)
	hubstest.Must(t, hubstest.Migrate(d.owner))
	return d
}

// newEmptyRoleDatabase stops before the command migrate.
func newEmptyRoleDatabase(t *testing.T, attributes string) roleDatabase {
	t.Helper()
	pg := hubstest.StartPostgres(t, hubstest.NewPath("postgres"))
	as := func(role, database string) string {
		return hubstest.WithUser(t, hubstest.WithDatabase(pg.URL, database), role, rolePassword)
	}
	const login = " login password '" + rolePassword + "'"
	hubstest.Exec(t, pg.URL, "create role administrator "+attributes+login)
	for role, database := range map[string]string{"hubs_owner": "hubs", "stranger": "stranger"} {
		administrator := as("administrator", "postgres")
		hubstest.Exec(t, administrator, "create role "+role+login)
		hubstest.Exec(t, administrator, "grant "+role+" to administrator")
		hubstest.Exec(t, administrator,
			"create database "+database+" owner "+role+" encoding 'UTF8' template template0")
	}
	return roleDatabase{
		administrator: as("administrator", "hubs"),
		owner:         as("hubs_owner", "hubs"),
		server:        as("hubs_server", "hubs"),
		stranger:      as("stranger", "hubs"),
	}
}

// runRoles runs roles.sql as the administrator. It returns PostgreSQL's warnings and notices.
func (d roleDatabase) runRoles(t *testing.T) (messages []string) {
	t.Helper()
	messages, err := d.tryRoles(t)
	hubstest.Must(t, err)
	return messages
}

// tryRoles is like runRoles, but returns an error.
func (d roleDatabase) tryRoles(t *testing.T) (messages []string, err error) {
	t.Helper()
	connector, err := pq.NewConnector(d.administrator)
	hubstest.Must(t, err)
	db := sql.OpenDB(pq.ConnectorWithNoticeHandler(connector, func(notice *pq.Error) {
		messages = append(messages, notice.Message)
	}))
	defer db.Close()
	const password = "alter role hubs_server password '" + rolePassword + "'"
	_, err = db.Exec(shipped(t, "roles.sql") + password)
	return messages, err
}

// wantPrivilegeRefused fails the test unless PostgreSQL refuses each statement for lack of a right.
// refused has one statement a line.
func wantPrivilegeRefused(t *testing.T, databaseURL, refused string) {
	t.Helper()
	db := hubstest.OpenDB(t, databaseURL)
	for statement := range strings.Lines(refused) {
		_, err := db.Exec(statement)
		refusal, ok := errors.AsType[*pq.Error](err)
		if !ok || refusal.Code != "42501" { // insufficient_privilege
			t.Errorf("%s: got %v, want insufficient_privilege", statement, err)
		}
	}
}

// The role hubs_server, with which a server runs, has the rights that the endpoints need. roles.sql
// takes all others from it, whether they were granted by mistake or by an earlier version of the
// file. It also resets the role's settings: somebody who has stolen its password could have changed
// them.
func TestLeastPrivilegeRole(t *testing.T) {
	t.Parallel()
	d := newRoleDatabase(t, "superuser")
	hubstest.Exec(t, d.administrator, oldRights)
	// As after a restore without privileges.
	hubstest.Exec(t, d.owner, "grant all on account_changes to hubs_owner")
	for range 2 { // operators run roles.sql after each migrate, so it must work again
		warnings := d.runRoles(t)
		hubstest.WantEqual(t, "warnings", warnings, []string(nil))
	}
	const settings = "select count(*) from pg_db_role_setting where setrole <> 0"
	got := hubstest.Query[int](t, d.administrator, settings)
	hubstest.WantEqual(t, "settings of roles", got, 0)
	hubstest.Exec(t, d.server, neededByServer)
	wantPrivilegeRefused(t, d.server, refusedToServer+refusedBySuperuser)
	for _, name := range []string{"postgres", "template1", "stranger"} {
		wantPrivilegeRefused(t, hubstest.WithDatabase(d.server, name), "select 1")
		// Other roles can still connect.
		hubstest.Exec(t, hubstest.WithDatabase(d.stranger, name), "select 1")
	}
	// The stranger, in turn, can't connect to the server's database.
	wantPrivilegeRefused(t, d.stranger, "select 1")
	// Nobody changes what was recorded, the owner included.
	wantPrivilegeRefused(t, d.owner, "update account_changes set program = 'x'\n"+
		"delete from account_changes\ntruncate account_changes")
	// The owner keeps the rights that migrate and a dump need.
	hubstest.Exec(t, d.owner, "select pg_advisory_xact_lock(1)")
	hubstest.Exec(t, d.owner, "select lo_unlink(lo_create(0))")
}

// On a managed service, the administrator is no superuser. roles.sql does what they can do, and
// warns of the protections that are missing.
func TestRolesWithoutSuperuser(t *testing.T) {
	t.Parallel()
	d := newRoleDatabase(t, "createrole createdb")
	for range 2 {
		warnings := d.runRoles(t)
		hubstest.WantEqual(t, "warnings", warnings, []string{
			"hubs_server can still connect to the database postgres",
			"hubs_server can still connect to the database template1",
			"hubs_server can still make large objects, and fill the disk with them",
			"hubs_server can still take advisory locks, and so hold up hubs migrate",
		})
	}
	hubstest.Exec(t, d.server, neededByServer)
	wantPrivilegeRefused(t, d.server, refusedToServer)
	wantPrivilegeRefused(t, hubstest.WithDatabase(d.server, "stranger"), "select 1")
}

// roles.sql works on the schema to which migrate has written, whichever that is, and a server finds
// the tables there.
func TestRolesFollowTheSchema(t *testing.T) {
	t.Parallel()
	for name, schema := range map[string]string{
		"named like the owner": "create schema hubs_owner authorization hubs_owner",
		"set for the database": "create schema app authorization hubs_owner; " +
			"alter database hubs set search_path = app",
		"set for the owner": `create schema "My App" authorization hubs_owner; ` +
			`alter role hubs_owner in database hubs set search_path = "My App", public`,
		"without public": "drop schema public; create schema hubs_owner authorization hubs_owner",
		"public, though not the default": "alter role hubs_owner set search_path = public; " +
			"alter database hubs set search_path = elsewhere",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newEmptyRoleDatabase(t, "superuser")
			hubstest.Exec(t, d.administrator, schema)
			hubstest.Must(t, hubstest.Migrate(d.owner))
			for range 2 {
				hubstest.WantEqual(t, "messages", d.runRoles(t), []string(nil))
			}
			s := hubstest.Start(t, map[string]string{"DATABASE_URL": d.server})
			s.Client(t).Get("/healthz").Want(t, 200)
			hubstest.Exec(t, d.owner, "insert into users (email) values ('a@b.example')")
			hubstest.Exec(t, d.server, neededByServer)
			wantPrivilegeRefused(t, d.server, refusedToServer)
		})
	}
}

// roles.sql says why it can't find the tables, and changes nothing.
func TestRolesNeedOneSchema(t *testing.T) {
	t.Parallel()
	d := newEmptyRoleDatabase(t, "superuser")
	wantRefusal := func(want string) {
		t.Helper()
		_, err := d.tryRoles(t)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got the error %v, want one with %q", err, want)
		}
	}
	wantRefusal("no tables of this version (run: hubs migrate)")
	hubstest.Must(t, hubstest.Migrate(d.owner))
	hubstest.Exec(t, d.administrator, "create schema hubs_owner authorization hubs_owner")
	hubstest.Must(t, hubstest.Migrate(d.owner))
	wantRefusal("several schemas: hubs_owner, public")
	hubstest.Exec(t, d.administrator, "drop schema hubs_owner cascade; "+
		"create role hubs_server; grant hubs_server to hubs_owner; reassign owned by hubs_owner to hubs_server")
	wantRefusal("hubs_server owns the tables")
}

// Run as the owner, who is no administrator, roles.sql says who must run it.
func TestRolesNeedAnAdministrator(t *testing.T) {
	t.Parallel()
	d := newRoleDatabase(t, "superuser")
	d.administrator = d.owner
	_, err := d.tryRoles(t)
	if err == nil || !strings.Contains(err.Error(), "run roles.sql as a superuser") {
		t.Errorf("got the error %v, want one that says who must run it", err)
	}
}

// roles.sql takes from every role but the owner what it may do to the tables. It names what it has
// taken, and what it can't take, with the statement that does. Once these have run, it says nothing.
func TestRolesNameWhatOthersMayDo(t *testing.T) {
	t.Parallel()
	d := newRoleDatabase(t, "superuser")
	hubstest.Exec(t, d.administrator, `
		create role hubs_server login noinherit;
		grant truncate, trigger, references on users to hubs_server;
		-- as Supabase does for the roles of its own interface
		create role anon;
		alter default privileges for role hubs_owner in schema public grant select on tables to anon;
		alter default privileges for role hubs_owner grant all on tables to hubs_server;
		grant select, insert, delete on account_changes, files to anon;
		grant insert on users to anon with grant option;
		set role anon; grant insert on users to pg_monitor; reset role;
		grant update (suspended), update (email) on users to public;
		-- by another role
		create role "Writers"; grant update on users to "Writers"; grant "Writers" to hubs_server;
		grant pg_execute_server_program to hubs_server;
		create role deputy; grant hubs_owner to deputy;
		create role intern; grant deputy to intern;
		create role robot; grant pg_write_all_data to robot;
		alter table hubs enable row level security;
		alter table account_changes owner to administrator`)
	first := d.runRoles(t)
	second := d.runRoles(t)

	hubstest.WantEqual(t, "what was taken", first[:len(first)-len(second)], []string{
		"taken from hubs_server: membership in Writers",
		"taken from hubs_server: membership in pg_execute_server_program",
		`taken from "Writers": update on users`,
		"taken from anon: insert on users",
		"taken from pg_monitor: insert on users",
		"taken from public: update of columns on users",
		"taken from anon: delete, insert, select on account_changes",
		"taken from anon: delete, insert, select on files",
	})
	hubstest.WantEqual(t, "what was left", second, []string{
		"account_changes belongs to administrator: alter table account_changes owner to hubs_owner",
		"deputy can act as hubs_owner, and so write or read users: revoke hubs_owner from deputy",
		"intern can act as deputy, and so write or read users: revoke deputy from intern",
		"new tables will be open to anon: alter default privileges for role hubs_owner in schema public " +
			"revoke all on tables from anon",
		"new tables will be open to hubs_server: alter default privileges for role hubs_owner " +
			"revoke all on tables from hubs_server",
		"robot can act as pg_write_all_data, and so write or read users: revoke pg_write_all_data from robot",
		"row-level security on hubs can hide rows: alter table hubs disable row level security",
	})
	for _, message := range second {
		_, statement, _ := strings.Cut(message, ": ")
		hubstest.Exec(t, d.administrator, statement)
	}
	hubstest.WantEqual(t, "what is left after that", d.runRoles(t), []string(nil))
}

// refusedToServer holds statements that a server never needs. hubs_server must have no right to run
// them.
const refusedToServer = `create table t ()
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
delete from files
select from account_changes
insert into account_changes (user_id) values (gen_random_uuid())
update account_changes set program = 'x'
alter role hubs_server createdb
create role r
create database d
set role hubs_owner
copy hubs to '/tmp/hubs'
copy hubs to program 'true'
select lo_import('/etc/passwd')
select lo_export(1, '/tmp/x')
`

// refusedBySuperuser holds further statements, which only a superuser can take from hubs_server.
const refusedBySuperuser = `select lo_create(0)
select lo_creat(-1)
select lo_from_bytea(0, 'x')
select lo_open(1, 131072)
select lo_put(1, 0, 'x')
select lowrite(0, 'x')
select pg_advisory_lock(7239104561)
select pg_advisory_xact_lock(7239104561)
select pg_advisory_lock_shared(1, 2)
select pg_try_advisory_lock(7239104561)
select pg_try_advisory_xact_lock(7239104561)
`

// neededByServer holds statements that need every right of hubs_server. The server itself connects
// with it in the tests of the API.
const neededByServer = `
insert into terms_acceptances (user_id, version) select user_id, '1' from users
	on conflict (user_id, version) do update set version = excluded.version;
insert into hubs (name) values ('North');
update hubs set name = 'South';
delete from hubs;
insert into files (user_id, name, content_type, size) select user_id, 'a.txt', 'text/plain', 1 from users;
select from terms_acceptances, hubs, files`

// oldRights give hubs_server more rights than it needs.
const oldRights = `
create role hubs_server login password '` + rolePassword + `' createdb createrole;
grant all on all tables in schema public to hubs_server;
grant update (suspended) on users to hubs_server;
grant all on schema public to hubs_server;
grant all on database hubs to hubs_server;
grant execute on function lo_create(oid), pg_advisory_lock(bigint) to hubs_server;
revoke execute on function hub_name_key(text) from public;
alter role hubs_server set search_path = s;
alter role hubs_server in database hubs set synchronous_commit = off`
