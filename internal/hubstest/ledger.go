package hubstest

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	mathrand "math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"
)

// A Ledger keeps what clients were told: every write that was acknowledged, and every one
// that may have been done. Once the faults are over, Check and CheckFiles compare the tables
// and the files with it. Its methods may run in parallel, each with one request.
type Ledger struct {
	report func(kind, detail string) // gets what must not be

	mu       sync.Mutex
	hubs     map[string]*ledgerHub // by name
	idle     chan *ledgerHub       // acknowledged, not deleted, and with no request under way
	files    map[string][sha256.Size]byte
	unsure   int               // uploads without an answer, or with a 502 or 503
	accepted map[string]string // by address
}

type ledgerHub struct {
	name, id string
	created  bool // acknowledged
	deleting bool
	deleted  bool // acknowledged
	sent     int  // the last change sent: its number is the description
	changed  int  // the last change acknowledged
}

// A Sender sends one request, as Client.Do does.
type Sender interface {
	Do(method, path string, body any, headers ...string) *Response
}

// NewLedger returns an empty ledger. It calls report for what must not be: a kind of fault,
// always in the same words, and what the fault is about. report is the test's own, so that a
// failure stands at a line of the test.
func NewLedger(report func(kind, detail string)) *Ledger {
	return &Ledger{
		report:   report,
		hubs:     map[string]*ledgerHub{},
		idle:     make(chan *ledgerHub, 1<<20), // more than a soak makes
		files:    map[string][sha256.Size]byte{},
		accepted: map[string]string{},
	}
}

// Acknowledged returns how many writes were.
func (l *Ledger) Acknowledged() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.files) + len(l.accepted)
	for _, hub := range l.hubs {
		n += hub.changed
		if hub.created {
			n++
		}
	}
	return n
}

// WriteHub creates, changes or deletes a hub.
func (l *Ledger) WriteHub(c Sender) *Response {
	kind := mathrand.IntN(10)
	if kind < 3 {
		return l.createHub(c)
	}
	hub := l.take()
	switch {
	case hub == nil:
		return l.createHub(c)
	case kind == 9:
		return l.deleteHub(c, hub)
	default:
		return l.changeHub(c, hub)
	}
}

func (l *Ledger) createHub(c Sender) *Response {
	hub := &ledgerHub{name: fmt.Sprintf("ledger %d", serial.Add(1))}
	l.mu.Lock()
	l.hubs[hub.name] = hub
	l.mu.Unlock()
	r := c.Do("POST", "/hubs", map[string]string{"name": hub.name})
	if r.Status != 201 {
		return r
	}
	hub.id = r.member("hubId")
	hub.created = true
	l.giveBack(hub)
	return r
}

func (l *Ledger) changeHub(c Sender, hub *ledgerHub) *Response {
	defer l.giveBack(hub)
	hub.sent++
	change := map[string]string{"description": strconv.Itoa(hub.sent)}
	r := c.Do("PATCH", "/hubs/"+hub.id, change)
	if r.Status == 200 {
		hub.changed = hub.sent
	}
	return r
}

func (l *Ledger) deleteHub(c Sender, hub *ledgerHub) *Response {
	hub.deleting = true // and it is not given back
	r := c.Do("DELETE", "/hubs/"+hub.id, nil)
	hub.deleted = r.Status == 204
	return r
}

// ReadHub reads a hub that was acknowledged: the last change that was acknowledged is there.
// It returns nil if there is none.
func (l *Ledger) ReadHub(c Sender) *Response {
	hub := l.take()
	if hub == nil {
		return nil
	}
	defer l.giveBack(hub)
	r := c.Do("GET", "/hubs/"+hub.id, nil)
	if r.Status == 404 {
		l.report("an acknowledged hub not found", r.String())
	}
	if r.Status == 200 {
		l.checkChange(hub, r.member("description"))
	}
	return r
}

func (l *Ledger) checkChange(hub *ledgerHub, description string) {
	change, _ := strconv.Atoi(description)
	if change < hub.changed || change > hub.sent {
		l.report("an acknowledged change lost", fmt.Sprintf(
			"%s: change %d, acknowledged %d, sent %d", hub.name, change, hub.changed, hub.sent))
	}
}

// take returns an idle hub, which is the caller's alone until it is given back, or nil.
func (l *Ledger) take() *ledgerHub {
	select {
	case hub := <-l.idle:
		return hub
	default:
		return nil
	}
}

