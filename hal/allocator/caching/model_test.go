package caching

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// model is the cache in slow and obvious words: one list of what is idle, in order
// of the frees, searched from the rules in the package comment.
type model struct {
	pools []Pool
	waste float64
	depth int

	idle                  []modelBlock // oldest first
	live                  map[uint64]modelBlock
	down                  []freed // what went to the base, in order
	hits, misses, evicted uint64
	reused                allocator.Grounds
}

type modelBlock struct {
	addr        uint64
	size, rated memory.Bytes
	heap, pool  int // pool -1: never kept
	own         bool
	ready       queue.Frontier
}

func (m *model) limit(need memory.Bytes) memory.Bytes {
	return memory.Bytes(math.Floor(float64(need) * m.waste))
}

func (m *model) pool(r *allocator.Request, size memory.Bytes) int {
	if r.Kind.Usage()&(memory.SharingExport|memory.SharingImmutable|memory.SharingReplicate) != 0 {
		return -1
	}
	for j, p := range m.pools {
		if p.Heap.Matches(heaps[r.Kind.Heap()]) {
			if p.Off || p.MaxAlloc > 0 && size > p.MaxAlloc || p.Capacity > 0 && size > p.Capacity {
				return -1
			}
			return j
		}
	}
	return -1
}

func (m *model) serves(b *modelBlock, r *allocator.Request) bool {
	return b.heap == r.Kind.Heap() && b.own == (r.Kind&allocator.NoSubAlloc != 0) &&
		b.size >= r.Size && b.rated <= m.limit(r.Size) && b.addr%uint64(r.Kind.Align()) == 0
}

// choose returns the index in idle of the block that r gets, or -1.
func (m *model) choose(r *allocator.Request) (int, allocator.Reuse) {
	if m.pool(r, r.Size) < 0 {
		return -1, 0
	}
	byClass := func(c uint32) (list []int) { // oldest first
		for i, b := range m.idle {
			if class(b.rated) == c && b.heap == r.Kind.Heap() && b.own == (r.Kind&allocator.NoSubAlloc != 0) {
				list = append(list, i)
			}
		}
		return list
	}
	notReady := false
	for c := class(r.Size); c <= class(m.limit(r.Size)); c++ {
		list := byClass(c)
		slices.Reverse(list)
		for _, i := range list[:min(len(list), m.depth)] {
			if m.serves(&m.idle[i], r) {
				if g := r.Reuse(m.idle[i].ready); g < allocator.ReuseWait {
					return i, g
				}
				notReady = true
			}
		}
	}
	if !notReady {
		return -1, 0
	}
	for _, worst := range []allocator.Reuse{allocator.ReusePolled, allocator.ReuseWait} {
		for c := class(r.Size); c <= class(m.limit(r.Size)); c++ {
			for _, i := range byClass(c) {
				if g := r.Reuse(m.idle[i].ready); m.serves(&m.idle[i], r) && g <= worst {
					return i, g
				}
			}
		}
	}
	return -1, 0
}

// allocated is told what r got.
func (m *model) allocated(t *rapid.T, r *allocator.Request, want int, g allocator.Reuse, b allocator.Block, f queue.Frontier, fresh bool) {
	require.Equal(t, want < 0, fresh, "from below or not")
	if fresh {
		m.misses++
		m.live[b.Addr] = modelBlock{
			addr: b.Addr, size: b.Size, rated: min(b.Size, m.limit(r.Size)), ready: f,
			heap: r.Kind.Heap(), pool: m.pool(r, b.Size), own: r.Kind&allocator.NoSubAlloc != 0,
		}
		return
	}
	x := m.idle[want]
	require.Equal(t, x.addr, b.Addr)
	require.Equal(t, x.size, b.Size)
	require.Equal(t, x.ready, f)
	m.hits++
	m.reused[g]++
	m.idle = slices.Delete(m.idle, want, want+1)
	m.live[b.Addr] = x
}

func (m *model) sums(pool int) (bytes memory.Bytes, count int64) {
	for _, b := range m.idle {
		if pool < 0 || b.pool == pool {
			bytes += b.size
			count++
		}
	}
	return bytes, count
}

func (m *model) toBase(i int) {
	b := m.idle[i]
	m.down = append(m.down, freed{b.addr, b.size, b.ready})
	m.idle = slices.Delete(m.idle, i, i+1)
}

func (m *model) freed(addr uint64, after queue.Frontier) {
	b := m.live[addr]
	delete(m.live, addr)
	if b.ready != after {
		after = queue.Join(b.ready, after)
	}
	if after.Unknown() {
		after = queue.Everything()
	}
	b.ready = after
	if b.pool < 0 {
		m.down = append(m.down, freed{b.addr, b.size, b.ready})
		return
	}
	p := m.pools[b.pool]
	for {
		bytes, count := m.sums(b.pool)
		if (p.Capacity == 0 || bytes+b.size <= p.Capacity) && (p.Count == 0 || count < p.Count) {
			break
		}
		m.toBase(slices.IndexFunc(m.idle, func(x modelBlock) bool { return x.pool == b.pool }))
		m.evicted++
	}
	m.idle = append(m.idle, b)
}

func (m *model) trim(keep memory.Bytes) (given memory.Bytes) {
	for {
		bytes, _ := m.sums(-1)
		if bytes <= keep {
			return given
		}
		given += m.idle[0].size
		m.toBase(0)
	}
}

// history draws random steps: of what is compared with the model if shards is 1, of
// what must hold anyhow if there are more.
func history(t *rapid.T, shards int) {
	any := memory.HeapKey{AnyType: true}
	local := memory.HeapKey{Type: memory.DeviceLocal}
	limit := func(name string, most int64) int64 { return rapid.Int64Range(0, most).Draw(t, name) }
	pool := func(key memory.HeapKey, name string) Pool {
		return Pool{
			Heap: key, MaxAlloc: memory.Bytes(limit(name+" max", 600)), Capacity: memory.Bytes(limit(name+" capacity", 3000)),
			Count: limit(name+" count", 8), Off: rapid.IntRange(0, 9).Draw(t, name+" off") == 0,
		}
	}
	c := Config{
		Waste:  rapid.SampledFrom([]float64{1, 1.125, 1.5, 4}).Draw(t, "waste"),
		Depth:  rapid.IntRange(1, 4).Draw(t, "depth"),
		Shards: shards,
		Pools:  []Pool{pool(local, "local")},
	}
	if rapid.Bool().Draw(t, "second pool") {
		c.Pools = append(c.Pools, pool(any, "any"))
	}
	base := newBase()
	base.round = rapid.SampledFrom([]memory.Bytes{0, 16, 256}).Draw(t, "round")
	a, err := New(base, testEnv(), c)
	require.NoError(t, err)
	m := &model{pools: c.Pools, waste: c.Waste, depth: c.Depth, live: map[uint64]modelBlock{}}

	var queues [3]manual
	for i := range queues {
		q := &queues[i]
		q.Queue = queue.New(queue.Options{Executor: func(o *queue.Queue) queue.Executor {
			q.w = queue.NewWorker(o, nop{}, true)
			return q.w
		}})
	}
	defer func() {
		for _, q := range queues {
			q.Close()
			q.drain()
		}
	}()
	pick := func() manual { return queues[rapid.IntRange(0, 2).Draw(t, "queue")] }
	issue := func(q manual) queue.Frontier {
		at, _, err := q.Submit(&queue.Op{}, nil, nil)
		require.NoError(t, err)
		return queue.After(at)
	}
	var live, dead []allocator.Block

	t.Repeat(map[string]func(*rapid.T){
		"allocate": func(t *rapid.T) {
			r := request(rapid.IntRange(0, len(heaps)-1).Draw(t, "heap"), memory.Bytes(rapid.IntRange(1, 40).Draw(t, "size")*rapid.SampledFrom([]int{1, 7, 20}).Draw(t, "unit")), 0)
			usage := memory.Transfer
			if rapid.IntRange(0, 19).Draw(t, "export") == 0 {
				usage |= memory.SharingExport
			}
			flags := rapid.SampledFrom([]allocator.Kind{0, 0, 0, 0, allocator.MayWait, allocator.NoOrdered, allocator.NoPolled, allocator.NoSubAlloc}).Draw(t, "flags")
			r.Kind = allocator.MakeKind(r.Kind.Heap(), rapid.SampledFrom([]memory.Bytes{1, 1, 64}).Draw(t, "align"), usage, 0, flags)
			if n := rapid.IntRange(0, 3).Draw(t, "for"); n < 3 {
				r.Who.Queue = queues[n].ID()
			}
			want, g := -1, allocator.ReuseNo
			if shards == 1 {
				want, g = m.choose(&r)
			}
			allocs := base.allocs
			b, f, o := a.Allocate(r)
			require.Equal(t, allocator.OK, o)
			require.GreaterOrEqual(t, b.Size, r.Size)
			require.Zero(t, b.Addr%uint64(r.Kind.Align()))
			require.Less(t, r.Reuse(f), allocator.ReuseNo)
			for _, x := range live {
				require.NotEqual(t, x.Addr, b.Addr)
			}
			live = append(live, b)
			if shards == 1 {
				m.allocated(t, &r, want, g, b, f, base.allocs > allocs)
			}
		},
		"free": func(t *rapid.T) {
			if len(live) == 0 {
				return // nothing live
			}
			i := rapid.IntRange(0, len(live)-1).Draw(t, "which")
			b := live[i]
			live = slices.Delete(live, i, i+1)
			dead = append(dead, b)
			f := queue.ReadyNow()
			switch rapid.IntRange(0, 3).Draw(t, "after") {
			case 0, 1:
				f = issue(pick())
			case 2:
				f = queue.Frontier{}
			}
			if shards == 1 {
				m.freed(b.Addr, f)
			}
			require.Equal(t, allocator.OK, a.Free(b, f))
		},
		"use": func(t *rapid.T) {
			if len(live) == 0 {
				return // nothing live
			}
			b := live[rapid.IntRange(0, len(live)-1).Draw(t, "which")]
			f := issue(pick())
			if x, modelled := m.live[b.Addr]; modelled && x.ready != f {
				x.ready = queue.Join(x.ready, f)
				m.live[b.Addr] = x
			}
			require.Equal(t, allocator.OK, b.Keeper.Ledger.Use(b.ID, f))
		},
		"step": func(t *rapid.T) { pick().w.Step() },
		"learn": func(t *rapid.T) {
			from, to := pick(), pick()
			if from.ID() == to.ID() {
				return // one queue
			}
			s := queue.NewSemaphore(0)
			_, _, err := from.Submit(&queue.Op{}, nil, s.At(1))
			require.NoError(t, err)
			_, issued, err := to.Submit(&queue.Op{}, s.At(1), nil)
			require.NoError(t, err)
			require.True(t, issued)
		},
		"trim": func(t *rapid.T) {
			keep := memory.Bytes(rapid.IntRange(0, 2000).Draw(t, "keep"))
			given := a.Trim(keep)
			require.LessOrEqual(t, a.Stats().Idle, keep)
			if shards == 1 {
				require.Equal(t, m.trim(keep), given)
			}
		},
		"stale": func(t *rapid.T) {
			if len(dead) == 0 {
				return // nothing dead
			}
			b := dead[rapid.IntRange(0, len(dead)-1).Draw(t, "which")]
			require.Equal(t, allocator.Stale, a.Free(b, queue.ReadyNow()))
			require.Equal(t, allocator.Stale, b.Keeper.Ledger.Use(b.ID, queue.ReadyNow()))
		},
		"": func(t *rapid.T) {
			require.NoError(t, a.Check())
			st := a.Stats()
			require.Equal(t, base.live, st.Held)
			require.Equal(t, st.Held, st.Live+st.Idle)
			require.Equal(t, st.Allocs-st.Frees, uint64(len(live)))
			require.GreaterOrEqual(t, st.PeakHeld, st.PeakLive)
			if shards > 1 {
				return
			}
			bytes, count := m.sums(-1)
			require.Equal(t, bytes, st.Idle)
			require.EqualValues(t, count, st.Blocks)
			require.Equal(t, []uint64{m.hits, m.misses, m.evicted}, []uint64{st.Hits, st.Misses, st.Evicted})
			require.Equal(t, m.reused, st.Reused)
			pending, largest := memory.Bytes(0), memory.Bytes(0)
			for _, b := range m.idle {
				largest = max(largest, b.size)
				if !b.ready.Reached() {
					pending += b.size
				}
			}
			require.Equal(t, pending, st.Pending)
			require.Equal(t, largest, st.LargestFree)
			require.Equal(t, m.down, base.frees)
		},
	})

	for _, b := range live {
		require.Equal(t, allocator.OK, a.Free(b, queue.Frontier{}))
	}
	require.NoError(t, a.Close())
	require.NoError(t, a.Check())
	require.Zero(t, base.live)
	require.Zero(t, base.blocks)
	require.Zero(t, a.Stats().Held)
}

func TestTheCacheDoesWhatTheModelSays(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { history(t, 1) })
}

func TestShardsKeepTheLimitsInSum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { history(t, 4) })
}

func FuzzHistory(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) { history(t, rapid.SampledFrom([]int{1, 2, 4}).Draw(t, "shards")) }))
}
