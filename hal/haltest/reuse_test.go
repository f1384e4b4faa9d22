package haltest_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/haltest"
)

// grounds are the reasons for which memory that was freed a moment ago is handed out
// again, each with what makes it so and the option that switches it off.
var grounds = []struct {
	name    string
	ground  allocator.Reuse
	on, off string
	request hal.Reuse // the same as off, for one request
	// ready does what the ground needs after a buffer was freed on the first of three
	// queues, and returns the queue to allocate on.
	ready func(t *testing.T, sim *haltest.Device, q []*hal.Queue) *hal.Queue
}{
	{
		"the same queue", allocator.ReuseSame, "reuse", "reuse:same=off", hal.NoSame,
		func(_ *testing.T, _ *haltest.Device, q []*hal.Queue) *hal.Queue { return q[0] },
	},
	{
		"ordered through two semaphores and three queues", allocator.ReuseOrdered, "reuse", "reuse:ordered=off", hal.NoOrdered,
		func(t *testing.T, _ *haltest.Device, q []*hal.Queue) *hal.Queue {
			s, u := hal.NewSemaphore(0), hal.NewSemaphore(0)
			require.NoError(t, q[0].Barrier(nil, s.At(1)))
			require.NoError(t, q[1].Barrier(s.At(1), u.At(1)))
			require.NoError(t, q[2].Barrier(u.At(1), nil))
			return q[2]
		},
	},
	{
		"over, as a poll finds", allocator.ReusePolled, "reuse", "reuse:polled=off", hal.NoPolled,
		func(_ *testing.T, sim *haltest.Device, q []*hal.Queue) *hal.Queue {
			sim.Run()
			return q[1]
		},
	},
	{
		"with a wait added", allocator.ReuseWait, "reuse:wait=on", "reuse", 0,
		func(_ *testing.T, _ *haltest.Device, q []*hal.Queue) *hal.Queue { return q[1] },
	},
}

func TestEachGroundOfReuseServesAndCanBeSwitchedOff(t *testing.T) {
	for _, stack := range []string{"raw+caching", "pool+caching:device_local=*,shards=4", "vmm+block", "raw+block", "pool+block+caching"} {
		for _, g := range grounds {
			for _, polled := range []bool{false, true} {
				again := func(policy string, reuse hal.Reuse) (same bool, by allocator.Grounds) {
					sim, err := haltest.New(haltest.Config{Polled: polled})
					require.NoError(t, err)
					dev, err := hal.OpenDriver(sim, hal.WithAllocator(stack, policy))
					require.NoError(t, err)
					ctx := context.Background()
					q := dev.Queues()
					p := hal.Params{Size: 2 * hal.MiB, Reuse: reuse} // a slab of its own, so that no rest serves
					a, err := q[0].Alloca(ctx, p, nil, nil)
					require.NoError(t, err)
					require.NoError(t, q[0].Fill(a.All(), []byte{1}, nil, nil))
					require.NoError(t, q[0].Dealloca(a, nil, nil))
					home := g.ready(t, sim, q)
					b, err := home.Alloca(ctx, p, nil, nil)
					require.NoError(t, err)
					require.NoError(t, home.Fill(b.All(), []byte{2}, nil, nil))
					require.NoError(t, home.Dealloca(b, nil, nil))
					for _, l := range dev.Stats().Layers {
						for i, n := range l.Reused {
							by[i] += n
						}
					}
					sim.Run()
					require.NoError(t, dev.Close(ctx))
					require.NoError(t, sim.Monitor().Err())
					return a.Address() == b.Address(), by
				}
				same, by := again(g.on, 0)
				require.True(t, same, "%s, %s, polled %v", stack, g.name, polled)
				require.EqualValues(t, 1, by[g.ground], "%s, %s, polled %v: %v", stack, g.name, polled, by)

				same, by = again(g.off, 0)
				require.False(t, same, "%s, %s switched off: %v", stack, g.name, by)
				if g.request != 0 {
					same, by = again("reuse", g.request)
					require.False(t, same, "%s, %s switched off for the request: %v", stack, g.name, by)
				}
			}
		}
	}
}
