#!/usr/bin/env bash
# ./tools/licenses.sh writes web/licenses.txt: the licences of all that a binary contains, as their
# owners ask. It takes the texts from this repository, from the modules that the binary is made of,
# from Go itself, and from the heads of their files. With -check, it only compares, and fails if the file is not up to date.
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

# Prints the comments of files that give a licence of their own, from "Copyright" to the end or to a
# line of "=", each once, with the first file that has it. The files' names come on standard input.
own_licences() {
	# shellcheck disable=SC2016 # awk's variables
	xargs awk -v root="$(go env GOROOT)/src/" -v cache="$(go env GOMODCACHE)/" '
		function end_of_comment() {
			isLicence = comment ~ /Permission to|Permission is|Redistribution and use/
			start = index(comment, "Copyright")
			comment = substr(comment, start ? start : 1)
			if (index(comment, "\n===")) { comment = substr(comment, 1, index(comment, "\n===")) }
			if (isLicence && !seen[comment]++) {
				name = FILENAME
				sub(root, "", name)
				sub(cache, "", name)
				printf "\n==== %s ====\n\n%s", name, comment
			}
			comment = ""
		}
		FNR == 1 { end_of_comment() }
		/^\/\// { sub(/^\/\/[ \t]*/, ""); comment = comment $0 "\n"; next }
		{ end_of_comment() }'
}

# The targets of a release are made of the same modules, but not of the same files.
for target in linux/amd64 linux/arm64 darwin/amd64 darwin/arm64; do
	# shellcheck disable=SC2016 # the template's variable
	CGO_ENABLED=0 GOOS=${target%/*} GOARCH=${target#*/} go list -deps -f '
		{{with .Module}}{{if not .Main}}module {{.Path}} {{.Dir}}{{end}}{{end}}
		{{$dir := .Dir}}{{range .GoFiles}}file {{$dir}}/{{.}}
		{{end}}{{range .SFiles}}file {{$dir}}/{{.}}
		{{end}}' .
done | sed 's/^[[:space:]]*//' | LC_ALL=C sort -u >"$tmp/contents"
sed -n 's/^module //p' "$tmp/contents" >"$tmp/modules"
{
	echo 'The program hubs contains the works of the following owners.'
	notices hubs .
	while read -r module dir; do notices "$module" "$dir"; done <"$tmp/modules"
	notices 'Go, its library and runtime' "$(go env GOROOT)"
	sed -n 's/^file //p' "$tmp/contents" | own_licences
} >"$tmp/licenses.txt"
if [ "${1:-}" = -check ]; then
	diff web/licenses.txt "$tmp/licenses.txt" >&2 ||
		die 'web/licenses.txt is not what the modules say: run ./tools/licenses.sh'
else
	cp "$tmp/licenses.txt" web/licenses.txt
fi
