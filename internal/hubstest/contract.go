package hubstest

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"mime"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"
)

// Document returns the decoded web/openapi.json, the contract. Client.Do compares every answer with
// the contract.
var Document = sync.OnceValue(func() any {
	var decoded any
	text, err := os.ReadFile(filepath.Join(Root(), "web/openapi.json"))
	if err == nil {
		err = json.Unmarshal(text, &decoded)
	}
	if err != nil {
		panic(err)
	}
	return decoded
})

// Contract returns the value in web/openapi.json to which the names lead. Tests read limits,
// lifetimes and sizes from the contract instead of repeating them.
func Contract[T any](t testing.TB, names ...string) T {
	t.Helper()
	value := Within(Document(), names...)
	found, ok := value.(T)
	if !ok {
		t.Fatalf("setup: web/openapi.json: %q: got %v, want a %T", names, value, found)
	}
	return found
}

// A Limit is a rate limit: the most requests of one key that pass within a period.
type Limit struct {
	Requests int
	Period   time.Duration
	By       string // description of the key, such as "client address"
}

// Limits returns the limits that the contract lists for a route such as "GET /hubs", that by client
// address first.
func Limits(route string) (limits []Limit) {
	method, path, _ := strings.Cut(route, " ")
	listed, _ := Within(Document(), "paths", path, strings.ToLower(method), "x-limits").([]any)
	for _, reference := range listed {
		limit := resolve(reference).(map[string]any)
		limits = append(limits, Limit{
			Requests: int(limit["requests"].(float64)),
			Period:   time.Duration(limit["seconds"].(float64)) * time.Second,
			By:       limit["by"].(string),
		})
	}
	return limits
}

// LimitOf returns the last limit of a route. A route that has a limit besides the one by client
// address lists its own last.
func LimitOf(t testing.TB, route string) Limit {
	t.Helper()
	limits := Limits(route)
	if limits == nil {
		t.Fatalf("setup: the contract lists no limit of %s", route)
	}
	return limits[len(limits)-1]
}

// Example returns an example of a schema: its own, or an object with the examples of its members.
func Example(schema any) any {
	schema = resolve(schema)
	examples, _ := Within(schema, "examples").([]any)
	if len(examples) > 0 {
		return examples[0]
	}
	object := map[string]any{}
	members, _ := Within(schema, "properties").(map[string]any)
	for name, member := range members {
		object[name] = Example(member)
	}
	return object
}

// compile is regexp.MustCompile, once for each pattern: most answers are compared with the same ones.
func compile(pattern string) *regexp.Regexp {
	known, isKnown := compiled.Load(pattern)
	if !isKnown {
		known, _ = compiled.LoadOrStore(pattern, regexp.MustCompile(pattern))
	}
	return known.(*regexp.Regexp)
}

var compiled sync.Map // of *regexp.Regexp, by pattern

// Within returns the member of value to which the names lead. It follows references ($ref) on the
// way, also if value is one. If there is no such member, it returns nil.
func Within(value any, names ...string) any {
	value = resolve(value)
	for _, name := range names {
		object, _ := value.(map[string]any)
		value = resolve(object[name])
	}
	return value
}

// resolve returns the target of a reference ($ref). It returns any other value unchanged. It panics
// if there is no target, because nothing would be compared with a missing schema.
func resolve(value any) any {
	object, _ := value.(map[string]any)
	path, ok := object["$ref"].(string)
	if !ok {
		return value
	}
	target := Within(Document(), strings.Split(path, "/")[1:]...)
	if target == nil {
		panic("the contract lacks " + path)
	}
	return target
}

// contractFault returns an error if the answer does not match the contract. If the contract lists
// no such path or method, only an error is checked: its body must match the schema Problem.
func (r *Response) contractFault() error {
	path := contractPath(r.Path)
	operation := Within(Document(), "paths", path, strings.ToLower(r.Method))
	if operation != nil {
		seen.Store(fmt.Sprintf("%s %s: %d", r.Method, path, r.Status), true)
		if r.Status/100 == 2 {
			return errors.Join(r.requestFault(path, operation), r.operationFault(operation))
		}
		return r.operationFault(operation)
	}
	if r.Status < 400 || r.Method == "HEAD" {
		return nil
	}
	return r.bodyFault(Within(Document(), "components", "schemas", "Problem"))
}

