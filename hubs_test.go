//go:build moving

package main

// Tests of hubs.go: lists against a reference in Go, and the rules of a hub's fields.

import (
	"cmp"
	"encoding/json"
	"math/rand/v2"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// A hubAsker puts questions to GET /hubs and to the reference.
type hubAsker struct {
	*testClient
	all   []hub
	asked int
}

// newHubAsker fills the table with hubs in which all kinds of ties and names are, and
// reads them back as the reference. More than a thousand: the server looks at that
// many to choose how to search, and the choice must not be seen.
func newHubAsker(t testing.TB) *hubAsker {
	t.Helper()
	srv := startServer(t)
	member, _ := srv.member(t, roleMember)
	db := testDB(t, srv.env["DATABASE_URL"])
	random := rand.New(rand.NewPCG(1, 2))
	pick := func(from ...string) string { return from[random.IntN(len(from))] }
	names, statuses, created, updated := make([]string, 1500), make([]string, 1500), make([]int, 1500), make([]int, 1500)
	for i := range names {
		for range 1 + random.IntN(6) {
			names[i] += pick("North", "south", "EAST", "a", "B", "%", "_", `\`, "%_", `\%`, "'", `"`, " ", "Ä", "ä", "é", "É", "Я", "я",
				"日本", "😀", "1", "12", "o", "O", "--", "$1", "{order}")
		}
		if names[i] = strings.Trim(names[i], " "); names[i] == "" {
			names[i] = "-"
		}
		statuses[i], created[i], updated[i] = pick(hubStatuses...), random.IntN(40), random.IntN(40)
	}
	for i, rare := range []string{"Needle", "needles", "XNEEDLE", "100%_sure", `C:\new`} {
		names[300*i] = rare
	}
	encode := func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	if _, err := db.Exec(`insert into hubs (name, status, created_at, updated_at)
		select n, s, '2026-01-01'::timestamptz + c::int * interval '1 microsecond', '2026-02-01'::timestamptz + u::int * interval '1 day'
		from rows from (json_array_elements_text($1::json), json_array_elements_text($2::json),
			json_array_elements_text($3::json), json_array_elements_text($4::json)) as row (n, s, c, u)`,
		encode(names), encode(statuses), encode(created), encode(updated)); err != nil {
		t.Fatal(err)
	}
	execSQL(t, srv.env["DATABASE_URL"], "analyze hubs")
	rows, err := db.Query("select hub_id, name, description, status, created_at, updated_at from hubs")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	asker := &hubAsker{testClient: member}
	for rows.Next() {
		var h hub
		if err := rows.Scan(&h.HubID, &h.Name, &h.Description, &h.Status, &h.CreatedAt, &h.UpdatedAt); err != nil {
			t.Fatal(err)
		}
		h.CreatedAt, h.UpdatedAt = h.CreatedAt.UTC(), h.UpdatedAt.UTC()
		asker.all = append(asker.all, h)
	}
	if len(asker.all) != len(names) {
		t.Fatalf("%d hubs, %v", len(asker.all), rows.Err())
	}
	return asker
}

// reference is the whole list that the parameters ask for.
func (a *hubAsker) reference(q url.Values) (list []hub) {
	for _, h := range a.all {
		contains := strings.Contains(strings.ToLower(h.Name), strings.ToLower(q.Get("filters[name]")))
		if contains && (!q.Has("filters[status]") || q.Get("filters[status]") == h.Status) {
			list = append(list, h)
		}
	}
	slices.SortFunc(list, func(x, y hub) int {
		by := 0
		switch q.Get("orderBy") {
		case "createdAt":
			by = x.CreatedAt.Compare(y.CreatedAt)
		case "updatedAt":
			by = x.UpdatedAt.Compare(y.UpdatedAt)
		default:
			by = strings.Compare(x.Name, y.Name) // by bytes
		}
		if by = cmp.Or(by, strings.Compare(x.HubID, y.HubID)); q.Get("orderDirection") == "desc" {
			return -by
		}
		return by
	})
	return list
}

// ask compares one page with the reference, and returns its length.
func (a *hubAsker) ask(t testing.TB, q url.Values) int {
	t.Helper()
	if a.asked++; a.asked%90 == 0 {
		a.testClient = a.elsewhere()
	}
	list, limit, offset := a.reference(q), 20, 0
	if q.Has("limit") {
		limit, _ = strconv.Atoi(q.Get("limit"))
	}
	if q.Has("offset") {
		offset, _ = strconv.Atoi(q.Get("offset"))
	}
	want := hubPage{list[min(offset, len(list)):min(offset+limit, len(list))], limit, offset, offset+limit < len(list)}
	var got hubPage
	answer := a.do("GET", "/hubs?"+q.Encode(), nil).want(t, 200)
	if err := json.Unmarshal(answer.body, &got); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got.Items, want.Items) || got.Limit != limit || got.Offset != offset || got.HasMore != want.HasMore || got.Items == nil {
		var names []string
		for _, h := range want.Items {
			names = append(names, h.Name+" "+h.HubID)
		}
		t.Fatalf("%v: want hasMore %v and %d items: %q\ngot hasMore %v and %d: %s", q, want.HasMore, len(names), names,
			got.HasMore, len(got.Items), answer.body)
	}
	return len(got.Items)
}

