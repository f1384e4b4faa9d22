package host

import (
	"fmt"

	"github.com/google/btree"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// poolState is where a pool's block is.
//
//	         PoolAlloc                 PoolFree
//	(heap) ────────────► live ◄─────┐ ────────► pending
//	   ▲                            │              │ its frontier is reached
//	   │  beyond the threshold,     │ PoolAlloc    ▼
//	   └── trimmed, out of room ────┴─────────── idle
type poolState uint8

const (
	poolLive poolState = iota
	poolPending
	poolIdle
)

// pool is a heap's stream-ordered pool, guarded by the heap's lock. What it has
// taken from the heap is the heap's taken[kindPool].
type pool struct {
	keep      memory.Bytes // the threshold
	pending   []poolFree   // oldest first
	idle      memory.Bytes
	bySize    *btree.BTreeG[*span] // idle blocks; among equals the one freed last
	byAge     *btree.BTreeG[*span] // idle blocks; the one freed first
	lastFreed uint64
}

type poolFree struct {
	block *span
	after queue.Frontier
}

// maxWaste is the part of a block that a smaller request may leave unused: 1/8.
const maxWaste = 8

func newPool() pool {
	return pool{
		bySize: btree.NewG(btreeDegree, func(a, b *span) bool {
			return a.taken < b.taken || a.taken == b.taken && a.serial > b.serial
		}),
		byAge: btree.NewG(btreeDegree, func(a, b *span) bool { return a.serial < b.serial }),
	}
}

// settle makes idle what has been reached.
func (p *pool) settle() {
	kept := p.pending[:0]
	for _, f := range p.pending {
		if !f.after.Reached() {
			kept = append(kept, f)
			continue
		}
		p.lastFreed++
		f.block.state, f.block.serial = poolIdle, p.lastFreed
		p.bySize.ReplaceOrInsert(f.block)
		p.byAge.ReplaceOrInsert(f.block)
		p.idle += f.block.taken
	}
	clear(p.pending[len(kept):])
	p.pending = kept
}

func (p *pool) unlist(s *span) {
	p.bySize.Delete(s)
	p.byAge.Delete(s)
	p.idle -= s.taken
}

// reuse takes the tightest idle block that serves.
func (p *pool) reuse(size, align memory.Bytes) *span {
	need, ok := memory.AlignUp(size, Alignment)
	if !ok {
		return nil
	}
	var found *span
	p.bySize.AscendGreaterOrEqual(&span{taken: need, serial: ^uint64(0)}, func(s *span) bool {
		if s.taken-need > s.taken/maxWaste {
			return false
		}
		if s.addr&uint64(align-1) == 0 {
			found = s
		}
		return found == nil
	})
	if found != nil {
		p.unlist(found)
		found.state = poolLive
	}
	return found
}

// shedLocked unlists idle blocks, those freed first, until at most keep bytes are idle.
func (h *heap) shedLocked(keep memory.Bytes) []*span {
	var out []*span
	for h.pool.idle > keep {
		s, _ := h.pool.byAge.Min()
		h.pool.unlist(s)
		h.used.Delete(s)
		out = append(out, s)
	}
	return out
}

// liveLocked counts what was handed out of h's pool and not freed.
func (p *pool) liveLocked(h *heap) (n int, size memory.Bytes) {
	n, size = h.count[kindPool]-p.bySize.Len()-len(p.pending), h.taken[kindPool]-p.idle
	for _, f := range p.pending {
		size -= f.block.taken
	}
	return n, size
}

// shrink gives blocks back to the heap and returns how much that was. What the
// system refuses to take is idle again.
func (d *Device) shrink(h *heap, blocks []*span) (given memory.Bytes, err error) {
	for _, s := range blocks {
		spend(d.config.FreeCost)
		if e := h.release(s); e != nil {
			err = e
			h.mu.Lock()
			h.pool.pending = append(h.pool.pending, poolFree{s, queue.ReadyNow()})
			h.mu.Unlock()
			continue
		}
		given += s.taken
	}
	return given, err
}

// dry reports whether none of the device's queues has work in flight.
func (d *Device) dry() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.queues {
		if q := e.queue; q.Reached() < q.Issued().Value {
			return false
		}
	}
	return true
}

