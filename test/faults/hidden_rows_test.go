package faults

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// hidings are statements that hide rows of a table from the server's role, %s being the table. None
// of them takes a right away, so PostgreSQL reports no error by itself.
var hidings = map[string]string{
	"all rows":                "alter table %s enable row level security",
	"all rows, forced":        "alter table %s enable row level security; alter table %s force row level security",
	"some rows":               "alter table %s enable row level security; create policy part on %s using (random() < 0.5)",
	"no row, but by a policy": "alter table %s enable row level security; create policy whole on %s using (true)",
}

func hide(statement, table string) string { return strings.ReplaceAll(statement, "%s", table) }

// show undoes each of the hidings.
const show = `alter table %s disable row level security; alter table %s no force row level security;
	drop policy if exists part on %s; drop policy if exists whole on %s`

var tablesOfServer = []string{"users", "terms_acceptances", "hubs", "files"}

// D8: While a policy could hide rows of any table, no answer is empty that looks true: requests that
// need the table fail, and so does /healthz. Nobody loses a session. Afterwards, all is as before.
func TestHiddenRowsAreAnError(t *testing.T) {
	t.Parallel()
	s, admin := start(t)
	s.AllowErrorsWithAnyOf("failed")
	hub, file := fillService(t, admin)
	needs := map[string][]string{
		"users":             {"/auth/session", "/hubs", hub, file},
		"terms_acceptances": {"/auth/session", "/hubs", hub, file},
		"hubs":              {"/hubs", "/hubs?filters[name]=n", hub},
		"files":             {file},
	}
	for name, hiding := range hidings {
		for _, table := range tablesOfServer {
			s.exec(hide(hiding, table))
			get(admin, "/healthz").Want(t, 503)
			for _, path := range needs[table] {
				if r := get(admin, path); r.Status < 500 {
					t.Errorf("%s of %s hidden: got the answer %v, want an error", name, table, r)
				}
			}
			s.exec(hide(show, table))
			get(admin, "/healthz").Want(t, 200)
		}
	}
	s.wantUnchanged(admin, hub, file)
}

// D8: The server does not start while a policy could hide rows of any table, and says so.
func TestHiddenRowsPreventTheStart(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	for name, hiding := range hidings {
		for _, table := range tablesOfServer {
			hubstest.Exec(t, database, hide(hiding, table))
			cmd := exec.Command(hubstest.Binary(), "serve")
			_, err := hubstest.TryStart(t, cmd, map[string]string{"DATABASE_URL": database})
			if err == nil {
				t.Fatalf("%s of %s hidden: the server has started", name, table)
			}
			isNamed := strings.Contains(err.Error(), "row-level security")
			if !isNamed || cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("%s of %s hidden: got exit status %d, %v, want 1 and row-level security named",
					name, table, cmd.ProcessState.ExitCode(), err)
			}
			hubstest.Exec(t, database, hide(show, table))
		}
	}
}

// D8: While a policy could hide rows of a table, a command that needs it fails and says so.
func TestCommandsReportHiddenRows(t *testing.T) {
	t.Parallel()
	s, _ := start(t)
	email, _ := s.NewUser(t, "member")
	role, owner := hubstest.NewRole(t, s.Database)
	for _, table := range append([]string{"account_changes"}, tablesOfServer...) {
		hubstest.Exec(t, s.Database, "alter table "+table+" owner to "+role)
	}
	env := map[string]string{"DATABASE_URL": owner, "FILES_DIR": s.Env["FILES_DIR"]}
	commands := map[string][]string{
		"users": {"user list", "user show " + email, "user history " + email, "user export " + email,
			"user suspend " + email, "user role " + email + " member", "user delete -files " + email},
		"terms_acceptances": {"user show " + email, "user export " + email},
		"account_changes":   {"user history " + email, "user export " + email},
		"files":             {"user export " + email, "user delete " + email, "user delete -files " + email},
	}
	for table, lines := range commands {
		hubstest.Exec(t, s.Database, hide(hidings["all rows, forced"], table))
		for _, line := range lines {
			status, output := hubstest.Run(t, env, strings.Fields(line)...)
			if status != 1 || !strings.Contains(output, "a policy hides rows") {
				t.Errorf("%s hidden: %s: got exit status %d, %q, want 1 and the policy named", table, line, status, output)
			}
		}
		hubstest.Exec(t, s.Database, hide(show, table))
	}
}

// A role from which row-level security hides nothing works: one with BYPASSRLS, or the owner, unless
// it is forced.
func TestRowLevelSecurityThatHidesNothing(t *testing.T) {
	t.Parallel()
	for name, grant := range map[string]string{
		"bypassrls": "alter role %s bypassrls; grant select, insert, update, delete on all tables in schema public to %s",
		"owner": `alter table users owner to %s; alter table terms_acceptances owner to %s;
			alter table hubs owner to %s; alter table files owner to %s`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			role, through := hubstest.NewRole(t, database)
			hubstest.Exec(t, database, hide(grant, role))
			for _, table := range tablesOfServer {
				hubstest.Exec(t, database, hide(hidings["all rows"], table))
			}
			server := hubstest.Start(t, map[string]string{"DATABASE_URL": through})
			server.Database = database
			s, admin := newService(t, server)
			hub, file := fillService(t, admin)
			get(admin, "/healthz").Want(t, 200)
			s.wantUnchanged(admin, hub, file)
		})
	}
}

// D8: The sweep removes no bytes because their row is hidden, even if PostgreSQL reports no hidden
// rows because the setting for that has got lost.
func TestSweepKeepsFilesWithHiddenRows(t *testing.T) {
	t.Parallel()
	for name, setting := range map[string]string{"as set": "row_security = off", "lost": "row_security =  on"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			broken, through := newBrokenPostgres(t, database)
			broken.Replace("row_security = off", setting)
			s, admin := startOn(t, through)
			s.Database = database
			s.AllowErrorsWithAnyOf("sweep", "failed")
			file := admin.Store("a.txt", "content")
			id := strings.Split(file, "/")[2]
			s.exec(hide(hidings["all rows"], "files"))
			s.putFiles(24*time.Hour, hubstest.Unfinished+"/"+id) // as after a crash before its removal

			// The next sweep comes within a minute.
			limit := time.After(time.Minute + hubstest.Patience)
			for s.Log.Count(`"level":"ERROR"`, "sweep", id) == 0 {
				select {
				case <-limit:
					t.Fatalf("got no error of the sweep, which can't know the row; the log ends:\n%s", s.Log.End())
				case <-time.After(50 * time.Millisecond):
				}
				if _, err := os.Stat(filepath.Join(s.Env["FILES_DIR"], id)); err != nil {
					t.Fatalf("the bytes of the file are gone: %v", err)
				}
			}
			s.exec(hide(show, "files"))
			admin.WantFile(file, "content")
		})
	}
}
