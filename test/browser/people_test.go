package browser

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"hubs/internal/hubstest"
)

// What people do with a code or a file, the learner's page expects.
func TestPageExpectsPeople(t *testing.T) {
	t.Parallel()
	for name, use := range map[string]func(*learner){
		"codes as people paste them": (*learner).pasteCodes,
		"an answer that breaks off":  (*learner).loseAnswer,
		"files that can't be read":   (*learner).chooseUnreadable,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			use(newLearner(t, hubstest.NewMailServer(t, hubstest.MailOptions{}).Env()))
		})
	}
}

// pastes are texts that people paste in place of a code, and what a page must make of them.
var pastes = map[string]string{
	"098056":           "098056",
	" 098056\u00a0":    "098056",
	"098-056":          "098056",
	"098 056":          "098056",
	asPasted("098056"): "098056",
	"G-098056":         "098056",
	"Your sign-in code is ०९८०५६।":                               "098056",
	"Code 098056 of 2026-11-28 9:15":                             "098056",
	"098056 (digit by digit: 0 9 8 0 5 6), within 10 minutes":    "098056",
	"Your code for x.example: 098056 Your code for x is 098056.": "098056",
	"12345":         "12345",
	"1234567":       "1234567",
	"098056 123456": "098056123456",
	"no code":       "",
}

// wantPastes pastes each text and presses a button. It compares the code that the page wants to
// send. No request leaves the page.
func (b *browser) wantPastes(button string) {
	b.t.Helper()
	script[any](b, `window.fetch = (url, init) => {
		if (init.body) window.sent = JSON.parse(init.body).code;
		return Promise.reject(new TypeError('not sent'));
	}`)
	for text, want := range pastes {
		script[any](b, "document.querySelector('#code').value = arguments[0]; window.sent = null", text)
		hubstest.WaitFor(b.t, fmt.Sprintf("what is sent for %q", text), "sent "+want, func() string {
			return script[string](b, `if (window.sent === null) document.querySelector(arguments[0]).click();
				return window.sent === null ? '' : 'sent ' + window.sent`, button)
		})
	}
}

// mailedText returns the text of the next mail to an address, as an input has it after a paste.
func mailedText(t testing.TB, s *hubstest.Server, email string) string {
	t.Helper()
	_, text, _ := strings.Cut(s.Mail.WaitMail(t, email).Data, "\r\n\r\n")
	return strings.ReplaceAll(text, "\r\n", "")
}

// pasteCodes pastes codes, and at last the whole mail.
func (l *learner) pasteCodes() {
	l.open(l.srv.Base + "/")
	l.waitFor("document.readyState === 'complete'")
	l.wantPastes("#validate")
	l.open(l.srv.Base + "/")
	l.enter("#email", l.email)
	l.enter("#code", mailedText(l.t, l.srv, l.email))
	l.waitText("#message-validate", "You are signed in as "+l.email)
}

func (e *exampleUser) pasteCodes() {
	email, _ := e.srv.NewUser(e.t, "member")
	e.begin(e.page)
	e.keys("#email", email)
	e.click("#have")
	e.waitFor(isVisible, "#present")
	e.wantPastes("#present button")
	e.post("/refresh", params{})
	e.srv.Client(e.t).AskCode(email)
	e.waitFor(isVisible, "#present")
	e.keys("#code", mailedText(e.t, e.srv, email)+enterKey)
	e.waitText("#who", email)
}

// breakOff starts a proxy in front of a server, and returns its URL. The first answer to a path
// breaks off after its headers, with the cookie in them.
func breakOff(t testing.TB, s *hubstest.Server, path string) (url string) {
	var isBroken atomic.Bool
	proxy := httputil.NewSingleHostReverseProxy(parseURL(t, s.Base))
	proxy.ModifyResponse = func(r *http.Response) error {
		if r.Request.URL.Path == path && isBroken.CompareAndSwap(false, true) {
			r.Body = http.NoBody // shorter than its Content-Length
		}
		return nil
	}
	return serve(t, proxy.ServeHTTP)
}

func parseURL(t testing.TB, text string) *url.URL {
	t.Helper()
	u, err := url.Parse(text)
	hubstest.Must(t, err)
	return u
}

// loseAnswer signs in, but the answer breaks off. The user presents the code again: the page does
// not say that it is wrong, but who is signed in.
func (l *learner) loseAnswer() {
	l.open(breakOff(l.t, l.srv, "/auth/otp/validate") + "/")
	l.enter("#email", l.email)
	code := l.srv.Code(l.t, l.email)
	l.enter("#code", code)
	l.waitText("#message-validate", "No answer came.")
	l.enter("#code", code)
	l.waitText("#message-validate", "This browser's session is now that of "+l.email)
	l.wantEqual("the session is shown", l.visible("#sign-out"), true)
}

