package host

import (
	"github.com/google/btree"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/internal/vmem"
)

// space is the address space of a heap: regions reserved as they are needed,
// divided into holes. A request gets the smallest hole that is large enough, at
// the lowest address among equals: O(log n). Neighbouring holes of one region are
// always one hole. Regions stay until the device is closed; they hold no memory.
//
// It is guarded by the heap's lock.
type space struct {
	chunk   memory.Bytes       // the least size of a new region
	grown   func(*vmem.Region) // told of a new region
	byAddr  *btree.BTreeG[hole]
	bySize  *btree.BTreeG[hole]
	regions []*vmem.Region
}

// hole is a range of addresses without an owner, in whole system pages.
type hole struct {
	addr   uint64
	size   memory.Bytes
	region *vmem.Region
}

func (h hole) end() uint64 { return h.addr + uint64(h.size) }

const (
	btreeDegree = 16
	minChunk    = 64 * memory.MiB
	maxChunk    = memory.TiB
)

func newSpace(capacity memory.Bytes, grown func(*vmem.Region)) space {
	chunk, _ := memory.AlignUp(min(max(capacity, minChunk), maxChunk), systemPage)
	return space{
		chunk: chunk, grown: grown,
		byAddr: btree.NewG(btreeDegree, func(a, b hole) bool { return a.addr < b.addr }),
		bySize: btree.NewG(btreeDegree, func(a, b hole) bool {
			return a.size < b.size || a.size == b.size && a.addr < b.addr
		}),
	}
}

// take finds size bytes, in system pages, at a multiple of align.
func (s *space) take(size, align memory.Bytes) (hole, error) {
	align = max(align, systemPage)
	slack := align - systemPage
	if size > memory.MaxBytes-slack {
		return hole{}, errNoAddresses
	}
	h, ok := s.smallest(size)
	if ok && alignAddr(h.addr, align)+uint64(size) > h.end() {
		h, ok = s.smallest(size + slack)
	}
	if !ok {
		var err error
		if h, err = s.grow(size + slack); err != nil {
			return hole{}, err
		}
	}
	s.remove(h)
	start := alignAddr(h.addr, align)
	if start > h.addr {
		s.insert(hole{h.addr, memory.Bytes(start - h.addr), h.region})
	}
	if end := start + uint64(size); end < h.end() {
		s.insert(hole{end, memory.Bytes(h.end() - end), h.region})
	}
	return hole{start, size, h.region}, nil
}

// give takes a range back.
func (s *space) give(h hole) {
	s.byAddr.DescendLessOrEqual(h, func(prev hole) bool {
		if prev.region == h.region && prev.end() == h.addr {
			s.remove(prev)
			h.addr, h.size = prev.addr, h.size+prev.size
		}
		return false
	})
	if next, ok := s.byAddr.Get(hole{addr: h.end()}); ok && next.region == h.region {
		s.remove(next)
		h.size += next.size
	}
	s.insert(h)
}

func (s *space) smallest(size memory.Bytes) (found hole, ok bool) {
	s.bySize.AscendGreaterOrEqual(hole{size: size}, func(h hole) bool {
		found, ok = h, true
		return false
	})
	return found, ok
}

func (s *space) insert(h hole) {
	s.byAddr.ReplaceOrInsert(h)
	s.bySize.ReplaceOrInsert(h)
}

func (s *space) remove(h hole) {
	s.byAddr.Delete(h)
	s.bySize.Delete(h)
}

// grow reserves a region of at least need bytes: a chunk, or what the system will
// give in its place.
func (s *space) grow(need memory.Bytes) (hole, error) {
	for n := max(s.chunk, need); ; n = max(n/2&^(systemPage-1), need) {
		r, err := vmem.Reserve(int64(n))
		if err != nil {
			if n == need {
				return hole{}, err
			}
			continue
		}
		s.regions = append(s.regions, r)
		s.grown(r)
		h := hole{uint64(r.Base()), n, r}
		s.insert(h)
		return h, nil
	}
}

func alignAddr(addr uint64, align memory.Bytes) uint64 {
	return (addr + uint64(align) - 1) &^ (uint64(align) - 1)
}
