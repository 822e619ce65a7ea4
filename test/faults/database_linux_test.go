package faults

import (
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"hubs/internal/hubstest"
)

// D5: If the first address behind the database's name drops packets, the server uses the second one.
// The test gives the server an /etc/hosts of its own. All of 127.0.0.0/8 is this machine.
func TestSecondAddressOfTheDatabase(t *testing.T) {
	t.Parallel()
	hubstest.NeedRoot(t)
	database := hubstest.NewDatabase(t)
	_, through := hubstest.FaultProxyURL(t, database) // listens at 127.0.0.1 only
	u, err := url.Parse(through)
	hubstest.Must(t, err)
	hubstest.FullQueueAt(t, "127.0.0.2:"+u.Port())
	u.Host = "database.test:" + u.Port()
	hosts := filepath.Join(t.TempDir(), "hosts")
	const addresses = "127.0.0.2 database.test\n127.0.0.1 database.test\n"
	hubstest.Must(t, os.WriteFile(hosts, []byte(addresses), 0o600))
	const own = `mount --bind "$0" /etc/hosts && exec "$@"`
	cmd := exec.Command("unshare", "--mount", "sh", "-c", own, hosts, hubstest.Binary(), "serve")
	s, err := hubstest.TryStart(t, cmd, map[string]string{"DATABASE_URL": u.String()})
	if err != nil { // not marked as setup: the server connects when it starts
		t.Fatal(err)
	}
	get(s.Client(t), "/healthz").Want(t, 200)
}
