package api

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// run runs a command line of the binary. A wrong one says so on standard error alone, and a
// right one on standard output alone.
func run(t *testing.T, env map[string]string, want int, line ...string) (said string) {
	t.Helper()
	code, out, errOut := hubstest.Run(env, line...)
	said, silent := out, errOut
	if want != 0 {
		said, silent = errOut, out
	}
	if code != want {
		t.Errorf("%q: exit status %d, want %d\n%s%s", line, code, want, out, errOut)
	}
	if silent != "" {
		t.Errorf("%q: on the other output: %q", line, silent)
	}
	if strings.Contains(said, "secret-1") {
		t.Errorf("%q: a secret in %q", line, said)
	}
	return said
}

// wantPrefix checks what a command says.
func wantPrefix(t *testing.T, said, want string) {
	t.Helper()
	if !strings.HasPrefix(said, want) {
		t.Errorf("got %q, want it to begin with %q", said, want)
	}
}

// Everything that is wrong with the settings is said at once.
func TestConfigurationErrorsTogether(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		env  map[string]string
		want []string
	}{
		"nothing set": {
			want: []string{"APP_ENV", "DATABASE_URL", "SESSION_SECRET"},
		},
		"all bad": {
			env: map[string]string{
				"APP_ENV": "production", "ADDR": "x", "DATABASE_URL": "postgres://u:secret-1@[h",
				"SESSION_SECRET": "secret-1", "COOKIE_PREFIX": "a b", "COOKIE_DOMAIN": "x y",
				"ALLOWED_ORIGINS": "x", "ALLOWED_ORIGIN_DOMAIN": "x y", "TRUSTED_PROXIES": "x",
				"SMTP_URL": "http://u:secret-1@h", "MAX_UPLOAD_BYTES": "25MB",
			},
			want: []string{
				"ADDR", "DATABASE_URL", "SESSION_SECRET", "COOKIE_PREFIX", "COOKIE_DOMAIN", "ALLOWED_ORIGINS",
				"ALLOWED_ORIGIN_DOMAIN", "TRUSTED_PROXIES", "SMTP_URL", "MAX_UPLOAD_BYTES: must be digits",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			said := run(t, c.env, 2)
			for _, want := range c.want {
				if !strings.Contains(said, want) {
					t.Errorf("no word of %s in\n%s", want, said)
				}
			}
		})
	}
}

// Each wrong command line has a message of its own, with the usage after it.
func TestWrongCommandLines(t *testing.T) {
	t.Parallel()
	env := map[string]string{"DATABASE_URL": "postgres://u:secret-1@127.0.0.1:1/d"}
	for line, want := range map[string]string{
		"frobnicate":                    `there is no command "frobnicate"`,
		"serve x":                       `there is no command "serve x"`,
		"migrate x":                     `there is no command "migrate x"`,
		"mail-test":                     `there is no command "mail-test"`,
		"user":                          "user: name a command",
		"user frobnicate a@b.example":   `there is no command "user frobnicate"`,
		"user add":                      "user add: takes 1 argument(s), got 0",
		"user add -role":                "user add: flag needs an argument: -role",
		"user add -rule x a@b.example":  "user add: flag provided but not defined: -rule",
		"user add a@b.example -role x":  "user add: takes 1 argument(s), got 3; -role comes first",
		"user role a@b.example":         "user role: takes 2 argument(s)",
		"user email a@b.example":        "user email: takes 2 argument(s)",
		"user role -role x a@b.example": "user role: flag provided but not defined: -role",
		"user suspend":                  "user suspend: takes 1 argument(s)",
		"user activate":                 "user activate: takes 1 argument(s)",
		"user signout":                  "user signout: takes 1 argument(s)",
		"user delete":                   "user delete: takes 1 argument(s)",
		"user list x":                   "user list: takes 0 argument(s)",
		"user show":                     "user show: takes 1 argument(s)",
	} {
		t.Run(line, func(t *testing.T) {
			said := run(t, env, 2, strings.Fields(line)...)
			wantPrefix(t, said, want)
			if !strings.Contains(said, "\nusage: hubs") {
				t.Errorf("no usage in %q", said)
			}
		})
	}
}

