// Package browser tests the learner's page, the example front end, and pages of other origins, in
// Chromium, Firefox ESR and WebKitGTK. It shows what only a browser does: the cookie that no
// script can read, SameSite, CORS, Content-Security-Policy.
package browser

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }

const (
	chromium = "chromium"
	firefox  = "firefox"
	webkit   = "webkit"
)

var engines = []string{chromium, firefox, webkit}

// inEachEngine runs a test once in each engine.
func inEachEngine(t *testing.T, test func(t *testing.T, b *browser)) {
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			test(t, newBrowser(t, engine, ""))
		})
	}
}

// A browser is one running browser. Any failure of its driver ends the test.
type browser struct {
	t         testing.TB
	engine    string
	driver    driver
	downloads string // the folder that it downloads to
}

// A driver carries out one command of the WebDriver protocol within a session.
type driver interface {
	command(method, path string, in params) (json.RawMessage, error)
}

type params = map[string]any

// newBrowser starts a browser that ends with the test. With an address it takes the server there,
// whatever its certificate, for every host that it reaches by TLS.
func newBrowser(t testing.TB, engine, server string) *browser {
	// Not t.TempDir, which fails the test if a process that is ending still writes.
	dir, err := os.MkdirTemp(hubstest.Dir, engine+"-")
	if err != nil {
		t.Fatal(err)
	}
	b := &browser{t: t, engine: engine, downloads: dir + "/Downloads"}
	if err := os.Mkdir(b.downloads, 0o700); err != nil {
		t.Fatal(err)
	}
	switch engine {
	case chromium:
		b.driver = startChromium(t, dir, server)
	case firefox:
		b.driver = startFirefox(t, dir, server)
	case webkit:
		b.driver = startWebKit(t, dir, server)
	}
	t.Cleanup(func() {
		if t.Failed() {
			fmt.Fprintln(t.Output(), "the page at the end:", b.text("body"))
		}
		b.command("DELETE", "", nil, nil)
	})
	return b
}

// command sends one command of the WebDriver protocol.
func (b *browser) command(method, path string, in params, out any) {
	b.t.Helper()
	answer, err := b.driver.command(method, path, in)
	if err == nil && out != nil {
		err = json.Unmarshal(answer, out)
	}
	if err != nil {
		b.t.Fatalf("%s: WebDriver %s %s: %v", b.engine, method, path, err)
	}
}

// script runs the body of a function in the page. It awaits a promise that is returned. For null
// and undefined it returns the zero value.
func script[T any](b *browser, body string, args ...any) (value T) {
	b.t.Helper()
	call := params{"script": body, "args": append([]any{}, args...)}
	b.command("POST", "/execute/sync", call, &value)
	return value
}

func (b *browser) open(url string) {
	b.t.Helper()
	b.command("POST", "/url", params{"url": url}, nil)
}

// element returns the path of the one element that a CSS selector names. It scrolls the
// element to the middle of the window: the drivers don't know what the navigation covers.
func (b *browser) element(selector string) string {
	b.t.Helper()
	script[any](b, `document.querySelector(arguments[0])?.scrollIntoView(
		{block: 'center', behavior: 'instant'})`, selector)
	var found map[string]string
	wanted := params{"using": "css selector", "value": selector}
	b.command("POST", "/element", wanted, &found)
	for _, id := range found {
		return "/element/" + id
	}
	b.t.Fatalf("no element %s", selector)
	return ""
}

// click fails where a user could not click.
func (b *browser) click(selector string) {
	b.t.Helper()
	b.command("POST", b.element(selector)+"/click", params{}, nil)
}

const enterKey = "\uE007"

// keys types into an input in place of what it holds.
func (b *browser) keys(selector, text string) {
	b.t.Helper()
	input := b.element(selector)
	if script[string](b, "return document.querySelector(arguments[0]).type", selector) != "file" {
		b.command("POST", input+"/clear", params{}, nil)
	}
	b.command("POST", input+"/value", params{"text": text}, nil)
}

func (b *browser) text(selector string) string {
	b.t.Helper()
	return script[string](b, "return document.querySelector(arguments[0])?.textContent", selector)
}

const isVisible = "document.querySelector(arguments[0])?.checkVisibility()"

func (b *browser) visible(selector string) bool {
	b.t.Helper()
	return script[bool](b, "return "+isVisible, selector)
}

// waitFor waits until an expression is true in the page. While the page is being replaced by
// another, a driver may fail instead of answering; that counts as not yet.
func (b *browser) waitFor(expression string, args ...any) {
	b.t.Helper()
	call := params{"script": "return " + expression, "args": append([]any{}, args...)}
	hubstest.WaitUntil(b.t, fmt.Sprint(expression, args), func() bool {
		answer, err := b.driver.command("POST", "/execute/sync", call)
		return err == nil && string(answer) == "true"
	})
}

func (b *browser) waitText(selector, part string) {
	b.t.Helper()
	b.waitFor("document.querySelector(arguments[0])?.textContent.includes(arguments[1])",
		selector, part)
}

