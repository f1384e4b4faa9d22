package host

import (
	"errors"
	"fmt"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/internal/vmem"
)

// pages are a heap's pages that can move, guarded by the heap's lock. The zero
// value has none.
type pages struct {
	store *vmem.Pages
	byID  map[driver.Page]vmem.Handle
	last  driver.Page
}

func (p *pages) size() memory.Bytes {
	if p.store == nil {
		return 0
	}
	return memory.Bytes(p.store.Granularity())
}

// taken counts pages that were created and not released, and those that were
// released and are still mapped.
func (p *pages) taken() memory.Bytes {
	if p.store == nil {
		return 0
	}
	s := p.store.Stats()
	return memory.Bytes(s.Live+s.Lingering) * p.size()
}

func (p *pages) live() int {
	if p.store == nil {
		return 0
	}
	s := p.store.Stats()
	return s.Live + s.Lingering
}

func (p *pages) close() error {
	if p.store == nil {
		return nil
	}
	return p.store.Close()
}

// pageHeap returns heap i, which must have pages.
func (d *Device) pageHeap(i int) (*heap, error) {
	h, err := d.heap(i)
	if err != nil {
		return nil, err
	}
	if h.pages.store == nil {
		return nil, fmt.Errorf("host: pages of heap %s: %w", h.name, driver.ErrUnsupported)
	}
	return h, nil
}

// Granularity implements [driver.Pages].
func (d *Device) Granularity(heap int) memory.Bytes {
	if heap < 0 || heap >= len(d.heaps) {
		return 0
	}
	return d.heaps[heap].pages.size()
}

// Create implements [driver.Pages]. A page is zero when it is created.
func (d *Device) Create(heap int) (driver.Page, error) {
	h, err := d.pageHeap(heap)
	if err != nil {
		return 0, err
	}
	spend(d.config.AllocCost)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return 0, ErrClosed
	}
	if h.pages.size() > h.freeLocked() {
		return 0, h.fullLocked("page of " + h.pages.size().String())
	}
	v, err := h.pages.store.Create()
	if err != nil {
		return 0, fmt.Errorf("host: %w: %w", driver.ErrOutOfMemory, err)
	}
	h.pages.last++
	h.pages.byID[h.pages.last] = v
	return h.pages.last, nil
}

// Release implements [driver.Pages].
func (d *Device) Release(heap int, p driver.Page) error {
	h, err := d.pageHeap(heap)
	if err != nil {
		return err
	}
	spend(d.config.FreeCost)
	h.mu.Lock()
	defer h.mu.Unlock()
	v, err := h.pages.find(p)
	if err != nil {
		return err
	}
	if err := h.pages.store.Free(v); err != nil {
		return fmt.Errorf("host: release of page %d: %w", p, err)
	}
	delete(h.pages.byID, p)
	return nil
}

func (p *pages) find(id driver.Page) (vmem.Handle, error) {
	v, ok := p.byID[id]
	switch {
	case ok:
		return v, nil
	case id == 0 || id > p.last:
		return v, fmt.Errorf("%w: page %d was never created", ErrBadAddress, id)
	}
	return v, fmt.Errorf("%w: page %d was released before", ErrBadAddress, id)
}

// Reserve implements [driver.Addresses]. The address is a multiple of the
// granularity.
func (d *Device) Reserve(heap int, size memory.Bytes) (uint64, error) {
	h, err := d.pageHeap(heap)
	if err != nil {
		return 0, err
	}
	g := h.pages.size()
	if size <= 0 || size%g != 0 {
		return 0, fmt.Errorf("host: reservation of %v: not a positive multiple of %v", size, g)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return 0, ErrClosed
	}
	s := &span{kind: kindReserved}
	if s.hole, err = h.space.take(size, g); err != nil {
		return 0, fmt.Errorf("host: reservation of %v: %w: %w", size, driver.ErrOutOfMemory, err)
	}
	h.addLocked(s)
	return s.addr, nil
}

// Unreserve implements [driver.Addresses].
func (d *Device) Unreserve(heap int, addr uint64, size memory.Bytes) error {
	h, err := d.pageHeap(heap)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	s, err := h.findLocked(kindReserved, addr, "unreserve")
	switch {
	case err != nil:
		return err
	case s.size != size:
		return fmt.Errorf("%w: unreserve of %v at %#x: the reservation has %v", ErrBadAddress, size, addr, s.size)
	case s.mapped > 0:
		return fmt.Errorf("host: unreserve of %#x: %d pages are mapped in it", addr, s.mapped)
	}
	h.used.Delete(s)
	h.dropLocked(s)
	return nil
}

// reservationLocked returns the reservation that n pages at addr lie in.
func (h *heap) reservationLocked(addr uint64, n int) (*span, error) {
	if h.closed {
		return nil, ErrClosed
	}
	var s *span
	h.used.DescendLessOrEqual(&span{hole: hole{addr: addr}}, func(x *span) bool { s = x; return false })
	g := h.pages.size()
	switch {
	case s == nil || s.kind != kindReserved || addr-s.addr >= uint64(s.size):
		return nil, fmt.Errorf("%w: %#x isn't reserved", ErrBadAddress, addr)
	case addr%uint64(g) != 0:
		return nil, fmt.Errorf("host: address %#x isn't a multiple of %v", addr, g)
	case n <= 0 || uint64(n) > (s.end()-addr)/uint64(g):
		return nil, fmt.Errorf("host: %d pages at %#x don't lie in the reservation [%#x, %#x)", n, addr, s.addr, s.end())
	}
	return s, nil
}

// Map implements [driver.Addresses].
func (d *Device) Map(heap int, addr uint64, list []driver.Page) error {
	h, err := d.pageHeap(heap)
	if err != nil {
		return err
	}
	spend(d.config.AllocCost)
	handles := make([]vmem.Handle, len(list))
	s, err := func() (*span, error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		s, err := h.reservationLocked(addr, len(list))
		if err != nil {
			return nil, err
		}
		for i, p := range list {
			if handles[i], err = h.pages.find(p); err != nil {
				return nil, err
			}
		}
		s.mapped += len(list) // from here on it can't be unreserved
		return s, nil
	}()
	if err != nil {
		return fmt.Errorf("host: map: %w", err)
	}
	if err := h.pages.store.MapRun(s.region, int64(addr-uint64(s.region.Base())), handles); err != nil {
		h.mu.Lock()
		s.mapped -= len(list)
		h.mu.Unlock()
		if errors.Is(err, vmem.ErrTooManyMappings) {
			err = fmt.Errorf("%w: %w", driver.ErrOutOfMemory, err)
		}
		return fmt.Errorf("host: map: %w", err)
	}
	return nil
}

// Unmap implements [driver.Addresses].
func (d *Device) Unmap(heap int, addr uint64, n int) error {
	h, err := d.pageHeap(heap)
	if err != nil {
		return err
	}
	spend(d.config.FreeCost)
	h.mu.Lock()
	s, err := h.reservationLocked(addr, n)
	h.mu.Unlock()
	if err != nil {
		return fmt.Errorf("host: unmap: %w", err)
	}
	size := int64(n) * h.pages.store.Granularity()
	if err := h.pages.store.Unmap(s.region, int64(addr-uint64(s.region.Base())), size); err != nil {
		return fmt.Errorf("host: unmap: %w", err)
	}
	h.mu.Lock()
	s.mapped -= n
	h.mu.Unlock()
	return nil
}