// Every order, page by page to its end: nothing twice, nothing skipped, ties included.
func TestHubListOrderAndPages(t *testing.T) {
	t.Parallel()
	a := newHubAsker(t)
	if n := a.ask(t, nil); n != 20 {
		t.Errorf("%d items by default", n)
	}
	for _, by := range []string{"name", "createdAt", "updatedAt"} {
		for _, direction := range []string{"asc", "desc"} {
			for _, filter := range []string{"", "active", "archived"} {
				q := url.Values{"orderBy": {by}, "orderDirection": {direction}, "limit": {"100"}}
				if filter != "" {
					q.Set("filters[status]", filter)
				}
				for offset := 0; offset <= len(a.all); offset += 100 {
					q.Set("offset", strconv.Itoa(offset))
					if a.ask(t, q) == 0 {
						break
					}
				}
			}
		}
	}
	for _, q := range []string{"limit=1", "limit=1&offset=1499", "limit=1&offset=1500", "offset=10000", "limit=100&offset=1400", "limit=99&offset=1400"} {
		values, err := url.ParseQuery(q)
		if err != nil {
			t.Fatal(err)
		}
		a.ask(t, values)
	}
}

// Parts of names, frequent and rare, with every character a plain one, in every order
// and together with the status.
func TestHubListSearch(t *testing.T) {
	t.Parallel()
	a := newHubAsker(t)
	if n := len(a.reference(url.Values{"filters[name]": {"needle"}})); n != 3 {
		t.Fatalf("%d of 3 rare names: the reference is wrong", n)
	}
	searches := []string{"%", "_", `\`, `\\`, "%_", `\%`, "%%", "__", "'", `"`, "--", "$1", "{order}", "{", "north", "NORTH", "nOrTh",
		"ä", "Ä", "é", "я", "日", "😀", "needle", "NEEDLES", "100%", `c:\`, "nowhere at all", strings.Repeat("x", 100), "a", "1", " "}
	random := rand.New(rand.NewPCG(3, 4))
	for range 120 { // pieces of names that there are
		name := []rune(a.all[random.IntN(len(a.all))].Name)
		from := random.IntN(len(name))
		searches = append(searches, string(name[from:from+1+random.IntN(len(name)-from)]))
	}
	for i, search := range searches {
		q := url.Values{"filters[name]": {search}, "limit": {[]string{"100", "20", "1"}[i%3]},
			"orderBy": {[]string{"name", "createdAt", "updatedAt"}[i/3%3]}, "orderDirection": {[]string{"asc", "desc"}[i/9%2]}}
		a.ask(t, q)
		q.Set("offset", strconv.Itoa(random.IntN(40)))
		a.ask(t, q)
		q.Set("filters[status]", hubStatuses[i%2])
		a.ask(t, q)
	}
}

// A search ignores case in all scripts, and the final sigma is a sigma.
func TestHubListSearchIgnoresCase(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	member, _ := srv.member(t, roleMember)
	execSQL(t, srv.env["DATABASE_URL"], "insert into hubs (name) values ('ΟΔΟΣ'), ('οδος'), ('Οδοσ 1'), ('ЁЛКА'), ('other')")
	for search, want := range map[string]int{"οδοσ": 3, "οδος": 3, "ΟΔΟΣ": 3, "ς": 3, "Σ": 3, "ёлка": 1, "ЁЛ": 1, "елка": 0} {
		answer := member.do("GET", "/hubs?"+url.Values{"filters[name]": {search}}.Encode(), nil).want(t, 200)
		if items := answer.field(t, "items").([]any); len(items) != want {
			t.Errorf("%s: %d hubs, want %d: %s", search, len(items), want, answer.body)
		}
	}
}

// A name that has all pieces of a rare part, but not the part, is not found.
func TestHubListSearchFindsWholeParts(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	member, _ := srv.member(t, roleMember)
	execSQL(t, srv.env["DATABASE_URL"], "insert into hubs (name) values ('abcd'), ('abc bcd'), ('bcd abc'), ('other')")
	for search, want := range map[string]int{"abcd": 1, "abc": 3, "bcd": 3, "abcde": 0} {
		answer := member.do("GET", "/hubs?"+url.Values{"filters[name]": {search}}.Encode(), nil).want(t, 200)
		if items := answer.field(t, "items").([]any); len(items) != want {
			t.Errorf("%s: got %d hubs, want %d: %s", search, len(items), want, answer.body)
		}
	}
}

// The rules of a hub's fields, at creation and at change alike.
func TestHubFields(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	admin, _ := srv.member(t, roleAdmin)
	existing := admin.do("POST", "/hubs", `{"name":"a"}`).want(t, 201).header.Get("Location")
	long := func(n int) string { return strings.Repeat("😀", n) }
	for _, test := range []struct {
		field, sent, stored string // stored "": refused
	}{
		{"name", "N", "N"},
		{"name", "  North Harbour ", "North Harbour"},
		{"name", long(100), long(100)},
		{"name", " " + long(100) + " ", long(100)},
		{"name", long(101), ""},
		{"name", "", ""},
		{"name", "   ", ""},
		{"name", "a\nb", ""},
		{"name", "a\tb", ""},
		{"name", "\n", ""},
		{"name", "a\x00b", ""},
		{"name", "a\x7fb", ""},
		{"name", "a\u0085b", ""},
		{"name", "a\ufffdb", ""},
		{"name", `'; drop table hubs; --`, `'; drop table hubs; --`},
		{"name", "<b>&amp;", "<b>&amp;"},
		{"name", "e\u0301", "e\u0301"}, // as sent: not composed
		{"description", " two\r\nlines\tand a tab ", " two\r\nlines\tand a tab "},
		{"description", long(2000), long(2000)},
		{"description", long(2001), ""},
		{"description", "a\x00b", ""},
		{"description", "a\vb", ""},
		{"description", "a\x1bb", ""},
		{"status", "active", "active"},
		{"status", "archived", "archived"},
		{"status", "", ""},
		{"status", "Active", ""},
		{"status", " active", ""},
	} {
		admin = admin.elsewhere()
		create := map[string]string{"name": "a"}
		create[test.field] = test.sent
		change := map[string]string{test.field: test.sent}
		for _, answer := range []*testResponse{admin.do("POST", "/hubs", create), admin.do("PATCH", existing, change)} {
			switch {
			case test.stored == "":
				wantInvalid(t, answer, test.field)
			case answer.status >= 300 || answer.field(t, test.field) != test.stored:
				t.Errorf("%s %q: want %q, got %v", test.field, test.sent, test.stored, answer)
			}
		}
	}
	// The empty description is one.
	for _, answer := range []*testResponse{admin.do("POST", "/hubs", `{"name":"a","description":""}`), admin.do("PATCH", existing, `{"description":""}`)} {
		if answer.status >= 300 || answer.field(t, "description") != "" {
			t.Error(answer)
		}
	}
	wantInvalid(t, admin.do("POST", "/hubs", `{}`), "name")
	wantInvalid(t, admin.do("POST", "/hubs", `{"description":"d"}`), "name")
	wantInvalid(t, admin.do("PATCH", existing, `{}`), "body")
}

// A hub's life: created with defaults, read, changed in part, deleted.
func TestHubLife(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	admin, _ := srv.member(t, roleAdmin)
	read := func(answer *testResponse, status int) (h hub) {
		t.Helper()
		if err := json.Unmarshal(answer.want(t, status).body, &h); err != nil {
			t.Fatal(err)
		}
		return h
	}
	answer := admin.do("POST", "/hubs", `{"name":"North"}`)
	created := read(answer, 201)
	path := answer.header.Get("Location")
	if path != "/hubs/"+created.HubID || created.Description != "" || created.Status != "active" || !created.CreatedAt.Equal(created.UpdatedAt) {
		t.Errorf("created: %v", answer)
	}
	now := queryValue[time.Time](t, srv.env["DATABASE_URL"], "select now()")
	if age := now.Sub(created.CreatedAt); age < 0 || age > patience {
		t.Errorf("createdAt: %v, now: %v", created.CreatedAt, now)
	}
	if strings.Count(string(answer.body), `Z"`) != 2 {
		t.Errorf("times that are not UTC: %s", answer.body)
	}
	if got := read(admin.do("GET", path, nil), 200); got != created {
		t.Errorf("read: %+v, created: %+v", got, created)
	}
	want := created
	for _, change := range []struct {
		body string
		do   func()
	}{
		{`{"name":"South"}`, func() { want.Name = "South" }},
		{`{"description":"d"}`, func() { want.Description = "d" }},
		{`{"status":"archived"}`, func() { want.Status = "archived" }},
		{`{"name":"South"}`, func() {}}, // the same once more is a change too
		{`{"name":"N","description":"","status":"active"}`, func() { want.Name, want.Description, want.Status = "N", "", "active" }},
	} {
		got := read(admin.do("PATCH", path, change.body), 200)
		if !got.UpdatedAt.After(want.UpdatedAt) {
			t.Errorf("%s: updatedAt does not move: %v", change.body, got.UpdatedAt)
		}
		change.do()
		want.UpdatedAt = got.UpdatedAt
		if got != want || read(admin.do("GET", path, nil), 200) != want {
			t.Errorf("%s: %+v, want %+v", change.body, got, want)
		}
	}
	// Two who change different fields at once don't undo each other's change.
	var both sync.WaitGroup
	for _, body := range []string{`{"name":"both"}`, `{"description":"both"}`} {
		both.Go(func() { admin.do("PATCH", path, body) })
	}
	both.Wait()
	if got := read(admin.do("GET", path, nil), 200); got.Name != "both" || got.Description != "both" {
		t.Errorf("after two changes at once: %+v", got)
	}

	twin := read(admin.do("POST", "/hubs", `{"name":"both"}`), 201) // names need not differ
	if answer := admin.do("DELETE", path, nil).want(t, 204); len(answer.body) != 0 {
		t.Error(answer)
	}
	for _, method := range []string{"GET", "DELETE"} {
		wantProblem(t, admin.do(method, path, nil), 404, "not_found")
	}
	wantProblem(t, admin.do("PATCH", path, `{"name":"x"}`), 404, "not_found")
	if got := read(admin.do("GET", "/hubs/"+twin.HubID, nil), 200); got != twin {
		t.Errorf("the twin: %+v, %+v", got, twin)
	}
}

// What is no identifier names nothing: a 404, never an error of the database's.
func TestHubOddIdentifiers(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	admin, _ := srv.member(t, roleAdmin)
	id := admin.do("POST", "/hubs", `{"name":"a"}`).want(t, 201).field(t, "hubId").(string)
	for _, odd := range []string{"x", "0", "-1", "null", strings.ToUpper(id), strings.ReplaceAll(id, "-", ""), "%7B" + id + "%7D", id + "%20",
		"%20" + id, id + "%00", id + "%0A", "%00", "%ff", id + "x", id[:35], "%2e%2e", "a%2Fb", strings.Repeat("a", 4000),
		"00000000-0000-0000-0000-000000000000", "'%20or%20''='", "*"} {
		admin = admin.elsewhere()
		wantProblem(t, admin.do("GET", "/hubs/"+odd, nil), 404, "not_found")
		wantProblem(t, admin.do("PATCH", "/hubs/"+odd, `{"name":"b"}`), 404, "not_found")
		wantProblem(t, admin.do("DELETE", "/hubs/"+odd, nil), 404, "not_found")
	}
	if name := admin.do("GET", "/hubs/"+id, nil).want(t, 200).field(t, "name"); name != "a" {
		t.Errorf("name: %v", name)
	}
}
