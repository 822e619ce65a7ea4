// Package api tests the server from outside, through HTTP and SMTP.
package api

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) {
	hubstest.Main(m, everyAnswerIsSeen)
}

// start starts a server, by default in the local environment. It returns the server, and a client
// whose user is new, has this role, is signed in and has accepted the terms.
func start(
	t testing.TB, role string, env ...map[string]string,
) (*hubstest.Server, *hubstest.Client) {
	t.Helper()
	s := hubstest.Start(t, env...)
	c, _ := s.Member(t, role)
	return s, c
}

// staging returns the settings of a server on staging with a new mail server. Such a server logs
// each request and sends codes by mail.
func staging(t testing.TB) map[string]string {
	t.Helper()
	return hubstest.StagingEnv(hubstest.NewMailServer(t, hubstest.MailOptions{}))
}

// production returns the settings of a server in production with a new mail server.
func production(t testing.TB) map[string]string {
	t.Helper()
	env := hubstest.NewMailServer(t, hubstest.MailOptions{}).Env()
	env["APP_ENV"] = "production"
	env["COOKIE_DOMAIN"] = "example.com"
	env["ALLOWED_ORIGIN_DOMAIN"] = "example.com"
	return env
}

// startEnvironments starts a server for each entry of settings, and returns the servers by the
// names of the entries. The name is also the server's APP_ENV, unless the entry sets another. The
// servers of deployed environments share one mail server.
func startEnvironments(t testing.TB, settings map[string]map[string]string) map[string]*hubstest.Server {
	t.Helper()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	servers := map[string]*hubstest.Server{}
	for name, values := range settings {
		env := map[string]string{"APP_ENV": name}
		maps.Copy(env, values)
		if env["APP_ENV"] != "local" {
			maps.Copy(env, mail.Env())
		}
		servers[name] = hubstest.Start(t, env)
	}
	return servers
}

const (
	askRoute   = "POST /auth/otp/request"
	guessRoute = "POST /auth/otp/validate"
)

// askForNewUser adds a user and asks for a code. It returns the user's address.
func askForNewUser(t *testing.T, s *hubstest.Server) (email string) {
	t.Helper()
	email, _ = s.NewUser(t, "member")
	s.Client(t).AskCode(email)
	return email
}

var (
	wantEqual = hubstest.WantEqual
	wantText  = hubstest.WantText
	run       = hubstest.Run
	repeat    = strings.Repeat
)

// wantNow checks that a time is within a minute of now.
func wantNow(t *testing.T, what string, at time.Time) {
	t.Helper()
	if time.Since(at).Abs() > time.Minute {
		t.Errorf("%s: got %v, want now: %v", what, at, time.Now())
	}
}

// A way is one of the ways in which net/http sends a body.
type way struct {
	name string
	body io.Reader
}

// bothWays returns the two ways to send a body: with a Content-Length and in chunks.
func bothWays(body string) []way {
	return []way{
		{"with a length", strings.NewReader(body)},
		{"in chunks", io.MultiReader(strings.NewReader(body))}, // hides the length
	}
}

// exceed sends a request more often than the limit permits, all on one connection. It waits for no
// answer before the next request, so even on a busy machine the server gets them as fast as it can
// answer. exceed returns the number of requests that passed, and the last answer, which should be a
// refusal (429). A body is encoded as JSON.
func exceed(
	t *testing.T, s *hubstest.Server, c *hubstest.Client, limit hubstest.Limit, request string, body any,
	headers ...string,
) (passed int, refusal *hubstest.Response) {
	t.Helper()
	text := ""
	if body != nil {
		encoded, err := json.Marshal(body)
		hubstest.Must(t, err)
		text = string(encoded)
		headers = append(slices.Clone(headers), "Content-Type", "application/json",
			"Content-Length", fmt.Sprint(len(text)))
	}
	text = c.Head(request, headers...) + text
	conn := hubstest.Dial(t, s.Addr)
	defer conn.Close()
	conn.Begin(text)
	more := limit.Requests + 29
	go io.WriteString(conn, repeat(text, more)) // an error shows as a missing answer
	for range 1 + more {
		refusal = conn.Receive(t)
		switch refusal.Status {
		case 0:
			t.FailNow() // nor does any further answer come
		case 429:
		default:
			passed++
		}
	}
	return passed, refusal
}

// decodeStrict decodes a JSON text into value. name is for messages. A member that value does not have
// ends the test, so that no test overlooks one.
func decodeStrict(t testing.TB, name, text string, value any) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(value); err != nil {
		t.Fatalf("setup: %s: %v", name, err)
	}
}

// wantLimited checks that an answer is a 429, that its detail names the limit, and that its
// Retry-After is at most the period. TestLimitSlides checks that Retry-After is true.
func wantLimited(t *testing.T, r *hubstest.Response, l hubstest.Limit) {
	t.Helper()
	r.WantProblem(t, 429, "rate_limited")
	r.WantField(t, "detail", "Too many requests: the limit is "+limitText(l)+".")
	wait, err := time.ParseDuration(r.Header.Get("Retry-After") + "s")
	if err != nil || wait < time.Second || wait > l.Period {
		t.Errorf("Retry-After: got %q, want 1 s to %v", r.Header.Get("Retry-After"), l.Period)
	}
}

// waitLogged waits for a log line that has the request id of an answer and contains all parts. It
// returns the line.
func waitLogged(t testing.TB, s *hubstest.Server, r *hubstest.Response, parts ...string) string {
	t.Helper()
	if t.Failed() {
		t.FailNow() // the line of a wrong answer may never come
	}
	id := `"requestId":"` + r.Header.Get("X-Request-Id") + `"`
	return s.Log.WaitFor(t, append(parts, id)...)
}

// maskedEmail returns an address in the form that the log shows: a***@example.com.
func maskedEmail(email string) string {
	return email[:1] + "***" + email[strings.LastIndex(email, "@"):]
}

// shell runs a script in a folder. The script sees args as $1, $2 and so on. shell ends the test if
// a command of the script fails.
func shell(t *testing.T, dir, script string, args ...string) {
	t.Helper()
	cmd := exec.Command("sh", "-ec", script, "sh")
	cmd.Args = append(cmd.Args, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("setup: %s: %v\n%s", script, err, out)
	}
}

// timeOf returns a member of an answer that is a time.
func timeOf(t *testing.T, r *hubstest.Response, member string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339Nano, r.Field(t, member))
	hubstest.Must(t, err)
	return at
}
