//go:build moving

package main

// The browsers of the tests: Chromium, Firefox ESR and WebKitGTK, each with an empty
// profile. Chromium and WebKitGTK come with a driver that speaks the W3C WebDriver
// protocol over HTTP. Debian has no such driver for Firefox, so Firefox is driven by its
// own protocol, Marionette, which has the same commands under other names.

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

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
			test(t, newBrowser(t, engine, browserOptions{}))
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
	command(method, path string, in any) (json.RawMessage, error)
}

// browserOptions are what a test may ask of a browser.
type browserOptions struct {
	flags []string          // of Chromium's command line
	hosts map[string]string // for Firefox and WebKitGTK: addresses by host name; any certificate will do
}

// newBrowser starts a browser that ends with the test. The test fails if a program is
// missing: a skipped test would read as passed.
func newBrowser(t testing.TB, engine string, options browserOptions) *browser {
	t.Helper()
	// Not t.TempDir, which fails the test if a process that is ending still writes.
	dir, err := os.MkdirTemp(testDir, engine+"-")
	if err != nil {
		t.Fatal(err)
	}
	b := &browser{t: t, engine: engine, downloads: dir + "/Downloads"}
	if err := os.Mkdir(b.downloads, 0o700); err != nil {
		t.Fatal(err)
	}
	switch engine {
	case chromium:
		b.driver = startChromium(t, dir, options)
	case firefox:
		b.driver = startFirefox(t, dir, options)
	case webkit:
		b.driver = startWebKit(t, dir, options)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the page at the end: %q", script[[]string](b, `const texts = [...document.querySelectorAll(
				'.message, .field-error, #hubs-summary')].map(element => element.textContent);
				return [String(location), ...texts.filter(Boolean)]`))
		}
		b.command("DELETE", "", nil, nil)
	})
	return b
}

// needProgram returns the path of a program.
func needProgram(t testing.TB, program, debianPackage string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Fatalf("no browser to test with: %v (on Debian: apt-get install %s)", err, debianPackage)
	}
	return path
}

// startDriver runs a program until the test ends. The shell ends the program when its
// standard input is closed, so the program also ends when the tests are killed.
func startDriver(t testing.TB, dir string, env []string, args ...string) (out *logBuffer, done chan struct{}) {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", `"$@" & cat; kill $!; wait`, "sh"}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+dir, "TMPDIR="+dir, "XDG_RUNTIME_DIR="+dir)
	cmd.Env = append(cmd.Env, env...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, done = &logBuffer{}, make(chan struct{})
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = patience // a grandchild that keeps the pipe open must not hang the tests
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(done)
		cmd.Wait()
	}()
	t.Cleanup(func() {
		stdin.Close()
		<-done
	})
	return out, done
}

// outputAfter waits for a line that contains the text, and returns the rest of that line.
func outputAfter(t testing.TB, out *logBuffer, done chan struct{}, text string) string {
	t.Helper()
	line, _, err := out.wait(0, done, containsAll([]string{text}))
	if err != nil {
		t.Fatalf("%v with %q", err, text)
	}
	_, rest, _ := strings.Cut(line, text)
	return strings.TrimSpace(rest)
}

// startChromedriver returns the port on which the driver listens. The driver finds a free port of
// one protocol, and ends if that port is taken in the other: then it is started again.
func startChromedriver(t testing.TB, dir string) (port string) {
	t.Helper()
	const listens, taken = "started successfully on port ", "port not available"
	for range 5 {
		out, done := startDriver(t, dir, nil, needProgram(t, "chromedriver", "chromium-driver"), "--port=0")
		line, _, err := out.wait(0, done, func(line string) bool {
			return strings.Contains(line, listens) || strings.Contains(line, taken)
		})
		if err != nil {
			t.Fatalf("%v that says where chromedriver listens", err)
		}
		if _, port, ok := strings.Cut(line, listens); ok {
			return strings.TrimSuffix(strings.TrimSpace(port), ".")
		}
	}
	t.Fatal("chromedriver found no free port in five attempts")
	return ""
}

func startChromium(t testing.TB, dir string, asked browserOptions) driver {
	t.Helper()
	program := needProgram(t, "chromium", "chromium")
	port := startChromedriver(t, dir)
	args := []string{
		"--headless", "--no-sandbox", // root can't have the sandbox
		"--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync",
		// Nothing leaves this machine.
		"--host-resolver-rules=MAP * ~NOTFOUND,EXCLUDE localhost,EXCLUDE 127.0.0.1",
		// With the pipe, a Chromium whose driver is gone ends.
		"--disable-dev-shm-usage", "--force-prefers-reduced-motion", "--remote-debugging-pipe",
		"--user-data-dir=" + dir + "/profile", "--window-size=1280,900",
	}
	options := map[string]any{
		"binary": program,
		"args":   append(args, asked.flags...),
		"prefs": map[string]any{
			"download.default_directory": dir + "/Downloads",
			// Else it is not SameSite that keeps the cookie from another site's requests.
			"profile.cookie_controls_mode":      0,
			"profile.block_third_party_cookies": false,
		},
	}
	d, err := newWebDriver(port, map[string]any{
		"goog:chromeOptions": options,
		"goog:loggingPrefs":  map[string]string{"browser": "ALL", "performance": "ALL"},
	})
	if err != nil {
		t.Fatal("WebDriver session: ", err)
	}
	return d
}

// startWebKit runs WebKitGTK's MiniBrowser, which needs a display, on a virtual one.
func startWebKit(t testing.TB, dir string, asked browserOptions) driver {
	t.Helper()
	found, err := exec.Command("sh", "-c", "ls /usr/lib/*/webkit2gtk-4.1/MiniBrowser").Output()
	if err != nil {
		t.Fatal("no browser to test with: no MiniBrowser (on Debian: apt-get install webkit2gtk-driver)")
	}
	screen := []string{"-displayfd", "1", "-screen", "0", "1400x1000x24", "-nolisten", "tcp"}
	out, done := startDriver(t, dir, nil, append([]string{needProgram(t, "Xvfb", "xvfb")}, screen...)...)
	display := outputAfter(t, out, done, "")
	userDirs := []byte("XDG_DOWNLOAD_DIR=\"$HOME/Downloads\"\n")
	err = os.MkdirAll(dir+"/.config", 0o700)
	if err = cmp.Or(err, os.WriteFile(dir+"/.config/user-dirs.dirs", userDirs, 0o600)); err != nil {
		t.Fatal(err)
	}
	env := []string{"DISPLAY=:" + display, "GTK_A11Y=none", "NO_AT_BRIDGE=1"}
	env = append(env, "https_proxy=http://127.0.0.1:"+asked.proxy(t)) // plain HTTP goes straight
	options := map[string]any{"binary": strings.TrimSpace(string(found)), "args": []string{"--automation"}}
	// Now and then a driver does not answer, or another program has taken its port: then another one
	// is started, on another port.
	var d *webDriver
	for range 3 {
		port := freePort(t)
		startDriver(t, dir, env, needProgram(t, "WebKitWebDriver", "webkit2gtk-driver"), "--port="+port)
		waitUntil(t, "WebKitWebDriver on its port", func() bool {
			conn, err := net.Dial("tcp", "127.0.0.1:"+port)
			if err == nil {
				conn.Close()
			}
			return err == nil
		})
		d, err = newWebDriver(port, map[string]any{
			"webkitgtk:browserOptions": options,
			"acceptInsecureCerts":      asked.hosts != nil,
		})
		if err == nil {
			return d
		}
	}
	t.Fatal("WebDriver session, the third attempt: ", err)
	return nil
}

// proxy starts a proxy that leads to the hosts, and returns its port: no driver can map
// host names. Without hosts it is a port where nobody listens.
func (o browserOptions) proxy(t testing.TB) (port string) {
	if o.hosts == nil {
		return "9"
	}
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		server, err := net.Dial("tcp", o.hosts[r.URL.Hostname()])
		if r.Method != http.MethodConnect || err != nil {
			http.Error(w, "no such host", http.StatusBadGateway)
			return
		}
		defer server.Close()
		client, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer client.Close()
		fmt.Fprint(client, "HTTP/1.1 200 OK\r\n\r\n")
		go func() {
			defer server.Close()
			io.Copy(server, client)
		}()
		io.Copy(client, server)
	}))
	t.Cleanup(proxy.Close)
	return proxy.URL[strings.LastIndex(proxy.URL, ":")+1:]
}

// freePort is for a program that can't tell which port it has chosen.
func freePort(t testing.TB) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)
}

// A webDriver speaks the W3C WebDriver protocol.
type webDriver struct {
	session string // the address of the session at the driver
}

func newWebDriver(port string, capabilities map[string]any) (*webDriver, error) {
	d := &webDriver{"http://127.0.0.1:" + port + "/session"}
	asked := map[string]any{"capabilities": map[string]any{"alwaysMatch": capabilities}}
	answer, err := d.command("POST", "", asked)
	var created struct{ SessionID string }
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(answer, &created); err != nil {
		return nil, err
	}
	d.session += "/" + created.SessionID
	return d, nil
}

func (d *webDriver) command(method, path string, in any) (json.RawMessage, error) {
	var body io.Reader
	if in != nil {
		encoded, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(encoded)
	}
	req, err := http.NewRequest(method, d.session+path, body)
	if err != nil {
		return nil, err
	}
	resp, err := (&http.Client{Timeout: 2 * patience}).Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var answer struct{ Value json.RawMessage }
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return nil, err
	}
	if resp.StatusCode != 200 {
		message, _, _ := strings.Cut(string(answer.Value), `\n#`) // without the stack
		return nil, errors.New(message)
	}
	return answer.Value, nil
}

