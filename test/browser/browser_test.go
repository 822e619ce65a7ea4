// Package browser tests the page and the example in three browsers.
package browser

import (
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }
