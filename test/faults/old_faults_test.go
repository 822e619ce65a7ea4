//go:build moving

package main

// Faults: a database that hangs, a disk that is full, a server that is killed. After each,
// the promised status comes within seconds, everything acknowledged is there, nothing
// half-done is, and the service recovers by itself.

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// A load is a number of clients that send one request after the other.
type load struct {
	quit     chan struct{}
	stopOnce sync.Once
	workers  sync.WaitGroup
	mu       sync.Mutex
	count    map[int]int // by status
	slowest  time.Duration
}

// startLoad calls request again and again until end, or until the test has failed. It must be
// safe in several goroutines.
func startLoad(t testing.TB, workers int, request func() *testResponse) *load {
	l := &load{quit: make(chan struct{}), count: map[int]int{}}
	t.Cleanup(l.stop)
	for range workers {
		l.workers.Go(func() {
			for {
				select {
				case <-l.quit:
					return
				default:
				}
				start := time.Now()
				r := request()
				l.mu.Lock()
				l.count[r.status]++
				l.slowest = max(l.slowest, time.Since(start))
				l.mu.Unlock()
			}
		})
	}
	return l
}

// stop may be called more than once.
func (l *load) stop() {
	l.stopOnce.Do(func() { close(l.quit) })
	l.workers.Wait()
}

func (l *load) counts() map[int]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.count)
}

// wait waits for n more answers with a status. Meanwhile each is a success or a 503.
func (l *load) wait(t testing.TB, status, n int) {
	t.Helper()
	n += l.counts()[status]
	what := fmt.Sprintf("%d answers %d, have %v", n, status, l.counts())
	waitUntil(t, what, func() bool {
		t.Helper()
		counts := l.counts()
		for other := range counts {
			if other/100 != 2 && other != 503 {
				t.Fatalf("got the answers %v, want successes and 503 only", counts)
			}
		}
		return counts[status] >= n
	})
}

// end stops the load. Every answer must have been success or 503, within the bounds of the
// store.
func (l *load) end(t testing.TB, what string, success int) {
	t.Helper()
	l.stop()
	t.Logf("%s: answers %v, the slowest after %v", what, l.count, l.slowest.Round(time.Millisecond))
	for status := range l.count {
		if status != success && status != 503 {
			t.Errorf("%s: got the answers %v, want %d and 503 only", what, l.count, success)
		}
	}
	if l.slowest > dbWait {
		t.Errorf("%s: got an answer after %v, want at most %v", what, l.slowest, dbWait)
	}
}

// D1, Z2: PostgreSQL hangs (SIGSTOP), once while the pool is idle, once while it is busy.
// (Sign-in without a database: TestDatabaseAway.)
func TestDatabaseHangs(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	s := startServer(t, map[string]string{"DATABASE_URL": pg.url})
	s.allowErrors(`"error":"unavailable`)
	c, _ := s.member(t, "admin")
	f := c.upload("a.txt", []byte("content")).stored(t)
	hubs := func() *testResponse { return c.elsewhere().do("GET", "/hubs", nil) }
	warm := startLoad(t, 2*poolSize, hubs)
	warm.wait(t, 200, 10*poolSize)
	warm.end(t, "warm", 200)

	pg.pause()
	// The first requests use the connections of the pool. They lose them, so the next ones
	// have to connect.
	for _, pool := range []string{"idle pool", "no pool"} {
		var wg sync.WaitGroup
		refused := func(method, path string, body any) {
			wg.Go(func() {
				start := time.Now()
				r := c.elsewhere().do(method, path, body)
				wait := time.Since(start)
				wantProblem(t, r, 503, "unavailable") // never 200, never 401
				t.Logf("%s: %s %s: 503 after %v", pool, method, path, wait.Round(time.Millisecond))
				if wait > dbWait {
					t.Errorf("%s: %s %s: got the answer after %v, want at most %v", pool, method, path, wait, dbWait)
				}
			})
		}
		refused("GET", "/hubs", nil)
		refused("POST", "/hubs", map[string]string{"name": "n"})
		refused("GET", f.Path, nil)
		refused("GET", "/auth/session", nil)
		refused("POST", "/auth/logout", nil)
		refused("GET", "/healthz", nil)
		wg.Go(func() { wantProblem(t, c.elsewhere().upload("b.txt", []byte("content")), 503, "unavailable") })
		wg.Wait()
	}
	if names := s.filesIn(t); len(names) != 1 {
		t.Errorf("after a refused upload: got %q on disk, want one file", names)
	}
	pg.resume()
	waitUntil(t, "service again", func() bool { return hubs().status == 200 })
	c.elsewhere().do("GET", "/healthz", nil).want(t, 200)

	busy := startLoad(t, 3*poolSize, hubs)
	busy.wait(t, 200, 100)
	pg.pause()
	busy.wait(t, 503, 3*poolSize)
	pg.resume()
	busy.wait(t, 200, 100)
	busy.end(t, "busy pool", 200)
	c.wantFile(t, f, "content")
	s.wantStored(t, 1)
}

