package faults

import (
	"sync"
	"sync/atomic"
	"testing"
)

// H6: At most four searches by name run at the same time, whoever sends them: the others wait, and
// other requests are served.
func TestSearchesLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	const most = 4
	s, c := start(t)
	s.AllowErrorsWithAnyOf(unavailable) // of searches that wait for too long
	hub := location(t, createHub(c, "North"))
	tx := s.lock("hubs")
	var ended atomic.Bool
	var searches sync.WaitGroup
	for range manyRequests {
		searches.Go(func() {
			for !ended.Load() {
				get(c, "/hubs?filters[name]=o")
			}
		})
	}
	defer searches.Wait()
	defer ended.Store(true)
	s.waitForLocks(most)
	for range 20 {
		get(c, "/auth/session").Want(t, 200)
		if n := s.count(lockWaiters); n > most {
			t.Errorf("got %d searches at the same time, want at most %d", n, most)
		}
	}
	tx.Rollback()
	get(c, hub).Want(t, 200)
}
