package main

// Hubs, the domain resource: its types with their checks, then the handlers. Another
// resource would have a file of this shape.

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// A hub is a hub as it is stored and sent.
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

// scanTargets returns where hubColumns are scanned to.
func (h *hub) scanTargets() []any {
	return []any{&h.HubID, &h.Name, &h.Description, &h.Status, &h.CreatedAt, &h.UpdatedAt}
}

func (h hub) isValid() bool {
	nameLength := utf8.RuneCountInString(h.Name)
	return isUUID(h.HubID) &&
		nameLength >= 1 && nameLength <= 100 &&
		utf8.RuneCountInString(h.Description) <= 2000 &&
		slices.Contains(hubStatuses, h.Status) &&
		!h.CreatedAt.IsZero() && !h.UpdatedAt.IsZero()
}

var (
	hubNameRule        = rule{name: "name", min: 1, max: 100, trim: true, required: true}
	hubDescriptionRule = rule{name: "description", max: 2000, controls: "\r\n\t"}
	hubStatusRule      = rule{name: "status", oneOf: hubStatuses, fallback: "active"}
)

// A newHub is the input of POST /hubs.
type newHub struct{ name, description, status string }

func parseNewHub(f *fields) newHub {
	return newHub{f.text(hubNameRule), f.text(hubDescriptionRule), f.text(hubStatusRule)}
}

// A hubChange is the input of PATCH /hubs/{hubId}. nil leaves a field as it is.
type hubChange struct{ name, description, status *string }

func parseHubChange(f *fields) hubChange {
	change := hubChange{
		f.optional(hubNameRule),
		f.optional(hubDescriptionRule),
		f.optional(hubStatusRule),
	}
	if change == (hubChange{}) {
		f.refuse("body", "must have at least one of name, description, status")
	}
	return change
}

// A hubQuery is the input of GET /hubs.
type hubQuery struct {
	limit, offset           int
	orderBy, orderDirection string
	name, status            *string // filters; nil: none
}

var (
	limitRule   = rule{name: "limit", number: true, min: 1, max: 100, fallback: "20"}
	offsetRule  = rule{name: "offset", number: true, min: 0, max: 10000, fallback: "0"}
	orderByRule = rule{
		name: "orderBy", oneOf: []string{"name", "createdAt", "updatedAt"}, fallback: "name",
	}
	orderDirectionRule = rule{
		name: "orderDirection", oneOf: []string{"asc", "desc"}, fallback: "asc",
	}
	nameFilterRule   = rule{name: "filters[name]", min: 1, max: 100}
	statusFilterRule = rule{name: "filters[status]", oneOf: hubStatuses}
)

func parseHubQuery(f *fields) hubQuery {
	return hubQuery{
		limit:          f.number(limitRule),
		offset:         f.number(offsetRule),
		orderBy:        f.text(orderByRule),
		orderDirection: f.text(orderDirectionRule),
		name:           f.optional(nameFilterRule),
		status:         f.optional(statusFilterRule),
	}
}

// hubOrders has the columns that a list can be ordered by. The name of a column can't be a
// parameter of a statement: only what stands here gets into the text of one.
var hubOrders = map[string]string{
	"name":      "name",
	"createdAt": "created_at",
	"updatedAt": "updated_at",
}

// A hubPage is one page of a list. It has no total: to count costs more as the table grows,
// hasMore costs one row.
type hubPage struct {
	Items   []hub `json:"items"`
	Limit   int   `json:"limit"`
	Offset  int   `json:"offset"`
	HasMore bool  `json:"hasMore"`
}

func (p hubPage) isValid() bool {
	for _, h := range p.Items {
		if !h.isValid() {
			return false
		}
	}
	return p.Items != nil && len(p.Items) <= p.Limit
}

func (s *server) listHubs(_ *requestState, q hubQuery) (hubPage, error) {
	page := hubPage{Items: make([]hub, 0, q.limit+1), Limit: q.limit, Offset: q.offset}
	text, args := q.statement()
	err := s.store.rows(statement{text: text, args: args, expensive: q.name != nil || q.offset > 100}, func(rows *sql.Rows) error {
		var h hub
		err := rows.Scan(h.scanTargets()...)
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

func (s *server) getHub(state *requestState, _ nothing) (hub, error) {
	var h hub
	found, err := s.store.row(
		read("select "+hubColumns+" from hubs where hub_id = $1", state.pathID("hubId")),
		h.scanTargets()...)
	return h, orNotFound(found, err)
}

// orNotFound returns the 404 of a statement that found no row.
func orNotFound(found bool, err error) error {
	if err == nil && !found {
		return errNotFound
	}
	return err
}

func (s *server) createHub(state *requestState, in newHub) (hub, error) {
	var h hub
	_, err := s.store.row(
		write(`insert into hubs (name, description, status) values ($1, $2, $3)
			returning `+hubColumns,
			in.name, in.description, in.status),
		h.scanTargets()...)
	if err != nil {
		return hub{}, err
	}
	state.Header().Set("Location", "/hubs/"+h.HubID)
	return h, nil
}

// changeHub sets what the input has. nil becomes null, for which the old value stays.
func (s *server) changeHub(state *requestState, in hubChange) (hub, error) {
	var h hub
	found, err := s.store.row(
		write(`update hubs set name = coalesce($2, name), description = coalesce($3, description),
			status = coalesce($4, status), updated_at = now() where hub_id = $1 returning `+hubColumns,
			state.pathID("hubId"), in.name, in.description, in.status),
		h.scanTargets()...)
	return h, orNotFound(found, err)
}

func (s *server) deleteHub(state *requestState, _ nothing) (nothing, error) {
	found, err := s.store.row(
		write("delete from hubs where hub_id = $1 returning hub_id", state.pathID("hubId")),
		new(string))
	return nothing{}, orNotFound(found, err)
}
