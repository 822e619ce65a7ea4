package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A hub is the JSON representation of a hub.
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
	Items         []hub
	Limit, Offset int
	HasMore       bool
	Next          *string
}

// decode returns the body of an answer. A member that T does not have ends the test, so that no
// test forgets a new one.
func decode[T any](t testing.TB, answer *hubstest.Response) (value T) {
	t.Helper()
	hubstest.Decode(t, answer.String(), string(answer.Body), &value)
	return value
}

// A hubReader requests lists of hubs. Its model says what each list must be.
type hubReader struct {
	*hubstest.Client
	all []hub // in the database
}

// newHubReader starts a server with 400 hubs. Their names are random sequences of spaces and of the
// words in pieces. Many names and times are equal.
func newHubReader(t testing.TB, pieces string) *hubReader {
	t.Helper()
	s, member := start(t, "member")
	reader := &hubReader{Client: member}
	words := append(strings.Fields(pieces), " ")
	random := rand.New(rand.NewPCG(1, 2))
	statuses := []string{"active", "active", "archived"}
	newYear := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for range 400 {
		var name strings.Builder
		name.WriteString("x")
		for range random.IntN(6) {
			name.WriteString(words[random.IntN(len(words))])
		}
		microseconds := time.Duration(random.IntN(40)) * 99 * time.Microsecond
		reader.all = append(reader.all, hub{
			HubID:     hubstest.NewUUID(),
			Name:      name.String(),
			Status:    statuses[random.IntN(len(statuses))],
			CreatedAt: newYear.Add(microseconds),
			UpdatedAt: newYear.AddDate(0, 0, random.IntN(40)),
		})
	}
	encoded, err := json.Marshal(reader.all)
	hubstest.Must(t, err)
	hubstest.Exec(t, s.Database, `
		insert into hubs (hub_id, name, description, status, created_at, updated_at)
		select * from json_to_recordset($1) as hub ("hubId" uuid, name text, description text,
			status text, "createdAt" timestamptz, "updatedAt" timestamptz)`, string(encoded))
	return reader
}

// model returns the page that the server must send for a query. It filters and sorts all hubs. The
// defaults are those of the contract.
func (r *hubReader) model(t testing.TB, query string) hubPage {
	t.Helper()
	q, err := url.ParseQuery(query)
	hubstest.Must(t, err)
	for name, schema := range listParameters() {
		if value, hasDefault := schema["default"]; hasDefault && !q.Has(name) {
			q.Set(name, fmt.Sprint(value))
		}
	}
	var found []hub
	for _, h := range r.all {
		part := strings.Trim(q.Get("filters[name]"), " ")
		hasName := strings.Contains(nameKey(h.Name), nameKey(part))
		hasStatus := h.Status == cmp.Or(q.Get("filters[status]"), h.Status)
		if hasName && hasStatus {
			found = append(found, h)
		}
	}
	slices.SortFunc(found, func(a, b hub) int {
		return cmp.Or(compareBy(q.Get("orderBy"), a, b), strings.Compare(a.HubID, b.HubID))
	})
	if q.Get("orderDirection") == "desc" {
		slices.Reverse(found)
	}
	limit, _ := strconv.Atoi(q.Get("limit"))
	offset, _ := strconv.Atoi(q.Get("offset"))
	from := min(offset, len(found))
	to := min(offset+limit, len(found))
	items := append([]hub{}, found[from:to]...)
	for i, h := range items { // an answer has three decimals, and an order all six
		items[i].CreatedAt = h.CreatedAt.Truncate(time.Millisecond)
	}
	return hubPage{
		Items:   items,
		Limit:   limit,
		Offset:  offset,
		HasMore: to < len(found),
	}
}

// compareBy compares two hubs by createdAt, updatedAt or, for any other field, by name.
func compareBy(field string, a, b hub) int {
	switch field {
	case "createdAt":
		return a.CreatedAt.Compare(b.CreatedAt)
	case "updatedAt":
		return a.UpdatedAt.Compare(b.UpdatedAt)
	}
	return strings.Compare(a.Name, b.Name) // by bytes
}

// nameKey returns the form of a name that a search compares: lower case, with ς (the final sigma)
// as σ, and the letters with a mark that searchPieces has in one character (NFC).
func nameKey(name string) string {
	compose := strings.NewReplacer("ς", "σ", "ß", "ss", "o\u0308", "ö", "a\u0308\u0304", "ǟ")
	return compose.Replace(strings.ToLower(name))
}

// get requests a page. Each request has a client address of its own, because of the limit by client
// address. The answer has a Content-Length, so a client notices if the end is missing.
func (r *hubReader) get(t testing.TB, query string) hubPage {
	t.Helper()
	answer := r.Elsewhere().Get("/hubs?" + query)
	answer.Want(t, 200)
	length := answer.Header.Get("Content-Length")
	wantEqual(t, "Content-Length", length, strconv.Itoa(len(answer.Body)))
	page := decode[hubPage](t, answer)
	wantEqual(t, "next is there", page.Next != nil, page.HasMore)
	page.Next = nil // opaque: see TestWholeListIsRead
	return page
}

