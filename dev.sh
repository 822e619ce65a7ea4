#!/usr/bin/env bash
# The developer's commands, such as a running server, the tests and a tour. They work on a
# fresh Debian or macOS machine that has Go. Everything this script keeps is in .dev/, which
# git ignores. It is written for bash 3.2, the version that macOS has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
project=$PWD
PATH=$PATH:/usr/local/go/bin:/usr/sbin

usage() {
	cat <<-'END'
		usage: ./dev.sh run              a local server with demo data, until Ctrl-C
		       ./dev.sh user ...         the server's user commands, on that server's database
		       ./dev.sh test [FLAG...]   what every change needs: units and the API, a minute
		       ./dev.sh test all         everything but soak and bench, with the race detector and
		                                 coverage, 8 minutes; installs browsers and proxies
		       ./dev.sh tour [URL]       the whole flow with curl, against a server of its own, or the
		                                 one at URL, whose codes it asks for; EMAIL if set
		       ./dev.sh test guide       docs/yours.md, followed step by step in a copy, 3 minutes
		       ./dev.sh soak [MINUTES]   clients of every kind while PostgreSQL, mail, disk and servers
		                                 fail in turn, 10 minutes by default; a table of what held
		       ./dev.sh bench [COMMIT]   what each kind of request costs beside bare net/http, into
		                                 docs/bench.txt; or a commit against the working tree
		       ./dev.sh bench abuse      what the most expensive requests cost
		       ./dev.sh prove ...        takes protections out and shows that the tests notice
		       ./dev.sh release [OS/ARCH...]
		                                 binaries of the commit HEAD, SBOMs, checksums: .dev/release
		       ./dev.sh postgres [DIR]   a private PostgreSQL until standard input ends; prints its URL

		run and user take ADDR and DATABASE_URL, if set. Without DATABASE_URL they use a private
		PostgreSQL in .dev/. To start afresh: delete .dev/
		HUBS_PG_BIN names the folder of another PostgreSQL's programs.
	END
}
wrong() { usage >&2; exit 2; }
say() { printf '%s\n' "$*" >&2; }
die() { say "dev.sh: $*"; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }
is_root() { [ "$(id -u)" = 0 ]; }
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# However the script ends, cleanup stops what it has started, the server first.
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
trap 'exit 130' INT TERM HUP

make_tmp() {
	tmp=$(mktemp -d "${TMPDIR:-/tmp}/hubs.XXXXXX")
	tmp=$(cd "$tmp" && pwd -P)
	if is_root; then chmod 711 "$tmp"; fi # PostgreSQL's own user must be able to enter it
}

# --- programs: the script installs missing ones ---

as_root() {
	if is_root; then "$@"; elif has sudo; then sudo "$@"; else die "root or sudo is needed for: $*"; fi
}

apt_get() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" </dev/null >/dev/null; }

apt_install() {
	has apt-get || die "please install: $* (this script can do so with apt-get or Homebrew only)"
	say "Installing with apt-get: $*"
	apt_get update
	apt_get install -y --no-install-recommends "$@"
}

# install_missing PROGRAM[:PACKAGE]... installs the missing programs from Debian's packages.
install_missing() {
	local program missing=()
	for program in "$@"; do
		has "${program%:*}" || missing+=("${program#*:}")
	done
	[ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
}

need_go() { has go || die "Go 1.26 or newer is needed: https://go.dev/dl/"; }

# Sets pg_bin, the folder of PostgreSQL's programs.
find_postgres() {
	if [ -n "${HUBS_PG_BIN:-}" ]; then
		pg_bin=$(cd "$HUBS_PG_BIN" && pwd -P) || die "HUBS_PG_BIN is no folder: $HUBS_PG_BIN"
		as_pg test -x "$pg_bin/postgres" || die "PostgreSQL's user can't run $pg_bin/postgres"
		return
	fi
	# The words are split on purpose: each is a folder, the newest version first.
	# shellcheck disable=SC2046
	for pg_bin in "$(dirname "$(command -v initdb)")" \
		$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -t/ -k5,5rn) \
		$(printf '%s\n' {/opt/homebrew,/usr/local}/opt/postgresql*/bin | sort -t@ -k2,2rn)
	do
		if [ -x "$pg_bin/initdb" ]; then return; fi
	done
	return 1
}

