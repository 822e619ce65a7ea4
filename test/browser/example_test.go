package browser

import (
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// exampleSite builds the example front end in a copy of the working tree, with the commands of
// docs/clients.md, and serves it on a port of its own. The page at /?api=URL calls the server at
// that URL. The packages are installed already, as they are locked, so npm finds nothing to do.
func exampleSite(t testing.TB) (url string) {
	t.Helper()
	commands := hubstest.Matches(t, "docs/clients.md", "(?s)```sh\n(.*?)```")[0]
	dir := hubstest.Packages(t, "testdata/example")
	locked := hubstest.ReadFile(t, "test/browser/testdata/example/package.json")
	for _, wanted := range hubstest.Matches(t, "docs/clients.md", `(openapi-typescript@\S+|typescript@\S+)`) {
		name, version, _ := strings.Cut(wanted, "@")
		if !strings.Contains(locked, fmt.Sprintf("%q: %q", name, version)) {
			t.Errorf("docs/clients.md installs %s, want what testdata/example locks:\n%s", wanted, locked)
		}
	}
	shell := exec.Command("sh", "-ec", `cp -R "$0/examples" "$0/web" .; `+commands, hubstest.Root())
	shell.Dir = dir
	if out, err := shell.CombinedOutput(); err != nil {
		t.Fatalf("setup: %s: %v\n%s", commands, err, out)
	}
	const standard = `content="http://localhost:8080"`
	index := hubstest.ReadFile(t, "examples/index.html")
	if !strings.Contains(index, standard) {
		t.Fatalf("setup: examples/index.html has no %s to replace", standard)
	}
	files := http.FileServer(http.Dir(dir + "/examples"))
	return serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			files.ServeHTTP(w, r)
			return
		}
		api := r.URL.Query().Get("api")
		writePage(w, strings.Replace(index, standard, `content="`+api+`"`, 1))
	})
}

// An exampleUser uses the example in one browser.
type exampleUser struct {
	*browser
	srv  *hubstest.Server
	page string // the example's URL, on the server's host name
}

// newExampleUser starts a browser, and a server that allows the example's origin.
func newExampleUser(t testing.TB, site string) *exampleUser {
	t.Helper()
	site = withLocalhost(site)
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	s := hubstest.Start(t, mail.Env(), map[string]string{"ALLOWED_ORIGINS": site})
	return &exampleUser{newBrowser(t, ""), s, site + "/?api=" + withLocalhost(s.Base)}
}

// The example works on another port of the server's host, and for people who do what people do.
func TestExampleInBrowser(t *testing.T) {
	t.Parallel()
	site := exampleSite(t)
	for name, use := range map[string]func(*exampleUser){
		"from sign-in to sign-out":   (*exampleUser).useAll,
		"another tab signs in":       (*exampleUser).noticeOtherTabs,
		"another tab uses the code":  (*exampleUser).presentUsedCode,
		"the session has ended":      (*exampleUser).openEnded,
		"codes as people paste them": (*exampleUser).pasteCodes,
		"files that can't be read":   (*exampleUser).chooseUnreadable,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			use(newExampleUser(t, site))
		})
	}
}

// useAll signs in, accepts the terms, lists hubs, uploads files and meets a limit. On a host name
// other than the server's, the browser does not keep the session.
func (e *exampleUser) useAll() {
	hubstest.Exec(e.t, e.srv.Database,
		"insert into hubs (name) select 'Hub ' || to_char(n, 'FM00') from generate_series(1, 12) n")
	e.begin(e.page)
	e.signIn("Hub 01 (active)")
	e.turnPages()
	e.keys("#name", "ub 07"+enterKey)
	e.waitFor("document.querySelector('#list').textContent === 'Hub 07 (active)'")
	e.uploadPhoto()
	e.uploadPicture()
	e.open(e.page)
	e.waitText("#list", "Hub 01 (active)")
	e.click("#leave button")
	e.useOldCode()
	e.askTooOften()
	e.wantEqual("after a 429, the button is enabled", script[bool](e.browser, "return "+mayAsk), false)

	// Two host names are two sites. So the browser does not keep the cookie, which is SameSite=Lax.
	e.begin(strings.Replace(e.page, withLocalhost(e.srv.Base), e.srv.Base, 1))
	e.signIn("The session has ended.")
}

// begin opens the example and waits for its first form. Nobody is signed in.
func (e *exampleUser) begin(page string) {
	e.open(page)
	e.waitFor(isVisible, "#ask")
}

// signIn signs a new user in, accepts the terms, and waits until the page has the text. While the
// user looks for the code, the browser loads the page anew.
func (e *exampleUser) signIn(text string) (email string) {
	email, _ = e.srv.NewUser(e.t, "member")
	e.keys("#email", email+enterKey)
	e.waitText("#message", "a code is on its way")
	e.post("/refresh", params{})
	e.waitFor(isVisible, "#present")
	e.keys("#code", asPasted(e.srv.Code(e.t, email))+enterKey)
	e.waitFor(isVisible, "#accept")
	e.click("#accept button")
	e.waitText("body", text)
	return email
}

