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
	return serve(t, func(w http.ResponseWriter, _ *http.Request) { writePage(w, page) })
}

func writePage(w http.ResponseWriter, page string) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	io.WriteString(w, page)
}

const emptyPage = `<!doctype html><title>Another page</title><link rel="icon" href="data:,">`

// origins holds the origins of the pages that a browser opens, and of the server that they call.
type origins struct {
	api, allowed        string
	sameSite, crossSite string // not allowed; only requests of sameSite have the cookie
}

// Pages of an allowed origin can use the server, and pages of other origins can't. Two ports of a
// host are one site. So of the two pages that are not allowed, one is of the server's site, and its
// requests have the cookie. The other is of another site, and its requests have no cookie.
func TestOtherOriginsInBrowser(t *testing.T) {
	t.Parallel()
	allowed := withLocalhost(servePage(t, emptyPage))
	foreign := servePage(t, emptyPage)
	inEachEngine(t, func(t *testing.T, b *browser) {
		srv := hubstest.Start(t, map[string]string{"ALLOWED_ORIGINS": allowed})
		testOrigins(t, b, srv, origins{
			api:       withLocalhost(srv.Base),
			allowed:   allowed,
			sameSite:  withLocalhost(foreign),
			crossSite: foreign,
		})
	})
}

func withLocalhost(url string) string { return strings.Replace(url, "127.0.0.1", "localhost", 1) }

// The same holds in production: over TLS, behind a proxy, on names of one domain. All subdomains of
// that domain are allowed, but not the domain itself. The cookie has the attributes of production.
func TestProductionInBrowser(t *testing.T) {
	t.Parallel()
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
			srv := hubstest.Start(t, hubstest.ProductionEnv(mail))
			b := newBrowser(t, engine, behindProxy(t, srv))
			testOrigins(t, b, srv, origins{
				api:       srv.Base,
				allowed:   "https://app.example.com",
				sameSite:  "https://example.com",
				crossSite: "https://evil-example.com",
			})
			b.open(srv.Base + "/healthz")
			wantCookie(t, b, browserCookie{
				Name:     srv.CookieName(),
				Domain:   ".example.com",
				Path:     "/",
				SameSite: "Lax",
				HTTPOnly: true,
				Secure:   true,
			})
		})
	}
}

// behindProxy starts a TLS server and returns its address. It passes requests for api.example.com
// to srv, and serves an empty page under every other name.
func behindProxy(t *testing.T, srv *hubstest.Server) (addr string) {
	api := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: srv.Addr})
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
	Status                   int
	Type, Body               string
	ID, RetryAfter, Location string // headers; "" if absent, or hidden by the browser
	Failed                   string // the error of fetch, if there is no answer
}

// An originTest is a browser whose page calls the server.
type originTest struct {
	*browser
	srv *hubstest.Server
	at  origins
}

// fetch makes the page send a request with cookies. init is the second argument of JavaScript's
// fetch.
func (o originTest) fetch(path, init string) pageAnswer {
	o.t.Helper()
	return script[pageAnswer](o.browser, `
		return fetch(arguments[0] + arguments[1], {credentials: 'include', ...`+init+`}).then(
			async r => ({
				status: r.status,
				type: r.type,
				body: await r.text(),
				id: r.headers.get('x-request-id') ?? '',
				retryAfter: r.headers.get('retry-after') ?? '',
				location: r.headers.get('location') ?? ''
			}),
			error => ({failed: String(error)}))`, o.at.api, path)
}

// want is fetch for a request whose answer the page must be able to read.
func (o originTest) want(status int, path, init string) pageAnswer {
	o.t.Helper()
	answer := o.fetch(path, init)
	if answer.Status != status || answer.Type != "cors" || answer.ID == "" {
		o.t.Fatalf("%s: want %d, readable by the page, got %+v", path, status, answer)
	}
	return answer
}

// jsonInit returns the init of a request with a JSON body.
func jsonInit(method, body string) string {
	return `{method: '` + method + `', body: '` + body + `',
		headers: {'content-type': 'application/json', 'x-request-id': 'by-the-page'}}`
}

// testOrigins tests what browsers do with CORS (C1), SameSite and the refusal of cross-site writes
// (C2), on pages of three origins.
func testOrigins(t *testing.T, b *browser, srv *hubstest.Server, at origins) {
	o := originTest{browser: b, srv: srv, at: at}
	database := srv.Database
	hubstest.Exec(t, database, "insert into hubs (name) values ('North')")
	hub := "/hubs/" + hubstest.Query[string](t, database, "select hub_id from hubs")
	o.useAll(t, hub)
	o.attack(t, "same site", at.sameSite, hub, 0)
	o.attack(t, "cross site", at.crossSite, hub, 2)

	b.open(at.allowed)
	hubs := o.want(200, "/hubs", `{}`).Body
	if strings.Count(hubs, "hubId") != 2 || strings.Contains(hubs, "Taken") {
		t.Errorf("want the two hubs of this test, unchanged by foreign pages, got %s", hubs)
	}
	if n := hubstest.Query[int](t, database, "select count(*) from files"); n != 0 {
		t.Errorf("got %d files that foreign pages uploaded, want 0", n)
	}
	// No page can show an answer of the server in a frame.
	b.console()
	script[any](b, `return new Promise(loaded => {
		const frame = document.createElement('iframe');
		frame.onload = () => loaded();
		frame.src = arguments[0];
		document.body.append(frame);
	})`, at.api+"/healthz")
	b.wantConsole("frame-ancestors 'none'")
}

