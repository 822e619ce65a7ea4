package main

// The store: PostgreSQL through database/sql. When the database fails, a
// request gets this:
//
//	no connection is free         503 after slotTimeout
//	a statement runs too long     503 after statementTimeout
//	PostgreSQL does not answer    503: the socket times out (deadlineConn)
//	PostgreSQL reports an error   503 or 500 (classify)
//	a connection is dead          nothing, if it was idle: another one is taken
//
// lib/pq reports a dead connection as driver.ErrBadConn. Then database/sql
// sends the statement again on another one, but it never does so on a
// *sql.Conn. So reads run on the pool, and each write on a *sql.Conn that has
// just answered.

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/lib/pq"
)

//go:embed schema.sql
var schema string

const (
	poolSize         = 8               // connections; on two cores, 16 served no more requests
	slotTimeout      = time.Second     // longest wait for a connection
	statementTimeout = time.Second     // after which PostgreSQL cancels a statement
	dbTimeout        = 2 * time.Second // for each look-up, dial, read and write of a socket
)

var serverSettings = map[string]string{
	"statement_timeout": fmt.Sprint(statementTimeout.Milliseconds()),
	// Plan each statement once (a list then takes 54 µs instead of 79), and use
	// the indexes even while a table is small.
	"plan_cache_mode": "force_generic_plan",
	"enable_seqscan":  "off",
}

// The methods of a store take no context, because each read with one starts two
// goroutines, which cost 5 % of a request's processor time.
type store struct {
	db         *sql.DB
	slots      chan struct{} // one element for each statement under way
	statements sync.Map      // text of a read → *sql.Stmt, prepared at its first use
}

func openStore(databaseURL string) (*store, error) {
	connector, err := newConnector(databaseURL, serverSettings)
	if err != nil {
		return nil, err
	}
	connector.Dialer(deadlineDialer{})
	st := &store{db: sql.OpenDB(connector), slots: make(chan struct{}, poolSize)}
	st.db.SetMaxOpenConns(poolSize)
	st.db.SetMaxIdleConns(poolSize) // with the default of 2, connections would come and go
	// After a failover, a read may go to the old primary for at most this time.
	st.db.SetConnMaxLifetime(time.Minute)
	if err := st.probeTables(); err != nil {
		return nil, explainDBError(err)
	}
	return st, nil
}

// probeTables returns an error if a table or a column can't be read. It reads
// no row.
func (st *store) probeTables() error {
	err := st.read(`select from
		(select user_id, email, permission, suspended, signed_out_at from users) u,
		(select user_id, version, accepted_at from terms_acceptances) t,
		(select file_id, user_id, name, content_type, size, created_at from files) f,
		(select `+hubColumns+`, name_lower from hubs) h
		where false`, nil)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	return err
}

// read runs a statement that changes nothing, and scans its only row. Without a
// row, it returns sql.ErrNoRows.
func (st *store) read(text string, args []any, dest ...any) error {
	if err := st.takeSlot(); err != nil {
		return err
	}
	defer st.freeSlot()
	rows, err := st.query(text, args)
	if err != nil {
		return err
	}
	return scanOne(rows, dest)
}

// list runs a statement that changes nothing, and calls scan for each row. Its
// statement may be sent again (D5).
func (st *store) list(text string, args []any, scan func(*sql.Rows) error) error {
	if err := st.takeSlot(); err != nil {
		return err
	}
	defer st.freeSlot()
	rows, err := st.query(text, args)
	if err != nil {
		return err
	}
	return scanAll(rows, scan)
}

func scanOne(rows *sql.Rows, dest []any) error {
	found := false
	err := scanAll(rows, func(rows *sql.Rows) error {
		found = true
		return rows.Scan(dest...)
	})
	if err == nil && !found {
		return sql.ErrNoRows
	}
	return err
}

// scanAll reads rows to the end, because an error can follow a row.
func scanAll(rows *sql.Rows, scan func(*sql.Rows) error) error {
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return classify(rows.Err())
}

// query prepares each text at its first use, which halves the cost of a read.
// No value is part of a text, so there are few.
func (st *store) query(text string, args []any) (*sql.Rows, error) {
	prepared, isPrepared := st.statements.Load(text)
	if !isPrepared {
		fresh, err := st.db.Prepare(text)
		if err != nil {
			return nil, classify(err)
		}
		prepared, _ = st.statements.LoadOrStore(text, fresh)
	}
	rows, err := prepared.(*sql.Stmt).Query(args...)
	if sqlState(err) == "0A000" { // the type of a column was changed
		st.statements.Delete(text)
	}
	return rows, classify(err)
}

