//go:build moving

package main

// ./dev.sh bench abuse: the most expensive requests. For each kind the CPU of the server and
// of PostgreSQL, and what one client can burn in ten seconds within the limits.

import (
	"fmt"
	"math"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"
	"unsafe"
)

// What one client address may send in ten seconds.
const (
	abuseGlobal  = 100
	abuseFiles   = 5000
	abuseNoLimit = 0 // refused by a limit: as many as the client can send
)

// An abuseKind is a row of the table.
type abuseKind struct {
	name   string
	most   int           // in ten seconds, by one client
	before func()        // before each round
	send   func() int    // sends a request and returns the status of its answer
	pause  time.Duration // between two requests, for those whose work comes after the answer
	status int           // of the last answer

	server, postgres time.Duration // CPU of a request
}

// BenchmarkAbuse runs once, whatever b.N.
func BenchmarkAbuse(b *testing.B) {
	binary := os.Getenv("BENCH_BINARY")
	if binary == "" {
		b.Skip("only by way of ./dev.sh bench abuse")
	}
	pg, err := startShared()
	if err != nil {
		b.Fatal(err)
	}
	mail := newMailSink(b)
	env := benchEnv(b, newDatabase(b), mail)
	databaseURL := env["DATABASE_URL"]
	fillHubs(b, databaseURL, benchHubs)
	// The worst matches for a walk are those at its end.
	execSQL(b, databaseURL, `update hubs set name = name || ' latecomer'
		where hub_id in (select hub_id from hubs order by created_at desc limit $1::int)`, benchHubs*7/100)
	execSQL(b, databaseURL, `update hubs set name = 'Zz ' || name
		where hub_id in (select hub_id from hubs order by name desc limit $1::int)`, benchHubs*4/100)
	fillUsers(b, databaseURL)
	server := startBenchServer(b, binary, env)

	a := &abuse{b: b, pg: pg, server: server, raw: &hostileClient{t: b, addr: env["ADDR"]}}
	defer a.raw.close()
	a.file = a.fileOf(10_000)
	a.measure(&abuseKind{name: "GET /auth/session, for comparison", most: abuseGlobal, send: a.get("/auth/session", "")})
	a.measure(&abuseKind{name: "GET /hubs, for comparison", most: abuseGlobal, send: a.get("/hubs", "")})
	a.lists()
	a.headers()
	a.refused()
	a.bodies()
	a.signIns()
	a.files()
	a.report()
}

type abuse struct {
	b      *testing.B
	pg     *testPostgres
	server *benchServer
	raw    *hostileClient
	file   string // the path of a file of 10 kB
	users  int    // whose cookies were used
	kinds  []*abuseKind
}

// get is a GET in the name of the next user, with more headers.
func (a *abuse) get(path, header string) func() int {
	return func() int {
		return a.raw.send("GET " + path + " HTTP/1.1\r\nHost: api.staging.example.com\r\nCookie: " + a.cookie() + "\r\n" + header)
	}
}

// post sends a body, in the name of the next user.
func (a *abuse) post(path, contentType string, body func() string) func() int {
	return func() int {
		text := body()
		n := serial.Add(1)
		return a.raw.exchange(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: api.staging.example.com\r\nCookie: %s\r\n"+
			"X-Forwarded-For: 10.%d.%d.%d\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s",
			path, a.cookie(), n>>16&255, n>>8&255, n&255, contentType, len(text), text))
	}
}

func (a *abuse) cookie() string {
	a.users++
	return a.server.cookies[a.users%len(a.server.cookies)]
}

func (a *abuse) fileOf(size int) string {
	return a.server.client.upload("a.bin", make([]byte, size)).want(a.b, 201).field(a.b, "path").(string)
}

// lists finds the list without and the one with a name filter that cost PostgreSQL most.
func (a *abuse) lists() {
	names := []string{"", rareName, commonName, someName, absentName, "a", "ar", "x", "latecomer", "zz", "e", "er l", "0",
		strings.Repeat("a", 100), strings.Repeat("ab", 50)}
	var plain, named abuseKind
	for _, name := range names {
		for _, order := range []string{"name", "createdAt", "updatedAt"} {
			for _, direction := range []string{"asc", "desc"} {
				for _, status := range []string{"", "active", "archived"} {
					for _, offset := range []string{"0", "900", "10000"} {
						query := url.Values{"limit": {"100"}, "offset": {offset}, "orderBy": {order}, "orderDirection": {direction}}
						if name != "" {
							query.Set("filters[name]", name)
						}
						if status != "" {
							query.Set("filters[status]", status)
						}
						k := abuseKind{most: abuseGlobal, send: a.get("/hubs?"+query.Encode(), "")}
						k.name = fmt.Sprintf("list: name %.12q, status %q, by %s %s, offset %s", name, status, order, direction, offset)
						a.sample(&k, 3, 0)
						worst := &plain
						if name != "" {
							worst = &named
						}
						if k.postgres > worst.postgres {
							*worst = k
						}
					}
				}
			}
		}
	}
	a.measure(&plain)
	a.measure(&named)
}

