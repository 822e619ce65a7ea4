-- The least that a running server needs. Run this file in the server's database, after each
-- `hubs migrate`, after a restore, and after making a database in the same cluster:
--
--     psql -v ON_ERROR_STOP=1 -d hubs -f deploy/roles.sql
--
-- There are two roles. hubs_owner owns the database and its tables; `hubs migrate` and
-- `hubs user …` connect as it. hubs_server is what `hubs serve` connects as. It has no DDL
-- and can't write users, so that not even an SQL injection makes an administrator, wakes a
-- suspended account or brings an ended session back. (At its start the server warns in its
-- log when its role may write users.)
--
-- Run it as a superuser. A managed service has none for its customers: run it there as the
-- administrator, with CREATEROLE and membership in hubs_owner. It then does what that role
-- can do, and warns of each protection that is missing.
--
-- This file sets no password. Set one with \password, or use certificates.
begin;

do $$
declare
    owner name := (select datdba::regrole from pg_database where datname = current_database());
    server pg_roles;
begin
    if not pg_has_role(owner, 'usage') then
        raise 'run roles.sql as a superuser, or as a member of % (grant % to %)',
            owner, owner, current_user;
    end if;
    if not exists (select from pg_roles where rolname = 'hubs_server') then
        create role hubs_server login;
    end if;
    -- Not every administrator may name these attributes, so name only those that are set.
    select * into server from pg_roles where rolname = 'hubs_server';
    if server.rolsuper or server.rolreplication or server.rolbypassrls then
        alter role hubs_server nosuperuser noreplication nobypassrls;
    end if;
    if server.rolcreatedb or server.rolcreaterole then
        alter role hubs_server nocreatedb nocreaterole;
    end if;
    -- A role may change its own settings, such as search_path, for all its later connections.
    alter role hubs_server reset all;
    execute format('alter role hubs_server in database %I reset all', current_database());

    -- hubs_server may do all that PUBLIC may do. By default PUBLIC may connect to a database
    -- and make temporary tables in it, and up to PostgreSQL 14 create tables in public.
    execute format('revoke all on database %I from public, hubs_server', current_database());
    execute format('grant connect on database %I to hubs_server', current_database());
end $$;
revoke all on schema public from public, hubs_server;
grant usage on schema public to hubs_server;
grant all on schema public to pg_database_owner; -- the default from PostgreSQL 15 on

-- No other database of the cluster, unless this file was run there too. A right that PUBLIC
-- has can't be taken from one role: so the roles that exist now get it by name, and PUBLIC
-- loses it. Grant CONNECT by name to roles that are made later.
do $$
declare
    other name;
    role_name name;
begin
    for other in select datname from pg_database
                 where datname <> current_database() and pg_has_role(datdba, 'usage')
                 and has_database_privilege('public', oid, 'connect') loop
        for role_name in select rolname from pg_roles
                         where rolname <> 'hubs_server' and rolname !~ '^pg_' and not rolsuper loop
            execute format('grant connect on database %I to %I', other, role_name);
        end loop;
        execute format('revoke connect on database %I from public', other);
    end loop;
end $$;

-- No large objects, which could fill the disk, and no advisory locks, which could hold up
-- `hubs migrate`. The owner of the database keeps both.
do $$
declare
    f regprocedure;
begin
    for f in select oid from pg_proc
             where pronamespace = 'pg_catalog'::regnamespace
             and proname ~ '^(lo_.*|loread|lowrite|pg_(try_)?advisory_.*)$'
             and proname not in ('lo_import', 'lo_export') /* for superusers only, always */
             and pg_has_role(proowner, 'usage') loop
        execute format('revoke execute on function %s from public, hubs_server', f);
        execute format('grant execute on function %s to pg_database_owner', f);
    end loop;
end $$;

revoke all on all tables in schema public from public, hubs_server;
grant select                         on users             to hubs_server;
grant select, insert                 on terms_acceptances to hubs_server;
grant update (version)               on terms_acceptances to hubs_server; -- on conflict do update
grant select, insert, update, delete on hubs              to hubs_server;
grant select, insert                 on files             to hubs_server;

-- What is left of the rights that PUBLIC has by default, because this role could not take it.
do $$
declare
    ability text;
begin
    for ability in
        select 'connect to the database ' || datname from pg_database
            where datname <> current_database() and datallowconn
            and has_database_privilege('public', oid, 'connect')
        union all select 'create tables in the schema public'
            where has_schema_privilege('hubs_server', 'public', 'create')
        union all select 'make large objects, and fill the disk with them'
            where has_function_privilege('hubs_server', 'lo_create(oid)', 'execute')
        union all select 'take advisory locks, and so hold up hubs migrate'
            where has_function_privilege('hubs_server', 'pg_advisory_lock(bigint)', 'execute')
        order by 1
    loop
        raise warning 'hubs_server can still %', ability;
    end loop;
end $$;

commit;
