//go:build moving

package main

// GET /hubs on large tables: which rows each shape of its statement reads (part of the
// tests), and what a request costs at a million hubs against a thousand
// (./dev.sh bench growth).

import (
	"context"
	"database/sql"
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

// Names to search for in the hubs that fillHubs makes.
const (
	rareName   = "zweibrücken" // in 30 names, whatever the number of hubs
	commonName = "hub"         // in every third name
	someName   = "harbour"     // in one name of fifteen
	absentName = "xylophone"   // in no name
	splitName  = "abab"        // in no name, but every second name has its pieces, aba and bab

	// These sort to one end of every order: the ways to search are not equal there.
	fewFirst = "forerunner" // 0.5 %, first in ascending orders
	fewLast  = "latecomer"  // 0.5 %, last in ascending orders
	manyLast = "straggler"  // 5 %, last but for fewLast
)

// fillHubs makes n hubs, then the indexes, which is faster than row by row, and the
// statistics that PostgreSQL makes by itself a minute later. Ids by md5: as good as
// random, but the same each time, and with them the sample that a search begins with.
func fillHubs(t testing.TB, databaseURL string, n int) {
	t.Helper()
	for _, index := range []string{"by_name", "by_created_at", "by_updated_at",
		"by_status_name", "by_status_created_at", "by_status_updated_at", "name_grams"} {
		execSQL(t, databaseURL, "drop index hubs_"+index)
	}
	execSQL(t, databaseURL, `
		insert into hubs (hub_id, name, description, status, created_at, updated_at)
		select md5(n::text)::uuid,
			case place when 'first' then 'AA Forerunner ' when 'last' then 'zz Latecomer ' when 'late' then 'zy Straggler ' else '' end
			|| case when n % ($1::int / 30) = 7 then 'Zweibrücken ' else '' end
			|| word[1 + floor(random() * 45)] || case when random() < 0.33 then ' Hub ' else ' ' end
			|| word[1 + floor(random() * 45)] || ' ' || word[1 + floor(random() * 45)] || floor(random() * 10000)
			|| case when n % 2 = 0 then ' aba bab' else '' end,
			'Trains and trams, a bakery and a reading room, number ' || n || '.',
			case when random() < 0.1 then 'archived' else 'active' end,
			timestamptz '2026-01-01' + n * interval '10 seconds',
			timestamptz '2026-01-01' + random() * interval '300 days'
				+ case place when 'first' then -1 when 'last' then 2 when 'late' then 1 else 0 end * interval '1 year'
		from (
			select n, case when n <= 0.005 * $1::int then 'first' when n > 0.995 * $1::int then 'last'
				when n > 0.945 * $1::int then 'late' end place
			from generate_series(1, $1::int) n) places,
		(select regexp_split_to_array('North South East West Old New Upper Lower
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
				each(q, []string{rareName, commonName, someName, absentName, splitName, fewFirst, fewLast, manyLast, "a", "ar", "x"})
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

// A listReader runs the statements of GET /hubs with the very text and settings of the
// server, prepared as the server's are, so that their plans are the generic ones.
type listReader struct {
	t    *testing.T
	conn *sql.Conn
}

func newListReader(t *testing.T, databaseURL string) listReader {
	t.Helper()
	st, err := openStore(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.db.Close() })
	conn, err := st.db.Conn(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return listReader{t, conn}
}

// query returns the only column of the rows of a statement, as text.
func (r listReader) query(text string, args ...any) (values []string) {
	r.t.Helper()
	rows, err := r.conn.QueryContext(context.Background(), text, args...)
	if err != nil {
		r.t.Fatalf("%s\n%v", text, err)
	}
	defer rows.Close()
	for rows.Next() {
		var value string
		if err := rows.Scan(&value); err != nil {
			r.t.Fatal(err)
		}
		values = append(values, value)
	}
	if err := rows.Err(); err != nil {
		r.t.Fatalf("%s\n%v", text, err)
	}
	return values
}

// page returns the ids of a page.
func (r listReader) page(q hubQuery) []string {
	list := q.listStatement()
	return r.query("select hub_id from ("+list.text+") page", list.args...)
}

// explain runs the statement of a page and returns the steps of its plan. The arguments are
// literals, since execute takes no parameters.
func (r listReader) explain(q hubQuery) planNode {
	r.t.Helper()
	list := q.listStatement()
	r.query("prepare page as " + list.text)
	defer r.query("deallocate page")
	literals := make([]string, len(list.args))
	for i, arg := range list.args {
		literals[i] = "'" + fmt.Sprint(arg) + "'"
	}
	lines := r.query("explain (analyze, timing off, format json) execute page(" + strings.Join(literals, ", ") + ")")
	var plans []struct{ Plan planNode }
	if err := json.Unmarshal([]byte(strings.Join(lines, "")), &plans); err != nil || len(plans) != 1 {
		r.t.Fatalf("%v in %s", err, lines)
	}
	return plans[0].Plan
}

// Each shape of the list, deep pages included, reads a bounded part of 100,000 hubs, by an
// index, and finds what a plain statement finds.
func TestHubListReadsLittleOfALargeTable(t *testing.T) {
	t.Parallel()
	const size = 100_000
	databaseURL := newDatabase(t)
	fillHubs(t, databaseURL, size)
	reader := newListReader(t, databaseURL)
	// Of a name that a share of the hubs has, a page needs (offset + limit) / share of them.
	shares := map[string]float64{"": 1, commonName: 0.3, someName: 0.04, "a": 0.5, "ar": 0.15}
	// most is the number of index entries and rows that a page may read. 1200: the sample,
	// the rows of the page.
	most := func(q hubQuery, name string) float64 {
		switch share := shares[name]; {
		case share > 0:
			return 1200 + 1.2*float64(q.offset+q.limit+1)/share
		case name == fewFirst || name == fewLast: // the budget, then an index that finds 500, which are read
			return 1200 + 40_000 + 3*0.005*size
		case name == manyLast || name == splitName: // all entries once
			return 1200 + 1.01*size
		}
		return 1200 + 2*30 // what the index finds, and reading it
	}
	hubShapes("archived", func(q hubQuery, names []string) { // a tenth of them: another index shows
		for _, name := range names {
			where, args := "true", []any{}
			if q.name = nil; name != "" {
				q.name = &name
				where, args = "strpos(lower(name), $1) > 0", append(args, name)
			}
			if q.status != nil {
				where += " and status = '" + *q.status + "'"
			}
			order := hubOrders[q.orderBy] + " " + q.orderDirection + ", hub_id " + q.orderDirection
			all := reader.query("select hub_id from hubs where "+where+" order by "+order+" limit 10021", args...)
			for _, q.offset = range []int{0, 100, 101, 900, 10000} {
				kind := fmt.Sprintf("order by %s, name %q, status %v, offset %d", order, name, q.status != nil, q.offset)
				want := all[min(q.offset, len(all)):min(q.offset+q.limit+1, len(all))]
				if got := reader.page(q); !slices.Equal(got, want) {
					t.Errorf("%s: got %d hubs: %v\nwant %d: %v", kind, len(got), got, len(want), want)
				}
				rows, faults := reader.explain(q).read()
				if rows > most(q, name) {
					faults = append(faults, fmt.Sprintf("reads %.0f rows, more than %.0f", rows, most(q, name)))
				}
				if faults != nil {
					t.Errorf("%s: %s", kind, strings.Join(faults, "; "))
				}
			}
		}
	})

	// Exactly a page of these is within the budget of a search by name; the rest is behind it, and
	// the page has to say so. Ten have low ids, so they are in the sample: few enough for the name to
	// be rare, and enough for the search to try.
	execSQL(t, databaseURL, `insert into hubs (hub_id, name)
		select case when n <= 10 then ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid
				else gen_random_uuid() end,
			case when n <= 20 then 'AA Pagefiller ' else 'zz Pagefiller ' end || n
		from generate_series(1, 25) n`)
	name := "pagefiller"
	q := hubQuery{limit: 20, orderBy: "name", orderDirection: "asc", name: &name}
	if got := len(reader.page(q)); got != q.limit+1 {
		t.Errorf("a page of 20 and one more: got %d hubs, want %d", got, q.limit+1)
	}
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
