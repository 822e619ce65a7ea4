// Package deploy tests the files in deploy/: the proxies' configurations, the systemd units, the
// settings, the database role.
//
// The tests run these files as they are shipped. They replace addresses, paths and users, and
// nothing else. Each client connects from an address of its own in 127.0.0.0/8. The proxy sees
// that address and passes it on to the server.
package deploy

import (
	"maps"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }

// shipped returns a file of deploy/ with values replaced. oldNew holds pairs of an old and a new
// value. shipped fails the test if an old value is not in the file.
func shipped(t testing.TB, name string, oldNew ...string) string {
	t.Helper()
	text := hubstest.ReadFile(t, "deploy/"+name)
	for i := 0; i < len(oldNew); i += 2 {
		if !strings.Contains(text, oldNew[i]) {
			t.Fatalf("setup: deploy/%s has no %q to replace", name, oldNew[i])
		}
	}
	return strings.NewReplacer(oldNew...).Replace(text)
}

// readEnv returns the settings in a file of deploy/. It fails the test at a value with quotes or
// backslashes, because systemd would change such a value.
func readEnv(t testing.TB, name string) map[string]string {
	t.Helper()
	env := map[string]string{}
	for line := range strings.Lines(shipped(t, name)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || strings.ContainsAny(value, `"'\`) {
			t.Fatalf("setup: %s: got %q, want NAME=value without quotes and backslashes", name, line)
		}
		env[key] = value
	}
	return env
}

// productionEnv returns the settings of production.env, with a folder of files, a free port and a
// mail server of the test's own.
func productionEnv(t testing.TB) map[string]string {
	t.Helper()
	env := readEnv(t, "production.env")
	env["FILES_DIR"] = t.TempDir()
	env["ADDR"] = "127.0.0.1:0"
	maps.Copy(env, hubstest.NewMailServer(t, hubstest.MailOptions{}).Env())
	return env
}
