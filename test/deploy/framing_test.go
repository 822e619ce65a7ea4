package deploy

import (
	"cmp"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// smuggled is a request that a client hides in the body of another request. If the proxy and the
// server disagreed about where the outer request ends, the server would take the hidden request for
// one that the proxy sent. It would believe the address in it, and no rule of the proxy would have
// been applied to it.
const smuggled = "GET /smuggled HTTP/1.1\r\n" +
	"Host: api.example.com\r\n" +
	"X-Forwarded-For: 198.51.100.66\r\n\r\n"

// ambiguousBody ends before the smuggled request if it is read as chunks, and after it if it is
// read by its length.
const ambiguousBody = "0\r\n\r\n" + smuggled

// nginxOnly and bothProxies are proxies that refuse a request.
var nginxOnly = []string{"nginx"}

// framings holds what follows Host and "Connection: close" in a request.
var framings = map[string]struct {
	headers   string   // <length> stands for the length of the body
	body      string   // if empty: ambiguousBody
	refusedBy []string // the proxies that refuse the request; the others pass it on, once
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
	// In the cases that only nginx refuses, HAProxy reads the body as chunks and drops
	// Content-Length.
	"chunked, length short": {
		headers:   "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
		body:      fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(smuggled), smuggled),
		refusedBy: nginxOnly,
	},
	"length, chunked": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding: chunked\r\n",
		refusedBy: nginxOnly,
	},
	"chunked, length": {
		headers:   "Transfer-Encoding: chunked\r\nContent-Length: <length>\r\n",
		refusedBy: nginxOnly,
	},
	"tab before chunked": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding:\tchunked\r\n",
		refusedBy: nginxOnly,
	},
	"folded": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding:\r\n chunked\r\n",
		refusedBy: nginxOnly,
	},
	"line feed alone": {
		headers:   "Content-Length: <length>\r\nX: y\nTransfer-Encoding: chunked\r\n",
		refusedBy: nginxOnly,
	},
	// The proxy might not know these codings, or the server might not, so both proxies refuse them.
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

// No client can smuggle a request past a proxy. The proxy refuses a request whose length is
// unclear, or passes it on with one length. Both proxies do so by default. No line of their
// configurations asks for it, so no removal can make them pass two lengths on. An upgrade would
// open a tunnel to the server: haproxy.cfg removes the header Upgrade, and nginx does not pass it
// on unless told to.
func TestProxyFraming(t *testing.T) {
	forEachProxy(t, func(t *testing.T, engine string) {
		backend := newRecorder(t, func(r *http.Request) string {
			if r.Header.Get("Upgrade") != "" { // it agrees to every upgrade
				return "HTTP/1.1 101 Switching Protocols\r\n" +
					"Connection: Upgrade\r\nUpgrade: tunnel\r\n\r\n"
			}
			return emptyAnswer
		})
		p := startProxy(t, engine, backend.addr)
		var want []string // the beginning of each request that must reach the server
		for name, c := range framings {
			address := newAddress()
			line := "POST /" + strings.ReplaceAll(name, " ", "-")
			const start = " HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n"
			body := cmp.Or(c.body, ambiguousBody)
			headers := strings.ReplaceAll(c.headers, "<length>", fmt.Sprint(len(body)))
			answer := p.raw(t, address, line+start+headers+"\r\n"+body)
			status := "200"
			if slices.Contains(c.refusedBy, engine) {
				status = "400|501" // 501: nginx, for a coding that it does not know
			} else {
				want = append(want, line)
			}
			if !regexp.MustCompile(`^HTTP/1.1 (` + status + `) `).MatchString(answer) {
				t.Errorf("%s: got %.100q, want status %s", name, answer, status)
			}
			for _, head := range backend.seen(line + " ") {
				wantFramedOnce(t, strings.ToLower(head), address)
			}
		}
		hubstest.WaitFor(t, "connections to the server", 0, backend.open.Load)
		var got []string
		for _, head := range backend.seen("") {
			line, _, _ := strings.Cut(head, " HTTP/")
			got = append(got, line)
		}
		if !slices.Equal(got, want) {
			t.Errorf("requests at the server: got\n%q, want\n%q", got, want)
		}
	})
}

// wantFramedOnce checks the head of a request that a proxy has passed on, in lower case. It
// requires one X-Forwarded-For, which holds the client's address, one Host, and at most one length.
func wantFramedOnce(t *testing.T, head, address string) {
	t.Helper()
	for header, value := range map[string]string{
		"x-forwarded-for": address,
		"host":            "api.example.com",
	} {
		isOnce := strings.Count(head, "\n"+header+":") == 1
		if !isOnce || !strings.Contains(head, header+": "+value+"\r\n") {
			t.Errorf("got the head %q, want exactly one %s, with %s", head, header, value)
		}
	}
	lengths := regexp.MustCompile(`\n(content-length|transfer-encoding):`).FindAllString(head, -1)
	if len(lengths) > 1 {
		t.Errorf("got the head %q, want at most one Content-Length or Transfer-Encoding", head)
	}
}
