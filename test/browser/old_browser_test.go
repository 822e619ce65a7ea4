//go:build moving

package main

// The learner's page, and pages of other origins, in real browsers. These tests show what
// only a browser does: the cookie that no script can read, SameSite, CORS,
// Content-Security-Policy. harness_browser_test.go drives the browsers.

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"image"
	"image/png"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// A learner is someone at the page, in one engine, on a server of their own.
type learner struct {
	*browser
	srv             *testServer
	email, database string
}

func newLearner(t *testing.T, b *browser) *learner {
	srv := startServer(t)
	l := &learner{browser: b, srv: srv, email: newEmail(), database: srv.env["DATABASE_URL"]}
	noteEmail([]byte(`{"email":"` + l.email + `"}`))
	testUser(t, l.database, l.email, "member")
	execSQL(t, l.database, `insert into hubs (name, status, description)
		select 'Hub ' || to_char(n, 'FM00') || case when n = 12 then ' <b>no markup</b>' else '' end,
			case when n > 10 then 'archived' else 'active' end, '<b>no markup</b>' from generate_series(1, 12) n`)
	l.open(srv.base + "/")
	return l
}

// act does something that makes the page call the server, and waits for the message that
// follows. It counts exchanges, so that it does not take an older message for the new one.
func (l *learner) act(do func(), place, message string) {
	l.t.Helper()
	exchanges := func() int {
		return script[int](l.browser, "return document.querySelector('#exchange-log').childElementCount")
	}
	before := exchanges()
	do()
	waitUntil(l.t, "the exchange that should say "+message, func() bool { return exchanges() > before })
	l.waitText("#message-"+place, message)
}

func (l *learner) press(selector string) func() { return func() { l.click(selector) } }

func (l *learner) enter(selector, text string) func() {
	return func() { l.keys(selector, text+enterKey) }
}

// signIn takes steps 1 and 2. It returns the code.
func (l *learner) signIn() (code string) {
	l.t.Helper()
	l.act(l.enter("#email", l.email), "request", "a code of 6 digits, good for 10 minutes")
	code = l.srv.code(l.t, l.email)
	l.act(l.enter("#code", code), "validate", "You are signed in as "+l.email)
	return code
}

// wantInView waits until a user sees the element without scrolling: the page scrolls smoothly.
func (l *learner) wantInView(selector string) {
	l.t.Helper()
	waitUntil(l.t, selector+" in view", func() bool {
		return script[bool](l.browser, `const box = document.querySelector(arguments[0]).getBoundingClientRect();
			const bar = document.querySelector('nav').getBoundingClientRect();
			const uncovered = box.top >= bar.bottom - 1 && box.bottom <= innerHeight + 1;
			return bar.top >= -1 && box.height > 0 && uncovered`, selector)
	})
}

// A learner walks the page from its first step to its last, and tries what it says is
// left to try.
func TestPageInBrowser(t *testing.T) {
	t.Parallel()
	if os.Getenv("AXE_JS") == "" {
		t.Log("!!! ACCESSIBILITY NOT CHECKED: AXE_JS does not name axe-core's axe.min.js !!!")
	}
	inEachEngine(t, func(t *testing.T, b *browser) {
		l := newLearner(t, b)
		b.look("first sight")
		if b.engine == chromium {
			if got := b.requests(); len(got) != 1 || got[0].URL != l.srv.base+"/" {
				t.Errorf("requests to show the page: %v", got)
			}
		}
		l.walkSignIn(t)
		l.walkHubs(t)
		l.walkFiles(t)
		l.walkRefusals(t)
		if b.engine == chromium {
			l.checkRequests(t)
		}
	})
}

