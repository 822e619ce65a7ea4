package api

import (
	"database/sql"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// explain returns the plan of a statement. The settings of the server make PostgreSQL use one plan
// for all arguments, so explain passes nulls. db must be limited to one connection, because a
// prepared statement exists on its own connection only.
func explain(t *testing.T, db *sql.DB, text string) (plan string) {
	t.Helper()
	if _, err := db.Exec("prepare list as " + text); err != nil {
		t.Fatalf("setup: %s: %v", text, err)
	}
	defer db.Exec("deallocate list")
	arguments := strings.Repeat(", null", strings.Count(text, "$"))[2:]
	row := db.QueryRow("explain (costs off, format yaml) execute list(" + arguments + ")")
	if err := row.Scan(&plan); err != nil {
		t.Fatalf("setup: %s: %v", text, err)
	}
	return plan
}

// serverSettings are the settings of the server's connections on which a plan depends, as a part of
// a database URL. TestSettingsOfConnections checks that the server has them.
const serverSettings = "&plan_cache_mode=force_generic_plan&enable_seqscan=off&jit=off" +
	"&max_parallel_workers_per_gather=0"

// readsMore matches a plan that reads more than a page and the hubs before it. Such a plan sorts or
// scans the whole table, because no index has the order, or filters by status, because no index
// begins with the status.
var readsMore = regexp.MustCompile(`Sort|Seq Scan|Filter: .*status`)

// A list reads only its page and the hubs before it, in an index that has the order of the list
// and, if the list is filtered by status, the status. At a large offset, or with a filter by name,
// it finds the ids of the page in the index alone, and reads the rows of its page only.
func TestHubListReadsLittle(t *testing.T) {
	t.Parallel()
	s, member := start(t, "member")
	planner := hubstest.OpenDB(t, s.Database+serverSettings)
	planner.SetMaxOpenConns(1)
	hubstest.Exec(t, s.Database, `
		insert into hubs (name, status, created_at, updated_at)
		select 'Hub ' || md5(n::text), case when n % 10 = 0 then 'archived' else 'active' end,
			now() - n * interval '1 minute', now() - n % 977 * interval '1 hour'
		from generate_series(1, 20000) n`)
	// After a vacuum, PostgreSQL can tell from the index alone that a row is visible.
	hubstest.Exec(t, s.Database, "vacuum analyze hubs")

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
				plan := explain(t, planner, lastList(t, s.Database))
				_, belowLimit, _ := strings.Cut(plan, "Limit") // above it, only the page is sorted
				if !strings.Contains(belowLimit, scan) || readsMore.MatchString(belowLimit) {
					t.Errorf("GET %s: got the plan\n%swant an %s below the Limit, and no %v",
						path, plan, scan, readsMore)
				}
			}
		}
	}
}

// lastList returns the statement of the last GET /hubs. It fails if there was none.
func lastList(t *testing.T, database string) string {
	t.Helper()
	return hubstest.Query[string](t, database, `select query from pg_stat_activity
		-- If this finds no row, the statement of a list has changed: adapt the next line.
		where query like 'select %from hubs%'
			and datname = current_database() and pid <> pg_backend_pid()
		order by query_start desc limit 1`)
}
