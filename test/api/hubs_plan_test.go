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

// sentSettings returns the settings that the server sends as it connects, for the end of a URL.
func sentSettings(sent string) string {
	_, settings, _ := strings.Cut(sent, "\x00\x03\x00\x00") // version 3 of the protocol
	settings, _, _ = strings.Cut(settings, "\x00\x00")
	pair := regexp.MustCompile(`(\w+)\x00([^\x00]+)\x00?`)
	return pair.ReplaceAllString(settings, "&$1=$2")
}

// What shows that a plan reads more than its page and what is before it: no index has the order, or
// none has the status.
var readsMore = regexp.MustCompile(`Sort|Seq Scan|Filter: .*status`)

// A list reads its page, and what is before it, in an index that has its order and its status. Far
// from the start, and in a search, it reads the index alone, and the rows of its own page only.
func TestHubListReadsLittle(t *testing.T) {
	t.Parallel()
	proxy, through := hubstest.ProxyURL(t, hubstest.NewDatabase(t))
	proxy.Sent() // begins the record
	srv := hubstest.Start(t, map[string]string{"DATABASE_URL": through})
	planner := hubstest.OpenDB(t, through+sentSettings(string(proxy.Sent())))
	planner.SetMaxOpenConns(1)
	member, _ := srv.Member(t, "member")
	hubstest.Exec(t, srv.Database, `
		insert into hubs (name, status, created_at, updated_at)
		select 'Hub ' || md5(n::text), case when n % 10 = 0 then 'archived' else 'active' end,
			now() - n * interval '1 minute', now() - n % 977 * interval '1 hour'
		from generate_series(1, 20000) n`)
	hubstest.Exec(t, srv.Database, "vacuum analyze hubs") // else an index alone can't tell what is there
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
		-- No rows? Say here what the statement of a list looks like now.
		where query like 'select %from hubs%'
			and datname = current_database() and pid <> pg_backend_pid()
		order by query_start desc limit 1`)
}
