package host_test

import (
	"errors"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

func TestTheTableIsSound(t *testing.T) {
	require.NoError(t, host.Driver().Table().Check())
	v, err := host.Driver().Table().Parse("")
	require.NoError(t, err)
	d, err := host.Driver().Open(v)
	require.NoError(t, err)
	found, err := host.Driver().Devices()
	require.NoError(t, err)
	require.Equal(t, []driver.Info{d.Info()}, found, "Devices describes what Open finds")
	require.Equal(t, 64*memory.GiB, d.Info().Heaps[deviceHeap].Capacity)
	require.Equal(t, 64*memory.GiB, d.Info().Heaps[hostHeap].Capacity)
	require.Equal(t, 4, d.Info().Queues)
	require.Empty(t, d.Info().Modelled)
	require.NoError(t, d.Close())
}

func TestOptions(t *testing.T) {
	r := &driver.Registry{}
	require.NoError(t, r.Register(host.Driver()))
	d, err := r.Open("host:capacity=24GiB,host_capacity=1GiB,queues=2,granularity=64KiB,alloc_cost=100us,free_cost=50us")
	require.NoError(t, err)
	i := d.Info()
	require.Equal(t, 24*memory.GiB, i.Heaps[deviceHeap].Capacity)
	require.Equal(t, memory.GiB, i.Heaps[hostHeap].Capacity)
	require.Equal(t, 2, i.Queues)
	require.Equal(t, "alloc_cost=100µs free_cost=50µs", i.Modelled)
	require.NoError(t, d.Close())

	for text, want := range map[string]string{
		"host:capacity=1KiB":                    "out of range",
		"host:queues=0":                         "out of range",
		"host:queues=257":                       "out of range",
		"host:granularity=12KiB":                "power of two",
		"host:granularity=5000":                 "power of two",
		"host:granularity=4MiB,capacity=1MiB":   "no page of 4MiB fits",
		"host:granularity=4KiB,capacity=100TiB": "more than 4294967295 pages",
		"host:capacty=1GiB":                     `did you mean "capacity"`,
	} {
		_, err := r.Open(text)
		var e *spec.Error
		require.ErrorAs(t, err, &e, text)
		require.ErrorContains(t, err, want, text)
	}
	_, err = host.Open(host.Config{Capacity: 1, Queues: -1, Granularity: 3, FreeCost: -1})
	for _, want := range []string{"capacity", "queues", "granularity", "costs"} {
		require.ErrorContains(t, err, want, "all that is wrong is reported")
	}
}

func TestHeaps(t *testing.T) {
	d := open(t, host.Config{})
	h := d.Info().Heaps
	for want, typ := range map[int]memory.Type{deviceHeap: memory.DeviceLocal, hostHeap: memory.HostVisible} {
		got, ok := h.Find(typ, memory.Default)
		require.True(t, ok)
		require.Equal(t, want, got)
	}
	require.False(t, h[deviceHeap].Type.Has(memory.HostVisible))
	require.False(t, h[deviceHeap].Usage.Has(memory.MappingScoped))
	require.True(t, h[hostHeap].Usage.Has(memory.Mapping))
	d.Info().Heaps[0].Name = "changed"
	require.Equal(t, "device", d.Info().Heaps[0].Name, "a caller can't change the device")
	if runtime.GOOS == "linux" {
		require.Equal(t, []string{"vmm", "pool", "raw"}, d.Info().Sources)
	} else {
		require.Equal(t, []string{"pool", "raw"}, d.Info().Sources)
	}
}

func TestADeviceSmallerThanAPageHasNone(t *testing.T) {
	d := open(t, host.Config{Capacity: memory.MiB})
	require.Equal(t, []string{"pool", "raw"}, d.Info().Sources)
	require.Zero(t, d.Granularity(deviceHeap))
	_, err := d.Create(deviceHeap)
	require.ErrorIs(t, err, driver.ErrUnsupported)
}

func TestCapacityIsCountedInUnitsOf256(t *testing.T) {
	d := open(t, host.Config{Capacity: 64 * memory.KiB})
	a, taken, err := d.Alloc(deviceHeap, 1, 1)
	require.NoError(t, err)
	require.Equal(t, host.Alignment, taken)
	require.Equal(t, 64*memory.KiB-256, free(t, d, deviceHeap), "no system page is counted")
	var all []uint64
	for {
		addr, _, err := d.Alloc(deviceHeap, 256, 256)
		if err != nil {
			require.ErrorIs(t, err, driver.ErrOutOfMemory)
			require.ErrorContains(t, err, "heap device has 0B free of 64KiB (raw 64KiB, pool 0B, pages 0B)")
			break
		}
		all = append(all, addr)
	}
	require.Len(t, all, 255, "the last byte of the capacity can be had")
	require.NoError(t, d.Free(deviceHeap, a))
	for _, x := range all {
		require.NoError(t, d.Free(deviceHeap, x))
	}
	require.Equal(t, 64*memory.KiB, free(t, d, deviceHeap))
}

func TestAllSourcesDrawFromOneCapacity(t *testing.T) {
	d := open(t, host.Config{Capacity: 4 * memory.MiB, Granularity: memory.MiB})
	if d.Granularity(deviceHeap) == 0 {
		t.Skip("no pages here")
	}
	raw, _, err := d.Alloc(deviceHeap, memory.MiB, 1)
	require.NoError(t, err)
	pooled, _, _, err := d.PoolAlloc(deviceHeap, memory.MiB, 1)
	require.NoError(t, err)
	page, err := d.Create(deviceHeap)
	require.NoError(t, err)
	require.Equal(t, memory.MiB, free(t, d, deviceHeap))
	require.Equal(t, 4*memory.MiB, free(t, d, hostHeap), "the heaps don't share")
	rest, _, err := d.Alloc(deviceHeap, memory.MiB, 1)
	require.NoError(t, err)
	_, err = d.Create(deviceHeap)
	require.ErrorIs(t, err, driver.ErrOutOfMemory)
	_, _, _, err = d.PoolAlloc(deviceHeap, 1, 1)
	require.ErrorIs(t, err, driver.ErrOutOfMemory)
	_, _, err = d.Alloc(deviceHeap, 1, 1)
	require.ErrorIs(t, err, driver.ErrOutOfMemory)
	require.NoError(t, d.Release(deviceHeap, page))
	require.NoError(t, d.Free(deviceHeap, raw))
	require.NoError(t, d.Free(deviceHeap, rest))
	require.NoError(t, d.PoolFree(deviceHeap, pooled, queue.ReadyNow()))
	require.Equal(t, 4*memory.MiB, free(t, d, deviceHeap))
}

func TestAHugeDeviceCostsNothing(t *testing.T) {
	d := open(t, host.Config{Capacity: 4 * memory.TiB})
	q := newQueue(t, d)
	addr := alloc(t, d, deviceHeap, 3*memory.TiB)
	last := addr + uint64(3*memory.TiB) - 64
	require.NoError(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: last, Size: 64, Pattern: 7, PatternSize: 1}))
	require.Equal(t, byte(7), download(t, q, last, 64)[63])
	_, _, err := d.Alloc(deviceHeap, 2*memory.TiB, 1)
	require.ErrorIs(t, err, driver.ErrOutOfMemory)
	_, _, err = d.Alloc(deviceHeap, math.MaxInt64, 1)
	require.ErrorIs(t, err, driver.ErrOutOfMemory, "nothing wraps")
}

