package deploy

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// A cluster is three servers on one database and one folder behind HAProxy.
type cluster struct {
	*proxy
	servers [3]*hubstest.Server // the first is the active one
}

func startCluster(t *testing.T) *cluster {
	c := &cluster{}
	env := productionEnv(t)
	env["DATABASE_URL"] = hubstest.NewDatabase(t)
	// No outgoing connection of this machine takes a port of this address while its server is
	// away.
	env["ADDR"] = "127.77.0.1:0"
	var addrs []string
	for i := range c.servers {
		c.servers[i] = hubstest.Start(t, env)
		addrs = append(addrs, c.servers[i].Addr)
	}
	c.proxy = startProxy(t, "haproxy", addrs...)
	return c
}

// restart starts a server that has ended, where it was.
func (c *cluster) restart(t *testing.T, i int, overrides map[string]string) {
	t.Helper()
	env := maps.Clone(c.servers[i].Env)
	env["ADDR"] = c.servers[i].Addr
	c.servers[i] = hubstest.Start(c.t, env, overrides)
}

// servedBy tells which server has answered.
func (c *cluster) servedBy(t *testing.T, r *hubstest.Response) (server int) {
	t.Helper()
	id := r.Header.Get("X-Request-Id")
	hubstest.WaitUntil(t, "the request in a log", func() bool {
		server = slices.IndexFunc(c.servers[:], func(s *hubstest.Server) bool {
			return s.Log.Count(`"msg":"request"`, id) > 0
		})
		return server >= 0
	})
	return server
}

// addressElsewhere returns an address whose requests go to another server than the active
// one.
func (c *cluster) addressElsewhere(t *testing.T) string {
	t.Helper()
	for {
		address := newAddress()
		r := c.client(c.servers[0], address).Do("GET", "/auth/session", nil)
		if c.servedBy(t, r) != 0 {
			return address
		}
	}
}

// command is the operator at HAProxy's socket.
func (c *cluster) command(t *testing.T, line string) string {
	t.Helper()
	conn, err := net.Dial("unix", c.dir+"/admin.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintln(conn, line)
	answer, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	return string(answer)
}

// waitState waits until HAProxy takes the server for UP or DOWN in both backends.
func (c *cluster) waitState(t *testing.T, server int, state string) {
	t.Helper()
	name := fmt.Sprintf("s%d", server+1)
	hubstest.WaitUntil(t, name+" "+state, func() bool {
		seen := 0
		for line := range strings.Lines(c.command(t, "show stat -1 4 -1")) {
			fields := strings.Split(line, ",")
			if len(fields) > 17 && fields[1] == name && fields[17] == state {
				seen++
			}
		}
		return seen == 2
	})
}

func TestCluster(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	t.Run("works as one", func(t *testing.T) { testWorksAsOne(t, c) })
	t.Run("limits", func(t *testing.T) { testLimits(t, c) })
	t.Run("targets", func(t *testing.T) { testTargets(t, c) })
	t.Run("rolling restart with a new key", func(t *testing.T) { testRollingRestart(t, c) })
	t.Run("active server killed", func(t *testing.T) { testActiveKilled(t, c) })
}

func testWorksAsOne(t *testing.T, c *cluster) {
	admin := c.member(c.servers[0], "admin") // each request is from another address
	hub := admin.Do("POST", "/hubs", map[string]string{"name": "North"}).Want(t, 201).Header.Get("Location")
	file := admin.Upload("a.txt", []byte("text")).Want(t, 201).Header.Get("Location")
	served := map[int]bool{}
	for len(served) < len(c.servers) {
		admin.Do("GET", hub, nil).Want(t, 200)
		r := admin.Do("GET", file, nil).Want(t, 200)
		if string(r.Body) != "text" {
			t.Fatalf("another file: %v", r)
		}
		served[c.servedBy(t, r)] = true
	}
	// A client stays with one server. Codes are the active one's, however their path is written.
	home := c.client(c.servers[0], c.addressElsewhere(t))
	first := c.servedBy(t, home.Do("GET", "/auth/session", nil))
	for _, path := range []string{"/hubs", "/files/x/y", "/healthz", "/auth/session?x=/auth/otp/"} {
		if got := c.servedBy(t, home.Do("GET", path, nil)); got != first {
			t.Errorf("%s by server %d, want %d", path, got, first)
		}
	}
	for _, path := range []string{"otp/request", "%6ftp/request", "ot%70/%76alidate", "otp/validate?x"} {
		r := home.Do("POST", "/auth/"+path, "{}").Want(t, 400)
		if got := c.servedBy(t, r); got != 0 {
			t.Errorf("/auth/%s by server %d, want 0", path, got)
		}
	}
}

// wantStatuses sends requests at the same moment and compares how many have which status.
func wantStatuses(t *testing.T, want map[int]int, send func(i int) *hubstest.Response) {
	t.Helper()
	total := 0
	for _, n := range want {
		total += n
	}
	var mu sync.Mutex
	var all sync.WaitGroup
	got := map[int]int{}
	for i := range total {
		all.Go(func() {
			status := send(i).Status
			mu.Lock()
			defer mu.Unlock()
			got[status]++
		})
	}
	all.Wait()
	if !maps.Equal(got, want) {
		t.Errorf("got answers by status %v, want %v", got, want)
	}
}

// Three servers have together the limits of one.
func testLimits(t *testing.T, c *cluster) {
	s := c.servers[0]
	t.Run("100 by address", func(t *testing.T) {
		one := c.client(s, newAddress())
		wantStatuses(t, map[int]int{401: 100, 429: 20}, func(i int) *hubstest.Response {
			return one.Do("GET", []string{"/auth/session", "/hubs"}[i%2], nil)
		})
	})
	t.Run("100 by the /64", func(t *testing.T) {
		var clients atomic.Int64
		many := c.client(s, "")
		many.HTTP.Transport.(*http.Transport).Dial = func(string, string) (net.Conn, error) {
			conn, err := net.Dial("tcp", c.proxied)
			if err == nil {
				fmt.Fprintf(conn, "PROXY TCP6 2001:db8:1:1::%x 2001:db8::1 1024 443\r\n", clients.Add(1))
			}
			return conn, err
		}
		many.HTTP.Transport.(*http.Transport).DialContext = nil
		wantStatuses(t, map[int]int{401: 100, 429: 10}, func(int) *hubstest.Response {
			return many.Do("GET", "/auth/session", nil)
		})
	})
	t.Run("5 codes by e-mail and address", func(t *testing.T) {
		email := map[string]string{"email": hubstest.NewEmail()}
		one := c.client(s, c.addressElsewhere(t))
		wantStatuses(t, map[int]int{200: 5, 429: 3}, func(i int) *hubstest.Response {
			return one.Do("POST", []string{"/auth/otp/request", "/auth/%6Ftp/request"}[i%2], email)
		})
	})
	t.Run("10 guesses by e-mail", func(t *testing.T) {
		guess := map[string]string{"email": hubstest.NewEmail(), "code": "000000"}
		many := c.client(s, "")
		wantStatuses(t, map[int]int{401: 10, 429: 10}, func(i int) *hubstest.Response {
			return many.Do("POST", []string{"/auth/otp/validate", "/auth/otp/%76alidate"}[i%2], guess)
		})
	})
}

// P1: what a server takes for /auth/otp/* has come to the active one, in all forms of target,
// Host and version.
func testTargets(t *testing.T, c *cluster) {
	sendTargets(t, c.proxy, c.addressElsewhere(t))
	const served = `"route":"/auth/otp/validate","status":400`
	for i, s := range c.servers {
		if got := s.Log.Count(served); (got > 0) != (i == 0) {
			t.Errorf("server %d: %d attempts to sign in", i, got)
		}
	}
}

func TestTargetsBehindNginx(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, productionEnv(t))
	sendTargets(t, startProxy(t, "nginx", s.Addr), newAddress())
	s.Log.WaitFor(t, `"route":"/auth/otp/validate","status":400`)
}

