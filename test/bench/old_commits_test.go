//go:build moving

package main

// ./dev.sh bench COMMIT: a commit against the working tree. Both run at the same time, each on
// a database of its own with the same rows, in the same PostgreSQL. The loads go to one and to
// the other in turn, so that what the machine does meanwhile meets both. A change is accepted
// or refused by the medians of the pairs' ratios.
//
// Two databases, since a commit may have another schema. Each is made by its own migrate.

import (
	"bytes"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// Many short pairs: on a shared machine a disturbance then spoils a few pairs, not a load.
const (
	benchPairs    = 15
	benchPairTime = time.Second // of each side
)

// BenchmarkCommits runs once, whatever b.N.
func BenchmarkCommits(b *testing.B) {
	binaries := []string{os.Getenv("BENCH_COMMIT_BINARY"), os.Getenv("BENCH_BINARY")}
	if binaries[0] == "" {
		b.Skip("only by way of ./dev.sh bench COMMIT")
	}
	pg, err := startShared()
	if err != nil {
		b.Fatal(err)
	}
	mail := newMailSink(b)
	rows := newDatabase(b)
	fillHubs(b, rows, benchHubs)
	fillUsers(b, rows)
	var servers []*benchServer
	for i, binary := range binaries {
		databaseURL := withDatabase(rows, fmt.Sprintf("commit_%d", i))
		execSQL(b, pg.url, fmt.Sprintf("create database commit_%d", i))
		copyRows(b, rows, databaseURL, binary)
		servers = append(servers, startBenchServer(b, binary, benchEnv(b, databaseURL, mail)))
	}

	filters := url.Values{"filters[name]": {someName}, "filters[status]": {"active"}}
	loads := []struct {
		name string
		path func(*benchServer) string
	}{
		{"GET /auth/session", samePath("/auth/session")},
		{"GET /hubs", samePath("/hubs")},
		{"GET /hubs, name and status", samePath("/hubs?" + filters.Encode())},
		{"file of 10 kB", uploadedFile(b, 10_000)},
		{"file of 1 MB", uploadedFile(b, 1_000_000)},
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "%s: %s\n%s (before) and the working tree (after), in turn: %d pairs of %v each, %d connections; %d hubs.\n"+
		"Medians, and of the ratios after/before the median [quartiles] of the pairs.\n\n",
		time.Now().Format(time.DateOnly), machine(), os.Getenv("BENCH_COMMIT"), benchPairs, benchPairTime, benchConnections, benchHubs)
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "\t\tbefore\tafter\tafter/before\t\n")
	for _, load := range loads {
		var sides []*benchLoad
		for _, server := range servers {
			address := "http://" + server.env["ADDR"] + load.path(server)
			sides = append(sides, &benchLoad{run: func(d time.Duration) benchRun {
				return measured(b, server.process, pg, func(r *benchRun) { runWrk(b, r, d, server.cookieFile, address) })
			}})
		}
		for _, side := range sides {
			side.run(time.Second) // warms up
		}
		for pair := range benchPairs {
			order := slices.Clone(sides)
			if pair%2 == 1 {
				slices.Reverse(order)
			}
			for _, side := range order {
				side.rounds = append(side.rounds, side.run(benchPairTime))
			}
		}
		writeComparison(table, load.name, sides[0], sides[1])
	}
	table.Flush()
	fmt.Fprintln(&out)
	for i, side := range []string{"before", "after"} {
		size, err := os.Stat(binaries[i])
		if err != nil {
			b.Fatal(err)
		}
		fmt.Fprintf(&out, "%-6s memory under load, at most: %.1f MB (VmHWM); binary %.2f MB\n", side,
			statusKB(b, servers[i].process, "VmHWM")/1000, float64(size.Size())/1e6)
	}
	fmt.Print("\n", out.String())
}

func samePath(path string) func(*benchServer) string {
	return func(*benchServer) string { return path }
}

// uploadedFile uploads a file to each server: its path has a random id.
func uploadedFile(b *testing.B, size int) func(*benchServer) string {
	return func(s *benchServer) string {
		return s.client.upload("a.bin", make([]byte, size)).want(b, 201).field(b, "path").(string)
	}
}

// writeComparison writes the rows of one load.
func writeComparison(table *tabwriter.Writer, name string, before, after *benchLoad) {
	figures := []struct {
		name  string
		value func(benchRun) float64
	}{
		{"requests/s", func(r benchRun) float64 { return r.requests / r.took.Seconds() }},
		{"p50, us", func(r benchRun) float64 { return r.p50.Seconds() * 1e6 }},
		{"p99, us", func(r benchRun) float64 { return r.p99.Seconds() * 1e6 }},
		{"CPU of the server, us", benchRun.serverCPU},
		{"CPU of PostgreSQL, us", benchRun.postgresCPU},
	}
	for _, figure := range figures {
		ratios := after.ratios(before, figure.value)
		fmt.Fprintf(table, "%s\t%s\t%.0f\t%.0f\t%.2f [%.2f %.2f]\t\n", name, figure.name,
			before.median(figure.value), after.median(figure.value),
			ratios[len(ratios)/2], ratios[len(ratios)/4], ratios[len(ratios)*3/4])
		name = ""
	}
}

// copyRows makes a database with the schema of a binary and the rows of another database,
// ids included, so that the same session cookies hold. The indexes of hubs, but for the
// primary key, are made when the rows are there, which is faster.
func copyRows(b *testing.B, from, to, binary string) {
	migrate := func() {
		cmd := exec.Command(binary, "migrate")
		cmd.Env = []string{"DATABASE_URL=" + to}
		if text, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("migrate: %v\n%s", err, text)
		}
	}
	migrate()
	execSQL(b, to, `do $$
		declare index text;
		begin
			for index in select indexname from pg_indexes where tablename = 'hubs' and indexname <> 'hubs_pkey' loop
				execute 'drop index ' || index;
			end loop;
		end $$`)
	for _, table := range []string{
		"users (user_id, email)",
		"terms_acceptances (user_id, version)",
		"hubs (hub_id, name, description, status, created_at, updated_at)",
	} {
		name, columns, _ := strings.Cut(table, " ")
		out := exec.Command(os.Getenv("BENCH_PSQL"), "-qXAt", "-d", from, "-c",
			fmt.Sprintf("copy (select %s from %s) to stdout", strings.Trim(columns, "()"), name))
		in := exec.Command(os.Getenv("BENCH_PSQL"), "-qXAt", "-v", "ON_ERROR_STOP=1", "-d", to, "-c",
			fmt.Sprintf("copy %s from stdin", table))
		var errs bytes.Buffer
		out.Stderr, in.Stderr = &errs, &errs
		pipe, err := out.StdoutPipe()
		if err != nil {
			b.Fatal(err)
		}
		in.Stdin = pipe
		if err := out.Start(); err != nil {
			b.Fatal(err)
		}
		inErr := in.Run()
		if outErr := out.Wait(); inErr != nil || outErr != nil {
			b.Fatalf("copy of %s: %v, %v\n%s", name, outErr, inErr, errs.String())
		}
	}
	migrate()
	execSQL(b, to, "vacuum analyze")
}
