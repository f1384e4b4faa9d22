package block

import (
	"fmt"
	"strings"

	"github.com/halyard-go/halyard/hal/memory"
)

// checkEvery bounds the cost of the checks: with many pieces only each checkEvery-th
// critical section is checked.
const (
	checkFully = 1 << 10
	checkEvery = 1 << 10
)

// mustHoldLocked panics if the books are wrong, with a picture of the arena.
func (ar *arena) mustHoldLocked() {
	st := &ar.stats
	if ar.index.blocks > checkFully && (st.Allocs+st.Frees)%checkEvery != 0 {
		return
	}
	if st.Allocs-st.Frees > checkFully && (st.Allocs+st.Frees)%checkEvery != 0 {
		return
	}
	if err := ar.checkLocked(); err != nil {
		panic(fmt.Sprintf("block: heap %d: %v\n%s", ar.heap, err, ar.dumpLocked()))
	}
}

// tally is what a walk over all pieces adds up.
type tally struct {
	live, free memory.Bytes
	frees      map[uint32]bool
	hollows    map[uint32]bool
	mapped     int64
	lastPage   int64
}

// checkLocked verifies that pieces tile their slabs and the range, that neighbours
// are merged, and that index, lists and figures are what the pieces add up to.
func (ar *arena) checkLocked() error {
	t := tally{frees: map[uint32]bool{}, hollows: map[uint32]bool{}, lastPage: -1}
	held := memory.Bytes(0)
	for id := range ar.slabs {
		s := &ar.slabs[id]
		if s.first == 0 {
			continue
		}
		held += s.block.Size
		size := s.block.Size
		if !s.own {
			size &^= ar.config.MinBlock - 1
		}
		if err := ar.walkLocked(&t, s.first, uint32(id), s.block.Addr, size); err != nil {
			return fmt.Errorf("slab %d: %w", id, err)
		}
	}
	if p := ar.pages; p != nil && p.first != 0 {
		if err := ar.walkLocked(&t, p.first, 0, p.addr, p.size); err != nil {
			return fmt.Errorf("range: %w", err)
		}
		held += memory.Bytes(t.mapped) * p.page
		if err := ar.checkRangeLocked(&t); err != nil {
			return err
		}
	}
	st := &ar.stats
	switch {
	case t.live != st.Live:
		return fmt.Errorf("live pieces add up to %d, figures say %d", t.live, st.Live)
	case held != st.Held:
		return fmt.Errorf("slabs and mapped pages add up to %d, figures say %d held", held, st.Held)
	case st.PeakLive < st.Live || st.PeakHeld < st.Held || st.Live < 0:
		return fmt.Errorf("impossible figures: %+v", *st)
	case st.Allocs-st.Frees > 0 && t.live == 0, st.Allocs < st.Frees:
		return fmt.Errorf("%d blocks handed out and %d taken back, with %d bytes live", st.Allocs, st.Frees, t.live)
	case st.Allocs != st.Hits+st.Misses:
		return fmt.Errorf("%d blocks handed out, but %d hits and %d misses", st.Allocs, st.Hits, st.Misses)
	}
	return ar.index.check(t.frees)
}

// walkLocked adds up the pieces of one slab or of the range.
func (ar *arena) walkLocked(t *tally, first, id uint32, addr uint64, size memory.Bytes) error {
	end := addr + uint64(size)
	prev, before := uint32(0), state(0)
	for i := first; i != 0; {
		n := ar.node(i)
		switch {
		case n.addr != addr || n.size <= 0 || n.end() > end:
			return fmt.Errorf("piece %d at %#x+%d, want one at %#x that ends by %#x", i, n.addr, n.size, addr, end)
		case n.prev != prev || n.slab != id:
			return fmt.Errorf("piece %d has neighbour %d in slab %d, want %d in %d", i, n.prev, n.slab, prev, id)
		case n.state == before && (n.state == hollow || n.state == free && ar.pieces.ready(prev) == ar.pieces.ready(i)):
			return fmt.Errorf("pieces %d and %d are not merged", prev, i)
		}
		mapped := true
		switch n.state {
		case live:
			t.live += n.size
		case free:
			t.free += n.size
			if ar.pages == nil || i != ar.pages.brink {
				t.frees[i] = true
			}
		case aside:
		case hollow:
			t.hollows[i] = true
			mapped = false
		case coming:
			mapped = false
		default:
			return fmt.Errorf("piece %d is in state %d", i, n.state)
		}
		if id == 0 {
			p := ar.pages
			if !mapped && (n.addr|uint64(n.size))&uint64(p.page-1) != 0 {
				return fmt.Errorf("unmapped piece %d at %#x+%d isn't whole pages", i, n.addr, n.size)
			}
			if mapped {
				lo, hi := max(p.down(n.addr), t.lastPage+1), p.up(n.end())
				t.mapped += max(0, hi-lo)
				t.lastPage = max(t.lastPage, hi-1)
			}
		}
		addr, prev, before = n.end(), i, n.state
		i = n.next
	}
	if addr != end {
		return fmt.Errorf("pieces end at %#x, want %#x", addr, end)
	}
	return nil
}

