#!/usr/bin/env bash
# ./dev.sh release notes VERSION: a section of CHANGELOG.md, made of the files of changes/, which are
# then removed.
#
# ./dev.sh release [OS/ARCH...]: binaries of the commit HEAD, their SBOMs and checksums, into
# .dev/release. It builds in a clone of its own: nothing that is not committed gets in, and each
# binary says which commit it is, and which version if the commit has a tag such as v1.0.0.
#
# The same commit built by the same version of Go gives the same bytes, in any folder. That
# holds for the binaries on every system; an SBOM also names the checksum of the tool that made
# it, which differs by system.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
project=$PWD out=$PWD/.dev/release
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
die() { printf 'release: %s\n' "$*" >&2; exit 1; }

# Puts the section above that of the last release.
notes() {
	local files
	files=$(find changes -name '*.md' ! -name README.md | sort)
	[ -n "$files" ] || die "changes/ has no file but README.md"
	{
		sed '/^## /,$d' CHANGELOG.md
		printf '## %s\n\n' "$1"
		# shellcheck disable=SC2086 # each word is a file
		cat $files
		echo
		sed -n '/^## /,$p' CHANGELOG.md
	} >"$tmp/notes"
	cp "$tmp/notes" CHANGELOG.md
	# shellcheck disable=SC2086 # each word is a file
	rm $files
}
if [ "${1:-}" = notes ]; then
	[ $# = 2 ] || die "which version? ./dev.sh release notes v1.1.0"
	notes "$2"
	exit
fi
sha256() { if command -v sha256sum >/dev/null; then sha256sum "$@"; else shasum -a 256 "$@"; fi; }

# Builds the tool that lists what is in a binary. Its checksum stands here, and those of what it
# requires in its own go.sum, so it needs no line in our go.mod and no checksum database.
sbom_version=v1.9.0
make_sbom_tool() {
	local module=github.com/CycloneDX/cyclonedx-gomod download dir
	local sum=h1:DuoKgGcY7gYKga9hjt4+xNjEg2O4ShPQYkVDPfGWAek=
	download=$(GONOSUMDB=$module go mod download -json "$module@$sbom_version") ||
		die "the SBOM tool could not be fetched: $module@$sbom_version"
	case $download in
	*"\"Sum\": \"$sum\""*) ;;
	*) die "the SBOM tool has another checksum than $sum" ;;
	esac
	dir=$(printf '%s\n' "$download" | sed -n 's/^.*"Dir": "\(.*\)".*$/\1/p')
	(cd "$dir" && go build -trimpath -buildvcs=false -mod=readonly -o "$tmp/cyclonedx-gomod" \
		./cmd/cyclonedx-gomod) || die "the SBOM tool could not be fetched or built: $module"
}

# sbom BINARY writes BINARY.cdx.json: what is in the folder's program for GOOS and GOARCH. It is
# the same in every run: its serial number comes from the binary and its time from the commit.
# The tool does not know its own version unless it is installed by name, so that is put in too.
sbom() {
	local committed serial uuid8='s/^(.{8})(.{4}).(.{3}).(.{3})(.{12}).*/\1-\2-8\3-8\4-\5/'
	serial=$(sha256 "$1" | sed -E "$uuid8")
	"$tmp/cyclonedx-gomod" app -json -std -licenses -assert-licenses -serial "$serial" \
		-output "$tmp/sbom" -main . . >"$tmp/sbom.log" 2>&1 ||
		{ cat "$tmp/sbom.log" >&2; die "no SBOM for $1"; }
	committed=$(TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ)
	sed -e "s/\"timestamp\": \"[^\"]*\"/\"timestamp\": \"$committed\"/" \
		-e "s/\"v0.0.0-unknown\"/\"$sbom_version\"/" "$tmp/sbom" >"$1.cdx.json"
}

[ $# -gt 0 ] || set -- linux/amd64 linux/arm64 darwin/amd64 darwin/arm64
git clone --quiet --no-hardlinks "$project" "$tmp/source" ||
	die "it is made of a commit, and this is no git repository"
[ -z "$(git status --porcelain)" ] || echo 'Not in the release: changes that are not committed' >&2
# Settings of this machine that would change the bytes.
export GOFLAGS='' GOEXPERIMENT='' GOWORK=off GOAMD64=v1 GOARM64=v8.0 CGO_ENABLED=0
make_sbom_tool
rm -rf "$out"
mkdir -p "$out"
cd "$tmp/source"
for target in "$@"; do
	export GOOS=${target%/*} GOARCH=${target#*/}
	go build -trimpath -buildvcs=true -ldflags='-s -w' -o "$out/hubs-$GOOS-$GOARCH" .
	sbom "$out/hubs-$GOOS-$GOARCH"
done
cp LICENSE "$out/"
cd "$out"
sha256 LICENSE hubs-* >"$tmp/sums"
mv "$tmp/sums" SHA256SUMS
printf '%s made .dev/release of commit %s:\n' "$(go env GOVERSION)" \
	"$(git -C "$tmp/source" describe --always --tags --abbrev=40)" >&2
cat SHA256SUMS
