package api

import (
	"fmt"
	"testing"

	"hubs/internal/hubstest"
)

// TestPostgresVersion prints the version of PostgreSQL that the tests run against. .ci/run, which
// runs them against several versions, looks for that line.
func TestPostgresVersion(t *testing.T) {
	t.Parallel()
	major := hubstest.Query[int](t, hubstest.NewDatabase(t),
		"select current_setting('server_version_num')::int / 10000")
	fmt.Fprintln(t.Output(), "ran against PostgreSQL", major)
}
