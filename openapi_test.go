//go:build moving

package main

// openapi.json is made here from the contract table, so it can't drift from what the
// server does: routes, access, limits, fields and their rules are the server's own;
// only the words and the examples stand in this file. After a change of the contract:
//
//	go test -run TestOpenAPI -update

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write openapi.json anew")

func TestOpenAPI(t *testing.T) {
	d := &apiDocument{t: t, schemas: map[string]object{}, problems: map[string]object{}, used: map[string]bool{}}
	var made bytes.Buffer
	encoder := json.NewEncoder(&made)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(d.make()); err != nil {
		t.Fatal(err)
	}
	for name := range fieldDocs {
		if !d.used[name] {
			t.Errorf("%s is described here, and the server does not have it", name)
		}
	}
	if *update {
		if err := os.WriteFile("openapi.json", made.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	onDisk, err := os.ReadFile("openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Split(made.String(), "\n")
	for i, line := range strings.Split(string(onDisk), "\n") {
		if i >= len(want) || line != want[i] {
			t.Fatalf("openapi.json is not what the contract says, from line %d on: %s\n"+
				"After a change that is meant: go test -run TestOpenAPI -update", i+1, line)
		}
	}
	if len(onDisk) != made.Len() {
		t.Fatal("openapi.json is shorter than the contract")
	}
}

// The server sends the document as it is checked in, but for the name of the cookie: that is
// the one of the environment that serves it.
func TestOpenAPIServed(t *testing.T) {
	t.Parallel()
	onDisk, err := os.ReadFile("openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	mails := newMailServer(t, mailOptions{})
	for name, test := range map[string]struct {
		env    map[string]string
		cookie string
	}{
		"local":      {nil, "hubs_auth_local"},
		"prefix":     {map[string]string{"COOKIE_PREFIX": "acme"}, "acme_auth_local"},
		"staging":    {stagingEnv(mails), "__Secure-hubs_auth_staging"},
		"production": {productionEnv(mails), "__Secure-hubs_auth_production"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startServer(t, test.env).client(t).do("GET", "/openapi.json", nil).want(t, 200)
			if kind := r.header.Get("Content-Type"); kind != "application/json" {
				t.Errorf("got %q, want application/json", kind)
			}
			var document struct {
				Components struct {
					SecuritySchemes struct{ Session struct{ In, Name string } }
				}
			}
			if err := json.Unmarshal(r.body, &document); err != nil {
				t.Fatal(err)
			}
			if got := document.Components.SecuritySchemes.Session; got.In != "cookie" || got.Name != test.cookie {
				t.Errorf("got %+v, want the cookie %s", got, test.cookie)
			}
			want := bytes.Replace(onDisk, []byte(`"name": "hubs_auth_local"`), []byte(`"name": "`+test.cookie+`"`), 1)
			if !bytes.Equal(r.body, want) {
				t.Error("another document is served than the one that is checked in")
			}
		})
	}
}

// An object is a JSON object whose members keep their order: names and values in turn.
type object []any

func (o object) MarshalJSON() ([]byte, error) {
	out := bytes.NewBufferString("{")
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	for i := range len(o) / 2 {
		if i > 0 {
			out.WriteByte(',')
		}
		if err := encoder.Encode(o[2*i]); err != nil {
			return nil, err
		}
		out.WriteByte(':')
		if err := encoder.Encode(o[2*i+1]); err != nil {
			return nil, err
		}
	}
	out.WriteByte('}')
	return out.Bytes(), nil
}

// ref is a reference to a component.
func ref(kind, name string) object { return object{"$ref", "#/components/" + kind + "/" + name} }

const apiDescription = `Sign-in without passwords, and data for those who are signed in.

Every answer has ` + "`X-Request-Id`" + `, and every error is a problem (RFC 9457). A path that is not listed is a
404 ` + "`not_found`" + `, a method that is not listed a 405 ` + "`method_not_allowed`" + ` with ` + "`Allow`" + `.

What this document can't express:

- A query string has no unknown and no repeated parameters, no ` + "`;`" + ` and no bad escapes: 400.
- A JSON body is one object of at most 16 KiB, sent as ` + "`application/json`" + ` in UTF-8, without repeated members
  and without null: 400, 413 or 415.
- An operation without input ignores the query string and the body.
- Request headers of more than 16 KiB are refused with 431, before this contract begins and without an id.
- Pages of allowed origins read answers with credentials (CORS). Writes by pages of other origins are
  refused with 403 ` + "`cross_origin`" + `.
- Errors are tried in this order: session, account, terms, role, input, the operation's own limit. So an attempt
  that is malformed is not counted.`

// operationDoc is what the contract table does not say about an operation.
type operationDoc struct{ id, tag, summary, success, text string }

var operationDocs = map[string]operationDoc{
	"POST /auth/otp/request": {"requestCode", "Sign-in", "Ask for a one-time code by e-mail",
		"The same answer for every address.",
		"Mails a code of six digits to an active user of this address. The answer comes first and is the same whether or not " +
			"there is such a user. While the last code is younger than a minute, nothing is sent and that code stays valid."},
	"POST /auth/otp/validate": {"validateCode", "Sign-in", "Exchange address and code for a session", "Signed in; the cookie is set.",
		"Uses the code up and sets the session cookie, which lasts 60 days. Every attempt counts, right or wrong."},
	"POST /auth/logout": {"signOut", "Sign-in", "Clear the session cookie", "The cookie is cleared.",
		"Clears the cookie, and does no more: a copy of the token stays valid until it expires."},
	"GET /auth/session": {"getSession", "Sign-in", "Show the session", "The session that the request came with.",
		"Shows the account as it is now and when the session ends. A page asks for it after a reload."},
	"POST /terms/acceptance": {"acceptTerms", "Terms", "Accept the current terms", "Accepted. A second acceptance keeps the first time.",
		"Records that the user accepts this version of the terms. Only the current version is taken."},
	"GET /hubs": {"listHubs", "Hubs", "List hubs", "One page. The order is total: ties are broken by hubId.",
		"Lists the hubs that the filters let through, one page at a time. Ask for the next page with a larger offset while hasMore is true."},
	"GET /hubs/{hubId}":    {"getHub", "Hubs", "Show a hub", "The hub.", "Shows one hub."},
	"POST /hubs":           {"createHub", "Hubs", "Create a hub", "The hub as it was created.", "Creates a hub; Location names it."},
	"PATCH /hubs/{hubId}":  {"changeHub", "Hubs", "Change a hub", "The hub as it is now. What was not sent is as before.", "Changes the members that are sent, and leaves the others as they are."},
	"DELETE /hubs/{hubId}": {"deleteHub", "Hubs", "Delete a hub", "The hub is gone.", "Deletes a hub for good."},
	"POST /files/upload": {"uploadFile", "Files", "Upload a file", "The file is whole and on disk.",
		"Stores one file, sent as a form. It can be read once it is whole; an upload that breaks off leaves nothing."},
	"GET /files/{fileId}/{name}": {"getFile", "Files", "Read a file", "The bytes.",
		"Sends the bytes. Takes Range (of at most 16 ranges, else it is ignored) and the conditions of RFC 9110."},
	"GET /healthz":      {"getHealth", "Service", "Say whether the service works", "The database answers.", "Asks the database, and says within seconds whether it answers."},
	"GET /openapi.json": {"getContract", "Service", "This document", "The contract as OpenAPI 3.1.", "Sends this document, with the cookie's name of the environment that serves it."},
}

var tagDocs = object{
	"Sign-in", "A code by e-mail, a session in a cookie.",
	"Terms", "Most operations need the current terms to be accepted.",
	"Hubs", "The domain resource.",
	"Files", "Any signed-in user may read a file whose path they know; ids can't be guessed.",
	"Service", "For machines.",
}

// fieldDoc is what neither a field's rule nor its Go type says. schema members are
// added to the field's schema.
type fieldDoc struct {
	text    string
	example any
	schema  object
}

// fieldDocs are by type and field, or by field alone where all types mean the same.
// What an output's check method demands is repeated here; TestRefusals holds the
// server's answers against it.
var fieldDocs = map[string]fieldDoc{
	"email":            {"One ASCII address. Compared without regard to case.", "ada@example.com", nil},
	"user.email":       {"The address as it is stored.", "ada@example.com", object{"format", "email", "maxLength", 254}},
	"code":             {"The code that was mailed.", "012345", nil},
	"codeLength":       {"Digits of a code.", codeLength, nil},
	"expiresInSeconds": {"How long a code lives.", 600, nil},
	"user":             {"The account.", nil, nil},
	"userId":           {"Opaque.", exampleID, object{"format", "uuid"}},
	"permission":       {"The role, as it is now.", "member", object{"enum", allRoles}},
	"terms":            {"The current terms of use and privacy policy.", nil, nil},
	"version":          {"The current terms version.", TERMS_VERSION, nil},
	"accepted":         {"Whether the user has accepted this version.", true, nil},
	"expiresAt":        {"When the session ends.", exampleTime, nil},
	"acceptedAt":       {"When it was accepted first.", exampleTime, nil},

	"items":           {"The hubs of this page.", nil, object{"maxItems", 100}},
	"limit":           {"The most items of the page.", 20, nil},
	"hubPage.limit":   {"As asked for.", 20, object{"minimum", 1, "maximum", 100}},
	"offset":          {"Items before the page.", 0, nil},
	"hubPage.offset":  {"As asked for.", 0, object{"minimum", 0, "maximum", 10000}},
	"hasMore":         {"Whether there is a next page.", false, nil},
	"orderBy":         {"The field that orders the list.", "name", nil},
	"orderDirection":  {"Ascending or descending.", "asc", nil},
	"filters[name]":   {"A part of the name, case ignored; `%` and `_` are plain characters.", "harbour", nil},
	"filters[status]": {"The status.", "active", nil},

	"hubId":           {"Opaque.", exampleID, object{"format", "uuid"}},
	"name":            {"Two hubs may share one.", "North Harbour", nil},
	"hub.name":        {"Two hubs may share one.", "North Harbour", object{"minLength", 1, "maxLength", 100}},
	"description":     {"Line breaks and tabs are allowed.", "Ships and ferries.", nil},
	"hub.description": {"May be empty.", "Ships and ferries.", object{"maxLength", 2000}},
	"status":          {"Whether the hub is in use.", "active", nil},
	"hub.status":      {"Whether the hub is in use.", "active", object{"enum", hubStatuses}},
	"createdAt":       {"UTC.", exampleTime, nil},
	"updatedAt":       {"UTC; of the last change.", exampleTime, nil},

	"fileId":      {"Opaque.", exampleID, object{"format", "uuid"}},
	"file.name":   {"The last path element of the name that was sent.", "plan.png", object{"minLength", 1, "maxLength", 255}},
	"contentType": {"The server's own finding.", "image/png", nil},
	"size":        {"Bytes.", 48213, object{"format", "int64", "minimum", 0}},
	"path":        {"Where to read it.", "/files/" + exampleID + "/plan.png", object{"format", "uri-reference"}},

	"health.status": {"Always ok; else the answer is a 503.", "ok", object{"const", "ok"}},
}

const (
	exampleID   = "3f1c2a9e-7c1b-4e0a-9d53-0b6f4c8e2d71"
	exampleTime = "2026-11-21T09:30:00Z"
)

// problemDocs are all the problems there are, when they arise, and the detail of an example.
var problemDocs = []struct {
	status             int
	code, text, detail string
}{
	{400, "invalid_request", "The input is malformed or invalid; `errors` names each field.", "The input is not valid."},
	{401, "unauthenticated", "The session is missing, badly signed, expired or ended, or its user is gone.", "Sign in: the session is missing, expired or ended."},
	{401, "invalid_code", "The code is wrong, used, expired or was never issued, or the address is unknown.", "The code is wrong, used or expired."},
	{403, "account_suspended", "The account is suspended.", "This account is suspended."},
	{403, "terms_not_accepted", "The current terms are not accepted.", "Accept the terms first: POST /terms/acceptance."},
	{403, "forbidden", "The role does not suffice.", "Your role does not permit this."},
	{403, "cross_origin", "A page of an origin that is not allowed would write.", "Pages of this origin may not write here."},
	{404, "not_found", "There is nothing at this address.", "There is nothing at this address."},
	{405, "method_not_allowed", "`Allow` lists the methods.", "The Allow header lists the methods of this address."},
	{409, "conflict", "Another terms version than the current one.", "The current terms version is " + TERMS_VERSION + "."},
	{412, "precondition_failed", "A condition in the request's headers does not hold.", "A condition in the request's headers does not hold."},
	{413, "too_large", "The body is over its limit.", "The body is larger than this endpoint takes."},
	{415, "unsupported_media_type", "The Content-Type or Content-Encoding is not taken here.", "This Content-Type or Content-Encoding is not taken."},
	{416, "range_not_satisfiable", "The file has no such range.", "The file has no such range."},
	{429, "rate_limited", "Over a limit; `detail` names it.", "The limit is 100 per 10s by client address."},
	{500, "internal", "A bug; the server's log has it under this id.", "The server failed; its log says why."},
	{503, "unavailable", "The database or the mail queue is out of reach.", "Try again soon."},
	{507, "insufficient_storage", "No room for the file.", "There is no room for the file."},
}

// possible lists the problems that an operation may answer with, in the order of
// problemDocs.
func possible(r route) (codes []string) {
	write, upload := r.method != "GET", r.path == "/files/upload"
	_, noInput := r.contract.input.(nothing)
	_, terms := r.contract.input.(acceptance)
	_, proof := r.contract.input.(guess)
	_, isFile := r.contract.output.(fileContent)
	_, fixed := r.contract.output.(document)
	for code, is := range map[string]bool{
		"invalid_request":        !noInput || upload,
		"unauthenticated":        r.access.needsSession(),
		"invalid_code":           proof,
		"account_suspended":      r.access.needsSession() || proof,
		"terms_not_accepted":     r.access == sessionAndTerms,
		"forbidden":              r.roles != nil,
		"cross_origin":           write,
		"not_found":              strings.Contains(r.path, "{"),
		"conflict":               terms,
		"precondition_failed":    isFile,
		"too_large":              write && !noInput || upload,
		"unsupported_media_type": write && !noInput || upload,
		"range_not_satisfiable":  isFile,
		"rate_limited":           true,
		"internal":               true,
		"unavailable":            !fixed,
		"insufficient_storage":   upload,
	} {
		if is {
			codes = append(codes, code)
		}
	}
	return codes
}

// An apiDocument is openapi.json in the making.
type apiDocument struct {
	t        *testing.T
	schemas  map[string]object
	problems map[string]object // components.responses
	used     map[string]bool   // keys of fieldDocs
}

func (d *apiDocument) make() object {
	paths := map[string]object{}
	needs := routeTable(d.t)
	described := 0
	for _, r := range newServer(config{env: envLocal}, nil, io.Discard).routes() {
		name := r.method + " " + r.path
		if r.path == "/{$}" {
			continue // the learner's page of the local environment is no part of the contract
		}
		doc, ok := operationDocs[name]
		if !ok {
			d.t.Fatalf("%s is not described in operationDocs", name)
		}
		described++
		if paths[r.path] == nil {
			paths[r.path] = d.pathParameters(r)
		}
		operation := d.operation(r, doc, needs[name])
		paths[r.path] = append(paths[r.path], strings.ToLower(r.method), operation)
		if r.method == http.MethodGet {
			paths[r.path] = append(paths[r.path], "head", headOperation(operation, doc))
		}
	}
	if described != len(operationDocs) {
		d.t.Error("operationDocs describes operations that are no more")
	}
	var tags []object
	for pair := range slices.Chunk(tagDocs, 2) {
		tags = append(tags, object{"name", pair[0], "description", pair[1]})
	}
	return object{
		"openapi", "3.1.0",
		"info", object{"title", "Hubs", "version", "1", "description", apiDescription},
		"servers", []object{{"url", "/"}},
		"tags", tags,
		"paths", paths,
		"components", object{
			"securitySchemes", object{"session", object{
				"type", "apiKey", "in", "cookie", "name", "hubs_auth_local",
				"description", "A signed token that only the server can make. This is the cookie's name where this document " +
					"is served; it ends with the environment's name.",
			}},
			"parameters", object{"requestId", object{
				"name", "x-request-id", "in", "header",
				"description", "Accepted when it has this form, else replaced by a generated one. It stands in the " +
					"answer, in errors and in the server's log.",
				"schema", object{"type", "string", "pattern", requestIDForm}, "example", "web-7f3a.42",
			}},
			"headers", object{
				"X-Request-Id", header("The id of this request.", object{"type", "string", "pattern", requestIDForm}),
				"Retry-After", header("Seconds after which another attempt makes sense.", object{"type", "integer", "minimum", 1}),
				"Location", header("Path of what was created.", object{"type", "string", "format", "uri-reference"}),
				"Set-Cookie", header("The session cookie.", object{"type", "string"}),
				"WWW-Authenticate", header("How to prove who asks.", object{"type", "string", "const", "Cookie"}),
				"ETag", header("Of a file; it never changes.", object{"type", "string"}),
				"Content-Disposition", header("inline for PNG, JPEG, GIF, WebP and plain text, else attachment.", object{"type", "string"}),
				"Content-Range", header("The part that is sent.", object{"type", "string"}),
			},
			"responses", d.problems,
			"schemas", d.schemasWith("Problem", problemSchema()),
		},
	}
}

const requestIDForm = "^[A-Za-z0-9._-]{1,128}$"

var requestIDPattern = regexp.MustCompile(requestIDForm)

func header(text string, schema object) object {
	return object{"description", text, "schema", schema}
}

func (d *apiDocument) schemasWith(name string, schema object) map[string]object {
	d.schemas[name] = schema
	return d.schemas
}

func problemSchema() object {
	var codes []string
	for _, p := range problemDocs {
		codes = append(codes, p.code)
	}
	text := func(description, example string) object {
		return object{"type", "string", "description", description, "examples", []string{example}}
	}
	return object{
		"type", "object", "description", "RFC 9457. Programs compare `code`.",
		"required", []string{"title", "status", "detail", "code", "requestId"},
		"properties", object{
			"title", text("The status in words.", "Bad Request"),
			"status", object{"type", "integer", "minimum", 400, "maximum", 599, "examples", []int{400}},
			"detail", text("A sentence for people.", "The input is not valid."),
			"code", object{"type", "string", "enum", codes},
			"requestId", text("The X-Request-Id.", "web-7f3a.42"),
			"errors", object{
				"type", "array", "description", "Of an invalid_request: what is wrong with which field.",
				"items", object{
					"type", "object", "required", []string{"field", "detail"},
					"properties", object{"field", text("Its name.", "limit"), "detail", text("What is wrong.", "is not known here")},
				},
			},
		},
	}
}

// routeTable is what the command routes says of each operation: needs and limits.
func routeTable(t testing.TB) map[string]string {
	t.Helper()
	_, table, _ := runCLI(nil, "routes")
	columns := map[string]string{}
	for line := range strings.Lines(table) {
		cells := regexp.MustCompile(`\s{2,}`).Split(strings.TrimSpace(line), -1)
		if len(cells) != 4 {
			t.Fatalf("a row of the route table with %d cells: %q", len(cells), cells)
		}
		columns[cells[0]+" "+cells[1]] = fmt.Sprintf("Needs: %s. Limit: %s.", strings.Replace(cells[2], "-", "nothing", 1), cells[3])
	}
	return columns
}

var pathParameter = regexp.MustCompile(`{([^}]*)}`)

func (d *apiDocument) pathParameters(r route) object {
	parameters := []object{ref("parameters", "requestId")}
	for _, match := range pathParameter.FindAllStringSubmatch(r.path, -1) {
		doc := fieldDocs[match[1]]
		if match[1] == "name" {
			doc = fieldDocs["file.name"]
		}
		parameters = append(parameters, object{"name", match[1], "in", "path", "required", true,
			"description", doc.text, "schema", append(object{"type", "string"}, doc.schema...), "example", doc.example})
	}
	return object{"parameters", parameters}
}

func (d *apiDocument) operation(r route, doc operationDoc, needs string) object {
	o := object{"operationId", doc.id, "tags", []string{doc.tag}, "summary", doc.summary, "description", doc.text + "\n\n" + needs}
	if !r.access.needsSession() {
		o = append(o, "security", []object{})
	} else {
		o = append(o, "security", []object{{"session", []string{}}})
	}
	_, noInput := r.contract.input.(nothing)
	_, isFile := r.contract.output.(fileContent)
	switch {
	case isFile:
		var parameters []object
		for _, name := range []string{"Range", "If-Range", "If-Match", "If-None-Match"} {
			parameters = append(parameters, object{"name", name, "in", "header", "description", "RFC 9110.", "schema", object{"type", "string"}})
		}
		o = append(o, "parameters", parameters)
	case r.path == "/files/upload":
		o = append(o, "requestBody", object{"required", true, "content", object{"multipart/form-data", object{
			"schema", object{
				"type", "object", "required", []string{"file"}, "additionalProperties", false,
				"properties", object{"file", object{
					"type", "string", "format", "binary",
					"description", "The only part, with a file name of 1 to 255 bytes. At most MAX_UPLOAD_BYTES, by " +
						"default 26214400; the form around it at most 64 KiB.",
				}},
			},
		}}})
	case !noInput && r.method == "GET":
		var parameters []object
		for _, rule := range rulesOf(r.contract) {
			schema, doc := d.ruleSchema(typeName(r.contract.input), rule)
			parameters = append(parameters, object{"name", rule.name, "in", "query", "required", rule.required,
				"description", doc.text, "schema", schema, "example", doc.example})
		}
		o = append(o, "parameters", parameters)
	case !noInput:
		o = append(o, "requestBody", object{"required", true, "content", object{"application/json", object{
			"schema", d.inputSchema(r)}}})
	}
	return append(o, "responses", d.responses(r, doc))
}

// headOperation describes HEAD, which works wherever GET does.
func headOperation(get object, doc operationDoc) object {
	head := object{}
	for pair := range slices.Chunk(get, 2) {
		switch pair[0] {
		case "operationId":
			head = append(head, pair[0], "head"+strings.TrimPrefix(capital(doc.id), "Get"))
		case "summary":
			head = append(head, pair[0], "Headers only: "+strings.ToLower(doc.summary[:1])+doc.summary[1:])
		case "description":
			head = append(head, pair[0], "Answers as GET does, with the same status and headers, and without a body.")
		case "responses":
			responses := object{}
			for answer := range slices.Chunk(pair[1].(object), 2) {
				if status := answer[0].(string); status < "400" {
					success := answer[1].(object)
					responses = append(responses, status, object{"description", "As GET: " + success[1].(string), "headers", success[3]})
				}
			}
			failed := object{"headers", object{"X-Request-Id", ref("headers", "X-Request-Id")}}
			responses = append(responses, "4XX", append(object{"description", "As GET, without the problem."}, failed...),
				"5XX", append(object{"description", "As GET, without the problem."}, failed...))
			head = append(head, pair[0], responses)
		default:
			head = append(head, pair...)
		}
	}
	return head
}

// inputSchema is the schema of a JSON body, made of the rules that its read method
// has asked for.
func (d *apiDocument) inputSchema(r route) object {
	name := typeName(r.contract.input)
	var required []string
	var properties object
	for _, rule := range rulesOf(r.contract) {
		// A generator of types would make a member with a default a required one; and in a
		// change, what is not sent stays as it is.
		fallback := rule.fallback
		rule.fallback = ""
		schema, doc := d.ruleSchema(name, rule)
		if fallback != "" && rulesRequire(r.contract) {
			doc.text += " If it is not sent: " + fallback + "."
		}
		properties = append(properties, rule.name, append(schema, "description", doc.text, "examples", []any{doc.example}))
		if rule.required && rulesRequire(r.contract) {
			required = append(required, rule.name)
		}
	}
	schema := object{"type", "object", "additionalProperties", false}
	if required != nil {
		schema = append(schema, "required", required)
	} else {
		schema = append(schema, "minProperties", 1) // of PATCH
	}
	d.schemas[capital(name)] = append(schema, "properties", properties)
	return ref("schemas", capital(name))
}

// rulesRequire reports whether an input has a required field. A change has none: it takes any
// of the fields.
func rulesRequire(c contract) bool {
	f := &fields{}
	parseInput(c, f)
	return slices.ContainsFunc(f.errors, func(e fieldError) bool { return e.Detail == "is required" })
}

// rulesOf is what an input asks for, in the order in which it asks.
func rulesOf(c contract) (rules []rule) {
	parseInput(c, &fields{onRead: func(r rule) { rules = append(rules, r) }})
	return rules
}

// parseInput parses fields as the endpoint would.
func parseInput(c contract, f *fields) {
	switch c.input.(type) {
	case codeRequest:
		parseCodeRequest(f)
	case guess:
		parseGuess(f)
	case acceptance:
		parseAcceptance(f)
	case newHub:
		parseNewHub(f)
	case hubChange:
		parseHubChange(f)
	case hubQuery:
		parseHubQuery(f)
	default:
		panic(fmt.Sprintf("%T is not listed here", c.input))
	}
}

func (d *apiDocument) ruleSchema(owner string, r rule) (object, fieldDoc) {
	doc := d.fieldDoc(owner, r.name)
	if r.number {
		fallback, err := strconv.Atoi(r.fallback)
		if err != nil {
			d.t.Fatal(r.name, err)
		}
		return object{"type", "integer", "minimum", r.min, "maximum", r.max, "default", fallback}, doc
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
		schema = append(schema, "pattern", `^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\ufffd]*$`)
	default:
		schema = append(schema, "pattern", `^[^\u0000-\u001f\u007f-\u009f\ufffd]*$`)
	}
	if r.fallback != "" {
		schema = append(schema, "default", r.fallback)
	}
	if r.trim {
		doc.text += " Spaces around it don't count."
	}
	return schema, doc
}

func (d *apiDocument) fieldDoc(owner, name string) fieldDoc {
	key := owner + "." + name
	if _, own := fieldDocs[key]; !own {
		key = name
	}
	doc, ok := fieldDocs[key]
	if !ok {
		d.t.Fatalf("%s.%s is not described in fieldDocs", owner, name)
	}
	d.used[key] = true
	return doc
}

// outputSchema finds the JSON shape of a type, and leaves those of structs in
// components.schemas.
func (d *apiDocument) outputSchema(of reflect.Type) object {
	switch {
	case of == reflect.TypeFor[time.Time]():
		return object{"type", "string", "format", "date-time"}
	case of.Kind() == reflect.Pointer:
		return d.outputSchema(of.Elem())
	case of.Kind() == reflect.Slice:
		return object{"type", "array", "items", d.outputSchema(of.Elem())}
	case of.Kind() == reflect.String:
		return object{"type", "string"}
	case of.Kind() == reflect.Bool:
		return object{"type", "boolean"}
	case of.Kind() == reflect.Int, of.Kind() == reflect.Int64:
		return object{"type", "integer"}
	case of.Kind() != reflect.Struct:
		d.t.Fatalf("%v has no JSON schema", of)
	}
	var names []string
	var properties object
	for field := range of.Fields() {
		if !field.IsExported() {
			continue
		}
		name := field.Tag.Get("json")
		if name == "" || strings.Contains(name, ",") {
			d.t.Fatalf("%v.%s: a member has a plain name", of, field.Name)
		}
		doc := d.fieldDoc(of.Name(), name)
		schema := append(append(d.outputSchema(field.Type), doc.schema...), "description", doc.text)
		if doc.example != nil {
			schema = append(schema, "examples", []any{doc.example})
		}
		names, properties = append(names, name), append(properties, name, schema)
	}
	d.schemas[capital(of.Name())] = object{"type", "object", "required", names, "properties", properties}
	return ref("schemas", capital(of.Name()))
}

// example makes an answer of the examples of its fields.
func (d *apiDocument) example(of reflect.Type) any {
	switch of.Kind() {
	case reflect.Pointer:
		return d.example(of.Elem())
	case reflect.Slice:
		return []any{d.example(of.Elem())}
	}
	var members object
	for field := range of.Fields() {
		if !field.IsExported() {
			continue
		}
		name := field.Tag.Get("json")
		value := d.fieldDoc(of.Name(), name).example
		if value == nil {
			value = d.example(field.Type)
		}
		members = append(members, name, value)
	}
	return members
}

// responses are by status: success first, then the problems.
func (d *apiDocument) responses(r route, doc operationDoc) object {
	success, headers := object{}, object{"X-Request-Id", ref("headers", "X-Request-Id")}
	add := func(names ...string) {
		for _, name := range names {
			headers = append(headers, name, ref("headers", name))
		}
	}
	if r.status == http.StatusCreated {
		add("Location")
	}
	if _, signsIn := r.contract.input.(guess); signsIn || r.path == "/auth/logout" {
		add("Set-Cookie")
	}
	var content object
	bytes := object{"*/*", object{"schema", object{"type", "string", "format", "binary"}, "example", "Ships and ferries."}}
	switch r.contract.output.(type) {
	case nothing:
	case document:
		content = object{"application/json", object{"schema", object{"type", "object"}, "example", object{"openapi", "3.1.0"}}}
	case fileContent:
		add("ETag", "Content-Disposition")
		content = bytes
	default:
		of := reflect.TypeOf(r.contract.output)
		content = object{"application/json", object{"schema", d.outputSchema(of), "example", d.example(of)}}
	}
	response := func(text string, content object) object {
		o := object{"description", text, "headers", slices.Clone(headers)}
		if content != nil {
			o = append(o, "content", content)
		}
		return o
	}
	success = append(success, strconv.Itoa(r.status), response(doc.success, content))
	if _, isFile := r.contract.output.(fileContent); isFile {
		success = append(success, "304", response("The client has it already (If-None-Match).", nil))
		add("Content-Range")
		success = slices.Insert(success, 2, any("206"), any(response("The part that Range asked for.", bytes)))
	}
	return append(success, d.problemResponses(possible(r))...)
}

// problemResponses refers to one response a status, which stands in
// components.responses under the codes that it may have.
func (d *apiDocument) problemResponses(possible []string) (responses object) {
	byStatus := map[int]object{} // status → codes
	texts := map[int]string{}
	var order []int
	for _, p := range problemDocs {
		if slices.Contains(possible, p.code) {
			if byStatus[p.status] == nil {
				order = append(order, p.status)
			}
			byStatus[p.status] = append(byStatus[p.status], p.code)
			texts[p.status] += fmt.Sprintf("- `%s`: %s\n", p.code, p.text)
		}
	}
	for _, status := range order {
		headers := object{"X-Request-Id", ref("headers", "X-Request-Id")}
		switch status {
		case 401:
			headers = append(headers, "WWW-Authenticate", ref("headers", "WWW-Authenticate"))
		case 429, 503:
			headers = append(headers, "Retry-After", ref("headers", "Retry-After"))
		}
		examples := object{}
		var names []string
		for _, code := range byStatus[status] {
			examples = append(examples, code, object{"value", problemExample(code.(string))})
			words := strings.Split(code.(string), "_")
			for i, word := range words {
				words[i] = capital(word)
			}
			names = append(names, strings.Join(words, ""))
		}
		name := strings.Join(names, "Or")
		d.problems[name] = object{"description", strings.TrimSpace(texts[status]), "headers", headers,
			"content", object{"application/problem+json", object{"schema", object{"allOf", []object{
				ref("schemas", "Problem"),
				{"properties", object{"code", object{"enum", []any(byStatus[status])}}},
			}}, "examples", examples}}}
		responses = append(responses, strconv.Itoa(status), ref("responses", name))
	}
	return responses
}

// problemExample is an answer with this code.
func problemExample(code string) object {
	for _, p := range problemDocs {
		if p.code != code {
			continue
		}
		example := object{"title", http.StatusText(p.status), "status", p.status, "detail", p.detail, "code", code, "requestId", "web-7f3a.42"}
		if code == "invalid_request" {
			example = append(example, "errors", []object{{"field", "limit", "detail", "must be a whole number from 1 to 100"}})
		}
		return example
	}
	panic("no problem " + code)
}

func typeName(v any) string { return reflect.TypeOf(v).Name() }

func capital(name string) string { return strings.ToUpper(name[:1]) + name[1:] }