func (st *store) takeSlot() error {
	select {
	case st.slots <- struct{}{}:
		return nil
	case <-time.After(slotTimeout):
		return unavailable(errors.New("all connections to the database are busy"))
	}
}

func (st *store) freeSlot() { <-st.slots }

// write is like read, for a statement that changes something. It returns
// errNotSent if PostgreSQL has not got the statement.
//
// A write must not be sent twice, because PostgreSQL may have committed it
// before its connection broke (D1). The context has no deadline. At a deadline,
// lib/pq would cancel the statement. If PostgreSQL was waiting for its standby,
// it would then report success.
func (st *store) write(text string, args []any, dest ...any) error {
	if err := st.takeSlot(); err != nil {
		return fmt.Errorf("%w: %w", errNotSent, err)
	}
	defer st.freeSlot()
	conn, err := st.writableConn()
	if err != nil {
		return fmt.Errorf("%w: %w", errNotSent, classify(err))
	}
	defer conn.Close()
	rows, err := conn.QueryContext(context.Background(), text, args...)
	if err != nil {
		return classify(err)
	}
	return scanOne(rows, dest)
}

var errNotSent = errors.New("not sent")

// writableConn returns a connection that has just answered that it can write.
// It drops those that are dead or whose server has become a standby. This costs
// each write a round trip.
func (st *store) writableConn() (*sql.Conn, error) {
	ctx := context.Background()
	started := time.Now()
	var lastErr error
	for tries := 0; tries <= poolSize && time.Since(started) < dbTimeout; tries++ {
		conn, err := st.db.Conn(ctx)
		if err != nil {
			return nil, err
		}
		var isReadOnly string
		err = conn.QueryRowContext(ctx, "show transaction_read_only").Scan(&isReadOnly)
		if err == nil && isReadOnly == "off" {
			return conn, nil
		}
		lastErr = cmp.Or(err, errors.New("the database is read-only"))
		conn.Raw(func(any) error { return driver.ErrBadConn }) // database/sql closes the connection
		conn.Close()
	}
	return nil, lastErr
}

// orNotFound turns a missing row into a 404.
func orNotFound(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return errNotFound
	}
	return err
}

// endedIfUserGone returns a 401 if the user of a write was deleted meanwhile.
func endedIfUserGone(err error) error {
	if sqlState(err) == "23503" { // foreign_key_violation
		return unauthenticated("ended")
	}
	return err
}

// sqlState returns PostgreSQL's code of an error (manual, appendix A), or "".
func sqlState(err error) string {
	dbErr, ok := errors.AsType[*pq.Error](err)
	if !ok {
		return ""
	}
	return string(dbErr.Code)
}

// outageClasses are the classes of SQLSTATEs whose cause may soon pass. All
// others mean a bug or a wrong setup.
var outageClasses = []string{
	"08", // connection
	"0A", // the type of a column was changed after its statement was prepared
	"25", // the server has become read-only
	"40", // serialization, deadlock
	"53", // resources
	"55", // a lock was not free in time
	"57", // operator, or statement_timeout
	"58", // system, such as a failed disk
}

// classify turns a failure of the database into a 503, so that nobody gets or
// loses a session through it (Z2). An error that PostgreSQL reports stays as it
// is, unless its cause may soon pass.
func classify(err error) error {
	if err == nil {
		return nil
	}
	dbErr, isReported := errors.AsType[*pq.Error](err)
	// Without a report, the connection is broken. FATAL means that PostgreSQL
	// refuses it.
	if !isReported || dbErr.Fatal() {
		return unavailable(err)
	}
	if slices.Contains(outageClasses, string(dbErr.Code.Class())) {
		return unavailable(err)
	}
	return err
}

// A deadlineDialer dials connections on which every read and write times out.
// lib/pq alone would wait for a hung PostgreSQL for ever.
type deadlineDialer struct{}

