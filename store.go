package main

// The store: PostgreSQL through database/sql. Handlers run statements through
// part 1 alone. When the database fails, a request gets this:
//
//	no connection is free         503 after slotTimeout
//	a statement runs too long     503 after statementTimeout
//	PostgreSQL does not answer    503: the socket times out (deadlineConn)
//	PostgreSQL reports an error   503 or 500 (classify)
//	a connection is dead          nothing, if it was idle: another one is taken
//
// Three things can't be mended from inside: an answer belongs to another
// statement (part 2), or the driver panics or does not return (part 3). Then
// failStop ends the process, and what runs it, such as systemd, starts it again.
//
// lib/pq reports a dead connection as driver.ErrBadConn. Then database/sql
// sends the statement again on another one, but it never does so on a
// *sql.Conn. So reads run on the pool, and each write on a *sql.Conn that has
// just answered.

import (
	"cmp"
	"context"
	"crypto/rand"
	"database/sql"
	"database/sql/driver"
	_ "embed"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lib/pq"
)

//go:embed schema.sql
var schema string

const (
	poolSize         = 8               // connections; on two cores, 16 served no more requests
	slotTimeout      = time.Second     // longest wait for a connection, or for a place among the searches
	statementTimeout = time.Second     // after which PostgreSQL cancels a statement
	dbTimeout        = 2 * time.Second // for each look-up, dial, read and write of a socket
	checkInterval    = time.Minute     // from a check of the sessions, after an error, to the next one

	// The process ends after more ticks of a driverCall than this, times the number
	// of hosts in DATABASE_URL. A paused machine misses ticks.
	hangTick  = 5 * time.Second
	hangTicks = 6
)

// serverSettings are set on each connection after it is made. As parameters of
// the connection, a pooler would refuse them or drop them.
var serverSettings = fmt.Sprintf(`set statement_timeout = %d;
	-- Plan each statement once (a list then takes 54 us instead of 79). Never read
	-- a whole table where an index will do, as PostgreSQL would while it is small.
	-- Compiling a plan can take a second.
	set plan_cache_mode = force_generic_plan; set enable_seqscan = off; set jit = off;
	-- A policy that hides rows is an error then, and not an answer without them.
	set row_security = off`, statementTimeout.Milliseconds())

// The methods of a store take no context, because each read with one starts two
// goroutines, which cost 5 % of a request's processor time.
type store struct {
	db         *sql.DB
	log        *slog.Logger
	slots      slots      // statements under way
	searches   slots      // those of them that may read a whole index
	statements sync.Map   // text of a read → *preparedRead, made at its first use
	checking   sync.Mutex // held from a check of the sessions until the next one may begin

	mu       sync.Mutex
	calls    map[*driverCall]bool // under way
	maxTicks int                  // of a call
}

func openStore(cfg pq.Config, log *slog.Logger) (*store, error) {
	st := &store{
		log:      log,
		slots:    make(slots, poolSize),
		searches: make(slots, maxSearches),
		calls:    map[*driverCall]bool{},
		maxTicks: hangTicks * (1 + len(cfg.Multi)),
	}
	st.db = sql.OpenDB(connector{cfg, st})
	st.db.SetMaxOpenConns(poolSize)
	st.db.SetMaxIdleConns(poolSize) // with the default of 2, connections would come and go
	// After a failover, a read may go to the old primary for at most this time.
	st.db.SetConnMaxLifetime(time.Minute)
	go st.watchCalls()
	err := st.detectPooler()
	if err == nil {
		err = st.probe()
	}
	if sqlState(err) == "42P01" { // undefined_table
		var searchPath string
		st.read("select current_setting('search_path')", nil, &searchPath)
		return nil, fmt.Errorf("the database lacks the tables in the search_path of its role, %s (run "+
			"hubs migrate, which names its schema, then deploy/roles.sql): %w", searchPath, err)
	}
	if err != nil && !errors.Is(err, errMissingRights) {
		err = explainDBError(err)
	}
	return st, err
}

// Part 1: reads and writes.

// read runs a statement that changes nothing, and scans its only row. Without a
// row, it returns sql.ErrNoRows. The statement may be sent again (D5).
func (st *store) read(text string, args []any, dest ...any) error {
	found := false
	err := st.list(text, args, func() []any {
		found = true
		return dest
	})
	if err == nil && !found {
		return sql.ErrNoRows
	}
	return err
}

