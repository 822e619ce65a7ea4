package faults

import (
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A brokenWorld is a unit whose database can break PostgreSQL's protocol.
type brokenWorld struct {
	*service
	database *brokenPostgres
	admin    *hubstest.Client
	work     sync.WaitGroup // requests under way
}

func startBroken(t *testing.T) *brokenWorld {
	t.Helper()
	database := hubstest.NewDatabase(t)
	broken, through := newBrokenPostgres(t, database)
	unit := startUnit(t, hubstest.NewMailServer(t, hubstest.MailOptions{}).Env(),
		map[string]string{"DATABASE_URL": through}, hubstest.Quiet)
	unit.AllowErrorsWithAnyOf("")
	unit.Database = database
	t.Cleanup(func() {
		// Servers say there why they don't start, but none may crash.
		if unit.Stderr.Count("goroutine ") > 0 {
			t.Errorf("standard error: got a crash:\n%.5000s", unit.Stderr)
		}
		unit.Stderr = &hubstest.Log{}
	})
	s, admin := newService(t, unit)
	return &brokenWorld{service: s, database: broken, admin: admin}
}

// askAtOnce sends more requests at the same time than the server has connections, and does not wait
// for the answers: none may come before the database is well again.
func (w *brokenWorld) askAtOnce(request string, body any) {
	for range pool + 2 {
		w.work.Go(func() { w.admin.Elsewhere().Try(request, body) })
	}
}

// A moment is a piece of the server's work with the database.
type moment struct {
	statement string // what Break breaks
	work      func(*brokenWorld)
}

var moments = map[string]moment{
	"opening a connection": {opening, func(w *brokenWorld) {
		w.database.Drop()
		w.askAtOnce("GET /auth/session", nil)
	}},
	"a read": {"from hubs", func(w *brokenWorld) { w.askAtOnce("GET /hubs", nil) }},
	"a write": {"insert into hubs", func(w *brokenWorld) {
		w.askAtOnce("POST /hubs", `{"name":"North"}`)
	}},
	"the work of a code": {"", (*brokenWorld).askCodes},
	"the sweep":          {"from files where file_id", (*brokenWorld).sweep},
	"/healthz":           {"", func(w *brokenWorld) { w.askAtOnce("GET /healthz", nil) }},
}

// askCodes asks for codes of users, which the server makes after its answers.
func (w *brokenWorld) askCodes() {
	for _, email := range addUsers(w.t, w.Server, pool+2) {
		w.work.Go(func() {
			w.admin.Elsewhere().Try("POST /auth/otp/request", map[string]string{"email": email})
		})
	}
}

// sweep starts a server that finds uploads which were never finished.
func (w *brokenWorld) sweep() {
	for range 3 {
		w.putFiles(24*time.Hour, hubstest.Unfinished+"/"+hubstest.NewUUID())
	}
	broken := w.database.Broken()
	w.kill()
	hubstest.WaitUntil(w.t, "an answer to a sweep", func() bool { return w.database.Broken() > broken })
}

// kill ends the server that runs now. The unit starts another one.
func (w *brokenWorld) kill() {
	var last struct{ PID int }
	for _, line := range slices.Backward(w.Log.All()) {
		if strings.Contains(line, "unit: a server starts") {
			hubstest.Must(w.t, json.Unmarshal([]byte(line), &last))
			break
		}
	}
	starts := w.Log.Count("unit: a server starts")
	err := syscall.Kill(last.PID, syscall.SIGKILL)
	if err != syscall.ESRCH { // it may have ended by itself
		hubstest.Must(w.t, err)
	}
	hubstest.WaitUntil(w.t, "the next server", func() bool {
		return w.Log.Count("unit: a server starts") > starts
	})
}

// canBreak reports whether answers at a moment have a message that a flaw breaks.
func (m moment) canBreak(flaw flaw) bool {
	switch {
	case flaw.Kinds == "":
		return true
	case m.statement == opening:
		// The driver skips data after the end here, so nothing is broken.
		return strings.ContainsAny(flaw.Kinds, "RS")
	default:
		return flaw.Kinds != "R"
	}
}

// D7: Whatever the database, or what stands before it, does to PostgreSQL's protocol, and whenever it
// does so, the service is back within a minute of the end of that: no place of the pool is lost. The
// log says what was broken.
func TestServiceOutlivesBrokenProtocol(t *testing.T) {
	t.Parallel()
	for name, m := range moments {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := startBroken(t)
			for _, flaw := range flaws {
				if m.canBreak(flaw) && !t.Failed() { // each failure takes a minute
					w.suffer(m, flaw)
				}
			}
			// As a 500 of one request, a panic of the driver would cost a place in the pool each time.
			if n := w.Log.Count(`"msg":"failed"`, "panic in "); n > 0 {
				t.Errorf("got %d panics that ended a request, want each to end the process\n%s", n, w.Log.End())
			}
		})
	}
}

