package main

// Hubs, the domain resource: the types with their validation, then the handlers. Use this file as
// the model for another resource. The table and its indexes are in schema.sql.
//
// A resource uses what the files before it offer. In middleware.go: strict input (a parse function
// takes each field that a client may send, by a rule, and any other field is a 400), the state of
// the request, and the check of each output by its isValid. In store.go: statements (readOnly and
// readWrite make one, row and rows run it, and orNotFound turns a missing row into a 404).
//
// A parse function returns no error. The fields collect all errors, and if there is one, the
// handler is not called.

import (
	"database/sql"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"
)

// The limits of a hub and of the list. schema.sql also enforces those of the columns.
const (
	maxHubName        = 100  // characters, of a name and of the filter by name
	maxHubDescription = 2000 // characters
	maxPageLimit      = 100  // hubs
	maxPageOffset     = 10000

	// Up to this offset, it is faster to read the skipped rows as well. Beyond it, listStatement
	// first finds the ids of the page in an index.
	plainOffset = 100
)

// A hub is a row of the table hubs, and its JSON representation.
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

// scanTargets returns the destinations for hubColumns, in the same order.
func (h *hub) scanTargets() []any {
	return []any{&h.HubID, &h.Name, &h.Description, &h.Status, &h.CreatedAt, &h.UpdatedAt}
}

// isValid does not check HubID: the type of its column is uuid.
func (h hub) isValid() bool {
	nameLength := utf8.RuneCountInString(h.Name)
	return nameLength >= 1 && nameLength <= maxHubName &&
		utf8.RuneCountInString(h.Description) <= maxHubDescription &&
		slices.Contains(hubStatuses, h.Status) &&
		!h.CreatedAt.IsZero() && !h.UpdatedAt.IsZero()
}

var (
	hubNameRule        = rule{name: "name", min: 1, max: maxHubName, trim: true, required: true}
	hubDescriptionRule = rule{name: "description", max: maxHubDescription, controls: "\r\n\t"}
	hubStatusRule      = rule{name: "status", oneOf: hubStatuses, fallback: "active"}
)

// A newHub is the input of POST /hubs.
type newHub struct{ name, description, status string }

func parseNewHub(f *fields) newHub {
	return newHub{
		name:        f.text(hubNameRule),
		description: f.text(hubDescriptionRule),
		status:      f.text(hubStatusRule),
	}
}

// A hubChange is the input of PATCH /hubs/{hubId}. A field that is not sent is nil, and stays as it
// is.
type hubChange struct{ name, description, status *string }

func parseHubChange(f *fields) hubChange {
	change := hubChange{
		name:        f.optional(hubNameRule),
		description: f.optional(hubDescriptionRule),
		status:      f.optional(hubStatusRule),
	}
	if change == (hubChange{}) {
		f.addError("body", "must have at least one of name, description, status")
	}
	return change
}

// A hubQuery is the input of GET /hubs.
type hubQuery struct {
	limit, offset           int
	orderBy, orderDirection string
	name, status            *string // filters; nil means no filter
}

var (
	pageLimitRule  = rule{name: "limit", number: true, min: 1, max: maxPageLimit, fallback: "20"}
	pageOffsetRule = rule{name: "offset", number: true, max: maxPageOffset, fallback: "0"}
	orderByRule    = rule{
		name: "orderBy", oneOf: []string{"name", "createdAt", "updatedAt"}, fallback: "name",
	}
	orderDirectionRule = rule{
		name: "orderDirection", oneOf: []string{"asc", "desc"}, fallback: "asc",
	}
	nameFilterRule   = rule{name: "filters[name]", min: 1, max: maxHubName}
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

// hubOrders has the column for each value of orderByRule. A column name can't be a parameter of a
// statement, so one of these becomes part of the text.
var hubOrders = map[string]string{
	"name":      "name",
	"createdAt": "created_at",
	"updatedAt": "updated_at",
}

// A hubPage is one page of the list. It has no total, because counting takes longer as the table
// grows. HasMore costs only one more row.
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
	return len(p.Items) <= p.Limit
}

