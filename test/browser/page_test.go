package browser

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A learner uses the learner's page in one browser, on a server of their own. It counts what the
// page and the server count too.
type learner struct {
	*browser
	srv        *hubstest.Server
	email      string
	codesAsked int // requests for a code
	refusals   int // those that step 9 lists: all but 400 invalid_request, each once
	// messages are parts of the console's messages that this step must cause, in their order.
	messages []string
	axe      string // axe-core, if it is to check the page after each step
}

// newLearner starts a browser, and a server with a new user and 12 hubs.
func newLearner(t *testing.T, settings ...map[string]string) *learner {
	t.Helper()
	s := hubstest.Start(t, settings...)
	email, _ := s.NewUser(t, "member")
	l := &learner{browser: newBrowser(t, ""), srv: s, email: email}
	l.exec(`insert into hubs (name, status, description)
		select 'Hub ' || to_char(n, 'FM00') || case when n = 12 then ' <b>no markup</b>' else '' end,
			case when n > 10 then 'archived' else 'active' end,
			'<b>no markup</b>' from generate_series(1, 12) n`)
	return l
}

// exec changes the server's database.
func (l *learner) exec(query string) {
	hubstest.Exec(l.t, l.srv.Database, query)
}

const exchanges = "document.querySelectorAll('#exchange-log > *').length"

// enter types text and the enter key, which makes the page send a request. It waits for the answer.
func (l *learner) enter(selector, text string) {
	l.t.Helper()
	l.sending(func() { l.keys(selector, text+enterKey) })
}

// press clicks on an element, which makes the page send a request. It waits for the answer.
func (l *learner) press(selector string) {
	l.t.Helper()
	l.sending(func() { l.click(selector) })
}

// sending calls act and waits until the page shows one more request.
func (l *learner) sending(act func()) {
	l.t.Helper()
	before := script[int](l.browser, "return "+exchanges)
	act()
	l.waitFor(exchanges+" > arguments[0]", before)
}

// step takes one step of the story. The console must have the messages that the step must cause, and
// no other.
func (l *learner) step(name string, take func()) {
	l.messages = nil
	l.browser.step(name, take)
	l.wantConsole(l.messages...)
	if l.axe != "" {
		l.wantAccessible(l.axe, name)
	}
}

// waitRefused waits for the message of a refusal, which begins with its status. The console has a
// message about each answer of 400 or more.
func (l *learner) waitRefused(place, message string) {
	l.t.Helper()
	l.waitText(place, message)
	l.messages = append(l.messages, "the server responded with a status of "+message[:3])
	if message != "400 invalid_request" {
		l.refusals++
	}
}

// codeIsSent returns what the page must say after a request for a code, by the contract's example.
func (l *learner) codeIsSent() string {
	schema := hubstest.Contract[any](l.t, "components", "schemas", "CodeAnswer")
	answer := hubstest.Example(schema).(map[string]any)
	minutes := answer["expiresInSeconds"].(float64) / 60
	return fmt.Sprintf("a code of %v digits for it, good for at most %v minutes", answer["codeLength"], minutes)
}

// chooseFile makes a file and chooses it in the page's input for files. The file is an hour old,
// because Chromium compares the times of a file in whole seconds.
func (b *browser) chooseFile(name, content string) (path string) {
	b.t.Helper()
	path = filepath.Join(b.t.TempDir(), name)
	hubstest.WriteFile(b.t, path, content)
	hourAgo := time.Now().Add(-time.Hour)
	hubstest.Must(b.t, os.Chtimes(path, hourAgo, hourAgo))
	b.post(b.element("#file")+"/value", params{"text": path})
	return path
}

// picture returns a PNG, 300 pixels wide.
func picture() string {
	var content bytes.Buffer
	png.Encode(&content, image.NewGray(image.Rect(0, 0, 300, 200)))
	return content.String()
}

// The learner's page works from its first step to its last. After each action it shows the message
// that belongs to the server's answer.
func TestPageInBrowser(t *testing.T) {
	t.Parallel()
	newLearner(t).takeAllSteps()
}

