package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// The tests of this file read the contract, so they hold for each resource that somebody adds. They
// make what they need by the POST that the contract has for it, and read some marks:
//
//	x-matches  of a filter: "whole" if it compares, "part" if it searches in any case
//	x-order    of a list without a parameter orderBy: the field and its direction, "name asc".
//	           In each order, equal values are ordered by the id
//	x-owner    of an operation: true if it is for the user who made the resource, and does not show
//	           it to others. Each PATCH, PUT or DELETE that needs no role must say true or false
//	writeOnly  of a field, as in any OpenAPI document: no answer has it

// An object is the JSON of a resource.
type object = map[string]any

// objectOf returns the body of an answer.
func objectOf(t testing.TB, r *hubstest.Response) (o object) {
	t.Helper()
	hubstest.Must(t, json.Unmarshal(r.Body, &o))
	return o
}

// routeOf returns the operation of a route such as "GET /hubs".
func routeOf(route string) (found operation, exists bool) {
	i := slices.IndexFunc(routes, func(r operation) bool { return r.Route == route })
	if i < 0 {
		return found, false
	}
	return routes[i], true
}

// creatorOf returns the operation that makes the resources of a collection: POST /hubs for /hubs, and
// POST /files/upload for /files.
func creatorOf(collection string) (found operation, exists bool) {
	for _, r := range routes {
		below, isBelow := strings.CutPrefix(r.Route+"/", "POST "+collection+"/")
		if isBelow && r.Status == 201 && !strings.Contains(below, "{") {
			return r, true
		}
	}
	return found, false
}

// idOf returns the name of the id of a collection: hubId for /hubs. It returns "" if no path has one.
func idOf(collection string) string {
	for _, r := range routes {
		_, path, _ := strings.Cut(r.Route, " ")
		if below, isBelow := strings.CutPrefix(path, collection+"/{"); isBelow {
			name, _, _ := strings.Cut(below, "}")
			return name
		}
	}
	return ""
}

// needsRole reports whether an operation is for users of some roles only.
func needsRole(t testing.TB, r operation) bool {
	t.Helper()
	roles := hubstest.Contract[[]any](t, "components", "schemas", "Role", "enum")
	return slices.ContainsFunc(roles, func(role any) bool { return strings.Contains(r.Needs, role.(string)) })
}

// A maker makes resources: as a user, or as an administrator what only one can make.
type maker struct {
	*hubstest.Server
	admin, user *hubstest.Client
}

// create makes a resource of a collection, whose path is given as the contract has it, and as it is. The
// body has the examples of the contract, but for change. create returns what was made.
func (m maker) create(t *testing.T, collection, path string, change object) object {
	t.Helper()
	r, exists := creatorOf(collection)
	if !exists {
		t.Fatalf("setup: the contract has no POST that makes what is below %s", collection)
	}
	c := m.user
	if needsRole(t, r) {
		c = m.admin
	}
	q := callOf(t, m.Server, r, strings.Replace(r.Route, collection, path, 1))
	if body, isJSON := q.body.(object); isJSON {
		maps.Copy(body, change)
	}
	return objectOf(t, q.send(c.In(t).Elsewhere()).Must(t, 201))
}

// parameter matches a parameter of a path, and what is before it.
var parameter = regexp.MustCompile(`^([^{]*)/{([^}]*)}`)

// newPath returns a path of the contract with values for its parameters: each id is that of a resource
// that it makes. Another parameter, such as the name of a file, is a member of the last one.
func (m maker) newPath(t *testing.T, template string) (path string) {
	t.Helper()
	var last object
	rest := template
	for strings.Contains(rest, "{") {
		match := parameter.FindStringSubmatch(rest)
		before, name := match[1], match[2]
		path += before
		collection := template[:len(template)-len(rest)+len(before)]
		if _, exists := creatorOf(collection); exists || last == nil {
			last = m.create(t, collection, path, nil)
		}
		path += "/" + url.PathEscape(asText(last[name]))
		rest = rest[len(match[0]):]
	}
	return path + rest
}

// read reads a list to its end, page by page: with byNext, each behind the last row of the one before,
// and otherwise by offset. It checks what a page says of itself.
func read(t testing.TB, c *hubstest.Client, path string, query url.Values, byNext bool) (all []object) {
	t.Helper()
	query = maps.Clone(query)
	for {
		var page struct {
			Items   []object
			Limit   int
			HasMore bool
			Next    *string
		}
		limit := 10 + rand.IntN(50)
		query.Set("limit", fmt.Sprint(limit))
		target := path + "?" + query.Encode()
		hubstest.Must(t, json.Unmarshal(c.Elsewhere().Get(target).Must(t, 200).Body, &page))
		all = append(all, page.Items...)
		isFull := len(page.Items) == limit
		if page.Limit != limit || len(page.Items) > limit || page.HasMore && !isFull {
			t.Fatalf("GET %s: got %d items, limit %d, hasMore %v", target, len(page.Items), page.Limit, page.HasMore)
		}
		if !page.HasMore {
			return all
		}
		if byNext {
			query.Set("after", *page.Next)
		} else {
			query.Set("offset", fmt.Sprint(len(all)))
		}
	}
}

