package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A hub as the server sends it.
type hub struct {
	HubID       string    `json:"hubId"`
	Name        string    `json:"name"`
	Description string    `json:"description"`
	Status      string    `json:"status"`
	CreatedAt   time.Time `json:"createdAt"`
	UpdatedAt   time.Time `json:"updatedAt"`
}

// hubPage is the answer to GET /hubs.
type hubPage struct {
	Items   []hub `json:"items"`
	Limit   int   `json:"limit"`
	Offset  int   `json:"offset"`
	HasMore bool  `json:"hasMore"`
}

// decode returns the body of an answer that must have the status.
func decode[T any](t testing.TB, answer *hubstest.Response, status int) (value T) {
	t.Helper()
	if err := json.Unmarshal(answer.Want(t, status).Body, &value); err != nil {
		t.Fatalf("%v in %v", err, answer)
	}
	return value
}

// A hubReader asks for lists, and knows from a plain model what it must get.
type hubReader struct {
	*hubstest.Client
	all   []hub
	asked int
}

// newHubReader starts a server with 400 hubs that have all kinds of names, and many equal
// names and times.
func newHubReader(t testing.TB, pieces ...string) *hubReader {
	t.Helper()
	srv := hubstest.Start(t)
	member, _ := srv.Member(t, "member")
	random := rand.New(rand.NewPCG(1, 2))
	reader := &hubReader{Client: member}
	newYear := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for range 400 {
		name := "x"
		for range random.IntN(6) {
			name += pieces[random.IntN(len(pieces))]
		}
		reader.all = append(reader.all, hub{
			HubID:     hubstest.NewUUID(),
			Name:      name,
			Status:    []string{"active", "active", "archived"}[random.IntN(3)],
			CreatedAt: newYear.Add(time.Duration(random.IntN(40)) * time.Microsecond),
			UpdatedAt: newYear.AddDate(0, 0, random.IntN(40)),
		})
	}
	addHubs(t, srv, reader.all)
	return reader
}

func addHubs(t testing.TB, srv *hubstest.Server, hubs []hub) {
	t.Helper()
	encoded, err := json.Marshal(hubs)
	if err != nil {
		t.Fatal(err)
	}
	hubstest.Exec(t, srv.Env["DATABASE_URL"], `
		insert into hubs (hub_id, name, description, status, created_at, updated_at)
		select * from json_to_recordset($1) as hub ("hubId" uuid, name text, description text,
			status text, "createdAt" timestamptz, "updatedAt" timestamptz)`, string(encoded))
}

// model returns the page that the parameters ask for, by a plain look at all hubs.
func (r *hubReader) model(q url.Values) hubPage {
	var found []hub
	for _, h := range r.all {
		hasName := strings.Contains(nameKey(h.Name), nameKey(q.Get("filters[name]")))
		hasStatus := strings.Contains(h.Status, q.Get("filters[status]"))
		if hasName && hasStatus {
			found = append(found, h)
		}
	}
	slices.SortFunc(found, func(a, b hub) int {
		order := cmp.Or(compareBy(q.Get("orderBy"), a, b), strings.Compare(a.HubID, b.HubID))
		if q.Get("orderDirection") == "desc" {
			return -order
		}
		return order
	})
	limit := numberOr(q.Get("limit"), 20)
	offset := numberOr(q.Get("offset"), 0)
	from := min(offset, len(found))
	to := min(offset+limit, len(found))
	return hubPage{
		Items:   append([]hub{}, found[from:to]...),
		Limit:   limit,
		Offset:  offset,
		HasMore: to < len(found),
	}
}

func compareBy(field string, a, b hub) int {
	switch field {
	case "createdAt":
		return a.CreatedAt.Compare(b.CreatedAt)
	case "updatedAt":
		return a.UpdatedAt.Compare(b.UpdatedAt)
	}
	return strings.Compare(a.Name, b.Name) // by bytes
}

// nameKey is how names are compared: a final sigma is a sigma.
func nameKey(name string) string {
	return strings.ReplaceAll(strings.ToLower(name), "ς", "σ")
}

func numberOr(text string, fallback int) int {
	number, err := strconv.Atoi(text)
	if err != nil {
		return fallback
	}
	return number
}

