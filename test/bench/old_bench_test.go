//go:build moving

package main

// ./dev.sh bench: what a request costs, beside what net/http and PostgreSQL alone
// cost on the same machine in the same minute. The figures that last are the ratios.

import (
	"bytes"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"
)

const (
	benchRounds      = 3
	benchTime        = 2 * time.Second // of each load in each round
	benchConnections = 32
	benchHubs        = 100_000
	benchUsers       = 10_000
)

// In a process of its own, the test binary is the bare handler: net/http and a body of the
// size in the path. With ?user it also runs the statement that each request with a session
// runs, with ?page that of GET /hubs as well, and nothing else. No server that asks the same
// of the same modules can cost less.
func init() {
	addr := os.Getenv("BENCH_BARE_ADDR")
	if addr == "" {
		return
	}
	st, err := openStore(os.Getenv("BENCH_BARE_DATABASE"))
	if err != nil {
		panic(err)
	}
	st.db.SetMaxOpenConns(poolSize)
	userRow, userErr := st.db.Prepare(os.Getenv("BENCH_BARE_USER_STATEMENT"))
	pageRows, pageErr := st.db.Prepare(os.Getenv("BENCH_BARE_PAGE_STATEMENT"))
	if err := errors.Join(userErr, pageErr); err != nil {
		panic(err)
	}
	userID := os.Getenv("BENCH_BARE_USER")
	body := bytes.Repeat([]byte("x"), 1<<20)
	panic(http.ListenAndServe(addr, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var err error
		if r.URL.RawQuery != "" {
			err = readRows(userRow, userID, TERMS_VERSION)
		}
		if r.URL.RawQuery == "page" && err == nil {
			err = readRows(pageRows, benchPageLimit, benchPageOffset)
		}
		if err != nil {
			http.Error(w, err.Error(), 500)
			return
		}
		size, _ := strconv.Atoi(r.URL.Path[1:])
		w.Header().Set("Content-Type", "application/json")
		w.Write(body[:size])
	})))
}

// The parameters of the statement of GET /hubs without parameters. The server reads one
// row more than it sends.
const (
	benchPageLimit  = 21
	benchPageOffset = 0
)

// readRows runs a statement and scans all columns of all rows.
func readRows(statement *sql.Stmt, args ...any) error {
	rows, err := statement.Query(args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		return err
	}
	for rows.Next() {
		values := make([]any, len(columns))
		targets := make([]any, len(columns))
		for i := range values {
			targets[i] = &values[i]
		}
		if err := rows.Scan(targets...); err != nil {
			return err
		}
	}
	return rows.Err()
}

// A benchLoad is a row of the table: what is run, and what came of it in each round.
type benchLoad struct {
	name   string
	run    func(time.Duration) benchRun
	bare   *benchLoad // of the same size
	rounds []benchRun
}

type benchRun struct {
	requests         float64
	took             time.Duration
	p50, p99         time.Duration
	server, postgres time.Duration // CPU time
}

// median of a figure over the rounds.
func (l *benchLoad) median(figure func(benchRun) float64) float64 {
	return l.medianTimes(nil, figure)
}

// medianTimes is the median over the rounds of how many times another load's figure this
// load's is. Within a round the two are close in time: a shared machine changes its speed.
func (l *benchLoad) medianTimes(other *benchLoad, figure func(benchRun) float64) float64 {
	figures := l.ratios(other, figure)
	return figures[len(figures)/2]
}

// ratios are how many times another load's figure this load's is, round by round, in order
// of size; without another load they are the figures themselves.
func (l *benchLoad) ratios(other *benchLoad, figure func(benchRun) float64) []float64 {
	var figures []float64
	for i, r := range l.rounds {
		figures = append(figures, figure(r))
		if other != nil {
			figures[i] /= figure(other.rounds[i])
		}
	}
	slices.Sort(figures)
	return figures
}

func (l *benchLoad) timesBare() float64 { return l.medianTimes(l.bare, benchRun.serverCPU) }

// CPU time of a request in microseconds.
func (r benchRun) serverCPU() float64   { return r.server.Seconds() * 1e6 / r.requests }
func (r benchRun) postgresCPU() float64 { return r.postgres.Seconds() * 1e6 / r.requests }

// BenchmarkServer runs once, whatever b.N, and writes bench.txt.
func BenchmarkServer(b *testing.B) {
	binary := os.Getenv("BENCH_BINARY")
	if binary == "" {
		b.Skip("only by way of ./dev.sh bench")
	}
	pg, err := startShared()
	if err != nil {
		b.Fatal(err)
	}
	mail := newMailSink(b)
	env := benchEnv(b, newDatabase(b), mail)
	fillHubs(b, env["DATABASE_URL"], benchHubs)
	fillUsers(b, env["DATABASE_URL"])

	// Four starts to measure, the fifth to stay.
	var server *benchServer
	starts := &benchLoad{}
	for range 5 {
		if server != nil {
			server.process.Process.Signal(syscall.SIGTERM)
			server.process.Wait()
		}
		started := time.Now()
		server = startBenchServer(b, binary, env)
		starts.rounds = append(starts.rounds, benchRun{took: time.Since(started)})
	}
	time.Sleep(time.Second)
	idle := statusKB(b, server.process, "VmRSS")
	client := server.client
	client.do("GET", "/auth/session", nil).want(b, 200)
	userText := lastStatement(b, env["DATABASE_URL"], "from users")
	client.do("GET", "/hubs", nil).want(b, 200)
	pageText := lastStatement(b, env["DATABASE_URL"], "from hubs")
	userID := queryValue[string](b, env["DATABASE_URL"], "select user_id from users limit 1")
	bareAddress := freeAddress(b)
	bare := startBench(b, map[string]string{
		"BENCH_BARE_ADDR":           bareAddress,
		"BENCH_BARE_DATABASE":       env["DATABASE_URL"],
		"BENCH_BARE_USER_STATEMENT": userText,
		"BENCH_BARE_PAGE_STATEMENT": pageText,
		"BENCH_BARE_USER":           userID,
	}, os.Args[0])
	awaitAnswer(b, fmt.Sprintf("http://%s/1?page", bareAddress))

	var loads []*benchLoad
	wrk := func(name string, process *exec.Cmd, address, path string) *benchLoad {
		l := &benchLoad{name: name, run: func(d time.Duration) benchRun {
			return measured(b, process, pg, func(r *benchRun) { runWrk(b, r, d, server.cookieFile, "http://"+address+path) })
		}}
		loads = append(loads, l)
		return l
	}
	pair := func(name, path, statements string) (l, floor *benchLoad) {
		size := len(client.do("GET", path, nil).want(b, 200).body)
		beside := wrk(fmt.Sprintf("bare handler, %d bytes", size), bare, bareAddress, "/"+fmt.Sprint(size))
		if statements != "" {
			floor = wrk("and its statements, nothing else", bare, bareAddress, fmt.Sprintf("/%d?%s", size, statements))
			floor.bare = beside
		}
		l = wrk(name, server.process, env["ADDR"], path)
		l.bare = beside
		return l, floor
	}
	fileOf := func(size int) string {
		return client.upload("a.bin", make([]byte, size)).want(b, 201).field(b, "path").(string)
	}
	session, sessionFloor := pair("GET /auth/session", "/auth/session", "user")
	list, listFloor := pair("GET /hubs", "/hubs", "page")
	pgbench := &benchLoad{name: "pgbench: both statements of GET /hubs", run: func(d time.Duration) benchRun {
		return measured(b, nil, pg, func(r *benchRun) { runPgbench(b, r, d, env["DATABASE_URL"], userID, userText, pageText) })
	}}
	loads = append(loads, pgbench)
	filters := url.Values{"filters[name]": {someName}, "filters[status]": {"active"}}
	pair("GET /hubs, name and status", "/hubs?"+filters.Encode(), "")
	pair("file of 10 kB", fileOf(10_000), "")
	pair("file of 1 MB", fileOf(1_000_000), "")
	signIn := &benchLoad{name: "sign-in: code, mail, session", run: func(d time.Duration) benchRun {
		return measured(b, server.process, pg, func(r *benchRun) { runSignIns(b, r, d, client.srv, mail) })
	}}
	loads = append(loads, signIn)

	for _, l := range loads {
		l.run(time.Second) // warms up
	}
	for range benchRounds {
		for _, l := range loads {
			l.rounds = append(l.rounds, l.run(benchTime))
		}
	}
	size, err := os.Stat(binary)
	if err != nil {
		b.Fatal(err)
	}
	report := benchReport(b, loads, []benchTarget{
		{"server CPU of GET /hubs, times bare", list.timesBare(), 5.5},
		{"server CPU of GET /auth/session, times bare", session.timesBare(), 2.8},
		{"the floor of the list: its statements alone", listFloor.timesBare(), 0},
		{"the floor of the session: its statement alone", sessionFloor.timesBare(), 0},
		{"PostgreSQL's CPU of GET /hubs, times pgbench",
			list.medianTimes(pgbench, benchRun.postgresCPU), 1.15},
		{"p99 of GET /hubs, times p50", list.median(func(r benchRun) float64 { return float64(r.p99) / float64(r.p50) }), 4},
		{"memory idle, MB (VmRSS)", idle / 1000, 10},
		{"memory under load, at most, MB (VmHWM)", statusKB(b, server.process, "VmHWM") / 1000, 32},
		{"start to the first answer, ms", starts.median(func(r benchRun) float64 { return r.took.Seconds() * 1000 }), 40},
		{"binary, MB (go build -trimpath -ldflags='-s -w')", float64(size.Size()) / 1e6, 9},
	})
	if err := os.WriteFile("bench.txt", report, 0o644); err != nil {
		b.Fatal(err)
	}
}

