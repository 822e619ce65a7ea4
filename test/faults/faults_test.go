// Package faults tests the server while its database, its mail server, its disk or the network
// fails, and while the server is stopped or killed. The tests check four promises:
//
//   - A client gets the status that SECURITY.md and docs/deploy.md promise.
//   - Everything that the server has acknowledged is stored.
//   - Nothing is left of an upload or a write that failed, except where a test says so.
//   - The server works again, without a restart, when the fault is over.
package faults

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) {
	hubstest.Main(m)
}

// A service is a server with its database. The test t fails if a method of the service fails.
type service struct {
	*hubstest.Server
	t     *testing.T
	proxy *faultProxy // between server and database; nil without startBehindProxy
}

// start starts a server on a new database, and signs an admin in. env overrides the settings of
// hubstest.ServerEnv.
func start(t *testing.T, env ...map[string]string) (*service, *hubstest.Client) {
	t.Helper()
	return newService(t, hubstest.Start(t, env...))
}

// startOn is like start, but uses an existing database.
func startOn(t *testing.T, databaseURL string) (*service, *hubstest.Client) {
	t.Helper()
	return start(t, map[string]string{"DATABASE_URL": databaseURL})
}

// startBehindProxy is like start, but puts a proxy between the server and its database. The proxy
// can cut or hang the server's connections. The test's own statements don't go through the proxy.
func startBehindProxy(t *testing.T) (*service, *hubstest.Client) {
	t.Helper()
	database := hubstest.NewDatabase(t)
	proxy, through := faultProxyURL(t, database)
	s, admin := startOn(t, through)
	s.Database = database
	s.proxy = proxy
	return s, admin
}

// newService returns the service of a running server, and an admin who is signed in.
func newService(t *testing.T, server *hubstest.Server) (*service, *hubstest.Client) {
	t.Helper()
	admin, _ := server.Member(t, "admin")
	return &service{Server: server, t: t}, admin
}

// exec runs statements in the database, as an operator would with psql.
func (s *service) exec(query string, args ...any) {
	s.t.Helper()
	hubstest.Exec(s.t, s.Database, query, args...)
}

// count returns the number of rows in a table. The table's name may be followed by a condition,
// such as "hubs where name = $1", and args are its parameters.
func (s *service) count(table string, args ...any) int {
	s.t.Helper()
	return hubstest.Query[int](s.t, s.Database, "select count(*) from "+table, args...)
}

// wantRows fails the test if count does not return want.
func (s *service) wantRows(want int, table string, args ...any) {
	s.t.Helper()
	if got := s.count(table, args...); got != want {
		s.t.Errorf("rows of %s %q: got %d, want %d", table, args, got, want)
	}
}

// unavailable is in the log line of each request that got a 503.
const unavailable = `"code":"unavailable"`

// clients are at work at the same time. Each sends one request after another.
type clients struct {
	t     *testing.T
	work  sync.WaitGroup
	ended atomic.Bool

	mu        sync.Mutex
	successes []int // of each client since the last waitForSuccesses
	outages   []int // 503s of each client since the last waitForOutage
}

// startClients starts one client for each function. The function sends one request and returns its
// answer. The client calls it again and again until end is called. An answer that is neither a
// success nor a 503 fails the test.
func startClients(t *testing.T, functions ...func() *hubstest.Response) *clients {
	c := &clients{
		t:         t,
		successes: make([]int, len(functions)),
		outages:   make([]int, len(functions)),
	}
	t.Cleanup(c.end)
	for i, send := range functions {
		c.work.Go(func() {
			for !t.Failed() && !c.ended.Load() {
				c.note(i, send())
			}
		})
	}
	return c
}

// note counts an answer of a client.
func (c *clients) note(client int, r *hubstest.Response) {
	counts := c.successes
	if r.Status/100 != 2 {
		wantUnavailable(c.t, r)
		counts = c.outages
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	counts[client]++
}

// waitForSuccesses waits until each client has had n more successes.
func (c *clients) waitForSuccesses(n int) {
	c.t.Helper()
	c.waitForEach(n, "successes", c.successes)
}

// waitForOutage waits until each client has had n more 503s.
func (c *clients) waitForOutage(n int) {
	c.t.Helper()
	c.waitForEach(n, "503s", c.outages)
}

// waitForEach sets the counts to 0, and waits until each is at least n.
func (c *clients) waitForEach(n int, kind string, counts []int) {
	c.t.Helper()
	c.mu.Lock()
	clear(counts)
	c.mu.Unlock()
	what := fmt.Sprintf("a client with fewer than %d %s", n, kind)
	hubstest.WaitFor(c.t, what, "none", func() string {
		c.mu.Lock()
		defer c.mu.Unlock()
		for client, count := range counts {
			if count < n && !c.t.Failed() { // after a failure, no client sends more
				return fmt.Sprintf("client %d with %d", client, count)
			}
		}
		return "none"
	})
}

// end stops the clients and waits for their last answers. It may be called more than once.
func (c *clients) end() {
	c.ended.Store(true)
	c.work.Wait()
}

// get sends a GET from a new client address. Like createHub and sendUpload below, it may be called
// often: no limit by client address is reached.
func get(c *hubstest.Client, path string) *hubstest.Response {
	return c.Elsewhere().Get(path)
}

// getAtOnce sends a GET n times at the same time. The channel gets the answers.
func getAtOnce(
	t *testing.T, n int, c *hubstest.Client, path string,
) (answers chan *hubstest.Response) {
	return hubstest.SendAtOnce(t, n, func() *hubstest.Response { return get(c, path) })
}

// createHub sends a request that creates a hub, from a new client address.
func createHub(admin *hubstest.Client, name string) *hubstest.Response {
	return admin.Elsewhere().Do("POST /hubs", map[string]string{"name": name})
}

// sendUpload uploads a file with the text "content", from a new client address.
func sendUpload(c *hubstest.Client, name string) *hubstest.Response {
	return c.Elsewhere().Upload(name, []byte("content"))
}

// location returns the path of the hub or the file that a request has created. It ends the test if
// the answer is not a 201.
func location(t *testing.T, r *hubstest.Response) string {
	t.Helper()
	return r.Must(t, 201).Header.Get("Location")
}

// wantUnavailable fails the test if the answer is not a 503 with the code "unavailable", or if it
// quotes an error message of the database.
func wantUnavailable(t *testing.T, r *hubstest.Response) {
	t.Helper()
	r.WantProblem(t, 503, "unavailable")
	if strings.Contains(string(r.Body), "pq: ") {
		t.Errorf("got the answer %s, want no error message of the database in it", r.Body)
	}
}
