package faults

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// mostSearches is how many searches by name the server runs at the same time.
const mostSearches = 4

// H6: At most four searches by name run at the same time, whoever sends them: the others wait, and
// other requests are served.
func TestSearchesLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
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
	s.waitForLocks(mostSearches)
	for range 60 {
		get(c, "/auth/session").Want(t, 200)
		if n := s.count(lockWaiters); n > mostSearches {
			t.Errorf("got %d searches at the same time, want at most %d", n, mostSearches)
		}
		// To show that no fifth search begins, also after it has waited for a place for a second.
		time.Sleep(25 * time.Millisecond)
	}
	tx.Rollback()
	get(c, hub).Want(t, 200)
}
