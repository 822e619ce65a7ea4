package api

import (
	"cmp"
	"encoding/json"
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
	decodeStrict(t, answer.String(), string(answer.Body), &value)
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

// found returns the hubs that the server must find for a query, in order, without limit and offset. The
// defaults are those of the contract.
func (r *hubReader) found(t testing.TB, query string) (found []hub) {
	t.Helper()
	q, err := url.ParseQuery(query)
	hubstest.Must(t, err)
	part := nameKey(strings.Trim(q.Get("filters[name]"), " "))
	for _, h := range r.all {
		isNamed := strings.Contains(nameKey(h.Name), part)
		if isNamed && h.Status == cmp.Or(q.Get("filters[status]"), h.Status) {
			found = append(found, h)
		}
	}
	slices.SortFunc(found, func(a, b hub) int {
		return cmp.Or(compareBy(q.Get("orderBy"), a, b), strings.Compare(a.HubID, b.HubID))
	})
	if q.Get("orderDirection") == "desc" {
		slices.Reverse(found)
	}
	return found
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
		query := "/hubs?limit=100&filters[name]=" + url.QueryEscape(search)
		answer := r.Elsewhere().Get(query).Must(t, 200)
		length := answer.Header.Get("Content-Length") // without it, no client notices a missing end
		wantEqual(t, "Content-Length", length, strconv.Itoa(len(answer.Body)))
		want := r.found(t, query)
		want = append([]hub{}, want[:min(100, len(want))]...)
		for i, h := range want { // an answer has three decimals, and an order all six
			want[i].CreatedAt = h.CreatedAt.Truncate(time.Millisecond)
		}
		wantEqual(t, "GET "+query, decode[hubPage](t, answer).Items, want)
	}
}

// A hub has an id of its own, and the defaults of what was not sent. Two hubs may have the same name.
func TestNewHubHasDefaults(t *testing.T) {
	t.Parallel()
	_, admin := start(t, "admin")
	answer := admin.Do("POST /hubs", `{"name":"North"}`).Must(t, 201)
	got := decode[hub](t, answer)
	wantEqual(t, "Location", answer.Header.Get("Location"), "/hubs/"+got.HubID)
	wantNow(t, "createdAt", got.CreatedAt)
	wantEqual(t, "created with a name", got, hub{
		HubID:     got.HubID,
		Name:      "North",
		Status:    "active",
		CreatedAt: got.CreatedAt,
		UpdatedAt: got.CreatedAt,
	})
	admin.Do("POST /hubs", `{"name":"North"}`).Must(t, 201)
}

// Each change sets updatedAt, also one to the same values. It never goes back, even if the database's
// clock does.
func TestChangeSetsUpdatedAt(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	made := decode[hub](t, admin.Do("POST /hubs", `{"name":"North"}`).Must(t, 201))
	path := "/hubs/" + made.HubID
	for _, change := range []string{`{"name":"North"}`, `{"description":"d"}`, `{"status":"archived"}`} {
		hubstest.Exec(t, s.Database, "update hubs set updated_at = updated_at - interval '1 hour'")
		got := decode[hub](t, admin.Do("PATCH "+path, change).Must(t, 200))
		wantNow(t, change+": updatedAt", got.UpdatedAt)
		wantEqual(t, change+": createdAt", got.CreatedAt, made.CreatedAt)
	}
	later := time.Now().UTC().Add(time.Hour).Truncate(time.Second)
	hubstest.Exec(t, s.Database, "update hubs set updated_at = $1", later)
	changed := decode[hub](t, admin.Do("PATCH "+path, `{"name":"South"}`).Must(t, 200))
	wantEqual(t, "updatedAt, which was later", changed.UpdatedAt, later)
}
