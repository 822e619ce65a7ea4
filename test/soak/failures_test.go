package soak

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
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
	name  string
	shows string // an answer that it must cause; "" if nobody may notice
	run   func()
}

// failures returns all kinds.
func (s *soak) failures() []failure {
	const (
		noDatabase = "503 unavailable"
		noMail     = "codes that did not come"
		noServer   = "the server restarts"
		noDisk     = "507 insufficient_storage"
	)
	mailFails := func(mode hubstest.MailMode, d time.Duration) func() {
		return func() {
			s.mail.Fail(mode)
			time.Sleep(d)
			s.mail.Release()
		}
	}
	first := s.servers[0]
	return []failure{
		{"PostgreSQL killed", noDatabase, func() {
			s.pg.Crash(syscall.SIGKILL)
			s.hold()
			s.pg.Start()
		}},
		{"mail server hangs", noMail, mailFails(hubstest.MailHangs, 4*hold)},
		{"PostgreSQL hung", noDatabase, func() {
			s.pg.Pause()
			s.hold()
			s.pg.Resume()
		}},
		{"server restarted", noServer, func() {
			s.restart(first)
		}},
		{"FILES_DIR gone", noDatabase, s.moveFiles},
		{"PostgreSQL restarted", noDatabase, func() {
			s.pg.Stop()
			s.pg.Start()
		}},
		{"disk full", noDisk, s.fillDisk},
		{"column type changed", "", s.changeColumn},
		{"mail server greets for ever", noMail, mailFails(hubstest.MailFloods, 4*hold)},
		{"server killed", noServer, func() {
			first.end(s.t, syscall.SIGKILL)
			first.start(s.t)
		}},
		{"uploads end on a slow disk", "", s.slowUploads},
		{"mail server refuses", noMail, mailFails(hubstest.MailRefuses, hold)},
		{"machine of PostgreSQL lost", noDatabase, func() {
			s.pg.Lose()
			s.hold()
			s.pg.Start()
		}},
	}
}

// possible leaves those that this machine can have.
func (s *soak) possible(list []failure) []failure {
	possible := map[string]bool{
		"disk full":                  s.isSmall,
		"uploads end on a slow disk": exec.Command("strace", "true").Run() == nil,
	}
	return slices.DeleteFunc(list, func(f failure) bool {
		isPossible, isAsked := possible[f.name]
		if isAsked && !isPossible {
			s.event("%s: NOT TRIED, it needs root or strace", f.name)
		}
		return isAsked && !isPossible
	})
}

// failAll runs one failure after the other until the time is over, each at least once.
func (s *soak) failAll(until time.Time) {
	for round := 0; round == 0 || time.Now().Before(until); round++ {
		for _, f := range s.possible(s.failures()) {
			if round > 0 && time.Now().After(until) {
				return
			}
			s.fail(f)
		}
	}
}

func (s *soak) fail(f failure) {
	before := s.seen(f.shows)
	f.run()
	back := s.waitBack(f.name)
	seen := s.seen(f.shows) - before
	// That a code does not come shows only when its client has lost patience.
	isLate := strings.HasPrefix(f.name, "mail")
	if f.shows == "" {
		s.event("%-28s back after %5.1f s", f.name, back.Seconds())
	} else {
		s.event("%-28s back after %5.1f s, %5d times: %s", f.name, back.Seconds(), seen, f.shows)
	}
	if f.shows != "" && seen == 0 && !isLate {
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
	const users, each = 10, 10
	server := s.servers[1]
	slow := exec.Command(
		"strace", "-f", "-qq",
		"-o", "/dev/null",
		"-e", "trace=fsync,fdatasync",
		"-e", "inject=fsync,fdatasync:delay_enter=2000000",
		"-p", fmt.Sprint(server.cmd.Process.Pid),
	)
	if err := slow.Start(); err != nil {
		s.t.Error(err)
		return
	}
	var uploads sync.WaitGroup
	for range users {
		member := s.member(server, "member")
		for range each {
			uploads.Go(func() {
				s.ledger.Upload(member.expecting("201"))
			})
		}
	}
	uploads.Wait()
	slow.Process.Signal(syscall.SIGTERM)
	slow.Wait()
}
