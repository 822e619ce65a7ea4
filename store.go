package main

// The store: PostgreSQL through database/sql. The statements stand beside the handlers that
// use them. Here is what they share: the pool, its time limits, prepared statements, what is
// tried again, and which errors mean that the database is out of reach.

import (
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/lib/pq"
)

//go:embed schema.sql
var schema string

const (
	poolSize      = 8               // connections, all kept open
	expensiveSize = poolSize / 2    // of these, for expensive statements at a time
	dbTimeout     = 2 * time.Second // for one wait, one statement, one read or write on a socket
)

// A store runs statements. Its methods take no context: dbTimeout bounds each step of a
// statement, whether or not the client waits. With a context, lib/pq would start a goroutine for
// each statement, and dial a connection to cancel it each time a client goes away.
type store struct {
	db             *sql.DB
	slots          chan struct{} // one for each connection; bounds the wait
	expensiveSlots chan struct{} // one for each expensive statement
	statements     sync.Map      // text → *sql.Stmt, prepared at first use and kept
}

// A statement is what the store runs.
type statement struct {
	text      string
	args      []any
	writes    bool // so never sent a second time
	expensive bool // at most expensiveSize of these run at a time
}

// read and write make statements. store.row and store.rows run them.
func read(text string, args ...any) statement { return statement{text: text, args: args} }

func write(text string, args ...any) statement {
	return statement{text: text, args: args, writes: true}
}

// openStore connects and checks that the tables are there.
func openStore(databaseURL string) (*store, error) {
	connector, err := newConnector(databaseURL, map[string]string{
		"statement_timeout": fmt.Sprint(dbTimeout.Milliseconds()),
		"timezone":          "UTC",
		// One plan for all calls of a statement. Otherwise PostgreSQL would plan a list anew at
		// each call, because of its limit and offset (79 µs against 54).
		"plan_cache_mode": "force_generic_plan",
		// Each statement has an index that serves it, and is too short to gain from a compiler
		// or from parallel workers.
		"enable_seqscan":                  "off",
		"jit":                             "off",
		"max_parallel_workers_per_gather": "0",
	})
	if err != nil {
		return nil, err
	}
	connector.Dialer(deadlineDialer{})
	st := &store{
		db:             sql.OpenDB(connector),
		slots:          make(chan struct{}, poolSize),
		expensiveSlots: make(chan struct{}, expensiveSize),
	}
	// The default of 2 would open and close connections all the time.
	st.db.SetMaxIdleConns(poolSize)
	tables := read("select count(*) from users, terms_acceptances, hubs, files where false")
	_, err = st.row(tables, new(int))
	if err != nil {
		st.db.Close()
		return nil, fmt.Errorf(
			"the database does not answer, or it lacks the tables (run: hubs migrate): %w", err)
	}
	return st, nil
}

// newConnector checks the connection string. settings override the string's own. The error
// says no more than that it is wrong: lib/pq's own error may quote the password.
func newConnector(databaseURL string, settings map[string]string) (*pq.Connector, error) {
	const complaint = usageError("DATABASE_URL: must be a PostgreSQL URL or connection string; several " +
		"hosts as postgres://user@host1,host2/hubs?port=5432,5433&target_session_attrs=read-write")
	cfg, err := pq.NewConfig(databaseURL)
	if err != nil || databaseURL == "" {
		return nil, complaint
	}
	// cfg.Host is the first host; cfg.Multi has the others.
	for _, server := range append(cfg.Multi, pq.ConfigMultihost{Host: cfg.Host}) {
		if strings.Count(server.Host, ":") == 1 { // lib/pq would look host:port up as a name
			return nil, complaint
		}
	}
	cfg = cfg.Clone() // its map Runtime is never nil
	// PostgreSQL ignores the letter case of a setting's name.
	maps.DeleteFunc(cfg.Runtime, func(name, _ string) bool {
		return settings[strings.ToLower(name)] != ""
	})
	maps.Copy(cfg.Runtime, settings)
	return pq.NewConnectorConfig(cfg)
}

// migrate applies schema.sql, however long its indexes take.
func migrate(ctx context.Context, databaseURL string, out io.Writer) error {
	connector, err := newConnector(databaseURL, nil)
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	if _, err := db.ExecContext(ctx, schema); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "the tables are up to date")
	return err
}

// row runs a statement and scans its row. found is false if there is none; then dest is
// unchanged.
func (st *store) row(q statement, dest ...any) (found bool, err error) {
	err = st.rows(q, func(rows *sql.Rows) error {
		found = true
		return rows.Scan(dest...)
	})
	return found && err == nil, err
}

// rows runs a statement and calls scan for each row. If a write returns an error, it may have
// been done all the same: the connection may have broken after the statement.
//
// D1: we never send a write again (for what the driver does, see SECURITY.md, Deviations).
// D5: a read whose connection turns out to be dead is tried once more on a new one, unless scan
// has had a row already. So once the database is back after a crash, no read fails.
// H6: expensive statements never take all connections.
func (st *store) rows(q statement, scan func(*sql.Rows) error) error {
	if q.expensive {
		if err := takeSlot(st.expensiveSlots); err != nil {
			return err
		}
		defer func() { <-st.expensiveSlots }()
	}
	if err := takeSlot(st.slots); err != nil {
		return err
	}
	defer func() { <-st.slots }()
	scanned, err := st.run(q, scan)
	if isConnectionGone(err) && !scanned && !q.writes {
		st.dropIdle()
		_, err = st.run(q, scan)
	}
	return st.classifyDBError(err)
}

