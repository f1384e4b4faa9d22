package haltest_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/haltest"
)

// Faults that users of other allocators reported, each as the smallest sequence that
// shows its kind, on a device whose queues stand still until they are told to move.

// bench is a simulated device and who uses it.
type bench struct {
	*testing.T
	sim *haltest.Device
	dev *hal.Device
	q   []*hal.Queue
}

// onBenches runs f on every kind of stack and device, then lets all work finish, and
// wants nothing touched too early and nothing left.
func onBenches(t *testing.T, f func(b *bench)) {
	for _, stack := range []string{"raw", "pool", "vmm", "vmm+block", "raw+block", "pool+caching", "raw+caching:shards=4", "vmm+block+caching", "raw+caching+block", "vmm+block+reuse:wait=on"} {
		for _, polled := range []bool{false, true} {
			name := stack
			if polled {
				name += " polled"
			}
			t.Run(name, func(t *testing.T) {
				sim, err := haltest.New(haltest.Config{Capacity: 16 << 20, Queues: 3, Polled: polled})
				require.NoError(t, err)
				dev, err := hal.OpenDriver(sim, hal.WithAllocator(stack))
				require.NoError(t, err)
				b := &bench{t, sim, dev, dev.Queues()}
				f(b)
				require.NoError(t, dev.Check())
				sim.Run()
				require.Empty(t, sim.Stuck())
				require.NoError(t, dev.Close(context.Background()))
				require.NoError(t, sim.Monitor().Err())
			})
		}
	}
}

func (b *bench) alloca(q *hal.Queue, size hal.Bytes) hal.Buffer {
	b.Helper()
	x, err := q.Alloca(context.Background(), hal.Params{Size: size}, nil, nil)
	require.NoError(b, err)
	return x
}

func (b *bench) fill(q *hal.Queue, x hal.Buffer, wait, signal hal.Fence) {
	b.Helper()
	require.NoError(b, q.Fill(x.All(), []byte{1}, wait, signal))
}

func (b *bench) dealloca(q *hal.Queue, x hal.Buffer) {
	b.Helper()
	require.NoError(b, q.Dealloca(x, nil, nil))
}

// sound wants that nothing was touched too early so far.
func (b *bench) sound() {
	b.Helper()
	require.NoError(b, b.sim.Monitor().Err())
}

// A buffer is used on a second queue and freed on the first; the first asks for the
// same again while the second is still at it.
func TestAUseOnAnotherQueueOutlivesTheFree(t *testing.T) {
	onBenches(t, func(b *bench) {
		born := hal.NewSemaphore(0)
		x := b.alloca(b.q[0], hal.MiB)
		b.fill(b.q[0], x, nil, born.At(1))
		b.fill(b.q[1], x, born.At(1), nil)
		b.dealloca(b.q[0], x)
		y := b.alloca(b.q[0], hal.MiB)
		b.fill(b.q[0], y, nil, nil)
		b.sound()
		b.dealloca(b.q[0], y)
	})
}

// Memory that a stalled queue has freed merges with its neighbours for a request of a
// second queue; a third must not get the part that is in use.
func TestMergedMemoryStaysInUse(t *testing.T) {
	onBenches(t, func(b *bench) {
		var parts []hal.Buffer
		for range 8 {
			parts = append(parts, b.alloca(b.q[0], 256*hal.KiB))
		}
		for i, x := range parts {
			b.fill(b.q[i%2], x, nil, nil)
		}
		for i, x := range parts {
			b.dealloca(b.q[i%2], x)
		}
		for _, q := range []*hal.Queue{b.q[1], b.q[2]} {
			big := b.alloca(q, 2*hal.MiB)
			b.fill(q, big, nil, nil)
			b.sound()
			b.dealloca(q, big)
			small := b.alloca(q, 256*hal.KiB)
			b.fill(q, small, nil, nil)
			b.sound()
			b.dealloca(q, small)
		}
	})
}

// A queue goes while what it freed is in use, and another comes: it is not the first
// one again, whatever the driver calls it.
func TestANewQueueIsNotTheOneThatWent(t *testing.T) {
	onBenches(t, func(b *bench) {
		old := b.q[2]
		x := b.alloca(old, hal.MiB)
		b.fill(old, x, nil, nil)
		b.dealloca(old, x)
		old.Close()
		fresh, err := b.dev.NewQueue()
		require.NoError(b, err)
		require.NotEqual(b, old.ID(), fresh.ID())
		y := b.alloca(fresh, hal.MiB)
		b.fill(fresh, y, nil, nil)
		b.sound()
		b.dealloca(fresh, y)
	})
}

