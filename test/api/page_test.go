package api

import (
	"testing"

	"hubs/internal/hubstest"
)

// The page is served byte for byte, whatever the settings: the hashes in its policy are those of
// the file (TestPageHashes), and with another byte its script would not run.
func TestPageIsAsHashed(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t, map[string]string{"COOKIE_PREFIX": "mine"})
	page, err := srv.Client(t).Try("GET", "/", nil)
	if err != nil {
		t.Fatal(err)
	}
	page.Want(t, 200)
	if string(page.Body) != hubstest.ReadFile(t, "web/index.html") {
		t.Error("the page is served with other bytes than those of web/index.html")
	}
}
