package main

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"hubs/internal/hubstest"
)

// I1: No text from a client becomes part of the text of a list's statement. The test makes the
// query itself, so this holds even if the validation of the fields let every text pass.
func TestListStatementHasNoTextOfAClient(t *testing.T) {
	t.Parallel()
	const limit, offset = 20, 40
	plain := "name"
	hostile := "a'); drop table hubs; -- $1 %s"
	statement := func(filter, order string) (text string, args []any) {
		q := hubQuery{
			limit:          limit,
			offset:         offset,
			orderBy:        order,
			orderDirection: order,
			name:           &filter,
			status:         &filter,
		}
		return q.statement()
	}

	want, _ := statement(plain, plain)
	got, args := statement(hostile, plain)
	if got != want {
		t.Errorf("filtered by %q: got the text\n%s\nwant\n%s", hostile, got, want)
	}
	wantArgs := []any{limit + 1, offset, hostile, hostile} // one row more, for HasMore
	if !slices.Equal(args, wantArgs) {
		t.Errorf("filtered by %q: got the arguments %v, want %v", hostile, args, wantArgs)
	}
	if got, _ := statement(plain, hostile); strings.Contains(got, "drop") {
		t.Errorf("ordered by %q: got the text\n%s\nwant no drop in it", hostile, got)
	}
}

// I2: A query is accepted only if package url reads the same single values from it, all of known
// names, and the parsed values are within their bounds.
func FuzzHubQuery(f *testing.F) {
	f.Add("limit=20&offset=40&orderBy=name&orderDirection=desc&filters[name]=a%20b&filters[status]=active")
	f.Add("filters%5Bname%5D=%e2%80%8b&after=MQ&limit=+1")
	f.Fuzz(func(t *testing.T, query string) {
		r := &request{Request: &http.Request{Method: "GET", URL: &url.URL{RawQuery: query}}}
		r.route.input = hubQueryFields
		if r.readFields() != nil || r.badFields != nil {
			return
		}
		q, errs := parseHubQuery(r.fields)
		if errs != nil {
			return
		}
		values, err := url.ParseQuery(query)
		if err != nil || len(values) != len(r.fields) {
			t.Errorf("got the fields %q accepted, want those of %v, %v", r.fields, values, err)
		}
		for name, value := range r.fields {
			isKnown := slices.Contains(hubQueryFields, name)
			if !isKnown || !slices.Equal(values[name], []string{value}) || !utf8.ValidString(value) {
				t.Errorf("got %s = %q accepted, want one known value of %q", name, value, values[name])
			}
		}
		if q.limit < 1 || q.limit > maxPageLimit || q.offset < 0 || q.offset > maxPageOffset {
			t.Errorf("got limit %d and offset %d accepted", q.limit, q.offset)
		}
		if q.name != nil && utf8.RuneCountInString(*q.name) > maxHubName {
			t.Errorf("got a filter of %d bytes accepted", len(*q.name))
		}
	})
}

// I2: What is accepted as after is a place that PostgreSQL can compare with: an id, and a text or a
// time in UTC. It is what next would return for a hub there.
func FuzzAfter(f *testing.F) {
	query := func(orderBy string) hubQuery {
		q, _ := parseHubQuery(fields{"orderBy": orderBy})
		return q
	}
	for _, orderBy := range []string{"name", "createdAt", "updatedAt"} {
		q := query(orderBy)
		h := hub{HubID: hubstest.NewUUID(), Name: "North", CreatedAt: timestamp{time.Unix(1, 2000)}}
		decoded, _ := base64.RawURLEncoding.DecodeString(q.next(h))
		f.Add(orderBy, string(decoded))
	}
	f.Fuzz(func(t *testing.T, orderBy, decoded string) {
		text := base64.RawURLEncoding.EncodeToString([]byte(decoded))
		q := query(orderBy)
		p := q.parsePlace(text)
		if p == nil {
			return
		}
		h := hub{HubID: p.hubID}
		switch value := p.value.(type) {
		case string:
			h.Name = value
			if !utf8.ValidString(value) || strings.Contains(value, "\x00") {
				t.Errorf("got the name %q accepted, which PostgreSQL refuses", value)
			}
			if got := q.next(h); got != text {
				t.Errorf("got next %q for the place of %q", got, text)
			}
		case time.Time:
			if value.Location() != time.UTC || value.Year() < -1 || value.Year() > 10_000 {
				t.Errorf("got the time %v accepted, which PostgreSQL may not know", value)
			}
		}
		if !isUUID(p.hubID) {
			t.Errorf("got the id %q accepted", p.hubID)
		}
	})
}

// I3, Z3: A body is accepted only if encoding/json reads the same texts from it, as one object
// without null, of known names that stand there once.
func FuzzJSONBody(f *testing.F) {
	f.Add(`{"name":"North","description":"d","status":"active"}`)
	f.Add("\ufeff{\"name\":\"\\u0041\\ud83d\\ude00\"}")
	f.Add(`{"Name":"a","name":"b","name":"c"}`)
	f.Fuzz(func(t *testing.T, body string) {
		r := &request{Request: httptest.NewRequest("POST", "/hubs", strings.NewReader(body))}
		r.Header.Set("Content-Type", "application/json")
		r.route.input = hubFields
		if r.readFields() != nil || r.badFields != nil {
			return
		}
		texts := decodeStrictly(t, strings.TrimPrefix(body, "\ufeff"))
		if len(texts) != len(r.fields) {
			t.Errorf("got the fields %q accepted, want %q", r.fields, texts)
		}
		for name, value := range r.fields {
			if texts[name] != value || !slices.Contains(hubFields, name) {
				t.Errorf("got %s = %q accepted, want %q", name, value, texts[name])
			}
		}
		if in, errs := parseNewHub(r.fields); errs == nil {
			length := utf8.RuneCountInString(*in.name)
			if length < 1 || length > maxHubName || strings.TrimSpace(*in.name) != *in.name {
				t.Errorf("got the name %q accepted", *in.name)
			}
		}
	})
}

// decodeStrictly returns the members of an object, all of which must be texts.
func decodeStrictly(t *testing.T, body string) map[string]string {
	t.Helper()
	var object map[string]any
	if err := json.Unmarshal([]byte(body), &object); err != nil {
		t.Errorf("got a body accepted that is no JSON: %v", err)
	}
	texts := map[string]string{}
	for name, value := range object {
		text, isText := value.(string)
		if !isText {
			t.Errorf("got the member %s = %v accepted, want a text", name, value)
		}
		texts[name] = text
	}
	return texts
}
