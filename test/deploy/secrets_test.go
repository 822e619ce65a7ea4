package deploy

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// Each secret is changed while clients go on, as docs/runbook.md says. No request fails, nobody is signed
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
	load := startLoad(t, s, user)
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
	if load.failures.Load() > 0 {
		t.Errorf("got %d of %d requests that failed, want none: %s",
			load.failures.Load(), load.failures.Load()+load.successes.Load(), load.first.Load())
	}
	t.Logf("%d requests, %d failed", load.successes.Load(), load.failures.Load())
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

// A load is a loop of clients that read and write with one session. Each request has a connection and
// a client address of its own. A http.Client does not repeat a request on a new connection.
type load struct {
	stop                func()
	successes, failures atomic.Int64
	first               atomic.Value // of the failures
}

func startLoad(t *testing.T, s *hubstest.Server, user *hubstest.Client) *load {
	t.Helper()
	l := &load{}
	addr, cookie := s.Addr, s.CookieName()+"="+user.Token()
	version := user.Get("/auth/session").Must(t, 200).Field(t, "terms.version")
	acceptance := fmt.Sprintf(`{"version":%q}`, version)
	ended := make(chan struct{})
	var clients sync.WaitGroup
	client := http.Client{
		Transport: &http.Transport{DisableKeepAlives: true},
		Timeout:   hubstest.Patience,
	}
	for n := range 4 {
		clients.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-ended:
					return
				default:
				}
				err := sendOne(&client, addr, cookie, []string{"", acceptance}[(i+n)%2])
				if err == nil {
					l.successes.Add(1)
				} else if l.failures.Add(1) == 1 {
					l.first.Store(time.Now().Format("15:04:05.000 ") + err.Error())
				}
			}
		})
	}
	l.stop = sync.OnceFunc(func() { close(ended); clients.Wait() })
	t.Cleanup(l.stop)
	return l
}

// sendOne stores an acceptance of the terms or, without one, reads the list of hubs.
func sendOne(client *http.Client, addr, cookie, acceptance string) error {
	method, path := "POST", "/terms/acceptance"
	if acceptance == "" {
		method, path = "GET", "/hubs"
	}
	request, _ := http.NewRequest(method, "http://"+addr+path, strings.NewReader(acceptance)) // well-formed
	request.Header.Set("Cookie", cookie)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("X-Forwarded-For", hubstest.NewIP())
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != 200 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, answer.Status, text)
	}
	return err
}

func (l *load) waitForSuccesses(t *testing.T, more int64) {
	t.Helper()
	from := l.successes.Load()
	hubstest.WaitUntil(t, "more requests succeed", func() bool {
		return l.successes.Load() >= from+more || l.failures.Load() > 1000
	})
}
