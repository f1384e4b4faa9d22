package replay

import (
	"context"
	"encoding/binary"

	"github.com/google/btree"

	"github.com/halyard-go/halyard/hal"
)

// edge is how many bytes are marked at each end of a buffer; one of at most two
// edges is marked whole.
const edge = 16

// interval is where a live buffer lies.
type interval struct {
	lo, hi uint64
	id     int32
}

// auditor checks what one run is handed.
type auditor struct {
	r *runner

	// live are disjoint intervals. A buffer over another one is counted, and left
	// out to keep them so: in says which are there.
	live *btree.BTreeG[interval]
	in   []bool

	marks  []byte // 2*edge by id: what the ends of the buffer must hold
	births uint64 // allocations so far, so that no two have the same marks

	// Reads are looked at later, so that queues run on: a ring of them.
	ring    [readsAhead]check
	got     []byte // 2*edge a slot
	next    int    // the slot to use next
	pending int
	fences  []hal.Fence // by queue, for one value of a semaphore
	values  []uint64    // by queue: what reads have signalled so far
}

// readsAhead is how many reads may be under way at once.
const readsAhead = 1024

func newAuditor(r *runner, allocs, queues int) *auditor {
	a := &auditor{
		r:      r,
		live:   btree.NewG(32, func(a, b interval) bool { return a.lo < b.lo }),
		in:     make([]bool, allocs),
		marks:  make([]byte, 2*edge*allocs),
		got:    make([]byte, 2*edge*readsAhead),
		values: make([]uint64, queues),
	}
	for range queues {
		a.fences = append(a.fences, hal.NewSemaphore(0).At(0))
	}
	return a
}

// ends divides the marked bytes of a buffer: those at its start, and those at its
// end.
func ends(size hal.Bytes) (head, tail hal.Bytes) {
	if size <= 2*edge {
		return size, 0
	}
	return edge, edge
}

// marksOf are the bytes that buffer id of size bytes must hold.
func (a *auditor) marksOf(id int32, size hal.Bytes) []byte {
	head, tail := ends(size)
	return a.marks[2*edge*int(id):][:head+tail]
}

// begin takes in a buffer that q was handed and has its ends written; signal is
// signalled after that.
func (a *auditor) begin(q *hal.Queue, id int32, b hal.Buffer, size hal.Bytes, signal hal.Fence) {
	if size > 0 {
		a.place(id, b, size)
	}
	a.births++
	marks := a.marks[2*edge*int(id):][:2*edge]
	for i := range 2 * edge / 8 {
		binary.LittleEndian.PutUint64(marks[8*i:], mix(a.births<<2|uint64(i)))
	}
	head, tail := ends(size)
	if head == 0 {
		if err := q.Barrier(nil, signal); err != nil {
			a.r.problem("barrier after allocation %d: %v", id, err)
		}
		return
	}
	first := signal
	if tail > 0 {
		first = nil
	}
	err := q.Upload(b.Span(0, head), marks[:head], nil, first)
	if err == nil && tail > 0 {
		err = q.Upload(b.Span(size-tail, tail), marks[head:head+tail], nil, signal)
	}
	if err != nil {
		a.r.problem("upload to allocation %d: %v", id, err)
	}
}

