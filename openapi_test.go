package main

// TestOpenAPI compares web/openapi.json with the document that this file generates. So the contract
// and the server can't differ. After a change of the contract, run:
//
//	go test -run TestOpenAPI -update .
//
// The generator takes texts and examples from testdata/contract.json, and everything else from the
// server's own tables and types: routes, access rules, limits, fields and their rules. So it can't
// show a mistake in them: test/api/access_test.go repeats the access rules, and
// TestNumbersAreAsDocumented and TestRequestLimits the numbers. To read the generator,
// begin with generator.document, which goes through the routes. The functions below it follow the
// order of an operation in the document: parameters and body, the answer to a success, problems,
// and at last HEAD.
//
// At the end of this file are tests of other files that must follow the code.

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"flag"
	"io"
	"maps"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

var update = flag.Bool("update", false, "write web/openapi.json anew")

// web/openapi.json is exactly the document that the generator makes, and testdata/contract.json
// describes nothing else. With -update, the test writes web/openapi.json.
func TestOpenAPI(t *testing.T) {
	g := newGenerator(t)
	made := encodeJSON(g.document(), "  ")
	g.wantAllUsed()
	if word := regexp.MustCompile(`<\w+>`).Find(made); word != nil {
		t.Errorf("testdata/contract.json has the word %s, which newGenerator does not replace", word)
	}
	if *update {
		hubstest.Must(t, os.WriteFile("web/openapi.json", made, 0o644))
		return
	}
	hubstest.WantText(t, "web/openapi.json", hubstest.ReadFile(t, "web/openapi.json"), string(made))
	if t.Failed() {
		t.Error("if the change is intended, run: go test -run TestOpenAPI -update .")
	}
}

// An object is a JSON object that keeps the order of its members. Its elements are names and values
// in turn.
type object []any

// MarshalJSON encodes the members in their order.
func (o object) MarshalJSON() ([]byte, error) {
	out := []byte("{")
	for i, part := range o {
		if i > 0 {
			out = append(out, ",:"[i%2])
		}
		out = append(out, encodeJSON(part, "")...)
	}
	return append(out, '}'), nil
}

// encodeJSON encodes a value, indented by indent, with a line break at the end. It panics if the
// value has no JSON form.
func encodeJSON(value any, indent string) []byte {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", indent)
	if err := encoder.Encode(value); err != nil {
		panic(err)
	}
	return out.Bytes()
}

// ref returns a reference to a component.
func ref(kind, name string) object {
	return object{"$ref", "#/components/" + kind + "/" + name}
}

// contractWords is the content of testdata/contract.json: the texts and examples of the contract.
type contractWords struct {
	About       []string // for readers of the file; not in the document
	Description []string
	Document    json.RawMessage           // the document, with words for what the generator makes
	Problem     json.RawMessage           // the schema of all problems
	Operations  map[string]operationWords // by method and path
	Fields      map[string]fieldWords     // by type and name, or by name alone
	Problems    []problemWords
}

// operationWords describe an operation.
type operationWords struct {
	ID, Tag, Summary, Success, Text string
	Problems                        []string        // codes that isPossible can't derive
	Headers                         []string        // of a success, besides X-Request-Id
	Content                         json.RawMessage // of a success that the handler sends itself
	Parameters, RequestBody         json.RawMessage // that the handler reads itself
}

// fieldWords describe a field of an input or an output.
type fieldWords struct {
	Text    string
	Example any
	Schema  object // members to add to the schema of the field
}

// problemWords describe a problem, and the detail of an example.
type problemWords struct {
	Status             int
	Code, Text, Detail string
	Headers            []string // of all problems with this status, besides X-Request-Id
}

// A generator makes web/openapi.json.
type generator struct {
	t         *testing.T
	words     contractWords
	used      map[string]bool   // names of the operations and fields whose words were used
	schemas   map[string]any    // of components
	responses map[string]object // of components
}

// newGenerator reads testdata/contract.json. It replaces words in angle brackets by constants of
// the server.
func newGenerator(t *testing.T) *generator {
	t.Helper()
	text := fillInJSON(hubstest.ReadFile(t, "testdata/contract.json"), object{
		"terms", TERMS_VERSION,
		"roles", allRoles,
		"sessionDays", sessionTTL.Hours() / 24,
		"codeLength", codeLength,
		"codeSeconds", codeTTL.Seconds(),
		"hubStatuses", hubStatuses,
		"maxHubName", maxHubName,
		"maxHubDescription", maxHubDescription,
		"maxPageLimit", maxPageLimit,
		"maxPageOffset", maxPageOffset,
	})
	g := &generator{
		t:         t,
		used:      map[string]bool{},
		schemas:   map[string]any{},
		responses: map[string]object{},
	}
	hubstest.Decode(t, "testdata/contract.json", text, &g.words)
	return g
}

