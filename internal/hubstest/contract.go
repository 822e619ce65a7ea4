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

// document is web/openapi.json. Every answer that Client.Do gets is compared with it.
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

// Contract returns a value of web/openapi.json by the names on the way to it. Tests take
// limits, lives and sizes from there.
func Contract[T any](t testing.TB, names ...string) T {
	value := within(document(), names...)
	found, ok := value.(T)
	if !ok {
		t.Fatalf("web/openapi.json: %q is %v", names, value)
	}
	return found
}

// A Limit is how many requests the server answers in a period.
type Limit struct {
	Requests int
	Period   time.Duration
	By       string // what is counted for itself, such as "client address"
}

// LimitOf returns the limit of a route such as "GET /hubs": its own, or if it has none, that by
// client address.
func LimitOf(t testing.TB, route string) Limit {
	method, path, _ := strings.Cut(route, " ")
	limits := Contract[[]any](t, "paths", path, strings.ToLower(method), "x-limits")
	last := limits[len(limits)-1].(map[string]any)
	return Limit{
		Requests: int(last["requests"].(float64)),
		Period:   time.Duration(last["seconds"].(float64)) * time.Second,
		By:       last["by"].(string),
	}
}

// within follows names into objects, and references on the way. It returns nil where there is
// no such member.
func within(value any, names ...string) any {
	for _, name := range names {
		object, _ := value.(map[string]any)
		value = resolve(object[name])
	}
	return value
}

// resolve returns what a reference refers to, and any other value as it is.
func resolve(value any) any {
	object, _ := value.(map[string]any)
	path, ok := object["$ref"].(string)
	if !ok {
		return value
	}
	return within(document(), strings.Split(path, "/")[1:]...)
}

// contractFault says what the contract does not know of an answer: its status, its content type,
// the code of a problem, a member. An answer to a path or a method that is not in the contract
// passes, but a problem must be one.
func (r *Response) contractFault() error {
	operation := within(document(), "paths", contractPath(r.Path), strings.ToLower(r.Method))
	schema := within(document(), "components", "schemas", "Problem")
	if operation != nil {
		response := r.response(operation)
		if response == nil {
			return errors.New("the contract does not have this status here")
		}
		contents, _ := within(response, "content").(map[string]any)
		isFile := contents["*/*"] != nil
		isEmpty := contents == nil && len(r.Body) == 0
		if isFile || isEmpty {
			return nil
		}
		kind := r.Header.Get("Content-Type")
		schema = within(contents, kind, "schema")
		if schema == nil {
			return fmt.Errorf("the contract has no schema for the content type %q here", kind)
		}
	} else if r.Status < 400 || r.Method == "HEAD" {
		return nil
	}
	var body any
	if err := json.Unmarshal(r.Body, &body); err != nil {
		return err
	}
	return schemaFault(schema, body)
}

// response returns what the contract has for a status: a HEAD has one response for all 4XX.
func (r *Response) response(operation any) any {
	status := strconv.Itoa(r.Status)
	response := within(operation, "responses", status)
	if response == nil {
		response = within(operation, "responses", status[:1]+"XX")
	}
	return response
}

// contractPath returns the path of the contract that a request's path is one of, such as
// /hubs/{hubId}, or "".
func contractPath(target string) string {
	target, _, _ = strings.Cut(target, "?")
	paths, _ := within(document(), "paths").(map[string]any)
	for template := range paths {
		pattern := pathParameter.ReplaceAllString(template, "?*")
		if fits, _ := path.Match(pattern, target); fits {
			return template
		}
	}
	return ""
}

var pathParameter = regexp.MustCompile(`{[^}]*}`)

// jsonTypes are the types of a schema by those that encoding/json decodes them to.
var jsonTypes = map[string]string{
	"string":                  "string",
	"float64":                 "number",
	"bool":                    "boolean",
	"[]interface {}":          "array",
	"map[string]interface {}": "object",
}

// schemaFault compares a JSON value with the types, members and choices of a schema. Lengths,
// ranges, patterns and formats are not compared: the tests of each member look at its value.
func schemaFault(schema, value any) error {
	rules, _ := resolve(schema).(map[string]any)
	all, _ := rules["allOf"].([]any)
	for _, part := range all {
		if err := schemaFault(part, value); err != nil {
			return err
		}
	}
	want, typed := rules["type"]
	number, _ := value.(float64)
	if want == "integer" && number == math.Trunc(number) {
		want = "number"
	}
	if got := jsonTypes[fmt.Sprintf("%T", value)]; typed && got != want {
		return fmt.Errorf("%v is %s, the contract has %s", value, got, want)
	}
	choices, limited := rules["enum"].([]any)
	if limited && !slices.Contains(choices, value) {
		return fmt.Errorf("%v is none of %v in the contract", value, choices)
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

func membersFault(rules, object map[string]any) error {
	required, _ := rules["required"].([]any)
	for _, name := range required {
		if _, sent := object[name.(string)]; !sent {
			return fmt.Errorf("the member %s is missing", name)
		}
	}
	properties, listed := rules["properties"].(map[string]any)
	for name, value := range object {
		schema, known := properties[name]
		if !known && listed && rules["type"] != nil {
			return fmt.Errorf("the contract has no member %s", name)
		}
		if err := schemaFault(schema, value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