need_postgres() {
	local conf=/etc/postgresql-common/createcluster.conf failed=''
	if find_postgres; then return; fi
	if has brew; then
		say "Installing with Homebrew: postgresql@17"
		brew install postgresql@17 </dev/null >&2
	else
		# Debian's package would also make a cluster and start it. Prevent that, this time only.
		apt_install postgresql-common
		as_root sed -i.before-hubs 's/^#*create_main_cluster.*/create_main_cluster = false/' "$conf"
		apt_install postgresql || failed=yes
		as_root mv "$conf.before-hubs" "$conf"
		[ -z "$failed" ] || die "apt-get could not install PostgreSQL"
	fi
	find_postgres || die "PostgreSQL was installed, but initdb can't be found"
}

# --- a private PostgreSQL ---
#
# DIR/data        the cluster, with server.log
# DIR/password    the password of its roles; mode 600
# DIR/port        the port of the last start, used again if it is free
# DIR/owner       the process id of the dev.sh that uses it
#
# It listens only on 127.0.0.1, and asks for the password, because every account of the machine can
# reach a port. It has no Unix socket: the path of a socket can have only about 100 bytes.

# Runs one of PostgreSQL's programs, not as root, because they refuse that.
as_pg() {
	local user=postgres
	if ! is_root; then "$@"; return; fi
	id -u postgres >/dev/null 2>&1 || user=nobody
	if has runuser; then (cd / && runuser -u "$user" -- "$@"); else (cd / && sudo -u "$user" "$@"); fi
}

# Tells whether the PostgreSQL in a folder is running and another dev.sh uses it.
is_kept() {
	local owner
	owner=$(cat "$1/owner" 2>/dev/null) && kill -0 "$owner" 2>/dev/null || return
	as_pg "$pg_bin/pg_ctl" -D "$1/data" status >/dev/null
}

# start_postgres DIR [SETTING=VALUE...] makes the cluster if there is none, and starts it.
# It sets pg_dir, port and password.
start_postgres() {
	local dir setting options='-c listen_addresses=127.0.0.1 -c unix_socket_directories=' attempt
	need_postgres
	mkdir -p "$1"
	dir=$(cd "$1" && pwd -P)
	shift
	for setting in "$@"; do options="$options -c $setting"; done
	if is_root; then chmod 711 "$dir"; fi
	as_pg test -x "$dir" || die "PostgreSQL runs as an ordinary user, who can't enter $dir"

	[ -s "$dir/password" ] || (umask 077 && random >"$dir/password")
	password=$(cat "$dir/password")
	[ -d "$dir/data" ] || make_cluster "$dir"
	if is_kept "$dir"; then die "$dir is in use by another dev.sh, process $(cat "$dir/owner")"; fi
	pg_dir=$dir
	stop_postgres # a killed dev.sh may have left one running
	echo $$ >"$dir/owner"
	port=$(cat "$dir/port" 2>/dev/null || echo $((20000 + RANDOM % 12000)))
	for attempt in 1 2 3 4 5 6 7 8 9 10; do
		rm -f "$dir/data/server.log"
		if as_pg "$pg_bin/pg_ctl" -D "$dir/data" -l "$dir/data/server.log" -o "$options -p $port" \
			-t 60 -w start >/dev/null 2>&1
		then
			echo "$port" >"$dir/port"
			return
		fi
		grep -q 'could not bind' "$dir/data/server.log" || break
		port=$((20000 + RANDOM % 12000)) # below the ports that systems use for outgoing connections
	done
	cat "$dir/data/server.log" >&2
	die "PostgreSQL did not start ($attempt attempts)"
}

