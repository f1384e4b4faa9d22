package block

import (
	"cmp"
	"slices"
	"sync"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/mutant"
)

// state is where a piece of memory is in the state machine of the package.
type state uint8

const (
	_      state = iota
	live         // handed out
	free         // mapped, nobody's, in the index or the brink
	aside        // mapped, set aside by a call of the base in progress
	hollow       // unmapped whole pages, nobody's
	coming       // unmapped whole pages, set aside to be mapped
)

// node is a piece of a slab or of the range. Neighbours are numbers, so that the
// collector has nothing to follow.
type node struct {
	addr       uint64
	size       memory.Bytes
	prev, next uint32 // neighbours below and above; 0 at the ends
	up, down   uint32 // in the list of a size class, or of hollow pieces
	slab       uint32 // index in arena.slabs; 0: the range
	state      state
	age        uint64 // arena.clock when it was freed
}

func (n *node) end() uint64 { return n.addr + uint64(n.size) }

// slab is memory taken from the base in one piece.
type slab struct {
	block allocator.Block
	first uint32 // the piece at its lowest address; 0 while the entry is unused
	own   bool   // of one request, never suballocated
}

// arena is the memory of one heap.
type arena struct {
	heap   int
	base   allocator.Allocator
	config *Config
	usage  memory.Usage // of a slab: what the heap allows
	most   memory.Bytes // of a slab that isn't one request's

	mu     sync.Mutex
	pieces pieces
	index  index
	pages  *pages // nil without virtual memory; the pointer is immutable
	slabs  []slab // the first is unused
	spare  []uint32
	stats  allocator.Stats // but what figures works out
	asked  memory.Bytes    // slabs being asked for
	clock  uint64          // frees so far
	turns  uint64          // times that growing changed what is mapped or held
	busy   int             // calls of the base in progress: memory is on its way
	seams  []seam          // not merged yet, oldest first
	joints []seam          // scratch of coalesceLocked

	moreSeams bool // there are others
	closed    bool
}

func newArena(a *Allocator, heap int) (*arena, allocator.Outcome) {
	ar := &arena{heap: heap, base: a.base, config: &a.config, most: a.config.MaxSlab, slabs: make([]slab, 1)}
	if heap < len(a.env.Heaps) {
		h := &a.env.Heaps[heap]
		ar.usage = h.Usage
		if h.MaxAllocation > 0 {
			ar.most = min(ar.most, h.MaxAllocation)
		}
	}
	ar.index.init(&ar.pieces, a.config.MinBlock)
	if v := virtual(a.base, heap); v != nil {
		if o := ar.reserve(v, a.env.Capacity(heap)); o != allocator.OK {
			return nil, o
		}
	}
	return ar, allocator.OK
}

func (ar *arena) node(i uint32) *node { return ar.pieces.at(i) }

// unlock ends a critical section; with the invariants tag it checks the books.
func (ar *arena) unlock() {
	if invariants {
		ar.mustHoldLocked()
	}
	ar.mu.Unlock()
}

// measure returns the bytes and the alignment that r takes, or false if they
// don't fit in any memory of this arena.
func (ar *arena) measure(r *allocator.Request) (need, align memory.Bytes, ok bool) {
	unit := ar.config.MinBlock
	align = max(r.Kind.Align(), unit)
	if r.Size <= 0 || r.Kind.Align() <= 0 || r.Size > memory.MaxBytes-unit {
		return 0, 0, false
	}
	need = (r.Size + unit - 1) &^ (unit - 1)
	most := memory.MaxBytes
	if ar.pages != nil && r.Kind&allocator.NoSubAlloc == 0 {
		most = ar.pages.size
	}
	return need, align, align-unit <= most && need <= most-(align-unit)
}

// Bounds of one search under the lock: the free pieces that it looks at, and of
// those that would serve how many it chooses from. More choice was tried and gains
// nothing.
const (
	glance  = 12
	choices = 4
)

// search is one request looking for a free piece.
type search struct {
	ar          *arena
	r           *allocator.Request
	need, align memory.Bytes
	left        int   // pieces still to look at
	choose      int   // and to choose from
	complete    bool  // those that aren't ready don't count
	floor       int64 // whole pages broken anywhere

	found  uint32
	addr   uint64
	broken int64
	ground allocator.Reuse

	second     uint32 // found with a wait
	secondAddr uint64
}

