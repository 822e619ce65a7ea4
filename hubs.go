package main

// Hubs, the domain resource, and the model for another one: the row, its inputs
// with their checks, and the handlers, which run a statement and return an
// output or an error.

import (
	"fmt"
)

// schema.sql enforces the limits of the columns, too.
const (
	maxHubName        = 100  // characters, also of the filter by name
	maxHubDescription = 2000 // characters
	maxPageLimit      = 100  // hubs
	maxPageOffset     = 10000

	// Up to this offset, reading the skipped rows is faster than finding the
	// ids first.
	plainOffset = 100
)

var hubStatuses = []string{"active", "archived"}

type hub struct {
	HubID       string    `json:"hubId"`
	Name        string    `json:"name"`
	Description string    `json:"description"`
	Status      string    `json:"status"`
	CreatedAt   timestamp `json:"createdAt"`
	UpdatedAt   timestamp `json:"updatedAt"`
}

const hubColumns = "hub_id, name, description, status, created_at, updated_at"

// targets returns where to scan hubColumns, in the same order.
func (h *hub) targets() []any {
	return []any{&h.HubID, &h.Name, &h.Description, &h.Status, &h.CreatedAt.Time, &h.UpdatedAt.Time}
}

// validate accepts all that the table accepts. An operator may have written a
// name with a tab, which must not break its page. A time is zero if the scan
// has missed its column.
func (h hub) validate() (errs fieldErrors) {
	errs.requireLength("name", h.Name, 1, maxHubName)
	errs.requireLength("description", h.Description, 0, maxHubDescription)
	errs.requireOneOf("status", h.Status, hubStatuses)
	errs.require(!h.CreatedAt.IsZero(), "createdAt", "is zero")
	errs.require(!h.UpdatedAt.IsZero(), "updatedAt", "is zero")
	return errs
}

var hubFields = []string{"name", "description", "status"}

// A hubInput is the input of POST and PATCH. A field that was not sent is nil.
type hubInput struct{ name, description, status *string }

func newHubInput(f fields) hubInput {
	return hubInput{
		name:        f.trimmed("name"),
		description: f.optional("description"),
		status:      f.optional("status"),
	}
}

func (in hubInput) validate() (errs fieldErrors) {
	if in.name != nil {
		errs.requireLength("name", *in.name, 1, maxHubName)
		errs.forbidControls("name", *in.name, "")
	}
	if in.description != nil {
		errs.requireLength("description", *in.description, 0, maxHubDescription)
		errs.forbidControls("description", *in.description, "\r\n\t")
	}
	if in.status != nil {
		errs.requireOneOf("status", *in.status, hubStatuses)
	}
	return errs
}

func checkNewHub(f fields) fieldErrors {
	in := newHubInput(f)
	errs := in.validate()
	errs.require(in.name != nil, "name", "is required")
	return errs
}

func (s *server) createHub(r *request) (output, error) {
	in := newHubInput(r.fields)
	var h hub
	err := s.store.write(`insert into hubs (name, description, status)
		values ($1, coalesce($2, ''), coalesce($3, 'active')) returning `+hubColumns,
		[]any{in.name, in.description, in.status}, h.targets()...)
	if err != nil {
		return nil, err
	}
	r.w.Header().Set("Location", "/hubs/"+h.HubID)
	return h, nil
}

func checkHubChange(f fields) fieldErrors {
	in := newHubInput(f)
	errs := in.validate()
	errs.require(in != hubInput{}, "body", "must have at least one of name, description, status")
	return errs
}

// changeHub sets the fields that were sent; of the others, coalesce keeps the
// old value. updated_at never goes back, even if the database's clock does.
func (s *server) changeHub(r *request) (output, error) {
	in := newHubInput(r.fields)
	var h hub
	err := s.store.write(`update hubs set name = coalesce($2, name),
		description = coalesce($3, description), status = coalesce($4, status),
		updated_at = greatest(updated_at, clock_timestamp())
		where hub_id = $1 returning `+hubColumns,
		[]any{r.pathID("hubId"), in.name, in.description, in.status}, h.targets()...)
	if err != nil {
		return nil, orNotFound(err)
	}
	return h, nil
}

func (s *server) deleteHub(r *request) (output, error) {
	var id string
	err := s.store.write("delete from hubs where hub_id = $1 returning hub_id",
		[]any{r.pathID("hubId")}, &id)
	return nil, orNotFound(err)
}