// fillInJSON replaces words in angle brackets by JSON values, in turn. Within a text, it leaves out the
// quotes of the value.
func fillInJSON(text string, values object) string {
	for pair := range slices.Chunk(values, 2) {
		word := "<" + pair[0].(string) + ">"
		encoded := strings.TrimSpace(string(encodeJSON(pair[1], "")))
		text = strings.ReplaceAll(text, strconv.Quote(word), encoded)
		text = strings.ReplaceAll(text, word, strings.Trim(encoded, `"`))
	}
	return text
}

// A shape is what the generator must know of a contract.
type shape struct {
	input  string // name of its type, without the package
	output reflect.Type
	rules  []rule // of the fields that the endpoint takes
}

// shape returns the shape of a contract. It parses the input as if no field had been sent. The test
// adds this method to the server's type, because only its methods know the types In and Out.
func (c typedContract[In, Out]) shape() shape {
	f := &fields{}
	if c.parse != nil {
		c.parse(f)
	}
	return shape{
		input:  reflect.TypeFor[In]().Name(),
		output: reflect.TypeFor[Out](),
		rules:  f.taken,
	}
}

// shapeOf returns the shape of a route's contract.
func shapeOf(r route) shape {
	return r.contract.(interface{ shape() shape }).shape()
}

// capital returns the name with a capital first letter.
func capital(name string) string {
	return strings.ToUpper(name[:1]) + name[1:]
}

// wantAllUsed fails the test for words in testdata/contract.json that the document does not use.
func (g *generator) wantAllUsed() {
	g.t.Helper()
	operations := slices.Collect(maps.Keys(g.words.Operations))
	for _, name := range slices.AppendSeq(operations, maps.Keys(g.words.Fields)) {
		if !g.used[name] {
			g.t.Errorf("testdata/contract.json describes %s, which the server does not have", name)
		}
	}
}

// document returns the whole document.
func (g *generator) document() json.RawMessage {
	g.t.Helper()
	s := newServer(config{}, nil, io.Discard) // not local, so without the page at /
	var codes []string
	for _, p := range g.words.Problems {
		codes = append(codes, p.Code)
	}
	paths := map[string]object{}
	for _, r := range s.routes() {
		name := r.method + " " + r.path
		words, ok := g.words.Operations[name]
		if !ok {
			g.t.Fatalf("testdata/contract.json does not describe the operation %s: "+
				"add it to operations", name)
		}
		g.used[name] = true
		for _, code := range words.Problems {
			if !slices.Contains(codes, code) {
				g.t.Errorf("testdata/contract.json: %s has the unknown problem %s", name, code)
			}
		}
		needs := r.access.String()
		if r.access.public {
			needs = "nothing"
		}
		limits, limitText := limitsOf(s, r)
		words.Text += "\n\nNeeds: " + needs + ". Limit: " + limitText + "."
		if paths[r.path] == nil {
			paths[r.path] = g.pathParameters(r.path)
		}
		responses := g.allResponses(r, words)
		add := func(method string, words operationWords, responses object) {
			operation := append(g.operation(r, words), "responses", responses, "x-limits", limits)
			paths[r.path] = append(paths[r.path], method, operation)
		}
		add(strings.ToLower(r.method), words, responses)
		if r.method == "GET" { // the server answers HEAD there, too
			add("head", headWords(words), headResponses(responses))
		}
	}
	g.schemas["Problem"] = g.words.Problem
	return json.RawMessage(fillInJSON(string(g.words.Document), object{
		"description", strings.Join(g.words.Description, "\n"),
		"paths", paths,
		"responses", g.responses,
		"schemas", g.schemas,
		"codes", codes, // in the schema of a problem
	}))
}

// limitsOf returns the limits of a route, as the value of x-limits and as a text.
func limitsOf(s *server, r route) (members []object, text string) {
	limits := []*limiter{s.clientLimit(r.method, r.path)}
	if own := r.contract.ownLimit(); own != nil {
		limits = append(limits, own)
	}
	var texts []string
	for _, l := range limits {
		texts = append(texts, l.String())
		members = append(members, object{
			"requests", l.burst,
			"seconds", l.period.Seconds(),
			"by", l.by,
		})
	}
	return members, strings.Join(texts, "; ")
}

