package soak

import (
	"fmt"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"hubs/internal/hubstest"
)

const (
	hold = 4 * time.Second // duration of most failures
	rest = 2 * time.Second // pause between two failures
)

// A failure is one way in which a server, PostgreSQL, the mail server or the disk fails.
type failure struct {
	name  string
	shows string // an answer that it must cause; "" if it need not cause any
	run   func() // begins the failure and ends it
}

// mailFailure returns a failure of the mail server, in the given mode, that lasts for d. Clients
// notice it late: a code comes only after the failure, or not at all.
func (s *soak) mailFailure(name string, mode hubstest.MailMode, d time.Duration) failure {
	return failure{name: name, run: func() {
		s.mail.Fail(mode)
		time.Sleep(d)
		s.mail.Release()
	}}
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

// failures returns all failures. That of a slow disk needs strace, which must be permitted to
// trace.
func (s *soak) failures() []failure {
	kill := func() { s.pg.Crash(syscall.SIGKILL) }
	first := s.servers[0]
	all := []failure{
		s.databaseFailure("PostgreSQL killed", kill, s.pg.Start),
		s.mailFailure("mail server hangs", hubstest.MailHangs, 4*hold),
		s.databaseFailure("PostgreSQL hung", s.pg.Pause, s.pg.Resume),
		{name: "server restarted", shows: noServer, run: func() {
			s.restart(first)
		}},
		{name: "PostgreSQL restarted", shows: noDatabase, run: func() {
			s.pg.Stop()
			s.pg.Start()
		}},
		s.mailFailure("mail server greets for ever", hubstest.MailFloods, hold),
		{name: "server killed", shows: noServer, run: func() {
			first.end(s.t, syscall.SIGKILL)
			first.start(s.t)
		}},
		s.mailFailure("mail server refuses", hubstest.MailRefuses, hold),
		s.databaseFailure("machine of PostgreSQL lost", s.pg.Lose, s.pg.Start),
	}
	if err := exec.Command("strace", "true").Run(); err != nil {
		s.event("NOT TRIED: uploads end on a slow disk: %v", err)
		return all
	}
	return append(all, failure{name: "uploads end on a slow disk", run: s.slowUploads})
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

// slowUploads delays every fsync of one server by two seconds, while 100 uploads end at about the
// same time. The server must answer each upload, and all other requests meanwhile.
func (s *soak) slowUploads() {
	server := s.servers[1]
	// Sign in first, because attaching strace may stop the server for seconds.
	var members []*client
	for range 10 {
		members = append(members, s.signedIn(server, "member"))
	}
	slow := exec.Command(
		"strace", "-f", "-qq",
		"-o", "/dev/null",
		"-e", "trace=fsync,fdatasync",
		"-e", "inject=fsync,fdatasync:delay_enter=2000000",
		"-p", fmt.Sprint(server.Cmd.Process.Pid),
	)
	if err := slow.Start(); err != nil {
		s.t.Error(err)
		return
	}
	var uploads sync.WaitGroup
	for _, member := range members {
		for range 10 {
			uploads.Go(func() {
				s.ledger.Upload(member.expecting("201"))
			})
		}
	}
	uploads.Wait()
	slow.Process.Signal(syscall.SIGTERM)
	slow.Wait()
}
