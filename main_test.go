//go:build moving

package main

// Tests of main.go: configuration, commands, start and stop.

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// deployedEnv is a right configuration of an environment. Nothing in it is dialled.
func deployedEnv(name string) map[string]string {
	env := map[string]string{
		"APP_ENV": name, "DATABASE_URL": "postgres://u:database-password@127.0.0.1:1/hubs",
		"SESSION_SECRET": "session-secret-of-thirty-two-byte",
	}
	if name != envLocal {
		env["COOKIE_DOMAIN"] = "example.com"
		env["SMTP_URL"], env["MAIL_FROM"] = "smtps://u:mail-password@127.0.0.1:465", "hubs@example.com"
	}
	if name == envProduction {
		env["ALLOWED_ORIGIN_DOMAIN"] = "example.com"
	}
	return env
}

// tryServe is the command serve (which is also no command at all) where it should not
// get as far as serving.
func tryServe(t testing.TB, env map[string]string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var out, errOut logBuffer
	code = run(ctx, nil, lookup(env), &out, &errOut)
	if ctx.Err() != nil {
		t.Errorf("it serves: %s", &out)
	}
	return code, out.String(), errOut.String()
}

// K1: every value is checked at the start; a bad one is named, and no secret printed.
func TestConfiguration(t *testing.T) {
	t.Parallel()
	const all = "local staging production"
	const key = "kkkkkkkkkkkkkkkkkkkkkkk012345678" // 32 bytes, 10 of them different
	for _, test := range []struct {
		variable     string
		environments string
		good, bad    []string // "": unset
	}{
		{"APP_ENV", envLocal, nil, []string{"", "prod", "Local", "local "}},
		{"ADDR", all, []string{"", ":0", "0.0.0.0:80", "[::1]:8080", "localhost:8080"}, []string{"8080", "localhost", "::1", "1.2.3.4",
			"127.0.0.1:65536", ":99999", "127.0.0.1:-1", "127.0.0.1:x"}},
		{"DATABASE_URL", all, []string{"postgres://u:p@h/d", "host=h user=u password=p"}, []string{"", "postgres://u:secret-1@[h/d", "mysql://u:secret-1@h/d",
			"postgres://u:secret-1@h:65536/d", "postgres://u:secret-1@h:x/d", "host=h user=u password=secret-1 port=99999"}},
		{"SESSION_SECRET", all, []string{key, key + "," + key, "éèêëàâäùûüôöîïçÿ"},
			[]string{"", "short-secret-1", key[1:], key + "," + key[1:], key + ",", "," + key, key + ",secret-1," + key,
				key + ", " + key, key + " ", "\t" + key, key + "\n," + key,
				strings.Repeat("k", 64), strings.Repeat("secret-1", 8), strings.Repeat("012345678", 9), key + "," + strings.Repeat("é", 16),
				key[:24] + "01234567", "REPLACE-WITH-THE-OUTPUT-OF-openssl-rand-base64-48",
				key + ",REPLACE-WITH-THE-OUTPUT-OF-openssl-rand-base64-48"}},
		{"COOKIE_PREFIX", envLocal, []string{"", "app", "a-b_1"}, []string{"__Host-app", "__host-app", "__Secure-app", "__secure-app", "a b", "a;", "a=b", "é"}},
		{"COOKIE_PREFIX", "staging production", []string{"", "app", "__Secure-app"}, []string{"__Host-app", "__HOST-app", "a b", "a,b"}},
		{"COOKIE_DOMAIN", envLocal, []string{""}, []string{"example.com", "localhost"}},
		{"COOKIE_DOMAIN", envStaging, []string{"a.b-c.example", "b.example"}, nil},
		{"COOKIE_DOMAIN", "staging production", []string{"example.com", "Example.com"}, []string{"", ".example.com", "example.com:80",
			"https://example.com", "example.com/", "a b", "-a.example", "a;b", "example.com; Path=/x",
			strings.Repeat("a", 64) + ".example", "com", "localhost", "10.0.0.1", "127.0.0.1", "::1", "[::1]", "2001:db8::1"}},
		// A parent or a child of ALLOWED_ORIGIN_DOMAIN, which is example.com.
		{"COOKIE_DOMAIN", envProduction, []string{"api.example.com", "a.b.example.com"},
			[]string{"example.org", "evil-example.com", "example.com.evil", "xample.com", "pple.com"}},
		{"ALLOWED_ORIGINS", "local staging", []string{"", "https://a.example", "http://localhost:3000,https://b.example:8443"},
			[]string{"*", "null", "a.example", "https://a.example/", "https://a.example/x", "https://*.example", "ftp://a.example",
				"https://a.example,x", "https://u@a.example", "HTTPS://a.example", "https://A.example", "https://",
				"http://localhost:65536", "http://localhost:99999", "http://localhost:0", "http://localhost:3000,http://localhost:70000"}},
		{"ALLOWED_ORIGINS", envProduction, []string{""}, []string{"https://a.example"}},
		{"ALLOWED_ORIGIN_DOMAIN", "local staging", []string{""}, []string{"example.com"}},
		{"ALLOWED_ORIGIN_DOMAIN", envProduction, []string{"example.com", "app.example.com", "Example.com"}, []string{"", ".example.com", "*.example.com",
			"https://example.com", "example.com:443", "example.com/", "com", "localhost", "10.0.0.1", "::1", "example.org", "le.com"}},
		{"ALLOWED_ORIGIN_DOMAIN", envProduction, []string{"a.b.example.com", "EXAMPLE.COM"}, nil},
		{"TRUSTED_PROXIES", all, []string{"", "10.0.0.0/8", "10.0.0.0/8,fd00::/8", "10.0.0.0/8, 192.0.2.1/32"},
			[]string{"10.0.0.1", "10.0.0.0/33", "x", "10.0.0.0/8,proxy.example", "10.0.0.0-10.1.0.0",
				"::ffff:10.0.0.0/104", // an IPv4 address is compared as such: this would match none
				"0.0.0.0/0", "::/0", "10.0.0.0/0", "10.0.0.0/8,0.0.0.0/0", "10.0.0.0/8, ::/0"}},
		{"SMTP_URL", all, []string{"smtp://h:587", "smtps://u:p@h", "smtp://127.0.0.1:25", "smtp://[::1]:25", "smtps://u%40x:p%2F@mail.example:465/",
			"smtp://ada@example.com:p@ss@mail.example:587"},
			[]string{"http://u:secret-1@h", "h:25", "smtp://", "smtp://u:secret-1@[h", "smtp://u:secret-1@h:x", "smtp://u:secret-1@",
				"smtp://h:0", "smtp://h:999999", "smtp://h:65536", "smtps://u:secret-1@h:65536", "smtp://h/path", "smtp://h?starttls=no", "smtp://h#x", "smtp://u:secret-1@h h"}},
		{"SMTP_URL", "staging production", nil, []string{""}},
		{"MAIL_FROM", "staging production", []string{"a@b.example", "Hubs <a@b.example>"}, []string{"", "a", "a@b@c", "a@b.example, c@d.example",
			"<a@b.example>\r\nBcc: x@y.example", "ä@b.example"}},
		{"FILES_DIR", all, []string{"", "/tmp/x", "x"}, nil},
		{"MAX_UPLOAD_BYTES", all, []string{"", "1", "26214400"}, []string{"0", "-1", "x", "1.5", "10MB", "9223372036854775808", "2000000000000"}},
	} {
		for environment := range strings.SplitSeq(test.environments, " ") {
			env := deployedEnv(environment)
			if test.variable == "SMTP_URL" {
				env["MAIL_FROM"] = "hubs@example.com"
			}
			for _, value := range test.good {
				t.Run(fmt.Sprintf("%s/good %s=%q", environment, test.variable, value), func(t *testing.T) {
					if _, err := loadConfig(lookup(merged(env, test.variable, value))); err != nil {
						t.Errorf("got %v, want no error", err)
					}
				})
			}
			for _, value := range test.bad {
				t.Run(fmt.Sprintf("%s/bad %s=%q", environment, test.variable, value), func(t *testing.T) {
					code, out, errOut := tryServe(t, merged(env, test.variable, value))
					if code != 2 || out != "" || !strings.Contains(errOut, test.variable) {
						t.Errorf("got exit %d, output %q, errors %q; want exit 2 and a word of the setting", code, out, errOut)
					}
					for _, secret := range []string{"secret-1", "session-secret", "password@", key[1:], placeholderKey} {
						if strings.Contains(errOut, secret) {
							t.Errorf("it prints a secret: %s", errOut)
						}
					}
				})
			}
		}
	}
}

