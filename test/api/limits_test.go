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
	limit := hubstest.LimitOf(t, "GET /hubs")

	for _, test := range []struct {
		address string
		same    string // counts against the limit of address
		other   string // counts against a limit of its own
	}{
		{
			address: "192.0.2.1",
			same:    "::ffff:192.0.2.1",
			other:   "192.0.2.2",
		},
		{
			address: "2001:db8:0:1::1",
			same:    "2001:db8:0:1::9",
			other:   "2001:db8:0:2::1",
		},
	} {
		c.IP = test.address
		passed, refusal := exceed(t, c, limit, "GET /hubs", nil)
		wantEqual(t, test.address+": requests that passed", passed, limit.Requests)
		wantLimited(t, refusal, limit)
		c.IP = test.same
		wantLimited(t, c.Get("/hubs"), limit)
		c.IP = test.other
		c.Get("/hubs").WantProblem(t, 401, "unauthenticated")
	}
}

// O8: Requests for codes are counted by e-mail address and client network together. Another case of
// the address, or a space around it, makes no difference. So a client can't keep another client
// from getting a code. A refused request does not make the current code invalid.
func TestLimitOfCodes(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	limit := hubstest.LimitOf(t, askRoute)
	email, _ := s.NewUser(t, "member")
	body := map[string]string{"email": email}
	c := s.Client(t)

	passed, refusal := exceed(t, c, limit, askRoute, body)

	wantEqual(t, askRoute+": requests that passed", passed, limit.Requests)
	wantLimited(t, refusal, limit)
	spelled := map[string]string{"email": " " + strings.ToUpper(email)}
	wantLimited(t, c.Do(askRoute, spelled), limit)
	another := map[string]string{"email": "x" + email}
	c.Do(askRoute, another).Want(t, 200)
	c.Elsewhere().Do(askRoute, body).Want(t, 200)
	c.IP = strings.TrimSuffix(c.IP, "1") + "2" // another address of the client's network
	wantLimited(t, c.Do(askRoute, body), limit)
	c.PresentCode(email, s.Code(t, email)).Want(t, 200)
}