// takeSlot takes a slot, or gives up after dbTimeout.
//
// D2: a bounded wait, then 503.
func takeSlot(slots chan struct{}) error {
	select {
	case slots <- struct{}{}:
		return nil
	case <-time.After(dbTimeout):
		return unavailable(errors.New("no free database connection"))
	}
}

// errScan marks a row that the code could not take: a bug, and no outage.
var errScan = errors.New("scan")

// run runs a statement once. It is prepared at its first use, and kept.
func (st *store) run(q statement, scan func(*sql.Rows) error) (scanned bool, err error) {
	prepared, ok := st.statements.Load(q.text)
	if !ok {
		fresh, err := st.db.Prepare(q.text)
		if err != nil {
			return false, err
		}
		prepared, ok = st.statements.LoadOrStore(q.text, fresh)
		if ok { // another request was first
			fresh.Close()
		}
	}
	rows, err := prepared.(*sql.Stmt).Query(q.args...)
	if err != nil {
		return false, err
	}
	defer rows.Close()
	for rows.Next() {
		scanned = true
		if err := scan(rows); err != nil {
			return scanned, fmt.Errorf("%w: %w", errScan, err)
		}
	}
	return scanned, rows.Err()
}

// dropIdle closes the idle connections: when one is dead, the others are too, mostly.
func (st *store) dropIdle() {
	st.db.SetMaxIdleConns(0)
	st.db.SetMaxIdleConns(poolSize)
}

// isConnectionGone reports whether a connection was closed or reset under a statement. Timeouts
// and refused new connections do not count.
func isConnectionGone(err error) bool {
	broken, ok := errors.AsType[*net.OpError](err)
	return ok && broken.Op != "dial" && !broken.Timeout()
}

// classifyDBError turns the errors of a database that is out of reach into a 503. Every error that
// is not PostgreSQL's own counts as one of the connection. Of PostgreSQL's own, those count that
// end or refuse the connection (FATAL), and these classes (PostgreSQL manual, appendix A):
//
//	08  connections
//	25  transactions: a standby takes no writes
//	53  resources
//	57  intervention by an operator, or by statement_timeout
//	58  the system
//
// Other errors of PostgreSQL come from a bug, or from a wrong set-up.
//
// Z2: a database that is away gives nobody a session, and takes none away.
func (st *store) classifyDBError(err error) error {
	if err == nil || errors.Is(err, errScan) {
		return err
	}
	dbErr, isDBError := errors.AsType[*pq.Error](err)
	if !isDBError {
		// Not waited for: if the database hangs, closing takes dbTimeout for each connection.
		go st.dropIdle()
		return unavailable(err)
	}
	switch class := string(dbErr.Code.Class()); {
	case dbErr.Code == "23503": // a foreign key. Here all refer to users: the user was deleted
		return unauthenticated("ended")
	case class == "25": // we are connected to a standby: connect anew
		go st.dropIdle()
		return unavailable(err)
	// A class has two characters, so it can match only one of these whole.
	case dbErr.Fatal() || strings.Contains("08 53 57 58", class):
		return unavailable(err)
	}
	return err
}

// deadlineDialer makes connections whose every read and write ends in time. Without it
// lib/pq waits for a hung PostgreSQL for ever, whatever a context says.
type deadlineDialer struct{}

func (d deadlineDialer) Dial(network, address string) (net.Conn, error) {
	return d.DialTimeout(network, address, dbTimeout)
}

// DialTimeout is what lib/pq calls if DATABASE_URL has a connect_timeout.
func (deadlineDialer) DialTimeout(network, address string, limit time.Duration) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, min(limit, dbTimeout))
	if err != nil {
		return nil, err
	}
	return deadlineConn{conn}, nil
}

type deadlineConn struct{ net.Conn }

// Read hides io.EOF from lib/pq. Because of io.EOF, lib/pq would report a bad connection, and
// database/sql would send the statement again, even a write. With TLS, crypto/tls reports
// an orderly close as io.EOF itself. But before it closes, PostgreSQL sends a FATAL error.
//
// A connection whose read failed is closed. Otherwise, if an answer broke off after an
// error, lib/pq would use the connection again and take the late rest of that answer for
// the answer to the next statement.
//
// D1: no write is done twice, and a hung PostgreSQL is given up after dbTimeout.
func (c deadlineConn) Read(b []byte) (int, error) {
	c.SetReadDeadline(time.Now().Add(dbTimeout))
	n, err := c.Conn.Read(b)
	if err != nil {
		c.Close()
	}
	if errors.Is(err, io.EOF) {
		err = &net.OpError{Op: "read", Net: "tcp", Err: errors.New("closed by the database")}
	}
	return n, err
}

func (c deadlineConn) Write(b []byte) (int, error) {
	c.SetWriteDeadline(time.Now().Add(dbTimeout))
	return c.Conn.Write(b)
}
