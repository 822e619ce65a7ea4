package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"hubs/internal/hubstest"
)

// N4: Each secret is changed while clients go on, as docs/runbook.md says. No request fails, nobody is signed
// out, and a mail gets out with each password. Each restart is one of hubs.service with hubs.socket:
// the next server starts when the last one has ended, on the same listening socket.
func TestSecretsAreChangedUnderLoad(t *testing.T) {
	t.Parallel()
	d := newRoleDatabase(t, "superuser")
	d.runRoles(t)
	setPassword(t, d, "hubs_server", rolePassword)
	mail := mailServerWithPassword(t, "old")
	secrets := secretFiles{dir: t.TempDir()}
	secrets.write(t, "DATABASE_URL", d.server)
	secrets.write(t, "SESSION_SECRET", "old-secret-of-more-than-thirty-two-bytes")
	secrets.write(t, "SMTP_URL", mail.URL)
	socket, _ := hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	s := secrets.start(t, socket, d, mail)
	user, _ := s.Member(t, "member")
	load := startLoad(t, user, func() string { return s.Addr })
	restart := func(mail *hubstest.MailServer) {
		t.Helper()
		s.Stop(t)
		s = secrets.start(t, socket, d, mail)
		load.waitForSuccesses(t, 50)
		s.Member(t, "member") // signs in by mail
	}

	// The database: servers use a second login while the password of the first one changes.
	hubstest.Exec(t, d.administrator, "create role hubs_change login in role hubs_server")
	setPassword(t, d, "hubs_change", "between")
	secrets.write(t, "DATABASE_URL", hubstest.WithUser(t, d.server, "hubs_change", "between"))
	restart(mail)
	s.Log.WaitFor(t, "member of hubs_server") // the only warning, as the runbook says
	setPassword(t, d, "hubs_server", "new")
	secrets.write(t, "DATABASE_URL", hubstest.WithUser(t, d.server, "hubs_server", "new"))
	restart(mail)
	hubstest.Exec(t, d.administrator, "drop role hubs_change")

	// Mail: the mail server takes both passwords for a while.
	mail = mailServerWithPassword(t, "new")
	secrets.write(t, "SMTP_URL", mail.URL)
	restart(mail)

	// The key: the old one still verifies.
	secrets.write(t, "SESSION_SECRET", "new-secret-of-more-than-thirty-two-bytes,old-secret-of-more-than-thirty-two-bytes")
	restart(mail)

	load.stop()
	hubstest.WantEqual(t, "warnings at the end", s.Log.Count(`"level":"WARN"`), 0)
	load.wantNoFailure(t)
}

func setPassword(t *testing.T, d roleDatabase, role, password string) {
	t.Helper()
	hubstest.Exec(t, d.administrator, "alter role "+role+" password '"+password+"'")
}

// mailServerWithPassword returns a mail server whose clients must sign in.
func mailServerWithPassword(t *testing.T, password string) *hubstest.MailServer {
	t.Helper()
	return hubstest.NewMailServer(t, hubstest.MailOptions{User: "hubs", Password: password})
}

// secretFiles is the folder /etc/hubs/secrets.
type secretFiles struct{ dir string }

func (f secretFiles) write(t *testing.T, name, value string) {
	t.Helper()
	hubstest.WriteFile(t, filepath.Join(f.dir, name), value+"\n")
}

// start starts a server with these secrets on a socket, as systemd does it.
func (f secretFiles) start(
	t *testing.T, socket *os.File, d roleDatabase, mail *hubstest.MailServer,
) *hubstest.Server {
	t.Helper()
	env := productionEnv(t)
	for _, name := range secretSettings {
		env[name] = ""
		env[name+"_FILE"] = filepath.Join(f.dir, name)
	}
	cmd := exec.Command("sh", "-c", `LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" serve`, hubstest.Binary())
	cmd.ExtraFiles = []*os.File{socket}
	s := hubstest.StartCommand(t, cmd, env, hubstest.Quiet)
	s.Database = d.owner
	s.Mail = mail
	return s
}
