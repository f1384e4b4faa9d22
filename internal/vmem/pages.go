package vmem

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
)

// Pages is memory in pages of one size that has no address until it is mapped
// into a [Region]. The zero Pages is not usable; see [NewPages].
//
// A page goes through these states:
//
//	       Create           Free, mapped somewhere
//	void ----------> live ------------------------> lingering
//	  ^                |                                |
//	  +----------------+                                |
//	  |  Free, mapped nowhere                           |
//	  +-------------------------------------------------+
//	                 last mapping goes
//
// Memory is given back to the system on the way to void. A lingering page has
// lost its handle: it cannot be mapped again.
type Pages struct {
	granularity int64  // immutable
	count       int64  // immutable: capacity in pages
	id          uint32 // immutable: the owner in the handles

	mu sync.Mutex
	// store is the memory. It stays open as long as a page is mapped.
	// +checklocks:mu
	store store
	// +checklocks:mu
	closed bool
	// slots has the pages up to the highest ever created.
	// +checklocks:mu
	slots []slot
	// void has the indexes of the void pages among slots.
	// +checklocks:mu
	void minHeap
	// serial numbers the calls of Create.
	// +checklocks:mu
	serial uint64
	// stats is kept up to date with slots.
	// +checklocks:mu
	stats PagesStats
}

// A store is the system's side of a Pages.
type store interface {
	// mapAt maps n bytes of the store from from on at the reserved place p of
	// r. When it fails the place stays reserved.
	mapAt(r *Region, off, n, from int64) error
	// punch gives n bytes at off back: they read as zero when next mapped.
	punch(off, n int64) error
	close() error
}

type pageState uint8

const (
	pageVoid pageState = iota
	pageLive
	pageLingering
)

type slot struct {
	serial uint64 // of the last handle
	maps   int32  // places where the page is mapped
	state  pageState
}

// A Handle names a page of a [Pages], from Create to Free. Handles are
// comparable and are never used again. The zero Handle names nothing.
type Handle struct {
	serial uint64
	index  uint32
	owner  uint32
}

// String returns the numbers of the Pages, of the page and of its creation.
func (h Handle) String() string {
	if h == (Handle{}) {
		return "no page"
	}
	return fmt.Sprintf("page %d.%d#%d", h.owner, h.index, h.serial)
}

var lastPagesID atomic.Uint32

// NewPages returns pages of granularity bytes, as many as are in capacity
// bytes. granularity must be a multiple of [PageSize] and capacity one of
// granularity. No memory is used until pages are touched.
//
// The memory is an unnamed file in memory (memfd_create), which uses one file
// descriptor. Only Linux has that: elsewhere the error matches
// [errors.ErrUnsupported].
func NewPages(capacity, granularity int64) (*Pages, error) {
	fail := func(err error) (*Pages, error) {
		return nil, fmt.Errorf("vmem: new pages of %d bytes, %d bytes in all: %w", granularity, capacity, err)
	}
	switch {
	case granularity <= 0 || capacity <= 0:
		return fail(ErrRange)
	case granularity%pageSize != 0:
		return fail(fmt.Errorf("%w (%d)", ErrMisaligned, pageSize))
	case capacity%granularity != 0:
		return fail(fmt.Errorf("%w (%d)", ErrMisaligned, granularity))
	case capacity/granularity > math.MaxUint32:
		return fail(fmt.Errorf("%w (more than 2^32 pages)", ErrRange))
	}
	s, err := newStore(capacity)
	if err != nil {
		return fail(err)
	}
	return &Pages{
		granularity: granularity,
		count:       capacity / granularity,
		id:          lastPagesID.Add(1),
		store:       s,
	}, nil
}

// Granularity returns the size of a page.
func (p *Pages) Granularity() int64 { return p.granularity }

// Capacity returns the size of all pages together.
func (p *Pages) Capacity() int64 { return p.count * p.granularity }

// PagesStats says how the capacity of a [Pages] is used.
type PagesStats struct {
	Live      int // pages created and not freed
	Lingering int // pages freed and still mapped
	Mappings  int // places where a page is mapped
}

// Stats returns how the capacity is used.
func (p *Pages) Stats() PagesStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stats
}

