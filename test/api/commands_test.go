package api

import (
	"maps"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// run runs a command line of the binary. A wrong one says so on standard error alone, and a
// right one on standard output alone.
func run(
	t *testing.T, env map[string]string, want int, line ...string,
) (said string) {
	t.Helper()
	code, said, silent := hubstest.Run(env, line...)
	if want != 0 {
		said, silent = silent, said
	}
	if code != want {
		t.Errorf("%q: exit status %d, want %d\n%s%s", line, code, want, said, silent)
	}
	if silent != "" {
		t.Errorf("%q: on the other output: %q", line, silent)
	}
	if strings.Contains(said, "secret-1") {
		t.Errorf("%q: a secret in %q", line, said)
	}
	return said
}

// A commandCase is what an operator types, line by line. commands.json says what the members
// mean.
type commandCase struct {
	Name  string
	Env   map[string]string
	SQL   []string
	Lines []struct {
		Run      []string
		Exit     int
		Begins   string
		Says     string
		Contains []string
	}
}

// What the commands do, say, and refuse. What a change of a user means to their sessions is in
// TestSessionFollowsAccount.
func TestCommands(t *testing.T) {
	t.Parallel()
	for _, c := range hubstest.ReadCases[commandCase](t, "testdata/commands.json") {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			_, powerless := hubstest.NewRole(t, database)
			words := []string{
				"<database>", database,
				"<no database>", hubstest.WithDatabase(database, "none"),
				"<wrong password>", hubstest.WithUser(t, database, "postgres", "secret-1"),
				"<powerless>", powerless,
				"<folder>", t.TempDir(),
			}
			env := map[string]string{"DATABASE_URL": database}
			maps.Copy(env, c.Env)
			for name, value := range env {
				env[name] = hubstest.FillIn(value, words...)
			}
			hubstest.Exec(t, database, strings.Join(c.SQL, " "))
			for _, line := range c.Lines {
				said := run(t, env, line.Exit, line.Run...)
				if !strings.HasPrefix(said, line.Begins) {
					t.Errorf("%q: got %q, want it to begin with %q", line.Run, said, line.Begins)
				}
				if line.Says != "" && said != line.Says {
					t.Errorf("%q: got %q, want %q", line.Run, said, line.Says)
				}
				for _, part := range line.Contains {
					if !strings.Contains(said, part) {
						t.Errorf("%q: no word of %q in\n%s", line.Run, part, said)
					}
				}
			}
		})
	}
}

// Addresses are compared in ASCII, also by a database whose locale gives I another lower case.
func TestAddressesInATurkishDatabase(t *testing.T) {
	t.Parallel()
	version := hubstest.Query[int](t, hubstest.NewDatabase(t),
		"select current_setting('server_version_num')::int")
	if version < 150000 {
		t.Skip("PostgreSQL 14 has no such locale")
	}
	database := hubstest.EmptyDatabase(t, `template template0 encoding utf8
		locale_provider icu icu_locale 'tr-TR' locale 'C'`)
	got := hubstest.Query[string](t, database, "select lower('I')")
	if got != "ı" {
		t.Fatalf("the lower case of I is %q: the database is not Turkish", got)
	}
	if err := hubstest.Migrate(database); err != nil {
		t.Fatal(err)
	}
	s := hubstest.Start(t, map[string]string{"DATABASE_URL": database})
	const stored = "INFO@IRIS.EXAMPLE"
	const lower = "info@iris.example"
	s.User(t, "add", stored)
	run(t, s.Env, 1, "user", "add", lower)
	s.User(t, "suspend", lower)
	s.User(t, "activate", stored)
	s.SignIn(t, lower)
}

// mail-test says what became of a mail.
func TestMailTest(t *testing.T) {
	t.Parallel()
	m := hubstest.NewMailServer(t, hubstest.MailOptions{})
	email := hubstest.NewEmail()
	said := run(t, m.Env(), 0, "mail-test", email)
	if want := "127.0.0.1:"; !strings.HasPrefix(said, want) {
		t.Errorf("got %q, want it to begin with %s", said, want)
	}
	mail := m.WaitMail(t, email)
	if !strings.Contains(mail.Data, "\r\nSubject: A test\r\n") {
		t.Errorf("got the mail %q, want a test", mail.Data)
	}
	m.Fail(hubstest.MailRefusesRecipient)
	said = run(t, m.Env(), 1, "mail-test", email)
	want := regexp.MustCompile("^the mail was not sent: .*no such mailbox")
	if !want.MatchString(said) {
		t.Errorf("got %q, want the mail server's words", said)
	}
}

var twoRequirements = regexp.MustCompile(`^module hubs

go \S+

require \(
	github.com/golang-jwt/jwt/v5 v\S+
	github.com/lib/pq v\S+
\)
$`)

// Two requirements, none that came with them, and nothing that replaces one.
func TestTwoRequirements(t *testing.T) {
	t.Parallel()
	text := hubstest.ReadFile(t, "go.mod")
	if !twoRequirements.MatchString(text) {
		t.Errorf("got the requirements\n%s\nwant %s", text, twoRequirements)
	}
}