// requestFault returns an error if the server has accepted a request that the contract does not
// permit. It compares path, query, headers and JSON body. An operation that lists no query or no
// body ignores them. A body that the test streams is compared by its type only.
func (r *Response) requestFault(template string, operation any) error {
	target, query, _ := strings.Cut(r.Path, "?")
	unlisted, _ := url.ParseQuery(query) // the server has accepted it
	takesQuery := false
	shared, _ := Within(Document(), "paths", template, "parameters").([]any)
	own, _ := Within(operation, "parameters").([]any)
	for _, listed := range slices.Concat(shared, own) {
		parameter := resolve(listed).(map[string]any)
		name := parameter["name"].(string)
		var sent []string
		switch parameter["in"] {
		case "path":
			i := slices.Index(strings.Split(template, "/"), "{"+name+"}")
			value, _ := url.PathUnescape(strings.Split(target, "/")[i]) // the server has accepted it
			sent = []string{value}
		case "header":
			sent = r.sent.Values(name)
		case "query":
			takesQuery = true
			sent = unlisted[name]
			delete(unlisted, name)
			if len(sent) > 1 {
				return fmt.Errorf("the parameter %s is sent twice, and accepted", name)
			}
		}
		for _, text := range sent {
			if err := parameterFault(parameter["schema"], text); err != nil {
				return fmt.Errorf("accepted, against the contract: the parameter %s: %w", name, err)
			}
		}
	}
	if takesQuery && len(unlisted) > 0 {
		return fmt.Errorf("accepted, but not in the contract: the parameters %v", unlisted)
	}
	contents, _ := Within(operation, "requestBody", "content").(map[string]any)
	kind, _, _ := mime.ParseMediaType(r.sent.Get("Content-Type"))
	if contents != nil && contents[kind] == nil {
		return fmt.Errorf("accepted, but not in the contract: the content type %q", kind)
	}
	if kind != "application/json" || contents == nil || r.sentBody == "" {
		return nil
	}
	var body any
	json.Unmarshal([]byte(strings.TrimPrefix(r.sentBody, "\uFEFF")), &body) // a byte order mark
	if err := schemaFault(Within(contents, kind, "schema"), body); err != nil {
		return fmt.Errorf("accepted, against the contract: %w", err)
	}
	return nil
}

// parameterFault compares a parameter, or a header of an answer, with its schema. Both are texts,
// also if the schema says integer.
func parameterFault(schema any, text string) error {
	if Within(schema, "type") == "integer" {
		number, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("got %q, want an integer", text)
		}
		return schemaFault(schema, float64(number))
	}
	return schemaFault(schema, text)
}

