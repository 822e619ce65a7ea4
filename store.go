package main

// The store: PostgreSQL through database/sql. Each statement is next to the handler that uses
// it. This file has what they share: the pool, prepared statements, and the handling of failures:
//
//	failure                      what a request gets                    where
//
//	no slot for a statement      503, after it has waited dbTimeout     takeSlot
//	                             (an expensive one waits for two slots, one after the other)
//	a statement runs too long    503, because PostgreSQL cancels it     statementTimeout
//	PostgreSQL does not answer   503, because the socket times out      deadlineConn
//	a connection has died        a read is retried once; a write: 503   store.rows
//	PostgreSQL reports an error  503 or 500                             classifyDBError

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
	"sync"
	"time"

	"github.com/lib/pq"
)

//go:embed schema.sql
var schema string

const (
	poolSize      = 8               // statements at a time (see slots), and connections kept open
	expensiveSize = poolSize / 2    // maximum number of expensive statements at a time
	dbTimeout     = 2 * time.Second // for each wait for a slot, dial, socket read or socket write

	// statementTimeout is shorter than dbTimeout, so that PostgreSQL cancels a slow statement
	// before the read of its answer times out. If the read does time out, classifyDBError drops
	// every idle connection.
	statementTimeout = dbTimeout - 200*time.Millisecond
)

// A store runs statements. Its methods take no context: dbTimeout bounds each step of a
// statement, even after the client has gone. With a context, lib/pq would start a goroutine for
// each statement, and would dial another connection to cancel it whenever a client disconnects.
type store struct {
	db             *sql.DB
	slots          chan struct{} // holds one element for each running statement (see takeSlot)
	expensiveSlots chan struct{} // holds one element for each running expensive statement
	statements     sync.Map      // text → *sql.Stmt, prepared at first use and kept
	dropping       sync.Mutex    // held while dropIdle runs
}

// A statement is an SQL statement with its arguments.
type statement struct {
	text      string
	args      []any
	retry     bool // readOnly: it may be sent twice
	expensive bool // at most expensiveSize of these run at a time
}

// readOnly returns a statement that changes nothing.
func readOnly(text string, args ...any) statement {
	return statement{text: text, args: args, retry: true}
}

// readWrite returns a statement that may change something, so it is never sent twice.
func readWrite(text string, args ...any) statement { return statement{text: text, args: args} }

