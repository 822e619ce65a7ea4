package faults

import (
	"testing"

	"hubs/internal/hubstest"
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
	searches := getAtOnce(t, manyRequests, c, "/hubs?filters[name]=o")
	s.waitForLocks(most)
	for range 20 {
		get(c, "/auth/session").Want(t, 200)
		if n := s.count(lockWaiters); n > most {
			t.Errorf("got %d searches at the same time, want at most %d", n, most)
		}
	}
	// The other places are for others, also if they wait for the same table.
	others := getAtOnce(t, 1, c, hub)
	s.waitForLocks(most + 1)
	tx.Rollback()
	(<-others).Want(t, 200)
	hubstest.CountStatuses(searches)
	get(c, "/hubs?filters[name]=o").Want(t, 200)
}
