#!/usr/bin/env bash
# ./tools/licenses.sh writes web/licenses.txt: the licences of all that a binary contains, as their
# owners ask. It takes the texts from this repository, from the modules that the binary is made of,
# and from Go itself. With -check, it only compares, and fails if the file is not up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
die() { printf 'licenses: %s\n' "$*" >&2; exit 1; }

# notices NAME DIR prints the licence files of a folder. A folder without one is an error.
notices() {
	local file found=''
	for file in "$2"/*; do
		# macOS does not tell LICENSE from license, so the shell compares.
		case $(basename "$file" | tr '[:lower:]' '[:upper:]') in
		*.GO) continue ;;
		LICENSE* | LICENCE* | COPYING* | NOTICE*) ;;
		*) continue ;;
		esac
		found=yes
		printf '\n==== %s, %s ====\n\n' "$1" "$(basename "$file")"
		cat "$file"
	done
	[ -n "$found" ] || die "$1 has no licence file in $2"
}

# All targets of a release are made of the same modules. If they were not, this would list them all.
for GOOS in linux darwin; do
	GOOS=$GOOS go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}' .
done | sort -u >"$tmp/modules"
{
	echo 'The program hubs contains the works of the following owners.'
	notices hubs .
	while read -r module dir; do notices "$module" "$dir"; done <"$tmp/modules"
	notices 'Go, its library and runtime' "$(go env GOROOT)"
} >"$tmp/licenses.txt"
if [ "${1:-}" = -check ]; then
	diff web/licenses.txt "$tmp/licenses.txt" >&2 ||
		die 'web/licenses.txt is not what the modules say: run ./tools/licenses.sh'
else
	cp "$tmp/licenses.txt" web/licenses.txt
fi