// operationFault returns an error if an operation of the contract does not list the answer's status
// or content type, or if a header or the body does not match its schema.
func (r *Response) operationFault(operation any) error {
	response := Within(operation, "responses", strconv.Itoa(r.Status))
	if response == nil {
		return errors.New("the contract does not list this status for this route")
	}
	headers, _ := Within(response, "headers").(map[string]any)
	for name, header := range headers {
		for _, value := range r.Header.Values(name) {
			if err := parameterFault(Within(header, "schema"), value); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	contents, _ := Within(response, "content").(map[string]any)
	isFile := contents["*/*"] != nil // has any content type and no schema
	isEmpty := contents == nil && len(r.Body) == 0
	if isFile || isEmpty {
		return nil
	}
	kind := r.Header.Get("Content-Type")
	schema := Within(contents, kind, "schema")
	if schema == nil {
		return fmt.Errorf("the contract does not list the content type %q for this route", kind)
	}
	examples, _ := Within(contents, kind, "examples").(map[string]any) // of a problem, by its code
	if examples != nil && examples[r.Code()] == nil {
		return fmt.Errorf("the contract does not list the code %q for this answer", r.Code())
	}
	return r.bodyFault(schema)
}

// bodyFault returns an error if the body is not JSON that matches the schema.
func (r *Response) bodyFault(schema any) error {
	var body any
	if err := json.Unmarshal(r.Body, &body); err != nil {
		return fmt.Errorf("the body is not JSON: %w", err)
	}
	return schemaFault(schema, body)
}

// seen has the answers that the tests of this package have got, such as "GET /hubs: 200".
var seen sync.Map

// Seen reports whether a test of this package has got such an answer as "GET /hubs: 200".
func Seen(answer string) bool {
	_, isSeen := seen.Load(answer)
	return isSeen
}

// contractPath returns the contract's path for a request's path, such as /hubs/{hubId} for /hubs/1.
// If there is none, it returns "".
func contractPath(target string) string {
	target, _, _ = strings.Cut(target, "?")
	paths, _ := Within(Document(), "paths").(map[string]any)
	if paths[target] != nil {
		return target
	}
	for template := range paths {
		pattern := pathParameter.ReplaceAllString(template, "?*")
		if fits, _ := path.Match(pattern, target); fits {
			return template
		}
	}
	return ""
}

// pathParameter matches a parameter of a path in the contract, such as {hubId}.
var pathParameter = regexp.MustCompile(`{[^}]*}`)

// jsonTypes maps the Go types of decoded JSON values to the names of types in a schema.
var jsonTypes = map[string]string{
	"string":                  "string",
	"float64":                 "number",
	"bool":                    "boolean",
	"[]interface {}":          "array",
	"map[string]interface {}": "object",
	"<nil>":                   "null",
}

// schemaFault returns an error if a JSON value does not match a schema: its type, members, choices
// (enum), bounds, pattern and format.
func schemaFault(schema, value any) error {
	rules, _ := resolve(schema).(map[string]any)
	want, hasType := rules["type"]
	number, _ := value.(float64)
	if want == "integer" && number == math.Trunc(number) {
		want = "number" // JSON has no integers of its own
	}
	isOneOf := func(got string) bool {
		choices, isList := want.([]any)
		return got == want || isList && slices.Contains(choices, any(got))
	}
	if got := jsonTypes[fmt.Sprintf("%T", value)]; hasType && !isOneOf(got) {
		return fmt.Errorf("got %v of type %q, want type %q", value, got, want)
	}
	switch value := value.(type) {
	case string:
		return textFault(rules, value)
	case float64:
		return rangeFault(value, rules["minimum"], rules["maximum"])
	case []any:
		for _, item := range value {
			if err := schemaFault(rules["items"], item); err != nil {
				return err
			}
		}
	case map[string]any:
		return membersFault(rules, value)
	}
	return nil
}

// formats are the formats of texts, with what must hold for them.
var formats = map[any]func(text string) bool{
	nil:      func(string) bool { return true },
	"binary": func(string) bool { return true },
	"uuid":   regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`).MatchString,
	"date-time": func(text string) bool {
		_, err := time.Parse(time.RFC3339, text)
		return err == nil
	},
	"uri-reference": func(text string) bool {
		u, err := url.Parse(text)
		return err == nil && u.String() == text
	},
}

// textFault returns an error if a text is not one of the choices of a schema, does not match its
// pattern or its format, or is too short or too long.
func textFault(rules map[string]any, text string) error {
	switch rules["x-trimmed"] {
	case "spaces":
		text = strings.Trim(text, " ")
	case "white space":
		text = strings.TrimSpace(text)
	}
	hasFormat := formats[rules["format"]]
	if !hasFormat(text) {
		return fmt.Errorf("got %q, want the format %v", text, rules["format"])
	}
	if most, ok := rules["x-maxBytes"].(float64); ok && len(text) > int(most) {
		return fmt.Errorf("got %d bytes, want at most the %v of web/openapi.json", len(text), most)
	}
	choices, hasChoices := rules["enum"].([]any)
	if hasChoices && !slices.Contains(choices, any(text)) {
		return fmt.Errorf("got %q, want one of %v", text, choices)
	}
	if constant := rules["const"]; constant != nil && text != constant {
		return fmt.Errorf("got %q, want %v", text, constant)
	}
	pattern, hasPattern := rules["pattern"].(string)
	if hasPattern && !compile(pattern).MatchString(text) {
		return fmt.Errorf("got %q, want a match of %s", text, pattern)
	}
	length := float64(utf8.RuneCountInString(text))
	return rangeFault(length, rules["minLength"], rules["maxLength"])
}

// rangeFault returns an error if a number or a length is outside its bounds. Either may be nil.
func rangeFault(got float64, least, most any) error {
	if bound, ok := least.(float64); ok && got < bound {
		return fmt.Errorf("got %v, want at least the %v of web/openapi.json", got, bound)
	}
	if bound, ok := most.(float64); ok && got > bound {
		return fmt.Errorf("got %v, want at most the %v of web/openapi.json", got, bound)
	}
	return nil
}

// membersFault returns an error if an object lacks a required member, has a member that the schema
// does not list, or has one whose value does not match.
func membersFault(rules, object map[string]any) error {
	required, _ := rules["required"].([]any)
	for _, name := range required {
		if _, sent := object[name.(string)]; !sent {
			return fmt.Errorf("the member %s is missing", name)
		}
	}
	properties, hasProperties := rules["properties"].(map[string]any)
	for name, value := range object {
		schema, known := properties[name]
		if !known && hasProperties {
			return fmt.Errorf("the contract does not list the member %s", name)
		}
		if err := schemaFault(schema, value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
