-- The least that a running server needs. Run it as a superuser, in the server's
-- database, after each `hubs migrate`:
--
--     psql -v ON_ERROR_STOP=1 -d hubs -f deploy/roles.sql
--
-- Two roles. hubs_owner owns the database and its tables; `hubs migrate` and
-- `hubs user …` connect as it. hubs_server is what `hubs serve` connects as: no DDL, and
-- no right to write users, so that not even an SQL injection makes an
-- administrator, wakes a suspended account or brings an ended session back.
-- Neither gets a password here: set one with \password, or use certificates.
begin;

do $$ begin
    if not exists (select from pg_roles where rolname = 'hubs_server') then
        create role hubs_server login;
    end if;
end $$;
alter role hubs_server nosuperuser nocreatedb nocreaterole noreplication nobypassrls;

-- PUBLIC is every role: what it may do, hubs_server may do. (PostgreSQL up to 14 lets
-- everyone create tables in public; all versions let everyone make temporary ones.)
do $$ begin
    execute format('revoke all on database %I from public', current_database());
    execute format('revoke all on database %I from hubs_server', current_database());
    execute format('grant connect on database %I to hubs_server', current_database());
end $$;
revoke all on schema public from public, hubs_server;
grant usage on schema public to hubs_server;
grant all on schema public to pg_database_owner; -- up to PostgreSQL 14 it is not his already

revoke all on all tables in schema public from public, hubs_server;
grant select                         on users             to hubs_server;
grant select, insert, update         on terms_acceptances to hubs_server;
grant select, insert, update, delete on hubs              to hubs_server;
grant select, insert, delete         on files             to hubs_server;

commit;
