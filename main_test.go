package main

// Tests of the settings: their values in each environment, and the table in docs/deploy.md. At the
// end, tests of the project itself: the table of limits, the unit, the send buffer, requirements,
// the page.

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"hubs/internal/hubstest"
)

// A settingCase has values of one setting that the server accepts and rejects, each with the
// reason.
type settingCase struct {
	variable     string
	environments []string
	good, bad    map[string]string // reasons by value; the value "" means that it is unset
}

var allEnvironments = []string{envLocal, envStaging, envProduction}

// testKey is the shortest session key with as few different bytes as one may have.
var testKey = strings.Repeat("k", 23) + "012345678"

// settingCases has values of all settings. No output may show secret-1.
//
// ADDR and FILES_DIR are checked when they are used: see TestCommands and TestFilesDirMissing.
// TestQuotesAndBlanksAreRefused has the values in quotes or with white space around them.
var settingCases = []settingCase{
	{
		variable:     "APP_ENV",
		environments: []string{envLocal},
		bad: map[string]string{
			"":      "no environment is the default",
			"prod":  "no abbreviation",
			"Local": "lower case only",
		},
	},
	{
		variable:     "DATABASE_URL",
		environments: allEnvironments,
		good: map[string]string{
			"postgres://u:p@h/d":       "a URL",
			"postgresql://u:p@h/d":     "the other scheme",
			"host=h user=u password=p": "keywords",
			"postgres://u:p@h1,h2/d?port=5432,5433&target_session_attrs=read-write":                "two hosts as a URL",
			"host=h1,h2 port=5432,5433 user=u password=p dbname=d target_session_attrs=read-write": "two hosts by keywords",
			"postgres://u:p@h1:5432/d?options=-c%20search_path=a,b":                                "a comma in an option is no second host",
			"postgres://u:p@h1:5432/d?application_name=hubs:1,2":                                   "nor is one in a name",
		},
		bad: map[string]string{
			"":                                           "is required",
			"secret-1":                                   "a word",
			"u:secret-1@h/d":                             "no scheme",
			"postgres://u:secret-1@[h/d":                 "no URL",
			"postgres://u:secret-1%zz@h/d":               "a bad escape",
			"mysql://u:secret-1@h/d":                     "another database",
			"jdbc:postgresql://u:secret-1@h/d":           "a form of Java",
			"postgresql+asyncpg://u:secret-1@h/d":        "a form of Python",
			"postgres://u:secret-1@h1:5432,h2:5432/d":    "two hosts in libpq's form",
			"postgres://h1:5432,h2/d?password=secret-1":  "two hosts, one of them with a port",
			"postgres://u:secret-1@h:65536/d":            "a port too high",
			"postgres://u:secret-1@h:x/d":                "no number for a port",
			"host=h user=u password=secret-1 port=99999": "a port too high, by keyword",
		},
	},
	{
		variable:     "SESSION_SECRET",
		environments: allEnvironments,
		good: map[string]string{
			testKey:                 "the shortest",
			testKey + "," + testKey: "two, as while keys are changed",
			"éèêëàâäùûüôöîïçÿ":      "32 bytes, though 16 letters",
		},
		bad: map[string]string{
			"":                                    "is required",
			"short-secret-1":                      "too short",
			strings.Repeat("k", 22) + "012345678": "31 bytes",
			testKey + "," + strings.Repeat("k", 22) + "012345678": "the second has 31 bytes",
			testKey + ",":                                                  "an empty key behind the comma",
			"," + testKey:                                                  "an empty key before it",
			testKey + ",secret-1," + testKey:                               "a short one between two good ones",
			testKey + ", " + testKey:                                       "a space before the second",
			testKey + "\n," + testKey:                                      "a line break behind the first",
			strings.Repeat("k", 64):                                        "one byte again and again",
			strings.Repeat("secret-1", 8):                                  "seven different bytes",
			strings.Repeat("012345678", 9):                                 "nine different bytes, however many",
			testKey + ",éééééééééééééééé":                                  "two different bytes in the second, beyond ASCII",
			strings.Repeat("k", 23) + "001234567":                          "nine different bytes, of 32",
			"REPLACE-WITH-THE-OUTPUT-OF-openssl-rand-base64-48":            "the placeholder of deploy/",
			testKey + ",REPLACE-WITH-THE-OUTPUT-OF-openssl-rand-base64-48": "the placeholder as the second",
		},
	},
	{
		variable:     "COOKIE_PREFIX",
		environments: []string{envLocal},
		good: map[string]string{
			"":      "the default",
			"app":   "a name",
			"a-b_1": "every kind of character",
		},
		bad: map[string]string{
			"__Host-app":   "does not go with a Domain",
			"__host-app":   "browsers compare it without regard to case",
			"__Secure-app": "there is TLS",
			"__secure-app": "browsers compare it without regard to case",
			"__Http-app":   "only over HTTPS, too",
			"a b":          "a space",
			"a;":           "ends the name",
			"a=b":          "ends the name",
			"é":            "not ASCII",
		},
	},
	{
		variable:     "COOKIE_PREFIX",
		environments: []string{envStaging, envProduction},
		good: map[string]string{
			"":             "the default",
			"app":          "a name",
			"__Secure-app": "there is TLS",
		},
		bad: map[string]string{
			"__Host-app": "does not go with a Domain",
			"__HOST-app": "browsers compare it without regard to case",
			"a b":        "a space",
			"a,b":        "a comma",
		},
	},
	{
		variable:     "COOKIE_DOMAIN",
		environments: []string{envLocal},
		good: map[string]string{
			"": "unset",
		},
		bad: map[string]string{
			"example.com": "localhost is in no domain",
			"localhost":   "browsers refuse it as a Domain",
		},
	},
	{
		variable:     "COOKIE_DOMAIN",
		environments: []string{envStaging, envProduction},
		good: map[string]string{
			"example.com":   "two labels",
			"a.b-c.example": "three labels",
			"Example.com":   "in any case",
		},
		bad: map[string]string{
			"":                     "the front ends need the cookie",
			".example.com":         "no dot before it",
			"example.com:80":       "no port",
			"https://example.com":  "no scheme",
			"example.com/":         "no path",
			"a b":                  "a space",
			"-a.example":           "a hyphen first",
			"a;b":                  "would end the attribute",
			"example.com; Path=/x": "another attribute",
			"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.example": "a label of 64 letters",
			"com":         "a top-level domain",
			"localhost":   "one label",
			"10.0.0.1":    "IPv4",
			"127.0.0.1":   "IPv4 of this machine",
			"127.1":       "the same for short",
			"::1":         "IPv6",
			"[::1]":       "IPv6 in brackets",
			"2001:db8::1": "IPv6, long",
		},
	},
	{
		variable:     "ALLOWED_ORIGINS",
		environments: []string{envLocal, envStaging},
		good: map[string]string{
			"":                  "the default",
			"https://a.example": "one",
			"http://localhost:3000,https://b.example:8443": "two, with ports",
			"http://a.example:443":                         "the default port of another scheme",
			"http://127.0.0.1:3000,http://[::1]:3000":      "addresses",
			"http://xn--bcher-kva.example":                 "an international domain",
		},
		bad: map[string]string{
			"*":                      "every origin",
			"null":                   "the origin of any sandboxed frame",
			"a.example":              "no scheme",
			"https://a.example:443":  "browsers leave the default port out",
			"http://a.example:80":    "browsers leave the default port out",
			"http://a.example:080":   "a zero before the port",
			"https://a.example:":     "a colon without a port",
			"https://a.example.":     "a dot at the end",
			"https://a..example":     "an empty label",
			"https://-a.example":     "a hyphen before a label",
			"https://a-.example":     "a hyphen behind a label",
			"http://1.2.3":           "no address: browsers make 1.2.0.3 of it",
			"http://127.0.0.01":      "no form of an address that browsers send",
			"http://[::0001]":        "browsers shorten an address",
			"https://a.example/":     "a slash behind: no origin has one",
			"https://a.example/x":    "a path",
			"https://*.example":      "no pattern",
			"ftp://a.example":        "another scheme",
			"https://a.example,x":    "the second is bad",
			"https://u@a.example":    "a user",
			"HTTPS://a.example":      "browsers send lower case",
			"https://A.example":      "browsers send lower case",
			"https://":               "no host",
			"http://localhost:65536": "the first port too high",
			"http://localhost:99999": "five digits, but no port",
			"http://localhost:0":     "no port to connect to",
			"http://localhost:3000,http://localhost:70000": "the port of the second",
		},
	},
	{
		variable:     "ALLOWED_ORIGINS",
		environments: []string{envProduction},
		good: map[string]string{
			"": "unset",
		},
		bad: map[string]string{
			"https://a.example": "there, ALLOWED_ORIGIN_DOMAIN allows them",
		},
	},
	{
		variable:     "ALLOWED_ORIGIN_DOMAIN",
		environments: []string{envLocal, envStaging},
		good: map[string]string{
			"": "unset",
		},
		bad: map[string]string{
			"example.com": "there, ALLOWED_ORIGINS lists them",
		},
	},
	{
		variable:     "ALLOWED_ORIGIN_DOMAIN",
		environments: []string{envProduction},
		good: map[string]string{
			"example.com":     "two labels",
			"app.example.com": "three labels",
			"Example.com":     "in any case",
		},
		bad: map[string]string{
			"":                    "is required",
			".example.com":        "no dot before it",
			"*.example.com":       "no pattern",
			"https://example.com": "no scheme",
			"example.com:443":     "no port",
			"example.com/":        "no path",
			"com":                 "a top-level domain",
			"localhost":           "one label",
			"10.0.0.1":            "IPv4",
			"10.1":                "IPv4 for short",
			"::1":                 "IPv6",
		},
	},
	{
		variable:     "TRUSTED_PROXIES",
		environments: allEnvironments,
		good: map[string]string{
			"":                         "none",
			"10.0.0.0/8":               "one",
			"10.0.0.0/8,fd00::/8":      "both families",
			"10.0.0.0/8, 192.0.2.1/32": "a space after the comma",
		},
		bad: map[string]string{
			"10.0.0.1":                 "no length",
			"10.0.0.0/33":              "longer than an address",
			"x":                        "no address",
			"10.0.0.0/8,proxy.example": "a name",
			"10.0.0.0-10.1.0.0":        "a range",
			"0.0.0.0/0":                "trusts every client",
			"::/0":                     "trusts every client in IPv6",
			"::ffff:10.0.0.0/104":      "IPv4 in the form of IPv6: it would match no address",
			"10.0.0.0/0":               "trusts every client, whatever the address",
			"10.0.0.0/8,0.0.0.0/0":     "the second trusts every client",
			"10.0.0.0/8, ::/0":         "the same behind a space",
		},
	},
	{
		variable:     "SMTP_URL",
		environments: allEnvironments,
		good: map[string]string{
			"smtp://h:587":                                 "STARTTLS",
			"smtps://u:p@h":                                "TLS and a user",
			"smtp://127.0.0.1:25":                          "IPv4",
			"smtp://[::1]:25":                              "IPv6",
			"smtps://u%40x:p%2F@mail.example:465/":         "escapes, and a slash behind",
			"smtp://ada@example.com:p@ss@mail.example:587": "@ without an escape: the last one counts",
		},
		bad: map[string]string{
			"http://u:secret-1@h":        "another scheme",
			"h:25":                       "no scheme",
			"smtp://":                    "no host",
			"smtp://u:secret-1@[h":       "no URL",
			"smtp://u:secret-1@h:x":      "no number for a port",
			"smtp://u:secret-1@":         "no host behind the user",
			"smtp://h:0":                 "no port to connect to",
			"smtp://h:999999":            "six digits, but no port",
			"smtp://h:65536":             "the first port too high",
			"smtps://u:secret-1@h:65536": "the same with a password",
			"smtp://h/path":              "a path, which would mean nothing",
			"smtp://h?starttls=no":       "an option, which would mean nothing",
			"smtp://h#x":                 "a fragment",
			"smtp://u:secret-1@h h":      "a space",
		},
	},
	{
		variable:     "SMTP_URL",
		environments: []string{envStaging, envProduction},
		bad: map[string]string{
			"": "mail must be sent",
		},
	},
	{
		variable:     "SMTP_URL",
		environments: []string{envLocal},
		good: map[string]string{
			"": "codes are printed",
		},
	},
	{
		variable:     "MAIL_FROM",
		environments: []string{envStaging, envProduction},
		good: map[string]string{
			"a@b.example":                   "an address",
			"Hubs <a@b.example>":            "with a name",
			`"Hubs, sign-in" <a@b.example>`: "with a name in quotes",
		},
		bad: map[string]string{
			"":                                  "is required",
			"a":                                 "no domain",
			"a@b@c":                             "two @",
			"a@b.example, c@d.example":          "two addresses",
			"<a@b.example>\r\nBcc: x@y.example": "another header",
			"ä@b.example":                       "not ASCII",
		},
	},
	{
		variable:     "ADDR",
		environments: allEnvironments,
		good: map[string]string{
			"":               "the default",
			"127.0.0.1:8080": "this machine alone",
			":80":            "every address",
		},
	},
	{
		variable:     "FILES_DIR",
		environments: allEnvironments,
		good: map[string]string{
			"":       "the default",
			"/tmp/x": "absolute",
			"x":      "relative",
		},
	},
	{
		variable:     "MAX_UPLOAD_BYTES",
		environments: allEnvironments,
		good: map[string]string{
			"":  "the default",
			"1": "the least",
		},
		bad: map[string]string{
			"0":                   "no upload at all",
			"-1":                  "negative",
			"x":                   "no number",
			"+5":                  "a sign",
			"1.5":                 "no whole number",
			"10MB":                "no units",
			"9223372036854775808": "more than 63 bits",
			"2000000000000":       "more than 2^40",
		},
	},
}