// walkSignIn takes steps 1 to 4, by the keyboard where it can.
func (l *learner) walkSignIn(t *testing.T) {
	b := l.browser
	l.act(l.enter("#email", l.email), "request", "a code of 6 digits, good for 10 minutes")
	code := l.srv.code(t, l.email)
	if focus := script[string](b, "return document.activeElement.id"); focus != "code" {
		t.Errorf("the focus is at %q, not where the code is entered", focus)
	}
	b.wantConsole()
	l.act(l.enter("#code", "12345"), "validate", "400 invalid_request")
	b.look("with a field error")
	b.wantConsole(refusedBy + "400")
	l.act(l.enter("#code", anotherCode(code)), "validate", "401 invalid_code")
	b.wantConsole(refusedBy + "401")
	if len(b.cookies()) != 0 || b.visible("#sign-out") {
		t.Errorf("signed in by a wrong code: %v", b.cookies())
	}
	// People paste a code as their mail program shows it. Only the page takes the space away.
	l.act(l.enter("#code", code[:3]+" "+code[3:]), "validate", "You are signed in as "+l.email)
	b.wantConsole()
	for _, part := range []string{"#h-validate", "#exchange-validate summary", "#message-validate"} {
		l.wantInView(part)
	}
	if current := b.text("#steps [aria-current]"); current != "2 Present" {
		t.Errorf("the navigation is at %q", current)
	}
	b.look("before the terms")

	// The cookie, T6: as the browser understands it, and out of reach of every script.
	token := wantCookie(t, b, browserCookie{Name: "hubs_auth_local", Domain: "127.0.0.1", Path: "/",
		SameSite: "Lax", HTTPOnly: true})
	reachable := script[string](b, `return document.cookie + document.documentElement.outerHTML +
		JSON.stringify([localStorage, sessionStorage, history.state])`)
	if strings.Contains(reachable, token) || strings.Contains(reachable, "eyJ") {
		t.Error("a script can read the token")
	}
	if visible := script[string](b, "return document.cookie"); visible != "" {
		t.Errorf("document.cookie: %q", visible)
	}
	if said := b.text("#script-cookie"); said != "has no trace of it" {
		t.Errorf("the page says that document.cookie %s", said)
	}

	// A used code, the terms gate: shown by the page, kept by the server.
	l.act(l.enter("#code", code), "validate", "401 invalid_code")
	l.act(l.press("#try-hubs"), "terms-gate", "403 terms_not_accepted")
	l.wantInView("#message-terms-gate")
	b.wantConsole(refusedBy+"401", refusedBy+"403")
	if b.visible("#list-hubs") || b.visible("#upload") || !b.visible("#sign-out") {
		t.Error("hubs and files on offer before the terms, or no longer signed in")
	}
	l.act(l.press("#terms-accept"), "terms", "Accepted.")
	version := queryValue[string](t, l.database, "select version from terms_acceptances")
	if version != TERMS_VERSION {
		t.Errorf("accepted: %s", version)
	}
}

// walkHubs takes step 5: pages, filters, order.
func (l *learner) walkHubs(t *testing.T) {
	b := l.browser
	wantHubs := func(summary string, names ...string) {
		t.Helper()
		b.waitText("#hubs-summary", summary)
		got := script[[]string](b, "return [...document.querySelectorAll('#hubs strong')].map(e => e.textContent)")
		if !slices.Equal(got, names) {
			t.Errorf("%s: %q, want %q", summary, got, names)
		}
	}
	wantHubs("Hubs 1 to 5. There are more.", "Hub 01", "Hub 02", "Hub 03", "Hub 04", "Hub 05")
	if n := script[int](b, "return document.querySelectorAll('#hubs b').length"); n != 0 {
		t.Error("what the server says became markup")
	}
	b.look("with hubs")
	b.click("#next")
	wantHubs("Hubs 6 to 10. There are more.", "Hub 06", "Hub 07", "Hub 08", "Hub 09", "Hub 10")
	b.click("#next")
	wantHubs("Hubs 11 to 12. These are the last.", "Hub 11", "Hub 12 <b>no markup</b>")
	b.click("#previous")
	wantHubs("Hubs 6 to 10. There are more.", "Hub 06", "Hub 07", "Hub 08", "Hub 09", "Hub 10")
	// The drivers can't choose: they scroll the select under the navigation.
	script[any](b, `document.querySelector('#filter-status').value = 'archived';
		document.querySelector('#order-direction').value = 'desc'`)
	b.click("#list-hubs")
	wantHubs("Hubs 1 to 2. These are the last.", "Hub 12 <b>no markup</b>", "Hub 11")
	b.keys("#filter-name", "B 11"+enterKey)
	wantHubs("Hubs 1 to 1. These are the last.", "Hub 11")
	b.keys("#filter-name", "%"+enterKey)
	wantHubs("No hub to show.")
	b.wantConsole()
}

