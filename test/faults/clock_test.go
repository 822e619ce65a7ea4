package faults

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A clockedPostgres is a PostgreSQL of one test whose clock the test can set. All of its processes see
// the clock of libfaketime.
type clockedPostgres struct {
	*hubstest.Postgres
	file string // what libfaketime reads before each look at the clock
}

// newClockedPostgres starts a PostgreSQL whose clock is right, with the schema and the server's role.
// It skips the test if libfaketime is missing.
func newClockedPostgres(t testing.TB) *clockedPostgres {
	t.Helper()
	faketime := hubstest.Need(t, "faketime", "faketime")
	library, err := exec.Command(faketime, "-f", "+0", "sh", "-c", `printf %s "$LD_PRELOAD"`).Output()
	hubstest.Must(t, err)
	pg := &clockedPostgres{file: hubstest.NewPath("clock")}
	pg.SetClock(t, 0)
	pg.Postgres = hubstest.StartPostgres(t, hubstest.NewPath("clocked"),
		"LD_PRELOAD="+strings.TrimSpace(string(library)),
		"FAKETIME_TIMESTAMP_FILE="+pg.file,
		"FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1")
	hubstest.Must(t, hubstest.SetUp(pg.URL))
	return pg
}

// SetClock sets PostgreSQL's clock to the right time and ahead more, or less if ahead is negative.
func (pg *clockedPostgres) SetClock(t testing.TB, ahead time.Duration) {
	t.Helper()
	hubstest.WriteFile(t, pg.file, fmt.Sprintf("%+ds", int(ahead.Seconds())))
}
