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

// A client sends requests to one of the servers, each from an address of its own, and counts
// the answers.
type client struct {
	*hubstest.Client
	soak     *soak
	server   *server
	expected []string // "200", "403 forbidden"; 503 is expected always
}

func (c *client) expecting(answers ...string) *client {
	other := *c
	other.expected = answers
	return &other
}

// fresh returns a client with nobody signed in.
func (c *client) fresh() *client {
	jar, err := cookiejar.New(nil)
	if err != nil {
		panic(err)
	}
	browser := *c.HTTP
	browser.Jar = jar
	moved := c.Elsewhere()
	moved.HTTP = &browser
	return &client{
		Client: moved,
		soak:   c.soak,
		server: c.server,
	}
}

var idInPath = regexp.MustCompile(`/[0-9a-f-]{36}(/.*)?$`)

// Do sends a request. It returns status 0 if no answer came, which is a fault unless the server
// was stopped meanwhile.
func (c *client) Do(method, path string, body any, headers ...string) *hubstest.Response {
	s := c.soak
	before := c.server.life.Load()
	r, err := c.Elsewhere().Try(method, path, body, headers...)
	wasStopped := isStopped(before) || c.server.life.Load() != before
	route := idInPath.ReplaceAllString(path, "/{id}")
	route, _, _ = strings.Cut(route, "?")
	route = method + " " + route
	got := fmt.Sprint(r.Status)
	if r.Status >= 400 {
		got = fmt.Sprint(r.Status, " ", r.Code())
	}
	switch {
	case err != nil && wasStopped:
		r.Status = 0
		got = noServer
	case err != nil:
		r.Status = 0
		got = "none"
		s.fault("no answer", fmt.Sprint(route, ": ", err))
	case r.Fault() != nil:
		s.fault("an answer outside the contract", r.Fault())
	case got != "503 unavailable" && !slices.Contains(c.expected, got):
		detail := fmt.Sprintf("%q, %v", c.expected, r)
		s.fault("an answer that should be another", detail)
	}
	s.mu.Lock()
	s.answers[route+": "+got]++
	s.mu.Unlock()
	return r
}

func (s *soak) startClients() {
	for _, server := range s.servers {
		admin := s.member(server, "admin")
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
				uploader := admin.expecting("201", "429 rate_limited", "507 insufficient_storage")
				s.ledger.Upload(uploader)
			})
			s.repeat(60*time.Millisecond, func() {
				s.ledger.ReadFile(admin.expecting("200", "429 rate_limited"))
			})
		}
		s.repeat(time.Second, admin.leaveUpload)
		s.repeat(200*time.Millisecond, func() {
			admin.fresh().offend()
		})
		s.repeat(200*time.Millisecond, func() {
			admin.expecting("200").Do("GET", "/healthz", nil)
		})
	}
}

// member returns a client who is signed in, with the terms accepted. Nothing may fail meanwhile.
func (s *soak) member(server *server, role string) *client {
	email, _ := server.NewUser(s.t, role)
	c := server.Client(s.t)
	c.AskCode(email)
	c.PresentCode(email, s.mailedCode(email, hubstest.Patience)).Want(s.t, 200)
	c.AcceptTerms()
	return &client{
		Client: c,
		soak:   s,
		server: server,
	}
}

// repeat runs a client until the end, with a pause between two rounds.
func (s *soak) repeat(pause time.Duration, round func()) {
	s.clients.Go(func() {
		for s.wait(pause/2 + rand.N(pause)) {
			round()
		}
	})
}

// wait returns false at the end of the soak.
func (s *soak) wait(d time.Duration) bool {
	select {
	case <-s.quit:
		return false
	case <-time.After(d):
		return true
	}
}

