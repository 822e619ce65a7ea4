package api

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// L2: Clients are limited by their IPv4 address, also if it is written as an IPv6 address, or by
// the /64 network of their IPv6 address, because one customer usually has a whole /64.
func TestLimitByClientAddress(t *testing.T) {
	t.Parallel()
	c := hubstest.Start(t).Client(t)
	// same counts against the limit of address, and other against a limit of its own.
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

// Every request counts against the limit by client address, even if it is refused or matches no
// route.
func TestRequestsShareALimit(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	for _, request := range []string{
		"GET /nowhere",
		"OPTIONS /hubs",
		"POST /files/upload",
		"GET /filesystem", // begins like the path of a file
	} {
		c := s.Client(t)
		flood(t, c, request)
		hubstest.WantProblem(t, c.Get("/hubs"), 429, "rate_limited")
	}
}

// Downloads count against a limit of their own, which is larger. So a client that has spent the
// limit of the other requests can still download files.
func TestFilesHaveALimitOfTheirOwn(t *testing.T) {
	t.Parallel()
	c := hubstest.Start(t).Client(t)
	flood(t, c, "GET /hubs")
	c.Get("/files/a/b").Want(t, 401)
	c.Send("HEAD /files/a/b", nil).Want(t, 401)
}

// O8: Requests for codes are counted by e-mail address and client network together. Another case of
// the address, or a space around it, makes no difference. So a client can't keep another client
// from getting a code. A refused request does not make the current code invalid.
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
