package main

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	"hubs/internal/hubstest"
)

// isUnavailable reports whether an error is a 503 with a Retry-After.
func isUnavailable(err error) bool {
	answer, ok := errors.AsType[problem](err)
	return ok && answer.Status == 503 && answer.retryAfter > 0
}

// Z2: An error of a database that can't serve now becomes a 503. An error that a bug causes, such
// as a wrong statement, stays as it is and so becomes a 500, because trying again does not help.
func TestClassesOfDatabaseErrors(t *testing.T) {
	t.Parallel()
	connector, err := newConnector("postgres://nobody@127.0.0.1:1/none", nil)
	hubstest.Must(t, err)
	st := &store{db: sql.OpenDB(connector)} // connects only for a statement, so never here
	defer st.db.Close()

	outages := []error{
		net.ErrClosed,
		io.ErrUnexpectedEOF,
		os.ErrDeadlineExceeded,
		sql.ErrConnDone,
		// PostgreSQL refuses the connection: no right to connect, no such database.
		&pq.Error{Code: "28000", Severity: pqerror.SeverityFatal},
		&pq.Error{Code: "3D000", Severity: pqerror.SeverityFatal},
	}
	for _, code := range []pqerror.Code{
		"08006", // connection failure
		"0A000", // a column has changed its type
		"25006", // read only, because it is a standby
		"53100", // disk full
		"53300", // too many connections
		"57014", // statement timeout
		"57P01", // shut down
		"57P03", // starting up
		"58030", // I/O error
	} {
		outages = append(outages, &pq.Error{Code: code})
	}
	for _, outage := range outages {
		err := st.classifyDBError(fmt.Errorf("within: %w", outage))
		if !isUnavailable(err) || !errors.Is(err, outage) {
			t.Errorf("%v: got %v, want a 503 with this cause", outage, err)
		}
	}

	bugs := []error{
		fmt.Errorf("%w: %w", errScan, io.EOF), // scan does not take the type of a column
		nil,
	}
	for _, code := range []pqerror.Code{
		"22021", // a byte that is not valid in a text
		"23505", // a duplicate of a unique value
		"42601", // a syntax error
		"42P01", // no such table
		"XX000", // a bug of PostgreSQL
	} {
		bugs = append(bugs, &pq.Error{Code: code})
	}
	for _, bug := range bugs {
		if got := st.classifyDBError(bug); got != bug {
			t.Errorf("%v: got %v, want the same error", bug, got)
		}
	}
}

// D1: A read is retried only if its connection was closed or reset. It is not retried if the
// database hangs, which would take twice as long, or if the database refuses connections.
func TestWhichReadsAreTriedAgain(t *testing.T) {
	t.Parallel()
	during := func(operation string, err error) error {
		return &net.OpError{Op: operation, Err: err}
	}
	for _, gone := range []error{
		during("read", syscall.ECONNRESET),
		during("write", syscall.EPIPE),
		fmt.Errorf("prepare: %w", during("read", net.ErrClosed)),
	} {
		if !isConnectionGone(gone) {
			t.Errorf("isConnectionGone(%v): got false, want true", gone)
		}
	}

	for _, other := range []error{
		nil,
		during("read", os.ErrDeadlineExceeded), // the database hangs
		during("write", os.ErrDeadlineExceeded),
		during("dial", syscall.ECONNREFUSED),
		during("dial", os.ErrDeadlineExceeded),
		&pq.Error{Code: "57P01"},
		errScan,
	} {
		if isConnectionGone(other) {
			t.Errorf("isConnectionGone(%v): got true, want false", other)
		}
	}
}

// D1: If the database hangs, a read or a write on its connection ends after dbTimeout. A read that
// times out closes the connection, so that the late rest of an answer can't be taken for the answer
// to the next statement.
func TestHungDatabaseIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		time.AfterFunc(time.Minute, func() { ours.Close() }) // ends a call that has no deadline
		conn := deadlineConn{ours}
		for _, call := range []func([]byte) (int, error){conn.Write, conn.Read} {
			start := time.Now()
			_, err := call(make([]byte, 1))
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("got the error %v, want %v", err, os.ErrDeadlineExceeded)
			}
			if took := time.Since(start); took != dbTimeout {
				t.Errorf("got an error after %v, want it after %v", took, dbTimeout)
			}
		}
		theirs.SetWriteDeadline(time.Now().Add(time.Second))
		_, err := theirs.Write([]byte("late"))
		if !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("a late answer: got the error %v, want %v", err, io.ErrClosedPipe)
		}
	})
}

// D1: When the database closes a connection, the driver gets an error other than io.EOF. For
// io.EOF, it would report a bad connection, and database/sql would send the statement again, even a
// write.
func TestOrderlyEndIsAnError(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	theirs.Close()
	_, err := deadlineConn{ours}.Read(make([]byte, 1))
	if errors.Is(err, io.EOF) || !isConnectionGone(err) {
		t.Errorf("got the error %v, want another than io.EOF, for a connection that is gone", err)
	}
}