// list is like read, for any number of rows, each with targets of its own.
func (st *store) list(text string, args []any, targets func() []any) error {
	if !st.slots.take(slotTimeout) {
		return errBusy
	}
	defer st.slots.free()
	defer st.end(st.begin()) // part 3 watches the time between
	rows, err := st.query(text, args)
	if err != nil {
		return err
	}
	defer rows.close()
	for rows.next() {
		if err := rows.scan(targets()); err != nil {
			return err
		}
	}
	return classify(rows.rows.Err()) // an error can follow a row
}

var (
	errBusy          = unavailable(errors.New("all connections to the database are busy"))
	errNotSent       = errors.New("not sent")
	errMissingRights = errors.New("the database role lacks rights (run deploy/roles.sql)")
)

// write is like read, for a statement that changes something. It must not be sent
// twice, because PostgreSQL may have committed it before its connection broke
// (D1). With errNotSent, PostgreSQL has not got it.
func (st *store) write(text string, args []any, dest ...any) error {
	if !st.slots.take(slotTimeout) {
		return fmt.Errorf("%w: %w", errNotSent, errBusy)
	}
	defer st.slots.free()
	defer st.end(st.begin())
	conn, err := st.writableConn()
	if err != nil {
		return fmt.Errorf("%w: %w", errNotSent, classify(err))
	}
	defer conn.Close()
	return st.writeOn(conn, text, args, dest)
}

// writeOn sets no deadline: at one, lib/pq would cancel the statement, and PostgreSQL
// would report success if it was waiting for its standby, the copy that takes over.
func (st *store) writeOn(conn *sql.Conn, text string, args, dest []any) error {
	defer st.catch()
	rows, err := conn.QueryContext(context.Background(), text, args...)
	if err != nil {
		return classify(err)
	}
	if !rows.Next() {
		return cmp.Or(classify(rows.Err()), sql.ErrNoRows)
	}
	err = rows.Scan(dest...)
	if closeErr := rows.Close(); err == nil { // an error can follow the row
		err = classify(closeErr)
	}
	return err
}

// writableConn returns a connection that has just answered that it can write, which
// costs a round trip. It drops those that are dead or lead to a standby.
func (st *store) writableConn() (*sql.Conn, error) {
	defer st.catch()
	started := time.Now()
	var lastErr error
	for tries := 0; tries <= poolSize && time.Since(started) < dbTimeout; tries++ {
		conn, err := st.db.Conn(context.Background())
		if err != nil {
			return nil, err
		}
		var isReadOnly string
		err = conn.QueryRowContext(context.Background(), "show transaction_read_only").Scan(&isReadOnly)
		if err == nil && isReadOnly == "off" {
			return conn, nil
		}
		lastErr = cmp.Or(err, errors.New("the database is read-only"))
		drop(conn)
	}
	return nil, lastErr
}

// drop closes a connection for good.
func drop(conn *sql.Conn) {
	conn.Raw(func(any) error { return driver.ErrBadConn })
	conn.Close()
}

// Part 2: a pooler in transaction mode (D6). It lends a session a connection for
// each transaction, perhaps one on which another session has prepared something
// else under the same name. Then an answer belongs to another statement.

// A preparedRead is prepared once a connection, which halves the cost of a read. The first
// column of each row is its number, made of the text, so that all servers agree. A row with
// another number belongs to another statement. An answer without rows has no number.
type preparedRead struct {
	statement  *sql.Stmt
	number     int64
	parameters int
}

func (st *store) prepare(text string) (*preparedRead, error) {
	if known, isKnown := st.statements.Load(text); isKnown {
		return known.(*preparedRead), nil
	}
	number := int64(crc32.ChecksumIEEE([]byte(text)))
	numbered := strings.Replace(text, "select ", fmt.Sprintf("select %d::bigint, ", number), 1)
	statement, err := st.db.Prepare(numbered)
	if err != nil {
		return nil, err
	}
	p := &preparedRead{statement: statement, number: number}
	for strings.Contains(text, fmt.Sprint("$", p.parameters+1)) {
		p.parameters++
	}
	first, isKnown := st.statements.LoadOrStore(text, p)
	if isKnown { // another request was faster
		statement.Close()
	}
	return first.(*preparedRead), nil
}

