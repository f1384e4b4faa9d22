package host

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/google/btree"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/internal/vmem"
)

var (
	// ErrBadAddress is what a free, unmap and the like get for an address that names
	// nothing: it was never handed out, or was given back before.
	ErrBadAddress = errors.New("host: no such memory")
	// ErrClosed is what every call on a closed device gets.
	ErrClosed = errors.New("host: device is closed")

	errNoAddresses = errors.New("no address space of that size")
)

// kind says what a range of addresses was handed out for.
type kind uint8

const (
	kindRaw kind = iota
	kindPool
	kindReserved // addresses for pages
	kinds
)

var kindNames = [kinds]string{"raw", "pool", "reservation"}

// span is a range of addresses in use.
type span struct {
	hole
	taken  memory.Bytes // from the capacity
	kind   kind
	mapped int       // pages mapped in a reservation
	state  poolState // of a pool's block
	serial uint64    // orders the pool's free blocks by when they became free
}

// heap is one heap: its account, its addresses, and what is in them.
type heap struct {
	index int
	name  string
	size  memory.Bytes // the capacity

	// shedding is held while blocks go from the pool to the heap, so that whoever finds
	// no room can tell that none is on its way. Taken before mu.
	shedding sync.Mutex

	mu     sync.Mutex
	closed bool
	space  space
	used   *btree.BTreeG[*span] // by address
	taken  [kinds]memory.Bytes
	count  [kinds]int
	pool   pool
	pages  pages
}

func newHeap(index int, h memory.Heap, grown func(*vmem.Region)) *heap {
	return &heap{
		index: index, name: h.Name, size: h.Capacity,
		space: newSpace(h.Capacity, grown),
		used:  btree.NewG(btreeDegree, func(a, b *span) bool { return a.addr < b.addr }),
		pool:  newPool(),
	}
}

func (h *heap) freeLocked() memory.Bytes {
	return h.size - h.taken[kindRaw] - h.taken[kindPool] - h.pages.taken()
}

// fullLocked is the error for want of capacity.
func (h *heap) fullLocked(what string) error {
	return fmt.Errorf("host: %s: %w: heap %s has %v free of %v (raw %v, pool %v, pages %v)", what, driver.ErrOutOfMemory,
		h.name, h.freeLocked(), h.size, h.taken[kindRaw], h.taken[kindPool], h.pages.taken())
}

// alloc takes memory from the capacity and makes it accessible.
func (h *heap) alloc(k kind, size, align memory.Bytes) (*span, error) {
	what := func() string { return fmt.Sprintf("%s allocation of %v", kindNames[k], size) } // for errors only
	if size <= 0 || !memory.IsPowerOfTwo(align) {
		return nil, fmt.Errorf("host: %s at alignment %v: size and alignment must be positive, the alignment a power of two", what(), align)
	}
	taken, ok := memory.AlignUp(size, Alignment)
	room, fits := memory.AlignUp(size, systemPage)
	s := &span{taken: taken, kind: k}
	err := func() (err error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.closed {
			return ErrClosed
		}
		if !ok || !fits || taken > h.freeLocked() {
			return h.fullLocked(what())
		}
		if s.hole, err = h.space.take(room, align); err != nil {
			return fmt.Errorf("host: %s: %w: %w", what(), driver.ErrOutOfMemory, err)
		}
		h.addLocked(s)
		return nil
	}()
	if err != nil {
		return nil, err
	}
	if err := s.region.Commit(s.offset(), int64(s.size)); err != nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.used.Delete(s)
		h.dropLocked(s)
		return nil, fmt.Errorf("host: %s: %w: %w", what(), driver.ErrOutOfMemory, err)
	}
	return s, nil
}

func (s *span) offset() int64 { return int64(s.addr - uint64(s.region.Base())) }

func (h *heap) addLocked(s *span) {
	h.used.ReplaceOrInsert(s)
	h.taken[s.kind] += s.taken
	h.count[s.kind]++
}

// dropLocked forgets a span that is no longer in used.
func (h *heap) dropLocked(s *span) {
	h.taken[s.kind] -= s.taken
	h.count[s.kind]--
	h.space.give(s.hole)
}

// findLocked returns the span of kind k that begins at addr.
func (h *heap) findLocked(k kind, addr uint64, what string) (*span, error) {
	if h.closed {
		return nil, ErrClosed
	}
	s, ok := h.used.Get(&span{hole: hole{addr: addr}})
	switch {
	case !ok:
		return nil, fmt.Errorf("%w: %s of %#x: never handed out by heap %s, or given back before", ErrBadAddress, what, addr, h.name)
	case s.kind != k:
		return nil, fmt.Errorf("%w: %s of %#x: that is a %s block", ErrBadAddress, what, addr, kindNames[s.kind])
	}
	return s, nil
}

// release makes the memory of s, which is no longer in used, inaccessible and gives
// it back. If the system refuses, s is in used again.
func (h *heap) release(s *span) error {
	err := s.region.Decommit(s.offset(), int64(s.size))
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		h.used.ReplaceOrInsert(s)
		return fmt.Errorf("host: free of %#x: %w", s.addr, err)
	}
	h.dropLocked(s)
	return nil
}

func (h *heap) free(addr uint64) error {
	h.mu.Lock()
	s, err := h.findLocked(kindRaw, addr, "free")
	if err == nil {
		h.used.Delete(s)
	}
	h.mu.Unlock()
	if err != nil {
		return err
	}
	return h.release(s)
}

// leaksLocked describes what is still allocated, or is empty.
func (h *heap) leaksLocked() string {
	var parts []string
	add := func(n int, size memory.Bytes, what string) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%v in %d %s", size, n, what))
		}
	}
	add(h.count[kindRaw], h.taken[kindRaw], "raw allocations")
	live, bytes := h.pool.liveLocked(h)
	add(live, bytes, "pool allocations")
	add(h.pages.live(), h.pages.taken(), "pages")
	reserved := memory.Bytes(0)
	h.used.Ascend(func(s *span) bool {
		if s.kind == kindReserved {
			reserved += s.size
		}
		return true
	})
	add(h.count[kindReserved], reserved, "address reservations")
	if len(parts) == 0 {
		return ""
	}
	return "heap " + h.name + ": " + strings.Join(parts, ", ")
}

// close gives all addresses and memory back.
func (h *heap) close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for _, r := range h.space.regions {
		errs = append(errs, r.Release())
	}
	errs = append(errs, h.pages.close())
	return errors.Join(errs...)
}