# Makes the cluster under another name first, so that an interruption leaves no half-made one.
make_cluster() {
	local locale=C
	rm -rf "$1/new"
	mkdir -m 700 "$1/new"
	if is_root; then chown "$(as_pg id -u)" "$1/new" "$1/password"; fi
	case $(locale -a 2>/dev/null) in *C.UTF-8* | *C.utf8*) locale=C.UTF-8 ;; esac
	as_pg "$pg_bin/initdb" -D "$1/new" -U postgres -A scram-sha-256 --pwfile="$1/password" \
		-E UTF8 --locale="$locale" >"$1/initdb.log" 2>&1 || die "initdb failed: $(cat "$1/initdb.log")"
	mv "$1/new" "$1/data"
}

stop_postgres() {
	local pid
	pid=$(head -n 1 "$pg_dir/data/postmaster.pid" 2>/dev/null) || return 0
	# A test may have left the processes frozen. Wake them, so that they see the signal to stop.
	# shellcheck disable=SC2046
	kill -CONT "$pid" $(pgrep -P "$pid" 2>/dev/null) 2>/dev/null || true
	as_pg "$pg_bin/pg_ctl" -D "$pg_dir/data" -m fast -t 20 stop >/dev/null 2>&1 ||
		as_pg "$pg_bin/pg_ctl" -D "$pg_dir/data" -m immediate -t 20 stop >/dev/null 2>&1 || true
}

# With fsync=off, a power failure can lose the data of the tests. The death of a process can't.
test_settings=(fsync=off max_connections=200)

# Starts a PostgreSQL for tests in a folder of its own, and tells the tests of it.
start_test_postgres() {
	make_tmp
	start_postgres "$tmp/postgres" "${test_settings[@]}"
	export HUBS_TEST_POSTGRES="postgres://postgres:$password@127.0.0.1:$port/postgres?sslmode=disable"
}

# sql passes the password in the environment, because other accounts can read a command line.
sql() {
	local psql=psql
	[ ! -x "$pg_bin/psql" ] || psql=$pg_bin/psql
	PGPASSWORD=${password:-${PGPASSWORD:-}} "$psql" -qXAt -v ON_ERROR_STOP=1 "$@"
}

cmd_postgres() {
	find_postgres || { say "PostgreSQL is not installed"; exit 69; } # the tests install nothing
	if [ $# = 0 ]; then make_tmp; set -- "$tmp/postgres"; fi
	start_postgres "$1" "${test_settings[@]}"
	echo "postgres://postgres:$password@127.0.0.1:$port/postgres?sslmode=disable"
	# cat runs in the background: otherwise bash would handle signals only after cat ends.
	exec 3<&0
	cat <&3 >/dev/null &
	watcher=$!
	wait "$watcher" || true
}

# Makes a database and an ordinary role that owns it, as in a deployment. Sets DATABASE_URL.
make_database() {
	sql -d "postgres://postgres@127.0.0.1:$port/postgres" >&2 <<-END
		select 'create role hubs login'
		where not exists (select from pg_roles where rolname = 'hubs') \gexec
		select 'create database hubs owner hubs'
		where not exists (select from pg_database where datname = 'hubs') \gexec
		alter role hubs password '$password';
	END
	export DATABASE_URL="postgres://hubs:$password@127.0.0.1:$port/hubs?sslmode=disable"
}

# Fills empty tables with demo data. Tables that have rows stay as the developer left them.
seed() { sql -d "$DATABASE_URL" -f examples/demo.sql >&2; }

# use_private_database own starts the cluster of ./dev.sh run, and use_private_database shared only
# if it is not running yet. Both set DATABASE_URL.
use_private_database() {
	local home=$project/.dev/postgres
	need_postgres
	# The user that PostgreSQL runs as can't enter every folder, such as root's home.
	if is_root && ! { chmod 711 .dev && as_pg test -x "$project/.dev"; }; then
		home=/var/lib/hubs-dev-$(printf '%s' "$project" | cksum | cut -d' ' -f1)
		[ -e .dev/database ] || rm -rf "$home" # .dev/ was deleted: start afresh
		touch .dev/database
	fi
	if [ "$1" = shared ] && is_kept "$home"; then
		port=$(cat "$home/port") password=$(cat "$home/password")
	else
		start_postgres "$home"
	fi
	make_database
}

listen_address() { printf '%s\n' "$1" | sed -n 's/.*"msg":"listening".*"addr":"\([^"]*\)".*/\1/p'; }

# Prints the server's output. Once the server listens, it also prints what to try.
show_output() {
	local line url
	trap '' INT TERM HUP # so that the server's last lines are shown too
	while IFS= read -r line; do
		printf '%s\n' "$line"
		case $line in *'"msg":"listening"'*) ;; *) continue ;; esac
		# Show the name: 127.0.0.1 and localhost are two sites, and front ends run on localhost.
		url=$(listen_address "$line" | sed 's/^127\.0\.0\.1:/localhost:/')
		cat >&2 <<-END
			Open http://$url/ and sign in as member@hubs.example or admin@hubs.example.
			There is no mail server: the sign-in codes appear here, in this terminal.
			In another terminal, ./dev.sh tour http://$url shows the same with curl.
			Ctrl-C stops the server.
		END
	done
}