// K3: every key that stands in an example of deploy/ is refused, or someone would keep it.
func TestExampleKeysAreRefused(t *testing.T) {
	t.Parallel()
	names, err := filepath.Glob("deploy/*.env")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range regexp.MustCompile(`SESSION_SECRET=(\S+)`).FindAllStringSubmatch(string(text), -1) {
			found++
			code, _, errOut := tryServe(t, merged(deployedEnv(envStaging), "SESSION_SECRET", match[1]))
			if code != 2 || !strings.Contains(errOut, "SESSION_SECRET: ") || strings.Contains(errOut, match[1]) {
				t.Errorf("%s: got exit %d, errors %q; want exit 2 and a word of the setting", name, code, errOut)
			}
		}
	}
	if found == 0 {
		t.Error("no example of deploy/ has a key")
	}
}

// K1: all that is wrong is said at once.
func TestConfigurationErrorsTogether(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		env  map[string]string
		want string
	}{
		"nothing set": {nil, "APP_ENV DATABASE_URL SESSION_SECRET"},
		"all bad": {map[string]string{"APP_ENV": "production", "ADDR": "x", "DATABASE_URL": "postgres://u:secret-1@[h", "SESSION_SECRET": "secret-1",
			"COOKIE_PREFIX": "a b", "COOKIE_DOMAIN": "x y", "ALLOWED_ORIGINS": "x", "ALLOWED_ORIGIN_DOMAIN": "x y", "TRUSTED_PROXIES": "x",
			"SMTP_URL": "http://u:secret-1@h", "MAX_UPLOAD_BYTES": "x"},
			"ADDR DATABASE_URL SESSION_SECRET COOKIE_PREFIX COOKIE_DOMAIN ALLOWED_ORIGINS ALLOWED_ORIGIN_DOMAIN TRUSTED_PROXIES SMTP_URL MAX_UPLOAD_BYTES"},
	} {
		code, out, errOut := tryServe(t, test.env)
		for variable := range strings.SplitSeq(test.want, " ") {
			if code != 2 || out != "" || !strings.Contains(errOut, variable) {
				t.Errorf("%s: exit %d, no word of %s: %s%s", name, code, variable, out, errOut)
			}
		}
		if strings.Contains(errOut, "secret-1") {
			t.Errorf("%s: it prints a secret: %s", name, errOut)
		}
	}
}

