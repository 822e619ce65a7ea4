package main

// Tests of what can't be seen of middleware.go from outside: how an endpoint fails, and what the
// log masks.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// panicOf calls f. It returns the value of its panic, or nil if there is none.
func panicOf(f func()) (fault any) {
	defer func() { fault = recover() }()
	f()
	return nil
}

// startRoutes makes the handler of these routes. It returns the panic that prevents the start.
func startRoutes(routes []route) (fault any) {
	s := newServer(config{env: envLocal}, nil, io.Discard)
	return panicOf(func() { s.handler(routes) })
}

// Z1: The server does not start if any route of its table has no valid access rule.
func TestRouteWithoutAccessDoesNotStart(t *testing.T) {
	t.Parallel()
	table := newServer(config{env: envLocal}, nil, io.Discard).routes()
	if fault := startRoutes(table); fault != nil {
		t.Fatalf("the unchanged table: got the panic %v, want none", fault)
	}
	for i, r := range table {
		for _, invalid := range []access{
			{},
			{terms: true},
			{public: true, terms: true},
			{public: true, session: true},
		} {
			routes := slices.Clone(table)
			routes[i].access = invalid
			text, _ := startRoutes(routes).(string)
			if !strings.HasSuffix(text, r.method+" "+r.path) {
				t.Errorf("%+v: got the panic %q, want one that names %s", invalid, text, r.path)
			}
		}
	}
}

// A countedByPointer is an input whose limitKey has a pointer receiver.
type countedByPointer struct{}

func (*countedByPointer) limitKey(*requestState) string { return "" }

// Z1: The server does not start if an input is not parsed, or is counted without a limit. The
// functions that make contracts panic.
func TestIncompleteContractDoesNotStart(t *testing.T) {
	t.Parallel()
	s := newServer(config{}, nil, io.Discard)
	for name, newContract := range map[string]func() contract{
		"input without parse function": func() contract { return inputEndpoint(nil, s.createHub) },
		"counted input without parse function": func() contract {
			return limitedEndpoint(s.guessLimit, nil, s.validateCode)
		},
		"counted input without limit": func() contract {
			return inputEndpoint(parseGuess, s.validateCode)
		},
		"counted input by pointer without limit": func() contract {
			return inputEndpoint(
				func(*fields) countedByPointer { return countedByPointer{} },
				func(*requestState, countedByPointer) (nothing, error) { return nothing{}, nil })
		},
		"no limit": func() contract { return limitedEndpoint(nil, parseGuess, s.validateCode) },
	} {
		text, _ := panicOf(func() { newContract() }).(string)
		if !strings.Contains(text, "Endpoint: without") {
			t.Errorf("%s: got the panic %q, want one that says what is missing", name, text)
		}
	}
}

// statusOf sends a request and returns the status of the answer.
func statusOf(s *server, method, path string) int {
	answer := httptest.NewRecorder()
	s.handler(s.routes()).ServeHTTP(answer, httptest.NewRequest(method, path, nil))
	return answer.Code
}

// The server has the page at / only in the local environment.
func TestPageIsLocal(t *testing.T) {
	t.Parallel()
	for environment, want := range map[string]int{
		envLocal:      200,
		envStaging:    404,
		envProduction: 404,
	} {
		s := newServer(config{env: environment}, nil, io.Discard)
		if got := statusOf(s, "GET", "/"); got != want {
			t.Errorf("GET / in %s: got status %d, want %d", environment, got, want)
		}
	}
}

// The endpoints below fail. No answer may have the secret.
const secret = "a-secret-in-the-stack"

func panics(*requestState) (nothing, error) { panic(secret) }

// fails returns an error after it has set headers for a success.
func fails(state *requestState) (nothing, error) {
	for name := range strings.FieldsSeq(`Set-Cookie ETag Last-Modified Accept-Ranges Location
		Content-Disposition Content-Length Cache-Control Content-Security-Policy X-Other`) {
		state.Header().Set(name, secret)
	}
	return nothing{}, errors.New(secret)
}

// failsInHTTP fails as http.ServeContent does.
func failsInHTTP(state *requestState) (nothing, error) {
	http.Error(problemWriter{state}, secret, 500)
	return nothing{}, nil
}

// An invalidAnswer is an output that breaks its contract.
type invalidAnswer struct {
	Secret string `json:"secret"`
}

func (invalidAnswer) isValid() bool { return false }

func answersWrong(*requestState) (invalidAnswer, error) { return invalidAnswer{secret}, nil }

