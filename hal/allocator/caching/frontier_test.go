package caching

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// free frees b after f.
func free(t testing.TB, a *Allocator, b allocator.Block, f queue.Frontier) {
	t.Helper()
	require.Equal(t, allocator.OK, a.Free(b, f))
}

func TestTheSameQueueGetsMemoryThatIsStillInUse(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	q1 := manualQueue(t)
	x := get(t, a, request(device, 64, q1.ID()))
	f := q1.work(t, nil, nil)
	free(t, a, x, f)
	y, g, o := a.Allocate(request(device, 64, q1.ID()))
	require.Equal(t, allocator.OK, o)
	require.Equal(t, x.Addr, y.Addr)
	require.Equal(t, f, g)
	require.Equal(t, allocator.Grounds{1, 0, 0, 0}, a.Stats().Reused)
	free(t, a, y, f)
	finish(t, a, base)
	require.Equal(t, f, base.frees[0].after, "memory goes down with its frontier")
}

func TestAnotherQueueGetsItOnceItIsOrderedAfterOrReached(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	q1, q2, q3 := manualQueue(t), manualQueue(t), manualQueue(t)
	x := get(t, a, request(device, 64, q1.ID()))
	s := queue.NewSemaphore(0)
	f := q1.work(t, nil, s.At(1))
	free(t, a, x, f)

	y := get(t, a, request(device, 64, q2.ID()))
	require.NotEqual(t, x.Addr, y.Addr)

	q3.work(t, s.At(1), nil)
	z, g, o := a.Allocate(request(device, 64, q3.ID()))
	require.Equal(t, allocator.OK, o)
	require.Equal(t, x.Addr, z.Addr)
	require.Equal(t, f, g, "the caller learns what the memory waits for")
	require.EqualValues(t, 1, a.Stats().Reused[allocator.ReuseOrdered])
	free(t, a, z, f)

	r := request(device, 64, q3.ID())
	r.Kind |= allocator.NoOrdered
	u := get(t, a, r)
	require.NotEqual(t, x.Addr, u.Addr, "ordered is not enough for this request")

	q1.drain()
	v := get(t, a, request(device, 64, q2.ID()))
	require.Equal(t, x.Addr, v.Addr)
	require.EqualValues(t, 1, a.Stats().Reused[allocator.ReusePolled])
	for _, b := range []allocator.Block{y, u, v} {
		put(t, a, b)
	}
	finish(t, a, base)
}

func TestTheHostGetsOnlyWhatIsReached(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	q := manualQueue(t)
	x := get(t, a, request(device, 64, 0))
	free(t, a, x, q.work(t, nil, nil))
	y := get(t, a, request(device, 64, 0))
	require.NotEqual(t, x.Addr, y.Addr)
	q.drain()
	z := get(t, a, request(device, 64, 0))
	require.Equal(t, x.Addr, z.Addr)
	put(t, a, y)
	put(t, a, z)
	finish(t, a, base)
}

// Fault 43.
func TestARecordedUseKeepsMemoryFromBeingReused(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	q1, q2 := manualQueue(t), manualQueue(t)
	x := get(t, a, request(device, 64, q1.ID()))
	use := q2.work(t, nil, nil)
	require.Equal(t, allocator.OK, x.Keeper.Ledger.Use(x.ID, use))
	free(t, a, x, q1.work(t, nil, nil))
	q1.drain()
	y := get(t, a, request(device, 64, q1.ID()))
	require.NotEqual(t, x.Addr, y.Addr, "q2 still uses it")
	put(t, a, y)
	a.Trim(64)
	require.False(t, base.frees[0].after.Reached(), "nor is it free below")
	require.Equal(t, x.Addr, base.frees[0].addr)
	q2.drain()
	require.True(t, base.frees[0].after.Reached())
	finish(t, a, base)
}

func TestAnUnknownFrontierIsEverythingIssued(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	q1, q2 := manualQueue(t), manualQueue(t)
	x := get(t, a, request(device, 64, q1.ID()))
	q1.work(t, nil, nil)
	q2.work(t, nil, nil)
	free(t, a, x, queue.Frontier{})
	require.EqualValues(t, 64, a.Stats().Pending)
	q1.drain()
	_, _, o := a.Allocate(request(host, 1, 0))
	require.Equal(t, allocator.OK, o)
	y := get(t, a, request(device, 64, q1.ID()))
	require.NotEqual(t, x.Addr, y.Addr)
	q2.drain()
	z := get(t, a, request(device, 64, q1.ID()))
	require.Equal(t, x.Addr, z.Addr)
}

func TestABlockThatIsNotReadyNeverHidesOneThatIs(t *testing.T) {
	for _, shards := range []int{1, 4} {
		for _, ready := range []int{0, 10, 19} {
			base := newBase()
			a := newCache(t, base, Config{Depth: 2, Shards: shards})
			q1, q2 := manualQueue(t), manualQueue(t)
			var live []allocator.Block
			for range 20 {
				live = append(live, get(t, a, request(device, 64, q1.ID())))
			}
			f := q1.work(t, nil, nil)
			for i, b := range live {
				if i == ready {
					put(t, a, b)
				} else {
					free(t, a, b, f)
				}
			}
			b := get(t, a, request(device, 64, q2.ID()))
			require.Equal(t, live[ready].Addr, b.Addr)
			put(t, a, b)
			finish(t, a, base)
		}
	}
}