// A marionette speaks Firefox's own protocol: messages [0, id, command, parameters] and
// [1, id, error, result], each with its length and a colon before it.
type marionette struct {
	conn   net.Conn
	reader *bufio.Reader
	lastID int
}

func startFirefox(t testing.TB, dir string, asked browserOptions) driver {
	t.Helper()
	profile := dir + "/profile"
	proxyPort, err := strconv.Atoi(asked.proxy(t))
	if err != nil {
		t.Fatal(err)
	}
	prefs := map[string]any{
		"marionette.port": 0,
		// Nothing leaves this machine: everything but localhost goes to a proxy of the tests.
		"network.proxy.type": 1, "network.proxy.http": "127.0.0.1", "network.proxy.http_port": proxyPort,
		"network.proxy.ssl": "127.0.0.1", "network.proxy.ssl_port": proxyPort,
		"app.normandy.enabled": false, "datareporting.policy.dataSubmissionEnabled": false,
		"browser.download.folderList": 2, "browser.download.dir": dir + "/Downloads",
		// Else it is not SameSite that keeps the cookie from another site's requests.
		"network.cookie.cookieBehavior": 0,
	}
	var lines strings.Builder
	for name, value := range prefs {
		encoded, _ := json.Marshal(value) // numbers, texts and booleans: can't fail
		fmt.Fprintf(&lines, "user_pref(%q, %s);\n", name, encoded)
	}
	err = os.Mkdir(profile, 0o700)
	if err = cmp.Or(err, os.WriteFile(profile+"/user.js", []byte(lines.String()), 0o600)); err != nil {
		t.Fatal(err)
	}
	out, done := startDriver(t, dir, nil, needProgram(t, "firefox-esr", "firefox-esr"),
		"--headless", "--marionette", "--remote-allow-system-access", "--no-remote", "--width=1280", "--height=900", "--profile", profile)
	port := outputAfter(t, out, done, "Listening on port ")
	d := &marionette{}
	if d.conn, err = net.Dial("tcp", "127.0.0.1:"+port); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.conn.Close() })
	d.reader = bufio.NewReader(d.conn)
	if _, err = d.receive(); err == nil { // it says hello first
		_, err = d.send("WebDriver:NewSession", map[string]any{"acceptInsecureCerts": asked.hosts != nil})
	}
	if err != nil {
		t.Fatalf("Marionette: %v", err)
	}
	return d
}

