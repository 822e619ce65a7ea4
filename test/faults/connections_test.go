package faults

import (
	"fmt"
	"os/exec"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// startWithDescriptors starts a server with GOMEMLIMIT and, where the machine permits it, the file
// descriptors of deploy/hubs.service. It uses the plain binary, because the race detector and
// coverage take memory of their own.
func startWithDescriptors(t *testing.T, env ...map[string]string) *hubstest.Server {
	t.Helper()
	const limits = `ulimit -n 16384 || ulimit -n "$(ulimit -H -n)"; GOMEMLIMIT=192MiB exec "$@"`
	cmd := exec.Command("sh", "-c", limits, "sh", hubstest.PlainBinary(), "serve")
	return hubstest.StartCommand(t, cmd, env...)
}

// H8: 3,000 connections that are idle, or whose requests do not arrive, keep nobody out, also without
// a proxy in front. The server then closes them.
func TestIdleConnectionsKeepNobodyOut(t *testing.T) {
	t.Parallel()
	s := startWithDescriptors(t)
	c, _ := s.Member(t, "member")
	const get = "GET /openapi.json HTTP/1.1\r\nHost: x\r\n"
	const post = "POST /auth/otp/request HTTP/1.1\r\nHost: x\r\n" +
		"Content-Type: application/json\r\nContent-Length: 30\r\n\r\n"
	sent := []string{"", get, post + "{", get + "\r\n"} // the last one gets its answer
	var conns []*hubstest.Conn
	for i := range 3000 {
		conn := hubstest.Dial(t, s.Addr)
		conn.SetDeadline(time.Now().Add(4 * hubstest.Patience))
		conn.Begin(sent[i%len(sent)])
		conns = append(conns, conn)
	}

	c.Elsewhere().Get("/hubs").Want(t, 200)
	path := c.Store("a.txt", "content")
	c.WantFile(path, "content")

	for _, conn := range conns[len(conns)-len(sent) : len(conns)-1] { // the last is kept for longer
		wantClosed(t, conn)
	}
}

// The server starts, and works, with as few connections as its role may have.
func TestStartWithFewConnections(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{1, 3, 8} {
		t.Run(fmt.Sprint("limit ", limit), func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			role, through := hubstest.NewRole(t, database)
			hubstest.Exec(t, database, fmt.Sprintf("grant select, insert, update, delete on all tables in "+
				"schema public to %s; alter role %s connection limit %d", role, role, limit))
			for range 5 {
				server := hubstest.Start(t, map[string]string{"DATABASE_URL": through})
				server.Database = database
				s, admin := newService(t, server)
				createHub(admin, "North").Want(t, 201)
				s.Stop(t)
				s.waitForNoConnections()
			}
		})
	}
}

// D5: After a failover, a connection may lead to the old primary, however busy it is. So each ends within
// a minute, a busy one too.
func TestBusyConnectionsEnd(t *testing.T) {
	t.Parallel()
	const life = time.Minute
	s, c := start(t, hubstest.Quiet) // nobody else ends connections
	for end := time.Now().Add(life + 5*time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		hubstest.WantStatuses(t, getAtOnce(t, pool, c, "/auth/session"), map[int]int{200: pool})
	}
	s.wantRows(0, otherConns+" and usename = 'hubs_server' and backend_start < now() - $1::interval",
		fmt.Sprint((life+2*time.Second).Seconds(), " seconds"))
}

// waitForNoConnections waits until PostgreSQL has ended all connections of a server that has ended.
func (s *service) waitForNoConnections() {
	s.t.Helper()
	hubstest.WaitFor(s.t, "connections", 0, func() int { return s.count(otherConns) })
}
