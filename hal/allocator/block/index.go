package block

import (
	"math/bits"

	"github.com/google/btree"

	"github.com/halyard-go/halyard/hal/memory"
)

// Size classes: one for each size below 2·perDouble units, then perDouble of them
// for each power of two. The unit is at least minUnit, so every size has one.
const (
	perDouble = 32
	logDouble = 5
	minUnit   = 16
	classes   = (63-4-logDouble)*perDouble + perDouble // 63-bit sizes of at least minUnit = 1<<4 bytes
	words     = (classes + 63) / 64

	listLong  = 32 // a class with more blocks than this becomes a tree
	listShort = 12 // and a list again when it has shrunk to this
	degree    = 32
	spareNode = 64 // tree nodes kept for reuse
)

// index finds free blocks by size and address: bitmaps find the class, and a class
// is a sorted list through the nodes while short and a btree once long.
//
//	roof   word w has a bit set?      ..0 1 0 1
//	floor  class 64w+b has blocks?        │   └─ 0010..
//	class  list: 768@0x200 ─ 784@0x100    └───── 1000..
//	       or tree of (size, address)
//
// It is guarded by the arena's lock.
type index struct {
	pieces *pieces
	shift  uint // log2 of the unit
	roof   uint64
	floor  [words]uint64
	class  [classes]class
	spare  *btree.FreeListG[entry]
	blocks uint64
}

type class struct {
	head uint32
	n    uint32
	tree *btree.BTreeG[entry] // nil while the class is a list
}

// entry is a block in a tree.
type entry struct {
	size memory.Bytes
	addr uint64
	slot uint32
}

func (e entry) less(f entry) bool {
	return e.size < f.size || e.size == f.size && e.addr < f.addr
}

func (x *index) init(p *pieces, unit memory.Bytes) {
	x.pieces = p
	x.shift = uint(bits.TrailingZeros64(uint64(unit)))
}

// classOf returns the class of a size of at least one unit.
func (x *index) classOf(size memory.Bytes) int {
	n := uint64(size) >> x.shift
	if n < 2*perDouble {
		return int(n)
	}
	log := uint(bits.Len64(n)) - (logDouble + 1) // n>>log is in [perDouble, 2·perDouble)
	return int(log)<<logDouble + int(n>>log)
}

// from returns the first class from c on that has blocks, or -1.
func (x *index) from(c int) int {
	if c >= classes {
		return -1
	}
	w := c >> 6
	if m := x.floor[w] >> (c & 63) << (c & 63); m != 0 {
		return w<<6 | bits.TrailingZeros64(m)
	}
	m := x.roof >> (w + 1) << (w + 1)
	if m == 0 {
		return -1
	}
	w = bits.TrailingZeros64(m)
	return w<<6 | bits.TrailingZeros64(x.floor[w])
}

func (x *index) node(i uint32) *node { return x.pieces.at(i) }

// insert adds the free block in slot i.
func (x *index) insert(i uint32) {
	n := x.node(i)
	c := x.classOf(n.size)
	cl := &x.class[c]
	x.blocks++
	cl.n++
	if cl.tree != nil {
		cl.tree.ReplaceOrInsert(entry{n.size, n.addr, i})
		return
	}
	next := cl.head
	if next == 0 {
		x.floor[c>>6] |= 1 << (c & 63)
		x.roof |= 1 << (c >> 6)
		n.up, n.down = 0, 0
		cl.head = i
		return
	}
	prev := uint32(0)
	for next != 0 {
		m := x.node(next)
		if n.size < m.size || n.size == m.size && n.addr < m.addr {
			m.up = i
			break
		}
		prev, next = next, m.down
	}
	n.up, n.down = prev, next
	if prev == 0 {
		cl.head = i
	} else {
		x.node(prev).down = i
	}
	if cl.n > listLong {
		x.plant(cl)
	}
}

// remove takes the free block in slot i out. Its size is still what it was when it
// was inserted.
func (x *index) remove(i uint32) {
	n := x.node(i)
	c := x.classOf(n.size)
	cl := &x.class[c]
	x.blocks--
	cl.n--
	if cl.tree != nil {
		cl.tree.Delete(entry{size: n.size, addr: n.addr})
		if cl.n <= listShort {
			x.fell(cl)
		}
		return
	}
	up, down := n.up, n.down
	if down != 0 {
		x.node(down).up = up
	}
	if up != 0 {
		x.node(up).down = down
		return
	}
	cl.head = down
	if down == 0 {
		if x.floor[c>>6] &^= 1 << (c & 63); x.floor[c>>6] == 0 {
			x.roof &^= 1 << (c >> 6)
		}
	}
}

// plant turns a list into a tree.
func (x *index) plant(cl *class) {
	if x.spare == nil {
		x.spare = btree.NewFreeListG[entry](spareNode)
	}
	cl.tree = btree.NewWithFreeListG(degree, entry.less, x.spare)
	for i := cl.head; i != 0; {
		n := x.node(i)
		cl.tree.ReplaceOrInsert(entry{n.size, n.addr, i})
		i = n.down
	}
	cl.head = 0
}

// fell turns a tree into a list.
func (x *index) fell(cl *class) {
	below := uint32(0)
	cl.tree.Descend(func(e entry) bool {
		n := x.node(e.slot)
		n.up, n.down = 0, below
		if below != 0 {
			x.node(below).up = e.slot
		}
		below = e.slot
		return true
	})
	cl.head = below
	cl.tree.Clear(true)
	cl.tree = nil
}

// ascend calls visit for the free blocks of at least size bytes, by size and then
// by address, until it returns false.
func (x *index) ascend(size memory.Bytes, visit func(i uint32, n *node) bool) {
	for c := x.from(x.classOf(size)); c >= 0; c = x.from(c + 1) {
		cl := &x.class[c]
		if cl.tree == nil {
			for i := cl.head; i != 0; {
				n := x.node(i)
				next := n.down
				if n.size >= size && !visit(i, n) {
					return
				}
				i = next
			}
			continue
		}
		more := true
		cl.tree.AscendGreaterOrEqual(entry{size: size}, func(e entry) bool {
			more = visit(e.slot, x.node(e.slot))
			return more
		})
		if !more {
			return
		}
	}
}
