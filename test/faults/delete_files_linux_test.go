package faults

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// F3: Whichever call of the file system user delete -files is killed at, or fails at, running it again
// finishes. It leaves no row and no byte of the user, and the files of others as they are. While a call
// fails, the user and the rows stay.
func TestDeleteWithFilesIsInterrupted(t *testing.T) {
	t.Parallel()
	strace := hubstest.Need(t, "strace", "strace")
	s := hubstest.Start(t)
	other, _ := s.Member(t, "member")
	path := other.Store("other.txt", "of another user")
	const files = 2
	for _, fault := range []string{
		"unlinkat:signal=SIGKILL", "unlinkat:error=EIO", "fsync:signal=SIGKILL", "fsync:error=EIO",
	} {
		steps := 0
		for ; ; steps++ {
			_, email := s.Uploader(t, files)
			call, _, _ := strings.Cut(fault, ":")
			trace := filepath.Join(t.TempDir(), "trace")
			cmd := exec.Command(strace, "-f", "-o", trace, "-e", "trace="+call,
				"-e", fmt.Sprintf("inject=%s:when=%d", fault, steps+1),
				hubstest.Binary(), "user", "delete", "-files", email)
			cmd.Env = []string{"DATABASE_URL=" + s.Env["DATABASE_URL"], "FILES_DIR=" + s.Env["FILES_DIR"]}
			output, err := cmd.CombinedOutput()
			if err == nil { // there was no such call
				finishDelete(t, s, email, 1)
				break
			}
			// Until the rows are deleted, the user is there, so that the command can be run again.
			rows := hubstest.Query[int](t, s.Database, `select count(*) from files
				join users using (user_id) where email = $1`, email)
			if rows != files {
				t.Errorf("%s, step %d: got %d rows, want %d\n%s", fault, steps+1, rows, files, output)
			}
			finishDelete(t, s, email, 1)
			other.WantFile(path, "of another user")
		}
		if steps == 0 {
			t.Errorf("%s: got no such call, want at least one", fault)
		}
	}
}