// commands are Marionette's names of the WebDriver protocol's commands. ID stands for
// the id of an element, which Marionette takes as a parameter.
var marionetteCommands = map[string]string{
	"POST /url":              "WebDriver:Navigate",
	"POST /back":             "WebDriver:Back",
	"POST /refresh":          "WebDriver:Refresh",
	"POST /element":          "WebDriver:FindElement",
	"POST /element/ID/click": "WebDriver:ElementClick",
	"POST /element/ID/clear": "WebDriver:ElementClear",
	"POST /element/ID/value": "WebDriver:ElementSendKeys",
	"POST /execute/sync":     "WebDriver:ExecuteScript",
	"GET /cookie":            "WebDriver:GetCookies",
	"GET /screenshot":        "WebDriver:TakeScreenshot",
	"GET /window/handles":    "WebDriver:GetWindowHandles",
	"POST /window":           "WebDriver:SwitchToWindow",
	"DELETE /window":         "WebDriver:CloseWindow",
	"POST /window/rect":      "WebDriver:SetWindowRect",
	"DELETE ":                "WebDriver:DeleteSession",
	"POST /moz/context":      "Marionette:SetContext", // as geckodriver has it
}

func (d *marionette) command(method, path string, in any) (json.RawMessage, error) {
	params := map[string]any{}
	switch in := in.(type) {
	case map[string]any:
		params = maps.Clone(in)
	case map[string]string:
		for name, value := range in {
			params[name] = value
		}
	}
	if rest, ok := strings.CutPrefix(path, "/element/"); ok {
		id, action, _ := strings.Cut(rest, "/")
		params["id"] = id
		path = "/element/ID/" + action
	}
	name, ok := marionetteCommands[method+" "+path]
	if !ok {
		return nil, fmt.Errorf("no Marionette command for %s %s", method, path)
	}
	return d.send(name, params)
}

