package haltest

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Monitor knows for each byte of a simulated device which operations may still
// touch it, and notes whoever takes it before its time. It keeps its own account of
// order: each operation in flight has a vector clock, made of the order within its
// queue and the waits its hardware was given, and of nothing that Halyard believes.
// Bytes are told apart by physical page where pages are mapped, so that memory that
// has moved is still the same memory.
//
// What counts as a violation:
//
//   - an operation on a buffer is issued while an operation on an earlier buffer with
//     the same bytes is in flight that it is not ordered after;
//   - the driver frees, unmaps or releases memory, or the host views it, while an
//     operation that touches it is in flight;
//   - [Monitor.HandedToHost] finds such an operation.
//
// Operations on one and the same buffer are its owner's to order. Safe for
// concurrent use.
type Monitor struct {
	mu         sync.Mutex
	clocks     map[queue.ID]clock                // what the next operation of a queue comes after
	flight     map[queue.Point]*operation        // issued, not over
	touches    []*touch                          // of operations in flight and of foreign work
	sizes      map[uint64]memory.Bytes           // of raw allocations
	pages      map[uint64]driver.Page            // mapped, by address
	page       uint64                            // their size
	onDealloca func(at queue.Point, r queue.Ref) // told of deallocas as they are issued
	dead       bool                              // the device is lost: nothing runs on it any more
	violations []string
}

// clock is a vector clock: of each queue, the operation up to which one comes after.
type clock map[queue.ID]uint64

func (c clock) join(d clock) {
	for q, v := range d {
		c[q] = max(c[q], v)
	}
}

func (c clock) clone() clock {
	d := make(clock, len(c))
	d.join(c)
	return d
}

// operation is one in flight.
type operation struct {
	at    queue.Point
	after clock
}

// owner is whose bytes an operation touches: one hand-out of one block.
type owner struct {
	keeper any
	id     uint64
}

// touch is a range of bytes that something in flight touches.
type touch struct {
	until      queue.Point
	what       string
	owner      owner
	addr, size uint64
	pieces     []piece
}

// piece is a range of physical memory.
type piece struct {
	page       uint64 // 1 + the page's number; 0: base is an address
	base, size uint64
}

func (p piece) meets(q piece) bool {
	return p.page == q.page && p.base < q.base+q.size && q.base < p.base+p.size
}

func newMonitor() *Monitor {
	return &Monitor{
		clocks: map[queue.ID]clock{}, flight: map[queue.Point]*operation{},
		sizes: map[uint64]memory.Bytes{}, pages: map[uint64]driver.Page{},
	}
}

// Err returns what was found wrong so far, or nil.
func (m *Monitor) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.violations) == 0 {
		return nil
	}
	return fmt.Errorf("haltest: %d violations:\n%s", len(m.violations), strings.Join(m.violations, "\n"))
}

func (m *Monitor) blameLocked(format string, args ...any) {
	if m.dead {
		return
	}
	m.violations = append(m.violations, "  "+fmt.Sprintf(format, args...))
}

// Foreign declares work that no queue of the device knows of: it touches b's bytes
// until the point is over.
func (m *Monitor) Foreign(b allocator.Block, until queue.Point) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.flight[until] == nil {
		return
	}
	m.touches = append(m.touches, m.touchLocked(until, "foreign work", owner{b.Keeper, b.ID}, b.Addr, uint64(b.Size)))
}

// HandedToHost says that the host may now touch size bytes at addr.
func (m *Monitor) HandedToHost(addr uint64, size memory.Bytes) {
	m.acted("a hand-out to the host", addr, size)
}

// InFlight is how many operations are issued and not over.
func (m *Monitor) InFlight() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.flight)
}

// touchLocked makes the record of a range.
func (m *Monitor) touchLocked(until queue.Point, what string, o owner, addr, size uint64) *touch {
	return &touch{until, what, o, addr, size, m.piecesLocked(addr, size)}
}

// piecesLocked translates a range of addresses to physical memory.
func (m *Monitor) piecesLocked(addr, size uint64) (out []piece) {
	for size > 0 {
		n := size
		if m.page != 0 {
			start := addr &^ (m.page - 1)
			if p, ok := m.pages[start]; ok {
				n = min(n, start+m.page-addr)
				out = append(out, piece{1 + uint64(p), addr - start, n})
				addr, size = addr+n, size-n
				continue
			}
		}
		out = append(out, piece{0, addr, n})
		break
	}
	return out
}

