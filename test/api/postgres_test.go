package api

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// TestPostgresVersion prints the version of PostgreSQL that the tests run against. .ci/run, which
// runs them against five versions, looks for that line. If HUBS_PG_BIN is set, the version must be
// that of the programs in this folder. Otherwise .ci/run could run one version five times.
func TestPostgresVersion(t *testing.T) {
	t.Parallel()
	const oldest = 14
	major := hubstest.Query[int](t, hubstest.NewDatabase(t),
		"select current_setting('server_version_num')::int / 10000")
	fmt.Fprintln(t.Output(), "ran against PostgreSQL", major)
	if major < oldest {
		t.Errorf("got PostgreSQL %d, want %d or newer", major, oldest)
	}
	folder := os.Getenv("HUBS_PG_BIN")
	if folder == "" {
		return
	}
	version, err := exec.Command(folder+"/postgres", "--version").Output()
	hubstest.Must(t, err)
	if !strings.Contains(string(version), fmt.Sprintf(" %d.", major)) {
		t.Errorf("got PostgreSQL %d, want the version in HUBS_PG_BIN: %s", major, version)
	}
}