func (l *learner) takeAllSteps() {
	l.step("without the script", l.tryWithoutScript)
	l.step("first sight", l.openPage)
	l.step("steps 1 and 2: sign in", l.signIn)
	l.step("step 3: the cookie", l.inspectCookie)
	l.step("step 4: accept the terms", l.acceptTerms)
	l.step("step 5: list hubs", l.listHubs)
	l.step("step 9: refusals", l.meetRefusals)
	l.step("steps 6 and 7: upload and open files", l.uploadFiles)
	l.step("leave and go back", l.goBack)
	l.step("step 8: sign out", l.signOut)
}

// tryWithoutScript opens the page with a changed script, whose hash is not in the policy. The
// browser does not run the script, and the page must say so.
func (l *learner) tryWithoutScript() {
	page := hubstest.ReadFile(l.t, "web/index.html")
	changed := strings.Replace(page, "</script>", "// changed\n</script>", 1)
	l.open(servePage(l.t, changed))
	l.wantEqual("the message that no script runs is visible", l.visible("#no-script"), true)
	l.messages = []string{"script-src"}
}

func (l *learner) openPage() {
	l.open(l.srv.Base + "/")
	l.wantEqual("the message that no script runs is visible", l.visible("#no-script"), false)
}

// signIn takes steps 1 and 2 with the keyboard.
func (l *learner) signIn() {
	const place = "#message-validate"
	l.enter("#email", l.email)
	l.codesAsked++
	l.waitText("#message-request", l.codeIsSent())
	code := l.srv.Code(l.t, l.email)
	focus := script[string](l.browser, "return document.activeElement.id")
	l.wantEqual("the focus", focus, "code")
	l.enter("#code", "12345")
	l.waitRefused(place, "400 invalid_request")
	l.enter("#code", hubstest.OtherCode(code, 1))
	l.waitRefused(place, "401 invalid_code")
	l.messages = append(l.messages, "a status of 401") // the page has asked for the session before
	l.wantEqual("cookies after a wrong code", len(l.cookies()), 0)
	l.enter("#code", asPasted(code))
	l.waitText(place, "You are signed in as "+l.email)
	l.waitText("#steps [aria-current]", "2 Present") // a moment after the page has scrolled
	l.enter("#code", code)
	l.waitRefused(place, "401 invalid_code")
}

// asPasted returns a code as some people paste or type it: with a sign between, in full-width and in
// Arabic digits. The server would refuse it.
func asPasted(code string) string {
	return strings.Map(func(digit rune) rune { return digit - '0' + '\uff10' }, code[:3]) + "-" +
		strings.Map(func(digit rune) rune { return digit - '0' + '\u0660' }, code[3:])
}

// inspectCookie compares the cookie's attributes as the browser understands them (T6). It requires
// that no script can read the cookie.
func (l *learner) inspectCookie() {
	token := l.wantCookie(browserCookie{
		Name:     l.srv.CookieName(),
		Domain:   "127.0.0.1",
		Path:     "/",
		SameSite: "Lax",
		HTTPOnly: true,
	})
	reachable := script[string](l.browser, `return document.cookie +
		document.documentElement.outerHTML +
		JSON.stringify([localStorage, sessionStorage, history.state])`)
	isReachable := strings.Contains(reachable, token) || strings.Contains(reachable, "eyJ")
	l.wantEqual("a script can read the token", isReachable, false)
	l.wantEqual("document.cookie", script[string](l.browser, "return document.cookie"), "")
	l.wantEqual("what the page says of scripts", l.text("#script-cookie"), "has no trace of it")
}

// wantCookie returns the token in the page's only cookie. It compares the cookie's attributes, and
// checks that the cookie expires within a minute of its token.
func (b *browser) wantCookie(want browserCookie) (token string) {
	b.t.Helper()
	cookies := b.cookies()
	if len(cookies) != 1 {
		b.t.Fatalf("got the cookies %v, want one", cookies)
	}
	got := cookies[0]
	_, claims := hubstest.ReadToken(b.t, got.Value)
	expires, _ := claims["exp"].(float64)
	if difference := float64(got.Expiry) - expires; difference < -60 || difference > 60 {
		b.t.Errorf("got a cookie that expires %v s after its token, want at most 60 s apart",
			difference)
	}
	want.Value = got.Value
	want.Expiry = got.Expiry
	b.wantEqual("the cookie", got, want)
	return got.Value
}

