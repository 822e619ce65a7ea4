//go:build moving

package main

// The example front end under examples/, built as docs/clients.md says and run on an origin
// of its own, in each engine.

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// builtExample builds the example once, and returns its folder. The tools come from npm,
// in the versions that docs/clients.md names.
var builtExample = sync.OnceValues(func() (dir string, err error) {
	dir = filepath.Join(testDir, "example")
	if err := os.CopyFS(dir, os.DirFS("examples")); err != nil {
		return "", err
	}
	contract, err := filepath.Abs("openapi.json")
	if err != nil {
		return "", err
	}
	for _, command := range []string{
		"npm install --silent --no-audit --no-fund openapi-typescript@7.13.0 typescript@5.9.3",
		"npx openapi-typescript " + contract + " -o api.d.ts",
		"npx tsc --strict --target es2022 --module es2022 app.ts",
	} {
		cmd := exec.Command("sh", "-c", command)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", command, err, out)
		}
	}
	return dir, nil
})

// exampleSite serves the example on a port of its own, with the address of the API in it.
func exampleSite(t testing.TB, api *string) (url string) {
	t.Helper()
	dir, err := builtExample()
	if err != nil {
		t.Fatal("the example needs npm and its registry: ", err)
	}
	index, err := os.ReadFile(filepath.Join(dir, "index.html"))
	if err != nil {
		t.Fatal(err)
	}
	const standard = `content="http://localhost:8080"`
	if !strings.Contains(string(index), standard) {
		t.Fatalf("index.html does not have %s", standard)
	}
	files := http.FileServer(http.Dir(dir))
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			files.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		fmt.Fprint(w, strings.Replace(string(index), standard, `content="`+*api+`"`, 1))
	}))
	t.Cleanup(site.Close)
	return site.URL
}

func TestExampleInBrowser(t *testing.T) {
	t.Parallel()
	inEachEngine(t, func(t *testing.T, b *browser) {
		e := &exampleUser{browser: b}
		byNumber := exampleSite(t, &e.api)
		byName := withLocalhost(byNumber)
		e.srv = startServer(t, map[string]string{"ALLOWED_ORIGINS": byName + "," + byNumber})
		execSQL(t, e.srv.env["DATABASE_URL"], "insert into hubs (name) values ('North'), ('South')")

		e.api = withLocalhost(e.srv.base)
		e.begin(byName)
		e.signIn("North (active)")
		b.keys("#name", "sou"+enterKey)
		waitUntil(t, "the filtered list", func() bool { return b.text("#list") == "South (active)" })
		if !e.showsPicture(t) {
			t.Error("a picture is not shown from another port of localhost")
		}
		b.open(byName)
		b.waitText("#list", "North (active)")
		b.click("#leave button")
		e.askTooOften(t)

		// The same by number. Only here Chromium takes another port for another site.
		e.api = e.srv.base
		e.begin(byNumber)
		e.signIn("North (active)")
		if shown := e.showsPicture(t); shown != (b.engine != chromium) {
			t.Errorf("a picture without crossorigin from another port of 127.0.0.1 is shown: %v", shown)
		}
		b.click("#leave button")

		// Two host names are two sites: the browser keeps no SameSite=Lax cookie.
		e.begin(byName)
		e.signIn("unauthenticated")
	})
}

func withLocalhost(url string) string { return strings.Replace(url, "127.0.0.1", "localhost", 1) }

// An exampleUser is someone at the example, in one engine.
type exampleUser struct {
	*browser
	api string // the address of the server, as the page is told it
	srv *testServer
}

// begin opens the example where nobody is signed in.
func (e *exampleUser) begin(page string) {
	e.t.Helper()
	e.open(page)
	waitUntil(e.t, "the first form", func() bool { return e.visible("#ask") })
}

// signIn signs a new user in and accepts the terms, after which the page has the text.
func (e *exampleUser) signIn(text string) {
	e.t.Helper()
	email := newEmail()
	noteEmail([]byte(`{"email":"` + email + `"}`))
	testUser(e.t, e.srv.env["DATABASE_URL"], email, "member")
	e.keys("#email", email+enterKey)
	e.waitText("#message", "a code is on its way")
	e.keys("#code", e.srv.code(e.t, email)+enterKey)
	waitUntil(e.t, "the terms", func() bool { return e.visible("#accept") })
	e.click("#accept button")
	e.waitText("body", text)
}

// showsPicture uploads a picture and waits until the page shows it. It says whether the
// browser also shows it without crossorigin.
func (e *exampleUser) showsPicture(t *testing.T) (without bool) {
	var picture bytes.Buffer
	path := filepath.Join(t.TempDir(), "picture.png")
	err := png.Encode(&picture, image.NewGray(image.Rect(0, 0, 300, 200)))
	if err == nil {
		err = os.WriteFile(path, picture.Bytes(), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	e.keys("#file", path)
	e.click("#upload button")
	waitUntil(t, "the picture", func() bool {
		return script[int](e.browser, "return document.querySelector('#uploaded img')?.naturalWidth ?? 0") == 300
	})
	return script[bool](e.browser, `return new Promise(result => {
		const picture = new Image();
		picture.onload = () => result(true);
		picture.onerror = () => result(false);
		picture.src = document.querySelector('#uploaded a').href + '?plain';
	})`)
}

// askTooOften meets a limit: the page says for how long, and its button waits.
func (e *exampleUser) askTooOften(t *testing.T) {
	waitUntil(t, "the first form", func() bool { return e.visible("#ask") })
	e.keys("#email", "nobody@example.com")
	const enabled = "return !document.querySelector('#ask button').disabled"
	for range 6 {
		waitUntil(t, "the button", func() bool { return script[bool](e.browser, enabled) })
		e.click("#ask button")
	}
	e.waitText("#message", "rate_limited")
	if script[bool](e.browser, enabled) {
		t.Error("the button does not wait")
	}
}