func TestHelpAndVersion(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"help", "-h", "-help", "--help", "user --help", "user add -h"} {
		said := run(t, nil, 0, strings.Fields(line)...)
		for _, command := range []string{"serve", "migrate", "routes", "user add", "user role", "user suspend",
			"user activate", "user signout", "user email", "user delete", "user list", "user show",
			"mail-test", "version", "help"} {
			if !strings.Contains(said, "\n  "+command+" ") {
				t.Errorf("%s: no %q in\n%s", line, command, said)
			}
		}
	}
	version := regexp.MustCompile(`^hubs \S+ go1\.\d+`)
	for _, word := range []string{"version", "--version"} {
		if said := run(t, nil, 0, word); !version.MatchString(said) {
			t.Errorf("%s: got %q, want the version and Go's", word, said)
		}
	}
}

// What the operator got wrong is 2, a database that is out of reach 1.
func TestCommandsWithoutDatabase(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"migrate", "user add a@b.example", "user list"} {
		for url, want := range map[string]int{
			"":                           2,
			"postgres://u:secret-1@[h/d": 2,
			"postgres://u:secret-1@127.0.0.1:1/d?sslmode=disable": 1,
		} {
			run(t, map[string]string{"DATABASE_URL": url}, want, strings.Fields(line)...)
		}
	}
}

// A wrong password, a missing database, missing tables and a missing right are four sentences.
func TestDatabaseMistakesAreNamed(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	role := "powerless_" + strings.ReplaceAll(hubstest.NewUUID(), "-", "")
	hubstest.Exec(t, database, "create role "+role+" login password 'secret-1'")
	t.Cleanup(func() { hubstest.Exec(t, database, "drop role "+role) })
	for name, c := range map[string]struct{ url, want string }{
		"password": {
			url:  hubstest.WithUser(t, database, "postgres", "secret-1"),
			want: "DATABASE_URL: the database refuses this user or password",
		},
		"database": {
			url:  hubstest.WithDatabase(database, "none"),
			want: "DATABASE_URL: there is no such database",
		},
		"tables": {
			url:  hubstest.WithDatabase(database, "template1"),
			want: "the database lacks the tables (run: hubs migrate)",
		},
		"right": {
			url:  hubstest.WithUser(t, database, role, "secret-1"),
			want: "the database role lacks a right (migrate and user need the owner's DATABASE_URL)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			wantPrefix(t, run(t, map[string]string{"DATABASE_URL": c.url}, 1, "user", "list"), c.want)
		})
	}
}

// A userCommand is "user …" on one database.
type userCommand struct {
	t   *testing.T
	env map[string]string
}

func newUserCommand(t *testing.T, database string) userCommand {
	return userCommand{t: t, env: map[string]string{"DATABASE_URL": database}}
}

func (u userCommand) want(exit int, want string, args ...string) {
	u.t.Helper()
	wantPrefix(u.t, run(u.t, u.env, exit, append([]string{"user"}, args...)...), want)
}

// Each change holds from the next request on, and is printed. An address is one in any case.
func TestUserCommands(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	user := newUserCommand(t, s.Env["DATABASE_URL"])
	email := strings.Replace(hubstest.NewEmail(), "user", "User", 1)
	upper := strings.ToUpper(email)
	user.want(0, email+": added\n", "add", email)
	user.want(1, "there is a user with this address already", "add", "-role=admin", upper)
	c := s.SignIn(t, email)
	permission := func() any { return c.Do("GET", "/auth/session", nil).Want(t, 200).Field(t, "user", "permission") }
	other, _ := s.Member(t, "member")

	if got := permission(); got != "member" {
		t.Errorf("after add: permission %v, want member", got)
	}
	user.want(0, email+": has the new role from the next request on\n", "role", upper, "admin")
	if got := permission(); got != "admin" {
		t.Errorf("after role: permission %v, want admin", got)
	}
	user.want(0, email+": suspended from the next request on\n", "suspend", upper)
	hubstest.WantProblem(t, c.Do("GET", "/auth/session", nil), 403, "account_suspended")
	user.want(0, email+": active from the next request on\n", "activate", email)
	permission()
	user.want(0, email+": signed out everywhere\n", "signout", upper)
	hubstest.WantProblem(t, c.Do("GET", "/auth/session", nil), 401, "unauthenticated")
	other.Get("/auth/session").Want(t, 200)
	user.want(0, email+": deleted; uploaded files stay\n", "delete", upper)
	user.want(0, "", "list")

	for _, args := range [][]string{{"role", email, "admin"}, {"suspend", email}, {"activate", email},
		{"signout", email}, {"delete", email}, {"show", email}, {"email", email, hubstest.NewEmail()}} {
		user.want(1, "there is no user with this address", args...)
	}
}