// suffer breaks the protocol at a moment, on connections that are in use and on new ones.
func (w *brokenWorld) suffer(m moment, flaw flaw) {
	t := w.t
	errors := w.Log.Count(`"level":"ERROR"`)
	w.database.Break(flaw, m.statement)
	m.work(w)
	w.database.Drop()
	m.work(w)
	hubstest.WaitUntil(t, "an answer to break: "+flaw.Name, func() bool { return w.database.Broken() > 0 })
	time.Sleep(time.Second) // nothing from outside shows that all of the work has begun
	w.database.Mend()
	mended := time.Now()

	// The error may come later than the first answers: the driver waits for the rest of a message.
	for !w.isWhole() || w.Log.Count(`"level":"ERROR"`) == errors {
		if time.Since(mended) > time.Minute {
			t.Errorf("%s: a minute later, the service is not back, or no error is in the log, which ends:\n%s",
				flaw.Name, w.Log.End())
			w.kill()
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	w.work.Wait()
}

// isWhole reports whether the server can do its work, on all of its connections at once.
func (w *brokenWorld) isWhole() bool {
	r, _ := w.admin.Elsewhere().Try("GET /healthz", nil)
	if r.Status != 200 {
		return false
	}
	r, _ = w.admin.Elsewhere().Try("POST /hubs", `{"name":"South"}`)
	if r.Status != 201 {
		return false
	}
	answers := hubstest.SendAtOnce(w.t, 2*pool, func() *hubstest.Response {
		r, _ := w.admin.Elsewhere().Try("GET /hubs", nil)
		return r
	})
	return hubstest.CountStatuses(answers)[200] == 2*pool
}

// D7: A machine that was paused while the driver worked, such as a laptop, does not count as a driver
// that does not return: the server goes on, for as long as it may work without a pause.
func TestPauseWhileTheDriverWorks(t *testing.T) {
	t.Parallel()
	database, through := newBrokenPostgres(t, hubstest.NewDatabase(t))
	s, c := start(t, map[string]string{"DATABASE_URL": through}, hubstest.Quiet)
	s.AllowErrorsWithAnyOf("")
	database.Break(flaw{Kinds: "R", Break: endlessHash}, opening)
	database.Drop()
	answers := hubstest.SendAtOnce(t, 1, func() *hubstest.Response {
		r, _ := c.Elsewhere().Try("GET /auth/session", nil)
		return r
	})
	hubstest.WaitUntil(t, "a driver that works", func() bool { return database.Broken() > 0 })
	s.Signal(t, syscall.SIGSTOP)
	time.Sleep(35 * time.Second) // longer than the driver may take
	s.Signal(t, syscall.SIGCONT)
	select {
	case <-s.Done:
		t.Errorf("the server has ended after a pause; its log ends:\n%s", s.Log.End())
	case <-time.After(10 * time.Second): // two ticks
	}
	s.Signal(t, syscall.SIGKILL)
	<-answers
}

// D7: A machine that was paused with statements under way, such as a laptop, does not count as a driver
// that does not return: the server goes on.
func TestPausedServerGoesOn(t *testing.T) {
	t.Parallel()
	s, c := startBehindProxy(t)
	s.AllowErrorsWithAnyOf(unavailable)
	s.proxy.Hang()
	answers := hubstest.SendAtOnce(t, pool, func() *hubstest.Response {
		r, _ := c.Elsewhere().Try("GET /auth/session", nil) // its time is over when the machine goes on
		return r
	})
	hubstest.WaitUntil(t, "statements under way", func() bool { return s.proxy.Connections() >= pool/2 })
	hubstest.Must(t, s.Cmd.Process.Signal(syscall.SIGSTOP))
	time.Sleep(40 * time.Second) // longer than the driver may take
	s.proxy.Resume()
	hubstest.Must(t, s.Cmd.Process.Signal(syscall.SIGCONT))
	hubstest.CountStatuses(answers)
	for range 2 * pool {
		get(c, "/auth/session").Want(t, 200)
	}
}