// newStoreWithoutDatabase returns a store whose slots are all free.
func newStoreWithoutDatabase() *store {
	return &store{
		slots:          make(chan struct{}, poolSize),
		expensiveSlots: make(chan struct{}, expensiveSize),
	}
}

// fill takes all free slots.
func fill(slots chan struct{}) {
	for len(slots) < cap(slots) {
		slots <- struct{}{}
	}
}

// runExpensive starts n expensive statements at once, each of which must end with a 503. It returns
// when all of them wait for a slot. wait waits until they have ended.
func runExpensive(t *testing.T, st *store, n int) (wait func()) {
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			err := st.rows(statement{text: "select 1", expensive: true}, nil)
			if !isUnavailable(err) {
				t.Errorf("got the error %v, want a 503", err)
			}
		})
	}
	synctest.Wait()
	return all.Wait
}

// H6: An expensive statement that waits for an expensive slot holds no connection.
func TestWaitingExpensiveStatementsHoldNoConnection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		st := newStoreWithoutDatabase()
		fill(st.expensiveSlots)
		wait := runExpensive(t, st, 2*poolSize)
		if got := len(st.slots); got != 0 {
			t.Errorf("got %d connections held, want 0", got)
		}
		wait()
	})
}

// H6: An expensive statement that gets no connection gives its expensive slot back. Otherwise,
// after one busy moment, every later expensive statement would be a 503.
func TestExpensiveStatementsGiveTheirTurnBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		st := newStoreWithoutDatabase()
		fill(st.slots)
		wait := runExpensive(t, st, expensiveSize)
		wait()
		if got := len(st.expensiveSlots); got != 0 {
			t.Errorf("got %d expensive slots taken, want 0", got)
		}
	})
}

// A lateConnector fails after dbTimeout.
type lateConnector struct{ driver.Connector }

func (lateConnector) Connect(context.Context) (driver.Conn, error) {
	time.Sleep(dbTimeout)
	return nil, io.EOF
}

// E1: /healthz is a 503 after dbTimeout, even if it gets a slot and then waits for the database.
func TestHealthIsAnsweredInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &server{store: newStoreWithoutDatabase()}
		fill(s.store.slots)
		s.store.db = sql.OpenDB(lateConnector{})
		defer s.store.db.Close()
		time.AfterFunc(dbTimeout/2, func() { <-s.store.slots })
		start := time.Now()
		_, err := s.getHealth(nil)
		if took := time.Since(start); !isUnavailable(err) || took > dbTimeout {
			t.Errorf("got the error %v after %v, want a 503 after at most %v", err, took, dbTimeout)
		}
		time.Sleep(dbTimeout) // the check ends
	})
}

// A slowConnector makes connections. Close waits until gate is closed for the first two of them.
type slowConnector struct {
	driver.Connector
	gate    chan struct{}
	made    int      // number of connections; the first has the number 1
	closing chan int // gets the number of each connection whose Close is called
}

func (c *slowConnector) Connect(context.Context) (driver.Conn, error) {
	c.made++
	return &slowConn{connector: c, number: c.made}, nil
}

// A slowConn is a connection of which only Close may be called.
type slowConn struct {
	driver.Conn
	connector *slowConnector
	number    int
}

func (c *slowConn) Close() error {
	c.connector.closing <- c.number
	if c.number <= 2 {
		<-c.connector.gate
	}
	return nil
}

// D5: While a call of dropIdle closes connections, another call does nothing. Otherwise database/sql
// would close connections that have just become idle, instead of those that were idle before.
func TestSecondDropIdleDoesNothing(t *testing.T) {
	t.Parallel()
	connector := &slowConnector{gate: make(chan struct{}), closing: make(chan int, 8)}
	st := &store{db: sql.OpenDB(connector)}
	defer st.db.Close()
	st.db.SetMaxIdleConns(poolSize)
	useTwo := func() { // uses two connections at once, then returns them to the pool
		one, err1 := st.db.Conn(t.Context())
		two, err2 := st.db.Conn(t.Context())
		hubstest.Must(t, errors.Join(err1, err2))
		one.Close()
		two.Close()
	}

	useTwo()
	var drop sync.WaitGroup
	drop.Go(st.dropIdle)
	<-connector.closing // of connection 1, which takes until gate is closed
	st.dropIdle()
	useTwo()
	close(connector.gate)
	drop.Wait()

	var closed []int
	for range len(connector.closing) {
		closed = append(closed, <-connector.closing)
	}
	if !slices.Contains(closed, 2) {
		t.Errorf("got the connections 1 and %v closed, want 2 closed, idle before the drop", closed)
	}
}