// D1: PostgreSQL is stopped and started again under load. Every hub that was acknowledged is
// there afterwards, exactly once.
func TestDatabaseRestarts(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	s := startServer(t, map[string]string{"DATABASE_URL": pg.url})
	s.allowErrors(`"error":"unavailable`)
	c, _ := s.member(t, "admin")
	var created sync.Map
	load := startLoad(t, 4, func() *testResponse {
		name := fmt.Sprintf("hub %d", serial.Add(1))
		r := c.elsewhere().do("POST", "/hubs", map[string]string{"name": name})
		if r.status == 201 {
			created.Store(name, true)
		}
		return r
	})
	for range 2 {
		load.wait(t, 201, 50)
		pg.stop()
		load.wait(t, 503, 8)
		wantProblem(t, c.elsewhere().do("GET", "/healthz", nil), 503, "unavailable")
		c.elsewhere().do("GET", "/openapi.json", nil).want(t, 200)
		pg.start()
		load.wait(t, 201, 50)
	}
	load.end(t, "restarts", 201)
	// pg_terminate_backend breaks the connections, and PostgreSQL goes on.
	execSQL(t, pg.url, "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() and datname = current_database()")
	waitUntil(t, "service again", func() bool { return c.elsewhere().do("GET", "/hubs", nil).status == 200 })

	stored := map[string]int{}
	rows, err := testDB(t, pg.url).Query("select name, count(*) from hubs group by name")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		var n int
		if err := rows.Scan(&name, &n); err != nil {
			t.Fatal(err)
		}
		stored[name] = n
		if n != 1 {
			t.Errorf("%s: got it %d times, want once", name, n)
		}
	}
	created.Range(func(name, _ any) bool {
		if stored[name.(string)] == 0 {
			t.Errorf("%s: got no row, want one, as it was acknowledged", name)
		}
		return true
	})
}

// D3: a mail server hangs in the middle of a mail. The queue is bounded, a full queue looks
// the same for every address, and every accepted request is worked off.
// (What else a mail server may do: otp_test.go.)
func TestMailQueueIsBounded(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{noStartTLS: true})
	s := startServer(t, m.env())
	s.allowErrors("code not sent", "the mail queue is full")
	const asked = mailQueue + 10*mailWorkers
	domain := fmt.Sprintf("@q%d.example.com", serial.Add(1))
	execSQL(t, s.env["DATABASE_URL"], "insert into users (email) select 'user' || n || $1 from generate_series(1, $2::int) as n", domain, asked)
	m.fail(mailHangsData)
	var accepted, refused atomic.Int64
	var clients sync.WaitGroup
	c := s.client(t)
	work := make(chan int)
	for range 16 {
		clients.Go(func() {
			for n := range work {
				email := fmt.Sprintf("user%d%s", n, domain)
				r := c.elsewhere().do("POST", "/auth/otp/request", map[string]string{"email": email})
				if r.status == 200 {
					accepted.Add(1)
					continue
				}
				wantProblem(t, r, 503, "unavailable")
				refused.Add(1)
			}
		})
	}
	for n := range asked {
		work <- n + 1
	}
	close(work)
	clients.Wait()
	known := c.elsewhere().do("POST", "/auth/otp/request", map[string]string{"email": "user1" + domain})
	unknown := c.elsewhere().do("POST", "/auth/otp/request", map[string]string{"email": newEmail()})
	if known.status != unknown.status {
		t.Errorf("got %v for a known and %v for an unknown address, want the same", known, unknown)
	}
	for _, r := range []*testResponse{known, unknown} {
		if r.status == 200 {
			accepted.Add(1)
		}
	}
	t.Logf("%d accepted, %d refused", accepted.Load(), refused.Load())
	// A few more than the queue holds: a worker that gives the mail server up takes another.
	if n := accepted.Load(); n < mailQueue || n > mailQueue+5*mailWorkers || refused.Load() == 0 {
		t.Errorf("got %d accepted and %d refused, want %d to %d accepted, the others refused",
			n, refused.Load(), mailQueue, mailQueue+5*mailWorkers)
	}
	m.fail(mailCloses)
	waitUntil(t, "a line in the log for each that was accepted", func() bool {
		return int64(s.log.count(`"msg":"code not sent`)) == accepted.Load()
	})
	m.release()
	s.member(t, "member")
}