// sessionErrors are signs of another session's connection: no such prepared
// statement, one of this name, a wrong number of parameters.
var sessionErrors = []string{"26000", "42P05", "08P01"}

// query runs a read. A text begins with "select " and a column, and has no values.
func (st *store) query(text string, args []any) (*numberedRows, error) {
	defer st.catch()
	rows := &numberedRows{store: st}
	prepared, err := st.prepare(text)
	if err == nil {
		if len(args) != prepared.parameters { // our bug; database/sql's error looks like an outage
			return nil, fmt.Errorf("got %d arguments for %q", len(args), text)
		}
		rows.want = prepared.number
		rows.rows, err = prepared.statement.Query(args...)
	}
	switch dbErr, _ := errors.AsType[*pq.Error](err); {
	case dbErr == nil:
	case dbErr.Code == "0A000": // the type of a column was changed
		st.statements.Delete(text)
	case slices.Contains(sessionErrors, string(dbErr.Code)) && !dbErr.Fatal():
		go st.detectPoolerAgain()
	}
	if err != nil {
		return nil, classify(err)
	}
	return rows, nil
}

// numberedRows are the rows of a read, with calls of the driver that catch its panics.
type numberedRows struct {
	store     *store
	rows      *sql.Rows
	want, got int64 // number of a row
	dest      []any // reused, because a list allocates enough
}

func (r *numberedRows) next() bool {
	defer r.store.catch()
	return r.rows.Next()
}

// scan ends the process if the number of a row is wrong.
func (r *numberedRows) scan(targets []any) error {
	r.dest = append(append(r.dest[:0], &r.got), targets...)
	columns, _ := r.rows.Columns()   // can't fail: the rows are open
	if len(columns) != len(r.dest) { // our bug, at which Scan would not look at the number
		return fmt.Errorf("got %d targets for the columns %q", len(targets), columns[1:])
	}
	err := r.rows.Scan(r.dest...)
	if r.got != r.want { // or Scan has failed at the columns of another statement
		r.store.failStop(badPooler, "error", err)
	}
	return err
}

func (r *numberedRows) close() {
	defer r.store.catch()
	r.rows.Close()
}

// detectPooler ends the process if it finds such a pooler before the database.
//
//  1. Each of up to poolSize sessions sets a mark.
//  2. Each session, the last one first, begins a transaction, in which it looks
//     for its mark. None ends its transaction before all have looked.
//
// Of three sessions on connections A, B and C, a pooler that lends the next one has put
// a mark on each, and session 3 looks at A. One that lends the last one used has put
// all on A, where the third stays, and session 2 looks at B. With one connection, the
// second transaction waits in vain, which is an error.
func (st *store) detectPooler() error {
	marks := map[*sql.Conn]string{}
	var conns []*sql.Conn
	for range poolSize {
		if !st.slots.take(slotTimeout) {
			break
		}
		defer st.slots.free()
		conn, mark, err := st.markedConn()
		if err != nil && len(conns) == 0 {
			return err
		}
		if err != nil { // a pooler may have fewer
			break
		}
		defer conn.Close()
		marks[conn] = mark
		conns = append(conns, conn)
	}
	if len(conns) < 2 {
		st.log.Warn("not looked for a pooler in transaction mode: fewer than two connections were free")
	}
	for _, conn := range slices.Backward(conns) {
		tx, mark, err := st.findMark(conn)
		if err != nil {
			return err
		}
		defer st.rollback(tx)
		if mark != marks[conn] {
			st.failStop(badPooler)
		}
	}
	return nil
}

// detectPoolerAgain looks for a pooler at most once per checkInterval.
func (st *store) detectPoolerAgain() {
	if !st.checking.TryLock() {
		return
	}
	defer st.checking.Unlock()
	if err := st.detectPooler(); err != nil {
		st.log.Warn("not looked for a pooler in transaction mode", "error", err)
	}
	st.db.SetMaxIdleConns(0) // closes all idle connections, perhaps that of the error
	st.db.SetMaxIdleConns(poolSize)
	time.Sleep(checkInterval)
}

