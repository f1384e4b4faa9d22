package caching

import (
	"fmt"
	"math"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

const (
	kib = memory.KiB
	mib = memory.MiB
	gib = memory.GiB
)

func TestTable(t *testing.T) { require.NoError(t, Table.Check()) }

func TestDefaultsInTheTableAreThoseOfTheConfig(t *testing.T) {
	v, err := Table.Parse("")
	require.NoError(t, err)
	require.Equal(t, Config{Waste: DefaultWaste, Depth: DefaultDepth, Shards: 1}, FromValues(v))
}

// TestIREESpecStringsKeepTheirMeaning has, for each string, blocks that are
// allocated together and freed in order, and what must be idle afterwards.
func TestIREESpecStringsKeepTheirMeaning(t *testing.T) {
	type block struct {
		heap int
		size memory.Bytes
	}
	n := func(count int, b block) []block {
		list := make([]block, count)
		for i := range list {
			list[i] = b
		}
		return list
	}
	for _, c := range []struct {
		options string
		frees   []block
		idle    memory.Bytes
		blocks  uint64
	}{
		{"", n(100, block{device, gib}), 100 * gib, 100},
		{"", []block{{device, 1}, {host, 2}, {staging, 4}}, 7, 3},

		{"device_local=1gib;1gib;8", n(1, block{device, gib}), gib, 1},
		{"device_local=1gib;1gib;8", n(1, block{device, gib + 1}), 0, 0},
		{"device_local=1gib;1gib;8", n(2, block{device, gib}), gib, 1},
		{"device_local=1gib;1gib;8", n(5, block{device, 256 * mib}), gib, 4},
		{"device_local=1gib;1gib;8", n(9, block{device, mib}), 8 * mib, 8},
		{"device_local=1gib;1gib;8", n(9, block{host, mib}), 0, 0},
		{"device_local=1gib;1gib;8", n(9, block{staging, mib}), 8 * mib, 8}, // it has the bits of the key

		{"device_local=*;256mib;64,host_local=*;*;32", n(65, block{device, mib}), 64 * mib, 64},
		{"device_local=*;256mib;64,host_local=*;*;32", n(3, block{device, 128 * mib}), 256 * mib, 2},
		{"device_local=*;256mib;64,host_local=*;*;32", n(1, block{device, 257 * mib}), 0, 0},
		{"device_local=*;256mib;64,host_local=*;*;32", n(33, block{host, gib}), 32 * gib, 32},

		{"*;transfer=*;*;4", n(5, block{device, mib}), 4 * mib, 4},
		{"*;transfer=*;*;4", []block{{device, 1}, {host, 1}, {staging, 1}, {device, 1}, {host, 1}}, 4, 4},
		{"*;mapping_scoped=*;*;4", []block{{device, 1}, {host, 1}, {staging, 1}}, 1, 1},

		{"device_local|host_visible=1mib", []block{{device, 1}, {host, 1}, {staging, mib}, {staging, mib + 1}}, mib, 1},
		{"device_local|host_visible=1mib", n(100, block{staging, mib}), 100 * mib, 100},

		// In order: the first that matches counts, also where it keeps less.
		{"*=*;*;1,device_local=*;*;8", n(8, block{device, 1}), 1, 1},
		{"device_local|host_visible=*;*;1,device_local=*;*;3", append(n(8, block{device, 1}), n(8, block{staging, 1})...), 4, 4},
		{"device_local=1mib,*=*", []block{{device, 2 * mib}, {host, 2 * mib}}, 2 * mib, 1},

		// 0 keeps nothing.
		{"device_local=*;*;0,*=*;*;8", []block{{device, 1}, {host, 1}}, 1, 1},
		{"device_local=0", n(1, block{device, 1}), 0, 0},
		{"device_local=*;0", n(1, block{device, 1}), 0, 0},

		{"device_local=max_alloc:1GiB/capacity:4GiB/count:64", n(5, block{device, gib}), 4 * gib, 4},
	} {
		t.Run(c.options, func(t *testing.T) {
			base := newBase()
			a := parsed(t, base, c.options)
			var live []allocator.Block
			for _, b := range c.frees {
				live = append(live, get(t, a, request(b.heap, b.size, 0)))
			}
			for _, b := range live {
				put(t, a, b)
				require.NoError(t, a.Check())
			}
			st := a.Stats()
			require.Equal(t, c.idle, st.Idle)
			require.Equal(t, c.blocks, st.Blocks)
			require.Equal(t, c.idle, st.Held)
			require.Equal(t, c.idle, base.live)
			finish(t, a, base)
		})
	}
}

func TestUnboundedKeepsTenThousandSizes(t *testing.T) {
	base := newBase()
	a := parsed(t, base, "waste=1,depth=*")
	sizes := memory.Bytes(10_000)
	if invariants {
		sizes = 1_000
	}
	var live []allocator.Block
	for i := range sizes {
		live = append(live, get(t, a, request(device, 1000+i*i, 0)))
	}
	for _, b := range live {
		require.Equal(t, allocator.OK, a.Free(b, queue.ReadyNow()))
	}
	require.EqualValues(t, sizes, a.Stats().Blocks)
	require.Empty(t, base.frees)
	allocs := base.allocs
	for i := range sizes {
		b := get(t, a, request(device, 1000+i*i, 0))
		require.Equal(t, live[i].Addr, b.Addr)
		live[i] = b
	}
	require.Equal(t, allocs, base.allocs)
	for _, b := range live {
		a.Free(b, queue.ReadyNow())
	}
	finish(t, a, base)
}

func TestEvictionTakesWhatHasBeenIdleLongest(t *testing.T) {
	base := newBase()
	a := parsed(t, base, "device_local=*;100;*")
	var b [5]allocator.Block
	for i := range b {
		b[i] = get(t, a, request(device, 30, 0))
	}
	big := get(t, a, request(device, 70, 0))
	for _, i := range []int{2, 0, 1} {
		put(t, a, b[i])
	}
	put(t, a, get(t, a, request(device, 30, 0))) // 1, the newest, is used and freed again
	require.Empty(t, base.frees)
	put(t, a, b[4])
	require.Equal(t, []freed{{b[2].Addr, 30, queue.ReadyNow()}}, base.frees)
	put(t, a, big) // needs all but 30: the two oldest go
	require.Equal(t, b[0].Addr, base.frees[1].addr)
	require.Equal(t, b[1].Addr, base.frees[2].addr)
	require.Len(t, base.frees, 3)
	require.EqualValues(t, 3, a.Stats().Evicted)
	put(t, a, b[3])
	require.Equal(t, b[4].Addr, base.frees[3].addr)
	finish(t, a, base)
}

func TestManyEvictionsForOneBlock(t *testing.T) {
	for _, shards := range []int{1, 4} {
		base := newBase()
		a := newCache(t, base, Config{Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Capacity: 100}}, Shards: shards})
		var small []allocator.Block
		for i := range 100 {
			small = append(small, get(t, a, request(device, 1, queue.ID(i))))
		}
		for _, b := range small {
			put(t, a, b)
		}
		require.EqualValues(t, 100, a.Stats().Blocks)
		put(t, a, get(t, a, request(device, 100, 0)))
		st := a.Stats()
		require.EqualValues(t, 1, st.Blocks)
		require.EqualValues(t, 100, st.Idle)
		require.EqualValues(t, 100, st.Evicted)
		finish(t, a, base)
	}
}

