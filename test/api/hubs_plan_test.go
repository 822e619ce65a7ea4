package api

import (
	"database/sql"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// explain returns the plan of a statement, whatever its arguments. The database has one
// connection.
func explain(t *testing.T, db *sql.DB, text, arguments string) (plan string) {
	t.Helper()
	if _, err := db.Exec("prepare list as " + text); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	defer db.Exec("deallocate list")
	rows, err := db.Query("explain (costs off) execute list(" + arguments + ")")
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	defer rows.Close()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		plan += line + "\n"
	}
	return plan
}

// What shows that a plan reads more than its page and what is before it: no index has the order, or
// none has the status.
var readsMore = regexp.MustCompile(`Sort|Seq Scan|Filter: .*status`)

// A list reads its page, and what is before it, in an index that has its order and its status. Far
// from the start, and in a search, it reads the index alone, and the rows of its own page only.
func TestHubListReadsLittle(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	member, _ := srv.Member(t, "member")
	hubstest.Exec(t, srv.Database, `
		insert into hubs (name, status, created_at, updated_at)
		select 'Hub ' || md5(n::text), case when n % 10 = 0 then 'archived' else 'active' end,
			now() - n * interval '1 minute', now() - n % 977 * interval '1 hour'
		from generate_series(1, 20000) n`)
	hubstest.Exec(t, srv.Database, "vacuum analyze hubs") // else an index alone can't tell what is there
	planner := hubstest.OpenDB(t, srv.Database+
		"&plan_cache_mode=force_generic_plan&enable_seqscan=off&jit=off") // as the server's
	planner.SetMaxOpenConns(1)
	scans := map[string]string{
		"":                       "Index Scan",
		"&offset=5000":           "Index Only Scan",
		"&filters[name]=nowhere": "Index Only Scan",
	}
	for _, order := range hubOrders {
		for _, status := range []string{"", "&filters[status]=archived"} {
			for page, scan := range scans {
				path := "/hubs?" + order + status + page
				member.Elsewhere().Get(path).Want(t, 200)
				arguments := "1, 1" + strings.Repeat(", ''", strings.Count(path, "filters"))
				plan := explain(t, planner, lastList(t, srv.Database), arguments)
				_, ofPage, _ := strings.Cut(plan, "Limit") // before it is the order within a page
				if !strings.Contains(ofPage, scan) || readsMore.MatchString(ofPage) {
					t.Errorf("GET %s: want an %s below the Limit, and no %v:\n%s",
						path, scan, readsMore, plan)
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
