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

// framings holds what follows Host and "Connection: close" in a request. The names are also
// queries.
var framings = map[string]struct {
	headers   string   // <length> stands for the length of the body
	body      string   // if empty: ambiguousBody
	refusedBy []string // the proxies that refuse the request; the others pass it on, once
}{
	"hop-by-hop": {
		headers: "Connection: X-Forwarded-For\r\nContent-Length: <length>\r\n",
	},
	"forged-address": {
		headers: "X-Forwarded-For: 198.51.100.1, 127.0.0.1\r\nContent-Length: <length>\r\n",
	},
	"upgrade": {
		headers: "Connection: Upgrade\r\nUpgrade: tunnel\r\nContent-Length: 0\r\n",
		body:    smuggled,
	},
	"two-lengths": {
		headers:   "Content-Length: 0\r\nContent-Length: <length>\r\n",
		body:      smuggled,
		refusedBy: bothProxies,
	},
	// HAProxy reads the body as chunks and drops Content-Length.
	"length-chunked": {
		headers:   "Content-Length: <length>\r\nTransfer-Encoding: chunked\r\n",
		refusedBy: []string{"nginx"},
	},
	"space-before-colon": {
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
			for _, path := range []string{"/hubs?", "/files/upload?"} { // uploads stream
				address := newAddress()
				line := "POST " + path + name
				start := line + " HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n"
				body := cmp.Or(c.body, ambiguousBody)
				headers := strings.ReplaceAll(c.headers, "<length>", fmt.Sprint(len(body)))
				answer := p.raw(address, start+headers+"\r\n"+body)
				status := "200"
				if slices.Contains(c.refusedBy, engine) {
					status = "400"
				} else {
					want = append(want, line)
				}
				if !strings.HasPrefix(answer, "HTTP/1.1 "+status+" ") {
					t.Errorf("%s: got %.100q, want status %s", line, answer, status)
				}
				for _, head := range backend.seen(line + " ") {
					wantFramedOnce(t, strings.ToLower(head), address)
				}
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
	got := regexp.MustCompile(`\n(host|x-forwarded-for):.*`).FindAllString(head, -1)
	slices.Sort(got)
	want := []string{"\nhost: api.example.com\r", "\nx-forwarded-for: " + address + "\r"}
	if !slices.Equal(got, want) {
		t.Errorf("%.30q…: got %q, want %q", head, got, want)
	}
	lengths := regexp.MustCompile(`\n(content-length|transfer-encoding):`).FindAllString(head, -1)
	if len(lengths) > 1 {
		t.Errorf("got the head %q, want at most one Content-Length or Transfer-Encoding", head)
	}
}
