package allocator

import (
	"sync"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/mutant"
)

// Slots mints the blocks of one layer, or of one shard of it, and is their
// [Ledger]. T is what the layer keeps with each block; without pointers in it the
// collector never looks at the slots, however many there are.
//
// An ID is a slot and its generation. The generation moves whenever the block
// changes hands, so a handle used after its release is Stale even when the slot
// and the memory are somebody else's. A slot whose generation has come round
// is never used again.
//
// Slots are guarded by the layer's own lock, given to Init: methods named …Locked
// need it held, the [Ledger] methods take it. It is one lock that the layer takes
// anyway, and the check costs one comparison.
type Slots[T any] struct {
	mu     sync.Locker
	keeper Keeper
	chunks []*[slotChunk]Slot[T]
	used   uint32 // slots ever used; slot 0 never is
	free   uint32 // head of the list of free slots
}

const (
	slotChunk = 1 << 9
	genBits   = 36
	genMask   = 1<<genBits - 1
	maxSlots  = 1<<(64-genBits) - 1
)

// SlotOf is the slot that b was minted in: what stays the same while the block
// changes hands.
func SlotOf(b Block) uint32 { return uint32(b.ID >> genBits) }

// Slot is one block's record.
type Slot[T any] struct {
	gen   uint64 // odd: live or claimed
	ready queue.Frontier
	asked memory.Bytes
	kind  Kind
	tag   Tag
	pins  int16
	taken bool // claimed
	next  uint32
	Value T
}

// Init prepares the slots. mu is the lock of the layer.
func (s *Slots[T]) Init(mu sync.Locker, owner any, index uint32) {
	s.mu = mu
	s.keeper = Keeper{Owner: owner, Index: index, Ledger: s}
	s.used = 1
}

// Mints reports whether b was minted here, now or earlier.
func (s *Slots[T]) Mints(b Block) bool { return b.Keeper == &s.keeper }

// At returns the record in slot i.
func (s *Slots[T]) At(i uint32) *Slot[T] { return &s.chunks[i/slotChunk][i%slotChunk] }

// NewLocked takes a slot for a block that isn't handed out yet. It returns 0 if
// there can be no more slots (2²⁸ of them are in use).
func (s *Slots[T]) NewLocked() uint32 {
	if i := s.free; i != 0 {
		s.free = s.At(i).next
		return i
	}
	if s.used > maxSlots {
		return 0
	}
	if int(s.used/slotChunk) == len(s.chunks) {
		s.chunks = append(s.chunks, new([slotChunk]Slot[T]))
	}
	i := s.used
	s.used++
	return i
}

// MintLocked hands slot i out: every older handle of it is stale. ready is the
// frontier of the memory as it is handed out.
func (s *Slots[T]) MintLocked(i uint32, addr uint64, size memory.Bytes, r *Request, ready queue.Frontier) Block {
	return s.mint(s.At(i), i, addr, size, r, ready)
}

func (s *Slots[T]) mint(e *Slot[T], i uint32, addr uint64, size memory.Bytes, r *Request, ready queue.Frontier) Block {
	e.gen = (e.gen + 1) & genMask
	e.ready, e.asked, e.kind, e.tag = ready, r.Size, r.Kind, r.Who.Tag
	return Block{Addr: addr, Size: size, Keeper: &s.keeper, ID: uint64(i)<<genBits | e.gen}
}

// AddLocked is NewLocked, setting the value, and MintLocked in one. It is false if
// there can be no more slots.
func (s *Slots[T]) AddLocked(v T, addr uint64, size memory.Bytes, r *Request, ready queue.Frontier) (Block, bool) {
	i := s.free
	if i == 0 {
		if i = s.NewLocked(); i == 0 {
			return Block{}, false
		}
		e := s.At(i)
		e.Value = v
		return s.mint(e, i, addr, size, r, ready), true
	}
	e := s.At(i)
	s.free = e.next
	e.Value = v
	return s.mint(e, i, addr, size, r, ready), true
}

// findLocked returns the slot of a live or claimed block.
func (s *Slots[T]) findLocked(id uint64) (uint32, Outcome) {
	i := uint32(id >> genBits)
	if i == 0 || i >= s.used {
		return 0, Foreign
	}
	if s.At(i).gen != id&genMask || id&1 == 0 {
		return 0, Stale
	}
	return i, OK
}

// TakeLocked takes a block back that was handed out: it returns its slot and the
// frontier after which it is free, which is after joined with every use recorded
// while it was live. An unknown frontier becomes what it stands for, everything
// issued until now. The slot stays the block's until [Slots.DropLocked].
func (s *Slots[T]) TakeLocked(b Block, after queue.Frontier) (uint32, queue.Frontier, Outcome) {
	if !s.Mints(b) {
		return 0, queue.Frontier{}, Foreign
	}
	i := uint32(b.ID >> genBits)
	if i == 0 || i >= s.used {
		return 0, queue.Frontier{}, Foreign
	}
	f, o := s.take(s.At(i), b.ID, after)
	if o != OK {
		return 0, queue.Frontier{}, o
	}
	return i, f, OK
}