// turnPages goes to the second and last page of hubs, and back. A hub that is deleted meanwhile
// moves none out of the second page.
func (e *exampleUser) turnPages() {
	hubstest.Exec(e.t, e.srv.Database, "delete from hubs where name = 'Hub 02'")
	e.click("#next button")
	e.waitText("#list", "Hub 11 (active)Hub 12")
	e.wantEqual("on the last page, the button for a next page", e.visible("#next"), false)
	e.click("#previous button")
	e.waitText("#list", "Hub 01")
}

// uploadPhoto uploads a photo as many phones make them, in a format that few browsers show. The page
// shows a link and the reason.
func (e *exampleUser) uploadPhoto() {
	e.chooseFile("photo.heic", "\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic")
	e.click("#upload button")
	e.waitText("#uploaded a", "photo.heic")
	e.waitText("#uploaded", "A photo in HEIC must be exported as JPEG first.")
}

// uploadPicture uploads a picture and waits until the page shows it.
func (e *exampleUser) uploadPicture() {
	e.chooseFile("picture.png", picture())
	e.click("#upload button")
	e.waitFor("document.querySelector('#uploaded img')?.naturalWidth === 300")
}

// useOldCode opens the form for a code without asking for one.
func (e *exampleUser) useOldCode() {
	e.waitFor(isVisible, "#ask")
	e.keys("#email", "nobody@example.com")
	e.wantEqual("the form for a code is visible", e.visible("#present"), false)
	e.click("#have")
	e.waitFor(isVisible, "#present")
}

const mayAsk = "!document.querySelector('#ask button').disabled"

// askTooOften asks for one code more than the limit permits, and waits until the page says so.
func (e *exampleUser) askTooOften() {
	limit := hubstest.LimitOf(e.t, "POST /auth/otp/request").Requests
	for range limit + 1 {
		e.waitFor(mayAsk)
		e.click("#ask button")
	}
	e.waitText("#message", "rate_limited")
}

// The settings in docs/clients.md for axios, Uppy, FilePond and Dropzone upload a file from another
// origin. When the server refuses, they show its reason.
func TestUploadRecipes(t *testing.T) {
	t.Parallel()
	dir := hubstest.Packages(t, "testdata/uploaders")
	files := http.FileServer(http.Dir(dir))
	recipes := strings.Join(hubstest.Matches(t, "docs/clients.md", "(?s)```js\n(.*?)```"), "")
	page := withLocalhost(serve(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/node_modules/") {
			files.ServeHTTP(w, r)
			return
		}
		writePage(w, strings.Replace(recipesPage, "RECIPES", recipes, 1))
	}))
	s := hubstest.Start(t, map[string]string{"ALLOWED_ORIGINS": page})
	c, _ := s.Member(t, "member")
	b := newBrowser(t, "")
	b.open(page + "/node_modules/")
	// The cookie of localhost belongs to all its ports.
	b.post("/cookie", params{"cookie": params{"name": s.CookieName(), "value": c.Token()}})

	b.open(page + "?api=" + withLocalhost(s.Base))
	hubstest.WaitFor(t, "files", 5, func() int {
		return hubstest.Query[int](t, s.Database, "select count(*) from files")
	})

	hubstest.Exec(t, s.Database, "update users set suspended = true")
	script[any](b, "sendAll()")
	b.waitFor("reasons.filter(reason => reason.includes('account is suspended')).length === 4")
}

// recipesPage sends a file with each component when it is loaded, with axios two, and one with each
// when sendAll is called. reasons has what the components show of refusals.
const recipesPage = `<!doctype html><link rel="icon" href="data:,"><div id="drop"></div><input type="file">
<script type="module">
import { Uppy, XHRUpload } from '/node_modules/uppy/dist/uppy.min.mjs';
import * as FilePond from '/node_modules/filepond/dist/filepond.esm.js';
import Dropzone from '/node_modules/dropzone/dist/dropzone.mjs';
import axios from '/node_modules/axios/dist/esm/axios.js';
const api = new URLSearchParams(location.search).get('api');
const input = document.querySelector('input'), file = new File(['notes'], 'notes.txt');
window.reasons = [];
RECIPES
uppy.on('upload-error', (file, error) => reasons.push(error.message));
pond.on('processfile', error => { if (error) reasons.push(error.body); });
dropzone.on('error', file => reasons.push(file.previewElement.textContent));
window.sendAll = () => {
	client.postForm('/files/upload', { file }).catch(error => reasons.push(error.response.data.detail));
	uppy.addFile({ name: Date.now() + '.txt', data: file });
	uppy.upload();
	pond.addFile(file);
	dropzone.addFile(new File(['notes'], 'notes.txt'));
};
sendAll();
</script>`
