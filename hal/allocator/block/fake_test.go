package block

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tester is what tests, benchmarks and rapid's checks have in common.
type tester interface {
	require.TestingT
	Helper()
	Name() string
	Cleanup(func())
}

// fakeDriver is what both fakes share: a capacity, exact accounting, and a call
// that fails.
type fakeDriver struct {
	mu       sync.Mutex
	t        tester
	capacity memory.Bytes // 0: any
	held     memory.Bytes
	calls    int
	failAt   int // the call of this number fails; 0: none
	failWith allocator.Outcome
	log      []string // of calls, when record is set
	record   bool
	onCall   func() // run by each call, without a lock
}

// call counts a call that takes n bytes (or gives, if negative), and fails it if it
// is to fail.
func (d *fakeDriver) call(n memory.Bytes, format string, args ...any) allocator.Outcome {
	if d.onCall != nil {
		d.onCall()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls++
	if d.record {
		d.log = append(d.log, fmt.Sprintf(format, args...))
	}
	if d.calls == d.failAt {
		return d.failWith
	}
	if n > 0 && d.capacity > 0 && d.held+n > d.capacity {
		return allocator.Exhausted
	}
	d.held += n
	return allocator.OK
}

// fakeBase is a source of slabs.
type fakeBase struct {
	fakeDriver
	limit    memory.Bytes   // larger requests are OverLimit; 0: none
	ready    queue.Frontier // of what it hands out
	next     uint64
	gap      uint64 // between slabs
	slots    allocator.Slots[memory.Bytes]
	slotsMu  sync.Mutex
	pending  []queue.Frontier // of what was freed
	requests []allocator.Request
}

func newFakeBase(t tester, capacity memory.Bytes) *fakeBase {
	b := &fakeBase{next: 0x10000000, ready: queue.ReadyNow()}
	b.t, b.capacity, b.failWith = t, capacity, allocator.Exhausted
	b.slots.Init(&b.slotsMu, b, 0)
	return b
}

func (b *fakeBase) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	if b.record {
		b.requests = append(b.requests, r)
	}
	if b.limit > 0 && b.held+r.Size > b.limit {
		b.call(0, "alloc %d refused", r.Size)
		return allocator.Block{}, queue.Frontier{}, allocator.OverLimit
	}
	if o := b.call(r.Size, "alloc %d", r.Size); o != allocator.OK {
		return allocator.Block{}, queue.Frontier{}, o
	}
	b.slotsMu.Lock()
	defer b.slotsMu.Unlock()
	align := max(r.Kind.Align(), 256)
	addr := (b.next + uint64(align) - 1) &^ (uint64(align) - 1)
	b.next = addr + uint64(r.Size) + b.gap
	i := b.slots.NewLocked()
	b.slots.At(i).Value = r.Size
	return b.slots.MintLocked(i, addr, r.Size, &r, b.ready), b.ready, allocator.OK
}

func (b *fakeBase) Free(x allocator.Block, f queue.Frontier) allocator.Outcome {
	b.slotsMu.Lock()
	i, f, o := b.slots.TakeLocked(x, f)
	if o == allocator.OK {
		b.slots.DropLocked(i)
	}
	b.slotsMu.Unlock()
	if o != allocator.OK {
		b.t.Errorf("base: free of %+v: %v", x, o)
		return o
	}
	b.mu.Lock()
	b.pending = append(b.pending, f)
	b.mu.Unlock()
	if b.call(-x.Size, "free %d", x.Size) != allocator.OK { // a free doesn't fail
		b.mu.Lock()
		b.held -= x.Size
		b.mu.Unlock()
	}
	return o
}

func (b *fakeBase) Trim(memory.Bytes) memory.Bytes { return 0 }
func (b *fakeBase) Stats() allocator.Stats         { return allocator.Stats{Held: b.held} }
func (b *fakeBase) Close() error                   { return nil }

