package api

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// TestPostgresVersion says which PostgreSQL the tests ran against; .ci/run reads it. With
// HUBS_PG_BIN, that is the one in this folder: a check of five versions that always ran the same
// one would pass and tell nothing.
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
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(version), fmt.Sprintf(" %d.", major)) {
		t.Errorf("HUBS_PG_BIN has %s, but the tests ran against %d", version, major)
	}
}