// field returns the words for a field of a type: those of the type's own field, or else those of
// all fields with this name.
func (g *generator) field(owner, name string) fieldWords {
	g.t.Helper()
	key := owner + "." + name
	words, ok := g.words.Fields[key]
	if !ok {
		key = name
		words, ok = g.words.Fields[key]
	}
	if !ok {
		g.t.Fatalf("testdata/contract.json does not describe the field %s: "+
			"add it to fields, as %q or, if it means the same in all types, as %q",
			name, owner+"."+name, name)
	}
	g.used[key] = true
	return words
}

// pathParameters returns the parameters of all operations of a path.
func (g *generator) pathParameters(path string) object {
	parameters := []object{ref("parameters", "requestId")}
	for _, match := range regexp.MustCompile(`{([^}]*)}`).FindAllStringSubmatch(path, -1) {
		name := match[1]
		words := g.field("file", name) // {name} is the name of a file
		schema := append(object{"type", "string"}, words.Schema...)
		parameters = append(parameters, parameter(name, "path", true, schema, words))
	}
	return object{"parameters", parameters}
}

// parameter returns a parameter of an operation. in is "path" or "query".
func parameter(name, in string, required bool, schema object, words fieldWords) object {
	return object{
		"name", name,
		"in", in,
		"required", required,
		"description", words.Text,
		"schema", schema,
		"example", words.Example,
	}
}

// operation returns an operation, without its responses and limits.
func (g *generator) operation(r route, words operationWords) object {
	security := []object{}
	if !r.access.public {
		security = []object{{"session", []string{}}}
	}
	o := object{
		"operationId", words.ID,
		"tags", []string{words.Tag},
		"summary", words.Summary,
		"description", words.Text,
		"security", security,
	}
	switch {
	case words.Parameters != nil:
		o = append(o, "parameters", words.Parameters)
	case words.RequestBody != nil:
		o = append(o, "requestBody", words.RequestBody)
	case shapeOf(r).rules == nil:
	case r.method == "GET":
		o = append(o, "parameters", g.queryParameters(r))
	default:
		name := capital(shapeOf(r).input)
		g.schemas[name] = g.inputSchema(r)
		body := object{"application/json", object{"schema", ref("schemas", name)}}
		o = append(o, "requestBody", object{"required", true, "content", body})
	}
	return o
}

// queryParameters returns a parameter for each field of an input that is read from the query.
func (g *generator) queryParameters(r route) (parameters []object) {
	for _, asked := range shapeOf(r).rules {
		schema, words := g.ruleSchema(shapeOf(r).input, asked)
		parameters = append(parameters,
			parameter(asked.name, "query", asked.required, schema, words))
	}
	return parameters
}

// inputSchema returns the schema of a JSON body. The body of a change must have at least one of the
// fields, and an absent field has no default.
func (g *generator) inputSchema(r route) object {
	isChange := r.method == "PATCH"
	var required []string
	var properties object
	for _, asked := range shapeOf(r).rules {
		// The default is in the description, not in the schema: a program that makes types from the
		// schema would take a member with a default for a required one.
		fallback := asked.fallback
		asked.fallback = ""
		schema, words := g.ruleSchema(shapeOf(r).input, asked)
		if fallback != "" && !isChange {
			words.Text += " If it is not sent: " + fallback + "."
		}
		if asked.required {
			required = append(required, asked.name)
		}
		schema = append(schema, "description", words.Text, "examples", []any{words.Example})
		properties = append(properties, asked.name, schema)
	}
	schema := object{"type", "object", "additionalProperties", false}
	if isChange {
		schema = append(schema, "minProperties", 1)
	} else {
		schema = append(schema, "required", required)
	}
	return append(schema, "properties", properties)
}

// The patterns of texts that have no pattern of their own. linePattern allows no control
// characters. textPattern, for a text of several lines, allows only tabs and line breaks.
const (
	linePattern = `^[^\u0000-\u001f\u007f-\u009f\ufffd]*$`
	textPattern = `^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\ufffd]*$`
)

