// Package guide tests the patches of examples/, to which docs/yours.md links.
package guide

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"hubs/internal/hubstest"
)

// named matches the line of a patch that names the commit to which it applies.
var named = regexp.MustCompile(`^For commit ([0-9a-f]{40})\n`)

func TestMain(m *testing.M) { hubstest.Main(m) }

// The tests of test/api that say what is missing after a change of a resource.
const tests = "Hub|Room|Route|HeadIs|Input|JSONBodies|WritesCheck|Schema|Migrat|Broken|Contract|" +
	"IDOfAPath"

// Each patch names an earlier commit of this history and applies to it. Then the first tier passes,
// and so do the tests of what the patch changes.
func TestPatches(t *testing.T) {
	root := hubstest.Root()
	patches, _ := filepath.Glob(filepath.Join(root, "examples", "*.patch"))
	if len(patches) != 2 {
		t.Errorf("got the patches %q in examples/, want two", patches)
	}
	for _, patch := range patches {
		t.Run(filepath.Base(patch), func(t *testing.T) {
			text, err := os.ReadFile(patch)
			hubstest.Must(t, err)
			found := named.FindSubmatch(text)
			if found == nil {
				t.Fatal("got no line such as \"For commit 0123…\" at the top of the patch")
			}
			commit := string(found[1])
			folder := t.TempDir()

			run(t, root, "git", "merge-base", "--is-ancestor", commit, "HEAD")
			run(t, root, "git", "clone", "-q", "--shared", "--no-checkout", root, folder)
			run(t, folder, "git", "checkout", "-q", commit)
			run(t, folder, "git", "apply", patch)

			run(t, folder, "go", "vet", ".", "./test/api")
			run(t, folder, "go", "test", ".")
			run(t, folder, "go", "test", "-count=1", "-run="+tests, "./test/api")
		})
	}
}
