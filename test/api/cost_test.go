package api

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A hostilePlace is where a client can put a long text.
type hostilePlace struct {
	request  string // {text} is the text, {file} the path of a file
	header   string
	statuses []int // what the texts may mean there
}

var hostilePlaces = []hostilePlace{
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

// hostileTexts are repeated until they are long enough. Each once met, or might meet, an
// expression that looks for secrets, or a parser of lists.
var hostileTexts = []string{
	"key\u0080", "\xff", "a@a.", "code=", "://a:a@", "eyJa.",
	"0-0,", `"a",`, "127.0.0.1,", "a=a;", "a=a&",
}

// H4: a text of fourteen times the length costs at most fourteen times as much, not two hundred
// times.
func TestHostileTextsCostByTheirLength(t *testing.T) {
	if runtime.GOOS != "linux" {
		hubstest.Skip(t, "this test reads /proc: run it on Linux")
	}
	srv, client := start(t, "member", staging(t))
	file := upload(t, client, "some text")
	conn := hubstest.Dial(t, srv.Addr)
	cost := func(place hostilePlace, length int) time.Duration {
		before := cpuTime(t, srv.Cmd.Process.Pid)
		for _, text := range hostileTexts {
			long := strings.Repeat(text, length/len(text))
			fill := strings.NewReplacer("{text}", long, "{file}", file)
			for range 3 {
				head := client.Head(fill.Replace(place.request), fill.Replace(place.header))
				io.WriteString(conn, head+"\r\n")
				status, closes, err := conn.Receive()
				if err != nil || !slices.Contains(place.statuses, status) {
					t.Fatalf("%v, %d bytes of %q: got %d, %v", place, length, text, status, err)
				}
				if closes {
					conn = hubstest.Dial(t, srv.Addr)
				}
			}
		}
		return cpuTime(t, srv.Cmd.Process.Pid) - before
	}
	for _, place := range hostilePlaces {
		const times = 14
		short := cost(place, 1000)
		long := cost(place, times*1000)
		if long > times*short {
			t.Errorf("%v: 1,000 bytes take %v of CPU, %d times as many take %v",
				place, short, times, long)
		}
	}
}

// cpuTime adds up how long the threads of a process have run.
func cpuTime(t *testing.T, pid int) (sum time.Duration) {
	t.Helper()
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid)) // it is well formed
	for _, thread := range threads {
		var ran time.Duration
		text, err := os.ReadFile(thread)
		if err == nil {
			_, err = fmt.Sscan(string(text), &ran)
		}
		if err != nil {
			t.Fatal(err)
		}
		sum += ran
	}
	return sum
}