// headers finds for each place the text that costs the server most.
func (a *abuse) headers() {
	for _, place := range hostilePlaces {
		var worst abuseKind
		for _, text := range hostileHeaders {
			most := abuseGlobal
			if strings.Contains(place.line, "{file}") {
				most = abuseFiles
			}
			request := hostileRequest(place.line, place.header, text, longHostile, a.cookie(), a.file)
			k := abuseKind{most: most, send: func() int { return a.raw.send(request) }}
			k.name = fmt.Sprintf("15 kB of %q: %s", text, place.name)
			a.sample(&k, 5, 0)
			if k.server > worst.server {
				worst = k
			}
		}
		a.measure(&worst)
	}
}

// refused is what a client can still send that is over its limit.
func (a *abuse) refused() {
	const address = "X-Forwarded-For: 192.0.2.1\r\n\r\n"
	plain := hostileRequest("GET /hubs", "Cookie: {session}", "a", 1, a.server.cookies[0], a.file)
	exhaust := func() {
		for range abuseGlobal {
			a.raw.exchange(plain + address)
		}
	}
	send := func(request string) func() int { return func() int { return a.raw.exchange(request + address) } }
	a.measure(&abuseKind{name: "429", most: abuseNoLimit, before: exhaust, send: send(plain)})
	for _, place := range hostilePlaces {
		if place.name != "path" && place.name != "User-Agent" && place.name != "X-Forwarded-For" {
			continue
		}
		request := hostileRequest(place.line, place.header, hostileHeaders[0], longHostile, a.server.cookies[0], a.file)
		a.measure(&abuseKind{name: fmt.Sprintf("429 with 15 kB of %q: %s", hostileHeaders[0], place.name),
			most: abuseNoLimit, before: exhaust, send: send(request)})
	}
}

// bodies are JSON and forms that are long in many ways.
func (a *abuse) bodies() {
	const size = 16_000
	fixed := func(text string) func() string { return func() string { return text } }
	n := 0
	var names strings.Builder
	for ; names.Len() < size; n++ {
		fmt.Fprintf(&names, `"%x":"",`, n)
	}
	for name, body := range map[string]string{
		"2,000 names":      "{" + strings.TrimSuffix(names.String(), ",") + "}",
		"one name":         "{" + strings.Repeat(`"a":"",`, size/7) + `"a":""}`,
		"nested":           `{"email":` + strings.Repeat("[", 8000) + strings.Repeat("]", 8000) + "}",
		"an escaped email": `{"code":"123456","email":"` + strings.Repeat(`\u0061`, size/6-10) + `"}`,
	} {
		a.measure(&abuseKind{name: "16 kB of JSON: " + name, most: abuseGlobal,
			send: a.post("/auth/otp/validate", "application/json", fixed(body))})
	}
	part := func(size int) string {
		return form(filePart("a.txt")+"\r\nX-Pad: "+strings.Repeat("a", size), "text")
	}
	many := func(size int) string {
		return form(filePart("a.txt")+strings.Repeat("\r\nA: b", size/6), "text")
	}
	for _, size := range []int{3900, 60_000} {
		a.measure(&abuseKind{name: fmt.Sprintf("upload, a part header of %d bytes", size), most: abuseGlobal,
			send: a.post("/files/upload", formType, fixed(part(size)))})
		a.measure(&abuseKind{name: fmt.Sprintf("upload, %d bytes of short part headers", size), most: abuseGlobal,
			send: a.post("/files/upload", formType, fixed(many(size)))})
	}
	for _, size := range []int{1, 1_000_000, 25_000_000} {
		a.measure(&abuseKind{name: fmt.Sprintf("upload of %d bytes", size), most: abuseGlobal,
			send: a.post("/files/upload", formType, fixed(form(filePart("a.bin"), strings.Repeat("\x00", size))))})
	}
}

// signIns are the requests that need no session. The work for a code comes after the answer.
func (a *abuse) signIns() {
	unknown := func() string { return fmt.Sprintf(`{"email":"nobody%d@example.com"}`, serial.Add(1)) }
	user := 0
	known := func() string { user++; return fmt.Sprintf(`{"email":"user%d@example.com"}`, 1+user%benchUsers) }
	wrong := func() string {
		return fmt.Sprintf(`{"email":"user%d@example.com","code":"%06d"}`, 1+serial.Add(1)%benchUsers, serial.Add(1)%1_000_000)
	}
	const pause = 2 * time.Millisecond // 1,000 may wait for a worker
	a.measure(&abuseKind{name: "code request, unknown address", most: abuseGlobal, pause: pause,
		send: a.post("/auth/otp/request", "application/json", unknown)})
	a.measure(&abuseKind{name: "code request, a user's address", most: abuseGlobal, pause: pause,
		send: a.post("/auth/otp/request", "application/json", known)})
	a.measure(&abuseKind{name: "wrong code", most: abuseGlobal, send: a.post("/auth/otp/validate", "application/json", wrong)})
}