// F3: an upload to a full disk is a 507 and leaves nothing. Once there is room, uploads work.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	const room = 1 << 20
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", room)); err != nil {
		t.Fatalf("mounting a small disk needs root, as in CI: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s := startServer(t, map[string]string{"FILES_DIR": dir})
	s.allowErrors("insufficient_storage")
	c, _ := s.member(t, "member")
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, room/2), 0o600); err != nil {
		t.Fatal(err)
	}
	first := c.upload("a.txt", []byte("content")).stored(t)
	tooBig := []byte(strings.Repeat("0123456789abcdef", room/20))
	for range 2 {
		wantProblem(t, c.upload("big.txt", tooBig), 507, "insufficient_storage")
		if names := s.filesIn(t); len(names) != 2 {
			t.Errorf("got %q on disk, want the first file and the ballast", names)
		}
		c.wantFile(t, first, "content")
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	c.wantFile(t, c.upload("big.txt", tooBig).stored(t), string(tooBig))
	s.wantStored(t, 2)
}

// F3: a client that goes away in the middle of an upload leaves nothing, whether it closes or
// resets the connection, and whether or not it sent a Content-Length.
func TestClientGoneMidUpload(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	half, _, _ := strings.Cut(form(filePart("a.txt"), uploadingContent), "|")
	chunk := fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n", 170000)
	for _, length := range []string{"Content-Length: 170000\r\n\r\n", chunk} {
		for _, reset := range []bool{false, true} {
			conn, err := net.Dial("tcp", s.addr)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "POST /files/upload HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nContent-Type: %s\r\n%s%s",
				s.cookieName(), c.token(), formType, length, half)
			waitUntil(t, "a working file", func() bool { return len(s.workingFiles(t)) == 1 })
			if reset {
				conn.(*net.TCPConn).SetLinger(0)
			}
			conn.Close()
			waitUntil(t, "nothing left", func() bool { return len(s.filesIn(t)) == 0 })
		}
	}
	upload := c.startUpload("b.txt")
	upload.rest.CloseWithError(errors.New("changed my mind"))
	<-upload.answer
	waitUntil(t, "nothing left", func() bool { return len(s.filesIn(t)) == 0 })
	c.upload("c.txt", []byte("content")).stored(t)
	s.wantStored(t, 1)
}

// F3: kill -9 in the middle of an upload. A later sweep removes what is left, here that of
// the next start. Acknowledged uploads are there.
func TestKilledMidUpload(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	c, _ := p.member(t, "member")
	kept := c.upload("kept.txt", []byte("content")).stored(t)
	upload := c.startUpload("lost.txt")
	p.signal(t, syscall.SIGKILL)
	if code := p.wait(t); code != -1 {
		t.Errorf("got exit status %d, want -1 for a signal", code)
	}
	upload.rest.Close()
	if r := <-upload.answer; r.status != 0 {
		t.Errorf("got %v, want no answer", r)
	}
	working := p.workingFiles(t)
	if len(working) != 1 {
		t.Fatalf("got the working files %q, want one", working)
	}
	// Young, it is spared: another server's upload may be about to lock it.
	again := startProcess(t, p.env)
	if got := again.workingFiles(t); !slices.Equal(got, working) {
		t.Errorf("after a start at once: got the working files %q, want %q", got, working)
	}
	again.stop(t)
	p.ageUnfinished(t)
	again = startProcess(t, p.env)
	again.wantStored(t, 1)
	client := again.client(t)
	client.setToken(c.token())
	client.wantFile(t, kept, "content")
	client.upload("next.txt", []byte("content")).stored(t)
	again.wantStored(t, 2)
}