func (st *store) markedConn() (conn *sql.Conn, mark string, err error) {
	defer st.end(st.begin())
	defer st.catch()
	conn, err = st.db.Conn(context.Background())
	if err != nil {
		return nil, "", err
	}
	mark = rand.Text()
	_, err = conn.ExecContext(context.Background(), "select set_config('hubs.mark', $1, false)", mark)
	if err != nil {
		drop(conn)
		return nil, "", err
	}
	return conn, mark, nil
}

func (st *store) findMark(conn *sql.Conn) (tx *sql.Tx, mark string, err error) {
	defer st.end(st.begin())
	defer st.catch()
	tx, err = conn.BeginTx(context.Background(), &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return nil, "", err
	}
	err = tx.QueryRow("select coalesce(current_setting('hubs.mark', true), '')").Scan(&mark)
	if err != nil {
		tx.Rollback() // or Close would wait for it, for ever
	}
	return tx, mark, err
}

const badPooler = "an answer may belong to another statement: a pooler in transaction mode " +
	"stands before the database; DATABASE_URL must lead to PostgreSQL, or to a pooler in session mode"

// Part 3: a driver that panics or does not return (D7).

// failStop ends the process, even if writing the log blocks.
func (st *store) failStop(reason string, attrs ...any) {
	time.AfterFunc(time.Second, func() { os.Exit(1) })
	st.log.Error("the server ends: "+reason, attrs...)
	os.Exit(1)
}

// catch ends the process after a panic of the driver, which can leave a lock of database/sql
// held. Each call that reads what PostgreSQL sends is in a function that defers catch last, so
// it runs before what could wait for the lock. A panic in list's targets is our own bug.
func (st *store) catch() {
	if fault := recover(); fault != nil {
		st.failStop("the database, or what stands before it, has broken PostgreSQL's protocol, and "+
			"the driver has panicked", "error", fault, "at", panicFrames())
	}
}

func (st *store) rollback(tx *sql.Tx) {
	defer st.catch()
	tx.Rollback()
}

// A driverCall is a statement, or the making of a connection, that is under way.
// Deadlines bound all waiting for the database, but not the work that it can
// demand of the driver, such as any number of rounds of SCRAM.
type driverCall struct{ ticks int }

func (st *store) begin() *driverCall {
	st.mu.Lock()
	defer st.mu.Unlock()
	call := &driverCall{}
	st.calls[call] = true
	return call
}

func (st *store) end(call *driverCall) {
	st.mu.Lock()
	defer st.mu.Unlock()
	delete(st.calls, call)
}

func (st *store) watchCalls() {
	for range time.Tick(hangTick) {
		st.mu.Lock()
		for call := range st.calls {
			call.ticks++
			if call.ticks > st.maxTicks {
				st.failStop("a call of the database's driver does not return")
			}
		}
		st.mu.Unlock()
	}
}

// database/sql calls a connector on goroutines of its own, too.
type connector struct {
	cfg   pq.Config
	store *store
}

func (c connector) Driver() driver.Driver { return pq.Driver{} }

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	defer c.store.end(c.store.begin())
	defer c.store.catch()
	inner, err := pq.NewConnectorConfig(c.cfg)
	if err != nil {
		return nil, err
	}
	inner.Dialer(deadlineDialer{})
	conn, err := inner.Connect(ctx)
	if err != nil {
		return nil, err
	}
	_, err = conn.(driver.ExecerContext).ExecContext(context.Background(), serverSettings, nil)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// Part 4: what the database role may do.

// grantedRights are the rights of deploy/roles.sql on whole tables.
const grantedRights = `(values ('users', 'select'), ('terms_acceptances', 'select'),
	('terms_acceptances', 'insert'), ('hubs', 'select'), ('hubs', 'insert'), ('hubs', 'update'),
	('hubs', 'delete'), ('files', 'select'), ('files', 'insert')) granted (name, operation)`

// probe returns an error if a table or a column can't be read, as where a policy would
// hide rows (D8), or if a right is missing. It reads no row, but PostgreSQL checks each right.
func (st *store) probe() error {
	var missing string
	err := st.read(`select concat_ws(', ',
			(select string_agg(operation || ' on ' || name, ', ') from `+grantedRights+`
				where not has_table_privilege(name, operation)),
			case when not has_column_privilege('terms_acceptances', 'version', 'update')
				then 'update (version) on terms_acceptances' end,
			case when not has_function_privilege('hub_name_key(text)', 'execute')
				then 'execute on hub_name_key' end,
			case when exists (select from
				(select user_id, email, permission, suspended, signed_out_at from users) u,
				(select user_id, version, accepted_at from terms_acceptances) t,
				(select file_id, user_id, name, content_type, size, created_at from files) f,
				(select `+hubColumns+`, name_lower from hubs) h
				where false) then 'never' end)`, nil, &missing)
	if err == nil && missing != "" {
		return fmt.Errorf("%w: %s", errMissingRights, missing)
	}
	return err
}