// acceptTerms takes step 4. Until the user has accepted the terms, the server refuses the list of
// hubs, and the page hides the later steps.
func (l *learner) acceptTerms() {
	l.press("#try-hubs")
	l.waitRefused("#message-terms-gate", "403 terms_not_accepted")
	for _, step := range []string{"#list-hubs", "#upload"} {
		l.wantEqual(step+" is visible before the terms", l.visible(step), false)
	}
	l.press("#terms-accept")
	l.waitText("#message-terms", "Accepted.")
	accepted := hubstest.Query[int](l.t, l.srv.Database, "select count(*) from terms_acceptances")
	l.wantEqual("acceptances", accepted, 1)
}

// listHubs takes step 5: pages, filters and order.
func (l *learner) listHubs() {
	waitHubs := func(summary, names string) {
		l.t.Helper()
		l.waitText("#hubs-summary", summary)
		shown := script[string](l.browser,
			"return [...document.querySelectorAll('#hubs strong')].map(e => e.textContent).join()")
		l.wantEqual(summary, shown, names)
	}
	const second = "Hubs 6 to 10. There are more."
	const last = "Hub 12 <b>no markup</b>"
	waitHubs("Hubs 1 to 5. There are more.", "Hub 01,Hub 02,Hub 03,Hub 04,Hub 05")
	l.wantEqual("markup from a text of the server", l.text("#hubs b"), "")
	l.click("#next")
	waitHubs(second, "Hub 06,Hub 07,Hub 08,Hub 09,Hub 10")
	l.click("#next")
	waitHubs("Hubs 11 to 12. These are the last.", "Hub 11,"+last)
	l.click("#previous")
	waitHubs(second, "Hub 06,Hub 07,Hub 08,Hub 09,Hub 10")
	// The driver can't choose an option, because it scrolls the select under the navigation.
	script[any](l.browser, `document.querySelector('#filter-status').value = 'archived';
		document.querySelector('#order-direction').value = 'desc'`)
	l.click("#list-hubs")
	waitHubs("Hubs 1 to 2. These are the last.", last+",Hub 11")
	l.keys("#filter-name", "B 11"+enterKey)
	waitHubs("Hubs 1 to 1. These are the last.", "Hub 11")
	l.keys("#filter-name", "%"+enterKey)
	waitHubs("No hub to show.", "")
}

// upload uploads a file and waits until the page says so.
func (l *learner) upload(name, content string) {
	l.t.Helper()
	l.chooseFile(name, content)
	l.press("#upload")
	l.waitText("#message-upload", name+" is uploaded.")
}

// uploadFiles takes steps 6 and 7, and opens the files. A file that the browser must not show is
// downloaded, by a link of the page and by a link in another file.
func (l *learner) uploadFiles() {
	const found = " is uploaded. The server found it to be "
	const hostile = "<p>Not to be shown.</p>"
	upload := func(name, content, contentType string) (url string) {
		l.upload(name, content)
		l.waitText("#message-upload", name+found+contentType+".")
		name = strings.ReplaceAll(name, " ", "%20")
		l.waitFor("document.querySelector('#preview a')?.href.endsWith(arguments[0])", name)
		return script[string](l.browser, "return document.querySelector('#preview a').href")
	}
	page := upload("hostile.html", hostile, "application/octet-stream")
	l.waitText("#preview a", "Download it")
	l.click("#preview a")
	l.waitDownload("hostile.html", hostile)
	notes := upload("notes.txt", "Some notes.", "text/plain; charset=utf-8")
	picture := upload("a picture.png", picture(), "image/png")
	l.waitFor("document.querySelector('#preview img')?.naturalWidth === 300")
	done := script[int](l.browser, "return document.querySelector('#progress').value")
	l.wantEqual("progress", done, 1)

	l.open(picture)
	l.waitFor("document.images[0]?.naturalWidth === 300")
	hubstest.Must(l.t, os.Remove(filepath.Join(l.downloads, "hostile.html")))
	l.open(notes)
	l.waitText("pre", "Some notes.")
	script[any](l.browser, `const link = document.createElement('a');
		link.href = link.textContent = arguments[0]; document.body.append(link)`, page)
	l.click("a")
	l.waitDownload("hostile.html", hostile)
	l.open(l.srv.Base + "/")
	l.waitText("#message-session", "The session is good.")
}

