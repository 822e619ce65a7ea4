package browser

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A learner uses the learner's page in one browser, on a server of their own.
type learner struct {
	*browser
	srv             *hubstest.Server
	email, database string
}

// newLearner starts a server with a new user and 12 hubs.
func newLearner(t *testing.T, b *browser) *learner {
	srv := hubstest.Start(t)
	email, _ := srv.NewUser(t, "member")
	l := &learner{
		browser:  b,
		srv:      srv,
		email:    email,
		database: srv.Database,
	}
	hubstest.Exec(t, l.database, `insert into hubs (name, status, description)
		select 'Hub ' || to_char(n, 'FM00') || case when n = 12 then ' <b>no markup</b>' else '' end,
			case when n > 10 then 'archived' else 'active' end,
			'<b>no markup</b>' from generate_series(1, 12) n`)
	return l
}

const exchanges = "document.querySelectorAll('#exchange-log > *').length"

// enter types text and the enter key, which makes the page send a request. Then it waits for the
// message, as press does.
func (l *learner) enter(selector, text, place, message string) {
	l.t.Helper()
	l.send(func() { l.keys(selector, text+enterKey) }, place, message)
}

// press clicks on an element, which makes the page send a request. Then it waits for the message at
// the place. If the message begins with a status, the console must have this refusal as its only
// new message. Otherwise it must have no new message.
func (l *learner) press(selector, place, message string) {
	l.t.Helper()
	l.send(func() { l.click(selector) }, place, message)
}

// send calls act and waits until the page shows one more request and then the message.
func (l *learner) send(act func(), place, message string) {
	l.t.Helper()
	before := script[int](l.browser, "return "+exchanges)
	act()
	l.waitFor(exchanges+" > arguments[0]", before)
	l.waitText("#message-"+place, message)
	if strings.HasPrefix(message, "4") {
		l.wantConsole(refusalMessage + message[:3])
	} else {
		l.wantConsole()
	}
}

// codeIsSent returns what the page must say after a request for a code, by the contract's example.
func codeIsSent(t *testing.T) string {
	answer := hubstest.Contract[map[string]any](t, "paths", "/auth/otp/request", "post",
		"responses", "200", "content", "application/json", "example")
	minutes := answer["expiresInSeconds"].(float64) / 60
	return fmt.Sprintf("a code of %v digits, good for %v minutes", answer["codeLength"], minutes)
}

// writeFile makes a file to upload and returns its path.
func (b *browser) writeFile(name, content string) (path string) {
	path = filepath.Join(b.t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		b.t.Fatal(err)
	}
	return path
}

// picture returns a PNG, 300 pixels wide.
func picture() string {
	var content bytes.Buffer
	png.Encode(&content, image.NewGray(image.Rect(0, 0, 300, 200)))
	return content.String()
}

// The learner's page works from its first step to its last, in each engine. After each action it
// shows the message that belongs to the server's answer.
func TestPageInBrowser(t *testing.T) {
	t.Parallel()
	inEachEngine(t, func(t *testing.T, b *browser) {
		l := newLearner(t, b)
		l.tryWithoutScript(t)
		l.open(l.srv.Base + "/")
		b.look("first sight")
		if b.visible("#no-script") {
			t.Error("the page says that its script has not run, but it has")
		}
		l.walkSignIn(t)
		l.walkCookie(t)
		l.walkTerms(t)
		l.walkHubs(t)
		l.walkFiles(t)
		l.openFiles(t)
		l.walkRefusals(t)
		l.goBack(t)
		l.walkOut(t)
	})
}

// tryWithoutScript opens the page with a changed script, whose hash is not in the policy. The
// browser does not run the script, and the page must say so.
func (l *learner) tryWithoutScript(t *testing.T) {
	page := hubstest.ReadFile(t, "web/index.html")
	changed := strings.Replace(page, "</script>", "// changed\n</script>", 1)
	l.open(servePage(t, changed))
	if !l.visible("#no-script") {
		t.Error("the page does not say that its script has not run")
	}
	l.wantConsole("script-src")
}

