package api

import (
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A hostilePlace is where a client can put a long text.
type hostilePlace struct {
	request  string // {text} stands for the text, {file} for the path of a file
	header   string // the same
	statuses []int  // that the answer may have
}

var hostilePlaces = []hostilePlace{
	// request, header, statuses
	{"GET /hubs/{text}", "Accept: */*", []int{404}},
	{"GET /hubs?{text}", "Accept: */*", []int{400}},
	{"GET /hubs?filters[{text}]=a", "Accept: */*", []int{400}},
	{"GET /hubs?filters[name]={text}", "Accept: */*", []int{400}},
	{"GET /hubs", "Cookie: {text}", []int{200, 401}},
	{"GET /hubs", "X-Forwarded-For: {text}", []int{200}},
	{"GET /hubs", "X-Request-Id: {text}", []int{200}},
	{"GET /hubs", "Origin: https://{text}", []int{200}},
	{"POST /auth/logout", "Sec-Fetch-Site: {text}", []int{403}},
	{"POST /auth/otp/request", "Content-Type: application/json; {text}", []int{415}},
	{"GET {file}", "Range: bytes={text}", []int{200, 416}},
	{"GET {file}", "If-None-Match: {text}", []int{200}},
}

// hostileTexts are short texts that the test repeats. Each could be costly for a regular expression
// that looks for secrets, of this or an earlier version, or for a parser of lists.
var hostileTexts = []string{
	"key\u0080", "\xff", "a@a.", "code=", "://a:a@", "eyJa.",
	"0-0,", `"a",`, "127.0.0.1,", "a=a;", "a=a&",
}

// H4: The CPU time of a request grows no faster than the length of a text in it: 14 times the
// length costs at most 14 times as much. The time of a request without a text counts as well, so a
// cost that grows with the square shows only if 1,000 bytes cost about as much as that.
func TestHostileTextsCostByTheirLength(t *testing.T) {
	if runtime.GOOS != "linux" {
		hubstest.Skip(t, "this test reads /proc: run it on Linux")
	}
	srv, client := start(t, "member", staging(t))
	file := upload(t, client, "some text")
	conn := hubstest.Dial(t, srv.Addr)
	// cost puts each text, repeated up to length bytes, into a place. It returns the CPU time of
	// three requests with each.
	cost := func(place hostilePlace, length int) time.Duration {
		before := hubstest.CPU(srv.Cmd.Process.Pid)
		for _, text := range hostileTexts {
			long := strings.Repeat(text, length/len(text))
			fill := strings.NewReplacer("{text}", long, "{file}", file)
			for range 3 {
				head := client.Head(fill.Replace(place.request), fill.Replace(place.header))
				io.WriteString(conn, head+"\r\n")
				status, closes, err := conn.Receive()
				if err != nil || !slices.Contains(place.statuses, status) {
					t.Fatalf("%v, %d bytes of %q: got status %d, error %v, want one of %v",
						place, length, text, status, err, place.statuses)
				}
				if closes {
					conn = hubstest.Dial(t, srv.Addr)
				}
			}
		}
		return hubstest.CPU(srv.Cmd.Process.Pid) - before
	}
	for _, place := range hostilePlaces {
		const factor = 14
		short := cost(place, 1000)
		long := cost(place, factor*1000)
		if short == 0 || long > factor*short {
			t.Errorf("%v: got %v of CPU time for %d bytes, want at most %d times the %v for 1000",
				place, long, factor*1000, factor, short)
		}
	}
}