// Each wrong command line has a message of its own, the usage after it, and exit status 2.
func TestWrongCommandLines(t *testing.T) {
	t.Parallel()
	env := map[string]string{"DATABASE_URL": "postgres://u:secret-1@127.0.0.1:1/d"}
	seen := map[string]string{} // message → command line
	for _, test := range []struct{ line, message string }{
		{"frobnicate", `there is no command "frobnicate"`},
		{"frobnicate x", `there is no command "frobnicate x"`},
		{"serve x", `there is no command "serve x"`},
		{"serve -x", `there is no command "serve -x"`},
		{"migrate x", `there is no command "migrate x"`},
		{"routes x", `there is no command "routes x"`},
		{"version x", `there is no command "version x"`},
		{"user", `there is no command "user`},
		{"user frobnicate", `there is no command "user frobnicate"`},
		{"user frobnicate a@b.example", `there is no command "user frobnicate"`},
		{"user add", "user add: takes 1 argument(s)"},
		{"user add -role", "user add: flag needs an argument: -role"},
		{"user add -role admin", "user add: takes 1 argument(s)"},
		{"user add -rule admin a@b.example", "user add: flag provided but not defined: -rule"},
		{"user add -role admin a@b.example x", "user add: takes 1 argument(s)"},
		{"user add a@b.example admin", "user add: takes 1 argument(s)"},
		{"user role a@b.example", "user role: takes 2 argument(s)"},
		{"user role", "user role: takes 2 argument(s)"},
		{"user role -role admin a@b.example", "user role: flag provided but not defined: -role"},
		{"user suspend", "user suspend: takes 1 argument(s)"},
		{"user suspend a@b.example x", "user suspend: takes 1 argument(s)"},
		{"user activate", "user activate: takes 1 argument(s)"},
		{"user signout", "user signout: takes 1 argument(s)"},
		{"user list x", "user list: takes 0 argument(s)"},
		{"user show", "user show: takes 1 argument(s)"},
		{"user show a@b.example x", "user show: takes 1 argument(s)"},
	} {
		t.Run(test.line, func(t *testing.T) {
			code, out, errOut := runCLI(env, strings.Fields(test.line)...)
			if code != 2 || out != "" || !strings.HasPrefix(errOut, test.message) || !strings.Contains(errOut, "\nusage: hubs") {
				t.Errorf("got exit %d, output %q, errors %q; want exit 2 and %q with the usage", code, out, errOut, test.message)
			}
			seen[test.message] = test.line
		})
	}
	if len(seen) < 16 {
		t.Errorf("got %d different messages, want 16 or more", len(seen))
	}
}

// The help goes to standard output; it is no mistake to ask for it.
func TestHelpAndVersion(t *testing.T) {
	t.Parallel()
	for _, word := range []string{"help", "-h", "-help", "--help"} {
		t.Run(word, func(t *testing.T) {
			code, out, errOut := runCLI(nil, word)
			if code != 0 || errOut != "" {
				t.Fatalf("got exit %d, errors %q; want exit 0 and none", code, errOut)
			}
			for _, command := range []string{"serve", "migrate", "routes", "user add", "user role", "user suspend", "user activate",
				"user signout", "user list", "user show", "version", "help"} {
				if !strings.Contains(out, "\n  "+command+" ") {
					t.Errorf("the help has no %q:\n%s", command, out)
				}
			}
		})
	}
	path, err := testBinary()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(path, "version").Output()
	if err != nil || !regexp.MustCompile(`^hubs \S+ go1\.\d+`).Match(out) {
		t.Errorf("version: got %q, %v; want the version and Go's", out, err)
	}
}

// What the operator got wrong is 2; a database that is out of reach is 1.
func TestCommandsWithoutDatabase(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"migrate", "user add a@b.example", "user role a@b.example admin", "user suspend a@b.example",
		"user activate a@b.example", "user signout a@b.example", "user list", "user show a@b.example"} {
		for url, want := range map[string]int{"": 2, "postgres://u:secret-1@[h/d": 2, "postgres://u:secret-1@127.0.0.1:1/d?sslmode=disable": 1} {
			t.Run(line+" "+url, func(t *testing.T) {
				t.Parallel()
				code, out, errOut := runCLI(map[string]string{"DATABASE_URL": url}, strings.Fields(line)...)
				if code != want || out != "" || errOut == "" || strings.Contains(errOut, "secret-1") {
					t.Errorf("got exit %d, output %q, errors %q; want exit %d", code, out, errOut, want)
				}
			})
		}
	}
}

