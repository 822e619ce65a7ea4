-- The whole schema. `hubs migrate` runs all of it, any number of times. Two runs at
-- once are safe: "create … if not exists" races with itself, so the transaction takes
-- an advisory lock first, and the second run waits.
begin;
select pg_advisory_xact_lock(7239104561);

-- The accounts that may sign in. Every request with a session reads its row, so a
-- change takes effect with the user's next request.
create table if not exists users (
    user_id       uuid primary key default gen_random_uuid(),
    -- One ASCII address, by the same pattern as emailPattern in auth.go. It is checked here
    -- too, because mail goes to this text and operators may write it with psql.
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

-- One account for each address, ignoring case. The look-up at sign-in uses this index.
-- Collation C (of email, above) makes lower() the same in every locale.
create unique index if not exists users_email on users (lower(email));

-- One row for each user and each version of the terms that the user has accepted, with the
-- time of the first acceptance.
create table if not exists terms_acceptances (
    user_id     uuid not null references users on delete cascade,
    version     text not null,
    accepted_at timestamptz not null default now() check (isfinite(accepted_at)),
    primary key (user_id, version)
);

-- hub_name_key returns the form of a name that filters[name] compares: lower case in all
-- scripts. At the end of a word, lower() makes a Greek sigma a ς, which becomes a σ, so that
-- a part of a name matches anywhere in it. It uses ICU, because lower() in collation C
-- converts ASCII only.
create or replace function hub_name_key(name text) returns text
    language sql immutable strict parallel safe
    return translate(lower(name collate "und-x-icu"), 'ς', 'σ') collate "C";

-- The domain resource. Names are compared byte by byte (collation C), so that the order
-- of a list is the same on every machine.
create table if not exists hubs (
    hub_id      uuid primary key default gen_random_uuid(),
    name        text collate "C" not null check (char_length(name) between 1 and 100),
    -- Stored, because computing it takes 4 µs a name, and a search reads many names.
    name_lower  text collate "C" not null generated always as (hub_name_key(name)) stored,
    description text not null default '' check (char_length(description) <= 2000),
    status      text not null default 'active' check (status in ('active', 'archived')),
    created_at  timestamptz not null default now() check (isfinite(created_at)),
    updated_at  timestamptz not null default now() check (isfinite(updated_at))
);

-- The indexes of GET /hubs. Their rule:
--
--   * Each order of the list needs an index. Otherwise each page would sort the whole table.
--     PostgreSQL reads the index forwards for asc and backwards for desc. hub_id comes last, so
--     that hubs with equal values have a fixed order.
--   * An equality filter (status) needs another index for each order, with the column of the
--     filter first. Otherwise a page with few matches would read the whole index.
--   * Any other filter (name) needs no index of its own. But each index includes its column, so
--     that a search finds its ids in the index alone. Reading each row would take ten times as
--     long.
create index if not exists hubs_by_name       on hubs (name, hub_id) include (name_lower);
create index if not exists hubs_by_created_at on hubs (created_at, hub_id) include (name_lower);
create index if not exists hubs_by_updated_at on hubs (updated_at, hub_id) include (name_lower);
create index if not exists hubs_by_status_name
    on hubs (status, name, hub_id) include (name_lower);
create index if not exists hubs_by_status_created_at
    on hubs (status, created_at, hub_id) include (name_lower);
create index if not exists hubs_by_status_updated_at
    on hubs (status, updated_at, hub_id) include (name_lower);

-- The uploaded files. Their bytes are in FILES_DIR, under the name file_id. The row is
-- written last, when the whole file is on disk. Without a row, a file can't be read.
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
