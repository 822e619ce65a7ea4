package api

import (
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"hubs/internal/hubstest"
)

// user delete says how many files of the user stay. With -files, their rows and bytes go, and nobody
// else's. It ends the sessions of the user, and leaves a line in the history.
func TestDeleteWithFiles(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	other, _ := s.Uploader(t, 0)
	path := other.Store("other.txt", "of another user")
	leaver, leaverEmail := s.Uploader(t, 2)
	kept := leaver.Store("kept.txt", "kept")
	wantEqual(t, "user delete", s.User(t, "delete", leaverEmail),
		leaverEmail+": deleted; 3 uploaded files stay, and others can read them\n")
	other.WantFile(kept, "kept")
	s.WantStored(t, 4)

	c, email := s.Uploader(t, 3)
	upper := strings.ToUpper(email[:1]) + email[1:]
	status, output := run(t, s.Env, "user", "delete", upper, "-files")
	wantEqual(t, "exit status, with -files after the address", status, 2)
	wantParts(t, "output", output, "-files comes before the address")
	wantParts(t, "user delete -files", s.User(t, "delete", "-files", upper),
		": deleted, and 3 uploaded files; 0 of them were not in FILES_DIR")
	s.WantStored(t, 4)
	other.WantFile(path, "of another user")
	c.Get("/auth/session").WantProblem(t, 401, "unauthenticated")
	lines := historyOf(t, s, email)
	wantParts(t, "history", lines[len(lines)-1], "hubs user delete -files", "email: "+email+" → -")
	status, output = run(t, s.Env, "user", "delete", "-files", email)
	wantEqual(t, "exit status, run again", status, 1)
	wantParts(t, "output, run again", output, "there is no user with this address")

	nothing, _ := s.NewUser(t, "member")
	wantParts(t, "user without files", s.User(t, "delete", "--files=true", nothing), "and 0 uploaded files;")
	s.WantStored(t, 4)
}

// user delete -files changes nothing if FILES_DIR is not a folder that a server has used. In one that
// another server has used, it finds no bytes, and says so.
func TestDeleteWithFilesNeedsTheirFolder(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	_, email := s.Uploader(t, 2)
	empty := t.TempDir()
	for name, folder := range map[string]string{
		"unset":                  "",
		"empty":                  empty,
		"missing":                empty + "/x",
		"a file":                 hubstest.WriteFile(t, filepath.Join(t.TempDir(), "file"), "x"),
		"a folder of the folder": filepath.Join(s.Env["FILES_DIR"], hubstest.Unfinished),
		"in quotes":              `"` + s.Env["FILES_DIR"] + `"`,
	} {
		env := map[string]string{"DATABASE_URL": s.Env["DATABASE_URL"], "FILES_DIR": folder}
		status, output := run(t, env, "user", "delete", "-files", email)
		wantEqual(t, name+": exit status", status, 2)
		wantParts(t, name, output, "FILES_DIR: must")
		s.WantStored(t, 2)
	}
	wantEqual(t, "user", strings.Fields(s.User(t, "show", email))[0], email)
	foreign := hubstest.Start(t)
	env := map[string]string{
		"DATABASE_URL": s.Env["DATABASE_URL"],
		"FILES_DIR":    foreign.Env["FILES_DIR"],
	}
	status, output := run(t, env, "user", "delete", "-files", email)
	wantEqual(t, "exit status, in another server's folder", status, 0)
	wantParts(t, "another server's folder", output, "2 uploaded files; 2 of them were not in FILES_DIR")
}

// F3, W1: An upload of the user that is under way leaves nothing, whether it ends before or after the
// user is deleted, or just then.
func TestDeleteWithFilesBesideAnUpload(t *testing.T) {
	t.Parallel()
	t.Run("the upload ends later", func(t *testing.T) {
		s := hubstest.Start(t)
		c, email := s.Uploader(t, 1)
		upload := c.StartUpload("late.txt")
		s.User(t, "delete", "-files", email)
		upload.Finish().WantProblem(t, 401, "unauthenticated")
		s.WantStored(t, 0)
	})
	// The command has locked the user, and has not deleted it yet: a trigger makes it wait for the test.
	t.Run("the row waits for the command", func(t *testing.T) {
		s := hubstest.Start(t)
		c, email := s.Uploader(t, 1)
		upload := c.StartUpload("late.txt")
		hubstest.Exec(t, s.Database, `create function wait() returns trigger language plpgsql as $$
			begin perform pg_advisory_xact_lock(1); return null; end $$;
			create trigger wait before delete on files for each statement execute function wait()`)
		lock, err := hubstest.OpenDB(t, s.Database).Begin()
		hubstest.Must(t, err)
		defer lock.Rollback()
		_, err = lock.Exec("select pg_advisory_xact_lock(1)")
		hubstest.Must(t, err)
		var both sync.WaitGroup
		both.Go(func() {
			status, output := run(t, s.Env, "user", "delete", "-files", email)
			wantEqual(t, "exit status "+output, status, 0)
		})
		waitForLocks(t, s, 1)
		both.Go(func() { upload.Finish().WantProblem(t, 401, "unauthenticated") })
		waitForLocks(t, s, 2)
		lock.Rollback()
		both.Wait()
		s.WantStored(t, 0)
	})
	// The row of the upload is not committed yet when the command begins.
	t.Run("the command waits for the row", func(t *testing.T) {
		s := hubstest.Start(t)
		s.AllowErrorsWithAnyOf("no such file or directory")
		c, email := s.Uploader(t, 1)
		// After the check of the foreign key, which locks the user. PostgreSQL runs triggers by name.
		hubstest.Exec(t, s.Database, `create function wait() returns trigger language plpgsql as $$
			begin perform pg_sleep(0.5); return null; end $$;
			create trigger zz after insert on files for each row execute function wait()`)
		answer := make(chan *hubstest.Response, 1)
		go func() { answer <- c.Elsewhere().Upload("early.txt", []byte("content")) }()
		hubstest.WaitUntil(t, "the row of the upload is being written", func() bool {
			return hubstest.Query[bool](t, s.Database, `select exists (select from pg_stat_activity
				where datname = current_database() and wait_event = 'PgSleep')`)
		})
		out := s.User(t, "delete", "-files", email)
		wantParts(t, "user delete -files", out, "and 2 uploaded files; 0 of them were not in FILES_DIR")
		(<-answer).Want(t, 201)
		s.WantStored(t, 0)
	})
}

// waitForLocks waits until n connections to the server's database wait for a lock.
func waitForLocks(t *testing.T, s *hubstest.Server, n int) {
	t.Helper()
	hubstest.WaitFor(t, "connections that wait for a lock", n, func() int {
		return hubstest.Query[int](t, s.Database, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock'`)
	})
}
