package browser

import (
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// signInElsewhere signs a user in, in another tab of the browser. Then it closes that tab, and the
// first one comes to the front again.
func (b *browser) signInElsewhere(s *hubstest.Server, email string) {
	b.t.Helper()
	b.inAnotherTab(s, func() { b.signInUnseen(s, withLocalhost(s.Base), email) })
}

// inAnotherTab does something in another tab, on a page of the server. Then it closes that tab.
func (b *browser) inAnotherTab(s *hubstest.Server, act func()) {
	b.t.Helper()
	first := b.tab()
	b.newTab()
	b.open(withLocalhost(s.Base) + "/")
	act()
	b.command("DELETE", "/window", nil, nil)
	b.switchTo(first)
}

// signInUnseen makes the page sign a user in, without its own script.
func (b *browser) signInUnseen(s *hubstest.Server, api, email string) {
	b.t.Helper()
	b.send(api, "/auth/otp/request", map[string]string{"email": email})
	b.send(api, "/auth/otp/validate", map[string]string{"email": email, "code": s.Code(b.t, email)})
}

func (b *browser) signOutElsewhere(s *hubstest.Server) {
	b.t.Helper()
	b.inAnotherTab(s, func() { b.send(withLocalhost(s.Base), "/auth/logout", nil) })
}

// wantAcceptances compares the addresses of those who have accepted the terms.
func (b *browser) wantAcceptances(s *hubstest.Server, emails ...string) {
	b.t.Helper()
	got := hubstest.Query[string](b.t, s.Database, `select coalesce(string_agg(email, ' ' order by accepted_at), '')
		from terms_acceptances join users using (user_id)`)
	b.wantEqual("accepted by", got, strings.Join(emails, " "))
}

// sleep makes the browser stop the tab, as it does with tabs in the background, while something
// happens.
func (b *browser) sleep(during func()) {
	b.t.Helper()
	state := func(state string) { b.devTools("Page.setWebLifecycleState", params{"state": state}) }
	state("frozen")
	during()
	state("active")
}

// The learner's page notices when another tab signs in or out, or lets another account in. An
// acceptance of the terms is never stored for an account that the tab does not show.
func TestPageNoticesOtherTabs(t *testing.T) {
	t.Parallel()
	l := newLearner(t)
	second, _ := l.srv.NewUser(t, "admin")
	third, _ := l.srv.NewUser(t, "member")
	l.open(withLocalhost(l.srv.Base) + "/")

	l.browser.step("nobody is signed in here: somebody signs in there", func() {
		l.signInElsewhere(l.srv, l.email)
		l.open(withLocalhost(l.srv.Base) + "/") // the other tab has left no hint, since it is no page of ours
		l.press("#check-session")
		l.waitText("#terms-user", l.email)
	})
	l.browser.step("another account signs in there", func() {
		l.signInElsewhere(l.srv, second)
		l.waitText("#message-session", "This browser's session is now that of "+second+", role admin.")
		l.wantEqual("who is asked to accept", l.text("#terms-user"), second)
	})
	l.browser.step("a third one signs in, while both tabs are in front", func() {
		l.signInUnseen(l.srv, withLocalhost(l.srv.Base), third)
		l.press("#terms-accept")
		l.waitText("#message-terms", "now that of "+third)
		l.wantAcceptances(l.srv)
		l.press("#terms-accept")
		l.waitText("#message-terms", "Accepted.")
		l.wantAcceptances(l.srv, third)
	})
	l.browser.step("another account does not see what the last one saw", func() {
		l.upload("note.txt", "mine")
		l.waitText("#preview pre", "mine")
		hubstest.Exec(t, l.srv.Database, `insert into terms_acceptances (user_id, version)
			select u.user_id, t.version from users u, terms_acceptances t where u.email = $1`, second)
		l.signInUnseen(l.srv, withLocalhost(l.srv.Base), second)
		l.press("#check-session")
		l.waitText("#terms-user", second)
		l.wantEqual("the file of the last user", l.text("#preview"), "")
		l.signInElsewhere(l.srv, third)
		l.waitText("#message-session", "now that of "+third)
	})
	l.browser.step("the tab is asleep while the account signs out there", func() {
		l.upload("note.txt", "mine")
		l.waitText("#preview pre", "mine")
		l.sleep(func() { l.signOutElsewhere(l.srv) })
		l.waitText("#message-session", "401 unauthenticated")
		l.wantEqual("the file of the last user", l.text("#preview"), "")
		l.wantEqual("the hubs", l.text("#hubs"), "")
	})
}

// noticeOtherTabs is TestPageNoticesOtherTabs for the example.
func (e *exampleUser) noticeOtherTabs() {
	first, _ := e.srv.NewUser(e.t, "member")
	second, _ := e.srv.NewUser(e.t, "member")
	third, _ := e.srv.NewUser(e.t, "member")
	e.begin(e.page)
	e.step("nobody is signed in here: somebody signs in there", func() {
		e.signInElsewhere(e.srv, first)
		e.waitText("#who", first)
	})
	e.step("another account signs in there", func() {
		e.signInElsewhere(e.srv, second)
		e.waitText("#who", second)
	})
	e.step("a third one signs in, while both tabs are in front", func() {
		e.signInUnseen(e.srv, withLocalhost(e.srv.Base), third)
		e.click("#accept button")
		e.waitText("#message", "Another user has signed in, in another tab.")
		e.waitText("#who", third)
		e.wantAcceptances(e.srv)
		e.click("#accept button")
		e.waitFor(isVisible, "#hubs")
		e.wantAcceptances(e.srv, third)
	})
	e.step("the tab is asleep while the account signs out there", func() {
		e.uploadPicture()
		e.sleep(func() { e.signOutElsewhere(e.srv) })
		e.waitFor(isVisible, "#ask")
		e.wantEqual("the file of the last user", e.text("#uploaded"), "")
	})
}

// openEnded follows the link to a file after the session has ended. The refusal, in JSON, is in a tab
// of its own and does not replace the page.
func (e *exampleUser) openEnded() {
	e.begin(e.page)
	email := e.signIn("Upload")
	e.uploadPicture()
	page := e.tab()
	e.srv.User(e.t, "signout", email)
	e.click("#uploaded a")
	hubstest.WaitFor(e.t, "tabs", 2, func() int { return len(e.tabs()) })
	e.switchTo(page)
	e.waitFor(isVisible, "#ask")
}

// Two servers on one host name share the browser's cookies, whatever their ports. With a
// COOKIE_PREFIX of its own, each keeps its session, and the page names its cookie.
func TestTwoServersOnOneHost(t *testing.T) {
	t.Parallel()
	b := newBrowser(t, "")
	prefixes := []string{"hubs", "other"}
	var servers []*hubstest.Server
	for _, prefix := range prefixes {
		s := hubstest.Start(t, map[string]string{"COOKIE_PREFIX": prefix})
		email, _ := s.NewUser(t, "member")
		b.open(s.Base + "/")
		b.signInUnseen(s, s.Base, email)
		servers = append(servers, s)
	}

	for i, s := range servers {
		b.open(s.Base + "/")
		b.click("#check-session")
		b.waitText("#message-session", "The session is good.")
		b.wantEqual("the cookie that the page names", b.text(".cookie-name"), prefixes[i]+"_auth_local")
	}
}

// At a host name that browsers take for insecure, the page can't work. It names an address of its own
// port where it can.
func TestPageNamesItsAddress(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	b := newBrowser(t, "")

	b.open(strings.Replace(s.Base, "127.0.0.1", "hubs.example", 1) + "/")
	b.waitText("#insecure", "Open "+withLocalhost(s.Base)+"/ on the machine that runs")
	b.click("#request-code")
	b.waitText("#message-request", withLocalhost(s.Base)+"/")
	b.open(withLocalhost(s.Base) + "/")
	b.wantEqual("the message at that address", b.visible("#insecure"), false)
}

// After a sign-out, nobody can read a file of the last user from the browser: not by Back, not by
// the history, not from the cache, not from a prefetch, not after a restart that restores all tabs.
// After a sign-out everywhere, which leaves the cookie in the browser, Chromium may go back to a file
// for three minutes; the rest holds (C4).
func TestFilesEndWithTheSession(t *testing.T) {
	t.Parallel()
	app := withLocalhost(servePage(t, emptyPage))
	s := hubstest.Start(t, map[string]string{"ALLOWED_ORIGINS": app})
	r := &reader{newBrowser(t, ""), s, app, withLocalhost(s.Base)}
	signOut := func(string) { r.signOutElsewhere(s) }
	r.step("Back", func() { r.goBack(r.base+"/healthz", signOut) })
	r.step("Back from another origin", func() { r.goBack(r.app, signOut) })
	for name, end := range map[string]func(email string){
		"sign-out":            signOut,
		"sign-out everywhere": func(email string) { s.User(t, "signout", email) },
	} {
		r.step(name+", then the cache", func() { r.fetchAgain(end) })
		r.step(name+", then a prefetched link", func() { r.followPrefetched(end) })
		r.step(name+", then a picture", func() { r.showAgain(end) })
	}
	r.step("a restored session", r.restore)
}

// A reader reads a file in a browser whose session then ends.
type reader struct {
	*browser
	srv       *hubstest.Server
	app, base string // URLs of an allowed page, and of the server
}

const secret = "not for the next one"

// signIn signs a new user in, and uploads a file. It returns the file's URL.
func (r *reader) signIn(name, content string) (email, file string) {
	r.t.Helper()
	c, email := r.srv.Member(r.t, "member")
	r.open(r.base + "/healthz")
	r.setCookie(browserCookie{Name: r.srv.CookieName(), Expiry: 2e9}, c.Token())
	return email, r.base + c.Store(name, content)
}

// wantRefused requires that the tab shows the server's refusal, and not the file.
func (r *reader) wantRefused() {
	r.t.Helper()
	r.waitText("body", "unauthenticated")
	r.wantEqual("the file is shown", strings.Contains(r.text("body"), secret), false)
}

// goBack opens the file, then another page, ends the session, and goes back.
func (r *reader) goBack(page string, end func(email string)) {
	email, file := r.signIn("file.txt", secret)
	r.open(file)
	r.waitText("body", secret)
	r.open(page)
	end(email)
	r.post("/back", params{})
	r.wantRefused()
	r.open(page)
	script[any](r.browser, "setTimeout(() => history.go(-1))")
	r.waitFor("location.href === arguments[0]", file)
	r.wantRefused()
}

// fetchAgain reads the file with fetch, ends the session, and reads it again, from the cache if that
// has it.
func (r *reader) fetchAgain(end func(email string)) {
	email, file := r.signIn("file.txt", secret)
	r.open(r.base + "/")
	read := func(cache string) string {
		return script[string](r.browser, `return fetch(arguments[0], {cache: arguments[1], mode: 'same-origin'})
			.then(answer => answer.text(), String)`, file, cache)
	}
	r.wantEqual("the file during the session", read("default"), secret)
	end(email)
	for _, cache := range []string{"force-cache", "only-if-cached", "default"} {
		r.wantEqual(cache+" has the file", strings.Contains(read(cache), secret), false)
	}
}

// followPrefetched lets a page prefetch the file, ends the session, and follows the page's link.
func (r *reader) followPrefetched(end func(email string)) {
	email, file := r.signIn("file.txt", secret)
	r.open(r.app)
	script[any](r.browser, `return new Promise(loaded => {
		const link = Object.assign(document.createElement('link'), {rel: 'prefetch', href: arguments[0]});
		link.onload = () => loaded();
		document.head.append(link);
		const anchor = Object.assign(document.createElement('a'), {href: arguments[0], textContent: 'file'});
		document.body.append(anchor);
	})`, file)
	end(email)
	r.click("a")
	r.wantRefused()
}

// showAgain shows a picture, ends the session, and loads the page again.
func (r *reader) showAgain(end func(email string)) {
	email, file := r.signIn("picture.png", picture())
	show := func() bool {
		return script[bool](r.browser, `return new Promise(shown => {
			const picture = Object.assign(new Image(), {crossOrigin: 'use-credentials'});
			picture.onload = () => shown(true);
			picture.onerror = () => shown(false);
			picture.src = arguments[0];
		})`, file)
	}
	r.open(r.app)
	r.wantEqual("the picture is shown during the session", show(), true)
	end(email)
	r.post("/refresh", params{})
	r.wantEqual("the picture is shown afterwards", show(), false)
}

// restore opens the file, signs out in another tab, and restarts the browser, which opens all tabs
// again.
func (r *reader) restore() {
	_, file := r.signIn("file.txt", secret)
	r.open(file)
	r.signOutElsewhere(r.srv)
	r.restart("--restore-last-session")
	isRestored := func() bool {
		for _, tab := range r.tabs() {
			r.switchTo(tab)
			if script[string](r.browser, "return location.href") == file {
				return true
			}
		}
		return false
	}
	hubstest.WaitUntil(r.t, "the tab with the file is restored", isRestored)
	r.wantRefused()
}
