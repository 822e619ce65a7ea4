package faults

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// transaction are settings of PgBouncer in transaction mode.
func transaction(size int, more map[string]string) map[string]string {
	settings := map[string]string{"pool_mode": "transaction", "default_pool_size": fmt.Sprint(size)}
	maps.Copy(settings, more)
	return settings
}

// D6: Behind a pooler in transaction mode, the statements of one session run on the connection of
// another. So the server does not start, whichever way the pooler hands out its connections, and
// says why.
func TestPoolerInTransactionModeIsRefused(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	for _, size := range []int{2, 4, 8, 20} {
		for _, roundRobin := range []string{"0", "1"} {
			for _, way := range []string{"one process", "two behind a balancer", "two hosts"} {
				t.Run(fmt.Sprint(way, ", size ", size, ", round robin ", roundRobin), func(t *testing.T) {
					t.Parallel()
					processes := 2
					if way == "one process" {
						processes = 1
					}
					pooler := newPooler(t, database, processes, transaction(size, map[string]string{
						"server_round_robin":        roundRobin,
						"ignore_startup_parameters": "statement_timeout,plan_cache_mode,enable_seqscan",
					}))
					through := pooler.URL()
					if way == "two hosts" {
						through = pooler.HostsURL()
					}
					wantRefused(t, through)
				})
			}
		}
	}
}

// wantRefused fails the test unless a server does not start because of the pooler.
func wantRefused(t *testing.T, databaseURL string) {
	t.Helper()
	cmd := exec.Command(hubstest.Binary(), "serve")
	_, err := hubstest.TryStart(t, cmd, map[string]string{"DATABASE_URL": databaseURL})
	if err == nil {
		t.Fatal("the server has started, want it to refuse a pooler in transaction mode")
	}
	if strings.Count(err.Error(), "session mode") != 1 || !strings.Contains(err.Error(), "DATABASE_URL") {
		t.Errorf("got the error %v, want one sentence that names DATABASE_URL and session mode", err)
	}
	if code := cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("got exit status %d, want 1", code)
	}
}

// Behind a pooler in session mode, the server works as it does without one: also if the pooler drops
// what it does not know of a connection's start, or has fewer connections than the server wants.
func TestPoolerInSessionModeWorks(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		processes int
		settings  map[string]string
		parallel  int // requests at the same time that the pooler has connections for
	}{
		"as Debian ships it":     {1, nil, pool},
		"that drops parameters":  {1, map[string]string{"ignore_startup_parameters": "extra_float_digits,statement_timeout"}, pool},
		"two processes":          {2, nil, pool},
		"that takes turns":       {2, map[string]string{"server_round_robin": "1"}, pool},
		"with three connections": {1, map[string]string{"default_pool_size": "3"}, 1},
		"with one connection":    {1, map[string]string{"default_pool_size": "1"}, 1},
		"for three clients":      {1, map[string]string{"max_client_conn": "3"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			settings := map[string]string{"pool_mode": "session"}
			maps.Copy(settings, test.settings)
			pooler := newPooler(t, database, test.processes, settings)
			s, admin := startBehindPooler(t, pooler, database)
			hub, file := fillService(t, admin)
			for range 10 {
				answers := getAtOnce(t, test.parallel, admin, "/hubs?orderBy=createdAt")
				hubstest.WantStatuses(t, answers, map[int]int{200: test.parallel})
			}
			get(admin, "/healthz").Want(t, 200)
			s.wantUnchanged(admin, hub, file)
		})
	}
}

// A pooler in session mode that takes no more clients is an outage of those who get none (503), which
// PostgreSQL's error in the log explains. The server goes on.
func TestFullPoolerIsAnOutage(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	pooler := newPooler(t, database, 1,
		map[string]string{"pool_mode": "session", "max_client_conn": "3"})
	s, admin := startBehindPooler(t, pooler, database)
	s.AllowErrorsWithAnyOf(unavailable)
	for range 5 {
		counts := hubstest.CountStatuses(getAtOnce(t, manyRequests, admin, "/hubs"))
		if counts[200] == 0 || counts[200]+counts[503] != manyRequests {
			t.Errorf("got the statuses %v, want some 200 and else 503", counts)
		}
	}
	s.Log.WaitFor(t, "max_client_conn")
	get(admin, "/healthz").Want(t, 200)
	if n := s.Log.Count("session mode"); n != 0 {
		t.Errorf("got %d lines that take it for a pooler in transaction mode, want none", n)
	}
}

