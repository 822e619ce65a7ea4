package api

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// wholeList is how many hubs TestWholeListIsRead reads in each order and with each filter.
const wholeList = 1200

// fillWholeList inserts hubs of which every second stays; the others are "spare", and may be renamed
// and deleted. Many values of each order are equal, many times differ in their microseconds only, and
// some names are as long as a name can be.
const fillWholeList = `
	insert into hubs (name, description, status, created_at, updated_at)
	select case n % 7 when 0 then repeat('😀', 99) || chr(65 + n / 2 % 3)
			else 'Hub ' || n / 2 % 90 || ' ' end,
		case n % 2 when 0 then 'stays' else 'spare' end,
		case n % 3 when 0 then 'archived' else 'active' end,
		'2026-01-01Z'::timestamptz + n / 6 * interval '1 microsecond',
		'2026-01-01Z'::timestamptz - n / 8 * interval '333 microseconds'
	from generate_series(1, $1::int) n`

// storedHubs returns all hubs from the database, whose times have microseconds.
func storedHubs(t testing.TB, s *hubstest.Server) (all []hub) {
	t.Helper()
	text := hubstest.Query[string](t, s.Database, `select json_agg(json_build_object('hubId', hub_id,
		'name', name, 'description', description, 'status', status, 'createdAt', created_at,
		'updatedAt', updated_at)) from hubs`)
	hubstest.Must(t, json.Unmarshal([]byte(text), &all))
	return all
}

// readAll reads a list to its end, page by page, each behind the last row of the one before. It calls
// between after each page.
func readAll(t testing.TB, c *hubstest.Client, query string, between func(page hubPage)) (all []hub) {
	t.Helper()
	after := ""
	for {
		limit := 1 + rand.IntN(100) // may change from page to page
		path := fmt.Sprintf("/hubs?%s&limit=%d%s", query, limit, after)
		page := decode[hubPage](t, c.Elsewhere().Get(path).Must(t, 200))
		all = append(all, page.Items...)
		if page.HasMore != (page.Next != nil) || len(page.Items) < limit && page.HasMore || page.Offset != 0 {
			t.Fatalf("GET %s: got %d items, offset %d, hasMore %v, next %v", path, len(page.Items),
				page.Offset, page.HasMore, page.Next)
		}
		between(page)
		if page.Next == nil {
			return all
		}
		after = "&after=" + *page.Next
	}
}

// B4, B4b: A program that reads the whole list by next and after reads each hub exactly once and in
// its place, unless the value that orders the list has changed, while others add, rename and delete
// hubs between its pages: the last one of a page, others of it, and any that are still to come.
func TestWholeListIsRead(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	hubstest.Exec(t, s.Database, fillWholeList, wholeList)
	filters := []string{
		"",
		"filters[status]=archived",
		"filters[name]=hUb+1",
		"filters[name]=hub&filters[status]=active",
	}
	for _, order := range hubOrders(t) {
		t.Run(order, func(t *testing.T) {
			t.Parallel() // so each reader is disturbed by the others, too
			reader := &hubReader{Client: admin.In(t)}
			for _, filter := range filters {
				query := order + "&" + filter
				before := storedHubs(t, s)
				got := readAll(t, reader.Client, query, func(page hubPage) {
					disturb(reader.Elsewhere(), page, before)
				})
				reader.all = slices.DeleteFunc(slices.Clone(before), isSpare)
				want := ids(reader.found(t, query))
				wantSameIDs(t, query, ids(slices.DeleteFunc(slices.Clone(got), isSpare)), want)
				if strings.Contains(order, "createdAt") {
					wantNoneTwice(t, query, ids(got)) // not even one that was renamed
				}
			}
		})
	}
}

func isSpare(h hub) bool { return h.Description == "spare" }

func ids(hubs []hub) (list []string) {
	for _, h := range hubs {
		list = append(list, h.HubID)
	}
	return list
}

// disturb deletes the last hub of a page, renames its first one, deletes one of all hubs, renames
// another, and adds two. It touches spare hubs only, and some are gone already.
func disturb(admin *hubstest.Client, page hubPage, all []hub) {
	change := func(method string, h hub, body any) {
		if isSpare(h) {
			admin.Do(method+" /hubs/"+h.HubID, body)
		}
	}
	newName := func() any {
		return map[string]string{"name": fmt.Sprint("Hub ", rand.IntN(90)), "description": "spare"}
	}
	if len(page.Items) > 0 {
		change("DELETE", page.Items[len(page.Items)-1], nil)
		change("PATCH", page.Items[0], newName())
	}
	change("DELETE", all[rand.IntN(len(all))], nil)
	change("PATCH", all[rand.IntN(len(all))], newName())
	admin.Do("POST /hubs", newName())
	admin.Do("POST /hubs", newName())
}

