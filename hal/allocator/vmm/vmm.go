// Package vmm is the source whose memory comes in pages that are mapped at
// addresses reserved before: cuMemAddressReserve, cuMemCreate and cuMemMap, say.
//
//	--device_allocator=vmm
//
// It is made for a layer that lays its one contiguous range out of pages (block):
// that one asks for [allocator.VirtualMemory]. Used alone, each allocation is a
// reservation of its own with whole pages mapped: granted is the size rounded up
// to pages. A heap without pages is served with plain allocations, as raw does.
//
// # Figures
//
// One count a driver call that did its work: SourceAllocs and Created are calls
// that create a page, SourceFrees and Released those that release one, Maps and
// Unmaps those that map or unmap a run, of whatever length. (Plain allocations of
// heaps without pages count in SourceAllocs and SourceFrees too.) Reservations of
// addresses take no memory and aren't counted. Held is created pages, mapped or
// not. Live is what Allocate and Grow have handed out; a page that the driver
// refused to take back is Idle, and is offered again by later calls.
package vmm

import (
	"errors"
	"fmt"
	"sync"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/internal/source"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// Source takes memory in pages. Safe for concurrent use.
type Source struct {
	source.Source
	mem paged
}

var (
	_ allocator.Allocator     = (*Source)(nil)
	_ allocator.VirtualMemory = (*Source)(nil)
)

// Layer describes the source to a registry.
var Layer = allocator.Layer{
	Table: &spec.Table{
		Name:    "vmm",
		Summary: "pages of memory, mapped at reserved addresses",
		Doc:     "Best under block, which then has one contiguous range and can move pages. Alone, each allocation is rounded up to whole pages. A heap without pages is served as by raw.",
	},
	Source: true,
	Mints:  true,
	New: func(base allocator.Allocator, env *allocator.Env, _ *spec.Values) (allocator.Allocator, error) {
		return open(base, env)
	},
}

// New makes the source. The environment's device must be a [driver.Virtual] with
// pages on at least one heap, and a [driver.Raw].
func New(env *allocator.Env) (*Source, error) { return open(nil, env) }

// device is what the source needs.
type device interface {
	driver.Raw
	driver.Virtual
}

func open(base allocator.Allocator, env *allocator.Env) (*Source, error) {
	d, err := source.Device[device](base, env, "vmm")
	if err != nil {
		return nil, err
	}
	s := &Source{}
	s.mem.raw = source.Raw{Source: &s.Source, Driver: d}
	found := false
	for heap := range min(len(env.Heaps), allocator.MaxHeaps) {
		if g := d.Granularity(heap); g > 0 {
			found = true
			s.mem.heaps[heap] = &virtual{
				source: &s.Source, driver: d, room: env.Device.MemInfo, heap: heap, page: g, capacity: env.Heaps[heap].Capacity,
				pages: map[uint64]driver.Page{}, homes: map[uint64]home{},
			}
		}
	}
	if !found {
		return nil, fmt.Errorf("no heap of device %s has pages: %w", env.Device.Info().Name, driver.ErrUnsupported)
	}
	source.Init(&s.Source, env, &s.mem)
	return s, nil
}

// Virtual implements [allocator.VirtualMemory].
func (s *Source) Virtual(heap int) allocator.Virtual {
	if heap < 0 || heap >= len(s.mem.heaps) || s.mem.heaps[heap] == nil {
		return nil
	}
	return s.mem.heaps[heap]
}

// Trim implements [allocator.Allocator].
func (s *Source) Trim(keep memory.Bytes) memory.Bytes {
	total := s.Source.Trim(keep)
	for _, v := range s.mem.heaps {
		if v != nil {
			total += v.settle()
		}
	}
	return total
}

// Close implements [allocator.Allocator].
func (s *Source) Close() error {
	s.Trim(0)
	errs := []error{s.Source.Close()}
	for heap, v := range s.mem.heaps {
		if v == nil {
			continue
		}
		if n := v.owing(); n > 0 {
			errs = append(errs, fmt.Errorf("the driver refuses to take back %d pages, mappings or reservations of heap %d: %w", n, heap, s.LastError()))
		}
	}
	return errors.Join(errs...)
}

// paged is the pages as [source.Memory].
type paged struct {
	raw   source.Raw
	heaps [allocator.MaxHeaps]*virtual // nil: no pages
}

// Take implements [source.Memory].
func (m *paged) Take(heap int, size, align memory.Bytes) (uint64, memory.Bytes, queue.Frontier, error) {
	v := m.heaps[heap]
	if v == nil {
		return m.raw.Take(heap, size, align)
	}
	addr, granted, err := v.take(size, align)
	return addr, granted, queue.ReadyNow(), err
}

// Give implements [source.Memory].
func (m *paged) Give(heap int, addr uint64, granted memory.Bytes) error {
	v := m.heaps[heap]
	if v == nil {
		return m.raw.Give(heap, addr, granted)
	}
	return v.give(addr, granted)
}

// Forget implements [source.Memory].
func (m *paged) Forget(heap int, addr uint64, granted memory.Bytes) {
	v := m.heaps[heap]
	if v == nil {
		m.raw.Forget(heap, addr, granted)
		return
	}
	v.forget(addr, int(granted/v.page))
	v.mu.Lock()
	delete(v.homes, addr)
	v.mu.Unlock()
}

// virtual is the pages and addresses of one heap: [allocator.Virtual], counted.
type virtual struct {
	source   *source.Source
	driver   driver.Virtual
	room     func(heap int) (free, total memory.Bytes, err error)
	heap     int
	page     memory.Bytes
	capacity memory.Bytes

	mu    sync.Mutex // leaf; guards what follows
	pages map[uint64]driver.Page
	homes map[uint64]home // of allocations, by their address
	owed  []debt
}

// home is the reservation that an allocation lies in.
type home struct {
	addr uint64
	size memory.Bytes
}

// debt is something that the driver refused to take back.
type debt struct {
	idle memory.Bytes // of Stats.Idle
	pay  func() error
}

// Granularity implements [allocator.Virtual].
func (v *virtual) Granularity() memory.Bytes { return v.page }

// Reserve implements [allocator.Virtual].
func (v *virtual) Reserve(size memory.Bytes) (uint64, allocator.Outcome) {
	v.settle()
	addr, err := v.driver.Reserve(v.heap, size)
	return addr, v.outcome(err)
}

// Unreserve implements [allocator.Virtual]. If the driver refuses, it is asked again
// later.
func (v *virtual) Unreserve(addr uint64, size memory.Bytes) {
	v.must(0, func() error { return v.driver.Unreserve(v.heap, addr, size) })
}

// Grow implements [allocator.Virtual]. Pages that were taken before one failed go
// back.
func (v *virtual) Grow(addr uint64, n int) allocator.Outcome {
	source.Drain(v.source)
	if err := v.grow(addr, n); err != nil {
		return v.outcome(err)
	}
	source.Count(v.source, func(st *allocator.Stats) { st.Live += v.bytes(n) })
	return allocator.OK
}

// Shrink implements [allocator.Virtual]. After the loss of the device it only
// counts, and is OK.
func (v *virtual) Shrink(addr uint64, n int) allocator.Outcome {
	if err := v.shrink(addr, n); err != nil {
		if o := v.outcome(err); o != allocator.Lost {
			return o
		}
		v.forget(addr, n)
	}
	source.Count(v.source, func(st *allocator.Stats) { st.Live -= v.bytes(n) })
	return allocator.OK
}

// Move implements [allocator.Virtual]. The ranges must not overlap. The pages are
// mapped at the new addresses before they leave the old ones: then nothing is left
// to fail that can't be undone.
func (v *virtual) Move(from, to uint64, n int) allocator.Outcome {
	v.settle()
	list, err := v.at(from, n)
	if err != nil {
		return v.outcome(err)
	}
	if err := v.mapRun(to, list); err != nil {
		return v.outcome(err)
	}
	if err := v.unmapRun(from, n); err != nil {
		v.must(0, func() error { return v.unmapRun(to, n) })
		return v.outcome(err)
	}
	v.forgetPages(from, n)
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, p := range list {
		v.pages[v.addr(to, i)] = p
	}
	return allocator.OK
}

func (v *virtual) bytes(n int) memory.Bytes       { return memory.Bytes(n) * v.page }
func (v *virtual) addr(base uint64, i int) uint64 { return base + uint64(i)*uint64(v.page) }

// outcome is OK, Exhausted or Lost, as the contract of allocator.Virtual says.
func (v *virtual) outcome(err error) allocator.Outcome {
	if err == nil {
		return allocator.OK
	}
	if source.Note(v.source, err) == allocator.Lost {
		return allocator.Lost
	}
	return allocator.Exhausted
}

// take reserves addresses of their own for an allocation and fills them with pages.
func (v *virtual) take(size, align memory.Bytes) (uint64, memory.Bytes, error) {
	granted, ok := memory.AlignUp(size, v.page)
	slack := max(0, align-v.page)
	if !ok || granted > memory.MaxBytes-slack {
		return 0, 0, source.ErrTooLarge
	}
	if v.capacity > 0 && granted > v.capacity {
		return 0, 0, fmt.Errorf("%w: %v in pages of %v are more than the %v of the heap", driver.ErrOutOfMemory, granted, v.page, v.capacity)
	}
	v.settle()
	h := home{size: granted + slack}
	var err error
	if h.addr, err = v.driver.Reserve(v.heap, h.size); err != nil {
		return 0, 0, err
	}
	addr := (h.addr + uint64(slack)) &^ uint64(max(align, v.page)-1)
	if err := v.grow(addr, int(granted/v.page)); err != nil {
		v.Unreserve(h.addr, h.size)
		return 0, 0, err
	}
	v.mu.Lock()
	v.homes[addr] = h
	v.mu.Unlock()
	return addr, granted, nil
}

func (v *virtual) give(addr uint64, granted memory.Bytes) error {
	if err := v.shrink(addr, int(granted/v.page)); err != nil {
		return err
	}
	v.mu.Lock()
	h := v.homes[addr]
	delete(v.homes, addr)
	v.mu.Unlock()
	v.Unreserve(h.addr, h.size)
	return nil
}

// grow creates n pages and maps them at addr, or leaves all as it was.
func (v *virtual) grow(addr uint64, n int) error {
	if n <= 0 {
		return fmt.Errorf("%d pages can't be mapped", n)
	}
	v.settle()
	// What is not there needn't be found out page by page, and a report that is made
	// when this fails should see the heap as it is.
	if free, total, err := v.room(v.heap); err == nil && n > 1 && free < v.bytes(n) {
		return fmt.Errorf("%w: %d pages of %v wanted, %v free of %v", driver.ErrOutOfMemory, n, v.page, free, total)
	}
	list := make([]driver.Page, 0, min(n, 1<<16))
	for len(list) < n {
		p, err := v.driver.Create(v.heap)
		if err != nil {
			v.release(list)
			return err
		}
		source.Count(v.source, func(st *allocator.Stats) {
			st.SourceAllocs++
			st.Created++
			st.Held += v.page
		})
		list = append(list, p)
	}
	if err := v.mapRun(addr, list); err != nil {
		v.release(list)
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, p := range list {
		v.pages[v.addr(addr, i)] = p
	}
	return nil
}

func (v *virtual) shrink(addr uint64, n int) error {
	list, err := v.at(addr, n)
	if err != nil {
		return err
	}
	if err := v.unmapRun(addr, n); err != nil {
		return err
	}
	v.forgetPages(addr, n)
	v.release(list)
	return nil
}

// at returns the n pages that are mapped from addr on.
func (v *virtual) at(addr uint64, n int) ([]driver.Page, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if n <= 0 || n > len(v.pages) {
		return nil, fmt.Errorf("%d pages aren't mapped at %#x", n, addr)
	}
	list := make([]driver.Page, n)
	for i := range list {
		p, ok := v.pages[v.addr(addr, i)]
		if !ok {
			return nil, fmt.Errorf("no page is mapped at %#x", v.addr(addr, i))
		}
		list[i] = p
	}
	return list, nil
}

func (v *virtual) mapRun(addr uint64, list []driver.Page) error {
	if err := v.driver.Map(v.heap, addr, list); err != nil {
		return err
	}
	source.Count(v.source, func(st *allocator.Stats) { st.Maps++ })
	return nil
}

func (v *virtual) unmapRun(addr uint64, n int) error {
	if err := v.driver.Unmap(v.heap, addr, n); err != nil {
		return err
	}
	source.Count(v.source, func(st *allocator.Stats) { st.Unmaps++ })
	return nil
}

// release gives pages back that are mapped nowhere.
func (v *virtual) release(list []driver.Page) {
	for _, p := range list {
		v.must(v.page, func() error {
			if err := v.driver.Release(v.heap, p); err != nil {
				return err
			}
			source.Count(v.source, func(st *allocator.Stats) {
				st.SourceFrees++
				st.Released++
				st.Held -= v.page
			})
			return nil
		})
	}
}

// forget drops n pages at addr after the loss of the device.
func (v *virtual) forget(addr uint64, n int) {
	v.forgetPages(addr, n)
	source.Count(v.source, func(st *allocator.Stats) { st.Held -= v.bytes(n) })
}

func (v *virtual) forgetPages(addr uint64, n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i := range n {
		delete(v.pages, v.addr(addr, i))
	}
}

// must calls pay, and owes it if the driver refuses; idle is the memory that stays
// held for it. After the loss of the device nothing is owed. It reports whether all
// is paid.
func (v *virtual) must(idle memory.Bytes, pay func() error) bool {
	err := pay()
	switch {
	case err == nil:
	case v.outcome(err) == allocator.Lost:
		source.Count(v.source, func(st *allocator.Stats) { st.Held -= idle })
	default:
		source.Count(v.source, func(st *allocator.Stats) { st.Idle += idle })
		v.mu.Lock()
		v.owed = append(v.owed, debt{idle, pay})
		v.mu.Unlock()
		return false
	}
	return true
}

// settle tries once more what the driver refused, and returns the memory it took.
func (v *virtual) settle() (paid memory.Bytes) {
	v.mu.Lock()
	list := v.owed
	v.owed = nil
	v.mu.Unlock()
	for _, x := range list {
		source.Count(v.source, func(st *allocator.Stats) { st.Idle -= x.idle })
		if v.must(x.idle, x.pay) {
			paid += x.idle
		}
	}
	return paid
}

// owing is how many debts there are.
func (v *virtual) owing() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.owed)
}
