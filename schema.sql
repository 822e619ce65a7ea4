-- The whole schema. `migrate` runs it, and may run it again and again; two
-- servers may do so at once: create … if not exists races with itself, so the
-- transaction begins with a lock that the second one waits for.
begin;
select pg_advisory_xact_lock(7239104561);

-- Substring search in names without reading the table (index hubs_name_trgm).
-- Needs ownership of the database, not a superuser.
create extension if not exists pg_trgm;

-- Who may sign in. A row is read afresh by every request, so that a change here
-- holds from the user's next request on.
create table if not exists users (
    user_id       uuid primary key default gen_random_uuid(),
    -- One ASCII address: decisions of parseEmail in auth.go, kept here too, since
    -- mail goes to this text and operators write it at the psql prompt.
    email         text not null check (length(email) <= 254 and email ~
                  '^[A-Za-z0-9!#$%&''*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&''*+/=?^_`{|}~-]+)*@[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*$'),
    permission    text not null default 'member' check (permission in ('member', 'admin')),
    suspended     boolean not null default false,
    -- "Sign out everywhere": session tokens issued before this time are refused.
    signed_out_at timestamptz,
    created_at    timestamptz not null default now()
);

-- One account an address, whatever its case; serves the look-up at sign-in.
-- Collation C: other locales give some letters another lower case.
create unique index if not exists users_email on users (lower(email collate "C"));

-- Who accepted which version of the terms, and when first.
create table if not exists terms_acceptances (
    user_id     uuid not null references users on delete cascade,
    version     text not null,
    accepted_at timestamptz not null default now(),
    primary key (user_id, version)
);

-- The domain resource. Names compare by bytes (collation C), so that the order of
-- a list is the same on every machine.
create table if not exists hubs (
    hub_id      uuid primary key default gen_random_uuid(),
    name        text collate "C" not null check (char_length(name) between 1 and 100),
    description text not null default '' check (char_length(description) <= 2000),
    status      text not null default 'active' check (status in ('active', 'archived')),
    created_at  timestamptz not null default now(),
    updated_at  timestamptz not null default now()
);

-- GET /hubs, one index an order; hub_id makes the order total. Each is read
-- forwards for asc and backwards for desc.
create index if not exists hubs_name on hubs (name, hub_id);
create index if not exists hubs_created_at on hubs (created_at, hub_id);
create index if not exists hubs_updated_at on hubs (updated_at, hub_id);

-- What was uploaded; the bytes are in FILES_DIR under file_id. A row is written
-- last, once the file is whole and on disk: no row, no file.
create table if not exists files (
    file_id      uuid primary key default gen_random_uuid(),
    user_id      uuid references users on delete set null,
    name         text not null check (octet_length(name) between 1 and 255),
    content_type text not null,
    size         bigint not null check (size >= 0),
    created_at   timestamptz not null default now()
);

commit;