// failedID is the id of the request that call sends.
const failedID = "id-of-the-request"

// call sends a request to an endpoint. fault is what net/http gets: http.ErrAbortHandler if it must
// cut the connection.
func call(s *server, c contract) (answer *httptest.ResponseRecorder, fault any) {
	handler := s.handler([]route{{"GET", "/x", public, 200, c}})
	answer = httptest.NewRecorder()
	request := httptest.NewRequest("GET", "/x", nil)
	request.Header.Set("X-Request-Id", failedID)
	fault = panicOf(func() { handler.ServeHTTP(answer, request) })
	return answer, fault
}

// newLoggedServer returns a server and its log.
func newLoggedServer() (*server, *bytes.Buffer) {
	var log bytes.Buffer
	return newServer(config{env: envStaging}, nil, &log), &log
}

// errorLogged matches a log that has an error and the request, both with failedID.
var errorLogged = regexp.MustCompile(`^.*"level":"ERROR".*"requestId":"id-of-the-request".*
.*"msg":"request".*"requestId":"id-of-the-request".*
$`)

// wantErrorLogged checks that a log has an error and the request, both with the id of call.
func wantErrorLogged(t *testing.T, log *bytes.Buffer) {
	t.Helper()
	if !errorLogged.Match(log.Bytes()) {
		t.Errorf("got the log\n%s\nwant it to match %s", log, errorLogged)
	}
}

// failing are endpoints that fail before they have sent anything.
var failing = map[string]contract{
	"panic":             endpoint(panics),
	"error":             endpoint(fails),
	"error of net/http": endpoint(failsInHTTP),
	"invalid output":    endpoint(answersWrong),
}

// G3, I5: A panic, an unknown error or an output that breaks its contract is a 500 that does not
// reveal the cause, and has no header of the failed answer. The log has an error with the same
// request id.
func TestInternalErrorsAreLoggedNotShown(t *testing.T) {
	t.Parallel()
	for name, c := range failing {
		t.Run(name, func(t *testing.T) {
			s, log := newLoggedServer()
			answer, fault := call(s, c)
			if fault != nil {
				t.Errorf("got the panic %v, want none", fault)
			}
			var p problem
			if err := json.Unmarshal(answer.Body.Bytes(), &p); err != nil {
				t.Errorf("got the body %s, want a problem: %v", answer.Body, err)
			}
			if answer.Code != 500 || p.Code != "internal" || p.RequestID != failedID {
				t.Errorf("got status %d and %+v, want 500, internal and the id of call",
					answer.Code, p)
			}
			text := fmt.Sprint(answer.Header(), answer.Body)
			if strings.Contains(text, secret) {
				t.Errorf("got %s, want no %s in it", text, secret)
			}
			wantErrorLogged(t, log)
		})
	}
}

// G3: If an endpoint fails after it has sent a part of its answer, the connection is cut, so that
// no client takes the part for the whole.
func TestFailureAfterHalfCutsTheConnection(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*requestState) (nothing, error){
		"panic": panics,
		"error": fails,
	} {
		t.Run(name, func(t *testing.T) {
			s, log := newLoggedServer()
			_, fault := call(s, endpoint(func(state *requestState) (nothing, error) {
				state.Write([]byte("half"))
				return end(state)
			}))
			if fault != http.ErrAbortHandler {
				t.Errorf("got the panic %v, want %v", fault, http.ErrAbortHandler)
			}
			wantErrorLogged(t, log)
		})
	}
}

// G4: The log shows where a panic was. The test looks for a function of the stack, not for a path,
// because a long path would be masked or cut off.
func TestPanicIsLoggedWithItsStack(t *testing.T) {
	t.Parallel()
	s, log := newLoggedServer()
	call(s, endpoint(panics))
	if want := ".panics("; !strings.Contains(log.String(), want) {
		t.Errorf("got the log\n%s\nwant %s in it", log, want)
	}
}

// An error keeps the header with which a stopping server ends its connections.
func TestErrorsOfAStoppingServerEndConnections(t *testing.T) {
	t.Parallel()
	for name, c := range failing {
		s, _ := newLoggedServer()
		s.stopping.Store(true)
		answer, _ := call(s, c)
		if got := answer.Header().Get("Connection"); got != "close" {
			t.Errorf("%s: got Connection %q, want close", name, got)
		}
	}
}