func (l *Ledger) giveBack(hub *ledgerHub) { l.idle <- hub }

// Upload uploads a file of random bytes.
func (l *Ledger) Upload(c Sender) *Response {
	content := make([]byte, 100+mathrand.IntN(16<<10))
	rand.Read(content)
	form, contentType := Form(fmt.Sprintf("ledger %d.bin", serial.Add(1)), content)
	r := c.Do("POST", "/files/upload", form, "Content-Type", contentType)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch r.Status {
	case 201:
		l.files[r.member("path")] = sha256.Sum256(content)
	case 0, 502, 503:
		l.unsure++
	}
	return r
}

// ReadFile fetches a file that was acknowledged, or returns nil if there is none.
func (l *Ledger) ReadFile(c Sender) *Response {
	l.mu.Lock()
	var path string
	for path = range l.files { // in no order
		break
	}
	l.mu.Unlock()
	if path == "" {
		return nil
	}
	return l.fetch(c, path)
}

func (l *Ledger) fetch(c Sender, path string) *Response {
	r := c.Do("GET", path, nil)
	l.mu.Lock()
	isSame := sha256.Sum256(r.Body) == l.files[path]
	l.mu.Unlock()
	if r.Status == 200 && !isSame {
		l.report("an acknowledged file came back different", path)
	}
	return r
}

// AcceptTerms accepts the terms for the user who is signed in.
func (l *Ledger) AcceptTerms(c Sender, email, version string) *Response {
	r := c.Do("POST", "/terms/acceptance", map[string]string{"version": version})
	if r.Status == 200 {
		l.mu.Lock()
		l.accepted[email] = r.member("acceptedAt")
		l.mu.Unlock()
	}
	return r
}

// Check compares the tables with the ledger. No request may be under way.
func (l *Ledger) Check(t testing.TB, databaseURL string) {
	stored := readRows[storedHub](t, databaseURL, `select name, to_jsonb(hub) as value
		from (select name, count(*) as copies, min(description) as change from hubs
			where name like 'ledger %' group by name) hub`)
	for name, row := range stored {
		l.checkHub(name, row)
	}
	for name, hub := range l.hubs {
		_, isStored := stored[name]
		if hub.created && !hub.deleting && !isStored {
			l.report("an acknowledged hub lost", name)
		}
	}
	accepted := readRows[time.Time](t, databaseURL, `select email as name,
		max(accepted_at) as value from terms_acceptances join users using (user_id) group by email`)
	for email, at := range l.accepted {
		told, err := time.Parse(time.RFC3339Nano, at)
		if err != nil || !told.Equal(accepted[email]) {
			detail := fmt.Sprintf("%s: acknowledged %s, stored %v", email, at, accepted[email])
			l.report("an acknowledged acceptance lost", detail)
		}
	}
}

type storedHub struct {
	Copies int
	Change string
}

// readRows returns the values of a query by their names.
func readRows[T any](t testing.TB, databaseURL, query string) (rows map[string]T) {
	const all = "select coalesce(json_object_agg(name, value), '{}') from (%s) rows"
	text := Query[[]byte](t, databaseURL, fmt.Sprintf(all, query))
	if err := json.Unmarshal(text, &rows); err != nil {
		t.Fatal(err)
	}
	return rows
}

func (l *Ledger) checkHub(name string, row storedHub) {
	hub := l.hubs[name]
	if hub == nil {
		l.report("a hub that nobody sent", name)
		return
	}
	if row.Copies > 1 {
		l.report("a write done twice", fmt.Sprintf("%s is there %d times", name, row.Copies))
	}
	if hub.deleted {
		l.report("an acknowledged deletion undone", name)
	}
	l.checkChange(hub, row.Change)
}

// CheckFiles fetches every acknowledged file, and compares the rows with what was uploaded.
func (l *Ledger) CheckFiles(t testing.TB, c Sender, databaseURL string) {
	for path := range l.files {
		if r := l.fetch(c, path); r.Status != 200 {
			l.report("an acknowledged file lost", r.String())
		}
	}
	rows := Query[int](t, databaseURL, "select count(*) from files")
	least := len(l.files)
	if rows < least || rows > least+l.unsure {
		l.report("rows of files", fmt.Sprintf(
			"%d, want %d, or up to %d more of unsure uploads", rows, least, l.unsure))
	}
}
