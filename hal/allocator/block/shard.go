package block

import (
	"sync"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// shards is how many there are: queues that have one to themselves don't meet.
const (
	shards    = 16
	shardMask = shards - 1
)

// shard mints the handles of the queues that belong to it, and has a magazine: the
// last few pieces that were freed, as they were, for the next requests of the same
// size. To the arena they are live. A queue that frees and allocates the same sizes
// again and again, as most do, then meets nobody else's lock.
//
// What is in a magazine can't merge with its neighbours, so it is used only while
// queues stand in each other's way: for some frees after the arena's lock was found
// taken. Who has the arena to himself gets the placement of best fit, and the same
// one each time.
type shard struct {
	mu    sync.Mutex
	slots allocator.Slots[handle]
	kept  [maxMagazine]kept // oldest first
	n     int
	hot   int // frees that still go to the magazine

	live, peak    memory.Bytes // handed out
	allocs, frees uint64
	hits          uint64
	reused        allocator.Grounds

	_ [64]byte // shards are neighbours in memory; their locks should not be
}

// handle is what a shard keeps with a block: which piece it is, and of which heap.
type handle uint32

const pieceBits = 28 // and 4 for the heap: see maxPieces and allocator.MaxHeaps

func handleOf(heap int, piece uint32) handle { return handle(heap)<<pieceBits | handle(piece) }
func (h handle) piece() uint32               { return uint32(h) & (1<<pieceBits - 1) }
func (h handle) heap() uint8                 { return uint8(h >> pieceBits) }

// kept is a piece in the magazine.
type kept struct {
	addr  uint64
	size  memory.Bytes
	slot  uint32 // of the handles that it had, with its frontier
	piece uint32
	heap  uint8
}

// findLocked takes a piece out of the magazine that serves r.
func (s *shard) findLocked(r *allocator.Request, unit memory.Bytes) (allocator.Block, queue.Frontier, bool) {
	need := (r.Size + unit - 1) &^ (unit - 1)
	for k := s.n - 1; k >= 0; k-- {
		e := &s.kept[k]
		if e.size != need || int(e.heap) != r.Kind.Heap() || e.addr&uint64(r.Kind.Align()-1) != 0 || r.Kind&allocator.NoSubAlloc != 0 {
			continue
		}
		f := s.slots.ReadyLocked(e.slot)
		if g := r.Reuse(f); g < allocator.ReuseWait {
			b := s.slots.MintLocked(e.slot, e.addr, e.size, r, f)
			s.wentOutLocked(e.size)
			s.hits++
			s.reused[g&3]++
			copy(s.kept[k:s.n], s.kept[k+1:s.n])
			s.n--
			return b, f, true
		}
	}
	return allocator.Block{}, queue.Frontier{}, false
}

func (s *shard) wentOutLocked(size memory.Bytes) {
	s.allocs++
	s.live += size
	if s.live > s.peak {
		s.peak = s.live
	}
}

// mintLocked hands out piece i, which is live. It is false if there can be no more
// handles.
func (s *shard) mintLocked(ar *arena, i uint32, r *allocator.Request, f queue.Frontier) (allocator.Block, bool) {
	n := ar.pieces.shared(i)
	b, ok := s.slots.AddLocked(handleOf(ar.heap, i), n.addr, n.size, r, f)
	if ok {
		s.wentOutLocked(n.size)
	}
	return b, ok
}

// hotFrees is for how many frees a shard uses its magazine after it was held up.
const hotFrees = 1024

// keepLocked puts a piece into the magazine, which holds depth of them, and returns
// the one that has to go for it, if any.
func (s *shard) keepLocked(e kept, depth int) (out kept, full bool) {
	if s.n == depth {
		out, full = s.kept[0], true
		copy(s.kept[:s.n], s.kept[1:s.n])
		s.n--
	}
	s.kept[s.n] = e
	s.n++
	return out, full
}

// dropLocked ends the keeping of a piece, and returns its frontier.
func (s *shard) dropLocked(e kept) queue.Frontier {
	f := s.slots.ReadyLocked(e.slot)
	s.slots.DropLocked(e.slot)
	return f
}

// spill empties every magazine into the arenas, and returns how many pieces that
// were. It is called without a lock, before an arena grows or gives back.
func (a *Allocator) spill() (pieces int) {
	type free struct {
		kept
		ready queue.Frontier
	}
	for i := range a.shards {
		s := &a.shards[i]
		var list [maxMagazine]free
		s.mu.Lock()
		n := s.n
		for k, e := range s.kept[:n] {
			list[k] = free{e, s.dropLocked(e)}
		}
		s.n = 0
		s.mu.Unlock()
		for _, e := range list[:n] {
			a.arenas[e.heap].Load().give(e.piece, e.ready)
		}
		pieces += n
	}
	return pieces
}
