package api

import (
	"cmp"
	"testing"

	"hubs/internal/hubstest"
)

// A queryCase is a query string, which is sent byte for byte.
type queryCase struct {
	Name, Rule string
	Path       string // "" means /hubs
	Query      string
	Want       answer
}

// queriedHubs are the bodies from which an admin makes the hubs of these cases, in this order.
var queriedHubs = []string{
	`{"name":"North"}`,
	`{"name":"100% green"}`,
	`{"name":"100 green","status":"archived"}`,
	`{"name":"under_score"}`,
	`{"name":"underXscore"}`,
	`{"name":"École","description":"north in the description is not looked at"}`,
	`{"name":"back\\slash","status":"archived"}`,
	`{"name":"it's"}`,
}

// I1, I2: The server checks each parameter of GET /hubs against its allow-list or its bounds. A
// parameter that is malformed, repeated or unknown is a 400.
func TestHubListParameters(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	for _, body := range queriedHubs {
		admin.Do("POST /hubs", body).Must(t, 201)
	}
	member, _ := s.Member(t, "member")
	cookie := s.CookieName() + "=" + member.Token()
	runCases(t, queryCases, func(t *testing.T, c queryCase) {
		target := cmp.Or(c.Path, "/hubs") + "?" + c.Query
		r := onTheWire(t, s, "GET "+target, nil, "Cookie", cookie, "X-Forwarded-For", hubstest.NewIP())
		wantAnswer(t, r, c.Want)
	})
}