// Dial gives each address of a host name its share of dbTimeout.
func (deadlineDialer) Dial(network, address string) (net.Conn, error) {
	addresses := []string{address}
	host, port, err := net.SplitHostPort(address)
	if err == nil && network != "unix" {
		ctx, cancel := context.WithTimeout(context.Background(), dbTimeout)
		defer cancel()
		addresses, err = net.DefaultResolver.LookupHost(ctx, host)
		if err != nil {
			return nil, err
		}
		for i, ip := range addresses {
			addresses[i] = net.JoinHostPort(ip, port)
		}
	}
	var conn net.Conn
	for _, address := range addresses {
		conn, err = net.DialTimeout(network, address, dbTimeout/time.Duration(len(addresses)))
		if err == nil {
			return deadlineConn{conn}, nil
		}
	}
	return nil, err
}

// DialTimeout is called if DATABASE_URL sets connect_timeout, and ignores that.
func (d deadlineDialer) DialTimeout(network, address string, _ time.Duration) (net.Conn, error) {
	return d.Dial(network, address)
}

type deadlineConn struct{ net.Conn }

// Read closes the connection after any error, so that lib/pq can't take the
// late rest of one answer for the next. A reset becomes io.EOF, which lib/pq
// reports as driver.ErrBadConn.
func (c deadlineConn) Read(b []byte) (int, error) {
	c.SetReadDeadline(time.Now().Add(dbTimeout))
	n, err := c.Conn.Read(b)
	if err != nil {
		c.Close()
		if !os.IsTimeout(err) {
			err = io.EOF
		}
	}
	return n, err
}

func (c deadlineConn) Write(b []byte) (int, error) {
	c.SetWriteDeadline(time.Now().Add(dbTimeout))
	return c.Conn.Write(b)
}

// The configuration of the database, and commands.

var (
	databaseURLPattern = regexp.MustCompile(`^(postgres(ql)?://|[a-z_]+ *=)`)
	// libpq's form for several hosts, which lib/pq does not know
	portBeforeComma = regexp.MustCompile(`^[a-z]+://([^/?]*@)?[^/?@]*:[0-9]+,`)
)

// newConnector parses DATABASE_URL. It accepts only PostgreSQL's forms, because
// lib/pq would take the URL of another database for key=value, and send the
// password to localhost. It leaves out lib/pq's error, which may quote the
// password.
func newConnector(databaseURL string, settings map[string]string) (*pq.Connector, error) {
	cfg, err := pq.NewConfig(databaseURL)
	isKnownForm := databaseURLPattern.MatchString(databaseURL)
	if err != nil || !isKnownForm || portBeforeComma.MatchString(databaseURL) {
		return nil, usageError("DATABASE_URL: must be postgres://… or key=value …, special " +
			"characters in the password percent-encoded; several hosts as " +
			"postgres://user@host1,host2/hubs?port=5432,5433&target_session_attrs=read-write")
	}
	if cfg.Runtime == nil {
		cfg.Runtime = map[string]string{}
	}
	maps.Copy(cfg.Runtime, settings)
	cfg.BinaryParameters = true // a write needs one round trip less
	return pq.NewConnectorConfig(cfg)
}

// openForCommand sets no time limits, because building an index takes long.
func openForCommand(ctx context.Context) (*sql.Conn, error) {
	var settings settingReader
	databaseURL := settings.get("DATABASE_URL", "")
	connector, err := newConnector(databaseURL, map[string]string{"timezone": "UTC"})
	if settings != nil {
		return nil, errors.Join(settings...)
	}
	if err != nil {
		return nil, err
	}
	conn, err := sql.OpenDB(connector).Conn(ctx)
	if err != nil {
		return nil, explainDBError(err)
	}
	return conn, nil
}

func explainDBError(err error) error {
	const refusedSetting = "DATABASE_URL: the database, or a pooler before it, refuses a setting"
	advice := map[string]string{
		"08P01": refusedSetting,
		"42704": refusedSetting,
		"28000": "DATABASE_URL: the database refuses this user",
		"28P01": "DATABASE_URL: the database refuses this user or password",
		"42P01": "the database lacks the tables (run: hubs migrate)",
		"42703": "a table lacks a column of this version (CHANGELOG.md says how to upgrade)",
		"42501": "the database role lacks a right (migrate and user need the owner's DATABASE_URL)",
	}
	sentence := cmp.Or(advice[sqlState(err)], "the database can't be reached, or reported an error")
	return fmt.Errorf("%s: %w", sentence, err)
}

func migrate(ctx context.Context) error {
	conn, err := openForCommand(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, schema); err != nil {
		return explainDBError(err)
	}
	fmt.Println("the tables are up to date")
	return nil
}
