package api

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// E1: hubs health asks the server at ADDR, and ends with 0 if it is well, whatever form ADDR has and
// whatever proxy the environment names. It leaves no line in the log.
func TestHealthOfAServerThatIsWell(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	_, port, err := net.SplitHostPort(s.Addr)
	hubstest.Must(t, err)
	for name, env := range map[string]map[string]string{
		"as the server has it": {"ADDR": s.Addr},
		"a name":               {"ADDR": "localhost:" + port},
		"a port alone":         {"ADDR": ":" + port},
		"every address":        {"ADDR": "0.0.0.0:" + port},
		"behind a proxy for others": {
			// Go's client asks no proxy for a loopback address.
			"ADDR": "0.0.0.0:" + port, "HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1",
		},
	} {
		status, output := run(t, env, "health")
		if status != 0 || output != "ok\n" {
			t.Errorf("%s: got exit status %d, %q, want 0, ok", name, status, output)
		}
	}
	waitLogged(t, s, s.Client(t).Get("/openapi.json"), `"msg":"request"`)
	wantEqual(t, "request lines", s.Log.Count(`"msg":"request"`), 1)
}

// H9: A client that has used up the limit of 127.0.0.1 does not make the server look unwell.
func TestHealthSharesNoLimit(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c := s.Client(t)
	c.IP = "127.0.0.1"
	limit := hubstest.LimitOf(t, "GET /healthz")
	_, refused := exceed(t, s, c, limit, "GET /healthz", nil)
	refused.Want(t, 429)
	status, output := run(t, map[string]string{"ADDR": s.Addr}, "health")
	wantEqual(t, "exit status", status, 0)
	wantEqual(t, "output", output, "ok\n")
}

// E1: hubs health ends with 1 if the server is not well, is away or is hung, and with 2 if ADDR is no
// address. It says what it has asked.
func TestHealthOfAServerThatIsNot(t *testing.T) {
	t.Parallel()
	unwell := hubstest.Start(t)
	unwell.AllowErrorsWithAnyOf("no such file or directory")
	hubstest.Must(t, os.RemoveAll(unwell.Env["FILES_DIR"]))
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	hubstest.Must(t, err)
	closed.Close()
	_, hung := hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")                      // takes connections, and says nothing
	other := httptest.NewServer(http.RedirectHandler("/elsewhere", http.StatusFound)) // not this server
	t.Cleanup(other.Close)
	mute := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		panic(http.ErrAbortHandler) // closes the connection without an answer
	}))
	t.Cleanup(mute.Close)
	for name, c := range map[string]struct {
		addr   string
		status int
		says   string
	}{
		"unwell":       {unwell.Addr, 1, "answers 503 Service Unavailable; the server's log says why"},
		"away":         {closed.Addr().String(), 1, "connection refused"},
		"hung":         {hung, 1, "Timeout exceeded"},
		"another":      {strings.TrimPrefix(other.URL, "http://"), 1, "stopped after 10 redirects"},
		"mute":         {strings.TrimPrefix(mute.URL, "http://"), 1, "EOF"},
		"no port":      {"127.0.0.1", 2, "ADDR: "},
		"no address":   {"a b:80", 2, "ADDR: "},
		"a port alone": {"8080", 2, "ADDR: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			status, output := run(t, map[string]string{"ADDR": c.addr}, "health")
			wantEqual(t, "exit status", status, c.status)
			wantParts(t, "output", output, c.says)
		})
	}
}

// The commands that only print something need no setting, and take no argument.
func TestCommandsThatNeedNothing(t *testing.T) {
	t.Parallel()
	for command, parts := range map[string][]string{
		"version":  {"hubs ", " go1."},
		"routes":   {"METHOD", "GET     /hubs"},
		"licenses": {"github.com/golang-jwt/jwt/v5", "github.com/lib/pq", "Copyright", "The Go Authors"},
		"help":     {"usage: hubs"},
	} {
		status, output := run(t, map[string]string{}, command)
		wantEqual(t, "exit status of "+command, status, 0)
		wantParts(t, command, output, parts...)
		// A setting that is wrong makes no difference.
		status, again := run(t, map[string]string{"APP_ENV": "x", "DATABASE_URL": "x", "ADDR": "x"}, command)
		wantEqual(t, "exit status of "+command+" beside wrong settings", status, 0)
		wantEqual(t, command+" beside wrong settings", again, output)
		if command != "help" {
			status, _ = run(t, map[string]string{}, command, "x")
			wantEqual(t, "exit status of "+command+" x", status, 2)
		}
	}
	_, output := run(t, map[string]string{}, "licenses")
	wantText(t, "licenses", output, hubstest.ReadFile(t, "web/licenses.txt"))
	for _, module := range hubstest.Matches(t, "go.mod", `(?m)^\t(\S+) v\S+$`) {
		wantParts(t, "licenses", output, "==== "+module)
	}
}