// collectionOf returns the path of the collection to which a path below it belongs: /hubs for
// /hubs/{hubId}.
func collectionOf(path string) string { return path[:strings.LastIndex(path, "/")] }

// listOf returns the operation that lists a collection.
func listOf(collection string) (list operation, exists bool) {
	list, exists = routeOf("GET " + collection)
	return list, exists && list.Item != nil
}

// Each field of a POST or a PATCH is stored: the answer, a GET and the list have it as it was sent. A
// PATCH leaves the other fields as they are.
func TestFieldsAreReadBack(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	m := maker{s, admin, admin}
	for _, r := range routes {
		method, template, _ := strings.Cut(r.Route, " ")
		isStored := r.Status == 201 || method == "PATCH" || method == "PUT"
		if r.Fields == nil || !isStored {
			continue
		}
		t.Run(r.Route, func(t *testing.T) {
			path := m.newPath(t, template)
			for _, field := range r.Fields {
				values, _ := valuesOf(field.Schema)
				if !slices.ContainsFunc(values, func(v any) bool { return v != values[0] }) {
					t.Fatalf("setup: the contract has one value of %s only: add an example", field.Name)
				}
				for _, value := range values {
					wantReadBack(t, s, admin.In(t).Elsewhere(), r, path, field.Name, value)
				}
			}
		})
	}
}

// wantReadBack sends a value of a field, and looks for it in the answer, a GET and the list.
func wantReadBack(
	t *testing.T, s *hubstest.Server, c *hubstest.Client, r operation, path, field string, value any,
) {
	t.Helper()
	method, template, _ := strings.Cut(r.Route, " ")
	sent := validBody(t, s, r).(object)
	want := maps.Clone(sent)
	collection, item := template, template+"/{"+idOf(template)+"}"
	if method != "POST" {
		collection, item = collectionOf(template), template
	}
	_, isShown := routeOf("GET " + item)
	if method == "PATCH" {
		sent, want = object{}, object{}
		if isShown {
			want = objectOf(t, c.Get(path).Must(t, 200))
		}
	}
	sent[field], want[field] = value, value
	answer := c.Do(method+" "+path, sent).Must(t, r.Status)

	views := map[string]object{"the answer": objectOf(t, answer)}
	path = cmp.Or(answer.Header.Get("Location"), path)
	if isShown {
		views["a GET"] = objectOf(t, c.Get(path).Must(t, 200))
	}
	if list, isListed := listOf(collection); isListed {
		all := read(t, c, collectionOf(path), url.Values{}, hasField(list, "after"))
		id := path[strings.LastIndex(path, "/")+1:]
		i := slices.IndexFunc(all, func(o object) bool { return o[idOf(collection)] == id })
		if i < 0 {
			t.Fatalf("GET %s: got no %s", collectionOf(path), path)
		}
		views["the list"] = all[i]
	}
	for what, got := range views {
		for _, f := range r.Fields {
			wanted, isKnown := want[f.Name]
			if isKnown && f.Schema["writeOnly"] != true && asText(got[f.Name]) != asText(wanted) {
				t.Errorf("%s %s with %s = %.100q: got %s = %.100q in %s, want %.100q", method, path, field,
					asText(value), f.Name, asText(got[f.Name]), what, asText(wanted))
			}
		}
	}
}

// asText returns a value as a query has it: a text, or the JSON of any other value.
func asText(value any) string {
	if text, isText := value.(string); isText {
		return text
	}
	encoded, _ := json.Marshal(value) // it has been JSON, or will be
	return string(encoded)
}

func hasField(r operation, name string) bool {
	return slices.ContainsFunc(r.Fields, func(f field) bool { return f.Name == name })
}

// A filter is a parameter of a list, such as filters[status] of GET /hubs.
type filter struct {
	field
	member string // of an item: status
}