// wantSameIDs compares two lists of ids, and shows where they begin to differ.
func wantSameIDs(t *testing.T, query string, got, want []string) {
	t.Helper()
	wantNoneTwice(t, query, got)
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || got[i] != want[i] {
			t.Errorf("%s: got %d hubs that stay, want %d; number %d is the first that differs",
				query, len(got), len(want), i)
			return
		}
	}
}

func wantNoneTwice(t *testing.T, query string, got []string) {
	t.Helper()
	sorted := slices.Sorted(slices.Values(got))
	if n := len(sorted) - len(slices.Compact(sorted)); n > 0 {
		t.Errorf("%s: got %d hubs twice, want none", query, n)
	}
}

// B4: Beyond the largest offset, next leads on to the last hub.
func TestNextLeadsBeyondTheLargestOffset(t *testing.T) {
	t.Parallel()
	s, member := start(t, "member")
	const last = 10_250
	hubstest.Exec(t, s.Database, `insert into hubs (name)
		select to_char(n, 'FM00000') from generate_series(1, $1::int) n`, last)
	member.Get("/hubs?offset=10001").WantProblem(t, 400, "invalid_request", "offset")
	query := "offset=10000&limit=100"
	var got []string
	for query != "" {
		page := decode[hubPage](t, member.Get("/hubs?"+query).Must(t, 200))
		for _, h := range page.Items {
			got = append(got, h.Name)
		}
		query = ""
		if page.Next != nil {
			query = "limit=100&after=" + *page.Next
		}
	}
	wantEqual(t, "hubs behind the largest offset", len(got), last-10_000)
	wantEqual(t, "first and last", []string{got[0], got[len(got)-1]}, []string{"10001", "10250"})
}

// An afterCase is a request for a list. In its query, <next> is the next of a page of the list Of,
// <cut> is that without its last letter, and <after> is the text Plain in base64. In Plain, <list>
// <id> <value> are the three parts of which the next of that list consists.
type afterCase struct {
	Name, Rule string
	Of         string // a list; "" means the one in Each
	Plain      string
	Query      string // "" means after=<after>
	Want       answer
}

// I2: An after that no page has as its next is a 400 that names it, or means a place in the list. It
// is never a failure, whatever its text: it reaches PostgreSQL as the value of a column.
func TestHostileAfter(t *testing.T) {
	t.Parallel()
	s, member := start(t, "member")
	hubstest.Exec(t, s.Database, `insert into hubs (name, created_at, updated_at) values
		('a%', '2026-01-01Z', '2026-01-01Z'), ('b%', '2026-01-02Z', '2026-01-02Z')`)
	nexts := map[string]string{}
	for word, query := range map[string]string{
		"<plain>":   "",
		"<desc>":    "orderDirection=desc",
		"<created>": "orderBy=createdAt",
		"<updated>": "orderBy=updatedAt",
		"<active>":  "filters[status]=active",
		"<named>":   "filters[name]=%25",
	} {
		nexts[word] = member.Get("/hubs?limit=1&"+query).Must(t, 200).Field(t, "next")
	}
	runCases(t, afterCases, func(t *testing.T, c afterCase) {
		next := named(t, nexts, c.Of)
		decoded, err := base64.RawURLEncoding.DecodeString(next)
		hubstest.Must(t, err)
		parts := strings.SplitN(string(decoded), " ", 3)
		plain := fillIn(c.Plain, "<list>", parts[0], "<id>", parts[1], "<value>", parts[2])
		words := []string{
			"<next>", next,
			"<cut>", next[:len(next)-1],
			"<after>", base64.RawURLEncoding.EncodeToString([]byte(plain)),
		}
		query := fillIn(cmp.Or(c.Query, "after=<after>"), words...)
		wantAnswer(t, member.In(t).Elsewhere().Get("/hubs?"+query), c.Want)
	})
}

