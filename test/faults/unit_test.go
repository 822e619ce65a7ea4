package faults

import (
	"os"
	"os/exec"
	"testing"

	"hubs/internal/hubstest"
)

// unitScript plays deploy/hubs.service and deploy/hubs.socket: whenever the server ends by itself, it
// starts it again. The listening socket is descriptor 3 and outlives the servers, so no connection
// is refused in between. If the tests are killed, it starts no more servers.
const unitScript = `
	trap 'kill -TERM $server; wait $server; exit $?' TERM
	while kill -0 $PPID 2>/dev/null; do
		sh -c 'LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" serve' "$0" &
		server=$!
		echo "{\"msg\":\"unit: a server starts\",\"pid\":$server}"
		wait $server
		echo "{\"msg\":\"unit: the server has ended\",\"status\":$?}"
		sleep 0.2
	done`

// startUnit is like Start, but starts the server again whenever it ends by itself. The servers share
// the log, which has a line for each of their ends.
func startUnit(t testing.TB, overrides ...map[string]string) *hubstest.Server {
	t.Helper()
	socket, _ := hubstest.ListeningSocket(t, "tcp", "127.0.0.1:0")
	cmd := exec.Command("sh", "-c", unitScript, hubstest.Binary())
	cmd.ExtraFiles = []*os.File{socket}
	return hubstest.StartCommand(t, cmd, overrides...)
}