// fit returns the lowest aligned address in n, which is at least as large as
// what is needed, and whether there is one.
func (s *search) fit(n *node) (uint64, bool) {
	mask := uint64(s.align) - 1
	addr := (n.addr + mask) &^ mask
	if mutant.Is(mutant.AlignOffByOne) {
		addr = (n.addr + mask>>1) &^ (mask >> 1)
	}
	return addr, addr >= n.addr && addr-n.addr <= uint64(n.size-s.need)
}

// look considers a free piece of sufficient size, and reports whether to go on.
func (s *search) look(i uint32, n *node) bool {
	addr, ok := s.fit(n)
	if !ok {
		return s.skip()
	}
	g := s.r.Reuse(s.ar.pieces.ready(i))
	if g >= allocator.ReuseWait {
		if g == allocator.ReuseWait && s.second == 0 {
			s.second, s.secondAddr = i, addr
		}
		return s.skip()
	}
	p := s.ar.pages
	if p == nil {
		s.found, s.addr, s.ground = i, addr, g
		return false
	}
	addr, broken := p.place(n, addr, s.need, s.align)
	if s.found == 0 || broken < s.broken {
		s.found, s.addr, s.ground, s.broken = i, addr, g, broken
	}
	s.choose--
	return s.broken > s.floor && s.choose > 0 && s.skip()
}

// skip passes over a piece that doesn't serve.
func (s *search) skip() bool {
	if s.complete {
		return true
	}
	s.left--
	return s.left > 0
}

// findLocked looks for a free piece and reports whether it found one.
func (ar *arena) findLocked(s *search) bool {
	if p := ar.pages; p != nil {
		s.floor = p.mustBreak(s.need, ar.config.MinBlock)
	}
	s.walk()
	if s.found != 0 {
		return true
	}
	if p := ar.pages; p != nil && p.brink != 0 {
		if n := ar.node(p.brink); n.size >= s.need {
			s.look(p.brink, n)
			s.addr, _ = s.fit(n) // at its low end, whatever is mapped of the last hole
		}
	}
	if s.found == 0 && s.second != 0 {
		s.found, s.addr, s.ground = s.second, s.secondAddr, allocator.ReuseWait
	}
	return s.found != 0
}

// walk looks at the free pieces from the best fit upwards.
func (s *search) walk() {
	x := &s.ar.index
	for c := x.from(x.classOf(s.need)); c >= 0; c = x.from(c + 1) {
		cl := &x.class[c]
		if cl.tree != nil {
			more := true
			cl.tree.AscendGreaterOrEqual(entry{size: s.need}, func(e entry) bool {
				more = s.look(e.slot, x.node(e.slot))
				return more
			})
			if !more {
				return
			}
			continue
		}
		for i := cl.head; i != 0; {
			n := x.node(i)
			if n.size >= s.need && !s.look(i, n) {
				return
			}
			i = n.down
		}
	}
}

// quickLocked serves r from what a short search finds.
func (ar *arena) quickLocked(r *allocator.Request) (piece uint32, f queue.Frontier, ok bool) {
	need, align, ok := ar.measure(r)
	if !ok || r.Kind&allocator.NoSubAlloc != 0 {
		return 0, f, false
	}
	s := search{ar: ar, r: r, need: need, align: align, left: glance, choose: choices}
	if ok = !ar.closed && ar.findLocked(&s); ok {
		if piece, f, ok = ar.takeLocked(&s); ok {
			ar.mendLocked()
		}
	}
	return piece, f, ok
}

// grow serves r where a short search found nothing: by a complete one, or with more
// from the base.
func (ar *arena) grow(r *allocator.Request) (piece uint32, f queue.Frontier, o allocator.Outcome) {
	need, align, ok := ar.measure(r)
	switch {
	case !ok:
		return ar.fail(r, allocator.TooLarge, queue.Frontier{})
	case r.Kind&allocator.NoSubAlloc != 0:
		return ar.allocateOwn(r, need, align)
	}
	queue.Poll()
	if ar.pages != nil {
		return ar.growPages(r, need, align)
	}
	return ar.growSlabs(r, need, align)
}

