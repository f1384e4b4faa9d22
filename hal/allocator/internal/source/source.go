// Package source has what the sources raw, pool and vmm share: they mint the
// blocks, keep what was freed and is still in use, give it back to the driver when
// its frontier is reached, and count.
//
// # State of a block's memory
//
//	       Take              Free, not reached            reached
//	driver ────► live ─────────────────────────► pending ────────► returning
//	  ▲            │                                ▲                 │  │
//	  │            └── Free, reached ───────────────┼────► returning  │  │
//	  │                                             └─────────────────┘  │
//	  └──── Give ───────────────────────────────────  the driver refused ┘
//
// Pending memory is looked through, oldest first, at the start of every Allocate,
// Free and Trim. Returning memory is in the hands of the goroutine that gives it
// back; it counts as pending until the driver has it.
//
// # Locks
//
// Source.mu is a leaf but for the leaves of hal/queue. No call of the driver and no
// log line is made under it.
package source

import (
	"errors"
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/mutant"
)

// Memory is one way to take memory from a driver. Its methods are called without a
// lock; they count what they do with [Count].
type Memory interface {
	// Take returns at least size bytes, how many they are, and the frontier after
	// which they may be touched. On an error nothing was taken.
	Take(heap int, size, align memory.Bytes) (addr uint64, granted memory.Bytes, ready queue.Frontier, err error)
	// Give gives back what Take returned; nothing touches it any more. On an error
	// nothing was given, and it will be asked again.
	Give(heap int, addr uint64, granted memory.Bytes) error
	// Forget is Give after the loss of the device: it calls no driver.
	Forget(heap int, addr uint64, granted memory.Bytes)
}

// ErrTooLarge is what Take returns for what no device of this kind could serve.
var ErrTooLarge = errors.New("size and alignment don't fit")

const (
	// glance is how many pending frees an ordinary call looks at. It bounds the cost
	// when a stalled queue has many; Trim, and a call that finds the driver full, look
	// at all.
	glance = 1024
	all    = int(^uint(0) >> 1)
	// batch is how many frees are taken off the list under one lock.
	batch = 64
	// maxTries bounds how often the driver is asked again because others gave
	// memory back meanwhile.
	maxTries = 16
)

// Source implements [allocator.Allocator] over a [Memory], for a source to embed.
type Source struct {
	env *allocator.Env
	mem Memory

	mu          sync.Mutex // guards all below
	slots       allocator.Slots[piece]
	stats       allocator.Stats
	first, last uint32                           // pending frees, oldest first, by slot
	returning   [allocator.MaxHeaps]memory.Bytes // being given back by somebody
	given       uint64                           // how often the driver has taken something back
	lost        bool
	err         error // of the latest call of the driver that failed
}

// piece is what is kept with a block. It has no pointers.
type piece struct {
	addr    uint64
	size    memory.Bytes
	next    uint32 // in the list of pending frees
	heap    uint8
	refused bool // by the driver, when it was given back
}

var (
	_ allocator.Allocator    = (*Source)(nil)
	_ allocator.Idler        = (*Source)(nil)
	_ allocator.LiveLister   = (*Source)(nil)
	_ allocator.PeakResetter = (*Source)(nil)
	_ allocator.LastErrorer  = (*Source)(nil)
)

// Init prepares s.
func Init(s *Source, env *allocator.Env, mem Memory) {
	s.env, s.mem = env, mem
	s.slots.Init(&s.mu, env.Owner, 0)
}

// Device returns the environment's device as a D, or an error that says that the
// source called name needs it.
func Device[D any](base allocator.Allocator, env *allocator.Env, name string) (D, error) {
	d, ok := env.Device.(D)
	switch {
	case base != nil:
		return d, fmt.Errorf("%s is a source: it takes memory from the driver and has no layer below", name)
	case env.Device == nil:
		return d, fmt.Errorf("%s needs a device", name)
	case !ok:
		info := env.Device.Info()
		return d, fmt.Errorf("device %s has no %s (it has %v): %w", info.Name, name, info.Sources, driver.ErrUnsupported)
	}
	return d, nil
}

// Count changes the figures. f is called under the lock and must only count.
func Count(s *Source, f func(st *allocator.Stats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.stats)
	s.stats.PeakLive = max(s.stats.PeakLive, s.stats.Live)
	s.stats.PeakHeld = max(s.stats.PeakHeld, s.stats.Held)
}

// Note remembers why the driver failed, and returns the outcome that it means.
func Note(s *Source, err error) allocator.Outcome {
	lost := errors.Is(err, queue.ErrLost)
	s.mu.Lock()
	s.err = err
	news := lost && !s.lost
	s.lost = s.lost || lost
	s.mu.Unlock()
	switch {
	case lost:
		if news {
			s.log().Error("device lost", zap.Error(err))
		}
		return allocator.Lost
	case errors.Is(err, driver.ErrOutOfMemory):
		return allocator.Exhausted
	case errors.Is(err, driver.ErrUnsupported):
		return allocator.Unsupported
	case errors.Is(err, ErrTooLarge):
		return allocator.TooLarge
	}
	s.log().Warn("the driver failed", zap.Error(err))
	return allocator.Exhausted
}

