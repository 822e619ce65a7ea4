package api

import (
	"strings"
	"testing"

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
		c.Get("/hubs").Must(t, 401)
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
	c.Get("/files/a/b").Must(t, 401)
	c.Send("HEAD /files/a/b", nil).Must(t, 401)
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
	c.PresentCode(email, s.Code(t, email)).Must(t, 200)
}
