// Package guide tests the patches of examples/, to which docs/yours.md links, and the exercises of
// README.md.
package guide

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }

// The tests of test/api that say what is missing after a change of a resource.
const tests = "Hub|Room|Route|HeadIs|Input|JSONBodies|WritesCheck|Schema|Migrat|Broken|Contract|" +
	"IDOfAPath|PagesByAfter|Rights|Fields|Filters|EveryList|IDsFind|Owners|Deleted|Column|RowsAndComments"

// patches returns the paths of the patches, in the order of their names.
func patches(t *testing.T) []string {
	t.Helper()
	paths, _ := filepath.Glob(filepath.Join(hubstest.Root(), "examples", "*.patch"))
	if len(paths) != 3 {
		t.Errorf("got the patches %q in examples/, want three", paths)
	}
	return paths
}

// apply applies a patch to a copy of this tree.
func apply(t *testing.T, folder, patch string) {
	t.Helper()
	if output, err := tryRun(folder, "git", "apply", patch); err != nil {
		t.Fatalf("%s does not apply (docs/CONTRIBUTING.md says how to renew it):\n%s",
			filepath.Base(patch), output)
	}
}

// Each patch applies to this tree. Then the first tier passes, and so do the tests of what a patch
// changes. TestAllPatchesAfterTheRename runs all.
func TestEachPatch(t *testing.T) {
	for _, patch := range patches(t) {
		t.Run(filepath.Base(patch), func(t *testing.T) {
			folder := copyTree(t)
			apply(t, folder, patch)
			run(t, folder, "go", "vet", "./...")
			run(t, folder, "go", "test", ".", "./tools/prove")
			run(t, folder, "go", "test", "-count=1", "-run="+tests, "./test/api")
			run(t, folder, "go", "test", "-count=1", "-run=TestLeastPrivilegeRole|TestRolesFollow", "./test/deploy")
			if strings.HasPrefix(filepath.Base(patch), "remove-files") {
				run(t, folder, "go", "test", "-count=1", "-run=TestDeletionThatIsCutOff", "./test/faults")
			}
		})
	}
}

// After the module was renamed as docs/yours.md says, the patches apply together, in any order, and
// make the same files. Then all that ./dev.sh test runs passes.
func TestAllPatchesAfterTheRename(t *testing.T) {
	renamed := func() (folder string) {
		folder = copyTree(t)
		run(t, folder, "git", "init", "-q")
		run(t, folder, "git", "add", "-A")
		run(t, folder, "sh", "-ec", block(t, "docs/yours.md", "rename"))
		return folder
	}
	folder, other := renamed(), renamed()
	for _, patch := range patches(t) {
		apply(t, folder, filepath.Join("examples", filepath.Base(patch)))
	}
	for _, patch := range slices.Backward(patches(t)) {
		apply(t, other, filepath.Join("examples", filepath.Base(patch)))
	}
	run(t, ".", "diff", "-r", "-x", ".git", folder, other)
	left, err := tryRun(folder, "git", "grep", `"hubs/[it]`, "--", "*.go", "examples/*.patch")
	if err == nil {
		t.Errorf("the old name of the module still stands in\n%s", left)
	}
	run(t, folder, "go", "vet", "./...")
	run(t, folder, "go", "test", ".")
	run(t, folder, "go", "test", "-count=1", "-timeout=10m", "-parallel=8", "./internal/...", "./tools/...", "./test/api")
}