// checkRangeLocked verifies the list of hollow pieces, the tail and the brink.
func (ar *arena) checkRangeLocked(t *tally) error {
	p := ar.pages
	listed, up := 0, uint32(0)
	for i := p.hollow; i != 0; i = ar.node(i).down {
		if !t.hollows[i] || ar.node(i).up != up {
			return fmt.Errorf("piece %d is in the list of hollow ones, after %d", i, ar.node(i).up)
		}
		listed++
		up = i
	}
	if listed != len(t.hollows) {
		return fmt.Errorf("%d hollow pieces, %d in their list", len(t.hollows), listed)
	}
	tail, brink := uint32(0), uint32(0)
	for i := range t.hollows {
		if ar.node(i).next == 0 {
			tail = i
		}
	}
	if tail != 0 {
		if j := ar.node(tail).prev; j != 0 && ar.node(j).state == free {
			brink = j
		}
	}
	if p.tail != tail || p.brink != brink {
		return fmt.Errorf("tail and brink are %d and %d, want %d and %d", p.tail, p.brink, tail, brink)
	}
	return nil
}

// check verifies that the index has exactly these blocks, each in its class and in
// order, and that the bitmaps say so.
func (x *index) check(want map[uint32]bool) error {
	found := 0
	for c := range x.class {
		cl := &x.class[c]
		if got := x.floor[c>>6]>>(c&63)&1 == 1; got != (cl.n > 0) {
			return fmt.Errorf("class %d has %d blocks, bitmap says %v", c, cl.n, got)
		}
		n, last := uint32(0), entry{}
		ordered := true
		x.each(cl, func(i uint32) {
			b := x.node(i)
			e := entry{b.size, b.addr, i}
			ordered = ordered && last.less(e) && x.classOf(b.size) == c && want[i]
			last = e
			n++
		})
		if !ordered || n != cl.n {
			return fmt.Errorf("class %d: %d blocks of %d, in order: %v", c, n, cl.n, ordered)
		}
		if cl.tree != nil && cl.n <= listShort || cl.tree == nil && cl.n > listLong {
			return fmt.Errorf("class %d of %d blocks: a tree: %v", c, cl.n, cl.tree != nil)
		}
		found += int(n)
	}
	for w := range x.floor {
		if got := x.roof>>w&1 == 1; got != (x.floor[w] != 0) {
			return fmt.Errorf("word %d is %#x, roof says %v", w, x.floor[w], got)
		}
	}
	if found != len(want) || x.blocks != uint64(found) {
		return fmt.Errorf("index has %d blocks and counts %d, want %d", found, x.blocks, len(want))
	}
	return nil
}

// each calls visit for the blocks of a class in the order in which it keeps them.
func (x *index) each(cl *class, visit func(i uint32)) {
	if cl.tree != nil {
		cl.tree.Ascend(func(e entry) bool {
			visit(e.slot)
			return true
		})
		return
	}
	for i := cl.head; i != 0; i = x.node(i).down {
		visit(i)
	}
}

var stateNames = [...]string{live: "live", free: "free", aside: "aside", hollow: "hollow", coming: "coming"}

// dumpLocked pictures the arena, one piece a line.
func (ar *arena) dumpLocked() string {
	var b strings.Builder
	dump := func(title string, first uint32) {
		fmt.Fprintln(&b, title)
		for i, k := first, 0; i != 0 && k < checkFully; k++ {
			n := ar.node(i)
			fmt.Fprintf(&b, "  %6d %#014x +%-12d %-6s %v\n", i, n.addr, n.size, stateNames[n.state], ar.pieces.ready(i))
			i = n.next
		}
	}
	for id := range ar.slabs {
		if s := &ar.slabs[id]; s.first != 0 {
			dump(fmt.Sprintf("slab %d, %v at %#x", id, s.block.Size, s.block.Addr), s.first)
		}
	}
	if p := ar.pages; p != nil {
		dump(fmt.Sprintf("range, %v at %#x", p.size, p.addr), p.first)
	}
	return b.String()
}
