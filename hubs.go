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

// A hub, as it is stored and sent.
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
	pageLimitRule  = rule{name: "limit", number: true, min: 1, max: 100, fallback: "20"}
	pageOffsetRule = rule{name: "offset", number: true, min: 0, max: 10000, fallback: "0"}
	orderByRule    = rule{
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
		limit:          f.number(pageLimitRule),
		offset:         f.number(pageOffsetRule),
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

// A hubPage is one page of a list. It has no total: counting costs more as the table grows.
// HasMore costs one row.
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
	var row hub // each row is scanned into it; append copies it
	targets := row.scanTargets()
	err := s.store.rows(q.listStatement(), func(rows *sql.Rows) error {
		if err := rows.Scan(targets...); err != nil {
			return err
		}
		page.Items = append(page.Items, row)
		return nil
	})
	if err != nil {
		return hubPage{}, err
	}
	page.HasMore = len(page.Items) > q.limit
	page.Items = page.Items[:min(len(page.Items), q.limit)]
	return page, nil
}

// Up to plainOffset, the fastest way is to read the rows in order and to drop the first ones.
const plainOffset = 100

// listStatement returns the SQL of the list and its arguments: $1 is the number of rows, $2
// the offset, then come the name and the status, if the query has them. Each shape of the
// query has its own text, so that it is prepared once and planned for the index that
// serves it. For example, active hubs with "har" in the name, newest first, on a first page:
//
//	with sample as materialized (select ... from hub_name_sample($3)),
//	...
//	where (select ...) and status = $4 order by created_at desc, hub_id desc
//	...
//
//	$1 = 21, $2 = 0, $3 = 'har', $4 = 'active'
//
// I1: of what a client sends, only the direction gets into the text, and only asc or desc passes
// its rule. All values are parameters.
func (q hubQuery) listStatement() statement {
	var text string
	args := []any{q.limit + 1, q.offset}
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
	text = strings.NewReplacer("{status}", status, "{column}", column, "{order}", order).Replace(text)
	return statement{
		text:      text,
		args:      args,
		expensive: q.name != nil || q.offset > plainOffset, // costs many times a first page
	}
}

const hubsFirstPages = "select " + hubColumns + ` from hubs where {status} order by {order} limit $1 offset $2`

// hubsDeepPage finds the page in an index alone, and reads only the rows of the page.
const hubsDeepPage = "select " + hubColumns + ` from hubs where hub_id = any (array(
	select hub_id from hubs where {status} order by {order} limit $1 offset $2)) order by {order}`

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

// changeHub sets what the input has. A nil is sent as null, and coalesce keeps the old value.
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

// hubsByName is the list with filters[name]. Skip it at a first reading: docs/search.md explains
// it step by step. It takes one of two ways, which find the same hubs (see the end of
// schema.sql): a walk in the list's order, and gathering the matches by the index of pieces. A
// sample of a thousand hubs decides:
//
//   - More than 20 candidates: "walked" reads entries until the page is full, all of them
//     if need be. To gather more than 2 % of the hubs would not be faster.
//   - Otherwise, if a full page is to be expected within 20,000 entries (20 samples), "tried" reads up to
//     40,000. The budget is for matches that come late in the order.
//   - If "tried" did not fill the page, or was not worth it, "gathered" reads all
//     candidates, about 2 % of the hubs at most.
//
// What "tried" found of a page that it did not fill, "gathered" finds again; any (array …)
// counts an id once. PostgreSQL skips a part whose condition on the sample is false.
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
