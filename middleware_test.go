package main

// Tests of what can't be seen of middleware.go from outside: how a route fails, and what the log
// masks.

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"
)

// panicOf calls f. It returns the value of its panic, or nil if there is none.
func panicOf(f func()) (fault any) {
	defer func() { fault = recover() }()
	f()
	return nil
}

// Z1: The server does not start with a route that is public and has conditions, that lacks its
// status or its handler, or whose limit lacks its key. A route without an access rule needs a
// session.
func TestIncompleteRouteDoesNotStart(t *testing.T) {
	t.Parallel()
	const pattern = "GET /x"
	limit := newLimiter(1, time.Hour, "")
	start := func(rt route) (fault any) {
		rt.pattern = pattern
		return panicOf(func() { newServer(config{}, nil, nil).addRoute(rt) })
	}
	handle := func(*request) (output, error) { return nil, nil }
	for _, complete := range []route{
		{status: 200, handle: handle}, // for users with a session
		{access: public, status: 200, handle: handle, limit: limit, limitKey: guessKey},
	} {
		if fault := start(complete); fault != nil {
			t.Fatalf("a complete route: got the panic %v, want none", fault)
		}
	}
	for name, rt := range map[string]route{
		"no status":         {handle: handle},
		"no handler":        {status: 200},
		"public with terms": {status: 200, handle: handle, access: access{public: true, terms: true}},
		"public with role":  {status: 200, handle: handle, access: access{public: true, roles: allRoles}},
		"limit without key": {status: 200, handle: handle, limit: limit},
		"key without limit": {status: 200, handle: handle, limitKey: guessKey},
	} {
		text, _ := start(rt).(string)
		if !strings.HasSuffix(text, pattern) {
			t.Errorf("%s: got the panic %q, want one that names %s", name, text, pattern)
		}
	}
}

// The handlers below fail. No answer may have the secret.
const secret = "a-secret-in-the-stack"

func panics(*request) (output, error) { panic(secret) }

// fails returns an error after it has set headers for a success.
func fails(r *request) (output, error) {
	for name := range strings.FieldsSeq(`Set-Cookie ETag Last-Modified Accept-Ranges Location
		Content-Disposition Content-Length Cache-Control Content-Security-Policy X-Other`) {
		r.w.Header().Set(name, secret)
	}
	return nil, errors.New(secret)
}

// failsInHTTP fails as http.ServeContent does.
func failsInHTTP(r *request) (output, error) {
	catcher := &errorCatcher{response: r.w}
	http.Error(catcher, secret, 500)
	return nil, catcher.toError()
}

// An invalidAnswer is an output that breaks its contract.
type invalidAnswer struct {
	Secret string `json:"secret"`
}

func (invalidAnswer) validate() fieldErrors { return fieldErrors{{"secret", "is not valid"}} }

func answersWrong(*request) (output, error) { return invalidAnswer{secret}, nil }

// failing are handlers that fail before they have sent anything.
var failing = map[string]func(*request) (output, error){
	"panic":             panics,
	"error":             fails,
	"error of net/http": failsInHTTP,
	"invalid output":    answersWrong,
}

// failedID is the id of the request that call sends.
const failedID = "id-of-the-request"

// call sends a request to a handler. fault is what net/http gets: http.ErrAbortHandler if it must
// cut the connection.
func call(s *server, handle func(*request) (output, error)) (
	answer *httptest.ResponseRecorder, fault any,
) {
	s.addRoute(route{pattern: "GET /x", access: public, status: 200, handle: handle})
	answer = httptest.NewRecorder()
	request := httptest.NewRequest("GET", "/x", nil)
	request.Header.Set("X-Request-Id", failedID)
	fault = panicOf(func() { s.ServeHTTP(answer, request) })
	return answer, fault
}

