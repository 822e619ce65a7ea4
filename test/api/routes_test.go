package api

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"hubs/internal/hubstest"
)

// routes has all routes, as the contract describes them. The contract is written by hand, so it
// repeats no mistake of the server. TestRoutesAreThoseOfTheContract compares the two.
var routes = operations()

// An operation is an operation of the contract, but for HEAD, which answers as GET does.
type operation struct {
	Route    string   // "GET /hubs"
	Needs    string   // "session, terms", or "nothing"
	Status   int      // of a success
	Statuses []string // of all answers
	Limits   []hubstest.Limit
	Fields   []field // of the query or of the JSON body

	Item  map[string]any // schema of an item of the list that it returns; nil if it returns none
	Order string         // of that list, such as "name asc" (x-order); "" if orderBy says it
	Owner any            // whether it is for the owner only (x-owner); nil if that is not said
}

// A field is a parameter of a query, or a member of a JSON body.
type field struct {
	Name       string
	IsRequired bool
	Matches    string // of a filter: "part" or "whole" (x-matches)
	Schema     map[string]any
}

// operations returns the operations of the contract, ordered by route. It panics if one of them
// does not say what it needs, or lists no limit.
func operations() (all []operation) {
	within := hubstest.Within
	for path, item := range within(hubstest.Document(), "paths").(map[string]any) {
		for method, listed := range item.(map[string]any) {
			if method == "parameters" || method == "head" {
				continue
			}
			route := strings.ToUpper(method) + " " + path
			_, needs, isSaid := strings.Cut(within(listed, "description").(string), "Needs: ")
			limits := hubstest.Limits(route)
			if !isSaid || limits == nil {
				panic("the contract does not say what this needs, or what limits it has: " + route)
			}
			statuses := slices.Sorted(maps.Keys(within(listed, "responses").(map[string]any)))
			success, _ := strconv.Atoi(statuses[0])
			answer := within(listed, "responses", statuses[0], "content", "application/json", "schema")
			item, _ := within(answer, "properties", "items", "items").(map[string]any)
			order, _ := within(listed, "x-order").(string)
			all = append(all, operation{
				Route:    route,
				Needs:    strings.TrimSuffix(needs, "."),
				Status:   success,
				Statuses: statuses,
				Limits:   limits,
				Fields:   fieldsOf(listed),
				Item:     item,
				Order:    order,
				Owner:    within(listed, "x-owner"),
			})
		}
	}
	slices.SortFunc(all, func(a, b operation) int { return strings.Compare(a.Route, b.Route) })
	return all
}

// fieldsOf returns the parameters of an operation's query, or the members of its JSON body.
func fieldsOf(listed any) (fields []field) {
	within := hubstest.Within
	parameters, _ := within(listed, "parameters").([]any)
	for _, parameter := range parameters {
		if within(parameter, "in") != "query" {
			continue
		}
		name := within(parameter, "name").(string)
		matches, _ := within(parameter, "x-matches").(string)
		schema := within(parameter, "schema").(map[string]any)
		fields = append(fields, field{Name: name, Matches: matches, Schema: schema})
	}
	body := within(listed, "requestBody", "content", "application/json", "schema")
	required, _ := within(body, "required").([]any)
	members, _ := within(body, "properties").(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(members)) {
		fields = append(fields, field{
			Name:       name,
			IsRequired: slices.Contains(required, any(name)),
			Schema:     within(members, name).(map[string]any),
		})
	}
	return fields
}

// maxLength returns the maxLength of a property of a schema of the contract, such as Hub and name.
// It panics if there is none.
func maxLength(schema, property string) int {
	limit := hubstest.Within(hubstest.Document(),
		"components", "schemas", schema, "properties", property, "maxLength")
	return int(limit.(float64))
}

// limitText returns a limit as the server writes it, such as "5 in 15 minutes by e-mail".
func limitText(l hubstest.Limit) string {
	period := fmt.Sprintf("%.0f minutes", l.Period.Minutes())
	if l.Period < time.Minute {
		period = fmt.Sprintf("%.0f s", l.Period.Seconds())
	}
	return fmt.Sprintf("%d in %s by %s", l.Requests, period, l.By)
}

// everyAnswerIsSeen returns an error if the contract lists an answer that no test of this package has
// got, but for failures of the server, which test/faults causes.
func everyAnswerIsSeen() error {
	var unseen []string
	for _, r := range routes {
		for _, status := range r.Statuses {
			answer := r.Route + ": " + status
			if status < "500" && !hubstest.Seen(answer) {
				unseen = append(unseen, answer)
			}
		}
	}
	if unseen != nil {
		return fmt.Errorf("the contract lists answers that no test has got: %q", unseen)
	}
	return nil
}
