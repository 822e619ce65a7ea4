package hubstest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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

// MaxLength returns the maxLength of a property of a schema of the contract, such as Hub and name.
// It panics if there is none.
func MaxLength(schema, property string) int {
	limit := within(document(), "components", "schemas", schema, "properties", property, "maxLength")
	return int(limit.(float64))
}

// An Operation is an operation of the contract, but for HEAD, which answers as GET does.
type Operation struct {
	Route  string // "GET /hubs"
	Needs  string // "session, terms", or "nothing"
	Status int    // of a success
	Limits []Limit
	Fields []Field // of the query or of the JSON body

	Item  map[string]any // schema of an item of the list that it returns; nil if it returns none
	Order string         // of that list, such as "name asc" (x-order); "" if orderBy says it
	Owner any            // whether it is for the owner only (x-owner); nil if that is not said
}

// A Limit is a rate limit: the most requests of one key that pass within a period.
type Limit struct {
	Requests int
	Period   time.Duration
	By       string // description of the key, such as "client address"
}

// String returns the limit as the server writes it, such as "5 in 15 minutes by e-mail".
func (l Limit) String() string {
	period := fmt.Sprintf("%.0f minutes", l.Period.Minutes())
	if l.Period < time.Minute {
		period = fmt.Sprintf("%.0f s", l.Period.Seconds())
	}
	return fmt.Sprintf("%d in %s by %s", l.Requests, period, l.By)
}

// A Field is a parameter of a query, or a member of a JSON body.
type Field struct {
	Name       string
	IsRequired bool
	Matches    string // of a filter: "part" or "whole" (x-matches)
	Schema     map[string]any
}

// Operations returns the operations of the contract, ordered by route. It panics if one of them
// does not say what it needs.
func Operations() (all []Operation) {
	for path, item := range within(document(), "paths").(map[string]any) {
		for method, operation := range item.(map[string]any) {
			if method == "parameters" || method == "head" {
				continue
			}
			_, needs, isSaid := strings.Cut(within(operation, "description").(string), "Needs: ")
			if !isSaid {
				panic("the contract does not say what this needs: " + method + " " + path)
			}
			statuses := within(operation, "responses").(map[string]any)
			first := slices.Min(slices.Collect(maps.Keys(statuses)))
			success, _ := strconv.Atoi(first)
			answer := within(statuses, first, "content", "application/json", "schema")
			item, _ := within(answer, "properties", "items", "items").(map[string]any)
			order, _ := within(operation, "x-order").(string)
			all = append(all, Operation{
				Route:  strings.ToUpper(method) + " " + path,
				Needs:  strings.TrimSuffix(needs, "."),
				Status: success,
				Limits: limitsOf(operation),
				Fields: fieldsOf(operation),
				Item:   item,
				Order:  order,
				Owner:  within(operation, "x-owner"),
			})
		}
	}
	slices.SortFunc(all, func(a, b Operation) int { return strings.Compare(a.Route, b.Route) })
	return all
}

// limitsOf returns the limits of an operation, that by client address first.
func limitsOf(operation any) (limits []Limit) {
	for _, reference := range within(operation, "x-limits").([]any) {
		limit := resolve(reference).(map[string]any)
		limits = append(limits, Limit{
			Requests: int(limit["requests"].(float64)),
			Period:   time.Duration(limit["seconds"].(float64)) * time.Second,
			By:       limit["by"].(string),
		})
	}
	return limits
}

// fieldsOf returns the parameters of an operation's query, or the members of its JSON body.
func fieldsOf(operation any) (fields []Field) {
	parameters, _ := within(operation, "parameters").([]any)
	for _, parameter := range parameters {
		if within(resolve(parameter), "in") != "query" {
			continue
		}
		name := within(resolve(parameter), "name").(string)
		matches, _ := within(resolve(parameter), "x-matches").(string)
		schema := within(resolve(parameter), "schema").(map[string]any)
		fields = append(fields, Field{Name: name, Matches: matches, Schema: schema})
	}
	body := within(operation, "requestBody", "content", "application/json", "schema")
	required, _ := within(body, "required").([]any)
	members, _ := within(body, "properties").(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(members)) {
		fields = append(fields, Field{
			Name:       name,
			IsRequired: slices.Contains(required, any(name)),
			Schema:     within(members, name).(map[string]any),
		})
	}
	return fields
}

// LimitOf returns the limit of a route such as "GET /hubs": the last one that the contract lists
// for it. A route that has a limit besides the one by client address lists its own last.
func LimitOf(t testing.TB, route string) Limit {
	for _, operation := range Operations() {
		if operation.Route == route {
			return operation.Limits[len(operation.Limits)-1]
		}
	}
	t.Fatalf("setup: the contract has no operation %s", route)
	return Limit{}
}

// Example returns an example of a schema: its own, or an object with the examples of its members.
func Example(schema any) any {
	schema = resolve(schema)
	examples, _ := within(schema, "examples").([]any)
	if len(examples) > 0 {
		return examples[0]
	}
	object := map[string]any{}
	members, _ := within(schema, "properties").(map[string]any)
	for name, member := range members {
		object[name] = Example(member)
	}
	return object
}