// The items are in the order of the bytes of their names.
var queryCases = []group[queryCase]{
	// Limit and offset, within their bounds.
	{Each: queryCase{Rule: "I2", Want: ok}, Cases: []queryCase{
		{Name: "empty", Query: "",
			Want: answer{
				Items: []string{"100 green", "100% green", "North", `back\slash`,
					"it's", "underXscore", "under_score", "École"},
				Body: values{"limit": 20.0, "offset": 0.0, "hasMore": false}}},
		{Name: "all the parameters",
			Query: "limit=2&offset=1&orderBy=createdAt&orderDirection=desc" +
				"&filters[name]=e&filters[status]=active",
			Want: answer{Items: []string{"underXscore", "under_score"},
				Body: values{"limit": 2.0, "offset": 1.0, "hasMore": true}}},
		{Name: "limit 1", Query: "limit=1",
			Want: answer{Items: []string{"100 green"}, Body: values{"limit": 1.0, "hasMore": true}}},
		{Name: "limit 100", Query: "limit=100",
			Want: answer{Body: values{"limit": 100.0, "hasMore": false}}},
		{Name: "limit, escaped", Query: "%6cimit=%32", Want: items("100 green", "100% green")},
		{Name: "offset 7 of 8", Query: "offset=7",
			Want: answer{Items: []string{"École"}, Body: values{"offset": 7.0, "hasMore": false}}},
		{Name: "offset past the end", Query: "offset=10000",
			Want: answer{Items: []string{}, Body: values{"hasMore": false}}},
		{Name: "the largest limit and offset", Query: "limit=100&offset=10000",
			Want: answer{Items: []string{},
				Body: values{"limit": 100.0, "offset": 10000.0, "hasMore": false}}},
	}},
	// The order of the list.
	{Each: queryCase{Rule: "I1", Want: ok}, Cases: []queryCase{
		{Name: "order name desc", Query: "orderBy=name&orderDirection=desc&limit=2",
			Want: items("École", "under_score")},
		{Name: "order createdAt", Query: "orderBy=createdAt&limit=3",
			Want: items("North", "100% green", "100 green")},
		{Name: "order updatedAt desc", Query: "orderBy=updatedAt&orderDirection=desc&limit=2",
			Want: items("it's", `back\slash`)},
	}},
	// The filter by status.
	{Each: queryCase{Rule: "I1", Want: ok}, Cases: []queryCase{
		{Name: "status active", Query: "filters[status]=active&limit=2",
			Want: items("100% green", "North")},
		{Name: "status archived", Query: "filters[status]=archived",
			Want: items("100 green", `back\slash`)},
		{Name: "status, brackets escaped", Rule: "I2", Query: "filters%5Bstatus%5D=archived",
			Want: items("100 green", `back\slash`)},
	}},
	// The filter by name: no character has a special meaning.
	{Each: queryCase{Rule: "I1", Want: ok}, Cases: []queryCase{
		{Name: "name, in another case", Query: "filters[name]=NORTH", Want: items("North")},
		{Name: "name, beyond ASCII in another case", Query: "filters[name]=%C3%A9COLE",
			Want: items("École")},
		{Name: "name, not escaped", Query: "filters[name]=École", Want: items("École")},
		{Name: "name, brackets escaped", Rule: "I2", Query: "filters%5Bname%5D=north",
			Want: items("North")},
		{Name: "name, % is a plain character", Query: "filters[name]=%25", Want: items("100% green")},
		{Name: "name, _ is a plain character", Query: "filters[name]=r_s",
			Want: items("under_score")},
		{Name: "name, backslash is a plain character", Query: "filters[name]=%5C",
			Want: items(`back\slash`)},
		{Name: "name, quote is a plain character", Query: "filters[name]='", Want: items("it's")},
		{Name: "name, SQL is plain text", Query: "filters[name]=%27%20or%20%271%27=%271",
			Want: items()},
		{Name: "name, + is a space", Rule: "I2", Query: "filters[name]=100+g",
			Want: items("100 green")},
		{Name: "name, a space behind, as a phone adds it", Query: "filters[name]=North%20",
			Want: items("North")},
		{Name: "name, spaces around, one within", Query: "filters[name]=++100+G%20%20",
			Want: items("100 green")},
		{Name: "name, decomposed, in another case", Query: "filters[name]=E%CC%81cole",
			Want: items("École")},
		{Name: "the longest name, spaces around", Rule: "I2",
			Query: "filters[name]=+" + repeat("a", maxName) + "+", Want: items()},
		{Name: "the longest name", Rule: "I2", Query: "filters[name]=" + repeat("a", maxName),
			Want: items()},
		{Name: "the longest name, of two bytes a character", Rule: "I2",
			Query: "filters[name]=" + repeat("é", maxName), Want: items()},
		{Name: "the longest name, of four bytes a character", Rule: "I2",
			Query: "filters[name]=" + repeat("😀", maxName), Want: items()},
	}},
	// Empty pairs, and the query of an endpoint without input, are ignored.
	{Each: queryCase{Rule: "I2", Want: ok}, Cases: []queryCase{
		{Name: "empty pairs say nothing", Query: "&&limit=1&", Want: items("100 green")},
		{Name: "an endpoint without input ignores the query", Path: "/auth/session",
			Query: "limit=-1&limit=%zz;%00"},
	}},
	// limit must be sent once, as a whole number in its range, in plain digits.
	{Each: queryCase{Rule: "I2", Want: invalid("limit")}, Cases: []queryCase{
		{Name: "limit 0", Query: "limit=0"},
		{Name: "limit 101", Query: "limit=101"},
		{Name: "limit -1", Query: "limit=-1"},
		{Name: "limit 2^31", Query: "limit=2147483648"},
		{Name: "limit 2^63", Query: "limit=9223372036854775808"},
		{Name: "limit 2^64 + 1", Query: "limit=18446744073709551617"},
		{Name: "limit of 300 digits", Query: "limit=" + repeat("9", 300)},
		{Name: "limit empty", Query: "limit="},
		{Name: "limit without =", Query: "limit"},
		{Name: "limit a word", Query: "limit=all"},
		{Name: "limit with a sign", Query: "limit=%2B1"},
		{Name: "limit after a space", Query: "limit=+1"},
		{Name: "limit with a leading zero", Query: "limit=01"},
		{Name: "limit with a fraction", Query: "limit=1.0"},
		{Name: "limit with an exponent", Query: "limit=1e1"},
		{Name: "limit hexadecimal", Query: "limit=0x10"},
		{Name: "limit with an underscore", Query: "limit=1_0"},
		{Name: "limit in full-width digits", Rule: "O9", Query: "limit=%EF%BC%91"},
		{Name: "limit with NUL", Query: "limit=1%00"},
		{Name: "limit of NUL", Query: "limit=%00"},
		{Name: "limit that is no UTF-8", Query: "limit=%ff"},
		{Name: "limit with a line feed", Query: "limit=1%0A"},
		{Name: "limit twice", Query: "limit=1&limit=2"},
		{Name: "limit twice, the same", Query: "limit=1&limit=1"},
		{Name: "limit twice, once escaped", Query: "limit=1&%6Cimit=1"},
	}},
	// offset must be sent once, as a whole number in its range, in plain digits.
	{Each: queryCase{Rule: "I2", Want: invalid("offset")}, Cases: []queryCase{
		{Name: "offset -1", Query: "offset=-1"},
		{Name: "offset -0", Query: "offset=-0"},
		{Name: "offset 10001", Query: "offset=10001"},
		{Name: "offset 2^63 - 1", Query: "offset=9223372036854775807"},
		{Name: "offset 2^63", Query: "offset=9223372036854775808"},
		{Name: "offset twice", Query: "offset=0&offset=0"},
		{Name: "offset twice, another between", Query: "offset=0&limit=1&offset=0"},
	}},
	// orderBy must be sent once, as a word of its list.
	{Each: queryCase{Rule: "I1", Want: invalid("orderBy")}, Cases: []queryCase{
		{Name: "orderBy a column", Query: "orderBy=created_at"},
		{Name: "orderBy another column", Query: "orderBy=hub_id"},
		{Name: "orderBy a field that has no order", Query: "orderBy=description"},
		{Name: "orderBy in another case", Query: "orderBy=Name"},
		{Name: "orderBy empty", Query: "orderBy="},
		{Name: "orderBy two", Query: "orderBy=name,createdAt"},
		{Name: "orderBy with a direction", Query: "orderBy=name%20desc"},
		{Name: "orderBy with SQL", Query: "orderBy=(select%201)"},
		{Name: "orderBy with a statement", Query: "orderBy=name%3Bdrop%20table%20hubs"},
		{Name: "orderBy with NUL", Query: "orderBy=name%00"},
		{Name: "orderBy twice", Rule: "I2", Query: "orderBy=name&orderBy=createdAt"},
	}},
	// orderDirection must be sent once, as a word of its list.
	{Each: queryCase{Rule: "I1", Want: invalid("orderDirection")}, Cases: []queryCase{
		{Name: "orderDirection in capitals", Query: "orderDirection=ASC"},
		{Name: "orderDirection with SQL", Query: "orderDirection=desc%20nulls%20first"},
		{Name: "orderDirection two", Query: "orderDirection=asc,hub_id"},
		{Name: "orderDirection empty", Query: "orderDirection="},
	}},
	// filters[name] must be sent once, as a text that a name may have.
	{Each: queryCase{Rule: "I2", Want: invalid("filters[name]")}, Cases: []queryCase{
		{Name: "name empty", Query: "filters[name]="},
		{Name: "name of spaces", Query: "filters[name]=+%20"},
		{Name: "name too long", Query: "filters[name]=" + repeat("a", maxName+1)},
		{Name: "name with NUL", Query: "filters[name]=a%00b"},
		{Name: "name of NUL", Query: "filters[name]=%00"},
		{Name: "name with a line feed", Query: "filters[name]=a%0Ab"},
		{Name: "name with a byte that is no UTF-8", Query: "filters[name]=%ff"},
		{Name: "name with a surrogate", Query: "filters[name]=%ED%A0%80"},
		{Name: "name with an overlong slash", Query: "filters[name]=%C0%AF"},
		{Name: "name with a character cut off", Query: "filters[name]=%C3"},
		{Name: "name with U+FFFD", Query: "filters[name]=%EF%BF%BD"},
		{Name: "name twice", Query: "filters[name]=a&filters[name]=b"},
		{Name: "name twice, once escaped", Query: "filters[name]=a&filters%5Bname%5D=b"},
	}},
	// filters[status] must be sent once, as a word of its list.
	{Each: queryCase{Rule: "I1", Want: invalid("filters[status]")}, Cases: []queryCase{
		{Name: "status unknown", Query: "filters[status]=deleted"},
		{Name: "status in capitals", Query: "filters[status]=ACTIVE"},
		{Name: "status with a capital", Query: "filters[status]=Active"},
		{Name: "status with SQL", Query: "filters[status]=active'--"},
		{Name: "status empty", Query: "filters[status]="},
	}},
	// Malformed query strings.
	{Each: queryCase{Rule: "I2", Want: invalid("query")}, Cases: []queryCase{
		{Name: "more parameters than any request has", Query: repeat("limit=1&", 50) + "limit=1"},
		{Name: "orderBy with a statement, not escaped", Rule: "I1",
			Query: "orderBy=name;drop%20table%20hubs"},
		{Name: "a semicolon between", Query: "limit=1;offset=1"},
		{Name: "a semicolon in a value", Query: "filters[name]=a;b"},
		{Name: "a semicolon alone", Query: ";"},
		{Name: "more than 10,000 parameters", Query: repeat("&", 10000)},
		{Name: "a bad escape", Query: "filters[name]=%zz"},
		{Name: "an escape cut off", Query: "filters[name]=%4"},
		{Name: "an escape cut off, of a letter", Query: "filters[name]=%a"},
		{Name: "a percent sign for a value", Query: "limit=%"},
		{Name: "a percent sign alone", Query: "%"},
		{Name: "a bad escape beside good parameters", Query: "limit=1&x=%u0041"},
		{Name: "a bad escape alone beside a good parameter", Query: "limit=1&%zz"},
	}},
	// Unknown filters, and other spellings of known ones.
	{Each: queryCase{Rule: "I2", Want: invalid()}, Cases: []queryCase{
		{Name: "filter unknown", Query: "filters[hubId]=a", Want: invalid("filters[hubId]")},
		{Name: "filter without a name", Query: "filters[]=x", Want: invalid("filters[]")},
		{Name: "filters in capitals", Query: "Filters[name]=a", Want: invalid("Filters[name]")},
		{Name: "filters without a bracket", Query: "filters=a", Want: invalid("filters")},
		{Name: "filters as JSON", Query: "filters=%7B%22name%22:%22a%22%7D",
			Want: invalid("filters")},
		{Name: "filters with a dot", Query: "filters.name=a", Want: invalid("filters.name")},
		{Name: "filters deeper", Query: "filters[name][like]=a",
			Want: invalid("filters[name][like]")},
	}},
	// Unknown parameters, and other spellings of known ones.
	{Each: queryCase{Rule: "I2", Want: invalid()}, Cases: []queryCase{
		{Name: "limit in capitals", Query: "LIMIT=1", Want: invalid("LIMIT")},
		{Name: "limit with a capital", Query: "Limit=1", Want: invalid("Limit")},
		{Name: "limit as a list", Query: "limit[]=1", Want: invalid("limit[]")},
		{Name: "a space behind a name", Query: "limit+=1", Want: invalid("limit ")},
		{Name: "unknown parameter", Query: "page=1", Want: invalid("page")},
		{Name: "unknown parameter beside known ones", Query: "limit=1&offset=0&debug=true",
			Want: invalid("debug")},
		{Name: "two unknown parameters", Query: "hubId=x&role=admin", Want: invalid("hubId", "role")},
		{Name: "several wrong: each is named", Query: "limit=0&offset=-1&orderBy=x&page=1",
			Want: invalid("limit", "offset", "orderBy", "page")},
		{Name: "a name of NUL", Query: "%00=1"},
		{Name: "a name that ends in NUL", Query: "limit%00=1", Want: invalid("limit\x00")},
		{Name: "a name that is no UTF-8", Query: "%ff=1"},
		{Name: "an empty name", Query: "=1"},
		{Name: "= alone", Query: "="},
		{Name: "a second question mark", Query: "?limit=1", Want: invalid("?limit")},
	}},
}
