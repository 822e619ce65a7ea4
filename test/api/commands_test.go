package api

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// K1: The commands do, print and refuse what testdata/commands.txt says. TestSessionFollowsAccount
// tests what the user commands do to sessions.
func TestCommands(t *testing.T) {
	t.Parallel()
	for _, c := range readTextCases(t, "commands.txt") {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			_, powerless := hubstest.NewRole(t, database)
			script := fillIn(c.Text,
				"<no database>", hubstest.WithDatabase(database, "none"),
				"<wrong password>", hubstest.WithUser(t, database, "postgres", "secret-1"),
				"<powerless>", powerless,
				"<folder>", t.TempDir())
			env := hubstest.ServerEnv(t, map[string]string{"DATABASE_URL": database})
			for step := range strings.SplitSeq(strings.TrimSpace(script), "\n\n") {
				wantStep(t, env, step)
			}
		})
	}
}

// argument matches one argument of a command line. It is in single quotes if it is empty or has
// spaces.
var argument = regexp.MustCompile(`'[^']*'|\S+`)

// wantStep runs one step of commands.txt, which ends before an empty line. It compares the output
// of each command with the text below the commands.
func wantStep(t *testing.T, env map[string]string, step string) {
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
		t.Errorf("commands.txt: got no command above %q, want one", want.String())
	}
	anyText := strings.NewReplacer(`\.\.\.`, ".*", `\(any\)`, "(?s:.*)")
	pattern := anyText.Replace(regexp.QuoteMeta(want.String()))
	for _, command := range commands {
		args := argument.FindAllString(command, -1)
		for i, arg := range args {
			args[i] = strings.Trim(arg, "'")
		}
		status, got := run(t, env, args[1:]...)
		if status != 0 {
			got += fmt.Sprintf("[%d]\n", status)
		}
		if !regexp.MustCompile("^" + pattern + "$").MatchString(got) {
			t.Errorf("%s: got\n%s\nwant\n%s", command, got, want.String())
		}
	}
}

// E-mail addresses are compared by the letter case of ASCII, even in a database with a Turkish
// locale, where the lower case of I is ı.
func TestAddressesInATurkishDatabase(t *testing.T) {
	t.Parallel()
	version := hubstest.Query[int](t, hubstest.NewDatabase(t),
		"select current_setting('server_version_num')::int")
	if version < 150000 {
		t.Skip("PostgreSQL before version 15 has no databases with an ICU locale")
	}
	database := hubstest.EmptyDatabase(t, `template template0 encoding utf8
		locale_provider icu icu_locale 'tr-TR' locale 'C'`)
	got := hubstest.Query[string](t, database, "select lower('I')")
	if got != "ı" {
		t.Fatalf("setup: lower('I') in the Turkish database: got %q, want ı", got)
	}
	hubstest.Must(t, hubstest.SetUp(database))
	s := hubstest.Start(t, map[string]string{"DATABASE_URL": database})

	const stored = "INFO@IRIS.EXAMPLE"
	const lower = "info@iris.example"
	s.User(t, "add", stored)
	status, output := run(t, s.Env, "user", "add", lower)
	if status != 1 {
		t.Errorf("user add of the same address in lower case: got %d, %q, want exit status 1",
			status, output)
	}
	c := s.Client(t)
	c.AskCode(lower)
	c.PresentCode(lower, s.Code(t, stored)).Want(t, 200)
	s.User(t, "delete", stored)
}
