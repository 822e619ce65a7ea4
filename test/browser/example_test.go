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

// builtExample builds the example front end once, as docs/clients.md says, and returns its
// folder. It takes the tools from npm, in the versions that the document names.
var builtExample = sync.OnceValues(func() (dir string, err error) {
	dir = filepath.Join(hubstest.Dir, "example")
	err = os.CopyFS(dir, os.DirFS(filepath.Join(hubstest.Root(), "examples")))
	if err != nil {
		return "", err
	}
	contract := filepath.Join(hubstest.Root(), "web", "openapi.json")
	for _, command := range []string{
		"npm install --silent --no-audit --no-fund openapi-typescript@7.13.0 typescript@5.9.3",
		"npx openapi-typescript " + contract + " -o api.d.ts",
		"npx tsc --strict --target es2022 --module es2022 app.ts",
	} {
		cmd := exec.Command("sh", "-c", command)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("%s: %w\n%s", command, err, out)
		}
	}
	return dir, nil
})

// exampleSite serves the example on a port of its own. The page calls the server at *api, which may
// change between requests for the page.
func exampleSite(t testing.TB, api *string) (url string) {
	hubstest.Need(t, "npm", "npm")
	dir, err := builtExample()
	if err != nil {
		t.Fatal("can't build the example, which needs npm's registry: ", err)
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
		writePage(w, strings.Replace(index, standard, `content="`+*api+`"`, 1))
	})
}

// An exampleUser uses the example in one browser.
type exampleUser struct {
	*browser
	api string // the URL of the server that the page calls
	srv *hubstest.Server
}

// The example works on another port of the server's host, in all engines: a user signs in, accepts
// the terms, lists hubs, uploads a picture and meets a limit. On a host name other than the
// server's, the browser does not keep the session.
func TestExampleInBrowser(t *testing.T) {
	t.Parallel()
	inEachEngine(t, func(t *testing.T, b *browser) {
		e := &exampleUser{browser: b}
		byNumber := exampleSite(t, &e.api)
		byName := withLocalhost(byNumber)
		e.srv = hubstest.Start(t, map[string]string{"ALLOWED_ORIGINS": byName + "," + byNumber})
		hubstest.Exec(t, e.srv.Database,
			"insert into hubs (name) select 'Hub ' || to_char(n, 'FM00') from generate_series(1, 12) n")

		e.api = withLocalhost(e.srv.Base)
		e.begin(byName)
		e.signIn("Hub 01 (active)")
		e.turnPages(t)
		b.keys("#name", "ub 07"+enterKey)
		b.waitFor("document.querySelector('#list').textContent === 'Hub 07 (active)'")
		if !e.showsPicture(t) {
			t.Error("want a picture without crossorigin from another port of localhost shown")
		}
		b.open(byName)
		b.waitText("#list", "Hub 01 (active)")
		b.click("#leave button")
		e.askTooOften(t)

		// The same with 127.0.0.1 as the host name. Only here, Chromium treats another port as
		// another site.
		e.api = e.srv.Base
		e.begin(byNumber)
		e.signIn("Hub 01 (active)")
		if shown := e.showsPicture(t); shown != (b.engine != chromium) {
			t.Errorf("a picture without crossorigin from another port of 127.0.0.1: got shown %v, "+
				"want it shown in all engines but Chromium", shown)
		}
		b.click("#leave button")

		// Two host names are two sites. So the browser does not keep the cookie, which is SameSite=Lax.
		e.begin(byName)
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
func (e *exampleUser) turnPages(t *testing.T) {
	e.click("#next button")
	e.waitText("#list", "Hub 12")
	if e.visible("#next") {
		t.Error("the last page of hubs offers a next page")
	}
	e.click("#previous button")
	e.waitText("#list", "Hub 01")
}

// showsPicture uploads a picture and waits until the page shows it. It reports whether the browser
// also shows the picture without crossorigin.
func (e *exampleUser) showsPicture(t *testing.T) (without bool) {
	path := filepath.Join(t.TempDir(), "picture.png")
	if err := os.WriteFile(path, []byte(picture()), 0o600); err != nil {
		t.Fatal(err)
	}
	e.keys("#file", path)
	e.click("#upload button")
	e.waitFor("document.querySelector('#uploaded img')?.naturalWidth === 300")
	return script[bool](e.browser, `return new Promise(result => {
		const picture = new Image();
		picture.onload = () => result(true);
		picture.onerror = () => result(false);
		picture.src = document.querySelector('#uploaded a').href + '?plain';
	})`)
}

// askTooOften asks for one code more than the limit permits. The page must say so, and must disable
// the button.
func (e *exampleUser) askTooOften(t *testing.T) {
	e.waitFor(isVisible, "#ask")
	e.keys("#email", "nobody@example.com")
	const enabled = "!document.querySelector('#ask button').disabled"
	limit := hubstest.LimitOf(t, "POST /auth/otp/request").Requests
	for range limit + 1 {
		e.waitFor(enabled)
		e.click("#ask button")
	}
	e.waitText("#message", "rate_limited")
	if script[bool](e.browser, "return "+enabled) {
		t.Error("the button is enabled after a 429, want it disabled")
	}
}
