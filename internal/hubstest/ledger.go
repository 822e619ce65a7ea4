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

// A Ledger records every write that the server acknowledged, and every write that may have been
// done although no answer said so. When the faults are over, CheckRows and CheckFiles compare the
// tables and the files with the ledger. The methods that send one request may be called in
// parallel.
//
// A write is acknowledged when the client has its answer: 200, 201 or 204.
type Ledger struct {
	report func(kind, detail string) // called for each fault

	mu       sync.Mutex
	hubs     map[string]*ledgerHub        // by name; all that a client has tried to create
	idle     chan *ledgerHub              // acknowledged, not deleted, no request under way
	files    map[string][sha256.Size]byte // hashes of the acknowledged files, by path
	unsure   int                          // uploads without an answer, or with a 502 or 503
	accepted map[string]string            // acknowledged times of acceptance, by address
}

// A ledgerHub is a hub that only the ledger writes. Its changes have the numbers 1, 2 and so on. A
// change sends its number as the description.
type ledgerHub struct {
	name, id string
	created  bool // acknowledged
	deleting bool // a request to delete the hub was sent
	deleted  bool // acknowledged
	sent     int  // number of the last change that was sent
	changed  int  // number of the last change that was acknowledged
}

// A Sender sends one request, as Client.Do does.
type Sender interface {
	Do(request string, body any, headers ...string) *Response
}

// NewLedger returns an empty ledger. It calls report for each fault that it finds. kind is a fixed
// text, so that a test can count the faults of each kind. detail names the write.
func NewLedger(report func(kind, detail string)) *Ledger {
	return &Ledger{
		report:   report,
		hubs:     map[string]*ledgerHub{},
		idle:     make(chan *ledgerHub, 1<<20), // more hubs than a soak makes
		files:    map[string][sha256.Size]byte{},
		accepted: map[string]string{},
	}
}

// Acknowledged returns how many writes were acknowledged, not counting deletions. A change that was
// not acknowledged counts too if a later change of the same hub was.
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