// validSettings returns valid settings for an environment. No test connects to the hosts in them.
func validSettings(name string) map[string]string {
	env := map[string]string{
		"APP_ENV":        name,
		"DATABASE_URL":   "postgres://u:database-password@127.0.0.1:1/hubs",
		"SESSION_SECRET": "session-secret-of-thirty-two-byte",
		"SMTP_URL":       "smtps://u:mail-password@127.0.0.1:465",
		"MAIL_FROM":      "hubs@example.com",
	}
	if name != envLocal {
		env["COOKIE_DOMAIN"] = "example.com"
	}
	if name == envProduction {
		env["ALLOWED_ORIGIN_DOMAIN"] = "example.com"
	}
	return env
}

// matchesInProduct is hubstest.Matches in all files of the server.
func matchesInProduct(t *testing.T, expression string) (found []string) {
	t.Helper()
	paths, _ := filepath.Glob("*.go") // the pattern is well formed
	for _, path := range paths {
		if !strings.HasSuffix(path, "_test.go") {
			found = append(found, hubstest.Matches(t, path, expression)...)
		}
	}
	return found
}

// settings returns the names of all settings, which are the arguments of setting and list in the
// code.
func settings(t *testing.T) []string {
	t.Helper()
	names := matchesInProduct(t, `settings\.(?:get|list|secret)\("(\w+)"`)
	slices.Sort(names)
	return slices.Compact(names)
}

