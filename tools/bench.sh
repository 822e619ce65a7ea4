#!/usr/bin/env bash
# ./dev.sh bench [COMMIT | abuse | peer]: test/bench measures, and benchstat makes the table. Without
# an argument, the table goes into docs/bench.txt. peer is PocketBase.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=${1:-} benchstat=golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da
[ "$(uname)" = Linux ] || { echo 'bench reads CPU times in /proc: Linux only' >&2; exit 1; }
command -v wrk >/dev/null || { echo 'bench needs wrk: apt-get install wrk' >&2; exit 1; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# build FOLDER BINARY builds the server with the same options as a release.
build() {
	(cd "$1" && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags='-s -w' -o "$2" .)
}
build . "$tmp/hubs"
peer=github.com/pocketbase/pocketbase@v0.40.4
if [ "$what" = peer ]; then
	# In a module of its own, by the version of Go that it asks for.
	mkdir "$tmp/peer"
	cp test/bench/testdata/peer/main.go "$tmp/peer"
	(
		cd "$tmp/peer"
		export GOTOOLCHAIN=auto GOFLAGS=-mod=mod CGO_ENABLED=0
		go mod init peer
		go get "$peer"
		go build -trimpath -ldflags='-s -w' -o pocketbase .
	) >"$tmp/log" 2>&1 || { cat "$tmp/log" >&2; exit 1; }
	export BENCH_PEER=$tmp/peer/pocketbase
	echo "after: this server at $(git describe --always --tags --dirty); peer: $peer"
	echo "load average before it begins: $(cut -d' ' -f1-3 /proc/loadavg)"
elif [ -n "$what" ] && [ "$what" != abuse ]; then
	mkdir "$tmp/commit"
	git archive "$what" | tar -xf - -C "$tmp/commit"
	build "$tmp/commit" "$tmp/before"
	export BENCH_BEFORE=$tmp/before
	what=commits
fi
HUBS_BINARY=$tmp/hubs BENCH=${what:-bare} BENCH_OUT=$tmp/figures \
	go test -count=1 -timeout=40m -run '^$' -bench '^BenchmarkRequests$' -benchtime=1x ./test/bench
go run "$benchstat" -col /side "$tmp/figures" | tee "$tmp/table"
[ -n "$what" ] || cp "$tmp/table" docs/bench.txt