// fakeVirtual is a source with pages; requests of their own go to its fakeBase.
type fakeVirtual struct {
	*fakeBase
	page     memory.Bytes
	base     uint64
	maxRange memory.Bytes // larger reservations are refused; 0: none
	reserved memory.Bytes
	ranges   []uint64
	mapped   map[uint64]bool // by page
	noMove   bool
}

func newFakeVirtual(t tester, page, capacity memory.Bytes) *fakeVirtual {
	return &fakeVirtual{fakeBase: newFakeBase(t, capacity), page: page, base: 1 << 42, mapped: map[uint64]bool{}}
}

func (v *fakeVirtual) Virtual(int) allocator.Virtual { return v }
func (v *fakeVirtual) Granularity() memory.Bytes     { return v.page }

func (v *fakeVirtual) Reserve(size memory.Bytes) (uint64, allocator.Outcome) {
	if v.maxRange > 0 && size > v.maxRange {
		return 0, allocator.Exhausted
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	addr := v.base << len(v.ranges)
	v.ranges = append(v.ranges, addr)
	v.reserved += size
	return addr, allocator.OK
}

func (v *fakeVirtual) Unreserve(addr uint64, size memory.Bytes) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !slices.Contains(v.ranges, addr) || size > v.reserved {
		v.t.Errorf("virtual: unreserve %#x+%d of %d", addr, size, v.reserved)
	}
	for p := range v.mapped {
		if p >= addr/uint64(v.page) && p < (addr+uint64(size))/uint64(v.page) {
			v.t.Errorf("virtual: unreserve of %#x with page %#x mapped", addr, p)
		}
	}
	v.reserved -= size
}

// set maps or unmaps n pages that must be the opposite now.
func (v *fakeVirtual) set(addr uint64, n int, mapped bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if addr%uint64(v.page) != 0 || n <= 0 {
		v.t.Errorf("virtual: %d pages at %#x", n, addr)
		return
	}
	for k := addr / uint64(v.page); n > 0; n-- {
		if v.mapped[k] == mapped {
			v.t.Errorf("virtual: page %#x is mapped already: %v", k, mapped)
		}
		if mapped {
			v.mapped[k] = true
		} else {
			delete(v.mapped, k)
		}
		k++
	}
}

func (v *fakeVirtual) Grow(addr uint64, n int) allocator.Outcome {
	o := v.call(memory.Bytes(n)*v.page, "grow %d+%d", (addr-v.base)/uint64(v.page), n)
	if o == allocator.OK {
		v.set(addr, n, true)
	}
	return o
}

func (v *fakeVirtual) Shrink(addr uint64, n int) allocator.Outcome {
	o := v.call(-memory.Bytes(n)*v.page, "shrink %d+%d", (addr-v.base)/uint64(v.page), n)
	if o == allocator.OK {
		v.set(addr, n, false)
	}
	return o
}

func (v *fakeVirtual) Move(from, to uint64, n int) allocator.Outcome {
	o := v.call(0, "move %d→%d+%d", (from-v.base)/uint64(v.page), (to-v.base)/uint64(v.page), n)
	if v.noMove && o == allocator.OK {
		o = allocator.Exhausted
	}
	if o == allocator.OK {
		v.set(from, n, false)
		v.set(to, n, true)
	}
	return o
}

// isMapped reports whether every page of size bytes at addr is mapped.
func (v *fakeVirtual) isMapped(addr uint64, size memory.Bytes) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	lo, hi := addr/uint64(v.page), (addr+uint64(size)+uint64(v.page)-1)/uint64(v.page)
	for k := lo; k < hi; k++ {
		if !v.mapped[k] {
			return false
		}
	}
	return true
}

// testQueue is a queue that moves by step alone.
type testQueue struct {
	*queue.Queue
	worker *queue.Worker
}

type idleRunner struct{}

func (idleRunner) Run(*queue.Op) error  { return nil }
func (idleRunner) Quick(*queue.Op) bool { return true }