// walkSignIn takes steps 1 and 2 with the keyboard.
func (l *learner) walkSignIn(t *testing.T) {
	b := l.browser
	l.enter("#email", l.email, "request", codeIsSent(t))
	code := l.srv.Code(t, l.email)
	if focus := script[string](b, "return document.activeElement.id"); focus != "code" {
		t.Errorf("the focus is at %q, want the input for the code", focus)
	}
	b.wantConsole()
	l.enter("#code", "12345", "validate", "400 invalid_request")
	b.look("with a field error")
	l.enter("#code", hubstest.OtherCode(code, 1), "validate", "401 invalid_code")
	if len(b.cookies()) != 0 {
		t.Errorf("after a wrong code: got the cookies %v, want none", b.cookies())
	}
	// People paste a code as their mail program shows it. The page removes the space. The server
	// would refuse the code with it.
	l.enter("#code", code[:3]+" "+code[3:], "validate", "You are signed in as "+l.email)
	if current := b.text("#steps [aria-current]"); current != "2 Present" {
		t.Errorf("the navigation is at %q, want it at step 2", current)
	}
	l.enter("#code", code, "validate", "401 invalid_code")
}

// walkCookie compares the cookie's attributes as the browser understands them (T6). It requires
// that no script can read the cookie.
func (l *learner) walkCookie(t *testing.T) {
	b := l.browser
	token := wantCookie(t, b, browserCookie{
		Name:     l.srv.CookieName(),
		Domain:   "127.0.0.1",
		Path:     "/",
		SameSite: "Lax",
		HTTPOnly: true,
	})
	reachable := script[string](b, `return document.cookie + document.documentElement.outerHTML +
		JSON.stringify([localStorage, sessionStorage, history.state])`)
	if strings.Contains(reachable, token) || strings.Contains(reachable, "eyJ") {
		t.Error("a script can read the token")
	}
	if visible := script[string](b, "return document.cookie"); visible != "" {
		t.Errorf("document.cookie: got %q, want it empty", visible)
	}
	if said := b.text("#script-cookie"); said != "has no trace of it" {
		t.Errorf("the page says that document.cookie %s, want no trace of the cookie", said)
	}
}

// wantCookie requires that the browser has exactly one cookie for the page, with these attributes,
// and that it expires within a minute of its token. It returns the token.
func wantCookie(t testing.TB, b *browser, want browserCookie) (token string) {
	cookies := b.cookies()
	if len(cookies) != 1 {
		t.Fatalf("got the cookies %v, want one", cookies)
	}
	got := cookies[0]
	_, claims := hubstest.ReadToken(t, got.Value)
	expires, _ := claims["exp"].(float64)
	if difference := float64(got.Expiry) - expires; difference < -60 || difference > 60 {
		t.Errorf("the cookie expires %v s after its token, want at most 60 s apart", difference)
	}
	want.Value = got.Value
	want.Expiry = got.Expiry
	if got != want {
		t.Errorf("got the cookie %+v, want %+v", got, want)
	}
	return got.Value
}

// walkTerms takes step 4. Until the user has accepted the terms, the server refuses the list of
// hubs, and the page hides the later steps.
func (l *learner) walkTerms(t *testing.T) {
	b := l.browser
	b.look("before the terms")
	l.press("#try-hubs", "terms-gate", "403 terms_not_accepted")
	for _, step := range []string{"#list-hubs", "#upload"} {
		if b.visible(step) {
			t.Errorf("%s is visible before the terms are accepted", step)
		}
	}
	l.press("#terms-accept", "terms", "Accepted.")
	accepted := hubstest.Query[int](t, l.database, "select count(*) from terms_acceptances")
	if accepted != 1 {
		t.Errorf("got %d acceptances, want 1", accepted)
	}
}

