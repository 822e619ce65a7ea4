//go:build moving

package main

// The soak: clients of every kind for minutes or hours, while one thing after the other
// fails that the server stands on. ./dev.sh soak runs it. At the end it holds what is
// there against what the clients were told, and prints a table.

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

const (
	soakHold    = 4 * time.Second  // how long each failure lasts
	soakRest    = 2 * time.Second  // between two
	soakBack    = 20 * time.Second // after a failure, until everything works again
	soakMaxRSS  = 64               // MiB that a server may have more at the end
	soakMaxFDs  = 16               // descriptors more
	soakRoutine = 100              // goroutines at the end
)

// A soakServer is one of the two processes. It keeps its address when it is started again.
type soakServer struct {
	*testServer
	cmd    *exec.Cmd
	exited chan struct{}
	// epoch is odd while the server is down: an answer that fails to come is then no fault.
	epoch atomic.Int64
}

// A soakRun is what the clients know.
type soakRun struct {
	t       *testing.T
	pg      *ownPostgres
	mail    *mailServer
	dir     string // FILES_DIR
	small   bool   // it is a disk of its own, which can be filled
	servers [2]*soakServer
	quit    chan struct{}
	clients sync.WaitGroup

	nextUser, users atomic.Int64

	mu       sync.Mutex
	answers  map[string]int // "POST /hubs: 201" → how many
	faults   map[string]int // what must not be → how many
	examples map[string]string
	hubs     map[string]*soakHub   // by name
	files    map[string][32]byte   // path → hash of an acknowledged file
	unsure   int                   // uploads whose answer does not say whether they are stored
	accepted map[string]string     // user → acceptedAt
	codes    map[string]bool       // that were mailed
	worked   map[string]int        // address and code → sessions
	spans    map[string][]soakSpan // limit, server and epoch → attempts that were let in
	events   []string              // rows of the table
}

type soakHub struct {
	id           string
	acknowledged bool
	deleted      bool // or perhaps deleted
	gone         bool // deletion acknowledged
	sent, change int  // last change sent, last acknowledged
}

type soakSpan struct{ sent, received time.Time }

func TestSoak(t *testing.T) {
	minutes, err := strconv.ParseFloat(cmp.Or(os.Getenv("SOAK_MINUTES"), "10"), 64)
	if err != nil || minutes <= 0 {
		t.Fatal("SOAK_MINUTES must be a number")
	}
	s := newSoak(t, minutes)
	start := s.servers[1].size(t)
	s.startClients()
	s.failures(time.Now().Add(time.Duration(minutes * float64(time.Minute))))
	close(s.quit)
	s.clients.Wait()
	s.waitBack("the end")
	s.checkStored()
	s.checkLimits()
	s.checkFiles()
	s.checkSize(start)
	for _, server := range s.servers {
		s.checkLog(server)
	}
	s.report()
}