type benchTarget struct {
	name        string
	value, most float64 // most 0: no aim, shown beside the others
}

func benchReport(b *testing.B, loads []*benchLoad, targets []benchTarget) []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, "%s: %s\nMedians of %d rounds of %v, %d connections; %d hubs, %d users; "+
		"each request from an address of its own.\n\n",
		time.Now().Format(time.DateOnly), machine(), benchRounds, benchTime, benchConnections, benchHubs, benchUsers)
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "\trequests/s\tp50 ms\tp99 ms\tCPU us: server\tPostgreSQL\tserver, times bare\t\n")
	for _, l := range loads {
		ratio := "-"
		if l.bare != nil {
			ratio = fmt.Sprintf("%.2f", l.timesBare())
		}
		cell := func(format string, figure func(benchRun) float64) string {
			if value := l.median(figure); value > 0 {
				return fmt.Sprintf(format, value)
			}
			return "-" // not measured
		}
		fmt.Fprintln(table, strings.Join([]string{l.name,
			cell("%.0f", func(r benchRun) float64 { return r.requests / r.took.Seconds() }),
			cell("%.2f", func(r benchRun) float64 { return r.p50.Seconds() * 1000 }),
			cell("%.2f", func(r benchRun) float64 { return r.p99.Seconds() * 1000 }),
			cell("%.0f", benchRun.serverCPU), cell("%.0f", benchRun.postgresCPU), ratio, ""}, "\t"))
	}
	table.Flush()
	fmt.Fprintln(&out)
	table = tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, t := range targets {
		aim, verdict := fmt.Sprintf("at most %v", t.most), "met"
		switch {
		case t.most == 0:
			aim, verdict = "", ""
		case t.value > t.most:
			verdict = "MISSED"
		}
		fmt.Fprintf(table, "%s\t%.2f\t%s\t%s\t\n", t.name, t.value, aim, verdict)
	}
	table.Flush()
	return out.Bytes()
}