func TestMemoryThatLeavesGeneralUsePassesThrough(t *testing.T) {
	for _, usage := range []memory.Usage{memory.SharingExport, memory.SharingImmutable, memory.SharingReplicate} {
		base := newBase()
		a := newCache(t, base, Config{})
		put(t, a, get(t, a, request(device, 64, 0)))
		r := request(device, 64, 0)
		r.Kind = allocator.MakeKind(device, 1, memory.Transfer|usage, 0, 0)
		b := get(t, a, r)
		require.Equal(t, 2, base.allocs, "%v is not served from what is kept", usage)
		put(t, a, b)
		require.Len(t, base.frees, 1, "%v is not kept", usage)
		require.Equal(t, allocator.Stale, a.Free(b, queue.ReadyNow()))
		st := a.Stats()
		require.EqualValues(t, 2, st.Misses)
		require.EqualValues(t, 64, st.PeakLive)
		require.EqualValues(t, 128, st.PeakHeld)
		require.EqualValues(t, 64, st.Held)
		finish(t, a, base)
	}
}

func TestAKeyThatMatchesNoHeapIsAnErrorThatNamesTheHeaps(t *testing.T) {
	key, err := memory.ParseHeapKey("host_cached")
	require.NoError(t, err)
	_, err = New(newBase(), testEnv(), Config{Pools: []Pool{{Heap: key}}})
	require.ErrorContains(t, err, "host_cached")
	for _, h := range heaps {
		require.ErrorContains(t, err, h.Name)
	}
	v, err := Table.Parse("depth=4,host_cached=1mib")
	require.NoError(t, err)
	_, err = Layer.New(newBase(), testEnv(), v)
	var e *spec.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, 17, e.Column)
	require.ErrorContains(t, err, "staging")
}

func TestConfigsThatCannotBeAreErrors(t *testing.T) {
	any := memory.HeapKey{AnyType: true}
	for _, c := range []Config{
		{Waste: 0.5}, {Waste: math.NaN()}, {Waste: -1}, {Idle: -1}, {Depth: -1},
		{Shards: 3}, {Shards: -1}, {Shards: 128},
		{Pools: []Pool{{Heap: any, MaxAlloc: -1}}},
		{Pools: []Pool{{Heap: any, Capacity: -1}}},
		{Pools: []Pool{{Heap: any, Count: -1}}},
	} {
		_, err := New(newBase(), testEnv(), c)
		require.Error(t, err, "%+v", c)
	}
	for _, s := range []string{"waste=0.9", "shards=3", "shards=0", "shards=128", "depth=0", "idle=0s", "wast=1", "device_local=1;2;3;4"} {
		_, err := Table.Parse(s)
		require.Error(t, err, s)
	}
	_, err := New(newBase(), testEnv(), Config{Waste: math.Inf(1), Depth: math.MaxInt, Shards: MaxShards})
	require.NoError(t, err)
}