var afterCases = []group[afterCase]{
	// What next returns leads on, and so does another text in its form.
	{Each: afterCase{Rule: "I2", Of: "<plain>", Query: "after=<next>",
		Want: answer{Status: 200, Items: []string{"b%"}}}, Cases: []afterCase{
		{Name: "next"},
		{Name: "next, escaped", Query: "%61fter=<next>"},
		{Name: "next of another order", Of: "<created>", Query: "orderBy=createdAt&after=<next>"},
		{Name: "next with a filter by status", Of: "<active>",
			Query: "after=<next>&filters%5Bstatus%5D=active"},
		{Name: "next with a filter by name", Of: "<named>", Query: "after=<next>&filters[name]=%25"},
		{Name: "limit changed", Query: "after=<next>&limit=100"},
		{Name: "the defaults sent", Query: "after=<next>&orderBy=name&orderDirection=asc"},
	}},
	{Each: afterCase{Rule: "I2", Of: "<plain>", Want: answer{Status: 200}}, Cases: []afterCase{
		{Name: "a hub that does not exist", Plain: "<list> 00000000-0000-0000-0000-000000000000 <value>",
			Want: items("a%", "b%")},
		{Name: "the last id", Plain: "<list> ffffffff-ffff-ffff-ffff-ffffffffffff <value>",
			Want: items("b%")},
		{Name: "an empty name", Plain: "<list> <id> ", Want: items("a%", "b%")},
		{Name: "a name of spaces", Plain: "<list> <id>   ", Want: items("a%", "b%")},
		{Name: "a name longer than a name can be", Plain: "<list> <id> a" + repeat("x", 600),
			Want: items("b%")},
		{Name: "a name with a line break", Plain: "<list> <id> a%\n", Want: items("b%")},
		{Name: "a name of SQL", Plain: "<list> <id> a') or true --", Want: items("b%")},
		{Name: "a name of U+FFFD", Plain: "<list> <id> \uFFFD", Want: items()},
		{Name: "the last character of Unicode", Plain: "<list> <id> \U0010FFFF", Want: items()},
	}},
	// A time that Go can read can be compared by PostgreSQL.
	{Each: afterCase{Rule: "I2", Of: "<created>", Query: "orderBy=createdAt&after=<after>",
		Want: answer{Status: 200}}, Cases: []afterCase{
		{Name: "a time zone", Plain: "<list> <id> 2026-01-01T01:00:00+01:00", Want: items("b%")},
		{Name: "an offset of +23:59", Plain: "<list> <id> 2026-01-01T23:59:00+23:59", Want: items("b%")},
		{Name: "an offset of -23:59", Plain: "<list> <id> 2025-12-31T00:01:00-23:59", Want: items("b%")},
		{Name: "an offset of a day", Plain: "<list> <id> 2026-01-01T00:00:00+24:00",
			Want: items("a%", "b%")},
		{Name: "nanoseconds", Plain: "<list> <id> 2026-01-01T00:00:00.000001999Z", Want: items("b%")},
		{Name: "year 0", Plain: "<list> <id> 0000-01-01T00:00:00Z", Want: items("a%", "b%")},
		{Name: "before year 0", Plain: "<list> <id> 0000-01-01T00:00:00+23:59",
			Want: items("a%", "b%")},
		{Name: "year 1", Plain: "<list> <id> 0001-01-01T00:00:00Z", Want: items("a%", "b%")},
		{Name: "year 9999", Plain: "<list> <id> 9999-12-31T23:59:59.999999999Z", Want: items()},
		{Name: "after year 9999", Plain: "<list> <id> 9999-12-31T23:59:59-23:59", Want: items()},
		{Name: "a leap day", Plain: "<list> <id> 2024-02-29T12:00:00Z", Want: items("a%", "b%")},
	}},
	// A next that was altered, or that another list has.
	{Each: afterCase{Rule: "I2", Of: "<plain>", Want: invalid("after")}, Cases: []afterCase{
		{Name: "empty", Query: "after="},
		{Name: "without =", Query: "after"},
		{Name: "a word", Query: "after=next"},
		{Name: "null", Query: "after=null"},
		{Name: "cut off", Query: "after=<cut>"},
		{Name: "longer by a letter", Query: "after=<next>A"},
		{Name: "with padding", Query: "after=<next>=="},
		{Name: "behind a space", Query: "after=+<next>"},
		{Name: "in the other alphabet", Query: "after=%2B%2F<next>"},
		{Name: "with NUL", Query: "after=<next>%00"},
		{Name: "with a byte that is no UTF-8", Query: "after=<next>%ff"},
		{Name: "twice", Query: "after=<next>&after=<next>"},
		{Name: "with an offset", Query: "after=<next>&offset=1"},
		{Name: "with offset 0", Query: "after=<next>&offset=0"},
		{Name: "of the other direction", Of: "<desc>", Query: "after=<next>"},
		{Name: "of another order", Of: "<created>", Query: "after=<next>"},
		{Name: "of another order by time", Of: "<created>", Query: "after=<next>&orderBy=updatedAt"},
		{Name: "of a list with a filter by status", Of: "<active>", Query: "after=<next>"},
		{Name: "of a list with a filter by name", Of: "<named>", Query: "after=<next>"},
		{Name: "of a list without a filter by status", Query: "after=<next>&filters[status]=active"},
		{Name: "of a list without a filter by name", Query: "after=<next>&filters[name]=%25"},
		{Name: "of a list with another filter", Of: "<named>",
			Query: "after=<next>&filters[name]=%25&filters[status]=active"},
		{Name: "one part", Plain: "<list>"},
		{Name: "two parts", Plain: "<list> <id>"},
		{Name: "no list", Plain: " <id> <value>"},
		{Name: "a list of NUL", Plain: "\x00 <id> <value>"},
		{Name: "another list", Plain: "x<list> <id> <value>"},
		{Name: "no id", Plain: "<list>  <value>"},
		{Name: "no UUID", Plain: "<list> 1 <value>"},
		{Name: "a UUID in capitals", Plain: "<list> AAAAAAAA-0000-4000-A000-000000000000 <value>"},
		{Name: "a UUID and SQL", Plain: "<list> <id>' <value>"},
		{Name: "a name with NUL", Plain: "<list> <id> a\x00"},
		{Name: "a name that is no UTF-8", Plain: "<list> <id> a\xff"},
		{Name: "a name with a surrogate", Plain: "<list> <id> \xed\xa0\x80"},
		{Name: "more than 1,000 bytes", Plain: "<list> <id> " + repeat("x", 800)},
	}},
	{Each: afterCase{Rule: "I2", Of: "<updated>", Query: "orderBy=updatedAt&after=<after>",
		Want: invalid("after")}, Cases: []afterCase{
		{Name: "no time", Plain: "<list> <id> a"},
		{Name: "an empty time", Plain: "<list> <id> "},
		{Name: "a time with NUL", Plain: "<list> <id> <value>\x00"},
		{Name: "infinity", Plain: "<list> <id> infinity"},
		{Name: "a time of PostgreSQL", Plain: "<list> <id> 2026-01-01 00:00:00+00"},
		{Name: "a time without a zone", Plain: "<list> <id> 2026-01-01T00:00:00"},
		{Name: "five digits of a year", Plain: "<list> <id> 10000-01-01T00:00:00Z"},
		{Name: "a year with a sign", Plain: "<list> <id> -001-01-01T00:00:00Z"},
		{Name: "no such day", Plain: "<list> <id> 2026-02-29T00:00:00Z"},
		{Name: "a leap second", Plain: "<list> <id> 2026-12-31T23:59:60Z"},
		{Name: "an offset of 25 hours", Plain: "<list> <id> 2026-01-01T00:00:00+25:00"},
	}},
}

