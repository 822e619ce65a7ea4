package faults

import (
	"os"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// damages are done to acknowledged writes.
var damages = []struct {
	want  string // the kind of fault that the ledger reports
	sql   string // the damage
	bytes string // of the file on disk; "" leaves them
}{
	{
		want: "a write was done twice",
		sql:  "insert into hubs (name, description) select name, description from hubs",
	},
	{
		want: "an acknowledged hub is lost",
		sql:  "delete from hubs",
	},
	{
		want: "an acknowledged change is lost",
		sql:  "update hubs set description = ''",
	},
	{
		want: "an acknowledged deletion is lost",
		sql: `insert into hubs (name, description) select name, description from before
			where name not in (select name from hubs)`,
	},
	{
		want: "a hub is stored that no client sent",
		sql:  "insert into hubs (name) values ('ledger of another')",
	},
	{
		want: "acknowledged terms are lost",
		sql:  "update terms_acceptances set accepted_at = now()",
	},
	{
		want: "an acknowledged file is lost",
		sql:  "update files set file_id = gen_random_uuid()",
	},
	{
		want:  "an acknowledged file has other bytes",
		sql:   "update files set size = 5",
		bytes: "other",
	},
	{
		want: "wrong number of rows in the table files",
		sql:  "insert into files (name, content_type, size) values ('a.txt', 'text/plain', 1)",
	},
}

// The ledger, which other tests rely on, reports each kind of damage to acknowledged writes, and
// nothing else.
func TestLedgerNoticesDamage(t *testing.T) {
	t.Parallel()
	for _, test := range damages {
		t.Run(test.want, func(t *testing.T) {
			t.Parallel()
			s, _ := start(t)
			c, email := s.Member(t, "admin")
			var kinds []string
			ledger := hubstest.NewLedger(func(kind, _ string) {
				kinds = append(kinds, kind)
			})
			version := get(c, "/auth/session").Field(t, "terms.version")
			ledger.AcceptTerms(c, email, version).Must(t, 200)
			path := location(t, ledger.Upload(c))
			write := func() int { // returns the status
				r := ledger.WriteHub(c.Elsewhere())
				if r.Status >= 300 {
					t.Fatalf("got the answer %v, want a success", r)
				}
				return r.Status
			}
			hubstest.WaitFor(t, "status of a write that deletes a hub", 204, func() int {
				// The case of a lost deletion needs the hubs that there were before it.
				s.exec("drop table if exists before; create table before as table hubs")
				return write()
			})
			// Write on until a hub that is left has a change.
			hubstest.WaitFor(t, "status of a write that changes a hub", 200, write)

			s.exec(test.sql)
			if test.bytes != "" {
				os.WriteFile(s.onDisk(path), []byte(test.bytes), 0o600)
			}
			ledger.CheckRows(t, s.Database)
			ledger.CheckFiles(t, c, s.Database)

			got := strings.Join(slices.Compact(kinds), ", ")
			if got != test.want {
				t.Errorf("got the faults %q, want %q", got, test.want)
			}
		})
	}
}