// H3: SIGTERM under load. Every request that was taken is answered, every promised mail is
// sent, an upload under way succeeds, and the exit status is 0.
func TestStopUnderLoad(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{noStartTLS: true})
	p := startProcess(t, m.env())
	const workers, each = 16, 25
	domain := fmt.Sprintf("@s%d.example.com", serial.Add(1))
	execSQL(t, p.env["DATABASE_URL"], "insert into users (email) select 'user' || n || $1 from generate_series(1, $2::int) as n", domain, workers*each)
	c, _ := p.member(t, "member")
	upload := c.startUpload("a.txt")
	m.slow(5 * time.Millisecond) // so that mail is still queued at the end

	var promised sync.Map
	var answers, lost atomic.Int64
	var wg sync.WaitGroup
	enough := make(chan struct{})
	for w := range workers {
		// Each client keeps one connection: one that still waits in the kernel when the
		// listener is closed was never taken. No client repeats a POST by itself.
		client := p.client(t)
		wg.Go(func() {
			for n := range each {
				email := fmt.Sprintf("user%d%s", w*each+n+1, domain)
				r, err := client.elsewhere().try("POST", "/auth/otp/request", map[string]string{"email": email})
				if errors.Is(err, syscall.ECONNREFUSED) {
					return
				}
				if err != nil || r.status != 200 {
					lost.Add(1)
					t.Errorf("request %d of client %d: got %v, %v, want 200", n, w, err, r)
					return
				}
				promised.Store(email, true)
				if answers.Add(1) == workers*each/3 {
					close(enough)
				}
			}
		})
	}
	<-enough
	queued := answers.Load() - int64(len(m.received()))
	// A connection in use is not simply closed: the last answer on it announces the end.
	conn, err := net.Dial("tcp", p.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	reader := bufio.NewReader(conn)
	last := func() bool {
		io.WriteString(conn, "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
		r, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Error("a connection ended without Connection: close: ", err)
			return true
		}
		io.Copy(io.Discard, r.Body)
		return r.Close
	}
	if last() { // with an answer on it, the connection does not wait in the kernel any more
		t.Error("a connection was closed before the stop")
	}
	wg.Go(func() {
		for !last() {
		}
	})
	p.signal(t, syscall.SIGTERM)
	start := time.Now()
	wg.Wait()
	time.Sleep(time.Until(start.Add(8 * time.Second))) // a request has 12 s to end
	if r := upload.finish(); r.status != 201 {
		t.Errorf("the upload under way: got %v, want 201", r)
	}
	if code := p.wait(t); code != 0 {
		t.Errorf("got exit status %d, want 0\n%s", code, p.stderr)
	}
	t.Logf("%d requests answered, %d lost, %d mails queued at SIGTERM, ended after %v",
		answers.Load(), lost.Load(), queued, time.Since(start).Round(time.Millisecond))
	mailed := map[string]int{}
	for _, mail := range m.received() {
		mailed[mail.to[0]]++
	}
	promised.Range(func(email, _ any) bool {
		if mailed[email.(string)] != 1 {
			t.Errorf("mails to %s: got %d, want 1", email, mailed[email.(string)])
		}
		return true
	})
	p.wantStored(t, 1)
}

