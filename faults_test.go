package main

// Faults as they happen: a database that hangs, a disk that is full, a server that is
// killed. After each of them the promised status comes within seconds, what was
// acknowledged is there, nothing half-done is, and the service goes on by itself.

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
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// A load is a number of clients that send one request after the other.
type load struct {
	quit    chan struct{}
	workers sync.WaitGroup
	mu      sync.Mutex
	count   map[int]int // by status
	slowest time.Duration
}

// startLoad sends request until end. It must be safe in several goroutines.
func startLoad(workers int, request func() *testResponse) *load {
	l := &load{quit: make(chan struct{}), count: map[int]int{}}
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

func (l *load) counts() map[int]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.count)
}

// wait waits for n more answers of that status.
func (l *load) wait(t testing.TB, status, n int) {
	t.Helper()
	n += l.counts()[status]
	waitUntil(t, fmt.Sprintf("%d answers %d, have %v", n, status, l.counts()), func() bool { return l.counts()[status] >= n })
}

// end stops the load. Of all its answers none may be anything but success or 503,
// and none may have taken longer than the store's bounds allow.
func (l *load) end(t testing.TB, what string, success int) {
	t.Helper()
	close(l.quit)
	l.workers.Wait()
	t.Logf("%s: answers %v, the slowest after %v", what, l.count, l.slowest.Round(time.Millisecond))
	for status := range l.count {
		if status != success && status != 503 {
			t.Errorf("%s: answers %v", what, l.count)
		}
	}
	if l.slowest > dbWait {
		t.Errorf("%s: an answer took %v", what, l.slowest)
	}
}