func newSoak(t *testing.T, minutes float64) *soakRun {
	s := &soakRun{
		t: t, pg: newPostgres(t), mail: newMailServer(t, mailOptions{noStartTLS: true}), dir: t.TempDir(),
		quit: make(chan struct{}), answers: map[string]int{}, faults: map[string]int{}, examples: map[string]string{},
		hubs: map[string]*soakHub{}, files: map[string][32]byte{}, accepted: map[string]string{},
		codes: map[string]bool{}, worked: map[string]int{}, spans: map[string][]soakSpan{},
	}
	size := 64<<20 + int(minutes*float64(16<<20))
	if err := syscall.Mount("tmpfs", s.dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err == nil {
		s.small = true
		t.Cleanup(func() { syscall.Unmount(s.dir, syscall.MNT_DETACH) })
	}
	s.users.Store(int64(1000 + minutes*600))
	execSQL(t, s.pg.url, "insert into users (email) select 'soak@u' || n || '.example.net' from generate_series(1, $1) as n", s.users.Load())
	for i := range s.servers {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := ln.Addr().String()
		ln.Close()
		env := serverEnv(t, stagingEnv(s.mail), map[string]string{"DATABASE_URL": s.pg.url, "FILES_DIR": s.dir, "ADDR": addr})
		server := &soakServer{testServer: newTestServer(env)}
		server.addr, server.base = addr, "https://api."+env["COOKIE_DOMAIN"]
		server.epoch.Store(1)
		s.servers[i] = server
		server.start(t)
		t.Cleanup(func() {
			server.cmd.Process.Kill()
			<-server.exited
		})
	}
	return s
}

func (server *soakServer) logPath() string {
	return filepath.Join(testDir, "soak-"+strings.ReplaceAll(server.addr, ":", "-")+".log")
}

// start returns when the server takes connections.
func (server *soakServer) start(t *testing.T) {
	path, err := testBinary()
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.OpenFile(server.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd, exited := exec.Command(path, "serve"), make(chan struct{})
	for name, value := range server.env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		cmd.Wait()
		close(exited)
	}()
	server.cmd, server.exited = cmd, exited
	waitUntil(t, "a server that listens", func() bool {
		conn, err := net.Dial("tcp", server.addr)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	server.epoch.Add(1)
}

// end stops it by a signal and returns the exit status.
func (server *soakServer) end(t *testing.T, sig syscall.Signal) int {
	server.epoch.Add(1)
	server.cmd.Process.Signal(sig)
	select {
	case <-server.exited:
	case <-time.After(patience):
		t.Errorf("a server has not ended %v after signal %v", patience, sig)
		server.cmd.Process.Kill()
		<-server.exited
	}
	return server.cmd.ProcessState.ExitCode()
}

type soakSize struct{ rssMiB, descriptors int }

func (server *soakServer) size(t *testing.T) soakSize {
	p := &testProcess{testServer: server.testServer, cmd: server.cmd}
	return soakSize{p.residentMiB(t), p.descriptors(t)}
}

// fault notes what must not be. One of each kind is kept whole.
func (s *soakRun) fault(kind, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.faults[kind]++; s.faults[kind] == 1 {
		s.examples[kind] = fmt.Sprintf(format, args...)
	}
}

// A soakClient is a browser at one of the servers.
type soakClient struct {
	*testClient
	run    *soakRun
	server *soakServer
}

func (s *soakRun) client(server *soakServer) *soakClient {
	return &soakClient{server.client(s.t), s, server}
}

// fresh is the same machine with nobody signed in, at another address.
func (c *soakClient) fresh() *soakClient {
	jar, _ := cookiejar.New(nil)
	browser := *c.http
	browser.Jar = jar
	moved := *c.elsewhere()
	moved.http = &browser
	return &soakClient{&moved, c.run, c.server}
}

// send sends a request from the client's address, or another one for each where it has
// none, and holds the answer against those that the contract has: a status, and for an
// error its code. 503 is among them always. It returns status 0 where none came.
func (c *soakClient) send(allowed string, method, path string, body any, headers ...string) *testResponse {
	s, epoch := c.run, c.server.epoch.Load()
	r, err := c.try(method, path, body, headers...)
	route := method + " " + soakRoute(path)
	restarted := epoch%2 == 1 || c.server.epoch.Load() != epoch
	got := "no answer"
	switch {
	case err != nil && restarted:
		got, r = "none, the server restarts", &testResponse{method: method, path: path, header: http.Header{}}
	case err != nil:
		s.fault("no answer", "%s: %v", route, err)
		r = &testResponse{method: method, path: path, header: http.Header{}}
	case r.status < 400:
		got = fmt.Sprint(r.status)
		if err := r.answerFault(); err != nil {
			s.fault("an answer outside the contract", "%v", err)
		}
	default:
		var p struct{ Code string }
		json.Unmarshal(r.body, &p)
		got = fmt.Sprint(r.status, " ", p.Code)
		if err := r.problemFault(r.status, p.Code, nil); err != nil {
			s.fault("an answer outside the contract", "%v in %v", err, r)
		}
	}
	if r.status != 0 && got != "503 unavailable" && !slices.Contains(strings.Split(allowed, ", "), got) {
		s.fault("an answer that should be another", "%s: %s, not %s: %v", route, got, allowed, r)
	}
	s.mu.Lock()
	s.answers[route+": "+got]++
	s.mu.Unlock()
	return r
}

func soakRoute(path string) string {
	path, _, _ = strings.Cut(path, "?")
	parts := strings.Split(path, "/")
	for i, part := range parts {
		if isUUID(part) {
			parts[i] = "{id}"
			if i+1 < len(parts) {
				parts[i+1] = "{name}"
			}
		}
	}
	return strings.Join(parts, "/")
}

// each runs a client until the end, with a pause between two rounds.
func (s *soakRun) each(pause time.Duration, round func()) {
	s.clients.Go(func() {
		for {
			select {
			case <-s.quit:
				return
			case <-time.After(pause/2 + rand.N(pause)):
				round()
			}
		}
	})
}

func (s *soakRun) startClients() {
	admins := make([]*soakClient, len(s.servers))
	for i, server := range s.servers {
		c, _ := server.member(s.t, "admin")
		admins[i] = &soakClient{c, s, server}
		guest := s.client(server)
		for range 8 {
			s.each(100*time.Millisecond, func() { s.signInOnce(guest.fresh()) })
		}
		for range 2 {
			s.each(60*time.Millisecond, s.hubWriter(admins[i]))
			s.each(40*time.Millisecond, func() { s.readOnce(admins[i]) })
			s.each(250*time.Millisecond, func() { s.uploadOnce(admins[i]) })
			s.each(60*time.Millisecond, func() { s.downloadOnce(admins[i]) })
		}
		s.each(200*time.Millisecond, func() { s.strangeOnce(guest.fresh()) })
		s.probeLimits(server)
	}
}

func (s *soakRun) moved(c *soakClient) *soakClient {
	return &soakClient{c.elsewhere(), s, c.server}
}

// signInOnce is a new user: code, session, terms, a look round, sometimes the way out.
func (s *soakRun) signInOnce(c *soakClient) {
	n := s.nextUser.Add(1)
	if n > s.users.Load() {
		return
	}
	email := fmt.Sprintf("soak@u%d.example.net", n)
	epoch := c.server.epoch.Load()
	if c.send("200", "POST", "/auth/otp/request", map[string]string{"email": email}).status != 200 {
		return
	}
	code := s.mail.codeFor(email, 15*time.Second)
	if code == "" {
		s.mu.Lock()
		s.answers["codes that did not come"]++
		s.mu.Unlock()
		return
	}
	s.mu.Lock()
	s.codes[code] = true
	s.mu.Unlock()
	present := func() int {
		allowed := "200, 401 invalid_code, 429 rate_limited"
		r := c.send(allowed, "POST", "/auth/otp/validate", map[string]string{"email": email, "code": code})
		if r.status == 200 {
			s.mu.Lock()
			s.worked[email+" "+code]++
			s.mu.Unlock()
		}
		return r.status
	}
	// Some take their time, so that the database may be away by then.
	select {
	case <-s.quit:
	case <-time.After(rand.N(2 * soakHold)):
	}
	refused := 0
	for range 4 { // two at a time, within the limit of ten
		var both sync.WaitGroup
		var statuses [2]int
		for i := range statuses {
			both.Go(func() { statuses[i] = present() })
		}
		both.Wait()
		if slices.Contains(statuses[:], 200) {
			refused = 0
			break
		}
		// While one attempt waits for the database in vain, the other finds no code: it
		// must be good again after the 503.
		if slices.Contains(statuses[:], 401) && !slices.Contains(statuses[:], 503) {
			refused++
			break
		}
		select {
		case <-s.quit:
		case <-time.After(time.Second):
		}
	}
	if refused > 0 && c.server.epoch.Load() == epoch {
		s.fault("a right code refused", "%s, though its server never stopped", email)
	}
	if c.token() == "" {
		return
	}
	present() // once more: see worked
	c.send("200", "GET", "/auth/session", nil)
	r := c.send("200", "POST", "/terms/acceptance", map[string]string{"version": TERMS_VERSION})
	if r.status == 200 {
		var acceptance struct{ AcceptedAt string }
		json.Unmarshal(r.body, &acceptance)
		s.mu.Lock()
		s.accepted[email] = acceptance.AcceptedAt
		s.mu.Unlock()
		c.send("200", "GET", "/hubs?limit=5", nil)
		c.send("403 forbidden", "POST", "/hubs", map[string]string{"name": "not for members"})
	}
	if n%3 == 0 && c.send("204", "POST", "/auth/logout", nil).status == 204 {
		c.send("401 unauthenticated", "GET", "/auth/session", nil)
	}
}

// codeFor waits for the code that was mailed to an address, or returns "".
func (m *mailServer) codeFor(to string, limit time.Duration) string {
	timeout := time.After(limit)
	for {
		m.mu.Lock()
		more := m.changed
		for _, mail := range slices.Backward(m.mails) {
			if slices.Contains(mail.to, to) {
				m.mu.Unlock()
				return cmp.Or(append(mail.codes(), "")...)
			}
		}
		m.mu.Unlock()
		select {
		case <-more:
		case <-timeout:
			return ""
		}
	}
}

// hubWriter makes, changes and deletes hubs that no other client touches.
func (s *soakRun) hubWriter(admin *soakClient) func() {
	var own []string
	return func() {
		c := s.moved(admin)
		switch n := rand.IntN(10); {
		case len(own) == 0 || n < 3:
			name := fmt.Sprintf("soak %d", serial.Add(1))
			h := &soakHub{}
			s.mu.Lock()
			s.hubs[name] = h
			s.mu.Unlock()
			r := c.send("201", "POST", "/hubs", map[string]string{"name": name})
			if r.status != 201 {
				return
			}
			var made struct{ HubID string }
			json.Unmarshal(r.body, &made)
			s.mu.Lock()
			h.id, h.acknowledged = made.HubID, true
			s.mu.Unlock()
			own = append(own, name)
		case n < 9:
			h := s.hub(own[rand.IntN(len(own))])
			s.mu.Lock()
			h.sent++
			change := h.sent
			s.mu.Unlock()
			if c.send("200", "PATCH", "/hubs/"+h.id, map[string]string{"description": fmt.Sprint(change)}).status == 200 {
				s.mu.Lock()
				h.change = change
				s.mu.Unlock()
			}
		default:
			i := rand.IntN(len(own))
			h := s.hub(own[i])
			own = slices.Delete(own, i, i+1)
			s.mu.Lock()
			h.deleted = true
			s.mu.Unlock()
			if c.send("204", "DELETE", "/hubs/"+h.id, nil).status == 204 {
				s.mu.Lock()
				h.gone = true
				s.mu.Unlock()
			}
		}
	}
}

func (s *soakRun) hub(name string) *soakHub {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hubs[name]
}

// readOnce reads a page, or a hub that was acknowledged: it must be there.
func (s *soakRun) readOnce(admin *soakClient) {
	c := s.moved(admin)
	if rand.IntN(2) == 0 {
		c.send("200", "GET", fmt.Sprintf("/hubs?limit=20&offset=%d&filters[name]=soak&orderBy=updatedAt&orderDirection=desc", rand.IntN(50)), nil)
		return
	}
	var id string
	change := 0
	s.mu.Lock()
	for _, h := range s.hubs { // in no order
		if h.acknowledged && !h.deleted {
			id, change = h.id, h.change
			break
		}
	}
	s.mu.Unlock()
	if id == "" {
		return
	}
	r := c.send("200, 404 not_found", "GET", "/hubs/"+id, nil)
	var read struct{ Description string }
	json.Unmarshal(r.body, &read)
	n, _ := strconv.Atoi(read.Description)
	s.mu.Lock()
	deleted := slices.ContainsFunc(slices.Collect(maps.Values(s.hubs)), func(h *soakHub) bool { return h.id == id && h.deleted })
	s.mu.Unlock()
	if r.status == 404 && !deleted {
		s.fault("an acknowledged hub not found", "%v", r)
	}
	if r.status == 200 && n < change {
		s.fault("an acknowledged change not read", "change %d, not %d", n, change)
	}
}

func (s *soakRun) uploadOnce(admin *soakClient) {
	c := s.moved(admin)
	content := make([]byte, 100+rand.IntN(16<<10))
	for i := range content {
		content[i] = byte(rand.Uint32())
	}
	name := fmt.Sprintf("soak %d.bin", serial.Add(1))
	body := "--edge\r\n" + filePart(name) + "\r\n\r\n" + string(content) + "\r\n--edge--\r\n"
	if rand.IntN(10) == 0 { // a client that goes away
		reader, writer := io.Pipe()
		go func() {
			io.WriteString(writer, body[:len(body)/2])
			writer.CloseWithError(errors.New("gone"))
		}()
		c.try("POST", "/files/upload", reader, "Content-Type", formType)
		reader.Close()
		return
	}
	r := c.send("201, 507 insufficient_storage, 429 rate_limited", "POST", "/files/upload", bytes.NewReader([]byte(body)), "Content-Type", formType)
	var stored struct{ Path string }
	json.Unmarshal(r.body, &stored)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch r.status {
	case 201:
		s.files[stored.Path] = sha256.Sum256(content)
	case 0:
		s.unsure++
	}
}

func (s *soakRun) downloadOnce(admin *soakClient) {
	s.mu.Lock()
	var path string
	var hash [32]byte
	for path, hash = range s.files { // in no order
		break
	}
	s.mu.Unlock()
	if path == "" {
		return
	}
	r := s.moved(admin).send("200, 429 rate_limited", "GET", path, nil)
	if r.status == 200 && sha256.Sum256(r.body) != hash {
		s.fault("an acknowledged file came back different", "%s: %d bytes", path, len(r.body))
	}
}

// strangeOnce is what nobody should send.
func (s *soakRun) strangeOnce(c *soakClient) {
	switch rand.IntN(6) {
	case 0:
		c.send("401 unauthenticated", "GET", "/hubs", nil)
	case 1:
		c.setToken("eyJhbGciOiJIUzI1NiJ9.e30." + strings.Repeat("A", 43))
		c.send("401 unauthenticated", "GET", "/auth/session", nil)
	case 2:
		c.send("400 invalid_request", "POST", "/auth/otp/request", `{"email":"nobody"}`)
	case 3:
		c.send("403 cross_origin", "POST", "/auth/otp/request", `{"email":"a@b.example"}`, "Origin", "https://evil.example")
	case 4:
		c.send("404 not_found", "GET", "/admin/?token=eyJsecret", nil)
	case 5:
		c.send("401 invalid_code", "POST", "/auth/otp/validate", map[string]string{"email": newEmail(), "code": "123456"})
	}
}

// probeLimits sends more than the limits permit, one request after the other.
func (s *soakRun) probeLimits(server *soakServer) {
	c, mailbox := s.client(server), newEmail()
	probe := func(limit string, pause time.Duration, c *soakClient, allowed, method, path string, body any) {
		s.each(pause, func() {
			epoch, sent := server.epoch.Load(), time.Now()
			r := c.send(allowed+", 429 rate_limited", method, path, body)
			if r.status == 0 || r.status == 429 {
				return
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			// The limits are in the server's memory: they begin anew with it.
			key := fmt.Sprint(limit, " ", server.addr, " ", epoch)
			if epoch == server.epoch.Load() {
				s.spans[key] = append(s.spans[key], soakSpan{sent, time.Now()})
			}
		})
	}
	probe("global", 20*time.Millisecond, c.fresh(), "200", "GET", "/openapi.json", nil)
	probe("codes", 500*time.Millisecond, c.fresh(), "200", "POST", "/auth/otp/request", map[string]string{"email": mailbox})
	probe("guesses", 500*time.Millisecond, c.fresh(), "401 invalid_code", "POST", "/auth/otp/validate", map[string]string{"email": mailbox, "code": "000000"})
}

var soakLimits = map[string]struct {
	n      int
	period time.Duration
}{"global": {100, 10 * time.Second}, "codes": {5, 15 * time.Minute}, "guesses": {10, 15 * time.Minute}}

// failures breaks one thing after the other until the time is over, each at least once.
func (s *soakRun) failures(until time.Time) {
	hold := func() { time.Sleep(soakHold) }
	type failure struct {
		name, shows string // shows: an answer that it must have caused
		run         func()
	}
	list := []failure{
		{"PostgreSQL killed", "503 unavailable", func() { s.pg.crash(syscall.SIGKILL); hold(); s.pg.start() }},
		{"mail server hangs", "codes that did not come", func() { s.mail.fail(mailHangs); time.Sleep(4 * soakHold); s.mail.release() }},
		{"PostgreSQL hung", "503 unavailable", func() { s.pg.pause(); hold(); s.pg.resume() }},
		{"server restarted", "the server restarts", func() {
			if code := s.servers[0].end(s.t, syscall.SIGTERM); code != 0 {
				s.fault("a server that did not stop well", "exit %d", code)
			}
			s.servers[0].start(s.t)
		}},
		{"PostgreSQL restarted", "503 unavailable", func() { s.pg.stop(); s.pg.start() }},
		{"disk full", "507 insufficient_storage", func() {
			ballast := filepath.Join(s.dir, "ballast")
			file, err := os.Create(ballast)
			if err != nil {
				s.t.Error(err)
				return
			}
			io.Copy(file, zeros{}) // until there is no room
			hold()
			file.Close()
			os.Remove(ballast)
		}},
		{"server killed", "the server restarts", func() {
			s.servers[0].end(s.t, syscall.SIGKILL)
			s.servers[0].start(s.t)
		}},
		{"mail server refuses", "codes that did not come", func() { s.mail.fail(mailRefuses); hold(); s.mail.release() }},
		{"machine of PostgreSQL lost", "503 unavailable", func() { s.pg.lose(); hold(); s.pg.start() }},
	}
	if !s.small {
		list = slices.DeleteFunc(list, func(f failure) bool { return f.name == "disk full" })
		s.events = append(s.events, "disk full: NOT TRIED, no right to mount a small disk")
	}
	for round := 0; round == 0 || time.Now().Before(until); round++ {
		for _, f := range list {
			if round > 0 && time.Now().After(until) {
				return
			}
			before := s.seen(f.shows)
			f.run()
			back := s.waitBack(f.name)
			// That a code does not come shows only when its client has lost patience.
			if !strings.HasPrefix(f.name, "mail") && s.seen(f.shows) == before {
				s.fault("a failure that did not show", "%s", f.name)
			}
			s.events = append(s.events, fmt.Sprintf("%-28s back after %5.1f s; meanwhile %5d times: %s", f.name, back.Seconds(), s.seen(f.shows)-before, f.shows))
			time.Sleep(soakRest)
		}
	}
}

// zeros never ends.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// seen counts the answers so far that contain the text.
func (s *soakRun) seen(text string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for answer, count := range s.answers {
		if strings.Contains(answer, text) {
			n += count
		}
	}
	return n
}

// waitBack waits until both servers read and write again, and send codes.
func (s *soakRun) waitBack(what string) time.Duration {
	start := time.Now()
	for _, server := range s.servers {
		c := s.client(server)
		email := newEmail()
		for ready := false; !ready; {
			if time.Since(start) > soakBack {
				s.fault("not back", "%v after %s", soakBack, what)
				return time.Since(start)
			}
			r, err := c.elsewhere().try("GET", "/healthz", nil)
			if ready = err == nil && r.status == 200; !ready {
				time.Sleep(50 * time.Millisecond)
			}
		}
		testUser(s.t, s.pg.url, email, "member")
		asked, err := c.try("POST", "/auth/otp/request", map[string]string{"email": email})
		if err != nil || asked.status != 200 {
			s.fault("not back", "code request after %s: %v %v", what, err, asked)
			continue
		}
		code := s.mail.codeFor(email, soakBack)
		r, err := c.try("POST", "/auth/otp/validate", map[string]string{"email": email, "code": code})
		if err != nil || r.status != 200 {
			s.fault("not back", "sign-in after %s: %v %v", what, err, r)
		}
		s.mu.Lock()
		s.codes[code] = true
		s.mu.Unlock()
	}
	return time.Since(start)
}

// checkStored holds the tables against what was acknowledged.
func (s *soakRun) checkStored() {
	db := testDB(s.t, s.pg.url)
	rows, err := db.Query("select name, count(*), min(description) from hubs group by name")
	if err != nil {
		s.t.Fatal(err)
	}
	defer rows.Close()
	stored := map[string]bool{}
	for rows.Next() {
		var name, description string
		var n int
		if err := rows.Scan(&name, &n, &description); err != nil {
			s.t.Fatal(err)
		}
		stored[name] = true
		h := s.hubs[name]
		change, _ := strconv.Atoi(description)
		switch {
		case h == nil:
			s.fault("a hub that nobody sent", "%s", name)
		case n > 1:
			s.fault("a write done twice", "%s is there %d times", name, n)
		case h.gone:
			s.fault("an acknowledged deletion undone", "%s", name)
		case change < h.change || change > h.sent:
			s.fault("an acknowledged change lost", "%s: change %d, acknowledged %d, sent %d", name, change, h.change, h.sent)
		}
	}
	for name, h := range s.hubs {
		if h.acknowledged && !h.deleted && !stored[name] {
			s.fault("an acknowledged hub lost", "%s", name)
		}
	}
	for email, at := range s.accepted {
		var when time.Time
		err := db.QueryRow("select accepted_at from terms_acceptances join users using (user_id) where email = $1", email).Scan(&when)
		if told, _ := time.Parse(time.RFC3339Nano, at); err != nil || !told.Equal(when) {
			s.fault("an acknowledged acceptance lost", "%s: %s, stored %v, %v", email, at, when, err)
		}
	}
	for code, n := range s.worked {
		if n > 1 {
			s.fault("a code worked twice", "%s: %d times", code, n)
		}
	}
}

// checkLimits: in no stretch of a limit's period did more get in than it permits.
func (s *soakRun) checkLimits() {
	for key, spans := range s.spans {
		name, _, _ := strings.Cut(key, " ")
		limit := soakLimits[name]
		for i := range spans {
			if last := i + limit.n; last < len(spans) && spans[last].received.Sub(spans[i].sent) < limit.period {
				s.fault("a limit exceeded", "%s: %d within %v", key, limit.n+1, spans[last].received.Sub(spans[i].sent))
			}
		}
	}
}

// checkFiles: every acknowledged file comes back whole, and of the others nothing is left.
func (s *soakRun) checkFiles() {
	server := s.servers[1]
	member, _ := server.member(s.t, "member")
	for path, hash := range s.files {
		r, err := member.elsewhere().try("GET", path, nil)
		if err != nil || r.status != 200 || sha256.Sum256(r.body) != hash {
			s.fault("an acknowledged file lost", "%s: %v %d", path, err, r.status)
		}
	}
	// The sweep spares what is younger than a minute.
	unfinishedDir := filepath.Join(s.dir, unfinished)
	old := time.Now().Add(-10 * time.Minute)
	left := 0
	for end := time.Now().Add(150 * time.Second); time.Now().Before(end); time.Sleep(time.Second) {
		entries, err := os.ReadDir(unfinishedDir)
		if err != nil {
			s.t.Fatal(err)
		}
		if left = len(entries); left == 0 {
			break
		}
		for _, entry := range entries {
			os.Chtimes(filepath.Join(unfinishedDir, entry.Name()), old, old)
		}
	}
	if left > 0 {
		s.fault("unfinished uploads left", "%d", left)
	}
	rows := queryValue[int](s.t, s.pg.url, "select count(*) from files")
	if extra := rows - len(s.files); extra < 0 || extra > s.unsure {
		s.fault("rows of files", "%d rows, %d files acknowledged, %d unsure", rows, len(s.files), s.unsure)
	}
	ids := queryValue[string](s.t, s.pg.url, "select coalesce(string_agg(file_id::text, ' '), '') from files")
	for _, name := range s.servers[0].filesIn(s.t) {
		if !strings.Contains(ids, name) {
			s.fault("bytes without a row", "%s", name)
		}
	}
}

// checkSize: the server that ran all the time is as small as at its start.
func (s *soakRun) checkSize(start soakSize) {
	server := s.servers[1]
	var end soakSize
	// Idle connections of the clients end with their transports.
	for range 20 {
		if end = server.size(s.t); end.descriptors <= start.descriptors+soakMaxFDs {
			break
		}
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		time.Sleep(10 * time.Second)
	}
	s.events = append(s.events, fmt.Sprintf("memory %d → %d MiB, descriptors %d → %d", start.rssMiB, end.rssMiB, start.descriptors, end.descriptors))
	if end.rssMiB > start.rssMiB+soakMaxRSS {
		s.fault("memory grows", "%d → %d MiB", start.rssMiB, end.rssMiB)
	}
	if end.descriptors > start.descriptors+soakMaxFDs {
		s.fault("descriptors leak", "%d → %d", start.descriptors, end.descriptors)
	}
	server.end(s.t, syscall.SIGQUIT) // has the Go runtime print its goroutines
	text, err := os.ReadFile(server.logPath())
	if err != nil {
		s.t.Fatal(err)
	}
	n := len(regexp.MustCompile(`(?m)^goroutine \d+ `).FindAll(text, -1))
	s.events = append(s.events, fmt.Sprintf("goroutines at the end: %d", n))
	if n > soakRoutine || n == 0 {
		s.fault("goroutines leak", "%d", n)
	}
}

var (
	wholeAddress = regexp.MustCompile(`[A-Za-z0-9._%+-]{2,}@[A-Za-z0-9.-]+\.[a-z]+`)
	sixDigits    = regexp.MustCompile(`(?:^|[^0-9A-Za-z.])([0-9]{6})(?:$|[^0-9A-Za-z])`)
)

// checkLog: nothing secret, nothing that is no JSON, no error of another kind than those
// that the failures explain.
func (s *soakRun) checkLog(server *soakServer) {
	text, err := os.ReadFile(server.logPath())
	if err != nil {
		s.t.Fatal(err)
	}
	text, _, _ = bytes.Cut(text, []byte("SIGQUIT")) // see checkSize
	database, _ := url.Parse(s.pg.url)
	password, _ := database.User.Password()
	expected := []string{"unavailable", "code not sent", "insufficient_storage", "sweep of unfinished uploads failed"}
	n := 0
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		n++
		var entry struct{ Level string }
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			s.fault("a log line that is no JSON", "%s", line)
		}
		if entry.Level == "ERROR" && !slices.ContainsFunc(expected, func(part string) bool { return strings.Contains(line, part) }) {
			s.fault("an unexpected error in the log", "%s", line)
		}
		for _, secret := range []string{"eyJ", "postgres://", password, server.env["SESSION_SECRET"]} {
			if strings.Contains(line, secret) {
				s.fault("a secret in the log", "%s", line)
			}
		}
		if strings.Contains(line, "@") && wholeAddress.MatchString(line) {
			s.fault("an address in the log", "%s", line)
		}
		for _, digits := range sixDigits.FindAllStringSubmatch(bareNumber.ReplaceAllString(line, `":0`), -1) {
			if s.codes[digits[1]] {
				s.fault("a code in the log", "%s", line)
			}
		}
		if len(line) > 2048 {
			s.fault("a log line over 2 kB", "%d bytes: %.300s", len(line), line)
		}
	}
	s.events = append(s.events, fmt.Sprintf("log lines of %s: %d", server.addr, n))
}

// report prints the table.
func (s *soakRun) report() {
	var table strings.Builder
	fmt.Fprintln(&table, "\nWhat happened:")
	for _, event := range s.events {
		fmt.Fprintln(&table, "  "+event)
	}
	fmt.Fprintln(&table, "Answers:")
	total := 0
	for _, answer := range slices.Sorted(maps.Keys(s.answers)) {
		fmt.Fprintf(&table, "  %8d  %s\n", s.answers[answer], answer)
		total += s.answers[answer]
	}
	hubs := 0
	for _, h := range s.hubs {
		if h.acknowledged {
			hubs++
		}
	}
	fmt.Fprintf(&table, "Held against the tables and the disk: %d hubs, %d files, %d acceptances, %d codes, %d answers.\n",
		hubs, len(s.files), len(s.accepted), len(s.codes), total)
	s.t.Log(table.String())
	for _, kind := range slices.Sorted(maps.Keys(s.faults)) {
		s.t.Errorf("%s: %d times, such as %s", kind, s.faults[kind], s.examples[kind])
	}
	if len(s.faults) == 0 {
		s.t.Log("Every invariant holds.")
	}
}
