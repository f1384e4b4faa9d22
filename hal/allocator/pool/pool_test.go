package pool_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/pool"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What the three sources have in common is tested in internal/source.

func open(t *testing.T, threshold memory.Bytes) (*pool.Source, *host.Device) {
	d, err := host.Open(host.Config{Capacity: memory.GiB})
	require.NoError(t, err)
	s, err := pool.New(&allocator.Env{Device: d, Heaps: d.Info().Heaps}, threshold)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.Zero(t, s.Stats().Held)
		require.NoError(t, d.Close())
	})
	return s, d
}

func alloc(t *testing.T, s allocator.Allocator, heap int, size memory.Bytes) allocator.Block {
	t.Helper()
	b, f, o := s.Allocate(allocator.Request{Size: size, Kind: allocator.MakeKind(heap, 256, 0, 0, 0)})
	require.Equal(t, allocator.OK, o)
	require.True(t, f.Reached())
	return b
}

func free(t *testing.T, s allocator.Allocator, blocks ...allocator.Block) {
	t.Helper()
	for _, b := range blocks {
		require.Equal(t, allocator.OK, s.Free(b, queue.ReadyNow()))
	}
}

func TestThePoolKeepsEverythingByDefault(t *testing.T) {
	v, err := pool.Layer.Table.Parse("")
	require.NoError(t, err)
	require.Equal(t, spec.UnlimitedSize, v.Size("threshold"))
	s, d := open(t, spec.UnlimitedSize)
	free(t, s, alloc(t, s, 0, memory.MiB), alloc(t, s, 0, 2*memory.MiB), alloc(t, s, 1, 4*memory.MiB))
	st := s.Stats()
	require.Equal(t, 7*memory.MiB, st.Held)
	require.Equal(t, 7*memory.MiB, st.Idle)
	require.Zero(t, st.Live)
	before, _, err := d.MemInfo(0)
	require.NoError(t, err)
	free(t, s, alloc(t, s, 0, 2*memory.MiB))
	after, _, err := d.MemInfo(0)
	require.NoError(t, err)
	require.Equal(t, before, after, "served from what the pool keeps")
	require.Equal(t, 7*memory.MiB, s.Stats().PeakHeld)
	require.Equal(t, 4*memory.MiB, s.Trim(3*memory.MiB), "3 MiB of both heaps together may stay")
	require.Equal(t, 3*memory.MiB, s.Stats().Held)
	require.Equal(t, 3*memory.MiB, s.Trim(0))
	s.ResetPeaks()
	require.Zero(t, s.Stats().PeakHeld)
}

func TestTheThresholdIsTheDriversPools(t *testing.T) {
	v, err := pool.Layer.Table.Parse("threshold=1MiB")
	require.NoError(t, err)
	require.Equal(t, memory.MiB, v.Size("threshold"))
	s, _ := open(t, memory.MiB)
	free(t, s, alloc(t, s, 0, memory.MiB), alloc(t, s, 0, 2*memory.MiB))
	require.Equal(t, memory.Bytes(0), s.Stats().Held, "the block freed last is larger than the threshold, the one freed first went before it")
	free(t, s, alloc(t, s, 0, memory.MiB))
	require.Equal(t, memory.MiB, s.Stats().Held)
}

// lame has no pool on heap 1.
type lame struct{ *host.Device }

func (d lame) SetPoolThreshold(heap int, keep memory.Bytes) error {
	if heap == 1 {
		return fmt.Errorf("no pool of pinned memory: %w", driver.ErrUnsupported)
	}
	return d.Device.SetPoolThreshold(heap, keep)
}

func (d lame) PoolAlloc(heap int, size, align memory.Bytes) (uint64, memory.Bytes, queue.Frontier, error) {
	if heap == 1 {
		panic("the heap has no pool")
	}
	return d.Device.PoolAlloc(heap, size, align)
}

func TestAHeapWithoutAPoolIsServedPlainly(t *testing.T) {
	d, err := host.Open(host.Config{Capacity: memory.GiB})
	require.NoError(t, err)
	s, err := pool.New(&allocator.Env{Device: lame{d}, Heaps: d.Info().Heaps}, spec.UnlimitedSize)
	require.NoError(t, err)
	a, b := alloc(t, s, 0, memory.MiB), alloc(t, s, 1, memory.MiB)
	require.Equal(t, 2*memory.MiB, s.Stats().Held)
	free(t, s, a, b)
	require.Equal(t, memory.MiB, s.Stats().Held, "what the pool keeps")
	require.EqualValues(t, 2, s.Stats().SourceFrees)
	c := alloc(t, s, 1, memory.MiB)
	d.Lose(fmt.Errorf("gone"))
	free(t, s, c)
	require.NoError(t, s.Close())
	require.Zero(t, s.Stats().Held)
	require.NoError(t, d.Close())
}

func Example() {
	d, err := host.Open(host.Config{Capacity: memory.GiB})
	if err != nil {
		panic(err)
	}
	s, err := pool.New(&allocator.Env{Device: d, Heaps: d.Info().Heaps}, 64*memory.MiB)
	if err != nil {
		panic(err)
	}
	for range 3 {
		b, _, _ := s.Allocate(allocator.Request{Size: memory.MiB})
		s.Free(b, queue.ReadyNow())
	}
	st := s.Stats()
	fmt.Println("live", st.Live, "held", st.Held, "after", st.SourceAllocs, "allocations")
	fmt.Println("trimmed", s.Trim(0))
	fmt.Println(s.Close(), d.Close())
	// Output:
	// live 0B held 1MiB after 3 allocations
	// trimmed 1MiB
	// <nil> <nil>
}
