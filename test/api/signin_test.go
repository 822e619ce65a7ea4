package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"

	"hubs/internal/hubstest"
)

// The whole way in and out, locally, where the code is printed.
func TestSignIn(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, userID := s.NewUser(t, "member")
	c := s.Client(t)
	hubstest.WantProblem(t, c.Do("GET", "/auth/session", nil), 401, "unauthenticated")

	c.AskCode(strings.ToUpper(email))
	code := s.Code(t, email)
	wantNoSession(t, c.PresentCode(email, hubstest.OtherCode(code, 1)), 401, "invalid_code")
	wantNoSession(t, c.PresentCode(hubstest.NewEmail(), code), 401, "invalid_code")
	view := c.PresentCode(" "+strings.ToUpper(email), code).Want(t, 200)
	wantNoSession(t, s.Client(t).PresentCode(email, code), 401, "invalid_code")

	want := map[string]any{"userId": userID, "email": email, "permission": "member"}
	if got := view.Field(t, "user"); !reflect.DeepEqual(got, want) {
		t.Errorf("got the user %v, want %v", got, want)
	}
	reloaded := c.Do("GET", "/auth/session", nil).Want(t, 200)
	if !bytes.Equal(view.Body, reloaded.Body) {
		t.Errorf("got %s after a reload, want %s", reloaded.Body, view.Body)
	}

	token := c.Token()
	c.Do("POST", "/auth/logout", nil).Want(t, 204)
	if left := c.Token(); left != "" {
		t.Errorf("got the cookie %q after sign-out, want none", left)
	}
	hubstest.WantProblem(t, c.Do("GET", "/auth/session", nil), 401, "unauthenticated")
	hubstest.WantProblem(t, c.Do("POST", "/auth/logout", nil), 401, "unauthenticated")
	// Sign-out clears the cookie and no more, as the README says.
	c.SetToken(token)
	c.Do("GET", "/auth/session", nil).Want(t, 200)
}

func wantNoSession(t *testing.T, r *hubstest.Response, status int, code string) {
	t.Helper()
	hubstest.WantProblem(t, r, status, code)
	if cookies := r.Header.Values("Set-Cookie"); cookies != nil {
		t.Errorf("got the cookies %q, want none", cookies)
	}
}

// O6: nobody can tell whose address it is: not when asking for a code, not when presenting
// one, and not when refused for asking too often.
func TestAddressesLookAlike(t *testing.T) {
	t.Parallel()
	m := hubstest.NewMailServer(t, hubstest.MailOptions{})
	s := hubstest.Start(t, hubstest.StagingEnv(m))
	known, _ := s.NewUser(t, "member")
	suspended, _ := s.NewUser(t, "member")
	unknown := hubstest.NewEmail()
	s.User(t, "suspend", suspended)
	c := s.Client(t)
	send := func(what, path, code string, status int) {
		t.Helper()
		answers := map[string]bool{}
		for _, email := range []string{known, suspended, unknown} {
			body := map[string]string{"email": email}
			if code != "" {
				body["code"] = code
			}
			r := c.Do("POST", path, body, "X-Request-Id", "one").Want(t, status)
			answers[withoutChance(r)] = true
		}
		if len(answers) != 1 {
			t.Errorf("%s: got answers that differ: %v", what, answers)
		}
	}
	send("request", "/auth/otp/request", "", 200)
	code := hubstest.OtherCode(s.Code(t, known), 1)
	for range 4 {
		send("further request", "/auth/otp/request", "", 200)
	}
	send("sixth request", "/auth/otp/request", "", 429)
	for range 10 {
		send("wrong code", "/auth/otp/validate", code, 401)
	}
	send("eleventh code", "/auth/otp/validate", code, 429)

	s.Log.WaitFor(t, "code not sent", hubstest.MaskedEmail(suspended))
	s.Log.WaitFor(t, "code not sent", hubstest.MaskedEmail(unknown))
	if n := len(m.Received()); n != 1 {
		t.Errorf("got %d mails, want 1: to the active user", n)
	}
}

var almost15Minutes = regexp.MustCompile(`^(8[5-9][0-9]|900)$`)

// withoutChance returns an answer without what differs between any two: the date, and, by
// a second, the time to wait.
func withoutChance(r *hubstest.Response) string {
	header := r.Header.Clone()
	header.Del("Date")
	if almost15Minutes.MatchString(header.Get("Retry-After")) {
		header.Set("Retry-After", "15 minutes")
	}
	return fmt.Sprintf("%d %v %s", r.Status, header, r.Body)
}

// guess presents a code from n addresses at once, and counts the answers by their status.
func guess(t *testing.T, s *hubstest.Server, n int, email, code string) map[int]int {
	var mu sync.Mutex
	var all sync.WaitGroup
	counts := map[int]int{}
	for range n {
		c := s.Client(t)
		all.Go(func() {
			r := c.PresentCode(email, code)
			mu.Lock()
			defer mu.Unlock()
			counts[r.Status]++
		})
	}
	all.Wait()
	return counts
}

