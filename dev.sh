#!/usr/bin/env bash
# The developer's commands: a running server, the tests, a tour, on a fresh Debian or
# macOS machine that has Go. Everything it keeps is in .dev/, which git ignores.
# Written for bash 3.2, which is what macOS has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
project=$PWD
PATH=$PATH:/usr/local/go/bin

usage() {
	cat >&2 <<-'END'
		usage: ./dev.sh run              a local server with demo data, until Ctrl-C; ADDR, DATABASE_URL if set
		       ./dev.sh user ...         the server's own user commands, on the database of the last run
		       ./dev.sh test [FLAG...]   all tests with the race detector; coverage, at least 90 %, without flags
		       ./dev.sh tour [URL]       the whole flow, shown with curl against a server of its own, or
		                                 against the one at URL: it asks for the code; EMAIL if set
		       ./dev.sh bench [WHAT]     speed beside net/http and PostgreSQL alone, into bench.txt, within 3 minutes;
		                                 COMMIT: that commit against the working tree, request by request;
		                                 abuse: the CPU of the most expensive requests;
		                                 growth: what lists cost at a million hubs against a thousand
		       ./dev.sh soak [MINUTES]   clients of every kind while PostgreSQL, mail server, disk and servers fail
		                                 in turn, 10 minutes by default; prints a table of what held
		       ./dev.sh prove [-v] [ROW|REMOVAL...]
		                                 takes each protection out and shows that the tests notice (testdata/removals),
		                                 all of them without arguments; -v shows code, removal and the tests' words;
		                                 -ci: those of changed files and a tenth of the others, within 12 minutes;
		                                 -report: the tests that no removal names
		       ./dev.sh release [OS/ARCH...]
		                                 binaries of the commit HEAD, their SBOMs and checksums, into .dev/release;
		                                 linux and darwin on amd64 and arm64 without arguments
		       ./dev.sh postgres [DIR]   a private PostgreSQL until standard input ends; prints its URL;
		                                 HUBS_PG_BIN names the folder of another version's programs
	END
	exit 2
}
say() { printf '%s\n' "$*" >&2; }
die() { say "dev.sh: $*"; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }
is_root() { [ "$(id -u)" = 0 ]; }
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# What was started is stopped on every way out: the server first, then what it needs.
# kill -9 of this script itself is the one way that leaves them running; the next
# start in the same folder clears that up.
tmp='' pg_dir='' server='' reader='' watcher=''
cleanup() {
	local status=$?
	trap '' INT TERM HUP
	set +e
	[ -z "$watcher" ] || kill "$watcher" 2>/dev/null
	if [ -n "$server" ] && kill -TERM "$server" 2>/dev/null; then wait "$server"; fi
	[ -z "$reader" ] || wait "$reader"
	[ -z "$pg_dir" ] || stop_postgres
	[ -z "$tmp" ] || rm -rf "$tmp"
	exit "$status"
}
trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

make_tmp() {
	tmp=$(mktemp -d "${TMPDIR:-/tmp}/hubs.XXXXXX")
	tmp=$(cd "$tmp" && pwd -P)
	if is_root; then chmod 711 "$tmp"; fi # PostgreSQL's own user has to pass
}

# --- programs: what is missing is installed ---

as_root() {
	if is_root; then "$@"; elif has sudo; then sudo "$@"; else die "root or sudo is needed for: $*"; fi
}

apt_install() {
	has apt-get || die "please install: $* (this script can do so with apt-get or Homebrew only)"
	say "Installing with apt-get: $*"
	as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update </dev/null >/dev/null
	as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" </dev/null >/dev/null
}

need_go() { has go || die "Go 1.26 or newer is needed: https://go.dev/dl/"; }

need_gcc() {
	has "$(go env CC)" && return
	[ "$(uname)" != Darwin ] || die "go test -race needs a C compiler; install Apple's with: xcode-select --install"
	apt_install gcc libc6-dev
}

# The one place that knows where PostgreSQL's programs may be. Sets pg_bin, their folder,
# and psql. HUBS_PG_BIN asks for the servers of one folder (initdb, pg_ctl and postgres)
# and no others: so the tests run against each version of PostgreSQL.
find_postgres() {
	local program
	if [ -n "${HUBS_PG_BIN:-}" ]; then
		pg_bin=$(cd "$HUBS_PG_BIN" && pwd -P) || die "HUBS_PG_BIN is no folder: $HUBS_PG_BIN"
		for program in initdb pg_ctl postgres; do
			as_pg test -x "$pg_bin/$program" || die "HUBS_PG_BIN: PostgreSQL's user can't run $pg_bin/$program"
		done
		psql=$pg_bin/psql
		[ -x "$psql" ] || psql=psql
		return 0
	fi
	# Word splitting is meant: one folder a word.
	# shellcheck disable=SC2046
	for pg_bin in "$(dirname "$(command -v initdb)")" \
		$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -t/ -k5,5rn) \
		$(printf '%s\n' {/opt/homebrew,/usr/local,/home/linuxbrew/.linuxbrew}/opt/postgresql*/bin | sort -t@ -k2,2rn) \
		"$(pg_config --bindir 2>/dev/null)"
	do
		if [ -x "$pg_bin/initdb" ] && [ -x "$pg_bin/pg_ctl" ] && [ -x "$pg_bin/psql" ]; then
			psql=$pg_bin/psql
			return 0
		fi
	done
	return 1
}

need_postgres() {
	local conf=/etc/postgresql-common/createcluster.conf failed=''
	find_postgres && return
	if has brew; then
		say "Installing with Homebrew: postgresql@17"
		brew install postgresql@17 </dev/null >&2
	else
		# Debian's package would also make and start a cluster on port 5432, which
		# nobody asked for: it is told not to, for this installation only.
		apt_install postgresql-common
		as_root sed -i.before-hubs 's/^#*create_main_cluster.*/create_main_cluster = false/' "$conf"
		apt_install postgresql || failed=yes
		as_root mv "$conf.before-hubs" "$conf"
		[ -z "$failed" ] || die "apt-get could not install PostgreSQL"
	fi
	find_postgres || die "PostgreSQL was installed, but initdb, pg_ctl and psql can't be found"
}

# --- a private PostgreSQL ---
#
# DIR/data             the cluster (PGDATA): postmaster.pid has the server's process id
#                      in its first line; server.log
# DIR/password         of its roles; mode 600
# DIR/port             the port of the last start, used again when it is free
# DIR/owner            process id of the dev.sh that keeps it
#
# It listens on 127.0.0.1 only and asks for the password: any account of the machine
# can reach a port. No Unix socket: their paths may have about 100 bytes only.

# Runs one of PostgreSQL's programs. They refuse to run as root.
as_pg() {
	local user=postgres
	id -u postgres >/dev/null 2>&1 || user=nobody
	if ! is_root; then
		"$@"
	elif has runuser; then
		(cd / && runuser -u "$user" -- "$@")
	else
		(cd / && sudo -u "$user" "$@")
	fi
}