// Pattern returns the pattern of a schema, or nil.
func Pattern(schema map[string]any) *regexp.Regexp {
	pattern, hasPattern := schema["pattern"].(string)
	if !hasPattern {
		return nil
	}
	return compile(pattern)
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
	path := contractPath(r.Path)
	operation := within(document(), "paths", path, strings.ToLower(r.Method))
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
	return r.bodyFault(within(document(), "components", "schemas", "Problem"))
}

// requestFault returns an error if the server has accepted a request that the contract does not
// permit. It compares path, query, headers and JSON body. An operation that lists no query or no
// body ignores them. A body that the test streams is compared by its type only.
func (r *Response) requestFault(template string, operation any) error {
	target, query, _ := strings.Cut(r.Path, "?")
	unlisted, _ := url.ParseQuery(query) // the server has accepted it
	takesQuery := false
	for _, parameter := range parametersOf(template, operation) {
		name := parameter["name"].(string)
		var sent []string
		switch parameter["in"] {
		case "path":
			sent = []string{inPath(template, target, name)}
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
	contents, _ := within(operation, "requestBody", "content").(map[string]any)
	kind, _, _ := mime.ParseMediaType(r.sent.Get("Content-Type"))
	if contents != nil && contents[kind] == nil {
		return fmt.Errorf("accepted, but not in the contract: the content type %q", kind)
	}
	if kind != "application/json" || contents == nil || r.sentBody == "" {
		return nil
	}
	var body any
	json.Unmarshal([]byte(strings.TrimPrefix(r.sentBody, "\uFEFF")), &body) // a byte order mark
	if err := schemaFault(within(contents, kind, "schema"), body); err != nil {
		return fmt.Errorf("accepted, against the contract: %w", err)
	}
	return nil
}

// parametersOf returns the parameters of an operation, also those of its path.
func parametersOf(template string, operation any) (all []map[string]any) {
	for _, list := range []any{within(document(), "paths", template), operation} {
		parameters, _ := within(list, "parameters").([]any)
		for _, parameter := range parameters {
			all = append(all, resolve(parameter).(map[string]any))
		}
	}
	return all
}

// inPath returns the value of a parameter in a path, such as that of hubId in /hubs/1 for
// /hubs/{hubId}.
func inPath(template, path, name string) string {
	i := slices.Index(strings.Split(template, "/"), "{"+name+"}")
	value, _ := url.PathUnescape(strings.Split(path, "/")[i]) // the server has accepted it
	return value
}

// parameterFault compares a parameter, or a header of an answer, with its schema. Both are texts,
// also if the schema says integer.
func parameterFault(schema any, text string) error {
	if within(schema, "type") == "integer" {
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
	response := within(operation, "responses", strconv.Itoa(r.Status))
	if response == nil {
		return errors.New("the contract does not list this status for this route")
	}
	headers, _ := within(response, "headers").(map[string]any)
	for name, header := range headers {
		for _, value := range r.Header.Values(name) {
			if err := parameterFault(within(header, "schema"), value); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
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
	examples, _ := within(contents, kind, "examples").(map[string]any) // of a problem, by its code
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

// Unseen returns the answers of the contract that no test of this package has got. It leaves out
// HEAD, which answers as GET does, and failures of the server, which test/faults causes.
func Unseen() (unseen []string) {
	for _, o := range Operations() {
		method, path, _ := strings.Cut(o.Route, " ")
		statuses := within(document(), "paths", path, strings.ToLower(method), "responses")
		for status := range statuses.(map[string]any) {
			answer := o.Route + ": " + status
			if _, isSeen := seen.Load(answer); !isSeen && status < "500" {
				unseen = append(unseen, answer)
			}
		}
	}
	slices.Sort(unseen)
	return unseen
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
		return fmt.Errorf("got %d bytes, want at most %v", len(text), most)
	}
	choices, hasChoices := rules["enum"].([]any)
	if hasChoices && !slices.Contains(choices, any(text)) {
		return fmt.Errorf("got %q, want one of %v", text, choices)
	}
	if constant := rules["const"]; constant != nil && text != constant {
		return fmt.Errorf("got %q, want %v", text, constant)
	}
	pattern := Pattern(rules)
	if pattern != nil && !pattern.MatchString(text) {
		return fmt.Errorf("got %q, want a match of %s", text, pattern)
	}
	length := float64(utf8.RuneCountInString(text))
	return rangeFault(length, rules["minLength"], rules["maxLength"])
}

// rangeFault returns an error if a number or a length is outside its bounds. Either may be nil.
func rangeFault(got float64, least, most any) error {
	if bound, ok := least.(float64); ok && got < bound {
		return fmt.Errorf("got %v, want at least %v", got, bound)
	}
	if bound, ok := most.(float64); ok && got > bound {
		return fmt.Errorf("got %v, want at most %v", got, bound)
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
