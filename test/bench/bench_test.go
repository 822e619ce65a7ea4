// Package bench measures.
package bench

import (
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }
