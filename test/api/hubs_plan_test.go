package api

import (
	"context"
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

// A planner explains statements on one connection, with the server's settings.
type planner struct {
	t    testing.TB
	conn *sql.Conn
}

func newPlanner(t testing.TB, databaseURL string) planner {
	t.Helper()
	conn, err := hubstest.OpenDB(t, databaseURL).Conn(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	p := planner{t: t, conn: conn}
	p.run("set plan_cache_mode = force_generic_plan")
	p.run("set enable_seqscan = off")
	p.run("set jit = off")
	return p
}

func (p planner) run(statement string) {
	p.t.Helper()
	if _, err := p.conn.ExecContext(context.Background(), statement); err != nil {
		p.t.Fatalf("%s: %v", statement, err)
	}
}

// explain returns the plan of a statement and its arguments, literals in a list.
func (p planner) explain(text, literals string) plan {
	p.t.Helper()
	p.run("prepare list as " + text)
	defer p.run("deallocate list")
	var answer []byte
	row := p.conn.QueryRowContext(context.Background(),
		"explain (analyze, timing off, format json) execute list("+literals+")")
	if err := row.Scan(&answer); err != nil {
		p.t.Fatalf("%s (%s): %v", text, literals, err)
	}
	var plans []struct{ Plan plan }
	if err := json.Unmarshal(answer, &plans); err != nil {
		p.t.Fatal(err)
	}
	return plans[0].Plan
}

// A listShape is one kind of list, and what it may read: entries of an index alone, and rows.
type listShape struct {
	query         string
	literals      string // the statement's arguments
	entries, rows float64
}

// pageRows is the default limit, and one for hasMore.
const pageRows = 21

var listShapes = []listShape{
	{
		query:    "offset=100",
		literals: "21, 100",
		rows:     100 + pageRows,
	},
	{
		query:    "offset=100&filters[status]=archived",
		literals: "21, 100, 'archived'",
		rows:     100 + pageRows,
	},
	{
		query:    "offset=1500",
		literals: "21, 1500",
		entries:  1500 + pageRows,
		rows:     pageRows,
	},
	{
		query:    "offset=1500&filters[status]=archived",
		literals: "21, 1500, 'archived'",
		entries:  1500 + pageRows,
		rows:     pageRows,
	},
	{
		query:    "filters[name]=nowhere",
		literals: "21, 0, 'nowhere'",
		entries:  20000,
	},
	{
		query:    "filters[name]=nowhere&filters[status]=archived",
		literals: "21, 0, 'archived', 'nowhere'",
		entries:  2000,
	},
}

// Each shape of the list reads the entries of its page, and of the pages before, in an index
// that has its order and its status. A search reads the names of the others in that index, and
// the rows of its own page only.
func TestHubListReadsLittle(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	database := srv.Env["DATABASE_URL"]
	member, _ := srv.Member(t, "member")
	hubstest.Exec(t, database, `
		insert into hubs (name, status, created_at, updated_at)
		select 'Hub ' || md5(n::text), case when n % 10 = 0 then 'archived' else 'active' end,
			now() - n * interval '1 minute', now() - n % 977 * interval '1 hour'
		from generate_series(1, 20000) n`)
	hubstest.Exec(t, database, "vacuum analyze hubs") // else an index alone can't tell what is there
	planner := newPlanner(t, database)

	for i, order := range hubOrders {
		member.IP = fmt.Sprintf("2001:db8:1:%x::1", i) // or the limit by address would answer
		for _, shape := range listShapes {
			path := "/hubs?" + order + "&" + shape.query
			member.Do("GET", path, nil).Want(t, 200)
			text := hubstest.Query[string](t, database, `select query from pg_stat_activity
				where datname = current_database() and query like 'select hub_id%limit $1%'
				order by query_start desc limit 1`)
			entries, rows := planner.explain(text, shape.literals).cost()
			if entries > shape.entries || rows > shape.rows {
				t.Errorf("GET %s: got %v entries and %v rows read, want at most %v and %v\n%s",
					path, entries, rows, shape.entries, shape.rows, text)
			}
		}
	}
}
