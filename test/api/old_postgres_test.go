//go:build moving

package main

import (
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"testing"
)

// The oldest PostgreSQL that the server is tested against.
const oldestPostgres = 14

// TestPostgresVersion says which PostgreSQL the tests of this run had. With HUBS_PG_BIN
// it must be the one in that folder: a check of five versions that always ran the same
// one would pass and tell nothing. .ci/run reads the log line.
func TestPostgresVersion(t *testing.T) {
	t.Parallel()
	pg, err := startShared()
	if err != nil {
		t.Fatal("no PostgreSQL: ", err)
	}

	number := queryValue[int](t, pg.url, "select current_setting('server_version_num')::int")
	major := number / 10000
	t.Logf("ran against PostgreSQL %d", major)
	if major < oldestPostgres {
		t.Errorf("PostgreSQL %d is older than %d", major, oldestPostgres)
	}

	folder := os.Getenv("HUBS_PG_BIN")
	if folder == "" {
		return
	}
	out, err := exec.Command(folder+"/postgres", "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	asked := regexp.MustCompile(`[0-9]+`).FindString(string(out))
	if asked != strconv.Itoa(major) {
		t.Errorf("HUBS_PG_BIN has PostgreSQL %s, the tests ran against %d", asked, major)
	}
}