// lib/pq does not take several hosts with their ports behind them; it would fail at the first
// connection. The form that it takes is said at the start.
func TestSeveralDatabaseHosts(t *testing.T) {
	t.Parallel()
	for url, refused := range map[string]bool{
		"postgres://u:secret-1@h1:5432,h2:5433/d":                                              true,
		"postgres://u:secret-1@h1:5432,h2/d":                                                   true,
		"postgresql://h1:5432,h2:5433/d?sslmode=disable":                                       true,
		"postgres://u:secret-1@h1:5432,h2:5433":                                                true,
		"postgres://u:secret-1@h1:5432,h2:5433?target_session_attrs=read-write":                true,
		"postgres://u:p@h1,h2/d?port=5432,5433&target_session_attrs=read-write":                false,
		"host=h1,h2 port=5432,5433 user=u password=p dbname=d target_session_attrs=read-write": false,
		"postgres://u:p@h1:5432/d?options=-c%20search_path=a,b":                                false,
		"postgres://u:p@h1:5432/d?application_name=hubs:1,2":                                   false,
	} {
		t.Run(url, func(t *testing.T) {
			_, err := loadConfig(lookup(merged(deployedEnv(envStaging), "DATABASE_URL", url)))
			if !refused {
				if err != nil {
					t.Errorf("got %v, want no error", err)
				}
				return
			}
			code, out, errOut := tryServe(t, merged(deployedEnv(envStaging), "DATABASE_URL", url))
			if code != 2 || out != "" || !strings.Contains(errOut, "several hosts as") || !strings.Contains(errOut, "port=5432,5433") ||
				strings.Contains(errOut, "secret-1") {
				t.Errorf("got exit %d, output %q, errors %q; want exit 2 and the form that is taken", code, out, errOut)
			}
		})
	}
}

// The commands for users, each with the line that it prints; and T5: each change holds from
// the next request on.
func TestUserCommands(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	// These need DATABASE_URL only.
	env := map[string]string{"DATABASE_URL": srv.env["DATABASE_URL"]}
	user := func(want int, message string, args ...string) {
		t.Helper()
		code, out, errOut := runCLI(env, append([]string{"user"}, args...)...)
		said, silent := out, errOut
		if want != 0 {
			said, silent = errOut, out
		}
		if code != want || silent != "" || !strings.HasPrefix(said, message) || want != 2 && strings.Count(said, "\n") != 1 {
			t.Errorf("%q: got exit %d, output %q, errors %q; want exit %d, one line %q", args, code, out, errOut, want, message)
		}
	}
	email := strings.Replace(newEmail(), "user", "User", 1) // it is printed as it is stored
	admin := newEmail()
	upper := strings.ToUpper(email)
	user(0, email+": added", "add", email)
	user(0, admin+": added", "add", "-role", "admin", admin)
	user(1, "there is a user with this address already", "add", email)
	user(1, "there is a user with this address already", "add", upper)
	user(1, "there is a user with this address already", "add", "-role=admin", email)
	user(2, `there is no role "root"; the roles are member and admin`, "add", "-role", "root", newEmail())
	for _, bad := range []string{"", " ", "a", "a@", "@b.example", "a b@c.example", "a@b.example ", "Ada <a@b.example>", `"a"@b.example`, "a@[127.0.0.1]",
		"ä@b.example", "a@b.example\nc", "a..b@c.example", "a@-b.example", strings.Repeat("a", 245) + "@b.example"} {
		for _, command := range [][]string{{"add"}, {"suspend"}, {"activate"}, {"signout"}, {"show"}} {
			user(2, fmt.Sprintf("%q is not an e-mail address", bad), append(command, bad)...)
		}
		user(2, fmt.Sprintf("%q is not an e-mail address", bad), "role", bad, "admin")
	}
	if n := queryValue[int](t, env["DATABASE_URL"], "select count(*) from users"); n != 2 {
		t.Errorf("got %d users, want 2", n)
	}
	c := srv.signIn(t, email)
	permission := func(want string) {
		t.Helper()
		if got := c.do("GET", "/auth/session", nil).want(t, 200).field(t, "user", "permission"); got != want {
			t.Errorf("got permission %v, want %s", got, want)
		}
	}
	permission("member")
	user(0, email+": has the new role from the next request on", "role", upper, "admin")
	permission("admin")
	user(2, `there is no role "root"`, "role", email, "root")
	permission("admin")
	user(0, email+": suspended from the next request on", "suspend", upper)
	wantProblem(t, c.do("GET", "/auth/session", nil), 403, "account_suspended")
	user(0, email+": suspended from the next request on", "suspend", email)
	user(0, email+": active from the next request on", "activate", email)
	permission("admin")
	other := srv.signIn(t, admin)
	user(0, email+": signed out everywhere", "signout", email)
	wantProblem(t, c.do("GET", "/auth/session", nil), 401, "unauthenticated")
	other.do("GET", "/auth/session", nil).want(t, 200)
	for _, args := range [][]string{{"role", newEmail(), "admin"}, {"suspend", newEmail()}, {"activate", newEmail()}, {"signout", newEmail()},
		{"show", newEmail()}} {
		user(1, "there is no user with this address", args...)
	}
}