// walkFiles takes steps 6 and 7: a file that the browser shows, and one that it must not.
func (l *learner) walkFiles(t *testing.T) {
	b := l.browser
	picture := filepath.Join(t.TempDir(), "a picture ü.png")
	hostile := filepath.Join(t.TempDir(), "hostile.html")
	var content bytes.Buffer
	if err := errors.Join(png.Encode(&content, image.NewGray(image.Rect(0, 0, 300, 200))),
		os.WriteFile(picture, content.Bytes(), 0o600),
		os.WriteFile(hostile, []byte("<script>alert(1)</script>"), 0o600)); err != nil {
		t.Fatal(err)
	}
	b.keys("#file", hostile)
	l.act(l.press("#upload"), "upload", "hostile.html is uploaded. The server found it to be application/octet-stream.")
	b.waitText("#preview a", "Download it")
	b.keys("#file", picture)
	l.act(l.press("#upload"), "upload", "a picture ü.png is uploaded. The server found it to be image/png.")
	waitUntil(t, "the picture on show", func() bool {
		return script[int](b, "return document.querySelector('#preview img')?.naturalWidth ?? 0") == 300
	})
	if done := script[float64](b, "return document.querySelector('#progress').value"); done != 1 {
		t.Errorf("progress: %v", done)
	}
	size := queryValue[int](t, l.database, "select size from files where name = $1", filepath.Base(picture))
	if size != content.Len() {
		t.Errorf("%d bytes uploaded, want %d", size, content.Len())
	}
	b.look("with a picture")
}