func (s *Source) log() *zap.Logger {
	if s.env.Log == nil {
		return zap.NewNop()
	}
	return s.env.Log
}

// LastError implements [allocator.LastErrorer]: the error of the latest call of the
// driver that failed, of whichever goroutine.
func (s *Source) LastError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Allocate implements [allocator.Allocator].
func (s *Source) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	if o := s.check(&r); o != allocator.OK {
		return s.refuse(0, o)
	}
	Drain(s)
	s.mu.Lock()
	lost := s.lost
	slot := s.slots.NewLocked()
	s.mu.Unlock()
	switch {
	case lost:
		return s.refuse(slot, allocator.Lost)
	case slot == 0:
		Note(s, errors.New("allocator: there can be no more blocks"))
		return s.refuse(0, allocator.Exhausted)
	}
	addr, granted, f, o := s.take(r.Kind.Heap(), r.Size, r.Kind.Align())
	if o != allocator.OK {
		b, _, _ := s.refuse(slot, o)
		return b, f, o
	}
	if f.Reached() { // fresh memory is nobody's: no ground for reuse is needed
		f = queue.ReadyNow()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slots.At(slot).Value = piece{addr: addr, size: granted, heap: uint8(r.Kind.Heap())}
	s.stats.Allocs++
	s.stats.Live += granted
	s.stats.PeakLive = max(s.stats.PeakLive, s.stats.Live)
	return s.slots.MintLocked(slot, addr, granted, &r, f), f, allocator.OK
}

// check refuses what no driver need be asked for.
func (s *Source) check(r *allocator.Request) allocator.Outcome {
	heap, align := r.Kind.Heap(), r.Kind.Align()
	if heap >= len(s.env.Heaps) {
		return allocator.Unsupported
	}
	if limit := s.env.Heaps[heap].MaxAllocation; limit > 0 && r.Size > limit {
		return allocator.TooLarge
	}
	if align <= 0 || r.Size > memory.MaxBytes-align {
		return allocator.TooLarge
	}
	return allocator.OK
}

func (s *Source) refuse(slot uint32, o allocator.Outcome) (allocator.Block, queue.Frontier, allocator.Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slot != 0 {
		s.slots.DropLocked(slot)
	}
	s.stats.Failed++
	return allocator.Block{}, queue.Frontier{}, o
}

// take asks the driver. When it is full, pending memory that has been reached goes
// back first, and the driver is asked again if anybody gave something back. With
// NeedsWait it returns the frontier of the oldest pending free of the heap.
func (s *Source) take(heap int, size, align memory.Bytes) (uint64, memory.Bytes, queue.Frontier, allocator.Outcome) {
	for try := 1; ; try++ {
		s.mu.Lock()
		mark := s.given
		s.mu.Unlock()
		addr, granted, ready, err := s.mem.Take(heap, size, align)
		if err == nil {
			return addr, granted, ready, allocator.OK
		}
		o := Note(s, err)
		if !errors.Is(err, driver.ErrOutOfMemory) {
			return 0, 0, queue.Frontier{}, o
		}
		s.drain(all)
		s.mu.Lock()
		again := s.given != mark && try < maxTries
		f, wait := s.oldestLocked(heap)
		s.mu.Unlock()
		switch {
		case again:
		case wait:
			return 0, 0, f, allocator.NeedsWait
		default:
			return 0, 0, queue.Frontier{}, o
		}
	}
}

// oldestLocked returns the frontier of the oldest pending free of heap. It is
// ReadyNow for what somebody is giving back at this moment.
func (s *Source) oldestLocked(heap int) (queue.Frontier, bool) {
	if s.returning[heap] > 0 {
		return queue.ReadyNow(), true
	}
	for i := s.first; i != 0; i = s.slots.At(i).Value.next {
		if p := &s.slots.At(i).Value; int(p.heap) == heap && !p.refused {
			return s.slots.ReadyLocked(i), true
		}
	}
	return queue.Frontier{}, false
}

// Free implements [allocator.Allocator].
func (s *Source) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	s.mu.Lock()
	slot, f, o := s.slots.TakeLocked(b, after)
	if o != allocator.OK {
		s.mu.Unlock()
		return o
	}
	p := &s.slots.At(slot).Value
	s.stats.Frees++
	s.stats.Live -= p.size
	s.stats.Pending += p.size
	var now [1]gift
	n := 0
	lost := s.lost
	if lost || f.Reached() || mutant.Is(mutant.UnmapOnOrdered) {
		now[0], n = s.returnLocked(slot), 1
	} else {
		s.appendLocked(slot)
	}
	s.mu.Unlock()
	s.give(now[:n], lost)
	Drain(s)
	return allocator.OK
}