// retryLocked is a complete search: what is ready by now serves r.
func (ar *arena) retryLocked(r *allocator.Request, need, align memory.Bytes) (uint32, queue.Frontier, bool) {
	ar.coalesceForLocked(r, need, align)
	s := search{ar: ar, r: r, need: need, align: align, left: glance, choose: choices, complete: true}
	if !ar.findLocked(&s) {
		return 0, queue.Frontier{}, false
	}
	return ar.takeLocked(&s)
}

// takeLocked takes what s found. It is false if there can be no more pieces.
func (ar *arena) takeLocked(s *search) (uint32, queue.Frontier, bool) {
	ar.detachLocked(s.found)
	i, f, ok := ar.carveLocked(s.found, s.addr, s.need)
	if ok {
		ar.stats.Hits++
		ar.stats.Reused[s.ground]++
	}
	return i, f, ok
}

// carveLocked makes a live piece of size bytes at addr of piece i, which is free and
// detached. The rest stays free. It is false, and all of i is free again, if there
// can be no more pieces.
func (ar *arena) carveLocked(i uint32, addr uint64, size memory.Bytes) (uint32, queue.Frontier, bool) {
	n := ar.node(i)
	if addr > n.addr {
		j := ar.splitLocked(i, addr)
		if j == 0 {
			ar.attachLocked(i)
			return 0, queue.Frontier{}, false
		}
		ar.node(j).state = aside
		ar.attachLocked(i)
		i, n = j, ar.node(j)
	}
	if n.size > size {
		j := ar.splitLocked(i, addr+uint64(size))
		if j == 0 {
			n.state = free
			ar.attachLocked(i)
			return 0, queue.Frontier{}, false
		}
		n.state = aside
		ar.node(j).state = free
		ar.attachLocked(j)
	}
	return i, ar.wakeLocked(i), true
}

// wakeLocked makes the detached piece i live, and returns its frontier.
func (ar *arena) wakeLocked(i uint32) queue.Frontier {
	n := ar.node(i)
	n.state = live
	st := &ar.stats
	st.Allocs++
	st.Live += n.size
	if st.Live > st.PeakLive {
		st.PeakLive = st.Live
	}
	return ar.pieces.ready(i)
}

// leftover is what giving a piece back leaves to be done without a lock.
type leftover struct {
	slab  allocator.Block // for the base, free after f
	f     queue.Frontier
	drain bool // the arena is closed
}

// give takes the live piece i back, which is free after f. No lock is held.
func (ar *arena) give(i uint32, f queue.Frontier) {
	ar.mu.Lock()
	rest := ar.giveLocked(i, f)
	ar.unlock()
	ar.finish(rest)
}

// giveLocked is give but for what rest says.
func (ar *arena) giveLocked(i uint32, f queue.Frontier) (rest leftover) {
	n := ar.node(i)
	ar.clock++
	n.state, n.age = free, ar.clock
	ar.pieces.setReady(i, f)
	ar.stats.Frees++
	if !mutant.Is(mutant.ForgetCount) {
		ar.stats.Live -= n.size
	}
	if n.slab != 0 && ar.slabs[n.slab].own {
		rest.slab, rest.f = ar.dropSlabLocked(n.slab), f
		return rest
	}
	ar.attachLocked(i)
	ar.mendLocked()
	rest.drain = ar.closed
	return rest
}

// finish does what a give has left.
func (ar *arena) finish(rest leftover) {
	if rest.slab.Size != 0 {
		ar.base.Free(rest.slab, rest.f)
	}
	if rest.drain {
		ar.drain()
	}
}

// splitLocked cuts the detached piece i at an address inside it and returns the
// upper half, alike in everything, or 0 if there is no slot left.
func (ar *arena) splitLocked(i uint32, at uint64) uint32 {
	j := ar.pieces.take()
	if j == 0 {
		return 0
	}
	n := ar.node(i)
	low := memory.Bytes(at - n.addr)
	*ar.node(j) = node{addr: at, size: n.size - low, prev: i, next: n.next, slab: n.slab, state: n.state, age: n.age}
	if n.next != 0 {
		ar.node(n.next).prev = j
	}
	n.size, n.next = low, j
	ar.pieces.setReady(j, ar.pieces.ready(i))
	if mutant.Is(mutant.SplitLosesFrontier) {
		ar.pieces.setReady(j, queue.ReadyNow())
	}
	return j
}

