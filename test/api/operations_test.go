package api

import (
	"cmp"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// O4: A preflight of an allowed origin costs no limit, so it leaves no line in the log either. A refused
// one does, and so does an OPTIONS that is no preflight.
func TestAllowedPreflightsAreNotLogged(t *testing.T) {
	t.Parallel()
	for name, env := range map[string]map[string]string{
		"staging": hubstest.ServerEnv(t, staging(t),
			map[string]string{"ALLOWED_ORIGINS": "https://app.example.com"}),
		"production": hubstest.ServerEnv(t, production(t)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := hubstest.Start(t, env)
			c := s.Client(t)
			preflight := func(path, origin string) *hubstest.Response {
				return c.Do("OPTIONS "+path, nil, "Origin", origin, "Access-Control-Request-Method", "PATCH",
					"Access-Control-Request-Headers", "x-request-id")
			}
			limit := hubstest.LimitOf(t, "GET /hubs").Requests
			for range limit {
				preflight("/hubs/"+hubstest.NewUUID(), "https://app.example.com").Want(t, 204)
			}
			preflight("/nowhere", "https://app.example.com").Want(t, 204)
			waitLogged(t, s, c.Get("/openapi.json", "Origin", "https://app.example.com"), `"msg":"request"`)
			wantEqual(t, "request lines", s.Log.Count(`"msg":"request"`), 1)

			refused := preflight("/hubs", "https://app.example.org")
			waitLogged(t, s, refused, `"msg":"request"`, `"method":"OPTIONS"`, `"status":405`)
			waitLogged(t, s, refused, "origin refused", "https://app.example.org")
			waitLogged(t, s, c.Do("OPTIONS /hubs", nil, "Origin", "https://app.example.com"),
				`"msg":"request"`, `"status":405`)
			waitLogged(t, s, c.Do("OPTIONS /hubs", nil, "Access-Control-Request-Method", "GET"),
				`"msg":"request"`, `"status":405`)
		})
	}
}

// H3, O11: SIGHUP stops the server as SIGTERM does, so that a unit starts it again with its settings
// read anew.
func TestHangUpStopsTheServer(t *testing.T) {
	t.Parallel()
	// If the tests run under nohup, the server would else inherit that the signal is ignored.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	s, c := start(t, "member")
	upload := c.StartUpload("a.txt")
	s.Signal(t, syscall.SIGHUP)
	upload.Finish().Want(t, 201)
	wantEqual(t, "exit status", s.WaitExit(t), 0)
	s.Log.WaitFor(t, `"msg":"stopped"`, `"requestsCutOff":false`)
}

// O11: A server that was started with SIGHUP ignored, as nohup(1) does, outlives its terminal.
func TestHangUpMayBeIgnored(t *testing.T) {
	t.Parallel()
	for name, command := range map[string][]string{
		"nohup":         {hubstest.Need(t, "nohup", "coreutils"), hubstest.Binary(), "serve"},
		"trap of shell": {"/bin/sh", "-c", `trap "" HUP; exec "$0" serve`, hubstest.Binary()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := hubstest.StartCommand(t, exec.Command(command[0], command[1:]...))
			hubstest.Must(t, s.Cmd.Process.Signal(syscall.SIGHUP))
			for range 20 {
				s.Client(t).Get("/healthz").Want(t, 200)
			}
			wantEqual(t, "exit status after SIGTERM", s.Stop(t), 0)
		})
	}
}

// unverified begins the warning that another machine could answer in place of the database.
const unverified = "DATABASE_URL: another machine could answer in place of the database"

// A databaseCase is a DATABASE_URL of a database that does not answer.
type databaseCase struct {
	url    string
	env    string // further variable, as NAME=value
	isOpen bool   // another machine could answer: there is a warning
}

