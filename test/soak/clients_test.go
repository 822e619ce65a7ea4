package soak

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http/cookiejar"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"hubs/internal/hubstest"
)

// A client sends requests to one of the servers and counts the answers. Each request comes from a
// new client address, so that no limit by client address refuses it.
type client struct {
	*hubstest.Client
	soak     *soak
	server   *server
	expected []string // such as "200" and "403 forbidden"; "503 unavailable" is always expected
}

// expecting returns the client with other expected answers.
func (c *client) expecting(answers ...string) *client {
	other := *c
	other.expected = answers
	return &other
}

// fresh returns a client of the same server that is not signed in.
func (c *client) fresh() *client {
	browser := *c.HTTP
	browser.Jar, _ = cookiejar.New(nil) // without options there is no error
	other := c.Elsewhere()
	other.HTTP = &browser
	return &client{
		Client: other,
		soak:   c.soak,
		server: c.server,
	}
}

var idInPath = regexp.MustCompile(`/[0-9a-f-]{36}(/.*)?$`)

// Do sends a request and counts the answer. An answer that is not expected, or that breaks the
// contract, is a fault. If there is no answer, Do returns the status 0. That is a fault unless the
// server was stopped during the request.
func (c *client) Do(request string, body any, headers ...string) *hubstest.Response {
	s := c.soak
	life := c.server.life.Load()
	r, err := c.Elsewhere().Try(request, body, headers...)
	route := idInPath.ReplaceAllString(request, "/{id}")
	route, _, _ = strings.Cut(route, "?")
	got := noServer
	if err == nil {
		got = c.judge(r)
	} else {
		r.Status = 0
		if !c.server.stoppedSince(life) {
			got = "none"
			s.fault("no answer", fmt.Sprint(route, ": ", err))
		}
	}
	s.mu.Lock()
	s.answers[route+": "+got]++
	s.mu.Unlock()
	return r
}

// judge returns the status of an answer, with the code of an error. An answer that is not expected,
// or that breaks the contract, is a fault.
func (c *client) judge(r *hubstest.Response) (got string) {
	got = fmt.Sprint(r.Status)
	if r.Status >= 400 {
		got += " " + r.Code()
	}
	if err := r.Fault(); err != nil {
		c.soak.fault("an answer that breaks the contract", err)
	} else if got != "503 unavailable" && !slices.Contains(c.expected, got) {
		c.soak.fault("an unexpected answer",
			fmt.Sprintf("got %v, want one of %q", r, c.expected))
	}
	return got
}

// startClients starts clients of every kind at each server. They run until quit is closed.
func (s *soak) startClients() {
	for _, server := range s.servers {
		admin := s.signedIn(server, "admin")
		for range 8 {
			s.repeat(100*time.Millisecond, func() {
				admin.fresh().signIn()
			})
		}
		for range 2 {
			s.repeat(60*time.Millisecond, func() {
				s.ledger.WriteHub(admin.expecting("200", "201", "204"))
			})
			s.repeat(40*time.Millisecond, func() {
				s.ledger.ReadHub(admin.expecting("200"))
			})
			s.repeat(60*time.Millisecond, admin.readPage)
			s.repeat(250*time.Millisecond, func() {
				s.ledger.Upload(admin.expecting("201"))
			})
			s.repeat(60*time.Millisecond, func() {
				s.ledger.ReadFile(admin.expecting("200"))
			})
		}
		s.repeat(time.Second, admin.breakOffUpload)
		s.repeat(200*time.Millisecond, func() {
			admin.expecting("200").Do("GET /healthz", nil)
		})
	}
}

// signedIn returns a client that is signed in as a new user with this role and has accepted the
// terms. It fails the test if a request fails, so it must not run during a failure.
func (s *soak) signedIn(server *server, role string) *client {
	c, _ := server.Member(s.t, role)
	return &client{
		Client: c,
		soak:   s,
		server: server,
	}
}

