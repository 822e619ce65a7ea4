-- The whole schema. `hubs migrate` runs all of it, any number of times. "create ... if not
-- exists" races with itself, so a second run waits for the lock of the first.
begin;
select pg_advisory_xact_lock(7239104561);

-- The accounts that may sign in. Every request that needs a session reads its row.
create table if not exists users (
    user_id       uuid primary key default gen_random_uuid(),
    -- The same pattern as emailPattern in auth.go: mail goes to this text, which operators may
    -- write with psql.
    email         text collate "C" not null check (length(email) <= 254 and email ~
                  '^[A-Za-z0-9!#$%&''*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&''*+/=?^_`{|}~-]+)*'
                  '@[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?'
                  '(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$'),
    permission    text not null default 'member' check (permission in ('member', 'admin')),
    suspended     boolean not null default false,
    -- "Sign out everywhere": session tokens issued before this time are refused.
    signed_out_at timestamptz check (isfinite(signed_out_at)),
    created_at    timestamptz not null default now() check (isfinite(created_at))
);

-- One account for each address, ignoring case. Collation C makes lower() the same everywhere.
create unique index if not exists users_email on users (lower(email));

-- What was changed in users, when and by whom: the trigger sees psql, too, but no truncate. No role
-- of deploy/roles.sql may change these rows. That stops mistakes, not an owner who means to.
create table if not exists account_changes (
    changed_at    timestamptz not null default clock_timestamp(),
    database_role text not null default session_user,
    program       text not null default current_setting('application_name'),
    user_id       uuid not null,
    before        jsonb, -- the columns that commands change; null for a new user
    after         jsonb  -- null for a deleted one
);
create index if not exists account_changes_by_user on account_changes (user_id);
revoke update, delete, truncate, trigger on account_changes from current_user;

-- The function runs with the owner's rights. So nobody else may attach it to a table, and it finds
-- no table but those of this schema.
create or replace function record_account_change() returns trigger
    language plpgsql security definer set timezone = 'UTC' as $$
declare
    was jsonb := to_jsonb(old) - '{user_id,created_at}'::text[];
    is_ jsonb := to_jsonb(new) - '{user_id,created_at}'::text[];
begin
    if was is distinct from is_ then
        insert into account_changes (user_id, before, after)
            values (coalesce(old.user_id, new.user_id), was, is_);
    end if;
    return null;
end $$;
revoke execute on function record_account_change() from public;
do $$ begin
    execute format('alter function record_account_change() set search_path = %I, pg_temp',
        current_schema());
end $$;
create or replace trigger account_changes after insert or update or delete on users
    for each row execute function record_account_change();

create table if not exists terms_acceptances (
    user_id     uuid not null references users on delete cascade,
    version     text not null,
    accepted_at timestamptz not null default now() check (isfinite(accepted_at)),
    primary key (user_id, version)
);

-- hub_name_key returns the form of a name that filters[name] compares: without case in all scripts
-- (by ICU: collation C knows ASCII only) and composed (NFC). Lower, upper, lower comes to the full
-- case folding, so STRASSE finds a sharp s; a dotless i counts as an i, too. A final Greek sigma (U+03C2) counts as a plain one, so that
-- a part of a name matches anywhere in it, and the dot that a Turkish I leaves (U+0307) goes.
create or replace function hub_name_key(name text) returns text
    language sql immutable strict parallel safe
    return normalize(replace(replace(lower(upper(lower(name collate "und-x-icu"))),
        U&'\03C2', U&'\03C3'), U&'i\0307', 'i'), NFC) collate "C";

-- The domain resource. Collation C makes the order of a list the same on every machine.
create table if not exists hubs (
    hub_id      uuid primary key default gen_random_uuid(),
    name        text collate "C" not null check (char_length(name) between 1 and 100),
    -- Stored: a search reads many names, at 4 us each.
    name_lower  text collate "C" not null generated always as (hub_name_key(name)) stored,
    description text not null default '' check (char_length(description) <= 2000),
    status      text not null default 'active' check (status in ('active', 'archived')),
    created_at  timestamptz not null default now() check (isfinite(created_at)),
    updated_at  timestamptz not null default now() check (isfinite(updated_at))
);

-- Rows keep the key of an older hub_name_key. Compute it again, here and after the commit for rows
-- that were inserted meanwhile.
update hubs set name = name where name_lower <> hub_name_key(name);

-- The indexes of GET /hubs. Their rule:
--
--   * Each order of the list needs an index, or each page would sort the whole table. hub_id comes
--     last, so that hubs with equal values have a fixed order.
--   * An equality filter (status) needs another one for each order, with its column first, or a
--     page with few matches would read the whole index.
--   * Each index includes the column of any other filter (name), so that a search finds its ids in
--     the index alone. Reading each row would take ten times as long.
create index if not exists hubs_by_name       on hubs (name, hub_id) include (name_lower);
create index if not exists hubs_by_created_at on hubs (created_at, hub_id) include (name_lower);
create index if not exists hubs_by_updated_at on hubs (updated_at, hub_id) include (name_lower);
create index if not exists hubs_by_status_name
    on hubs (status, name, hub_id) include (name_lower);
create index if not exists hubs_by_status_created_at
    on hubs (status, created_at, hub_id) include (name_lower);
create index if not exists hubs_by_status_updated_at
    on hubs (status, updated_at, hub_id) include (name_lower);

-- The uploaded files. Their bytes are in FILES_DIR, under file_id. The row is written last.
create table if not exists files (
    file_id      uuid primary key default gen_random_uuid(),
    user_id      uuid references users on delete set null,
    name         text not null check (octet_length(name) between 1 and 255),
    content_type text not null,
    size         bigint not null check (size >= 0),
    created_at   timestamptz not null default now() check (isfinite(created_at))
);

-- Used when a user is deleted, which sets user_id to null.
create index if not exists files_by_user on files (user_id);

commit;

update hubs set name = name where name_lower <> hub_name_key(name);
