// Package deploy tests the files in deploy/: proxies, units, the database role, the image.
package deploy

import (
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }
