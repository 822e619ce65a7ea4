#!/usr/bin/env bash
# ./dev.sh release notes VERSION: a section of CHANGELOG.md, made of the files of changes/, which are
# then removed.
#
# ./dev.sh release [VERSION] [OS/ARCH...]: binaries of the commit HEAD, with licences, SBOMs and
# checksums, into .dev/release. It builds in a clone of its own, so nothing that is not committed gets
# in, and each binary says which commit it is. With VERSION, such as v1.1.0, it is a release: the
# binaries say so, and once they are built, the commit gets the tag.
#
# RELEASE_KEY is the path of an SSH key that signs the checksums and the tag. Whoever checks them
# trusts the keys in deploy/allowed_signers. Once that file has a key, a release must be signed.
#
# ./dev.sh verify VERSION [DIR]: builds a release again, and says of each file in DIR, else of
# .dev/release, whether it is the same.
#
# The same commit gives the same bytes, on any system and in any folder: it is built by the version
# of Go that go.mod names.
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

# Settings of this machine that would change the bytes.
export GOFLAGS='' GOEXPERIMENT='' GOWORK=off GOFIPS140=off GOAMD64=v1 GOARM64=v8.0 CGO_ENABLED=0

# build BINARY builds the server, with the options that README.md names. With REBUILD, nothing that
# was compiled before is used, not even of Go's library.
build() { go build ${REBUILD:+-a} -trimpath -buildvcs=true -ldflags='-s -w' -o "$1" .; }

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
# The tool does not know its own version unless it is installed by name, so that is put in. Its own
# checksum differs by system, so that goes. It calls Go's library std, while the advisories of Go,
# and so the scanners, call it stdlib (golang/go#71567).
sbom() {
	local committed serial uuid8='s/^(.{8})(.{4}).(.{3}).(.{3})(.{12}).*/\1-\2-8\3-8\4-\5/'
	serial=$(sha256 "$1" | sed -E "$uuid8")
	"$tmp/cyclonedx-gomod" app -json -std -licenses -assert-licenses -serial "$serial" \
		-output "$tmp/sbom" -main . . >"$tmp/sbom.log" 2>&1 ||
		{ cat "$tmp/sbom.log" >&2; die "no SBOM for $1"; }
	committed=$(TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ)
	awk '/"hashes": \[/ && !gone {skip = 1} !skip; skip && /\]/ {skip = 0; gone = 1}' "$tmp/sbom" |
		sed -e "s/\"timestamp\": \"[^\"]*\"/\"timestamp\": \"$committed\"/" \
			-e "s/\"v0.0.0-unknown\"/\"$sbom_version\"/" \
			-e 's/"name": "std"/"name": "stdlib"/' -e 's/"version": "go\([0-9]\)/"version": "\1/' \
			-e 's#pkg:golang/std@go#pkg:golang/stdlib@#g' >"$1.cdx.json"
	grep -q "\"pkg:golang/stdlib@${GOTOOLCHAIN#go}?" "$1.cdx.json" || die "$1.cdx.json does not name Go's library"
}

# clone puts a copy of the repository into $tmp/source, goes there, and takes the version of Go that
# its go.mod names.
clone() { # COMMIT
	git clone --quiet --no-hardlinks "$project" "$tmp/source" ||
		die "it is made of a commit, and this is no git repository"
	cd "$tmp/source"
	git checkout --quiet --detach "$1" || die "there is no commit or tag $1"
	GOTOOLCHAIN=$(sed -n 's/^toolchain //p' go.mod)
	export GOTOOLCHAIN
	go version >/dev/null || die "$GOTOOLCHAIN, which go.mod names, is neither here nor could it be fetched"
}

# has_signers reports whether releases are signed: deploy/allowed_signers of the commit has a key.
has_signers() { grep -q '^[^#]' deploy/allowed_signers 2>/dev/null; }

# signed DIR checks the signature of the checksums in a folder.
signed() {
	ssh-keygen -Y verify -f deploy/allowed_signers -I releases -n hubs \
		-s "$1/SHA256SUMS.sig" <"$1/SHA256SUMS" >&2
}

# sign DIR signs the checksums in a folder.
sign() {
	ssh-keygen -q -Y sign -f "$RELEASE_KEY" -n hubs "$1/SHA256SUMS"
	signed "$1" || die "RELEASE_KEY is not a key of deploy/allowed_signers"
}

# check_version stops before anything is built if HEAD can't become the release.
check_version() {
	local tagged
	[ -z "$(git status --porcelain)" ] || die 'there are changes that are not committed'
	grep -q "^## $1\$" CHANGELOG.md ||
		die "CHANGELOG.md has no section $1: run ./dev.sh release notes $1, and commit"
	[ "$(find changes -name '*.md' | wc -l)" -eq 1 ] || die "changes/ has files that CHANGELOG.md lacks"
	if tagged=$(git rev-parse --quiet --verify "$1^{commit}"); then
		[ "$tagged" = "$(git rev-parse HEAD)" ] || die "there is a tag $1 already, on another commit"
	elif [ -z "${RELEASE_KEY:-}" ] && has_signers; then
		die 'deploy/allowed_signers has a key, so a release must be signed: set RELEASE_KEY'
	fi
}

