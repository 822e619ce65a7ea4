package browser

import (
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

func serve(t testing.TB, handler http.HandlerFunc) (url string) {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

// servePage serves a page on a port of its own.
func servePage(t testing.TB, page string) (url string) {
	return serve(t, func(w http.ResponseWriter, _ *http.Request) { writePage(w, page) })
}

func writePage(w http.ResponseWriter, page string) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	io.WriteString(w, page)
}

const emptyPage = `<!doctype html><title>Another page</title><link rel="icon" href="data:,">`

// The origins are those of pages that a browser opens, and of the server that they call.
type origins struct {
	api, allowed        string
	sameSite, crossSite string // not allowed; a request of the former has the cookie
}

// Sites don't differ by port. So of the two foreign pages one is of the same site, and its
// requests bear the cookie; the other is not.
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

// The same as it is deployed: over TLS, behind a proxy, on names of one domain, all of whose
// subdomains are allowed.
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

// behindProxy serves by TLS: the server on its name, a page on all others. It returns the address.
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

// A pageAnswer is what a script gets to see of an answer.
type pageAnswer struct {
	Status                   int
	Type, Body               string
	ID, RetryAfter, Location string // headers; "" where the browser hides them
	Failed                   string // what fetch threw instead
}

// An originTest is a browser with a page of one origin open, which calls the server.
type originTest struct {
	*browser
	srv *hubstest.Server
	at  origins
}

// fetch has the page make a request, with cookies. init is what fetch takes, in JavaScript.
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

// want is fetch for an answer that the page may read.
func (o originTest) want(status int, path, init string) pageAnswer {
	o.t.Helper()
	answer := o.fetch(path, init)
	if answer.Status != status || answer.Type != "cors" || answer.ID == "" {
		o.t.Fatalf("%s: want %d, got %+v", path, status, answer)
	}
	return answer
}

func jsonInit(method, body string) string {
	return `{method: '` + method + `', body: '` + body + `',
		headers: {'content-type': 'application/json', 'x-request-id': 'by-the-page'}}`
}

// testOrigins is what browsers make of CORS (C1), SameSite and the refusal of cross-site writes
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
		t.Errorf("a foreign page has written: %s", hubs)
	}
	if n := hubstest.Query[int](t, database, "select count(*) from files"); n != 0 {
		t.Errorf("foreign pages have uploaded %d files", n)
	}
	// No page can frame the server's.
	b.console()
	script[any](b, `return new Promise(loaded => {
		const frame = document.createElement('iframe');
		frame.onload = () => loaded();
		frame.src = arguments[0];
		document.body.append(frame);
	})`, at.api+"/healthz")
	b.wantConsole("frame-ancestors 'none'")
}

// useAll: a page of an allowed origin can do all that the API offers, and read each answer.
func (o originTest) useAll(t *testing.T, hub string) {
	o.open(o.at.allowed)
	email, _ := o.srv.NewUser(t, "admin")
	askCode := jsonInit("POST", `{"email":"`+email+`"}`)
	o.want(200, "/auth/otp/request", askCode)
	code := `{"email":"` + email + `","code":"` + o.srv.Code(t, email) + `"}`
	signedIn := o.want(200, "/auth/otp/validate", jsonInit("POST", code))
	if signedIn.ID != "by-the-page" || !strings.Contains(signedIn.Body, email) {
		t.Errorf("got %+v", signedIn)
	}
	// Cookies don't differ by port either.
	if visible := script[string](o.browser, "return document.cookie"); visible != "" {
		t.Errorf("document.cookie: %q", visible)
	}
	o.want(403, "/hubs", `{}`)
	version := regexp.MustCompile(`"version":"[^"]*"`).FindString(signedIn.Body)
	o.want(200, "/terms/acceptance", jsonInit("POST", "{"+version+"}"))
	created := o.want(201, "/hubs", jsonInit("POST", `{"name":"South"}`))
	if !strings.HasPrefix(created.Location, "/hubs/") {
		t.Errorf("no Location to read: %+v", created)
	}
	o.want(200, hub, jsonInit("PATCH", `{"status":"archived"}`))
	// The endpoint's own limit answers after CORS.
	limit := hubstest.LimitOf(o.t, "POST /auth/otp/request").Requests
	for range limit - 1 {
		o.want(200, "/auth/otp/request", askCode)
	}
	limited := o.want(429, "/auth/otp/request", askCode)
	if limited.RetryAfter == "" || !strings.Contains(limited.Body, "rate_limited") {
		t.Errorf("got %+v", limited)
	}
}

var attacks = []struct{ path, init string }{
	// Reading: by fetch, and without CORS, when it must yield nothing.
	{"/auth/session", `{}`},
	{"/auth/session", `{mode: 'no-cors'}`},
	{"{hub}", `{headers: {'x-request-id': 'by-a-foreign-page'}}`},
	// Writing that needs a preflight, which is not granted.
	{"{hub}", `{method: 'DELETE'}`},
	{"{hub}", jsonInit("PATCH", `{"name":"Taken"}`)},
	// Writing that needs none: the request gets to the server, which refuses it.
	{"/hubs", `{method: 'POST', mode: 'no-cors', body: '{"name":"Foreign"}'}`},
	{"/auth/logout", `{method: 'POST', mode: 'no-cors'}`},
	{"/files/upload", `{method: 'POST', mode: 'no-cors', body: (() => {
		const form = new FormData();
		form.append('file', new File(['x'], 'x.txt'));
		return form;
	})()}`},
}

// attack: a page of a foreign origin can read nothing and write nothing. Both reads get through
// to the server, without the cookie as often as given.
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
			t.Errorf("%s: fetch %s %s: %+v", name, attack.path, attack.init, answer)
		}
	}
	// A form is older than all of that.
	script[any](o.browser, `
		document.body.innerHTML = '<form method="post"><button>Win a prize</button></form>';
		document.forms[0].action = arguments[0] + '/auth/logout';
		document.forms[0].submit()`, o.at.api)
	o.waitText("body", `"cross_origin"`)
	if got := refused() - refusedBefore; got != 4 {
		t.Errorf("%s: got %d writes refused, want hub, logout, upload and form", name, got)
	}
	if got := noSession() - noSessionBefore; got != withoutCookie {
		t.Errorf("%s: %d requests came without the cookie, want %d", name, got, withoutCookie)
	}
}

// The page's own policy is in force: it allows its one style and its one script, by their
// hashes, and nothing that anyone may get into the page besides. TestPageHashes compares the
// hashes.
func TestPagePolicy(t *testing.T) {
	t.Parallel()
	b := newBrowser(t, chromium, "")
	b.open(hubstest.Start(t).Base + "/")
	b.wantConsole()
	violated := script[[]string](b, `
		const seen = new Set(), outside = arguments[0];
		return new Promise(done => {
			document.addEventListener('securitypolicyviolation', e => {
				seen.add(e.effectiveDirective);
				if (seen.size === 9) done([...seen].sort());
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
		})`, servePage(t, emptyPage))
	want := []string{
		"base-uri", "connect-src", "form-action", "frame-src", "img-src",
		"script-src-attr", "script-src-elem", "style-src-attr", "style-src-elem",
	}
	if !slices.Equal(violated, want) {
		t.Errorf("got refused by the policy: %q, want %q", violated, want)
	}
	if ran := script[any](b, "return window.hostile ?? null"); ran != nil {
		t.Errorf("hostile script %v ran", ran)
	}
}