// O3, O4, O5: guesses at one mailbox are counted before they are compared, wherever they come
// from, and a new code gives no new ones.
func TestGuessesAreCounted(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	asked := func() (c *hubstest.Client, email, code string) {
		email, _ = s.NewUser(t, "member")
		c = s.Client(t)
		c.AskCode(email)
		return c, email, s.Code(t, email)
	}
	t.Run("right", func(t *testing.T) {
		_, email, code := asked()
		want := map[int]int{200: 1, 401: 9, 429: 90}
		if got := guess(t, s, 100, email, code); !maps.Equal(got, want) {
			t.Errorf("a right code, 100 times: got %v, want %v", got, want)
		}
	})
	t.Run("wrong", func(t *testing.T) {
		c, email, code := asked()
		want := map[int]int{401: 10, 429: 30}
		got := guess(t, s, 40, email, hubstest.OtherCode(code, 1))
		if !maps.Equal(got, want) {
			t.Errorf("a wrong code, 40 times: got %v, want %v", got, want)
		}
		hubstest.WantProblem(t, c.PresentCode(email, code), 429, "rate_limited")
	})
	t.Run("new code", func(t *testing.T) {
		c, email, code := asked()
		c.PresentCode(email, code).Want(t, 200)
		guess(t, s, 5, email, code)
		c.AskCode(email)
		code = s.Code(t, email)
		guess(t, s, 4, email, hubstest.OtherCode(code, 1))
		hubstest.WantProblem(t, c.PresentCode(email, code), 429, "rate_limited")
	})
	t.Run("requests", func(t *testing.T) {
		c, email, code := asked()
		for range 4 {
			c.AskCode(email)
		}
		r := c.Do("POST", "/auth/otp/request", map[string]string{"email": email})
		hubstest.WantProblem(t, r, 429, "rate_limited")
		c.PresentCode(email, code).Want(t, 200) // the refusal leaves the code as it is
	})
}

// O7: fifty clients ask at once, and one mail is sent.
func TestOneMailForManyRequests(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, _ := s.NewUser(t, "member")
	var all sync.WaitGroup
	for range 50 {
		c := s.Client(t)
		all.Go(func() { c.AskCode(email) })
	}
	all.Wait()
	hubstest.WaitUntil(t, "the end of all requests", func() bool {
		return s.Log.Count(`"code sent"`)+s.Log.Count("less than a minute old") == 50
	})
	if n := s.Log.Count("Sign-in code for " + email); n != 1 {
		t.Errorf("got %d codes, want 1", n)
	}
	s.Client(t).PresentCode(email, s.Code(t, email)).Want(t, 200)
}

// onTheWire asks for a code byte for byte as written.
func onTheWire(
	t *testing.T, s *hubstest.Server, email string, headers ...string,
) *hubstest.Response {
	t.Helper()
	body, err := json.Marshal(map[string]string{"email": email})
	if err != nil {
		t.Fatal(err)
	}
	headers = append(headers, "Content-Type", "application/json")
	return s.Wire(t, "POST", "/auth/otp/request", body, headers...)
}

// I4, O9: which addresses are taken, and that the code goes to the address as it is stored.
func TestEmailForms(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	file := hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		Email, Stored string
	}](t, "emails.json")
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			email := hubstest.FillIn(c.Email)
			ip := hubstest.NewIP()
			if c.Stored != "" {
				hubstest.AddUser(t, s.Env["DATABASE_URL"], c.Stored, "member")
			}
			c.Expect.Check(t, onTheWire(t, s, email, "X-Forwarded-For", ip))
			if c.Stored != "" {
				s.Code(t, c.Stored)
				return
			}
			if c.Expect.Status == 200 {
				c.Expect = hubstest.Expected{Status: 401, Code: "invalid_code"}
			}
			guesser := s.Client(t)
			c.Expect.Check(t, guesser.PresentCode(email, "000000"))
		})
	}
}

// O9: a code is six ASCII digits in a string.
func TestCodeForms(t *testing.T) {
	t.Parallel()
	c := hubstest.Start(t).Client(t)
	for _, code := range []string{
		`""`, `"12345"`, `"1234567"`, `" 123456"`, `"123456\n"`, `"+12345"`, `"0x1234"`,
		`"1234.6"`, `"1e0005"`, `"12345O"`, `123456`, `["123456"]`,
		`"１２３４５６"`, `"١٢٣٤٥٦"`,
	} {
		body := `{"email":"ada@example.com","code":` + code + `}`
		r := c.Elsewhere().Do("POST", "/auth/otp/validate", body)
		hubstest.WantProblem(t, r, 400, "invalid_request", "code")
	}
}

// L2: the client is the first address from the right that is no trusted proxy.
func TestClientAddress(t *testing.T) {
	t.Parallel()
	file := hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		Server, Client          string
		Headers                 []string
		SharesWith, DiffersFrom []string
	}](t, "forwarded.json")
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	servers := map[string]*hubstest.Server{}
	for name, settings := range file.Settings {
		servers[name] = hubstest.Start(t, hubstest.StagingEnv(mail), settings)
	}
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			s := servers[c.Server]
			email := hubstest.NewEmail()
			for range 4 { // the limit by address and client is 5
				c.Expect.Check(t, onTheWire(t, s, email, c.Headers...))
			}
			mark := s.Log.Mark()
			c.Expect.Check(t, onTheWire(t, s, email, c.Headers...))
			s.Log.WaitAfter(t, mark, `"msg":"request"`, `"client":"`+c.Client+`"`)
			if c.SharesWith == nil {
				c.SharesWith = []string{c.Client}
			}
			if c.DiffersFrom == nil {
				c.DiffersFrom = []string{"198.51.100.99"}
			}
			for _, chain := range c.SharesWith {
				r := onTheWire(t, s, email, "X-Forwarded-For", chain)
				hubstest.WantProblem(t, r, 429, "rate_limited")
			}
			for _, chain := range c.DiffersFrom {
				onTheWire(t, s, email, "X-Forwarded-For", chain).Want(t, 200)
			}
		})
	}
}
