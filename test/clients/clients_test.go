// Package clients tests that the contract is of use to strangers: the usual generators make clients
// from it that compile strictly, and some of these clients then talk to a server.
//
// The tests fetch the generators from npm's registry and from the proxy of Go modules.
package clients

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) {
	hubstest.Main(m)
}

// environment is what go test was started with. hubstest.Main makes its own certificate authority
// the only one, but the go command must trust that of the module proxy.
var environment = os.Environ()

// tool runs a program in a folder. It ends the test if the program fails.
func tool(t *testing.T, dir, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(slices.Clone(environment), "NO_COLOR=1", "REDOCLY_TELEMETRY=off", "GOFLAGS=-mod=mod")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// copyInto copies the contract into a folder, and the programs in testdata that use the clients.
func copyInto(t *testing.T, dir, programs string) {
	t.Helper()
	hubstest.WriteFile(t, dir+"/openapi.json", hubstest.ReadFile(t, "web/openapi.json"))
	hubstest.Must(t, os.CopyFS(dir, os.DirFS(filepath.Join("testdata", programs))))
}

// wantFlow runs a program that signs a new user in, accepts the terms, lists hubs, uploads a file,
// reads it and signs out.
func wantFlow(t *testing.T, program string, args ...string) {
	t.Helper()
	s := hubstest.Start(t)
	hubstest.Exec(t, s.Database, "insert into hubs (name) values ('North Harbour'), ('South')")
	email, _ := s.NewUser(t, "member")
	cmd := exec.Command(program, append(args, s.Base, email)...)
	stdin, err := cmd.StdinPipe()
	hubstest.Must(t, err)
	var out strings.Builder
	cmd.Stdout = &out
	cmd.Stderr = &out
	hubstest.Must(t, cmd.Start())
	stdin.Write([]byte(s.Code(t, email))) // it comes once the program has asked for it
	stdin.Close()
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// The clients that four generators of TypeScript make compile strictly, and hide no type of the
// browser's own. Two of them go through the flow.
func TestTypeScriptClients(t *testing.T) {
	dir := hubstest.Packages(t, "testdata/npm")
	copyInto(t, dir, "ts")
	npx := func(args ...string) {
		t.Helper()
		tool(t, dir, dir+"/node_modules/.bin/"+args[0], args[1:]...)
	}
	npx("redocly", "lint", "--skip-rule=info-license", "openapi.json")
	npx("openapi-typescript", "openapi.json", "-o", "openapi-typescript.ts")
	npx("openapi-ts", "-i", "openapi.json", "-o", "hey-api", "-c", "@hey-api/client-fetch")
	npx("swagger-typescript-api", "generate", "-p", "openapi.json", "-o", ".", "--name", "swagger.ts")
	npx("orval", "--input", "openapi.json", "--output", "orval.ts", "--client", "fetch")

	npx("tsc", "--strict", "--target", "es2022", "--module", "commonjs", "--moduleResolution", "node10",
		"--esModuleInterop", "--lib", "es2022,dom,dom.iterable", "--types", "node", "--outDir", "out",
		"swagger.ts", "orval.ts", "use-openapi-fetch.ts", "use-hey-api.ts")
	browsers := typesIn(t, dir+"/node_modules/typescript/lib/lib.dom.d.ts", `(?m)^interface (\w+)`)
	for _, file := range []string{"hey-api/types.gen.ts", "swagger.ts", "orval.ts"} {
		for _, name := range typesIn(t, dir+"/"+file, `(?m)^export (?:type|interface) (\w+)`) {
			if slices.Contains(browsers, name) {
				t.Errorf("%s has a type %s, which hides the browser's", file, name)
			}
		}
	}
	node := hubstest.Need(t, "node", "nodejs")
	for _, program := range []string{"use-openapi-fetch", "use-hey-api"} {
		t.Run(program, func(t *testing.T) {
			wantFlow(t, node, dir+"/out/"+program+".js")
		})
	}
}

// typesIn returns the names in a file that the group of a pattern matches. There must be some.
func typesIn(t *testing.T, path, pattern string) (names []string) {
	t.Helper()
	text, err := os.ReadFile(path)
	hubstest.Must(t, err)
	for _, match := range regexp.MustCompile(pattern).FindAllSubmatch(text, -1) {
		names = append(names, string(match[1]))
	}
	if names == nil {
		t.Fatalf("setup: %s has no match of %s", path, pattern)
	}
	return names
}

// The clients that two generators of Go make pass go vet. That of ogen, which compares each answer
// with the contract, goes through the flow.
func TestGoClients(t *testing.T) {
	const (
		oapi    = "github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.2"
		runtime = "github.com/oapi-codegen/runtime@v1.9.0"
		ogen    = "github.com/ogen-go/ogen"
		version = "@v1.24.0"
	)
	dir := t.TempDir()
	list := exec.Command("go", "list", "-m", ogen+version)
	list.Env = environment
	if list.Run() != nil {
		hubstest.Skip(t, "the proxy of Go modules does not answer")
	}
	copyInto(t, dir, "go")
	hubstest.Must(t, os.Mkdir(dir+"/oapi-codegen", 0o755))
	tool(t, dir, "go", "run", oapi, "-generate", "types,client", "-package", "api",
		"-o", "oapi-codegen/client.go", "openapi.json")
	tool(t, dir, "go", "run", ogen+"/cmd/ogen"+version, "--package", "api", "--target", "ogen-client",
		"openapi.json")
	tool(t, dir, "go", "mod", "init", "clients")
	tool(t, dir, "go", "get", runtime, ogen+version)
	tool(t, dir, "go", "vet", "./...")
	tool(t, dir, "go", "build", "-o", "use-ogen", ".")
	wantFlow(t, dir+"/use-ogen")
}
