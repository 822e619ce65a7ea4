package deploy

import (
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// The files of settings that deploy/ has.
var envFiles = []string{"production.env", "staging.env"}

// envSecrets are the settings that hold a secret. The tests' PostgreSQL has no TLS. With
// sslmode=verify-full, as the files advise, the server does without the database rather than
// without TLS.
func envSecrets(t *testing.T) map[string]string {
	return map[string]string{
		"DATABASE_URL":   strings.Replace(hubstest.NewDatabase(t), "=disable", "=verify-full", 1),
		"SESSION_SECRET": "a-secret-of-more-than-thirty-two-bytes",
		"SMTP_URL":       "smtps://u:p@mail.example.com:465",
	}
}

// Both files explain every setting that docs/deploy.md has, and set no other one and no secret.
func TestEnvironmentFiles(t *testing.T) {
	t.Parallel()
	secrets := envSecrets(t)
	row := regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\| ")
	settings := row.FindAllStringSubmatch(hubstest.ReadFile(t, "docs/deploy.md"), -1)
	for _, name := range envFiles {
		text := shipped(t, name)
		unknown := readEnv(t, name)
		for _, setting := range settings {
			if secrets[setting[1]] == "" {
				delete(unknown, setting[1])
			}
			// Explained: set, or named as unset, right below a comment, maybe with another.
			explained := regexp.MustCompile(`(?m)^# .*\n(#?[A-Z_]+=.*\n)?#?` + setting[1] + `=`)
			if !explained.MatchString(text) {
				t.Errorf("%s does not explain %s", name, setting[1])
			}
		}
		if len(unknown) > 0 {
			t.Errorf("%s sets %v: a secret, or not in docs/deploy.md", name, unknown)
		}
	}
}

// The server takes both files: nothing but TLS is missing.
func TestServerTakesEnvironmentFiles(t *testing.T) {
	t.Parallel()
	for _, name := range envFiles {
		values := readEnv(t, name)
		maps.Copy(values, envSecrets(t))
		code, _, errOut := hubstest.Run(values, "serve")
		if code != 1 || !strings.Contains(errOut, "SSL is not enabled") {
			t.Errorf("%s: exit status %d, want 1 for want of TLS: %s", name, code, errOut)
		}
	}
}

// The proxy that both files trust is one address: any peer within a wider range can claim to be any
// client.
func TestEnvironmentFilesTrustOneProxy(t *testing.T) {
	t.Parallel()
	for _, name := range envFiles {
		value := readEnv(t, name)["TRUSTED_PROXIES"]
		proxies, err := netip.ParsePrefix(value)
		if err != nil || !proxies.IsSingleIP() {
			t.Errorf("%s: TRUSTED_PROXIES is %q, want one address", name, value)
		}
	}
}

// T8: browsers send no cookie of production to staging, and allow no page of the one on the
// other: the domains in the two files are strangers.
func TestStagingAndProductionShareNoDomain(t *testing.T) {
	t.Parallel()
	domains := func(name string) []string {
		env := readEnv(t, name)
		text := env["COOKIE_DOMAIN"] + " " + env["ALLOWED_ORIGIN_DOMAIN"] + " " + env["ALLOWED_ORIGINS"]
		return strings.Fields(strings.NewReplacer("https://", "", ",", " ").Replace(text))
	}
	staging := domains("staging.env")
	production := domains("production.env")
	if len(staging) < 2 || len(production) < 2 {
		t.Fatalf("got %q and %q, want a cookie's domain and origins in each", staging, production)
	}
	for _, a := range staging {
		for _, b := range production {
			if strings.HasSuffix(a, b) || strings.HasSuffix(b, a) {
				t.Errorf("staging has %s, production %s: one holds the other", a, b)
			}
		}
	}
}

// The units as systemd itself rates and reads them.
func TestSystemdUnits(t *testing.T) {
	t.Parallel()
	analyze := hubstest.Need(t, "systemd-analyze", "systemd")
	dir := t.TempDir()
	text := shipped(t, "hubs.service", "ExecStart=/usr/local/bin/hubs ", "ExecStart=/bin/true ")
	unit := writeFile(t, dir, "hubs.service", text)
	writeFile(t, dir, "hubs.socket", shipped(t, "hubs.socket"))
	rate := exec.Command(analyze, "security", "--offline=yes", "--no-pager", unit)
	out, err := rate.CombinedOutput()
	// 1.1 as shipped, by systemd 252; other versions differ by a tenth.
	if err != nil || !regexp.MustCompile(`hubs\.service: (0\.[0-9]|1\.[0-3]) `).Match(out) {
		t.Errorf("%v, want an exposure of at most 1.3\n%s", err, out)
	}
	for _, name := range []string{"hubs.service", "hubs.socket"} {
		verify := exec.Command(analyze, "verify", "--man=no", dir+"/"+name)
		verify.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
		out, err := verify.CombinedOutput()
		if err != nil || len(out) > 0 {
			t.Errorf("systemd-analyze verify %s: %v\n%s", name, err, out)
		}
	}
}

// What the units say fits the server and its settings.
func TestUnitsFitTheServer(t *testing.T) {
	t.Parallel()
	env := readEnv(t, "production.env")
	units := shipped(t, "hubs.service") + shipped(t, "hubs.socket")
	for name, want := range map[string]string{
		"ListenStream":      env["ADDR"],
		"RequiresMountsFor": env["FILES_DIR"],
		// N1: any end is followed by a start, also status 2, which is a crash of Go, too.
		"Restart":                  "always",
		"RestartPreventExitStatus": "",
		"StartLimitIntervalSec":    "0",
		"TriggerLimitIntervalSec":  "0",
		// Each refusal writes a line; an attack must not drop the lines of others.
		"LogRateLimitIntervalSec": "0",
	} {
		line := regexp.MustCompile(`(?m)^` + name + `=.*$`)
		lines := strings.Join(line.FindAllString(units, -1), " ")
		if got := strings.TrimPrefix(lines, name+"="); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}