// H3: the mail queue outlives the requests. A request that is under way when the server begins
// to stop may still ask for a code, and the user gets the mail.
func TestCodeAskedForDuringStop(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{noStartTLS: true})
	p := startProcess(t, m.env())
	email := newEmail()
	testUser(t, p.env["DATABASE_URL"], email, "member")
	body := fmt.Sprintf(`{"email":%q}`, email)
	noteEmail([]byte(body))
	asking := dialPatiently(t, p.addr)
	asking.send(fmt.Sprintf("POST /auth/otp/request HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n", len(body)))
	if status, _, err := asking.receive(); status != 100 || err != nil {
		t.Fatalf("got %d, %v, want 100: the request is under way", status, err)
	}
	idle := dialPatiently(t, p.addr)
	idle.send("GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
	if status, _, err := idle.receive(); status != 200 || err != nil {
		t.Fatalf("got %d, %v, want 200", status, err)
	}

	p.signal(t, syscall.SIGTERM)
	// Shutdown closes idle connections: from here on it waits for the requests under way.
	if _, err := idle.in.ReadByte(); err != io.EOF {
		t.Fatalf("idle connection at the stop: got %v, want %v", err, io.EOF)
	}
	asking.send(body)
	if status, _, err := asking.receive(); status != 200 || err != nil {
		t.Errorf("got %d, %v, want 200", status, err)
	}
	if code := p.wait(t); code != 0 {
		t.Errorf("got exit status %d, want 0\n%s", code, p.stderr)
	}
	mails := m.received()
	if len(mails) != 1 || mails[0].to[0] != email {
		t.Errorf("got the mails %v, want one to %s", mails, email)
	}
}

