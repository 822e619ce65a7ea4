// Package bench measures what each kind of request costs: ./dev.sh bench. It writes the figures to
// a file in the format of Go's benchmarks, of which benchstat makes a table.
package bench

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

const (
	connections = 16      // simultaneous connections of the load generator
	hubs        = 100_000 // rows in the table hubs
	users       = 1000    // rows in the table users

	// How often each kind of request is measured on each side. The sides take turns, so that other
	// load on the machine affects them alike.
	rounds = 10
)

func TestMain(m *testing.M) {
	if addr := os.Getenv("BENCH_BARE"); addr != "" {
		serveBare(addr)
	}
	hubstest.Main(m)
}

// serveBare serves the cheapest possible answers, with net/http alone. The path is the size of the
// body in bytes. serveBare never returns.
func serveBare(addr string) {
	body := bytes.Repeat([]byte("x"), 1<<20)
	answer := func(w http.ResponseWriter, r *http.Request) {
		size, _ := strconv.Atoi(r.URL.Path[1:])
		w.Header().Set("Content-Type", "application/json")
		w.Write(body[:size])
	}
	panic(http.ListenAndServe(addr, http.HandlerFunc(answer)))
}

// A kind is a kind of request.
type kind struct {
	Name   string
	Path   string // "{1 MB}" is the download of a file of that size
	Upload int    // size of the file to upload in bytes; 0 for a GET
	Header string // an additional header, such as "Range: bytes=0-0", or ""
	Peer   string // what to request of PocketBase for the same
}

// kinds has everyday requests, the most expensive requests that the limits let through, and those that
// PocketBase has too.
var kinds = map[string][]kind{
	"usual": {
		{Name: "session", Path: "/auth/session"},
		{Name: "list", Path: "/hubs"},
		{Name: "list-deep", Path: "/hubs?offset=5000"},
		{Name: "list-rare-name", Path: "/hubs?filters%5Bname%5D=zweibr"},
		{Name: "download-1MB", Path: "{1 MB}"},
		{Name: "upload-10kB", Path: "/files/upload", Upload: 10_000},
	},
	"abuse": {
		{Name: "session", Path: "/auth/session"},
		{Name: "list-deepest", Path: "/hubs?limit=100&offset=10000&orderBy=updatedAt&orderDirection=desc"},
		{Name: "list-absent-name", Path: "/hubs?limit=100&filters%5Bname%5D=xylophone"},
		{Name: "download-1MB", Path: "{1 MB}"},
		{Name: "download-16-ranges", Path: "{1 MB}", Header: "Range: bytes=0-0" + strings.Repeat(",0-0", 15)},
		{Name: "upload-1MB", Path: "/files/upload", Upload: 1_000_000},
	},
	"peer": {
		{Name: "list", Path: "/hubs", Peer: peerList + "&skipTotal=1"},
		{
			Name: "list-active",
			Path: "/hubs?filters%5Bstatus%5D=active",
			Peer: peerList + "&skipTotal=1&filter=(status=%27active%27)",
		},
		{Name: "list-with-its-total", Path: "/hubs", Peer: peerList},
	},
}

const peerList = "/api/collections/hubs/records?perPage=20&sort=name,id"

// A side is a server that is measured, or bare net/http or PocketBase, with which it is compared.
type side struct {
	name, base string
	process    *exec.Cmd
	client     *hubstest.Client // nil if it is another program
	users      string           // path of a file with one header a line that names a user; or ""
	file       string           // path of the uploaded file
	database   string           // URL of its database; or ""
}

// BenchmarkRequests measures. BENCH is "bare" to compare the usual requests with bare net/http,
// "commits" to compare them with the server BENCH_BEFORE, "peer" to compare those of lists with
// the program BENCH_PEER, or "abuse" to measure the most expensive requests. BENCH_OUT is the file for the figures. Go's own figures of this benchmark mean nothing.
func BenchmarkRequests(b *testing.B) {
	out, err := os.Create(os.Getenv("BENCH_OUT"))
	hubstest.Must(b, err)
	defer out.Close()
	pg := hubstest.NewPostgres(b)
	after := newSide(b, pg, "after", hubstest.Binary())
	sides := []*side{after}
	measured := kinds["usual"]
	switch os.Getenv("BENCH") {
	case "abuse":
		measured = kinds["abuse"]
	case "bare":
		sides = []*side{bareSide(b), after}
	case "commits":
		before := newSide(b, pg, "before", os.Getenv("BENCH_BEFORE"))
		sides = []*side{before, after}
	case "peer":
		measured = kinds["peer"]
		sides = []*side{newPeer(b, os.Getenv("BENCH_PEER"), after), after}
	}
	noteMemory := func(when, field string) {
		for _, s := range sides {
			used := float64(hubstest.Memory(s.process.Process.Pid, field)) / 1e6
			fmt.Fprintf(out, "BenchmarkMemory/%s/side=%s 1 %.1f MB\n", when, s.name, used)
		}
	}
	noteMemory("idle", "VmRSS")
	for round := range rounds {
		for _, k := range measured {
			for i := range sides {
				s := sides[(i+round)%len(sides)] // each round begins with another side
				if s.client == nil && k.Upload > 0 {
					continue
				}
				figures := s.measure(b, pg, k, after)
				fmt.Fprintf(out, "BenchmarkRequest/%s/side=%s 1 %s\n", k.Name, s.name, figures)
			}
		}
	}
	noteMemory("loaded", "VmRSS")
	noteMemory("most", "VmHWM")
	fmt.Fprintf(out, "BenchmarkMemory/loaded-postgres/side=after 1 %.1f MB\n", postgresMemory(pg))
}

