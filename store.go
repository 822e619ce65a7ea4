package main

// The store: PostgreSQL through database/sql. The statements stand beside the
// handlers that use them; here is what they share: the pool, its bounds in time,
// prepared statements, which errors mean "out of reach", and the health check.

import (
	"cmp"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/lib/pq"
)

//go:embed schema.sql
var schema string

const poolSize = 8                // connections, kept open
const dbTimeout = 2 * time.Second // a statement, a read or write on its socket, the wait for a connection

// store has no context parameters: its statements end by dbTimeout, whether or not
// the client waits. lib/pq would watch a context with one goroutine a statement,
// and dial a connection to cancel each time a client goes away.
type store struct {
	db         *sql.DB
	slots      chan struct{} // one a connection: bounds the wait, which database/sql does by context only
	statements sync.Map      // text → *sql.Stmt, prepared at first use, kept for the process
}

// openStore connects, with bounds in time, and checks that the schema is there.
func openStore(databaseURL string) (*store, error) {
	connector, err := newConnector(databaseURL, map[string]string{
		"statement_timeout": fmt.Sprint(dbTimeout.Milliseconds()), "timezone": "UTC",
		// limit and offset as parameters would be planned anew at each call
		// (measured: 79 µs against 54); every statement here is made for one plan.
		"plan_cache_mode": "force_generic_plan",
		// Each statement has an index that serves it, and is too short for the rest.
		"enable_seqscan": "off", "jit": "off", "max_parallel_workers_per_gather": "0",
	})
	if err != nil {
		return nil, err
	}
	connector.Dialer(deadlineDialer{})
	st := &store{db: sql.OpenDB(connector), slots: make(chan struct{}, poolSize)}
	st.db.SetMaxIdleConns(poolSize) // the default of 2 would open and close connections all the time
	if err = st.row("select count(*) from users, terms_acceptances, files, hubs_gathered_by_name('') where false",
		nil, new(int)); err != nil {
		st.db.Close()
		return nil, fmt.Errorf("the database does not answer, or lacks the schema (command migrate): %w", err)
	}
	return st, nil
}

// newConnector checks the connection string, whose own settings give way. Its complaint
// does not say more: lib/pq's may quote the password.
func newConnector(databaseURL string, settings map[string]string) (*pq.Connector, error) {
	cfg, err := pq.NewConfig(databaseURL)
	if err != nil || databaseURL == "" {
		return nil, configError("DATABASE_URL: must be a PostgreSQL URL or connection string")
	}
	cfg = cfg.Clone() // which always has a map Runtime
	maps.Copy(cfg.Runtime, settings)
	return pq.NewConnectorConfig(cfg)
}

// migrate applies schema.sql, however long its indexes take.
func migrate(databaseURL string) error {
	connector, err := newConnector(databaseURL, nil)
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	_, err = db.Exec(schema)
	return errors.Join(err, db.Close())
}

// row runs a statement and scans its only row; sql.ErrNoRows when there is none.
func (st *store) row(query string, args []any, dest ...any) error {
	missing := sql.ErrNoRows
	err := st.rows(query, args, func(rows *sql.Rows) error { missing = nil; return rows.Scan(dest...) })
	return cmp.Or(err, missing)
}

// rows runs a statement and calls scan for each row. Errors: unavailable, or what
// only a bug can cause. An error of a write may mean "not done" as well as "done":
// the connection may have broken after the statement.
func (st *store) rows(query string, args []any, scan func(*sql.Rows) error) error {
	select {
	case st.slots <- struct{}{}:
	case <-time.After(dbTimeout):
		return unavailable(errors.New("no free database connection"))
	}
	defer func() { <-st.slots }()

	prepared, ok := st.statements.Load(query)
	if !ok {
		stmt, err := st.db.Prepare(query)
		if err != nil {
			return reachable(err)
		}
		if prepared, ok = st.statements.LoadOrStore(query, stmt); ok {
			stmt.Close() // another request was first
		}
	}
	rows, err := prepared.(*sql.Stmt).Query(args...)
	if err != nil {
		return reachable(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err // a bug, and no matter of reach
		}
	}
	return reachable(rows.Err())
}

// reachable tells a database out of reach from a faulty statement. PostgreSQL's own errors
// are a matter of the statement, but for those that end the connection or refuse it
// (FATAL), and the classes (PostgreSQL manual, appendix A) of connections, resources,
// interventions and the system, and 25, of a standby that takes no writes.
func reachable(err error) error {
	refused, answered := errors.AsType[*pq.Error](err)
	switch {
	case err == nil:
		return nil
	case answered && refused.Code == "23503": // foreign key: the user was deleted meanwhile
		return errUnauthenticated
	case answered && !refused.Fatal() && !strings.Contains("08 25 53 57 58", string(refused.Code.Class())):
		return err
	}
	return unavailable(err)
}

// unavailable is the 503 of a database or a mail queue out of reach.
func unavailable(cause error) *problem {
	return &problem{Status: 503, Code: "unavailable", Detail: "Try again soon.", retryAfter: 2 * time.Second, cause: cause}
}

// pathID is the identifier in a path. What is not one is null to the database, and
// so names nothing.
func (x *exchange) pathID(name string) sql.Null[string] {
	id := x.r.PathValue(name)
	return sql.Null[string]{V: id, Valid: isUUID(id)}
}

type health struct {
	Status string `json:"status"`
}

func (h health) check() bool { return h.Status == "ok" }

// getHealth says whether the database answers. The 503 of one that does not is the
// store's.
func (s *server) getHealth(*exchange, nothing) (health, error) {
	return health{"ok"}, s.store.row("select 1", nil, new(int))
}

// deadlineDialer makes connections whose every read and write ends in time. Without
// it lib/pq waits for a hung PostgreSQL for ever, whatever a context says.
type deadlineDialer struct{}

func (d deadlineDialer) Dial(network, address string) (net.Conn, error) {
	return d.DialTimeout(network, address, dbTimeout)
}

// DialTimeout is what lib/pq calls where DATABASE_URL has a connect_timeout.
func (deadlineDialer) DialTimeout(network, address string, limit time.Duration) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, min(limit, dbTimeout))
	return deadlineConn{conn}, err
}

type deadlineConn struct{ net.Conn }

// Read hides io.EOF from lib/pq, which would call the connection bad, upon which
// database/sql sends the statement again: a write would be done twice. (Not guaranteed:
// below TLS an orderly close gets through to lib/pq. PostgreSQL says FATAL first.)
//
// A connection whose read failed is closed. lib/pq would use it again where the answer broke
// off after an error, and take the rest, when it comes, for the answer to the next statement.
func (c deadlineConn) Read(b []byte) (int, error) {
	c.SetReadDeadline(time.Now().Add(dbTimeout))
	n, err := c.Conn.Read(b)
	if err != nil {
		c.Close()
		err = &net.OpError{Op: "read", Net: "tcp", Err: errors.New(err.Error())}
	}
	return n, err
}

func (c deadlineConn) Write(b []byte) (int, error) {
	c.SetWriteDeadline(time.Now().Add(dbTimeout))
	return c.Conn.Write(b)
}
