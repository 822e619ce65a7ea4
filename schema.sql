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
                  '^[A-Za-z0-9!#$%&''*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&''*+/=?^_`{|}~-]+)*@[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$'),
    permission    text not null default 'member' check (permission in ('member', 'admin')),
    suspended     boolean not null default false,
    -- "Sign out everywhere": session tokens issued before this time are refused.
    signed_out_at timestamptz,
    created_at    timestamptz not null default now()
);

-- One account for each address, whatever its case; serves the look-up at sign-in.
-- Collation C, here and above: other locales give some letters another lower case.
create unique index if not exists users_email on users (lower(email));

-- Who accepted which version of the terms, and when first.
create table if not exists terms_acceptances (
    user_id     uuid not null references users on delete cascade,
    version     text not null,
    accepted_at timestamptz not null default now(),
    primary key (user_id, version)
);

-- The form in which names are searched: lower case in all scripts, and a final sigma
-- is a sigma. ICU does it, since lower() in collation C knows ASCII only.
create or replace function hub_name_key(name text) returns text
    language sql immutable strict parallel safe
    return translate(lower(name collate "und-x-icu"), 'ς', 'σ') collate "C";

-- A summary of a name in 64 bits: one bit for each letter (the lower half) and one for
-- each pair of letters (the upper half); some letters and pairs share a bit. A name that
-- contains a part has all bits of the part. Looking at bits is five times as fast as
-- looking for text, and rules out most names.
create or replace function hub_name_mask(name text) returns bigint
    language sql immutable strict parallel safe
    return (select coalesce(bit_or(1::bigint << letter % 32
                | case when next > 0 then 1::bigint << 32 + (7 * letter + next) % 32 else 0 end), 0)
            from (select ascii(substr(name, at, 1)) letter, ascii(substr(name, at + 1, 1)) next
                  from generate_series(1, length(name)) at) pairs);

-- The domain resource. Names compare by bytes (collation C), so that the order of
-- a list is the same on every machine.
create table if not exists hubs (
    hub_id      uuid not null default gen_random_uuid(),
    name        text collate "C" not null check (char_length(name) between 1 and 100),
    -- What filters[name] is compared with. Stored, because computing it takes 4 us for each name.
    name_lower  text collate "C" not null generated always as (hub_name_key(name)) stored,
    name_mask   bigint not null generated always as (hub_name_mask(hub_name_key(name))) stored,
    description text not null default '' check (char_length(description) <= 2000),
    status      text not null default 'active' check (status in ('active', 'archived')),
    created_at  timestamptz not null default now(),
    updated_at  timestamptz not null default now(),
    -- name_lower is in this index for the sample of hub_name_sample.
    primary key (hub_id) include (name_lower)
);

-- A table made by an earlier version lacks this column, and its indexes lack it too. To add
-- it rewrites the table and its indexes: more than a minute for a million hubs.
do $$ begin
    -- "add column if not exists" would lock the table each time, also against readers.
    if not exists (select from pg_attribute where attrelid = 'hubs'::regclass and attname = 'name_mask') then
        alter table hubs add column
            name_mask bigint not null generated always as (hub_name_mask(hub_name_key(name))) stored;
    end if;
end $$;
-- Indexes of earlier versions.
drop index if exists hubs_name, hubs_created_at, hubs_updated_at,
    hubs_status_name, hubs_status_created_at, hubs_status_updated_at;

-- GET /hubs, one index for each order, without and with filters[status]; read forwards for
-- asc and backwards for desc. hub_id makes the order total. The included columns let
-- PostgreSQL find a page, and filter by name, in the index alone.
create index if not exists hubs_by_name              on hubs (name, hub_id) include (name_mask, name_lower);
create index if not exists hubs_by_created_at        on hubs (created_at, hub_id) include (name_mask, name_lower);
create index if not exists hubs_by_updated_at        on hubs (updated_at, hub_id) include (name_mask, name_lower);
create index if not exists hubs_by_status_name       on hubs (status, name, hub_id) include (name_mask, name_lower);
create index if not exists hubs_by_status_created_at on hubs (status, created_at, hub_id) include (name_mask, name_lower);
create index if not exists hubs_by_status_updated_at on hubs (status, updated_at, hub_id) include (name_mask, name_lower);

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

-- The rest is the search of GET /hubs with filters[name]: skip it at a first reading.
-- hubsByName in hubs.go puts these functions together, and docs/search.md explains them step
-- by step. PostgreSQL inlines those that return rows and hub_name_contains, so that they
-- cost no call.

-- Whether a name contains a part, both as keys. The bits first: a plain "and" would let
-- PostgreSQL look for the text first.
create or replace function hub_name_contains(name_lower text, name_mask bigint, part text, part_mask bigint)
    returns boolean language sql immutable parallel safe
    return case when ~name_mask & part_mask = 0 then strpos(name_lower, part) > 0 else false end;

-- The first way: read the entries of an index in the list's order. At a million hubs an
-- entry takes 0.08 us.
create or replace function hubs_walked_by_name(part text) returns setof hubs language sql stable as $$
    select * from hubs
    where hub_name_contains(name_lower, name_mask, (select hub_name_key(part)), (select hub_name_mask(hub_name_key(part))))
$$;

-- Every piece of one, two and three characters of a name. The high cost tells the
-- planner to use the index on these pieces (hubs_name_grams) and never to compute them.
create or replace function hub_name_grams(name text) returns text[]
    language sql immutable strict parallel safe cost 100000
    return (select array_agg(substr(name, at, size))
            from generate_series(1, length(name)) at, generate_series(1, 3) size);

-- Serves a search for a text that few names contain, even of one character. Without
-- fastupdate, because every search would read the list of pending entries.
create index if not exists hubs_name_grams on hubs using gin (hub_name_grams(name_lower)) with (fastupdate = off);

-- The pieces by which the second way looks a part up: every third piece of three characters,
-- and the last one. Together they cover the part. Looking up all pieces would be slower: it
-- reads more of the index than it saves of the table (7.5 ms against 3.3 for two words, at a
-- million hubs).
create or replace function hub_name_pieces(part text) returns text[]
    language sql immutable strict parallel safe
    return array(select substr(part, least(at, greatest(1, length(part) - 2)), 3)
                 from generate_series(1, greatest(1, length(part)), 3) at);

-- The second way: gather the hubs by the index of pieces, then sort them. At a million hubs
-- a hub takes up to 4 us. OFFSET 0 is an optimization fence.
create or replace function hubs_gathered_by_name(part text) returns setof hubs language sql stable as $$
    select * from hubs
    where hub_name_grams(name_lower) @> (select hub_name_pieces(hub_name_key(part)))
    and strpos(name_lower, (select hub_name_key(part))) > 0
    offset 0
$$;

-- A sample to choose the way by: of the first thousand hubs by hub_id (it is random, so
-- they are a fair sample), how many have all pieces of the part (candidates, which the
-- second way would gather), and how many of these contain the part (matches). It stops at
-- the 21st candidate.
create or replace function hub_name_sample(part text)
    returns table (candidates bigint, matches bigint) language sql stable as $$
    select count(*), count(*) filter (where strpos(name_lower, (select hub_name_key(part))) > 0) from (
        select name_lower from (select name_lower from hubs order by hub_id limit 1000) thousand
        where name_lower like all (array(
            select '%' || regexp_replace(piece, '([\\%_])', '\\\1', 'g') || '%'
            from unnest(hub_name_pieces(hub_name_key(part))) piece))
        limit 21) seen
$$;

commit;
