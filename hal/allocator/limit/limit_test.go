package limit_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/limit"
)

func open(t testing.TB, stack ...string) *hal.Device {
	d, err := hal.Open("host:capacity=64MiB,host_capacity=32MiB", hal.WithAllocator(stack...))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close(context.Background())) })
	return d
}

func alloc(t testing.TB, d *hal.Device, p hal.Params) hal.Buffer {
	t.Helper()
	b, err := d.Allocate(context.Background(), p)
	require.NoError(t, err)
	return b
}

// refused wants an out-of-memory error that names the limit.
func refused(t testing.TB, d *hal.Device, p hal.Params, text string) {
	t.Helper()
	_, err := d.Allocate(context.Background(), p)
	require.ErrorIs(t, err, hal.ErrOutOfMemory)
	require.ErrorContains(t, err, "stopped by a limit: limit of "+text)
	require.ErrorContains(t, err, "advice: capped")
	require.NoError(t, d.Check())
}

func TestACapHolds(t *testing.T) {
	require.NoError(t, limit.Table.Check())
	for _, c := range []struct {
		stack, text string
		p           hal.Params
	}{
		{"block+limit:max=10MiB", "10 MiB for all heaps", hal.Params{}},
		{"block+limit:percent=12.5%", "8 MiB for heap device", hal.Params{}},
		{"block+limit:percent=12.5%", "4 MiB for heap host", hal.Params{Type: hal.HostLocal}},
		{"block+limit:device_local=5MiB", "5 MiB for heap device", hal.Params{}},
		{"block+limit:host_local=3MiB,*=max:7MiB/percent:50%", "3 MiB for heap host", hal.Params{Type: hal.HostLocal}},
		{"block+limit:host_local=3MiB,*=max:7MiB/percent:50%", "7 MiB for heap device", hal.Params{}},
		{"block+limit:tags=kv:2MiB;act:1MiB", `2 MiB for tag "kv"`, hal.Params{Tag: hal.InternTag("kv")}},
		{"vmm+limit:max=6MiB+block", "6 MiB for all heaps", hal.Params{}},    // pages count
		{"limit:percent=12.5%+block", "8 MiB for heap device", hal.Params{}}, // over vmm too
		{"raw+limit:max=6MiB+caching", "6 MiB for all heaps", hal.Params{}},  // the cache counts
	} {
		d := open(t, c.stack)
		c.p.Size = hal.MiB
		var got []hal.Buffer
		for {
			b, err := d.Allocate(context.Background(), c.p)
			if err != nil {
				break
			}
			got = append(got, b)
		}
		refused(t, d, c.p, c.text)
		require.NotEmpty(t, got, c.stack)
		require.NoError(t, got[0].Release())
		got[0] = alloc(t, d, c.p)
		refused(t, d, c.p, c.text)
		for _, b := range got {
			require.NoError(t, b.Release())
		}
		require.NoError(t, d.Check())
	}
}

// A cache below its cap walks the ladder: what it keeps makes room for what is asked.
func TestIdleMemoryUnderTheCapMakesRoom(t *testing.T) {
	d := open(t, "raw+limit:max=8MiB+caching")
	require.NoError(t, alloc(t, d, hal.Params{Size: 6 * hal.MiB}).Release())
	b := alloc(t, d, hal.Params{Size: 3 * hal.MiB})
	require.NoError(t, b.Release())
}

func TestTheGrantedBytesCount(t *testing.T) {
	d := open(t, "vmm+limit:max=3MiB") // pages of 2 MiB
	b := alloc(t, d, hal.Params{Size: 1})
	require.EqualValues(t, 2*hal.MiB, d.Stats().Layers[0].Live)
	refused(t, d, hal.Params{Size: 1}, "3 MiB for all heaps: 2 MiB used")
	require.NoError(t, b.Release())
}

// Requests that fit one by one never pass the cap together.
func TestConcurrentRequestsStayWithin(t *testing.T) {
	for _, stack := range []string{"block+limit:max=4MiB", "vmm+limit:max=8MiB+caching"} {
		d := open(t, stack)
		var wg sync.WaitGroup
		var served atomic.Int64
		for range 8 {
			wg.Go(func() {
				for range 400 {
					b, err := d.Allocate(context.Background(), hal.Params{Size: 3 * hal.MiB / 2})
					if err != nil {
						continue
					}
					served.Add(1)
					_ = b.Release()
				}
			})
		}
		wg.Wait()
		require.NoError(t, d.Check())
		require.NotZero(t, served.Load())
		for _, l := range d.Stats().Layers {
			if l.Layer == "limit" {
				require.LessOrEqual(t, l.PeakLive, 8*hal.MiB)
			}
		}
	}
}

