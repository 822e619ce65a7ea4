package deploy

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A kubelet is what Kubernetes does with the servers of kubernetes.yaml, without Kubernetes: it lists a
// server once its readiness probe has succeeded. When it ends one, proxies still send requests there for
// two seconds, because they learn late that it goes.
type kubelet struct {
	text   string // kubernetes.yaml
	listed atomic.Pointer[[]string]
	turn   atomic.Int64
}

const proxiesLearnAfter = 2 * time.Second

func newKubelet(t *testing.T) *kubelet {
	k := &kubelet{text: shipped(t, "kubernetes.yaml")}
	k.listed.Store(&[]string{})
	return k
}

// number returns the number after a word in kubernetes.yaml.
func (k *kubelet) number(t *testing.T, word string) int {
	t.Helper()
	found := regexp.MustCompile(word + `: (?:\{sleep: \{seconds: )?([0-9]+)`).FindStringSubmatch(k.text)
	if found == nil {
		t.Fatalf("setup: kubernetes.yaml has no number after %s", word)
	}
	n, err := strconv.Atoi(found[1])
	hubstest.Must(t, err)
	return n
}

// start starts a server, and lists it when it is ready.
func (k *kubelet) start(t *testing.T, env map[string]string) *hubstest.Server {
	t.Helper()
	s := hubstest.Start(t, env, hubstest.Quiet)
	path := regexp.MustCompile(`httpGet: \{path: (\S+), port: 8080\}`).FindStringSubmatch(k.text)[1]
	hubstest.WaitFor(t, "readiness probe", 200, func() int {
		answer, err := http.Get("http://" + s.Addr + path)
		if err != nil {
			return 0
		}
		answer.Body.Close()
		return answer.StatusCode
	})
	listed := append([]string{s.Addr}, *k.listed.Load()...)
	k.listed.Store(&listed)
	return s
}

// end takes a server from the list, late, and meanwhile ends it as kubernetes.yaml says.
func (k *kubelet) end(t *testing.T, s *hubstest.Server) {
	t.Helper()
	time.AfterFunc(proxiesLearnAfter, func() {
		listed := []string{}
		for _, addr := range *k.listed.Load() {
			if addr != s.Addr {
				listed = append(listed, addr)
			}
		}
		k.listed.Store(&listed)
	})
	time.Sleep(time.Duration(k.number(t, "preStop")) * time.Second)
	hubstest.WantEqual(t, "exit status", s.Stop(t), 0)
}

// next returns the listed servers in turn, as a Service does.
func (k *kubelet) next() string {
	listed := *k.listed.Load()
	return listed[int(k.turn.Add(1))%len(listed)]
}

// N3: Kubernetes replaces the server under load, as kubernetes.yaml says, and no request is lost.
func TestContainerIsReplacedUnderLoad(t *testing.T) {
	t.Parallel()
	k := newKubelet(t)
	env := productionEnv(t)
	env["DATABASE_URL"] = hubstest.NewDatabase(t)
	old := k.start(t, env)
	user, _ := old.Member(t, "member")
	load := startLoad(t, user, k.next)
	load.waitForSuccesses(t, 50)

	k.start(t, env)
	load.waitForSuccesses(t, 50) // from both
	k.end(t, old)
	load.waitForSuccesses(t, 50)
	load.wantNoFailure(t)
}

// A container has the time that a stop can take, is not ended because the database is away, and can
// write to its files only.
func TestManifestFitsTheServer(t *testing.T) {
	t.Parallel()
	k := newKubelet(t)
	const stop = 26 // seconds: main.go, stop
	for file, setting := range map[string]string{
		"compose.yaml": `stop_grace_period: (\d+)s`,
		"hubs.service": `TimeoutStopSec=(\d+)`,
	} {
		grace := hubstest.Matches(t, "deploy/"+file, setting)
		if seconds, err := strconv.Atoi(strings.Join(grace, " ")); err != nil || seconds < stop {
			t.Errorf("%s: got %q to stop, want one setting of %d s or more", file, grace, stop)
		}
	}
	if grace := k.number(t, "terminationGracePeriodSeconds"); grace < k.number(t, "preStop")+stop {
		t.Errorf("terminationGracePeriodSeconds: got %d, want preStop and %d s", grace, stop)
	}
	if strings.Contains(k.text, "\n          livenessProbe:") {
		t.Error("got a livenessProbe, want none: it would restart servers whose database is away")
	}
	for _, name := range secretSettings {
		if !strings.Contains(k.text, "{name: "+name+"_FILE, value: /secrets/"+name+"}") {
			t.Errorf("%s does not come from a file", name)
		}
	}
}