// machine describes what the figures were taken on.
func machine() string {
	model := "unknown processor"
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, found := strings.Cut(string(info), "model name\t: "); found {
			model, _, _ = strings.Cut(rest, "\n")
		}
	}
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	postgres, _ := exec.Command(os.Getenv("BENCH_PGBENCH"), "--version").Output()
	return fmt.Sprintf("%s, %d cores, Linux %s, %s, %s", model, runtime.NumCPU(), strings.TrimSpace(string(kernel)),
		runtime.Version(), strings.TrimSpace(string(postgres)))
}

// benchEnv is the environment of a server that is measured: staging, so that the request log
// is on, and an allowed origin, which testdata/bench.lua names.
func benchEnv(b *testing.B, databaseURL string, mail *mailSink) map[string]string {
	return serverEnv(b, map[string]string{
		"APP_ENV": "staging", "COOKIE_DOMAIN": "staging.example.com", "ADDR": freeAddress(b),
		"ALLOWED_ORIGINS": "https://app.staging.example.com",
		"SMTP_URL":        mail.url, "MAIL_FROM": "signin@example.com", "DATABASE_URL": databaseURL,
	})
}

// A benchServer is a server that is measured, with its clients: one for the harness, and a
// thousand session cookies for wrk.
type benchServer struct {
	process    *exec.Cmd
	env        map[string]string
	client     *testClient
	cookies    []string
	cookieFile string
}

// startBenchServer starts the server and waits for its first answer.
func startBenchServer(b *testing.B, binary string, env map[string]string) *benchServer {
	process := startBench(b, env, binary, "serve")
	awaitAnswer(b, "http://"+env["ADDR"]+"/healthz")
	harness := newTestServer(env) // for its clients
	harness.addr, harness.base = env["ADDR"], "https://api."+env["COOKIE_DOMAIN"]
	s := &benchServer{process: process, env: env, client: harness.client(b), cookieFile: b.TempDir() + "/cookies"}
	s.cookies = benchCookies(b, harness)
	s.client.setToken(strings.SplitN(s.cookies[0], "=", 2)[1])
	if err := os.WriteFile(s.cookieFile, []byte(strings.Join(s.cookies, "\n")), 0o600); err != nil {
		b.Fatal(err)
	}
	return s
}

// fillUsers makes the users, who all have accepted the terms.
func fillUsers(b testing.TB, databaseURL string) {
	execSQL(b, databaseURL, `
		insert into users (email) select 'user' || n || '@example.com' from generate_series(1, $1::int) n`, benchUsers)
	execSQL(b, databaseURL, `
		insert into terms_acceptances (user_id, version) select user_id, $1 from users`, TERMS_VERSION)
	execSQL(b, databaseURL, "vacuum analyze")
}

// benchCookies gives the session cookies of a thousand users.
func benchCookies(b testing.TB, s *testServer) (cookies []string) {
	rows, err := testDB(b, s.env["DATABASE_URL"]).Query("select user_id, email from users order by email limit 1000")
	if err != nil {
		b.Fatal(err)
	}
	defer rows.Close()
	now := time.Now().Unix()
	for rows.Next() {
		var userID, email string
		if err := rows.Scan(&userID, &email); err != nil {
			b.Fatal(err)
		}
		claims := fmt.Sprintf(`{"email":%q,"userId":%q,"iat":%d.123456,"exp":%d.123456}`, email, userID, now-1, now+3600)
		cookies = append(cookies, s.cookieName()+"="+forge(hs256, claims, s.env["SESSION_SECRET"], sha256.New))
	}
	if err := rows.Err(); err != nil {
		b.Fatal(err)
	}
	return cookies
}

// lastStatement is the text of a statement that a server has run last on one of its
// connections, as PostgreSQL got it.
func lastStatement(b *testing.B, databaseURL, part string) string {
	return queryValue[string](b, databaseURL, `
		select query from pg_stat_activity
		where datname = current_database() and pid <> pg_backend_pid() and query like '%' || $1 || '%'
		order by query_start desc limit 1`, part)
}

func freeAddress(b *testing.B) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// startBench starts a process that ends with this one. Its output goes to a file.
func startBench(b *testing.B, env map[string]string, command ...string) *exec.Cmd {
	log, err := os.Create(b.TempDir() + "/log")
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(command[0], command[1:]...)
	for name, value := range env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		log.Close()
	})
	return cmd
}

func awaitAnswer(b *testing.B, address string) {
	last := ""
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if answer, err := http.Get(address); err == nil {
			text, _ := io.ReadAll(answer.Body)
			answer.Body.Close()
			if answer.StatusCode == 200 {
				return
			}
			last = string(text)
		}
		if time.Now().After(end) {
			b.Fatal("no answer from ", address, last)
		}
	}
}

// statusKB is a line of /proc/PID/status.
func statusKB(b *testing.B, process *exec.Cmd, name string) (kb float64) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", process.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), name+":")
	if _, err := fmt.Sscan(rest, &kb); err != nil {
		b.Fatal(name, err)
	}
	return kb
}

// cpuTime is what the processes have used so far, in user and system mode, with those
// of their children that have ended (/proc/PID/stat, in hundredths of a second).
func cpuTime(pids ...string) (sum time.Duration) {
	for _, pid := range pids {
		text, _ := os.ReadFile("/proc/" + pid + "/stat")
		_, rest, _ := strings.Cut(string(text), ") ")
		if fields := strings.Fields(rest); len(fields) > 15 { // else it has just ended
			for _, field := range fields[11:15] {
				ticks, _ := strconv.Atoi(field)
				sum += time.Duration(ticks) * 10 * time.Millisecond
			}
		}
	}
	return sum
}

// measured adds the CPU times of the server and of PostgreSQL to a run.
func measured(b *testing.B, server *exec.Cmd, pg *testPostgres, run func(*benchRun)) (r benchRun) {
	pidFile, err := os.ReadFile(pg.dir + "/data/postmaster.pid")
	if err != nil {
		b.Fatal(err)
	}
	postmaster, _, _ := strings.Cut(string(pidFile), "\n")
	times := func() (ofServer, ofPostgres time.Duration) {
		if server != nil {
			ofServer = cpuTime(fmt.Sprint(server.Process.Pid))
		}
		children, err := exec.Command("pgrep", "-P", postmaster).Output()
		if err != nil {
			b.Fatal("pgrep: ", err)
		}
		return ofServer, cpuTime(append(strings.Fields(string(children)), postmaster)...)
	}
	server0, postgres0 := times()
	run(&r)
	server1, postgres1 := times()
	r.server, r.postgres = server1-server0, postgres1-postgres0
	return r
}

func runWrk(b *testing.B, r *benchRun, d time.Duration, cookieFile, address string) {
	out, err := exec.Command("wrk", "-t1", fmt.Sprintf("-c%d", benchConnections), fmt.Sprintf("-d%.0fs", d.Seconds()),
		"-s", "testdata/bench.lua", address, "--", cookieFile).CombinedOutput()
	_, result, _ := strings.Cut(string(out), "\nresult ")
	var took, p50, p99, failed int64
	_, scanErr := fmt.Sscan(result, &r.requests, &took, &p50, &p99, &failed)
	if err != nil || scanErr != nil || failed > 0 {
		b.Fatalf("wrk %s: %v, %d failed\n%s", address, err, failed, out)
	}
	r.took, r.p50, r.p99 = time.Duration(took)*1000, time.Duration(p50)*1000, time.Duration(p99)*1000
}

