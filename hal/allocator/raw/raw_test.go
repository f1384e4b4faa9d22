package raw_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/raw"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What the three sources have in common is tested in internal/source.

func TestOneCallAnAllocation(t *testing.T) {
	d, err := host.Open(host.Config{})
	require.NoError(t, err)
	s, err := raw.New(&allocator.Env{Device: d, Heaps: d.Info().Heaps})
	require.NoError(t, err)
	for i := range uint64(10) {
		b, f, o := s.Allocate(allocator.Request{Size: 1000})
		require.Equal(t, allocator.OK, o)
		require.Equal(t, queue.ReadyNow(), f)
		require.EqualValues(t, 1024, b.Size, "granted is what the driver took")
		require.Equal(t, allocator.OK, s.Free(b, f))
		st := s.Stats()
		require.Equal(t, i+1, st.SourceAllocs)
		require.Equal(t, i+1, st.SourceFrees)
		require.EqualValues(t, 1024, st.PeakHeld)
	}
	require.NoError(t, s.Close())
	require.NoError(t, d.Close())
	_, err = raw.New(&allocator.Env{})
	require.ErrorContains(t, err, "needs a device")
}

func Example() {
	d, err := host.Open(host.Config{Capacity: memory.GiB})
	if err != nil {
		panic(err)
	}
	s, err := raw.New(&allocator.Env{Device: d, Heaps: d.Info().Heaps})
	if err != nil {
		panic(err)
	}
	b, _, outcome := s.Allocate(allocator.Request{Size: memory.MiB})
	fmt.Println(outcome, b.Size, s.Stats().SourceAllocs)
	_, _, outcome = s.Allocate(allocator.Request{Size: memory.GiB})
	fmt.Println(outcome)
	fmt.Println(s.LastError())
	fmt.Println(s.Free(b, queue.ReadyNow()), s.Free(b, queue.ReadyNow()))
	fmt.Println(s.Close(), d.Close())
	// Output:
	// ok 1MiB 1
	// exhausted
	// host: raw allocation of 1GiB: driver: out of memory: heap device has 1023MiB free of 1GiB (raw 1MiB, pool 0B, pages 0B)
	// ok stale
	// <nil> <nil>
}
