package block

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/mutant"
)

// pages is the range of an arena with virtual memory.
type pages struct {
	virtual allocator.Virtual
	page    memory.Bytes
	shift   uint // log2 of page
	addr    uint64
	size    memory.Bytes // of the range

	// Guarded by the arena's lock.
	first  uint32 // piece at the lowest address; 0 when the range was given back
	tail   uint32 // hollow piece up to the end of the range
	brink  uint32 // free piece below the tail: not in the index
	hollow uint32 // list of hollow pieces
	full   bool   // the driver had no more pages when last asked
	spans  []span // scratch
}

// virtual returns the pages and addresses of a heap, or nil.
func virtual(base allocator.Allocator, heap int) allocator.Virtual {
	if vm, ok := allocator.As[allocator.VirtualMemory](base); ok {
		return vm.Virtual(heap)
	}
	return nil
}

// leastRange is the size of the range where the capacity is small or unknown.
const leastRange = memory.TiB

// reserve gives the arena its range: four times the capacity, and less if there
// are no such addresses.
func (ar *arena) reserve(v allocator.Virtual, capacity memory.Bytes) allocator.Outcome {
	page := v.Granularity()
	if !memory.IsPowerOfTwo(page) || page < ar.config.MinBlock {
		return allocator.Unsupported
	}
	size := leastRange
	if capacity > size/4 {
		size = min(capacity, memory.MaxBytes/8) * 4
	}
	for size &^= page - 1; ; size = size / 2 &^ (page - 1) {
		if size == 0 {
			return allocator.Exhausted
		}
		addr, o := v.Reserve(size)
		if o == allocator.Exhausted {
			continue
		}
		if o != allocator.OK {
			return o
		}
		i := ar.pieces.take() // nobody else knows the arena yet
		*ar.node(i) = node{addr: addr, size: size, state: hollow}
		ar.pieces.setReady(i, queue.ReadyNow())
		ar.pages = &pages{virtual: v, page: page, shift: uint(bits.TrailingZeros64(uint64(page))), addr: addr, size: size, first: i}
		ar.settleLocked(i)
		return allocator.OK
	}
}

// vacateLocked takes the range off the books if nothing is mapped in it and it
// wasn't before.
func (ar *arena) vacateLocked() bool {
	p := ar.pages
	if p.first == 0 || p.first != p.tail {
		return false
	}
	ar.detachLocked(p.first)
	ar.pieces.drop(p.first)
	p.first = 0
	return true
}

// unreserve gives the addresses back.
func (ar *arena) unreserve() {
	if p := ar.pages; p != nil {
		p.virtual.Unreserve(p.addr, p.size)
	}
}

// down and up return the page that addr is in, and the first one that begins at
// addr or above.
func (p *pages) down(addr uint64) int64 { return int64(addr >> p.shift) }
func (p *pages) up(addr uint64) int64   { return int64((addr + uint64(p.page) - 1) >> p.shift) }

// whole is the number of whole pages in n.
func (p *pages) whole(n *node) int64 { return max(0, p.down(n.end())-p.up(n.addr)) }

// taken is how many of the whole pages from lo to hi size bytes at addr touch.
func (p *pages) taken(lo, hi int64, addr uint64, size memory.Bytes) int64 {
	return max(0, min(hi, p.up(addr+uint64(size)))-max(lo, p.down(addr)))
}

// mustBreak is the least number of whole pages that size bytes break anywhere.
func (p *pages) mustBreak(size, unit memory.Bytes) int64 {
	if over := size - 2*(p.page-unit); over > 0 {
		return int64((over + p.page - 1) >> p.shift)
	}
	return 0
}

// place returns where in the free piece n need bytes break the fewest whole pages,
// at the low end, where low is the lowest aligned address, or at the high end.
func (p *pages) place(n *node, low uint64, need, align memory.Bytes) (addr uint64, broken int64) {
	lo, hi := p.up(n.addr), p.down(n.end())
	if lo >= hi {
		return low, 0
	}
	broken = p.taken(lo, hi, low, need)
	if broken == 0 {
		return low, 0
	}
	high := (n.end() - uint64(need)) &^ (uint64(align) - 1)
	if b := p.taken(lo, hi, high, need); b < broken {
		return high, b
	}
	return low, broken
}

