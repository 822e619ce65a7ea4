package deploy

import (
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// envFiles are the files with settings in deploy/.
var envFiles = []string{"production.env", "staging.env"}

// secretSettings are the settings that hold a secret.
var secretSettings = []string{"DATABASE_URL", "SESSION_SECRET", "SMTP_URL"}

// Each file explains every setting of docs/deploy.md. It sets no other setting, and no secret. It
// trusts one address as the proxy: each peer in a range could claim to be any client.
func TestEnvironmentFiles(t *testing.T) {
	t.Parallel()
	settings := hubstest.Matches(t, "docs/deploy.md", "(?m)^\\| `([A-Z_]+)` \\| ")
	for _, name := range envFiles {
		text := shipped(t, name)
		unknown := readEnv(t, name)
		proxies, err := netip.ParsePrefix(unknown["TRUSTED_PROXIES"])
		if err != nil || !proxies.IsSingleIP() {
			t.Errorf("%s: got TRUSTED_PROXIES %v, %v, want one address", name, proxies, err)
		}
		for _, setting := range settings {
			if !slices.Contains(secretSettings, setting) {
				delete(unknown, setting)
			}
			// A setting is explained if its line, which may be commented out, follows a comment.
			// One other setting may be in between.
			explained := regexp.MustCompile(`(?m)^# .*\n(#?[A-Z_]+=.*\n)?#?` + setting + `=`)
			if !explained.MatchString(text) {
				t.Errorf("%s does not explain %s", name, setting)
			}
		}
		if len(unknown) > 0 {
			t.Errorf("%s: got %v, want no secret, only settings of docs/deploy.md", name, unknown)
		}
	}
}

// The server accepts the settings of both files, and those of compose.yaml, with each secret in a file of
// its own. It ends only because
// the tests' PostgreSQL has no TLS, and DATABASE_URL has sslmode=verify-full, as the files advise.
func TestServerTakesEnvironmentFiles(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	compose := map[string]string{}
	_, service, _ := strings.Cut(shipped(t, "compose.yaml"), "\n  hubs:\n")
	setting := regexp.MustCompile(`(?m)^      ([A-Z_]+): (.+)$`)
	for _, match := range setting.FindAllStringSubmatch(service, -1) {
		compose[match[1]] = match[2]
	}
	for name, values := range map[string]map[string]string{
		"production.env": readEnv(t, "production.env"),
		"staging.env":    readEnv(t, "staging.env"),
		"compose.yaml":   compose,
	} {
		secrets := map[string]string{
			"DATABASE_URL":   strings.Replace(database, "=disable", "=verify-full", 1),
			"SESSION_SECRET": "a-secret-of-more-than-thirty-two-bytes",
			"SMTP_URL":       "smtps://u:p@mail.example.com:465",
		}
		for setting, secret := range secrets {
			if values[setting] == "" { // compose.yaml has an SMTP_URL without a password
				values[setting+"_FILE"] = hubstest.WriteFile(t, t.TempDir()+"/"+setting, secret+"\n")
			}
		}
		code, _, errOut := hubstest.RunBoth(values, "serve")
		if code != 1 || !strings.Contains(errOut, "SSL is not enabled") {
			t.Errorf("%s: got exit status %d, want 1 because TLS is missing: %s",
				name, code, errOut)
		}
	}
}

// T8: no domain in one file is, or ends with, a domain in the other. So browsers send no cookie of
// production to staging, and neither server allows the other's pages.
func TestStagingAndProductionShareNoDomain(t *testing.T) {
	t.Parallel()
	domains := func(name string) []string {
		env := readEnv(t, name)
		text := env["COOKIE_DOMAIN"] + " " +
			env["ALLOWED_ORIGIN_DOMAIN"] + " " +
			env["ALLOWED_ORIGINS"]
		return strings.Fields(strings.NewReplacer("https://", "", ",", " ").Replace(text))
	}
	staging := domains("staging.env")
	production := domains("production.env")
	if len(staging) < 2 || len(production) < 2 {
		t.Fatalf("got %q and %q, want the cookie's domain and an origin of each",
			staging, production)
	}
	for _, a := range staging {
		for _, b := range production {
			if strings.HasSuffix(a, b) || strings.HasSuffix(b, a) {
				t.Errorf("staging has %s and production %s: one ends with the other", a, b)
			}
		}
	}
}

// systemd rates the exposure of hubs.service at most 1.3, and finds no fault in either unit.
func TestSystemdUnits(t *testing.T) {
	t.Parallel()
	analyze := hubstest.Need(t, "systemd-analyze", "systemd")
	dir := t.TempDir()
	text := shipped(t, "hubs.service", "ExecStart=/usr/local/bin/hubs ", "ExecStart=/bin/true ")
	unit := hubstest.WriteFile(t, dir+"/hubs.service", text)
	hubstest.WriteFile(t, dir+"/hubs.socket", shipped(t, "hubs.socket"))
	rate := exec.Command(analyze, "security", "--offline=yes", "--no-pager", unit)
	out, err := rate.CombinedOutput()
	// systemd 252 rates the shipped unit 1.1. Other versions differ by 0.1.
	if err != nil || !regexp.MustCompile(`hubs\.service: (0\.[0-9]|1\.[0-3]) `).Match(out) {
		t.Errorf("systemd-analyze security: got the error %v, want an exposure of at most 1.3:\n%s",
			err, out)
	}
	for _, name := range []string{"hubs.service", "hubs.socket"} {
		verify := exec.Command(analyze, "verify", "--man=no", dir+"/"+name)
		verify.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
		out, err := verify.CombinedOutput()
		if err != nil || len(out) > 0 {
			t.Errorf("systemd-analyze verify %s: got the error %v, want none and no output:\n%s",
				name, err, out)
		}
	}
}

// The units fit the server and the settings of production.env.
func TestUnitsFitTheServer(t *testing.T) {
	t.Parallel()
	env := readEnv(t, "production.env")
	units := shipped(t, "hubs.service") + shipped(t, "hubs.socket")
	for name, want := range map[string]string{ // "": the units must have no such line
		"ListenStream":      env["ADDR"],
		"RequiresMountsFor": env["FILES_DIR"],
		// N1: systemd restarts the server after any end, also after status 2. A wrong setting has
		// this status, but so has a crash of Go.
		"Restart":                  "always",
		"RestartPreventExitStatus": "",
		"StartLimitIntervalSec":    "0",
		"TriggerLimitIntervalSec":  "0",
		// N1: a transfer takes two descriptors and, while it waits for the disk, a thread.
		"LimitNOFILE": "16384",
		"TasksMax":    "10000",
		// The server logs a line for each refusal. An attack must not make journald drop lines.
		"LogRateLimitIntervalSec": "0",
		// N2: Who breaks into the server can run no program.
		"NoExecPaths": "/",
		// Clients, the database and the mail server may be reached by IPv6.
		"RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
		"ExecPaths":               "/usr/local/bin/hubs",
	} {
		line := regexp.MustCompile(`(?m)^` + name + `=.*$`)
		lines := strings.Join(line.FindAllString(units, -1), " ")
		if got := strings.TrimPrefix(lines, name+"="); got != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	// N2: the secrets come as files that systemd copies for this service alone, and not by the environment.
	for _, name := range secretSettings {
		for _, part := range []string{
			"\nLoadCredential=" + name + ":/etc/hubs/secrets/" + name + "\n",
			name + "_FILE=%d/" + name,
		} {
			if !strings.Contains(units, part) {
				t.Errorf("hubs.service: %q is missing", part)
			}
		}
	}
}

// The image has the licences of what is in it, asks its own health, and collects garbage as the unit
// does.
func TestImageFitsTheServer(t *testing.T) {
	t.Parallel()
	image := shipped(t, "Containerfile")
	_, settings, _ := strings.Cut(shipped(t, "hubs.service"), "\nEnvironment=GOGC=")
	settings, _, _ = strings.Cut("GOGC="+settings, "\n")
	for _, part := range []string{
		"\nCOPY licenses.txt /\n",
		`CMD ["/hubs", "health"]`,
		" " + settings + "\n",
	} {
		if !strings.Contains(image, part) {
			t.Errorf("Containerfile: %q is missing", part)
		}
	}
}