// H1, H8: 100 uploads that stand still, 384 readers who don't read and 10,000 clients that say
// nothing, all at once. The others are served, and what the crowd costs is bounded.
func TestFloodOfConnections(t *testing.T) {
	t.Parallel()
	uploads, readers, idle := 100, 384, 10_000
	if testing.Short() {
		uploads, readers, idle = 20, 64, 2_000
	}
	openFiles := openFilesLimit()
	if openFiles < 2*maxConnections {
		t.Fatalf("at most %d open files: the server would take fewer connections than %d", openFiles, maxConnections)
	}
	if room := openFiles - readers - uploads - 2_000; room < idle {
		t.Logf("only %d idle connections: the limit of open files is too low", room)
		idle = room
	}
	p := startProcess(t)
	c, _ := p.member(t, "member")
	content := strings.Repeat("0123456789abcdef", 1<<19) // 8 MiB
	large := c.upload("large.txt", []byte(content)).stored(t)
	small := c.upload("small.txt", []byte("content")).stored(t)
	members := make([]*testClient, (uploads+readers)/maxUserTransfers+1)
	var wg sync.WaitGroup
	for i := range members {
		wg.Go(func() { members[i], _ = p.member(t, "member") })
	}
	wg.Wait()
	peak := 0
	served := func(when string) {
		t.Helper()
		start := time.Now()
		c.elsewhere().do("GET", "/hubs", nil).want(t, 200)
		c.wantFile(t, small, "content")
		c.elsewhere().upload("more.txt", []byte("content")).stored(t)
		mib := p.residentMiB(t)
		peak = max(peak, mib)
		t.Logf("%s: %d MiB resident, 4 requests of another client took %v", when, mib, time.Since(start).Round(time.Millisecond))
		// Half a dozen descriptors belong to no connection: the log, the folder, the poller.
		if got := p.sockets(t); got > maxConnections+poolSize+10 {
			t.Errorf("%s: got %d open sockets, want at most %d connections", when, got, maxConnections)
		}
	}
	served("at rest")

	pending := make([]*uploading, uploads)
	for i := range pending {
		wg.Go(func() { pending[i] = members[i/maxUserTransfers].beginUpload(fmt.Sprintf("%d.txt", i)) })
	}
	wg.Wait()
	waitUntil(t, "all uploads on disk", func() bool { return len(p.workingFiles(t)) == uploads })
	served(fmt.Sprintf("%d uploads", uploads))

	dial := func(n int, then func(i int, conn net.Conn) error) {
		const dialers = 8
		for worker := range dialers {
			wg.Go(func() {
				for i := worker; i < n; i += dialers {
					conn, err := net.Dial("tcp", p.addr)
					if err != nil {
						t.Error(err)
						return
					}
					t.Cleanup(func() { conn.Close() })
					if err := then(i, conn); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	dial(readers, func(i int, conn net.Conn) error {
		conn.(*net.TCPConn).SetReadBuffer(4096)
		n := serial.Add(1)
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nX-Forwarded-For: 2001:db8:%x:%x::1\r\n\r\n",
			large.Path, p.cookieName(), members[(uploads+i)/maxUserTransfers].token(), n>>16, n&0xffff)
		status, err := bufio.NewReaderSize(conn, 16).ReadString('\n')
		if !strings.Contains(status, "200") {
			return errors.Join(err, fmt.Errorf("a reader: got %q, want 200", status))
		}
		return err
	})
	served(fmt.Sprintf("and %d readers", readers))
	dial(idle, func(int, net.Conn) error { return nil })
	served(fmt.Sprintf("and %d idle", idle))
	if peak > 256 {
		t.Errorf("got %d MiB resident, want at most 256", peak)
	}

	for _, upload := range pending {
		wg.Go(func() {
			if r := upload.finish(); r.status != 201 {
				t.Errorf("an upload: got %v, want 201", r)
			}
		})
	}
	wg.Wait()
	served("uploads done")
	n := p.goroutines(t)
	t.Logf("%d goroutines", n)
	if n > 2*maxConnections+500 {
		t.Errorf("got %d goroutines, want at most %d", n, 2*maxConnections+500)
	}
	p.wantStored(t, uploads+2+5)
}

// H8: of the connections without a finished request, the oldest gives way once there are more
// than maxConnections/2. A connection that is served does not, however old it is.
func TestOldestWaitingConnectionGivesWay(t *testing.T) {
	t.Parallel()
	if n := openFilesLimit(); n < 2*maxConnections {
		t.Fatalf("at most %d open files: the server would take fewer connections than %d", n, maxConnections)
	}
	p := startProcess(t)
	c, _ := p.member(t, "member")
	upload := c.startUpload("a.txt") // the oldest of all
	c.http.CloseIdleConnections()

	const more = 40
	type kind struct {
		name string
		cut  int // bytes of a request that are sent at first
	}
	kinds := []kind{
		{"says nothing", 0},
		{"stops within its request line", len("GET /openapi")},
		{"stops within its headers", len("GET /openapi.json HTTP/1.1\r\nHost: x\r\n")},
		{"waits after an answer", -1}, // has sent a whole request before
	}
	request := func(i int) string { // each from an address of its own
		return fmt.Sprintf("GET /openapi.json HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 10.0.%d.%d\r\n\r\n", i>>8, i&0xff)
	}
	// A connection begins to wait a moment after its answer, perhaps after the next ones. So around
	// the last one that gives way there are none that wait after an answer.
	kindOf := func(i int) kind {
		if more-10 <= i && i < more+10 {
			return kinds[0]
		}
		return kinds[i%len(kinds)]
	}
	waiting := make([]*rawClient, maxConnections/2+more)
	for i := range waiting {
		waiting[i] = dialPatiently(t, p.addr)
		kind := kindOf(i)
		if kind.cut >= 0 {
			waiting[i].send(request(i)[:kind.cut])
			continue
		}
		waiting[i].send(request(i))
		if status, _, err := waiting[i].receive(); status != 200 || err != nil {
			t.Fatalf("connection %d: got %d, %v, want 200", i, status, err)
		}
	}
	for i, client := range waiting[:more] {
		if _, err := client.in.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("connection %d, which %s: got %v, want its end", i, kindOf(i).name, err)
		}
	}
	for _, i := range []int{more + 11, len(waiting) - 4, len(waiting) - 3, len(waiting) - 2, len(waiting) - 1} {
		kind := kindOf(i)
		waiting[i].send(request(i)[max(kind.cut, 0):])
		if status, _, err := waiting[i].receive(); status != 200 || err != nil {
			t.Errorf("connection %d, which %s: got %d, %v, want 200", i, kind.name, status, err)
		}
	}
	if r := upload.finish(); r.status != 201 {
		t.Errorf("the upload, the oldest connection: got %v, want 201", r)
	}
}

// H1, H3, H8: all connections are taken, 600 of them by requests under way. A new client is
// served all the same: an idle connection gives way to it. And the server can stop.
func TestAllConnectionsTaken(t *testing.T) {
	t.Parallel()
	if n := openFilesLimit(); n < 2*maxConnections {
		t.Fatalf("at most %d open files: the server would take fewer connections than %d", n, maxConnections)
	}
	p := startProcess(t)
	const underWay = 600
	body := `{"email":"nobody@example.com"}`
	headers := func(i int) string { return fmt.Sprintf("Host: x\r\nX-Forwarded-For: 10.0.%d.%d\r\n", i>>8, i&0xff) }
	whole := func(i int) string { return "GET /openapi.json HTTP/1.1\r\n" + headers(i) + "\r\n" }
	get := func(client *rawClient, i int) {
		t.Helper()
		client.send(whole(i))
		if status, _, err := client.receive(); status != 200 || err != nil {
			t.Fatalf("connection %d: got %d, %v, want 200", i, status, err)
		}
	}
	var busy, idle []*rawClient
	for i := range underWay {
		client := dialPatiently(t, p.addr)
		client.send("POST /auth/otp/request HTTP/1.1\r\n" + headers(i) + "Content-Type: application/json\r\n" +
			fmt.Sprintf("Content-Length: %d\r\nExpect: 100-continue\r\n\r\n", len(body)))
		if status, _, err := client.receive(); status != 100 || err != nil {
			t.Fatalf("connection %d: got %d, %v, want 100", i, status, err)
		}
		busy = append(busy, client)
	}
	for i := range maxConnections - underWay {
		client := dialPatiently(t, p.addr)
		get(client, underWay+i)
		idle = append(idle, client)
	}
	get(dialPatiently(t, p.addr), maxConnections)
	// A request under way lasts 15 s at most. So the new client did not wait for one to end.
	finish := func(client *rawClient) {
		t.Helper()
		client.send(body)
		if status, _, err := client.receive(); status != 200 || err != nil {
			t.Fatalf("a request under way: got %d, %v, want 200", status, err)
		}
	}
	finish(busy[0])
	get(dialPatiently(t, p.addr), maxConnections+1)

	p.signal(t, syscall.SIGTERM)
	if _, err := idle[len(idle)-1].in.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("idle connection at the stop: got %v, want its end", err)
	}
	for _, client := range busy[1:] {
		finish(client)
	}
	if code := p.wait(t); code != 0 {
		t.Errorf("got exit status %d, want 0\n%s", code, p.stderr)
	}
}

// dialPatiently opens a connection whose reads fail after a while that no passing test takes.
func dialPatiently(t testing.TB, addr string) *rawClient {
	t.Helper()
	client, err := dialRaw(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.conn.Close() })
	client.conn.SetDeadline(time.Now().Add(patience))
	return client
}

// sockets counts the open sockets of the process.
func (p *testProcess) sockets(t testing.TB) (n int) {
	t.Helper()
	folder := fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if target, err := os.Readlink(filepath.Join(folder, entry.Name())); err == nil && strings.HasPrefix(target, "socket:") {
			n++
		}
	}
	return n
}