// Fault 3.
func TestABlockMuchLargerThanAskedIsNotUsed(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	cycle(t, a, device, 4*gib)
	small := get(t, a, request(device, 10*kib, 0))
	require.Equal(t, 10*kib, small.Size)
	cycle(t, a, device, 4*gib)
	require.Equal(t, 4*gib+10*kib, base.live)
	put(t, a, small)
	finish(t, a, base)
}

func TestWasteIsBoundedByTheRatio(t *testing.T) {
	for _, c := range []struct {
		waste       float64
		kept, asked memory.Bytes
		hit         bool
	}{
		{1, 1000, 1000, true}, {1, 1001, 1000, false}, {1, 1 << 40, 1<<40 - 1, false},
		{1.125, 1125, 1000, true}, {1.125, 1126, 1000, false},
		{1.5, 1500, 1000, true}, {1.5, 1501, 1000, false}, {1.5, 999, 1000, false},
		{2, 2000, 1000, true}, {2, 2001, 1000, false}, {2, 3 << 40, 3 << 39, true},
		{3, 3, 1, true}, {3, 4, 1, false},
		{1 << 20, 1 << 40, 1 << 20, true}, {1 << 20, 1<<40 + 1, 1 << 20, false},
		{1 << 20, memory.MaxBytes, 1 << 60, true},
		{math.Inf(1), memory.MaxBytes, 1, true},
	} {
		base := newBase()
		base.next = 1
		a := newCache(t, base, Config{Waste: c.waste})
		cycle(t, a, device, c.kept)
		b := get(t, a, request(device, c.asked, 0))
		require.Equal(t, c.hit, base.allocs == 1, "%+v", c)
		require.GreaterOrEqual(t, b.Size, c.asked)
		put(t, a, b)
		if c.kept < memory.MaxBytes {
			finish(t, a, base)
		}
	}
}

func TestWhatTheBaseAddsIsNoWaste(t *testing.T) {
	for _, waste := range []float64{1, 1.125, 2} {
		base := newBase()
		base.round = 2 * mib
		a := newCache(t, base, Config{Waste: waste})
		for _, size := range []memory.Bytes{1, 100, 2*mib - 1, 2 * mib, 2*mib + 1, 3 * mib, 33 * mib} {
			cycle(t, a, device, size)
			allocs := base.allocs
			cycle(t, a, device, size)
			require.Equal(t, allocs, base.allocs, "%v again, waste %v", size, waste)
		}
		finish(t, a, base)
	}
}

func TestSizesAreComparedAtTheAlignmentOfTheHeap(t *testing.T) {
	env := testEnv()
	env.Heaps = memory.Heaps{{Name: "d", Type: memory.DeviceLocal, MinAlignment: 256}}
	for _, round := range []memory.Bytes{0, 256} {
		base := newBase()
		base.round = round
		a, err := New(base, env, Config{Waste: 1})
		require.NoError(t, err)
		cycle(t, a, 0, 200)
		cycle(t, a, 0, 190)
		require.Equal(t, 1, base.allocs, "both take 256 bytes")
		cycle(t, a, 0, 257)
		require.Equal(t, 2, base.allocs)
		finish(t, a, base)
	}
}

// Fault 23.
func TestSlowlyRisingSizesDoNotHoard(t *testing.T) {
	base := newBase()
	a := parsed(t, base, "device_local=*;64mib;*")
	for i := range memory.Bytes(1000) {
		cycle(t, a, device, mib+i*4*kib)
		require.LessOrEqual(t, a.Stats().Idle, 64*mib)
		require.LessOrEqual(t, base.live, 64*mib)
	}
	require.NoError(t, a.Check())
	// Falling again, what is there serves.
	hits := a.Stats().Hits
	for i := range memory.Bytes(100) {
		cycle(t, a, device, 4*mib-i*4*kib)
	}
	require.GreaterOrEqual(t, a.Stats().Hits-hits, uint64(90))
	finish(t, a, base)
}

func TestTheLastFreedIsTheFirstUsed(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	x, y := get(t, a, request(device, 64, 0)), get(t, a, request(device, 64, 0))
	put(t, a, x)
	put(t, a, y)
	y2 := get(t, a, request(device, 64, 0))
	x2 := get(t, a, request(device, 64, 0))
	require.Equal(t, y.Addr, y2.Addr)
	require.Equal(t, x.Addr, x2.Addr)
	put(t, a, x2)
	put(t, a, y2)
	finish(t, a, base)
}