func (d *marionette) send(name string, params map[string]any) (json.RawMessage, error) {
	d.lastID++
	message, err := json.Marshal([]any{0, d.lastID, name, params})
	if err != nil {
		return nil, err
	}
	d.conn.SetDeadline(time.Now().Add(2 * patience))
	if _, err := fmt.Fprintf(d.conn, "%d:%s", len(message), message); err != nil {
		return nil, err
	}
	message, err = d.receive()
	if err != nil {
		return nil, err
	}
	var failure *struct{ Error, Message string }
	var result json.RawMessage
	if err := json.Unmarshal(message, &[]any{new(int), new(int), &failure, &result}); err != nil {
		return nil, err
	}
	if failure != nil {
		return nil, fmt.Errorf("%s: %s", failure.Error, failure.Message)
	}
	// Most results, not all, are wrapped into an object with the one member "value".
	var wrapped map[string]json.RawMessage
	if json.Unmarshal(result, &wrapped) == nil && len(wrapped) == 1 && wrapped["value"] != nil {
		return wrapped["value"], nil
	}
	return result, nil
}

func (d *marionette) receive() ([]byte, error) {
	prefix, err := d.reader.ReadString(':')
	if err != nil {
		return nil, err
	}
	length, err := strconv.Atoi(strings.TrimSuffix(prefix, ":"))
	if err != nil {
		return nil, err
	}
	message := make([]byte, length)
	_, err = io.ReadFull(d.reader, message)
	return message, err
}

// command sends one command of the WebDriver protocol.
func (b *browser) command(method, path string, in, out any) {
	b.t.Helper()
	answer, err := b.driver.command(method, path, in)
	if err == nil && out != nil {
		err = json.Unmarshal(answer, out)
	}
	if err != nil {
		b.t.Fatalf("%s: WebDriver %s %s: %v", b.engine, method, path, err)
	}
}

