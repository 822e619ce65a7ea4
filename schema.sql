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

-- One account an address, whatever its case; serves the look-up at sign-in.
-- Collation C, here and above: other locales give some letters another lower case.
create unique index if not exists users_email on users (lower(email));

-- Who accepted which version of the terms, and when first.
create table if not exists terms_acceptances (
    user_id     uuid not null references users on delete cascade,
    version     text not null,
    accepted_at timestamptz not null default now(),
    primary key (user_id, version)
);

-- Every piece of one, two and three characters of a name. The high cost tells the
-- planner to ask the index made of it (hubs_name_grams), never to compute it.
create or replace function hub_name_grams(name text) returns text[]
    language sql immutable strict parallel safe cost 100000
    return (select array_agg(substr(name, at, size))
            from generate_series(1, length(name)) at, generate_series(1, 3) size);

-- What names are searched by, in the table and in what is asked for: small letters by ICU,
-- since lower() in collation C knows ASCII only; a final sigma is a sigma.
create or replace function hub_name_key(name text) returns text
    language sql immutable strict parallel safe
    return translate(lower(name collate "und-x-icu"), 'ς', 'σ') collate "C";

-- The domain resource. Names compare by bytes (collation C), so that the order of
-- a list is the same on every machine.
create table if not exists hubs (
    hub_id      uuid not null default gen_random_uuid(),
    name        text collate "C" not null check (char_length(name) between 1 and 100),
    -- What filters[name] is compared with; stored, since making it takes 4 us a name.
    name_lower  text collate "C" not null generated always as (hub_name_key(name)) stored,
    description text not null default '' check (char_length(description) <= 2000),
    status      text not null default 'active' check (status in ('active', 'archived')),
    created_at  timestamptz not null default now(),
    updated_at  timestamptz not null default now(),
    -- The first thousand by hub_id are the sample by which GET /hubs with filters[name]
    -- chooses its way.
    primary key (hub_id) include (name_lower)
);

-- GET /hubs, one index an order, without and with filters[status]; read forwards for
-- asc and backwards for desc. hub_id makes the order total; name_lower is there so
-- that a page is found, and a name filtered, in the index alone.
create index if not exists hubs_name              on hubs (name, hub_id) include (name_lower);
create index if not exists hubs_created_at        on hubs (created_at, hub_id) include (name_lower);
create index if not exists hubs_updated_at        on hubs (updated_at, hub_id) include (name_lower);
create index if not exists hubs_status_name       on hubs (status, name, hub_id) include (name_lower);
create index if not exists hubs_status_created_at on hubs (status, created_at, hub_id) include (name_lower);
create index if not exists hubs_status_updated_at on hubs (status, updated_at, hub_id) include (name_lower);

-- GET /hubs with filters[name] that few names contain, from one character on.
-- Without fastupdate: a search would have to read that list of what waits.
create index if not exists hubs_name_grams on hubs using gin (hub_name_grams(name_lower)) with (fastupdate = off);

-- The search of GET /hubs with filters[name]. PostgreSQL writes these three functions
-- into the statement that calls them; they cost no call.
--
-- What many names contain is soon met on a walk in the list's order.
create or replace function hubs_walked_by_name(part text) returns setof hubs language sql stable as $$
    select * from hubs where strpos(name_lower, (select hub_name_key(part))) > 0
$$;

-- What few names contain is gathered by the index of their pieces: by every third piece of
-- what is wanted and by its last, which cover it; to ask for all would read more of the
-- index than it spares of the table (7.5 ms against 3.3 for two words, of a million hubs).
-- With offset 0 the rest of the statement is not for this search to decide by.
create or replace function hubs_gathered_by_name(part text) returns setof hubs language sql stable as $$
    select * from hubs
    where strpos(name_lower, (select hub_name_key(part))) > 0
    and hub_name_grams(name_lower) @> array(
        select substr(wanted, least(at, greatest(1, length(wanted) - 2)), 3)
        from hub_name_key(part) wanted, generate_series(1, greatest(1, length(wanted)), 3) at)
    offset 0
$$;

-- Whether a walk to the row that is needed is the shorter way, by a sample of a thousand
-- hubs (hub_id is random, so any thousand by it are a fair one). A walk passes about
-- needed * 1000 / count names; the other way gathers and sorts, of a million hubs, 1000 *
-- count matches, one taken for 16 names passed. So the walk is the shorter where 16 * count^2
-- is needed or more; at 26 in the sample that is more than the deepest page needs.
create or replace function hub_name_is_frequent(part text, needed bigint)
    returns table (yes boolean) language sql stable as $$
    select count(*) > 1 and 16 * count(*) * count(*) >= needed from (
        select from (select name_lower from hubs order by hub_id limit 1000) thousand
        where strpos(name_lower, (select hub_name_key(part))) > 0 limit 26) seen
$$;

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
