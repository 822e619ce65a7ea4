#!/usr/bin/env bash
# A client in curl: the whole flow, request by request, with the answer that each must have.
#
#     examples/tour.sh http://localhost:8080     against the server of ./dev.sh run
#     ./dev.sh tour                              against a server of its own
#
# EMAIL is the user's address. OUTPUT is the file that a local server writes its output to:
# the tour reads the sign-in code there, and asks for it without.
set -euo pipefail
[ $# = 1 ] || { echo 'usage: examples/tour.sh URL' >&2; exit 2; }
url=${1%/} email=${EMAIL:-member@hubs.example} output=${OUTPUT:-}
json='Content-Type: application/json'
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM HUP
umask 077
cd "$tmp"
die() { printf 'The tour stops here: %s\n' "$*" >&2; exit 1; }

width=${COLUMNS:-$(tput cols 2>/dev/null || echo 80)}

# Folds long lines of an answer or of the log, after a space or a comma.
fold_lines() {
	awk -v width="$width" '{
		while (length($0) > width) {
			cut = match(substr($0, 1, width), /[ ,][^ ,]*$/)
			if (!cut) cut = width
			print substr($0, 1, cut)
			$0 = substr($0, cut + 1)
		}
		print
	}'
}

# quote WORD... prints a command that a shell understands: words in quotes where they need them, and
# a backslash at the end of each line but the last. An option and its value stay on one line.
quote() {
	local word part='' text='' length=2
	for word in "$@"; do
		case $word in *[!A-Za-z0-9_./:=@-]*) word="'${word//\'/\'\\\'\'}'" ;; esac
		part=${part:+$part }$word
		case $word in -?) continue ;; esac
		if [ "$text" ] && [ $((length + ${#part} + 3)) -gt "$width" ]; then
			text+=$' \\\n   ' length=3
		fi
		text=${text:+$text }$part
		length=$((length + ${#part} + 1))
		part=''
	done
	printf '%s' "$text${part:+ $part}"
}

# show COMMAND [OPTIONS] prints a command and runs it, with further options that only the tour needs.
show() {
	printf '\n$ %s\n' "$1"
	eval "$1 ${2:-}"
}

jar=cookies # the file with the cookies of step

# step TITLE STATUS CURL-ARGUMENT... shows one request and its answer, and ends the tour if the
# status is another one. Leaves the body in the file body.
step() {
	local title=$1 want=$2 status
	shift 2
	printf '\n--- %s' "$title"
	: >body
	show "$(quote curl -b "$jar" -c "$jar" "$@")" \
		'-sS --max-time 10 -D headers -o body -w "%{http_code}" >status' || die "curl failed"
	status=$(cat status)
	{
		tr -d '\r' <headers |
			grep -iE '^(HTTP/|Content-Type|Content-Disposition|Location|Retry-After|Set-Cookie|X-Request-Id)'
		if [ -s body ]; then printf '\n%s\n' "$(cat body)"; fi
	} | fold_lines
	case $status:${!#} in
	"$want":*) ;;
	429:*/auth/otp/*)
		die "$email has tried too often. Go on with another address (EMAIL=admin@hubs.example)," \
			"or restart the server: a new one has counted nothing" ;;
	*) die "the answer is $status, it should be $want" ;;
	esac
}
member_of() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" body; } # of the last answer's JSON
expect() { grep -q "$1" body || die "no $1 in the answer"; }

# wait_for PATTERN prints what sed finds by it in the server's output, within 10 seconds.
wait_for() {
	local found='' i
	for ((i = 0; i < 100; i++)); do
		found=$(sed -n "$1" "$output")
		if [ -n "$found" ]; then printf '%s\n' "$found"; return; fi
		sleep 0.1
	done
	cat "$output" >&2
	die "the server's output lacks: $1"
}

# Sets code: from the server's output, or from the person at the terminal.
read_code() {
	if [ -n "$output" ]; then
		code=$(wait_for 's/^Sign-in code for .*: \([0-9]*\)$/\1/p')
		printf '\n--- The server has no mail server here and prints the code:\n'
		grep '^Sign-in code' "$output"
	else
		printf '\n--- Type the code that was sent to %s (locally, the server prints it): ' "$email"
		read -r code || die "no code was typed"
		code=$(printf '%s' "$code" | tr -cd 0-9)
		[ "${#code}" = "$digits" ] ||
			die "a code has $digits digits; it is printed in the terminal of ./dev.sh run"
	fi
}

step 'Ask for a sign-in code. The answer is the same for every address.' 200 \
	-H "$json" -d "{\"email\":\"$email\"}" "$url/auth/otp/request"
digits=$(sed -n 's/.*"codeLength":\([0-9]*\).*/\1/p' body)
read_code
wrong=${code%?}$(((${code: -1} + 1) % 10))
step 'A wrong code. The server counts such attempts.' 401 \
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
	-G "$url/hubs" -d limit=3 -d 'filters[name]=har' -d 'filters[status]=active' \
	-d orderBy=createdAt -d orderDirection=desc
if [ -n "$output" ]; then expect Harbour; fi
show "echo 'Notes from the tour.' >notes.txt"
step 'Upload a file.' 201 -F file=@notes.txt "$url/files/upload"
step 'Fetch it again.' 200 "$url$(member_of path)"
cmp notes.txt body || die "the file came back different"
if [ "$role" = member ]; then
	step 'A member may not make hubs.' 403 -H "$json" -d '{"name":"Mine"}' "$url/hubs"
	expect '"forbidden"'
fi
stranger="stranger-$RANDOM@hubs.example"
passed=0
while [ "$(curl -sS --max-time 10 -o body -w '%{http_code}' \
	-H "$json" -d "{\"email\":\"$stranger\"}" "$url/auth/otp/request")" = 200 ]; do
	passed=$((passed + 1))
done
step "For an address that nobody has, $passed requests have passed. More are too many." 429 \
	-H "$json" -d "{\"email\":\"$stranger\"}" "$url/auth/otp/request"
expect rate_limited
id=$(member_of requestId)
printf '\n--- The request id is in the answer twice, and in the log:\n'
if [ -n "$output" ]; then
	wait_for "/\"refused\".*$id/p" | fold_lines
else
	printf 'look for %s in the output of the server\n' "$id"
fi
show 'cp cookies copy'
step 'Sign out. The answer empties the cookie.' 204 -X POST "$url/auth/logout"
step 'Without the cookie there is no session.' 401 "$url/auth/session"
expect '"unauthenticated"'
jar=copy
step 'But a copy of the token is still good, until it expires or "user signout" ends it.' 200 \
	"$url/auth/session"
printf '\nThe tour is complete: every answer was the expected one.\n'