// appendLocked puts slot at the end of the pending list.
func (s *Source) appendLocked(slot uint32) {
	s.slots.At(slot).Value.next = 0
	if s.last == 0 {
		s.first = slot
	} else {
		s.slots.At(s.last).Value.next = slot
	}
	s.last = slot
}

// gift is memory on its way back to the driver.
type gift struct {
	slot uint32
	heap int
	addr uint64
	size memory.Bytes
}

func (s *Source) returnLocked(slot uint32) gift {
	p := &s.slots.At(slot).Value
	s.returning[p.heap] += p.size
	return gift{slot, int(p.heap), p.addr, p.size}
}

// Drain gives back what is pending and reached.
func Drain(s *Source) { s.drain(glance) }

// drain looks at the oldest pending frees, limit of them, gives back what is
// reached, and returns how much that was.
func (s *Source) drain(limit int) (total memory.Bytes) {
	var buf [batch]gift
	for {
		n, lost := s.collect(&buf, limit)
		got, ok := s.give(buf[:n], lost)
		total += got
		if n < len(buf) || !ok {
			return total
		}
	}
}

// collect takes what is reached off the list: all of it once the device is lost.
func (s *Source) collect(buf *[batch]gift, limit int) (n int, lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	prev := uint32(0)
	for i := s.first; i != 0 && n < len(buf) && limit > 0; limit-- {
		next := s.slots.At(i).Value.next
		if !s.lost && !s.slots.ReadyLocked(i).Reached() {
			prev, i = i, next
			continue
		}
		if prev == 0 {
			s.first = next
		} else {
			s.slots.At(prev).Value.next = next
		}
		if s.last == i {
			s.last = prev
		}
		buf[n] = s.returnLocked(i)
		n++
		i = next
	}
	return n, s.lost
}

// give gives memory back. What the driver refuses is pending again, and asked for
// again by the next call.
func (s *Source) give(list []gift, lost bool) (total memory.Bytes, ok bool) {
	ok = true
	for _, g := range list {
		var err error
		if !lost {
			if err = s.mem.Give(g.heap, g.addr, g.size); err != nil {
				lost = Note(s, err) == allocator.Lost
			}
		}
		if lost {
			s.mem.Forget(g.heap, g.addr, g.size)
			err = nil
		}
		s.mu.Lock()
		s.returning[g.heap] -= g.size
		if err != nil {
			ok = false
			s.slots.At(g.slot).Value.refused = true
			s.appendLocked(g.slot)
		} else {
			total += g.size
			s.given++
			s.stats.Pending -= g.size
			s.slots.DropLocked(g.slot)
		}
		s.mu.Unlock()
	}
	return total, ok
}

// Trim implements [allocator.Allocator]. A source keeps nothing for later: it gives
// back what is pending and reached, whatever keep is.
func (s *Source) Trim(memory.Bytes) memory.Bytes { return s.drain(all) }

// Stats implements [allocator.Allocator].
func (s *Source) Stats() allocator.Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

// ResetPeaks implements [allocator.PeakResetter].
func (s *Source) ResetPeaks() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.PeakLive, s.stats.PeakHeld = s.stats.Live, s.stats.Held
}

// Pending implements [allocator.Idler].
func (s *Source) Pending(yield func(after queue.Frontier, size memory.Bytes) bool) {
	type item struct {
		after queue.Frontier
		size  memory.Bytes
	}
	var list []item
	s.mu.Lock()
	for i := s.first; i != 0; i = s.slots.At(i).Value.next {
		if p := &s.slots.At(i).Value; !p.refused {
			list = append(list, item{s.slots.ReadyLocked(i), p.size})
		}
	}
	s.mu.Unlock()
	for _, x := range list {
		if !yield(x.after, x.size) {
			return
		}
	}
}

// Live implements [allocator.LiveLister].
func (s *Source) Live(yield func(b allocator.Block, i allocator.Info) bool) { s.slots.Live(yield) }

// Close implements [allocator.Allocator]. Memory that is still in use, or that the
// driver refuses to take, is an error, unless the device is lost.
func (s *Source) Close() error {
	s.drain(all)
	s.mu.Lock()
	pending, err := s.stats.Pending, s.err
	s.mu.Unlock()
	if pending == 0 {
		return nil
	}
	if _, _, probe := s.env.Device.MemInfo(0); errors.Is(probe, queue.ErrLost) {
		Note(s, probe)
		s.drain(all)
		return nil
	}
	if err != nil {
		return fmt.Errorf("%v can't be given back: in use by the device, or refused by the driver, whose last error is: %w", pending, err)
	}
	return fmt.Errorf("%v can't be given back: still in use by the device", pending)
}
