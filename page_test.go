package main

import (
	"crypto/sha256"
	"encoding/base64"
	"regexp"
	"strings"
	"testing"
)

// The page's policy allows its one style and its one script by their hashes. With a wrong hash
// every button is dead.
func TestPageHashes(t *testing.T) {
	t.Parallel()
	for _, tag := range []string{"style", "script"} {
		block := regexp.MustCompile(`(?s)<` + tag + `>(.*?)</` + tag + `>`)
		blocks := block.FindAllStringSubmatch(indexPage, -1)
		if len(blocks) != 1 {
			t.Fatalf("web/index.html: got %d blocks of <%s>, want 1", len(blocks), tag)
		}
		sum := sha256.Sum256([]byte(blocks[0][1]))
		want := tag + "-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
		if !strings.Contains(indexPage, want) {
			t.Errorf("web/index.html: the policy at its top must say: %s", want)
		}
	}
}