func TestAlignmentIsHonoured(t *testing.T) {
	d := open(t, host.Config{Capacity: memory.GiB})
	for range 2 { // fresh, and from holes that are left
		var addrs []uint64
		for _, align := range []memory.Bytes{1, 256, 4096, 64 << 10, 1 << 20, 16 << 20, 1 << 30} {
			addr, _, err := d.Alloc(deviceHeap, 100, align)
			require.NoError(t, err)
			require.Zero(t, addr%uint64(max(align, host.Alignment)), "alignment %v", align)
			addrs = append(addrs, addr)
		}
		for _, a := range addrs {
			require.NoError(t, d.Free(deviceHeap, a))
		}
	}
	_, _, err := d.Alloc(deviceHeap, 100, 3)
	require.ErrorContains(t, err, "power of two")
	_, _, err = d.Alloc(deviceHeap, 0, 1)
	require.ErrorContains(t, err, "positive")
	_, _, err = d.Alloc(deviceHeap, 256, 1<<62)
	require.ErrorIs(t, err, driver.ErrOutOfMemory, "no address has this alignment and a next one")
}

func TestAddressesAreReused(t *testing.T) {
	d := open(t, host.Config{Capacity: memory.MiB})
	for range 1000 {
		a, _, err := d.Alloc(deviceHeap, 600*memory.KiB, 1)
		require.NoError(t, err)
		b, _, err := d.Alloc(deviceHeap, 300*memory.KiB, 1)
		require.NoError(t, err)
		require.NoError(t, d.Free(deviceHeap, a))
		require.NoError(t, d.Free(deviceHeap, b))
	}
	a, _, err := d.Alloc(deviceHeap, memory.MiB, 1)
	require.NoError(t, err, "neighbours are one hole again")
	require.NoError(t, d.Free(deviceHeap, a))
}