// What was freed on queues that are gone is there for all once their work is over.
func TestMemoryOfQueuesThatWentIsCommon(t *testing.T) {
	onBenches(t, func(b *bench) {
		for range 12 {
			q, err := b.dev.NewQueue()
			require.NoError(b, err)
			x := b.alloca(q, hal.MiB)
			b.fill(q, x, nil, nil)
			b.dealloca(q, x)
			q.Close()
		}
		b.sim.Run()
		before := b.dev.Stats().Source().PeakHeld
		for range 12 {
			x := b.alloca(b.q[0], hal.MiB)
			b.fill(b.q[0], x, nil, nil)
			defer b.dealloca(b.q[0], x)
		}
		require.LessOrEqual(b, b.dev.Stats().Source().PeakHeld, max(before, 13*hal.MiB))
		b.sound()
	})
}

// The rest of a block that is split is in use as long as the block was.
func TestTheRestOfASplitStaysInUse(t *testing.T) {
	onBenches(t, func(b *bench) {
		done := hal.NewSemaphore(0)
		big := b.alloca(b.q[0], 2*hal.MiB)
		b.fill(b.q[0], big, nil, nil)
		require.NoError(b, b.q[0].Dealloca(big, nil, done.At(1)))
		require.NoError(b, b.q[1].Barrier(done.At(1), nil)) // may have it: it comes after
		small := b.alloca(b.q[1], 256*hal.KiB)
		b.fill(b.q[1], small, nil, nil)
		rest := b.alloca(b.q[2], hal.MiB) // comes after nothing
		b.fill(b.q[2], rest, nil, nil)
		b.sound()
		b.dealloca(b.q[1], small)
		b.dealloca(b.q[2], rest)
	})
}

// A release that knows no queue, as a finalizer's, and one on a queue that has nothing
// to do come after the work on the buffer all the same.
func TestAReleaseWithoutTheRightQueueComesAfterTheWork(t *testing.T) {
	onBenches(t, func(b *bench) {
		release := []func(hal.Buffer) error{
			hal.Buffer.Release,
			b.q[1].Release,
			func(x hal.Buffer) error { return b.q[1].Dealloca(x, nil, nil) },
			func(x hal.Buffer) error { return x.ReleaseAfter(hal.ReadyNow()) },
		}
		for _, f := range release {
			x := b.alloca(b.q[0], hal.MiB)
			b.fill(b.q[0], x, nil, nil)
			require.NoError(b, f(x))
			b.dev.Trim(0)
			y := b.alloca(b.q[1], hal.MiB)
			b.fill(b.q[1], y, nil, nil)
			b.sound()
			b.dealloca(b.q[1], y)
		}
	})
}

// Work of another device on a buffer keeps it from the driver, if its owner says so.
func TestAnotherDevicesWorkKeepsMemory(t *testing.T) {
	onBenches(t, func(b *bench) {
		peer, err := haltest.New(haltest.Config{Seed: 7})
		require.NoError(b, err)
		other, err := hal.OpenDriver(peer)
		require.NoError(b, err)
		require.NoError(b, other.Queue(0).Barrier(nil, nil)) // stands for a copy between the two
		until := other.Queue(0).Issued()

		x := b.alloca(b.q[0], hal.MiB)
		require.NoError(b, x.UsedUntil(until))
		require.NoError(b, x.Release())
		b.dev.Trim(0)
		held := b.dev.Stats().Source().Held
		require.GreaterOrEqual(b, held, hal.MiB, "not before the other device is done")
		require.False(b, until.Reached())
		peer.Run()
		require.True(b, until.Reached())
		b.sim.Run()
		b.dev.Trim(0)
		require.Zero(b, b.dev.Stats().Source().Held)
		require.NoError(b, other.Close(context.Background()))
	})
}

// An allocation that fits once pending frees are over is served by the first call, not
// by the second.
func TestPendingMemoryIsWaitedForByTheFirstCall(t *testing.T) {
	onBenches(t, func(b *bench) {
		var parts []hal.Buffer
		for range 7 {
			x := b.alloca(b.q[0], 2*hal.MiB)
			b.fill(b.q[1], x, nil, nil)
			parts = append(parts, x)
		}
		for _, x := range parts {
			b.dealloca(b.q[0], x)
		}
		y := b.alloca(b.q[2], 10*hal.MiB)
		b.fill(b.q[2], y, nil, nil)
		b.sound()
		b.dealloca(b.q[2], y)
	})
}