// sendTargets sends the corpus. A target in which the proxy finds no path reaches no server.
func sendTargets(t *testing.T, p *proxy, address string) {
	t.Helper()
	for _, target := range readCorpus(t).Targets {
		for _, version := range []string{"1.0", "1.1"} {
			for _, host := range []string{"", "Host: api.example.com\r\n"} {
				answer := p.raw(t, address, "POST "+target+" HTTP/"+version+"\r\n"+host+
					"Content-Type: application/json\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
				hasPath := strings.HasPrefix(target, "/") || strings.Contains(target, "://")
				reached := strings.Contains(strings.ToLower(answer), "\nx-request-id:")
				if reached && !hasPath {
					t.Errorf("POST %s HTTP/%s %s reached a server", target, version, host)
				}
				if !reached && !strings.HasPrefix(answer, "HTTP/1.1 400 ") {
					t.Errorf("POST %s HTTP/%s %s: want 400, got %.100q", target, version, host, answer)
				}
			}
		}
	}
}

// A load is two members who upload and read through HAProxy while servers come and go. Each
// request is from another address, so all servers get some.
type load struct {
	*cluster
	t       *testing.T
	members []*hubstest.Client
	stop    atomic.Bool
	running sync.WaitGroup
	// tolerate says which failures may be. A nil one: none.
	tolerate func(*hubstest.Response, error) bool
	failed   atomic.Int64

	mu    sync.Mutex
	files map[string]string // content by the path of each acknowledged upload
}

func startLoad(t *testing.T, c *cluster, tolerate func(*hubstest.Response, error) bool) *load {
	l := &load{cluster: c, t: t, tolerate: tolerate, files: map[string]string{}}
	for i := range 2 {
		member := c.member(c.servers[0], "member")
		l.members = append(l.members, member)
		l.running.Go(func() {
			for n := 0; !l.stop.Load(); n++ {
				l.round(member, fmt.Sprintf("content %d of member %d", n, i))
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) round(member *hubstest.Client, content string) {
	l.try(200, func() (*hubstest.Response, error) { return member.Try("GET", "/auth/session", nil) })
	const head = "--x\r\nContent-Disposition: form-data; name=file; filename=load.txt\r\n\r\n"
	form := strings.NewReader(head + content + "\r\n--x--\r\n")
	path := ""
	l.try(201, func() (*hubstest.Response, error) {
		r, err := member.Try("POST", "/files/upload", form, "Content-Type", "multipart/form-data; boundary=x")
		path = r.Header.Get("Location")
		return r, err
	})
	if path != "" {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.files[path] = content
	}
}

func (l *load) try(status int, send func() (*hubstest.Response, error)) {
	r, err := send()
	if err == nil && r.Status == status {
		return
	}
	l.failed.Add(1)
	if l.tolerate == nil || !l.tolerate(r, err) {
		l.t.Errorf("under load, want %d: %v, %v", status, err, r)
	}
}

// waitMore waits for n further uploads.
func (l *load) waitMore(n int) {
	l.t.Helper()
	count := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.files)
	}
	goal := count() + n
	hubstest.WaitUntil(l.t, fmt.Sprintf("%d uploads more", n), func() bool { return count() >= goal })
}

func (l *load) end() {
	l.stop.Store(true)
	l.running.Wait()
}

// wantAll checks that every acknowledged upload and every session is there.
func (l *load) wantAll() {
	l.t.Helper()
	for path, content := range l.files {
		r := l.members[0].Do("GET", path, nil)
		if r.Status != 200 || string(r.Body) != content {
			l.t.Errorf("acknowledged with %q: %v", content, r)
		}
	}
	for _, member := range l.members {
		member.Do("GET", "/auth/session", nil).Want(l.t, 200)
	}
}

// A new key, without one request dropped or one session lost: the active server, which alone
// signs sessions, goes last. When it signs with the new key, all others know it.
func testRollingRestart(t *testing.T, c *cluster) {
	l := startLoad(t, c, nil)
	oldKey := c.servers[0].Env["SESSION_SECRET"]
	newKey := "new-secret-of-more-than-thirty-two-bytes"
	for _, i := range []int{2, 1, 0} {
		for _, backend := range []string{"active", "by_address"} {
			c.command(t, fmt.Sprintf("set server %s/s%d state drain", backend, i+1))
		}
		if code := c.servers[i].Stop(t); code != 0 {
			t.Errorf("server %d: exit status %d", i+1, code)
		}
		c.restart(t, i, map[string]string{"SESSION_SECRET": newKey + "," + oldKey})
		for _, backend := range []string{"active", "by_address"} {
			c.command(t, fmt.Sprintf("set server %s/s%d state ready", backend, i+1))
		}
		c.waitState(t, i, "UP")
		l.waitMore(5)
	}
	l.end()
	l.wantAll()
	// A server with the new key alone knows the sessions that are signed now, and no others.
	fresh := c.member(c.servers[0], "member")
	other := hubstest.Start(t, c.servers[0].Env, map[string]string{"ADDR": "127.0.0.1:0", "SESSION_SECRET": newKey})
	for token, want := range map[string]int{fresh.Token(): 200, l.members[0].Token(): 401} {
		guest := other.Client(t)
		guest.SetToken(token)
		guest.Do("GET", "/auth/session", nil).Want(t, want)
	}
}

// kill -9 of the active server under load: requests under way there fail, and no others.
func testActiveKilled(t *testing.T, c *cluster) {
	l := startLoad(t, c, func(r *hubstest.Response, err error) bool {
		return err != nil || r.Status == 502 || r.Status == 503 // never 401, 403, 404, 500
	})
	email := hubstest.NewEmail()
	hubstest.AddUser(t, c.servers[0].Env["DATABASE_URL"], email, "member")
	user := c.client(c.servers[0], "")
	user.Do("POST", "/auth/otp/request", map[string]string{"email": email}).Want(t, 200)
	guess := map[string]string{"email": email, "code": c.servers[0].Code(t, email)}
	l.waitMore(10)

	c.servers[0].Signal(t, syscall.SIGKILL)
	c.servers[0].Wait(t)
	c.waitState(t, 0, "DOWN")
	before := l.failed.Load()
	l.waitMore(10)
	// At the next server the code is unknown, and a new one works.
	hubstest.WantProblem(t, user.Do("POST", "/auth/otp/validate", guess), 401, "invalid_code")
	user.SignIn(email)
	c.servers[1].Log.WaitFor(t, `"msg":"signed in"`)
	l.end()
	if got := l.failed.Load(); got != before {
		t.Errorf("%d requests failed after the server was known to be down", got-before)
	}
	l.wantAll()

	c.restart(t, 0, nil)
	c.waitState(t, 0, "UP")
	r := user.Do("POST", "/auth/otp/validate", "{}").Want(t, 400)
	if got := c.servedBy(t, r); got != 0 {
		t.Errorf("the first server is up, and server %d is the active one", got)
	}
}
