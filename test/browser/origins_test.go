package browser

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// serve serves a handler on a port of its own until the test ends, and returns the URL.
func serve(t testing.TB, handler http.HandlerFunc) (url string) {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

// servePage serves one page for every path, on a port of its own.
func servePage(t testing.TB, page string) (url string) {
	return serve(t, func(w http.ResponseWriter, _ *http.Request) {
		writePage(w, page)
	})
}

func writePage(w http.ResponseWriter, page string) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	io.WriteString(w, page)
}

const emptyPage = `<!doctype html><title>Another page</title><link rel="icon" href="data:,">`

func withLocalhost(url string) string { return strings.Replace(url, "127.0.0.1", "localhost", 1) }

// terminateTLS starts a TLS server in front of s and returns its address. It passes requests for
// api.example.com to s, and serves an empty page under every other name.
func terminateTLS(t *testing.T, s *hubstest.Server) (addr string) {
	api := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: s.Addr})
	handler := func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "api.example.com" {
			api.ServeHTTP(w, r)
			return
		}
		writePage(w, emptyPage)
	}
	server := httptest.NewTLSServer(http.HandlerFunc(handler))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// A pageAnswer is what a script in a page can see of an answer.
type pageAnswer struct {
	Status       int
	Type, Body   string
	ID, Location string // headers; "" if absent, or hidden by the browser
	Failed       string // the error of fetch, if there is no answer
}

// A pageRequest is a request that a page sends. init has the members of the second argument of
// JavaScript's fetch.
type pageRequest struct{ path, init string }

// write returns a request with a JSON body, such as write("POST /hubs", `{"name":"North"}`).
func write(request, body string) pageRequest {
	method, path, _ := strings.Cut(request, " ")
	init := `method: '` + method + `', body: '` + body + `',
		headers: {'content-type': 'application/json', 'x-request-id': 'by-the-page'}`
	return pageRequest{path: path, init: init}
}

// An originTest is a browser whose page calls the server.
type originTest struct {
	*browser
	srv *hubstest.Server
	hub string // the path of a hub
}

const allowedPage = "https://app.example.com"

// In production, over TLS and behind a proxy, pages of an allowed origin can use the server, and
// pages of other origins can't: this is what browsers do with CORS (C1), SameSite and the refusal of
// cross-site writes (C2). All subdomains of a domain are allowed, but not the domain itself. The
// domain is of the server's site, so requests of its pages have the cookie. Requests from another
// site have none.
func TestOtherOriginsInBrowser(t *testing.T) {
	t.Parallel()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	s := hubstest.Start(t, mail.Env(), map[string]string{
		"APP_ENV":               "production",
		"COOKIE_DOMAIN":         "example.com",
		"ALLOWED_ORIGIN_DOMAIN": "example.com",
	})
	b := newBrowser(t, terminateTLS(t, s))
	hubstest.Exec(t, s.Database, "insert into hubs (name) values ('North')")
	hub := "/hubs/" + hubstest.Query[string](t, s.Database, "select hub_id from hubs")
	o := originTest{browser: b, srv: s, hub: hub}
	o.step("the allowed page", o.useAll)
	o.step("a page of the same site", func() {
		got := o.attack("https://example.com")
		b.wantEqual("attacks", got, outcome{refused: 4, withoutCookie: 0})
	})
	o.step("a page of another site", func() {
		got := o.attack("https://evil-example.com")
		b.wantEqual("attacks", got, outcome{refused: 4, withoutCookie: 2})
	})
	o.step("the allowed page again", o.wantNoChange)

	b.open(s.Base + "/healthz")
	b.wantCookie(browserCookie{
		Name:     s.CookieName(),
		Domain:   ".example.com",
		Path:     "/",
		SameSite: "Lax",
		HTTPOnly: true,
		Secure:   true,
	})
}

// fetch makes the page send a request with cookies.
func (o originTest) fetch(request pageRequest) pageAnswer {
	o.t.Helper()
	return script[pageAnswer](o.browser, `
		return fetch(arguments[0], {credentials: 'include', `+request.init+`}).then(
			async r => ({
				status: r.status,
				type: r.type,
				body: await r.text(),
				id: r.headers.get('x-request-id') ?? '',
				location: r.headers.get('location') ?? ''
			}),
			error => ({failed: String(error)}))`, o.srv.Base+request.path)
}

// read is fetch for a request whose answer the page must be able to read. Otherwise it ends the test.
func (o originTest) read(status int, request pageRequest) pageAnswer {
	o.t.Helper()
	answer := o.fetch(request)
	if answer.Status != status || answer.Type != "cors" || answer.ID == "" {
		o.t.Fatalf("%s: got %+v, want %d, readable by the page", request.path, answer, status)
	}
	return answer
}

// useAll opens a page of the allowed origin. The page can sign in and use the API, and can read
// each answer.
func (o originTest) useAll() {
	o.t.Helper()
	o.open(allowedPage)
	email, _ := o.srv.NewUser(o.t, "admin")
	o.read(200, write("POST /auth/otp/request", fmt.Sprintf(`{"email":%q}`, email)))
	code := fmt.Sprintf(`{"email":%q,"code":%q}`, email, o.srv.Code(o.t, email))
	signedIn := o.read(200, write("POST /auth/otp/validate", code))
	if signedIn.ID != "by-the-page" || !strings.Contains(signedIn.Body, email) {
		o.t.Errorf("sign-in: got %+v, want the page's X-Request-Id and the user's address", signedIn)
	}
	// The browser has the cookie for this page too, although its host name is not the server's. No
	// script may read it.
	o.wantEqual("document.cookie", script[string](o.browser, "return document.cookie"), "")
	o.read(403, pageRequest{path: "/hubs"})
	version := regexp.MustCompile(`"version":"[^"]*"`).FindString(signedIn.Body)
	o.read(200, write("POST /terms/acceptance", "{"+version+"}"))
	created := o.read(201, write("POST /hubs", `{"name":"South"}`))
	if !strings.HasPrefix(created.Location, "/hubs/") {
		o.t.Errorf("new hub: got %+v, want a Location that the page can read", created)
	}
	o.read(200, write("PATCH "+o.hub, `{"status":"archived"}`))
}