func (ar *arena) settleHollowLocked(i uint32, n *node) {
	p := ar.pages
	n.up, n.down = 0, p.hollow
	if p.hollow != 0 {
		ar.node(p.hollow).up = i
	}
	p.hollow = i
	if n.next != 0 {
		return
	}
	p.tail = i
	if n.prev != 0 && ar.node(n.prev).state == free {
		ar.index.remove(n.prev)
		p.brink = n.prev
	}
}

func (ar *arena) detachHollowLocked(i uint32) {
	p := ar.pages
	n := ar.node(i)
	if n.down != 0 {
		ar.node(n.down).up = n.up
	}
	if n.up != 0 {
		ar.node(n.up).down = n.down
	} else {
		p.hollow = n.down
	}
	if i != p.tail {
		return
	}
	p.tail = 0
	if p.brink != 0 {
		ar.index.insert(p.brink)
		p.brink = 0
	}
}

// span is a free or hollow piece of a hole.
type span struct {
	slot      uint32
	addr, end uint64
	hollow    bool
	reached   bool // or hollow: its whole pages could move, or be mapped elsewhere
}

// hole is a place for a request that needs pages to be mapped.
type hole struct {
	slot    uint32 // the piece in which it begins; 0: none
	addr    uint64
	cost    int64        // whole pages that it touches and that would serve elsewhere
	taken   int64        // whole pages that it touches, those still in use by the device too
	missing int64        // unmapped pages that it touches
	size    memory.Bytes // of the hole
}

// better orders the places for a request. The one of the least cost can be made
// whenever any can: it leaves the most pages to be moved to where they are missing.
func (h *hole) better(o *hole) bool {
	return o.slot == 0 || cmp.Or(
		cmp.Compare(h.cost, o.cost),
		cmp.Compare(h.taken, o.taken),
		cmp.Compare(h.missing, o.missing),
		cmp.Compare(h.size, o.size),
		cmp.Compare(h.addr, o.addr)) < 0
}

// bestHoleLocked chooses among the holes with unmapped pages: runs of neighbours
// that are hollow, or free and ready for r.
func (ar *arena) bestHoleLocked(r *allocator.Request, need, align memory.Bytes) hole {
	p := ar.pages
	var best hole
	for i := p.hollow; i != 0; i = ar.node(i).down {
		low := i
		n := ar.node(i)
		for j := n.prev; j != 0 && ar.readyLocked(r, j); j = ar.node(j).prev {
			low = j
		}
		if k := ar.node(low).prev; k != 0 && ar.node(k).state == hollow {
			continue // the hole is looked at from there
		}
		spans := p.spans[:0]
		for j := low; j != 0; {
			m := ar.node(j)
			if m.state != hollow && !ar.readyLocked(r, j) {
				break
			}
			spans = append(spans, span{j, m.addr, m.end(), m.state == hollow, ar.pieces.ready(j).Reached()})
			j = m.next
		}
		p.spans = spans
		p.choose(&best, spans, need, align, spans[len(spans)-1].slot == p.tail)
	}
	return best
}

// readyLocked reports whether piece i is free and may be handed to r at once.
func (ar *arena) readyLocked(r *allocator.Request, i uint32) bool {
	return ar.node(i).state == free && r.Reuse(ar.pieces.ready(i)) < allocator.ReuseWait
}

// choose tries the ends of each span of a hole. The last hole has no high end.
func (p *pages) choose(best *hole, spans []span, need, align memory.Bytes, last bool) {
	start, end := spans[0].addr, spans[len(spans)-1].end
	if end-start < uint64(need) {
		return
	}
	size := memory.Bytes(end - start)
	if last {
		size = memory.MaxBytes
	}
	mask := uint64(align) - 1
	try := func(addr uint64, from int) {
		if addr < start || addr > end-uint64(need) {
			return
		}
		for ; from > 0 && spans[from].addr > addr; from-- {
		}
		for ; spans[from].end <= addr; from++ {
		}
		h := hole{slot: spans[from].slot, addr: addr, size: size}
		for _, s := range spans[from:] {
			if s.addr >= addr+uint64(need) {
				break
			}
			w := p.taken(p.up(s.addr), p.down(s.end), addr, need)
			h.taken += w
			if s.hollow {
				h.missing += w
			}
			if s.reached {
				h.cost += w
			}
		}
		if h.better(best) {
			*best = h
		}
	}
	for k, s := range spans {
		try((s.addr+mask)&^mask, k)
		if !last && s.end-start >= uint64(need) {
			try((s.end-uint64(need))&^mask, k)
		}
	}
}