func TestAMissPollsOnceWithoutALock(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	q1, q2 := manualQueue(t), manualQueue(t)
	polls := 0
	remove := queue.AddPump(func() bool {
		polls++
		a.Stats() // would not return under the lock
		q1.drain()
		return true
	})
	defer remove()
	x := get(t, a, request(device, 64, q1.ID()))
	free(t, a, x, q1.work(t, nil, nil))
	y := get(t, a, request(device, 64, q2.ID()))
	require.Equal(t, x.Addr, y.Addr)
	require.Equal(t, 1, polls)
	get(t, a, request(device, 64, q2.ID()))
	require.Equal(t, 1, polls, "nothing to poll for")
	put(t, a, y)
}

func TestAPendingBlockThatWouldServeIsWorthWaitingFor(t *testing.T) {
	for _, limit := range []allocator.Outcome{allocator.Exhausted, allocator.OverLimit} {
		base := newBase()
		a := newCache(t, base, Config{})
		q1, q2 := manualQueue(t), manualQueue(t)
		x := get(t, a, request(device, 64, q1.ID()))
		f := q1.work(t, nil, nil)
		free(t, a, x, f)
		base.failAlloc = map[int]allocator.Outcome{2: limit, 3: limit, 4: allocator.TooLarge}
		_, g, o := a.Allocate(request(device, 64, q2.ID()))
		require.Equal(t, allocator.NeedsWait, o)
		require.Equal(t, f, g)
		_, _, o = a.Allocate(request(device, 6400, q2.ID()))
		require.Equal(t, limit, o, "nothing here would serve")
		_, _, o = a.Allocate(request(device, 64, q2.ID()))
		require.Equal(t, allocator.TooLarge, o, "no wait helps")
		q1.drain()
		y := get(t, a, request(device, 64, q2.ID()))
		require.Equal(t, x.Addr, y.Addr)
		put(t, a, y)
		finish(t, a, base)
	}
}

func TestAWaitIsAddedOnlyWhereAllowedAndNeeded(t *testing.T) {
	for _, shards := range []int{1, 2} {
		base := newBase()
		a := newCache(t, base, Config{Shards: shards})
		q1, q2 := manualQueue(t), manualQueue(t)
		first, second, third := get(t, a, request(device, 64, q1.ID())), get(t, a, request(device, 64, q1.ID())), get(t, a, request(device, 64, q2.ID()))
		f := q1.work(t, nil, nil)
		free(t, a, third, queue.ReadyNow())
		free(t, a, first, f)
		free(t, a, second, q1.work(t, nil, nil))
		r := request(device, 64, q2.ID())
		r.Kind |= allocator.MayWait
		b := get(t, a, r)
		require.Equal(t, third.Addr, b.Addr, "one that is ready comes first")
		c, g, o := a.Allocate(r)
		require.Equal(t, allocator.OK, o)
		require.Equal(t, first.Addr, c.Addr, "then the one that is ready soonest")
		require.Equal(t, f, g)
		require.EqualValues(t, 1, a.Stats().Reused[allocator.ReuseWait])
		require.Equal(t, 3, base.allocs)
		put(t, a, b)
		put(t, a, c)
		finish(t, a, base)
	}
}

func TestEvictedMemoryGoesDownWithItsFrontier(t *testing.T) {
	base := newBase()
	a := parsed(t, base, "device_local=*;*;1")
	q := manualQueue(t)
	x, y := get(t, a, request(device, 64, q.ID())), get(t, a, request(device, 64, q.ID()))
	f := q.work(t, nil, nil)
	free(t, a, x, f)
	put(t, a, y)
	require.Equal(t, []freed{{x.Addr, 64, f}}, base.frees)
	z := get(t, a, request(device, 65, 0))
	g := q.work(t, nil, nil)
	require.NoError(t, a.Close())
	free(t, a, z, g)
	require.Equal(t, g, base.frees[2].after)
	finish(t, a, base)
}

func TestFreshMemoryKeepsTheFrontierOfTheBase(t *testing.T) {
	base := newBase()
	q := manualQueue(t)
	base.frontier = q.work(t, nil, nil)
	a := newCache(t, base, Config{})
	b, f, o := a.Allocate(request(device, 64, 0))
	require.Equal(t, allocator.OK, o)
	require.Equal(t, base.frontier, f)
	put(t, a, b)
	require.EqualValues(t, 64, a.Stats().Pending, "free after both")
	q.drain()
	require.Zero(t, a.Stats().Pending)
	finish(t, a, base)
}

func TestPendingIsListedOldestFirst(t *testing.T) {
	base := newBase()
	a := parsed(t, base, "device_local=*,host_local=*")
	q := manualQueue(t)
	d, h, e, ready := get(t, a, request(device, 1, 0)), get(t, a, request(host, 2, 0)), get(t, a, request(device, 3, 0)), get(t, a, request(host, 4, 0))
	for _, b := range []allocator.Block{h, ready, e, d} {
		if b == ready {
			put(t, a, b)
		} else {
			free(t, a, b, q.work(t, nil, nil))
		}
	}
	list := func(most int) (sizes []memory.Bytes) {
		a.Pending(func(f queue.Frontier, size memory.Bytes) bool {
			require.False(t, f.Reached())
			sizes = append(sizes, size)
			return len(sizes) < most
		})
		return sizes
	}
	require.Equal(t, []memory.Bytes{2, 3, 1}, list(9))
	require.Equal(t, []memory.Bytes{2, 3}, list(2))
	require.EqualValues(t, 6, a.Stats().Pending)
	require.EqualValues(t, 10, a.Stats().Idle)
	q.w.Step()
	require.Equal(t, []memory.Bytes{3, 1}, list(9))
	finish(t, a, base)
}