// filtersOf returns the filters of a list. It ends the test if the contract does not say what one
// matches.
func filtersOf(t testing.TB, list operation) (filters []filter) {
	t.Helper()
	for _, field := range list.Fields {
		member, isFilter := strings.CutPrefix(field.Name, "filters[")
		if !isFilter {
			continue
		}
		if field.Matches != "part" && field.Matches != "whole" {
			t.Fatalf("setup: %s: the contract must say x-matches of %s: part or whole", list.Route, field.Name)
		}
		filters = append(filters, filter{field, strings.TrimSuffix(member, "]")})
	}
	return filters
}

// matches reports whether the filter with this value lets an item through.
func (f filter) matches(o object, value string) bool {
	got := asText(o[f.member])
	return got == value || f.Matches == "part" && strings.Contains(nameKey(got), nameKey(value))
}

// Each filter of a list finds what has its value, and nothing before anything has it.
func TestFiltersFindTheirValues(t *testing.T) {
	t.Parallel()
	for _, list := range routes {
		for _, f := range filtersOf(t, list) {
			t.Run(list.Route+"/"+f.Name, func(t *testing.T) {
				t.Parallel()
				s, admin := start(t, "admin")
				m := maker{s, admin, admin}
				collection := strings.TrimPrefix(list.Route, "GET ")
				path := m.newPath(t, collection)
				values, _ := valuesOf(f.Schema)
				var all []object
				for _, value := range slices.Compact(values) {
					wantFound(t, admin.In(t), list, path, f, value, all)
					all = append(all, m.create(t, collection, path, object{f.member: value}))
					for _, o := range all {
						wantFound(t, admin.In(t), list, path, f, o[f.member], all)
					}
				}
				m.create(t, collection, path, object{f.member: values[0]})
				wantNextOfItsList(t, admin.In(t), list, path, url.Values{f.Name: {asText(values[0])}})
			})
		}
	}
}

// wantNextOfItsList checks that next, of a list with a filter, leads on in no other list (I2). At least
// two items must have the value.
func wantNextOfItsList(t *testing.T, c *hubstest.Client, list operation, path string, query url.Values) {
	t.Helper()
	hasAfter := slices.ContainsFunc(list.Fields, func(f field) bool { return f.Name == "after" })
	if !hasAfter {
		return
	}
	query.Set("limit", "1")
	next := c.Get(path+"?"+query.Encode()).Must(t, 200).Field(t, "next")
	c.Get(path+"?after="+url.QueryEscape(next)).WantProblem(t, 400, "invalid_request")
}

// wantFound compares what a filter finds with what it must find of all the items. If it searches, so
// does a part of the value; if it compares, a part finds nothing.
func wantFound(
	t *testing.T, c *hubstest.Client, list operation, path string, f filter, value any, all []object,
) {
	t.Helper()
	texts := []string{asText(value)}
	if runes := []rune(texts[0]); len(runes) > 2 && isFree(f.Schema) {
		texts = append(texts, string(runes[1:len(runes)-1]))
	}
	id := idOf(strings.TrimPrefix(list.Route, "GET "))
	for _, text := range texts {
		query := url.Values{f.Name: {text}}
		want := slices.DeleteFunc(slices.Clone(all), func(o object) bool { return !f.matches(o, text) })
		got := read(t, c, path, query, false)
		if !reflect.DeepEqual(sortedBy(id, got), sortedBy(id, want)) {
			t.Errorf("GET %s?%s: got items with the %s %.99q, want %.99q", path, query.Encode(), f.member,
				sortedBy(f.member, got), sortedBy(f.member, want))
		}
	}
}

// sortedBy returns the values of a member of all the items, sorted.
func sortedBy(member string, all []object) (values []string) {
	for _, o := range all {
		values = append(values, asText(o[member]))
	}
	slices.Sort(values)
	return values
}

// ordersOf returns the orders of a list, such as "name asc".
func ordersOf(t *testing.T, list operation) (orders []string) {
	t.Helper()
	choices := map[string][]any{}
	for _, field := range list.Fields {
		choices[field.Name], _ = field.Schema["enum"].([]any)
	}
	for _, by := range choices["orderBy"] {
		for _, direction := range choices["orderDirection"] {
			orders = append(orders, fmt.Sprint(by, " ", direction))
		}
	}
	if orders == nil && list.Order != "" {
		return []string{list.Order}
	}
	if orders == nil {
		t.Fatalf("setup: %s: the contract must say its order: orderBy and orderDirection, or x-order", list.Route)
	}
	return orders
}

// isFree reports whether a schema permits any text of some length.
func isFree(schema map[string]any) bool {
	isBound := schema["enum"] != nil || schema["pattern"] != nil || schema["format"] != nil
	return schema["type"] == "string" && !isBound
}