// script runs the body of a function in the page. It awaits a promise that is returned.
func script[T any](b *browser, body string, args ...any) (value T) {
	b.t.Helper()
	b.command("POST", "/execute/sync", map[string]any{"script": body, "args": append([]any{}, args...)}, &value)
	return value
}

func (b *browser) open(url string) {
	b.t.Helper()
	b.command("POST", "/url", map[string]string{"url": url}, nil)
}

// element returns the path of the one element that a CSS selector names. It scrolls the
// element to the middle of the window: the drivers don't know what the navigation covers.
func (b *browser) element(selector string) string {
	b.t.Helper()
	script[any](b, "document.querySelector(arguments[0])?.scrollIntoView({block: 'center', behavior: 'instant'})", selector)
	var found map[string]string
	b.command("POST", "/element", map[string]string{"using": "css selector", "value": selector}, &found)
	for _, id := range found {
		return "/element/" + id
	}
	b.t.Fatalf("no element %s", selector)
	return ""
}

// click fails where a user could not click.
func (b *browser) click(selector string) {
	b.t.Helper()
	b.command("POST", b.element(selector)+"/click", map[string]string{}, nil)
}

const enterKey = "\uE007"

// keys types into an input in place of what it holds.
func (b *browser) keys(selector, text string) {
	b.t.Helper()
	input := b.element(selector)
	if script[string](b, "return document.querySelector(arguments[0]).type", selector) != "file" {
		b.command("POST", input+"/clear", map[string]string{}, nil)
	}
	b.command("POST", input+"/value", map[string]string{"text": text}, nil)
}

func (b *browser) text(selector string) string {
	b.t.Helper()
	return script[string](b, "return document.querySelector(arguments[0])?.textContent ?? ''", selector)
}

func (b *browser) visible(selector string) bool {
	b.t.Helper()
	return script[bool](b, "return document.querySelector(arguments[0]).checkVisibility()", selector)
}

func (b *browser) waitText(selector, part string) {
	b.t.Helper()
	waitUntil(b.t, fmt.Sprintf("%s with %q", selector, part), func() bool {
		return strings.Contains(b.text(selector), part)
	})
}

