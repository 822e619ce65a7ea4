package deploy

import (
	"errors"
	"strings"
	"testing"

	"github.com/lib/pq"

	"hubs/internal/hubstest"
)

// A roleDatabase holds URLs of the database hubs_owner, one for each role. The role stranger has a
// database beside it. Both are in a PostgreSQL of the test's own, because roles.sql changes rights
// in all databases.
type roleDatabase struct{ superuser, owner, server, stranger string }

const rolePassword = "the-password-of-each-role"

func newRoleDatabase(t *testing.T) roleDatabase {
	t.Helper()
	pg := hubstest.NewCluster(t)
	for _, role := range []string{"hubs_owner", "stranger"} {
		hubstest.Exec(t, pg.URL, "create role "+role+" login password '"+rolePassword+"'")
		hubstest.Exec(t, pg.URL, "create database "+role+" owner "+role)
	}
	database := hubstest.WithDatabase(pg.URL, "hubs_owner")
	d := roleDatabase{
		superuser: database,
		owner:     hubstest.WithUser(t, database, "hubs_owner", rolePassword),
		server:    hubstest.WithUser(t, database, "hubs_server", rolePassword),
		stranger:  hubstest.WithUser(t, database, "stranger", rolePassword),
	}
	err := hubstest.Migrate(d.owner)
	hubstest.Must(t, err)
	return d
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

// The role hubs_server, with which a server runs, has the rights that the endpoints need, and no
// others.
func TestLeastPrivilegeRole(t *testing.T) {
	t.Parallel()
	d := newRoleDatabase(t)
	for range 2 { // operators run roles.sql after each migrate, so it must work again
		hubstest.Exec(t, d.superuser, shipped(t, "roles.sql"))
	}
	hubstest.Exec(t, d.superuser, "alter role hubs_server password '"+rolePassword+"'")
	t.Run("server works", func(t *testing.T) { testServerRoleWorks(t, d) })
	t.Run("refused", func(t *testing.T) {
		wantPrivilegeRefused(t, d.server, refusedToServer)
	})
	t.Run("other databases", func(t *testing.T) {
		for _, name := range []string{"postgres", "template1", "stranger"} {
			wantPrivilegeRefused(t, hubstest.WithDatabase(d.server, name), "select 1")
			// Other roles can still connect.
			hubstest.Exec(t, hubstest.WithDatabase(d.stranger, name), "select 1")
		}
		// The stranger, in turn, can't connect to the server's database.
		wantPrivilegeRefused(t, d.stranger, "select 1")
	})
	t.Run("owner", func(t *testing.T) { // keeps the rights that migrate and a dump need
		hubstest.Exec(t, d.owner, "select pg_advisory_xact_lock(1)")
		hubstest.Exec(t, d.owner, "select lo_unlink(lo_create(0))")
	})
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

// testServerRoleWorks sends requests that need every right of hubs_server.
func testServerRoleWorks(t *testing.T, d roleDatabase) {
	s := hubstest.Start(t, map[string]string{"DATABASE_URL": d.server})
	email := hubstest.NewEmail()
	hubstest.AddUser(t, d.owner, email, "admin")
	c := s.SignIn(t, email)
	c.AcceptTerms()
	c.AcceptTerms() // the second time is an update
	r := c.Do("POST /hubs", `{"name":"North"}`).Must(t, 201)
	hub := r.Header.Get("Location")
	c.Do("PATCH "+hub, `{"name":"South"}`).Want(t, 200)
	c.Get("/hubs?filters[name]=south&orderBy=createdAt").Want(t, 200)
	r = c.Upload("a.txt", []byte("a")).Must(t, 201)
	c.WantFile(r.Header.Get("Location"), "a")
	c.Do("DELETE "+hub, nil).Want(t, 204)
}

// oldRights give hubs_server more rights than it needs.
const oldRights = `
create role hubs_server login password '` + rolePassword + `' createdb createrole;
grant all on all tables in schema public to hubs_server;
grant update (suspended) on users to hubs_server;
grant all on schema public to hubs_server;
grant all on database hubs_owner to hubs_server;
grant execute on function lo_create(oid), pg_advisory_lock(bigint) to hubs_server;
alter role hubs_server set search_path = s;
alter role hubs_server in database hubs_owner set synchronous_commit = off`

// needOldRights holds statements that hubs_server may run only with the oldRights.
const needOldRights = `create database d
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
`

// roles.sql takes all other rights from hubs_server, whether they were granted by mistake or by an
// earlier version of the file. It also resets the role's settings, because somebody who has stolen
// the role's password could have changed them.
func TestRolesTakeOldRightsBack(t *testing.T) {
	t.Parallel()
	d := newRoleDatabase(t)
	hubstest.Exec(t, d.superuser, oldRights)
	for statement := range strings.Lines(needOldRights) {
		hubstest.Exec(t, d.server, statement)
	}
	hubstest.Exec(t, d.superuser, "drop database d")
	hubstest.Exec(t, d.superuser, "drop table t; drop schema s; drop role r")
	hubstest.Exec(t, d.superuser, shipped(t, "roles.sql"))
	wantPrivilegeRefused(t, d.server, needOldRights)
	const settings = "select count(*) from pg_db_role_setting where setrole <> 0"
	got := hubstest.Query[int](t, d.superuser, settings)
	if got != 0 {
		t.Errorf("got %d settings of roles after roles.sql, want 0", got)
	}
}
