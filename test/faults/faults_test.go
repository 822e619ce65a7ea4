// Package faults tests what the server does while database, mail server, disk and network fail,
// and when it is stopped or killed: the promised status comes, everything acknowledged is there,
// nothing half-done is, and the service recovers by itself.
package faults

import (
	"sync"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }

// poolSize is how many connections to the database a server has (store.go).
const poolSize = 8

// A load is a number of clients that send one request after the other.
type load struct {
	workers sync.WaitGroup

	mu      sync.Mutex
	ended   bool
	good    int // answers of success
	refused int // answers 503
}

// startLoad calls request again and again until end. Each answer must be a success or a 503.
func startLoad(t *testing.T, workers int, request func() *hubstest.Response) *load {
	l := &load{}
	t.Cleanup(l.end)
	for range workers {
		l.workers.Go(func() {
			for !t.Failed() && l.count(t, request()) {
			}
		})
	}
	return l
}

// count notes an answer and reports whether the load goes on.
func (l *load) count(t *testing.T, r *hubstest.Response) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.Status/100 == 2 {
		l.good++
	} else {
		l.refused++
		wantUnavailable(t, r)
	}
	return !l.ended
}

// waitGood waits for n more answers of success.
func (l *load) waitGood(t *testing.T, n int) {
	t.Helper()
	good, _ := l.counts()
	hubstest.WaitUntil(t, "more answers of success", func() bool {
		now, _ := l.counts()
		return t.Failed() || now >= good+n
	})
}

// waitRefused waits for n more answers 503.
func (l *load) waitRefused(t *testing.T, n int) {
	t.Helper()
	_, refused := l.counts()
	hubstest.WaitUntil(t, "more answers 503", func() bool {
		_, now := l.counts()
		return t.Failed() || now >= refused+n
	})
}

func (l *load) counts() (good, refused int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.good, l.refused
}

// end may be called more than once.
func (l *load) end() {
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.workers.Wait()
}

// A guest has a code and has not presented it yet.
type guest struct {
	*hubstest.Client
	email, code string
}

func newGuest(t *testing.T, s *hubstest.Server) guest {
	t.Helper()
	email, _ := s.NewUser(t, "member")
	c := s.Client(t)
	c.AskCode(email)
	return guest{Client: c, email: email, code: s.Code(t, email)}
}

// present presents the code from a new address.
func (g guest) present(code string) *hubstest.Response {
	return g.Elsewhere().PresentCode(g.email, code)
}

// startOn starts a server on a database.
func startOn(t *testing.T, databaseURL string) *hubstest.Server {
	t.Helper()
	return hubstest.Start(t, map[string]string{"DATABASE_URL": databaseURL})
}

// get and createHub send a request from a new address, so that no limit is met.
func get(c *hubstest.Client, path string) *hubstest.Response {
	return c.Elsewhere().Do("GET", path, nil)
}

func createHub(admin *hubstest.Client, name string) *hubstest.Response {
	return admin.Elsewhere().Do("POST", "/hubs", map[string]string{"name": name})
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