// ask asks for a page, and compares it with the model's.
func (r *hubReader) ask(t testing.TB, q url.Values) hubPage {
	t.Helper()
	r.asked++
	r.IP = fmt.Sprintf("2001:db8:1:%x::1", r.asked) // or the limit by address would answer
	got := decode[hubPage](t, r.Do("GET", "/hubs?"+q.Encode(), nil), 200)
	want := r.model(q)
	if !reflect.DeepEqual(got, want) {
		t.Errorf("GET /hubs?%s: got\n%v\nwant\n%v", q.Encode(), got, want)
	}
	return got
}

// hubOrders returns the parameters of each order.
func hubOrders() (orders []url.Values) {
	for _, field := range []string{"name", "createdAt", "updatedAt"} {
		for _, direction := range []string{"asc", "desc"} {
			orders = append(orders, url.Values{"orderBy": {field}, "orderDirection": {direction}})
		}
	}
	return orders
}

// Each order, with each filter, page by page: every hub once and in its place, and each
// page but the last is full.
func TestHubListOrderAndPages(t *testing.T) {
	t.Parallel()
	r := newHubReader(t, "North", "south", "a", "B", "Ä", "ä", "é", " ", "日本", "1", "12", "%")
	filters := []url.Values{
		{},
		{"filters[status]": {"archived"}},
		{"filters[name]": {"a"}},
		{"filters[name]": {"b"}, "filters[status]": {"active"}},
	}
	for _, q := range hubOrders() {
		for _, filter := range filters {
			q.Del("filters[name]")
			q.Del("filters[status]")
			for name, values := range filter {
				q[name] = values
			}
			q.Set("limit", "45")
			for offset, more := 0, true; more; offset += 45 {
				q.Set("offset", strconv.Itoa(offset))
				more = r.ask(t, q).HasMore
			}
		}
	}
	r.ask(t, nil)
	for _, limit := range []string{"1", "100"} {
		for _, offset := range []string{"0", "100", "101", "300", "399", "400", "10000"} {
			r.ask(t, url.Values{"limit": {limit}, "offset": {offset}})
		}
	}
}

// I1: a search finds the names that contain the text, in any case and script. Each character
// of the text is a plain one.
func TestHubListSearch(t *testing.T) {
	t.Parallel()
	r := newHubReader(t, "North", "sOUth", "%", "_", `\`, `\%`, "'", `"`, "--", "$1", "{order}",
		"Ä", "ä", "É", "é", "Я", "я", "ОДОС", "ΟΔΟΣ", "οδος", "ẞ", "ß", "日本", "😀", " ", ":=")
	searches := []string{"%", "_", `\`, `\\`, "%%", "'", `"`, "--", "$1", "$3", "{order}", " ",
		"NORTH", "ä", "Ä", "É", "я", "σ", "ς", "Σ", "ΟΔΟΣ", "οδος", "οδοσ", "😀", "X", "nowhere",
		strings.Repeat("x", 100)}
	random := rand.New(rand.NewPCG(3, 4))
	for range 60 { // parts of names that there are
		name := []rune(r.all[random.IntN(len(r.all))].Name)
		from := random.IntN(len(name))
		to := from + 1 + random.IntN(len(name)-from)
		searches = append(searches, string(name[from:to]))
	}
	orders := hubOrders()
	for i, search := range searches {
		q := orders[i%len(orders)]
		q.Set("filters[name]", search)
		q.Set("offset", strconv.Itoa(random.IntN(10)))
		r.ask(t, q)
	}
}