func TestTheCloserSizeComesFirst(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{Waste: 2})
	close, far := get(t, a, request(device, 1100, 0)), get(t, a, request(device, 1900, 0))
	put(t, a, close)
	put(t, a, far)
	b := get(t, a, request(device, 1000, 0))
	require.Equal(t, close.Addr, b.Addr)
	put(t, a, b)
	finish(t, a, base)
}

func TestAlignmentHoldsOnReuse(t *testing.T) {
	base := newBase()
	base.next = 1<<20 + 64
	a := newCache(t, base, Config{})
	r := request(device, 4096, 0)
	x := get(t, a, r)
	put(t, a, x)
	r.Kind = allocator.MakeKind(device, 4096, memory.DispatchStorage, 0, 0)
	y := get(t, a, r)
	require.NotEqual(t, x.Addr, y.Addr)
	require.Zero(t, y.Addr%4096)
	put(t, a, y)
	z := get(t, a, request(device, 4096, 0))
	require.Equal(t, y.Addr, z.Addr, "the more aligned serves the less")
	put(t, a, z)
	finish(t, a, base)
}

func TestHeapsAndBlocksOfTheirOwnAreApart(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	x := get(t, a, request(device, 64, 0))
	put(t, a, x)
	require.NotEqual(t, x.Addr, cycle(t, a, host, 64))
	r := request(device, 64, 0)
	r.Kind |= allocator.NoSubAlloc
	y := get(t, a, r)
	require.NotEqual(t, x.Addr, y.Addr, "what is kept may be part of a larger block")
	put(t, a, y)
	z := get(t, a, r)
	require.Equal(t, y.Addr, z.Addr)
	put(t, a, z)
	finish(t, a, base)
}

func TestDepthBoundsTheSearch(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{Depth: 3, Waste: 1.125})
	sizes := []memory.Bytes{1007, 1001, 1002, 1003} // one class; a request of 1005 fits the oldest only
	var live []allocator.Block
	for _, n := range sizes {
		live = append(live, get(t, a, request(device, n, 0)))
	}
	for _, b := range live {
		put(t, a, b)
	}
	b := get(t, a, request(device, 1005, 0))
	require.Equal(t, 5, base.allocs)
	put(t, a, b)
	b = get(t, a, request(device, 1005, 0))
	require.Equal(t, 5, base.allocs)
	put(t, a, b)
	finish(t, a, base)
}

// Fault 126.
func TestForeignAndDoubleFreesAreDistinctErrors(t *testing.T) {
	for _, shards := range []int{1, 4} {
		base := newBase()
		a := newCache(t, base, Config{Shards: shards})
		b := get(t, a, request(device, 64, 0))
		inside := b
		inside.ID += 1 << 40
		inside.Addr += 32
		require.Equal(t, allocator.Foreign, a.Free(inside, queue.ReadyNow()))
		require.Equal(t, allocator.Foreign, a.Free(allocator.Block{}, queue.ReadyNow()))
		other := newCache(t, newBase(), Config{})
		strange := get(t, other, request(device, 64, 0))
		require.Equal(t, allocator.Foreign, a.Free(strange, queue.ReadyNow()))
		require.Equal(t, allocator.OK, a.Free(b, queue.ReadyNow()))
		require.Equal(t, allocator.Stale, a.Free(b, queue.ReadyNow()))
		st := a.Stats()
		require.EqualValues(t, 1, st.Frees)
		require.Zero(t, st.Live)
		finish(t, a, base)
	}
}

func TestAHandleIsStaleOnceItsMemoryIsSomebodyElses(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	x := get(t, a, request(device, 64, 0))
	put(t, a, x)
	y := get(t, a, request(device, 64, 0))
	require.Equal(t, x.Addr, y.Addr)
	l := x.Keeper.Ledger
	require.Equal(t, allocator.Stale, l.Use(x.ID, queue.ReadyNow()))
	_, o := l.Info(x.ID)
	require.Equal(t, allocator.Stale, o)
	require.Equal(t, allocator.Stale, a.Free(x, queue.ReadyNow()))
	i, o := l.Info(y.ID)
	require.Equal(t, allocator.OK, o)
	require.EqualValues(t, 64, i.Asked)
	put(t, a, y)
	finish(t, a, base)
}

func TestAPinnedBlockIsNotFreed(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	b := get(t, a, request(device, 64, 0))
	l := b.Keeper.Ledger
	require.Equal(t, allocator.OK, l.Pin(b.ID, 1))
	require.Equal(t, allocator.Busy, a.Free(b, queue.ReadyNow()))
	require.EqualValues(t, 64, a.Stats().Live)
	require.Zero(t, a.Stats().Frees)
	l.Pin(b.ID, -1)
	put(t, a, b)
	finish(t, a, base)
}

// Fault 97.
func TestOfManyConcurrentFreesOfOneBlockOneSucceeds(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{Shards: 4})
	for round := range 50 {
		b := get(t, a, request(device, 64, queue.ID(round)))
		var wg sync.WaitGroup
		var outcomes [4]allocator.Outcome
		for g := range outcomes {
			wg.Go(func() { outcomes[g] = a.Free(b, queue.ReadyNow()) })
		}
		wg.Wait()
		freed := 0
		for _, o := range outcomes {
			if o == allocator.OK {
				freed++
			} else {
				require.Equal(t, allocator.Stale, o)
			}
		}
		require.Equal(t, 1, freed)
	}
	finish(t, a, base)
}

