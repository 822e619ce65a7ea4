package soak

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"hubs/internal/hubstest"
)

const (
	hold = 4 * time.Second // how long each failure lasts
	rest = 2 * time.Second // between two
)

// A failure is one way in which something fails that the servers stand on.
type failure struct {
	name   string
	shows  string // an answer that it must cause; "" if nobody may notice
	isLate bool   // it shows once a client has lost patience, perhaps after the failure
	run    func()
}

// mailFailure is a mail server that fails for so long.
func (s *soak) mailFailure(name string, mode hubstest.MailMode, d time.Duration) failure {
	return failure{name: name, shows: noCode, isLate: true, run: func() {
		s.mail.Fail(mode)
		time.Sleep(d)
		s.mail.Release()
	}}
}

// failures returns all kinds that this machine can have.
func (s *soak) failures() []failure {
	const (
		noDatabase = "503 unavailable"
		noDisk     = "507 insufficient_storage"
	)
	first := s.servers[0]
	list := []failure{
		{name: "PostgreSQL killed", shows: noDatabase, run: func() {
			s.pg.Crash(syscall.SIGKILL)
			s.hold()
			s.pg.Start()
		}},
		s.mailFailure("mail server hangs", hubstest.MailHangs, 4*hold),
		{name: "PostgreSQL hung", shows: noDatabase, run: func() {
			s.pg.Pause()
			s.hold()
			s.pg.Resume()
		}},
		{name: "server restarted", shows: noServer, run: func() {
			s.restart(first)
		}},
		{name: "FILES_DIR gone", shows: noDatabase, run: s.moveFiles},
		{name: "PostgreSQL restarted", shows: noDatabase, run: func() {
			s.pg.Stop()
			s.pg.Start()
		}},
		{name: "column type changed", run: s.changeColumn},
		s.mailFailure("mail server greets for ever", hubstest.MailFloods, 4*hold),
		{name: "server killed", shows: noServer, run: func() {
			first.end(s.t, syscall.SIGKILL)
			first.start(s.t)
		}},
		s.mailFailure("mail server refuses", hubstest.MailRefuses, hold),
		{name: "machine of PostgreSQL lost", shows: noDatabase, run: func() {
			s.pg.Lose()
			s.hold()
			s.pg.Start()
		}},
	}
	if s.isSmall {
		list = append(list, failure{name: "disk full", shows: noDisk, run: s.fillDisk})
	} else {
		s.event("disk full: NOT TRIED, it needs root")
	}
	if exec.Command("strace", "true").Run() == nil {
		list = append(list, failure{name: "uploads end on a slow disk", run: s.slowUploads})
	} else {
		s.event("uploads end on a slow disk: NOT TRIED, it needs strace")
	}
	return list
}

// failAll runs one failure after the other until the time is over, each at least once.
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

// fail lets something fail, waits until all is well again, and checks that the failure showed.
func (s *soak) fail(f failure) {
	before := s.seen(f.shows)
	f.run()
	back := s.waitBack(f.name)
	seen := s.seen(f.shows) - before
	if f.shows == "" {
		s.event("%-28s back after %5.1f s", f.name, back.Seconds())
	} else {
		s.event("%-28s back after %5.1f s, %5d times: %s", f.name, back.Seconds(), seen, f.shows)
	}
	if f.shows != "" && seen == 0 && !f.isLate {
		s.fault("a failure that did not show", f.name)
	}
	time.Sleep(rest)
}

func (s *soak) hold() {
	time.Sleep(hold)
}

func (s *soak) restart(server *server) {
	if status := server.end(s.t, syscall.SIGTERM); status != 0 {
		s.fault("a server that did not stop well", fmt.Sprint("exit status ", status))
	}
	server.start(s.t)
}

// moveFiles takes FILES_DIR away for a while, as a mount that is lost.
func (s *soak) moveFiles() {
	away := s.dir + ".away"
	if err := os.Rename(s.dir, away); err != nil {
		s.t.Error(err)
	}
	s.hold()
	if err := os.Rename(away, s.dir); err != nil {
		s.t.Error(err)
	}
}

func (s *soak) fillDisk() {
	ballast, err := os.Create(filepath.Join(filepath.Dir(s.dir), "ballast"))
	if err != nil {
		s.t.Error(err)
		return
	}
	zero, err := os.Open("/dev/zero")
	if err != nil {
		s.t.Error(err)
		return
	}
	defer zero.Close()
	io.Copy(ballast, zero) // until there is no room
	s.hold()
	ballast.Close()
	os.Remove(ballast.Name())
}

// changeColumn changes a column's type and back, which breaks every prepared statement on it.
func (s *soak) changeColumn() {
	for _, kind := range []string{"varchar(3000)", "text"} {
		hubstest.Exec(s.t, s.pg.URL, "alter table hubs alter column description type "+kind)
		s.hold()
	}
}

// slowUploads delays every fsync of one server while a hundred uploads end together. Each is
// answered, and so is everybody else.
func (s *soak) slowUploads() {
	server := s.servers[1]
	var members []*client // signed in first: to attach strace may stop the server for seconds
	for range 10 {
		members = append(members, s.member(server, "member"))
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
		for range 10 { // uploads at once
			uploads.Go(func() {
				s.ledger.Upload(member.expecting("201"))
			})
		}
	}
	uploads.Wait()
	slow.Process.Signal(syscall.SIGTERM)
	slow.Wait()
}
