-- The whole schema. `migrate` runs it, and may run it again and again; two
-- servers may do so at once: create … if not exists races with itself, so the
-- transaction begins with a lock that the second one waits for.
begin;
select pg_advisory_xact_lock(7239104561);

-- Who may sign in. A row is read afresh by every request, so that a change here
-- holds from the user's next request on.
create table if not exists users (
    user_id       uuid primary key default gen_random_uuid(),
    -- One ASCII address, the form that emailForm in auth.go takes: mail goes to this
    -- text, and operators write it at the psql prompt.
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

-- One account for each address, whatever its case; serves the look-up at sign-in.
-- Collation C, here and above: other locales give some letters another lower case.
create unique index if not exists users_email on users (lower(email));

-- Who accepted which version of the terms, and when first.
create table if not exists terms_acceptances (
    user_id     uuid not null references users on delete cascade,
    version     text not null,
    accepted_at timestamptz not null default now() check (isfinite(accepted_at)),
    primary key (user_id, version)
);

-- The form in which names are compared by filters[name]: lower case in all scripts, and a
-- final sigma is a sigma. ICU does it, since lower() in collation C knows ASCII only.
create or replace function hub_name_key(name text) returns text
    language sql immutable strict parallel safe
    return translate(lower(name collate "und-x-icu"), 'ς', 'σ') collate "C";

-- The domain resource. Names compare by bytes (collation C), so that the order of
-- a list is the same on every machine.
create table if not exists hubs (
    hub_id      uuid primary key default gen_random_uuid(),
    name        text collate "C" not null check (char_length(name) between 1 and 100),
    -- Stored, because to compute it takes 4 us a name, and a search looks at many names.
    name_lower  text collate "C" not null generated always as (hub_name_key(name)) stored,
    description text not null default '' check (char_length(description) <= 2000),
    status      text not null default 'active' check (status in ('active', 'archived')),
    created_at  timestamptz not null default now() check (isfinite(created_at)),
    updated_at  timestamptz not null default now() check (isfinite(updated_at))
);

-- The indexes of GET /hubs. Their rule:
--
--   * Each order of the list needs an index, else each page would sort the whole table. It is
--     read forwards for asc and backwards for desc. hub_id makes the order total.
--   * A filter that compares for equality (status) needs an index for each order too, with the
--     filter's column in front, else a page of few matches would read the whole index.
--   * Any other filter (name) needs none of its own. But each index includes its column, so
--     that a list finds its ids in the index alone: to look at each row takes ten times as long.
create index if not exists hubs_by_name       on hubs (name, hub_id) include (name_lower);
create index if not exists hubs_by_created_at on hubs (created_at, hub_id) include (name_lower);
create index if not exists hubs_by_updated_at on hubs (updated_at, hub_id) include (name_lower);
create index if not exists hubs_by_status_name
    on hubs (status, name, hub_id) include (name_lower);
create index if not exists hubs_by_status_created_at
    on hubs (status, created_at, hub_id) include (name_lower);
create index if not exists hubs_by_status_updated_at
    on hubs (status, updated_at, hub_id) include (name_lower);

-- What was uploaded; the bytes are in FILES_DIR under file_id. A row is written
-- last, once the file is whole and on disk: no row, no file.
create table if not exists files (
    file_id      uuid primary key default gen_random_uuid(),
    user_id      uuid references users on delete set null,
    name         text not null check (octet_length(name) between 1 and 255),
    content_type text not null,
    size         bigint not null check (size >= 0),
    created_at   timestamptz not null default now() check (isfinite(created_at))
);

-- Serves the deletion of a user, which sets user_id to null.
create index if not exists files_by_user on files (user_id);

commit;
