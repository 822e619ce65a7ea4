// Package api tests the server from outside, through HTTP and SMTP.
package api

import (
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) {
	hubstest.Main(m)
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

// upload uploads a file named a.txt with this content, and returns its path.
func upload(t testing.TB, c *hubstest.Client, content string) (path string) {
	t.Helper()
	stored := c.Upload("a.txt", []byte(content)).Must(t, 201)
	return stored.Header.Get("Location")
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
	return hubstest.ProductionEnv(hubstest.NewMailServer(t, hubstest.MailOptions{}))
}

const (
	askRoute   = "POST /auth/otp/request"
	guessRoute = "POST /auth/otp/validate"
)

// asked adds a user and asks for a code. It returns the client that has asked, the user's address,
// and the code.
func asked(t *testing.T, s *hubstest.Server) (c *hubstest.Client, email, code string) {
	t.Helper()
	email, _ = s.NewUser(t, "member")
	c = s.Client(t)
	c.AskCode(email)
	return c, email, s.Code(t, email)
}

// A call is a request to one route.
type call struct {
	request string // "GET /hubs"
	body    any
	headers []string
}

// send sends the request with these headers besides its own.
func (q call) send(c *hubstest.Client, headers ...string) *hubstest.Response {
	return c.Send(q.request, q.body, slices.Concat(q.headers, headers)...)
}

// itemPath splits a path at its last {…}. The first group is the path of the POST that makes such
// an item, the second is the rest of the path.
var itemPath = regexp.MustCompile(`^(.*)/\{[^}]*\}([^{]*)$`)

// sample returns a valid call to a route of the contract. If the call needs a hub or a file, admin
// makes it first.
func sample(t *testing.T, srv *hubstest.Server, admin *hubstest.Client, route string) call {
	t.Helper()
	if route == uploadRoute {
		return call{
			request: route,
			body:    form(partHeader+"\r\nContent-Type: text/plain", "hello"), // Prism needs a type
			headers: []string{"Content-Type", formType},
		}
	}
	q := call{request: route}
	method, path, _ := strings.Cut(route, " ")
	item := itemPath.FindStringSubmatch(path)
	switch {
	case path == "/files/{fileId}/{name}":
		q.request = method + " " + upload(t, admin, "hello")
	case item != nil:
		create := sample(t, srv, admin, "POST "+item[1])
		made := create.send(admin).Must(t, 201)
		q.request = method + " " + made.Header.Get("Location") + item[2]
	}
	operation := []string{"paths", path, strings.ToLower(method)}
	if hubstest.Contract[map[string]any](t, operation...)["requestBody"] != nil {
		q.body = sampleBody(t, srv, operation)
	}
	return q
}

// sampleBody returns a valid body for an operation. It has the examples of the contract. If it
// needs a code, a new user asks for it.
func sampleBody(t *testing.T, srv *hubstest.Server, operation []string) map[string]any {
	t.Helper()
	fields := hubstest.Contract[map[string]any](t, append(operation,
		"requestBody", "content", "application/json", "schema", "properties")...)
	body := map[string]any{}
	for name, field := range fields {
		examples := field.(map[string]any)["examples"]
		body[name] = examples.([]any)[0]
	}
	if body["code"] != nil {
		_, body["email"], body["code"] = asked(t, srv)
	} else if body["email"] != nil {
		body["email"] = hubstest.NewEmail()
	}
	return body
}

// bothWays returns two readers of body. net/http sends the body of the first one with a
// Content-Length, and the body of the second one in chunks.
func bothWays(body string) map[string]io.Reader {
	return map[string]io.Reader{
		"with a length": strings.NewReader(body),
		"in chunks":     struct{ io.Reader }{strings.NewReader(body)}, // hides the length
	}
}

// flood spends the limit by client address with a request. It returns an answer that refuses the
// request (429).
func flood(t *testing.T, c *hubstest.Client, request string, headers ...string) *hubstest.Response {
	t.Helper()
	return spend(t, c, hubstest.LimitOf(t, "GET /hubs"), request, nil, headers...)
}

// spend spends a limit: it sends a request more often than the limit permits, all at once. The test
// fails unless exactly limit.Requests of them pass. spend then sends the request once more and
// returns the answer, which must be a refusal (429).
func spend(
	t *testing.T, c *hubstest.Client, limit hubstest.Limit, request string, body any, headers ...string,
) *hubstest.Response {
	t.Helper()
	send := func() *hubstest.Response {
		return c.Send(request, body, headers...)
	}
	sent := limit.Requests + 30
	passed := sent - atOnce(sent, send)[429]
	if passed != limit.Requests {
		t.Errorf("%s: got %d requests that passed, want %d", request, passed, limit.Requests)
	}
	refusal := send()
	wantLimited(t, refusal, limit)
	return refusal
}

// atOnce sends a request n times at once, and returns the number of answers by their status.
func atOnce(n int, send func() *hubstest.Response) map[int]int {
	statuses := make(chan int, n)
	for range n {
		go func() {
			statuses <- send().Status
		}()
	}
	counts := map[int]int{}
	for range n {
		counts[<-statuses]++
	}
	return counts
}

// wantLimited checks that an answer is a 429, that its detail names the limit, and that its
// Retry-After is at most the period. TestLimitSlides checks that Retry-After is true.
func wantLimited(t *testing.T, r *hubstest.Response, l hubstest.Limit) {
	t.Helper()
	hubstest.WantProblem(t, r, 429, "rate_limited")
	period := strings.Replace(l.Period.String(), "m0s", "m", 1)
	want := fmt.Sprintf("The limit is %d per %s by %s.", l.Requests, period, l.By)
	got := r.Field(t, "detail")
	if got != want {
		t.Errorf("detail: got %q, want %q", got, want)
	}
	wait, err := time.ParseDuration(r.Header.Get("Retry-After") + "s")
	if err != nil || wait < time.Second || wait > l.Period {
		t.Errorf("Retry-After: got %q, want 1 s to %v", r.Header.Get("Retry-After"), l.Period)
	}
}

// wantLogged waits for a log line that has the request id of an answer and contains all parts. It
// returns the line.
func wantLogged(t testing.TB, s *hubstest.Server, r *hubstest.Response, parts ...string) string {
	t.Helper()
	id := `"requestId":"` + r.Header.Get("X-Request-Id") + `"`
	return s.Log.WaitFor(t, append(parts, id)...)
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
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// timeOf returns a member of an answer that is a time.
func timeOf(t *testing.T, r *hubstest.Response, member string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339Nano, r.Field(t, member).(string))
	if err != nil {
		t.Fatal(err)
	}
	return at
}
