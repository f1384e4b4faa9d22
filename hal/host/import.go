package host

import (
	"fmt"
	"slices"

	"github.com/halyard-go/halyard/hal/memory"
)

// Import implements [driver.Importer]: operations may use the memory in place, at
// the same address, as memory of the host heap. It counts against no capacity. The
// caller keeps it alive and where it is until Unimport: memory of the Go heap needs
// a reference to it. Memory that overlaps an import or the device's own is refused.
func (d *Device) Import(addr uintptr, size memory.Bytes) (uint64, int, error) {
	if err := d.check(); err != nil {
		return 0, 0, err
	}
	if addr == 0 || size <= 0 || uint64(addr)+uint64(size) < uint64(addr) {
		return 0, 0, fmt.Errorf("host: import of %v at %#x: not a range of addresses", size, addr)
	}
	if !d.addArea(area{base: uint64(addr), size: uint64(size), heap: hostHeap}) {
		return 0, 0, fmt.Errorf("host: import of %v at %#x: it overlaps memory that the device has already", size, addr)
	}
	return uint64(addr), hostHeap, nil
}

// Unimport implements [driver.Importer].
func (d *Device) Unimport(addr uint64, size memory.Bytes) error {
	if err := d.check(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	list := *d.spaces.Load()
	i := slices.IndexFunc(list, func(a area) bool { return a.region == nil && a.base == addr && a.size == uint64(size) })
	if i < 0 {
		return fmt.Errorf("%w: unimport of %v at %#x: not imported, or ended before", ErrBadAddress, size, addr)
	}
	list = slices.Delete(slices.Clone(list), i, i+1)
	d.spaces.Store(&list)
	return nil
}

// imported counts what is imported.
func (d *Device) imported() (n int, size memory.Bytes) {
	for _, a := range *d.spaces.Load() {
		if a.region == nil {
			n++
			size += memory.Bytes(a.size)
		}
	}
	return n, size
}
