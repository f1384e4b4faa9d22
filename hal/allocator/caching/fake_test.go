package caching

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeBase is a source without a driver: it accounts for every block exactly,
// refuses what it is told to, and complains of what a layer must not do.
type fakeBase struct {
	round    memory.Bytes // sizes are rounded up to a multiple; 0: not at all
	capacity memory.Bytes // 0: no limit

	mu     sync.Mutex
	slots  allocator.Slots[fakeBlock]
	other  allocator.Slots[fakeBlock] // a second keeper, used in turn
	next   uint64
	live   memory.Bytes
	blocks int
	allocs int
	frees  []freed // in order

	failAlloc map[int]allocator.Outcome // by number of the call, from 1
	failFree  map[int]allocator.Outcome
	frontier  queue.Frontier // of what it hands out
	onFree    func(addr uint64)
}

type fakeBlock struct {
	addr uint64
	size memory.Bytes
}

type freed struct {
	addr  uint64
	size  memory.Bytes
	after queue.Frontier
}

func newBase() *fakeBase {
	f := &fakeBase{next: 1 << 20, frontier: queue.ReadyNow()}
	f.slots.Init(&f.mu, nil, 0)
	f.other.Init(&f.mu, nil, 1)
	return f
}

func (f *fakeBase) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.allocs++
	if o := f.failAlloc[f.allocs]; o != allocator.OK {
		return allocator.Block{}, queue.Frontier{}, o
	}
	size := r.Size
	if f.round > 0 {
		size = (size + f.round - 1) / f.round * f.round
	}
	if size < r.Size {
		return allocator.Block{}, queue.Frontier{}, allocator.TooLarge
	}
	if f.capacity > 0 && size > f.capacity-f.live {
		return allocator.Block{}, queue.Frontier{}, allocator.Exhausted
	}
	s := &f.slots
	if f.allocs%2 == 0 {
		s = &f.other
	}
	align := uint64(r.Kind.Align())
	addr := (f.next + align - 1) &^ (align - 1)
	f.next = addr + uint64(size)
	i := s.NewLocked()
	s.At(i).Value = fakeBlock{addr, size}
	f.live += size
	f.blocks++
	return s.MintLocked(i, addr, size, &r, f.frontier), f.frontier, allocator.OK
}

func (f *fakeBase) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	if f.onFree != nil {
		f.onFree(b.Addr)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if o := f.failFree[len(f.frees)+1]; o != allocator.OK {
		f.frees = append(f.frees, freed{})
		return o
	}
	s := &f.slots
	if f.other.Mints(b) {
		s = &f.other
	}
	i, _, o := s.TakeLocked(b, after)
	if o != allocator.OK {
		return o
	}
	v := s.At(i).Value
	if v.addr != b.Addr || v.size != b.Size {
		panic("a block came back changed")
	}
	s.DropLocked(i)
	f.live -= v.size
	f.blocks--
	f.frees = append(f.frees, freed{b.Addr, b.Size, after})
	return allocator.OK
}

func (f *fakeBase) Trim(memory.Bytes) memory.Bytes { return 0 }
func (f *fakeBase) Close() error                   { return nil }
func (f *fakeBase) Stats() allocator.Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return allocator.Stats{Held: f.live, Live: f.live}
}
func (f *fakeBase) Virtual(int) allocator.Virtual { return nil }
func (f *fakeBase) Snapshot() string              { return "base" }

// Heaps of the tests.
const (
	device = iota
	host
	staging
)

var heaps = memory.Heaps{
	device: {Name: "device", Type: memory.DeviceLocal, Usage: memory.Default | memory.SharingExport | memory.SharingImmutable | memory.SharingReplicate, Capacity: 64 * memory.GiB},
	host:   {Name: "host", Type: memory.HostLocal | memory.DeviceVisible, Usage: memory.Default | memory.Mapping},
	staging: {Name: "staging", Type: memory.DeviceLocal | memory.HostVisible,
		Usage: memory.Transfer},
}

func testEnv() *allocator.Env { return &allocator.Env{Heaps: heaps, Now: time.Now} }

func newCache(t testing.TB, base allocator.Allocator, c Config) *Allocator {
	t.Helper()
	a, err := New(base, testEnv(), c)
	require.NoError(t, err)
	return a
}

// parsed makes a cache from a spec string, as a flag would.
func parsed(t testing.TB, base allocator.Allocator, options string) *Allocator {
	t.Helper()
	v, err := Table.Parse(options)
	require.NoError(t, err)
	a, err := Layer.New(base, testEnv(), v)
	require.NoError(t, err)
	return a.(*Allocator)
}

func request(heap int, size memory.Bytes, q queue.ID) allocator.Request {
	return allocator.Request{
		Size: size,
		Kind: allocator.MakeKind(heap, 1, memory.DispatchStorage, 0, 0),
		Who:  allocator.Who{Queue: q},
	}
}

// get allocates what must be had.
func get(t testing.TB, a *Allocator, r allocator.Request) allocator.Block {
	t.Helper()
	b, _, o := a.Allocate(r)
	require.Equal(t, allocator.OK, o)
	return b
}

func put(t testing.TB, a *Allocator, b allocator.Block) {
	t.Helper()
	require.Equal(t, allocator.OK, a.Free(b, queue.ReadyNow()))
}

// cycle allocates and frees, and returns the address.
func cycle(t testing.TB, a *Allocator, heap int, size memory.Bytes) uint64 {
	t.Helper()
	b := get(t, a, request(heap, size, 0))
	put(t, a, b)
	return b.Addr
}

// finish checks what must hold at the end: nothing live, and after Close the base
// has everything back.
func finish(t testing.TB, a *Allocator, base *fakeBase) {
	t.Helper()
	require.NoError(t, a.Check())
	st := a.Stats()
	require.Zero(t, st.Live)
	require.Equal(t, st.Idle, st.Held)
	require.NoError(t, a.Close())
	require.NoError(t, a.Check())
	st = a.Stats()
	require.Zero(t, st.Held)
	require.Zero(t, st.Idle)
	require.Zero(t, st.Blocks)
	require.Zero(t, base.live)
	require.Zero(t, base.blocks)
}

// nop is the device of manual queues.
type nop struct{}

func (nop) Run(*queue.Op) error  { return nil }
func (nop) Quick(*queue.Op) bool { return true }

type manual struct {
	*queue.Queue
	w *queue.Worker
}

func manualQueue(t testing.TB) manual {
	var m manual
	m.Queue = queue.New(queue.Options{Executor: func(q *queue.Queue) queue.Executor {
		m.w = queue.NewWorker(q, nop{}, true)
		return m.w
	}})
	workers.add(m.w)
	t.Cleanup(func() {
		m.Close()
		workers.drain()
	})
	return m
}

// workers are those of manual queues: they wait for each other, so they are drained
// together.
var workers crew

type crew struct {
	mu   sync.Mutex
	list []*queue.Worker
}

func (p *crew) add(w *queue.Worker) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list = append(p.list, w)
}

func (p *crew) drain() {
	p.mu.Lock()
	list := p.list
	p.mu.Unlock()
	for moved := true; moved; {
		moved = false
		for _, w := range list {
			moved = w.Step() || moved
		}
	}
}

// work issues an operation, which is not over before a step.
func (m manual) work(t testing.TB, wait, signal queue.Fence) queue.Frontier {
	t.Helper()
	at, issued, err := m.Submit(&queue.Op{}, wait, signal)
	require.NoError(t, err)
	require.True(t, issued)
	return queue.After(at)
}

// drain carries out all that is issued.
func (m manual) drain() {
	for m.w.Step() {
	}
}