// docs/deploy.md explains every setting of the server, and no other. settingCases has values of
// every setting, and of no other.
func TestSettingsAreExplained(t *testing.T) {
	t.Parallel()
	read := settings(t)
	explained := hubstest.Matches(t, "docs/deploy.md", "(?m)^\\| `([A-Z_]+)` \\|[^|]+\\|$")
	var tried []string
	for _, c := range settingCases {
		tried = append(tried, c.variable)
	}
	for _, name := range slices.Concat(read, explained, tried) {
		for place, names := range map[string][]string{
			"the server":     read,
			"docs/deploy.md": explained,
			"settingCases":   tried,
		} {
			if !slices.Contains(names, name) {
				t.Errorf("%s: the setting %s is missing", place, name)
			}
		}
	}
	document := hubstest.ReadFile(t, "docs/deploy.md")
	for _, value := range matchesInProduct(t, `settings\.get\("\w+", "([^"]+)"`) {
		if !strings.Contains(document, value) {
			t.Errorf("docs/deploy.md: the default %s is missing", value)
		}
	}
}

// loadWith loads valid settings for an environment with one of them changed, and returns the error.
func loadWith(t *testing.T, environment, variable, value string) error {
	t.Helper()
	env := validSettings(environment)
	env[variable] = value
	for _, name := range settings(t) {
		t.Setenv(name, env[name])
	}
	_, err := loadConfig()
	return err
}