func TestReservationsAreKeptForWhomTheyAreMade(t *testing.T) {
	kv := hal.InternTag("kv")
	d := open(t, "block+limit:max=10MiB,tags=kv:8MiB")
	release, err := d.Reserve(hal.Params{Size: 6 * hal.MiB, Tag: kv})
	require.NoError(t, err)
	refused(t, d, hal.Params{Size: 5 * hal.MiB}, "10 MiB for all heaps: 6 MiB used")
	other := alloc(t, d, hal.Params{Size: 4 * hal.MiB})
	refused(t, d, hal.Params{Size: 1}, "10 MiB for all heaps")
	a := alloc(t, d, hal.Params{Size: 4 * hal.MiB, Tag: kv}) // drawn
	refused(t, d, hal.Params{Size: 3 * hal.MiB, Tag: kv}, "10 MiB for all heaps")
	b := alloc(t, d, hal.Params{Size: 2 * hal.MiB, Tag: kv})
	release()
	release()
	require.NoError(t, b.Release())
	require.NoError(t, a.Release())
	require.NoError(t, other.Release())
	_, err = d.Reserve(hal.Params{Size: 9 * hal.MiB, Tag: kv})
	require.ErrorIs(t, err, hal.ErrOutOfMemory)

	// What wasn't drawn goes back.
	release, err = d.Reserve(hal.Params{Size: 8 * hal.MiB, Tag: kv})
	require.NoError(t, err)
	release()
	x := alloc(t, d, hal.Params{Size: 10 * hal.MiB})
	require.NoError(t, x.Release())

	_, err = open(t, "block").Reserve(hal.Params{Size: 1})
	require.ErrorIs(t, err, hal.ErrUnsupported)
}

// A request that the base refuses leaves every count, and the reservation, as it was.
func TestAFailureBelowCountsNothing(t *testing.T) {
	kv := hal.InternTag("kv")
	d := open(t, "block+limit:max=1TiB")
	release, err := d.Reserve(hal.Params{Size: 60 * hal.MiB, Tag: kv})
	require.NoError(t, err)
	a := alloc(t, d, hal.Params{Size: 20 * hal.MiB})
	_, err = d.Allocate(context.Background(), hal.Params{Size: 50 * hal.MiB, Tag: kv}) // the device is full
	require.ErrorIs(t, err, hal.ErrOutOfMemory)
	require.ErrorContains(t, err, "stopped by the driver")
	require.NoError(t, d.Check())
	require.NoError(t, a.Release())
	b := alloc(t, d, hal.Params{Size: 50 * hal.MiB, Tag: kv})
	require.NoError(t, b.Release())
	release()
	require.NoError(t, d.Check())
}

func TestSpecsThatCantActAreErrors(t *testing.T) {
	for text, want := range map[string]string{
		"limit":                        "no limit is given",
		"limit:percent=100%":           "no limit is given",
		"limit:percent=101%":           "percent",
		"limit:tags=kv":                `"kv" is not LABEL:SIZE`,
		"limit:tags=kv:1GiB;kv:2GiB":   "given twice",
		"limit:tags=kv:lots":           "kv:lots",
		"limit:max=-1":                 "negative",
		"limit:max=1GiB,max=2GiB":      "max",
		"limit:device_locl=1GiB":       "device_local",
		"limit:max=1GiB+raw":           "source",
		"limit:max=99999999999999GiB":  "fit",
		"limit:max=1GiB,percent=maybe": "percent",
	} {
		_, err := hal.Open("host", hal.WithAllocator(text))
		require.Error(t, err, text)
		require.ErrorContains(t, err, want, text)
	}
	_, err := limit.New(nil, &allocator.Env{}, limit.Config{})
	require.Error(t, err)
}

// Over pages, a cap makes block move whole free pages to where they are needed, as a
// device that is full does.
func TestPagesMoveUnderACap(t *testing.T) {
	d, err := hal.Open("host:capacity=1GiB,granularity=64KiB", hal.WithAllocator("vmm+limit:max=4MiB+block"))
	require.NoError(t, err)
	var stay, keep []hal.Buffer
	for i := range 64 { // 4 MiB, every other page of which is freed
		b := alloc(t, d, hal.Params{Size: 64 * hal.KiB})
		if i%2 == 0 {
			stay = append(stay, b)
			continue
		}
		keep = append(keep, b)
	}
	for _, b := range keep {
		require.NoError(t, b.Release())
	}
	big := alloc(t, d, hal.Params{Size: 2 * hal.MiB})
	require.NoError(t, d.Check())
	for _, b := range append(stay, big) {
		require.NoError(t, b.Release())
	}
	require.LessOrEqual(t, d.Stats().Source().PeakHeld, 4*hal.MiB)
	require.NoError(t, d.Close(context.Background()))
}
