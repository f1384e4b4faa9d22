// Package pool is the source over the driver's stream-ordered pool, which keeps
// what is freed for later: cuMemAllocFromPoolAsync, say.
//
//	--device_allocator=pool
//	--device_allocator=pool:threshold=1GiB
//
// The driver's pool keeps free memory up to the threshold; the default, '*', keeps
// everything, so that a program in its steady state makes the driver take and give
// nothing. [Source.Trim] empties it.
//
// A block is freed to the pool when its frontier is reached, not before, so what
// the pool does never waits for the program's queues; until then it is pending.
// The frontier of a fresh block is what the driver says: a point on the pool's own
// service queue.
//
// A heap that the driver has no pool for is served with plain allocations, as raw
// does. Which of the two it is shows at the first use of the heap.
//
// # Figures
//
// Live is handed out. Held is what the pool has taken from the device, as it says
// itself after each call, so PeakHeld is exact while one goroutine allocates; Idle
// is what of it is neither live nor pending. SourceAllocs and SourceFrees count
// allocations from the pool and frees to it.
package pool

import (
	"errors"
	"sync/atomic"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/internal/source"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// Source takes memory from the driver's pool. Safe for concurrent use.
type Source struct {
	source.Source
	mem pooled
}

var _ allocator.Allocator = (*Source)(nil)

// Layer describes the source to a registry.
var Layer = allocator.Layer{
	Table: &spec.Table{
		Name:    "pool",
		Summary: "the driver's stream-ordered pool",
		Doc:     "The driver keeps what is freed, up to the threshold, and hands it out again without taking more. A heap without a pool is served as by raw.",
		Options: []spec.Option{{
			Name: "threshold", Kind: spec.Size, Default: "*", Unlimited: true,
			Help: "free bytes that the driver's pool of a heap keeps when the device is idle",
		}},
	},
	Source: true,
	Mints:  true,
	New: func(base allocator.Allocator, env *allocator.Env, options *spec.Values) (allocator.Allocator, error) {
		return open(base, env, options.Size("threshold"))
	},
}

// New makes the source. threshold is how many free bytes the driver's pool of a
// heap keeps; [spec.UnlimitedSize] keeps everything. The environment's device must
// be a [driver.Pool].
func New(env *allocator.Env, threshold memory.Bytes) (*Source, error) {
	return open(nil, env, threshold)
}

func open(base allocator.Allocator, env *allocator.Env, threshold memory.Bytes) (*Source, error) {
	d, err := source.Device[device](base, env, "pool")
	if err != nil {
		return nil, err
	}
	s := &Source{}
	s.mem = pooled{source: &s.Source, pool: d, keep: threshold, raw: source.Raw{Source: &s.Source, Driver: d}}
	source.Init(&s.Source, env, &s.mem)
	return s, nil
}

// device is what the source needs.
type device interface {
	driver.Raw
	driver.Pool
}

// Stats implements [allocator.Allocator]. It asks the driver what its pools hold.
func (s *Source) Stats() allocator.Stats {
	s.mem.observe()
	st := s.Source.Stats()
	st.Idle = max(0, st.Held-st.Live-st.Pending)
	return st
}

// Trim implements [allocator.Allocator]: the driver's pools give back what is idle
// beyond keep in all. It returns by how much less they hold.
func (s *Source) Trim(keep memory.Bytes) memory.Bytes {
	before := s.Stats().Held
	s.Source.Trim(keep)
	s.mem.trim(keep)
	return max(0, before-s.Stats().Held)
}

// ResetPeaks implements [allocator.PeakResetter].
func (s *Source) ResetPeaks() {
	s.mem.observe()
	s.Source.ResetPeaks()
}

// Close implements [allocator.Allocator].
func (s *Source) Close() error {
	err := s.Source.Close()
	return errors.Join(err, s.mem.trim(0))
}

// way says how a heap is served.
type way = uint32

const (
	unused way = iota
	byPool
	byRaw
)

// pooled is the pool as [source.Memory].
type pooled struct {
	source *source.Source
	pool   driver.Pool
	raw    source.Raw
	keep   memory.Bytes

	ways [allocator.MaxHeaps]atomic.Uint32 // settled before a heap's first block is handed out
	live [allocator.MaxHeaps]memory.Bytes  // taken and not given back; guarded by source.Count
	held [allocator.MaxHeaps]memory.Bytes  // what the pool held when it was last asked; likewise
}

// settle finds out how heap is served, and sets the threshold of its pool. Those who
// are first together all set it.
func (m *pooled) settle(heap int) (way, error) {
	if w := m.ways[heap].Load(); w != unused {
		return w, nil
	}
	w := byPool
	switch err := m.pool.SetPoolThreshold(heap, m.keep); {
	case errors.Is(err, driver.ErrUnsupported):
		w = byRaw
	case err != nil:
		return unused, err
	}
	m.ways[heap].Store(w)
	return w, nil
}

// Take implements [source.Memory].
func (m *pooled) Take(heap int, size, align memory.Bytes) (uint64, memory.Bytes, queue.Frontier, error) {
	w, err := m.settle(heap)
	if err != nil {
		return 0, 0, queue.Frontier{}, err
	}
	if w == byRaw {
		return m.raw.Take(heap, size, align)
	}
	addr, taken, valid, err := m.pool.PoolAlloc(heap, size, align)
	if err != nil {
		return 0, 0, queue.Frontier{}, err
	}
	m.changed(heap, taken, func(st *allocator.Stats) { st.SourceAllocs++ })
	return addr, taken, valid, nil
}

// Give implements [source.Memory].
func (m *pooled) Give(heap int, addr uint64, granted memory.Bytes) error {
	if m.ways[heap].Load() == byRaw {
		return m.raw.Give(heap, addr, granted)
	}
	// Counted before, so that whoever is given this memory next doesn't count it twice.
	source.Count(m.source, func(*allocator.Stats) { m.live[heap] -= granted })
	if err := m.pool.PoolFree(heap, addr, queue.ReadyNow()); err != nil {
		source.Count(m.source, func(*allocator.Stats) { m.live[heap] += granted })
		return err
	}
	m.changed(heap, 0, func(st *allocator.Stats) { st.SourceFrees++ })
	return nil
}

// Forget implements [source.Memory]. With the device the pool's idle memory is gone
// too.
func (m *pooled) Forget(heap int, addr uint64, granted memory.Bytes) {
	if m.ways[heap].Load() == byRaw {
		m.raw.Forget(heap, addr, granted)
		return
	}
	source.Count(m.source, func(st *allocator.Stats) {
		m.live[heap] -= granted
		m.holdLocked(st, heap, m.live[heap])
	})
}

// changed counts a call, and asks what the pool holds now.
func (m *pooled) changed(heap int, by memory.Bytes, count func(*allocator.Stats)) {
	held, err := m.pool.PoolHeld(heap)
	source.Count(m.source, func(st *allocator.Stats) {
		count(st)
		m.live[heap] += by
		if err != nil { // it is at least what was taken
			held = max(m.held[heap], m.live[heap])
		}
		m.holdLocked(st, heap, max(held, m.live[heap]))
	})
}

// holdLocked sets what the pool of heap holds.
func (m *pooled) holdLocked(st *allocator.Stats, heap int, held memory.Bytes) {
	st.Held += held - m.held[heap]
	m.held[heap] = held
}

// observe asks each pool what it holds. Where it doesn't say, the last answer counts.
func (m *pooled) observe() {
	for heap := range m.ways {
		if m.ways[heap].Load() != byPool {
			continue
		}
		held, err := m.pool.PoolHeld(heap)
		if err == nil || errors.Is(err, queue.ErrLost) { // a lost device holds nothing
			source.Count(m.source, func(st *allocator.Stats) { m.holdLocked(st, heap, max(held, m.live[heap])) })
		}
	}
}

// trim lets the pools keep at most keep free bytes in all. A lost device has none.
func (m *pooled) trim(keep memory.Bytes) error {
	var errs []error
	for heap := range m.ways {
		if m.ways[heap].Load() != byPool {
			continue
		}
		if _, err := m.pool.PoolTrim(heap, keep); err != nil {
			if source.Note(m.source, err) != allocator.Lost {
				errs = append(errs, err)
			}
			continue
		}
		m.observe()
		source.Count(m.source, func(*allocator.Stats) { keep -= m.held[heap] - m.live[heap] })
		keep = max(0, keep)
	}
	return errors.Join(errs...)
}
