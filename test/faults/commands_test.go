package faults

import (
	"database/sql"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// D1: A user command does not retry its statement either. If "user add" sent its insert again, it
// would find the user that the first one added, and would report that nothing was changed.
func TestCommandIsNotDoneTwice(t *testing.T) {
	t.Parallel()
	s, _ := startBehindProxy(t)
	email := hubstest.NewEmail()
	s.loseAnswerTo(email)
	status, output := hubstest.Run(t, s.Env, "user", "add", email)
	if status != 1 || strings.Contains(output, "nothing") {
		t.Errorf("got exit status %d, %q, want exit status 1, and an error that does not say \"nothing\"",
			status, output)
	}
	s.wantRows(1, "users where email = $1", email)
}

// A command has no time limit: deleting a user with many files takes long. Here, it waits for a lock
// for longer than the two seconds that the server gives a statement.
func TestCommandsHaveNoTimeLimit(t *testing.T) {
	t.Parallel()
	s, _ := start(t)
	_, email := s.Member(t, "member")
	tx := s.lock("users")
	var status int
	var output string
	var command sync.WaitGroup
	command.Go(func() { status, output = hubstest.Run(t, s.Env, "user", "delete", email) })
	s.waitForLocks(1)
	time.Sleep(3 * time.Second)
	tx.Rollback()
	command.Wait()
	if status != 0 {
		t.Errorf("got exit status %d, %q, want 0", status, output)
	}
	s.wantRows(0, "users where email = $1", email)
}

// Limits of time that a role or its database sets do not end a command, whether it waits for a lock
// or the database waits for it. Only the server has limits.
func TestCommandsIgnoreTimeLimits(t *testing.T) {
	t.Parallel()
	const limit, longer = "'400ms'", 600 * time.Millisecond
	for place, alter := range map[string]string{
		"of the role":                 "alter role OWNER set NAME = " + limit,
		"of the database":             "alter database DATABASE set NAME = " + limit,
		"of the role in the database": "alter role OWNER in database DATABASE set NAME = " + limit,
	} {
		t.Run(place, func(t *testing.T) {
			t.Parallel()
			database := hubstest.EmptyDatabase(t, "")
			owner, asOwner := hubstest.NewRole(t, database)
			name := hubstest.Query[string](t, database, "select current_database()")
			hubstest.Exec(t, database,
				"drop schema public cascade; create schema public authorization "+owner)
			lock := lockOfMigrate(t, database) // by a connection that has no limits yet
			for _, setting := range []string{
				"statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout",
			} {
				words := strings.NewReplacer("OWNER", owner, "DATABASE", name, "NAME", setting)
				hubstest.Exec(t, database, words.Replace(alter))
			}
			time.AfterFunc(longer, func() { lock.Rollback() })
			start := time.Now()
			if err := hubstest.Migrate(asOwner); err != nil {
				t.Errorf("migrate: got the error %v, want none", err)
			}
			if took := time.Since(start); took < longer {
				t.Fatalf("setup: migrate has not waited for the lock: %v", took)
			}

			proxy, through := faultProxyURL(t, asOwner)
			env := hubstest.ServerEnv(t, map[string]string{"DATABASE_URL": through})
			hubstest.Must(t, os.Mkdir(env["FILES_DIR"]+"/"+hubstest.Unfinished, 0o700))
			email := hubstest.NewEmail()
			hubstest.Run(t, env, "user", "add", email)
			proxy.When("delete from files", func() { time.Sleep(longer) })
			status, output := hubstest.Run(t, env, "user", "delete", "-files", email)
			if status != 0 {
				t.Errorf("user delete -files: got exit status %d, %s", status, output)
			}
		})
	}
}

// lockOfMigrate takes the lock that migrate takes first, until the transaction ends.
func lockOfMigrate(t *testing.T, database string) *sql.Tx {
	t.Helper()
	key := hubstest.Matches(t, "schema.sql", `pg_advisory_xact_lock\((\d+)\)`)
	tx, err := hubstest.OpenDB(t, database).Begin()
	hubstest.Must(t, err)
	t.Cleanup(func() { tx.Rollback() })
	_, err = tx.Exec("select pg_advisory_xact_lock(" + key[0] + ")")
	hubstest.Must(t, err)
	return tx
}