// walkRefusals takes steps 8 and 9.
func (l *learner) walkRefusals(t *testing.T) {
	b := l.browser
	note := filepath.Join(t.TempDir(), "note.txt")
	if err := os.WriteFile(note, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.act(l.enter("#new-hub-name", "Mine"), "member-writes", "403 forbidden")
	b.wantConsole(refusedBy + "403")
	for range 4 {
		l.act(l.press("#request-code"), "request", "good for 10 minutes")
	}
	l.act(l.press("#request-code"), "request", "429 rate_limited")
	b.waitText("#message-request", "Try again in 14 min ")
	b.wantConsole(refusedBy + "429")
	b.look("refused by a limit")

	// After a reload the session is still there, and the page knows that the cookie was sent.
	b.open(l.srv.base + "/")
	b.waitText("#message-session", "The session is good. You are "+l.email)
	b.waitText("#hubs-summary", "Hubs 1 to 5.")
	b.waitText("#exchange-session", "The browser sent it by itself")
	execSQL(t, l.database, "update users set suspended = true")
	l.act(l.press("#try-suspended"), "suspended", "403 account_suspended")
	execSQL(t, l.database, "update users set suspended = false")
	l.act(l.press("#check-session"), "session", "The session is good.")
	b.wantConsole(refusedBy + "403")

	// A double click calls once. The click after it would come third if it did not.
	exchanges := func() int {
		return script[int](b, "return document.querySelector('#exchange-log').childElementCount")
	}
	before := exchanges()
	twice := func() {
		script[any](b, "const button = document.querySelector('#check-session'); button.click(); button.click()")
	}
	l.act(twice, "session", "The session is good.")
	l.act(l.press("#check-session"), "session", "The session is good.")
	if got := exchanges() - before; got != 2 {
		t.Errorf("a double click and a click: got %d calls, want 2", got)
	}

	// Who comes to the browser next does not see the file of the user who has signed out.
	b.keys("#file", note)
	l.act(l.press("#upload"), "upload", "note.txt is uploaded.")
	b.waitText("#preview pre", "mine")
	l.act(l.press("#sign-out"), "logout", "You are signed out.")
	if shown := script[string](b, "return document.querySelector('#preview').textContent"); shown != "" {
		t.Errorf("signed out, and yet the page shows %q", shown)
	}
	if left := b.cookies(); len(left) != 0 || b.visible("#check-session") { // T7
		t.Errorf("signed out, and yet: %v", left)
	}
	b.wantConsole()
	l.act(l.press("#try-session"), "no-session", "401 unauthenticated")
	l.wantInView("#message-no-session")
	b.wantConsole(refusedBy + "401")
	b.open(l.srv.base + "/")
	b.waitText("#tries-count", "You have seen 7 of 9.")
	b.click("#start-over")
	b.waitText("#tries-count", "You have seen 0 of 9.")
	b.wantConsole()
}

// checkRequests checks that every call had an id, and that nothing was sent to anyone else.
func (l *learner) checkRequests(t *testing.T) {
	calls := 0
	for _, request := range l.requests() {
		switch rest, here := strings.CutPrefix(request.URL, l.srv.base+"/"); {
		case here && rest != "":
			calls++
			if id := request.Headers["x-request-id"]; !isUUID(id) {
				t.Errorf("%s %s with x-request-id %q", request.Method, request.URL, id)
			}
		case !here:
			t.Errorf("a request to another host: %s %s", request.Method, request.URL)
		}
	}
	if calls < 25 {
		t.Errorf("only %d calls seen", calls)
	}
}

// Going back to the page shows it as it is now: no used code, and the session as it is.
// WebKitGTK then shows the old state of a page, the others load it again.
func TestPageAfterBack(t *testing.T) {
	t.Parallel()
	inEachEngine(t, func(t *testing.T, b *browser) {
		l := newLearner(t, b)
		l.signIn()
		execSQL(t, l.database, "update users set permission = 'admin'")
		b.click("footer a")
		waitUntil(t, "the contract", func() bool {
			return script[string](b, "return location.pathname") == "/openapi.json"
		})
		b.command("POST", "/back", map[string]string{}, nil)
		b.waitText("#message-session", "role admin")
		if code := script[string](b, "return document.querySelector('#code').value"); code != "" {
			t.Errorf("the page still shows the code %s", code)
		}
		if !b.visible("#terms-accept") {
			t.Error("the page does not know the session")
		}
	})
}

// No select hides a part of its widest option, and the navigation is always in view.
func TestPageLayout(t *testing.T) {
	t.Parallel()
	inEachEngine(t, func(t *testing.T, b *browser) {
		l := newLearner(t, b)
		l.signIn()
		l.act(l.press("#terms-accept"), "terms", "Accepted.")
		clipped := script[[]string](b, `return [...document.querySelectorAll('select')].filter(select => {
			const free = select.cloneNode(true);
			free.style.cssText = 'width: max-content; min-width: 0; position: absolute';
			select.after(free);
			const needed = free.offsetWidth;
			free.remove();
			select.title = select.offsetWidth + ' of ' + needed;
			return select.offsetWidth < needed;
		}).map(select => select.id + ' ' + select.title)`)
		if len(clipped) > 0 {
			t.Errorf("clipped: %q", clipped)
		}
		for _, place := range []string{"#h-request", "#h-session", "#h-log"} {
			script[any](b, "document.querySelector(arguments[0]).scrollIntoView()", place)
			l.wantInView(place)
		}
		numbers := script[[]string](b, "return [...document.querySelectorAll('nav a')].map(a => a.textContent)")
		want := []string{"1 Ask", "2 Present", "3 Session", "4 Terms", "5 Hubs", "6 Upload", "7 Look", "8 Sign out", "9 Try"}
		if !slices.Equal(numbers, want) {
			t.Errorf("navigation: %q, want %q", numbers, want)
		}
	})
}

// On a phone the exchanges are folded: a learner sees the steps, and unfolds what they want.
func TestPageOnPhone(t *testing.T) {
	t.Parallel()
	b := newBrowser(t, chromium, browserOptions{flags: []string{"--window-size=500,900"}})
	l := newLearner(t, b)
	l.signIn()
	if open := script[int](b, "return document.querySelectorAll('.exchange[open]').length"); open != 0 {
		t.Errorf("%d exchanges are unfolded", open)
	}
	l.wantInView("#message-validate")
	l.wantInView("#exchange-validate")
	b.click("#exchange-validate summary")
	b.waitText("#exchange-validate[open]", "Set-Cookie: hubs_auth_local")
}

// On a host that is not a secure context the page says so.
func TestPageInsecure(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	b := newBrowser(t, chromium, browserOptions{flags: []string{"--host-resolver-rules=MAP hubs.example " + srv.addr}})
	b.open("http://hubs.example/")
	const message = "This page can't work at http://hubs.example"
	b.waitText("#insecure:not([hidden])", message)
	b.click("#request-code")
	b.waitText("#message-request", message)
	b.wantConsole()
}

// A file opens in a tab of its own without a word in the console, and a file that a
// browser must not show is downloaded: by a link of the page, and from such a tab.
func TestOpenedFiles(t *testing.T) {
	t.Parallel()
	inEachEngine(t, func(t *testing.T, b *browser) {
		l := newLearner(t, b)
		l.signIn()
		l.act(l.press("#terms-accept"), "terms", "Accepted.")
		var picture bytes.Buffer
		if err := png.Encode(&picture, image.NewGray(image.Rect(0, 0, 300, 200))); err != nil {
			t.Fatal(err)
		}
		upload := func(name, content string) {
			t.Helper()
			path := filepath.Join(t.TempDir(), name)
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			b.keys("#file", path)
			l.act(l.press("#upload"), "upload", name+" is uploaded.")
			waitUntil(t, "the link to "+name, func() bool {
				return script[bool](b, "return document.querySelector('#preview a')?.href.endsWith(arguments[0]) ?? false", name)
			})
		}
		downloaded := func(name string) func() bool {
			return func() bool {
				content, err := os.ReadFile(filepath.Join(b.downloads, name))
				return err == nil && string(content) == "<p>Not to be shown.</p>"
			}
		}
		const hostile = "<p>Not to be shown.</p>"
		upload("page.html", hostile)
		l.click("#preview a")
		waitUntil(t, "the download", downloaded("page.html"))
		upload("second.html", hostile)
		second := script[string](b, "return document.querySelector('#preview a').href")

		b.console()
		upload("picture.png", picture.String())
		b.inNewTab(l.press("#preview a"), func() {
			waitUntil(t, "the picture in its tab", func() bool {
				return script[int](b, "return document.images[0]?.naturalWidth ?? 0") == 300
			})
			left := script[int](b, "return document.images[0].getBoundingClientRect().left")
			if left < 100 {
				t.Errorf("the picture is not in the middle: the viewer's style is blocked")
			}
			b.wantConsole(iconMessage(b)...)
		})
		upload("notes.txt", "Some notes.")
		b.inNewTab(l.press("#preview a"), func() {
			b.waitText("pre", "Some notes.")
			b.wantConsole(iconMessage(b)...)
			script[any](b, `const link = document.createElement('a');
				link.href = link.textContent = arguments[0]; document.body.append(link)`, second)
			b.click("a")
			waitUntil(t, "the download from a sandboxed tab", downloaded("second.html"))
		})
	})
}

// iconMessage is what Firefox says about the icon of each tab that has a policy without
// pictures. To allow the icon, the server would have to serve one, to any site.
func iconMessage(b *browser) []string {
	if b.engine == firefox {
		return []string{"favicon.ico"}
	}
	return nil
}

// emptyPage serves a page on a port of its own, over TLS if there is a configuration.
func emptyPage(t testing.TB, config *tls.Config) (url string) {
	pages := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		io.WriteString(w, `<!doctype html><title>Another page</title><link rel="icon" href="data:,">`)
	}))
	if pages.TLS = config; config != nil {
		pages.StartTLS()
	} else {
		pages.Start()
	}
	t.Cleanup(pages.Close)
	return pages.URL
}