// warnOfRights warns of what the role may do to the tables beyond
// deploy/roles.sql, on any of their columns, or what would let it do so. If it may
// write users, an SQL injection could make an administrator.
func (st *store) warnOfRights() {
	var rights string
	err := st.read(`select case when rolsuper then 'superuser' else concat_ws(', ',
			case when rolcreaterole then 'createrole' end, case when rolreplication then 'replication' end,
			case when rolbypassrls then 'bypassrls' end,
			(select string_agg('member of ' || rolname, ', ') from pg_roles r
				where pg_has_role(me.oid, r.oid, 'member') and r.oid <> me.oid),
			(select string_agg(distinct held, ', ' order by held desc) from unnest(array['users',
					'terms_acceptances', 'hubs', 'files', 'account_changes']) name, unnest(array['select',
					'insert', 'update', 'delete', 'truncate', 'references', 'trigger']) operation,
				concat(operation, ' on ', name) held, pg_attribute
				where attrelid = name::regclass and attnum > 0 and not attisdropped
				and (name, operation) not in (select * from `+grantedRights+`)
				and (name, operation, attname) <> ('terms_acceptances', 'update', 'version')
				and case when operation in ('delete', 'truncate', 'trigger')
					then has_table_privilege(name, operation)
					else has_column_privilege(name, attnum, operation) end)) end
		from pg_roles me where rolname = current_user`, nil, &rights)
	if err != nil {
		st.log.Warn("the rights of the database role could not be checked", "error", err)
	}
	if rights != "" {
		st.log.Warn("the database role has rights that the server does not need (run "+
			"deploy/roles.sql, and use its role)", "rights", rights)
	}
}

// Part 5: errors.

// sqlState returns PostgreSQL's code of an error (manual, appendix A), or "".
func sqlState(err error) string {
	dbErr, ok := errors.AsType[*pq.Error](err)
	if !ok {
		return ""
	}
	return string(dbErr.Code)
}

// outageClasses are the classes of SQLSTATEs whose cause may soon pass. Most
// others mean a bug or a wrong setup.
var outageClasses = []string{
	"0A", // the type of a column was changed after its statement was prepared
	"25", // the server has become read-only
	"28", // a password was changed: FATAL, but lib/pq knows the English word only
	"40", // serialization, deadlock
	"53", // resources
	"55", // a lock was not free in time
	"57", // operator, or statement_timeout
	"58", // system, such as a failed disk
}

// classify turns what may soon pass into a 503, so that nobody gets or loses a
// session through it (Z2): what PostgreSQL has not reported, because the
// connection could not be made or is broken, what it has reported as FATAL,
// because it refuses or ends the connection, and the outageClasses.
func classify(err error) error {
	if err == nil {
		return nil
	}
	dbErr, isReported := errors.AsType[*pq.Error](err)
	if !isReported || dbErr.Fatal() || slices.Contains(outageClasses, string(dbErr.Code.Class())) {
		return unavailable(err)
	}
	return err
}

// Part 6: the connection.

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

// Read closes the connection after any error, or lib/pq could take the late rest of one
// answer for the next. A reset becomes io.EOF, which lib/pq reports as driver.ErrBadConn.
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

// Part 7: DATABASE_URL, and the commands.

var (
	databaseURLPattern = regexp.MustCompile(`^(postgres(ql)?://|[a-z_]+ *=)`)
	// what lib/pq misreads: libpq's form for several hosts; a password with a slash
	misread = regexp.MustCompile(`^[a-z]+://([^/?]*@)?[^/?@]*:[0-9]+,|^[a-z]+://[^/?]*/[^?]*@`)
)