// user list has a line for each user, user show all there is to one; both show an account as
// it is now.
func TestUserListAndShow(t *testing.T) {
	t.Parallel()
	env := map[string]string{"DATABASE_URL": newDatabase(t)}
	user := func(args ...string) string {
		t.Helper()
		code, out, errOut := runCLI(env, append([]string{"user"}, args...)...)
		if code != 0 || errOut != "" {
			t.Fatalf("%q: got exit %d, errors %q; want exit 0", args, code, errOut)
		}
		return out
	}
	if got := user("list"); got != "" {
		t.Errorf("without users: got %q, want nothing", got)
	}
	user("add", "zoe@example.com")
	user("add", "-role", "admin", "Ada@Example.com")
	user("add", "bob@example.com")
	user("suspend", "bob@example.com")
	execSQL(t, env["DATABASE_URL"], "update users set created_at = '2026-01-02 04:04:05+01'")
	const at = "  added 2026-01-02T03:04:05Z\n"
	want := "Ada@Example.com  admin  active" + at + "bob@example.com  member  suspended" + at + "zoe@example.com  member  active" + at
	if got := user("list"); got != want {
		t.Errorf("user list: got\n%swant\n%s", got, want)
	}
	wantShown := func(want string) {
		t.Helper()
		if got := user("show", "ADA@example.com"); got != want {
			t.Errorf("user show: got\n%s\nwant\n%s", got, want)
		}
	}
	wantShown("Ada@Example.com  admin  active" + at)
	user("role", "ada@example.com", "member")
	user("suspend", "ada@example.com")
	execSQL(t, env["DATABASE_URL"], `insert into terms_acceptances (user_id, version, accepted_at)
		select user_id, v, at::timestamptz from users, (values ('2026-11-01', '2026-11-02 10:00:00+00'), ('2025-01-01', '2025-02-03 12:00:00+02')) as a (v, at)
		where email = 'Ada@Example.com'`)
	execSQL(t, env["DATABASE_URL"], "update users set signed_out_at = '2026-02-03 04:05:06+00' where email = 'Ada@Example.com'")
	wantShown("Ada@Example.com  member  suspended" + at +
		"  signed out everywhere 2026-02-03T04:05:06Z\n" +
		"  accepted terms 2025-01-01 at 2025-02-03T10:00:00Z\n" +
		"  accepted terms 2026-11-01 at 2026-11-02T10:00:00Z\n")
}

// The schema may be applied again and again, by two at once too, and keeps what is there.
func TestMigrate(t *testing.T) {
	t.Parallel()
	pg, err := startShared()
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("test_%d", serial.Add(1))
	execSQL(t, pg.url, "create database "+name) // empty
	t.Cleanup(func() { execSQL(t, pg.url, "drop database "+name+" with (force)") })
	url := withDatabase(pg.url, name)

	code, out, errOut := tryServe(t, serverEnv(t, map[string]string{"DATABASE_URL": url}))
	if code != 1 || !strings.Contains(errOut, "migrate") {
		t.Errorf("serve without the schema: exit %d, %s%s", code, out, errOut)
	}
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if err := applySchema(url); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	// What an operator types must be enough.
	execSQL(t, url, "insert into users (email) values ('a@b.example'); insert into hubs (name) values ('North')")
	if err := applySchema(url); err != nil {
		t.Error(err)
	}
	if n := queryValue[int](t, url, "select (select count(*) from users) + (select count(*) from hubs)"); n != 2 {
		t.Errorf("%d rows after another migrate, want 2", n)
	}
}

// What serve can't have, it says, and exits with 1.
func TestServeFails(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() }) // after the subtests, which run in parallel
	file := t.TempDir() + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		override map[string]string
		message  string // what went wrong, and what to do
	}{
		"address taken": {map[string]string{"ADDR": taken.Addr().String()},
			"ADDR: another program listens on " + taken.Addr().String() + "; stop it or set ADDR\n"},
		"no folder":          {map[string]string{"FILES_DIR": file + "/x"}, "FILES_DIR: "},
		"database not there": {map[string]string{"DATABASE_URL": "postgres://u:secret-1@127.0.0.1:1/d?sslmode=disable"}, "the database does not answer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, out, errOut := tryServe(t, serverEnv(t, test.override))
			if code != 1 || !strings.HasPrefix(errOut, test.message) || strings.Contains(out, "listening") || strings.Contains(out+errOut, "secret-1") {
				t.Errorf("got exit %d, output %q, errors %q; want exit 1 and %q", code, out, errOut, test.message)
			}
		})
	}
}

// A signal that comes while the server starts stops it like any other: exit status 0. Twenty
// starts, because the runtime chooses at random what a server with two things to do does first.
func TestSignalDuringTheStart(t *testing.T) {
	t.Parallel()
	env := serverEnv(t)
	stopped, cancel := context.WithCancel(context.Background())
	cancel()
	var servers sync.WaitGroup
	for range 20 {
		servers.Go(func() {
			var out, errOut logBuffer
			code := run(stopped, []string{"serve"}, lookup(env), &out, &errOut)
			if code != 0 || out.count(`"msg":"stopped"`) != 1 {
				t.Errorf("got exit %d, errors %q, want exit 0 and \"stopped\" in the log:\n%s", code, errOut.String(), out.String())
			}
		})
	}
	servers.Wait()
}