need_port() { # HOST:PORT
	local host=${1%:*} taken_port=${1##*:}
	(exec 3<>"/dev/tcp/${host:-127.0.0.1}/$taken_port") 2>/dev/null || return 0
	die "another program uses $1 (a server that a killed ./dev.sh run left?)." \
		"Stop it, or choose another port: ADDR=127.0.0.1:$((taken_port + 1)) ./dev.sh run"
}

cmd_run() {
	local status=0 addr=${ADDR:-127.0.0.1:8080}
	need_go
	mkdir -p .dev
	need_port "$addr"
	make_tmp
	[ -x .dev/hubs ] || say "Building the server: a minute or two the first time, then seconds"
	go build -buildvcs=false -o .dev/hubs .
	[ -s .dev/session-secret ] || (umask 077 && random >.dev/session-secret)
	if [ -n "${DATABASE_URL:-}" ]; then
		say "Using the database of DATABASE_URL"
		find_postgres || has psql || die "psql is needed, for the demo data"
	else
		use_private_database own
		say "PostgreSQL ($pg_bin) runs on 127.0.0.1:$port, its cluster is in $pg_dir"
	fi
	.dev/hubs migrate
	seed

	mkfifo "$tmp/output"
	show_output <"$tmp/output" &
	reader=$!
	# set -m gives the server its own process group: Ctrl-C reaches this script, which sends one TERM.
	set -m
	APP_ENV=local ADDR=$addr FILES_DIR=${FILES_DIR:-.dev/files} \
		SESSION_SECRET=${SESSION_SECRET:-$(cat .dev/session-secret)} \
		.dev/hubs serve </dev/null >"$tmp/output" &
	server=$!
	set +m
	wait "$server" || status=$?
	server=''
	return "$status"
}

# Works while ./dev.sh run is running, and after it has ended.
cmd_user() {
	[ -x .dev/hubs ] || die "there is no database yet: ./dev.sh run makes it"
	[ -n "${DATABASE_URL:-}" ] || use_private_database shared
	.dev/hubs user "$@"
}

cmd_test() {
	need_go; need_postgres
	case ${1:-} in
	guide) go test -count=1 ./test/guide; return ;;
	all) test_all; return ;;
	esac
	go test "$@" . # comes first, because the tests of the API compare every answer with the contract
	go test -timeout=10m -parallel 8 "$@" ./internal/... ./tools/... ./test/api # most tests mostly wait
}

# Builds the server's binary once, with the race detector and coverage. The coverage of the unit
# tests is added to that of the binary. TestValidatingProxyFindsNoViolation and TestPageIsAccessible are
# left out, because .ci/run runs them.
test_all() {
	local total profile=.dev/coverage.out
	mkdir -p .dev
	if has apt-get && is_root; then
		install_missing gcc:build-essential chromium chromedriver:chromium-driver firefox-esr \
			Xvfb:xvfb WebKitWebDriver:webkit2gtk-driver npm haproxy nginx strace \
			systemd-analyze:systemd
		export HUBS_TEST_REQUIRE=all
	else
		say "!!! NOT ALL IS TESTED: browsers, proxies and failing system calls need Debian and root"
	fi
	start_test_postgres
	mkdir -m 777 "$tmp/coverage" # some tests run the server as another user
	go build -buildvcs=false -race -cover -covermode=atomic -o "$tmp/hubs" .
	go test -race -covermode=atomic -coverprofile="$tmp/units" .
	HUBS_BINARY=$tmp/hubs GOCOVERDIR=$tmp/coverage \
		go test -count=1 -timeout=20m -skip='ValidatingProxy|Accessible' ./internal/... ./tools/... ./test/{api,faults,deploy,browser}
	go tool covdata textfmt -i="$tmp/coverage" -o "$tmp/binary"
	{ cat "$tmp/units"; grep -v '^mode:' "$tmp/binary"; } >"$profile"
	total=$(go tool cover -func="$profile" | sed -n 's/^total:.*[^0-9.]\([0-9.]*\)%$/\1/p')
	echo "coverage: $total % of statements; the least is 90 %"
	[ "${total%.*}" -ge 90 ] || die "coverage is below 90 %"
}