// Fault 112.
func TestABlockGoesBackToWhereItCameFrom(t *testing.T) {
	base := newBase() // has two keepers, and checks
	a := newCache(t, base, Config{})
	var live []allocator.Block
	for i := range 20 {
		r := request(device, 64, 0)
		if i%3 == 0 {
			r.Kind = allocator.MakeKind(device, 1, memory.SharingExport, 0, 0)
		}
		live = append(live, get(t, a, r))
	}
	for _, b := range live[:10] {
		put(t, a, b)
	}
	require.NoError(t, a.Close())
	require.Equal(t, 10, base.blocks)
	for _, b := range live[10:] {
		put(t, a, b)
	}
	require.Zero(t, base.blocks, "a free after Close goes straight back")
	b := get(t, a, request(device, 64, 0))
	put(t, a, b)
	require.Zero(t, base.blocks)
	require.NoError(t, a.Close())
	finish(t, a, base)
}

// Fault 119.
func TestAnEvictionThatFailsLeavesListsAndBytesExact(t *testing.T) {
	for n := 1; n <= 12; n++ {
		base := newBase()
		base.failFree = map[int]allocator.Outcome{n: allocator.Busy}
		a := newCache(t, base, Config{Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Capacity: 400, Count: 4}}})
		lost := memory.Bytes(0)
		for i := range 8 {
			x, y := get(t, a, request(device, memory.Bytes(50+20*i), 0)), get(t, a, request(device, memory.Bytes(400-20*i), 0))
			for _, b := range []allocator.Block{x, y} {
				require.Equal(t, allocator.OK, a.Free(b, queue.ReadyNow()), "what was evicted is not the caller's affair")
				require.NoError(t, a.Check())
			}
		}
		a.Trim(0)
		require.NoError(t, a.Close())
		st := a.Stats()
		require.Zero(t, st.Live+st.Held+st.Idle)
		if len(base.frees) >= n {
			lost = base.live
			require.Equal(t, 1, base.blocks, "the one that the base refused is the base's to report")
		}
		require.Equal(t, lost, base.live)
	}
}

func TestABlockThatCannotBeKeptOrFreedIsReported(t *testing.T) {
	base := newBase()
	base.failFree = map[int]allocator.Outcome{1: allocator.Busy}
	a := parsed(t, base, "device_local=0")
	b := get(t, a, request(device, 64, 0))
	require.Equal(t, allocator.Busy, a.Free(b, queue.ReadyNow()))
	require.NoError(t, a.Check())
}

func TestAFailureOfTheBaseLeavesEverythingAsItWas(t *testing.T) {
	for _, o := range []allocator.Outcome{allocator.NeedsWait, allocator.OverLimit, allocator.Exhausted, allocator.TooLarge, allocator.Unsupported, allocator.Lost} {
		base := newBase()
		a := newCache(t, base, Config{})
		cycle(t, a, device, 64)
		before := a.Stats()
		base.failAlloc = map[int]allocator.Outcome{2: o}
		_, _, got := a.Allocate(request(device, 1000, 0))
		require.Equal(t, o, got)
		require.NoError(t, a.Check())
		after := a.Stats()
		require.EqualValues(t, 1, after.Failed)
		after.Failed = 0
		require.Equal(t, before, after)
		cycle(t, a, device, 1000)
		finish(t, a, base)
	}
}

// Every call to the base fails once.
func TestTheNthCallToTheBaseFails(t *testing.T) {
	for n := 1; n <= 30; n++ {
		base := newBase()
		base.failAlloc = map[int]allocator.Outcome{n: allocator.Exhausted}
		a := newCache(t, base, Config{Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Capacity: 2000, Count: 6}}, Shards: 2})
		var live []allocator.Block
		failed := uint64(0)
		for i := range 60 {
			b, _, o := a.Allocate(request(device, memory.Bytes(100+i*37%400), queue.ID(i%3)))
			if o != allocator.OK {
				require.Equal(t, allocator.Exhausted, o)
				failed++
			} else {
				live = append(live, b)
			}
			if len(live) > 5 {
				put(t, a, live[0])
				live = live[1:]
			}
			require.NoError(t, a.Check())
		}
		for _, b := range live {
			put(t, a, b)
		}
		require.Equal(t, failed, a.Stats().Failed)
		finish(t, a, base)
	}
}

