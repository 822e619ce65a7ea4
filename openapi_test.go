package main

// web/openapi.json is made here, so that it can't differ from what the server does: routes,
// access, limits, fields and their rules are the server's own, and the words and examples stand
// in testdata/contract.json. After a change of the contract:
//
//	go test -run TestOpenAPI -update .

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

func TestOpenAPI(t *testing.T) {
	g := newGenerator(t)
	made := encodeJSON(t, g.document(), "  ")
	g.checkAllUsed()
	if *update {
		if err := os.WriteFile("web/openapi.json", made, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	onDisk := hubstest.ReadFile(t, "web/openapi.json")
	got := strings.Split(onDisk, "\n")
	for i, line := range strings.Split(string(made), "\n") {
		if i >= len(got) || got[i] != line {
			t.Fatalf("web/openapi.json lacks what the contract says, in line %d: %s\n"+
				"After a change that is meant: go test -run TestOpenAPI -update .", i+1, line)
		}
	}
	if len(onDisk) != len(made) {
		t.Error("web/openapi.json has more lines than the contract")
	}
}

// An object is a JSON object whose members keep their order: names and values in turn.
type object []any

func (o object) MarshalJSON() ([]byte, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	separators := []string{",", ":"}
	out.WriteString("{")
	for i, part := range o {
		if i > 0 {
			out.WriteString(separators[i%2])
		}
		if err := encoder.Encode(part); err != nil {
			return nil, err
		}
	}
	out.WriteString("}")
	return out.Bytes(), nil
}

// member returns the place of a member's value.
func (o object) member(name string) *any {
	return &o[slices.Index(o, any(name))+1]
}

func encodeJSON(t *testing.T, value any, indent string) []byte {
	t.Helper()
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", indent)
	if err := encoder.Encode(value); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// ref returns a reference to a component.
func ref(kind, name string) object {
	return object{"$ref", "#/components/" + kind + "/" + name}
}

// contractWords is testdata/contract.json.
type contractWords struct {
	About       []string // for people
	Description []string
	Tags        json.RawMessage
	FileHeaders json.RawMessage // the parameters of GET /files/{fileId}/{name}
	Upload      json.RawMessage // the body of POST /files/upload
	Components  struct{ SecuritySchemes, Parameters, Headers, Problem json.RawMessage }
	Operations  map[string]operationWords // by method and path
	Fields      map[string]fieldWords     // by type and name, or by name alone
	Problems    []problemWords
}

type operationWords struct {
	ID, Tag, Summary, Success, Text string
	Problems                        []string // codes of what it does itself
}

type fieldWords struct {
	Text    string
	Example any
	Schema  object // members to add to the schema of the field
}

type problemWords struct {
	Status             int
	Code, Text, Detail string
}

// A generator makes web/openapi.json.
type generator struct {
	t         *testing.T
	words     contractWords
	used      map[string]bool    // the names of operations and fields
	inputs    map[string]*fields // by type: what is left when nothing was sent
	schemas   map[string]any
	responses map[string]object
}

func newGenerator(t *testing.T) *generator {
	t.Helper()
	text := hubstest.ReadFile(t, "testdata/contract.json")
	for name, value := range map[string]any{
		"terms":             TERMS_VERSION,
		"roles":             allRoles,
		"sessionDays":       sessionTTL.Hours() / 24,
		"codeLength":        codeLength,
		"codeSeconds":       codeTTL.Seconds(),
		"hubStatuses":       hubStatuses,
		"maxHubName":        maxHubName,
		"maxHubDescription": maxHubDescription,
		"maxPageLimit":      maxPageLimit,
		"maxPageOffset":     maxPageOffset,
	} {
		encoded := strings.TrimSpace(string(encodeJSON(t, value, "")))
		word := "<" + name + ">"
		text = strings.ReplaceAll(text, strconv.Quote(word), encoded)
		text = strings.ReplaceAll(text, word, strings.Trim(encoded, `"`))
	}
	g := &generator{
		t:         t,
		used:      map[string]bool{},
		inputs:    map[string]*fields{},
		schemas:   map[string]any{},
		responses: map[string]object{},
	}
	hubstest.Decode(t, "testdata/contract.json", text, &g.words)
	addInput(g, parseCodeRequest)
	addInput(g, parseGuess)
	addInput(g, parseAcceptance)
	addInput(g, parseNewHub)
	addInput(g, parseHubChange)
	addInput(g, parseHubQuery)
	return g
}

// addInput notes which fields an input asks for, and what it says when nothing is sent.
func addInput[In any](g *generator, parse func(*fields) In) {
	f := &fields{}
	in := parse(f)
	g.inputs[typeName(in)] = f
}

func typeName(v any) string {
	return reflect.TypeOf(v).Name()
}

func capital(name string) string {
	return strings.ToUpper(name[:1]) + name[1:]
}

func (g *generator) checkAllUsed() {
	described := slices.Collect(maps.Keys(g.words.Operations))
	described = slices.AppendSeq(described, maps.Keys(g.words.Fields))
	for _, name := range described {
		if !g.used[name] {
			g.t.Errorf("testdata/contract.json describes %s, which is no more", name)
		}
	}
}

func (g *generator) document() object {
	s := newServer(config{}, nil, io.Discard) // without the page for learners
	paths := map[string]object{}
	for _, r := range s.routes() {
		name := r.method + " " + r.path
		words, ok := g.words.Operations[name]
		if !ok {
			g.t.Fatalf("testdata/contract.json does not describe the operation %s: "+
				"add it to operations", name)
		}
		g.used[name] = true
		needs := strings.Replace(r.access.name, "-", "nothing", 1)
		limits, limitText := limitsOf(s, r)
		words.Text += "\n\nNeeds: " + needs + ". Limit: " + limitText + "."
		if paths[r.path] == nil {
			paths[r.path] = g.pathParameters(r.path)
		}
		operation := append(g.operation(r, words), "x-limits", limits)
		paths[r.path] = append(paths[r.path], strings.ToLower(r.method), operation)
		if r.method == "GET" {
			paths[r.path] = append(paths[r.path], "head", headOperation(operation, words))
		}
	}
	var codes []string
	for _, p := range g.words.Problems {
		codes = append(codes, p.Code)
	}
	c := g.words.Components
	g.schemas["Problem"] = json.RawMessage(
		bytes.Replace(c.Problem, []byte(`"<codes>"`), encodeJSON(g.t, codes, ""), 1))
	return object{
		"openapi", "3.1.0",
		"info", object{
			"title", "Hubs",
			"version", "1",
			"description", strings.Join(g.words.Description, "\n"),
		},
		"servers", []object{{"url", "/"}},
		"tags", g.words.Tags,
		"paths", paths,
		"components", object{
			"securitySchemes", c.SecuritySchemes,
			"parameters", c.Parameters,
			"headers", c.Headers,
			"responses", g.responses,
			"schemas", g.schemas,
		},
	}
}

// limitsOf returns the limits of a route, as members and in words.
func limitsOf(s *server, r route) (members []object, text string) {
	limits := []*limiter{s.clientLimit(r.method, r.path)}
	if r.contract.limit != nil {
		limits = append(limits, r.contract.limit)
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

// field returns the words for a field of a type.
func (g *generator) field(owner, name string) fieldWords {
	key := owner + "." + name
	words, ok := g.words.Fields[key]
	if !ok {
		key = name
		words, ok = g.words.Fields[key]
	}
	if !ok {
		g.t.Fatalf("testdata/contract.json does not describe the field %s: add it to fields, as %q or, "+
			"where it means the same in all types, as %q", name, owner+"."+name, name)
	}
	g.used[key] = true
	return words
}

func (g *generator) pathParameters(path string) object {
	parameters := []object{ref("parameters", "requestId")}
	for _, match := range regexp.MustCompile(`{([^}]*)}`).FindAllStringSubmatch(path, -1) {
		name := match[1]
		words := g.field("file", name)
		schema := append(object{"type", "string"}, words.Schema...)
		parameters = append(parameters, parameter(name, "path", true, schema, words))
	}
	return object{"parameters", parameters}
}

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
	input := typeName(r.contract.input)
	f := g.inputs[input]
	switch {
	case isFile(r):
		o = append(o, "parameters", g.words.FileHeaders)
	case r.path == "/files/upload":
		o = append(o, "requestBody", g.words.Upload)
	case f != nil && r.method == "GET":
		o = append(o, "parameters", g.queryParameters(input, f))
	case f != nil:
		g.schemas[capital(input)] = g.inputSchema(input, f)
		body := object{"application/json", object{"schema", ref("schemas", capital(input))}}
		o = append(o, "requestBody", object{"required", true, "content", body})
	case input != "nothing":
		g.t.Fatalf("openapi_test.go: newGenerator lacks the input %s: addInput(g, parse…)", input)
	}
	return append(o, "responses", g.allResponses(r, words))
}

func isFile(r route) bool {
	_, is := r.contract.output.(download)
	return is
}

func (g *generator) queryParameters(input string, f *fields) (parameters []object) {
	for _, r := range f.taken {
		schema, words := g.ruleSchema(input, r)
		parameters = append(parameters, parameter(r.name, "query", r.required, schema, words))
	}
	return parameters
}

// inputSchema returns the schema of a JSON body. A change, which takes any of the fields, does
// not complain of one that is missing.
func (g *generator) inputSchema(input string, f *fields) object {
	isRequired := func(e fieldError) bool { return e.Detail == "is required" }
	isChange := !slices.ContainsFunc(f.errors, isRequired)
	var required []string
	var properties object
	for _, asked := range f.taken {
		// A generator of types would take a member with a default for a required one.
		fallback := asked.fallback
		asked.fallback = ""
		schema, words := g.ruleSchema(input, asked)
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

// What a text may consist of: no control characters, and in a text of several lines none but
// tabs and line breaks.
const (
	linePattern = `^[^\u0000-\u001f\u007f-\u009f\ufffd]*$`
	textPattern = `^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\ufffd]*$`
)

func (g *generator) ruleSchema(owner string, r rule) (object, fieldWords) {
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

// output returns the schema of a type and an example of it. Those of structs stand in
// components.schemas.
func (g *generator) output(of reflect.Type) (schema object, example any) {
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

// allResponses are by status: success first, then the problems.
func (g *generator) allResponses(r route, words operationWords) object {
	headers := headerRefs()
	_, signsIn := r.contract.input.(guess)
	switch {
	case r.status == 201:
		headers = headerRefs("Location")
	case signsIn || r.path == "/auth/logout":
		headers = headerRefs("Set-Cookie")
	case isFile(r):
		headers = headerRefs("ETag", "Content-Disposition")
	}
	success := object{"description", words.Success, "headers", headers}
	file := object{"*/*", object{
		"schema", object{"type", "string", "format", "binary"},
		"example", "Ships and ferries.",
	}}
	switch r.contract.output.(type) {
	case nothing:
	case download:
		success = append(success, "content", file)
	case document:
		openAPI := object{"schema", object{"type", "object"}, "example", object{"openapi", "3.1.0"}}
		success = append(success, "content", object{"application/json", openAPI})
	default:
		schema, example := g.output(reflect.TypeOf(r.contract.output))
		answer := object{"schema", schema, "example", example}
		success = append(success, "content", object{"application/json", answer})
	}
	responses := object{strconv.Itoa(r.status), success}
	if isFile(r) {
		responses = append(responses,
			"206", object{
				"description", "The part that Range asked for.",
				"headers", headerRefs("ETag", "Content-Disposition", "Content-Range"),
				"content", file,
			},
			"304", object{
				"description", "The client has it already (If-None-Match).",
				"headers", headers,
			})
	}
	return append(responses, g.problemResponses(r, words)...)
}

// headerRefs refers to headers of an answer. Each has the request's id.
func headerRefs(names ...string) object {
	headers := object{"X-Request-Id", ref("headers", "X-Request-Id")}
	for _, name := range names {
		headers = append(headers, name, ref("headers", name))
	}
	return headers
}

// problemResponses refers to one response a status, which stands in components.responses under
// the codes that it may have.
func (g *generator) problemResponses(r route, words operationWords) (responses object) {
	byStatus := map[int][]problemWords{}
	for _, p := range g.words.Problems {
		if isPossible(r, words, p.Code) {
			byStatus[p.Status] = append(byStatus[p.Status], p)
		}
	}
	for _, status := range slices.Sorted(maps.Keys(byStatus)) {
		var names, texts, codes []string
		var examples object
		for _, p := range byStatus[status] {
			words := strings.Split(p.Code, "_")
			for i := range words {
				words[i] = capital(words[i])
			}
			names = append(names, strings.Join(words, ""))
			texts = append(texts, "- `"+p.Code+"`: "+p.Text)
			codes = append(codes, p.Code)
			examples = append(examples, p.Code, object{"value", p.example()})
		}
		name := strings.Join(names, "Or")
		headers := headerRefs()
		switch status {
		case 401:
			headers = headerRefs("WWW-Authenticate")
		case 429, 503:
			headers = headerRefs("Retry-After")
		}
		schema := object{"allOf", []object{
			ref("schemas", "Problem"),
			{"properties", object{"code", object{"enum", codes}}},
		}}
		answer := object{"schema", schema, "examples", examples}
		g.responses[name] = object{
			"description", strings.Join(texts, "\n"),
			"headers", headers,
			"content", object{"application/problem+json", answer},
		}
		responses = append(responses, strconv.Itoa(status), ref("responses", name))
	}
	return responses
}

// isPossible reports whether a route may answer with this problem: because of its access rule, its
// method, its input or its path, or because its words say so of what it does.
func isPossible(r route, words operationWords, code string) bool {
	isWrite := !isRead(r.method)
	takesInput := r.contract.parse != nil
	_, isFixed := r.contract.output.(document)
	possible := map[string]bool{
		"invalid_request":        takesInput,
		"unauthenticated":        !r.access.public,
		"account_suspended":      !r.access.public,
		"terms_not_accepted":     r.access.terms,
		"forbidden":              r.access.roles != nil,
		"cross_origin":           isWrite,
		"not_found":              strings.Contains(r.path, "{"),
		"precondition_failed":    isWrite,
		"too_large":              takesInput && isWrite,
		"unsupported_media_type": takesInput && isWrite,
		"rate_limited":           true,
		"internal":               true,
		"unavailable":            !isFixed,
	}
	return possible[code] || slices.Contains(words.Problems, code)
}

// example is an answer with this problem.
func (p problemWords) example() object {
	example := object{
		"title", http.StatusText(p.Status),
		"status", p.Status,
		"detail", p.Detail,
		"code", p.Code,
		"requestId", "web-7f3a.42",
	}
	if p.Code == "invalid_request" {
		wrong := object{"field", "limit", "detail", "must be a whole number from 1 to 100"}
		example = append(example, "errors", []object{wrong})
	}
	return example
}

// headOperation describes HEAD, which works wherever GET does, by what describes GET.
func headOperation(get object, words operationWords) object {
	head := slices.Clone(get)
	*head.member("operationId") = "head" + strings.TrimPrefix(capital(words.ID), "Get")
	*head.member("summary") = "Headers only: " +
		strings.ToLower(words.Summary[:1]) + words.Summary[1:]
	*head.member("description") =
		"Answers as GET does, with the same status and headers, and without a body."
	responses := head.member("responses")
	*responses = headResponses((*responses).(object))
	return head
}

func headResponses(get object) (head object) {
	for answer := range slices.Chunk(get, 2) {
		if status := answer[0].(string); status < "400" {
			success := answer[1].(object)
			head = append(head, status, object{
				"description", "As GET: " + (*success.member("description")).(string),
				"headers", *success.member("headers"),
			})
		}
	}
	failed := object{
		"description", "As GET, without the problem.",
		"headers", headerRefs(),
	}
	return append(head, "4XX", failed, "5XX", failed)
}

// The policy of the page names its script and its style by their hashes: with a wrong one, the
// page does nothing.
func TestPageHashes(t *testing.T) {
	page := indexPage
	for _, tag := range []string{"script", "style"} {
		_, rest, _ := strings.Cut(page, "<"+tag+">")
		content, _, _ := strings.Cut(rest, "</"+tag+">")
		sum := sha256.Sum256([]byte(content))
		want := tag + "-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
		page = regexp.MustCompile(tag+"-src '[^']*'").ReplaceAllLiteralString(page, want)
		if !strings.Contains(indexPage, want) && !*update {
			t.Errorf("web/index.html: the policy in its meta element must have: %s\n"+
				"After a change that is meant: go test -run TestPageHashes -update .", want)
		}
	}
	if !*update {
		return
	}
	if err := os.WriteFile("web/index.html", []byte(page), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Each table is known to deploy/roles.sql: without a grant the server can't read it, but the
// tests, which connect as the owner, can. It is known to checkTables as well: else neither the
// start nor /healthz would see that it is missing.
func TestEachTableIsGrantedAndChecked(t *testing.T) {
	t.Parallel()
	roles := hubstest.ReadFile(t, "deploy/roles.sql")
	_, checked, _ := strings.Cut(hubstest.ReadFile(t, "store.go"), "checkTables() error {")
	checked, _, _ = strings.Cut(checked, " where false")
	tables := matches(t, "schema.sql", `create table if not exists (\w+)`)
	if len(tables) < 4 {
		t.Fatalf("schema.sql: found the tables %q only", tables)
	}
	for _, table := range tables {
		grant := regexp.MustCompile(`(?m)^grant select.* on ` + table + `\s+to hubs_server;`)
		if !grant.MatchString(roles) {
			t.Errorf("deploy/roles.sql must have: grant select, … on %s to hubs_server;", table)
		}
		if !strings.Contains(checked, " from "+table+")") {
			t.Errorf("store.go: checkTables must read the table %s", table)
		}
	}
}

// N1: there are threads for all connections, each of which may wait for the disk.
// H3: a stop takes as long as the server needs, for the requests and then for the mail.
func TestUnitLeavesTheServerRoom(t *testing.T) {
	t.Parallel()
	for name, least := range map[string]int{
		"TasksMax":       maxConnections + 100,
		"LimitNOFILE":    4 * maxConnections,
		"TimeoutStopSec": 2 + int(2*stopTimeout/time.Second),
	} {
		set := matches(t, "deploy/hubs.service", `(?m)^`+name+`=([0-9]+)$`)
		got, err := strconv.Atoi(strings.Join(set, " "))
		if err != nil || got < least {
			t.Errorf("deploy/hubs.service: %s is %q, want at least %d", name, set, least)
		}
	}
}
