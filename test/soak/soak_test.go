// Package soak runs two servers for minutes or hours: ./dev.sh soak. Clients of every kind use
// them, while PostgreSQL, the mail server, the disk and the servers themselves fail, one after the
// other. At the end, the test compares the tables and the files with the writes that were
// acknowledged to the clients, and prints a table of failures and answers.
package soak

import (
	"cmp"
	"database/sql"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) {
	hubstest.Main(m)
}

// Rows of the table for answers and codes that clients did not get.
const (
	noCode   = "codes that did not come"
	noServer = "none, the server restarts"
)

// A soak is one run of the test, with all that its clients and failures share.
type soak struct {
	t       *testing.T
	pg      *hubstest.Postgres
	mail    *hubstest.MailServer
	dir     string // FILES_DIR
	servers [2]*server
	ledger  *hubstest.Ledger
	terms   string // current version of the terms

	operator *sql.DB       // adds the users
	quit     chan struct{} // closed when the clients must end
	clients  sync.WaitGroup
	begun    time.Time

	mu       sync.Mutex
	answers  map[string]int    // number of each kind: "POST /hubs: 201", or noCode
	faults   map[string]int    // number of each kind of wrong behavior
	examples map[string]string // the first fault of each kind
	events   []string          // rows of the table about failures
}

// The server keeps its promises through failures of all that it depends on. Every write that it
// acknowledges is stored, and none is done twice. Every answer fits the contract, and a code works
// once. After each failure, both servers sign users in again within 20 s. The second server is
// never restarted: its memory, descriptors and goroutines must not keep growing.
func TestSoak(t *testing.T) {
	if os.Getenv("SOAK_MINUTES") == "" {
		t.Skip("the soak takes minutes: ./dev.sh soak")
	}
	minutes, err := strconv.Atoi(os.Getenv("SOAK_MINUTES"))
	if err != nil {
		t.Fatal("setup: SOAK_MINUTES: ", err)
	}
	s := newSoak(t)
	steady := s.servers[1] // no failure restarts this one
	before := steady.size()
	s.startClients()
	s.failAll(s.begun.Add(time.Duration(minutes) * time.Minute))
	close(s.quit)
	s.clients.Wait()
	s.waitBack("the end")
	s.wantStored()
	s.wantSize(steady, before)
	s.report()
}

// newSoak starts PostgreSQL, the mail server and both servers.
func newSoak(t *testing.T) *soak {
	s := &soak{
		t:        t,
		pg:       hubstest.NewPostgres(t),
		mail:     hubstest.NewMailServer(t, hubstest.MailOptions{NoStartTLS: true}),
		dir:      t.TempDir(),
		quit:     make(chan struct{}),
		begun:    time.Now(),
		answers:  map[string]int{},
		faults:   map[string]int{},
		examples: map[string]string{},
	}
	s.operator = hubstest.OpenDB(t, s.pg.URL)
	s.ledger = hubstest.NewLedger(func(kind, detail string) {
		s.fault(kind, detail)
	})
	for i := range s.servers {
		s.servers[i] = s.newServer()
	}
	user, _ := s.servers[0].Member(t, "member")
	s.terms = user.Get("/auth/session").Field(t, "terms.version")
	return s
}

// fault counts wrong behavior of a server by its kind. It keeps the detail of the first of each
// kind.
func (s *soak) fault(kind string, detail any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults[kind]++
	if s.faults[kind] == 1 {
		after := time.Since(s.begun).Round(time.Second)
		s.examples[kind] = fmt.Sprintf("%v: %v", after, detail)
	}
}

// event adds a row to the part of the table about failures.
func (s *soak) event(format string, args ...any) {
	s.events = append(s.events, fmt.Sprintf(format, args...))
}

// seen returns how many answers so far contain the text.
func (s *soak) seen(text string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for answer, count := range s.answers {
		if strings.Contains(answer, text) {
			n += count
		}
	}
	return n
}

