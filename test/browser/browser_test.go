// Package browser tests the learner's page, the example front end, and pages of other origins, in
// Chromium and WebKitGTK. It tests what only a browser can show: that no script can
// read the cookie, and the effect of SameSite, CORS and Content-Security-Policy.
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
	webkit   = "webkit"
)

// engines has the function that starts each engine. dir is the folder of the browser.
var engines = map[string]func(t testing.TB, dir, server string) webDriver{
	chromium: startChromium,
	webkit:   startWebKit,
}

// inEachEngine runs a test once in each engine, in parallel, each time with a new browser.
func inEachEngine(t *testing.T, test func(t *testing.T, b *browser)) {
	for engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			test(t, newBrowser(t, engine, ""))
		})
	}
}

// A browser is one running browser, for one test. Any failure of its driver ends the test.
type browser struct {
	t         testing.TB
	engine    string
	driver    webDriver
	downloads string // the folder of its downloads
}

type params = map[string]any

// newBrowser starts a browser and ends it with the test. If server is not empty, it is the address
// of a TLS server: the browser reaches that server under every https host name, and accepts any
// certificate.
func newBrowser(t testing.TB, engine, server string) *browser {
	t.Helper()
	// Not t.TempDir: it fails the test if a process that is just ending still writes to the folder.
	// The name is short, because the path of Chromium's socket in it can have only 107 bytes.
	dir, err := os.MkdirTemp(hubstest.Dir, "")
	hubstest.Must(t, err)
	downloads := dir + "/Downloads"
	hubstest.Must(t, os.Mkdir(downloads, 0o700))
	driver := engines[engine](t, dir, server)
	b := &browser{t: t, engine: engine, driver: driver, downloads: downloads}
	t.Cleanup(func() {
		if t.Failed() {
			page := script[string](b, "return document.body.innerText")
			fmt.Fprintf(t.Output(), "the page at the end of the test: %.3000s\n", page)
		}
		b.command("DELETE", "", nil, nil)
	})
	return b
}

// step takes one step of a story. The next steps need it, so if it fails, step ends the test. It is
// not a subtest, because a step can't run alone.
func (b *browser) step(name string, take func()) {
	fmt.Fprintln(b.t.Output(), "step:", name)
	take()
	if b.t.Failed() {
		b.t.FailNow()
	}
}

// wantEqual compares two values of one type. what names the value.
func (b *browser) wantEqual(what string, got, want any) {
	b.t.Helper()
	if got != want {
		b.t.Errorf("%s: got %+v, want %+v", what, got, want)
	}
}

// command sends one command of the WebDriver protocol, and decodes its result into out. If out is
// nil, the result is ignored.
func (b *browser) command(method, path string, in params, out any) {
	b.t.Helper()
	answer, err := b.driver.command(method, path, in)
	if err == nil && out != nil {
		err = json.Unmarshal(answer, out)
	}
	if err != nil {
		b.t.Fatalf("setup: %s: WebDriver %s %s: %v", b.engine, method, path, err)
	}
}

// post sends a command that has no result.
func (b *browser) post(path string, in params) {
	b.t.Helper()
	b.command("POST", path, in, nil)
}

// script runs the body of a JavaScript function in the page and returns its result. If the function
// returns a promise, script waits for it. If the result is null or undefined, script returns the
// zero value.
func script[T any](b *browser, body string, args ...any) (value T) {
	b.t.Helper()
	call := params{"script": body, "args": append([]any{}, args...)}
	b.command("POST", "/execute/sync", call, &value)
	return value
}

func (b *browser) open(url string) {
	b.t.Helper()
	b.post("/url", params{"url": url})
}

// element returns the path of the first element that matches a CSS selector, for further commands.
// It scrolls the element to the middle of the window, so that the navigation, of which the drivers
// know nothing, does not cover it. From then on the page does not scroll smoothly: while it does, a
// click can miss the element.
func (b *browser) element(selector string) string {
	b.t.Helper()
	script[any](b, `document.documentElement.style.scrollBehavior = 'auto';
		document.querySelector(arguments[0])?.scrollIntoView({block: 'center'})`, selector)
	var found map[string]string
	wanted := params{"using": "css selector", "value": selector}
	b.command("POST", "/element", wanted, &found)
	for _, id := range found {
		return "/element/" + id
	}
	b.t.Fatalf("setup: no element matches %s", selector)
	return ""
}

// click clicks on an element. It fails the test if a user could not click there.
func (b *browser) click(selector string) {
	b.t.Helper()
	b.post(b.element(selector)+"/click", params{})
}

const enterKey = "\uE007"

// keys clears an input and types text into it.
func (b *browser) keys(selector, text string) {
	b.t.Helper()
	input := b.element(selector)
	b.post(input+"/clear", params{})
	b.post(input+"/value", params{"text": text})
}

