package vmem

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"unsafe"
)

var pageSize = int64(os.Getpagesize())

// PageSize returns the size of a page of the system, the unit of all offsets
// and sizes here.
func PageSize() int64 { return pageSize }

// A Region is a piece of reserved address space. The zero Region is not
// usable; see [Reserve].
type Region struct {
	base unsafe.Pointer // immutable
	size int64          // immutable

	mu sync.RWMutex
	// +checklocks:mu
	released bool
	// +checklocks:mu
	table table
}

// Reserve reserves size bytes of address space, a multiple of [PageSize]. No
// memory is used for it. The address space stays reserved until Release: the
// garbage collector does not release it.
func Reserve(size int64) (*Region, error) {
	switch {
	case size <= 0 || size > math.MaxInt:
		return nil, fmt.Errorf("vmem: reserve %d bytes: %w", size, ErrRange)
	case size%pageSize != 0:
		return nil, fmt.Errorf("vmem: reserve %d bytes: %w (%d)", size, ErrMisaligned, pageSize)
	}
	base, err := reserveSpace(uintptr(size))
	if err != nil {
		return nil, fmt.Errorf("vmem: reserve %d bytes: %w", size, err)
	}
	return &Region{base: base, size: size, table: newTable()}, nil
}

// Base returns the address of the first byte. It stays the same after Release,
// but means nothing then.
func (r *Region) Base() uintptr { return uintptr(r.base) }

// Size returns the number of bytes reserved.
func (r *Region) Size() int64 { return r.size }

// String returns the range of addresses.
func (r *Region) String() string {
	return fmt.Sprintf("[%#x, %#x)", r.Base(), r.Base()+uintptr(r.size))
}

// pointer returns the address of the byte at off, which must be in range.
func (r *Region) pointer(off int64) unsafe.Pointer { return unsafe.Add(r.base, off) }

// check returns an error for a range that is not inside the region, or not
// aligned to align.
//
// +checklocksread:r.mu
func (r *Region) check(off, n, align int64) error {
	switch {
	case r.released:
		return ErrReleased
	case off < 0 || n < 0 || n > r.size || off > r.size-n:
		return fmt.Errorf("%w (region has %d bytes)", ErrRange, r.size)
	case off%align != 0 || n%align != 0:
		return fmt.Errorf("%w (%d)", ErrMisaligned, align)
	}
	return nil
}

// rangeError says which call on which range it was that failed. Of nil it
// makes nil.
func rangeError(op string, off, n int64, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("vmem: %s %d bytes at offset %#x: %w", op, n, off, err)
}

// Commit makes n bytes at off readable and writable. They are zero, except
// where they were committed before: those keep what they have. The range must
// hold no mapped pages. If Commit fails nothing has changed.
func (r *Region) Commit(off, n int64) error {
	return rangeError("commit", off, n, r.commit(off, n))
}

func (r *Region) commit(off, n int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.check(off, n, pageSize); err != nil || n == 0 {
		return err
	}
	parts := r.table.overlapping(off, n)
	for _, e := range parts {
		if e.kind == mapped {
			return ErrMapped
		}
	}
	for i, e := range parts {
		if e.kind != reserved {
			continue
		}
		if err := commitPages(r.pointer(e.off), uintptr(e.n)); err != nil {
			for _, done := range parts[:i] {
				if done.kind == reserved {
					err = errors.Join(err, decommitPages(r.pointer(done.off), uintptr(done.n)))
				}
			}
			return err
		}
	}
	r.table.set(extent{off: off, n: n, kind: committed})
	return nil
}

// Decommit gives the memory of n bytes at off back to the system and makes
// them inaccessible. Parts that are not committed stay as they are. The range
// must hold no mapped pages. If Decommit fails nothing has changed.
func (r *Region) Decommit(off, n int64) error {
	return rangeError("decommit", off, n, r.decommit(off, n))
}

func (r *Region) decommit(off, n int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.check(off, n, pageSize); err != nil || n == 0 {
		return err
	}
	found := false
	for _, e := range r.table.overlapping(off, n) {
		if e.kind == mapped {
			return ErrMapped
		}
		found = found || e.kind == committed
	}
	if !found {
		return nil
	}
	if err := decommitPages(r.pointer(off), uintptr(n)); err != nil {
		return err
	}
	r.table.set(extent{off: off, n: n})
	return nil
}

// Bytes returns n bytes at off, which must be committed or mapped, all of
// them. They need no alignment. The slice is a view, good until its bytes are
// decommitted, unmapped or released.
func (r *Region) Bytes(off, n int64) ([]byte, error) {
	b, err := r.view(off, n)
	if err != nil {
		return nil, rangeError("view", off, n, err)
	}
	return b, nil
}

// At is Bytes for an address instead of an offset.
func (r *Region) At(addr uint64, n int64) ([]byte, error) {
	off := int64(-1) // out of range, unless
	if d := addr - uint64(r.Base()); d <= uint64(r.size) {
		off = int64(d)
	}
	b, err := r.view(off, n)
	if err != nil {
		return nil, fmt.Errorf("vmem: view %d bytes at address %#x of region %v: %w", n, addr, r, err)
	}
	return b, nil
}

func (r *Region) view(off, n int64) ([]byte, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if err := r.check(off, n, 1); err != nil {
		return nil, err
	}
	if n == 0 {
		return []byte{}, nil
	}
	if !r.table.covered(off, n) {
		return nil, ErrNotCommitted
	}
	return unsafe.Slice((*byte)(r.pointer(off)), n), nil
}

// Contains reports whether addr is an address of the region, whatever its
// state. A released region has none.
func (r *Region) Contains(addr uint64) bool {
	if addr-uint64(r.Base()) >= uint64(r.size) {
		return false
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	return !r.released
}

// RegionStats says how the address space of a region is used.
type RegionStats struct {
	Committed int64 // bytes committed, touched or not
	Mapped    int64 // bytes of mapped pages
	Extents   int   // runs of these: about one kernel mapping each
}

// Stats returns how the address space is used. It walks over all extents. Of
// a released region it is zero.
func (r *Region) Stats() RegionStats {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var s RegionStats
	r.table.tree.Ascend(func(e extent) bool {
		s.Extents++
		if e.kind == mapped {
			s.Mapped += e.n
		} else {
			s.Committed += e.n
		}
		return true
	})
	return s
}

// Release gives everything back: the committed memory, the mappings of pages
// (their handles stay good), and the address space. Every later call returns
// [ErrReleased], except Release itself, which does nothing. If the system
// refuses, the region stays as it was and Release may be called again.
func (r *Region) Release() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.released {
		return nil
	}
	if err := releaseSpace(r.base, uintptr(r.size)); err != nil {
		return fmt.Errorf("vmem: release region %v: %w", r, err)
	}
	r.released = true
	var err error
	r.table.tree.Ascend(func(e extent) bool {
		if e.kind == mapped {
			err = errors.Join(err, e.pages.unpin(e))
		}
		return true
	})
	r.table.tree.Clear(false)
	if err != nil {
		return fmt.Errorf("vmem: region %v is released: %w", r, err)
	}
	return nil
}