// growPages serves r where pages have to be mapped, unless a complete search finds
// room that is.
func (ar *arena) growPages(r *allocator.Request, need, align memory.Bytes) (uint32, queue.Frontier, allocator.Outcome) {
	const tries = 8 // while others take and give
	var supply supply
	for try := 0; ; try++ {
		ar.mu.Lock()
		if ar.closed {
			ar.unlock()
			return ar.fail(r, allocator.Unsupported, queue.Frontier{})
		}
		if i, f, ok := ar.retryLocked(r, need, align); ok {
			ar.unlock()
			return i, f, allocator.OK
		}
		if try == 0 {
			supply = ar.supplyLocked()
		}
		h := ar.bestHoleLocked(r, need, align)
		o := allocator.Exhausted
		short := h.missing
		if h.slot == 0 {
			short = int64((need + ar.pages.page - 1) >> ar.pages.shift)
		} else if g, ok := ar.prepareLocked(h, need, supply); ok {
			turns := ar.turns
			ar.busy++
			ar.unlock()
			o = g.run(ar.pages)
			ar.mu.Lock()
			ar.busy--
			if o == allocator.OK {
				if i, f, ok := ar.enterLocked(&g); ok {
					ar.unlock()
					return i, f, allocator.OK
				}
				o = allocator.Exhausted
			} else {
				ar.undoLocked(&g)
			}
			if o != allocator.Exhausted && o != allocator.OverLimit {
				ar.unlock()
				return ar.fail(r, o, queue.Frontier{})
			}
			if ar.nextLocked(&supply) || ar.turns != turns && try < tries {
				ar.unlock()
				continue
			}
			short = g.fresh
		}
		f, wait := ar.waitLocked(r, need, align)
		if !wait {
			f, wait = ar.waitForPagesLocked(short, h.addr, need)
		}
		if !wait && ar.busy > 0 { // what another call has put aside is soon free again
			f, wait = queue.ReadyNow(), true
		}
		ar.unlock()
		if wait {
			o = allocator.NeedsWait
		}
		return ar.fail(r, o, f)
	}
}

// supply says where the pages of a growth come from: the policy, in one place. The
// driver makes them until it has no more; from then on whole free pages that are
// reached move, and the driver is asked for what is still missing.
type supply struct {
	move bool
}

func (ar *arena) supplyLocked() supply { return supply{move: ar.pages.full} }

// nextLocked turns to the next source of pages after the driver had no more, and
// reports whether that may help.
func (ar *arena) nextLocked(s *supply) bool {
	ar.pages.full = true
	if s.move {
		return false
	}
	s.move = true
	return true
}

// fresh is how many of the missing pages the driver is to make where whole pages
// are free elsewhere.
func (s supply) fresh(missing, whole int64) int64 {
	if !s.move {
		return missing
	}
	return max(0, missing-whole)
}

// growth is the making of a place: pieces put aside, and calls of the driver.
type growth struct {
	addr  uint64 // of the block
	need  memory.Bytes
	first uint32 // pieces put aside or coming, from here
	last  uint32 // to here
	steps []step
	fresh int64 // pages that the driver is to make
}

// step maps a run of pages: one coming piece.
type step struct {
	to, from         uint32 // pieces; from is 0 where the driver makes the pages
	toAddr, fromAddr uint64
	n                int
	done             bool // mapped at to
	lost             bool // neither: given back and not made again
}

// prepareLocked puts aside the pieces under the hole's place and those whose pages
// are to move there. It is false, and all is as it was, if there is no slot left.
func (ar *arena) prepareLocked(h hole, need memory.Bytes, s supply) (growth, bool) {
	p := ar.pages
	g := growth{addr: h.addr, need: need}
	end := h.addr + uint64(need)
	ok := true
	for i := h.slot; ok && i != 0 && ar.node(i).addr < end; {
		n := ar.node(i)
		next := n.next
		lo, hi := max(h.addr, n.addr), min(end, n.end())
		to := aside
		if n.state == hollow {
			lo, hi = uint64(p.down(lo))<<p.shift, uint64(p.up(hi))<<p.shift
			to = coming
		}
		var j uint32
		if j, ok = ar.cutLocked(i, lo, hi, to); ok {
			if g.first == 0 {
				g.first = j
			}
			g.last = j
		}
		i = next
	}
	if !ok || !ar.planLocked(&g, h.missing, s) {
		ar.undoLocked(&g)
		return growth{}, false
	}
	return g, true
}