// bareSide starts this test's binary again, as a server of bare net/http (see TestMain).
func bareSide(t testing.TB) *side {
	s := &side{name: "bare"}
	s.start(t, exec.Command(os.Args[0]), "BENCH_BARE", nil)
	return s
}

// newSide starts a server on a new database that its own migrate has made. All sides have the same
// users and the same session key, so the cookies of one side are valid on all sides.
func newSide(t testing.TB, pg *hubstest.Postgres, name, binary string) *side {
	hubstest.Exec(t, pg.URL, "create database "+name)
	databaseURL := hubstest.WithDatabase(pg.URL, name)
	migrate := exec.Command(binary, "migrate")
	migrate.Env = []string{"DATABASE_URL=" + databaseURL}
	if text, err := migrate.CombinedOutput(); err != nil {
		t.Fatalf("setup: migrate: %v\n%s", err, text)
	}
	hubstest.Exec(t, databaseURL, fmt.Sprintf(fill, users, hubs))
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{NoStartTLS: true})
	env := hubstest.ServerEnv(t, hubstest.StagingEnv(mail), map[string]string{
		"DATABASE_URL":    databaseURL,
		"ALLOWED_ORIGINS": "https://app.staging.example.com", // the origin that bench.lua sends
	})
	s := &side{name: name, database: databaseURL}
	server := &hubstest.Server{
		Env:  env,
		Addr: s.start(t, exec.Command(binary, "serve"), "ADDR", env),
		Base: "https://api." + env["COOKIE_DOMAIN"],
	}
	s.client = server.Client(t)
	now := time.Now()
	var users []string
	accounts := hubstest.Query[string](t, databaseURL,
		"select string_agg(email || ' ' || user_id, ' ') from users")
	for account := range slices.Chunk(strings.Fields(accounts), 2) {
		token := hubstest.NewToken(env["SESSION_SECRET"], account[0], account[1], now, now.Add(time.Hour))
		s.client.SetToken(token)
		users = append(users, "Cookie: "+server.CookieName()+"="+token)
	}
	s.users = tempFile(t, []byte(strings.Join(users, "\n")))
	version := s.send(t, "GET /auth/session", nil).Field(t, "terms.version")
	hubstest.Exec(t, databaseURL,
		"insert into terms_acceptances (user_id, version) select user_id, $1 from users", version)
	hubstest.Exec(t, databaseURL, "vacuum analyze")
	form, contentType := hubstest.Form("a.bin", make([]byte, 1_000_000))
	upload := s.send(t, "POST /files/upload", form, "Content-Type", contentType)
	s.file = upload.Header.Get("Location")
	return s
}

// send sends one request. It does not compare the answer with the contract, because a commit may have
// another.
func (s *side) send(
	t testing.TB, request string, body any, headers ...string,
) *hubstest.Response {
	r, err := s.client.Elsewhere().Try(request, body, headers...)
	hubstest.Must(t, err)
	if r.Status >= 300 {
		t.Fatalf("setup: %s: got the answer %v", s.name, r)
	}
	return r
}

// newPeer loads the hubs of a server into PocketBase, and starts it.
func newPeer(t testing.TB, binary string, from *side) *side {
	dir := t.TempDir()
	hubstest.Exec(t, from.database, `create function format_time(timestamptz) returns text
		return to_char($1 at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.MS"Z"')`)
	hubs := hubstest.Query[string](t, from.database, `select string_agg(json_build_object(
			'id', right(replace(hub_id::text, '-', ''), 15), 'name', name, 'description', description,
			'status', status, 'created', format_time(created_at), 'updated', format_time(updated_at)
		)::text, E'\n') from hubs`)
	load := exec.Command(binary, "load", dir)
	load.Stdin = strings.NewReader(hubs)
	load.Stderr = t.Output()
	users, err := load.Output()
	hubstest.Must(t, err)
	s := &side{name: "peer", users: tempFile(t, users)}
	s.start(t, exec.Command(binary, "serve", "--dir="+dir), "ADDR", nil)
	return s
}

// fill inserts users and hubs. The names of the hubs begin with random characters, so that they are
// in random order. A third of them contain "Hub", one in 15 "Harbour", and one in 3,000
// "Zweibrücken". The two numbers of the format are those of the users and of the hubs.
const fill = `select setseed(0.5);
	insert into users (user_id, email)
	select md5('user' || n)::uuid, 'user' || n || '@example.com' from generate_series(1, %d) n;
	insert into hubs (hub_id, name, description, status, created_at, updated_at)
	select md5(n::text)::uuid,
		substr(md5(n::text), 1, 12) || case when n %% 3 = 0 then ' Hub' else '' end ||
		case when n %% 3000 = 7 then ' Zweibrücken' when n %% 15 = 1 then ' Harbour' else '' end,
		'Trains and trams, a bakery and a reading room, number ' || n || '.',
		case when random() < 0.1 then 'archived' else 'active' end,
		timestamptz '2026-01-01' + n * interval '10 seconds',
		timestamptz '2026-01-01' + random() * interval '300 days'
	from generate_series(1, %d) n`