// Faults 81 and 82.
func TestStatisticsMoveByTheSizeAndNeverBelowZero(t *testing.T) {
	base := newBase()
	base.round = 64
	a := newCache(t, base, Config{})
	x := get(t, a, request(device, 1000, 0))
	y := get(t, a, request(device, 100, 0))
	require.Equal(t, memory.Bytes(1024+128), a.Stats().Live)
	put(t, a, x)
	require.Equal(t, memory.Bytes(128), a.Stats().Live)
	a.ResetPeaks()
	put(t, a, y)
	st := a.Stats()
	require.Zero(t, st.Live)
	require.Equal(t, memory.Bytes(1024+128), st.Idle)
	require.Equal(t, st.Idle, st.Held)
	require.Equal(t, memory.Bytes(1024), st.LargestFree)
	require.Equal(t, memory.Bytes(1024), a.Trim(128))
	require.Equal(t, memory.Bytes(128), a.Stats().Held)
	finish(t, a, base)
}

// Fault 83.
func TestResettingPeaksTouchesOnlyPeaks(t *testing.T) {
	for _, shards := range []int{1, 2} {
		base := newBase()
		a := newCache(t, base, Config{Shards: shards})
		x, y := get(t, a, request(device, 1000, 0)), get(t, a, request(device, 10, 0))
		put(t, a, x)
		a.Trim(0)
		before := a.Stats()
		require.EqualValues(t, 1010, before.PeakLive)
		require.EqualValues(t, 1010, before.PeakHeld)
		a.ResetPeaks()
		after := a.Stats()
		require.EqualValues(t, 10, after.PeakLive)
		require.EqualValues(t, 10, after.PeakHeld)
		before.PeakLive, before.PeakHeld = 10, 10
		require.Equal(t, before, after)
		put(t, a, y)
		finish(t, a, base)
	}
}

// Fault 84.
func TestNothingDriftsInAHundredThousandRounds(t *testing.T) {
	base := newBase()
	base.round = 256
	a := parsed(t, base, "device_local=*;16kib;8")
	rounds := 100_000
	if invariants {
		rounds = 2_000
	}
	for i := range rounds {
		b, _, o := a.Allocate(request(device, memory.Bytes(1+i*7919%9000), 0))
		if o != allocator.OK || a.Free(b, queue.ReadyNow()) != allocator.OK {
			t.Fatal(o)
		}
	}
	st := a.Stats()
	require.EqualValues(t, rounds, st.Allocs)
	require.EqualValues(t, rounds, st.Frees)
	require.Equal(t, st.Allocs, st.Hits+st.Misses)
	require.Equal(t, base.live, st.Held)
	finish(t, a, base)
}

func TestTrimGivesTheLongestIdleFirst(t *testing.T) {
	base := newBase()
	a := parsed(t, base, "device_local=*,host_local=*")
	d1, h1, d2, h2 := get(t, a, request(device, 10, 0)), get(t, a, request(host, 20, 0)), get(t, a, request(device, 30, 0)), get(t, a, request(host, 40, 0))
	for _, b := range []allocator.Block{h2, d1, h1, d2} {
		put(t, a, b)
	}
	require.Zero(t, a.Trim(100))
	require.EqualValues(t, 40, a.Trim(60))
	require.EqualValues(t, 30, a.Trim(31))
	var order []uint64
	for _, f := range base.frees {
		order = append(order, f.addr)
	}
	require.Equal(t, []uint64{h2.Addr, d1.Addr, h1.Addr}, order)
	require.EqualValues(t, 30, a.Trim(0))
	require.Zero(t, a.Trim(0))
	require.Zero(t, a.Stats().Evicted)
	finish(t, a, base)
}

func TestTrimOfShardsKeepsNoMoreThanAsked(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{Shards: 8})
	var live []allocator.Block
	for i := range 100 {
		live = append(live, get(t, a, request(device, memory.Bytes(1+i*i), queue.ID(i))))
	}
	for _, b := range live {
		put(t, a, b)
	}
	total := a.Stats().Idle
	given := a.Trim(total / 3)
	st := a.Stats()
	require.LessOrEqual(t, st.Idle, total/3)
	require.NotZero(t, st.Idle)
	require.Equal(t, total, st.Idle+given)
	require.Equal(t, st.Idle, a.Trim(-1))
	finish(t, a, base)
}

// clock is a time that tests move.
type clock struct{ now time.Time }

func TestWhatIsIdleForTooLongGoesBack(t *testing.T) {
	c := clock{time.Unix(1000, 0)}
	env := testEnv()
	env.Now = func() time.Time { return c.now }
	base := newBase()
	a, err := New(base, env, Config{Idle: time.Minute, Shards: 2})
	require.NoError(t, err)
	q := []queue.ID{0, 1}
	x, y, z := get(t, a, request(device, 64, q[0])), get(t, a, request(device, 640, q[1])), get(t, a, request(device, 6400, q[0]))
	c.now = c.now.Add(time.Second)
	put(t, a, x)
	put(t, a, y)
	c.now = c.now.Add(time.Minute)
	put(t, a, z)
	require.Empty(t, base.frees, "a minute is not too long")
	c.now = c.now.Add(1)
	u := get(t, a, request(device, 64, q[0]))
	require.Equal(t, x.Addr, u.Addr, "what is asked for is used all the same")
	c.now = c.now.Add(time.Second)
	put(t, a, u)
	require.Empty(t, base.frees, "another shard's")
	require.Equal(t, y.Size, a.Trim(memory.MaxBytes))
	c.now = c.now.Add(2 * time.Minute)
	v := get(t, a, request(device, 1, q[1])) // a miss
	require.EqualValues(t, v.Size, a.Stats().Held)
	require.Zero(t, a.Stats().Evicted, "age is not want of room")
	put(t, a, v)
	w := get(t, a, request(device, 1<<20, q[1]))
	c.now = c.now.Add(2 * time.Minute)
	put(t, a, w)
	require.Equal(t, w.Size, a.Stats().Held, "a free looks too")
	finish(t, a, base)
}