// The README shows the route table as the command prints it.
func TestRouteTableInReadme(t *testing.T) {
	t.Parallel()
	code, table, errOut := runCLI(nil, "routes")
	if code != 0 || errOut != "" {
		t.Fatalf("routes: exit %d, %s", code, errOut)
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(readme), "<!-- routes -->\n")
	block, _, ended := strings.Cut(rest, "<!-- /routes -->")
	_, block, fenced := strings.Cut(block, "```")
	_, block, _ = strings.Cut(block, "\n") // what follows the opening fence
	block, _, closed := strings.Cut(block, "```")
	if !found || !ended || !fenced || !closed {
		t.Fatal("README.md has no fenced block between <!-- routes --> and <!-- /routes -->")
	}
	if block != table {
		t.Errorf("README.md has\n%s\nthe command prints\n%s", block, table)
	}
}

// K2: two requirements, and none that came with them.
func TestTwoRequirements(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "mod", "edit", "-json").Output()
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
	var paths []string
	for _, r := range module.Require {
		paths = append(paths, r.Path)
		if r.Indirect {
			t.Errorf("%s is indirect", r.Path)
		}
	}
	slices.Sort(paths)
	if want := []string{"github.com/golang-jwt/jwt/v5", "github.com/lib/pq"}; !slices.Equal(paths, want) {
		t.Errorf("%q, want %q", paths, want)
	}
	if len(module.Replace)+len(module.Exclude)+len(module.Tool) > 0 {
		t.Errorf("replace, exclude or tool in go.mod: %s", out)
	}
}

// Ready when the database answers; when it comes back, so does the service.
func TestHealth(t *testing.T) {
	t.Parallel()
	proxy, through := proxyURL(t, newDatabase(t))
	srv := startServer(t, map[string]string{"DATABASE_URL": through})
	srv.allowErrors("unavailable")
	c := srv.client(t)
	if answer := c.do("GET", "/healthz", nil).want(t, 200); string(answer.body) != "{\"status\":\"ok\"}\n" {
		t.Error(answer)
	}
	proxy.cut()
	wantProblem(t, c.do("GET", "/healthz", nil), 503, "unavailable")
	wantProblem(t, c.do("HEAD", "/healthz", nil), 503, "unavailable")
	proxy.resume()
	waitUntil(t, "healthy again", func() bool { return c.elsewhere().do("GET", "/healthz", nil).status == 200 })
}

// A rawClient keeps one connection and sends one request after the other, and never
// one again: what net/http's client repeats by itself would hide a lost request.
type rawClient struct {
	conn net.Conn
	in   *bufio.Reader
}

func dialRaw(addr string) (*rawClient, error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &rawClient{conn, bufio.NewReader(conn)}, nil
}

func (c *rawClient) send(request string) error {
	_, err := io.WriteString(c.conn, request)
	return err
}

func (c *rawClient) receive() (status int, closes bool, err error) {
	answer, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return 0, false, err
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return answer.StatusCode, answer.Close, err
}