// D1, Z2: PostgreSQL hangs (SIGSTOP), once under an idle pool, once under a busy one.
// (Sign-in without a database: TestDatabaseAway.)
func TestDatabaseHangs(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	s := startServer(t, map[string]string{"DATABASE_URL": pg.url})
	s.allowErrors(`"error":"unavailable`)
	c, _ := s.member(t, "admin")
	f := c.upload("a.txt", []byte("content")).stored(t)
	hubs := func() *testResponse { return c.elsewhere().do("GET", "/hubs", nil) }
	warm := startLoad(2*poolSize, hubs)
	warm.wait(t, 200, 10*poolSize)
	warm.end(t, "warm", 200)

	pg.pause()
	// First with the connections of before, then with none: each request dials.
	for _, pool := range []string{"idle pool", "no pool"} {
		var wg sync.WaitGroup
		refused := func(method, path string, body any) {
			wg.Go(func() {
				start := time.Now()
				r := c.elsewhere().do(method, path, body)
				wait := time.Since(start)
				wantProblem(t, r, 503, "unavailable") // never 200, never 401
				if t.Logf("%s: %s %s: 503 after %v", pool, method, path, wait.Round(time.Millisecond)); wait > dbWait {
					t.Errorf("%s: %s %s: after %v", pool, method, path, wait)
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
		t.Errorf("a refused upload has left %q", names)
	}
	pg.resume()
	waitUntil(t, "service again", func() bool { return hubs().status == 200 })
	c.elsewhere().do("GET", "/healthz", nil).want(t, 200)

	busy := startLoad(3*poolSize, hubs)
	busy.wait(t, 200, 100)
	pg.pause()
	busy.wait(t, 503, 3*poolSize)
	pg.resume()
	busy.wait(t, 200, 100)
	busy.end(t, "busy pool", 200)
	c.wantFile(t, f, "content")
	s.wantStored(t, 1)
}

// D1: PostgreSQL stopped and started again under load. Every hub that was
// acknowledged is there afterwards, once.
func TestDatabaseRestarts(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	s := startServer(t, map[string]string{"DATABASE_URL": pg.url})
	s.allowErrors(`"error":"unavailable`)
	c, _ := s.member(t, "admin")
	var created sync.Map
	load := startLoad(4, func() *testResponse {
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
	// pg_terminate_backend breaks connections while PostgreSQL itself stays.
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
		if stored[name] = n; n != 1 {
			t.Errorf("%s is there %d times", name, n)
		}
	}
	created.Range(func(name, _ any) bool {
		if stored[name.(string)] == 0 {
			t.Errorf("%s was acknowledged and is lost", name)
		}
		return true
	})
}

// D3: behind a mail server that hangs in the middle of a mail, the queue is bounded,
// its overflow shown alike for every address, and all that was accepted is worked off.
// (More of what a mail server may do: otp_test.go.)
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
				switch r := c.elsewhere().do("POST", "/auth/otp/request", map[string]string{"email": fmt.Sprintf("user%d%s", n, domain)}); r.status {
				case 200:
					accepted.Add(1)
				default:
					wantProblem(t, r, 503, "unavailable")
					refused.Add(1)
				}
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
		t.Errorf("known and unknown differ: %v %v", known, unknown)
	}
	for _, r := range []*testResponse{known, unknown} {
		if r.status == 200 {
			accepted.Add(1)
		}
	}
	t.Logf("%d accepted, %d refused", accepted.Load(), refused.Load())
	// Each worker holds one; a few more where a worker has given the mail server up.
	if n := accepted.Load(); n < mailQueue || n > mailQueue+5*mailWorkers || refused.Load() == 0 {
		t.Errorf("%d accepted, %d refused, of a queue of %d", n, refused.Load(), mailQueue)
	}
	m.fail(mailCloses)
	waitUntil(t, "a word on each that was accepted", func() bool {
		return int64(s.log.count(`"msg":"code not sent`)) == accepted.Load()
	})
	m.release()
	s.member(t, "member")
}

// F3: a full disk is a 507, leaves nothing, and ends when there is room.
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
			t.Errorf("left: %q", names)
		}
		c.wantFile(t, first, "content")
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	c.wantFile(t, c.upload("big.txt", tooBig).stored(t), string(tooBig))
	s.wantStored(t, 2)
}

// F3: a client that goes away in the middle of an upload leaves nothing, however it
// goes and whether or not it had told the length.
func TestClientGoneMidUpload(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, _ := s.member(t, "member")
	half, _, _ := strings.Cut(form(filePart("a.txt"), uploadingContent), "|")
	for _, length := range []string{"Content-Length: 170000\r\n\r\n", fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n", 170000)} {
		for _, reset := range []bool{false, true} {
			conn, err := net.Dial("tcp", s.addr)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "POST /files/upload HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nContent-Type: %s\r\n%s%s",
				s.cookieName(), c.token(), formType, length, half)
			waitUntil(t, "a temporary file", func() bool { return len(s.workingFiles(t)) == 1 })
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

// F3: kill -9 in the middle of an upload. The next start sweeps what is left, and
// what was acknowledged is there.
func TestKilledMidUpload(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	c, _ := p.member(t, "member")
	kept := c.upload("kept.txt", []byte("content")).stored(t)
	upload := c.startUpload("lost.txt")
	p.signal(t, syscall.SIGKILL)
	if code := p.wait(t); code != -1 {
		t.Errorf("exit %d", code)
	}
	upload.rest.Close()
	if r := <-upload.answer; r.status != 0 {
		t.Errorf("answered: %v", r)
	}
	if n := len(p.workingFiles(t)); n != 1 {
		t.Errorf("%d temporary files: the test shows nothing", n)
	}
	again := startProcess(t, p.env)
	again.wantStored(t, 1)
	client := again.client(t)
	client.setToken(c.token())
	client.wantFile(t, kept, "content")
	client.upload("next.txt", []byte("content")).stored(t)
	again.wantStored(t, 2)
}

// H3: SIGTERM under load: every request that was taken is answered, every mail that
// was promised is sent, an upload under way ends well, the exit status is 0.
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
		// One connection a client, kept: one that waits in the kernel when the listener
		// is closed was never taken. And by POST, which no client sends twice by itself.
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
					t.Errorf("request %d of client %d: %v %v", n, w, err, r)
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
	// A connection in use is not just closed: the last answer on it says so first.
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
			t.Error("a connection ends unannounced: ", err)
			return true
		}
		io.Copy(io.Discard, r.Body)
		return r.Close
	}
	if last() { // so the connection is taken, not waiting in the kernel
		t.Error("a connection is closed before the end")
	}
	wg.Go(func() {
		for !last() {
		}
	})
	p.signal(t, syscall.SIGTERM)
	start := time.Now()
	wg.Wait()
	if r := upload.finish(); r.status != 201 {
		t.Errorf("the upload under way: %v", r)
	}
	if code := p.wait(t); code != 0 {
		t.Errorf("exit %d\n%s", code, p.stderr)
	}
	t.Logf("%d requests answered, %d lost, %d mails queued at SIGTERM, ended after %v",
		answers.Load(), lost.Load(), queued, time.Since(start).Round(time.Millisecond))
	mailed := map[string]int{}
	for _, mail := range m.received() {
		mailed[mail.to[0]]++
	}
	promised.Range(func(email, _ any) bool {
		if mailed[email.(string)] != 1 {
			t.Errorf("%d mails to %s, one was promised", mailed[email.(string)], email)
		}
		return true
	})
	p.wantStored(t, 1)
}