// waitDownload waits until the folder of downloads has the file with this content.
func (b *browser) waitDownload(name, want string) {
	b.t.Helper()
	hubstest.WaitFor(b.t, "the download of "+name, want, func() string {
		content, _ := os.ReadFile(filepath.Join(b.downloads, name)) // at first there is no file
		return string(content)
	})
}

// meetRefusals takes step 9: refusals because of a role, a limit and a suspension.
func (l *learner) meetRefusals() {
	l.enter("#new-hub-name", "Mine")
	l.waitRefused("#message-member-writes", "403 forbidden")
	l.exec("update users set permission = 'admin'")
	l.enter("#new-hub-name", "Mine")
	l.waitText("#message-member-writes", "The hub “Mine” was made")
	limit := hubstest.LimitOf(l.t, "POST /auth/otp/request")
	for ; l.codesAsked < limit.Requests; l.codesAsked++ {
		l.press("#request-code")
		l.waitText("#message-request", l.codeIsSent())
	}
	l.press("#request-code")
	l.waitRefused("#message-request", "429 rate_limited")
	wait := fmt.Sprintf("Try again in %d min ", int(limit.Period.Minutes())-1)
	l.waitText("#message-request", wait)
	l.waitText("#message-request", "take another address, or restart")
	// The countdown runs on, but it is spoken once.
	shown, spoken := l.text("#message-request"), l.text("#status")
	l.waitFor("document.querySelector('#message-request').textContent !== arguments[0]", shown)
	if got := l.text("#status"); got != spoken || !strings.Contains(got, wait) {
		l.t.Errorf("after another second of the countdown: got %q spoken, want %q as before", got, spoken)
	}
	l.exec("update users set suspended = true")
	l.press("#try-suspended")
	l.waitRefused("#message-suspended", "403 account_suspended")
	l.exec("update users set suspended = false")
	l.press("#check-session")
	l.waitText("#message-session", "The session is good.")
}

// goBack leaves the page and goes back. The page must then show the session as it is now, and no
// used code.
func (l *learner) goBack() {
	l.exec("update users set permission = 'member'")
	l.click("footer a")
	l.waitFor("location.pathname === '/openapi.json'")
	l.post("/back", params{})
	l.waitText("#message-session", "role member")
	code := script[string](l.browser, "return document.querySelector('#code').value")
	l.wantEqual("the code in the page", code, "")
	l.exec("update users set permission = 'admin'")
	l.showAgain()
	l.waitText("#message-session", "role admin")
}

// showAgain does what other browsers do when a user goes back: they show the page's old state, and
// say so. Chromium under its driver loads the page again.
func (l *learner) showAgain() {
	l.t.Helper()
	l.sending(func() {
		script[any](l.browser, "dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
	})
}

// signOut loads the page again and takes step 8. After the sign-out, the page must not show the
// user's file to the next user of the browser.
func (l *learner) signOut() {
	l.open(l.srv.Base + "/")
	l.waitText("#message-session", "The session is good. You are "+l.email)
	l.waitText("#exchange", "The browser sent it by itself")
	l.upload("note.txt", "mine")
	l.waitText("#preview pre", "mine")
	l.press("#sign-out")
	l.waitText("#message-logout", "You are signed out.")
	l.wantEqual("the file after the sign-out", l.text("#preview"), "")
	l.wantEqual("cookies after the sign-out (T7)", len(l.cookies()), 0)
	l.press("#try-session")
	l.waitRefused("#message-no-session", "401 unauthenticated")
	l.waitText("#tries-count", fmt.Sprintf("You have seen %d of 9.", l.refusals))
	l.click("#start-over")
	l.waitText("#tries-count", "You have seen 0 of 9.")
}