// H6: A page by after begins at its place in the index of its order and filter, and reads only what
// is on the page, or between the hubs that a search finds. So it costs the same wherever it is.
func TestPagesByAfterReadLittle(t *testing.T) {
	t.Parallel()
	s, member := start(t, "member")
	planner := hubstest.OpenDB(t, s.Database+serverSettings)
	planner.SetMaxOpenConns(1)
	hubstest.Exec(t, s.Database, `
		insert into hubs (name, status, created_at, updated_at)
		select 'Hub ' || md5(n::text), case when n % 10 = 0 then 'archived' else 'active' end,
			now() - n * interval '1 minute', now() - n % 977 * interval '1 hour'
		from generate_series(1, 20000) n`)
	hubstest.Exec(t, s.Database, "vacuum analyze hubs")
	filters := exactFilters(t)
	filters["no column"] = ""
	begins := regexp.MustCompile(`Index Cond: .*ROW\(\w+, hub_id\) [<>] ROW\(`)
	for _, order := range hubOrders(t) {
		for _, filter := range filters {
			for search, scan := range map[string]string{
				"":                 "Index Scan",
				"&filters[name]=b": "Index Only Scan",
			} {
				path := "/hubs?limit=2&" + order + filter + search
				next := member.Elsewhere().Get(path).Must(t, 200).Field(t, "next")
				member.Elsewhere().Get(path+"&after="+next).Must(t, 200)
				plan := explain(t, planner, hubstest.Query[string](t, s.Database, lastList))
				_, belowLimit, _ := strings.Cut(plan, "Limit")
				if !strings.Contains(belowLimit, scan) || !begins.MatchString(belowLimit) ||
					strings.Contains(belowLimit, "Sort") {
					t.Errorf("GET %s&after=…: got the plan\n%swant an %s below the Limit, whose %v",
						path, plan, scan, begins)
				}
			}
		}
	}
}