// start starts the process on a free port and waits until it listens. The process reads its address
// from the given environment variable. Its log is discarded. start returns the address.
func (s *side) start(
	t testing.TB,
	cmd *exec.Cmd,
	variable string,
	env map[string]string,
) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	hubstest.Must(t, err)
	addr := listener.Addr().String()
	listener.Close() // the process can't choose a free port itself
	for name, value := range env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Env = append(cmd.Env, variable+"="+addr)
	hubstest.Must(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	s.process = cmd
	s.base = "http://" + addr
	hubstest.WaitUntil(t, "a process that listens at "+addr, func() bool {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return addr
}

// pathOf returns the path to request for a kind of request. For bare net/http, it is the size of
// the body that server sends for such a request.
func (s *side) pathOf(t testing.TB, k kind, server *side) string {
	if s.name == "peer" {
		return k.Peer
	}
	if s.client == nil {
		path := server.pathOf(t, k, server)
		return fmt.Sprint("/", len(server.send(t, "GET "+path, nil).Body))
	}
	return strings.ReplaceAll(k.Path, "{1 MB}", s.file)
}

// measure sends requests of one kind for a second and returns the figures. It fails the test if a
// request fails. The requests have the users of this side, or else those of server.
func (s *side) measure(t testing.TB, pg *hubstest.Postgres, k kind, server *side) (figures string) {
	url := s.base + s.pathOf(t, k, server)
	method, contentType, body := "GET", "", ""
	if k.Upload > 0 {
		form, formType := hubstest.Form("a.bin", make([]byte, k.Upload))
		text, _ := io.ReadAll(form) // the form is in memory, so there is no error
		method, contentType, body = "POST", formType, tempFile(t, text)
	}
	header, value, _ := strings.Cut(k.Header, ": ")
	users := cmp.Or(s.users, server.users)
	wrk := exec.Command(
		"wrk",
		"-t1",
		"-d1s",
		fmt.Sprint("-c", connections),
		"-s", "bench.lua",
		url,
		"--", users, method, contentType, body, header, value, // for bench.lua
	)
	serverBefore := cpuTime(s.process.Process.Pid)
	postgresBefore := postgresCPU(pg)
	out, err := wrk.CombinedOutput()
	serverUsed := cpuTime(s.process.Process.Pid) - serverBefore
	postgresUsed := postgresCPU(pg) - postgresBefore
	_, result, _ := strings.Cut(string(out), "\nresult ")
	var requests, took, p50, p99, failed float64
	_, scanErr := fmt.Sscan(result, &requests, &took, &p50, &p99, &failed)
	if err != nil || scanErr != nil || failed > 0 {
		t.Fatalf("setup: wrk, %s: got the error %v, %v failed requests, want none\n%s",
			k.Name, err, failed, out)
	}
	return fmt.Sprintf(
		"%.0f req/s %.2f p50-ms %.2f p99-ms %.1f server-us %.1f postgres-us",
		requests/took*1e6,
		p50/1e3,
		p99/1e3,
		serverUsed.Seconds()*1e6/requests,
		postgresUsed.Seconds()*1e6/requests,
	)
}

// tempFile writes a file that is removed at the end of the test, and returns its path.
func tempFile(t testing.TB, content []byte) (path string) {
	path = filepath.Join(t.TempDir(), "file")
	hubstest.Must(t, os.WriteFile(path, content, 0o600))
	return path
}

// postgresMemory returns the memory of all processes of PostgreSQL in MB. What they share counts once.
func postgresMemory(pg *hubstest.Postgres) (sum float64) {
	for _, pid := range pg.Processes() {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid)) // empty if it has just ended
		_, after, _ := strings.Cut(string(text), "\nPss:")
		var kilobytes float64
		fmt.Sscan(after, &kilobytes)
		sum += kilobytes / 1e3
	}
	return sum
}

// postgresCPU returns the CPU time that all processes of PostgreSQL have used so far.
func postgresCPU(pg *hubstest.Postgres) (sum time.Duration) {
	for _, pid := range pg.Processes() {
		sum += cpuTime(pid)
	}
	return sum
}

// cpuTime returns the CPU time that the threads of a process have used so far, without the threads
// that have ended. It reads the first number of each schedstat, in nanoseconds. Without such files,
// it returns 0.
func cpuTime(pid int) (sum time.Duration) {
	// The pattern is well formed, so Glob returns no error.
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, thread := range threads {
		text, _ := os.ReadFile(thread) // an error means that the thread has just ended
		var ran time.Duration
		fmt.Sscan(string(text), &ran)
		sum += ran
	}
	return sum
}