// A pageAnswer is what a script gets to see of an answer.
type pageAnswer struct {
	Status                   int
	Type, Body               string
	ID, RetryAfter, Location string // headers; "" where the browser hides them
	Failed                   string // what fetch threw instead
}

func (a pageAnswer) unreadable() bool {
	return a.Failed != "" || a == pageAnswer{Type: "opaque"}
}

// fetch has the page make a request, with cookies. init is what fetch takes, in
// JavaScript; api stands for the server's address in it.
func (b *browser) fetch(api, path, init string) pageAnswer {
	b.t.Helper()
	return script[pageAnswer](b, `const api = arguments[0];
		return fetch(api + arguments[1], {credentials: 'include', ...`+init+`}).then(async r => ({status: r.status,
			type: r.type, body: await r.text(), id: r.headers.get('x-request-id') ?? '',
			retryAfter: r.headers.get('retry-after') ?? '', location: r.headers.get('location') ?? ''}),
			error => ({failed: String(error)}))`, api, path)
}

// Sites don't differ by port. So of the two foreign pages one is of the same site, and
// its requests bear the cookie; the other is not.
func TestOtherOriginsInBrowser(t *testing.T) {
	t.Parallel()
	localhost := strings.NewReplacer("127.0.0.1", "localhost")
	allowed, foreign := localhost.Replace(emptyPage(t, nil)), emptyPage(t, nil)
	inEachEngine(t, func(t *testing.T, b *browser) {
		srv := startServer(t, map[string]string{"ALLOWED_ORIGINS": allowed})
		testOrigins(t, b, srv, localhost.Replace(srv.base), allowed, localhost.Replace(foreign), foreign)
	})
}

