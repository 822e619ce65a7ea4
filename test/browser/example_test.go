package browser

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"hubs/internal/hubstest"
)

// builtExample builds the example front end once, in a copy of the working tree, with the commands
// of docs/clients.md. It returns the example's folder.
var builtExample = sync.OnceValues(func() (dir string, err error) {
	dir = filepath.Join(hubstest.Dir, "built")
	for _, folder := range []string{"examples", "web"} {
		from := os.DirFS(filepath.Join(hubstest.Root(), folder))
		if err := os.CopyFS(filepath.Join(dir, folder), from); err != nil {
			return "", err
		}
	}
	document, err := os.ReadFile(filepath.Join(hubstest.Root(), "docs", "clients.md"))
	if err != nil {
		return "", err
	}
	_, text, _ := strings.Cut(string(document), "```sh\n")
	commands, _, _ := strings.Cut(text, "```")
	cmd := exec.Command("sh", "-ec", commands)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", commands, err, out)
	}
	return filepath.Join(dir, "examples"), nil
})

// askRegistry asks npm's registry, once, whether it answers.
var askRegistry = sync.OnceValue(func() error {
	return exec.Command("npm", "ping", "--fetch-retries=0", "--fetch-timeout=30000").Run()
})

// exampleSite serves the example on a port of its own. The page at /?api=URL calls the server at
// that URL.
func exampleSite(t testing.TB) (url string) {
	hubstest.Need(t, "npm", "npm")
	if askRegistry() != nil {
		hubstest.Skip(t, "npm's registry, which has the example's packages, does not answer")
	}
	dir, err := builtExample()
	if err != nil {
		t.Fatal("can't build the example: ", err)
	}
	const standard = `content="http://localhost:8080"`
	index := hubstest.ReadFile(t, "examples/index.html")
	if !strings.Contains(index, standard) {
		t.Fatalf("examples/index.html has no %s to replace", standard)
	}
	files := http.FileServer(http.Dir(dir))
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
	srv *hubstest.Server
}

// The example works on another port of the server's host, in all engines: a user signs in, accepts
// the terms, lists hubs, uploads a picture and meets a limit. On a host name other than the
// server's, the browser does not keep the session.
func TestExampleInBrowser(t *testing.T) {
	t.Parallel()
	inEachEngine(t, func(t *testing.T, b *browser) {
		byNumber := exampleSite(t)
		byName := withLocalhost(byNumber)
		srv := hubstest.Start(t, map[string]string{"ALLOWED_ORIGINS": byName + "," + byNumber})
		e := &exampleUser{browser: b, srv: srv}
		hubstest.Exec(t, srv.Database,
			"insert into hubs (name) select 'Hub ' || to_char(n, 'FM00') from generate_series(1, 12) n")

		page := byName + "/?api=" + withLocalhost(srv.Base)
		e.begin(page)
		e.signIn("Hub 01 (active)")
		e.turnPages()
		b.keys("#name", "ub 07"+enterKey)
		b.waitFor("document.querySelector('#list').textContent === 'Hub 07 (active)'")
		e.uploadPicture()
		if !e.showsWithoutCrossorigin() {
			t.Error("a picture without crossorigin from another port of localhost: " +
				"got it not shown, want it shown")
		}
		b.open(page)
		b.waitText("#list", "Hub 01 (active)")
		b.click("#leave button")
		e.askTooOften()
		if script[bool](b, "return "+mayAsk) {
			t.Error("after a 429: got the button enabled, want it disabled")
		}

		// The same with 127.0.0.1 as the host name. Only here, Chromium treats another port as
		// another site.
		e.begin(byNumber + "/?api=" + srv.Base)
		e.signIn("Hub 01 (active)")
		e.uploadPicture()
		if shown := e.showsWithoutCrossorigin(); shown != (b.engine != chromium) {
			t.Errorf("a picture without crossorigin from another port of 127.0.0.1: got shown %v, "+
				"want it shown in all engines but Chromium", shown)
		}
		b.click("#leave button")

		// Two host names are two sites. So the browser does not keep the cookie, which is SameSite=Lax.
		e.begin(byName + "/?api=" + srv.Base)
		e.signIn("unauthenticated")
	})
}

// begin opens the example and waits for its first form. Nobody is signed in.
func (e *exampleUser) begin(page string) {
	e.open(page)
	e.waitFor(isVisible, "#ask")
}

// signIn signs a new user in, accepts the terms, and waits until the page has the text.
func (e *exampleUser) signIn(text string) {
	email, _ := e.srv.NewUser(e.t, "member")
	e.keys("#email", email+enterKey)
	e.waitText("#message", "a code is on its way")
	e.keys("#code", e.srv.Code(e.t, email)+enterKey)
	e.waitFor(isVisible, "#accept")
	e.click("#accept button")
	e.waitText("body", text)
}

// turnPages goes to the second and last page of hubs, and back.
func (e *exampleUser) turnPages() {
	e.click("#next button")
	e.waitText("#list", "Hub 12")
	if e.visible("#next") {
		e.t.Error("the last page of hubs: got the button for a next page, want none")
	}
	e.click("#previous button")
	e.waitText("#list", "Hub 01")
}

// uploadPicture uploads a picture and waits until the page shows it.
func (e *exampleUser) uploadPicture() {
	e.keys("#file", e.writeFile("picture.png", picture()))
	e.click("#upload button")
	e.waitFor("document.querySelector('#uploaded img')?.naturalWidth === 300")
}

// showsWithoutCrossorigin reports whether the browser shows the uploaded picture in an element
// without the attribute crossorigin.
func (e *exampleUser) showsWithoutCrossorigin() bool {
	return script[bool](e.browser, `return new Promise(result => {
		const picture = new Image();
		picture.onload = () => result(true);
		picture.onerror = () => result(false);
		picture.src = document.querySelector('#uploaded a').href + '?plain';
	})`)
}

const mayAsk = "!document.querySelector('#ask button').disabled"

// askTooOften asks for one code more than the limit permits, and waits until the page says so.
func (e *exampleUser) askTooOften() {
	e.waitFor(isVisible, "#ask")
	e.keys("#email", "nobody@example.com")
	limit := hubstest.LimitOf(e.t, "POST /auth/otp/request").Requests
	for range limit + 1 {
		e.waitFor(mayAsk)
		e.click("#ask button")
	}
	e.waitText("#message", "rate_limited")
}