// presentUsedCode presents a code that has signed in already, in another tab. The page shows whose
// session it is. A wrong code, without a session, is a wrong code.
func (e *exampleUser) presentUsedCode() {
	email, _ := e.srv.NewUser(e.t, "member")
	e.begin(e.page)
	e.keys("#email", email+enterKey)
	e.waitFor(isVisible, "#present")
	code := e.srv.Code(e.t, email)
	e.keys("#code", hubstest.OtherCode(code, 1)+enterKey)
	e.waitText("#message", "invalid_code")
	e.send(withLocalhost(e.srv.Base), "/auth/otp/validate", map[string]string{"email": email, "code": code})
	e.keys("#code", code+enterKey)
	e.waitText("#who", email)
	e.wantEqual("a complaint", e.text("#message"), "")
}

// send makes the page send a POST with a JSON body to a server. The page's own script knows nothing
// of it, as of what another tab does.
func (b *browser) send(api, path string, body any) {
	b.t.Helper()
	status := script[int](b, `return fetch(arguments[0], {method: 'POST', credentials: 'include',
		headers: {'content-type': 'application/json'}, body: JSON.stringify(arguments[1])})
		.then(answer => answer.status)`, api+path, body)
	if status >= 300 {
		b.t.Fatalf("setup: POST %s: got status %d, want success", path, status)
	}
}

// spoil has what may happen to a file between its choice and its upload.
var spoil = map[string]func(path string) error{
	"removed":  os.Remove,
	"renamed":  func(path string) error { return os.Rename(path, path+".old") },
	"shrunk":   func(path string) error { return os.Truncate(path, 10) },
	"grown":    func(path string) error { return os.WriteFile(path, make([]byte, 5000), 0o600) },
	"replaced": func(path string) error { return os.WriteFile(path, make([]byte, 4000), 0o600) },
}

// wantUnreadable chooses files that can't be read when they are to be sent, and a folder. For each,
// the page must say so, and must send nothing.
func (b *browser) wantUnreadable(s *hubstest.Server, message string) {
	b.t.Helper()
	for _, name := range slices.Sorted(maps.Keys(spoil)) {
		path := b.chooseFile(name+".txt", strings.Repeat("text", 1000))
		// Chromium looks at a file a moment after it was chosen. It must not be the spoiled one.
		script[int](b, "return document.querySelector('#file').files[0].arrayBuffer().then(bytes => bytes.byteLength)")
		hubstest.Must(b.t, spoil[name](path))
		b.waitUnreadable(name, message)
	}
	b.dropFolder()
	b.waitUnreadable("folder", message)
	s.WantStored(b.t, 0)
	b.chooseFile("good.txt", "text")
	b.click("#upload:is(button), #upload button")
	hubstest.WaitFor(b.t, "files", 1, func() int {
		return hubstest.Query[int](b.t, s.Database, "select count(*) from files")
	})
}

// waitUnreadable presses the button for an upload and waits for the message.
func (b *browser) waitUnreadable(name, message string) {
	b.t.Helper()
	script[any](b, "document.querySelector(arguments[0]).textContent = ''", message)
	b.click("#upload:is(button), #upload button")
	hubstest.WaitFor(b.t, "the message about a file that is "+name, "This file can't be read: choose it again.",
		func() string { return b.text(message) })
}

// dropFolder drops a folder on the input for files.
func (b *browser) dropFolder() {
	b.t.Helper()
	folder := filepath.Join(b.t.TempDir(), "folder")
	hubstest.Must(b.t, os.Mkdir(folder, 0o700))
	b.element("#file")
	at := script[[]float64](b, `const {left, top} = document.querySelector('#file').getBoundingClientRect();
		return [left + 10, top + 10]`)
	for _, kind := range []string{"dragEnter", "dragOver", "drop"} {
		b.devTools("Input.dispatchDragEvent", params{
			"type": kind, "x": at[0], "y": at[1],
			"data": params{"items": []any{}, "files": []string{folder}, "dragOperationsMask": 1},
		})
	}
	b.waitFor("document.querySelector('#file').files[0]?.name === 'folder'")
}

func (l *learner) chooseUnreadable() {
	l.open(l.srv.Base + "/")
	l.enter("#email", l.email)
	l.enter("#code", l.srv.Code(l.t, l.email))
	l.waitFor(isVisible, "#terms-accept")
	l.press("#terms-accept")
	l.waitFor(isVisible, "#upload")
	l.wantUnreadable(l.srv, "#message-upload")
}

func (e *exampleUser) chooseUnreadable() {
	e.begin(e.page)
	e.signIn("Upload")
	e.waitFor(isVisible, "#upload")
	e.wantUnreadable(e.srv, "#message")
}