// draw returns a value that a schema permits. Texts are random sequences of a few words, so that many
// are equal in part, and some as a whole.
func draw(schema map[string]any) any {
	values, _ := valuesOf(schema)
	if isFree(schema) {
		words := strings.Fields("North south a B Ä ä é 日本 1 12 % _")
		var text strings.Builder
		text.WriteString(words[rand.IntN(len(words))])
		for range rand.IntN(3) {
			text.WriteString(" " + words[rand.IntN(len(words))])
		}
		values = []any{text.String()}
	}
	return values[rand.IntN(len(values))]
}

// createMany makes n resources of a collection with drawn values.
func (m maker) createMany(t *testing.T, collection, path string, n int) (all []object) {
	t.Helper()
	creator, _ := creatorOf(collection)
	for range n {
		body := object{}
		for _, field := range creator.Fields {
			body[field.Name] = draw(field.Schema)
		}
		all = append(all, m.create(t, collection, path, body))
	}
	return all
}

// queriesOf returns queries with no filter, with each one alone, and with all of them.
func queriesOf(filters []filter, all []object) []url.Values {
	anyOf := func(f filter) string {
		value := asText(all[rand.IntN(len(all))][f.member])
		if f.Matches == "part" {
			value = strings.Fields(value)[0]
		}
		return value
	}
	queries := []url.Values{{}, {}, {}}
	for _, f := range filters {
		queries[1].Set(f.Name, anyOf(f))
		queries[2].Set(f.Name, anyOf(f))
		queries = append(queries, url.Values{f.Name: {anyOf(f)}})
	}
	return queries
}

// The pages of each list together have each of its resources once, as it was made, and in each order and
// with each filter. They have none of another parent or, in a list for owners, of another user.
func TestEveryListIsReadWhole(t *testing.T) {
	t.Parallel()
	for _, list := range routes {
		if list.Item == nil {
			continue
		}
		t.Run(list.Route, func(t *testing.T) {
			t.Parallel()
			s, admin := start(t, "admin")
			m := maker{s, admin, admin}
			other, _ := s.Member(t, "member")
			collection := strings.TrimPrefix(list.Route, "GET ")
			path, beside := m.newPath(t, collection), m.newPath(t, collection)
			all := m.createMany(t, collection, path, 130)
			for _, o := range (maker{s, admin, other}).createMany(t, collection, path, 10) {
				if list.Owner != true {
					all = append(all, o)
				}
			}
			if beside != path {
				m.createMany(t, collection, beside, 10)
			}
			wantDefaults(t, admin, list, path)
			filters := filtersOf(t, list)
			for _, order := range ordersOf(t, list) {
				for _, query := range queriesOf(filters, all) {
					by, direction, _ := strings.Cut(order, " ")
					if hasField(list, "orderBy") {
						query.Set("orderBy", by)
						query.Set("orderDirection", direction)
					}
					want := slices.DeleteFunc(slices.Clone(all), func(o object) bool {
						return slices.ContainsFunc(filters, func(f filter) bool {
							return query.Has(f.Name) && !f.matches(o, query.Get(f.Name))
						})
					})
					what := "GET " + path + "?" + query.Encode()
					wantWhole(t, what, read(t, admin, path, query, false), want, idOf(collection), order)
					if hasField(list, "after") {
						wantWhole(t, what+" by after", read(t, admin, path, query, true), want, idOf(collection), order)
					}
				}
			}
		})
	}
}

// wantDefaults checks that a page without parameters is that of the contract's defaults. The list has
// more items than the page.
func wantDefaults(t *testing.T, c *hubstest.Client, list operation, path string) {
	t.Helper()
	query := url.Values{}
	for _, field := range list.Fields {
		if value := field.Schema["default"]; value != nil {
			query.Set(field.Name, asText(value))
		}
	}
	bare, full := c.Get(path).Must(t, 200), c.Get(path+"?"+query.Encode()).Must(t, 200)
	wantText(t, path+", compared with "+query.Encode(), string(bare.Body), string(full.Body))
	items, _ := objectOf(t, bare)["items"].([]any)
	wantEqual(t, "items of a page", asText(len(items)), query.Get("limit"))
}

// wantWhole compares the items of a list with those that it must have, and checks their order.
func wantWhole(t *testing.T, what string, got, want []object, id, order string) {
	t.Helper()
	byID := map[any]object{}
	for _, o := range want {
		byID[o[id]] = o
	}
	if !slices.Equal(sortedBy(id, got), sortedBy(id, want)) {
		t.Errorf("%s: got %d items, want another %d, each once", what, len(got), len(want))
		return
	}
	by, direction, _ := strings.Cut(order, " ")
	for i, o := range got {
		for member, value := range o {
			made, isKnown := byID[o[id]][member]
			if isKnown && made != value {
				t.Errorf("%s: got %s = %v, want %v as it was made", what, member, value, made)
			}
		}
		if i > 0 && !isOrdered(got[i-1], o, by, direction, id) {
			t.Errorf("%s: got %v %v before %v %v, want the order %s, then by %s",
				what, got[i-1][by], got[i-1][id], o[by], o[id], order, id)
			return
		}
	}
}

