// Package faults tests what the server does while database, mail server, disk and network fail.
package faults

import (
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }
