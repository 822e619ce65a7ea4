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
		t.Fatalf("%s: %v", text, err)
	}
	defer db.Exec("deallocate list")
	arguments := strings.Repeat(", null", strings.Count(text, "$"))[2:]
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

// sentSettings returns the settings that a server has sent at the start of a connection, as
// parameters to append to the query of a database URL.
func sentSettings(sent string) string {
	_, settings, _ := strings.Cut(sent, "\x00\x03\x00\x00") // version 3 of the protocol
	settings, _, _ = strings.Cut(settings, "\x00\x00")
	pair := regexp.MustCompile(`(\w+)\x00([^\x00]+)\x00?`)
	return pair.ReplaceAllString(settings, "&$1=$2")
}

// readsMore matches a plan that reads more than a page and the hubs before it. Such a plan sorts or
// scans the whole table, because no index has the order, or filters by status, because no index
// begins with the status.
var readsMore = regexp.MustCompile(`Sort|Seq Scan|Filter: .*status`)

// A list reads only its page and the hubs before it, in an index that has the order of the list
// and, if the list is filtered by status, the status. At a large offset, or with a filter by name,
// it finds the ids of the page in the index alone, and reads the rows of its page only.
func TestHubListReadsLittle(t *testing.T) {
	t.Parallel()
	proxy, through := hubstest.ProxyURL(t, hubstest.NewDatabase(t))
	proxy.Sent() // starts the recording
	srv := hubstest.Start(t, map[string]string{"DATABASE_URL": through})
	planner := hubstest.OpenDB(t, through+sentSettings(string(proxy.Sent())))
	planner.SetMaxOpenConns(1)
	member, _ := srv.Member(t, "member")
	hubstest.Exec(t, srv.Database, `
		insert into hubs (name, status, created_at, updated_at)
		select 'Hub ' || md5(n::text), case when n % 10 = 0 then 'archived' else 'active' end,
			now() - n * interval '1 minute', now() - n % 977 * interval '1 hour'
		from generate_series(1, 20000) n`)
	// After a vacuum, PostgreSQL can tell from the index alone that a row is visible.
	hubstest.Exec(t, srv.Database, "vacuum analyze hubs")
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
				plan := explain(t, planner, lastList(t, srv.Database))
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
