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
	pg := hubstest.NewCluster(t)
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
	d := roleDatabase{
		administrator: as("administrator", "hubs"),
		owner:         as("hubs_owner", "hubs"),
		server:        as("hubs_server", "hubs"),
		stranger:      as("stranger", "hubs"),
	}
	hubstest.Must(t, hubstest.Migrate(d.owner))
	return d
}

// runRoles runs roles.sql as the administrator. It returns PostgreSQL's warnings.
func (d roleDatabase) runRoles(t *testing.T) (warnings []string) {
	t.Helper()
	connector, err := pq.NewConnector(d.administrator)
	hubstest.Must(t, err)
	db := sql.OpenDB(pq.ConnectorWithNoticeHandler(connector, func(notice *pq.Error) {
		warnings = append(warnings, notice.Message)
	}))
	defer db.Close()
	const password = "alter role hubs_server password '" + rolePassword + "'"
	_, err = db.Exec(shipped(t, "roles.sql") + password)
	hubstest.Must(t, err)
	return warnings
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
alter role hubs_server set search_path = s;
alter role hubs_server in database hubs set synchronous_commit = off`
