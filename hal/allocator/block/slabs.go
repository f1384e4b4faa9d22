package block

import (
	"cmp"
	"slices"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// stepsDown bounds how often a slab that the base refuses is halved before the
// exact need is asked for.
const stepsDown = 6

// growSlabs serves r from a new slab, unless a complete search finds room.
func (ar *arena) growSlabs(r *allocator.Request, need, align memory.Bytes) (uint32, queue.Frontier, allocator.Outcome) {
	for again := false; ; again = true {
		ar.mu.Lock()
		if ar.closed {
			ar.unlock()
			return ar.fail(r, allocator.Unsupported, queue.Frontier{})
		}
		if i, f, ok := ar.retryLocked(r, need, align); ok {
			ar.unlock()
			return i, f, allocator.OK
		}
		size := need
		if !again {
			size = ar.slabSizeLocked(need)
		}
		ar.asked += size
		ar.busy++
		excess := ar.excessLocked()
		ar.unlock()

		if excess > 0 {
			ar.returnSlabs(excess, false)
		}
		got, f, o := ar.ask(r, size, need, align)

		ar.mu.Lock()
		ar.asked -= size
		ar.busy--
		if o == allocator.OK {
			i := ar.addSlabLocked(got, f, false)
			if i == 0 {
				ar.unlock()
				ar.base.Free(got, f)
				return ar.fail(r, allocator.Exhausted, queue.Frontier{})
			}
			ar.settleLocked(i)
			s := search{ar: ar, r: r, need: need, align: align, left: glance, choose: choices, complete: true}
			ok := ar.findLocked(&s)
			if !ok {
				// The base gave memory that r can't use at once: hand it on as it is, and the
				// stack sees to the rest.
				s.addr, ok = s.fit(ar.node(i))
				s.found = i
			}
			if ok {
				ar.detachLocked(s.found)
				if i, f, ok := ar.carveLocked(s.found, s.addr, need); ok {
					ar.stats.Misses++
					ar.unlock()
					return i, f, allocator.OK
				}
			}
			ar.unlock()
			return ar.fail(r, allocator.Unsupported, queue.Frontier{}) // not aligned as asked
		}
		ar.unlock()

		switch o {
		case allocator.Exhausted, allocator.OverLimit, allocator.NeedsWait:
			if ar.returnSlabs(need, false) > 0 {
				continue
			}
			if wait, ok := ar.waitForSlabs(r, need, align); ok {
				o, f = allocator.NeedsWait, wait
			}
		}
		return ar.fail(r, o, f)
	}
}

// slabSizeLocked returns how much to ask for. While another grower is asking, only
// the least: together they take about what one would.
func (ar *arena) slabSizeLocked(need memory.Bytes) memory.Bytes {
	c := ar.config
	if need >= ar.most {
		return need
	}
	size := c.MinSlab
	if ar.asked == 0 {
		size = max(size, memory.Bytes(float64(ar.stats.Held)*c.Growth/100))
	}
	size = max(size, need)
	round := max(c.MinBlock, min(c.MinSlab, defaultMinSlab))
	return max(need, min((size+round-1)/round*round, ar.most)&^(c.MinBlock-1))
}

// ask takes a slab of size bytes from the base, stepping down to what is needed if
// it refuses.
func (ar *arena) ask(r *allocator.Request, size, need, align memory.Bytes) (allocator.Block, queue.Frontier, allocator.Outcome) {
	up := allocator.Request{
		Kind: allocator.MakeKind(ar.heap, align, ar.usage|r.Kind.Usage(), r.Kind.Access(), r.Kind&allocator.ReuseFlags),
		Who:  allocator.Who{Queue: r.Who.Queue},
	}
	for step := 1; ; step++ {
		up.Size = size
		b, f, o := ar.base.Allocate(up)
		switch o {
		case allocator.Exhausted, allocator.OverLimit, allocator.NeedsWait, allocator.TooLarge:
		default:
			return b, f, o
		}
		if size <= need {
			return b, f, o
		}
		half := (size/2 + ar.config.MinBlock - 1) &^ (ar.config.MinBlock - 1)
		size = max(need, half)
		if step == stepsDown {
			size = need
		}
	}
}

// allocateOwn serves r with a slab of its own.
func (ar *arena) allocateOwn(r *allocator.Request, need, align memory.Bytes) (uint32, queue.Frontier, allocator.Outcome) {
	up := *r
	up.Size = need
	up.Kind = allocator.MakeKind(ar.heap, align, r.Kind.Usage(), r.Kind.Access(), r.Kind&(allocator.ReuseFlags|allocator.NoSubAlloc))
	for {
		ar.mu.Lock()
		closed := ar.closed
		ar.unlock()
		if closed {
			return ar.fail(r, allocator.Unsupported, queue.Frontier{})
		}
		got, f, o := ar.base.Allocate(up)
		switch o {
		case allocator.OK:
			ar.mu.Lock()
			i := ar.addSlabLocked(got, f, true)
			if i == 0 {
				ar.unlock()
				ar.base.Free(got, f)
				return ar.fail(r, allocator.Exhausted, queue.Frontier{})
			}
			f := ar.wakeLocked(i)
			ar.stats.Misses++
			ar.unlock()
			return i, f, allocator.OK
		case allocator.Exhausted, allocator.OverLimit, allocator.NeedsWait:
			if ar.giveBack(need) > 0 {
				continue
			}
		}
		return ar.fail(r, o, f)
	}
}

// addSlabLocked enters memory of the base that is usable after f. It returns its one
// piece, free and detached, or 0 if there is no slot left.
func (ar *arena) addSlabLocked(b allocator.Block, f queue.Frontier, own bool) uint32 {
	i := ar.pieces.take()
	if i == 0 {
		return 0
	}
	id := uint32(len(ar.slabs))
	if n := len(ar.spare); n > 0 {
		id, ar.spare = ar.spare[n-1], ar.spare[:n-1]
	} else {
		ar.slabs = append(ar.slabs, slab{})
	}
	ar.slabs[id] = slab{block: b, first: i, own: own}
	size := b.Size
	if !own {
		size &^= ar.config.MinBlock - 1
	}
	*ar.node(i) = node{addr: b.Addr, size: size, slab: id, state: free}
	if f.Unknown() {
		f = queue.Everything()
	}
	ar.pieces.setReady(i, f)
	ar.holdLocked(b.Size)
	return i
}

// dropSlabLocked takes a slab off the books whose one piece is detached.
func (ar *arena) dropSlabLocked(id uint32) allocator.Block {
	s := &ar.slabs[id]
	b := s.block
	ar.pieces.drop(s.first)
	*s = slab{}
	ar.spare = append(ar.spare, id)
	ar.holdLocked(-b.Size)
	return b
}

// wholeLocked returns the free piece that is all of the slab, or 0.
func (ar *arena) wholeLocked(s *slab) uint32 {
	if s.first == 0 {
		return 0
	}
	if n := ar.node(s.first); n.state != free || n.next != 0 {
		return 0
	}
	return s.first
}

// excessLocked is how much of the wholly free and reached slabs is beyond what may
// be kept when growing.
func (ar *arena) excessLocked() memory.Bytes {
	if ar.config.Keep == memory.MaxBytes {
		return 0
	}
	sum := -ar.config.Keep
	for id := range ar.slabs {
		s := &ar.slabs[id]
		if i := ar.wholeLocked(s); i != 0 && ar.pieces.ready(i).Reached() {
			sum += s.block.Size
		}
	}
	return sum
}

// returnSlabs gives wholly free slabs back to the base until that was want bytes,
// the highest addresses first, and returns how much it was. Those that aren't
// reached stay unless all of them are to go.
func (ar *arena) returnSlabs(want memory.Bytes, all bool) memory.Bytes {
	type idle struct {
		id    uint32
		block allocator.Block
		ready queue.Frontier
	}
	var list []idle
	ar.mu.Lock()
	if all {
		ar.coalesceLocked(always)
	} else {
		ar.coalesceLocked(ar.bothReachedLocked)
	}
	for id := range ar.slabs {
		s := &ar.slabs[id]
		i := ar.wholeLocked(s)
		if i == 0 {
			continue
		}
		if f := ar.pieces.ready(i); all || f.Reached() {
			list = append(list, idle{uint32(id), s.block, f})
		}
	}
	slices.SortFunc(list, func(a, b idle) int { return cmp.Compare(b.block.Addr, a.block.Addr) })
	gave := memory.Bytes(0)
	for k := range list {
		if gave >= want {
			list = list[:k]
			break
		}
		gave += list[k].block.Size
		ar.detachLocked(ar.slabs[list[k].id].first)
		ar.dropSlabLocked(list[k].id)
		ar.stats.Evicted++
	}
	ar.busy++
	ar.unlock()
	for _, s := range list {
		ar.base.Free(s.block, s.ready)
	}
	ar.mu.Lock()
	ar.busy--
	ar.unlock()
	return gave
}

// waitForSlabs returns the frontier after which r can be served although the base
// has nothing more: that of a pending piece that fits, or that after which enough
// wholly free slabs can go back.
func (ar *arena) waitForSlabs(r *allocator.Request, need, align memory.Bytes) (queue.Frontier, bool) {
	ar.mu.Lock()
	defer ar.unlock()
	if f, ok := ar.waitLocked(r, need, align); ok {
		return f, true
	}
	after, sum := queue.ReadyNow(), memory.Bytes(0)
	for _, p := range ar.pendingLocked() {
		s := &ar.slabs[ar.node(p.slot).slab]
		if ar.wholeLocked(s) != p.slot {
			continue
		}
		after = queue.Join(after, p.ready)
		if sum += s.block.Size; sum >= need {
			return after, true
		}
	}
	if ar.busy > 0 { // what another call is asking for, or giving back, may do
		return queue.ReadyNow(), true
	}
	return queue.Frontier{}, false
}
