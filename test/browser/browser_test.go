// Package browser tests the learner's page, the example front end, and pages of other origins, in
// Chromium. It tests what only a browser can show: that no script can read the cookie, and the
// effect of SameSite, CORS and Content-Security-Policy.
package browser

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }

// A browser is one running Chromium, for one test. Any failure of its driver ends the test.
type browser struct {
	t         testing.TB
	driver    string // the URL of its driver, which speaks the W3C WebDriver protocol
	session   string // the URL of the session at the driver
	dir       string // the folder of its profile and downloads
	downloads string
	server    string // see newBrowser
}

type params = map[string]any

// newBrowser starts Chromium and ends it with the test. If server is not empty, it is the address
// of a TLS server: the browser reaches that server under every https host name, and accepts any
// certificate.
func newBrowser(t testing.TB, server string) *browser {
	t.Helper()
	// Not t.TempDir: it fails the test if a process that is just ending still writes to the folder.
	// The name is short, because the path of Chromium's socket in it can have only 107 bytes.
	dir, err := os.MkdirTemp(hubstest.Dir, "")
	hubstest.Must(t, err)
	b := &browser{t: t, dir: dir, downloads: dir + "/Downloads", server: server}
	hubstest.Must(t, os.Mkdir(b.downloads, 0o700))
	b.driver = "http://127.0.0.1:" + startDriver(t, dir) + "/session"
	b.start()
	t.Cleanup(func() {
		if t.Failed() {
			page := script[string](b, "return document.body.innerText")
			fmt.Fprintf(t.Output(), "the page at the end of the test: %.3000s\n", page)
		}
		b.command("DELETE", "", nil, nil)
	})
	return b
}

// restart ends Chromium and starts it again with the same profile, and with further arguments.
func (b *browser) restart(args ...string) {
	b.t.Helper()
	b.command("DELETE", "", nil, nil)
	b.start(args...)
}

// start starts Chromium with these and the usual arguments.
func (b *browser) start(args ...string) {
	b.t.Helper()
	b.session = b.driver
	hosts := "MAP * 127.0.0.1" // no request leaves this machine
	if b.server != "" {
		hosts = "MAP *:443 " + b.server + ", " + hosts
	}
	options := params{
		"binary": hubstest.Need(b.t, "chromium", "chromium"),
		"args": append(args,
			"--headless", "--no-sandbox", // Chromium's sandbox does not work for root
			"--disable-gpu", "--disable-quic", "--no-first-run",
			"--disable-background-networking", "--disable-component-update", "--disable-sync",
			"--host-resolver-rules="+hosts,
			// With the pipe, Chromium ends when its driver has ended.
			"--disable-dev-shm-usage", "--force-prefers-reduced-motion", "--remote-debugging-pipe",
			"--user-data-dir="+b.dir+"/profile", "--window-size=1280,900",
		),
		"prefs": params{
			"download.default_directory": b.downloads,
			// These settings permit third-party cookies. So only SameSite can keep the cookie from
			// another site's requests.
			"profile.cookie_controls_mode":      0,
			"profile.block_third_party_cookies": false,
		},
	}
	wanted := params{
		"acceptInsecureCerts": b.server != "",
		"goog:chromeOptions":  options,
		"goog:loggingPrefs":   params{"browser": "ALL"},
	}
	var created struct{ SessionID string }
	b.command("POST", "", params{"capabilities": params{"alwaysMatch": wanted}}, &created)
	b.session += "/" + created.SessionID
}

// startDriver starts chromedriver and returns its port. dir is its home and its temporary folder.
// chromedriver chooses a port that is free in one of IPv4 and IPv6, and ends if the port is taken in
// the other. Then startDriver starts it again.
func startDriver(t testing.TB, dir string) (port string) {
	t.Helper()
	driver := hubstest.Need(t, "chromedriver", "chromium-driver")
	for range 5 {
		cmd := exec.Command(driver, "--port=0")
		cmd.Env = append(os.Environ(), "HOME="+dir, "TMPDIR="+dir)
		p := hubstest.StartProgram(t, cmd)
		port := p.WaitMatch(t, "started successfully on port ([0-9]+)|port not available")
		if port != "" {
			return port
		}
	}
	t.Fatal("setup: chromedriver found no free port in five attempts")
	return ""
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
	hubstest.WantEqual(b.t, what, got, want)
}