// openFilesLimit raises the limit of open files, if it may, for this process and those that
// it starts. It returns the limit.
func openFilesLimit() int {
	limit := syscall.Rlimit{Cur: 20000, Max: 20000}
	var now syscall.Rlimit
	syscall.Getrlimit(syscall.RLIMIT_NOFILE, &now)
	if now.Cur < limit.Cur {
		syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)
		syscall.Getrlimit(syscall.RLIMIT_NOFILE, &now)
	}
	return int(min(now.Cur, 1<<20))
}

// residentMiB returns the memory of the process that is not swapped out.
func (p *testProcess) residentMiB(t testing.TB) (mib int) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	if _, err := fmt.Sscan(rest, &mib); err != nil {
		t.Fatal(err)
	}
	return mib / 1024
}

// goroutines counts the goroutines of the process and ends it: on SIGQUIT the Go runtime
// prints them all.
func (p *testProcess) goroutines(t testing.TB) int {
	t.Helper()
	p.signal(t, syscall.SIGQUIT)
	p.wait(t)
	n := p.stderr.count("goroutine ", "[", ":")
	p.stderr.mu.Lock()
	defer p.stderr.mu.Unlock()
	p.stderr.lines, p.stderr.partial = nil, "" // the log check wants it empty
	return n
}
