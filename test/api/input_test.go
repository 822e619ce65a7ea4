package api

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// O4, O8: An attempt with a valid address counts, whatever else is wrong with it. One without an
// address does not, and is a 400 even when the limit of an address is reached.
func TestAttemptsWithAnAddressCount(t *testing.T) {
	t.Parallel()
	c := hubstest.Start(t).Client(t)
	for _, route := range []string{askRoute, guessRoute} {
		limit := hubstest.LimitOf(t, route)
		email := hubstest.NewEmail()
		for range limit.Requests + 1 {
			c.Do(route, `{"code":12345}`).WantProblem(t, 400, "invalid_request", "code", "email")
		}
		flawed := map[string]any{"email": email, "unknown": true}
		for range limit.Requests {
			c.Do(route, flawed).WantProblem(t, 400, "invalid_request")
		}
		wantLimited(t, c.Do(route, flawed), limit)
		wantLimited(t, c.Do(route, map[string]any{"email": email, "code": "123456"}), limit)
		c.Do(route, `{"code":12345}`).WantProblem(t, 400, "invalid_request", "code", "email")
	}
}

// H1: The headers of a request may have 16 kB. A request with more is a 431.
func TestHeadersAreBounded(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	get := func(padding int) *hubstest.Response {
		return onTheWire(t, s, "GET /openapi.json", nil, "X-Padding", strings.Repeat("x", padding))
	}
	get(15<<10).Want(t, 200)
	get(17<<10).Want(t, 431)
}

// H1: A refusal does not wait for a body that nothing reads. A client that withholds it gets its
// answer long before the time limit of a body, which is 15 s.
func TestRefusalDoesNotWaitForTheBody(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	conn := hubstest.Dial(t, s.Addr)
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	answer := conn.Send(t, "POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
	answer.WantProblem(t, 404, "not_found")
}

// H1: The server closes a connection whose headers or body take longer than their time limit, even
// if the client sends a little every second. It does not do so earlier, and answers other clients
// meanwhile.
func TestSlowRequestsEnd(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)

	for _, test := range []struct {
		name   string
		limit  time.Duration
		start  string // of the request
		more   string // what the client sends every second
		answer string // first line of the answer; "": no answer
	}{
		{
			name:  "headers",
			limit: 10 * time.Second,
			start: "GET /openapi.json HTTP/1.1\r\nHost: x\r\n",
			more:  "X-A: b\r\n",
		},
		{
			name:  "body",
			limit: 15 * time.Second,
			start: "POST /auth/otp/request HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n" +
				"Content-Type: application/json\r\n\r\n{",
			more:   " ",
			answer: "HTTP/1.1 400 Bad Request",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			begin := time.Now() // before the server accepts the connection and its limit begins
			conn := hubstest.Dial(t, s.Addr)
			// No other time limit of the server ends within these four seconds.
			conn.SetDeadline(begin.Add(test.limit + 4*time.Second))
			go keepSending(conn, test.start, test.more)
			s.Client(t).Get("/openapi.json").Want(t, 200)
			got, err := io.ReadAll(conn)
			took := time.Since(begin)
			if os.IsTimeout(err) || took < test.limit {
				t.Errorf("got the connection closed after %v, want it after %v", took, test.limit)
			}
			line, _, _ := strings.Cut(string(got), "\r\n")
			wantEqual(t, "first line of the answer", line, test.answer)
		})
	}
}

// keepSending sends start and then, every second, more, until the connection is closed.
func keepSending(conn io.Writer, start, more string) {
	_, err := io.WriteString(conn, start)
	for tick := time.Tick(time.Second); err == nil; <-tick {
		_, err = io.WriteString(conn, more)
	}
}