// command sends one command of the WebDriver protocol, and decodes its result into out. If out is
// nil, the result is ignored.
func (b *browser) command(method, path string, in params, out any) {
	b.t.Helper()
	answer, err := b.try(method, path, in)
	if err == nil && out != nil {
		err = json.Unmarshal(answer, out)
	}
	if err != nil {
		b.t.Fatalf("setup: WebDriver %s %s: %v", method, path, err)
	}
}

// try sends one command and returns its result.
func (b *browser) try(method, path string, in params) (json.RawMessage, error) {
	var body bytes.Buffer
	if in != nil {
		json.NewEncoder(&body).Encode(in) // params can always be encoded
	}
	req, err := http.NewRequest(method, b.session+path, &body)
	if err != nil {
		return nil, err
	}
	resp, err := (&http.Client{Timeout: 2 * hubstest.Patience}).Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var answer struct{ Value json.RawMessage }
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return nil, err
	}
	if resp.StatusCode != 200 {
		message, _, _ := strings.Cut(string(answer.Value), `\n#`) // without the stack trace
		return nil, errors.New(message)
	}
	return answer.Value, nil
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
// It scrolls the element to the middle of the window, so that the navigation, of which the driver
// knows nothing, does not cover it. From then on the page does not scroll smoothly: while it does, a
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
// tries again, because the driver may fail while the browser replaces the page by another.
func (b *browser) waitFor(expression string, args ...any) {
	b.t.Helper()
	call := params{"script": "return " + expression, "args": append([]any{}, args...)}
	hubstest.WaitUntil(b.t, fmt.Sprint(expression, args), func() bool {
		answer, err := b.try("POST", "/execute/sync", call)
		return err == nil && string(answer) == "true"
	})
}

// waitText waits until the text of an element contains part.
func (b *browser) waitText(selector, part string) {
	b.t.Helper()
	b.waitFor("document.querySelector(arguments[0])?.textContent.includes(arguments[1])",
		selector, part)
}

// devTools sends a command of Chromium's DevTools protocol.
func (b *browser) devTools(method string, details params) {
	b.t.Helper()
	b.post("/goog/cdp/execute", params{"cmd": method, "params": details})
}

// resize makes the window, without the browser's own bars, as large as a screen.
func (b *browser) resize(width, height int) {
	b.t.Helper()
	b.devTools("Emulation.setDeviceMetricsOverride", params{
		"width":             width,
		"height":            height,
		"deviceScaleFactor": 1,
		"mobile":            false,
	})
}

// tabs returns the handles of all tabs.
func (b *browser) tabs() (handles []string) {
	b.t.Helper()
	b.command("GET", "/window/handles", nil, &handles)
	return handles
}

// tab returns the handle of the tab to which commands go.
func (b *browser) tab() (handle string) {
	b.t.Helper()
	b.command("GET", "/window", nil, &handle)
	return handle
}

// switchTo brings a tab to the front. Commands then go to it.
func (b *browser) switchTo(tab string) {
	b.t.Helper()
	b.post("/window", params{"handle": tab})
	b.devTools("Page.bringToFront", params{})
}

// newTab opens a tab, and brings it to the front.
func (b *browser) newTab() (handle string) {
	b.t.Helper()
	var opened struct{ Handle string }
	b.command("POST", "/window/new", params{"type": "tab"}, &opened)
	b.switchTo(opened.Handle)
	return opened.Handle
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

// console returns the console's messages since the last call.
func (b *browser) console() (messages []string) {
	var entries []struct{ Message string }
	b.command("POST", "/se/log", params{"type": "browser"}, &entries)
	for _, entry := range entries {
		messages = append(messages, entry.Message)
	}
	return messages
}

// wantConsole requires that the console has as many new messages as there are parts, and that each
// message contains its part, in this order.
func (b *browser) wantConsole(parts ...string) {
	b.t.Helper()
	got := b.console()
	if !slices.EqualFunc(got, parts, strings.Contains) {
		b.t.Errorf("console: got %q, want messages with %q", got, parts)
	}
}