func newTestQueue(t tester) *testQueue {
	q := &testQueue{}
	q.Queue = queue.New(queue.Options{Executor: func(x *queue.Queue) queue.Executor {
		q.worker = queue.NewWorker(x, idleRunner{}, true)
		return q.worker
	}})
	t.Cleanup(func() {
		q.Close()
		q.drain()
	})
	return q
}

// issue submits work and returns the frontier after it.
func (q *testQueue) issue(t tester) queue.Frontier {
	t.Helper()
	at, _, err := q.Submit(&queue.Op{Kind: queue.Barrier}, nil, nil)
	require.NoError(t, err)
	return queue.After(at)
}

// after makes the next work of q come after o's.
func (q *testQueue) after(t tester, o *testQueue) {
	t.Helper()
	s := queue.NewSemaphore(0)
	_, _, err := o.Submit(&queue.Op{Kind: queue.Barrier}, nil, s.At(1))
	require.NoError(t, err)
	_, _, err = q.Submit(&queue.Op{Kind: queue.Barrier}, s.At(1), nil)
	require.NoError(t, err)
}

func (q *testQueue) drain() {
	for q.worker.Step() {
	}
}

// request asks for size bytes on q; q may be nil for the host.
func request(size memory.Bytes, q *testQueue) allocator.Request {
	r := allocator.Request{Size: size, Kind: allocator.MakeKind(0, 1, 0, 0, 0)}
	if q != nil {
		r.Who.Queue = q.ID()
	}
	return r
}

func aligned(size, align memory.Bytes, q *testQueue) allocator.Request {
	r := request(size, q)
	r.Kind = allocator.MakeKind(0, align, 0, 0, 0)
	return r
}

func newBlock(t tester, base allocator.Allocator, c Config) *Allocator {
	t.Helper()
	return newBlockOf(t, base, c, 0)
}

func newBlockOf(t tester, base allocator.Allocator, c Config, capacity memory.Bytes) *Allocator {
	t.Helper()
	if c.Magazine == 0 {
		c.Magazine = -1 // so that what is freed is seen to be free
	}
	a, err := New(base, &allocator.Env{Owner: t.Name(), Heaps: memory.Heaps{{Name: "main", Capacity: capacity}}}, c)
	require.NoError(t, err)
	return a
}

// check verifies the books.
func check(t tester, a *Allocator) {
	t.Helper()
	for _, ar := range a.opened() {
		ar.mu.Lock()
		err := ar.checkLocked()
		dump := ""
		if err != nil {
			dump = ar.dumpLocked()
		}
		ar.mu.Unlock()
		require.NoError(t, err, dump)
	}
}

// mustAlloc allocates and checks what comes back.
func mustAlloc(t tester, a *Allocator, r allocator.Request) allocator.Block {
	t.Helper()
	b, f, o := a.Allocate(r)
	require.Equal(t, allocator.OK, o)
	require.NotEqual(t, allocator.ReuseNo, r.Reuse(f))
	require.GreaterOrEqual(t, b.Size, r.Size)
	require.Zero(t, b.Addr&uint64(r.Kind.Align()-1))
	check(t, a)
	return b
}

func mustFree(t tester, a *Allocator, b allocator.Block, f queue.Frontier) {
	t.Helper()
	require.Equal(t, allocator.OK, a.Free(b, f))
	check(t, a)
}

// emptied frees nothing more: after a trim the base has everything back.
func emptied(t tester, a *Allocator, d *fakeDriver) {
	t.Helper()
	st := a.Stats()
	require.Zero(t, st.Live)
	a.Trim(0)
	check(t, a)
	st = a.Stats()
	require.Zero(t, st.Held)
	require.Zero(t, st.Idle)
	require.Zero(t, st.Pending)
	require.Zero(t, st.Blocks)
	require.Zero(t, d.held)
}
