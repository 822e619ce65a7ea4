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

var (
	hubNameRule        = rule{min: 1, max: 100, trim: true}
	hubDescriptionRule = rule{max: 2000, multiline: true}
	hubStatusRule      = rule{oneOf: hubStatuses, fallback: "active"}
)

// newHub is the input of POST /hubs.
type newHub struct{ name, description, status string }

func (newHub) read(f *fields) newHub {
	name := hubNameRule
	name.required = true
	return newHub{f.text("name", name), f.text("description", hubDescriptionRule), f.text("status", hubStatusRule)}
}

// hubChange is the input of PATCH /hubs/{hubId}: nil leaves a field as it is.
type hubChange struct{ name, description, status *string }

func (hubChange) read(f *fields) hubChange {
	c := hubChange{f.optional("name", hubNameRule), f.optional("description", hubDescriptionRule),
		f.optional("status", rule{oneOf: hubStatuses})}
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
		limit:          f.number("limit", rule{min: 1, max: 100, fallback: "20"}),
		offset:         f.number("offset", rule{min: 0, max: 10000, fallback: "0"}),
		orderBy:        f.text("orderBy", rule{oneOf: []string{"name", "createdAt", "updatedAt"}, fallback: "name"}),
		orderDirection: f.text("orderDirection", rule{oneOf: []string{"asc", "desc"}, fallback: "asc"}),
		name:           f.optional("filters[name]", rule{min: 1, max: 100}),
		status:         f.optional("filters[status]", rule{oneOf: hubStatuses}),
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
	broken := func(h hub) bool { return !h.check() }
	return p.Items != nil && len(p.Items) <= p.Limit && !slices.ContainsFunc(p.Items, broken)
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
	if page.HasMore = len(page.Items) > q.limit; page.HasMore {
		page.Items = page.Items[:q.limit]
	}
	return page, err
}

// statement gives each shape of the query a text of its own, so that each is
// prepared, and planned for the index that serves it, once.
func (q hubQuery) statement() (text string, args []any) {
	args = []any{q.limit + 1, q.offset}
	var where []string
	if q.status != nil {
		args = append(args, *q.status)
		where = append(where, fmt.Sprintf("status = $%d", len(args)))
	}
	if q.name != nil {
		args = append(args, "%"+likeEscapes.Replace(*q.name)+"%")
		where = append(where, fmt.Sprintf("name ilike $%d", len(args)))
	}
	text = "select " + hubColumns + " from hubs"
	if where != nil {
		text += " where " + strings.Join(where, " and ")
	}
	order := hubOrders[q.orderBy]
	return fmt.Sprintf("%s order by %s %s, hub_id %[3]s limit $1 offset $2", text, order, q.orderDirection), args
}

// likeEscapes makes plain characters of the pattern's own.
var likeEscapes = strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`)

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
	var id string
	return nothing{}, s.store.row("delete from hubs where hub_id = $1 returning hub_id", []any{x.pathID("hubId")}, &id)
}
