package api

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// T6: A code opens a session for its address, in any case of its letters. The answer to the request
// for a code has the code's length and lifetime. The answer to the sign-in describes the session.
// It is the same as that of GET /auth/session, which a page sends after a reload. The local server
// prints the code, with the address as stored in the database, and logs no requests: developers
// watch the same output for codes.
func TestCodeOpensASession(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, userID := s.NewUser(t, "member")
	upper := strings.ToUpper(email)
	c := s.Client(t)
	c.Get("/auth/session").WantProblem(t, 401, "unauthenticated")

	answer := c.Do(askRoute, map[string]string{"email": upper}).Must(t, 200)
	example := hubstest.Example(hubstest.Contract[any](t, "components", "schemas", "CodeAnswer"))
	fmt.Fprintln(t.Output(), "This answer is compared with the examples of CodeAnswer in web/openapi.json.")
	for name, value := range example.(map[string]any) { // the contract permits no other members
		answer.WantField(t, name, value)
	}
	view := c.PresentCode(" "+upper, s.Code(t, email)).Must(t, 200)
	view.WantField(t, "user", map[string]any{
		"userId":     userID,
		"email":      email,
		"permission": "member",
	})
	reloaded := c.Get("/auth/session").Must(t, 200)
	wantText(t, "session after a reload", string(reloaded.Body), string(view.Body))
	wantEqual(t, "request lines", s.Log.Count(`"msg":"request"`), 0)
}

// O6: Known, suspended and unknown addresses get the same answers: to a request for a code, to a
// wrong code, and to a request that is over the limit.
func TestAddressesLookAlike(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	known, _ := s.NewUser(t, "member")
	suspended, _ := s.NewUser(t, "member")
	unknown := hubstest.NewEmail()
	s.User(t, "suspend", suspended)
	c := s.Client(t)
	// send sends one request for each of the addresses, and compares the answers.
	send := func(route, code string, status int) {
		t.Helper()
		period := hubstest.LimitOf(t, route).Period
		var want string // the first answer
		for _, email := range []string{known, suspended, unknown} {
			body := map[string]string{"email": email}
			if code != "" {
				body["code"] = code
			}
			answer := c.Do(route, body, "X-Request-Id", "one").Must(t, status)
			got := constantParts(answer, period)
			want = cmp.Or(want, got)
			wantEqual(t, route+" for "+email, got, want)
		}
	}
	send(askRoute, "", 200)
	wrong := hubstest.OtherCode(s.Code(t, known), 1)
	for range hubstest.LimitOf(t, askRoute).Requests - 1 { // by now, the known address has a code
		send(askRoute, "", 200)
	}
	send(askRoute, "", 429)
	for range hubstest.LimitOf(t, guessRoute).Requests {
		send(guessRoute, wrong, 401)
	}
	send(guessRoute, wrong, 429)

	unsent := 2 * hubstest.LimitOf(t, askRoute).Requests // for the suspended and the unknown one
	hubstest.WaitFor(t, "requests without a mail", unsent, func() int {
		return s.Log.Count("code not sent: no active user")
	})
	wantEqual(t, "mails, all to the active user", len(s.Mail.Received()), 1)
}

// constantParts returns an answer, as text, without the parts that differ between any two answers:
// the header Date, and a Retry-After that is less than a minute short of the limit's period.
func constantParts(r *hubstest.Response, period time.Duration) string {
	header := r.Header.Clone()
	header.Del("Date")
	wait, err := time.ParseDuration(header.Get("Retry-After") + "s")
	if err == nil && wait > period-time.Minute && wait <= period {
		header.Set("Retry-After", "the period")
	}
	return fmt.Sprintf("%d %v %s", r.Status, header, r.Body)
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

// O3, O4, O5: Guesses at an e-mail address are counted before the code is compared, from all
// clients and for all spellings of the address together. Once the limit is spent, the right code is
// refused, too.
func TestLimitOfGuesses(t *testing.T) {
	t.Parallel()
	g := hubstest.Start(t).NewGuest(t)
	limit := hubstest.LimitOf(t, guessRoute)
	answers := g.PresentAtOnce(2*limit.Requests, hubstest.OtherCode(g.Code, 1))
	hubstest.WantStatuses(t, answers, map[int]int{
		401: limit.Requests,
		429: limit.Requests,
	})
	wantLimited(t, g.PresentCode(strings.ToUpper(g.Email), g.Code), limit)
	g.PresentCode("x"+g.Email, g.Code).Want(t, 401)
}

// O5: Neither a sign-in nor a new code gives back guesses that were spent.
func TestNewCodeGivesNoMoreGuesses(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	g := s.NewGuest(t)
	g.Present(g.Code).Want(t, 200)
	for range hubstest.LimitOf(t, guessRoute).Requests - 1 {
		g.Present(g.Code)
	}
	g.AskCode(g.Email)
	g.Present(s.Code(t, g.Email)).WantProblem(t, 429, "rate_limited")
}