// If the server could not store a body, the answer is a 5xx. If the body was too large, broke off
// or came too slowly, the answer is a 4xx.
func TestBodyFaultsAreToldApart(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err    error
		status int
	}{
		{&os.PathError{Err: syscall.EIO}, 500},
		{&os.PathError{Err: syscall.ENOSPC}, 507},
		{&os.PathError{Err: syscall.EDQUOT}, 507},
		{&http.MaxBytesError{}, 413},
		{errTooLarge, 413},
		{io.ErrUnexpectedEOF, 400},
		{os.ErrDeadlineExceeded, 400},
	} {
		if got := bodyProblem(fmt.Errorf("within: %w", test.err)).Status; got != test.status {
			t.Errorf("%v: got status %d, want %d", test.err, got, test.status)
		}
	}
}

// L4: Retry-After is in whole seconds and rounded up, so that a client that waits this long is not
// refused again.
func TestRetryAfterIsRoundedUp(t *testing.T) {
	t.Parallel()
	s := newServer(config{env: envLocal}, nil, io.Discard)
	for wait, want := range map[time.Duration]string{
		time.Millisecond: "1",
		time.Second:      "1",
		time.Second + 1:  "2",
	} {
		answer, _ := call(s, endpoint(func(*requestState) (nothing, error) {
			return nothing{}, rateLimited("", wait)
		}))
		if got := answer.Header().Get("Retry-After"); got != want {
			t.Errorf("a wait of %v: got Retry-After %q, want %q", wait, got, want)
		}
	}
}

// G2: maskText removes every kind of secret from an error's text, and nothing else. Then it cuts
// the text to maxLoggedText bytes.
func TestMaskOfEachKind(t *testing.T) {
	t.Parallel()
	type maskCase struct{ Why, Text, Logged string }
	cases := hubstest.ReadCases[maskCase](t, "testdata/masks.json")
	colons := strings.Repeat(":", maxLoggedText-len("j***"))
	cases = append(cases, maskCase{
		Why:    "the text is cut",
		Text:   strings.Repeat("-123456,", maxLoggedText),
		Logged: strings.Repeat("-***,", maxLoggedText)[:maxLoggedText],
	}, maskCase{
		Why:    "the mask comes before the cut, which would split the address",
		Text:   colons + "jane.roe@example.com",
		Logged: colons + "j***",
	})
	for _, c := range cases {
		t.Run(c.Why, func(t *testing.T) {
			if got := maskText(c.Text); got != c.Logged {
				t.Errorf("%q: got %q, want %q", c.Text, got, c.Logged)
			}
		})
	}
}

// loggedID is an id that would be masked in another text.
const loggedID = "48291348-2913-4829-8482-913482913482"

// logged returns the line of an event that has the four identifiers, and the text again and again:
// in its message and a query of 200 bytes each, and in an error of 15 kB.
func logged(text string) string {
	var out bytes.Buffer
	long := strings.Repeat(text+" ", 15<<10/len(text))
	newServer(config{}, nil, &out).log.Info(long[:200],
		"error", errors.New(long),
		"query", long[:200],
		"requestId", loggedID,
		"userId", loggedID,
		"fileId", loggedID,
		"client", loggedID)
	return out.String()
}

// G2: Every text of an event is masked, except the four identifiers by which an operator finds the
// lines of a request.
func TestEventsAreMasked(t *testing.T) {
	t.Parallel()
	for text, secret := range map[string]string{"ada@b.example": "ada@", "510764": "510764"} {
		got := logged(text)
		if n := strings.Count(got, loggedID); n != 4 {
			t.Errorf("got %d identifiers as they are, want 4: %s", n, got)
		}
		if strings.Contains(got, secret) {
			t.Errorf("got %s, want no %s in it", got, secret)
		}
	}
}

// H4: An event has at most 2 kB, even if JSON or the mask lengthens its texts.
func TestEventsAreShort(t *testing.T) {
	t.Parallel()
	for reason, text := range map[string]string{
		"JSON escapes a quotation mark":           `"`,
		"JSON replaces what is not UTF-8":         "\xff",
		"JSON may escape what HTML must not have": "<",
		"the mask lengthens an address":           "a@",
		"the mask lengthens a password in a URL":  "://a@",
		"the mask shortens a code":                "510764",
		"the mask shortens an address":            "ada@b.example",
	} {
		if got := len(logged(text)); got > 2048 {
			t.Errorf("%s: got an event of %d bytes, want at most 2048", reason, got)
		}
	}
}