// mix spreads n over all bits (the finalizer of splitmix64).
func mix(n uint64) uint64 {
	n += 0x9e3779b97f4a7c15
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

// place looks for a live buffer in b's place.
func (a *auditor) place(id int32, b hal.Buffer, size hal.Bytes) {
	x := interval{b.Address(), b.Address() + uint64(max(size, b.Granted())), id}
	if b.Granted() < size || x.lo%uint64(hal.DefaultAlign) != 0 {
		a.r.result.Misplaced++
		a.r.problem("allocation %d asked for %d bytes at a multiple of %d and got %d at %#x",
			id, int64(size), int64(hal.DefaultAlign), int64(b.Granted()), x.lo)
	}
	over := a.over(x)
	if over != nil {
		a.r.result.Overlaps++
		a.r.problem("overlap: allocation %d at %#x to %#x lies over allocation %d, which is live at %#x to %#x",
			id, x.lo, x.hi, over.id, over.lo, over.hi)
		return
	}
	a.live.ReplaceOrInsert(x)
	a.in[id] = true
}

// over returns a live buffer's interval that shares a byte with x, or nil.
func (a *auditor) over(x interval) (over *interval) {
	a.live.DescendLessOrEqual(x, func(y interval) bool {
		if y.hi > x.lo {
			over = &y
		}
		return false
	})
	if over == nil {
		a.live.AscendGreaterOrEqual(x, func(y interval) bool {
			if y.lo < x.hi {
				over = &y
			}
			return false
		})
	}
	return over
}

// lift takes a buffer out of the interval map.
func (a *auditor) lift(id int32, b hal.Buffer) {
	if a.in[id] {
		a.live.Delete(interval{lo: b.Address()})
		a.in[id] = false
	}
}

// read has the ends of a buffer read into got, after wait, and then signals
// signal. It reports whether there was anything to read.
func (a *auditor) read(q *hal.Queue, id int32, b hal.Buffer, size hal.Bytes, got []byte, wait, signal hal.Fence) bool {
	head, tail := ends(size)
	if head == 0 {
		return false
	}
	for i, m := range a.marksOf(id, size) {
		got[i] = ^m // a read that does not happen is no match
	}
	first := signal
	if tail > 0 {
		first = nil
	}
	err := q.Download(got[:head], b.Span(0, head), wait, first)
	if err == nil && tail > 0 {
		err = q.Download(got[head:head+tail], b.Span(size-tail, tail), nil, signal)
	}
	if err != nil {
		a.r.problem("download of allocation %d: %v", id, err)
	}
	return err == nil
}

// compare counts what has changed.
func (a *auditor) compare(id int32, size hal.Bytes, got []byte) {
	lost, first := 0, 0
	for i, m := range a.marksOf(id, size) {
		if got[i] != m {
			if lost == 0 {
				first = i
			}
			lost++
		}
	}
	if lost == 0 {
		return
	}
	head, tail := ends(size)
	at := hal.Bytes(first)
	if at >= head {
		at += size - head - tail
	}
	a.r.result.LostBytes += uint64(lost)
	a.r.problem("lost bytes: allocation %d of %d bytes has %d of its %d marked bytes changed, the first at %d",
		id, int64(size), lost, head+tail, int64(at))
}

// check is a read of a buffer's ends that has been submitted.
type check struct {
	id    int32
	queue int32
	size  hal.Bytes
	value uint64
}

// slot is where the read number i of the ring goes.
func (a *auditor) slot(i int) []byte { return a.got[2*edge*i:][:2*edge] }

// end has a buffer's ends read on queue number n, after wait, before its release
// there. It reports whether something was submitted that waits for wait.
func (a *auditor) end(ctx context.Context, q *hal.Queue, n int, id int32, b hal.Buffer, size hal.Bytes, wait hal.Fence) bool {
	if a.pending == readsAhead {
		a.look(ctx)
	}
	a.lift(id, b)
	a.values[n]++
	f := a.fences[n]
	f[0].Value = a.values[n]
	if !a.read(q, id, b, size, a.slot(a.next), wait, f) {
		return false
	}
	a.ring[a.next] = check{id, int32(n), size, a.values[n]}
	a.next = (a.next + 1) % readsAhead
	a.pending++
	return true
}

// look waits for the oldest read and compares.
func (a *auditor) look(ctx context.Context) {
	i := (a.next - a.pending + readsAhead) % readsAhead
	x := &a.ring[i]
	a.pending--
	if err := a.fences[x.queue][0].Semaphore.Wait(ctx, x.value); err != nil {
		a.r.problem("download of allocation %d: %v", x.id, err)
		return
	}
	a.compare(x.id, x.size, a.slot(i))
}

// settle looks at all reads.
func (a *auditor) settle(ctx context.Context) {
	for a.pending > 0 {
		a.look(ctx)
	}
}