// poolHeap returns heap i with its pool settled. If nothing is in flight any more
// it has given back what is beyond the threshold.
func (d *Device) poolHeap(i int) (*heap, error) {
	h, err := d.heap(i)
	if err != nil {
		return nil, err
	}
	dry := d.dry()
	h.shedding.Lock()
	defer h.shedding.Unlock()
	h.mu.Lock()
	h.pool.settle()
	var out []*span
	if dry && len(h.pool.pending) == 0 {
		out = h.shedLocked(h.pool.keep)
	}
	h.mu.Unlock()
	_, err = d.shrink(h, out)
	return h, err
}

// PoolAlloc implements [driver.Pool]. The memory is valid after a point on the
// pool's own service queue.
func (d *Device) PoolAlloc(heap int, size, align memory.Bytes) (uint64, memory.Bytes, queue.Frontier, error) {
	fail := func(err error) (uint64, memory.Bytes, queue.Frontier, error) { return 0, 0, queue.Frontier{}, err }
	h, err := d.heap(heap)
	if err != nil {
		return fail(err)
	}
	if size <= 0 || !memory.IsPowerOfTwo(align) {
		return fail(fmt.Errorf("host: pool allocation of %v at alignment %v: size and alignment must be positive, the alignment a power of two", size, align))
	}
	h.mu.Lock()
	h.pool.settle()
	s := h.pool.reuse(size, align)
	h.mu.Unlock()
	if s == nil {
		if s, err = d.growPool(h, size, align); err != nil {
			return fail(err)
		}
	}
	at, _, err := d.service.Submit(&queue.Op{Kind: queue.Barrier}, nil, nil)
	if err != nil {
		_ = h.poolFree(s.addr, queue.ReadyNow()) // handed to nobody
		return fail(d.check())
	}
	return s.addr, s.taken, queue.After(at), nil
}

// growPool takes a block from the heap; if there is no room, once more without
// what is idle.
func (d *Device) growPool(h *heap, size, align memory.Bytes) (*span, error) {
	if _, err := d.poolHeap(h.index); err != nil { // not more than the threshold may be kept
		return nil, err
	}
	spend(d.config.AllocCost)
	s, err := h.alloc(kindPool, size, align)
	if err == nil {
		return s, nil
	}
	h.shedding.Lock() // nobody else has blocks between the pool and the heap
	defer h.shedding.Unlock()
	for given := memory.Bytes(1); given > 0; {
		h.mu.Lock()
		h.pool.settle()
		s := h.pool.reuse(size, align)
		h.mu.Unlock()
		if s != nil {
			return s, nil
		}
		if s, err = h.alloc(kindPool, size, align); err == nil {
			return s, nil
		}
		h.mu.Lock()
		out := h.shedLocked(0)
		h.mu.Unlock()
		given, _ = d.shrink(h, out)
	}
	return nil, err
}

// PoolFree implements [driver.Pool].
func (d *Device) PoolFree(heap int, addr uint64, after queue.Frontier) error {
	h, err := d.heap(heap)
	if err != nil {
		return err
	}
	if err := h.poolFree(addr, after); err != nil {
		return err
	}
	_, err = d.poolHeap(heap)
	return err
}

func (h *heap) poolFree(addr uint64, after queue.Frontier) error {
	if after.Unknown() {
		after = queue.Everything()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	s, err := h.findLocked(kindPool, addr, "pool free")
	if err != nil {
		return err
	}
	if s.state != poolLive {
		return fmt.Errorf("%w: pool free of %#x: it was freed before", ErrBadAddress, addr)
	}
	s.state = poolPending
	h.pool.pending = append(h.pool.pending, poolFree{s, after})
	return nil
}

// SetPoolThreshold implements [driver.Pool].
func (d *Device) SetPoolThreshold(heap int, keep memory.Bytes) error {
	if keep < 0 {
		return fmt.Errorf("host: pool threshold %v is negative", keep)
	}
	h, err := d.heap(heap)
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.pool.keep = keep
	h.mu.Unlock()
	_, err = d.poolHeap(heap)
	return err
}

// PoolTrim implements [driver.Pool].
func (d *Device) PoolTrim(heap int, keep memory.Bytes) (memory.Bytes, error) {
	h, err := d.heap(heap)
	if err != nil {
		return 0, err
	}
	h.shedding.Lock()
	defer h.shedding.Unlock()
	h.mu.Lock()
	h.pool.settle()
	out := h.shedLocked(max(0, keep))
	h.mu.Unlock()
	return d.shrink(h, out)
}

// PoolHeld implements [driver.Pool].
func (d *Device) PoolHeld(heap int) (memory.Bytes, error) {
	h, err := d.poolHeap(heap)
	if err != nil {
		return 0, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.taken[kindPool], nil
}