// text returns the text of an element, or "" if no element matches.
func (b *browser) text(selector string) string {
	b.t.Helper()
	return script[string](b, "return document.querySelector(arguments[0])?.textContent", selector)
}

const isVisible = "document.querySelector(arguments[0])?.checkVisibility()"

// visible reports whether an element is there and is visible.
func (b *browser) visible(selector string) bool {
	b.t.Helper()
	return script[bool](b, "return "+isVisible, selector)
}

// waitFor waits until a JavaScript expression is true in the page. If the driver fails, waitFor
// tries again, because a driver may fail while the browser replaces the page by another.
func (b *browser) waitFor(expression string, args ...any) {
	b.t.Helper()
	call := params{"script": "return " + expression, "args": append([]any{}, args...)}
	hubstest.WaitUntil(b.t, fmt.Sprint(expression, args), func() bool {
		answer, err := b.driver.command("POST", "/execute/sync", call)
		return err == nil && string(answer) == "true"
	})
}

// waitText waits until the text of an element contains part.
func (b *browser) waitText(selector, part string) {
	b.t.Helper()
	b.waitFor("document.querySelector(arguments[0])?.textContent.includes(arguments[1])",
		selector, part)
}

// inNewTab clicks a link that opens a tab, calls look in that tab, and closes the tab.
func (b *browser) inNewTab(link string, look func()) {
	var before, handles []string
	b.command("GET", "/window/handles", nil, &before)
	b.click(link)
	hubstest.WaitFor(b.t, "open tabs", len(before)+1, func() int {
		b.command("GET", "/window/handles", nil, &handles)
		return len(handles)
	})
	isOld := func(handle string) bool { return slices.Contains(before, handle) }
	handles = slices.DeleteFunc(handles, isOld)
	b.switchTo(handles[0])
	look()
	b.command("DELETE", "/window", nil, nil)
	b.switchTo(before[0])
}

func (b *browser) switchTo(handle string) {
	b.post("/window", params{"handle": handle})
}

// cookies returns all cookies that the browser has for the page, including those that no script can
// read.
func (b *browser) cookies() (all []browserCookie) {
	b.command("GET", "/cookie", nil, &all)
	return all
}

type browserCookie struct {
	Name, Value, Domain, Path, SameSite string
	HTTPOnly, Secure                    bool
	Expiry                              int64
}

// console returns the console's messages since the last call. The driver of WebKitGTK does not show
// the console, so console returns nothing there.
func (b *browser) console() (messages []string) {
	if b.engine != chromium {
		return nil
	}
	var entries []struct{ Message string }
	b.command("POST", "/se/log", params{"type": "browser"}, &entries)
	for _, entry := range entries {
		messages = append(messages, entry.Message)
	}
	return messages
}

// wantConsole requires that the console has as many new messages as there are parts, and that each
// message contains its part, in this order. In WebKitGTK it requires nothing.
func (b *browser) wantConsole(parts ...string) {
	b.t.Helper()
	got := b.console()
	if b.engine == chromium && !slices.EqualFunc(got, parts, strings.Contains) {
		b.t.Errorf("%s: console: got %q, want messages with %q", b.engine, got, parts)
	}
}

// devTools sends a command of the Chrome DevTools protocol, for what WebDriver can't do.
func (b *browser) devTools(method string, details params) {
	b.post("/goog/cdp/execute", params{"cmd": method, "params": details})
}

// wantAccessible checks the page on a wide screen in light colors and on a narrow one in dark
// colors. state names the state of the page in failure messages. Only Chromium can emulate screens.
func (b *browser) wantAccessible(state string) {
	b.t.Helper()
	axe, err := os.ReadFile(os.Getenv("AXE_JS"))
	if err != nil {
		hubstest.Skip(b.t, "AXE_JS, the path of axe-core's axe.min.js: "+err.Error())
	}
	for scheme, width := range map[string]int{"light": 1280, "dark": 360} {
		b.devTools("Emulation.setDeviceMetricsOverride", params{
			"width":             width,
			"height":            900,
			"deviceScaleFactor": 1,
			"mobile":            false,
		})
		colors := params{"name": "prefers-color-scheme", "value": scheme}
		b.devTools("Emulation.setEmulatedMedia", params{"features": []params{colors}})
		for _, finding := range script[[]string](b, string(axe)+findFaults, width) {
			b.t.Errorf("%s, %s, %d px: got %s, want no finding", state, scheme, width, finding)
		}
	}
}

// findFaults is a script that returns what axe-core finds in the page, and whether the page is
// wider than the screen.
const findFaults = `;
	const rules = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];
	const [width] = arguments, wide = document.documentElement.scrollWidth;
	return axe.run(document, {runOnly: rules}).then(found => {
		if (found.passes.length < 10) throw Error('axe-core: fewer than 10 rules passed');
		return found.violations.map(v => v.id + ' at ' + v.nodes.map(n => n.target.join(' ')))
			.concat(wide > width ? ['a page ' + wide + ' px wide'] : []);
	})`
