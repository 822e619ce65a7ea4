package api

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// L2: a client is an IPv4 address, also where it is written in IPv6, or the /64 network of an
// IPv6 address, which one customer has as a whole.
func TestLimitByClientAddress(t *testing.T) {
	t.Parallel()
	c := hubstest.Start(t).Client(t)
	for _, test := range []struct{ address, same, other string }{
		{"192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"},
		{"2001:db8:0:1::1", "2001:db8:0:1::9", "2001:db8:0:2::1"},
	} {
		c.IP = test.address
		flood(t, c, "GET /hubs")
		c.IP = test.same
		hubstest.WantProblem(t, c.Get("/hubs"), 429, "rate_limited")
		c.IP = test.other
		c.Get("/hubs").Want(t, 401)
	}
}

// Every request counts against the limit of its client's address, also one that leads nowhere.
func TestRequestsShareALimit(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	for _, request := range []string{
		"GET /nowhere",
		"OPTIONS /hubs",
		"POST /files/upload",
		"GET /filesystem", // only begins like a file
	} {
		c := s.Client(t)
		flood(t, c, request)
		hubstest.WantProblem(t, c.Get("/hubs"), 429, "rate_limited")
	}
}

// A client that has spent its limit may still read files, which have a larger one.
func TestFilesHaveALimitOfTheirOwn(t *testing.T) {
	t.Parallel()
	c := hubstest.Start(t).Client(t)
	flood(t, c, "GET /hubs")
	c.Send("GET /files/a/b", nil).Want(t, 401)
	c.Send("HEAD /files/a/b", nil).Want(t, 401)
}

// O8: requests for codes are counted by the e-mail address, however it is written, and by the
// client. So one client keeps others from no code, and a refusal spoils no code.
func TestLimitOfCodes(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	limit := hubstest.LimitOf(t, askRoute)
	email, _ := s.NewUser(t, "member")
	ask := map[string]string{"email": email}
	c := s.Client(t)

	spend(t, c, limit, askRoute, ask)

	spelled := map[string]string{"email": " " + strings.ToUpper(email)}
	wantLimited(t, c.Send(askRoute, spelled), limit)
	c.AskCode("x" + email)
	c.Elsewhere().AskCode(email)
	c.IP += "9" // another address of the client's network
	wantLimited(t, c.Send(askRoute, ask), limit)
	c.PresentCode(email, s.Code(t, email)).Want(t, 200)
}

// flood spends the limit by client address, and returns a refusal.
func flood(
	t *testing.T, c *hubstest.Client, request string, headers ...string,
) *hubstest.Response {
	t.Helper()
	return spend(t, c, hubstest.LimitOf(t, "GET /hubs"), request, nil, headers...)
}

// spend sends a request many times at once, and returns a refusal. Exactly as many must pass as
// the limit says.
func spend(
	t *testing.T, c *hubstest.Client, limit hubstest.Limit, request string, body any, headers ...string,
) *hubstest.Response {
	t.Helper()
	send := func() *hubstest.Response {
		return c.Send(request, body, headers...)
	}
	many := limit.Requests + 30
	passed := many - atOnce(many, send)[429]
	if passed != limit.Requests {
		t.Errorf("%s: %d passed, want %d", request, passed, limit.Requests)
	}
	refusal := send()
	wantLimited(t, refusal, limit)
	return refusal
}

// atOnce sends a request n times at once, and counts the answers by their status.
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

// wantLimited checks a refusal. It names the limit and says how long to wait. (That this is true
// is a test of the limiter, by its clock.)
func wantLimited(t *testing.T, r *hubstest.Response, l hubstest.Limit) {
	t.Helper()
	hubstest.WantProblem(t, r, 429, "rate_limited")
	period := strings.Replace(l.Period.String(), "m0s", "m", 1)
	want := fmt.Sprintf("The limit is %d per %s by %s.", l.Requests, period, l.By)
	got := r.Field(t, "detail")
	if got != want {
		t.Errorf("detail: got %q, want %q", got, want)
	}
	wait, _ := time.ParseDuration(r.Header.Get("Retry-After") + "s") // WantProblem checks its form
	if wait > l.Period {
		t.Errorf("Retry-After: got %v, want at most %v", wait, l.Period)
	}
}