// The same as it is deployed: over TLS, behind a proxy, on names of one domain, all of
// whose subdomains are allowed. And what is there in production only.
func TestProductionInBrowser(t *testing.T) {
	t.Parallel()
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			proxy, srv := startProductionBehind(t, haproxy)
			page := strings.TrimPrefix(emptyPage(t, proxy.tls.Clone()), "https://")
			hosts := map[string]string{"app.example.com": page, "example.com": page, "evil-example.com": page}
			flags := proxy.browserFlags(hosts)
			hosts["api.example.com"] = proxy.addr
			b := newBrowser(t, engine, browserOptions{flags: flags, hosts: hosts})
			testOrigins(t, b, srv, srv.base,
				"https://app.example.com", "https://example.com", "https://evil-example.com")

			b.open(srv.base + "/healthz")
			wantCookie(t, b, browserCookie{Name: "__Secure-hubs_auth_production", Domain: ".example.com", Path: "/",
				SameSite: "Lax", HTTPOnly: true, Secure: true})
			if engine == chromium {
				testHSTS(t, b, srv)
			}
		})
	}
}

// testHSTS needs a certificate that the browser trusts, which only Chromium is given.
func testHSTS(t *testing.T, b *browser, srv *testServer) {
	b.entries("performance")
	b.open(strings.Replace(srv.base, "https:", "http:", 1) + "/healthz")
	if protocol := script[string](b, "return location.protocol"); protocol != "https:" {
		t.Errorf("http:// led to %s", protocol)
	}
	byHSTS := func(e logEntry) bool { return strings.Contains(e.Message, `"Non-Authoritative-Reason":"HSTS"`) }
	if !slices.ContainsFunc(b.entries("performance"), byHSTS) {
		t.Error("the browser has not learnt that this host is reached by HTTPS only")
	}
}

// wantCookie checks the only cookie: what the browser has understood of it. It returns
// the token.
func wantCookie(t testing.TB, b *browser, want browserCookie) (token string) {
	t.Helper()
	cookies := b.cookies()
	if len(cookies) != 1 {
		t.Fatalf("cookies: %v", cookies)
	}
	got := cookies[0]
	if days := time.Until(time.Unix(got.Expiry, 0)).Hours() / 24; days < 59.9 || days > 60.1 || got.Value == "" {
		t.Errorf("a token of %d bytes, for %f days", len(got.Value), days)
	}
	want.Value, want.Expiry = got.Value, got.Expiry
	if got != want {
		t.Errorf("cookie %+v, want %+v", got, want)
	}
	return got.Value
}