// The server accepts every good value of a setting. For a bad value, the error names the setting
// and has no secret.
func TestSettingsAreChecked(t *testing.T) {
	for _, c := range settingCases {
		for _, environment := range c.environments {
			for value, reason := range c.good {
				name := fmt.Sprintf("%s/good %s=%q", environment, c.variable, value)
				t.Run(name, func(t *testing.T) {
					if err := loadWith(t, environment, c.variable, value); err != nil {
						t.Errorf("%s: got %v, want no error", reason, err)
					}
				})
			}
			for value, reason := range c.bad {
				name := fmt.Sprintf("%s/bad %s=%q", environment, c.variable, value)
				t.Run(name, func(t *testing.T) {
					err := loadWith(t, environment, c.variable, value)
					if err == nil || !strings.Contains("\n"+err.Error(), "\n"+c.variable+": ") {
						t.Errorf("%s: got the error %v, want one that complains of %s",
							reason, err, c.variable)
					}
					wantNoneIn(t, err, "secret-1", "session-secret", "-password")
					if c.variable == "SESSION_SECRET" && value != "" {
						wantNoneIn(t, err, value)
					}
				})
			}
		}
	}
}

// wantNoneIn checks that the error has none of the secrets.
func wantNoneIn(t *testing.T, err error, secrets ...string) {
	t.Helper()
	for _, secret := range secrets {
		if strings.Contains(fmt.Sprint(err), secret) {
			t.Errorf("got the error %v, want no secret in it", err)
		}
	}
}