// D6: If the mode of a pooler changes under a running server (here by RELOAD), no answer is that of
// another statement: the server ends before it sends one, and says why.
func TestPoolerChangesItsMode(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 4, 20} {
		t.Run(fmt.Sprint("size ", size), func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			pooler := newPooler(t, database, 1, map[string]string{
				"pool_mode":                 "session",
				"default_pool_size":         fmt.Sprint(max(size, pool)),
				"ignore_startup_parameters": "statement_timeout,plan_cache_mode,enable_seqscan",
			})
			s, admin := startBehindPooler(t, pooler, database)
			s.AllowErrorsWithAnyOf("failed", "session mode")
			readers := newReaders(s, admin)
			readers.run(1000, nil)
			hubstest.WantEqual(t, "right answers in session mode", readers.right.Load(), int64(1000))

			pooler.Set("default_pool_size", fmt.Sprint(size))
			pooler.Set("pool_mode", "transaction")
			s.Signal(t, 0) // the test checks the exit status
			readers.run(10_000, s.Done)
			fmt.Fprintf(t.Output(), "%d right, %d wrong, %d refused\n",
				readers.right.Load(), readers.wrong.Load(), readers.refused.Load())
			if n := readers.wrong.Load(); n > 0 {
				t.Errorf("got %d answers of another statement, want none", n)
			}
			wantExit(t, s.Server, 1)
			s.Log.WaitFor(t, `"level":"ERROR"`, "session mode")
		})
	}
}

// startBehindPooler is like start, but the server reaches the database through a pooler. The test's
// own statements don't.
func startBehindPooler(t *testing.T, p *pooler, database string) (*service, *hubstest.Client) {
	t.Helper()
	server := hubstest.Start(t, map[string]string{"DATABASE_URL": p.URL()}, hubstest.Quiet)
	server.Database = database
	return newService(t, server)
}

// readers are twelve clients that read what must not change, and know what they must get.
type readers struct {
	s       *service
	client  *hubstest.Client
	checks  map[string]func(*hubstest.Response) bool // of right answers, by paths
	right   atomic.Int64
	wrong   atomic.Int64
	refused atomic.Int64 // 5xx
}

// newReaders makes 40 hubs. Each order of the list is another one.
func newReaders(s *service, c *hubstest.Client) *readers {
	s.exec(`insert into hubs (name, created_at, updated_at)
		select 'hub ' || n, now() - interval '1 day' * (n * 7 % 41), now() - interval '1 hour' * (n * 11 % 41)
		from generate_series(1, 40) n`)
	r := &readers{s: s, client: c, checks: map[string]func(*hubstest.Response) bool{}}
	hubs := hubsIn(get(c, "/hubs?limit=40").Must(s.t, 200))
	for i, hub := range hubs {
		r.checks["/hubs/"+hub["hubId"]] = sameBody(get(c, "/hubs/"+hub["hubId"]).Must(s.t, 200))
		order := []string{"name", "createdAt", "updatedAt"}[i%3]
		limit := 1 + i
		path := fmt.Sprintf("/hubs?orderBy=%s&orderDirection=%s&limit=%d", order, []string{"asc", "desc"}[i%2], limit)
		r.checks[path] = sameBody(get(c, path).Must(s.t, 200))
	}
	r.checks["/auth/session"] = sameBody(get(c, "/auth/session").Must(s.t, 200))
	file := c.Store("a.txt", "content")
	r.checks[file] = sameBody(get(c, file).Must(s.t, 200))
	return r
}

func sameBody(first *hubstest.Response) func(*hubstest.Response) bool {
	return func(r *hubstest.Response) bool { return r.Status == 200 && string(r.Body) == string(first.Body) }
}

