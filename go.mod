module hubs

go 1.26

toolchain go1.26.11

require (
	github.com/golang-jwt/jwt/v5 v5.3.1
	github.com/lib/pq v1.12.3
)
