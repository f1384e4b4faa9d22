package allocator

import (
	"sync"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// Mint is a layer that gives every block it hands out a handle of its own and
// changes nothing else. The stack puts it over a layer that hands out blocks again
// with the handles they had.
var Mint = Layer{
	Table: &spec.Table{
		Name:    "mint",
		Summary: "new handles over a layer that reuses them",
		Doc: "Gives each block a handle that is good until its release, so that a handle used\n" +
			"after that is an error even if the layers below hand the same block out again. The stack adds\n" +
			"it by itself where it is needed.",
	},
	Mints: true,
	New: func(base Allocator, env *Env, _ *spec.Values) (Allocator, error) {
		m := &minter{base: base}
		m.slots.Init(&m.mu, env.Owner, 0)
		return m, nil
	},
}

type minter struct {
	base Allocator

	mu    sync.Mutex // guards all below; the base is called without it
	slots Slots[minted]
	inner []*Keeper // of the blocks below, by index
	stats Stats
}

// minted is what a mint keeps of the block below.
type minted struct {
	addr  uint64
	size  memory.Bytes
	id    uint64
	inner int32
}

func (m *minter) Allocate(r Request) (Block, queue.Frontier, Outcome) {
	b, f, o := m.base.Allocate(r)
	if o != OK {
		m.mu.Lock()
		m.stats.Failed++
		m.mu.Unlock()
		return b, f, o
	}
	m.mu.Lock()
	i := m.slots.NewLocked()
	if i == 0 {
		m.stats.Failed++
		m.mu.Unlock()
		m.base.Free(b, f)
		return Block{}, queue.Frontier{}, Exhausted
	}
	m.slots.At(i).Value = minted{b.Addr, b.Size, b.ID, m.keeperLocked(b.Keeper)}
	out := m.slots.MintLocked(i, b.Addr, b.Size, &r, f)
	m.stats.Allocs++
	m.stats.Live += b.Size
	m.stats.PeakLive = max(m.stats.PeakLive, m.stats.Live)
	m.mu.Unlock()
	return out, f, OK
}

func (m *minter) keeperLocked(k *Keeper) int32 {
	for i, have := range m.inner {
		if have == k {
			return int32(i)
		}
	}
	m.inner = append(m.inner, k)
	return int32(len(m.inner) - 1)
}

func (m *minter) Free(b Block, after queue.Frontier) Outcome {
	m.mu.Lock()
	i, f, o := m.slots.TakeLocked(b, after)
	if o != OK {
		m.mu.Unlock()
		return o
	}
	v := m.slots.At(i).Value
	inner := Block{Addr: v.addr, Size: v.size, Keeper: m.inner[v.inner], ID: v.id}
	m.slots.DropLocked(i)
	m.stats.Frees++
	m.stats.Live -= v.size
	m.mu.Unlock()
	return m.base.Free(inner, f)
}

func (m *minter) Trim(memory.Bytes) memory.Bytes    { return 0 }
func (m *minter) Close() error                      { return nil }
func (m *minter) Live(yield func(Block, Info) bool) { m.slots.Live(yield) }
func (m *minter) Pass(any) Allocator                { return m.base }

func (m *minter) Stats() Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	st := m.stats
	st.Held, st.PeakHeld = st.Live, st.PeakLive
	return st
}

func (m *minter) ResetPeaks() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stats.PeakLive = m.stats.Live
}