// walkHubs takes step 5: pages, filters and order.
func (l *learner) walkHubs(t *testing.T) {
	b := l.browser
	wantHubs := func(summary string, names ...string) {
		t.Helper()
		b.waitText("#hubs-summary", summary)
		const shown = "return [...document.querySelectorAll('#hubs strong')].map(e => e.textContent)"
		got := script[[]string](b, shown)
		if !slices.Equal(got, names) {
			t.Errorf("%s: got %q, want %q", summary, got, names)
		}
	}
	const second = "Hubs 6 to 10. There are more."
	const last = "Hub 12 <b>no markup</b>"
	wantHubs("Hubs 1 to 5. There are more.", "Hub 01", "Hub 02", "Hub 03", "Hub 04", "Hub 05")
	if b.text("#hubs b") != "" {
		t.Error("text of the server became markup")
	}
	b.look("with hubs")
	b.click("#next")
	wantHubs(second, "Hub 06", "Hub 07", "Hub 08", "Hub 09", "Hub 10")
	b.click("#next")
	wantHubs("Hubs 11 to 12. These are the last.", "Hub 11", last)
	b.click("#previous")
	wantHubs(second, "Hub 06", "Hub 07", "Hub 08", "Hub 09", "Hub 10")
	// The drivers can't choose an option, because they scroll the select under the navigation.
	script[any](b, `document.querySelector('#filter-status').value = 'archived';
		document.querySelector('#order-direction').value = 'desc'`)
	b.click("#list-hubs")
	wantHubs("Hubs 1 to 2. These are the last.", last, "Hub 11")
	b.keys("#filter-name", "B 11"+enterKey)
	wantHubs("Hubs 1 to 1. These are the last.", "Hub 11")
	b.keys("#filter-name", "%"+enterKey)
	wantHubs("No hub to show.")
	b.wantConsole()
}

// upload uploads a file. Then it waits for a message with the file's name and the text said.
func (l *learner) upload(name, content, said string) {
	l.t.Helper()
	l.keys("#file", l.writeFile(name, content))
	l.press("#upload", "upload", name+said)
}

// walkFiles takes steps 6 and 7, with a file that the browser must not show and one that it shows.
func (l *learner) walkFiles(t *testing.T) {
	b := l.browser
	const found = " is uploaded. The server found it to be "
	l.upload("hostile.html", "<script>alert(1)</script>", found+"application/octet-stream.")
	b.waitText("#preview a", "Download it")
	l.upload("a picture ü.png", picture(), found+"image/png.")
	b.waitFor("document.querySelector('#preview img')?.naturalWidth === 300")
	done := script[float64](b, "return document.querySelector('#progress').value")
	if done != 1 {
		t.Errorf("progress: got %v, want 1", done)
	}
	b.look("with a picture")
}

// openFiles opens files that a browser may show: each opens in a tab of its own, without a message
// in the console. A file that a browser must not show is downloaded, by a link of the page and by a
// link in such a tab.
func (l *learner) openFiles(t *testing.T) {
	b := l.browser
	const hostile = "<p>Not to be shown.</p>"
	l.openUpload("page.html", hostile)
	b.click("#preview a")
	b.wantDownload("page.html", hostile)
	l.openUpload("second.html", hostile)
	second := script[string](b, "return document.querySelector('#preview a').href")
	l.openUpload("picture.png", picture())
	b.inNewTab("#preview a", func() {
		b.waitFor("document.images[0]?.naturalWidth === 300")
		b.wantConsole(iconMessage(b)...)
	})
	l.openUpload("notes.txt", "Some notes.")
	b.inNewTab("#preview a", func() {
		b.waitText("pre", "Some notes.")
		b.wantConsole(iconMessage(b)...)
		script[any](b, `const link = document.createElement('a');
			link.href = link.textContent = arguments[0]; document.body.append(link)`, second)
		b.click("a")
		b.wantDownload("second.html", hostile)
	})
}