func (s *server) listHubs(_ *requestState, q hubQuery) (hubPage, error) {
	// Items is never nil, which JSON would show as null.
	page := hubPage{Items: make([]hub, 0, q.limit+1), Limit: q.limit, Offset: q.offset}
	err := s.store.rows(q.listStatement(), func(rows *sql.Rows) error {
		page.Items = append(page.Items, hub{})
		last := &page.Items[len(page.Items)-1]
		return rows.Scan(last.scanTargets()...)
	})
	if err != nil {
		return hubPage{}, err
	}
	page.HasMore = len(page.Items) > q.limit
	if page.HasMore {
		page.Items = page.Items[:q.limit]
	}
	return page, nil
}

// listStatement returns the statement for a page of the list. Each order and each set of filters
// has its own text, so that each is prepared once and planned for its own index (schema.sql has the
// rule for the indexes, and says what name_lower and hub_name_key are).
//
// A page at a small offset, without a filter by name, reads its rows in the order of an index:
//
//	select … from hubs where true and status = $3
//	order by created_at desc, hub_id desc limit $1 offset $2
//
// Any other page may skip many hubs before it is full. It first finds the ids of the page in the
// index, without reading the rows of skipped hubs, and then reads the rows of the page:
//
//	select … from hubs where hub_id = any (array(select hub_id
//		from hubs where true and strpos(name_lower, (select hub_name_key($3))) > 0
//		order by name asc, hub_id asc limit $1 offset $2))
//	order by name asc, hub_id asc
//
// Nothing that a client sends becomes part of the text: the order comes from an allow-list, and all
// values are parameters (I1). A statement that may skip many hubs is marked expensive (H6).
func (q hubQuery) listStatement() statement {
	// $1 and $2. The one row more than the page is for HasMore.
	args := []any{q.limit + 1, q.offset}
	where := "true" // each filter below begins with "and"
	if q.status != nil {
		args = append(args, *q.status)
		where += fmt.Sprintf(" and status = $%d", len(args))
	}
	if q.name != nil {
		args = append(args, *q.name)
		// The inner select makes PostgreSQL compute the key once, not for each hub.
		where += fmt.Sprintf(" and strpos(name_lower, (select hub_name_key($%d))) > 0", len(args))
	}
	direction := "asc" // a literal, so that no text of the client gets into the statement
	if q.orderDirection == "desc" {
		direction = "desc"
	}
	order := hubOrders[q.orderBy] + " " + direction + ", hub_id " + direction
	selection := "from hubs where " + where + " order by " + order + " limit $1 offset $2"
	if q.name == nil && q.offset <= plainOffset {
		return readOnly("select "+hubColumns+" "+selection, args...)
	}
	// With array, PostgreSQL finds all ids before it reads their rows. The second "order by" is
	// needed because the rows come in any order.
	list := readOnly("select "+hubColumns+" from hubs where hub_id = any (array(select hub_id "+
		selection+")) order by "+order, args...)
	list.expensive = true
	return list
}

func (s *server) getHub(state *requestState) (hub, error) {
	var h hub
	found, err := s.store.row(
		readOnly("select "+hubColumns+" from hubs where hub_id = $1", state.pathID("hubId")),
		h.scanTargets()...)
	return orNotFound(h, found, err)
}

func (s *server) createHub(state *requestState, in newHub) (hub, error) {
	var h hub
	_, err := s.store.row(
		readWrite(`insert into hubs (name, description, status) values ($1, $2, $3)
			returning `+hubColumns,
			in.name, in.description, in.status),
		h.scanTargets()...)
	if err != nil {
		return hub{}, err
	}
	state.Header().Set("Location", "/hubs/"+h.HubID)
	return h, nil
}

// changeHub updates the fields that the input has. A nil becomes null, and coalesce keeps the old
// value. updated_at never goes back, even if the database's clock does.
func (s *server) changeHub(state *requestState, in hubChange) (hub, error) {
	var h hub
	found, err := s.store.row(
		readWrite(`update hubs set name = coalesce($2, name), description = coalesce($3, description),
			status = coalesce($4, status), updated_at = greatest(updated_at, clock_timestamp())
			where hub_id = $1 returning `+hubColumns,
			state.pathID("hubId"), in.name, in.description, in.status),
		h.scanTargets()...)
	return orNotFound(h, found, err)
}

func (s *server) deleteHub(state *requestState) (nothing, error) {
	found, err := s.store.row( // found says whether the statement has returned a row
		readWrite("delete from hubs where hub_id = $1 returning hub_id", state.pathID("hubId")),
		new(string))
	return orNotFound(nothing{}, found, err)
}