// An address that is changed back revives no session, and no two users share one.
func TestUserEmail(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	user := newUserCommand(t, s.Env["DATABASE_URL"])
	email, other, taken := hubstest.NewEmail(), hubstest.NewEmail(), hubstest.NewEmail()
	user.want(0, email, "add", email)
	user.want(0, taken, "add", taken)
	c := s.SignIn(t, email)

	user.want(1, "there is a user with this address already", "email", email, strings.ToUpper(taken))
	c.Do("GET", "/auth/session", nil).Want(t, 200)
	user.want(0, other+": the new address; signed out everywhere\n", "email", email, other)
	user.want(0, email+": the new address; signed out everywhere\n", "email", other, email)
	hubstest.WantProblem(t, c.Do("GET", "/auth/session", nil), 401, "unauthenticated")
}

func TestUserCommandsRefuseBadInput(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	hubstest.AddUser(t, database, "a@b.example", "member")
	user := newUserCommand(t, database)
	const refused = "the table users takes no such address or role (roles: member, admin)"
	user.want(1, refused, "add", "-role", "root", "new@b.example")
	user.want(1, refused, "role", "a@b.example", "root")
	addresses := []string{
		"", "a", "@b.example", "a b@c.example", "Ada <a@b.example>", `"a"@b.example`, "ä@b.example",
	}
	for _, bad := range addresses {
		user.want(1, refused, "add", bad)
		user.want(1, refused, "email", "a@b.example", bad)
	}
	unchanged := hubstest.Query[int](t, database,
		"select count(*) from users where email = 'a@b.example' and permission = 'member'")
	all := hubstest.Query[int](t, database, "select count(*) from users")
	if unchanged != 1 || all != 1 {
		t.Errorf("got %d users, %d of them unchanged, want 1 and 1", all, unchanged)
	}
}

// list has a line for each user, show all there is to one.
func TestUserListAndShow(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	hubstest.Exec(t, database, `
		insert into users (email, permission, suspended, created_at, signed_out_at) values
			('zoe@example.com', 'member', false, '2026-01-02 04:04:05+01', null),
			('Ada@Example.com', 'admin', true, '2026-01-02 04:04:05+01', '2026-02-03 04:05:06+00')`)
	hubstest.Exec(t, database, `
		insert into terms_acceptances (user_id, version, accepted_at)
		select user_id, version, at::timestamptz from users, (values
			('2026-11-01', '2026-11-02 10:00:00+00'), ('2025-01-01', '2025-02-03 12:00:00+02')) as a (version, at)
		where email = 'Ada@Example.com'`)
	env := map[string]string{"DATABASE_URL": database}
	const ada = "Ada@Example.com  admin  suspended  added 2026-01-02T03:04:05Z\n"
	const zoe = "zoe@example.com  member  active  added 2026-01-02T03:04:05Z\n"
	if got := run(t, env, 0, "user", "list"); got != ada+zoe {
		t.Errorf("list: got\n%swant\n%s", got, ada+zoe)
	}
	want := ada + "  signed out everywhere 2026-02-03T04:05:06Z\n" +
		"  accepted terms 2025-01-01 at 2025-02-03T10:00:00Z\n" +
		"  accepted terms 2026-11-01 at 2026-11-02T10:00:00Z\n"
	if got := run(t, env, 0, "user", "show", "ADA@example.com"); got != want {
		t.Errorf("show: got\n%swant\n%s", got, want)
	}
}