// runSignIns signs users in, one after the other on each connection. No user comes so
// often that a limit is met.
func runSignIns(b *testing.B, r *benchRun, d time.Duration, harness *testServer, mail *mailSink) {
	var mu sync.Mutex
	var each []time.Duration
	var all sync.WaitGroup
	started := time.Now()
	for range benchConnections {
		client := harness.client(b)
		client.http.Jar = nil
		all.Go(func() {
			for time.Since(started) < d {
				begun := time.Now()
				from := client.elsewhere()
				email := fmt.Sprintf("user%d@example.com", 1+serial.Add(1)%benchUsers)
				codes := mail.codes(email)
				asked, err := from.try("POST", "/auth/otp/request", map[string]string{"email": email})
				if err != nil || asked.status != 200 {
					b.Errorf("%v, %v", asked, err)
					return
				}
				code := <-codes
				answer, err := from.try("POST", "/auth/otp/validate", map[string]string{"email": email, "code": code})
				if err != nil || answer.status != 200 {
					b.Errorf("%v, %v", answer, err)
					return
				}
				mu.Lock()
				each = append(each, time.Since(begun))
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if b.Failed() {
		b.FailNow()
	}
	slices.Sort(each)
	r.requests, r.took = float64(len(each)), time.Since(started)
	r.p50, r.p99 = each[len(each)/2], each[len(each)*99/100]
}

// A mailSink is an SMTP server that hands out the codes it gets, by address.
type mailSink struct {
	url string
	mu  sync.Mutex
	to  map[string]chan string
}

func newMailSink(b *testing.B) *mailSink {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { listener.Close() })
	m := &mailSink{url: "smtp://" + listener.Addr().String(), to: map[string]chan string{}}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go m.serve(textproto.NewConn(conn))
		}
	}()
	return m
}

func (m *mailSink) codes(email string) chan string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.to[email] == nil {
		m.to[email] = make(chan string, 1)
	}
	return m.to[email]
}

var mailedCode = regexp.MustCompile(`code is ([0-9]{6})\.`)

func (m *mailSink) serve(c *textproto.Conn) {
	defer c.Close()
	var to string
	for err := c.PrintfLine("220 sink"); err == nil; {
		var line string
		if line, err = c.ReadLine(); err != nil {
			return
		}
		switch {
		case line == "QUIT":
			c.PrintfLine("221 bye")
			return
		case line == "DATA":
			c.PrintfLine("354 go on")
			var text []byte
			if text, err = c.ReadDotBytes(); err != nil {
				return
			}
			m.codes(to) <- string(mailedCode.FindSubmatch(text)[1])
		case strings.HasPrefix(line, "RCPT TO:"):
			to = between(line)
		}
		err = c.PrintfLine("250 ok")
	}
}

// runPgbench runs the statements of GET /hubs as the server does, without the server:
// the account's, then the page's.
func runPgbench(b *testing.B, r *benchRun, d time.Duration, databaseURL, userID, userText, pageText string) {
	script := b.TempDir() + "/script.sql"
	named := func(text, first, second string) string { // pgbench's parameters have names
		return strings.NewReplacer("$1", first, "$2", second, "\n", " ").Replace(text) + ";\n"
	}
	text := named(userText, ":user_id", ":version") + named(pageText, ":limit", ":offset")
	if err := os.WriteFile(script, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(os.Getenv("BENCH_PGBENCH"), "-n", "-M", "prepared", fmt.Sprintf("-c%d", poolSize),
		fmt.Sprintf("-T%.0f", d.Seconds()), "-f", script,
		"-D", "user_id="+userID,
		"-D", "version="+TERMS_VERSION, "-D", fmt.Sprint("limit=", benchPageLimit),
		"-D", fmt.Sprint("offset=", benchPageOffset), databaseURL)
	cmd.Env = append(os.Environ(), "PGOPTIONS=-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c jit=off "+
		"-c max_parallel_workers_per_gather=0")
	out, err := cmd.CombinedOutput()
	count := regexp.MustCompile(`actually processed: (\d+)`).FindSubmatch(out)
	failed := regexp.MustCompile(`failed transactions: [1-9]`).Match(out)
	if err != nil || count == nil || failed {
		b.Fatalf("pgbench: %v\n%s", err, out)
	}
	r.requests, _ = strconv.ParseFloat(string(count[1]), 64)
	r.took = d
}