// ruleSchema returns the schema of an input's field, made from its rule, and the words for it.
func (g *generator) ruleSchema(owner string, r rule) (object, fieldWords) {
	g.t.Helper()
	words := g.field(owner, r.name)
	if r.number {
		fallback, err := strconv.Atoi(r.fallback)
		if err != nil {
			g.t.Fatal(r.name, err)
		}
		limits := object{"minimum", r.min, "maximum", r.max, "default", fallback}
		return append(object{"type", "integer"}, limits...), words
	}
	schema := object{"type", "string"}
	if r.min > 0 {
		schema = append(schema, "minLength", r.min)
	}
	if r.max > 0 {
		schema = append(schema, "maxLength", r.max)
	}
	switch {
	case r.oneOf != nil:
		schema = append(schema, "enum", r.oneOf)
	case r.pattern != nil:
		schema = append(schema, "pattern", r.pattern.String())
	case r.controls != "":
		schema = append(schema, "pattern", textPattern)
	default:
		schema = append(schema, "pattern", linePattern)
	}
	if r.fallback != "" {
		schema = append(schema, "default", r.fallback)
	}
	if r.trim {
		words.Text += " Spaces around it don't count."
	}
	return schema, words
}

// output returns the schema of an output's type, and an example. It puts the schema of a struct
// into components.schemas, and returns a reference to it.
func (g *generator) output(of reflect.Type) (schema object, example any) {
	g.t.Helper()
	if of == reflect.TypeFor[time.Time]() {
		return object{"type", "string", "format", "date-time"}, nil
	}
	switch of.Kind() {
	case reflect.Pointer:
		return g.output(of.Elem())
	case reflect.Slice:
		items, example := g.output(of.Elem())
		return object{"type", "array", "items", items}, []any{example}
	case reflect.String:
		return object{"type", "string"}, nil
	case reflect.Bool:
		return object{"type", "boolean"}, nil
	case reflect.Int, reflect.Int64:
		return object{"type", "integer"}, nil
	case reflect.Struct:
	default:
		g.t.Fatalf("%v has no JSON schema", of)
	}
	var names []string
	var properties, members object
	for field := range of.Fields() {
		if !field.IsExported() {
			continue
		}
		name := field.Tag.Get("json")
		words := g.field(of.Name(), name)
		property, member := g.output(field.Type)
		property = append(append(property, words.Schema...), "description", words.Text)
		if words.Example != nil {
			property = append(property, "examples", []any{words.Example})
			member = words.Example
		}
		names = append(names, name)
		properties = append(properties, name, property)
		members = append(members, name, member)
	}
	name := capital(of.Name())
	g.schemas[name] = object{"type", "object", "required", names, "properties", properties}
	return ref("schemas", name), members
}

// allResponses returns the responses of an operation by status: first the success, then the
// problems.
func (g *generator) allResponses(r route, words operationWords) object {
	if r.status == 201 {
		words.Headers = []string{"Location"}
	}
	headers := headerRefs(words.Headers...)
	success := object{"description", words.Success, "headers", headers}
	switch {
	case r.status == 204:
	case words.Content != nil:
		success = append(success, "content", words.Content)
	default:
		schema, example := g.output(shapeOf(r).output)
		answer := object{"schema", schema, "example", example}
		success = append(success, "content", object{"application/json", answer})
	}
	responses := object{strconv.Itoa(r.status), success}
	if r.path == "/files/{fileId}/{name}" { // its handler sends its answers itself
		responses = append(responses,
			"206", object{
				"description", "The part that Range asked for.",
				"headers", headerRefs(append(words.Headers, "Content-Range")...),
				"content", words.Content,
			},
			"304", object{
				"description", "The client has it already (If-None-Match).",
				"headers", headers,
			})
	}
	return append(responses, g.problemResponses(r, words)...)
}

// headerRefs returns references to the headers of an answer. X-Request-Id is always one of them.
func headerRefs(names ...string) object {
	headers := object{"X-Request-Id", ref("headers", "X-Request-Id")}
	for _, name := range names {
		headers = append(headers, name, ref("headers", name))
	}
	return headers
}