// Create hands out the lowest page that is free. It is zero. When there is
// none the error matches [ErrExhausted].
func (p *Pages) Create() (Handle, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return Handle{}, fmt.Errorf("vmem: create a page: %w", ErrClosed)
	}
	index, ok := p.void.pop()
	if !ok {
		if int64(len(p.slots)) == p.count {
			return Handle{}, fmt.Errorf("vmem: create a page: %w (%d bytes, %d pages of which %d are freed but still mapped)",
				ErrExhausted, p.Capacity(), p.count, p.stats.Lingering)
		}
		index = uint32(len(p.slots))
		p.slots = append(p.slots, slot{})
	}
	p.serial++
	p.slots[index] = slot{serial: p.serial, state: pageLive}
	p.stats.Live++
	return Handle{serial: p.serial, index: index, owner: p.id}, nil
}

// Free ends the use of a handle. The memory is given back at once when the page
// is mapped nowhere, else when its last mapping goes: until then the mappings
// stay good. A second Free returns an error that matches [ErrDoubleFree].
func (p *Pages) Free(h Handle) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return fmt.Errorf("vmem: free %v: %w", h, ErrClosed)
	}
	s, err := p.findLocked(h, ErrDoubleFree)
	if err != nil {
		return fmt.Errorf("vmem: free %v: %w", h, err)
	}
	if err := p.freeLocked(h.index, s); err != nil {
		return fmt.Errorf("vmem: free %v: %w", h, err)
	}
	return nil
}

// findLocked returns the slot of a live page, or gone when the page is not live
// any more.
//
// +checklocks:p.mu
func (p *Pages) findLocked(h Handle, gone error) (*slot, error) {
	if h.owner != p.id || int64(h.index) >= int64(len(p.slots)) {
		return nil, ErrForeignHandle
	}
	s := &p.slots[h.index]
	if s.serial != h.serial || s.state != pageLive {
		return nil, gone
	}
	return s, nil
}

// freeLocked takes a live page to its next state. If it fails the page is live
// still.
//
// +checklocks:p.mu
func (p *Pages) freeLocked(index uint32, s *slot) error {
	if s.maps > 0 {
		s.state = pageLingering
		p.stats.Live--
		p.stats.Lingering++
		return nil
	}
	if err := p.voidLocked(index, s); err != nil {
		return err
	}
	p.stats.Live--
	return nil
}

// voidLocked gives the memory of a page back. If it fails the page is as it
// was: it must not be handed out with old contents.
//
// +checklocks:p.mu
func (p *Pages) voidLocked(index uint32, s *slot) error {
	if err := p.store.punch(int64(index)*p.granularity, p.granularity); err != nil {
		return err
	}
	s.state = pageVoid
	p.void.push(index)
	return nil
}

// pin counts one more mapping of each page, for all handles or for none.
func (p *Pages) pin(handles []Handle) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	for _, h := range handles {
		if _, err := p.findLocked(h, ErrFreedHandle); err != nil {
			return fmt.Errorf("%v: %w", h, err)
		}
	}
	for _, h := range handles {
		p.slots[h.index].maps++
	}
	p.stats.Mappings += len(handles)
	return nil
}

// unpin counts one mapping less of each page of e, and gives back what has
// lingered for that. An error says that memory could not be given back: the
// pages are out of use until Close.
func (p *Pages) unpin(e extent) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var err error
	for i := range uint32(e.n / p.granularity) {
		index := e.index + i
		s := &p.slots[index]
		s.maps--
		p.stats.Mappings--
		if s.maps > 0 || s.state != pageLingering {
			continue
		}
		if e := p.voidLocked(index, s); e != nil {
			err = errors.Join(err, e)
			continue
		}
		p.stats.Lingering--
	}
	return errors.Join(err, p.finishLocked())
}

// finishLocked closes the store after Close, once no page is mapped.
//
// +checklocks:p.mu
func (p *Pages) finishLocked() error {
	if !p.closed || p.stats.Mappings > 0 || p.store == nil {
		return nil
	}
	err := p.store.close()
	p.store, p.slots, p.void, p.stats = nil, nil, nil, PagesStats{}
	return err
}

// Map makes the page appear at off in r, where nothing may be committed or
// mapped. The same page may be mapped in many places, in several regions too:
// all see the same bytes. off must be a multiple of [PageSize]. If Map fails
// nothing has changed.
func (p *Pages) Map(r *Region, off int64, h Handle) error {
	return p.MapRun(r, off, []Handle{h})
}

// MapRun maps the pages one after the other from off on, as Map does, all or
// none. Handles of neighbouring pages, as they come from consecutive calls of
// Create, are mapped by one system call and make one mapping of the kernel.
func (p *Pages) MapRun(r *Region, off int64, handles []Handle) error {
	n := int64(math.MaxInt64) // out of range, unless
	if int64(len(handles)) <= math.MaxInt64/p.granularity {
		n = int64(len(handles)) * p.granularity
	}
	return rangeError("map", off, n, p.mapRun(r, off, n, handles))
}