// Addresses are compared in ASCII, also by a database whose locale gives I another lower case.
func TestAddressesInATurkishDatabase(t *testing.T) {
	t.Parallel()
	if hubstest.Query[int](t, hubstest.NewDatabase(t), "select current_setting('server_version_num')::int") < 150000 {
		t.Skip("PostgreSQL 14 has no such locale")
	}
	database := hubstest.EmptyDatabase(t, "template template0 encoding utf8 locale_provider icu icu_locale 'tr-TR' locale 'C'")
	if got := hubstest.Query[string](t, database, "select lower('I')"); got != "ı" {
		t.Fatalf("the lower case of I is %q: the database is not Turkish", got)
	}
	if err := hubstest.Migrate(database); err != nil {
		t.Fatal(err)
	}
	s := hubstest.Start(t, map[string]string{"DATABASE_URL": database})
	user := newUserCommand(t, database)
	const stored, lower = "INFO@IRIS.EXAMPLE", "info@iris.example"
	user.want(0, stored+": added", "add", stored)
	user.want(1, "there is a user with this address already", "add", lower)
	user.want(0, stored+": suspended", "suspend", lower)
	user.want(0, stored+": active", "activate", stored)
	s.SignIn(t, lower)
}

// mail-test says what became of a mail.
func TestMailTest(t *testing.T) {
	t.Parallel()
	m := hubstest.NewMailServer(t, hubstest.MailOptions{})
	email := hubstest.NewEmail()
	wantPrefix(t, run(t, m.Env(), 0, "mail-test", email), "127.0.0.1:")
	mail := m.WaitMail(t, email)
	if !strings.Contains(mail.Data, "\r\nSubject: A test\r\n") {
		t.Errorf("another mail: %q", mail.Data)
	}
	m.Fail(hubstest.MailRefusesRecipient)
	said := run(t, m.Env(), 1, "mail-test", email)
	wantPrefix(t, said, "the mail was not sent: ")
	if !strings.Contains(said, "no such mailbox") {
		t.Errorf("not the mail server's words: %q", said)
	}
	wantPrefix(t, run(t, nil, 2, "mail-test", email), "SMTP_URL: ")
}

// What serve can't have, it names: a setting with exit status 2, a database with 1.
func TestServeFails(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() }) // after the subtests, which run in parallel
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	m := hubstest.NewMailServer(t, hubstest.MailOptions{})
	missing := hubstest.StagingEnv(m)
	missing["FILES_DIR"] = file + "s"
	for name, c := range map[string]struct {
		env  map[string]string
		exit int
		want string
	}{
		"address taken": {
			env:  map[string]string{"ADDR": taken.Addr().String()},
			exit: 2,
			want: "ADDR, or the socket of LISTEN_FDS: ",
		},
		"no folder": {
			env:  map[string]string{"FILES_DIR": filepath.Join(file, "x")},
			exit: 2,
			want: "FILES_DIR: ",
		},
		"folder not made on staging": {
			env:  missing,
			exit: 2,
			want: "FILES_DIR: ",
		},
		"database not there": {
			env:  map[string]string{"DATABASE_URL": "postgres://u:secret-1@127.0.0.1:1/d?sslmode=disable"},
			exit: 1,
			want: "the database does not answer",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wantPrefix(t, run(t, hubstest.ServerEnv(t, c.env), c.exit, "serve"), c.want)
		})
	}
}

// Two requirements, and none that came with them.
func TestTwoRequirements(t *testing.T) {
	t.Parallel()
	list := exec.Command("go", "mod", "edit", "-json")
	list.Dir = hubstest.Root()
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	var module struct {
		Require []struct {
			Path     string
			Indirect bool
		}
		Replace, Exclude, Tool []any
	}
	if err := json.Unmarshal(out, &module); err != nil {
		t.Fatal(err)
	}
	if len(module.Require) != 2 {
		t.Errorf("%d requirements, want 2", len(module.Require))
	}
	for _, r := range module.Require {
		isOurs := r.Path == "github.com/golang-jwt/jwt/v5" || r.Path == "github.com/lib/pq"
		if r.Indirect || !isOurs {
			t.Errorf("%s is required", r.Path)
		}
	}
	if len(module.Replace)+len(module.Exclude)+len(module.Tool) > 0 {
		t.Errorf("replace, exclude or tool in go.mod: %s", out)
	}
}
