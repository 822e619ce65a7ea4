-- The least that a running server needs. Run this file in the server's database, after each
-- `hubs migrate`, after a restore, and after making a database in the same cluster:
--
--     psql -v ON_ERROR_STOP=1 -d hubs < deploy/roles.sql
--
-- There are two roles. hubs_owner owns the tables; `hubs migrate` and `hubs user …` connect as it.
-- hubs_server is what `hubs serve` connects as. It has no DDL and can't write users, so that not
-- even an SQL injection makes an administrator, wakes a suspended account or brings an ended
-- session back. (On staging and production the server warns at its start of rights beyond these.)
--
-- No other role keeps a right on the tables. A NOTICE says what was taken from whom, a WARNING what
-- could not be taken, with the statement that takes it. For reports, make views in another schema.
--
-- Run it as a superuser. A managed service has none for its customers: run it there as the
-- administrator, with CREATEROLE and membership in hubs_owner. It then does what that role
-- can do.
--
-- This file sets no password. Set one with \password, or use certificates.
begin;

-- Find the schema to which `hubs migrate` wrote. All that follows is done there.
do $$
declare
    found text[] := array(
        select relnamespace::regnamespace::text from pg_class
        where relkind = 'r' and relname in ('users', 'hubs', 'account_changes')
        group by relnamespace having count(*) = 3 order by 1);
begin
    if cardinality(found) = 0 then
        raise 'the database % has no tables of this version (run: hubs migrate)', current_database();
    elsif cardinality(found) > 1 then
        raise 'the tables are in several schemas: % (drop those that no server uses)',
            array_to_string(found, ', ');
    end if;
    perform set_config('search_path', found[1], true);
end $$;

do $$
declare
    owner name := (select pg_get_userbyid(relowner) from pg_class where oid = 'users'::regclass);
    attribute text;
    membership record;
begin
    if not pg_has_role(owner, 'usage') then
        raise 'run roles.sql as a superuser, or as a member of % (grant % to %)',
            owner, owner, current_user;
    elsif not (select rolsuper or rolcreaterole from pg_roles where rolname = current_user) then
        raise 'run roles.sql as a superuser, or as an administrator with CREATEROLE: % has neither', current_user;
    elsif owner = 'hubs_server' then
        raise 'hubs_server owns the tables: make hubs_owner, and reassign owned by hubs_server to hubs_owner';
    end if;
    if not exists (select from pg_roles where rolname = 'hubs_server') then
        create role hubs_server login;
    end if;
    -- Not every administrator may name these attributes, so name only those that are set.
    for attribute in
        select unnest(array[
            case when rolsuper then 'superuser' end, case when rolcreaterole then 'createrole' end,
            case when rolcreatedb then 'createdb' end, case when rolreplication then 'replication' end,
            case when rolbypassrls then 'bypassrls' end])
        from pg_roles where rolname = 'hubs_server'
    loop
        continue when attribute is null;
        begin
            execute 'alter role hubs_server no' || attribute;
        exception when insufficient_privilege then
            raise warning 'hubs_server has %: alter role hubs_server no%', attribute, attribute;
        end;
    end loop;
    -- A member can do what the other role can, at once or by SET ROLE.
    for membership in
        select pg_get_userbyid(roleid) as role, pg_get_userbyid(grantor) as grantor
        from pg_auth_members where pg_get_userbyid(member) = 'hubs_server'
    loop
        begin
            execute format('revoke %I from hubs_server granted by %I cascade',
                membership.role, membership.grantor);
            raise notice 'taken from hubs_server: membership in %', membership.role;
        exception when insufficient_privilege then
            raise warning 'hubs_server is a member of %: revoke % from hubs_server granted by %',
                membership.role, membership.role, membership.grantor;
        end;
    end loop;
    -- A role may change its own settings, such as search_path, for all its later connections.
    alter role hubs_server reset all;
    execute format('alter role hubs_server in database %I reset all', current_database());
    if current_schema <> 'public'
        or (select reset_val <> '"$user", public' from pg_settings where name = 'search_path') then
        execute format('alter role hubs_server in database %I set search_path = %I',
            current_database(), current_schema);
    end if;

    -- hubs_server may do all that PUBLIC may do. By default PUBLIC may connect to a database
    -- and make temporary tables in it, and up to PostgreSQL 14 create tables in public.
    execute format('revoke all on database %I from public, hubs_server', current_database());
    execute format('grant connect on database %I to hubs_server', current_database());
    if to_regnamespace('public') is not null then
        revoke all on schema public from public, hubs_server;
        grant all on schema public to pg_database_owner; -- the default from PostgreSQL 15 on
    end if;
    execute format('revoke all on schema %I from public, hubs_server', current_schema);
    execute format('grant usage on schema %I to hubs_server', current_schema);
    execute format('revoke all on all tables in schema %I from hubs_server', current_schema);
    -- `hubs migrate` does this too, but a dump that is restored without privileges undoes it.
    execute format('revoke update, delete, truncate, trigger, references on account_changes from %I',
        (select pg_get_userbyid(relowner) from pg_class where oid = 'account_changes'::regclass));
