package api

import (
	"fmt"
	"testing"

	"hubs/internal/hubstest"
)

// inParallel is the number of requests that are sent at the same moment.
const inParallel = 200

// What must hold for requests at the same moment holds for 200 of them, counted exactly:
//
//   - O3: the right code opens one session
//   - O4, L5: of wrong guesses, from as many addresses, ten are looked at; then the right code is refused
//   - L1: of requests by one client, as many pass as its limit says
//   - O7: one mail goes to a mailbox, however many ask
//   - F3: each upload has one row, one file, and its own bytes; some may be a 503
func TestRequestsAtTheSameMoment(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	s.AllowErrorsWithAnyOf("all connections to the database are busy") // on a slow machine
	limit := hubstest.LimitOf(t, "POST /auth/otp/validate").Requests
	t.Run("O3 right codes", func(t *testing.T) {
		g := s.NewGuest(t)
		counts := hubstest.CountStatuses(g.PresentAtOnce(inParallel, g.Code))
		wantEqual(t, "answers by status", counts, map[int]int{
			200: 1, 401: limit - 1, 429: inParallel - limit,
		})
	})
	t.Run("O4 wrong codes", func(t *testing.T) {
		g := s.NewGuest(t)
		counts := hubstest.CountStatuses(g.PresentAtOnce(inParallel, hubstest.OtherCode(g.Code, 1)))
		wantEqual(t, "answers by status", counts, map[int]int{401: limit, 429: inParallel - limit})
		g.Present(g.Code).WantProblem(t, 429, "rate_limited")
	})
	t.Run("L1 one client", func(t *testing.T) {
		limit := hubstest.LimitOf(t, "POST /auth/otp/request").Requests
		email, c := hubstest.NewEmail(), s.Client(t)
		counts := hubstest.CountStatuses(hubstest.SendAtOnce(t, limit+20, func() *hubstest.Response {
			return c.Do("POST /auth/otp/request", map[string]string{"email": email})
		}))
		wantEqual(t, "answers by status", counts, map[int]int{200: limit, 429: 20})
	})
	t.Run("O7 requests for a code", func(t *testing.T) {
		email, _ := s.NewUser(t, "member")
		hubstest.WantStatuses(t, hubstest.SendAtOnce(t, inParallel, func() *hubstest.Response {
			return s.Client(t).Do("POST /auth/otp/request", map[string]string{"email": email})
		}), map[int]int{200: inParallel})
		hubstest.WaitFor(t, "lines about the requests", inParallel, func() int {
			return s.Log.Count(`"msg":"code `, maskedEmail(email))
		})
		wantEqual(t, "mails", s.Log.Count(`"msg":"code sent"`, maskedEmail(email)), 1)
	})
	t.Run("F3 uploads", func(t *testing.T) {
		member, _ := s.Member(t, "member")
		stored := 0
		paths := hubstest.SendAtOnce(t, inParallel, func() *hubstest.Response {
			c := member.Elsewhere()
			return c.Upload("a.txt", fmt.Appendf(nil, "the bytes of %s", c.IP))
		})
		seen := map[string]bool{}
		for range inParallel {
			answer := <-paths
			if answer.Status == 503 {
				continue
			}
			answer.Want(t, 201)
			stored++
			path := answer.Header.Get("Location")
			content := string(member.Elsewhere().Get(path).Must(t, 200).Body)
			if seen[path] || seen[content] {
				t.Errorf("%s: got the path or the bytes %q twice", path, content)
			}
			seen[path], seen[content] = true, true
		}
		s.WantStored(t, stored)
		if stored < inParallel/2 {
			t.Errorf("got %d of %d uploads stored, want most", stored, inParallel)
		}
	})
}