// signIn is a new user: code, session, terms, sometimes the way out.
func (c *client) signIn() {
	s := c.soak
	email := hubstest.NewEmail()
	if !s.addUser(email) {
		return
	}
	life := c.server.life.Load()
	address := map[string]string{"email": email}
	asked := c.expecting("200").Do("POST", "/auth/otp/request", address)
	if asked.Status != 200 {
		return
	}
	code := s.mailedCode(email, 15*time.Second)
	if code == "" {
		s.mu.Lock()
		s.answers[noCode]++
		s.mu.Unlock()
		return
	}
	s.wait(rand.N(2 * hold)) // some take their time: the database may be away by then
	refused := c.present(email, code)
	if refused && c.server.life.Load() == life {
		s.fault("a right code refused", email+", though its server never stopped")
	}
	if c.Token() == "" {
		return
	}
	session := c.expecting("200").Do("GET", "/auth/session", nil)
	if session.Status != 200 {
		return
	}
	terms, _ := session.Field(s.t, "terms", "version").(string)
	accepted := s.ledger.AcceptTerms(c.expecting("200"), email, terms)
	if accepted.Status == 200 {
		hub := map[string]string{"name": "not for members"}
		c.expecting("403 forbidden").Do("POST", "/hubs", hub)
	}
	if rand.IntN(3) > 0 {
		return
	}
	if c.expecting("204").Do("POST", "/auth/logout", nil).Status == 204 {
		c.expecting("401 unauthenticated").Do("GET", "/auth/session", nil)
	}
}

// addUser inserts the user, or returns false while the database is away.
func (s *soak) addUser(email string) bool {
	_, err := s.operator.Exec("insert into users (email) values ($1)", email)
	return err == nil
}

// present presents a code twice at once, so that only one may work, and again while the answer
// is a 503: the code must stay good. It reports whether the right code was refused.
func (c *client) present(email, code string) (refused bool) {
	s := c.soak
	input := map[string]string{
		"email": email,
		"code":  code,
	}
	for range 4 { // two attempts each, which the limit allows
		var both sync.WaitGroup
		var statuses [2]int
		for i := range statuses {
			both.Go(func() {
				sender := c.expecting("200", "401 invalid_code", "429 rate_limited")
				statuses[i] = sender.Do("POST", "/auth/otp/validate", input).Status
			})
		}
		both.Wait()
		if statuses == [2]int{200, 200} {
			s.fault("a code worked twice", code)
		}
		if slices.Contains(statuses[:], 200) {
			return false
		}
		// While one attempt waits for the database in vain, the other finds no code.
		if statuses == [2]int{401, 401} {
			return true
		}
		if !s.wait(time.Second) {
			return false
		}
	}
	return false
}

func (c *client) readPage() {
	const query = "/hubs?limit=20&offset=%d&filters[name]=ledger" +
		"&orderBy=updatedAt&orderDirection=desc"
	path := fmt.Sprintf(query, rand.IntN(50))
	c.expecting("200").Do("GET", path, nil)
}

// leaveUpload goes away in the middle of an upload.
func (c *client) leaveUpload() {
	upload := c.BeginUpload("left.bin")
	upload.Rest.CloseWithError(errors.New("gone"))
	<-upload.Answer
}

// offend sends what nobody should send.
func (c *client) offend() {
	code := map[string]string{
		"email": hubstest.NewEmail(),
		"code":  "123456",
	}
	switch rand.IntN(5) {
	case 0:
		c.expecting("401 unauthenticated").Do("GET", "/hubs", nil)
	case 1:
		c.SetToken("eyJhbGciOiJIUzI1NiJ9.e30." + strings.Repeat("A", 43))
		c.expecting("401 unauthenticated").Do("GET", "/auth/session", nil)
	case 2:
		c.expecting("400 invalid_request").Do("POST", "/auth/otp/request", `{"email":"nobody"}`)
	case 3:
		evil := []string{"Origin", "https://evil.example"}
		c.expecting("403 cross_origin").Do("POST", "/auth/logout", nil, evil...)
	case 4:
		c.expecting("401 invalid_code").Do("POST", "/auth/otp/validate", code)
	}
}