cmd_prove() {
	need_go
	start_test_postgres
	HUBS_TEST_REQUIRE=all GOFLAGS=-buildvcs=false go run ./tools/prove "$@"
}

cmd_soak() {
	local minutes=${1:-10}
	case $minutes in '' | *[!0-9]* | 0) wrong ;; esac
	need_go; need_postgres
	SOAK_MINUTES=$minutes go test -count=1 -timeout="$((minutes * 2 + 15))m" -v ./test/soak
}

# Without a URL, the tour starts its own server on a free port, with its own database.
cmd_tour() {
	local i url=''
	has curl || apt_install curl ca-certificates
	if [ $# = 1 ]; then exec ./examples/tour.sh "$1"; fi
	need_go; make_tmp
	go build -buildvcs=false -o "$tmp/hubs" .
	start_postgres "$tmp/postgres" fsync=off
	make_database
	"$tmp/hubs" migrate
	seed
	: >"$tmp/output" # the loop below may read it before the server's shell has opened it
	APP_ENV=local ADDR=127.0.0.1:0 SESSION_SECRET=$(random) FILES_DIR=$tmp/files \
		"$tmp/hubs" serve </dev/null >"$tmp/output" 2>&1 &
	server=$!
	for ((i = 0; i < 100; i++)); do
		url=$(listen_address "$(cat "$tmp/output")")
		[ -z "$url" ] || break
		sleep 0.1
	done
	OUTPUT=$tmp/output ./examples/tour.sh "http://$url"
}

# test/bench measures, and benchstat makes the table.
cmd_bench() {
	local what=${1:-} benchstat=golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da
	need_go
	need_postgres
	[ "$(uname)" = Linux ] || die "bench reads CPU times in /proc: Linux only"
	has wrk || apt_install wrk
	make_tmp
	build_server . "$tmp/hubs"
	if [ -n "$what" ] && [ "$what" != abuse ]; then
		mkdir "$tmp/commit"
		git archive "$what" | tar -xf - -C "$tmp/commit" || die "bench $what: no such commit"
		build_server "$tmp/commit" "$tmp/before"
		export BENCH_BEFORE=$tmp/before
		what=commits
	fi
	HUBS_BINARY=$tmp/hubs BENCH=${what:-bare} BENCH_OUT=$tmp/figures \
		go test -count=1 -timeout=40m -run '^$' -bench '^BenchmarkRequests$' -benchtime=1x ./test/bench
	go run "$benchstat" -col /side "$tmp/figures" >"$tmp/table"
	cat "$tmp/table"
	[ -n "$what" ] || cp "$tmp/table" docs/bench.txt
}

# build_server FOLDER BINARY builds the server with the same options as a release.
build_server() {
	(cd "$1" && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags='-s -w' -o "$2" .)
}

[ $# -gt 0 ] || wrong
command=$1
shift
case $command in
run) [ $# = 0 ] || wrong; cmd_run ;;
postgres | tour | soak | bench) [ $# -le 1 ] || wrong; "cmd_$command" "$@" ;;
user | test) "cmd_$command" "$@" ;;
prove) cmd_prove "$@" ;;
release) need_go; ./tools/release.sh "$@" ;;
help | -h | --help) usage ;;
*) die "there is no command $command; ./dev.sh help lists the commands" ;;
esac
