package main

// Hubs, the domain resource, and the model for another one: the row, its inputs
// with their checks, and the handlers, which run a statement and return an
// output or an error. At the end, what the checks of any input are made of.

import (
	"database/sql"
	"encoding/base64"
	"errors"
	"fmt"
	"hash/crc32"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// schema.sql enforces the limits of the columns, too.
const (
	maxHubName        = 100  // characters, also of the filter by name
	maxHubDescription = 2000 // characters
	maxPageLimit      = 100  // hubs
	maxPageOffset     = 10000
	maxAfter          = 1000 // bytes; the longest name makes 600
	maxSearches       = 4    // statements at once that may read the whole index of a list

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

// validate accepts all that the table accepts, but for Go's zero time, which the
// scan leaves if it has missed a column. An operator may have written a name with
// a tab, which must not break its page.
func (h hub) validate() (errs fieldErrors) {
	errs.requireLength("name", h.Name, 1, maxHubName)
	errs.requireLength("description", h.Description, 0, maxHubDescription)
	errs.requireOneOf("status", h.Status, hubStatuses)
	errs.require(!h.CreatedAt.Time.IsZero(), "createdAt", "is zero")
	errs.require(!h.UpdatedAt.Time.IsZero(), "updatedAt", "is zero")
	return errs
}

var hubFields = []string{"name", "description", "status"}

// A hubInput is the input of POST and PATCH. A field that was not sent is nil.
type hubInput struct{ name, description, status *string }

func parseHub(f fields) (in hubInput, errs fieldErrors) {
	in = hubInput{
		name:        f.trimmed("name"),
		description: f.optional("description"),
		status:      f.optional("status"),
	}
	if in.name != nil {
		errs.requireLength("name", *in.name, 1, maxHubName)
		errs.forbidControls("name", *in.name, "")
		errs.require(strings.ContainsFunc(*in.name, isInk), "name", "must have a visible character")
	}
	if in.description != nil {
		errs.requireLength("description", *in.description, 0, maxHubDescription)
		errs.forbidControls("description", *in.description, "\r\n\t")
	}
	if in.status != nil {
		errs.requireOneOf("status", *in.status, hubStatuses)
	}
	return in, errs
}

// isInk leaves out most of what shows nothing, such as a zero width space, a filler of
// Hangul or an empty cell of Braille.
func isInk(c rune) bool {
	return c != '\u2800' && !unicode.In(c, unicode.Z, unicode.Cc, unicode.Cf, unicode.Variation_Selector,
		unicode.Other_Default_Ignorable_Code_Point)
}

func parseNewHub(f fields) (hubInput, fieldErrors) {
	in, errs := parseHub(f)
	errs.require(in.name != nil, "name", "is required")
	return in, errs
}

func (s *server) createHub(r *request, in hubInput) (output, error) {
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

func parseHubChange(f fields) (hubInput, fieldErrors) {
	in, errs := parseHub(f)
	errs.require(in != hubInput{}, "body", "must have at least one of name, description, status")
	return in, errs
}

// changeHub sets the fields that were sent; of the others, coalesce keeps the
// old value. updated_at never goes back, even if the database's clock does.
func (s *server) changeHub(r *request, in hubInput) (output, error) {
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
	"limit", "offset", "after", "orderBy", "orderDirection", nameFilter, statusFilter,
}

type hubQuery struct {
	limit, offset           int
	orderBy, orderDirection string
	name, status            *string // filters; nil means no filter
	fingerprint             string  // of order and filters
	after                   *place  // nil: the list from its beginning
}

var hubOrders = map[string]string{
	"name": "name", "createdAt": "created_at", "updatedAt": "updated_at",
}

func parseHubQuery(f fields) (q hubQuery, errs fieldErrors) {
	q = hubQuery{
		limit:          f.number("limit", "20"),
		offset:         f.number("offset", "0"),
		orderBy:        f.text("orderBy", "name"),
		orderDirection: f.text("orderDirection", "asc"),
		name:           f.trimmed(nameFilter),
		status:         f.optional(statusFilter),
	}
	list := strings.Join([]string{ // a valid value has no line break
		q.orderBy, q.orderDirection, strings.TrimFunc(f[nameFilter], isBlank), f[statusFilter],
	}, "\n")
	q.fingerprint = strconv.FormatUint(uint64(crc32.ChecksumIEEE([]byte(list))), 36)
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
	if text := f.optional("after"); text != nil {
		q.after = q.parsePlace(*text)
		errs.require(q.after != nil, "after",
			"must be the next of a page in the same order and with the same filters")
		errs.require(f.optional("offset") == nil, "after", "must not be sent with offset")
	}
	return q, errs
}

// A place is the last row of a page. The next page begins behind it, whatever
// was added or deleted meanwhile. A client gets it as an opaque text. It is not
// signed, because it grants nothing.
type place struct {
	value any // of the column that the list is ordered by
	hubID string
}

// next returns the place of the last hub of a page, as a client gets it.
func (q hubQuery) next(last hub) string {
	value := last.Name
	switch q.orderBy {
	case "createdAt":
		value = last.CreatedAt.Time.UTC().Format(time.RFC3339Nano) // PostgreSQL has microseconds
	case "updatedAt":
		value = last.UpdatedAt.Time.UTC().Format(time.RFC3339Nano)
	}
	text := q.fingerprint + " " + last.HubID + " " + value
	return base64.RawURLEncoding.EncodeToString([]byte(text))
}

// parsePlace returns nil for what can't be a place in this list.
func (q hubQuery) parsePlace(text string) *place {
	decoded, err := base64.RawURLEncoding.Strict().DecodeString(text)
	parts := strings.SplitN(string(decoded), " ", 3)
	isOfList := err == nil && len(text) <= maxAfter && len(parts) == 3 && parts[0] == q.fingerprint
	if !isOfList || !isUUID(parts[1]) {
		return nil
	}
	hubID, value := parts[1], parts[2]
	if q.orderBy == "name" {
		if !utf8.ValidString(value) || strings.Contains(value, "\x00") { // PostgreSQL refuses these
			return nil
		}
		return &place{value, hubID}
	}
	at, err := time.Parse(time.RFC3339Nano, value)
	if err != nil {
		return nil
	}
	return &place{at.UTC(), hubID} // PostgreSQL does not know every offset
}

// A hubPage has no total, whose cost grows with the table. HasMore costs one
// row.
type hubPage struct {
	Items   []hub   `json:"items"`
	Limit   int     `json:"limit"`
	Offset  int     `json:"offset"`
	HasMore bool    `json:"hasMore"`
	Next    *string `json:"next"` // after of the next page; nil on the last one
}

func (p hubPage) validate() (errs fieldErrors) {
	for _, h := range p.Items {
		errs = append(errs, h.validate()...)
	}
	return errs
}

func (s *server) listHubs(r *request, q hubQuery) (output, error) {
	// Items is never nil, which JSON would show as null.
	page := hubPage{Items: make([]hub, 0, q.limit+1), Limit: q.limit, Offset: q.offset}
	text, args := q.statement()
	if q.name != nil { // may take long, and the others must not wait for it
		if !s.store.searches.take(slotTimeout) {
			return nil, unavailable(errors.New("too many searches run at once"))
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
		next := q.next(page.Items[q.limit-1])
		page.Next = &next
	}
	return page, nil
}

// statement has few texts, each planned once, for an index (schema.sql): for each
// order and set of filters, with after or an offset. No text of a client is part
// of it (I1).
//
// A page at a large offset, or with a filter by name, may skip many hubs. It
// finds its ids in the index alone, then reads their rows.
func (q hubQuery) statement() (text string, args []any) {
	args = []any{q.limit + 1, q.offset} // one row more, for HasMore
	where := "true"
	add := func(condition string, values ...any) { // each %s of the condition is a value
		var parameters []any
		for _, value := range values {
			args = append(args, value)
			parameters = append(parameters, fmt.Sprint("$", len(args)))
		}
		where += " and " + fmt.Sprintf(condition, parameters...)
	}
	direction, isBehind := "asc", ">"
	if q.orderDirection == "desc" {
		direction, isBehind = "desc", "<"
	}
	column := hubOrders[q.orderBy]
	if q.status != nil {
		add("status = %s", *q.status)
	}
	if q.name != nil {
		// The inner select makes PostgreSQL compute the key once, not for each
		// hub.
		add("strpos(name_lower, (select hub_name_key(%s))) > 0", *q.name)
	}
	if q.after != nil {
		add("("+column+", hub_id) "+isBehind+" (%s, %s)", q.after.value, q.after.hubID)
	}
	order := column + " " + direction + ", hub_id " + direction
	selection := "from hubs where " + where + " order by " + order + " limit $1 offset $2"
	if q.name == nil && q.offset <= plainOffset {
		return "select " + hubColumns + " " + selection, args
	}
	return "select " + hubColumns + " from hubs where hub_id = any (array(select hub_id " +
		selection + ")) order by " + order, args
}

// What the handlers of any resource use: how a field is read and checked, ids of
// the path, a missing row.

func (f fields) text(name, fallback string) string {
	value, isSent := f[name]
	if !isSent {
		return fallback
	}
	return value
}

func (f fields) optional(name string) *string {
	value, isSent := f[name]
	if !isSent {
		return nil
	}
	return &value
}

func (f fields) trimmed(name string) *string {
	value := f.optional(name)
	if value != nil {
		*value = strings.TrimFunc(*value, isBlank)
	}
	return value
}

func isBlank(c rune) bool { return unicode.IsSpace(c) || c == '\uFEFF' }

// number returns a negative number, which no field allows, for anything but plain
// digits.
func (f fields) number(name, fallback string) int {
	text := f.text(name, fallback)
	n, err := strconv.Atoi(text)
	if err != nil || strconv.Itoa(n) != text { // such as +5 and 05
		return -1
	}
	return n
}

func (errs *fieldErrors) requireLength(name, text string, least, most int) {
	length := utf8.RuneCountInString(text)
	if length < least || length > most {
		errs.require(false, name, fmt.Sprintf("must be a text of %d to %d characters", least, most))
	}
}

func (errs *fieldErrors) forbidControls(name, text, allowed string) {
	isForbidden := func(c rune) bool {
		return unicode.IsControl(c) && !strings.ContainsRune(allowed, c)
	}
	errs.require(!strings.ContainsFunc(text, isForbidden), name, "must not have control characters")
}

func (errs *fieldErrors) requireOneOf(name, text string, allowed []string) {
	if !slices.Contains(allowed, text) {
		errs.require(false, name, "must be "+strings.Join(allowed, " or "))
	}
}

func (errs *fieldErrors) requireNumber(name string, n, least, most int) {
	if n < least || n > most {
		errs.require(false, name, fmt.Sprintf("must be a whole number from %d to %d", least, most))
	}
}

// pathID returns an id from the path, or NULL, which matches no row, if it is no
// UUID as answers have it.
func (r *request) pathID(name string) sql.Null[string] {
	id := r.PathValue(name)
	return sql.Null[string]{V: id, Valid: isUUID(id)}
}

// orNotFound turns a missing row into a 404.
func orNotFound(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return errNotFound
	}
	return err
}

var uuidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func isUUID(text string) bool { return uuidPattern.MatchString(text) }