// openUpload uploads a file and waits for the link to it.
func (l *learner) openUpload(name, content string) {
	l.upload(name, content, " is uploaded.")
	l.waitFor("document.querySelector('#preview a')?.href.endsWith(arguments[0])", name)
}

// wantDownload waits until the folder of downloads has the file with this content.
func (b *browser) wantDownload(name, want string) {
	hubstest.WaitUntil(b.t, "the download of "+name, func() bool {
		content, err := os.ReadFile(filepath.Join(b.downloads, name))
		return err == nil && string(content) == want
	})
}

// iconMessage returns the console messages of a tab that shows an answer other than the page.
// Firefox reports there that the answer's policy forbids the icon of the tab. To permit the icon,
// the server would have to serve one, to any site.
func iconMessage(b *browser) []string {
	if b.engine == firefox {
		return []string{"favicon.ico"}
	}
	return nil
}

// walkRefusals takes step 9: refusals because of a role, a limit and a suspension.
func (l *learner) walkRefusals(t *testing.T) {
	b := l.browser
	l.enter("#new-hub-name", "Mine", "member-writes", "403 forbidden")
	hubstest.Exec(t, l.database, "update users set permission = 'admin'")
	l.enter("#new-hub-name", "Mine", "member-writes", "The hub “Mine” was made")
	limit := hubstest.LimitOf(t, "POST /auth/otp/request")
	for range limit.Requests - 1 { // walkSignIn has asked once
		l.press("#request-code", "request", codeIsSent(t))
	}
	l.press("#request-code", "request", "429 rate_limited")
	wait := fmt.Sprintf("Try again in %d min ", int(limit.Period.Minutes())-1)
	b.waitText("#message-request", wait)
	b.look("refused by a limit")
	hubstest.Exec(t, l.database, "update users set suspended = true")
	l.press("#try-suspended", "suspended", "403 account_suspended")
	hubstest.Exec(t, l.database, "update users set suspended = false")
	l.press("#check-session", "session", "The session is good.")
}

// goBack leaves the page and goes back. The page must then show the session as it is now, and no
// used code. WebKitGTK shows the old state of the page again. The other engines load it again.
func (l *learner) goBack(t *testing.T) {
	hubstest.Exec(t, l.database, "update users set permission = 'member'")
	l.click("footer a")
	l.waitFor("location.pathname === '/openapi.json'")
	l.wantConsole(iconMessage(l.browser)...)
	l.command("POST", "/back", params{}, nil)
	l.waitText("#message-session", "role member")
	if code := script[string](l.browser, "return document.querySelector('#code').value"); code != "" {
		t.Errorf("the page shows the used code %s, want none", code)
	}
}

// walkOut loads the page again and takes step 8. After the sign-out, the page must not show the
// user's file to the next user of the browser.
func (l *learner) walkOut(t *testing.T) {
	b := l.browser
	b.open(l.srv.Base + "/")
	b.waitText("#message-session", "The session is good. You are "+l.email)
	b.waitText("#exchange-session", "The browser sent it by itself")
	l.upload("note.txt", "mine", " is uploaded.")
	b.waitText("#preview pre", "mine")
	l.press("#sign-out", "logout", "You are signed out.")
	shown := script[string](b, "return document.querySelector('#preview').textContent")
	if shown != "" {
		t.Errorf("after the sign-out the page shows %q, want nothing", shown)
	}
	if left := b.cookies(); len(left) != 0 { // T7
		t.Errorf("after the sign-out the browser has the cookies %v, want none", left)
	}
	b.wantConsole()
	l.press("#try-session", "no-session", "401 unauthenticated")
	// The tries that are left are new terms and a sign-out everywhere.
	b.waitText("#tries-count", "You have seen 7 of 9.")
	b.click("#start-over")
	b.waitText("#tries-count", "You have seen 0 of 9.")
}
