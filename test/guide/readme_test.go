package guide

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// block returns the code below a mark in a document, such as <!-- ask -->.
func block(t *testing.T, document, mark string) string {
	t.Helper()
	found := hubstest.Matches(t, document, "(?s)<!-- "+mark+" -->\n *```sh\n(.*?)```")
	if len(found) != 1 {
		t.Fatalf("%s: got %d blocks of code below <!-- %s -->, want one", document, len(found), mark)
	}
	return found[0]
}

// edit replaces a text in a file of a folder. The text must stand there once.
func edit(t *testing.T, folder, name, old, text string) {
	t.Helper()
	path := filepath.Join(folder, name)
	content, err := os.ReadFile(path)
	hubstest.Must(t, err)
	if n := strings.Count(string(content), old); n != 1 {
		t.Fatalf("%s: got %d times %q, want once: README.md asks for another change", name, n, old)
	}
	hubstest.WriteFile(t, path, strings.Replace(string(content), old, text, 1))
}

// wantFailure runs a command that must fail, and checks that its output has the words.
func wantFailure(t *testing.T, folder, command string, words ...string) {
	t.Helper()
	if !strings.Contains(hubstest.ReadFile(t, "README.md"), command) {
		t.Errorf("README.md: want the command %s", command)
	}
	output, err := tryRun(folder, "sh", "-c", command)
	if err == nil {
		t.Errorf("%s: got no failure, want one", command)
	}
	for _, word := range words {
		if !strings.Contains(output, word) {
			t.Errorf("%s: got\n%s\nwant a complaint with %q", command, output, word)
		}
	}
}

// After the change of the first exercise of README.md, the tests name all places that its answer
// names.
func TestExerciseNumber(t *testing.T) {
	t.Parallel()
	folder := copyTree(t)
	edit(t, folder, "otp.go", "codeTTL    = 10 * time.Minute", "codeTTL    = 20 * time.Minute")
	wantFailure(t, folder, "go test .", "docs/runbook.md", "codeTTL", "codeRenew", "SECURITY.md")
	wantFailure(t, folder, "go test -run 'TestCodeOpensASession|TestMailIsWellFormed' ./test/api",
		"expiresInSeconds", "20 minutes")
}

// The second exercise finds removals of the row, and shows what each takes out.
func TestExerciseProof(t *testing.T) {
	t.Parallel()
	const command = `grep -A 12 '^== O7' testdata/removals/otp.txt`
	if !strings.Contains(hubstest.ReadFile(t, "README.md"), command) {
		t.Errorf("README.md: want the command %s", command)
	}
	shown, err := tryRun(hubstest.Root(), "sh", "-c", command)
	hubstest.Must(t, err)
	for _, name := range []string{"O7-new-code-each-time", "O7-checked-and-mailed-apart", "O7-made-before-the-wait"} {
		_, removal, _ := strings.Cut(shown, "== "+name+"\n")
		removal, _, _ = strings.Cut(removal, "\n== ")
		if !strings.Contains(removal, "Gains: ") || !strings.Contains(removal, "In: ") {
			t.Errorf("%s: got\n%s\nwant what the removal %s gains and changes", command, shown, name)
		}
	}
}

// With the change of the third exercise, one code signs in many requests, and the test says so.
func TestExerciseRace(t *testing.T) {
	t.Parallel()
	folder := copyTree(t)
	edit(t, folder, "otp.go", "\tif c.byEmail[email] != code {\n\t\treturn false\n\t}\n", "")
	wantFailure(t, folder, "go test -run TestCodesInParallel .", "want 1")
}

// The commands of the fourth exercise steal a cookie. It outlives the sign-out, and ends with the
// command that the answer names.
func TestExerciseStolenCookie(t *testing.T) {
	t.Parallel()
	hubstest.Need(t, "curl", "curl")
	s := hubstest.Start(t)
	const email = "member@hubs.example"
	s.User(t, "add", email)
	local := strings.NewReplacer("http://localhost:8080", s.Base, "/tmp", t.TempDir())

	ask := local.Replace(block(t, "README.md", "ask"))
	api, _, _ := strings.Cut(ask, "\n")
	shell(t, ask)
	steal := strings.Replace(local.Replace(block(t, "README.md", "steal")), "123456", s.Code(t, email), 1)
	wantStatuses(t, shell(t, api, steal), "401", "200")

	s.User(t, "signout", email)
	lines := strings.Split(strings.TrimSpace(steal), "\n")
	wantStatuses(t, shell(t, api, lines[len(lines)-1]), "401")
}

// wantStatuses compares the statuses that curl has printed behind the answers.
func wantStatuses(t *testing.T, printed string, want ...string) {
	t.Helper()
	got := regexp.MustCompile(`(?m) ([0-9]{3})$`).FindAllStringSubmatch(printed, -1)
	for i, status := range want {
		if len(got) != len(want) || got[i][1] != status {
			t.Errorf("got\n%s\nwant the statuses %v", printed, want)
			return
		}
	}
}

// shell runs lines of a shell, and returns what they print. curl shows its progress unless it writes
// to a terminal, so standard error is left out.
func shell(t *testing.T, script ...string) string {
	t.Helper()
	return run(t, ".", "bash", "-ec", "exec 2>/dev/null\n"+strings.Join(script, "\n"))
}

// run runs a program in a folder, and returns what it has printed. It fails the test if the program
// fails.
func run(t *testing.T, folder, program string, args ...string) string {
	t.Helper()
	output, err := tryRun(folder, program, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, output)
	}
	return output
}

func tryRun(folder, program string, args ...string) (output string, err error) {
	command := exec.Command(program, args...)
	command.Dir = folder
	for _, setting := range os.Environ() {
		// The tests must build the server of the folder, not take one that was built before.
		if !strings.HasPrefix(setting, "HUBS_BINARY=") {
			command.Env = append(command.Env, setting)
		}
	}
	command.Env = append(command.Env, "HUBS_TEST_REQUIRE=all")
	printed, err := command.CombinedOutput()
	return string(printed), err
}

// copyTree copies the files of this working tree, changed ones as they are now, into a new
// folder.
func copyTree(t *testing.T) (folder string) {
	t.Helper()
	folder = t.TempDir()
	root := hubstest.Root()
	names := run(t, root, "git", "-c", "safe.directory=*", "ls-files", "-coz", "--exclude-standard")
	for name := range strings.SplitSeq(strings.TrimSuffix(names, "\x00"), "\x00") {
		from, to := filepath.Join(root, name), filepath.Join(folder, name)
		info, err := os.Stat(from)
		if os.IsNotExist(err) { // deleted, but not yet in the index
			continue
		}
		hubstest.Must(t, err)
		content, err := os.ReadFile(from)
		hubstest.Must(t, err)
		hubstest.Must(t, os.MkdirAll(filepath.Dir(to), 0o755))
		hubstest.Must(t, os.WriteFile(to, content, info.Mode().Perm()))
	}
	return folder
}
