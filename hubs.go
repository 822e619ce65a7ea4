package main

// Hubs, the domain resource: its types with their checks, then the handlers.
// Another resource would have a file of this shape.

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// hub is a hub as it is stored and sent.
type hub struct {
	HubID       string    `json:"hubId"`
	Name        string    `json:"name"`
	Description string    `json:"description"`
	Status      string    `json:"status"` // one of hubStatuses
	CreatedAt   time.Time `json:"createdAt"`
	UpdatedAt   time.Time `json:"updatedAt"`
}

const hubColumns = "hub_id, name, description, status, created_at, updated_at"

var hubStatuses = []string{"active", "archived"}

func (h *hub) targets() []any {
	return []any{&h.HubID, &h.Name, &h.Description, &h.Status, &h.CreatedAt, &h.UpdatedAt}
}

func (h hub) check() bool {
	name, description := utf8.RuneCountInString(h.Name), utf8.RuneCountInString(h.Description)
	return isUUID(h.HubID) && name >= 1 && name <= 100 && description <= 2000 &&
		slices.Contains(hubStatuses, h.Status) && !h.CreatedAt.IsZero() && !h.UpdatedAt.IsZero()
}

var hubNameRule = rule{name: "name", min: 1, max: 100, trim: true}
var hubDescriptionRule = rule{name: "description", max: 2000, controls: "\r\n\t"}
var hubStatusRule = rule{name: "status", oneOf: hubStatuses, fallback: "active"}

// newHub is the input of POST /hubs.
type newHub struct{ name, description, status string }

func (newHub) read(f *fields) newHub {
	return newHub{f.text(hubNameRule), f.text(hubDescriptionRule), f.text(hubStatusRule)}
}

// hubChange is the input of PATCH /hubs/{hubId}: nil leaves a field as it is.
type hubChange struct{ name, description, status *string }

func (hubChange) read(f *fields) hubChange {
	c := hubChange{f.optional(hubNameRule), f.optional(hubDescriptionRule), f.optional(hubStatusRule)}
	if c == (hubChange{}) {
		f.refuse("body", "must have at least one of name, description, status")
	}
	return c
}

// hubQuery is the input of GET /hubs.
type hubQuery struct {
	limit, offset           int
	orderBy, orderDirection string
	name, status            *string // filters; nil: none
}

// hubOrders are the columns that a list can be ordered by. Names of columns can't
// be parameters of a statement: only what stands here gets into its text.
var hubOrders = map[string]string{"name": "name", "createdAt": "created_at", "updatedAt": "updated_at"}

func (hubQuery) read(f *fields) hubQuery {
	return hubQuery{
		limit:          f.number(rule{name: "limit", number: true, min: 1, max: 100, fallback: "20"}),
		offset:         f.number(rule{name: "offset", number: true, min: 0, max: 10000, fallback: "0"}),
		orderBy:        f.text(rule{name: "orderBy", oneOf: []string{"name", "createdAt", "updatedAt"}, fallback: "name"}),
		orderDirection: f.text(rule{name: "orderDirection", oneOf: []string{"asc", "desc"}, fallback: "asc"}),
		name:           f.optional(rule{name: "filters[name]", min: 1, max: 100}),
		status:         f.optional(rule{name: "filters[status]", oneOf: hubStatuses}),
	}
}

// hubPage is one page of a list. It has no total: counting costs more as the table
// grows, hasMore costs one row.
type hubPage struct {
	Items   []hub `json:"items"`
	Limit   int   `json:"limit"`
	Offset  int   `json:"offset"`
	HasMore bool  `json:"hasMore"`
}

func (p hubPage) check() bool {
	return p.Items != nil && len(p.Items) <= p.Limit &&
		!slices.ContainsFunc(p.Items, func(h hub) bool { return !h.check() })
}

func (s *server) listHubs(_ *exchange, q hubQuery) (hubPage, error) {
	page := hubPage{Items: make([]hub, 0, q.limit+1), Limit: q.limit, Offset: q.offset}
	statement, args := q.statement()
	err := s.store.rows(statement, args, func(rows *sql.Rows) error {
		var h hub
		err := rows.Scan(h.targets()...)
		page.Items = append(page.Items, h)
		return err
	})
	page.HasMore = len(page.Items) > q.limit
	page.Items = page.Items[:min(len(page.Items), q.limit)]
	return page, err
}

// statement gives each shape of the query a text of its own, so that each is
// prepared once, and planned for the index that serves it.
func (q hubQuery) statement() (text string, args []any) {
	text, args = hubsPage, []any{q.limit + 1, q.offset}
	if q.name != nil {
		text, args = hubsByName, append(args, *q.name)
	}
	status := "true"
	if q.status != nil {
		args = append(args, *q.status)
		status = fmt.Sprintf("status = $%d", len(args))
	}
	order := fmt.Sprintf("%s %s, hub_id %[2]s", hubOrders[q.orderBy], q.orderDirection)
	return strings.ReplaceAll(strings.ReplaceAll(text, "{status}", status), "{order}", order), args
}

// hubsPage finds the page in an index alone, and reads the rows of the page only.
const hubsPage = "select " + hubColumns + ` from hubs where hub_id = any (array(
	select hub_id from hubs where {status} order by {order} limit $1 offset $2)) order by {order}`

// hubsByName has two ways, and a sample to choose by (schema.sql has all three): a walk
// in the list's order, and the index of the names' pieces, whose finds are then sorted.
// Both find the same; PostgreSQL runs only the one.
const hubsByName = `with frequent as materialized (select yes from hub_name_is_frequent($3, $1::bigint + $2::bigint))
select ` + hubColumns + ` from hubs where hub_id = any (array(
	(select hub_id from hubs_walked_by_name($3) where (select yes from frequent) and {status}
	order by {order} limit $1::bigint offset $2::bigint)
union all
	(select hub_id from hubs_gathered_by_name($3) where not (select yes from frequent) and {status}
	order by {order} limit $1::bigint offset $2::bigint))) order by {order}`

func (s *server) getHub(x *exchange, _ nothing) (h hub, err error) {
	err = s.store.row("select "+hubColumns+" from hubs where hub_id = $1", []any{x.pathID("hubId")}, h.targets()...)
	return h, err
}

func (s *server) createHub(x *exchange, in newHub) (h hub, err error) {
	err = s.store.row("insert into hubs (name, description, status) values ($1, $2, $3) returning "+hubColumns,
		[]any{in.name, in.description, in.status}, h.targets()...)
	x.Header().Set("Location", "/hubs/"+h.HubID)
	return h, err
}

// changeHub sets what the input has; a nil is null, for which the old value stays.
func (s *server) changeHub(x *exchange, in hubChange) (h hub, err error) {
	err = s.store.row(`update hubs set name = coalesce($2, name), description = coalesce($3, description),
		status = coalesce($4, status), updated_at = now() where hub_id = $1 returning `+hubColumns,
		[]any{x.pathID("hubId"), in.name, in.description, in.status}, h.targets()...)
	return h, err
}

func (s *server) deleteHub(x *exchange, _ nothing) (_ nothing, err error) {
	return nothing{}, s.store.row("delete from hubs where hub_id = $1 returning 0", []any{x.pathID("hubId")}, new(int))
}