// useAll opens a page of the allowed origin. The page can sign in and use the API, and can read
// each answer.
func (o originTest) useAll(t *testing.T, hub string) {
	o.open(o.at.allowed)
	email, _ := o.srv.NewUser(t, "admin")
	askCode := jsonInit("POST", fmt.Sprintf(`{"email":%q}`, email))
	o.want(200, "/auth/otp/request", askCode)
	code := fmt.Sprintf(`{"email":%q,"code":%q}`, email, o.srv.Code(t, email))
	signedIn := o.want(200, "/auth/otp/validate", jsonInit("POST", code))
	if signedIn.ID != "by-the-page" || !strings.Contains(signedIn.Body, email) {
		t.Errorf("sign-in: want the page's X-Request-Id and the user's address, got %+v", signedIn)
	}
	// The browser has the cookie for this page too, although its port or its host name is not the
	// server's. No script may read it.
	if visible := script[string](o.browser, "return document.cookie"); visible != "" {
		t.Errorf("document.cookie: got %q, want it empty", visible)
	}
	o.want(403, "/hubs", `{}`)
	version := regexp.MustCompile(`"version":"[^"]*"`).FindString(signedIn.Body)
	o.want(200, "/terms/acceptance", jsonInit("POST", "{"+version+"}"))
	created := o.want(201, "/hubs", jsonInit("POST", `{"name":"South"}`))
	if !strings.HasPrefix(created.Location, "/hubs/") {
		t.Errorf("want a Location that the page can read, got %+v", created)
	}
	o.want(200, hub, jsonInit("PATCH", `{"status":"archived"}`))
	// The page can also read the refusal by the limit of the endpoint itself.
	limit := hubstest.LimitOf(o.t, "POST /auth/otp/request").Requests
	for range limit - 1 {
		o.want(200, "/auth/otp/request", askCode)
	}
	limited := o.want(429, "/auth/otp/request", askCode)
	if limited.RetryAfter == "" || !strings.Contains(limited.Body, "rate_limited") {
		t.Errorf("want Retry-After and rate_limited, got %+v", limited)
	}
}

// attacks are the requests of a page whose origin is not allowed. init is as in fetch.
var attacks = []struct{ path, init string }{
	// Reads. The page must not see the answer, neither with CORS nor without.
	{"/auth/session", `{}`},
	{"/auth/session", `{mode: 'no-cors'}`},
	{"{hub}", `{headers: {'x-request-id': 'by-a-foreign-page'}}`},
	// Writes that need a preflight, which the server does not grant.
	{"{hub}", `{method: 'DELETE'}`},
	{"{hub}", jsonInit("PATCH", `{"name":"Taken"}`)},
	// Writes that need no preflight. The request comes to the server, and the server refuses it.
	{"/hubs", `{method: 'POST', mode: 'no-cors', body: '{"name":"Foreign"}'}`},
	{"/auth/logout", `{method: 'POST', mode: 'no-cors'}`},
	{"/files/upload", `{method: 'POST', mode: 'no-cors', body: (() => {
		const form = new FormData();
		form.append('file', new File(['x'], 'x.txt'));
		return form;
	})()}`},
}

// attack opens a page whose origin is not allowed. The page can read nothing and write nothing. Its
// two requests to /auth/session come to the server, withoutCookie of them without the cookie.
func (o originTest) attack(t *testing.T, name, page, hub string, withoutCookie int) {
	o.open(page)
	refused := func() int { return o.srv.Log.Count(`"code":"cross_origin"`) }
	noSession := func() int {
		return o.srv.Log.Count(`"reason":"missing"`, `"route":"/auth/session"`)
	}
	refusedBefore := refused()
	noSessionBefore := noSession()
	for _, attack := range attacks {
		answer := o.fetch(strings.Replace(attack.path, "{hub}", hub, 1), attack.init)
		isOpaque := answer == pageAnswer{Type: "opaque"}
		if answer.Failed == "" && !isOpaque {
			t.Errorf("%s: fetch %s %s: want no answer that the page can read, got %+v",
				name, attack.path, attack.init, answer)
		}
	}
	// A form needs neither fetch nor CORS.
	script[any](o.browser, `
		document.body.innerHTML = '<form method="post"><button>Win a prize</button></form>';
		document.forms[0].action = arguments[0] + '/auth/logout';
		document.forms[0].submit()`, o.at.api)
	o.waitText("body", `"cross_origin"`)
	if got := refused() - refusedBefore; got != 4 {
		t.Errorf("%s: got %d writes refused, want 4: hub, logout, upload and form", name, got)
	}
	if got := noSession() - noSessionBefore; got != withoutCookie {
		t.Errorf("%s: got %d requests without the cookie, want %d", name, got, withoutCookie)
	}
}

// The policy of the learner's page allows its one style and its one script, by their hashes, and
// nothing else that an attacker may get into the page. TestPageHashes compares the hashes. One
// engine suffices, because every engine reads the same policy.
func TestPagePolicy(t *testing.T) {
	t.Parallel()
	b := newBrowser(t, chromium, "")
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
	if ran := script[any](b, "return window.hostile ?? null"); ran != nil {
		t.Errorf("hostile script %v ran, want none to run", ran)
	}
}