// newLoggedServer returns a server and its log.
func newLoggedServer() (*server, *bytes.Buffer) {
	var log bytes.Buffer
	return newServer(config{env: envStaging}, nil, &logWriter{Writer: &log}), &log
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

// G3, I5: A panic, an unknown error or an output that breaks its contract is a 500 that does not
// reveal the cause, and has no header of the failed answer, but for the one with which a stopping
// server ends its connections. The log has one error, with the same request id.
func TestInternalErrorsAreLoggedNotShown(t *testing.T) {
	t.Parallel()
	for name, handle := range failing {
		t.Run(name, func(t *testing.T) {
			s, log := newLoggedServer()
			close(s.stopping)
			answer, fault := call(s, handle)
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
			if got := answer.Header().Get("Connection"); got != "close" {
				t.Errorf("got Connection %q, want close", got)
			}
			text := fmt.Sprint(answer.Header(), answer.Body)
			if strings.Contains(text, secret) {
				t.Errorf("got %s, want no %s in it", text, secret)
			}
			wantErrorLogged(t, log)
		})
	}
}

// G3: If a handler fails after it has sent a part of its answer, the connection is cut, so that no
// client takes the part for the whole.
func TestFailureAfterHalfCutsTheConnection(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*request) (output, error){
		"panic": panics,
		"error": fails,
	} {
		t.Run(name, func(t *testing.T) {
			s, log := newLoggedServer()
			_, fault := call(s, func(r *request) (output, error) {
				r.w.Write([]byte("half"))
				return end(r)
			})
			if fault != http.ErrAbortHandler {
				t.Errorf("got the panic %v, want %v", fault, http.ErrAbortHandler)
			}
			wantErrorLogged(t, log)
		})
	}
}

// G4: The log names the function that panicked.
func TestPanicIsLoggedWithItsFunction(t *testing.T) {
	t.Parallel()
	s, log := newLoggedServer()
	call(s, panics)
	if want := ".panics:"; !strings.Contains(log.String(), want) {
		t.Errorf("got the log\n%s\nwant %s in it", log, want)
	}
}

// L4: Retry-After is in whole seconds and rounded up, so that a client that waits this long is not
// refused again.
func TestRetryAfterIsRoundedUp(t *testing.T) {
	t.Parallel()
	for wait, want := range map[time.Duration]string{
		time.Millisecond: "1",
		time.Second:      "1",
		time.Second + 1:  "2",
	} {
		s, _ := newLoggedServer()
		answer, _ := call(s, func(*request) (output, error) { return nil, rateLimited("", wait) })
		if got := answer.Header().Get("Retry-After"); got != want {
			t.Errorf("a wait of %v: got Retry-After %q, want %q", wait, got, want)
		}
	}
}

// A small request must not cause a large answer: a problem names at most maxFieldErrors fields,
// each once and by at most maxFieldName bytes.
func TestAnswersNameFewFields(t *testing.T) {
	t.Parallel()
	var errs fieldErrors
	for n := range 2 * maxFieldErrors {
		name := fmt.Sprint(n, strings.Repeat("x", 2*maxFieldName))
		errs = append(errs, fieldError{name, "first"}, fieldError{name, "second"})
	}
	got := invalid(errs...).Errors
	if len(got) != maxFieldErrors {
		t.Errorf("got %d errors, want %d", len(got), maxFieldErrors)
	}
	for _, e := range got {
		if len(e.Field) != maxFieldName || e.Detail != "first" {
			t.Errorf("got %+v, want the first error, and %d bytes of the name", e, maxFieldName)
		}
	}
	if got := invalid(fieldError{"", "is not known here"}).Errors[0].Field; got == "" {
		t.Error("a field without a name: got no name in the answer, want one")
	}
	got = invalid(fieldError{strings.Repeat("日", maxFieldName), "is not known here"}).Errors
	if want := strings.Repeat("日", maxFieldName/3); got[0].Field != want {
		t.Errorf("got the name %q, want %q: it is cut between characters", got[0].Field, want)
	}
}