// inNewTab clicks a link that opens a tab, looks at that tab, and closes it.
func (b *browser) inNewTab(link string, look func()) {
	var before, handles []string
	b.command("GET", "/window/handles", nil, &before)
	b.click(link)
	hubstest.WaitUntil(b.t, "a new tab", func() bool {
		b.command("GET", "/window/handles", nil, &handles)
		return len(handles) > len(before)
	})
	isOld := func(handle string) bool { return slices.Contains(before, handle) }
	handles = slices.DeleteFunc(handles, isOld)
	b.switchTo(handles[0])
	look()
	b.command("DELETE", "/window", nil, nil)
	b.switchTo(before[0])
}

func (b *browser) switchTo(handle string) {
	b.command("POST", "/window", params{"handle": handle}, nil)
}

// cookies returns all that the browser holds for the page, also those hidden from scripts.
func (b *browser) cookies() (all []browserCookie) {
	b.command("GET", "/cookie", nil, &all)
	return all
}

type browserCookie struct {
	Name, Value, Domain, Path, SameSite string
	HTTPOnly, Secure                    bool
	Expiry                              int64
}

// console takes what the console has gained since it was last asked. Firefox keeps refused
// answers apart from it. WebKitGTK's driver does not show its console.
func (b *browser) console() (messages []string) {
	switch b.engine {
	case chromium:
		var entries []struct{ Message string }
		b.command("POST", "/se/log", params{"type": "browser"}, &entries)
		for _, entry := range entries {
			messages = append(messages, entry.Message)
		}
	case firefox:
		b.command("POST", "/moz/context", params{"value": "chrome"}, nil)
		messages = script[[]string](b, `const all = Services.console.getMessageArray();
			Services.console.reset();
			const isOfPage = m => /^http/.test(m.sourceName) || /^CSP/.test(m.category);
			return all.filter(m => m instanceof Ci.nsIScriptError && isOfPage(m))
				.map(m => m.sourceName + ': ' + m.category + ': ' + m.errorMessage)`)
		b.command("POST", "/moz/context", params{"value": "content"}, nil)
	}
	return messages
}

// wantConsole says what the console must have gained: one entry for each of the parts,
// which it contains, in this order. Without parts: nothing at all.
func (b *browser) wantConsole(parts ...string) {
	b.t.Helper()
	if b.engine == webkit {
		return
	}
	if b.engine == firefox {
		isRefusal := func(part string) bool { return strings.HasPrefix(part, refusedBy) }
		parts = slices.DeleteFunc(parts, isRefusal)
	}
	got := b.console()
	if !slices.EqualFunc(got, parts, strings.Contains) {
		b.t.Errorf("%s: console: %q, want %q", b.engine, got, parts)
	}
}

// refusedBy are Chromium's words for an answer of 400 and more, before the status.
const refusedBy = "the server responded with a status of "

// devTools is a command of the Chrome DevTools protocol, for what WebDriver can't do.
func (b *browser) devTools(method string, details params) {
	b.command("POST", "/goog/cdp/execute", params{"cmd": method, "params": details}, nil)
}

// look checks what every state of the page must keep: nothing wider than the screen, at
// a phone's width and at a desk's, and no finding of axe-core, in light and in dark.
// It looks in Chromium only, which can pretend to have another screen.
// AXE_JS is the path of axe-core's axe.min.js, which .ci/run fetches: this project does
// not depend on it.
func (b *browser) look(state string) {
	if b.engine != chromium {
		return
	}
	for scheme, width := range map[string]int{"light": 1280, "dark": 360} {
		b.devTools("Emulation.setDeviceMetricsOverride", params{
			"width":             width,
			"height":            900,
			"deviceScaleFactor": 1,
			"mobile":            false,
		})
		b.devTools("Emulation.setEmulatedMedia", params{"features": []params{
			{"name": "prefers-color-scheme", "value": scheme},
			{"name": "prefers-reduced-motion", "value": "reduce"},
		}})
		if wide := script[int](b, "return document.documentElement.scrollWidth"); wide > width {
			b.t.Errorf("%s: %d px wide on a screen of %d", state, wide, width)
		}
		for _, finding := range b.axe() {
			b.t.Errorf("%s, %s, %d px: axe-core: %s", state, scheme, width, finding)
		}
	}
	b.devTools("Emulation.clearDeviceMetricsOverride", params{})
}

// axe has axe-core examine the page, where there is one.
func (b *browser) axe() []string {
	path := os.Getenv("AXE_JS")
	if path == "" {
		fmt.Fprintln(b.t.Output(), "accessibility is not checked: AXE_JS names no axe.min.js")
		return nil
	}
	source, err := os.ReadFile(path)
	if err != nil {
		b.t.Fatal("AXE_JS: ", err)
	}
	return script[[]string](b, string(source)+`;
		const rules = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];
		return axe.run(document, {runOnly: rules}).then(found => {
			if (found.passes.length < 10) throw Error('axe-core has examined next to nothing');
			return found.violations.map(v => v.id + ' at ' + v.nodes.map(n => n.target.join(' ')));
		})`)
}