// isOrdered reports whether two items of a list are in order. Equal times may differ in microseconds,
// which an answer does not have.
func isOrdered(a, b object, by, direction, id string) bool {
	compared := compare(a[by], b[by])
	if _, err := time.Parse(time.RFC3339, asText(a[by])); err != nil {
		compared = cmp.Or(compared, compare(a[id], b[id]))
	}
	if direction == "desc" {
		return compared >= 0
	}
	return compared <= 0
}

// compare compares two numbers or, by their bytes, any other two values.
func compare(a, b any) int {
	x, isNumber := a.(float64)
	if y, areBoth := b.(float64); isNumber && areBoth {
		return cmp.Compare(x, y)
	}
	return strings.Compare(asText(a), asText(b))
}

// An id in a path finds that resource only, and below its own parent only. Else the answer is a 404, and
// no row changes.
func TestIDsFindOnlyTheirOwn(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	m := maker{s, admin, admin}
	for _, r := range routes {
		method, template, _ := strings.Cut(r.Route, " ")
		if !strings.Contains(template, "Id}") {
			continue
		}
		names := strings.Split(template, "/")
		t.Run(r.Route, func(t *testing.T) {
			path := strings.Split(m.newPath(t, template), "/")
			beside := strings.Split(m.newPath(t, template), "/")
			before := allRows(t, s)
			for i, name := range names {
				if !strings.HasSuffix(name, "Id}") {
					continue
				}
				ids := []string{hubstest.NewUUID(), strings.ToUpper(path[i]), "x"}
				if strings.Contains(strings.Join(names[i+1:], "/"), "Id}") {
					ids = append(ids, beside[i])
				}
				for _, id := range ids {
					wrong := slices.Clone(path)
					wrong[i] = id
					q := callOf(t, s, r, method+" "+strings.Join(wrong, "/"))
					q.send(admin.In(t).Elsewhere()).WantProblem(t, 404, "not_found")
				}
			}
			wantEqual(t, "rows", allRows(t, s), before)
		})
	}
}

// An operation for the owner is a 404 to another member, and changes nothing. The contract says of
// each change that needs no role whether it is for the owner.
func TestOwnersOnly(t *testing.T) {
	t.Parallel()
	for _, r := range routes {
		method, path, _ := strings.Cut(r.Route, " ")
		isWrite := method == "PATCH" || method == "PUT" || method == "DELETE"
		_, isSaid := r.Owner.(bool)
		if isWrite && strings.Contains(path, "{") && !needsRole(t, r) && !isSaid {
			t.Errorf("%s: a member may change what another has made, or may not: "+
				"the contract must say x-owner, true or false", r.Route)
		}
		if r.Owner != true || r.Item != nil {
			continue // TestEveryListIsReadWhole has the lists
		}
		t.Run(r.Route, func(t *testing.T) {
			s, admin := start(t, "admin")
			owner, _ := s.Member(t, "member")
			other, _ := s.Member(t, "member")
			q := maker{s, admin, owner}.validCall(t, r)
			before := allRows(t, s)
			q.send(other.In(t).Elsewhere()).WantProblem(t, 404, "not_found")
			wantEqual(t, "rows", allRows(t, s), before)
			q.send(owner.In(t).Elsewhere()).Want(t, r.Status)
		})
	}
}

// What was deleted is gone: for those who read it, for those who delete it again, and on disk.
func TestDeletedResourcesAreGone(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	m := maker{s, admin, admin}
	for _, r := range routes {
		template, isDelete := strings.CutPrefix(r.Route, "DELETE ")
		if !isDelete {
			continue
		}
		t.Run(r.Route, func(t *testing.T) {
			c := admin.In(t).Elsewhere()
			path := m.newPath(t, template)
			beside := m.newPath(t, template)
			c.Do("DELETE "+path, nil).Want(t, r.Status)
			c.Do("DELETE "+path, nil).WantProblem(t, 404, "not_found")
			if _, isShown := routeOf("GET " + template); isShown {
				c.Get(path).WantProblem(t, 404, "not_found")
				c.Get(beside).Want(t, 200)
			}
			s.WantStored(t, hubstest.Query[int](t, s.Database, "select count(*) from files"))
		})
	}
}