// inNewTab does something that opens a tab, looks at that tab, and closes it.
func (b *browser) inNewTab(open, look func()) {
	b.t.Helper()
	var before, handles []string
	b.command("GET", "/window/handles", nil, &before)
	open()
	waitUntil(b.t, "a new tab", func() bool {
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
	b.t.Helper()
	b.command("POST", "/window", map[string]string{"handle": handle}, nil)
}

// screenshot returns what the browser shows, as a PNG.
func (b *browser) screenshot() []byte {
	b.t.Helper()
	var encoded string
	b.command("GET", "/screenshot", nil, &encoded)
	content, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		b.t.Fatal(err)
	}
	return content
}

// cookies returns all that the browser holds for the page, also those hidden from scripts.
func (b *browser) cookies() (all []browserCookie) {
	b.t.Helper()
	b.command("GET", "/cookie", nil, &all)
	return all
}

type browserCookie struct {
	Name, Value, Domain, Path, SameSite string
	HTTPOnly, Secure                    bool
	Expiry                              int64
}

// entries takes what a log of Chromium has gained since it was last asked.
func (b *browser) entries(log string) (entries []logEntry) {
	b.t.Helper()
	b.command("POST", "/se/log", map[string]string{"type": log}, &entries)
	return entries
}

type logEntry struct{ Level, Message string }

// console takes what the console has gained since it was last asked. Firefox keeps refused
// answers apart from it. WebKitGTK's driver does not show its console.
func (b *browser) console() (messages []string) {
	b.t.Helper()
	switch b.engine {
	case chromium:
		for _, entry := range b.entries("browser") {
			messages = append(messages, entry.Message)
		}
	case firefox:
		b.command("POST", "/moz/context", map[string]string{"value": "chrome"}, nil)
		messages = script[[]string](b, `const all = Services.console.getMessageArray();
			Services.console.reset();
			return all.filter(m => m instanceof Ci.nsIScriptError && (/^http/.test(m.sourceName) || /^CSP/.test(m.category)))
				.map(m => m.sourceName + ': ' + m.category + ': ' + m.errorMessage)`)
		b.command("POST", "/moz/context", map[string]string{"value": "content"}, nil)
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
		parts = slices.DeleteFunc(parts, func(part string) bool { return strings.HasPrefix(part, refusedBy) })
	}
	got := b.console()
	if !slices.EqualFunc(got, parts, strings.Contains) {
		b.t.Errorf("%s: console: %q, want %q", b.engine, got, parts)
	}
}

// refusedBy are Chromium's words for an answer of 400 and more, before the status.
const refusedBy = "the server responded with a status of "

// A browserRequest is one that the page made, as the developer tools show it.
type browserRequest struct {
	Method, URL string
	Headers     map[string]string // without those that the browser adds by itself
}

// requests takes those that Chromium made since it was last asked, but for those that end
// within the browser: the pictures in a page's text, the tab that it opens at first.
func (b *browser) requests() (requests []browserRequest) {
	b.t.Helper()
	for _, entry := range b.entries("performance") {
		var event struct {
			Message struct {
				Method string
				Params struct{ Request browserRequest }
			}
		}
		if err := json.Unmarshal([]byte(entry.Message), &event); err != nil {
			b.t.Fatal(err)
		}
		request := event.Message.Params.Request
		scheme, _, _ := strings.Cut(request.URL, ":")
		within := slices.Contains([]string{"about", "blob", "chrome", "data"}, scheme)
		if event.Message.Method == "Network.requestWillBeSent" && !within {
			requests = append(requests, request)
		}
	}
	return requests
}

// devTools is a command of the Chrome DevTools protocol, for what WebDriver can't do.
func (b *browser) devTools(method string, params map[string]any) {
	b.t.Helper()
	b.command("POST", "/goog/cdp/execute", map[string]any{"cmd": method, "params": params}, nil)
}

// look checks what every state of the page must keep: nothing wider than the screen, at
// a phone's width and at a desk's, and no finding of axe-core, in light and in dark.
// It looks in Chromium only, which can pretend to have another screen.
// AXE_JS is the path of axe-core's axe.min.js, which .ci/run fetches: this project does
// not depend on it.
func (b *browser) look(state string) {
	b.t.Helper()
	if b.engine != chromium {
		return
	}
	for scheme, width := range map[string]int{"light": 1280, "dark": 360} {
		b.devTools("Emulation.setDeviceMetricsOverride",
			map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false})
		b.devTools("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{
			{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}}})
		if !script[bool](b, "return matchMedia(`(prefers-color-scheme: ${arguments[0]})`).matches", scheme) {
			b.t.Fatalf("%s: the browser does not show it %s", state, scheme)
		}
		if wide := script[int](b, "return document.documentElement.scrollWidth"); wide > width {
			b.t.Errorf("%s: %d px wide on a screen of %d", state, wide, width)
		}
		for _, finding := range b.axe() {
			b.t.Errorf("%s, %s, %d px: axe-core: %s", state, scheme, width, finding)
		}
		if folder := os.Getenv("SCREENSHOTS"); folder != "" { // for people: nothing compares them
			name := fmt.Sprintf("%s/%s %d.png", folder, state, width)
			if err := os.WriteFile(name, b.screenshot(), 0o644); err != nil {
				b.t.Fatal(err)
			}
		}
	}
	b.devTools("Emulation.clearDeviceMetricsOverride", map[string]any{})
}

// axe has axe-core examine the page, where there is one.
func (b *browser) axe() []string {
	b.t.Helper()
	path := os.Getenv("AXE_JS")
	if path == "" {
		return nil
	}
	source, err := os.ReadFile(path)
	if err != nil {
		b.t.Fatal("AXE_JS: ", err)
	}
	return script[[]string](b, string(source)+`;
		return axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})
			.then(found => {
				if (found.passes.length < 10) throw Error('axe-core has examined next to nothing');
				return found.violations.map(v => v.id + ' at ' + v.nodes.map(node => node.target.join(' ')));
			})`)
}
