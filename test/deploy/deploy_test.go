// Package deploy tests the files in deploy/: proxies, units, settings, the database role.
//
// They run as they are shipped: the tests replace addresses, paths and users in them, and
// nothing else. Clients come from addresses of their own in 127.0.0.0/8, so the client's
// address that the server sees is the one that the proxy saw.
package deploy

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }

// shipped returns a file of deploy/ with values replaced, each of which must be in it.
func shipped(t testing.TB, name string, oldNew ...string) string {
	text := hubstest.ReadFile(t, "deploy/"+name)
	for i := 0; i < len(oldNew); i += 2 {
		if !strings.Contains(text, oldNew[i]) {
			t.Fatalf("deploy/%s has no %q to replace", name, oldNew[i])
		}
	}
	return strings.NewReplacer(oldNew...).Replace(text)
}

// readEnv returns the settings in a file of deploy/, as systemd reads them.
func readEnv(t testing.TB, name string) map[string]string {
	env := map[string]string{}
	for line := range strings.Lines(shipped(t, name)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || strings.ContainsAny(value, `"'\`) {
			t.Fatalf("%s: want NAME=value, got %q", name, line)
		}
		env[key] = value
	}
	return env
}

// productionEnv returns production.env with what each server of the tests has of its own.
func productionEnv(t testing.TB) map[string]string {
	env := readEnv(t, "production.env")
	env["FILES_DIR"] = t.TempDir()
	env["ADDR"] = "127.0.0.1:0"
	maps.Copy(env, hubstest.NewMailServer(t, hubstest.MailOptions{}).Env())
	return env
}

func writeFile(t testing.TB, dir, name, text string) string {
	path := filepath.Join(dir, name)
	err := os.WriteFile(path, []byte(text), 0o644)
	if err != nil {
		t.Fatal(err)
	}
	return path
}