// wantNoChange opens a page of the allowed origin again. Foreign pages have changed nothing. No
// page, not even this one, can show an answer of the server in a frame.
func (o originTest) wantNoChange() {
	o.t.Helper()
	o.open(allowedPage)
	hubs := o.read(200, pageRequest{path: "/hubs"}).Body
	if strings.Count(hubs, "hubId") != 2 || strings.Contains(hubs, "Taken") {
		o.t.Errorf("got the hubs %s, want the two of this test, unchanged by foreign pages", hubs)
	}
	files := hubstest.Query[int](o.t, o.srv.Database, "select count(*) from files")
	o.wantEqual("files that foreign pages uploaded", files, 0)
	o.console()
	script[any](o.browser, `return new Promise(loaded => {
		const frame = document.createElement('iframe');
		frame.onload = () => loaded();
		frame.src = arguments[0];
		document.body.append(frame);
	})`, o.srv.Base+"/healthz")
	o.wantConsole("frame-ancestors 'none'")
}

// attacks are the requests of a page whose origin is not allowed. {hub} is the path of a hub.
var attacks = []pageRequest{
	// Reads. The page must not see the answer, neither with CORS nor without.
	{path: "/auth/session"},
	{path: "/auth/session", init: `mode: 'no-cors'`},
	{path: "{hub}", init: `headers: {'x-request-id': 'by-a-foreign-page'}`},
	// Writes that need a preflight, which the server does not grant.
	{path: "{hub}", init: `method: 'DELETE'`},
	write("PATCH {hub}", `{"name":"Taken"}`),
	// Writes that need no preflight. The request comes to the server, and the server refuses it.
	{path: "/hubs", init: `method: 'POST', mode: 'no-cors', body: '{"name":"Foreign"}'`},
	{path: "/auth/logout", init: `method: 'POST', mode: 'no-cors'`},
	{path: "/files/upload", init: `method: 'POST', mode: 'no-cors', body: (() => {
		const form = new FormData();
		form.append('file', new File(['x'], 'x.txt'));
		return form;
	})()`},
}

// An outcome is what came of the attacks of a page.
type outcome struct {
	readable      string // requests whose answer the page could read, with the answers
	refused       int    // writes that came to the server: hub, logout, upload and form
	withoutCookie int    // requests to /auth/session without the cookie, of two
}

// attack opens a page whose origin is not allowed. The page sends the attacks, and then a form.
func (o originTest) attack(page string) (seen outcome) {
	o.open(page)
	refused := func() int { return o.srv.Log.Count(`"code":"cross_origin"`) }
	noSession := func() int {
		return o.srv.Log.Count(`"reason":"missing"`, `"route":"/auth/session"`)
	}
	refusedBefore := refused()
	noSessionBefore := noSession()
	for _, attack := range attacks {
		attack.path = strings.Replace(attack.path, "{hub}", o.hub, 1)
		answer := o.fetch(attack)
		isOpaque := answer == pageAnswer{Type: "opaque"}
		if answer.Failed == "" && !isOpaque {
			seen.readable += fmt.Sprintf("%+v: %+v\n", attack, answer)
		}
	}
	// A form needs neither fetch nor CORS.
	script[any](o.browser, `
		document.body.innerHTML = '<form method="post"><button>Win a prize</button></form>';
		document.forms[0].action = arguments[0] + '/auth/logout';
		document.forms[0].submit()`, o.srv.Base)
	o.waitText("body", `"cross_origin"`)
	seen.refused = refused() - refusedBefore
	seen.withoutCookie = noSession() - noSessionBefore
	return seen
}

// The policy of the learner's page allows its one style and its one script, by their hashes, and
// nothing else that an attacker may get into the page. TestPageHashes compares the hashes.
func TestPagePolicy(t *testing.T) {
	t.Parallel()
	b := newBrowser(t, "")
	b.open(hubstest.Start(t).Base + "/")
	b.wantConsole()
	want := []string{
		"base-uri", "connect-src", "form-action", "frame-src", "img-src",
		"script-src-attr", "script-src-elem", "style-src-attr", "style-src-elem",
	}

	violated := script[[]string](b, `
		const seen = new Set(), [outside, all] = arguments;
		return new Promise(done => {
			const end = () => done([...seen].sort());
			setTimeout(end, 5000);
			document.addEventListener('securitypolicyviolation', e => {
				seen.add(e.effectiveDirective);
				if (seen.size === all) end();
			});
			const add = (tag, set) =>
				document.body.append(Object.assign(document.createElement(tag), set));
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
		})`, servePage(t, emptyPage), len(want))

	if !slices.Equal(violated, want) {
		t.Errorf("directives that refused something: got %q, want %q", violated, want)
	}
	b.wantEqual("the hostile script that ran", script[any](b, "return window.hostile ?? null"), nil)
}