// openStore connects to the database and checks that the tables can be read.
func openStore(databaseURL string) (*store, error) {
	connector, err := newConnector(databaseURL, map[string]string{
		"statement_timeout": fmt.Sprint(statementTimeout.Milliseconds()),
		"timezone":          "UTC",
		// Plan each statement once. Otherwise PostgreSQL would plan a list again at each call,
		// because of its limit and offset (79 µs a call instead of 54).
		"plan_cache_mode": "force_generic_plan",
		// Every statement of a request has a suitable index. Its plan must use it even if it is
		// made while a table is small. All are too short to gain from compilation or parallel
		// workers.
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
	// With the default of 2, connections would be opened and closed all the time.
	st.db.SetMaxIdleConns(poolSize)
	if err := st.checkTables(); err != nil {
		st.db.Close()
		return nil, explainDBError(err)
	}
	return st, nil
}

// checkTables returns an error if the tables can't be read: the database is unavailable, a column
// is missing, or the right to read or the search_path has changed. Its statement names the columns
// that requests use. PostgreSQL checks that each exists and may be read, but reads no row, because
// of "where false".
func (st *store) checkTables() error {
	_, err := st.row(readOnly(`select from
		(select user_id, email, permission, suspended, signed_out_at from users) u,
		(select user_id, version, accepted_at from terms_acceptances) t,
		(select file_id, user_id, name, content_type, size, created_at from files) f,
		(select ` + hubColumns + `, name_lower from hubs) h
		where false`))
	return err
}

// warnOfDatabaseRights logs a warning if the database role may change accounts, because an SQL
// injection could then create an administrator. deploy/roles.sql creates a role that may not.
// It also warns if the query fails.
func (s *server) warnOfDatabaseRights() {
	if s.cfg.env == envLocal {
		return
	}
	var mayWrite bool
	_, err := s.store.row(readOnly(`select has_any_column_privilege('users', 'insert, update')
		or has_table_privilege('users', 'delete')`), &mayWrite)
	if err != nil {
		s.log.Warn("the database role could not be checked", "error", err)
	}
	if mayWrite {
		s.log.Warn("the database role may write users: use the role of deploy/roles.sql")
	}
}

// explainDBError adds to an error what an operator can do about it, for the usual mistakes in a
// setup or a command. The keys are SQLSTATE codes (PostgreSQL manual, appendix A).
func explainDBError(err error) error {
	advice := map[string]string{
		"28P01": "DATABASE_URL: the database refuses this user or password",
		"3D000": "DATABASE_URL: there is no such database",
		"42P01": "the database lacks the tables (run: hubs migrate)",
		"42703": "a table lacks a column of this version (CHANGELOG.md says how to upgrade)",
		"57014": "the database canceled a statement that took too long (a lock, many rows) or was interrupted",
		"42501": "the database role lacks a right (migrate and user need the owner's DATABASE_URL)",
		"23505": "there would be two users with the same address; nothing was changed",
		"23514": "the table users takes no such address or role (roles: member, admin)",
	}
	sentence := cmp.Or(advice[sqlState(err)],
		"the database can't be reached, or reported an error (a command may still have made its change)")
	return fmt.Errorf("%s: %w", sentence, err)
}

// newConnector parses the connection string. settings override the string's own settings. The
// error has no details, because lib/pq's error may quote the password.
func newConnector(databaseURL string, settings map[string]string) (*pq.Connector, error) {
	cfg, err := pq.NewConfig(databaseURL)
	if err != nil || databaseURL == "" {
		return nil, usageError("DATABASE_URL: must be a PostgreSQL URL or connection string, special " +
			"characters in the password percent-encoded; several hosts as " +
			"postgres://user@host1,host2/hubs?port=5432,5433&target_session_attrs=read-write")
	}
	// Each connection sets search_path and synchronous_commit to PostgreSQL's own defaults, unless
	// DATABASE_URL sets them. The defaults of the role could be other ones, by mistake or because
	// whoever has the role has changed them (docs/deploy.md, "A stolen database role"). Another
	// search_path leads to other tables, and without synchronous_commit the server acknowledges
	// writes that are not on disk.
	runtime := map[string]string{"search_path": `"$user", public`, "synchronous_commit": "on"}
	maps.Copy(runtime, cfg.Runtime)
	maps.Copy(runtime, settings)
	cfg.Runtime = runtime
	return pq.NewConnectorConfig(cfg)
}

// migrate applies schema.sql. It sets no time limit, because building an index can take long.
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

// row runs a statement that returns one row at most, and scans it into dest. If there is no row,
// found is false and dest is unchanged. If there is an error, found is false as well.
func (st *store) row(q statement, dest ...any) (found bool, err error) {
	err = st.rows(q, func(rows *sql.Rows) error {
		found = true
		return rows.Scan(dest...)
	})
	return found && err == nil, err
}

// rows runs a statement and calls scan for each row.
//
// Expensive statements never take all slots (H6). They take an expensive slot first, so that a
// waiting one holds no other slot.
//
// A read whose connection was dead is sent once more, on another connection (D5). A write is never
// sent again, because PostgreSQL may have committed it before the connection broke (D1).
// SECURITY.md has the rare exceptions of both.
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
	mayRetry := q.retry && !scanned // otherwise a write could be done, or a row scanned, twice
	if mayRetry && isConnectionGone(err) {
		st.dropIdle() // so that the second try gets no dead connection, except as said there
		_, err = st.run(q, scan)
	}
	return st.classifyDBError(err)
}

// takeSlot takes a slot. If none becomes free within dbTimeout, it returns a 503 (D2). The slots do
// what SetMaxOpenConns could do: with that, and without a context, a statement would wait for a
// connection without a time limit.
func takeSlot(slots chan struct{}) error {
	select {
	case slots <- struct{}{}:
		return nil
	case <-time.After(dbTimeout):
		return unavailable(errors.New("no free slot for a statement"))
	}
}

// errScan marks an error of a scan function: a bug in this program, not an outage.
var errScan = errors.New("scan")

// run runs a statement without a retry. scanned reports whether scan was called.
//
// It prepares each text at its first use and keeps the prepared statement. There are few texts,
// because no value is part of one. A *sql.Stmt belongs to no connection: database/sql prepares it
// again on each connection that it uses.
func (st *store) run(q statement, scan func(*sql.Rows) error) (scanned bool, err error) {
	prepared, ok := st.statements.Load(q.text)
	if !ok {
		fresh, err := st.db.Prepare(q.text)
		if err != nil {
			return false, err
		}
		// Another request may have stored the same text meanwhile. Then use its statement. Ours is
		// not closed: database/sql would hold the lock of the whole pool until PostgreSQL answers.
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

// orNotFound returns value, or a 404 if a statement found no row.
func orNotFound[T any](value T, found bool, err error) (T, error) {
	var none T
	if err != nil {
		return none, err
	}
	if !found {
		return none, errNotFound
	}
	return value, nil
}

// endedIfUserGone returns a 401 if a write failed because the user that it refers to was deleted
// while the request ran. It returns any other error unchanged.
func endedIfUserGone(err error) error {
	if sqlState(err) == "23503" { // foreign_key_violation
		return unauthenticated("ended")
	}
	return err
}

// sqlState returns the SQLSTATE of err, or "" if err does not come from PostgreSQL.
func sqlState(err error) string {
	dbErr, ok := errors.AsType[*pq.Error](err)
	if !ok {
		return ""
	}
	return string(dbErr.Code)
}

// outageClasses are the SQLSTATE classes (PostgreSQL manual, appendix A) of errors that mean that
// PostgreSQL can't serve now. Almost all errors of other classes come from a bug or a wrong setup.
var outageClasses = []string{
	"08", // connection failure
	"53", // insufficient resources
	"57", // intervention by an operator or by statement_timeout
	"58", // system error, such as a failed disk
}

// staleClasses are the SQLSTATE classes of errors that mean that a connection works, but is of no
// use to this program any more.
var staleClasses = []string{
	"0A", // feature not supported: a column of a prepared statement has changed its type
	"25", // invalid transaction state: this server has become read-only
}

// classifyDBError turns the errors of an unavailable database into a 503, so that nobody gets a
// session and nobody loses one meanwhile (Z2). It also closes the idle connections if they may be
// dead. Any other error stays as it is, and becomes a 500 unless the caller handles it.
func (st *store) classifyDBError(err error) error {
	if err == nil || errors.Is(err, errScan) { // errScan: a bug of this program
		return err
	}
	dbErr, isDBError := errors.AsType[*pq.Error](err)
	if !isDBError {
		// The connection is broken. (A bug such as a wrong number of arguments also gets here.)
		// Don't wait: if the database hangs, closing takes up to dbTimeout for each connection.
		go st.dropIdle()
		return unavailable(err)
	}
	class := string(dbErr.Code.Class())
	if slices.Contains(staleClasses, class) {
		// Wait: PostgreSQL answers, so closing is quick. This connection is idle again, so this
		// call closes it, too.
		st.dropIdle()
		return unavailable(err)
	}
	// FATAL means that PostgreSQL does not accept the connection. For a FATAL error during a
	// statement, lib/pq returns driver.ErrBadConn, which is not a *pq.Error.
	if dbErr.Fatal() || slices.Contains(outageClasses, class) {
		return unavailable(err)
	}
	return err
}

// The rest of this file makes up for what database/sql and lib/pq do not do.

// isConnectionGone reports whether the connection was closed or reset while a statement used it, so
// that a new one may help. Such an error is a *net.OpError: after a close, deadlineConn.Read makes
// it. isConnectionGone returns false for timeouts and for failures to dial, because another try
// would take as long again.
func isConnectionGone(err error) bool {
	broken, ok := errors.AsType[*net.OpError](err)
	return ok && broken.Op != "dial" && !broken.Timeout()
}

// dropIdle closes the idle connections, because if one is dead, the others most likely are too.
// database/sql has no method for this, but closes them when their maximum number is set to 0.
//
// Only one call runs at a time, because two could close a connection in use. SetMaxIdleConns(0)
// empties the list of idle connections, and then closes them out of the same array. If a second
// call ended meanwhile, the list could grow again and overwrite the array. So a second call returns
// at once. If the list is not empty yet, its caller may get a dead connection.
func (st *store) dropIdle() {
	if !st.dropping.TryLock() {
		return
	}
	defer st.dropping.Unlock()
	st.db.SetMaxIdleConns(0)
	st.db.SetMaxIdleConns(poolSize)
}

// deadlineDialer dials connections on which every read and write times out. Without it, lib/pq
// would wait forever for a hung PostgreSQL, even with a context.
type deadlineDialer struct{}

func (deadlineDialer) Dial(network, address string) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, dbTimeout)
	if err != nil {
		return nil, err
	}
	return deadlineConn{conn}, nil
}

// DialTimeout is called by lib/pq if DATABASE_URL or PGCONNECT_TIMEOUT sets connect_timeout. It
// ignores that time.
func (d deadlineDialer) DialTimeout(network, address string, _ time.Duration) (net.Conn, error) {
	return d.Dial(network, address)
}

type deadlineConn struct{ net.Conn }

// Read times out after dbTimeout, so a hung PostgreSQL can't block a request. Two more rules
// prevent unsafe behaviors of the driver (D1):
//
//   - Read never returns io.EOF. For io.EOF, lib/pq reports a bad connection, and database/sql then
//     sends the statement again, even a write. Read returns a *net.OpError instead, for which
//     store.rows decides. A FATAL error, which PostgreSQL sends before it closes, has the same
//     effect as io.EOF, and this can't prevent it: see SECURITY.md, Deviations.
//   - Read closes the connection after any error. If an answer broke off after an error message,
//     lib/pq would otherwise reuse the connection, and read the late rest of that answer as the
//     answer to the next statement.
func (c deadlineConn) Read(b []byte) (int, error) {
	c.SetReadDeadline(time.Now().Add(dbTimeout))
	n, err := c.Conn.Read(b)
	if err != nil {
		c.Close()
	}
	if errors.Is(err, io.EOF) {
		err = &net.OpError{Op: "read", Err: errors.New("closed by the database")}
	}
	return n, err
}

func (c deadlineConn) Write(b []byte) (int, error) {
	c.SetWriteDeadline(time.Now().Add(dbTimeout))
	return c.Conn.Write(b)
}