// cutLocked puts the part from lo to hi of piece i, which is free or hollow, into
// state to. The rest stays what it was. It is false if there is no slot left.
func (ar *arena) cutLocked(i uint32, lo, hi uint64, to state) (uint32, bool) {
	ar.detachLocked(i)
	if lo > ar.node(i).addr {
		j := ar.splitLocked(i, lo)
		ar.settleLocked(i)
		if j == 0 {
			return 0, false
		}
		i = j
	}
	if hi < ar.node(i).end() {
		j := ar.splitLocked(i, hi)
		if j == 0 {
			ar.attachLocked(i)
			return 0, false
		}
		ar.node(i).state = to
		ar.settleLocked(j)
	}
	ar.node(i).state = to
	return i, true
}

// planLocked decides where the pages of each coming piece come from, and puts
// aside those that move. Where it returns false, g has what was put aside.
func (ar *arena) planLocked(g *growth, missing int64, s supply) bool {
	p := ar.pages
	var runs []run
	if s.move {
		runs = ar.runsLocked()
	}
	whole := int64(0)
	for _, r := range runs {
		whole += r.n
	}
	g.fresh = s.fresh(missing, whole)
	left := g.fresh
	for i := g.first; ; i = ar.node(i).next {
		for n := ar.node(i); n.state == coming; {
			st := step{to: i, toAddr: n.addr}
			pages := int64(n.size) >> p.shift
			if left > 0 {
				st.n = int(min(left, pages))
				left -= int64(st.n)
			} else {
				r := &runs[0]
				st.n = int(min(r.n, pages))
				from, ok := ar.liftLocked(r.slot, st.n)
				if !ok {
					return false
				}
				st.from, st.fromAddr = from, ar.node(from).addr
				if r.n -= int64(st.n); r.n == 0 {
					runs = runs[1:]
				}
			}
			if int64(st.n) == pages {
				g.steps = append(g.steps, st)
				break
			}
			j := ar.splitLocked(i, n.addr+uint64(st.n)<<p.shift)
			if j == 0 {
				if st.from != 0 {
					ar.node(st.from).state = free
					ar.attachLocked(st.from)
				}
				return false
			}
			if g.last == i {
				g.last = j
			}
			g.steps = append(g.steps, st)
			i, n = j, ar.node(j)
		}
		if i == g.last {
			return true
		}
	}
}

// run is a run of whole free pages that may move.
type run struct {
	slot uint32
	addr uint64
	n    int64
}

// runsLocked lists the runs of whole free pages that are reached, smallest first.
func (ar *arena) runsLocked() []run {
	p := ar.pages
	var list []run
	ar.eachFreeLocked(p.page, func(i uint32, n *node) bool {
		if w := p.whole(n); w > 0 && n.slab == 0 && (ar.pieces.ready(i).Reached() || mutant.Is(mutant.UnmapOnOrdered)) {
			list = append(list, run{i, n.addr, w})
		}
		return true
	})
	slices.SortFunc(list, func(a, b run) int {
		return cmp.Or(cmp.Compare(a.n, b.n), cmp.Compare(a.addr, b.addr))
	})
	return list
}

// liftLocked puts n whole pages at the high end of the free and reached piece i
// aside. If there are more, they stay in i.
func (ar *arena) liftLocked(i uint32, n int) (uint32, bool) {
	p := ar.pages
	hi := uint64(p.down(ar.node(i).end())) << p.shift
	j, ok := ar.cutLocked(i, hi-uint64(n)<<p.shift, hi, aside)
	if ok {
		ar.pieces.setReady(j, queue.ReadyNow())
	}
	return j, ok
}

// run makes the calls of the driver. If one fails, what was done is undone as far
// as the driver lets it; the steps say how they ended.
func (g *growth) run(p *pages) allocator.Outcome {
	for k := range g.steps {
		o := g.steps[k].do(p)
		if o == allocator.OK {
			continue
		}
		for j := k - 1; j >= 0; j-- {
			g.steps[j].undo(p)
		}
		return o
	}
	return allocator.OK
}

func (s *step) do(p *pages) allocator.Outcome {
	o := allocator.Exhausted
	if s.from != 0 {
		if o = p.virtual.Move(s.fromAddr, s.toAddr, s.n); o == allocator.Exhausted {
			if o = p.virtual.Shrink(s.fromAddr, s.n); o != allocator.OK {
				return o
			}
			o = p.virtual.Grow(s.toAddr, s.n) // the last resort: give back and make anew
			s.lost = o != allocator.OK
		}
	} else {
		o = p.virtual.Grow(s.toAddr, s.n)
	}
	s.done = o == allocator.OK
	return o
}

