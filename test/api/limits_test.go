package api

import (
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

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
	for range limit.Requests {
		c.AskCode(email)
	}
	wantLimited(t, c.Do(askRoute, body), limit)
	spelled := map[string]string{"email": " " + strings.ToUpper(email)}
	wantLimited(t, c.Do(askRoute, spelled), limit)
	another := map[string]string{"email": "x" + email}
	c.Do(askRoute, another).Want(t, 200)
	c.Elsewhere().Do(askRoute, body).Want(t, 200)
	c.IP = strings.TrimSuffix(c.IP, "1") + "2" // another address of the client's network
	wantLimited(t, c.Do(askRoute, body), limit)
	c.PresentCode(email, s.Code(t, email)).Want(t, 200)
}