// waitBack waits until both servers are healthy and sign a new user in, and returns how long that
// took. If it takes too long, that is a fault. what names the failure before it.
func (s *soak) waitBack(what string) time.Duration {
	const within = 20 * time.Second
	start := time.Now()
	for _, server := range s.servers {
		email, _ := server.NewUser(s.t, "member")
		for !s.isBack(server, email) {
			if time.Since(start) > within {
				s.fault("a server that does not recover", "after "+what)
				return time.Since(start)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	return time.Since(start)
}

// isBack reports whether a server is healthy and signs the user in.
func (s *soak) isBack(server *server, email string) bool {
	client := server.Client(s.t)
	defer client.HTTP.CloseIdleConnections()
	isGood := func(method, path string, body any) bool {
		r, err := client.Try(method+" "+path, body)
		return err == nil && r.Status == 200
	}
	input := map[string]string{"email": email}
	if !isGood("GET", "/healthz", nil) || !isGood("POST", "/auth/otp/request", input) {
		return false
	}
	input["code"] = s.mailedCode(email, hubstest.Patience)
	return isGood("POST", "/auth/otp/validate", input)
}

// mailedCode waits for a mail to an address and returns the code in the newest one. If none arrives
// within the limit, it returns "".
func (s *soak) mailedCode(to string, limit time.Duration) string {
	end := time.Now().Add(limit)
	for ; time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		for _, mail := range slices.Backward(s.mail.Received()) {
			if slices.Contains(mail.To, to) {
				return cmp.Or(append(mail.Codes(), "")...)
			}
		}
	}
	return ""
}

// wantStored compares the tables and the files with the writes that were acknowledged. Then it
// restarts a server, which sweeps when it starts. After that every file in FILES_DIR must have a row.
func (s *soak) wantStored() {
	reader := s.signedIn(s.servers[1], "member")
	s.ledger.CheckRows(s.t, s.pg.URL)
	s.ledger.CheckFiles(s.t, reader.expecting("200"), s.pg.URL)
	s.waitSwept()
	stored := hubstest.Query[string](s.t, s.pg.URL,
		"select coalesce(string_agg(file_id::text, ' '), '') from files")
	for _, name := range s.servers[0].FilesIn(s.t) {
		if !strings.Contains(stored, name) {
			s.fault("bytes without a row", name)
		}
	}
}

// waitSwept dates all working names back, restarts a server, and waits until they are gone.
func (s *soak) waitSwept() {
	unfinished := func() (left []string) {
		left, _ = filepath.Glob(filepath.Join(s.dir, hubstest.Unfinished, "*"))
		return left
	}
	old := time.Now().Add(-time.Hour)
	for _, path := range unfinished() {
		hubstest.Must(s.t, os.Chtimes(path, old, old))
	}
	s.restart(s.servers[0])
	end := time.Now().Add(hubstest.Patience)
	for len(unfinished()) > 0 {
		if time.Now().After(end) {
			s.fault("working names that are not swept", unfinished())
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// report prints the table, and fails the test for each kind of fault.
func (s *soak) report() {
	var table strings.Builder
	fmt.Fprintln(&table, "\nWhat happened:")
	for _, event := range s.events {
		fmt.Fprintln(&table, "  "+event)
	}
	fmt.Fprintln(&table, "Answers:")
	for _, answer := range slices.Sorted(maps.Keys(s.answers)) {
		fmt.Fprintf(&table, "  %8d  %s\n", s.answers[answer], answer)
	}
	fmt.Fprintf(&table, "Compared with the tables and the disk: %d acknowledged writes.\n",
		s.ledger.Acknowledged())
	fmt.Println(&table)
	// Each needs a sign-in.
	for _, success := range []string{
		"POST /hubs: 201", "POST /files/upload: 201", "GET /files/{id}: 200",
	} {
		if s.answers[success] == 0 {
			s.t.Errorf("got no %s, want some", success)
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(s.faults)) {
		s.t.Errorf("%s: got %d, want 0; the first after %s", kind, s.faults[kind], s.examples[kind])
	}
}
