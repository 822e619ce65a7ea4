package soak

import (
	"fmt"
	"syscall"
	"time"

	"hubs/internal/hubstest"
)

const (
	hold = 3 * time.Second // duration of most failures: longer than a statement may take
	rest = time.Second     // pause between two failures
)

// A failure is one way in which a server, PostgreSQL, the mail server or the disk fails.
type failure struct {
	name  string
	shows string // an answer that it must cause; "" if it need not cause any
	run   func() // begins the failure and ends it
}

// noDatabase is the answer while PostgreSQL is away.
const noDatabase = "503 unavailable"

// databaseFailure returns a failure of PostgreSQL, which begin begins and end ends.
func (s *soak) databaseFailure(name string, begin, end func()) failure {
	return failure{name: name, shows: noDatabase, run: func() {
		begin()
		time.Sleep(hold)
		end()
	}}
}

// failures returns all failures.
func (s *soak) failures() []failure {
	kill := func() { s.pg.Crash(syscall.SIGKILL) }
	first := s.servers[0]
	return []failure{
		s.databaseFailure("PostgreSQL killed", kill, s.pg.Start),
		s.databaseFailure("PostgreSQL hung", s.pg.Pause, s.pg.Resume),
		{name: "server restarted", shows: noServer, run: func() {
			s.restart(first)
		}},
		{name: "PostgreSQL restarted", shows: noDatabase, run: func() {
			s.pg.Stop()
			s.pg.Start()
		}},
		{name: "server killed", shows: noServer, run: func() {
			first.end(s.t, syscall.SIGKILL)
			first.start(s.t)
		}},
		s.databaseFailure("machine of PostgreSQL lost", s.pg.Lose, s.pg.Start),
		// Clients notice this late: a code comes only after the failure, or not at all.
		{name: "mail server hangs", run: func() {
			s.mail.Fail(hubstest.MailHangs)
			time.Sleep(4 * hold) // longer than a conversation may take
			s.mail.Release()
		}},
	}
}

// failAll runs one failure after the other until the given time, and each at least once.
func (s *soak) failAll(until time.Time) {
	all := s.failures()
	for round := 0; round == 0 || time.Now().Before(until); round++ {
		for _, f := range all {
			if round > 0 && time.Now().After(until) {
				return
			}
			s.fail(f)
		}
	}
}

// fail runs a failure and waits until both servers sign users in again. If the failure has not
// caused the answer that it must cause, that is a fault.
func (s *soak) fail(f failure) {
	before := s.seen(f.shows)
	f.run()
	row := fmt.Sprintf("%-28s back after %5.1f s", f.name, s.waitBack(f.name).Seconds())
	if f.shows != "" {
		seen := s.seen(f.shows) - before
		row += fmt.Sprintf(", %5d times: %s", seen, f.shows)
		if seen == 0 {
			s.fault("a failure that no client noticed", f.name)
		}
	}
	s.event("%s", row)
	time.Sleep(rest)
}

// restart stops a server with SIGTERM and starts it again. An exit status other than 0 is a fault.
func (s *soak) restart(server *server) {
	if status := server.end(s.t, syscall.SIGTERM); status != 0 {
		s.fault("a server that did not stop cleanly",
			fmt.Sprintf("got exit status %d, want 0", status))
	}
	server.start(s.t)
}