func (s *step) undo(p *pages) {
	if s.from != 0 {
		s.done = p.virtual.Move(s.toAddr, s.fromAddr, s.n) != allocator.OK
	} else {
		s.done = p.virtual.Shrink(s.toAddr, s.n) != allocator.OK
	}
}

// enterLocked enters a growth whose steps are done, and hands out its block.
func (ar *arena) enterLocked(g *growth) (uint32, queue.Frontier, bool) {
	i := g.first
	for i != g.last {
		if ar.node(i).next == g.last {
			g.last = i
		}
		ar.fuseLocked(i)
	}
	ar.node(i).state = free
	j, f, ok := ar.carveLocked(i, g.addr, g.need)
	if ok {
		ar.stats.Misses++
	}
	ar.turns++
	if g.fresh > 0 {
		ar.pages.full = false
	}
	ar.leaveLocked(g)
	return j, f, ok
}

// leaveLocked enters where the pages of a growth came from and what that makes of
// the bytes held.
func (ar *arena) leaveLocked(g *growth) {
	held := memory.Bytes(0)
	for k := range g.steps {
		s := &g.steps[k]
		size := memory.Bytes(s.n) * ar.pages.page
		switch {
		case s.from == 0 && s.done:
			held += size
		case s.from == 0:
		case s.lost:
			held -= size
			fallthrough
		case s.done:
			ar.node(s.from).state = hollow
			ar.attachLocked(s.from)
		default:
			ar.node(s.from).state = free
			ar.attachLocked(s.from)
		}
	}
	ar.holdLocked(held)
}

// undoLocked enters a growth that failed: all is as it was, but for pages that the
// driver would not take back where they came from.
func (ar *arena) undoLocked(g *growth) {
	k := 0
	for i := g.first; i != 0; {
		n := ar.node(i)
		last, next := i == g.last, n.next
		to := free
		if n.state == coming {
			to = hollow
			if k < len(g.steps) && g.steps[k].to == i {
				if g.steps[k].done {
					to = free
				}
				k++
			}
		}
		n.state = to
		ar.attachLocked(i)
		if last {
			break
		}
		i = next
	}
	ar.leaveLocked(g)
}

// waitForPagesLocked returns the frontier after which missing more whole pages are
// free, not counting those under need bytes at addr, where they are to go. Those
// freed first come first.
func (ar *arena) waitForPagesLocked(missing int64, addr uint64, need memory.Bytes) (queue.Frontier, bool) {
	p := ar.pages
	after := queue.ReadyNow()
	for _, piece := range ar.pendingLocked() {
		n := ar.node(piece.slot)
		w := p.whole(n) - p.taken(p.up(n.addr), p.down(n.end()), addr, need)
		if n.slab != 0 || w <= 0 {
			continue
		}
		after = queue.Join(after, piece.ready)
		if missing -= w; missing <= 0 {
			return after, true
		}
	}
	return queue.Frontier{}, false
}

// shrink gives whole free pages that are reached back until that was want bytes,
// the highest addresses first, and returns how much it was.
func (ar *arena) shrink(want memory.Bytes) memory.Bytes {
	p := ar.pages
	var g growth
	ar.mu.Lock()
	ar.coalesceLocked(ar.bothReachedLocked)
	ar.busy++
	runs := ar.runsLocked()
	slices.SortFunc(runs, func(a, b run) int { return cmp.Compare(b.addr, a.addr) })
	left := int64(want >> p.shift)
	if want&(p.page-1) != 0 {
		left++
	}
	for _, r := range runs {
		n := min(r.n, left)
		if n == 0 {
			break
		}
		i, ok := ar.liftLocked(r.slot, int(n))
		if !ok {
			break
		}
		g.steps = append(g.steps, step{from: i, fromAddr: ar.node(i).addr, n: int(n)})
		left -= n
	}
	ar.unlock()
	for k := range g.steps {
		s := &g.steps[k]
		s.lost = p.virtual.Shrink(s.fromAddr, s.n) == allocator.OK
	}
	ar.mu.Lock()
	gave := memory.Bytes(0)
	for k := range g.steps {
		if g.steps[k].lost {
			gave += memory.Bytes(g.steps[k].n) * p.page
			ar.stats.Evicted++
			p.full = false
		}
	}
	ar.leaveLocked(&g)
	ar.busy--
	ar.unlock()
	return gave
}