func hubsIn(answer *hubstest.Response) []map[string]string {
	var page struct{ Items []map[string]string }
	json.Unmarshal(answer.Body, &page)
	return page.Items
}

// run sends n requests, by twelve clients. It ends early when done is closed.
func (r *readers) run(n int, done <-chan struct{}) {
	var sent atomic.Int64
	var work sync.WaitGroup
	paths := slices.Collect(maps.Keys(r.checks))
	for range 12 {
		work.Go(func() {
			for i := sent.Add(1); i <= int64(n); i = sent.Add(1) {
				select {
				case <-done:
					return
				default:
					r.read(paths[rand.IntN(len(paths))])
				}
			}
		})
	}
	work.Wait()
}

// read sends a request. An answer that is neither the right one nor a 5xx is wrong: so is an empty
// list, a 404 of a hub, and a 401 of a session.
func (r *readers) read(path string) {
	answer, err := r.client.Elsewhere().Try("GET "+path, nil)
	switch {
	case err != nil: // the server has ended
	case answer.Status >= 500:
		r.refused.Add(1)
	case r.checks[path](answer):
		r.right.Add(1)
	default:
		r.wrong.Add(1)
		fmt.Fprintf(r.s.t.Output(), "a wrong answer: %.300v\n", answer)
	}
}

// D6: An answer without a row may be that of another statement, too. Here the look-up of a session
// runs as the look-up of an address, which finds nobody. Nobody loses a session by that.
func TestPoolerEndsNoSession(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	pooler := newPooler(t, database, 1, map[string]string{
		"pool_mode":                 "session",
		"server_round_robin":        "1",
		"ignore_startup_parameters": "statement_timeout,plan_cache_mode,enable_seqscan",
	})
	s, c := startBehindPooler(t, pooler, database)
	s.AllowErrorsWithAnyOf("failed", "code not sent", "session mode")
	name := database[strings.LastIndex(database, "/")+1 : strings.Index(database, "?")]
	// Half of the new connections first prepare the one statement, half the other.
	for isMixed := false; !isMixed; {
		pooler.Console("KILL "+name, "RESUME "+name)
		emails := addUsers(t, s.Server, pool/2)
		tx := s.lock("users")
		for _, email := range emails {
			s.Client(t).AskCode(email)
		}
		waiters := func() int { return s.count(lockWaiters) }
		comesTo(pool/2, waiters)
		answers := getAtOnce(t, pool/2, c, "/auth/session")
		isMixed = comesTo(pool, waiters)
		tx.Rollback()
		hubstest.CountStatuses(answers)
	}

	pooler.Set("pool_mode", "transaction")
	s.Signal(t, 0) // the test checks the exit status
	for range 10 {
		answers := hubstest.SendAtOnce(t, 2*pool, func() *hubstest.Response {
			r, _ := c.Elsewhere().Try("GET /auth/session", nil)
			return r
		})
		statuses := hubstest.CountStatuses(answers)
		if statuses[401] > 0 {
			t.Fatalf("got %d refusals of a session that has not ended, want none", statuses[401])
		}
	}
	wantExit(t, s.Server, 1)
}

// comesTo reports whether a number comes to want within a second, after which PostgreSQL cancels what
// waits for a lock.
func comesTo(want int, number func() int) bool {
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		if number() == want {
			return true
		}
	}
	return false
}

// D1, D6: If the database goes away while the server looks for a pooler, the look ends with an error,
// and gives back what it holds.
func TestLookForPoolerEndsWithItsConnections(t *testing.T) {
	t.Parallel()
	proxy, through := faultProxyURL(t, hubstest.NewDatabase(t))
	proxy.When("current_setting('hubs.mark'", proxy.Cut)
	cmd := exec.Command(hubstest.Binary(), "serve")
	_, err := hubstest.TryStart(t, cmd, map[string]string{"DATABASE_URL": through})
	if err == nil {
		t.Error("got a start, want an error")
	}
	if code := cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("got exit status %d, want 1", code)
	}
}