// Whatever the setting, a value with quotes or white space around it is refused, by a sentence that
// says so. docker --env-file keeps quotes, and secrets from files end in a line break.
func TestQuotesAndBlanksAreRefused(t *testing.T) {
	for _, environment := range allEnvironments {
		for _, name := range settings(t) {
			forms := []string{`"_"`, "'_'", " _", "\t_", "_ ", "_\n", "_\r\n"}
			if name != "MAIL_FROM" { // which may begin with a name in quotes
				forms = append(forms, `"_`, "'_")
			}
			if name != "DATABASE_URL" { // which may end in a password in quotes
				forms = append(forms, `_"`, "_'")
			}
			value := cmp.Or(validSettings(environment)[name], "x")
			var accepted []string // or refused in other words
			for _, form := range forms {
				err := loadWith(t, environment, name, strings.Replace(form, "_", value, 1))
				sentence := "\n" + name + ": must not be in quotes, or begin or end with"
				if !strings.Contains(fmt.Sprint("\n", err), sentence) {
					accepted = append(accepted, form)
				}
				wantNoneIn(t, err, "session-secret", "-password")
			}
			if accepted != nil {
				t.Errorf("%s: %s: got no sentence about quotes and spaces for these forms: %q",
					environment, name, accepted)
			}
		}
	}
}

// The session keys in the examples of deploy/ are the placeholder that the server refuses, because an
// operator may forget to replace it.
func TestExampleKeysAreRefused(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"deploy/production.env", "deploy/staging.env"} {
		keys := hubstest.Matches(t, name, `SESSION_SECRET=(\S+)`)
		hubstest.WantEqual(t, name, keys, []string{placeholderKey})
	}
}

// documentedRow matches a row of a table whose third column names a constant or a limiter.
var documentedRow = regexp.MustCompile("(?m)^\\| [^|]+ \\| ([^|]+) \\| `(\\w+)` \\|$")

// The numbers of all limits and lifetimes stand in the code and in one table of docs/runbook.md,
// which this test compares. The limits of requests are those of the server; the others are
// constants.
func TestNumbersAreAsDocumented(t *testing.T) {
	t.Parallel()
	runbook := hubstest.ReadFile(t, "docs/runbook.md")
	_, section, _ := strings.Cut(runbook, "\n## Limits and lifetimes\n")
	section, _, _ = strings.Cut(section, "\n## ")
	rows := documentedRow.FindAllStringSubmatch(section, -1)
	if lines := strings.Count(section, "\n|") - 2; len(rows) != lines || lines < 1 {
		t.Errorf("docs/runbook.md: got %d rows with a constant, want all of %d", len(rows), lines)
	}
	s := newServer(config{}, nil, nil)
	limits := map[string]*limiter{
		"requestLimit":     s.requestLimit,
		"fileLimit":        s.fileLimit,
		"codeRequestLimit": s.codeRequestLimit,
		"guessLimit":       s.guessLimit,
	}
	constants := constantsOfProduct(t)
	for _, row := range rows {
		text, name := row[1], row[2]
		if limit := limits[name]; limit != nil {
			burst, period, _ := strings.Cut(text, " in ")
			wantDocumented(t, "requests of "+name, burst, int64(limit.burst))
			wantDocumented(t, "period of "+name, period, int64(limit.period))
			continue
		}
		value, isThere := constants[name]
		if !isThere {
			t.Errorf("docs/runbook.md: got the constant %s, which the code lacks", name)
			continue
		}
		wantDocumented(t, name, text, value)
	}
}