// G2: maskText removes every kind of secret from an error's text, and nothing else. Then it cuts
// the text to maxLoggedText bytes.
func TestMaskOfEachKind(t *testing.T) {
	t.Parallel()
	colons := strings.Repeat(":", maxLoggedText-len("j***"))
	// Each text has only one kind of secret. With two, the mask of one could also hide the other.
	for _, c := range []struct {
		why, text string
		logged    string // "": as it is
	}{
		{why: "one in a URL without a user",
			text:   "postgres://:(opaque)@db.example.com",
			logged: "postgres://***@db.example.com"},
		{why: "a token: its first part is the same for all",
			text:   "x eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJlbWFpbCI6ImFkYUBiLmV4YW1wbGUiLCJ1c2VySWQiOiIi.c2lnbmF0dXJlLW9mLXRoaXJ0eS10d28tYnl0ZXMtIS0h",
			logged: "x eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.***.***"},
		{why: "six digits may be a code", text: "at 510764.", logged: "at ***."},
		{why: "between other characters", text: "_510764x", logged: "_***x"},
		{why: "twice, between underlines", text: "/x_510764_510764_", logged: "/x_***_***_"},
		{why: "a longer number", text: "x 1234567890 x", logged: "x *** x"},
		{why: "an address", text: "ada@b.example", logged: "a***@b.example"},
		{why: "one without a dot in its domain",
			text:   "550 <ada@corp>: no such user",
			logged: "550 <a***@corp>: no such user"},
		{why: "one in capitals",
			text:   "550 <ADA@B.EXAMPLE>: no such user",
			logged: "550 <A***@B.EXAMPLE>: no such user"},
		{why: "one beyond ASCII", text: "äda@b.example", logged: "ä***@b.example"},
		{why: "one with another character before the @", text: "ada.byron`@b.example", logged: "a***@b.example"},
		{why: "a long word may be a key", text: "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk", logged: "***"},
		{why: "a key in base64", text: "key kkkk+kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk== x", logged: "key *** x"},
		{why: "white space becomes a space; what can't be seen goes",
			text:   "a\u009b31mb\nc\x7fd\u202ee",
			logged: "a31mb cde"},
		{why: "a code with characters in it that can't be seen", text: "482\u200b913 51\u00ad0764", logged: "*** ***"},
		{why: "a code with such characters, as %q writes them",
			text:   `"482\u200b913 51\u00ad0764"`,
			logged: `"*** ***"`},
		{why: "no secret: an id", text: "file 0b1c2d3e-aaaa-4bbb-8ccc-ddddeeeeffff"},
		{why: "no secret: five digits", text: "12345 x 12345"},
		{why: "no secret: the path of a file",
			text: "open data/files/unfinished/0b1c2d3e-aaaa-4bbb-8ccc-ddddeeeeffff: no such file"},
		{why: "no secret: a date", text: "certificate has expired: current time 2026-11-23T10:20:30Z"},
		{why: "no secret: numbers of a list", text: "limit=20&offset=10000"},
		{why: "no secret: a mail server's answer", text: "550 5.1.1 user unknown"},
		{why: "no secret: an address of a machine", text: "dial tcp 127.0.0.1:5432: connection refused"},
		{why: "no secret: PostgreSQL's words", text: `password failed for "hubs" (28P01)`},
		{why: "the text is cut",
			text:   strings.Repeat("-123456,", maxLoggedText),
			logged: strings.Repeat("-***,", maxLoggedText)[:maxLoggedText]},
		{why: "the mask comes before the cut, which would split the address",
			text:   colons + "jane.roe@example.com",
			logged: colons + "j***"},
	} {
		t.Run(c.why, func(t *testing.T) {
			want := cmp.Or(c.logged, c.text)
			if got := maskText(c.text); got != want {
				t.Errorf("%q: got %q, want %q", c.text, got, want)
			}
		})
	}
}

// loggedID is an id that would be masked in another text.
const loggedID = "48291348-2913-4829-8482-913482913482"

// G2: Every text of an event is masked, except those by which an operator finds the lines of a
// request.
func TestEventsAreMasked(t *testing.T) {
	t.Parallel()
	for text, secret := range map[string]string{"ada@b.example": "ada@", "510764": "510764"} {
		var out bytes.Buffer
		log := newServer(config{}, nil, &logWriter{Writer: &out}).log
		log.Info(text, "error", errors.New(text), "email", text, "reason", text,
			"requestId", loggedID,
			"userId", loggedID,
			"fileId", loggedID,
			"client", loggedID,
			"origin", loggedID)
		if n := strings.Count(out.String(), loggedID); n != 5 {
			t.Errorf("got %d ids as they are, want 5: %s", n, &out)
		}
		if strings.Contains(out.String(), secret) {
			t.Errorf("got %s, want no %s in it", &out, secret)
		}
	}
}

// H4: An event has less than 2 kB, even if JSON or the mask lengthens its error. The event of this
// test has the longest of everything else, as that of a code which could not be mailed.
func TestEventsAreShort(t *testing.T) {
	t.Parallel()
	for reason, text := range map[string]string{
		"JSON escapes a quotation mark":          `"`,
		"JSON replaces what is not UTF-8":        "\xff",
		"a line break":                           "\n",
		"the mask lengthens an address":          "a@",
		"the mask lengthens a password in a URL": "://a@",
		"the mask shortens a code":               "510764 ",
		"the mask shortens an address":           "ada@b.example ",
	} {
		var out bytes.Buffer
		newServer(config{}, nil, &logWriter{Writer: &out}).log.Error("code not sent",
			"requestId", strings.Repeat("x", 128),
			"client", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
			"userId", loggedID,
			"email", "a@"+strings.Repeat("b.", 125)+"cc",
			"error", errors.New(strings.Repeat(text, 15<<10/len(text))))
		if got := out.Len(); got > 2000 {
			t.Errorf("%s: got an event of %d bytes, want at most 2000", reason, got)
		}
	}
}
