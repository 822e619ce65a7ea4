package faults

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// A pooler is PgBouncer between servers and their PostgreSQL: one process, or several that share the
// connections of clients.
type pooler struct {
	t         testing.TB
	databases string            // the section [databases] of the settings
	settings  map[string]string // the section [pgbouncer]
	processes []pgbouncer
	url       *url.URL // of PostgreSQL, as the server would connect to it
}

type pgbouncer struct {
	config string // path of the settings
	addr   string
}

// newPooler starts PgBouncer before a database. settings are those of its section [pgbouncer], such
// as "pool_mode". newPooler skips the test if PgBouncer is missing.
func newPooler(t testing.TB, databaseURL string, processes int, settings map[string]string) *pooler {
	t.Helper()
	program := hubstest.Need(t, "pgbouncer", "pgbouncer")
	u, err := url.Parse(hubstest.AsServer(databaseURL))
	hubstest.Must(t, err)
	password, _ := u.User.Password()
	p := &pooler{
		t: t,
		databases: fmt.Sprintf("[databases]\n* = host=%s port=%s user=%s password=%s\n",
			u.Hostname(), u.Port(), u.User.Username(), password),
		settings: map[string]string{
			"auth_type":   "any", // [databases] has user and password
			"admin_users": u.User.Username(),
		},
		url: u,
	}
	maps.Copy(p.settings, settings)
	for range processes {
		p.startOne(program)
	}
	return p
}

// startOne starts a process on a socket that it takes over, as it would from systemd.
func (p *pooler) startOne(program string) {
	p.t.Helper()
	dir := hubstest.NewPath("pgbouncer")
	hubstest.Must(p.t, os.Mkdir(dir, 0o755))
	socket, addr := hubstest.ListeningSocket(p.t, "tcp", "127.0.0.1:0")
	one := pgbouncer{config: dir + "/pgbouncer.ini", addr: addr}
	p.processes = append(p.processes, one)
	hubstest.WriteFile(p.t, one.config, p.text())
	script := `LISTEN_FDS=1 LISTEN_PID=$$ exec "$@"`
	cmd := exec.Command("sh", "-c", script, "sh", program)
	if os.Getuid() == 0 {
		cmd.Args = append(cmd.Args, "-u", "nobody")
	}
	cmd.Args = append(cmd.Args, one.config)
	cmd.ExtraFiles = []*os.File{socket} // descriptor 3
	hubstest.StartProgram(p.t, cmd).WaitMatch(p.t, "(process up)")
	// Handing the socket over has made it blocking, but PgBouncer must not wait in accept.
	hubstest.Must(p.t, syscall.SetNonblock(int(socket.Fd()), true))
}

// text returns the settings.
func (p *pooler) text() string {
	var text strings.Builder
	text.WriteString(p.databases + "[pgbouncer]\n")
	for _, name := range slices.Sorted(maps.Keys(p.settings)) {
		text.WriteString(name + " = " + p.settings[name] + "\n")
	}
	return text.String()
}

// Set changes a setting of each process, as an operator would.
func (p *pooler) Set(name, value string) {
	p.t.Helper()
	p.settings[name] = value
	for _, one := range p.processes {
		hubstest.WriteFile(p.t, one.config, p.text())
	}
	p.Console("RELOAD")
}

// Console runs commands of PgBouncer's console, in each process.
func (p *pooler) Console(commands ...string) {
	p.t.Helper()
	for _, one := range p.processes {
		console := *p.url
		console.Host = one.addr
		for _, command := range commands {
			hubstest.Exec(p.t, hubstest.WithDatabase(console.String(), "pgbouncer"), command)
		}
	}
}

// URL returns the URL through the pooler. A balancer gives its processes the connections in turn.
func (p *pooler) URL() string {
	p.t.Helper()
	u := *p.url
	u.Host = p.processes[0].addr
	if len(p.processes) > 1 {
		u.Host = p.balance()
	}
	return u.String()
}

// HostsURL returns a URL that names each process as a host, of which the driver takes any.
func (p *pooler) HostsURL() string {
	var hosts, ports []string
	for _, one := range p.processes {
		host, port, _ := net.SplitHostPort(one.addr)
		hosts = append(hosts, host)
		ports = append(ports, port)
	}
	u := *p.url
	u.Host = strings.Join(hosts, ",")
	u.RawQuery += "&load_balance_hosts=random&port=" + strings.Join(ports, ",")
	return u.String()
}

// balance starts a balancer of connections, which runs until the test ends, and returns its address.
func (p *pooler) balance() (addr string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	hubstest.Must(p.t, err)
	p.t.Cleanup(func() { ln.Close() })
	pass := func(to, from net.Conn) {
		io.Copy(to, from)
		to.Close()
		from.Close()
	}
	go func() {
		for n := 0; ; n++ {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", p.processes[n%len(p.processes)].addr)
			if err != nil {
				client.Close()
				continue
			}
			go pass(client, server)
			go pass(server, client)
		}
	}()
	return ln.Addr().String()
}