// H3: SIGTERM under load. Every request on a connection that was taken is answered,
// queued mail is sent, the process ends with 0.
func TestStopAnswersEveryRequest(t *testing.T) {
	t.Parallel()
	mails := newMailServer(t, mailOptions{})
	p := startProcess(t, mails.env())
	mails.fail(mailHangs) // until the stop has begun
	var emails []string
	for range 20 { // more than there are workers: some are on their way, some in the queue
		email := newEmail()
		testUser(t, p.env["DATABASE_URL"], email, roleMember)
		emails = append(emails, email)
		p.client(t).do("POST", "/auth/otp/request", map[string]string{"email": email}).want(t, 200)
	}
	idle, err := dialRaw(p.addr) // has had an answer, and asks again once the stop has begun
	if err != nil {
		t.Fatal(err)
	}
	defer idle.conn.Close()
	const again = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
	idle.send(again)
	if status, _, err := idle.receive(); status != 200 || err != nil {
		t.Fatalf("%d, %v", status, err)
	}
	late, err := dialRaw(p.addr) // half a request is there when the signal comes
	if err != nil {
		t.Fatal(err)
	}
	defer late.conn.Close()
	email := newEmail()
	testUser(t, p.env["DATABASE_URL"], email, roleMember)
	body := fmt.Sprintf(`{"email":%q}`, email)
	request := fmt.Sprintf("POST /auth/otp/request HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	if err := late.send(request[:len(request)-5]); err != nil {
		t.Fatal(err)
	}

	var answered, told atomic.Int64
	var clients sync.WaitGroup
	for n := range 8 {
		clients.Go(func() {
			c, err := dialRaw(p.addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.conn.Close()
			for i := 0; ; i++ {
				err := c.send(fmt.Sprintf("GET /healthz HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 10.%d.%d.%d\r\n\r\n", n, i/250, i%250))
				status, closes, receiveErr := c.receive()
				if err = errors.Join(err, receiveErr); err != nil || status != 200 {
					t.Errorf("request %d of client %d was lost: %d, %v", i, n, status, err)
					return
				}
				if answered.Add(1); closes {
					told.Add(1)
					return
				}
			}
		})
	}
	waitUntil(t, "load", func() bool { return answered.Load() > 500 })
	p.signal(t, syscall.SIGTERM)
	waitUntil(t, "no new connections", func() bool {
		c, err := net.Dial("tcp", p.addr)
		if err == nil {
			c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	idle.send(again)
	// An error: on a busy machine the 500 ms for requests that are just arriving may be over.
	if _, closes, err := idle.receive(); err == nil && !closes {
		t.Error("a client was not told that its connection ends")
	}
	if err := late.send(request[len(request)-5:]); err != nil {
		t.Error(err)
	}
	if status, _, err := late.receive(); status != 200 || err != nil {
		t.Errorf("the request that was under way: %d, %v", status, err)
	}
	clients.Wait()
	if told.Load() != 8 {
		t.Errorf("%d of 8 clients were told that their connection ends", told.Load())
	}
	// Shutdown looks at least every 500 ms whether all is answered. From then on only the mail
	// keeps the process; nothing announces that.
	select {
	case <-p.done:
		t.Errorf("the process ended with mail in its queue\n%s", p.log)
	case <-time.After(2 * time.Second):
	}
	mails.release()
	if code := p.wait(t); code != 0 {
		t.Errorf("exit %d\n%s", code, p.stderr)
	}
	if n := len(mails.received()); n != len(emails)+1 {
		t.Errorf("%d mails, want %d", n, len(emails)+1)
	}
	for _, email := range append(emails, email) {
		mails.waitMail(t, email)
	}
}

// H3: a mail that a worker is just sending, with none behind it in the queue, is finished too.
func TestStopWaitsForTheLastMail(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{})
	p := startProcess(t, m.env())
	m.fail(mailHangs)
	email := newEmail()
	testUser(t, p.env["DATABASE_URL"], email, roleMember)
	askCode(p.client(t), email)
	waitUntil(t, "a worker at its mail", func() bool { open, _, _ := m.connections(); return open == 1 })
	p.signal(t, syscall.SIGTERM)
	select {
	case <-p.done:
		t.Errorf("the process ended in the middle of a mail\n%s", p.log)
	case <-time.After(drainTime + 2*time.Second): // Shutdown takes 500 ms at most; nothing announces its end
	}
	m.release()
	m.waitMail(t, email)
	if code := p.wait(t); code != 0 {
		t.Errorf("exit %d\n%s", code, p.stderr)
	}
}

// A mail server that never answers does not keep a stopping server for ever: what is still
// queued is given up, the log says so, and so does the exit status.
func TestStopGivesUpOnMail(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{})
	p := startProcess(t, m.env())
	p.allowErrors("code not sent", "stopped with mail unsent")
	m.fail(mailHangs)
	for range 4 * mailWorkers { // each attempt takes mailTimeout: the last of them would begin after stopTimeout
		email := newEmail()
		testUser(t, p.env["DATABASE_URL"], email, roleMember)
		askCode(p.client(t), email)
	}
	waitUntil(t, "every worker at its mail", func() bool { open, _, _ := m.connections(); return open == mailWorkers })
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t); code != 1 {
		t.Errorf("exit %d", code)
	}
	if p.log.count(`"msg":"stopped with mail unsent"`, `"level":"ERROR"`) != 1 {
		t.Errorf("no word of it:\n%s", p.log)
	}
}

// A request that does not end does not keep a stopping server: it is cut off, the log says
// so, and so does the exit status; and the next start takes back what it left.
func TestStopCutsOffWhatDoesNotEnd(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	c, _ := p.member(t, roleMember)
	upload := c.startUpload("a.txt")
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t); code != 1 { // sooner than patience; the upload by itself has a minute at least
		t.Errorf("exit %d", code)
	}
	p.log.waitFor(t, `"msg":"stopped"`, `"requestsCutOff":true`)
	upload.rest.Close()
	if r := <-upload.answer; r.status != 0 {
		t.Errorf("answered: %v", r)
	}
	p.stderr.mu.Lock()
	p.stderr.lines, p.stderr.partial = nil, "" // it ends with a word of the error; the log check wants none
	p.stderr.mu.Unlock()
	p.ageUnfinished(t) // a younger one could be another server's
	startServer(t, p.env).wantStored(t, 0)
}

