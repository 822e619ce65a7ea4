// Package api tests the server from outside, through HTTP and SMTP.
package api

import (
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) { hubstest.Main(m) }