# start_postgres DIR [SETTING=VALUE...] makes the cluster where there is none and
# starts it. Sets pg_dir, port and password.
start_postgres() {
	local dir setting options='-c listen_addresses=127.0.0.1 -c unix_socket_directories=' locale=C owner attempt
	need_postgres
	mkdir -p "$1"
	dir=$(cd "$1" && pwd -P)
	shift
	for setting in "$@"; do options="$options -c $setting"; done
	if is_root; then chmod 711 "$dir"; fi
	as_pg test -x "$dir" || die "PostgreSQL runs as an ordinary user, who can't enter $dir"

	[ -s "$dir/password" ] || (umask 077 && random >"$dir/password")
	password=$(cat "$dir/password")
	if [ ! -d "$dir/data" ]; then
		# Made under another name first: a start that is interrupted leaves no half cluster.
		rm -rf "$dir/new"
		mkdir -m 700 "$dir/new"
		if is_root; then chown "$(as_pg id -u)" "$dir/new" "$dir/password"; fi
		case $(locale -a 2>/dev/null) in *C.UTF-8* | *C.utf8*) locale=C.UTF-8 ;; esac
		as_pg "$pg_bin/initdb" -D "$dir/new" -U postgres -A scram-sha-256 --pwfile="$dir/password" \
			-E UTF8 --locale="$locale" >"$dir/initdb.log" 2>&1 || { cat "$dir/initdb.log" >&2; die "initdb failed"; }
		mv "$dir/new" "$dir/data"
	elif as_pg "$pg_bin/pg_ctl" -D "$dir/data" status >/dev/null; then
		owner=$(cat "$dir/owner" 2>/dev/null || echo 0)
		if [ "$owner" != 0 ] && kill -0 "$owner" 2>/dev/null; then die "$dir is in use by another dev.sh, process $owner"; fi
		say "Stopping a PostgreSQL that a killed dev.sh left in $dir"
		pg_dir=$dir stop_postgres
	fi

	echo $$ >"$dir/owner"
	pg_dir=$dir
	port=$(cat "$dir/port" 2>/dev/null || echo $((20000 + RANDOM % 12000)))
	for attempt in 1 2 3 4 5 6 7 8 9 10; do
		rm -f "$dir/data/server.log"
		if as_pg "$pg_bin/pg_ctl" -D "$dir/data" -l "$dir/data/server.log" -o "$options -p $port" -t 60 -w start \
			>/dev/null 2>&1
		then
			echo "$port" >"$dir/port"
			return
		fi
		grep -q 'could not bind' "$dir/data/server.log" || break
		port=$((20000 + RANDOM % 12000)) # below the ports that systems hand to outgoing connections
	done
	cat "$dir/data/server.log" >&2
	die "PostgreSQL did not start ($attempt attempts)"
}

stop_postgres() {
	local pid
	pid=$(head -n 1 "$pg_dir/data/postmaster.pid" 2>/dev/null) || return 0
	# A test may have left them frozen: then they would never see that they shall stop.
	# shellcheck disable=SC2046
	kill -CONT "$pid" $(pgrep -P "$pid" 2>/dev/null) 2>/dev/null || true
	as_pg "$pg_bin/pg_ctl" -D "$pg_dir/data" -m fast -t 20 stop >/dev/null 2>&1 ||
		as_pg "$pg_bin/pg_ctl" -D "$pg_dir/data" -m immediate -t 20 stop >&2
}

# Passwords go by the environment: other accounts can read a command line.
sql() { PGPASSWORD=${password:-${PGPASSWORD:-}} "$psql" -qXAt -v ON_ERROR_STOP=1 "$@"; }

cmd_postgres() {
	find_postgres || { say "PostgreSQL is not installed"; exit 69; } # the tests install nothing
	if [ $# = 0 ]; then make_tmp; set -- "$tmp/postgres"; fi
	# Tests may lose their data when the machine's power goes, not when a process dies.
	start_postgres "$1" fsync=off max_connections=200
	echo "postgres://postgres:$password@127.0.0.1:$port/postgres?sslmode=disable"
	# Not in the foreground: bash would put off the signals until cat ends.
	exec 3<&0
	cat <&3 >/dev/null &
	watcher=$!
	wait "$watcher" || true
}

# --- a database with demo data ---

# An ordinary role that owns its database, as a deployment has it; sets DATABASE_URL.
make_database() {
	sql -d "postgres://postgres@127.0.0.1:$port/postgres" >&2 <<-END
		select 'create role hubs login' where not exists (select from pg_roles where rolname = 'hubs') \gexec
		select 'create database hubs owner hubs' where not exists (select from pg_database where datname = 'hubs') \gexec
		alter role hubs password '$password';
	END
	export DATABASE_URL="postgres://hubs:$password@127.0.0.1:$port/hubs?sslmode=disable"
}

# Only into empty tables: what a developer has made of the data stays as it is.
seed() {
	sql "$@" >&2 <<-'END'
		begin;
		insert into users (email, permission)
		select * from (values ('member@hubs.example', 'member'), ('admin@hubs.example', 'admin')) as demo
		where not exists (select from users);

		insert into hubs (name, description, status, created_at, updated_at)
		select quarter || ' ' || place,
		       purpose || ' in the ' || lower(quarter) || ' quarter, number ' || n || '.',
		       case when n % 7 = 0 then 'archived' else 'active' end,
		       now() - n * interval '29 hours', now() - n * interval '5 hours'
		from (select *, row_number() over (order by place, quarter) as n
		      from unnest(array['North', 'South', 'East', 'West', 'Old']) as quarter,
		           (values ('Harbour', 'Ships and ferries'), ('Station', 'Trains and trams'),
		                   ('Market', 'Fruit, bread and fish'), ('Library', 'Books, maps and quiet rooms'),
		                   ('Workshop', 'Tools to borrow, benches to rent'), ('Depot', 'Parcels, stored and sorted'),
		                   ('Garden', 'Beds, sheds and a well'), ('Mill', 'Flour on weekdays'),
		                   ('Observatory', 'Two telescopes, open on clear nights'), ('Café', 'Coffee, 8 to 18 o''clock')
		           ) as places (place, purpose)) as demo
		where not exists (select from hubs);
		commit;
	END
}

# --- run ---

# Passes the server's output on, and says what to try once it listens.
show_output() {
	local line url
	trap '' INT TERM HUP # to the end: the server's last lines are to be seen too
	while IFS= read -r line; do
		printf '%s\n' "$line"
		case $line in *'"msg":"listening"'*) ;; *) continue ;; esac
		# By name: 127.0.0.1 and localhost are two sites, and front ends run on localhost.
		url=http://$(printf '%s' "$line" | sed -e 's/.*"addr":"\([^"]*\)".*/\1/' -e 's/^127\.0\.0\.1:/localhost:/')
		cat >&2 <<-END

			Open $url/ and sign in as member@hubs.example or admin@hubs.example.
			There is no mail server: the sign-in codes appear here, in this terminal.
			In another terminal, ./dev.sh tour $url shows the same with curl.
			Ctrl-C stops the server.

		END
	done
}

# A run that was killed by kill -9 leaves its server running. The next run stops it.
# .dev/server has the process ids of the server and of its dev.sh.
stop_orphan() {
	local orphan owner args i
	[ -s .dev/server ] || return 0
	read -r orphan owner <.dev/server
	args=$(ps -p "$orphan" -o args= 2>/dev/null) || return 0
	case $args in '.dev/hubs serve'*) ;; *) return 0 ;; esac # the id is another program's by now
	if kill -0 "$owner" 2>/dev/null; then die "a server runs already, started by ./dev.sh run with process id $owner"; fi
	say "Stopping the server that a killed ./dev.sh run left, process $orphan"
	kill -TERM "$orphan" 2>/dev/null || true
	for ((i = 0; i < 200; i++)); do
		kill -0 "$orphan" 2>/dev/null || return 0
		sleep 0.1
	done
	kill -KILL "$orphan"
}

# Ends the run early, with a sentence, if another program has the port.
need_port() {
	local host=${1%:*} taken_port=${1##*:}
	[ -n "$host" ] || host=127.0.0.1
	(exec 3<>"/dev/tcp/$host/$taken_port") 2>/dev/null || return 0
	die "another program uses $1. Choose another port: ADDR=127.0.0.1:$((taken_port + 1)) ./dev.sh run"
}

cmd_run() {
	local status=0 dir=$project/.dev/postgres addr=${ADDR:-127.0.0.1:8080}
	need_go
	mkdir -p .dev
	stop_orphan
	need_port "$addr"
	make_tmp
	[ -x .dev/hubs ] || say "Building the server: one or two minutes the first time, seconds after that"
	go build -buildvcs=false -o .dev/hubs .
	[ -s .dev/session-secret ] || (umask 077 && random >.dev/session-secret)

	if [ -n "${DATABASE_URL:-}" ]; then
		say "Using the database of DATABASE_URL"
		.dev/hubs migrate
		if find_postgres; then seed -d "$DATABASE_URL"; else say "No psql here: demo data not added"; fi
	else
		# Root's home, for one, is closed to the user that PostgreSQL runs as.
		if is_root && ! { chmod 711 .dev && as_pg test -x "$project/.dev"; }; then
			dir=/var/lib/hubs-dev-$(printf '%s' "$project" | cksum | cut -d' ' -f1)
		fi
		start_postgres "$dir"
		say "PostgreSQL ($pg_bin) runs on 127.0.0.1:$port, its cluster is in $pg_dir"
		make_database
		.dev/hubs migrate
		seed -d "postgres://hubs@127.0.0.1:$port/hubs"
	fi

	(umask 077 && printf '%s\n' "$DATABASE_URL" >.dev/database-url)

	mkfifo "$tmp/output"
	show_output <"$tmp/output" &
	reader=$!
	# A process group of its own (set -m): Ctrl-C reaches this script, which sends one TERM.
	set -m
	APP_ENV=local ADDR=$addr FILES_DIR=${FILES_DIR:-.dev/files} SESSION_SECRET=${SESSION_SECRET:-$(cat .dev/session-secret)} \
		.dev/hubs serve </dev/null >"$tmp/output" &
	server=$!
	echo "$server $$" >.dev/server
	set +m
	wait "$server" || status=$?
	server=''
	return "$status"
}

cmd_user() {
	[ -s .dev/database-url ] || die "start ./dev.sh run first"
	DATABASE_URL=$(cat .dev/database-url) .dev/hubs user "$@"
}

# --- test ---

# What the tests with the tag system drive besides: three browsers, npm, two proxies, and
# strace, which makes system calls fail.
need_system() {
	local missing='' program
	for program in chromium chromedriver:chromium-driver firefox-esr WebKitWebDriver:webkit2gtk-driver Xvfb:xvfb npm \
		haproxy nginx strace systemd-analyze:systemd
	do
		PATH=$PATH:/usr/sbin has "${program%:*}" || missing="$missing ${program#*:}"
	done
	[ -n "$missing" ] || return 0
	has apt-get || return 1
	# Word splitting is meant: one package a word.
	# shellcheck disable=SC2086
	apt_install $missing
}

cmd_test() {
	local total tags=system
	need_go
	need_gcc
	need_postgres # the tests start it themselves, with ./dev.sh postgres
	if ! need_system; then
		tags=''
		say "!!! NOT TESTED: browsers, proxies and failing system calls, whose tests need Debian's packages"
	fi
	mkdir -p .dev
	go test -race -tags="$tags" -timeout=40m -covermode=atomic -coverprofile=.dev/coverage.out "$@" ./...
	[ $# = 0 ] || return 0 # a part of the tests covers a part of the code
	total=$(go tool cover -func=.dev/coverage.out | sed -n 's/^total:.*[^0-9.]\([0-9.]*\)%$/\1/p')
	echo "coverage: $total % of statements; the least is 90 %"
	[ "${total%.*}" -ge 90 ] || die "coverage is below 90 %"
}

# --- tour ---

# Folds long lines to the width of the terminal, after a space or a comma.
fold_lines() {
	awk -v width="${COLUMNS:-$(tput cols 2>/dev/null || echo 80)}" '{
		while (length($0) > width) {
			cut = match(substr($0, 1, width), /[ ,][^ ,]*$/)
			if (!cut) cut = width
			print substr($0, 1, cut)
			$0 = substr($0, cut + 1)
		}
		print
	}'
}

# step TITLE STATUS CURL-ARGUMENT... shows one request and its answer, and ends the
# tour when the status is another one. Leaves the body in the file body.
step() {
	local title=$1 want=$2 status word
	shift 2
	{
		printf '\n--- %s\n$ curl -b cookies -c cookies' "$title"
		for word in "$@"; do
			case $word in *[!A-Za-z0-9_./:=-]*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
		done
		echo
	} | fold_lines
	: >body
	status=$(curl -sS --max-time 10 -b cookies -c cookies -D headers -o body -w '%{http_code}' "$@") || die "curl failed"
	{
		tr -d '\r' <headers |
			grep -iE '^(HTTP/|Content-Type|Content-Disposition|Location|Retry-After|Set-Cookie|X-Request-Id)'
		if [ -s body ]; then echo; cat body; echo; fi
	} | fold_lines
	[ "$status" = "$want" ] || die "the tour stops here: the answer is $status, it should be $want"
}
member_of() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" body; } # of the last answer's JSON
expect() { grep -q "$1" body || die "the tour stops here: no $1 in the answer"; }

# wait_for PATTERN prints what sed finds by it in the server's output, within 10 seconds.
wait_for() {
	local found='' i
	for ((i = 0; i < 100; i++)); do
		found=$(sed -n "$1" output)
		if [ -n "$found" ]; then printf '%s\n' "$found"; return; fi
		sleep 0.1
	done
	cat output >&2
	die "the server's output lacks: $1"
}

# A server of the tour's own, on a free port, with a database of its own. Sets url.
start_tour_server() {
	need_go
	go build -buildvcs=false -o "$tmp/hubs" .
	start_postgres "$tmp/postgres" fsync=off
	cd "$tmp"
	umask 077
	make_database
	./hubs migrate
	seed -d "postgres://hubs@127.0.0.1:$port/hubs"
	: >output
	APP_ENV=local ADDR=127.0.0.1:0 SESSION_SECRET=$(random) FILES_DIR=$tmp/files ./hubs serve </dev/null >output 2>&1 &
	server=$!
	url=http://$(wait_for 's/.*"msg":"listening".*"addr":"\([^"]*\)".*/\1/p')
}

# Sets code: from the output of the tour's own server, or from the person at the terminal.
read_code() {
	if [ -n "$server" ]; then
		code=$(wait_for 's/^Sign-in code for .*: \([0-9]\{6\}\)$/\1/p')
		printf '\n--- The server has no mail server here and prints the code:\n'
		grep '^Sign-in code' output
	else
		printf '\n--- Type the code that was sent to %s (locally, the server prints it): ' "$email"
		read -r code || die "no code was typed"
		code=$(printf '%s' "$code" | tr -cd 0-9)
		[ "${#code}" = 6 ] || die "a code has six digits; it is printed in the terminal of ./dev.sh run"
	fi
}

# Shows where the request id of the last answer, an error, stands.
show_request_id() {
	local id
	id=$(member_of requestId)
	printf '\n--- The request id is in the answer twice, and in the log:\n'
	if [ -n "$server" ]; then
		wait_for "/\"refused\".*$id/p" | fold_lines
	else
		printf 'look for %s in the output of the server\n' "$id"
	fi
}

cmd_tour() {
	local url=${1:-} email=${EMAIL:-member@hubs.example} code wrong stranger version role json='Content-Type: application/json' i
	has curl || apt_install curl ca-certificates
	make_tmp
	if [ -z "$url" ]; then start_tour_server; fi
	url=${url%/}
	cd "$tmp"
	umask 077

	step 'Ask for a sign-in code. The answer is the same for every address.' 200 \
		-H "$json" -d "{\"email\":\"$email\"}" "$url/auth/otp/request"
	read_code
	wrong=$(printf '%06d' $(((10#$code + 1) % 1000000)))
	step 'A wrong code. It counts: ten attempts in 15 minutes for an address.' 401 \
		-H "$json" -d "{\"email\":\"$email\",\"code\":\"$wrong\"}" "$url/auth/otp/validate"
	expect invalid_code
	step 'Present the code. The session token comes in a cookie.' 200 \
		-H "$json" -d "{\"email\":\"$email\",\"code\":\"$code\"}" "$url/auth/otp/validate"
	version=$(member_of version) role=$(member_of permission)
	if grep -q '"accepted":false' body; then
		step 'The terms come first.' 403 "$url/hubs"
		expect terms_not_accepted
		step 'Accept them.' 200 -H "$json" -d "{\"version\":\"$version\"}" "$url/terms/acceptance"
	else
		printf '\n--- This account has accepted the terms before: the tour goes on behind the gate.\n'
	fi
	step 'List hubs: three of the active ones that have "har" in their name.' 200 \
		-G "$url/hubs" -d limit=3 -d 'filters[name]=har' -d 'filters[status]=active' -d orderBy=createdAt -d orderDirection=desc
	if [ -n "$server" ]; then expect Harbour; fi
	echo 'Notes from the tour.' >notes.txt
	step 'Upload a file.' 201 -F file=@notes.txt "$url/files/upload"
	step 'Fetch it again.' 200 "$url$(member_of path)"
	cmp notes.txt body || die "the file came back different"
	if [ "$role" = member ]; then
		step 'A member may not make hubs.' 403 -H "$json" -d '{"name":"Mine"}' "$url/hubs"
		expect '"forbidden"'
	fi
	stranger="stranger-$RANDOM@hubs.example"
	for i in 1 2 3 4 5; do
		curl -sS --max-time 10 -o body -H "$json" -d "{\"email\":\"$stranger\"}" "$url/auth/otp/request" || die "curl failed"
	done
	step 'Five more requests for a code have passed, for an address that nobody has. The sixth meets a limit.' 429 \
		-H "$json" -d "{\"email\":\"$stranger\"}" "$url/auth/otp/request"
	expect rate_limited
	show_request_id
	step 'Sign out.' 204 -X POST "$url/auth/logout"
	step 'The session is over.' 401 "$url/hubs"
	expect '"unauthenticated"'
	printf '\nThe tour is complete: every answer was the expected one.\n'
}

# --- bench ---

# The measuring itself is in bench_test.go, bench_commits_test.go, bench_abuse_test.go and
# growth_test.go.
cmd_bench() {
	local what=${1:-server} go_bench=(go test -run '^$' -benchtime 1x)
	need_go
	need_postgres
	if [ "$what" = growth ]; then
		"${go_bench[@]}" -bench '^BenchmarkGrowth$' -timeout 30m .
		return
	fi
	[ "$(uname)" = Linux ] || die "bench reads CPU times in /proc: Linux only"
	has wrk || apt_install wrk
	make_tmp
	build_server "$project" "$tmp/hubs"
	export BENCH_BINARY=$tmp/hubs BENCH_PGBENCH=$pg_bin/pgbench BENCH_PSQL=$pg_bin/psql
	case $what in
	server)
		"${go_bench[@]}" -bench '^BenchmarkServer$' -timeout 4m .
		cat bench.txt
		;;
	abuse) "${go_bench[@]}" -bench '^BenchmarkAbuse$' -timeout 15m . ;;
	*)
		mkdir "$tmp/commit"
		git archive "$what" | tar -xf - -C "$tmp/commit" || die "bench $what: no such commit"
		build_server "$tmp/commit" "$tmp/hubs-commit"
		BENCH_COMMIT=$(git rev-parse --short "$what") BENCH_COMMIT_BINARY=$tmp/hubs-commit \
			"${go_bench[@]}" -bench '^BenchmarkCommits$' -timeout 15m .
		;;
	esac
}

# build_server FOLDER BINARY builds as a release is built.
build_server() {
	(cd "$1" && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags='-s -w' -o "$2" .)
}

# --- release ---

# Builds the tool that lists what is in a binary. Its checksum stands here, and those of what
# it requires in its own go.sum, so it needs no line in our go.mod and no checksum database
# (GONOSUMDB).
sbom_version=v1.9.0
make_sbom_tool() {
	local module=github.com/CycloneDX/cyclonedx-gomod version=$sbom_version download dir
	local sum=h1:DuoKgGcY7gYKga9hjt4+xNjEg2O4ShPQYkVDPfGWAek=
	download=$(GONOSUMDB=$module go mod download -json "$module@$version") ||
		die "the SBOM tool could not be fetched: $module@$version"
	case $download in
	*"\"Sum\": \"$sum\""*) ;;
	*) die "the SBOM tool has another checksum than $sum" ;;
	esac
	dir=$(printf '%s\n' "$download" | sed -n 's/^.*"Dir": "\(.*\)".*$/\1/p')
	(cd "$dir" && go build -trimpath -buildvcs=false -mod=readonly -o "$tmp/cyclonedx-gomod" ./cmd/cyclonedx-gomod) ||
		die "the SBOM tool could not be fetched or built: $module@$version"
}

