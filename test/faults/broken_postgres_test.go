package faults

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A brokenPostgres stands between a server and its PostgreSQL. It passes all messages, until Break
// makes it break PostgreSQL's protocol (manual, chapter "Frontend/Backend Protocol").
type brokenPostgres struct {
	proxy *faultProxy // for Drop

	mu        sync.Mutex
	flaw      *flaw
	statement string // see Break
	broken    int
	replaced  map[string]string // see Replace
}

// A flaw is a way to break the protocol.
type flaw struct {
	Name string
	// Kinds are types of messages, such as "DC". In each answer, the first message of one of these
	// types is broken. With "", the first message is, whatever its type.
	Kinds string
	// Break returns what is sent in place of a message. The body has neither type nor length.
	Break func(kind byte, body []byte) []byte
	Drips bool // after the broken message comes a byte a second, and nothing else
}

// message returns a message with its type and length.
func message(kind byte, body []byte) []byte {
	head := []byte{kind, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(head[1:], uint32(4+len(body)))
	return append(head, body...)
}

// withLength returns the beginning of a message: its type, and a length that need not be true.
func withLength(length uint32) func(kind byte, body []byte) []byte {
	return func(kind byte, body []byte) []byte {
		return append(binary.BigEndian.AppendUint32([]byte{kind}, length), body...)
	}
}

// instead returns messages with this body, whatever the type and the body of the true one.
func instead(kind byte, body string) func(byte, []byte) []byte {
	return func(byte, []byte) []byte { return message(kind, []byte(body)) }
}

const row = "DC" // of an answer without a row, the end is broken: it gets a row

// flaws are the known flaws of a protocol that a driver must stand, of which version 1.12.3 of lib/pq
// does not stand the most (CVE-2026-56868 to 56874).
var flaws = []flaw{
	{Name: "length 0", Break: withLength(0)},
	{Name: "length 3", Break: withLength(3)},
	{Name: "length of 50 MB", Break: withLength(50 << 20)}, // of 800 MB, eight servers would take 50 GB
	{Name: "length of 50 MB that drips", Break: withLength(50 << 20), Drips: true},
	{Name: "more values than the message has", Kinds: row, Break: instead('D', "\x00\x63")},
	{Name: "no values", Kinds: row, Break: instead('D', "\x00\x00")},
	{Name: "values of one byte", Kinds: row, Break: instead('D', "\x00\x63"+strings.Repeat("\x00\x00\x00\x01\x07", 99))},
	{Name: "value of negative length", Kinds: row, Break: instead('D', "\x00\x01\xff\xff\xff\x00")},
	{Name: "text without its end", Kinds: "SC", Break: func(kind byte, body []byte) []byte {
		return message(kind, bytes.TrimRight(body, "\x00"))
	}},
	{Name: "columns without their description", Kinds: "Tn1", Break: instead('T', "\x00\x05id")},
	{Name: "password hash of 2^31-1 rounds", Kinds: "R", Break: endlessHash},
	{Name: "plain text", Break: func(byte, []byte) []byte {
		return []byte("HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n400 Bad Request")
	}},
	{Name: "error in plain text", Break: func(byte, []byte) []byte {
		return []byte("Ecould not fork new process for connection\n\x00")
	}},
	{Name: "end out of order", Break: instead('Z', "I")},
	{Name: "end without a status", Kinds: "Z", Break: instead('Z', "")},
	{Name: "data after the end", Kinds: "Z", Break: func(kind byte, body []byte) []byte {
		return append(message(kind, body), message('D', []byte("\x00\x01\xff\xff\xff\xff"))...)
	}},
}

// endlessHash breaks the first message of SCRAM's conversation that has a number of rounds. It keeps
// the nonce, without which the client would end at once.
func endlessHash(kind byte, body []byte) []byte {
	before, _, hasRounds := bytes.Cut(body, []byte(",i="))
	if !hasRounds {
		return message(kind, body)
	}
	return message(kind, append(before, ",i=2147483647"...))
}

// newBrokenPostgres starts a brokenPostgres that runs until the test ends. It returns the URL that
// leads through it.
func newBrokenPostgres(t testing.TB, databaseURL string) (b *brokenPostgres, through string) {
	t.Helper()
	u, err := url.Parse(databaseURL)
	hubstest.Must(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	hubstest.Must(t, err)
	b = &brokenPostgres{replaced: map[string]string{}}
	target := u.Host
	b.proxy = newFaultProxy(t, ln.Addr().String())
	var work sync.WaitGroup
	work.Go(func() {
		for {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			work.Go(func() { b.serve(client, target) })
		}
	})
	t.Cleanup(func() { // before the proxy's, so it cuts the connections itself
		b.proxy.Cut()
		ln.Close()
		work.Wait()
	})
	u.Host = b.proxy.Addr
	return b, u.String()
}

// Break breaks every answer to a statement that contains the text, until Mend is called. The text ""
// is in every statement, and in the beginning of a connection, too; the text opening is only there.
func (b *brokenPostgres) Break(flaw flaw, statement string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.flaw, b.statement, b.broken = &flaw, statement, 0
}

// opening stands for the beginning of a connection, up to its first statement.
const opening = "(opening)"

// Mend makes the database keep its protocol again. Broken connections stay broken.
func (b *brokenPostgres) Mend() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.flaw = nil
}

// Broken returns how many answers have been broken since Break.
func (b *brokenPostgres) Broken() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.broken
}

