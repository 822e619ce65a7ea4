package api

import (
	"io"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// hostilePlaces are where a client can put a long text, each with a header in its second line.
// {text} is the text, {file} the path of a file.
var hostilePlaces = []string{
	"GET /hubs/{text}\nAccept: */*",
	"GET /hubs?{text}\nAccept: */*",
	"GET /hubs?filters[{text}]=a\nAccept: */*",
	"GET /hubs?filters[name]={text}\nAccept: */*",
	"GET /hubs\nCookie: {text}",
	"GET /hubs\nX-Forwarded-For: {text}",
	"GET /hubs\nX-Request-Id: {text}",
	"GET /hubs\nOrigin: https://{text}",
	"POST /auth/logout\nSec-Fetch-Site: {text}",
	"POST /auth/otp/request\nContent-Type: application/json; {text}",
	"GET {file}\nRange: bytes={text}",
	"GET {file}\nIf-None-Match: {text}",
}

// hostileTexts are repeated until they are long enough. Each once met, or might meet, an
// expression that looks for secrets, or a parser of lists.
var hostileTexts = []string{
	"key\u0080", "\xff", "a@a.", "code=", "://a:a@", "eyJa.",
	"0-0,", `"a",`, "127.0.0.1,", "a=a;", "a=a&",
}

// H4: a text of fourteen times the length costs some fourteen times as much, not two hundred times.
func TestHostileTextsCostByTheirLength(t *testing.T) {
	srv, client := start(t, "member", staging(t))
	file := upload(t, client, "some text")
	conn := hubstest.Dial(t, srv.Addr)
	cost := func(place string, length int) time.Duration {
		before := hubstest.CPU(srv.Cmd.Process.Pid)
		for _, text := range hostileTexts {
			long := strings.Repeat(text, length/len(text))
			fill := strings.NewReplacer("{text}", long, "{file}", file)
			request, header, _ := strings.Cut(place, "\n")
			for range 3 {
				head := client.Head(fill.Replace(request), fill.Replace(header))
				io.WriteString(conn, head+"\r\n")
				_, closes, err := conn.Receive()
				if err != nil {
					t.Fatalf("%s: %v", place, err)
				}
				if closes {
					conn = hubstest.Dial(t, srv.Addr)
				}
			}
		}
		return hubstest.CPU(srv.Cmd.Process.Pid) - before
	}
	for _, place := range hostilePlaces {
		const most = 20
		const tick = 10 * time.Millisecond // the least that is measured
		short := cost(place, 1000)
		long := cost(place, 14_000)
		if long > most*max(short, tick) {
			t.Errorf("%s: 1,000 bytes take %v of CPU, 14,000 take %v", place, short, long)
		}
	}
	if hubstest.CPU(srv.Cmd.Process.Pid) == 0 {
		hubstest.Skip(t, "this test reads /proc: run it on Linux")
	}
}
