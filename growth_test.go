package main

// GET /hubs on large tables: which rows each shape of its statement reads (part of the
// tests), and what a request costs at a million hubs against a thousand
// (./dev.sh bench growth).

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// Of the names that fillHubs makes, 30 contain rareName whatever their number, every
// third contains commonName, one in fifteen someName.
const (
	rareName   = "zweibrücken"
	commonName = "hub"
	someName   = "harbour"
	absentName = "xylophone"
)

// fillHubs makes n hubs, then the indexes, which is faster than row by row, and the
// statistics that PostgreSQL makes by itself a minute later. Ids by md5: as good as
// random, but the same each time, and with them the sample that a search begins with.
func fillHubs(t testing.TB, databaseURL string, n int) {
	t.Helper()
	for _, index := range []string{"name", "created_at", "updated_at",
		"status_name", "status_created_at", "status_updated_at", "name_grams"} {
		execSQL(t, databaseURL, "drop index hubs_"+index)
	}
	execSQL(t, databaseURL, `
		insert into hubs (hub_id, name, description, status, created_at, updated_at)
		select md5(n::text)::uuid, case when n % ($1::int / 30) = 7 then 'Zweibrücken ' else '' end
			|| word[1 + floor(random() * 45)] || case when random() < 0.33 then ' Hub ' else ' ' end
			|| word[1 + floor(random() * 45)] || ' ' || word[1 + floor(random() * 45)] || floor(random() * 10000),
			'Trains and trams, a bakery and a reading room, number ' || n || '.',
			case when random() < 0.1 then 'archived' else 'active' end,
			timestamptz '2026-01-01' + n * interval '10 seconds',
			timestamptz '2026-01-01' + random() * interval '300 days'
		from generate_series(1, $1::int) n, (select regexp_split_to_array('North South East West Old New Upper Lower
			Harbour Station Market Library Workshop Depot Garden Mill Observatory Cafe Bridge Tower River Hill Lake Forest
			Castle Abbey Temple School College Museum Theatre Gallery Square Park Meadow Orchard Vineyard Brewery Bakery
			Foundry Quarry Lighthouse Airfield Junction Crossing', '\s+') as word) words`, n)
	if err := applySchema(databaseURL); err != nil {
		t.Fatal(err)
	}
	execSQL(t, databaseURL, "vacuum analyze hubs")
}

// hubShapes calls each with every shape that a statement of GET /hubs can have, some of
// them with a status, and with the names to ask for, where it asks for one.
func hubShapes(someStatus string, each func(q hubQuery, names []string)) {
	for _, column := range []string{"name", "createdAt", "updatedAt"} {
		for _, direction := range []string{"asc", "desc"} {
			for _, status := range []*string{nil, &someStatus} {
				q := hubQuery{limit: 20, orderBy: column, orderDirection: direction, status: status}
				each(q, []string{""})
				each(q, []string{rareName, commonName, someName, absentName, "a", "ar", "x"})
			}
		}
	}
}

// planNode is a step of a plan as explain (analyze, format json) tells it. Rows are
// averages of its loops.
type planNode struct {
	Kind     string     `json:"Node Type"`
	Table    string     `json:"Relation Name"`
	Index    string     `json:"Index Name"`
	Rows     float64    `json:"Actual Rows"`
	Loops    float64    `json:"Actual Loops"`
	Filtered float64    `json:"Rows Removed by Filter"`
	Recheck  float64    `json:"Rows Removed by Index Recheck"`
	Plans    []planNode `json:"Plans"`
}

// read is the number of index entries and rows of hubs that the plan has read; faults
// are the steps that read the whole table or sort it.
func (p planNode) read() (rows float64, faults []string) {
	if strings.Contains(p.Kind, "Scan") && (p.Table == "hubs" || strings.HasPrefix(p.Index, "hubs")) {
		rows = (p.Rows + p.Filtered + p.Recheck) * p.Loops
	}
	if p.Kind == "Seq Scan" && p.Loops > 0 {
		faults = append(faults, "a sequential scan of "+p.Table)
	}
	for _, child := range p.Plans {
		more, theirs := child.read()
		rows, faults = rows+more, append(faults, theirs...)
		if strings.Contains(p.Kind, "Sort") && child.Rows*child.Loops > 1000 {
			faults = append(faults, fmt.Sprintf("a sort of %.0f rows", child.Rows*child.Loops))
		}
	}
	return rows, faults
}

// Each shape of the list, deep pages included, reads a small part of 100,000 hubs, by
// an index, with the very text and settings of the server. Of a name that a share of
// the hubs has, a page needs (offset + limit) / share of them.
func TestHubListReadsLittleOfALargeTable(t *testing.T) {
	t.Parallel()
	databaseURL := newDatabase(t)
	fillHubs(t, databaseURL, 100_000)
	st, err := openStore(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer st.db.Close()
	conn, err := st.db.Conn(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	exec := func(query string) {
		if _, err := conn.ExecContext(context.Background(), query); err != nil {
			t.Fatalf("%s\n%v", query, err)
		}
	}
	// explain runs a statement that is prepared, as the server's are: its plan is the
	// generic one. Literals, since execute takes no parameters.
	explain := func(args []any) planNode {
		literals := make([]string, len(args))
		for i, arg := range args {
			literals[i] = "'" + fmt.Sprint(arg) + "'"
		}
		var text string
		query := "explain (analyze, timing off, format json) execute page(" + strings.Join(literals, ", ") + ")"
		if err := conn.QueryRowContext(context.Background(), query).Scan(&text); err != nil {
			t.Fatalf("%s\n%v", query, err)
		}
		var plans []struct{ Plan planNode }
		if err := json.Unmarshal([]byte(text), &plans); err != nil || len(plans) != 1 {
			t.Fatalf("%v in %s", err, text)
		}
		return plans[0].Plan
	}
	shares := map[string]float64{"": 1, commonName: 0.3, someName: 0.04, "a": 0.5, "ar": 0.15}
	hubShapes("archived", func(q hubQuery, names []string) { // a tenth of them: another index shows
		if names[0] != "" {
			q.name = &names[0]
		}
		text, _ := q.statement()
		exec("prepare page as " + text)
		defer exec("deallocate page")
		for _, q.offset = range []int{0, 900, 10000} {
			for _, name := range names {
				if q.name != nil {
					q.name = &name
				}
				_, args := q.statement()
				rows, faults := explain(args).read()
				most := 2 * 30.0 // the matches and the rows of the page
				if share := shares[name]; share > 0 {
					most = 1.2 * float64(q.offset+q.limit+1) / share
				}
				if most += 1000 + 200; rows > most { // and the sample
					faults = append(faults, fmt.Sprintf("reads %.0f rows, more than %.0f", rows, most))
				}
				if faults != nil {
					t.Errorf("order by %s %s, name %q, status %v, offset %d: %s", q.orderBy, q.orderDirection, name,
						q.status != nil, q.offset, strings.Join(faults, "; "))
				}
			}
		}
	})
}

// BenchmarkGrowth runs once, whatever b.N, and takes a few minutes: it prints what each
// kind of list costs at a million hubs, as a multiple of the cost at a thousand.
func BenchmarkGrowth(b *testing.B) {
	var clients []*testClient // of a server with a thousand hubs, and of one with a million
	for _, size := range []int{1000, 1_000_000} {
		srv := startServer(b)
		fillHubs(b, srv.env["DATABASE_URL"], size)
		client, _ := srv.member(b, roleMember)
		clients = append(clients, client)
	}
	// cost is the median time of a request to each of them, taken in turn.
	cost := func(q hubQuery) (few, many float64) {
		query := url.Values{"limit": {fmt.Sprint(q.limit)}, "offset": {fmt.Sprint(q.offset)},
			"orderBy": {q.orderBy}, "orderDirection": {q.orderDirection}}
		if q.name != nil {
			query.Set("filters[name]", *q.name)
		}
		if q.status != nil {
			query.Set("filters[status]", *q.status)
		}
		var times [2][]float64
		for range 15 {
			for i, client := range clients {
				from := client.elsewhere()
				started := time.Now()
				from.do("GET", "/hubs?"+query.Encode(), nil).want(b, 200)
				times[i] = append(times[i], time.Since(started).Seconds()*1000)
			}
		}
		slices.Sort(times[0])
		slices.Sort(times[1])
		return times[0][7], times[1][7]
	}

	type row struct {
		kind                   string
		first, later, deepest  float64 // offset 0, 900 (ratios), 10000 (milliseconds)
		worstFirst, worstLater string
	}
	var rows []*row
	hubShapes("active", func(q hubQuery, names []string) {
		for _, name := range names {
			if q.name = nil; name != "" {
				q.name = &name
			}
			kind := fmt.Sprintf("name %q, status %v", name, q.status != nil)
			at := slices.IndexFunc(rows, func(r *row) bool { return r.kind == kind })
			if at < 0 {
				at, rows = len(rows), append(rows, &row{kind: kind})
			}
			r := rows[at]
			measure := func(offset int, ratio *float64, worst *string) {
				q.offset, q.limit = offset, 20
				if few, many := cost(q); many/few > *ratio {
					*ratio = many / few
					*worst = fmt.Sprintf("%.2f/%.2f ms by %s %s", many, few, q.orderBy, q.orderDirection)
				}
			}
			measure(0, &r.first, &r.worstFirst)
			measure(900, &r.later, &r.worstLater)
			q.offset, q.limit = 10000, 100
			_, many := cost(q)
			r.deepest = max(r.deepest, many)
		}
	})
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "worst of six orders\toffset 0: 1M/1k\t\toffset 900: 1M/1k\t\toffset 10000, limit 100: ms")
	for _, r := range rows {
		fmt.Fprintf(table, "%s\t%.2f\t%s\t%.2f\t%s\t%.1f\n", r.kind, r.first, r.worstFirst, r.later, r.worstLater, r.deepest)
	}
	table.Flush()
}
