package api

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A secretCase is the content of a file that a setting such as SESSION_SECRET_FILE names. <value> is
// a value that the server takes from the environment.
type secretCase struct {
	content string
	says    string // "" if it is accepted
	isKey   bool   // SESSION_SECRET takes it: a key may be any bytes
}

// secretCases has a case for each form of a file, by its name.
var secretCases = map[string]secretCase{
	"no line break":           {content: "<value>"},
	"a line break":            {content: "<value>\n"},
	"a line break of Windows": {content: "<value>\r\n"},

	"empty":               {content: "", says: "must name a file of one line, the value"},
	"a line break alone":  {content: "\n", says: "must name a file of one line, the value"},
	"two line breaks":     {content: "<value>\n\n", says: "must name a file of one line, the value"},
	"two lines":           {content: "<value>\nsecret-1\n", says: "must name a file of one line, the value"},
	"an empty first line": {content: "\n<value>\n", says: "must name a file of one line, the value"},
	"quotes":              {content: "\"<value>\"\n", says: "must not be in quotes, or begin or end with a space"},
	"single quotes":       {content: "'<value>'", says: "must not be in quotes, or begin or end with a space"},
	"a space behind":      {content: "<value> \n", says: "must not be in quotes, or begin or end with a space"},
	"a tab before":        {content: "\t<value>\n", says: "must not be in quotes, or begin or end with a space"},
	"a malformed value":   {content: "secret-1\n", says: ": "},
	"a byte order mark":   {content: "\uFEFF<value>\n", says: ": must be", isKey: true},
	"a line break inside": {content: "<value>\rsecret-1\n", says: ": must be", isKey: true},
	"a NUL behind":        {content: "<value>\x00\n", says: ": must be", isKey: true},
}

// secretSettings are the settings that may be in files.
var secretSettings = []string{"DATABASE_URL", "SESSION_SECRET", "SMTP_URL"}

// secretEnv returns settings of a server on staging that no test starts, and which of them are secret.
// Each secret value has the word secret-1 in it, which run looks for in all output.
func secretEnv(t *testing.T) map[string]string {
	t.Helper()
	return hubstest.ServerEnv(t, map[string]string{
		"APP_ENV":        "staging",
		"COOKIE_DOMAIN":  "staging.example.com",
		"DATABASE_URL":   "postgres://u:secret-1@127.0.0.1:1/d?sslmode=disable",
		"SESSION_SECRET": "secret-1-of-more-than-thirty-two-bytes",
		"SMTP_URL":       "smtp://u:secret-1@127.0.0.1:1",
		"MAIL_FROM":      "signin@example.com",
	})
}

// inFile moves a setting of env into a file with this content, in which <value> stands for its value.
func inFile(t *testing.T, env map[string]string, setting, content string) (path string) {
	t.Helper()
	content = strings.ReplaceAll(content, "<value>", env[setting])
	path = hubstest.WriteFile(t, filepath.Join(t.TempDir(), "a file"), content)
	env[setting] = ""
	env[setting+"_FILE"] = path
	return path
}

// K5: Each secret may be in a file, whose last line break does not count. All else holds as for the
// variable. A complaint names the setting of the file, or the secret, and never has the value.
func TestFormsOfSecretFiles(t *testing.T) {
	t.Parallel()
	for _, setting := range secretSettings {
		for name, c := range secretCases {
			t.Run(setting+" "+name, func(t *testing.T) {
				t.Parallel()
				env := secretEnv(t)
				inFile(t, env, setting, c.content)
				// With the right settings, serve goes on until the database does not answer.
				status, output := run(t, env, "serve")
				if c.says == "" || c.isKey && setting == "SESSION_SECRET" {
					wantEqual(t, "exit status", status, 1)
					wantParts(t, "output", output, "the database can't be reached")
					return
				}
				wantEqual(t, "exit status", status, 2)
				wantParts(t, "output", output, c.says)
				for line := range strings.Lines(output) {
					if !strings.HasPrefix(line, setting) {
						t.Errorf("got the line %q, want none that is not about %s", line, setting)
					}
				}
			})
		}
	}
}

// K5: A setting given twice, or whose file can't be read, is refused by the name of the setting. The
// path is not printed: it may be the secret, by mistake.
func TestSecretsInFiles(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for _, setting := range secretSettings {
		for name, c := range map[string]struct {
			path string // "" means a good file
			both bool   // the variable is set, too
			says string
		}{
			"both set":              {both: true, says: "must be unset if " + setting + " is set"},
			"both set, no file":     {both: true, path: "/nowhere", says: "must be unset if " + setting + " is set"},
			"no such file":          {path: folder + "/secret-1", says: "no such file"},
			"a folder":              {path: folder, says: "is a directory"},
			"a file as a folder":    {path: "/dev/null/x", says: "not a directory"},
			"the value for a path":  {path: "<value>", says: "can't be read"},
			"a path with a space":   {path: folder + "/x ", says: "must not be in quotes"},
			"a path in quotes":      {path: `"` + folder + `/x"`, says: "must not be in quotes"},
			"a path of 5,000 bytes": {path: "/" + strings.Repeat("x", 5000), says: "too long"},
			"an empty device":       {path: "/dev/null", says: "must name a file of one line"},
		} {
			t.Run(setting+" "+name, func(t *testing.T) {
				t.Parallel()
				env := secretEnv(t)
				value := env[setting]
				inFile(t, env, setting, "<value>\n")
				if c.path != "" {
					env[setting+"_FILE"] = strings.ReplaceAll(c.path, "<value>", value)
				}
				if c.both {
					env[setting] = value
				}
				status, output := run(t, env, "serve")
				wantEqual(t, "exit status", status, 2)
				wantParts(t, "output", output, setting+"_FILE: ", c.says)
			})
		}
	}
	if os.Getuid() != 0 { // root may read every file
		env := secretEnv(t)
		path := inFile(t, env, "SESSION_SECRET", "<value>\n")
		hubstest.Must(t, os.Chmod(path, 0))
		_, output := run(t, env, "serve")
		wantParts(t, "a file without rights", output, "SESSION_SECRET_FILE: can't be read: permission denied")
	}
}

// Server and commands work with secrets that are all in files.
func TestServerAndCommandsReadSecretsFromFiles(t *testing.T) {
	t.Parallel()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	env := hubstest.ServerEnv(t, hubstest.StagingEnv(mail))
	database, key := env["DATABASE_URL"], env["SESSION_SECRET"]
	for _, setting := range secretSettings {
		inFile(t, env, setting, "<value>\n")
	}
	email := hubstest.NewEmail()
	for _, command := range []struct{ line, says string }{
		{"migrate", "the tables are up to date"},
		{"user add " + email, "added"},
		{"user list", email},
		{"mail-test " + email, "has accepted the mail"},
	} {
		status, output := run(t, env, strings.Fields(command.line)...)
		wantEqual(t, "exit status of "+command.line, status, 0)
		wantParts(t, command.line, output, command.says)
	}
	status, output := run(t, map[string]string{"DATABASE_URL_FILE": "/nowhere"}, "user", "list")
	wantEqual(t, "exit status of user list without the file", status, 2)
	wantParts(t, "user list without the file", output,
		"DATABASE_URL_FILE: can't be read: no such file or directory\n")

	mail.WaitMail(t, email) // of mail-test
	s := hubstest.Start(t, env)
	s.Mail, s.Database = mail, database
	s.SignIn(t, email)
	userID := hubstest.Query[string](t, database, "select user_id from users")
	token := token{}.sign(key, "<email>", email, "<userId>", userID)
	s.With(t, token).Get("/auth/session").Want(t, 200)
}