// fuseLocked makes one piece of the detached i and its upper neighbour.
func (ar *arena) fuseLocked(i uint32) {
	n := ar.node(i)
	j := n.next
	m := ar.node(j)
	n.size += m.size
	n.next = m.next
	n.age = max(n.age, m.age)
	if m.next != 0 {
		ar.node(m.next).prev = i
	}
	f, g := ar.pieces.ready(i), ar.pieces.ready(j)
	if f != g && !mutant.Is(mutant.MergeLosesFrontier) {
		ar.pieces.setReady(i, queue.Join(f, g))
	}
	ar.pieces.drop(j)
}

// mergeLocked makes one detached piece of the detached i and its neighbours in the
// same state, and returns it. Free neighbours merge where that makes neither wait
// for the other; where it would, they stay apart by a seam.
func (ar *arena) mergeLocked(i uint32) uint32 {
	for {
		n := ar.node(i)
		if p := n.prev; p != 0 && ar.node(p).state == n.state {
			if ar.fusibleLocked(p, i) {
				ar.detachLocked(p)
				ar.fuseLocked(p)
				i = p
				continue
			}
			ar.seamLocked(p)
		}
		if q := n.next; q != 0 && ar.node(q).state == n.state {
			if ar.fusibleLocked(i, q) {
				ar.detachLocked(q)
				ar.fuseLocked(i)
				continue
			}
			ar.seamLocked(i)
		}
		return i
	}
}

// fusibleLocked reports whether merging the neighbours i and j, in the same state,
// costs nothing: they are ready at the same time. Memory that is ready must not
// become pending because something pending is freed beside it: under load on several
// queues all free memory would end up in one piece that is never ready.
func (ar *arena) fusibleLocked(i, j uint32) bool {
	if ar.node(i).state == hollow {
		return true
	}
	f, g := ar.pieces.ready(i), ar.pieces.ready(j)
	if f == g {
		return true
	}
	if q := f.Queue(); q != 0 && q == g.Queue() {
		return true
	}
	return f.Reached() && g.Reached()
}

// seam is a free piece whose upper neighbour was free but not ready at the same
// time. By now it may be something else.
type seam struct {
	slot uint32
	addr uint64
}

// maxSeams bounds those that are remembered one by one; beyond that a walk over all
// free pieces finds them.
const maxSeams = 64

func (ar *arena) seamLocked(i uint32) {
	if len(ar.seams) < maxSeams {
		ar.seams = append(ar.seams, seam{i, ar.node(i).addr})
		return
	}
	ar.moreSeams = true
}

// mendLocked looks at the seam remembered longest, and closes it if it can: memory
// that an idle queue frees is whole again one call later.
func (ar *arena) mendLocked() {
	if len(ar.seams) == 0 {
		return
	}
	s := ar.seams[0]
	ar.seams = ar.seams[:copy(ar.seams, ar.seams[1:])]
	if n := ar.node(s.slot); n.state != free || n.addr != s.addr || n.next == 0 || ar.node(n.next).state != free {
		return
	}
	ar.detachLocked(s.slot)
	ar.attachLocked(s.slot) // which remembers it again if it stays
}

// coalesceLocked closes every seam whose sides, in slots i and j, may be merged.
func (ar *arena) coalesceLocked(mayMerge func(i, j uint32) bool) {
	if len(ar.seams) == 0 && !ar.moreSeams {
		return
	}
	ar.seams, ar.moreSeams = ar.seams[:0], false
	joints := ar.joints[:0]
	ar.eachFreeLocked(ar.config.MinBlock, func(i uint32, n *node) bool {
		if n.next != 0 && ar.node(n.next).state == free {
			joints = append(joints, seam{i, n.addr})
		}
		return true
	})
	for _, s := range joints {
		i := s.slot
		n := ar.node(i)
		if n.state != free || n.addr != s.addr {
			continue // merged into the one below
		}
		for n.next != 0 && ar.node(n.next).state == free {
			if !mayMerge(i, n.next) {
				ar.seamLocked(i)
				break
			}
			ar.detachLocked(i)
			ar.detachLocked(n.next)
			ar.fuseLocked(i)
			ar.settleLocked(i)
		}
	}
	ar.joints = joints
}

