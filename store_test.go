package main

import (
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// Z2: a 503 is for a database that can't serve now. A faulty statement is a bug, and no reason to
// try again.
func TestClassesOfDatabaseErrors(t *testing.T) {
	t.Parallel()
	connector, err := newConnector("postgres://nobody@127.0.0.1:1/none", nil)
	if err != nil {
		t.Fatal(err)
	}
	st := &store{db: sql.OpenDB(connector)} // it connects when it must, so never here
	defer st.db.Close()
	for name, test := range map[string]struct {
		err         error
		unavailable bool
	}{
		"connection failure":       {&pq.Error{Code: "08006"}, true},
		"a changed column type":    {&pq.Error{Code: "0A000"}, true},
		"a standby":                {&pq.Error{Code: "25006"}, true},
		"disk full":                {&pq.Error{Code: "53100"}, true},
		"too many connections":     {&pq.Error{Code: "53300"}, true},
		"statement timeout":        {&pq.Error{Code: "57014"}, true},
		"shut down":                {&pq.Error{Code: "57P01"}, true},
		"starting up":              {&pq.Error{Code: "57P03"}, true},
		"I/O error":                {&pq.Error{Code: "58030"}, true},
		"a role that is refused":   {&pq.Error{Code: "28000", Severity: pqerror.SeverityFatal}, true},
		"a database that is gone":  {&pq.Error{Code: "3D000", Severity: pqerror.SeverityFatal}, true},
		"closed":                   {net.ErrClosed, true},
		"cut off":                  {io.ErrUnexpectedEOF, true},
		"hung":                     {os.ErrDeadlineExceeded, true},
		"no connection":            {sql.ErrConnDone, true},
		"a byte that is no text":   {&pq.Error{Code: "22021"}, false},
		"a second row of its kind": {&pq.Error{Code: "23505"}, false},
		"a syntax error":           {&pq.Error{Code: "42601"}, false},
		"a table that is missing":  {&pq.Error{Code: "42P01"}, false},
		"an internal error":        {&pq.Error{Code: "XX000"}, false},
		"a row of another type":    {fmt.Errorf("%w: %w", errScan, io.EOF), false},
	} {
		got := st.classifyDBError(fmt.Errorf("within: %w", test.err))
		answer, ok := errors.AsType[problem](got)
		isUnavailable := ok && answer.Status == 503 && answer.retryAfter > 0
		if isUnavailable != test.unavailable {
			t.Errorf("%s: got %v, want a 503: %v", name, got, test.unavailable)
		}
		if !errors.Is(got, test.err) {
			t.Errorf("%s: got %v, want the cause in it", name, got)
		}
	}
	if err := st.classifyDBError(nil); err != nil {
		t.Errorf("no error: got %v", err)
	}
}

// D1: a read is tried again only after its connection was closed or reset. A database that hangs
// is not asked twice, which would take twice as long, nor is one that refuses connections.
func TestWhichReadsAreTriedAgain(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err  error
		want bool
	}{
		"none":               {nil, false},
		"reset":              {&net.OpError{Op: "read", Err: syscall.ECONNRESET}, true},
		"closed":             {&net.OpError{Op: "write", Err: syscall.EPIPE}, true},
		"wrapped":            {fmt.Errorf("prepare: %w", &net.OpError{Op: "read", Err: net.ErrClosed}), true},
		"hung at a read":     {&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, false},
		"hung at a write":    {&net.OpError{Op: "write", Err: os.ErrDeadlineExceeded}, false},
		"refused":            {&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, false},
		"dial without end":   {&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, false},
		"answer of another":  {errScan, false},
		"PostgreSQL's error": {&pq.Error{Code: "57P01"}, false},
	} {
		if got := isConnectionGone(test.err); got != test.want {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}

// D1: a database that says nothing any more, or reads nothing, is given up in time. After that
// the connection is closed: a late rest of the answer must not be taken for the answer to the
// next statement.
func TestHungConnectionEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for name, use := range map[string]func(net.Conn) (int, error){
			"read":  func(c net.Conn) (int, error) { return c.Read(make([]byte, 1)) },
			"write": func(c net.Conn) (int, error) { return c.Write([]byte("statement")) },
		} {
			ours, theirs := net.Pipe()
			conn := deadlineConn{ours}
			start := time.Now()
			_, err := use(conn)
			if !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != dbTimeout {
				t.Errorf("%s: got %v after %v, want an end after %v", name, err, time.Since(start), dbTimeout)
			}
			if name == "write" {
				continue
			}
			if _, err := theirs.Write([]byte("late")); !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("a late answer: got %v, want %v", err, io.ErrClosedPipe)
			}
		}
	})
}

// D1: the driver never sees io.EOF. It would take that for a connection on which the statement was
// not sent, and send it again.
func TestOrderlyEndIsAnError(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	theirs.Close()
	_, err := deadlineConn{ours}.Read(make([]byte, 1))
	if errors.Is(err, io.EOF) || !isConnectionGone(err) {
		t.Errorf("got %v, want the loss of the connection", err)
	}
}

// H6: an expensive statement that waits for its turn holds no connection. One that finds no
// connection gives its turn back.
func TestExpensiveStatementsTakeTurns(t *testing.T) {
	t.Parallel()
	for name, fill := range map[string]func(st *store) chan struct{}{
		"no turn":       func(st *store) chan struct{} { return st.expensiveSlots },
		"no connection": func(st *store) chan struct{} { return st.slots },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := &store{ // without a database: no statement gets as far
					slots:          make(chan struct{}, poolSize),
					expensiveSlots: make(chan struct{}, expensiveSize),
				}
				full := fill(st)
				for range cap(full) {
					full <- struct{}{}
				}
				var statements sync.WaitGroup
				for range 2 * poolSize {
					statements.Go(func() {
						err := st.rows(statement{text: "select 1", expensive: true}, nil)
						if answer, ok := errors.AsType[problem](err); !ok || answer.Status != 503 {
							t.Errorf("got %v, want a 503", err)
						}
					})
				}
				synctest.Wait()
				if name == "no turn" && len(st.slots) > 0 {
					t.Errorf("got %d connections held, want none", len(st.slots))
				}
				statements.Wait()
				if got := len(st.slots) + len(st.expensiveSlots); got != cap(full) {
					t.Errorf("got %d slots taken, want the %d of before", got, cap(full))
				}
			})
		})
	}
}