release() {
	local version='' target
	case ${1:-} in v[0-9]*.[0-9]*.[0-9]*) version=$1; shift; check_version "$version" ;; esac
	[ $# -gt 0 ] || set -- linux/amd64 linux/arm64 darwin/amd64 darwin/arm64
	[ -z "$(git status --porcelain)" ] || echo 'Not in the release: changes that are not committed' >&2
	clone HEAD
	[ -z "$version" ] || git tag --force "$version" >/dev/null
	if [ -n "${RELEASE_KEY:-}" ]; then # try the key before anything is built
		echo try >"$tmp/SHA256SUMS"
		sign "$tmp"
	fi
	./tools/licenses.sh -check
	make_sbom_tool
	rm -rf "$out"
	mkdir -p "$out"
	for target in "$@"; do
		export GOOS=${target%/*} GOARCH=${target#*/}
		build "$out/hubs-$GOOS-$GOARCH"
		go version -m "$out/hubs-$GOOS-$GOARCH" | grep -Fq "hubs	${version:-v}" ||
			die "the binary does not say that it is $version"
		sbom "$out/hubs-$GOOS-$GOARCH"
	done
	cp LICENSE web/licenses.txt "$out/"
	(cd "$out" && sha256 LICENSE licenses.txt hubs-* >"$tmp/sums" && mv "$tmp/sums" SHA256SUMS)
	[ -z "${RELEASE_KEY:-}" ] || sign "$out"
	if [ -n "$version" ]; then tag "$version"; fi
	printf '%s made .dev/release of commit %s:\n' "$GOTOOLCHAIN" \
		"$(git describe --always --tags --abbrev=40)" >&2
	[ -e "$out/SHA256SUMS.sig" ] || echo 'It is NOT SIGNED, because RELEASE_KEY is not set.' >&2
	cat "$out/SHA256SUMS"
}

# tag gives the commit its tag, now that it has been built. Signed, if there is a key.
tag() {
	cd "$project"
	if ! git rev-parse --quiet --verify "$1" >/dev/null; then
		if [ -n "${RELEASE_KEY:-}" ]; then
			git -c gpg.format=ssh -c user.signingKey="$RELEASE_KEY" tag -s -m "hubs $1" "$1"
		else
			git tag -a -m "hubs $1" "$1"
		fi
	fi
	echo "The tag $1 is made. To publish it: git push origin $1" >&2
	cd "$tmp/source"
}

# verify VERSION DIR builds the release again with its own script, and compares.
verify() {
	local dir=$2 file name verdict failed=0 targets
	[ -r "$dir/SHA256SUMS" ] || die "there is no SHA256SUMS in $dir"
	dir=$(cd "$dir" && pwd -P)
	clone "$1"
	if [ -e "$dir/SHA256SUMS.sig" ]; then
		signed "$dir" || die 'the signature of SHA256SUMS is not of a key in deploy/allowed_signers'
	elif has_signers; then
		die 'SHA256SUMS has no signature, although deploy/allowed_signers has a key'
	else
		echo 'SHA256SUMS is not signed: deploy/allowed_signers has no key.' >&2
	fi
	targets=$(sed -n 's/^.* hubs-\([a-z0-9]*\)-\([a-z0-9]*\)$/\1\/\2/p' "$dir/SHA256SUMS")
	# shellcheck disable=SC2086 # each word is a target
	RELEASE_KEY='' REBUILD=${REBUILD-yes} ./dev.sh release $targets >"$tmp/log" 2>&1 || { cat "$tmp/log" >&2; die "$1 does not build"; }
	for file in .dev/release/* "$dir"/*; do
		name=$(basename "$file") verdict=same
		if [ "$file" = "$dir/$name" ] && [ -e ".dev/release/$name" ]; then continue; fi # seen
		if [ "$name" = SHA256SUMS.sig ]; then continue; fi
		if [ ! -e ".dev/release/$name" ]; then
			verdict='NOT OF THIS RELEASE'
		elif [ ! -e "$dir/$name" ]; then
			verdict='not there'
		elif ! cmp -s ".dev/release/$name" "$dir/$name"; then
			verdict=DIFFERENT
		fi
		case $verdict in [A-Z]*) failed=1 ;; esac
		printf '%-19s  %s\n' "$verdict" "$name"
	done
	[ "$failed" = 0 ] || die "$dir is not what the commit of $1 gives"
	echo "All files of $dir are what the commit $(git rev-parse HEAD) gives." >&2
}

case ${1:-} in
verify)
	case $# in 2 | 3) verify "$2" "${3:-$out}" ;; *) die 'which version? ./dev.sh verify v1.1.0' ;; esac ;;
*) release "$@" ;;
esac