// testOrigins is what browsers make of CORS (C1), SameSite and the refusal of cross-site
// writes (C2), on pages of three origins.
func testOrigins(t *testing.T, b *browser, srv *testServer, api, allowed, sameSite, crossSite string) {
	email, database := newEmail(), srv.env["DATABASE_URL"]
	noteEmail([]byte(`{"email":"` + email + `"}`))
	testUser(t, database, email, "admin")
	execSQL(t, database, "insert into hubs (name) values ('North')")
	hub := "/hubs/" + queryValue[string](t, database, "select hub_id from hubs")
	post := func(body string) string {
		return `{method: 'POST', headers: {'content-type': 'application/json', 'x-request-id': 'by-the-page'},
			body: '` + body + `'}`
	}
	want := func(status int, path, init string) pageAnswer {
		t.Helper()
		answer := b.fetch(api, path, init)
		if answer.Status != status || answer.Type != "cors" || answer.ID == "" {
			t.Fatalf("%s: want %d, got %+v", path, status, answer)
		}
		return answer
	}

	// A page of an allowed origin can do all that the API offers, and read each answer.
	b.open(allowed)
	want(200, "/auth/otp/request", post(`{"email":"`+email+`"}`))
	signedIn := want(200, "/auth/otp/validate", post(`{"email":"`+email+`","code":"`+srv.code(t, email)+`"}`))
	if signedIn.ID != "by-the-page" || !strings.Contains(signedIn.Body, email) {
		t.Errorf("%+v", signedIn)
	}
	if visible := script[string](b, "return document.cookie"); visible != "" { // cookies don't differ by port either
		t.Errorf("document.cookie: %q", visible)
	}
	want(403, "/hubs", `{}`)
	want(200, "/terms/acceptance", post(`{"version":"`+TERMS_VERSION+`"}`))
	if created := want(201, "/hubs", post(`{"name":"South"}`)); !strings.HasPrefix(created.Location, "/hubs/") {
		t.Errorf("no Location to read: %+v", created)
	}
	want(200, hub, `{method: 'PATCH', headers: {'content-type': 'application/json'}, body: '{"status":"archived"}'}`)
	for range 4 {
		want(200, "/auth/otp/request", post(`{"email":"`+email+`"}`))
	}
	// The endpoint's own limit, which answers after CORS.
	if limited := want(429, "/auth/otp/request", post(`{"email":"`+email+`"}`)); limited.RetryAfter == "" ||
		!strings.Contains(limited.Body, "rate_limited") {
		t.Errorf("%+v", limited)
	}

	for name, foreign := range map[string]string{"same site": sameSite, "cross site": crossSite} {
		b.open(foreign)
		refused := func() int { return srv.log.count(`"code":"cross_origin"`) }
		noSession := func() int { return srv.log.count(`"reason":"missing"`, `"route":"/auth/session"`) }
		refusedBefore, noSessionBefore := refused(), noSession()
		for _, test := range []struct{ path, init string }{
			// Reading: by fetch, and without CORS, when it must yield nothing.
			{"/auth/session", "{}"},
			{"/auth/session", "{mode: 'no-cors'}"},
			{hub, "{headers: {'x-request-id': 'by-a-foreign-page'}}"},
			// Writing that needs a preflight, which is not granted.
			{hub, "{method: 'DELETE'}"},
			{hub, `{method: 'PATCH', headers: {'content-type': 'application/json'}, body: '{"name":"Taken"}'}`},
			// Writing that needs none: the request gets to the server, which refuses it.
			{"/hubs", `{method: 'POST', mode: 'no-cors', body: '{"name":"Foreign"}'}`},
			{"/auth/logout", "{method: 'POST', mode: 'no-cors'}"},
			{"/files/upload", `{method: 'POST', mode: 'no-cors', body: (() => {
				const form = new FormData(); form.append('file', new File(['x'], 'x.txt')); return form })()}`},
		} {
			if answer := b.fetch(api, test.path, test.init); !answer.unreadable() {
				t.Errorf("%s: fetch %s %s: %+v", name, test.path, test.init, answer)
			}
		}
		// A form, which is older than all of that.
		script[any](b, `document.body.innerHTML = '<form method="post"><button>Win a prize</button></form>';
			document.forms[0].action = arguments[0] + '/auth/logout'; document.forms[0].submit()`, api)
		b.waitText("body", `"cross_origin"`)
		if got := refused() - refusedBefore; got != 4 {
			t.Errorf("%s: %d writes refused, want the hub, the logout, the upload and the form", name, got)
		}
		// Both pages got through to the server; with the cookie only the one of the same site.
		wantWithout := map[string]int{"same site": 0, "cross site": 2}[name]
		if got := noSession() - noSessionBefore; got != wantWithout {
			t.Errorf("%s: %d requests came without the cookie, want %d", name, got, wantWithout)
		}
	}
	b.open(allowed)
	if hubs := want(200, "/hubs", `{}`).Body; strings.Count(hubs, "hubId") != 2 || strings.Contains(hubs, "Taken") {
		t.Errorf("a foreign page has written: %s", hubs)
	}
	if n := queryValue[int](t, database, "select count(*) from files"); n != 0 {
		t.Errorf("%d files uploaded by foreign pages", n)
	}

	// No page can frame the server's.
	b.console()
	script[any](b, `return new Promise(loaded => { const frame = document.createElement('iframe');
		frame.onload = () => loaded(); frame.src = arguments[0]; document.body.append(frame) })`, api+"/healthz")
	b.wantConsole("frame-ancestors 'none'")

	// The limit of step 4, which answers before CORS: even so the page can read why.
	limited := script[[]pageAnswer](b, `return Promise.all(Array.from({length: 110}, () =>
		fetch(arguments[0] + '/healthz', {credentials: 'include'}).then(async r => ({status: r.status, type: r.type,
			body: await r.text(), id: r.headers.get('x-request-id'), retryAfter: r.headers.get('retry-after') ?? ''}),
			error => ({failed: String(error)}))))`, api)
	statuses := map[int]int{}
	for _, answer := range limited {
		statuses[answer.Status]++
		explained := answer.RetryAfter != "" && strings.Contains(answer.Body, "rate_limited")
		if answer.Failed != "" || answer.Status == 429 && !explained {
			t.Errorf("%+v", answer)
		}
	}
	if statuses[429] < 10 || statuses[200]+statuses[429] != 110 {
		t.Errorf("statuses of 110 requests: %v", statuses)
	}
}

