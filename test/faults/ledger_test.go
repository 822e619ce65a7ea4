package faults

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	mathrand "math/rand/v2"
	"strconv"
	"sync"
	"testing"

	"hubs/internal/hubstest"
)

// A ledger records every write that the server acknowledged, and every write that may have been
// done although no answer said so. When the faults are over, checkRows and checkFiles compare the
// tables and the files with the ledger. writeHub and upload may be called in parallel.
//
// A write is acknowledged when the client has its answer: 200, 201 or 204.
type ledger struct {
	t testing.TB

	mu     sync.Mutex
	hubs   map[string]*ledgerHub        // by name; all that a client has tried to create
	idle   chan *ledgerHub              // acknowledged, not deleted, no request under way
	files  map[string][sha256.Size]byte // hashes of the acknowledged files, by path
	unsure int                          // uploads with a 503
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

// newLedger returns an empty ledger. A write that was lost or done twice fails the test.
func newLedger(t testing.TB) *ledger {
	return &ledger{
		t:     t,
		hubs:  map[string]*ledgerHub{},
		idle:  make(chan *ledgerHub, 1<<20), // more hubs than a soak makes
		files: map[string][sha256.Size]byte{},
	}
}

// writeHub creates, changes or deletes a hub, at random.
func (l *ledger) writeHub(c *hubstest.Client) *hubstest.Response {
	draw := mathrand.IntN(10)
	if draw < 3 {
		return l.createHub(c)
	}
	select {
	case hub := <-l.idle: // no other caller gets this hub until it is back
		if draw == 9 {
			return l.deleteHub(c, hub)
		}
		return l.changeHub(c, hub)
	default:
		return l.createHub(c)
	}
}

func (l *ledger) createHub(c *hubstest.Client) *hubstest.Response {
	hub := &ledgerHub{name: "ledger " + hubstest.NewUUID()}
	l.mu.Lock()
	l.hubs[hub.name] = hub
	l.mu.Unlock()
	r := c.Do("POST /hubs", map[string]string{"name": hub.name})
	if r.Status != 201 {
		return r
	}
	hub.id = madeBy(r).HubID
	hub.created = true
	l.idle <- hub
	return r
}

func (l *ledger) changeHub(c *hubstest.Client, hub *ledgerHub) *hubstest.Response {
	hub.sent++
	change := map[string]string{"description": strconv.Itoa(hub.sent)}
	r := c.Do("PATCH /hubs/"+hub.id, change)
	if r.Status == 200 {
		hub.changed = hub.sent
	}
	l.idle <- hub
	return r
}

func (l *ledger) deleteHub(c *hubstest.Client, hub *ledgerHub) *hubstest.Response {
	hub.deleting = true // no other request may use the hub, so it does not become idle again
	r := c.Do("DELETE /hubs/"+hub.id, nil)
	hub.deleted = r.Status == 204
	return r
}

// upload uploads a file with 100 bytes to about 16 kB of random content.
func (l *ledger) upload(c *hubstest.Client) *hubstest.Response {
	content := make([]byte, 100+mathrand.IntN(16<<10))
	rand.Read(content)
	r := c.Upload("ledger "+hubstest.NewUUID()+".bin", content)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch r.Status {
	case 201:
		l.files[madeBy(r).Path] = sha256.Sum256(content)
	case 503:
		l.unsure++
	}
	return r
}

// A made hub or file, as the answer describes it.
type made struct{ HubID, Path string }

func madeBy(r *hubstest.Response) (m made) {
	json.Unmarshal(r.Body, &m) // the harness has compared the answer with the contract
	return m
}

// checkRows compares the hubs in the table with the ledger. No request may be under way.
func (l *ledger) checkRows(databaseURL string) {
	l.t.Helper()
	text := hubstest.Query[[]byte](l.t, databaseURL, `select json_object_agg(name, to_jsonb(hub))
		from (select name, count(*) as copies, min(description) as change from hubs
			group by name) hub`)
	var stored map[string]storedHub
	hubstest.Must(l.t, json.Unmarshal(text, &stored))
	for name, hub := range l.hubs {
		row, isStored := stored[name]
		if hub.created && !hub.deleting && !isStored {
			l.t.Errorf("%s: an acknowledged hub is lost", name)
		}
		if !isStored {
			continue
		}
		if row.Copies > 1 {
			l.t.Errorf("%s: got %d rows, want 1: a write was done twice", name, row.Copies)
		}
		if hub.deleted {
			l.t.Errorf("%s: an acknowledged deletion is lost", name)
		}
		change, _ := strconv.Atoi(row.Change) // without a change, the description is empty
		if change < hub.changed || change > hub.sent {
			l.t.Errorf("%s: got change %d, want %d (acknowledged) to %d (sent)",
				name, change, hub.changed, hub.sent)
		}
	}
}

// A storedHub is what the table has under one name.
type storedHub struct {
	Copies int    // number of rows
	Change string // the description
}

// checkFiles downloads every acknowledged file and compares the number of rows with the ledger. No
// request may be under way, and nothing but the ledger may have uploaded files.
func (l *ledger) checkFiles(c *hubstest.Client, databaseURL string) {
	l.t.Helper()
	for path, hash := range l.files {
		r := c.Elsewhere().Get(path)
		if r.Status != 200 || sha256.Sum256(r.Body) != hash {
			l.t.Errorf("%s: got %v, want the bytes of an acknowledged file", path, r)
		}
	}
	rows := hubstest.Query[int](l.t, databaseURL, "select count(*) from files")
	least := len(l.files)
	if rows < least || rows > least+l.unsure {
		l.t.Errorf("rows of files: got %d, want %d to %d: an upload with a 503 may be stored",
			rows, least, least+l.unsure)
	}
}
