package faults

import (
	"cmp"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// startWriting starts four clients that write hubs, two that upload files, and one that reads. The
// ledger gets their writes.
func startWriting(
	t *testing.T, admin *hubstest.Client, ledger *ledger,
) *clients {
	t.Helper()
	write := func() *hubstest.Response {
		return ledger.writeHub(admin.Elsewhere())
	}
	upload := func() *hubstest.Response {
		return ledger.upload(admin.Elsewhere())
	}
	read := func() *hubstest.Response {
		return get(admin, "/hubs")
	}
	return startClients(t, write, write, write, write, upload, upload, read)
}

// D1, D2, D5: While PostgreSQL is stopped, lost or hung under load, every answer is a success or a
// 503. When it is back, the server works again without a restart, and every acknowledged write is
// stored exactly once. The server holds no connection and no goroutine of what has failed.
//
// ./dev.sh soak repeats the outages for minutes or hours. After the first round, the server's
// memory must not grow by more than 64 MB.
func TestLoadOutlivesTheDatabase(t *testing.T) {
	t.Parallel()
	pg := newPostgres(t)
	s, admin := startOn(t, pg.URL)
	s.AllowErrorsWithAnyOf(unavailable)
	ledger := newLedger(t)
	outages := []struct {
		away, back func(*postgres) // begin and end the outage
	}{
		{away: (*postgres).Stop, back: (*postgres).Start},
		{away: (*postgres).lose, back: (*postgres).Start},
		{away: (*postgres).pause, back: (*postgres).resume},
	}
	var memory int // after the first round
	minutes, err := strconv.Atoi(cmp.Or(os.Getenv("SOAK_MINUTES"), "0"))
	hubstest.Must(t, err)
	end := time.Now().Add(time.Duration(minutes) * time.Minute)
	for round := 0; round == 0 || time.Now().Before(end); round++ {
		for _, outage := range outages {
			guest := s.NewGuest(t)
			clients := startWriting(t, admin, ledger)
			clients.waitForSuccesses(10)
			outage.away(pg)
			clients.waitForOutage(2)
			outage.back(pg)
			clients.waitForSuccesses(20)
			clients.end()
			guest.Present(guest.Code).Want(t, 200)
		}
		used := hubstest.Memory(s.Cmd.Process.Pid, "VmRSS")
		fmt.Fprintf(t.Output(), "round %d: %d MB\n", round, used>>20)
		memory = cmp.Or(memory, used)
		if used > memory+64<<20 {
			t.Fatalf("memory: got %d MB, and %d MB after the first round", used>>20, memory>>20)
		}
	}
	ledger.checkRows(pg.URL)
	ledger.checkFiles(admin, pg.URL)
	s.wantNoLeaks()
}

// wantNoLeaks fails the test if the server has many descriptors open, or many goroutines. It ends
// the server. A system without /proc shows no descriptors.
func (s *service) wantNoLeaks() {
	t := s.t
	t.Helper()
	const most = 100 // a few for each of the clients, which are idle
	open, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.Cmd.Process.Pid))
	if len(open) > most {
		t.Errorf("descriptors: got %d, want at most %d", len(open), most)
	}
	s.Signal(t, syscall.SIGQUIT) // the Go runtime prints all goroutines on standard error
	s.WaitExit(t)
	goroutines := s.Stderr.Count("goroutine ", "]:")
	s.Stderr = &hubstest.Log{} // hubstest allows no output on standard error
	if goroutines == 0 || goroutines > most {
		t.Errorf("goroutines: got %d, want 1 to %d", goroutines, most)
	}
}