// documentedUnits are the units of the table, in nanoseconds or bytes.
var documentedUnits = map[string]int64{
	"":      1,
	"ms":    int64(time.Millisecond),
	"s":     int64(time.Second),
	"min":   int64(time.Minute),
	"days":  24 * int64(time.Hour),
	"bytes": 1,
	"KiB":   1 << 10,
	"MiB":   1 << 20,
}

// wantDocumented compares a value of the table, such as "10,000", "64 KiB" or "2 s each", with that
// of the code.
func wantDocumented(t *testing.T, name, text string, value int64) {
	t.Helper()
	digits, unit, _ := strings.Cut(strings.TrimSuffix(text, " each"), " ")
	n, err := strconv.ParseInt(strings.ReplaceAll(digits, ",", ""), 10, 64)
	factor := documentedUnits[unit]
	if err != nil || factor == 0 {
		t.Errorf("docs/runbook.md: got the value %q, want a number and one of the units", text)
		return
	}
	if n*factor == value {
		return
	}
	inCode := fmt.Sprint(value)
	if factor >= int64(time.Millisecond) {
		inCode = time.Duration(value).String()
	}
	t.Errorf("docs/runbook.md, the table of limits: got %q for %s, want %s, as in the code", text, name, inCode)
}

// inWords are the numbers that SECURITY.md writes in words.
var inWords = map[int]string{4: "four", 5: "five", 8: "eight", 10: "ten"}