// The page's own policy is in force: it allows its one style and its one script, by
// their hashes, and nothing that anyone may get into the page besides.
func TestPagePolicy(t *testing.T) {
	t.Parallel()
	hash := func(tag string) string {
		blocks := regexp.MustCompile(`(?s)<`+tag+`[^>]*>(.*?)</`+tag+`>`).FindAllStringSubmatch(page, -1)
		if len(blocks) != 1 {
			t.Fatalf("%d blocks of <%s>, want 1", len(blocks), tag)
		}
		sum := sha256.Sum256([]byte(blocks[0][1]))
		return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	want := "default-src 'none'; connect-src 'self'; img-src blob: data:; form-action 'none'; base-uri 'none'; " +
		"style-src " + hash("style") + "; script-src " + hash("script")
	meta := regexp.MustCompile(`(?s)<meta http-equiv="Content-Security-Policy" content="(.*?)">`).FindStringSubmatch(page)
	if meta == nil || strings.Join(strings.Fields(meta[1]), " ") != want {
		t.Fatalf("policy of the page: %s\nwant %s", meta, want)
	}

	srv := startServer(t)
	answer, err := srv.client(t).try("GET", "/", nil)
	if err != nil || answer.status != 200 || string(answer.body) != page {
		t.Fatalf("%v: %v", err, answer)
	}
	headers := maps.Clone(everyAnswer)
	headers["Content-Security-Policy"], headers["Content-Type"] = "frame-ancestors 'none'", "text/html; charset=utf-8"
	for name, value := range headers {
		if got := answer.header.Values(name); len(got) != 1 || got[0] != value {
			t.Errorf("%s: %q, want %q", name, got, value)
		}
	}
	mails := newMailServer(t, mailOptions{})
	for _, env := range []map[string]string{stagingEnv(mails), productionEnv(mails)} {
		wantProblem(t, startServer(t, env).client(t).do("GET", "/", nil), 404, "not_found")
	}

	b := newBrowser(t, chromium, browserOptions{})
	b.open(srv.base + "/")
	b.wantConsole()
	outside := emptyPage(t, nil)
	violated := script[[]string](b, `const seen = new Set(), outside = arguments[0];
		return new Promise(done => {
			document.addEventListener('securitypolicyviolation', e => {
				seen.add(e.effectiveDirective);
				if (seen.size === 9) done([...seen].sort());
			});
			const add = (tag, set) => document.body.append(Object.assign(document.createElement(tag), set));
			add('script', {textContent: 'window.hostile = 1'});
			add('script', {src: outside});
			add('div', {innerHTML: '<img src="data:," onerror="window.hostile = 2"><p style="color: red">'});
			add('style', {textContent: 'body { display: none }'});
			add('img', {src: outside});
			add('iframe', {src: outside});
			add('base', {href: outside});
			add('form', {action: outside, id: 'trick', method: 'post'});
			document.forms.trick.submit();
			fetch(outside).catch(() => {});
		})`, outside)
	wantViolated := []string{"base-uri", "connect-src", "form-action", "frame-src", "img-src",
		"script-src-attr", "script-src-elem", "style-src-attr", "style-src-elem"}
	if !slices.Equal(violated, wantViolated) {
		t.Errorf("refused by the policy: %q, want %q", violated, wantViolated)
	}
	if ran := script[any](b, "return window.hostile ?? null"); ran != nil {
		t.Errorf("hostile script %v ran", ran)
	}
}