// WriteHub creates, changes or deletes a hub, at random.
func (l *Ledger) WriteHub(c Sender) *Response {
	draw := mathrand.IntN(10)
	if draw < 3 {
		return l.createHub(c)
	}
	hub := l.take()
	switch {
	case hub == nil:
		return l.createHub(c)
	case draw == 9:
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
	r := c.Do("POST /hubs", map[string]string{"name": hub.name})
	if r.Status != 201 {
		return r
	}
	hub.id = r.text("hubId")
	hub.created = true
	l.giveBack(hub)
	return r
}

func (l *Ledger) changeHub(c Sender, hub *ledgerHub) *Response {
	defer l.giveBack(hub)
	hub.sent++
	change := map[string]string{"description": strconv.Itoa(hub.sent)}
	r := c.Do("PATCH /hubs/"+hub.id, change)
	if r.Status == 200 {
		hub.changed = hub.sent
	}
	return r
}

func (l *Ledger) deleteHub(c Sender, hub *ledgerHub) *Response {
	hub.deleting = true // no other request may use the hub, so it is not given back
	r := c.Do("DELETE /hubs/"+hub.id, nil)
	hub.deleted = r.Status == 204
	return r
}

// ReadHub reads an acknowledged hub. The answer must have the last acknowledged change, or a later
// one that was sent. ReadHub returns nil if no hub is idle.
func (l *Ledger) ReadHub(c Sender) *Response {
	hub := l.take()
	if hub == nil {
		return nil
	}
	defer l.giveBack(hub)
	r := c.Do("GET /hubs/"+hub.id, nil)
	if r.Status == 404 {
		l.report("an acknowledged hub is not found", r.String())
	}
	if r.Status == 200 {
		l.checkChange(hub, r.text("description"))
	}
	return r
}

// checkChange reports a fault unless the description is the last acknowledged change, or a later
// change that was sent.
func (l *Ledger) checkChange(hub *ledgerHub, description string) {
	change, _ := strconv.Atoi(description) // without a change, the description is empty
	if change < hub.changed || change > hub.sent {
		l.report("an acknowledged change is lost", fmt.Sprintf(
			"%s: got change %d, want %d (acknowledged) to %d (sent)",
			hub.name, change, hub.changed, hub.sent))
	}
}

// take returns an idle hub, or nil if there is none. No other caller gets the hub until giveBack.
func (l *Ledger) take() *ledgerHub {
	select {
	case hub := <-l.idle:
		return hub
	default:
		return nil
	}
}

func (l *Ledger) giveBack(hub *ledgerHub) { l.idle <- hub }

// Upload uploads a file with 100 bytes to about 16 kB of random content.
func (l *Ledger) Upload(c Sender) *Response {
	content := make([]byte, 100+mathrand.IntN(16<<10))
	rand.Read(content)
	form, contentType := Form(fmt.Sprintf("ledger %d.bin", serial.Add(1)), content)
	r := c.Do("POST /files/upload", form, "Content-Type", contentType)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch r.Status {
	case 201:
		l.files[r.text("path")] = sha256.Sum256(content)
	case 0, 502, 503:
		l.unsure++
	}
	return r
}

// ReadFile downloads an acknowledged file. It returns nil if there is none.
func (l *Ledger) ReadFile(c Sender) *Response {
	l.mu.Lock()
	var path string
	for path = range l.files { // the first of a map is a random one
		break
	}
	l.mu.Unlock()
	if path == "" {
		return nil
	}
	return l.fetch(c, path)
}

// fetch downloads an acknowledged file. It reports a fault if a 200 has other bytes than were
// uploaded.
func (l *Ledger) fetch(c Sender, path string) *Response {
	r := c.Do("GET "+path, nil)
	l.mu.Lock()
	isSame := sha256.Sum256(r.Body) == l.files[path]
	l.mu.Unlock()
	if r.Status == 200 && !isSame {
		l.report("an acknowledged file has other bytes", path)
	}
	return r
}

// AcceptTerms accepts a version of the terms. email is the address of the signed-in user.
func (l *Ledger) AcceptTerms(c Sender, email, version string) *Response {
	r := c.Do("POST /terms/acceptance", map[string]string{"version": version})
	if r.Status == 200 {
		l.mu.Lock()
		l.accepted[email] = r.text("acceptedAt")
		l.mu.Unlock()
	}
	return r
}

// CheckRows compares the hubs and the accepted terms in the tables with the ledger. No request may be
// under way.
func (l *Ledger) CheckRows(t testing.TB, databaseURL string) {
	t.Helper()
	stored := readRows[storedHub](t, databaseURL, `select name, to_jsonb(hub) as value
		from (select name, count(*) as copies, min(description) as change from hubs
			where name like 'ledger %' group by name) hub`)
	for name, row := range stored {
		l.checkHub(name, row)
	}
	for name, hub := range l.hubs {
		_, isStored := stored[name]
		if hub.created && !hub.deleting && !isStored {
			l.report("an acknowledged hub is lost", name)
		}
	}
	// Times in answers have three decimals, and the table has six.
	accepted := readRows[time.Time](t, databaseURL, `select email as name,
		date_trunc('milliseconds', max(accepted_at)) as value
		from terms_acceptances join users using (user_id) group by email`)
	for email, at := range l.accepted {
		acknowledged, err := time.Parse(time.RFC3339, at)
		if err != nil || !acknowledged.Equal(accepted[email]) {
			detail := fmt.Sprintf("%s: got the stored time %v, want %s", email, accepted[email], at)
			l.report("acknowledged terms are lost", detail)
		}
	}
}

// A storedHub is what the table has under one name.
type storedHub struct {
	Copies int    // number of rows
	Change string // the description
}

// readRows returns the column value of each row of a query, by the column name.
func readRows[T any](t testing.TB, databaseURL, query string) (rows map[string]T) {
	t.Helper()
	const all = "select coalesce(json_object_agg(name, value), '{}') from (%s) rows"
	text := Query[[]byte](t, databaseURL, fmt.Sprintf(all, query))
	Must(t, json.Unmarshal(text, &rows))
	return rows
}

// checkHub compares a stored hub with the ledger.
func (l *Ledger) checkHub(name string, row storedHub) {
	hub := l.hubs[name]
	if hub == nil {
		l.report("a hub is stored that no client sent", name)
		return
	}
	if row.Copies > 1 {
		l.report("a write was done twice", fmt.Sprintf("%s: got %d rows, want 1", name, row.Copies))
	}
	if hub.deleted {
		l.report("an acknowledged deletion is lost", name)
	}
	l.checkChange(hub, row.Change)
}

// CheckFiles downloads every acknowledged file and compares the number of rows with the ledger. No
// request may be under way, and nothing but the ledger may have uploaded files.
func (l *Ledger) CheckFiles(t testing.TB, c Sender, databaseURL string) {
	t.Helper()
	for path := range l.files {
		if r := l.fetch(c, path); r.Status != 200 {
			l.report("an acknowledged file is lost", r.String())
		}
	}
	rows := Query[int](t, databaseURL, "select count(*) from files")
	least := len(l.files)
	if rows < least || rows > least+l.unsure {
		l.report("wrong number of rows in the table files", fmt.Sprintf(
			"got %d, want %d to %d: uploads without an answer may be stored",
			rows, least, least+l.unsure))
	}
}