// issued is told of an operation as its executor gets it.
func (m *Monitor) issued(at queue.Point, op *queue.Op, waits []queue.Bound) {
	m.mu.Lock()
	if op.Kind == queue.Dealloca && m.onDealloca != nil {
		f := m.onDealloca
		defer f(at, op.Refs[0])
	}
	defer m.mu.Unlock()
	c := m.clocks[at.Queue]
	if c == nil {
		c = clock{}
		m.clocks[at.Queue] = c
	}
	for i := range waits {
		p := waits[i].Point
		if by := m.flight[p]; by != nil {
			c.join(by.after)
			c[p.Queue] = max(c[p.Queue], p.Value)
		}
	}
	c[at.Queue] = at.Value
	m.flight[at] = &operation{at, c.clone()}
	add := func(i int, addr uint64, size int64) {
		if size == 0 {
			return
		}
		o := owner{op.Refs[i].Keeper, op.Refs[i].ID}
		if o.keeper == nil { // a layer's own
			o = owner{at, 0}
		}
		t := m.touchLocked(at, op.Kind.String(), o, addr, uint64(size))
		m.checkLocked(at, t, c)
		m.touches = append(m.touches, t)
	}
	switch op.Kind {
	case queue.Fill:
		add(0, op.Dst, op.Size)
	case queue.Upload:
		add(0, op.Dst, int64(len(op.Host)))
	case queue.Download:
		add(0, op.Src, int64(len(op.Host)))
	case queue.Copy:
		add(0, op.Dst, op.Size)
		add(1, op.Src, op.Size)
	}
}

// checkLocked blames t, of the operation at with clock c, for every touch of another
// owner's that it doesn't come after.
func (m *Monitor) checkLocked(at queue.Point, t *touch, c clock) {
	for _, u := range m.touches {
		if u.owner == t.owner || c[u.until.Queue] >= u.until.Value || !meet(u.pieces, t.pieces) {
			continue
		}
		m.blameLocked("%v %s of [%#x, +%#x) was issued while %v %s of [%#x, +%#x), for an earlier owner, may still touch it",
			at, t.what, t.addr, t.size, u.until, u.what, u.addr, u.size)
	}
}

func meet(a, b []piece) bool {
	for _, p := range a {
		if slices.ContainsFunc(b, p.meets) {
			return true
		}
	}
	return false
}

// lost is told of the loss of the device: from then on the driver may take anything.
func (m *Monitor) lost() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dead = true
}

// retired is told of an operation when it is over.
func (m *Monitor) retired(at queue.Point) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.flight, at)
	m.touches = slices.DeleteFunc(m.touches, func(t *touch) bool { return t.until == at })
}

// took and gave keep the sizes of raw allocations.
func (m *Monitor) took(addr uint64, size memory.Bytes) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sizes[addr] = size
}

func (m *Monitor) gave(what string, addr uint64) {
	m.mu.Lock()
	size := m.sizes[addr]
	delete(m.sizes, addr)
	m.mu.Unlock()
	m.acted(what, addr, size)
}

// acted is told of something that happens at once to a range of addresses.
func (m *Monitor) acted(what string, addr uint64, size memory.Bytes) {
	m.mu.Lock()
	defer m.mu.Unlock()
	pieces := m.piecesLocked(addr, uint64(size))
	for _, u := range m.touches {
		if meet(u.pieces, pieces) {
			m.blameLocked("%s of [%#x, +%#x) while %v %s of [%#x, +%#x) may still touch it", what, addr, uint64(size), u.until, u.what, u.addr, u.size)
		}
	}
}

func (m *Monitor) mapped(addr uint64, size memory.Bytes, pages []driver.Page) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.page = uint64(size)
	for i, p := range pages {
		m.pages[addr+uint64(i)*m.page] = p
	}
}

// unmapped is told of pages before they go: what touches these addresses would fault,
// also where the page stays mapped somewhere else.
func (m *Monitor) unmapped(addr uint64, size memory.Bytes, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	end := addr + uint64(n)*uint64(size)
	for _, u := range m.touches {
		if u.addr < end && addr < u.addr+u.size {
			m.blameLocked("unmap of [%#x, +%#x) while %v %s of [%#x, +%#x) may still touch it", addr, end-addr, u.until, u.what, u.addr, u.size)
		}
	}
	for i := range n {
		delete(m.pages, addr+uint64(i)*uint64(size))
	}
}

// released is told of a page before it goes.
func (m *Monitor) released(p driver.Page) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, u := range m.touches {
		if slices.ContainsFunc(u.pieces, func(q piece) bool { return q.page == 1+uint64(p) }) {
			m.blameLocked("release of page %d while %v %s may still touch it", p, u.until, u.what)
		}
	}
}