// A hub's life: created with defaults, read, changed in part, deleted.
func TestHubLife(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	admin, _ := srv.Member(t, "admin")
	begin := hubstest.Query[time.Time](t, srv.Env["DATABASE_URL"], "select now()")

	answer := admin.Do("POST", "/hubs", `{"name":"North"}`)
	want := decode[hub](t, answer, 201)
	path := "/hubs/" + want.HubID
	if got := answer.Header.Get("Location"); got != path {
		t.Errorf("Location: got %q, want %q", got, path)
	}
	if want.CreatedAt.Before(begin) || !want.CreatedAt.Equal(want.UpdatedAt) {
		t.Errorf("times: got %v and %v, want both now, after %v", want.CreatedAt, want.UpdatedAt, begin)
	}
	if got := strings.Count(string(answer.Body), `Z"`); got != 2 {
		t.Errorf("got %d times in UTC, want 2, in %s", got, answer.Body)
	}
	plain := hub{want.HubID, "North", "", "active", want.CreatedAt, want.UpdatedAt}
	if want != plain {
		t.Errorf("got %v, want %v", want, plain)
	}

	changes := []struct {
		body   string
		change func()
	}{
		{`{"name":"South"}`, func() { want.Name = "South" }},
		{`{"description":"d"}`, func() { want.Description = "d" }},
		{`{"status":"archived"}`, func() { want.Status = "archived" }},
		{`{"name":"South"}`, func() {}}, // the same once more is a change too
		{`{"description":"","status":"active"}`, func() { want.Description, want.Status = "", "active" }},
	}
	for _, c := range changes {
		got := decode[hub](t, admin.Do("PATCH", path, c.body), 200)
		if !got.UpdatedAt.After(want.UpdatedAt) {
			t.Errorf("%s: updatedAt got %v, want it after %v", c.body, got.UpdatedAt, want.UpdatedAt)
		}
		want.UpdatedAt = got.UpdatedAt
		c.change()
		if got != want {
			t.Errorf("%s: got %v, want %v", c.body, got, want)
		}
		if got := decode[hub](t, admin.Do("GET", path, nil), 200); got != want {
			t.Errorf("read after %s: got %v, want %v", c.body, got, want)
		}
	}

	twin := decode[hub](t, admin.Do("POST", "/hubs", `{"name":"South"}`), 201)
	admin.Do("DELETE", path, nil).Want(t, 204)
	hubstest.WantProblem(t, admin.Do("GET", path, nil), 404, "not_found")
	hubstest.WantProblem(t, admin.Do("DELETE", path, nil), 404, "not_found")
	hubstest.WantProblem(t, admin.Do("PATCH", path, `{"name":"x"}`), 404, "not_found")
	if got := decode[hub](t, admin.Do("GET", "/hubs/"+twin.HubID, nil), 200); got != twin {
		t.Errorf("another hub of the same name: got %v, want %v", got, twin)
	}
}

// Two who change different fields at once don't undo each other's change.
func TestHubChangesAtOnce(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	admin, _ := srv.Member(t, "admin")
	path := "/hubs/" + decode[hub](t, admin.Do("POST", "/hubs", `{"name":"North"}`), 201).HubID
	var changes sync.WaitGroup
	for _, body := range []string{`{"name":"both"}`, `{"description":"both"}`, `{"status":"archived"}`} {
		changes.Go(func() { admin.Do("PATCH", path, body) })
	}
	changes.Wait()
	got := decode[hub](t, admin.Do("GET", path, nil), 200)
	if got.Name != "both" || got.Description != "both" || got.Status != "archived" {
		t.Errorf("got %v, want all three changes", got)
	}
}

// updatedAt never goes back, also when the database's clock does.
func TestHubTimesNeverGoBack(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	admin, _ := srv.Member(t, "admin")
	path := "/hubs/" + decode[hub](t, admin.Do("POST", "/hubs", `{"name":"North"}`), 201).HubID
	later := time.Now().UTC().Add(time.Hour).Truncate(time.Second)
	hubstest.Exec(t, srv.Env["DATABASE_URL"], "update hubs set updated_at = $1", later)
	got := decode[hub](t, admin.Do("PATCH", path, `{"name":"South"}`), 200)
	if got.UpdatedAt != later {
		t.Errorf("updatedAt: got %v, want %v, as it was", got.UpdatedAt, later)
	}
}

// What is no identifier names nothing: a 404, never an error of the database's.
func TestHubOddIdentifiers(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	admin, _ := srv.Member(t, "admin")
	id := decode[hub](t, admin.Do("POST", "/hubs", `{"name":"a"}`), 201).HubID
	odd := []string{
		"x", "0", "-1", "null", "*", "%00", "%ff", "%2e%2e", "a%2Fb", "'%20or%20''='",
		id + "x", id + "%20", "%20" + id, id + "%00", id + "%0A", "%7B" + id + "%7D", id[:35],
		strings.ToUpper(id), strings.ReplaceAll(id, "-", ""), strings.Repeat("a", 4000),
		"00000000-0000-0000-0000-000000000000",
	}
	for i, text := range odd {
		admin.IP = fmt.Sprintf("2001:db8:1:%x::1", i)
		path := "/hubs/" + text
		hubstest.WantProblem(t, admin.Do("GET", path, nil), 404, "not_found")
		hubstest.WantProblem(t, admin.Do("PATCH", path, `{"name":"b"}`), 404, "not_found")
		hubstest.WantProblem(t, admin.Do("DELETE", path, nil), 404, "not_found")
	}
	if got := decode[hub](t, admin.Do("GET", "/hubs/"+id, nil), 200).Name; got != "a" {
		t.Errorf("name: got %q, want a", got)
	}
}