// X10: On staging and production, the server warns before its first connection if the database is on
// another machine and TLS does not check who answers. Locally, it does not.
func TestUnverifiedDatabaseIsReported(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]databaseCase{
		"no sslmode":                   {url: "postgres://u:p@db.invalid:1/d", isOpen: true},
		"require":                      {url: "postgres://u:p@db.invalid:1/d?sslmode=require", isOpen: true},
		"any public authority":         {url: "postgres://u:p@db.invalid:1/d?sslmode=verify-ca", isOpen: true},
		"disable":                      {url: "postgres://u:p@db.invalid:1/d?sslmode=disable", isOpen: true},
		"by keywords":                  {url: "host=db.invalid port=1 user=u sslmode=require", isOpen: true},
		"an address":                   {url: "postgres://u:p@192.0.2.1:1/d", isOpen: true},
		"an address of IPv6":           {url: "postgres://u:p@[2001:db8::1]:1/d", isOpen: true},
		"the second host":              {url: "postgres://u:p@localhost,db.invalid/d?port=1,1", isOpen: true},
		"the first of two hosts":       {url: "postgres://u:p@db.invalid,localhost/d?port=1,1", isOpen: true},
		"a name that begins like it":   {url: "postgres://u:p@localhost.db.invalid:1/d", isOpen: true},
		"another address of localhost": {url: "host=localhost hostaddr=192.0.2.1 port=1 user=u", isOpen: true},
		"in the environment":           {url: "postgres:///d", env: "PGHOST=db.invalid", isOpen: true},

		"verify-full":             {url: "postgres://u:p@db.invalid:1/d?sslmode=verify-full"},
		"verify-ca":               {url: "postgres://u:p@db.invalid:1/d?sslmode=verify-ca&sslrootcert=/nowhere/ca.pem"},
		"verify-full, two hosts":  {url: "postgres://u:p@db.invalid,192.0.2.1/d?port=1,1&sslmode=verify-full"},
		"verified by environment": {url: "postgres://u:p@db.invalid:1/d", env: "PGSSLMODE=verify-full"},
		"localhost":               {url: "postgres://u:p@localhost:1/d?sslmode=disable"},
		"loopback":                {url: "postgres://u:p@127.0.0.1:1/d?sslmode=disable"},
		"loopback, another":       {url: "postgres://u:p@127.8.9.1:1/d"},
		"loopback of IPv6":        {url: "postgres://u:p@[::1]:1/d"},
		"a socket":                {url: "postgres://u:p@/d?host=/nowhere&port=1"},
		"a socket by keywords":    {url: "host=/nowhere port=1 user=u"},
		"two sockets":             {url: "postgres://u:p@/d?host=/nowhere,/nothing&port=1,1"},
		"an abstract socket":      {url: "host=@nowhere port=1 user=u"},
		"an address of a name":    {url: "host=db.invalid hostaddr=127.0.0.1 port=1 user=u"},
		"no host":                 {url: "postgres://u:p@:1/d"},
	} {
		for environment, settings := range map[string]map[string]string{
			"local":      {},
			"staging":    {"COOKIE_DOMAIN": "staging.example.com"},
			"production": {"COOKIE_DOMAIN": "example.com", "ALLOWED_ORIGIN_DOMAIN": "example.com"},
		} {
			t.Run(name+" "+environment, func(t *testing.T) {
				t.Parallel()
				variable, value, _ := strings.Cut(cmp.Or(c.env, "HOME=/nowhere"), "=")
				env := hubstest.ServerEnv(t, settings, map[string]string{
					"APP_ENV":      environment,
					"DATABASE_URL": c.url,
					"SMTP_URL":     "smtp://127.0.0.1:1",
					"MAIL_FROM":    "signin@example.com",
					variable:       value,
				})
				status, log, output := hubstest.RunBoth(env, "serve")
				if status != 1 || !strings.Contains(output, "the database can't be reached") {
					t.Fatalf("setup: got exit status %d, %s, want a database that does not answer", status, output)
				}
				want := 0
				if c.isOpen && environment != "local" {
					want = 1
				}
				got := strings.Count(log, unverified)
				if got != want || want == 1 && !strings.Contains(log, `"level":"WARN"`) {
					t.Errorf("%s: got %d warnings, want %d, in the log\n%s", c.url, got, want, log)
				}
			})
		}
	}
}

// L2: If an X-Forwarded-For comes from a peer that TRUSTED_PROXIES does not name, the server warns, but
// once only, however many requests come. A health check, and clients of a trusted proxy, cause no
// warning.
func TestUntrustedProxyIsReportedOnce(t *testing.T) {
	t.Parallel()
	const warning = "X-Forwarded-For is ignored, because TRUSTED_PROXIES does not name its sender"
	for name, c := range map[string]struct {
		proxies string // TRUSTED_PROXIES
		headers []string
		want    int
	}{
		"nobody is trusted":   {headers: []string{"X-Forwarded-For", "203.0.113.1"}, want: 1},
		"others are trusted":  {proxies: "10.0.0.0/8", headers: []string{"X-Forwarded-For", "::1"}, want: 1},
		"a text that is none": {headers: []string{"X-Forwarded-For", "unknown"}, want: 1},
		"the peer is trusted": {proxies: "127.0.0.1/32", headers: []string{"X-Forwarded-For", "203.0.113.1"}},
		"a health check":      {headers: []string{"X-Forwarded-For", "100::1"}},
		"no header":           {},
		"another header":      {headers: []string{"Forwarded", "for=203.0.113.1", "X-Real-Ip", "203.0.113.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := hubstest.Start(t, staging(t), map[string]string{"TRUSTED_PROXIES": c.proxies})
			client := s.Client(t)
			client.IP = "" // no header
			answers := hubstest.SendAtOnce(t, 20, func() *hubstest.Response {
				return client.Get("/auth/session", c.headers...)
			})
			hubstest.WantStatuses(t, answers, map[int]int{401: 20})
			waitLogged(t, s, client.Get("/openapi.json"), `"msg":"request"`)
			wantEqual(t, "warnings", s.Log.Count(`"level":"WARN"`, warning), c.want)
		})
	}
}
