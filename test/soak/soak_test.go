// Package soak runs the server for long under faults.
package soak

import (
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }
