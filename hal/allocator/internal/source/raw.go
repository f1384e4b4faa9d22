package source

import (
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Raw is the driver's plain way to get memory: one call an allocation.
type Raw struct {
	Source *Source
	Driver driver.Raw
}

// Take implements [Memory].
func (m Raw) Take(heap int, size, align memory.Bytes) (uint64, memory.Bytes, queue.Frontier, error) {
	addr, taken, err := m.Driver.Alloc(heap, size, align)
	if err != nil {
		return 0, 0, queue.Frontier{}, err
	}
	Count(m.Source, func(st *allocator.Stats) {
		st.SourceAllocs++
		st.Held += taken
	})
	return addr, taken, queue.ReadyNow(), nil
}

// Give implements [Memory].
func (m Raw) Give(heap int, addr uint64, granted memory.Bytes) error {
	if err := m.Driver.Free(heap, addr); err != nil {
		return err
	}
	Count(m.Source, func(st *allocator.Stats) {
		st.SourceFrees++
		st.Held -= granted
	})
	return nil
}

// Forget implements [Memory].
func (m Raw) Forget(_ int, _ uint64, granted memory.Bytes) {
	Count(m.Source, func(st *allocator.Stats) { st.Held -= granted })
}
