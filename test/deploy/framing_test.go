package deploy

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// smuggled is a request that a client hides in another one. If the proxy and the server
// disagreed about where that one ends, the server would take it for a request that the proxy
// sent: it would believe the address, and no rule of the proxy would have seen it.
const smuggled = "GET /smuggled HTTP/1.1\r\n" +
	"Host: api.example.com\r\n" +
	"X-Forwarded-For: 198.51.100.66\r\n\r\n"

// chunkless ends before the smuggled request by its chunks, and after it by its length.
const chunkless = "0\r\n\r\n" + smuggled

const bothProxies = "haproxy and nginx"

// framings are what follows Host and "Connection: close" in a request.
var framings = map[string]struct {
	headers   string // <length> is that of the body
	body      string // chunkless, unless it is another
	refusedBy string // the others pass the request on, once
}{
	"hop by hop": {
		headers: "Connection: X-Forwarded-For\r\nContent-Length: <length>\r\n",
	},
	"forged address": {
		headers: "X-Forwarded-For: 198.51.100.1, 127.0.0.1\r\nContent-Length: <length>\r\n",
	},
	"upgrade": {
		headers: "Connection: Upgrade\r\nUpgrade: tunnel\r\nContent-Length: 0\r\n",
		body:    smuggled,
	},
	"two lengths": {
		headers:   "Content-Length: 0\r\nContent-Length: <length>\r\n",
		body:      smuggled,
		refusedBy: bothProxies,
	},
	"a list of lengths": {
		headers:   "Content-Length: 0, <length>\r\n",
		body:      smuggled,
		refusedBy: bothProxies,
	},
	"a signed length": {
		headers:   "Content-Length: +<length>\r\n",
		body:      smuggled,
		refusedBy: bothProxies,
	},
	// HAProxy goes by the chunks, and passes on no length.
	"chunked, length short": {
		headers:   "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
		body:      fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(smuggled), smuggled),
		refusedBy: "nginx",
	},
	"length, chunked": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding: chunked\r\n",
		refusedBy: "nginx",
	},
	"chunked, length": {
		headers:   "Transfer-Encoding: chunked\r\nContent-Length: <length>\r\n",
		refusedBy: "nginx",
	},
	"tab before chunked": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding:\tchunked\r\n",
		refusedBy: "nginx",
	},
	"folded": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding:\r\n chunked\r\n",
		refusedBy: "nginx",
	},
	"line feed alone": {
		headers:   "Content-Length: <length>\r\nX: y\nTransfer-Encoding: chunked\r\n",
		refusedBy: "nginx",
	},
	// The proxy and the server do not both know these codings.
	"no such coding": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding: xchunked\r\n",
		refusedBy: bothProxies,
	},
	"chunked, then another": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding: chunked, identity\r\n",
		refusedBy: bothProxies,
	},
	"chunked twice": {
		headers: "Content-Length: <length>\r\n" +
			"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
		refusedBy: bothProxies,
	},
	"space before colon": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding : chunked\r\n",
		refusedBy: bothProxies,
	},
}

// No client smuggles a request past a proxy. A request whose length is unclear is refused, or
// reaches the server with one length. Both programs do so by default: no line of their
// configurations asks for it, so no removal lets one of the lengths through. An upgrade would
// open a tunnel to the server: HAProxy is told to drop it, and nginx is not told to pass it on.
func TestProxyFraming(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		backend := newRecorder(t, emptyAnswer)
		p := startProxy(t, engine, backend.addr)
		var want []string // what reaches the server
		for name, c := range framings {
			address := newAddress()
			line := "POST /" + strings.ReplaceAll(name, " ", "-")
			const start = " HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n"
			body := cmp.Or(c.body, chunkless)
			headers := strings.ReplaceAll(c.headers, "<length>", fmt.Sprint(len(body)))
			answer := p.raw(t, address, line+start+headers+"\r\n"+body)
			status := "200"
			if strings.Contains(c.refusedBy, engine) {
				status = "400|501"
			} else {
				want = append(want, line)
			}
			if !regexp.MustCompile(`^HTTP/1.1 (` + status + `) `).MatchString(answer) {
				t.Errorf("%s: want %s, got %.100q", name, status, answer)
			}
			for _, head := range backend.seen(line + " ") {
				wantFramedOnce(t, strings.ToLower(head), address)
			}
		}
		hubstest.WaitUntil(t, "the end of all connections to the server", func() bool {
			return backend.open.Load() == 0
		})
		var got []string
		for _, head := range backend.seen("") {
			line, _, _ := strings.Cut(head, " HTTP/")
			got = append(got, line)
		}
		if !slices.Equal(got, want) {
			t.Errorf("the server has seen\n%q, want\n%q", got, want)
		}
	})
}

// wantFramedOnce checks what a proxy says of the client's address, the host and the length.
func wantFramedOnce(t *testing.T, head, address string) {
	t.Helper()
	for header, value := range map[string]string{
		"x-forwarded-for": address,
		"host":            "api.example.com",
	} {
		isOnce := strings.Count(head, "\n"+header+":") == 1
		if !isOnce || !strings.Contains(head, header+": "+value+"\r\n") {
			t.Errorf("want %s once, %s: %q", header, value, head)
		}
	}
	lengths := regexp.MustCompile(`\n(content-length|transfer-encoding):`).FindAllString(head, -1)
	if len(lengths) > 1 {
		t.Errorf("framed twice: %q", head)
	}
}
