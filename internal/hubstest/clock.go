package hubstest

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// A ClockedPostgres is a PostgreSQL of one test whose clock the test can set. All of its processes see
// the clock of libfaketime.
type ClockedPostgres struct {
	*Postgres
	file string // what libfaketime reads before each look at the clock
}

// NewClockedPostgres starts a PostgreSQL whose clock is right, with the schema and the server's role.
// It skips the test if libfaketime is missing.
func NewClockedPostgres(t testing.TB) *ClockedPostgres {
	t.Helper()
	needShared(t) // skips the test if PostgreSQL is not installed
	faketime := Need(t, "faketime", "faketime")
	library, err := exec.Command(faketime, "-f", "+0", "sh", "-c", `printf %s "$LD_PRELOAD"`).Output()
	Must(t, err)
	name := fmt.Sprintf("%s/clocked-%d", Dir, serial.Add(1))
	pg := &ClockedPostgres{file: name + ".clock"}
	pg.SetClock(t, 0)
	pg.Postgres = &Postgres{t: t, Dir: name, env: []string{
		"LD_PRELOAD=" + strings.TrimSpace(string(library)),
		"FAKETIME_TIMESTAMP_FILE=" + pg.file,
		"FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1",
	}}
	pg.Start()
	t.Cleanup(pg.Stop)
	Must(t, SetUp(pg.URL))
	return pg
}

// SetClock sets PostgreSQL's clock to the right time and ahead more, or less if ahead is negative.
func (pg *ClockedPostgres) SetClock(t testing.TB, ahead time.Duration) {
	t.Helper()
	WriteFile(t, pg.file, fmt.Sprintf("%+ds", int(ahead.Seconds())))
}
