package api

import (
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// In the local environment, and in no other, the server sends web/index.html, byte for byte. The
// policy in that file has hashes of its script and style (TestPageHashes), so a browser would not
// run a script with another byte. In web/openapi.json, the server changes the name of the cookie to
// its own.
func TestDocumentsAreServed(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, map[string]string{"COOKIE_PREFIX": "acme"})
	page := s.Client(t).Get("/")
	wantText(t, "GET /", string(page.Body), hubstest.ReadFile(t, "web/index.html"))
	served := s.Client(t).Get("/openapi.json")
	contract := hubstest.ReadFile(t, "web/openapi.json")
	want := strings.Replace(contract, `"name": "hubs_auth_local"`, `"name": "acme_auth_local"`, 1)
	wantText(t, "GET /openapi.json", string(served.Body), want)
	for _, deployed := range []map[string]string{staging(t), production(t)} {
		hubstest.Start(t, deployed).Client(t).Get("/").Want(t, 404)
	}
}

// routeRow matches a row of the table that the command routes prints: method, path, needs, limits.
var routeRow = regexp.MustCompile(`(?m)^([A-Z]+) +(/\S*) +(.+?)  +(.*)`)

// The server has the routes of the contract and no others, with the same access rules and limits.
func TestRoutesAreThoseOfTheContract(t *testing.T) {
	t.Parallel()
	const page = "GET /{$}" // in the local environment only
	want := map[string]string{page: "- " + limitText(hubstest.LimitOf(t, "GET /healthz"))}
	for _, r := range routes {
		var limits []string
		for _, limit := range r.Limits {
			limits = append(limits, limitText(limit))
		}
		want[r.Route] = strings.Replace(r.Needs, "nothing", "-", 1) + " " + strings.Join(limits, "; ")
	}
	_, printed := run(t, nil, "routes")
	got := map[string]string{}
	for _, row := range routeRow.FindAllStringSubmatch(printed, -1) {
		got[row[1]+" "+row[2]] = row[3] + " " + row[4]
	}
	wantEqual(t, "routes of hubs routes", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
	for route, text := range want {
		wantText(t, "hubs routes, compared with web/openapi.json: "+route, got[route], text)
	}
}

// L1: Each limit of the contract is exact: so many requests pass, and the next is a 429 that names
// the limit. A HEAD has the limit of a GET. The limit by client address comes before everything else.
func TestLimitsAreThoseOfTheContract(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	for _, r := range routes {
		requests := []string{r.Route}
		if path, isGet := strings.CutPrefix(r.Route, "GET "); isGet {
			requests = append(requests, "HEAD "+path)
		}
		for i, limit := range r.Limits {
			for _, request := range requests {
				t.Run(request+"/"+limit.By, func(t *testing.T) {
					var body any // none: refused, but counted by client address
					if i > 0 {
						body = validBody(t, s, r)
					}
					limitOnce := func() (isInOnePeriod bool) {
						begin := time.Now()
						passed, refusal := exceed(t, s, s.Client(t), limit, request, body)
						periods := int(time.Since(begin) / limit.Period) // that have gone by
						if passed < limit.Requests || passed > limit.Requests*(1+periods) {
							t.Errorf("got %d requests passed in %d periods, want %d in each: x-limits in web/openapi.json",
								passed, 1+periods, limit.Requests)
						} else if periods == 0 && refusal.Method != "HEAD" { // its answer has no body
							wantLimited(t, refusal, limit)
						}
						return periods == 0
					}
					hubstest.WaitUntil(t, "the requests within a period", limitOnce)
				})
			}
		}
	}
}

// with returns the call with another value of one field. The value nil leaves the field out.
func (q call) with(name string, value any) call {
	body, isJSON := q.body.(map[string]any)
	switch {
	case value == nil:
		delete(body, name) // the query has no fields to begin with
	case isJSON:
		body[name] = value
	default:
		q.request += "?" + url.Values{name: {fmt.Sprint(value)}}.Encode()
	}
	return q
}

// textOf returns a text with this many characters, if possible one that matches the pattern of the
// schema. Its characters have four bytes in UTF-8 and two units in UTF-16, unless it is an address.
func textOf(schema map[string]any, length int) string {
	text := strings.Repeat("😀", length)
	if schema["x-maxBytes"] != nil {
		text = strings.Repeat("n", length)
	}
	pattern := patternOf(schema)
	if pattern == nil || pattern.MatchString(text) || length < 3 {
		return text
	}
	rest := length - len("a@")
	return "a@" + strings.Repeat("b", 2-rest%2) + strings.Repeat(".b", (rest-1)/2)
}

// patternOf returns the pattern of a schema, or nil.
func patternOf(schema map[string]any) *regexp.Regexp {
	pattern, hasPattern := schema["pattern"].(string)
	if !hasPattern {
		return nil
	}
	return regexp.MustCompile(pattern)
}

// valuesOf returns values that a schema permits and values that it does not, at its bounds and just
// beyond them.
func valuesOf(schema map[string]any) (good, bad []any) {
	good = []any{hubstest.Example(schema)}
	example := fmt.Sprint(good[0])
	if more, hasMore := schema["examples"].([]any); hasMore {
		good = append(good, more[1:]...)
	}
	if schema["type"] == "boolean" {
		good = append(good, true, false)
	}
	tryBound := func(rule string, beyond int, valueOf func(n int) any) {
		if bound, hasBound := schema[rule].(float64); hasBound {
			good = append(good, valueOf(int(bound)))
			bad = append(bad, valueOf(int(bound)+beyond))
		}
	}
	number := func(n int) any { return n }
	text := func(length int) any { return textOf(schema, max(length, 0)) }
	tryBound("minimum", -1, number)
	tryBound("maximum", +1, number)
	tryBound("minLength", -1, text)
	tryBound("maxLength", +1, text)
	tryBound("x-maxBytes", +2, func(bytes int) any { return strings.Repeat("ü", bytes/2) })
	if choices, hasChoices := schema["enum"].([]any); hasChoices {
		good = append(good, choices...)
		bad = append(bad, "", example+"s", strings.ToUpper(example))
	}
	if pattern := patternOf(schema); pattern != nil {
		for _, text := range []string{example[1:], example + "1", example + "@", "０１２３４５"} {
			if pattern.MatchString(text) {
				good = append(good, text)
			} else {
				bad = append(bad, text)
			}
		}
	}
	return good, bad
}

// otherType returns a value of another JSON type than that of a schema.
func otherType(schema map[string]any) any {
	if schema["type"] == "string" {
		return 7
	}
	return fmt.Sprint(hubstest.Example(schema))
}

// I2, I3, Z3: The inputs of each route are those of the contract. A value at a bound or of an enum
// is accepted. One beyond it or, in a body, of another type, a missing or an unknown field is a 400
// that names the field.
func TestInputsAreThoseOfTheContract(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	for _, r := range routes {
		if r.Fields == nil {
			continue
		}
		t.Run(r.Route, func(t *testing.T) {
			send := func(name string, value any) *hubstest.Response {
				q := maker{s, admin, admin}.validCall(t, r).with(name, value)
				return q.send(s.With(t, admin.Token()))
			}
			wantRefused := func(name string, value any) {
				t.Helper()
				send(name, value).WantProblem(t, 400, "invalid_request", name)
			}
			for _, field := range r.Fields {
				if field.Schema["x-opaque"] == true { // only the server can make one
					wantRefused(field.Name, "")
					wantRefused(field.Name, "x")
					continue
				}
				good, bad := valuesOf(field.Schema)
				if field.IsRequired {
					bad = append(bad, nil)
				} else {
					good = append(good, nil)
				}
				if !strings.HasPrefix(r.Route, "GET ") { // in a query, all values are texts
					bad = append(bad, otherType(field.Schema))
				}
				for _, value := range good {
					answer := send(field.Name, value)
					if answer.Status == 400 {
						t.Errorf("%s = %#v: want no 400, got %v", field.Name, value, answer)
					}
				}
				for _, value := range bad {
					wantRefused(field.Name, value)
				}
			}
			wantRefused("unknown", "x")
		})
	}
}

// A write with If-Match is a 412, because nothing that can be written has an ETag. Only the value *
// is accepted.
//
// H4: Each route with a JSON body refuses another content type, and a body of over 16 KiB, also one
// that is sent in chunks. bodyCases has the largest body that is accepted.
func TestWritesCheckConditionTypeAndSize(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	for _, r := range routes {
		if strings.HasPrefix(r.Route, "GET ") {
			continue
		}
		q := maker{s, admin, admin}.validCall(t, r)
		c := s.With(t, admin.Token())
		q.send(c, "If-Match", `"1"`).WantProblem(t, 412, "precondition_failed")
		q.send(c, "If-Match", "*").Want(t, r.Status)
		if _, isJSON := q.body.(map[string]any); !isJSON {
			continue
		}
		q.send(c, "Content-Type", "text/plain").WantProblem(t, 415, "unsupported_media_type")
		for _, way := range bothWays(strings.Repeat(" ", 16<<10) + "{}") {
			q.body = way.body
			q.send(c, "Content-Type", "application/json").WantProblem(t, 413, "too_large")
		}
	}
}
