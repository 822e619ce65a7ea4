package api

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"testing"

	"hubs/internal/hubstest"
)

// A plan is a step of a plan as explain (analyze, format json) tells it. Rows are averages of
// its loops.
type plan struct {
	Kind        string  `json:"Node Type"`
	Rows        float64 `json:"Actual Rows"`
	Loops       float64 `json:"Actual Loops"`
	Filtered    float64 `json:"Rows Removed by Filter"`
	HeapFetches float64 `json:"Heap Fetches"`
	Plans       []plan  `json:"Plans"`
}

// cost adds up the entries that a plan reads in an index alone, and the rows that it reads.
func (p plan) cost() (entries, rows float64) {
	read := (p.Rows + p.Filtered) * p.Loops
	switch p.Kind {
	case "Index Only Scan":
		entries = read
		rows = p.HeapFetches
	case "Index Scan", "Bitmap Heap Scan", "Seq Scan":
		rows = read
	}
	for _, step := range p.Plans {
		stepEntries, stepRows := step.cost()
		entries += stepEntries
		rows += stepRows
	}
	return entries, rows
}

// explain returns the plan of a statement and its arguments, literals in a list. The database has
// one connection.
func explain(t testing.TB, db *sql.DB, text, literals string) plan {
	t.Helper()
	if _, err := db.Exec("prepare list as " + text); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	defer db.Exec("deallocate list")
	var answer []byte
	row := db.QueryRow("explain (analyze, timing off, format json) execute list(" + literals + ")")
	if err := row.Scan(&answer); err != nil {
		t.Fatalf("%s (%s): %v", text, literals, err)
	}
	var plans []struct{ Plan plan }
	if err := json.Unmarshal(answer, &plans); err != nil {
		t.Fatal(err)
	}
	return plans[0].Plan
}

const (
	offsetOfRows  = 100   // so near that the rows themselves are read
	offsetOfIndex = 1_500 // so far that they are not
)

// Each shape of the list reads the entries of its page, and of the pages before, in an index
// that has its order and its status. A search reads the names of the others in that index, and
// the rows of its own page only.
func TestHubListReadsLittle(t *testing.T) {
	t.Parallel()
	const hubs = 20_000
	srv := hubstest.Start(t)
	database := srv.Database
	member, _ := srv.Member(t, "member")
	hubstest.Exec(t, database, `
		insert into hubs (name, status, created_at, updated_at)
		select 'Hub ' || md5(n::text), case when n % 10 = 0 then 'archived' else 'active' end,
			now() - n * interval '1 minute', now() - n % 977 * interval '1 hour'
		from generate_series(1, $1::int) n`, hubs)
	hubsOf := map[string]int{
		"":         hubs,
		"archived": hubs / 10,
	}
	hubstest.Exec(t, database, "vacuum analyze hubs") // else an index alone can't tell what is there
	planner := hubstest.OpenDB(t, database+
		"&plan_cache_mode=force_generic_plan&enable_seqscan=off&jit=off") // as the server's
	planner.SetMaxOpenConns(1)
	page := decode[hubPage](t, member.Get("/hubs"), 200)
	pageRows := page.Limit + 1 // and one for hasMore

	for _, order := range hubOrders {
		for status, hubs := range hubsOf {
			for _, shape := range []struct {
				offset        int
				name          string // a filter; "": none
				entries, rows int    // that it may read: of an index alone, and of the table
			}{
				{offset: offsetOfRows, rows: offsetOfRows + pageRows},
				{offset: offsetOfIndex, entries: offsetOfIndex + pageRows, rows: pageRows},
				{name: "nowhere", entries: hubs},
			} {
				path := fmt.Sprint("/hubs?", order, "&offset=", shape.offset)
				literals := fmt.Sprint(pageRows, ", ", shape.offset)
				if status != "" {
					path += "&filters[status]=" + status
					literals += ", '" + status + "'"
				}
				if shape.name != "" {
					path += "&filters[name]=" + shape.name
					literals += ", '" + shape.name + "'"
				}
				member.Elsewhere().Get(path).Want(t, 200)
				text := lastList(t, database)
				entries, rows := explain(t, planner, text, literals).cost()
				if entries > float64(shape.entries) || rows > float64(shape.rows) {
					t.Errorf("GET %s: got %v entries and %v rows read, want at most %v and %v\n%s",
						path, entries, rows, shape.entries, shape.rows, text)
				}
			}
		}
	}
}

// lastList returns the statement of the last list.
func lastList(t *testing.T, database string) string {
	t.Helper()
	return hubstest.Query[string](t, database, `select query from pg_stat_activity
		where datname = current_database() and query like 'select hub_id%limit $1%'
		order by query_start desc limit 1`)
}
