// Package soak runs two servers for minutes or hours, with clients of every kind, while one
// thing after the other fails that they stand on. At the end it compares what is there with
// what the clients were told, and prints a table: ./dev.sh soak.
package soak

import (
	"cmp"
	"database/sql"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
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

// What stands in the table for an answer that did not come.
const (
	noCode   = "codes that did not come"
	noServer = "none, the server restarts"
)

// A soak is what all clients know.
type soak struct {
	t       *testing.T
	pg      *hubstest.Postgres
	mail    *hubstest.MailServer
	dir     string // FILES_DIR
	isSmall bool   // FILES_DIR is on a disk of its own, which can be filled
	servers [2]*server
	ledger  *hubstest.Ledger

	operator *sql.DB
	quit     chan struct{}
	clients  sync.WaitGroup
	begun    time.Time

	mu       sync.Mutex
	answers  map[string]int // "POST /hubs: 201" or noCode, and how many
	faults   map[string]int // what must not be, and how often
	examples map[string]string
	codes    map[string]bool // that were mailed
	events   []string        // rows of the table
}

func TestSoak(t *testing.T) {
	if os.Getenv("SOAK_MINUTES") == "" {
		t.Skip("the soak takes minutes: ./dev.sh soak")
	}
	minutes, err := strconv.Atoi(os.Getenv("SOAK_MINUTES"))
	if err != nil {
		t.Fatal("SOAK_MINUTES: ", err)
	}
	s := newSoak(t)
	steady := s.servers[1]
	before := steady.size()
	s.startClients()
	s.failAll(time.Now().Add(time.Duration(minutes) * time.Minute))
	close(s.quit)
	s.clients.Wait()
	s.waitBack("the end")
	s.checkStored()
	s.checkSize(steady, before)
	s.checkPassword()
	s.report()
}

func newSoak(t *testing.T) *soak {
	disk := t.TempDir()
	s := &soak{
		t:        t,
		pg:       hubstest.NewPostgres(t),
		mail:     hubstest.NewMailServer(t, hubstest.MailOptions{NoStartTLS: true}),
		dir:      filepath.Join(disk, "files"),
		quit:     make(chan struct{}),
		begun:    time.Now(),
		answers:  map[string]int{},
		faults:   map[string]int{},
		examples: map[string]string{},
		codes:    map[string]bool{},
	}
	s.operator = hubstest.OpenDB(t, s.pg.URL)
	s.ledger = hubstest.NewLedger(func(kind, detail string) {
		s.fault(kind, detail)
	})
	mount := exec.Command("mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", disk)
	s.isSmall = mount.Run() == nil
	if s.isSmall {
		t.Cleanup(func() {
			exec.Command("umount", "--lazy", disk).Run()
		})
	}
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range s.servers {
		s.servers[i] = s.newServer()
	}
	return s
}

// fault notes what must not be. One of each kind is kept whole.
func (s *soak) fault(kind string, detail any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults[kind]++
	if s.faults[kind] == 1 {
		after := time.Since(s.begun).Round(time.Second)
		s.examples[kind] = fmt.Sprintf("%v: %v", after, detail)
	}
}

// event adds a row to the table.
func (s *soak) event(format string, args ...any) {
	s.events = append(s.events, fmt.Sprintf(format, args...))
}

// seen counts the answers so far that contain the text.
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

// waitBack waits until both servers are healthy again, and sign a new user in.
func (s *soak) waitBack(what string) time.Duration {
	const within = 20 * time.Second
	start := time.Now()
	for _, server := range s.servers {
		email, _ := server.NewUser(s.t, "member")
		for !s.isBack(server, email) {
			if time.Since(start) > within {
				s.fault("not back", what)
				return time.Since(start)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	return time.Since(start)
}

// isBack reports whether a server is healthy and signs a user in.
func (s *soak) isBack(server *server, email string) bool {
	client := server.Client(s.t)
	isGood := func(method, path string, body any) bool {
		r, err := client.Try(method, path, body)
		return err == nil && r.Status == 200
	}
	input := map[string]string{"email": email}
	if !isGood("GET", "/healthz", nil) || !isGood("POST", "/auth/otp/request", input) {
		return false
	}
	input["code"] = s.mailedCode(email, hubstest.Patience)
	return isGood("POST", "/auth/otp/validate", input)
}

// mailedCode waits for the code that was mailed to an address, or returns "".
func (s *soak) mailedCode(to string, limit time.Duration) string {
	end := time.Now().Add(limit)
	for ; time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		for _, mail := range slices.Backward(s.mail.Received()) {
			if slices.Contains(mail.To, to) {
				code := cmp.Or(append(mail.Codes(), "")...)
				s.mu.Lock()
				s.codes[code] = true
				s.mu.Unlock()
				return code
			}
		}
	}
	return ""
}

// checkStored compares the tables and the disk with what was acknowledged. Of uploads that were
// not, nothing is left: the sweep spares what is younger than a minute.
func (s *soak) checkStored() {
	reader := s.member(s.servers[1], "member")
	s.ledger.Check(s.t, s.pg.URL)
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

// checkPassword looks for the database's password in the logs. All else that no log may have is
// looked for by hubstest.
func (s *soak) checkPassword() {
	database, err := url.Parse(s.pg.URL)
	if err != nil {
		s.t.Fatal(err)
	}
	password, _ := database.User.Password()
	for _, server := range s.servers {
		if n := server.Log.Count(password); n > 0 {
			s.fault("the database's password in the log", n)
		}
	}
}

// waitSwept waits until nothing is left of unfinished uploads.
func (s *soak) waitSwept() {
	unfinished := filepath.Join(s.dir, hubstest.Unfinished, "*")
	end := time.Now().Add(2*time.Minute + hubstest.Patience)
	old := time.Now().Add(-time.Hour)
	left, _ := filepath.Glob(unfinished)
	for len(left) > 0 {
		if time.Now().After(end) {
			s.fault("unfinished uploads left", left)
			return
		}
		for _, path := range left {
			os.Chtimes(path, old, old) // it may just have been swept
		}
		time.Sleep(time.Second)
		left, _ = filepath.Glob(unfinished)
	}
}

// report prints the table.
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
	fmt.Fprintf(
		&table,
		"Compared with the tables and the disk: %d acknowledged writes, %d codes.\n",
		s.ledger.Acknowledged(),
		len(s.codes),
	)
	fmt.Println(&table)
	for _, kind := range slices.Sorted(maps.Keys(s.faults)) {
		s.t.Errorf("%s: %d times, such as after %s", kind, s.faults[kind], s.examples[kind])
	}
}