// H1: a client that does not read its answers is given up when the time of an answer is
// over.
func TestUnreadAnswersEnd(t *testing.T) {
	t.Parallel()
	srv := startServer(t, stagingEnv(newMailServer(t, mailOptions{})))
	execSQL(t, srv.env["DATABASE_URL"], "insert into hubs (name, description) select 'n', repeat('😀', 2000) from generate_series(1, 100)")
	c, _ := srv.member(t, roleMember)
	conn, err := net.Dial("tcp", srv.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const asked = 80 // answers of 800 KB: more than all buffers between the two hold
	io.WriteString(conn, strings.Repeat(fmt.Sprintf("GET /hubs?limit=100 HTTP/1.1\r\nHost: x\r\nX-Request-Id: unread\r\nCookie: %s=%s\r\n\r\n",
		srv.cookieName(), c.token()), asked))
	var line struct{ Duration time.Duration }
	isStuck := func(text string) bool {
		return strings.Contains(text, `"requestId":"unread"`) && json.Unmarshal([]byte(text), &line) == nil && line.Duration > answerTimeout/2
	}
	_, _, err = srv.log.wait(0, nil, isStuck)
	if err != nil { // patience is about as long
		_, _, err = srv.log.wait(0, nil, isStuck)
	}
	if n := srv.log.count(`"msg":"request"`, `"requestId":"unread"`); err != nil || n == asked || line.Duration > answerTimeout+patience/2 {
		t.Errorf("%d of %d were written, one took %v, %v", n, asked, line.Duration, err)
	}
}

// Ctrl-C stops the server as SIGTERM does: with exit status 0, and the log says so.
func TestInterruptStopsInOrder(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	p.signal(t, syscall.SIGINT)
	if code := p.wait(t); code != 0 {
		t.Errorf("got exit status %d, want 0\n%s", code, p.stderr)
	}
	p.log.waitFor(t, `"msg":"stopped"`, `"requestsCutOff":false`)
}

// A second signal ends the process at once, also while a mail is under way, for which the
// first one lets it live on.
func TestSecondSignalEndsTheProcess(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{})
	p := startProcess(t, m.env())
	p.allowErrors("code not sent") // if no signal ends the process, the mail's timeout does
	m.fail(mailHangs)
	email := newEmail()
	testUser(t, p.env["DATABASE_URL"], email, roleMember)
	askCode(p.client(t), email)
	waitUntil(t, "a worker at its mail", func() bool { open, _, _ := m.connections(); return open == 1 })
	p.signal(t, syscall.SIGTERM)
	// The server may not have heard of the first signal yet, so more are sent until one ends it.
	waitUntil(t, "the end of the process", func() bool {
		p.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.done:
			return true
		default:
			return false
		}
	})
	if p.exit != -1 {
		t.Errorf("got exit status %d, want an end by the signal", p.exit)
	}
}

// A user command whose answer is lost may be done, and it is not sent again: a second "user
// add" would find the user of the first one, and say that nothing was changed.
func TestUserCommandIsSentOnce(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	tap := newWireTap(t, database)
	email := newEmail()
	tap.endAfter(email)
	code, out, errOut := runCLI(map[string]string{"DATABASE_URL": tap.url}, "user", "add", "-role", "admin", email)
	if code != 1 || out != "" || strings.Contains(errOut, "nothing was changed") {
		t.Errorf("got exit %d, output %q, errors %q; want exit 1 and an error that leaves open whether it is done", code, out, errOut)
	}
	if n := queryValue[int](t, database, "select count(*) from users where email = $1 and permission = 'admin'", email); n != 1 {
		t.Errorf("got %d users, want 1: the connection ended after the statement", n)
	}
}

// Addresses are compared in ASCII, also by a database whose own locale gives I another lower
// case. (PostgreSQL takes such a locale from version 15 on.)
func TestAddressesInATurkishDatabase(t *testing.T) {
	t.Parallel()
	pg, err := startShared()
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("test_%d", serial.Add(1))
	execSQL(t, pg.url, "create database "+name+" template template0 encoding utf8 locale_provider icu icu_locale 'tr-TR' locale 'C'")
	t.Cleanup(func() { execSQL(t, pg.url, "drop database "+name+" with (force)") })
	database := withDatabase(pg.url, name)
	if got := queryValue[string](t, database, "select lower('I')"); got != "ı" {
		t.Fatalf("the lower case of I: got %q, want ı: the database is not Turkish", got)
	}
	if err := applySchema(database); err != nil {
		t.Fatal(err)
	}
	srv := startServer(t, map[string]string{"DATABASE_URL": database})
	for _, stored := range []string{"INFO@IRIS.EXAMPLE", "istanbul@izmir.example"} {
		lower, upper := strings.ToLower(stored), strings.ToUpper(stored)
		for _, command := range []struct {
			args []string
			exit int
		}{
			{[]string{"add", stored}, 0}, {[]string{"add", lower}, 1}, {[]string{"add", upper}, 1},
			{[]string{"suspend", upper}, 0}, {[]string{"activate", lower}, 0},
			{[]string{"role", upper, "admin"}, 0}, {[]string{"show", upper}, 0}, {[]string{"show", lower}, 0},
		} {
			code, out, errOut := runCLI(srv.env, append([]string{"user"}, command.args...)...)
			if code != command.exit {
				t.Errorf("user %s: got exit %d, %s%s; want exit %d", command.args, code, out, errOut, command.exit)
			}
		}
		c := srv.client(t)
		askCode(c, upper)
		presentCode(c, lower, srv.code(t, stored)).want(t, 200)
		if code, _, errOut := runCLI(srv.env, "user", "signout", upper); code != 0 {
			t.Errorf("user signout %s: got exit %d, %s; want 0", upper, code, errOut)
		}
		wantProblem(t, c.do("GET", "/auth/session", nil), 401, rejected)
	}
}