// Drop closes all connections.
func (b *brokenPostgres) Drop() {
	b.proxy.Cut()
	b.proxy.Resume()
}

// Replace replaces a text in what clients send from now on by another of the same length.
func (b *brokenPostgres) Replace(old, text string) {
	if len(old) != len(text) {
		panic("the length of a message would not be true")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.replaced[old] = text
}

// A pgSession is one connection through a brokenPostgres.
type pgSession struct {
	b        *brokenPostgres
	client   net.Conn
	prepared map[string]string // texts of statements by their names

	mu      sync.Mutex
	current string // the text whose answer comes next
	isDone  bool   // the answer has been broken already
}

func (b *brokenPostgres) serve(client net.Conn, target string) {
	defer client.Close()
	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer server.Close()
	s := &pgSession{b: b, client: client, current: opening, prepared: map[string]string{}}
	go func() {
		s.passStatements(server)
		server.Close()
	}()
	s.passAnswers(server)
}

// passStatements passes what the client sends, and keeps the text whose answer the client waits for.
// The first message has no type. It asks for no TLS, because the tests' URLs say sslmode=disable.
func (s *pgSession) passStatements(server net.Conn) {
	for isFirst := true; ; isFirst = false {
		head := make([]byte, 5)
		if isFirst {
			head = head[1:]
		}
		_, err := io.ReadFull(s.client, head)
		if err != nil {
			return
		}
		body := make([]byte, binary.BigEndian.Uint32(head[len(head)-4:])-4)
		if _, err := io.ReadFull(s.client, body); err != nil {
			return
		}
		for old, text := range s.b.replacements() {
			body = bytes.ReplaceAll(body, []byte(old), []byte(text))
		}
		if !isFirst {
			s.note(head[0], body)
		}
		if _, err := server.Write(append(head, body...)); err != nil {
			return
		}
	}
}

func (b *brokenPostgres) replacements() map[string]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.replaced // only Replace changes it, before clients come
}

// note keeps the text of a statement: of a query, of a statement that is prepared, or of a prepared
// one that is bound.
func (s *pgSession) note(kind byte, body []byte) {
	texts := strings.Split(string(body), "\x00")
	s.mu.Lock()
	defer s.mu.Unlock()
	switch kind {
	case 'Q':
		s.current = texts[0]
	case 'P':
		s.current = texts[1]
		s.prepared[texts[0]] = texts[1]
	case 'B':
		s.current = s.prepared[texts[1]]
	default:
		return
	}
	s.isDone = false
}

// passAnswers passes what PostgreSQL sends, and breaks it where Break has asked for that.
func (s *pgSession) passAnswers(server net.Conn) {
	for {
		head := make([]byte, 5)
		if _, err := io.ReadFull(server, head); err != nil {
			return
		}
		body := make([]byte, binary.BigEndian.Uint32(head[1:])-4)
		if _, err := io.ReadFull(server, body); err != nil {
			return
		}
		sent := append(head, body...)
		flaw := s.due(head[0], body)
		if flaw != nil {
			sent = flaw.Break(head[0], body)
		}
		_, err := s.client.Write(sent)
		for flaw != nil && flaw.Drips && err == nil {
			time.Sleep(time.Second)
			_, err = s.client.Write([]byte{0})
		}
		if err != nil {
			return
		}
	}
}

// due returns the flaw with which a message is to be broken, or nil.
func (s *pgSession) due(kind byte, body []byte) *flaw {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	flaw := s.b.flaw
	if flaw == nil || s.isDone || !strings.Contains(s.current, s.b.statement) {
		return nil
	}
	isMeant := flaw.Kinds == "" || strings.IndexByte(flaw.Kinds, kind) >= 0
	isUnchanged := bytes.Equal(flaw.Break(kind, body), message(kind, body))
	if !isMeant || isUnchanged {
		return nil
	}
	s.isDone = true
	s.b.broken++
	return flaw
}