// repeat calls round in a new goroutine, again and again until quit is closed. Before each call it
// waits for a random time; pause is the mean.
func (s *soak) repeat(pause time.Duration, round func()) {
	s.clients.Go(func() {
		for s.wait(pause/2 + rand.N(pause)) {
			round()
		}
	})
}

// wait waits for the duration d. It returns false at once when quit is closed.
func (s *soak) wait(d time.Duration) bool {
	select {
	case <-s.quit:
		return false
	case <-time.After(d):
		return true
	}
}

// signIn adds a user, requests a code, exchanges it for a session and uses the session. A right
// code must work, unless the server has stopped and forgotten it.
func (c *client) signIn() {
	s := c.soak
	email := hubstest.NewEmail()
	_, err := s.operator.Exec("insert into users (email) values ($1)", email)
	if err != nil {
		return // the database is unreachable
	}
	life := c.server.life.Load()
	address := map[string]string{"email": email}
	if c.expecting("200").Do("POST /auth/otp/request", address).Status != 200 {
		return
	}
	code := s.mailedCode(email, 15*time.Second)
	if code == "" {
		s.mu.Lock()
		s.answers[noCode]++
		s.mu.Unlock()
		return
	}
	s.wait(rand.N(2 * hold)) // so that some codes are used while the database is unreachable
	refused := c.useCode(email, code)
	if refused && !c.server.stoppedSince(life) {
		s.fault("a right code refused", email+", although the server has not stopped")
	}
	if c.Token() != "" {
		c.useSession(email)
	}
}

// useSession accepts the terms. One time in three, it signs out.
func (c *client) useSession(email string) {
	s := c.soak
	if c.expecting("200").Do("GET /auth/session", nil).Status != 200 {
		return
	}
	if s.ledger.AcceptTerms(c.expecting("200"), email, s.terms).Status == 200 {
		c.expecting("403 forbidden").Do("POST /hubs", `{"name":"not for members"}`)
	}
	if rand.IntN(3) > 0 {
		return
	}
	if c.expecting("204").Do("POST /auth/logout", nil).Status == 204 {
		c.expecting("401 unauthenticated").Do("GET /auth/session", nil)
	}
}

// useCode sends the right code in two requests at once, of which at most one may succeed. If
// neither succeeds and not both are a 401, it sends the code again, because a 503 must leave the
// code valid. refused reports whether both requests got a 401.
func (c *client) useCode(email, code string) (refused bool) {
	s := c.soak
	input := map[string]string{
		"email": email,
		"code":  code,
	}
	for range 4 { // 8 attempts in all; the limit by e-mail allows 10
		var both sync.WaitGroup
		var statuses [2]int
		for i := range statuses {
			both.Go(func() {
				sender := c.expecting("200", "401 invalid_code", "429 rate_limited")
				statuses[i] = sender.Do("POST /auth/otp/validate", input).Status
			})
		}
		both.Wait()
		if statuses == [2]int{200, 200} {
			s.fault("a code worked twice", code)
		}
		if slices.Contains(statuses[:], 200) {
			return false
		}
		// After one 401 alone, try again: the other request got no answer, or an error.
		if statuses == [2]int{401, 401} {
			return true
		}
		if !s.wait(time.Second) {
			return false
		}
	}
	return false
}

// readPage reads a random page of the list of the ledger's hubs.
func (c *client) readPage() {
	const query = "/hubs?limit=20&offset=%d&filters[name]=ledger" +
		"&orderBy=updatedAt&orderDirection=desc"
	path := fmt.Sprintf(query, rand.IntN(50))
	c.expecting("200").Do("GET "+path, nil)
}

// breakOffUpload begins an upload and breaks it off in the middle.
func (c *client) breakOffUpload() {
	upload := c.BeginUpload("left.bin")
	upload.Rest.CloseWithError(errors.New("gone"))
	<-upload.Answer
}