// database accepts only PostgreSQL's forms, because lib/pq would take
// the URL of another database for key=value, and send the password to
// localhost. It leaves out lib/pq's error, which may quote the password.
func (settings *settingReader) database() pq.Config {
	text := settings.secret("DATABASE_URL")
	cfg, err := pq.NewConfig(text)
	isKnownForm := databaseURLPattern.MatchString(text) && !misread.MatchString(text)
	settings.require(err == nil && isKnownForm, "DATABASE_URL: must be postgres://… or key=value …, "+
		"special characters in the password percent-encoded; several hosts as "+
		"postgres://user@host1,host2/hubs?port=5432,5433&target_session_attrs=read-write")
	cfg.SSLMode = cmp.Or(cfg.SSLMode, pq.SSLModeRequire) // lib/pq may default to prefer some day
	cfg.BinaryParameters = true                          // a write needs one round trip less
	return cfg
}

// isUnverified reports whether any machine on the way could answer in place of the
// database. Without sslrootcert, verify-ca may take a certificate of any public authority.
func isUnverified(cfg pq.Config) bool {
	if cfg.SSLMode == pq.SSLModeVerifyFull || cfg.SSLMode == pq.SSLModeVerifyCA && cfg.SSLRootCert != "" {
		return false
	}
	first := pq.ConfigMultihost{Host: cfg.Host, Hostaddr: cfg.Hostaddr}
	return slices.ContainsFunc(append(cfg.Multi, first), func(h pq.ConfigMultihost) bool {
		addr := h.Hostaddr
		if !addr.IsValid() {
			addr, _ = netip.ParseAddr(h.Host)
		}
		isSocket := strings.HasPrefix(h.Host, "/") || strings.HasPrefix(h.Host, "@")
		hasLocalName := !addr.IsValid() && (h.Host == "localhost" || isSocket) // hostaddr counts first
		return !hasLocalName && !addr.IsLoopback()
	})
}

// commandSettings take away time limits of the role or the cluster, because
// building an index takes long. Some versions of PostgreSQL lack some of them.
const commandSettings = `set timezone = 'UTC'; set row_security = off;
	select set_config(name, '0', false) from pg_settings where name in ('statement_timeout',
		'lock_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')`

// openForCommand lifts time limits, and names the command in account_changes.
func openForCommand(ctx context.Context, command string) (*sql.Conn, error) {
	var settings settingReader
	cfg := settings.database()
	if settings != nil {
		return nil, errors.Join(settings...)
	}
	cfg.ApplicationName = "hubs " + command
	connector, err := pq.NewConnectorConfig(cfg)
	if err != nil {
		return nil, err
	}
	conn, err := sql.OpenDB(connector).Conn(ctx)
	if err == nil {
		_, err = conn.ExecContext(ctx, commandSettings)
	}
	if err != nil {
		return nil, explainDBError(err)
	}
	return conn, nil
}

func explainDBError(err error) error {
	advice := map[string]string{
		"08P01": "DATABASE_URL: a pooler before the database refuses the connection",
		"3F000": "the database role has no schema to work in (create it, or set its search_path)",
		"42704": "DATABASE_URL: the database, or a pooler before it, refuses a setting",
		"28000": "DATABASE_URL: the database refuses this user",
		"28P01": "DATABASE_URL: the database refuses this user or password",
		"42P01": "the database lacks the tables (run: hubs migrate)",
		"42883": "the database lacks a function of this version (run: hubs migrate)",
		"42703": "a table lacks a column of this version (CHANGELOG.md says how to upgrade)",
		"42501": "the database role lacks a right, or a policy hides rows (migrate and user need the " +
			"DATABASE_URL of the tables' owner, serve that of deploy/roles.sql's role)",
	}
	sentence := cmp.Or(advice[sqlState(err)], "DATABASE_URL: the database can't be reached, or reported an error")
	return fmt.Errorf("%s: %w", sentence, err)
}

func migrate(ctx context.Context) error {
	conn, err := openForCommand(ctx, "migrate")
	if err != nil {
		return err
	}
	defer conn.Close()
	var place string
	_, err = conn.ExecContext(ctx, schema)
	if err == nil {
		err = conn.QueryRowContext(ctx, "select current_schema() || ', by ' || current_user").Scan(&place)
	}
	if err != nil {
		return explainDBError(err)
	}
	fmt.Println("the tables are up to date, in the schema " + place)
	return nil
}
