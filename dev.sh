#!/usr/bin/env bash
# The developer's commands. They work on Debian and macOS with Go. What this script keeps is in .dev/,
# which git ignores. It is written for bash 3.2, the version that macOS has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
project=$PWD
PATH=$PATH:/usr/local/go/bin:/usr/sbin

usage() {
	cat <<-'END'
		./dev.sh run              a local server with demo data, until Ctrl-C; ADDR, if set
		./dev.sh user ...         the server's user commands, on that server's database
		./dev.sh tour [URL]       the whole flow with curl, against a server of its own or that at URL
		./dev.sh test [FLAG...]   what every change needs: units and the API, a minute
		./dev.sh test all         all but fuzz, soak and bench, with the race detector
		./dev.sh test guide       the patches of examples/, applied and tested
		./dev.sh prove [ROW...]   takes protections out and shows that the tests notice
		./dev.sh fuzz             each fuzz target for FUZZTIME, or 3 s
		./dev.sh mutate [SEED [CHANGES]]  changes of single operators that no test notices; an hour or two
		./dev.sh soak [MINUTES]   clients that write and read while PostgreSQL fails again and again
		./dev.sh bench [COMMIT]   what requests cost, beside bare net/http or beside a commit
		./dev.sh bench abuse      the most expensive requests
		./dev.sh bench peer       lists of 100,000 hubs, beside PocketBase
		./dev.sh release notes VERSION    moves the files of changes/ into CHANGELOG.md
		./dev.sh release [VERSION] [OS/ARCH...]    binaries of HEAD, licences, SBOMs, checksums: .dev/release
		./dev.sh verify VERSION [DIR]     builds a release again, and compares each file with that in DIR
		./dev.sh postgres [DIR]   a private PostgreSQL until standard input ends; prints its URL
		run and user use a private PostgreSQL in .dev/ (root: /var/lib/hubs-dev-*), unless DATABASE_URL is set.
	END
}
wrong() { usage >&2; exit 2; }
say() { printf '%s\n' "$*" >&2; }
die() { say "dev.sh: $*"; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }
is_root() { [ "$(id -u)" = 0 ]; }
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# However the script ends, cleanup stops what it has started, the server first.
tmp='' pg_dir='' server=''
cleanup() {
	local status=$?
	trap '' INT TERM HUP
	set +e
	if [ -n "$server" ] && kill -TERM "$server" 2>/dev/null; then wait "$server"; fi
	[ -z "$pg_dir" ] || as_pg "$pg_bin/pg_ctl" -D "$pg_dir/data" -m fast -t 20 stop >/dev/null 2>&1
	[ -z "$tmp" ] || rm -rf "$tmp"
	exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

tmp=$(mktemp -d "${TMPDIR:-/tmp}/hubs.XXXXXX")
tmp=$(cd "$tmp" && pwd -P)
if is_root; then chmod 711 "$tmp"; fi # PostgreSQL's own user must be able to enter it

# --- programs: as root on Debian, the script installs missing ones ---

# install_missing PROGRAM[:PACKAGE]...
install_missing() {
	local program missing=()
	for program in "$@"; do
		has "${program%:*}" || missing+=("${program#*:}")
	done
	[ ${#missing[@]} != 0 ] || return 0
	say "To be installed: ${missing[*]}"
	if ! has apt-get || ! is_root; then die "this script installs programs as root on Debian only"; fi
	apt-get -qq update >/dev/null
	DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
		"${missing[@]}" </dev/null >/dev/null
}

# Sets pg_bin, the folder of PostgreSQL's programs: of those in PATH, or else the newest.
find_postgres() {
	# The words are split on purpose: each is a folder.
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
	if find_postgres; then return; fi
	install_missing initdb:postgresql
	find_postgres || die "PostgreSQL was installed, but initdb can't be found"
}

# --- a private PostgreSQL ---
#
# DIR/data        the cluster, with server.log
# DIR/password    the password of its superuser; mode 600
# DIR/port        the port of the last start, used again if it is free
#
# It listens only on 127.0.0.1, and asks for the password, because every account of the machine can
# reach a port. It has no Unix socket: the path of a socket can have only about 100 bytes. With
# fsync=off, a power failure can lose data. The death of a process can't.
pg_options='-c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off -c max_connections=400'

# Runs one of PostgreSQL's programs, not as root, because they refuse that.
as_pg() {
	local user=postgres
	if ! is_root; then "$@"; return; fi
	id -u postgres >/dev/null 2>&1 || user=nobody
	(cd / && runuser -u "$user" -- "$@")
}

# start_postgres DIR makes the cluster if there is none, and starts it, unless another dev.sh has.
# It sets port, password and DATABASE_URL. The database is the superuser's own.
start_postgres() {
	local dir attempt
	need_postgres
	mkdir -p "$1"
	dir=$(cd "$1" && pwd -P)
	if is_root; then chmod 711 "$dir"; fi
	as_pg test -x "$dir" || die "PostgreSQL runs as an ordinary user, who can't enter $dir"
	[ -s "$dir/password" ] || (umask 077 && random >"$dir/password")
	password=$(cat "$dir/password")
	[ -d "$dir/data" ] || make_cluster "$dir"
	port=$(cat "$dir/port" 2>/dev/null || echo $((20000 + RANDOM % 12000)))
	for attempt in 1 2 3 4 5 6 7 8 9 10; do
		if as_pg "$pg_bin/pg_ctl" -D "$dir/data" status >/dev/null; then break; fi
		pg_dir=$dir
		if as_pg "$pg_bin/pg_ctl" -D "$dir/data" -l "$dir/data/server.log" \
			-o "$pg_options -p $port" -t 60 -w start >/dev/null 2>&1
		then break; fi
		[ "$attempt" != 10 ] || die "PostgreSQL did not start: $(tail -n 20 "$dir/data/server.log")"
		port=$((20000 + RANDOM % 12000)) # below the ports that systems use for outgoing connections
	done
	echo "$port" >"$dir/port"
	DATABASE_URL="postgres://postgres:$password@127.0.0.1:$port/postgres?sslmode=disable"
}

# Makes the cluster under another name first, so that an interruption leaves no half-made one.
make_cluster() {
	local locale=C
	[ "$(uname)" != Linux ] || locale=C.UTF-8
	rm -rf "$1/new"
	mkdir -m 700 "$1/new"
	if is_root; then chown "$(as_pg id -u)" "$1/new" "$1/password"; fi
	as_pg "$pg_bin/initdb" -D "$1/new" -U postgres -A scram-sha-256 --pwfile="$1/password" \
		-E UTF8 --locale=$locale >"$1/initdb.log" 2>&1 || die "initdb failed: $(cat "$1/initdb.log")"
	mv "$1/new" "$1/data"
}

cmd_postgres() {
	find_postgres || { say "PostgreSQL is not installed"; exit 69; } # the tests install nothing
	start_postgres "${1:-$tmp/postgres}"
	echo "$DATABASE_URL"
	while read -r; do :; done
}

# --- a server with demo data ---

# Sets DATABASE_URL to the private PostgreSQL of ./dev.sh run, unless it is set.
use_database() {
	local home=$project/.dev/postgres
	[ -z "${DATABASE_URL:-}" ] || return 0
	if is_root; then # PostgreSQL runs as a user who can't enter every folder, such as root's home
		home=/var/lib/hubs-dev-$(printf '%s' "$project" | cksum | cut -d' ' -f1)
		[ -e .dev/database ] || rm -rf "$home" # .dev/ was deleted: start afresh
		touch .dev/database
	fi
	start_postgres "$home"
	database_folder=$home
	export DATABASE_URL
}

# serve_demo BINARY NAME=VALUE... builds the server, and starts it with demo data and these settings.
serve_demo() {
	local binary=$1 psql=psql
	shift
	go build -buildvcs=false -o "$binary" .
	"$binary" migrate
	if find_postgres && [ -x "$pg_bin/psql" ]; then psql=$pg_bin/psql; fi
	# psql takes the password from the environment: other accounts can read a command line.
	PGPASSWORD=${password:-} "$psql" -qX -v ON_ERROR_STOP=1 -f examples/demo.sql \
		-d "${DATABASE_URL/:"${password:-}"@/@}" >/dev/null
	# set -m gives the server its own process group: Ctrl-C reaches this script, which sends one TERM.
	set -m
	env APP_ENV=local "$@" "$binary" serve </dev/null &
	server=$!
	set +m
}

cmd_run() {
	local addr=${ADDR:-127.0.0.1:8080} status=0
	mkdir -p .dev
	[ -x .dev/hubs ] || say "Building the server: a minute or two the first time, then seconds"
	[ -s .dev/session-secret ] || (umask 077 && random >.dev/session-secret)
	use_database
	# Show the name: 127.0.0.1 and localhost are two sites, and front ends run on localhost.
	cat >&2 <<-END
		Once the server listens, open http://localhost:${addr##*:}/ and sign in as
		member@hubs.example or admin@hubs.example. The codes appear here, in this terminal.
		In another terminal, ./dev.sh tour http://localhost:${addr##*:} shows the same with curl.
		Ctrl-C stops the server. The database is in ${database_folder:-DATABASE_URL}.
	END
	export SESSION_SECRET=${SESSION_SECRET:-$(cat .dev/session-secret)}
	serve_demo .dev/hubs ADDR="$addr" FILES_DIR="${FILES_DIR:-.dev/files}"
	wait "$server" || status=$?
	server=''
	return "$status"
}

cmd_user() {
	[ -x .dev/hubs ] || die "there is no database yet: ./dev.sh run makes it"
	use_database
	.dev/hubs user "$@"
}

# Without a URL, the tour starts its own server on a free port, with its own database.
cmd_tour() {
	local i url=''
	install_missing curl
	if [ $# = 1 ]; then exec ./examples/tour.sh "$1"; fi
	start_postgres "$tmp/postgres"
	SESSION_SECRET=$(random)
	export DATABASE_URL SESSION_SECRET
	serve_demo "$tmp/hubs" ADDR=127.0.0.1:0 FILES_DIR="$tmp/files" >"$tmp/output" 2>&1
	for ((i = 0; i < 100; i++)); do
		url=$(sed -n 's/.*"msg":"listening".*"addr":"\([^"]*\)".*/\1/p' "$tmp/output")
		[ -z "$url" ] || break
		sleep 0.1
	done
	OUTPUT=$tmp/output ./examples/tour.sh "http://$url"
}

# --- tests ---

cmd_test() {
	local failed=0
	need_postgres
	case ${1:-} in
	guide) go test -count=1 ./test/guide; return ;;
	all) test_all; return ;;
	esac
	go test "$@" . || failed=1
	go test -timeout=10m -parallel 8 "$@" ./internal/... ./tools/... ./test/api || failed=1
	return "$failed"
}

# The server's binary has the race detector. .ci/run runs the test that is left out.
test_all() {
	local failed=0
	if is_root && has apt-get; then
		install_missing gcc:build-essential chromium chromedriver:chromium-driver \
			npm wget haproxy nginx pgbouncer faketime strace systemd-analyze:systemd
		export HUBS_TEST_REQUIRE=all
	else
		say "!!! NOT ALL IS TESTED: browsers, proxies and failing system calls need Debian and root"
	fi
	start_postgres "$tmp/postgres"
	export HUBS_TEST_POSTGRES=$DATABASE_URL HUBS_BINARY=$tmp/hubs
	go build -buildvcs=false -race -o "$HUBS_BINARY" .
	go test -race . || failed=1
	# These count within a period, so each runs alone.
	go test -count=1 -timeout=20m -parallel 8 ./internal/... ./tools/... ./test/api || failed=1
	go test -count=1 -timeout=20m -parallel 8 ./test/faults || failed=1
	go test -count=1 -timeout=10m ./test/deploy || failed=1
	# Browsers and compilers take whole cores. Without axe-core, the tests of accessibility are left to .ci/run.
	go test -count=1 -timeout=20m -p 2 -parallel 8 -skip="$([ -n "${AXE_JS:-}" ] || echo Accessible)" \
		./test/{browser,clients,guide} || failed=1
	return "$failed"
}

# The programs of tools/ that run tests of changed servers.
cmd_prove() { with_postgres go run ./tools/prove "$@"; }
cmd_mutate() { with_postgres go run ./tools/mutate "$@"; }
with_postgres() {
	start_postgres "$tmp/postgres"
	HUBS_TEST_POSTGRES=$DATABASE_URL HUBS_TEST_REQUIRE=all GOFLAGS=-buildvcs=false "$@"
}

# go test -fuzz takes one target at a time, and would link its package anew for each.
cmd_fuzz() {
	local file target folder package found failed=0
	found=$(grep -r --include='*_test.go' '^func Fuzz' ./*_test.go internal test tools |
		sed -E 's/^([^:]*):func (Fuzz[A-Za-z0-9_]*)\(.*/\1 \2/' | sort)
	[ -n "$found" ] || die "there is no fuzz target: no func Fuzz... in a test"
	need_postgres # some targets ask a server
	while read -r file target; do
		folder=./$(dirname "$file") package=$tmp/$(dirname "$file" | tr / -).test
		[ -x "$package" ] || go test -c -fuzz=. -o "$package" "$folder" || exit
		say "$target, in $folder"
		(cd "$folder" && "$package" -test.run='^$' -test.fuzz="^$target\$" \
			-test.fuzztime="${FUZZTIME:-3s}" -test.fuzzcachedir="$(go env GOCACHE)/fuzz/hubs/$folder") </dev/null || failed=1
	done <<-END
		$found
	END
	return "$failed"
}

[ $# -gt 0 ] || wrong
command=$1
shift
has go || die "Go 1.26 or newer is needed: https://go.dev/dl/"
case $command in
run) [ $# = 0 ] || wrong; cmd_run ;;
postgres | tour) [ $# -le 1 ] || wrong; "cmd_$command" "$@" ;;
soak) need_postgres && SOAK_MINUTES=${1:-10} go test -count=1 -timeout=0 -v \
	-run '^TestLoadOutlivesTheDatabase$' ./test/faults ;;
fuzz) [ $# = 0 ] || wrong; cmd_fuzz ;;
mutate) [ $# -le 2 ] || wrong; cmd_mutate "$@" ;;
user | test | prove) "cmd_$command" "$@" ;;
bench) need_postgres; ./tools/bench.sh "$@" ;;
release) ./tools/release.sh "$@" ;;
verify) ./tools/release.sh verify "$@" ;;
help | -h | --help) usage ;;
*) die "there is no command $command; ./dev.sh help lists the commands" ;;
esac
