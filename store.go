package main

// The store: PostgreSQL through database/sql. The statements stand beside the
// handlers that use them; here is what they share: the pool, its bounds in time,
// prepared statements, and which errors mean "out of reach".

import (
	"cmp"
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/lib/pq"
)

//go:embed schema.sql
var schema string

const (
	poolSize  = 8               // connections, kept open
	dbTimeout = 2 * time.Second // a statement, a read or write on its socket, the wait for a connection
)

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
	cfg, err := pq.NewConfig(databaseURL)
	if err != nil {
		return nil, errDatabaseURL
	}
	settings := map[string]string{
		"statement_timeout": fmt.Sprint(dbTimeout.Milliseconds()),
		"timezone":          "UTC",
		// limit and offset as parameters would be planned anew at each call
		// (measured: 79 µs against 54); every statement here is made for one plan.
		"plan_cache_mode": "force_generic_plan",
		// Each statement has an index that serves it, and is too short for the rest.
		"enable_seqscan": "off", "jit": "off", "max_parallel_workers_per_gather": "0",
	}
	for name, value := range cfg.Runtime { // what DATABASE_URL sets besides
		settings[name] = cmp.Or(settings[name], value)
	}
	cfg.Runtime = settings
	connector, err := pq.NewConnectorConfig(cfg)
	if err != nil {
		return nil, errDatabaseURL
	}
	connector.Dialer(deadlineDialer{&net.Dialer{Timeout: dbTimeout}})
	st := &store{db: sql.OpenDB(connector), slots: make(chan struct{}, poolSize)}
	st.db.SetMaxIdleConns(poolSize) // the default of 2 would open and close connections all the time
	var tables int
	if err = st.row("select count(*) from users, hubs, terms_acceptances, files where false", nil, &tables); err != nil {
		st.db.Close()
		return nil, fmt.Errorf("the database does not answer, or lacks the schema (command migrate): %w", err)
	}
	return st, nil
}

// errDatabaseURL does not say more: lib/pq's own error may quote the password.
const errDatabaseURL = configError("DATABASE_URL: must be a PostgreSQL URL or connection string")

// migrate applies schema.sql, however long its indexes take.
func migrate(databaseURL string) error {
	connector, err := pq.NewConnector(databaseURL)
	if err != nil || databaseURL == "" {
		return errDatabaseURL
	}
	db := sql.OpenDB(connector)
	_, err = db.Exec(schema)
	return errors.Join(err, db.Close())
}

// row runs a statement and scans its only row; sql.ErrNoRows when there is none.
func (st *store) row(query string, args []any, dest ...any) error {
	return st.with(query, func(ctx context.Context, stmt *sql.Stmt) error {
		return stmt.QueryRowContext(ctx, args...).Scan(dest...)
	})
}

// rows runs a statement and calls scan for each row.
func (st *store) rows(query string, args []any, scan func(*sql.Rows) error) error {
	return st.with(query, func(ctx context.Context, stmt *sql.Stmt) error {
		rows, err := stmt.QueryContext(ctx, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			if err := scan(rows); err != nil {
				return err
			}
		}
		return rows.Err()
	})
}

// with lends the prepared statement of a text, and a connection to run it on.
// Errors: sql.ErrNoRows, unavailable, or what only a bug can cause. An error of a
// write may mean "not done" as well as "done": the connection may have broken
// after the statement.
func (st *store) with(query string, use func(context.Context, *sql.Stmt) error) error {
	select {
	case st.slots <- struct{}{}:
	case <-time.After(dbTimeout):
		return unavailable(errors.New("no free database connection"))
	}
	defer func() { <-st.slots }()

	ctx := context.Background()
	prepared, ok := st.statements.Load(query)
	if !ok {
		stmt, err := st.db.PrepareContext(ctx, query)
		if err != nil {
			return reachable(err)
		}
		if prepared, ok = st.statements.LoadOrStore(query, stmt); ok {
			stmt.Close() // another request was first
		}
	}
	return reachable(use(ctx, prepared.(*sql.Stmt)))
}

// reachable tells a database out of reach from a faulty statement. PostgreSQL's
// own errors are a matter of the statement, but for the classes (PostgreSQL
// manual, appendix A) of connections, resources, interventions and the system.
func reachable(err error) error {
	if err == nil || errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if refused, ok := errors.AsType[*pq.Error](err); ok {
		switch refused.Code.Class() {
		case "08", "25", "53", "57", "58":
		default:
			return err
		}
	}
	return unavailable(err)
}

// deadlineDialer makes connections whose every read and write ends in time. Without
// it lib/pq waits for a hung PostgreSQL for ever, whatever a context says.
type deadlineDialer struct{ *net.Dialer }

func (d deadlineDialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := d.Dialer.DialContext(ctx, network, address)
	return deadlineConn{conn}, err
}

// DialTimeout completes pq.Dialer; lib/pq prefers DialContext.
func (d deadlineDialer) DialTimeout(network, address string, _ time.Duration) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

type deadlineConn struct{ net.Conn }

// Read hides io.EOF from lib/pq, which would call the connection bad, upon which
// database/sql sends the statement again: a write would be done twice.
func (c deadlineConn) Read(b []byte) (int, error) {
	c.SetReadDeadline(time.Now().Add(dbTimeout))
	n, err := c.Conn.Read(b)
	if err == io.EOF {
		err = &net.OpError{Op: "read", Net: "tcp", Err: io.ErrUnexpectedEOF}
	}
	return n, err
}

func (c deadlineConn) Write(b []byte) (int, error) {
	c.SetWriteDeadline(time.Now().Add(dbTimeout))
	return c.Conn.Write(b)
}
