package api

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// run runs a command line of the binary, and returns what it prints, with the exit status behind it
// if that is not 0. It says what is wrong on standard error alone, all else on standard output alone.
func run(t *testing.T, env map[string]string, args ...string) string {
	t.Helper()
	status, said, silent := hubstest.Run(env, args...)
	if status != 0 {
		said, silent = fmt.Sprintf("%s[%d]\n", silent, status), said
	}
	if silent != "" {
		t.Errorf("%q: on the other output: %q", args, silent)
	}
	if strings.Contains(said, "secret-1") {
		t.Errorf("%q: a secret in %q", args, said)
	}
	return said
}

// What the commands do, say, and refuse. What a change of a user means to their sessions is in
// TestSessionFollowsAccount.
func TestCommands(t *testing.T) {
	t.Parallel()
	file := hubstest.ReadFile(t, "testdata/commands.txt")
	for _, text := range strings.Split(file, "\n== ")[1:] {
		name, script, _ := strings.Cut(text, "\n")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			_, powerless := hubstest.NewRole(t, database)
			script := hubstest.FillIn(script,
				"<no database>", hubstest.WithDatabase(database, "none"),
				"<wrong password>", hubstest.WithUser(t, database, "postgres", "secret-1"),
				"<powerless>", powerless,
				"<folder>", t.TempDir())
			env := map[string]string{"DATABASE_URL": database}
			for step := range strings.SplitSeq(strings.TrimSpace(script), "\n\n") {
				runStep(t, env, step)
			}
		})
	}
}

// argument is a word of a command line, in single quotes if it is empty or has spaces.
var argument = regexp.MustCompile(`'[^']*'|\S+`)

// runStep runs the lines of commands.txt up to an empty one.
func runStep(t *testing.T, env map[string]string, step string) {
	t.Helper()
	var commands []string
	var want strings.Builder
	for line := range strings.Lines(step + "\n") {
		kind, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch kind {
		case "sql":
			hubstest.Exec(t, env["DATABASE_URL"], rest)
		case "env":
			name, value, _ := strings.Cut(rest, "=")
			env[name] = value
		case "$":
			commands = append(commands, rest)
		default:
			want.WriteString(line)
		}
	}
	if len(commands) == 0 && want.String() != "" {
		t.Errorf("no command prints this: %q", want.String())
	}
	form := strings.ReplaceAll(regexp.QuoteMeta(want.String()), `\.\.\.`, "(?s:.*)")
	for _, command := range commands {
		args := argument.FindAllString(command, -1)
		for i, arg := range args {
			args[i] = strings.Trim(arg, "'")
		}
		got := run(t, env, args[1:]...)
		if !regexp.MustCompile("^" + form + "$").MatchString(got) {
			t.Errorf("%s: got\n%s\nwant\n%s", command, got, want.String())
		}
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
	if said := run(t, s.Env, "user", "add", lower); !strings.HasSuffix(said, "[1]\n") {
		t.Errorf("a second account of the address: %s", said)
	}
	s.User(t, "suspend", lower)
	s.User(t, "activate", stored)
	s.SignIn(t, lower)
}

// mail-test says what became of a mail.
func TestMailTest(t *testing.T) {
	t.Parallel()
	m := hubstest.NewMailServer(t, hubstest.MailOptions{})
	email := hubstest.NewEmail()
	said := run(t, m.Env(), "mail-test", email)
	if want := "127.0.0.1:"; !strings.HasPrefix(said, want) {
		t.Errorf("got %q, want it to begin with %s", said, want)
	}
	mail := m.WaitMail(t, email)
	if !strings.Contains(mail.Data, "\r\nSubject: A test\r\n") {
		t.Errorf("got the mail %q, want a test", mail.Data)
	}
	m.Fail(hubstest.MailRefusesRecipient)
	said = run(t, m.Env(), "mail-test", email)
	want := regexp.MustCompile("^the mail was not sent: .*no such mailbox.*\n\\[1\\]\n$")
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
