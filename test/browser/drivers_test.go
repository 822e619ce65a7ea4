package browser

// The drivers of Chromium and WebKitGTK. They speak the W3C WebDriver protocol over HTTP. Firefox is
// not here: it was the slowest, needed a protocol of its own, and noticed nothing that the others
// did not.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// startProgram runs a program until the test ends. dir is its home and its temporary folder.
func startProgram(t testing.TB, dir, program string, args ...string) *hubstest.Program {
	t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), "HOME="+dir, "TMPDIR="+dir, "XDG_RUNTIME_DIR="+dir)
	return hubstest.StartProgram(t, cmd)
}

// startChromedriver starts chromedriver and returns its port. chromedriver chooses a port that is
// free in one of IPv4 and IPv6, and ends if the port is taken in the other. Then startChromedriver
// starts it again.
func startChromedriver(t testing.TB, dir string) (port string) {
	t.Helper()
	driver := hubstest.Need(t, "chromedriver", "chromium-driver")
	for range 5 {
		p := startProgram(t, dir, driver, "--port=0")
		port := p.WaitMatch(t, "started successfully on port ([0-9]+)|port not available")
		if port != "" {
			return port
		}
	}
	t.Fatal("setup: chromedriver found no free port in five attempts")
	return ""
}

func startChromium(t testing.TB, dir, server string) webDriver {
	t.Helper()
	program := hubstest.Need(t, "chromium", "chromium")
	port := startChromedriver(t, dir)
	options := params{
		"binary": program,
		"args": []string{
			"--headless", "--no-sandbox", // Chromium's sandbox does not work for root
			"--disable-gpu", "--disable-quic", "--no-first-run",
			"--disable-background-networking", "--disable-component-update", "--disable-sync",
			// No request leaves this machine.
			"--host-resolver-rules=MAP * 127.0.0.1",
			"--proxy-server=https=127.0.0.1:" + startTunnel(t, server),
			// With the pipe, Chromium ends when its driver has ended.
			"--disable-dev-shm-usage", "--force-prefers-reduced-motion", "--remote-debugging-pipe",
			"--user-data-dir=" + dir + "/profile", "--window-size=1280,900",
		},
		"prefs": params{
			"download.default_directory": dir + "/Downloads",
			// These settings permit third-party cookies. So only SameSite can keep the cookie from
			// another site's requests.
			"profile.cookie_controls_mode":      0,
			"profile.block_third_party_cookies": false,
		},
	}
	d, err := newWebDriver(port, params{
		"acceptInsecureCerts": server != "",
		"goog:chromeOptions":  options,
		"goog:loggingPrefs":   params{"browser": "ALL"},
	})
	if err != nil {
		t.Fatal("setup: WebDriver session: ", err)
	}
	return d
}

// startWebKit runs WebKitGTK's MiniBrowser on a virtual display, because it needs a display.
func startWebKit(t testing.TB, dir, server string) webDriver {
	t.Helper()
	found, _ := filepath.Glob("/usr/lib/*/webkit2gtk-4.1/MiniBrowser") // the pattern is well formed
	if found == nil {
		hubstest.Skip(t, "MiniBrowser is missing: apt-get install webkit2gtk-driver")
	}
	screen := startProgram(t, dir, hubstest.Need(t, "Xvfb", "xvfb"),
		"-displayfd", "1", "-screen", "0", "1400x1000x24", "-nolisten", "tcp")
	display := screen.WaitMatch(t, "^([0-9]+)$")
	hubstest.WriteFile(t, dir+"/.config/user-dirs.dirs", `XDG_DOWNLOAD_DIR="$HOME/Downloads"`)
	capabilities := params{
		"acceptInsecureCerts": server != "",
		"webkitgtk:browserOptions": params{
			"binary": found[0],
			"args":   []string{"--automation"},
		},
	}
	tunnel := startTunnel(t, server)
	// Sometimes a driver does not answer, or another program takes its port first. Then startWebKit
	// starts another driver on another port.
	var err error
	for range 3 {
		addr := hubstest.FreeAddr(t)
		port := portOf(addr)
		startProgram(t, dir, "env", "DISPLAY=:"+display, "GTK_A11Y=none", "NO_AT_BRIDGE=1",
			"https_proxy=http://127.0.0.1:"+tunnel, // plain HTTP does not use the proxy
			hubstest.Need(t, "WebKitWebDriver", "webkit2gtk-driver"), "--port="+port)
		hubstest.WaitListening(t, addr)
		var d webDriver
		d, err = newWebDriver(port, capabilities)
		if err == nil {
			return d
		}
	}
	t.Fatal("setup: WebDriver session, at the third and last attempt: ", err)
	return ""
}

// startTunnel starts a proxy that connects to the server, whatever host the browser asks for, and
// returns its port. The tests need it because not every driver can map host names. If server is
// empty, startTunnel returns a port on which nothing listens.
func startTunnel(t testing.TB, server string) (port string) {
	t.Helper()
	if server == "" {
		return "9"
	}
	tunnel := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, err := net.Dial("tcp", server)
		if r.Method != http.MethodConnect || err != nil {
			http.Error(w, "no such host", http.StatusBadGateway)
			return
		}
		defer conn.Close()
		client, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer client.Close()
		fmt.Fprint(client, "HTTP/1.1 200 OK\r\n\r\n")
		go func() {
			defer conn.Close()
			io.Copy(conn, client)
		}()
		io.Copy(client, conn)
	}))
	t.Cleanup(tunnel.Close)
	return portOf(tunnel.Listener.Addr().String())
}

func portOf(addr string) string { return addr[strings.LastIndex(addr, ":")+1:] }

// A webDriver is the URL of a session at a driver that speaks the W3C WebDriver protocol.
type webDriver string

func newWebDriver(port string, capabilities params) (webDriver, error) {
	d := webDriver("http://127.0.0.1:" + port + "/session")
	asked := params{"capabilities": params{"alwaysMatch": capabilities}}
	answer, err := d.command("POST", "", asked)
	if err != nil {
		return "", err
	}
	var created struct{ SessionID string }
	err = json.Unmarshal(answer, &created)
	return d + webDriver("/"+created.SessionID), err
}

func (d webDriver) command(method, path string, in params) (json.RawMessage, error) {
	var body bytes.Buffer
	if in != nil {
		json.NewEncoder(&body).Encode(in) // params can always be encoded
	}
	req, err := http.NewRequest(method, string(d)+path, &body)
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
