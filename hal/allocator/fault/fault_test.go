package fault_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator/fault"
)

func open(t testing.TB, stack string) *hal.Device {
	d, err := hal.Open("host:capacity=64MiB,queues=2,granularity=64KiB", hal.WithAllocator(stack))
	require.NoError(t, err)
	return d
}

// work is a workload with some of everything; it returns how many requests failed.
func work(t testing.TB, d *hal.Device) (failed int) {
	ctx := context.Background()
	var live []hal.Buffer
	for i := range 60 {
		size := hal.Bytes(1+i*7919%40) * 16 * hal.KiB
		var b hal.Buffer
		var err error
		switch q := d.Queue(i % 2); i % 3 {
		case 0:
			b, err = q.Alloca(ctx, hal.Params{Size: size}, nil, nil)
		case 1:
			b, err = q.Allocate(ctx, hal.Params{Size: size})
		default:
			b, err = d.Allocate(ctx, hal.Params{Size: size, Type: hal.HostVisible})
		}
		switch {
		case errors.Is(err, hal.ErrOutOfMemory):
			failed++
			require.ErrorIs(t, err, fault.ErrOnPurpose)
		case errors.Is(err, hal.ErrLost):
			failed++
		default:
			require.NoError(t, err)
			require.NoError(t, d.Queue(i%2).Fill(b.Span(0, 16), []byte{1}, nil, nil))
			live = append(live, b)
		}
		if len(live) > 6 {
			require.NoError(t, d.Queue(0).Dealloca(live[0], nil, nil))
			live = live[1:]
		}
		require.NoError(t, d.Check())
	}
	for _, b := range live {
		require.NoError(t, b.Release())
	}
	return failed
}

// emptied wants everything back with the driver.
func emptied(t testing.TB, d *hal.Device, stack string) {
	_, err := d.TrimWait(context.Background(), 0)
	require.NoError(t, err)
	for _, l := range d.Stats().Layers {
		require.Zero(t, l.Held, "%s: %s", stack, l.Spec)
		require.Zero(t, l.Live, "%s: %s", stack, l.Spec)
	}
	require.NoError(t, d.Close(context.Background()))
}

// Whichever request of a workload fails, nothing is lost, no count is wrong and all
// stays usable. With caches above, one failure may even go unnoticed.
func TestTheNthFailureLosesNothing(t *testing.T) {
	for _, stack := range []string{"raw+fault:nth=N", "pool+fault:nth=N+block", "vmm+fault:nth=N+block", "vmm+block+fault:nth=N+caching", "raw+caching+fault:nth=N", "vmm+fault:nth=N+block+limit:percent=90%+caching"} {
		for n := 1; n <= 40; n++ {
			spec := strings.ReplaceAll(stack, "N", strconv.Itoa(n))
			d := open(t, spec)
			require.LessOrEqual(t, work(t, d), 1, spec)
			require.Zero(t, work(t, d), "%s: usable afterwards", spec)
			emptied(t, d, spec)
		}
	}
}

func TestEachWayToFail(t *testing.T) {
	require.NoError(t, fault.Table.Check())
	ctx := context.Background()
	alloc := func(d *hal.Device, size hal.Bytes) error {
		b, err := d.Allocate(ctx, hal.Params{Size: size})
		if err == nil {
			defer func() { _ = b.Release() }()
		}
		return err
	}
	outcomes := func(stack string, n int) (failed []int) {
		d := open(t, stack)
		defer func() { require.NoError(t, d.Close(ctx)) }()
		for i := 1; i <= n; i++ {
			if alloc(d, 4096) != nil {
				failed = append(failed, i)
			}
		}
		return failed
	}
	// The ladder asks again, so what fails once is served: by the third time in a row
	// it isn't.
	require.Empty(t, outcomes("raw+fault:nth=3", 10))
	require.Len(t, outcomes("raw+fault:every=1", 5), 5)
	require.Len(t, outcomes("raw+fault:percent=100%", 5), 5)
	a, b := outcomes("raw+fault:percent=70%,seed=4", 100), outcomes("raw+fault:percent=70%,seed=4", 100)
	require.Equal(t, a, b, "a seed decides")
	require.NotEmpty(t, a)
	require.Less(t, len(a), 100)

	for _, stack := range []string{"raw+fault:cap=1MiB", "vmm+fault:cap=1MiB+block"} {
		d := open(t, stack)
		first, err := d.Allocate(ctx, hal.Params{Size: 768 * hal.KiB})
		require.NoError(t, err, stack)
		require.ErrorIs(t, alloc(d, 512*hal.KiB), fault.ErrOnPurpose, stack)
		require.NoError(t, first.Release())
		require.NoError(t, alloc(d, 512*hal.KiB), stack)
		require.NoError(t, d.Close(ctx))
	}

	d := open(t, "raw+fault:delay=2ms")
	start := time.Now()
	require.NoError(t, alloc(d, 1))
	require.GreaterOrEqual(t, time.Since(start), 2*time.Millisecond)
	require.NoError(t, d.Close(ctx))

	d = open(t, "raw+fault:lost=2")
	require.NoError(t, alloc(d, 1))
	err := alloc(d, 1)
	require.ErrorIs(t, err, hal.ErrLost)
	require.ErrorIs(t, err, fault.ErrOnPurpose)
	require.NoError(t, d.Close(ctx))

	for _, bad := range []string{"fault", "fault:seed=3", "fault:percent=200%", "fault:nth=-1"} {
		_, err := hal.Open("host", hal.WithAllocator(bad))
		require.Error(t, err, bad)
	}
	_, err = fault.New(nil, fault.Config{})
	require.Error(t, err)
}
