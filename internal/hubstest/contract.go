package hubstest

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
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
)

// document returns the decoded web/openapi.json, the contract. Client.Do compares every answer
// with the contract.
var document = sync.OnceValue(func() any {
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
	value := within(document(), names...)
	found, ok := value.(T)
	if !ok {
		t.Fatalf("setup: web/openapi.json: %q: got %v, want a %T", names, value, found)
	}
	return found
}

// ContractOf is like Contract, but the names lead on from the operation of a route such as
// "GET /hubs".
func ContractOf[T any](t testing.TB, route string, names ...string) T {
	t.Helper()
	method, path, _ := strings.Cut(route, " ")
	operation := []string{"paths", path, strings.ToLower(method)}
	return Contract[T](t, append(operation, names...)...)
}

// A Limit is a rate limit: the most requests of one key that pass within a period.
type Limit struct {
	Requests int
	Period   time.Duration
	By       string // description of the key, such as "client address"
}

// LimitOf returns the limit of a route such as "GET /hubs": the last one that the contract lists
// for it. A route that has a limit besides the one by client address lists its own last.
func LimitOf(t testing.TB, route string) Limit {
	limits := ContractOf[[]any](t, route, "x-limits")
	last := limits[len(limits)-1].(map[string]any)
	return Limit{
		Requests: int(last["requests"].(float64)),
		Period:   time.Duration(last["seconds"].(float64)) * time.Second,
		By:       last["by"].(string),
	}
}

// within returns the member of value to which the names lead. It follows references ($ref) on the
// way. If there is no such member, it returns nil.
func within(value any, names ...string) any {
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
	target := within(document(), strings.Split(path, "/")[1:]...)
	if target == nil {
		panic("the contract lacks " + path)
	}
	return target
}

// contractFault returns an error if the answer does not match the contract. If the contract lists
// no such path or method, only an error is checked: its body must match the schema Problem.
func (r *Response) contractFault() error {
	operation := within(document(), "paths", contractPath(r.Path), strings.ToLower(r.Method))
	if operation != nil {
		return r.operationFault(operation)
	}
	if r.Status < 400 || r.Method == "HEAD" {
		return nil
	}
	return r.bodyFault(within(document(), "components", "schemas", "Problem"))
}

// operationFault returns an error if an operation of the contract does not list the answer's status
// or content type, or if the body does not match the schema.
func (r *Response) operationFault(operation any) error {
	response := r.response(operation)
	if response == nil {
		return errors.New("the contract does not list this status for this route")
	}
	contents, _ := within(response, "content").(map[string]any)
	isFile := contents["*/*"] != nil // has any content type and no schema
	isEmpty := contents == nil && len(r.Body) == 0
	if isFile || isEmpty {
		return nil
	}
	kind := r.Header.Get("Content-Type")
	schema := within(contents, kind, "schema")
	if schema == nil {
		return fmt.Errorf("the contract does not list the content type %q for this route", kind)
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

// response returns the operation's response for the answer's status, or nil. For a HEAD, the
// contract describes all errors together, as 4XX and 5XX.
func (r *Response) response(operation any) any {
	status := strconv.Itoa(r.Status)
	response := within(operation, "responses", status)
	if response == nil {
		response = within(operation, "responses", status[:1]+"XX")
	}
	return response
}

// contractPath returns the contract's path for a request's path, such as /hubs/{hubId} for /hubs/1.
// If there is none, it returns "".
func contractPath(target string) string {
	target, _, _ = strings.Cut(target, "?")
	paths, _ := within(document(), "paths").(map[string]any)
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
}

// schemaFault returns an error if a JSON value does not have the type, the members or one of the
// choices (enum) of a schema. It does not compare lengths, ranges, patterns and formats, because
// the tests of each member check its value.
func schemaFault(schema, value any) error {
	rules, _ := resolve(schema).(map[string]any)
	parts, _ := rules["allOf"].([]any)
	for _, part := range parts {
		if err := schemaFault(part, value); err != nil {
			return err
		}
	}
	want, hasType := rules["type"]
	number, _ := value.(float64)
	if want == "integer" && number == math.Trunc(number) {
		want = "number" // JSON has no integers of its own
	}
	if got := jsonTypes[fmt.Sprintf("%T", value)]; hasType && got != want {
		return fmt.Errorf("got %v of type %q, want type %q", value, got, want)
	}
	choices, hasChoices := rules["enum"].([]any)
	if hasChoices && !slices.Contains(choices, value) {
		return fmt.Errorf("got %v, want one of %v", value, choices)
	}
	items, _ := value.([]any)
	for _, item := range items {
		if err := schemaFault(rules["items"], item); err != nil {
			return err
		}
	}
	if object, ok := value.(map[string]any); ok {
		return membersFault(rules, object)
	}
	return nil
}

// membersFault returns an error if an object lacks a required member, has a member that the schema
// does not list, or has one whose value does not match. A schema without a type may leave members
// out, because it only adds rules to another schema (allOf).
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
		if !known && hasProperties && rules["type"] != nil {
			return fmt.Errorf("the contract does not list the member %s", name)
		}
		if err := schemaFault(schema, value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
