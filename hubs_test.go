package main

import (
	"slices"
	"strings"
	"testing"
)

// I1: No text from a client becomes part of the text of a list's statement. The test makes the
// query itself, so this holds even if the validation of the fields let every text pass.
func TestListStatementHasNoTextOfAClient(t *testing.T) {
	t.Parallel()
	const limit, offset = 20, 40
	plain := "name"
	hostile := "a'); drop table hubs; -- $1 %s"
	statement := func(filter, order string) (text string, args []any) {
		q := hubQuery{
			limit:          limit,
			offset:         offset,
			orderBy:        order,
			orderDirection: order,
			name:           &filter,
			status:         &filter,
		}
		return q.statement()
	}

	want, _ := statement(plain, plain)
	got, args := statement(hostile, plain)
	if got != want {
		t.Errorf("filtered by %q: got the text\n%s\nwant\n%s", hostile, got, want)
	}
	wantArgs := []any{limit + 1, offset, hostile, hostile} // one row more, for HasMore
	if !slices.Equal(args, wantArgs) {
		t.Errorf("filtered by %q: got the arguments %v, want %v", hostile, args, wantArgs)
	}
	if got, _ := statement(plain, hostile); strings.Contains(got, "drop") {
		t.Errorf("ordered by %q: got the text\n%s\nwant no drop in it", hostile, got)
	}
}
