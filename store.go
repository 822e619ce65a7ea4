package main

// The store: PostgreSQL through database/sql. The statements stand beside the handlers that
// use them. Here is what they share: the pool, prepared statements, and what happens when
// the database fails:
//
//	all connections are taken      the wait is bounded, then a 503     takeSlot
//	a statement runs too long      PostgreSQL ends it: a 503           statementTimeout
//	PostgreSQL does not answer     the socket gives up: a 503          deadlineConn
//	a connection has died          a read is tried once more           store.rows
//	any error                      is it an outage (503) or a bug?     classifyDBError

import (
	"cmp"
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
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
	dbTimeout     = 2 * time.Second // for one wait, one read or write on a socket

	// PostgreSQL ends a statement before the read of its answer gives up: after a read that gave
	// up, classifyDBError drops every idle connection.
	statementTimeout = dbTimeout - 200*time.Millisecond
)

// A store runs statements. Its methods take no context: dbTimeout bounds each step of a
// statement, whether or not the client waits. With a context, lib/pq would start a goroutine for
// each statement, and dial a connection to cancel it each time a client goes away.
type store struct {
	db             *sql.DB
	slots          chan struct{} // one for each connection; bounds the wait
	expensiveSlots chan struct{} // one for each expensive statement
	statements     sync.Map      // text → *sql.Stmt, prepared at first use and kept
	dropping       sync.Mutex    // held by dropIdle
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
		"statement_timeout": fmt.Sprint(statementTimeout.Milliseconds()),
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
	if err := st.checkTables(); err != nil {
		st.db.Close()
		return nil, explainDBError(err)
	}
	return st, nil
}

// checkTables fails if a table can't be read: because the database is away, or because a
// table, a right or the search_path has changed.
func (st *store) checkTables() error {
	_, err := st.row(read("select count(*) from users, terms_acceptances, files, hubs where false"), new(int))
	return err
}

// explainDBError says in words what an operator can do about the usual mistakes of a set-up or of a
// command (PostgreSQL manual, appendix A).
func explainDBError(err error) error {
	advice := map[string]string{
		"28P01": "DATABASE_URL: the database refuses this user or password",
		"3D000": "DATABASE_URL: there is no such database",
		"42P01": "the database lacks the tables (run: hubs migrate)",
		"42501": "the database role lacks a right (migrate and user need the owner's DATABASE_URL)",
		"23505": "there is a user with this address already; nothing was changed",
		"23514": "the table users takes no such address or role (roles: member, admin)",
	}
	sentence := cmp.Or(advice[sqlState(err)], "the database does not answer, or with an error")
	return fmt.Errorf("%s: %w", sentence, err)
}

// newConnector checks the connection string. settings override the string's own. The error
// says no more than that it is wrong: lib/pq's own error may quote the password.
func newConnector(databaseURL string, settings map[string]string) (*pq.Connector, error) {
	cfg, err := pq.NewConfig(databaseURL)
	if err != nil || databaseURL == "" {
		return nil, usageError("DATABASE_URL: must be a PostgreSQL URL or connection string, special " +
			"characters in the password percent-encoded; several hosts as " +
			"postgres://user@host1,host2/hubs?port=5432,5433&target_session_attrs=read-write")
	}
	// A role may change the defaults of its own connections. A thief of its password could
	// make the server write to other tables, or acknowledge what is not on disk. These two are
	// PostgreSQL's own defaults; DATABASE_URL may have others.
	runtime := map[string]string{"search_path": `"$user", public`, "synchronous_commit": "on"}
	for name, value := range cfg.Runtime {
		runtime[strings.ToLower(name)] = value // PostgreSQL ignores the letter case
	}
	maps.Copy(runtime, settings)
	cfg.Runtime = runtime
	return pq.NewConnectorConfig(cfg)
}

// migrate applies schema.sql, however long its indexes take.
func migrate(ctx context.Context) error {
	connector, err := newConnector(os.Getenv("DATABASE_URL"), nil)
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	if _, err := db.ExecContext(ctx, schema); err != nil {
		return explainDBError(err)
	}
	fmt.Println("the tables are up to date")
	return nil
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
// been done all the same: the connection may have broken after the statement. So we never send a
// write again (D1; for what the driver does, see SECURITY.md, Deviations).
//
// A read whose connection turns out to be dead is tried once more on a new one, unless scan has
// had a row already. So once the database is back after a crash, no read fails (D5).
//
// Expensive statements never take all connections (H6). They take their own slot first, so that
// one that waits holds no connection.
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

// takeSlot takes a slot, or gives up after dbTimeout: the wait is bounded, then comes a 503 (D2).
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
		// If another request was first, fresh is not used again.
		prepared, _ = st.statements.LoadOrStore(q.text, fresh)
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

// dropIdle closes the idle connections: when one is dead, the others are too, mostly. database/sql
// has no call for it, but closes them when there may be none.
//
// Only one call at a time: SetMaxIdleConns closes a list that shares its array with the pool's.
// If another call let the pool grow meanwhile, it would close a connection that is in use.
func (st *store) dropIdle() {
	if !st.dropping.TryLock() {
		return
	}
	defer st.dropping.Unlock()
	st.db.SetMaxIdleConns(0)
	st.db.SetMaxIdleConns(poolSize)
}

// isConnectionGone reports whether a connection was closed or reset under a statement. Timeouts
// and refused new connections do not count.
func isConnectionGone(err error) bool {
	broken, ok := errors.AsType[*net.OpError](err)
	return ok && broken.Op != "dial" && !broken.Timeout()
}

// outageClasses are the errors of PostgreSQL (manual, appendix A) that mean that it can't
// serve now. Other errors come from a bug, or from a wrong set-up.
var outageClasses = []string{
	"08", // connections
	"53", // resources
	"57", // intervention by an operator, or by statement_timeout
	"58", // the system
}

// staleClasses are those of a connection that can't be used any more.
var staleClasses = []string{
	"0A", // a prepared statement, since a column has another type now
	"25", // transactions: we are connected to a standby, which takes no writes
}

// classifyDBError turns the errors of a database that is out of reach into a 503:
//
//   - every error that is not PostgreSQL's own,
//   - every error that ends or refuses the connection (FATAL),
//   - the classes above.
//
// So a database that is away gives nobody a session, and takes none away (Z2).
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
	class := string(dbErr.Code.Class())
	if slices.Contains(staleClasses, class) {
		st.dropIdle() // this connection, too: it is idle again
		return unavailable(err)
	}
	if dbErr.Fatal() || slices.Contains(outageClasses, class) {
		return unavailable(err)
	}
	return err
}

// sqlState returns the SQLSTATE of PostgreSQL's error, or "" if err is none.
func sqlState(err error) string {
	dbErr, ok := errors.AsType[*pq.Error](err)
	if !ok {
		return ""
	}
	return string(dbErr.Code)
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

// Read sees to it that no write is done twice, and gives up a hung PostgreSQL after dbTimeout
// (D1).
//
// It never returns io.EOF. For io.EOF, lib/pq reports a bad connection, and database/sql then
// sends the statement again, even a write. (With TLS, crypto/tls reports an orderly close as
// io.EOF itself. But before it closes, PostgreSQL sends a FATAL error.)
//
// It closes a connection whose read failed. If an answer broke off after an error, lib/pq would
// use the connection again, and take the late rest of that answer for the answer to the next
// statement.
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