// In each order and with each filter, the pages of a list together have every hub once and in its
// place. Each page but the last is full.
func TestHubListOrderAndPages(t *testing.T) {
	t.Parallel()
	r := newHubReader(t, "North south a B Ä ä é 日本 1 12 %")
	filters := []string{
		"",
		"&filters[status]=archived",
		"&filters[name]=a",
		"&filters[name]=b&filters[status]=active",
	}

	for _, order := range hubOrders() {
		for _, filter := range filters {
			offset := 0
			hasMore := true
			for hasMore {
				query := fmt.Sprint(order, filter, "&limit=45&offset=", offset)
				page := r.get(t, query)
				wantEqual(t, "GET /hubs?"+query, page, r.model(t, query))
				hasMore = page.HasMore
				offset += page.Limit
			}
		}
	}

	wantEqual(t, "GET /hubs?", r.get(t, ""), r.model(t, ""))
	for _, limit := range []int{1, 100} {
		for _, offset := range []int{0, 100, 101, 300, 399, 400, 10000} {
			query := fmt.Sprintf("limit=%d&offset=%d", limit, offset)
			wantEqual(t, "GET /hubs?"+query, r.get(t, query), r.model(t, query))
		}
	}
}

const (
	searchPieces = `North sOUth Ä ä É é Я я ẞ ß 日本 😀 ` +
		"ö O\u0308 Ǟ a\u0308\u0304 " + // composed, and as some keyboards write them
		`% _ \ \% ` + // have a meaning in a pattern of LIKE
		`' " -- $1 {order} := ` + // have a meaning in a statement
		`ΟΔΟΣ οδος` // end in a sigma, which has another lower case there
	searchTexts = `NORTH X nowhere ä Ä É я 😀 ` +
		"ö o\u0308 Ö O\u0308 ǟ A\u0308\u0304 " +
		`% _ \ \\ %% ` +
		`' " -- $1 $3 {order} ` +
		`σ ς Σ ΟΔΟΣ οδος οδοσ`
)

// I1: A search finds the names that contain the text. It ignores case, in every script, and how a
// letter and its marks are composed. Spaces around the text count as little as those around a name.
// No character of the text has a special meaning, such as % in a LIKE pattern.
func TestHubListSearch(t *testing.T) {
	t.Parallel()
	r := newHubReader(t, searchPieces)
	searches := append(strings.Fields(searchTexts), " North ", strings.Repeat("x", 100))
	for _, search := range searches {
		query := "filters[name]=" + url.QueryEscape(search)
		wantEqual(t, "GET /hubs?"+query, r.get(t, query), r.model(t, query))
	}
}

// readHub requests a hub.
func readHub(t *testing.T, c *hubstest.Client, id string) hub {
	t.Helper()
	return decode[hub](t, c.Get("/hubs/"+id).Must(t, 200))
}

// A hub is created with defaults, read and deleted. Two hubs may have the same name. If the id in a
// path is not exactly that of a hub, the answer is a 404: PostgreSQL would take it in capitals, too.
func TestHubIsCreatedAndDeleted(t *testing.T) {
	t.Parallel()
	_, admin := start(t, "admin")
	answer := admin.Do("POST /hubs", `{"name":"North"}`)
	answer.Want(t, 201)
	got := decode[hub](t, answer)
	path := "/hubs/" + got.HubID
	wantEqual(t, "Location", answer.Header.Get("Location"), path)
	wantNow(t, "createdAt", got.CreatedAt)
	want := hub{
		HubID:     got.HubID,
		Name:      "North",
		Status:    "active",
		CreatedAt: got.CreatedAt,
		UpdatedAt: got.CreatedAt,
	}
	wantEqual(t, "created with a name", got, want)
	wantEqual(t, "read", readHub(t, admin, got.HubID), want)

	twin := decode[hub](t, admin.Do("POST /hubs", `{"name":"North"}`).Must(t, 201))
	admin.Do("DELETE "+path, nil).Want(t, 204)
	for _, none := range []string{path, "/hubs/" + strings.ToUpper(twin.HubID)} {
		admin.Get(none).WantProblem(t, 404, "not_found")
		admin.Do("DELETE "+none, nil).WantProblem(t, 404, "not_found")
		admin.Do("PATCH "+none, `{"name":"x"}`).WantProblem(t, 404, "not_found")
	}
	wantEqual(t, "the other hub of the same name", readHub(t, admin, twin.HubID), twin)
}

// A change sets the fields that it has, and updatedAt. It leaves the other fields as they are.
// updatedAt never goes back, even if the database's clock does.
func TestChangeSetsOnlyItsFields(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	want := decode[hub](t, admin.Do("POST /hubs", `{"name":"North"}`).Must(t, 201))
	path := "/hubs/" + want.HubID
	for _, change := range []string{
		`{"name":"South"}`,
		`{"description":"d"}`,
		`{"status":"archived"}`,
		`{"name":"South"}`, // the same name again also sets updatedAt
		`{"description":""}`,
		`{"name":"East","description":"e","status":"active"}`,
	} {
		hubstest.Exec(t, s.Database, "update hubs set updated_at = updated_at - interval '1 hour'")
		got := decode[hub](t, admin.Do("PATCH "+path, change).Must(t, 200))
		wantNow(t, change+": updatedAt", got.UpdatedAt)
		want.UpdatedAt = got.UpdatedAt
		hubstest.Decode(t, change, change, &want) // sets only the fields in change
		wantEqual(t, change, got, want)
		wantEqual(t, "read after "+change, readHub(t, admin, want.HubID), want)
	}
	later := time.Now().UTC().Add(time.Hour).Truncate(time.Second)
	hubstest.Exec(t, s.Database, "update hubs set updated_at = $1", later)
	changed := decode[hub](t, admin.Do("PATCH "+path, `{"name":"South"}`).Must(t, 200))
	wantEqual(t, "updatedAt, which was later", changed.UpdatedAt, later)
}
