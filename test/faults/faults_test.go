// Package faults tests what the server does while database, mail server, disk and network fail,
// and when it is stopped or killed: the promised status comes, everything acknowledged is there,
// nothing half-done is, and the service recovers by itself.
package faults

import (
	"sync"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) {
	hubstest.Main(m)
}

// A service is a server with its database.
type service struct {
	*hubstest.Server
	t     *testing.T
	proxy *hubstest.Proxy // between the two, by startBehindProxy
}

// start starts a server on a database of its own, and signs an admin in.
func start(t *testing.T, env ...map[string]string) (*service, *hubstest.Client) {
	t.Helper()
	return newService(t, hubstest.Start(t, env...))
}

// startOn is start on a database that is there.
func startOn(t *testing.T, databaseURL string) (*service, *hubstest.Client) {
	t.Helper()
	return start(t, map[string]string{"DATABASE_URL": databaseURL})
}

// startBehindProxy is start with a proxy that can take the database away from the server. The
// test's own statements go past it.
func startBehindProxy(t *testing.T) (*service, *hubstest.Client) {
	t.Helper()
	database := hubstest.NewDatabase(t)
	proxy, through := hubstest.ProxyURL(t, database)
	s, admin := startOn(t, through)
	s.Database = database
	s.proxy = proxy
	return s, admin
}

func newService(t *testing.T, server *hubstest.Server) (*service, *hubstest.Client) {
	t.Helper()
	admin, _ := server.Member(t, "admin")
	return &service{Server: server, t: t}, admin
}

// exec is the operator at the psql prompt.
func (s *service) exec(query string, args ...any) {
	s.t.Helper()
	hubstest.Exec(s.t, s.Database, query, args...)
}

// count counts the rows of a table, which may have a condition behind its name.
func (s *service) count(table string, args ...any) int {
	s.t.Helper()
	return hubstest.Query[int](s.t, s.Database, "select count(*) from "+table, args...)
}

func (s *service) wantRows(want int, table string, args ...any) {
	s.t.Helper()
	if got := s.count(table, args...); got != want {
		s.t.Errorf("%s %q: got %d rows, want %d", table, args, got, want)
	}
}

// A load is clients that send one request after the other.
type load struct {
	t       *testing.T
	clients sync.WaitGroup
	n       int // clients

	mu      sync.Mutex
	ended   bool
	answers map[answer]int // since waitFor was called
}

// An answer is a client's success, or its 503.
type answer struct {
	client int
	isGood bool
}

// startLoad starts a client for each function, which is called again and again until end.
// Each answer must be a success or a 503.
func startLoad(t *testing.T, clients ...func() *hubstest.Response) *load {
	l := &load{
		t:       t,
		n:       len(clients),
		answers: map[answer]int{},
	}
	t.Cleanup(l.end)
	for i, send := range clients {
		l.clients.Go(func() {
			for !t.Failed() && l.note(i, send()) {
			}
		})
	}
	return l
}

// note counts an answer and reports whether the load goes on.
func (l *load) note(client int, r *hubstest.Response) bool {
	isGood := r.Status/100 == 2
	if !isGood {
		wantUnavailable(l.t, r)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answers[answer{client, isGood}]++
	return !l.ended
}

// waitFor waits until each client has had n more answers of success, or of 503.
func (l *load) waitFor(n int, isGood bool) {
	l.t.Helper()
	l.mu.Lock()
	clear(l.answers)
	l.mu.Unlock()
	hubstest.WaitUntil(l.t, "more answers", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		for client := range l.n {
			if l.answers[answer{client, isGood}] < n {
				return l.t.Failed()
			}
		}
		return true
	})
}

// end may be called more than once.
func (l *load) end() {
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.clients.Wait()
}

// A guest has a code and has not presented it yet.
type guest struct {
	*hubstest.Client
	email, code string
}

func newGuest(t *testing.T, s *service) guest {
	t.Helper()
	email, _ := s.NewUser(t, "member")
	c := s.Client(t)
	c.AskCode(email)
	return guest{
		Client: c,
		email:  email,
		code:   s.Code(t, email),
	}
}

// present presents the code from a new address.
func (g guest) present(code string) *hubstest.Response {
	return g.Elsewhere().PresentCode(g.email, code)
}

// get, createHub and uploadText send a request from a new address, so that no limit is met.
func get(c *hubstest.Client, path string) *hubstest.Response {
	return c.Elsewhere().Get(path)
}

func createHub(admin *hubstest.Client, name string) *hubstest.Response {
	hub := map[string]string{"name": name}
	return admin.Elsewhere().Do("POST", "/hubs", hub)
}

func uploadText(c *hubstest.Client, name string) *hubstest.Response {
	return c.Elsewhere().Upload(name, []byte("content"))
}

// store uploads a small file and returns its path.
func store(t *testing.T, c *hubstest.Client, name string) (path string) {
	t.Helper()
	return location(t, uploadText(c, name))
}

// location returns the path of what a request has made.
func location(t *testing.T, r *hubstest.Response) string {
	t.Helper()
	return r.Want(t, 201).Header.Get("Location")
}

func wantUnavailable(t *testing.T, r *hubstest.Response) {
	t.Helper()
	hubstest.WantProblem(t, r, 503, "unavailable")
}