// coalesceForLocked closes the seams between what r may have at once. What is
// reached is merged with what is not, and so can't move or go back, only where r then
// fits.
func (ar *arena) coalesceForLocked(r *allocator.Request, need, align memory.Bytes) {
	s := search{need: need, align: align}
	ar.coalesceLocked(func(i, j uint32) bool {
		f, g := ar.pieces.ready(i).Reached(), ar.pieces.ready(j).Reached()
		switch {
		case f && g:
			return true
		case !ar.readyLocked(r, i) || !ar.readyLocked(r, j):
			return false
		case f == g:
			return true
		}
		for k := ar.node(i).prev; k != 0 && ar.readyLocked(r, k); k = ar.node(i).prev {
			i = k
		}
		run := *ar.node(i)
		for k := run.next; k != 0 && ar.readyLocked(r, k); k = ar.node(k).next {
			run.size += ar.node(k).size
		}
		_, fits := s.fit(&run)
		return run.size >= need && fits
	})
}

// bothReachedLocked is for coalesceLocked: what is reached stays so.
func (ar *arena) bothReachedLocked(i, j uint32) bool {
	return ar.pieces.ready(i).Reached() && ar.pieces.ready(j).Reached()
}

func always(_, _ uint32) bool { return true }

// settleLocked enters the free or hollow piece i, which has no neighbour in the
// same state.
func (ar *arena) settleLocked(i uint32) {
	n := ar.node(i)
	p := ar.pages
	switch {
	case n.state == hollow:
		ar.settleHollowLocked(i, n)
	case p != nil && n.next != 0 && n.next == p.tail:
		p.brink = i
	default:
		ar.index.insert(i)
	}
}

// attachLocked merges the free or hollow piece i with its neighbours and enters
// the result.
func (ar *arena) attachLocked(i uint32) { ar.settleLocked(ar.mergeLocked(i)) }

// detachLocked takes a free or hollow piece off the books that find it.
func (ar *arena) detachLocked(i uint32) {
	p := ar.pages
	switch {
	case p == nil:
		ar.index.remove(i)
	case ar.node(i).state == hollow:
		ar.detachHollowLocked(i)
	case i == p.brink:
		p.brink = 0
	default:
		ar.index.remove(i)
	}
}

// eachFreeLocked calls visit for the free pieces of at least size bytes until it
// returns false.
func (ar *arena) eachFreeLocked(size memory.Bytes, visit func(i uint32, n *node) bool) {
	more := true
	ar.index.ascend(size, func(i uint32, n *node) bool {
		more = visit(i, n)
		return more
	})
	if p := ar.pages; more && p != nil && p.brink != 0 {
		if n := ar.node(p.brink); n.size >= size {
			visit(p.brink, n)
		}
	}
}

// fail counts a request that isn't served, and answers it.
func (ar *arena) fail(_ *allocator.Request, o allocator.Outcome, f queue.Frontier) (uint32, queue.Frontier, allocator.Outcome) {
	ar.mu.Lock()
	ar.stats.Failed++
	closed := ar.closed
	ar.unlock()
	if closed {
		ar.drain()
	}
	if o != allocator.NeedsWait {
		f = queue.Frontier{}
	}
	return 0, f, o
}

// waitLocked returns the frontier after which r can be served: that of the pending
// run of free pieces freed first of those that fit.
func (ar *arena) waitLocked(r *allocator.Request, need, align memory.Bytes) (queue.Frontier, bool) {
	if !waits(r) {
		return queue.Frontier{}, false
	}
	s := search{need: need, align: align}
	best, age, found := queue.Frontier{}, uint64(0), false
	ar.eachFreeLocked(ar.config.MinBlock, func(i uint32, n *node) bool {
		if n.prev != 0 && ar.node(n.prev).state == free {
			return true // looked at from the lowest piece of the run
		}
		run, after := *n, ar.pieces.ready(i)
		for j := n.next; j != 0 && ar.node(j).state == free; j = ar.node(j).next {
			m := ar.node(j)
			run.size += m.size
			run.age = max(run.age, m.age)
			after = queue.Join(after, ar.pieces.ready(j))
		}
		if run.size < need || found && run.age >= age {
			return true
		}
		if _, fits := s.fit(&run); fits {
			best, age, found = after, run.age, true
		}
		return true
	})
	if !found {
		return queue.Frontier{}, false
	}
	return best, true
}