func (s *server) getHub(r *request) (output, error) {
	var h hub
	err := s.store.read("select "+hubColumns+" from hubs where hub_id = $1",
		[]any{r.pathID("hubId")}, h.targets()...)
	if err != nil {
		return nil, orNotFound(err)
	}
	return h, nil
}

const nameFilter, statusFilter = "filters[name]", "filters[status]"

var hubQueryFields = []string{
	"limit", "offset", "orderBy", "orderDirection", nameFilter, statusFilter,
}

type hubQuery struct {
	limit, offset           int
	orderBy, orderDirection string
	name, status            *string // filters; nil means no filter
}

func newHubQuery(f fields) hubQuery {
	return hubQuery{
		limit:          f.number("limit", "20"),
		offset:         f.number("offset", "0"),
		orderBy:        f.text("orderBy", "name"),
		orderDirection: f.text("orderDirection", "asc"),
		name:           f.trimmed(nameFilter),
		status:         f.optional(statusFilter),
	}
}

var hubOrders = map[string]string{
	"name": "name", "createdAt": "created_at", "updatedAt": "updated_at",
}

func (q hubQuery) validate() (errs fieldErrors) {
	errs.requireNumber("limit", q.limit, 1, maxPageLimit)
	errs.requireNumber("offset", q.offset, 0, maxPageOffset)
	errs.require(hubOrders[q.orderBy] != "", "orderBy", "must be name, createdAt or updatedAt")
	errs.requireOneOf("orderDirection", q.orderDirection, []string{"asc", "desc"})
	if q.name != nil {
		errs.requireLength(nameFilter, *q.name, 1, maxHubName)
		errs.forbidControls(nameFilter, *q.name, "")
	}
	if q.status != nil {
		errs.requireOneOf(statusFilter, *q.status, hubStatuses)
	}
	return errs
}

func checkHubQuery(f fields) fieldErrors { return newHubQuery(f).validate() }

// A hubPage has no total, whose cost grows with the table. HasMore costs one
// row.
type hubPage struct {
	Items   []hub `json:"items"`
	Limit   int   `json:"limit"`
	Offset  int   `json:"offset"`
	HasMore bool  `json:"hasMore"`
}

func (p hubPage) validate() (errs fieldErrors) {
	for _, h := range p.Items {
		errs = append(errs, h.validate()...)
	}
	return errs
}

func (s *server) listHubs(r *request) (output, error) {
	q := newHubQuery(r.fields)
	// Items is never nil, which JSON would show as null.
	page := hubPage{Items: make([]hub, 0, q.limit+1), Limit: q.limit, Offset: q.offset}
	text, args := q.statement()
	if q.name != nil { // others must not wait for slow searches
		if !s.store.searches.take(slotTimeout) {
			return nil, errBusy
		}
		defer s.store.searches.free()
	}
	err := s.store.list(text, args, func() []any {
		page.Items = append(page.Items, hub{})
		return page.Items[len(page.Items)-1].targets()
	})
	if err != nil {
		return nil, err
	}
	page.HasMore = len(page.Items) > q.limit
	if page.HasMore {
		page.Items = page.Items[:q.limit]
	}
	return page, nil
}

// statement has a text for each order and set of filters, planned for its own
// index (schema.sql). No text of a client is part of it (I1).
//
// A page at a large offset, or with a filter by name, may skip many hubs. It
// finds its ids in the index alone, then reads their rows.
func (q hubQuery) statement() (text string, args []any) {
	args = []any{q.limit + 1, q.offset} // one row more, for HasMore
	where := "true"
	if q.status != nil {
		args = append(args, *q.status)
		where += fmt.Sprintf(" and status = $%d", len(args))
	}
	if q.name != nil {
		args = append(args, *q.name)
		// The inner select makes PostgreSQL compute the key once, not for each
		// hub.
		where += fmt.Sprintf(" and strpos(name_lower, (select hub_name_key($%d))) > 0", len(args))
	}
	direction := "asc"
	if q.orderDirection == "desc" {
		direction = "desc"
	}
	order := hubOrders[q.orderBy] + " " + direction + ", hub_id " + direction
	selection := "from hubs where " + where + " order by " + order + " limit $1 offset $2"
	if q.name == nil && q.offset <= plainOffset {
		return "select " + hubColumns + " " + selection, args
	}
	return "select " + hubColumns + " from hubs where hub_id = any (array(select hub_id " +
		selection + ")) order by " + order, args
}