// number writes a number as SECURITY.md does: 2,880.
func number(n int) string {
	if word := inWords[n]; word != "" {
		return word
	}
	digits := strconv.Itoa(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

// The figures of SECURITY.md that follow from limits and lifetimes are those of the code.
func TestFiguresOfSecurityFollow(t *testing.T) {
	t.Parallel()
	minutes := func(d time.Duration) int { return int((d + time.Minute - 1) / time.Minute) }
	seconds := func(d time.Duration) string { return fmt.Sprint(int((d + time.Second - 1) / time.Second)) }
	pause := "a minute,"
	if codeResend != time.Minute {
		pause = "every " + codeResend.String() + ","
	}
	const day = 24 * time.Hour
	guesses := newServer(config{}, nil, nil).guessLimit
	inFlood := maxGuesses * int(day/codeRenew)
	inPeace := guesses.burst * int(day/guesses.period)
	percent := func(guesses int) string { return fmt.Sprintf("%.1f %%", 100*float64(guesses)/codeCount) }
	upload := transferTimeout(26214400+maxFormBytes) + sweepReserve + sweepInterval

	text := strings.Join(strings.Fields(hubstest.ReadFile(t, "SECURITY.md")), " ")
	for _, sentence := range []struct {
		constants string
		words     []any // each is written, with a blank between two
	}{
		{"maxGuesses, codeRenew", []any{maxGuesses, "end it, and a new one comes at most every",
			minutes(codeRenew), "minutes."}},
		{"maxGuesses, codeRenew, guessLimit, codeLength", []any{"That makes", inFlood,
			"guesses a day with a flood (" + percent(inFlood) + "), and", inPeace,
			"without (" + percent(inPeace) + ":"}},
		{"guessLimit", []any{"is free", minutes(guesses.period), "minutes after it was made.",
			"A stranger who takes all of them,", guesses.burst * int(time.Hour/guesses.period),
			"an hour, keeps the user from signing in for as long as they go on, and up to",
			minutes(guesses.period), "minutes longer."}},
		{"codeResend", []any{"A mailbox gets at most one mail", pause}},
		{"maxConversations", []any{"Who knows", maxConversations, "accounts,"}},
		{"sessionTTL", []any{int(sessionTTL / day), "days without new proof"}},
		{"transferTimeout, sweepReserve, sweepInterval", []any{"stay for", minutes(upload),
			"minutes with the default `MAX_UPLOAD_BYTES`"}},
		{"stallTimeout", []any{"An upload without progress ends after", seconds(stallTimeout), "s;"}},
		{"drainTimeout", []any{"the server reads on for", seconds(drainTimeout), "s,"}},
		{"maxRanges", []any{"A Range header with more than", maxRanges, "ranges is ignored"}},
		{"poolSize", []any{"A hung primary** makes up to", poolSize, "requests fail"}},
		{"maxSearches", []any{maxSearches, "run at once;"}},
		{"arrivalTime, stopTimeout", []any{"SIGTERM still ends it, in",
			seconds(arrivalTime + 2*stopTimeout + time.Second), "s."}},
		{"answerTimeout", []any{"It stays in memory for up to", seconds(answerTimeout), "s if its client"}},
	} {
		var words []string
		for _, word := range sentence.words {
			if n, isNumber := word.(int); isNumber {
				word = number(n)
			}
			words = append(words, word.(string))
		}
		want := strings.Join(words, " ")
		if !strings.Contains(strings.ToLower(text), strings.ToLower(want)) {
			t.Errorf("SECURITY.md: want %q, as %s make it", want, sentence.constants)
		}
	}
	for sentence, maker := range map[string]string{
		fmt.Sprintf("session cookie, which lasts %d days", sessionTTL/day):              "sessionTTL",
		fmt.Sprintf("the limit is %s.", newServer(config{}, nil, nil).codeRequestLimit): "codeRequestLimit",
		fmt.Sprintf("The current version of the terms is %s.", TERMS_VERSION):           "TERMS_VERSION",
	} {
		if !strings.Contains(openAPI, sentence) {
			t.Errorf("web/openapi.json: want %q, as %s makes it", sentence, maker)
		}
	}
}

// constantDeclaration matches constants of a package, or one that is a number.
const constantDeclaration = `(?ms)^(const (?:\(.*?^\)|\w+ = [0-9][^\n]*))`

// constantsOfProduct returns the whole numbers among the constants of this package, by name. It
// looks at the constants alone, because to import all that the rest needs would take seconds.
func constantsOfProduct(t *testing.T) map[string]int64 {
	t.Helper()
	source := []string{"package hubs", `import "time"`}
	paths, _ := filepath.Glob("*.go") // the pattern is well formed
	for _, path := range paths {
		if !strings.HasSuffix(path, "_test.go") {
			source = append(source, hubstest.Matches(t, path, constantDeclaration)...)
		}
	}
	positions := token.NewFileSet()
	file, err := parser.ParseFile(positions, "", strings.Join(source, "\n"), 0)
	hubstest.Must(t, err)
	checker := types.Config{
		Importer: importer.ForCompiler(positions, "source", nil),
		Error:    func(error) {}, // no number needs the types that are missing
	}
	checked, _ := checker.Check("hubs", positions, []*ast.File{file}, nil)
	values := map[string]int64{}
	for _, name := range checked.Scope().Names() {
		if c, ok := checked.Scope().Lookup(name).(*types.Const); ok {
			if n, isWhole := constant.Int64Val(constant.ToInt(c.Val())); isWhole {
				values[name] = n
			}
		}
	}
	return values
}

// H3: systemd gives a stop as long as the server takes, and a second more. A mail that is under way
// when the server stops has time to end.
func TestUnitLeavesTheServerRoom(t *testing.T) {
	t.Parallel()
	least := int((arrivalTime+2*stopTimeout)/time.Second) + 2
	set := hubstest.Matches(t, "deploy/hubs.service", `(?m)^TimeoutStopSec=([0-9]+)$`)
	got, err := strconv.Atoi(strings.Join(set, " "))
	if err != nil || got < least {
		t.Errorf("deploy/hubs.service: got TimeoutStopSec=%q, want at least %d", set, least)
	}
	if mailTimeout >= stopTimeout {
		t.Errorf("got %v for a mail, want less than the stop's %v", mailTimeout, stopTimeout)
	}
}

// H8: The kernel keeps little for a client that reads nothing. Linux doubles the size that is set.
func TestSendBufferIsBounded(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	hubstest.Must(t, err)
	defer listener.Close()
	conn, err := net.Dial("tcp", listener.Addr().String())
	hubstest.Must(t, err)
	defer conn.Close()
	s := newServer(config{}, nil, nil).newHTTPServer()
	s.ConnContext(t.Context(), conn)
	raw, err := conn.(*net.TCPConn).SyscallConn()
	hubstest.Must(t, err)
	size := 0
	raw.Control(func(fd uintptr) {
		size, err = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF)
	})
	if err != nil || size < sendBuffer || size > 2*sendBuffer {
		t.Errorf("got a send buffer of %d bytes, error %v, want at most %d", size, err, 2*sendBuffer)
	}
}

var twoRequirements = regexp.MustCompile(`^module \S+

go \S+

toolchain go\S+

require \(
	github.com/golang-jwt/jwt/v5 v\S+
	github.com/lib/pq v\S+
\)
$`)

// go.mod has two requirements, no indirect requirement, and no replacement for one.
func TestTwoRequirements(t *testing.T) {
	t.Parallel()
	text := hubstest.ReadFile(t, "go.mod")
	if !twoRequirements.MatchString(text) {
		t.Errorf("go.mod: got\n%s\nwant it to match\n%s", text, twoRequirements)
	}
}

var update = flag.Bool("update", false, "write the hashes of web/index.html anew")

// The policy in web/index.html has the hashes of the page's script and style. With a wrong hash, a
// browser ignores the script or the style. With -update, the test writes the hashes.
func TestPageHashes(t *testing.T) {
	page := indexPage
	for _, tag := range []string{"script", "style"} {
		content := hubstest.Matches(t, "web/index.html", "(?s)<"+tag+">(.*)</"+tag+">")
		if len(content) != 1 {
			t.Fatalf("web/index.html: got %d elements %s without attributes, want 1", len(content), tag)
		}
		sum := sha256.Sum256([]byte(content[0]))
		want := tag + "-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
		page = regexp.MustCompile(tag+"-src '[^']*'").ReplaceAllLiteralString(page, want)
		if !strings.Contains(indexPage, want) && !*update {
			t.Errorf("web/index.html: want %s in the policy of its meta element\n"+
				"If the change is intended, run: go test -run TestPageHashes -update .", want)
		}
	}
	if *update {
		hubstest.Must(t, os.WriteFile("web/index.html", []byte(page), 0o644))
	}
}

// K1, K3: A DATABASE_URL is accepted only in one of PostgreSQL's forms, and leads to no other host
// than package url reads from it. No complaint has its password.
func FuzzDatabaseURL(f *testing.F) {
	f.Add("postgres://u:secret-1@db.example:5432/hubs?sslmode=verify-full")
	f.Add("host=db.example user=u password='secret-1' dbname=hubs")
	f.Add("mysql://u:secret-1@db.example/hubs")
	f.Add("postgres://u:secret-1@a,b/hubs?port=1,2")
	f.Add("postgres://u@r/secret-1@db.example/hubs")
	f.Fuzz(func(t *testing.T, text string) {
		if strings.ContainsRune(text, 0) { // no variable can have it
			return
		}
		t.Setenv("DATABASE_URL", text)
		var settings settingReader
		cfg := settings.database()
		if settings != nil {
			if strings.Contains(text, "secret-1") {
				wantNoneIn(t, errors.Join(settings...), "secret-1")
			}
			return
		}
		u, err := url.Parse(text)
		isURL := err == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql")
		if strings.Contains(text, "://") && !strings.Contains(text, "=") && !isURL {
			t.Errorf("got %q accepted", text)
		}
		if isURL && strings.Contains(u.EscapedPath(), "@") {
			t.Errorf("%q: got it accepted, want a complaint: %q may be a part of the password", text, u.Host)
		}
		host, _, _ := strings.Cut(cfg.Host, ",")
		if isURL && utf8.ValidString(u.Host) && u.Hostname() != "" && !u.Query().Has("host") && !u.Query().Has("hostaddr") &&
			!strings.HasPrefix(u.Host, host) && !strings.HasPrefix(u.Hostname(), host) {
			t.Errorf("%q: got the host %q, want %q", text, cfg.Host, u.Hostname())
		}
		if cfg.SSLMode == "" {
			t.Errorf("%q: got no sslmode, want one", text)
		}
	})
}

// K1: An SMTP_URL is accepted only if package url reads a host and a port from it, and nothing behind
// them. No complaint has its password.
func FuzzSMTPURL(f *testing.F) {
	f.Add("smtps://u:secret-1@mail.example:465")
	f.Add("smtp://[::1]:25")
	f.Add("smtp://u:p%40@mail.example:587/path?x#y")
	f.Fuzz(func(t *testing.T, text string) {
		if strings.ContainsRune(text, 0) {
			return
		}
		t.Setenv("SMTP_URL", text)
		t.Setenv("MAIL_FROM", "hubs@example.com")
		var settings settingReader
		m := readMailer(&settings)
		if settings != nil {
			if strings.Contains(text, "secret-1") {
				wantNoneIn(t, errors.Join(settings...), "secret-1")
			}
			return
		}
		isMail := m.server.Scheme == "smtp" || m.server.Scheme == "smtps"
		isBare := strings.Trim(m.server.Path, "/") == "" && m.server.RawQuery == "" && m.server.Fragment == ""
		if !isMail || !isBare || m.server.Hostname() == "" || m.server.Port() == "0" {
			t.Errorf("got %q accepted", text)
		}
	})
}