sha256() { if has sha256sum; then sha256sum "$@"; else shasum -a 256 "$@"; fi; }

# sbom BINARY writes BINARY.cdx.json: what is in the folder's program for GOOS and GOARCH. It is
# the same in every run: its serial number comes from the binary and its time from the commit.
# The tool does not know its own version unless it is installed by name, so that is put in too.
sbom() {
	local committed serial
	serial=$(sha256 "$1" | sed -E 's/^(.{8})(.{4}).(.{3}).(.{3})(.{12}).*/\1-\2-8\3-8\4-\5/') # a UUID of version 8
	"$tmp/cyclonedx-gomod" app -json -std -licenses -assert-licenses -serial "$serial" -output "$tmp/sbom" -main . . \
		>"$tmp/sbom.log" 2>&1 || { cat "$tmp/sbom.log" >&2; die "no SBOM for $1"; }
	committed=$(TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ)
	sed -e "s/\"timestamp\": \"[^\"]*\"/\"timestamp\": \"$committed\"/" -e "s/\"v0.0.0-unknown\"/\"$sbom_version\"/" \
		"$tmp/sbom" >"$1.cdx.json"
}

# A release is made of the commit HEAD, in a clone of its own: nothing that is not committed
# gets in, and each binary can say which commit it is. The same commit built by the same
# version of Go gives the same bytes, in any folder. That holds for the binaries on every
# system; an SBOM also names the checksum of the tool that made it, which differs by system.
cmd_release() {
	local out=$project/.dev/release target name
	[ $# -gt 0 ] || set -- linux/amd64 linux/arm64 darwin/amd64 darwin/arm64
	need_go
	has git || apt_install git
	make_tmp
	git clone --quiet --no-hardlinks "$project" "$tmp/source" || die "a release needs a git repository: it is made of a commit"
	[ -z "$(git status --porcelain)" ] || say "Not in the release: changes that are not committed"
	# Settings of this machine that would change the bytes.
	export GOFLAGS='' GOEXPERIMENT='' GOWORK=off GOAMD64=v1 GOARM64=v8.0 CGO_ENABLED=0
	make_sbom_tool
	rm -rf "$out"
	mkdir -p "$out"
	cd "$tmp/source"
	for target in "$@"; do
		export GOOS=${target%/*} GOARCH=${target#*/}
		name=hubs-$GOOS-$GOARCH
		go build -trimpath -buildvcs=true -ldflags='-s -w' -o "$out/$name" .
		sbom "$out/$name"
	done
	cp LICENSE "$out/"
	cd "$out"
	sha256 LICENSE hubs-* >"$tmp/sums"
	mv "$tmp/sums" SHA256SUMS
	say "$(go env GOVERSION) made .dev/release of commit $(git -C "$tmp/source" rev-parse HEAD):"
	cat SHA256SUMS
}

# --- soak ---

# soak_test.go does it all; as root it fills a small disk of its own, too.
cmd_soak() {
	local minutes=${1:-10}
	case $minutes in '' | *[!0-9]* | 0) usage ;; esac
	need_go
	need_postgres
	SOAK_MINUTES=$minutes go test -tags=soak -count=1 -timeout="$((minutes * 2 + 15))m" -run '^TestSoak$' -v .
}

# --- prove ---

cmd_prove() {
	need_go
	need_postgres
	go run ./tools/prove "$@"
}

[ $# -gt 0 ] || usage
command=$1
shift
case $command in
postgres) [ $# -le 1 ] || usage; cmd_postgres "$@" ;;
run) [ $# = 0 ] || usage; cmd_run ;;
tour) [ $# -le 1 ] || usage; cmd_tour "$@" ;;
soak) [ $# -le 1 ] || usage; cmd_soak "$@" ;;
test | user | release | prove) "cmd_$command" "$@" ;;
bench) [ $# -le 1 ] || usage; cmd_bench "$@" ;;
help | -h | --help) (usage) 2>&1 || true ;;
*) die "there is no command $command; ./dev.sh help lists the commands" ;;
esac