end $$;

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

grant select                         on users             to hubs_server;
grant select, insert                 on terms_acceptances to hubs_server;
grant update (version)               on terms_acceptances to hubs_server; -- on conflict do update
grant select, insert, update, delete on hubs              to hubs_server;
grant select, insert                 on files             to hubs_server;
grant execute on function hub_name_key(text) to hubs_server; -- PUBLIC may have lost it

do $$
declare
    owner oid := (select relowner from pg_class where oid = 'users'::regclass);
    ours oid[] := array(
        select oid from pg_class where relnamespace = quote_ident(current_schema)::regnamespace and relkind = 'r'
        and (has_any_column_privilege('hubs_server', oid, 'select') or relname = 'account_changes'));
    -- Who can use one of these can write users, or read them.
    powerful oid[] := owner || array(select oid from pg_roles where rolname in ('pg_write_all_data',
        'pg_read_all_data', 'pg_execute_server_program', 'pg_write_server_files', 'pg_read_server_files'));
    other record;
    problem text;
begin
    -- Other roles: by default privileges, a service may grant all new tables to roles of its own.
    for other in
        select relation::regclass as name, case grantee when 0 then 'public' else
            quote_ident(pg_get_userbyid(grantee)) end as role, string_agg(distinct operation, ', ') as rights
        from (select oid, grantee, lower(privilege_type) from pg_class, aclexplode(relacl)
                where oid = any (ours) and grantee <> relowner
            union all select attrelid, grantee, lower(privilege_type) || ' of columns'
                from pg_attribute, aclexplode(attacl) where attrelid = any (ours)
        ) granted (relation, grantee, operation)
        where grantee <> 'hubs_server'::regrole group by 1, 2 order by 1, 2
    loop
        execute format('revoke all on %s from %s cascade', other.name, other.role);
        raise notice 'taken from %: % on %', other.role, other.rights, other.name;
    end loop;
    execute format('revoke all on all tables in schema %I from public', current_schema);

    for problem in
        -- What is left of the rights that PUBLIC has by default, because this role could not take it.
        select 'hubs_server can still connect to the database ' || datname from pg_database
            where datname <> current_database() and datallowconn
            and has_database_privilege('public', oid, 'connect')
        union select 'hubs_server can still create tables in the schema ' || current_schema
            where has_schema_privilege('hubs_server', current_schema, 'create')
        union select 'hubs_server can still make large objects, and fill the disk with them'
            where has_function_privilege('hubs_server', 'lo_create(oid)', 'execute')
        union select 'hubs_server can still take advisory locks, and so hold up hubs migrate'
            where has_function_privilege('hubs_server', 'pg_advisory_lock(bigint)', 'execute')

        -- Who can write or read users in other ways.
        union select format('%1$I can act as %2$I, and so write or read users: revoke %2$I from %1$I',
                pg_get_userbyid(member), pg_get_userbyid(roleid))
            from pg_auth_members join pg_roles r on r.oid = member
            where exists (select from unnest(powerful) p where pg_has_role(roleid, p, 'member'))
            and not rolsuper and rolname !~ '^pg_' and member <> owner
            and rolname not in (current_user, 'hubs_server')
        union select format('%1$I can make itself a member of %2$I: alter role %1$I nocreaterole',
                rolname, pg_get_userbyid(owner))
            from pg_roles where rolcreaterole and not rolsuper and oid <> owner and rolname <> current_user
            and current_setting('server_version_num')::int < 160000
        union select format('new tables will be open to %1$s: alter default privileges for role %2$I%3$s '
                'revoke all on tables from %1$s', case grantee when 0 then 'public' else
                quote_ident(pg_get_userbyid(grantee)) end, pg_get_userbyid(owner),
                ' in schema ' || nullif(defaclnamespace, 0)::regnamespace)
            from pg_default_acl, aclexplode(defaclacl) where defaclobjtype = 'r' and defaclrole = owner
            and defaclnamespace in (0, quote_ident(current_schema)::regnamespace) and grantee <> owner

        -- What a server does not start with, or `hubs user` does not work with.
        union select format('row-level security on %1$s can hide rows: alter table %1$s disable row level '
                'security', oid::regclass)
            from pg_class where oid = any (ours) and relrowsecurity
        union select format('%1$s belongs to %2$I: alter table %1$s owner to %3$I', oid::regclass,
                pg_get_userbyid(relowner), pg_get_userbyid(owner))
            from pg_class where oid = any (ours) and relowner <> owner
        order by 1
    loop
        raise warning '%', problem;
    end loop;
end $$;

commit;