// H1: 100 uploads that stand still, 1,000 readers who don't read and 10,000 clients
// that say nothing, all at once: the others are served, and what each of them costs
// is bounded.
func TestFloodOfConnections(t *testing.T) {
	t.Parallel()
	uploads, readers, idle := 100, 1000, 10000
	if testing.Short() {
		uploads, readers, idle = 20, 100, 1000
	}
	if room := openFilesLimit() - readers - uploads - 2000; room < idle {
		t.Logf("only %d idle connections: the limit of open files is too low", room)
		idle = room
	}
	p := startProcess(t)
	c, _ := p.member(t, "member")
	content := strings.Repeat("0123456789abcdef", 1<<19) // 8 MiB
	large := c.upload("large.txt", []byte(content)).stored(t)
	small := c.upload("small.txt", []byte("content")).stored(t)
	served := func(when string) {
		t.Helper()
		start := time.Now()
		c.elsewhere().do("GET", "/hubs", nil).want(t, 200)
		c.wantFile(t, small, "content")
		c.elsewhere().upload("more.txt", []byte("content")).stored(t)
		t.Logf("%s: %d MiB resident, 4 requests of another client took %v", when, p.residentMiB(t), time.Since(start).Round(time.Millisecond))
	}
	served("at rest")

	var wg sync.WaitGroup
	pending := make([]*uploading, uploads)
	for i := range pending {
		wg.Go(func() { pending[i] = c.beginUpload(fmt.Sprintf("%d.txt", i)) })
	}
	wg.Wait()
	waitUntil(t, "all uploads on disk", func() bool { return len(p.workingFiles(t)) == uploads })
	served(fmt.Sprintf("%d uploads", uploads))

	dial := func(n int, then func(net.Conn) error) {
		for range 8 {
			wg.Go(func() {
				for range n / 8 {
					conn, err := net.Dial("tcp", p.addr)
					if err != nil {
						t.Error(err)
						return
					}
					t.Cleanup(func() { conn.Close() })
					if err := then(conn); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	dial(readers, func(conn net.Conn) error {
		conn.(*net.TCPConn).SetReadBuffer(4096)
		n := serial.Add(1)
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nCookie: %s=%s\r\nX-Forwarded-For: 2001:db8:%x:%x::1\r\n\r\n",
			large.Path, p.cookieName(), c.token(), n>>16, n&0xffff)
		status, err := bufio.NewReaderSize(conn, 16).ReadString('\n')
		if !strings.Contains(status, "200") {
			return errors.Join(err, fmt.Errorf("a reader gets %q", status))
		}
		return err
	})
	served(fmt.Sprintf("and %d readers", readers))
	dial(idle, func(net.Conn) error { return nil })
	served(fmt.Sprintf("and %d idle", idle))
	if mib := p.residentMiB(t); mib > 512 {
		t.Errorf("%d MiB resident", mib)
	}

	for _, upload := range pending {
		wg.Go(func() {
			if r := upload.finish(); r.status != 201 {
				t.Errorf("an upload: %v", r)
			}
		})
	}
	wg.Wait()
	served("uploads done")
	connections := readers + idle
	n := p.goroutines(t)
	if t.Logf("%d goroutines for %d connections", n, connections); n > 2*connections+500 {
		t.Errorf("%d goroutines for %d connections", n, connections)
	}
	p.wantStored(t, uploads+7)
}

// openFilesLimit raises the limit of open files where it may, for this process and
// the ones it starts, and returns it.
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

// residentMiB is the memory of the process that is not swapped out.
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

// goroutines counts them, and ends the process by it: SIGQUIT has the Go runtime
// print them all.
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