func TestBadFreesAreErrors(t *testing.T) {
	d := open(t, host.Config{})
	a, _, err := d.Alloc(deviceHeap, 4096, 1)
	require.NoError(t, err)
	require.ErrorIs(t, d.Free(deviceHeap, a+256), host.ErrBadAddress)
	require.ErrorIs(t, d.Free(hostHeap, a), host.ErrBadAddress)
	require.ErrorIs(t, d.PoolFree(deviceHeap, a, queue.ReadyNow()), host.ErrBadAddress)
	require.ErrorIs(t, d.Free(3, a), driver.ErrUnsupported)
	require.NoError(t, d.Free(deviceHeap, a))
	require.ErrorIs(t, d.Free(deviceHeap, a), host.ErrBadAddress, "a double free")
	p, _, _, err := d.PoolAlloc(deviceHeap, 4096, 1)
	require.NoError(t, err)
	require.ErrorContains(t, d.Free(deviceHeap, p), "that is a pool block")
	require.NoError(t, d.SetPoolThreshold(deviceHeap, memory.GiB))
	require.NoError(t, d.PoolFree(deviceHeap, p, queue.ReadyNow()))
	require.ErrorContains(t, d.PoolFree(deviceHeap, p, queue.ReadyNow()), "freed before")
	require.Equal(t, 64*memory.GiB-4096, free(t, d, deviceHeap), "the pool keeps one block")
	require.Error(t, d.SetPoolThreshold(deviceHeap, -1))
}

func TestFreshMemoryIsZero(t *testing.T) {
	d := open(t, host.Config{Capacity: memory.MiB})
	q := newQueue(t, d)
	for range 3 {
		a, _, err := d.Alloc(deviceHeap, memory.MiB, 1)
		require.NoError(t, err)
		require.Equal(t, make([]byte, 4096), download(t, q, a, 4096))
		require.NoError(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: a, Size: int64(memory.MiB), Pattern: 0xff, PatternSize: 1}))
		require.NoError(t, d.Free(deviceHeap, a))
	}
}

func TestViewWorksOnTheHostHeapOnly(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	h := alloc(t, d, hostHeap, 4096)
	view, err := d.View(h, 4096)
	require.NoError(t, err)
	copy(view, "hello")
	require.Equal(t, []byte("hello"), download(t, q, h, 5))
	_, err = d.View(alloc(t, d, deviceHeap, 4096), 4096)
	require.ErrorIs(t, err, driver.ErrUnsupported)
	_, err = d.View(h, 1<<40)
	require.Error(t, err)
	_, err = d.View(h, -1)
	require.Error(t, err)
	_, err = d.View(1, 1)
	require.Error(t, err)
}