func TestPassHidesTheMemoryThatWouldGoPastTheCache(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	_, ok := allocator.As[allocator.VirtualMemory](a)
	require.False(t, ok)
	type snapshotter interface{ Snapshot() string }
	s, ok := allocator.As[snapshotter](a)
	require.True(t, ok)
	require.Equal(t, "base", s.Snapshot())
}

func TestLiveListsWhatIsOut(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{Shards: 4})
	var live []allocator.Block
	for i := range 8 {
		live = append(live, get(t, a, request(device, memory.Bytes(100+i), queue.ID(i))))
	}
	put(t, a, live[3])
	n := 0
	a.Live(func(b allocator.Block, i allocator.Info) bool {
		n++
		require.NotEqual(t, memory.Bytes(103), i.Asked)
		require.Equal(t, allocator.OK, a.Free(b, queue.ReadyNow()))
		return true
	})
	require.Equal(t, 7, n)
	get(t, a, request(device, 1, 0))
	get(t, a, request(device, 1, 1))
	n = 0
	a.Live(func(b allocator.Block, _ allocator.Info) bool { n++; put(t, a, b); return false })
	require.Equal(t, 1, n)
	a.Live(func(b allocator.Block, _ allocator.Info) bool { put(t, a, b); return true })
	finish(t, a, base)
}

func TestAHitAllocatesNothing(t *testing.T) {
	if invariants {
		t.Skip("the checks allocate")
	}
	for _, c := range []Config{{}, {Shards: 8}, {Idle: time.Hour}, {Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Capacity: gib, Count: 3}}}} {
		a := newCache(t, newBase(), c)
		r := request(device, 4096, 7)
		after := queue.After(queue.Point{Queue: 7, Value: 3})
		a.Free(get(t, a, r), after)
		require.Zero(t, testing.AllocsPerRun(100, func() {
			b, _, _ := a.Allocate(r)
			a.Free(b, after)
		}))
	}
	// Nor does a free that evicts.
	base := newBase()
	base.frees = make([]freed, 0, 1000)
	a := newCache(t, base, Config{Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Count: 1}}})
	var live []allocator.Block
	for range 102 {
		live = append(live, get(t, a, request(device, 4096, 0)))
	}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		a.Free(live[0], queue.ReadyNow())
		live = live[1:]
	}))
}

func TestASlotIsTwoCacheLinesWithoutPointers(t *testing.T) {
	require.EqualValues(t, 128, unsafe.Sizeof(allocator.Slot[node]{}))
}

func TestClassesRiseAndHoldAnEighth(t *testing.T) {
	require.EqualValues(t, classes-1, class(memory.MaxBytes))
	last := uint32(0)
	for n := memory.Bytes(1); n < 1<<62; n += 1 + n/37 {
		c := class(n)
		require.GreaterOrEqual(t, c, last)
		require.Less(t, class(n), uint32(classes))
		require.Greater(t, class(n+n/8+1), c)
		last = c
	}
}

func TestHundredsOfKeepersBelow(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{})
	s := &a.shards[0]
	for i := range 300 {
		require.EqualValues(t, i, s.keeperLocked(&allocator.Keeper{Index: uint32(i)}))
	}
	require.EqualValues(t, 299, s.keeperLocked(s.keepers[299]))
}

func TestShardsServeEachOther(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{Shards: 4})
	b := get(t, a, request(device, 64, 1))
	put(t, a, b)
	c := get(t, a, request(device, 64, 2))
	require.Equal(t, b.Addr, c.Addr)
	require.Equal(t, b.Keeper, c.Keeper)
	put(t, a, c)
	require.Equal(t, 1, base.allocs)
	finish(t, a, base)
}