func (p *Pages) mapRun(r *Region, off, n int64, handles []Handle) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.check(off, n, pageSize); err != nil || n == 0 {
		return err
	}
	for _, e := range r.table.overlapping(off, n) {
		switch e.kind {
		case mapped:
			return ErrMapped
		case committed:
			return ErrCommitted
		}
	}
	if err := p.pin(handles); err != nil {
		return err
	}
	// From here on the store is open: its pages are mapped as it were.
	var runs []extent
	for i, h := range handles {
		e := extent{off: off + int64(i)*p.granularity, n: p.granularity, kind: mapped, index: h.index, pages: p}
		if last := len(runs) - 1; last >= 0 && e.follows(runs[last]) {
			runs[last].n += e.n
		} else {
			runs = append(runs, e)
		}
	}
	for i, e := range runs {
		err := p.storeOfPinned().mapAt(r, e.off, e.n, int64(e.index)*p.granularity)
		if err == nil {
			r.table.set(e)
			continue
		}
		for _, e := range runs[i:] {
			err = errors.Join(err, p.unpin(e))
		}
		if i > 0 {
			err = errors.Join(err, p.unmapLocked(r, off, e.off-off, runs[:i]))
		}
		return err
	}
	return nil
}

// storeOfPinned returns the store for a caller who has pinned a page, which
// keeps it open.
func (p *Pages) storeOfPinned() store {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.store
}

// Unmap takes the pages from n bytes at off in r: the place is reserved again,
// and the pages keep their contents. All of the range must be mapped from p,
// and it must not cut through a page. Unmap works after Close too. If it fails
// nothing has changed, unless the error says that memory was not given back.
func (p *Pages) Unmap(r *Region, off, n int64) error {
	return rangeError("unmap", off, n, p.unmap(r, off, n))
}

func (p *Pages) unmap(r *Region, off, n int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.check(off, n, pageSize); err != nil || n == 0 {
		return err
	}
	end := off + n
	parts := r.table.overlapping(off, n)
	for i, e := range parts {
		if e.kind != mapped || e.pages != p {
			return ErrNotMapped
		}
		first, last := max(off, e.off), min(end, e.end())
		if (first-e.off)%p.granularity != 0 || (last-e.off)%p.granularity != 0 {
			return fmt.Errorf("%w (it cuts through a page of %d bytes)", ErrMisaligned, p.granularity)
		}
		parts[i] = e.clip(first, last)
	}
	return p.unmapLocked(r, off, n, parts)
}

// unmapLocked unmaps the range, which consists of parts.
//
// +checklocks:r.mu
func (p *Pages) unmapLocked(r *Region, off, n int64, parts []extent) error {
	if err := decommitPages(r.pointer(off), uintptr(n)); err != nil {
		return err
	}
	r.table.set(extent{off: off, n: n})
	var err error
	for _, e := range parts {
		err = errors.Join(err, p.unpin(e))
	}
	return err
}

// Close frees all pages. Those that are mapped stay good until they are
// unmapped or their region is released; then the last of the memory goes. A
// second Close does nothing.
func (p *Pages) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	var err error
	if p.stats.Mappings > 0 {
		for i := range p.slots {
			if s := &p.slots[i]; s.state == pageLive {
				err = errors.Join(err, p.freeLocked(uint32(i), s))
			}
		}
	}
	if err := errors.Join(err, p.finishLocked()); err != nil {
		return fmt.Errorf("vmem: close pages: %w", err)
	}
	return nil
}

// A minHeap is a set of page indexes that gives the lowest first.
type minHeap []uint32

func (h *minHeap) push(x uint32) {
	s := append(*h, x)
	i := len(s) - 1
	for i > 0 && s[(i-1)/2] > x {
		s[i] = s[(i-1)/2]
		i = (i - 1) / 2
	}
	s[i] = x
	*h = s
}

func (h *minHeap) pop() (lowest uint32, ok bool) {
	s := *h
	if len(s) == 0 {
		return 0, false
	}
	lowest = s[0]
	n := len(s) - 1
	x := s[n] // takes the place of the lowest and sinks
	s = s[:n]
	i := 0
	for {
		c := 2*i + 1
		if c >= n {
			break
		}
		if c+1 < n && s[c+1] < s[c] {
			c++
		}
		if s[c] >= x {
			break
		}
		s[i] = s[c]
		i = c
	}
	if n > 0 {
		s[i] = x
	}
	*h = s
	return lowest, true
}
