package api

import (
	"database/sql"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
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
const serverSettings = "&plan_cache_mode=force_generic_plan&enable_seqscan=off"

// hubOrders returns the parameters of each order of GET /hubs.
func hubOrders(t *testing.T) (orders []string) {
	t.Helper()
	list, _ := listOf("/hubs")
	for _, order := range ordersOf(t, list) {
		by, direction, _ := strings.Cut(order, " ")
		orders = append(orders, "orderBy="+by+"&orderDirection="+direction)
	}
	return orders
}

// capital matches the beginning of a word in a name of the contract.
var capital = regexp.MustCompile("[A-Z]")

// exactFilters returns a value for each filter of GET /hubs that compares a whole value, by the
// name of its column. One that finds a part needs no index.
func exactFilters(t *testing.T) map[string]string {
	t.Helper()
	filters := map[string]string{}
	list, _ := listOf("/hubs")
	for _, f := range filtersOf(t, list) {
		if f.Matches == "whole" {
			column := strings.ToLower(capital.ReplaceAllString(f.member, "_$0"))
			values, _ := valuesOf(f.Schema)
			filters[column] = "&" + f.Name + "=" + url.QueryEscape(fmt.Sprint(values[len(values)-1]))
		}
	}
	if len(filters) == 0 {
		t.Fatal("setup: the contract has no filter of GET /hubs that compares a whole value")
	}
	return filters
}

// lastList selects the statement of the last GET /hubs. If it finds no row, the statement of a list
// has changed: adapt it.
const lastList = `select query from pg_stat_activity
	where query like 'select %from hubs%'
		and datname = current_database() and pid <> pg_backend_pid()
	order by query_start desc limit 1`

// A list reads only its page and the hubs before it, in an index that has the order of the list
// and, if the list is filtered by a whole value, that value. At a large offset, or with a filter by
// name, it finds the ids of the page in the index alone, and reads the rows of its page only.
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

	filters := exactFilters(t)
	// A plan that sorts or scans the whole table has no index for the order. One that filters by a
	// whole value has no index that begins with it.
	columns := strings.Join(slices.Collect(maps.Keys(filters)), "|")
	readsMore := regexp.MustCompile(`Sort|Seq Scan|Filter: .*\b(` + columns + `)\b`)
	filters["no column"] = ""
	scans := map[string]string{
		"":                       "Index Scan",
		"&offset=5000":           "Index Only Scan",
		"&filters[name]=nowhere": "Index Only Scan",
	}
	for _, order := range hubOrders(t) {
		for _, filter := range filters {
			for page, scan := range scans {
				path := "/hubs?" + order + filter + page
				member.Elsewhere().Get(path).Must(t, 200)
				plan := explain(t, planner, hubstest.Query[string](t, s.Database, lastList))
				_, belowLimit, _ := strings.Cut(plan, "Limit") // above it, only the page is sorted
				if !strings.Contains(belowLimit, scan) || readsMore.MatchString(belowLimit) {
					t.Errorf("GET %s: got the plan\n%swant an %s below the Limit, and no %v",
						path, plan, scan, readsMore)
				}
			}
		}
	}
}