// waits reports whether memory that is reached would do for r.
func waits(r *allocator.Request) bool {
	return r.Who.Queue == 0 || r.Kind&allocator.NoPolled == 0
}

// pendingPiece is free memory that waits for its frontier.
type pendingPiece struct {
	slot  uint32
	ready queue.Frontier
	size  memory.Bytes
	age   uint64
}

// pending lists free memory that isn't reached, oldest first.
func (ar *arena) pending() []pendingPiece {
	ar.mu.Lock()
	defer ar.unlock()
	return ar.pendingLocked()
}

func (ar *arena) pendingLocked() []pendingPiece {
	var list []pendingPiece
	ar.eachFreeLocked(ar.config.MinBlock, func(i uint32, n *node) bool {
		if f := ar.pieces.ready(i); !f.Reached() {
			list = append(list, pendingPiece{i, f, n.size, n.age})
		}
		return true
	})
	slices.SortFunc(list, func(a, b pendingPiece) int { return cmp.Compare(a.age, b.age) })
	return list
}

// idle is what is held and not handed out.
func (ar *arena) idle() memory.Bytes {
	ar.mu.Lock()
	defer ar.unlock()
	return ar.stats.Held - ar.stats.Live
}

func (ar *arena) figures() allocator.Stats {
	ar.mu.Lock()
	defer ar.unlock()
	s := ar.stats
	s.Idle = s.Held - s.Live
	whole := memory.Bytes(0)
	ar.eachFreeLocked(ar.config.MinBlock, func(i uint32, n *node) bool {
		s.Blocks++
		if !ar.pieces.ready(i).Reached() {
			s.Pending += n.size
		}
		s.LargestFree = max(s.LargestFree, n.size)
		if p := ar.pages; p != nil && n.slab == 0 {
			whole += memory.Bytes(p.whole(n)) * p.page
		}
		return true
	})
	s.LargestFree = max(s.LargestFree, whole) // pages can be moved together
	return s
}

func (ar *arena) resetPeaks() {
	ar.mu.Lock()
	ar.stats.PeakLive, ar.stats.PeakHeld = ar.stats.Live, ar.stats.Held
	ar.unlock()
}

// holdLocked counts memory taken from below, or given back if size is negative.
func (ar *arena) holdLocked(size memory.Bytes) {
	if size != 0 {
		ar.turns++
	}
	ar.stats.Held += size
	ar.stats.PeakHeld = max(ar.stats.PeakHeld, ar.stats.Held)
}

// giveBack returns wholly free memory that is reached to the base, at least want
// bytes if there is so much, the highest addresses first. It returns how much it was.
func (ar *arena) giveBack(want memory.Bytes) memory.Bytes {
	gave := memory.Bytes(0)
	if ar.pages != nil {
		gave = ar.shrink(want)
	}
	if gave < want {
		gave += ar.returnSlabs(want-gave, false)
	}
	return gave
}

// close refuses further requests and gives back what is idle. It returns what
// can't go back yet.
func (ar *arena) close() memory.Bytes {
	ar.mu.Lock()
	ar.closed = true
	ar.unlock()
	return ar.drain()
}

// drain gives all idle memory of a closed arena back, slabs with their frontiers,
// and the addresses when nothing is left in them. It returns the bytes of pages
// that are still in use by the device.
func (ar *arena) drain() memory.Bytes {
	ar.returnSlabs(memory.MaxBytes, true)
	if ar.pages == nil {
		return 0
	}
	ar.shrink(memory.MaxBytes)
	ar.mu.Lock()
	ar.coalesceLocked(always)
	left := memory.Bytes(0)
	ar.eachFreeLocked(ar.pages.page, func(i uint32, n *node) bool {
		if n.slab == 0 && !ar.pieces.ready(i).Reached() {
			left += memory.Bytes(ar.pages.whole(n)) * ar.pages.page
		}
		return true
	})
	empty := ar.vacateLocked()
	ar.unlock()
	if empty {
		ar.unreserve()
	}
	return left
}
