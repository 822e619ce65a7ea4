package api

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// hostilePlaces are where a client can put a long text. {text} is the text, {file} the path of a
// file.
var hostilePlaces = []struct{ request, header string }{
	{request: "GET /hubs/{text}", header: "Accept: */*"},
	{request: "GET /hubs?{text}", header: "Accept: */*"},
	{request: "GET /hubs?filters[{text}]=a", header: "Accept: */*"},
	{request: "GET /hubs?filters[name]={text}", header: "Accept: */*"},
	{request: "GET /hubs", header: "Cookie: {text}"},
	{request: "GET /hubs", header: "X-Forwarded-For: {text}"},
	{request: "GET /hubs", header: "X-Request-Id: {text}"},
	{request: "GET /hubs", header: "Origin: https://{text}"},
	{request: "POST /auth/logout", header: "Sec-Fetch-Site: {text}"},
	{request: "POST /auth/otp/request", header: "Content-Type: application/json; {text}"},
	{request: "GET {file}", header: "Range: bytes={text}"},
	{request: "GET {file}", header: "If-None-Match: {text}"},
}

// hostileTexts are repeated until they are long enough. Each once met, or might meet, an
// expression that looks for secrets, or a parser of lists.
var hostileTexts = []string{
	"key\u0080", "\xff", "a@a.", "code=", "://a:a@", "eyJa.", "0-0,", `"a",`, "127.0.0.1,", "a=a;", "a=a&",
}

// H4: a text of fifteen times the length costs some fifteen times as much, not two hundred times.
func TestHostileTextsCostByTheirLength(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("this test reads /proc")
	}
	srv := hubstest.Start(t, hubstest.StagingEnv(hubstest.NewMailServer(t, hubstest.MailOptions{})))
	client, _ := srv.Member(t, "member")
	file := client.Upload("a.txt", []byte("some text")).Want(t, 201).Field(t, "path").(string)
	conn := hubstest.Dial(t, srv.Addr)
	cost := func(request, header string, length int) int {
		before := cpuTicks(t, srv.Cmd.Process.Pid)
		for _, text := range hostileTexts {
			fill := strings.NewReplacer("{text}", strings.Repeat(text, length/len(text)), "{file}", file)
			for range 3 {
				io.WriteString(conn, client.Head(fill.Replace(request), fill.Replace(header))+"\r\n")
				_, closes, err := conn.Receive()
				if err != nil {
					t.Fatalf("%s %s: %v", request, header, err)
				}
				if closes {
					conn = hubstest.Dial(t, srv.Addr)
				}
			}
		}
		return cpuTicks(t, srv.Cmd.Process.Pid) - before
	}
	for _, place := range hostilePlaces {
		const most = 20
		short := cost(place.request, place.header, 1000)
		long := cost(place.request, place.header, 14_000)
		if long > most*max(short, 1) {
			t.Errorf("%s %s: 1,000 bytes take %d ticks of CPU, 14,000 take %d",
				place.request, place.header, short, long)
		}
	}
}

// cpuTicks is the CPU time of a process, in hundredths of a second.
func cpuTicks(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	user, userErr := strconv.Atoi(fields[11])
	system, systemErr := strconv.Atoi(fields[12])
	if userErr != nil || systemErr != nil {
		t.Fatalf("/proc/%d/stat: %s", pid, text)
	}
	return user + system
}