func TestShardsShareTheLimits(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Capacity: 1000, Count: 10}}, Shards: 4})
	on := func(q queue.ID, size memory.Bytes) { put(t, a, get(t, a, request(device, size, q))) }
	on(1, 900) // one shard may use nearly all
	require.EqualValues(t, 900, a.Stats().Idle)
	on(2, 1000) // and another all, though it has nothing of its own to evict
	require.EqualValues(t, 1000, a.Stats().Idle)
	require.NoError(t, a.Check())
	a.Trim(0)
	on(1, 300)
	on(2, 600)
	b := get(t, a, request(device, 600, 2))
	on(1, 500) // shard 2 has leased what it no longer uses: nothing of shard 1 has to go
	require.EqualValues(t, 300+500, a.Stats().Idle)
	put(t, a, b)
	a.Trim(0)
	on(3, 1000) // what shards lease and don't use is not lost
	require.EqualValues(t, 1000, a.Stats().Idle)
	a.Trim(0)
	var live []allocator.Block
	for i := range 40 {
		live = append(live, get(t, a, request(device, 1, queue.ID(i))))
	}
	for _, b := range live {
		put(t, a, b)
		require.NoError(t, a.Check())
	}
	require.EqualValues(t, 10, a.Stats().Blocks)
	finish(t, a, base)
}

func TestSlotsOfWhatWentBackAreUsedAgain(t *testing.T) {
	base := newBase()
	a := parsed(t, base, "device_local=*;*;1")
	base.failAlloc = map[int]allocator.Outcome{}
	for i := range 100 {
		base.failAlloc[2*i+1] = allocator.Exhausted
	}
	for i := range 200 {
		if b, _, o := a.Allocate(request(host, 64, 0)); o == allocator.OK {
			require.Less(t, allocator.SlotOf(b), uint32(3))
			put(t, a, b)
		}
		base.failAlloc[base.allocs+1] = allocator.OK
		x := get(t, a, request(device, memory.Bytes(1<<(i%8)), 0))
		require.Less(t, allocator.SlotOf(x), uint32(4))
		put(t, a, x)
	}
	finish(t, a, base)
}

func TestSixteenGoroutinesOnEightQueues(t *testing.T) {
	for _, shards := range []int{1, 4} {
		t.Run(fmt.Sprint(shards), func(t *testing.T) {
			base := newBase()
			const capacity, count = 64 * kib, 24
			a := newCache(t, base, Config{Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Capacity: capacity, Count: count}}, Shards: shards, Idle: time.Millisecond})
			var queues [8]*queue.Queue
			for i := range queues {
				queues[i] = queue.New(queue.Options{Executor: func(q *queue.Queue) queue.Executor { return queue.NewWorker(q, nop{}, false) }})
				defer queues[i].Close()
			}
			rounds := 1500
			if invariants || testing.Short() {
				rounds = 200
			}
			var owned sync.Map // no two hold the same memory
			var wg sync.WaitGroup
			stop := make(chan struct{})
			for g := range 16 {
				wg.Go(func() {
					q := queues[g%8]
					var live []allocator.Block
					free := func(b allocator.Block) {
						owned.Delete(b.Addr)
						at, _, _ := q.Submit(&queue.Op{}, nil, nil)
						if o := a.Free(b, queue.After(at)); o != allocator.OK {
							t.Error(o)
						}
						if o := a.Free(b, queue.After(at)); o != allocator.Stale {
							t.Error(o)
						}
					}
					for i := range rounds {
						b, _, o := a.Allocate(request(device, memory.Bytes(1+(i*g*31)%9000), q.ID()))
						if o != allocator.OK {
							t.Error(o)
							return
						}
						if _, taken := owned.LoadOrStore(b.Addr, true); taken {
							t.Errorf("%#x is handed out twice", b.Addr)
						}
						b.Keeper.Ledger.Use(b.ID, queue.After(q.Issued()))
						live = append(live, b)
						if len(live) > 8 {
							free(live[0])
							live = live[1:]
						}
						if i%200 == 0 {
							a.Trim(capacity / 2)
						}
					}
					for _, b := range live {
						free(b)
					}
				})
			}
			var watch sync.WaitGroup
			watch.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					st := a.Stats()
					if st.Idle > capacity || st.Blocks > count || st.Idle < 0 || st.Live < 0 || st.Held < st.Idle+st.Live {
						t.Errorf("%+v", st)
					}
					if err := a.Check(); err != nil {
						t.Error(err)
					}
					a.Pending(func(queue.Frontier, memory.Bytes) bool { return true })
				}
			})
			wg.Wait()
			close(stop)
			watch.Wait()
			finish(t, a, base)
		})
	}
}

func TestCloseWhileOthersFree(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{Shards: 2, Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Capacity: 100}}})
	var live []allocator.Block
	for i := range 200 {
		live = append(live, get(t, a, request(device, 7, queue.ID(i))))
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for _, b := range live[g*50 : g*50+50] {
				a.Free(b, queue.ReadyNow())
			}
		})
	}
	require.NoError(t, a.Close())
	wg.Wait()
	require.Zero(t, base.blocks)
	finish(t, a, base)
}

func TestTheBaseIsCalledWithoutALock(t *testing.T) {
	base := newBase()
	a := newCache(t, base, Config{Shards: 2, Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Capacity: 100}}})
	base.onFree = func(uint64) { a.Stats() }
	for i := range 10 {
		put(t, a, get(t, a, request(device, memory.Bytes(90+i), queue.ID(i))))
	}
	a.Trim(0)
	finish(t, a, base)
}