func TestCloseReportsWhatIsAllocated(t *testing.T) {
	d, err := host.Open(host.Config{Capacity: 16 * memory.MiB})
	require.NoError(t, err)
	_, _, err = d.Alloc(deviceHeap, 1000, 1)
	require.NoError(t, err)
	_, _, err = d.Alloc(hostHeap, 1000, 1)
	require.NoError(t, err)
	_, _, _, err = d.PoolAlloc(deviceHeap, memory.MiB, 1)
	require.NoError(t, err)
	idle, _, _, err := d.PoolAlloc(hostHeap, memory.MiB, 1)
	require.NoError(t, err)
	require.NoError(t, d.SetPoolThreshold(hostHeap, memory.GiB))
	require.NoError(t, d.PoolFree(hostHeap, idle, queue.ReadyNow()))
	if d.Granularity(deviceHeap) > 0 {
		p, err := d.Create(deviceHeap)
		require.NoError(t, err)
		addr, err := d.Reserve(deviceHeap, 4*memory.MiB)
		require.NoError(t, err)
		require.NoError(t, d.Map(deviceHeap, addr, []driver.Page{p}))
	}
	err = d.Close()
	want := "host: closed with memory still allocated: heap device: 1KiB in 1 raw allocations, 1MiB in 1 pool allocations"
	if runtime.GOOS == "linux" {
		want += ", 2MiB in 1 pages, 4MiB in 1 address reservations"
	}
	require.EqualError(t, err, want+"; heap host: 1KiB in 1 raw allocations", "what the pool keeps is no leak")
	require.NoError(t, d.Close(), "idempotent")
	_, _, err = d.Alloc(deviceHeap, 1, 1)
	require.ErrorIs(t, err, host.ErrClosed)
	_, err = d.NewQueue(nil)
	require.ErrorIs(t, err, host.ErrClosed)
	_, _, err = d.MemInfo(0)
	require.ErrorIs(t, err, host.ErrClosed)
}

func TestModelledCost(t *testing.T) {
	d := open(t, host.Config{AllocCost: 2 * time.Millisecond, FreeCost: 30 * time.Microsecond})
	require.Equal(t, "alloc_cost=2ms free_cost=30µs", d.Info().Modelled)
	start := time.Now()
	a, _, err := d.Alloc(deviceHeap, 1, 1)
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(start), 2*time.Millisecond)
	start = time.Now()
	require.NoError(t, d.Free(deviceHeap, a))
	require.GreaterOrEqual(t, time.Since(start), 30*time.Microsecond)
	require.NoError(t, d.SetPoolThreshold(deviceHeap, memory.GiB))
	p, _, _, err := d.PoolAlloc(deviceHeap, 1, 1)
	require.NoError(t, err)
	require.NoError(t, d.PoolFree(deviceHeap, p, queue.ReadyNow()))
}

func TestLoss(t *testing.T) {
	cause := errors.New("fell off the bus")
	d, err := host.Open(host.Config{})
	require.NoError(t, err)
	q, err := d.NewQueue(nil)
	require.NoError(t, err)
	a, _, err := d.Alloc(deviceHeap, 4096, 1)
	require.NoError(t, err)
	hold, running := make(chan struct{}), make(chan struct{})
	s := queue.NewSemaphore(0)
	at := submit(t, q, queue.Op{Kind: queue.Call, Func: func() error { close(running); <-hold; return nil }}, nil, s.At(1))
	<-running
	d.Lose(cause)
	d.Lose(errors.New("again"))
	require.ErrorIs(t, s.Wait(soon(t), 1), queue.ErrLost)
	require.False(t, at.Reached())
	for _, err := range []error{
		d.Free(deviceHeap, a),
		d.PoolFree(deviceHeap, a, queue.ReadyNow()),
		func() error { _, _, err := d.Alloc(deviceHeap, 1, 1); return err }(),
		func() error { _, _, _, err := d.PoolAlloc(deviceHeap, 1, 1); return err }(),
		func() error { _, err := d.Create(deviceHeap); return err }(),
		func() error { _, _, err := d.MemInfo(0); return err }(),
		func() error { _, err := d.NewQueue(nil); return err }(),
	} {
		require.ErrorIs(t, err, queue.ErrLost)
		require.ErrorIs(t, err, cause)
	}
	require.ErrorContains(t, d.Close(), "closed while 1 user functions run")
	close(hold)
	q.Abandon()
	require.True(t, at.Reached())
}

func TestALostDeviceClosesWithoutLeaks(t *testing.T) {
	d, err := host.Open(host.Config{})
	require.NoError(t, err)
	q, err := d.NewQueue(nil)
	require.NoError(t, err)
	_, _, err = d.Alloc(deviceHeap, 4096, 1)
	require.NoError(t, err)
	d.Lose(errors.New("gone"))
	require.NoError(t, d.Close())
	require.Nil(t, queue.Lookup(q.ID()), "its queues are abandoned")
}
