package deploy

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"io"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// Types of HTTP/2's frames, and flags of a frame with headers (RFC 9113, section 6).
const (
	headersFrame  = 1
	resetFrame    = 3
	settingsFrame = 4

	endStream  = 1
	endHeaders = 4
)

// frame returns a frame of HTTP/2.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	head := []byte{0, byte(len(payload) >> 8), byte(len(payload)), kind, flags}
	return append(binary.BigEndian.AppendUint32(head, stream), payload...)
}

// cancelledRequests returns the frames of n requests, each cancelled at once. The streams have odd
// numbers from first on. flags are those of the headers: without endStream, a body would follow.
func cancelledRequests(flags byte, first uint32, n int) []byte {
	const authority = "api.example.com"
	const path = "/hubs"
	// HPACK (RFC 7541): :method GET, :scheme https and two literals, of :path and :authority.
	headers := append([]byte{0x82, 0x87, 0x04, byte(len(path))}, path...)
	headers = append(append(headers, 0x01, byte(len(authority))), authority...)
	cancel := []byte{0, 0, 0, 8}
	var frames bytes.Buffer
	for i := range uint32(n) {
		frames.Write(frame(headersFrame, flags, first+2*i, headers))
		frames.Write(frame(resetFrame, 0, first+2*i, cancel))
	}
	return frames.Bytes()
}

// dialHTTP2 opens a connection and begins HTTP/2 on it. It drops all that the proxy sends.
func (p *frontProxy) dialHTTP2(address string) (*tls.Conn, error) {
	config := &tls.Config{ServerName: "api.example.com", NextProtos: []string{"h2"}}
	conn, err := tls.DialWithDialer(dialer(address), "tcp", p.addr, config)
	if err != nil {
		return nil, err
	}
	conn.SetDeadline(time.Now().Add(2 * hubstest.Patience))
	io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	conn.Write(frame(settingsFrame, 0, 0, nil))
	go io.Copy(io.Discard, conn)
	return conn, nil
}

// H8: an address that begins requests by HTTP/2 and cancels each at once, which costs it little, can
// begin some 1,200 a second. Only so many reach the server or the log, whether it keeps one
// connection or opens a new one again and again. Others are served meanwhile.
func TestCancelledRequestsAreBounded(t *testing.T) {
	cases := map[string]struct {
		flags         byte
		perConnection int
	}{
		"one connection":    {endHeaders | endStream, 1 << 20},
		"many connections":  {endHeaders | endStream, 500}, // nginx closes one after 1,000 requests
		"unfinished bodies": {endHeaders, 500},
	}
	forEachProxy(t, func(t *testing.T, engine string) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxy(t, engine, s.Addr)
		member := p.member(s, "member")
		for name, c := range cases {
			const total, enough = 200_000, 100
			address := newAddress()
			began := time.Now()
			sent, refused := 0, 0
			for sent < total && refused < enough {
				conn, err := p.dialHTTP2(address)
				if err != nil {
					refused++
					continue
				}
				const batch = 50
				for n := 0; n < c.perConnection && sent < total; n += batch {
					_, err := conn.Write(cancelledRequests(c.flags, uint32(2*n+1), batch))
					if err != nil { // the proxy has closed the connection
						break
					}
					sent += batch
				}
				conn.NetConn().Close()
			}
			// Twice as many as in a second, since a second begins at any time.
			bound := 1200 * (2 + int(time.Since(began).Seconds()))
			member.Get("/hubs").Want(t, 200)

			// HAProxy logs some requests in both of its steps.
			steps := map[bool]int{}
			for _, line := range p.logged() {
				if strings.Contains(line, address+":") {
					steps[strings.Contains(line, " https~ ")]++
				}
			}
			atServer := s.Log.Count(`"client":"` + address + `"`)
			if got := max(steps[true], steps[false], atServer); got > bound {
				t.Errorf("%s: got %d log lines for %d cancelled requests, want at most %d",
					name, got, sent, bound)
			}
			hubstest.WaitUntil(t, "the address is served again", func() bool {
				r, err := p.clientFrom(s, address).Try("GET /healthz", nil)
				return err == nil && r.Header.Get("X-Request-Id") != ""
			})
		}
	})
}