// files are reads of files.
func (a *abuse) files() {
	large := a.fileOf(25_000_000)
	medium := a.fileOf(1_000_000)
	ranges := func(n int) string {
		return "Range: bytes=" + strings.TrimSuffix(strings.Repeat("0-0,", n), ",") + "\r\n"
	}
	for _, k := range []abuseKind{
		{name: "file of 10 kB", send: a.get(a.file, "")},
		{name: "file of 1 MB", send: a.get(medium, "")},
		{name: "file of 25 MB", send: a.get(large, "")},
		{name: "file of 25 MB, 16 ranges", send: a.get(large, ranges(16))},
		{name: "file of 25 MB, 17 ranges", send: a.get(large, ranges(17))},
		{name: "file of 10 kB, 3,500 ranges", send: a.get(a.file, ranges(3500))},
	} {
		k.most = abuseFiles
		a.measure(&k)
	}
}

// measure takes the least of a few rounds, each of enough requests, and adds the row.
func (a *abuse) measure(k *abuseKind) {
	const rounds, atLeast = 3, 300 * time.Millisecond
	a.sample(k, 1, 0) // warms up
	server, postgres := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	for range rounds {
		a.sample(k, 1, atLeast)
		server, postgres = min(server, k.server), min(postgres, k.postgres)
	}
	k.server, k.postgres = server, postgres
	a.kinds = append(a.kinds, k)
}

// sample sends at least so many requests, for at least so long.
func (a *abuse) sample(k *abuseKind, requests int, atLeast time.Duration) {
	if k.pause > 0 && atLeast > 0 {
		time.Sleep(time.Second) // what earlier requests have left to do
	}
	if k.before != nil {
		k.before()
	}
	server, postgres := a.cpu()
	started, sent := time.Now(), 0
	for ; sent < requests || time.Since(started) < atLeast; sent++ {
		k.status = k.send()
		time.Sleep(k.pause)
	}
	if k.pause > 0 && atLeast > 0 {
		time.Sleep(time.Second)
	}
	server1, postgres1 := a.cpu()
	k.server, k.postgres = (server1-server)/time.Duration(sent), (postgres1-postgres)/time.Duration(sent)
}

// cpu is what the server and the PostgreSQL processes have used so far.
func (a *abuse) cpu() (server, postgres time.Duration) {
	pidFile, err := os.ReadFile(a.pg.dir + "/data/postmaster.pid")
	if err != nil {
		a.b.Fatal(err)
	}
	postmaster, _, _ := strings.Cut(string(pidFile), "\n")
	children, err := exec.Command("pgrep", "-P", postmaster).Output()
	if err != nil {
		a.b.Fatal("pgrep: ", err)
	}
	for text := range strings.FieldsSeq(string(children)) {
		pid, _ := strconv.Atoi(text)
		postgres += cpuClock(pid)
	}
	return cpuClock(a.server.process.Process.Pid), postgres
}

// cpuClock is the CPU time of a process to the nanosecond, 0 if it has ended. /proc/PID/stat
// knows hundredths of a second only. clock_getcpuclockid(3) has the number of the clock.
func cpuClock(pid int) time.Duration {
	var now syscall.Timespec
	clock := uint32(^pid)<<3 | 2
	if _, _, failed := syscall.Syscall(syscall.SYS_CLOCK_GETTIME,
		uintptr(clock), uintptr(unsafe.Pointer(&now)), 0); failed != 0 {
		return 0
	}
	return time.Duration(now.Nano())
}

// report prints the table.
func (a *abuse) report() {
	fmt.Printf("\n%s: %s\n%d hubs. CPU of a request, and of as many as one client may send in ten seconds.\n\n",
		time.Now().Format(time.DateOnly), machine(), benchHubs)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "\tstatus\tserver, us\tPostgreSQL, us\tin 10 s\tserver, ms\tPostgreSQL, ms\t")
	microseconds := func(d time.Duration) float64 { return d.Seconds() * 1e6 }
	for _, k := range a.kinds {
		times, server, postgres := "any", "-", "-"
		if k.most != abuseNoLimit {
			times = fmt.Sprint(k.most)
			server = fmt.Sprintf("%.0f", microseconds(k.server)*float64(k.most)/1000)
			postgres = fmt.Sprintf("%.0f", microseconds(k.postgres)*float64(k.most)/1000)
		}
		fmt.Fprintf(table, "%s\t%d\t%.0f\t%.0f\t%s\t%s\t%s\t\n", k.name, k.status,
			microseconds(k.server), microseconds(k.postgres), times, server, postgres)
	}
	table.Flush()
}