// take ends the life id of the block in e.
func (s *Slots[T]) take(e *Slot[T], id uint64, after queue.Frontier) (queue.Frontier, Outcome) {
	switch {
	case e.gen != id&genMask || id&1 == 0:
		return queue.Frontier{}, Stale
	case e.pins != 0:
		return queue.Frontier{}, Busy
	}
	e.gen = (e.gen + 1) & genMask
	e.taken = false
	if e.ready == after && !after.Unknown() {
		return after, OK
	}
	f := queue.Join(e.ready, after)
	if f.Unknown() {
		f = queue.Everything()
		if mutant.Is(mutant.ZeroIsReady) {
			f = queue.ReadyNow()
		}
	}
	e.ready = f
	return f, OK
}

// RevokeLocked takes the live block in slot i back from whoever holds it: its handle is
// stale from then on, and it is free after every recorded use ([Slots.ReadyLocked]).
// It is false, and nothing happens, if the block was claimed, or is pinned.
func (s *Slots[T]) RevokeLocked(i uint32) bool {
	e := s.At(i)
	if e.taken || e.gen&1 == 0 {
		return false
	}
	_, o := s.take(e, e.gen, e.ready)
	return o == OK
}

// ReadyLocked is the frontier of a free block: what TakeLocked returned.
func (s *Slots[T]) ReadyLocked(i uint32) queue.Frontier { return s.At(i).ready }

// SetReadyLocked sets the frontier of a free block: of one that was split off or
// merged, or came from below.
func (s *Slots[T]) SetReadyLocked(i uint32, f queue.Frontier) { s.At(i).ready = f }

// DropLocked gives slot i up, for a block that is no longer the layer's. Its
// handles stay stale.
func (s *Slots[T]) DropLocked(i uint32) {
	s.drop(s.At(i), i)
}

func (s *Slots[T]) drop(e *Slot[T], i uint32) {
	var none T
	e.Value = none
	if e.gen >= genMask-2 { // the next life could be taken for the first
		return
	}
	e.next, s.free = s.free, i
}

// RemoveLocked is TakeLocked and DropLocked in one. It returns what was kept with the
// block, the kind it was asked for, and the frontier after which it is free.
func (s *Slots[T]) RemoveLocked(b Block, after queue.Frontier) (v T, k Kind, f queue.Frontier, o Outcome) {
	if !s.Mints(b) {
		return v, 0, f, Foreign
	}
	i := uint32(b.ID >> genBits)
	if i == 0 || i >= s.used {
		return v, 0, f, Foreign
	}
	e := s.At(i)
	if f, o = s.take(e, b.ID, after); o != OK {
		return v, 0, f, o
	}
	v, k = e.Value, e.kind
	s.drop(e, i)
	return v, k, f, OK
}

// AskedLocked returns the size, kind and tag with which slot i was last minted.
func (s *Slots[T]) AskedLocked(i uint32) Info {
	e := s.At(i)
	return Info{Asked: e.asked, Kind: e.kind, Tag: e.tag, Pins: int(e.pins), Uses: e.ready}
}

// Use implements [Ledger].
func (s *Slots[T]) Use(id uint64, after queue.Frontier) Outcome {
	s.mu.Lock()
	i, o := s.findLocked(id)
	if o == Stale && s.claimedLocked(id) && !mutant.Is(mutant.ClaimedIsStale) {
		i, o = uint32(id>>genBits), OK
	}
	if o == OK {
		e := s.At(i)
		if p := e.ready; p != after && !mutant.Is(mutant.SkipUse) {
			e.ready = queue.Join(p, after)
		}
	}
	s.mu.Unlock()
	return o
}

// Info implements [Ledger].
func (s *Slots[T]) Info(id uint64) (Info, Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, o := s.findLocked(id)
	if o != OK {
		return Info{}, o
	}
	return s.AskedLocked(i), OK
}

// Pin implements [Ledger].
func (s *Slots[T]) Pin(id uint64, n int) Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, o := s.findLocked(id)
	if o != OK {
		return o
	}
	e := s.At(i)
	if p := int(e.pins) + n; p >= 0 && p < 1<<15 {
		e.pins = int16(p)
		return OK
	}
	return Busy
}

// claimedLocked reports whether the block was claimed from the holder of id, and not
// taken back yet.
func (s *Slots[T]) claimedLocked(id uint64) bool {
	e := s.At(uint32(id >> genBits))
	return id&1 == 1 && e.taken && e.gen == (id+2)&genMask
}

// Claim implements [Ledger].
func (s *Slots[T]) Claim(id uint64) (uint64, Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, o := s.findLocked(id)
	if o != OK {
		return 0, o
	}
	e := s.At(i)
	if e.pins != 0 {
		return 0, Busy
	}
	e.gen = (e.gen + 2) & genMask // stays odd: live, for another holder
	e.taken = true
	return uint64(i)<<genBits | e.gen, OK
}

// Unclaim implements [Ledger].
func (s *Slots[T]) Unclaim(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i, o := s.findLocked(id); o == OK && s.At(i).taken {
		e := s.At(i)
		e.gen = (e.gen - 2) & genMask
		e.taken = false
	}
}

// Live implements [LiveLister] for a layer whose handles are all of these slots.
func (s *Slots[T]) Live(yield func(b Block, i Info) bool) {
	for i := uint32(1); ; i++ {
		s.mu.Lock()
		if i >= s.used {
			s.mu.Unlock()
			return
		}
		e := s.At(i)
		live := e.gen&1 == 1 && !e.taken
		b := Block{Size: e.asked, Keeper: &s.keeper, ID: uint64(i)<<genBits | e.gen}
		info := s.AskedLocked(i)
		s.mu.Unlock()
		if live && !yield(b, info) {
			return
		}
	}
}