// problemResponses returns a reference to a response for each status that has a problem. It puts
// the response into components.responses, under a name made of the codes that the status may have.
func (g *generator) problemResponses(r route, words operationWords) (responses object) {
	byStatus := map[int][]problemWords{}
	for _, p := range g.words.Problems {
		if isPossible(r, words, p.Code) {
			byStatus[p.Status] = append(byStatus[p.Status], p)
		}
	}
	for _, status := range slices.Sorted(maps.Keys(byStatus)) {
		var texts, codes []string
		var examples object
		for _, p := range byStatus[status] {
			texts = append(texts, "- `"+p.Code+"`: "+p.Text)
			codes = append(codes, p.Code)
			examples = append(examples, p.Code, object{"value", p.example()})
		}
		schema := object{"allOf", []object{
			ref("schemas", "Problem"),
			{"properties", object{"code", object{"enum", codes}}},
		}}
		parts := strings.Split(strings.Join(codes, "_or_"), "_")
		for i, part := range parts {
			parts[i] = capital(part)
		}
		name := strings.Join(parts, "")
		answer := object{"schema", schema, "examples", examples}
		g.responses[name] = object{
			"description", strings.Join(texts, "\n"),
			"headers", headerRefs(byStatus[status][0].Headers...),
			"content", object{"application/problem+json", answer},
		}
		responses = append(responses, strconv.Itoa(status), ref("responses", name))
	}
	return responses
}

// isPossible reports whether a route may answer with this problem. Either testdata/contract.json lists
// it for the operation, or it follows from the access rule, the method, the input or the path.
func isPossible(r route, words operationWords, code string) bool {
	isWrite := !isRead(r.method)
	takesInput := shapeOf(r).rules != nil
	if slices.Contains(words.Problems, code) {
		return true
	}
	switch code {
	case "rate_limited", "internal":
		return true
	case "unavailable":
		return r.path != "/openapi.json" // which needs no database
	case "unauthenticated", "account_suspended":
		return !r.access.public
	case "terms_not_accepted":
		return r.access.terms
	case "forbidden":
		return r.access.roles != nil
	case "cross_origin", "precondition_failed":
		return isWrite
	case "not_found":
		return strings.Contains(r.path, "{")
	case "invalid_request":
		return takesInput
	case "too_large", "unsupported_media_type":
		return takesInput && isWrite
	}
	return false
}

// example returns an answer with this problem.
func (p problemWords) example() object {
	example := object{
		"title", http.StatusText(p.Status),
		"status", p.Status,
		"detail", p.Detail,
		"code", p.Code,
		"requestId", "web-7f3a.42",
	}
	if p.Code == "invalid_request" {
		wrong := object{"field", pageLimitRule.name, "detail", pageLimitRule.validate("")}
		example = append(example, "errors", []object{wrong})
	}
	return example
}

// headWords returns the words for the operation HEAD of a path, made from those of GET.
func headWords(get operationWords) operationWords {
	get.ID = "head" + strings.TrimPrefix(capital(get.ID), "Get")
	get.Summary = "Headers only: " + strings.ToLower(get.Summary[:1]) + get.Summary[1:]
	get.Text = "Answers as GET does, with the same status and headers, and without a body."
	return get
}

// headResponses returns the responses of HEAD, made from those of GET. They have no bodies.
func headResponses(get object) (head object) {
	for answer := range slices.Chunk(get, 2) {
		if status := answer[0].(string); status < "400" {
			success := answer[1].(object) // begins with its description and its headers
			head = append(head, status, object{
				"description", "As GET: " + success[1].(string),
				"headers", success[3],
			})
		}
	}
	failed := object{
		"description", "As GET, without the problem.",
		"headers", headerRefs(),
	}
	return append(head, "4XX", failed, "5XX", failed)
}

// The policy in web/index.html has the hashes of the page's script and style. With a wrong hash, a
// browser ignores the script or the style. With -update, the test writes the hashes.
func TestPageHashes(t *testing.T) {
	page := indexPage
	for _, tag := range []string{"script", "style"} {
		content := hubstest.Matches(t, "web/index.html", "(?s)<"+tag+">(.*)</"+tag+">")
		if len(content) != 1 {
			t.Fatalf("web/index.html: got %d elements %s without attributes, want 1", len(content), tag)
		}
		sum := sha256.Sum256([]byte(content[0]))
		want := tag + "-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
		page = regexp.MustCompile(tag+"-src '[^']*'").ReplaceAllLiteralString(page, want)
		if !strings.Contains(indexPage, want) && !*update {
			t.Errorf("web/index.html: want %s in the policy of its meta element\n"+
				"If the change is intended, run: go test -run TestPageHashes -update .", want)
		}
	}
	if *update {
		hubstest.Must(t, os.WriteFile("web/index.html", []byte(page), 0o644))
	}
}
