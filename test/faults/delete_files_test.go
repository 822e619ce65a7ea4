package faults

import (
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// finishDelete runs user delete -files again after a run that has failed in some way. Then nothing may
// be left of the user but the files of others, which are kept in stored.
func finishDelete(t *testing.T, s *hubstest.Server, email string, stored int) {
	t.Helper()
	status, output := hubstest.Run(t, s.Env, "user", "delete", "-files", email)
	isGone := status == 1 && strings.Contains(output, "there is no user with this address")
	if status != 0 && !isGone {
		t.Errorf("run again: got exit status %d, %s, want 0, or no such user", status, output)
	}
	s.WantStored(t, stored)
	hubstest.WantEqual(t, "rows of the user", hubstest.Query[int](t, s.Database, `select
		(select count(*) from users where email = $1) + (select count(*) from files where user_id is null)`,
		email), 0)
}

// F3: If the connection to the database is lost at a statement of user delete -files, before or after
// PostgreSQL has run it, running the command again finishes.
func TestDeleteWithFilesWithoutTheDatabase(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	other, _ := s.Member(t, "member")
	path := other.Store("other.txt", "of another user")
	proxy, through := faultProxyURL(t, s.Env["DATABASE_URL"])
	env := map[string]string{"DATABASE_URL": through, "FILES_DIR": s.Env["FILES_DIR"]}
	for _, statement := range []string{
		"set timezone", "for update", "string_agg(file_id", "delete from files", "delete from users", "COMMIT",
	} {
		for _, isAnswered := range []bool{false, true} {
			_, email := s.Uploader(t, 2)
			cut := func() {
				proxy.Cut()
				proxy.Resume()
			}
			proxy.When(statement, func() {
				if isAnswered {
					proxy.WhenAnswered("", cut)
				} else {
					cut()
				}
			})
			status, output := hubstest.Run(t, env, "user", "delete", "-files", email)
			if status != 1 {
				t.Errorf("%s lost, answered %v: got exit status %d, %s, want 1", statement, isAnswered, status, output)
			}
			finishDelete(t, s, email, 1)
			other.WantFile(path, "of another user")
		}
	}
}
