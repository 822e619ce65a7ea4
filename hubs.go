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

// listHubs reads one row more than the page has: whether it is there is hasMore.
func (s *server) listHubs(_ *exchange, q hubQuery) (hubPage, error) {
	items := make([]hub, 0, q.limit+1)
	var row hub // every row is scanned into it, then copied
	targets := row.targets()
	statement, args := q.statement()
	err := s.store.rows(statement, args, func(rows *sql.Rows) error {
		if err := rows.Scan(targets...); err != nil {
			return err
		}
		items = append(items, row)
		return nil
	})
	if err != nil {
		return hubPage{}, err
	}
	hasMore := len(items) > q.limit
	if hasMore {
		items = items[:q.limit]
	}
	return hubPage{Items: items, Limit: q.limit, Offset: q.offset, HasMore: hasMore}, nil
}

// plainOffset is the last offset at which reading the rows in order and dropping the
// first ones is the fastest way.
const plainOffset = 100

// expensive reports whether the statement may take many times as long as a first page.
func (q hubQuery) expensive() bool {
	return q.name != nil || q.offset > plainOffset
}

// statement returns the SQL of the list and its arguments: $1 is the number of rows, $2
// the offset, then come the name and the status, if the query has them. Each shape of the
// query has its own text, so that it is prepared once and planned for the index that
// serves it. For example, active hubs with "har" in the name, newest first, on a first page:
//
//	with sample as materialized (select candidates, matches from hub_name_sample($3)),
//	...
//	where (select ...) and status = $4 order by created_at desc, hub_id desc
//	...
//
//	$1 = 21, $2 = 0, $3 = 'har', $4 = 'active'
func (q hubQuery) statement() (text string, args []any) {
	args = []any{q.limit + 1, q.offset}
	switch {
	case q.name != nil:
		text = hubsByName
		args = append(args, *q.name)
	case q.offset > plainOffset:
		text = hubsDeepPage
	default:
		text = hubsFirstPages
	}
	status := "true"
	if q.status != nil {
		args = append(args, *q.status)
		status = fmt.Sprintf("status = $%d", len(args))
	}
	column := hubOrders[q.orderBy]
	order := column + " " + q.orderDirection + ", hub_id " + q.orderDirection
	text = strings.ReplaceAll(text, "{status}", status)
	text = strings.ReplaceAll(text, "{column}", column)
	text = strings.ReplaceAll(text, "{order}", order)
	return text, args
}

const hubsFirstPages = "select " + hubColumns + ` from hubs where {status} order by {order} limit $1 offset $2`

// hubsDeepPage finds the page in an index alone, and reads only the rows of the page.
const hubsDeepPage = "select " + hubColumns + ` from hubs where hub_id = any (array(
	select hub_id from hubs where {status} order by {order} limit $1 offset $2)) order by {order}`

// hubsByName takes one of two ways, which find the same hubs (see schema.sql): a walk in
// the list's order, and gathering the matches by the index of pieces. A sample of a
// thousand hubs decides:
//
//   - More than 20 candidates: "walked" reads entries until the page is full, all of them
//     if need be. That is no slower than gathering over 2 % of the hubs.
//   - Otherwise, if a full page is to be expected within 20,000 entries, "tried" reads up to
//     40,000. The budget is for matches that come late in the order.
//   - If "tried" did not fill the page, or was not worth it, "gathered" reads all
//     candidates, about 2 % of the hubs at most.
//
// What "tried" found of a page that it did not fill, "gathered" finds again; an id that is
// there twice does no harm. PostgreSQL skips a part whose condition on the sample is false.
const hubsByName = `with sample as materialized (
	select candidates > 20 as frequent, matches * 20 >= $1::bigint + $2::bigint as worth_a_try from hub_name_sample($3)),
tried as materialized (
	select hub_id from (
		select hub_id, name_lower, name_mask, {column} from hubs
		where (select worth_a_try and not frequent from sample) and {status}
		order by {order} limit 40000) entries
	where hub_name_contains(name_lower, name_mask, (select hub_name_key($3)), (select hub_name_mask(hub_name_key($3))))
	order by {order} limit $1 offset $2),
walked as (
	select hub_id from hubs_walked_by_name($3)
	where (select frequent from sample) and {status}
	order by {order} limit $1 offset $2),
gathered as (
	select hub_id from hubs_gathered_by_name($3)
	where (select not frequent from sample) and (select count(*) < $1 from tried) and {status}
	order by {order} limit $1 offset $2)
select ` + hubColumns + ` from hubs where hub_id = any (array(
	select hub_id from tried union all select hub_id from walked union all select hub_id from gathered))
order by {order}`

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
