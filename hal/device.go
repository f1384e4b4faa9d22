package hal

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/scope"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Device is an open device with its allocator stack. Make it with [Open], end it
// with [Device.Close]. Safe for concurrent use.
type Device struct {
	driver driver.Device
	info   driver.Info
	stack  *allocator.Stack
	top    allocator.Allocator
	log    *zap.Logger
	policy allocator.Kind            // flags of every request
	kind   allocator.Kind            // of the zero Params
	most   [allocator.MaxHeaps]Bytes // one allocation of each heap
	scoped bool                      // the stack has a scope
	failed atomic.Uint64             // allocations that failed for want of memory

	closing atomic.Bool
	lost    atomic.Pointer[error] // set once, when a queue says so

	// What never enters the stack: buffers of no bytes, and imported memory.
	ownMu sync.Mutex // leaf
	own   allocator.Slots[owned]

	imports   sync.WaitGroup // release callbacks to come
	importing atomic.Int64   // how many
	releases  sync.Map       // of imported buffers, by slot: func()

	first  []*Queue   // those opened with the device; immutable
	mu     sync.Mutex // guards queues and ended; taken before any queue's lock
	queues []*Queue   // open
	ended  []*Queue   // closed, with work still in flight

	closeMu sync.Mutex // guards the rest; taken before all others
	closed  bool
	leak    error // what Close has found so far
}

// owned is what a device keeps of a buffer that isn't the stack's.
type owned struct {
	addr     uint64
	size     Bytes
	imported bool
}

// Params say what memory is wanted. The zero value of each field but Size asks for
// device-local memory, aligned to 256 bytes, for the default usage.
type Params struct {
	Size   Bytes      // 0 is valid: such a buffer holds no memory
	Align  Bytes      // a power of two; 0 is 256
	Type   MemoryType // bits that the heap must have; 0 is device-local, or host-visible if Usage has mapping
	Usage  Usage      // uses that the heap must allow; 0 is any
	Access Access     // a hint to layers; 0 is any
	Tag    Tag        // 0: the tag that the context carries, if any
	Reuse  Reuse      // changes which memory still in flight may be handed out
}

// Reuse changes which free memory, still in use by issued work, a request may get
// beyond that freed on its own queue.
type Reuse = allocator.Kind

// The changes; join them with |.
const (
	// NoOrdered: not memory that the queue is known to come after through semaphores.
	NoOrdered = allocator.NoOrdered
	// NoPolled: not memory whose uses were found to be over.
	NoPolled = allocator.NoPolled
	// MayWait: also memory in use by another queue, with a wait added to the alloca.
	MayWait = allocator.MayWait
	// NoSame: not even memory freed on its own queue, unless its uses are over.
	NoSame = allocator.NoSame
	// NoSubAlloc: memory of its own, not part of a larger block.
	NoSubAlloc = allocator.NoSubAlloc
)

// DefaultAlign is the alignment of a request that names none.
const DefaultAlign Bytes = 256

// kindOf resolves the heap and packs the rest.
func (d *Device) kindOf(p *Params) (allocator.Kind, error) {
	if p.Align|Bytes(p.Type)|Bytes(p.Usage)|Bytes(p.Access)|Bytes(p.Reuse) == 0 {
		return d.kind, nil
	}
	align := p.Align
	if align == 0 {
		align = DefaultAlign
	}
	if align < 0 || bits.OnesCount64(uint64(align)) != 1 {
		return 0, invalid("alignment %d is not a power of two", int64(align))
	}
	want := p.Type
	if want == 0 && p.Usage.Has(memory.MappingScoped) || want == 0 && p.Usage.Has(memory.MappingPersistent) {
		want = memory.HostVisible
	} else if want == 0 {
		want = memory.DeviceLocal
	}
	heap, ok := d.info.Heaps.Find(want, p.Usage)
	if !ok {
		return 0, fmt.Errorf("hal: %w: no heap of %s has memory type %v and usage %v (heaps: %v)", ErrUnsupported, d.info.Name, want, p.Usage, d.info.Heaps)
	}
	return allocator.MakeKind(heap, align, p.Usage, p.Access, p.Reuse|d.policy), nil
}

// request makes p a request of queue q (0: the host).
func (d *Device) request(ctx context.Context, p *Params, q queue.ID) (allocator.Request, error) {
	kind, err := d.kindOf(p)
	if err != nil {
		return allocator.Request{}, err
	}
	if p.Size < 0 {
		return allocator.Request{}, invalid("size %d is negative", int64(p.Size))
	}
	if ctx == nil {
		return allocator.Request{}, invalid("nil context")
	}
	tag := p.Tag
	if tag == 0 && ctx != context.Background() {
		tag = allocator.TagOf(ctx)
	}
	r := allocator.Request{Size: p.Size, Kind: kind, Who: allocator.Who{Queue: q, Tag: tag}}
	if d.scoped {
		r.Pass = scope.PassOf(ctx)
	}
	return r, nil
}

// allocate serves r; on a hit it is one call of the outermost layer.
func (d *Device) allocate(ctx context.Context, r allocator.Request) (allocator.Block, queue.Frontier, error) {
	if d.closing.Load() {
		return allocator.Block{}, queue.Frontier{}, fmt.Errorf("hal: device %s: %w", d.info.Name, ErrClosed)
	}
	if lost := d.lost.Load(); lost != nil { // what is idle may be in use by what never ends
		return allocator.Block{}, queue.Frontier{}, fmt.Errorf("hal: device %s: %w", d.info.Name, *lost)
	}
	if r.Size == 0 {
		return d.mintOwn(owned{}, &r), queue.ReadyNow(), nil
	}
	if r.Size > d.most[r.Kind.Heap()] {
		return d.slow(ctx, r, allocator.Block{}, queue.Frontier{}, allocator.TooLarge)
	}
	b, f, o := d.top.Allocate(r)
	if o == allocator.OK && r.Reuse(f) != allocator.ReuseNo {
		return b, f, nil
	}
	return d.slow(ctx, r, b, f, o)
}

//go:noinline
func (d *Device) slow(ctx context.Context, r allocator.Request, b allocator.Block, f queue.Frontier, o allocator.Outcome) (allocator.Block, queue.Frontier, error) {
	if r.Size > memory.MaxBytes-r.Kind.Align() {
		o = allocator.TooLarge
	}
	b, f, err := d.stack.Slow(ctx, r, b, f, o)
	if err != nil {
		if oom, ok := errors.AsType[*OOMError](err); ok {
			d.failed.Add(1)
			oom.On = d.queueName(r.Who.Queue)
		}
		return b, f, fmt.Errorf("hal: %w", err)
	}
	return b, f, nil
}

// queueName names a queue for people: by its index, where it has one.
func (d *Device) queueName(id queue.ID) string {
	for i, q := range d.first {
		if q.queue.ID() == id {
			return fmt.Sprintf("queue %d", i)
		}
	}
	return ""
}

func (d *Device) mintOwn(o owned, r *allocator.Request) allocator.Block {
	d.ownMu.Lock()
	defer d.ownMu.Unlock()
	i := d.own.NewLocked()
	d.own.At(i).Value = o
	return d.own.MintLocked(i, o.addr, o.size, r, queue.ReadyNow())
}

// free gives b back to the stack, or ends what the device owns.
func (d *Device) free(b allocator.Block, after queue.Frontier) error {
	if d.own.Mints(b) {
		return d.freeOwn(b, after)
	}
	if o := d.top.Free(b, after); o != allocator.OK {
		return fmt.Errorf("hal: %w", o.Err())
	}
	return nil
}

// Allocate returns memory for the host, which may use it at once: nothing the
// device still does can touch it. For memory that a queue will use,
// [Queue.Allocate] and [Queue.Alloca] reuse more. Errors: [OOMError], ErrTooLarge,
// ErrUnsupported, ErrInvalid, ErrClosed, ErrLost. ctx bounds the waiting for
// memory that issued work will free, and carries a tag; where memory is at hand it is
// not looked at. An OOMError for want of time matches ctx's error too: look at
// ctx.Err() before making room for another try.
func (d *Device) Allocate(ctx context.Context, p Params) (Buffer, error) {
	r, err := d.request(ctx, &p, 0)
	if err != nil {
		return Buffer{}, err
	}
	b, _, err := d.allocate(ctx, r)
	if err != nil {
		return Buffer{}, err
	}
	return Buffer{b}, nil
}

// Reserve sets p.Size bytes aside in the stack's limit, for allocations from the heap
// that p names and with p's tag: for a scheduler that decides before it loads. They
// draw on what is set aside first, and nobody else can; release, which may be called
// at any time, gives back what is left. Idle memory is given up to make room. Errors:
// ErrOutOfMemory if a limit stands in the way, ErrUnsupported without a limit layer.
func (d *Device) Reserve(p Params) (release func(), err error) {
	r, err := d.request(context.Background(), &p, 0)
	if err != nil {
		return nil, err
	}
	l, ok := allocator.As[allocator.Reserver](d.top)
	if !ok {
		return nil, fmt.Errorf("hal: reserve: %w by %s: the stack has no limit", ErrUnsupported, d.stack)
	}
	release, o := l.Reserve(r.Kind.Heap(), r.Who.Tag, p.Size)
	if o == allocator.OverLimit {
		d.Trim(0)
		release, o = l.Reserve(r.Kind.Heap(), r.Who.Tag, p.Size)
	}
	if o != allocator.OK {
		return nil, fmt.Errorf("hal: reserve %v: %w: a limit of %s stands in the way", p.Size, o.Err(), d.stack)
	}
	return release, nil
}

// Info describes the device.
func (d *Device) Info() DeviceInfo { return d.info }

// Allocator is the effective allocator stack, as a spec.
func (d *Device) Allocator() string { return d.stack.String() }

// Queue returns queue i of those opened with the device, whether or not it has been
// closed since; Info().Queues says how many there are. It panics if there is none.
func (d *Device) Queue(i int) *Queue {
	if i < 0 || i >= len(d.first) {
		panic(fmt.Sprintf("hal: queue %d of device %s, which was opened with %d", i, d.info.Name, len(d.first)))
	}
	return d.first[i]
}

// Queues returns the open queues.
func (d *Device) Queues() []*Queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]*Queue(nil), d.queues...)
}

// NewQueue opens one more queue. End it with [Queue.Close], or with the device.
func (d *Device) NewQueue() (*Queue, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closing.Load() {
		return nil, fmt.Errorf("hal: device %s: %w", d.info.Name, ErrClosed)
	}
	q, err := d.driver.NewQueue(hook{d})
	if err != nil {
		return nil, fmt.Errorf("hal: new queue: %w", err)
	}
	hq := &Queue{device: d, queue: q}
	d.queues = append(d.queues, hq)
	return hq, nil
}

// end takes a queue that is being closed off the list of open ones. It is remembered
// until its work is over: Close waits for it.
func (d *Device) end(q *Queue) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.Index(d.queues, q)
	if i < 0 {
		return
	}
	d.queues = slices.Delete(d.queues, i, i+1)
	d.ended = append(slices.DeleteFunc(d.ended, func(q *Queue) bool { return q.queue.Issued().Reached() }), q)
}

// all returns the open queues, and those closed with work in flight.
func (d *Device) all() []*Queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Concat(d.queues, d.ended)
}

// Compatibility says what a request would get.
type Compatibility struct {
	Heap       int   // index into Info().Heaps
	Align      Bytes // alignment that would be used
	Mappable   bool  // Buffer.Map works
	Importable bool  // Device.Import works
	TooLarge   bool  // more than one allocation of the heap can be
}

// Compatible says which heap p would be served from and what the buffer could be
// used for, without allocating. The errors are those of Allocate for bad params.
func (d *Device) Compatible(p Params) (Compatibility, error) {
	r, err := d.request(context.Background(), &p, 0)
	if err != nil {
		return Compatibility{}, err
	}
	h := d.info.Heaps[r.Kind.Heap()]
	_, importer := d.driver.(driver.Importer)
	return Compatibility{
		Heap: r.Kind.Heap(), Align: r.Kind.Align(), Mappable: h.Type.Has(memory.HostVisible), Importable: importer,
		TooLarge: p.Size > d.most[r.Kind.Heap()],
	}, nil
}

// Stats are a device's figures at one moment.
type Stats struct {
	Device    string `json:"device"`
	Allocator string `json:"device_allocator"`
	Modelled  string `json:"modelled,omitempty"`
	// OutOfMemory counts the allocations that failed for want of memory, each once.
	// A layer's own Failed counts every time that it was asked in vain.
	OutOfMemory uint64       `json:"out_of_memory"`
	Layers      []LayerStats `json:"layers"` // outermost first; the last is the source
}

// Source is the innermost layer: what was asked of the driver.
func (s Stats) Source() LayerStats { return s.Layers[len(s.Layers)-1] }

// Stats returns the figures of every layer.
func (d *Device) Stats() Stats {
	return Stats{OutOfMemory: d.failed.Load(), Device: d.info.Name, Allocator: d.stack.String(), Modelled: d.info.Modelled, Layers: d.stack.Stats()}
}

// Check verifies the structures of every layer against each other: for tests, and
// for a report of something strange. Its cost is a walk over every block.
func (d *Device) Check() error { return d.stack.Check() }

// ResetPeaks sets the peaks in the statistics to the present values.
func (d *Device) ResetPeaks() { d.stack.ResetPeaks() }

// Trim gives idle memory back to the driver until each layer keeps at most keep
// bytes idle, and returns how much the driver got. Memory that issued work still
// uses stays until it is over.
func (d *Device) Trim(keep Bytes) Bytes {
	n, _ := d.stack.Trim(context.Background(), keep, false) // without waiting there is no error
	return n
}

// TrimWait is Trim that first waits, until ctx is done, for issued work to let go
// of what is idle.
func (d *Device) TrimWait(ctx context.Context, keep Bytes) (Bytes, error) {
	return d.stack.Trim(ctx, keep, true)
}

// OnPressure registers f to be called, without locks, when an allocation fails for
// want of memory and nothing that is idle or pending helps. f gets the size of the
// whole request, frees what it can do without, and returns how many bytes that was:
// memory outside Halyard, or buffers of this device, by Release or Dealloca, which
// are waited for. The allocation is tried again after each call, and f is called
// again as long as it returns more than 0, up to 64 times. What f itself allocates
// calls nobody. The returned function takes f away.
func (d *Device) OnPressure(f func(ctx context.Context, want Bytes) Bytes) (remove func()) {
	return d.stack.OnPressure(f)
}

// Import makes host memory (its address and size) usable by queues of the device.
// It stays the caller's: release, if not nil, is called once, on a goroutine of its
// own, when the buffer has been released and all its uses are over. Imported memory
// never enters the allocator stack.
func (d *Device) Import(addr uintptr, size Bytes, release func()) (Buffer, error) {
	im, ok := d.driver.(driver.Importer)
	switch {
	case d.closing.Load():
		return Buffer{}, fmt.Errorf("hal: import: device %s: %w", d.info.Name, ErrClosed)
	case !ok:
		return Buffer{}, fmt.Errorf("hal: import: %w by %s", ErrUnsupported, d.info.Name)
	case addr == 0 || size <= 0:
		return Buffer{}, invalid("import of %d bytes at address %#x", int64(size), addr)
	}
	at, heap, err := im.Import(addr, size)
	if err != nil {
		return Buffer{}, fmt.Errorf("hal: import: %w", err)
	}
	r := allocator.Request{Size: size, Kind: allocator.MakeKind(heap, 1, 0, 0, 0)}
	b := d.mintOwn(owned{addr: at, size: size, imported: true}, &r)
	d.imports.Add(1)
	d.importing.Add(1)
	d.releases.Store(allocator.SlotOf(b), release)
	return Buffer{b}, nil
}

// freeOwn ends a buffer of no bytes or imported memory.
func (d *Device) freeOwn(b allocator.Block, after queue.Frontier) error {
	d.ownMu.Lock()
	i, f, o := d.own.TakeLocked(b, after)
	if o != allocator.OK {
		d.ownMu.Unlock()
		return fmt.Errorf("hal: %w", o.Err())
	}
	v := d.own.At(i).Value
	d.own.DropLocked(i)
	d.ownMu.Unlock()
	if !v.imported {
		return nil
	}
	kept, _ := d.releases.LoadAndDelete(allocator.SlotOf(b))
	release, _ := kept.(func())
	go func() {
		defer d.imports.Done()
		defer d.importing.Add(-1)
		_ = f.Wait(context.Background()) // an error: the device is lost, and touches nothing any more
		_ = d.driver.(driver.Importer).Unimport(v.addr, v.size)
		if release != nil {
			release()
		}
	}()
	return nil
}

// hook is how queues reach the memory of their operations.
type hook struct{ *Device }

func (h hook) Use(op *queue.Op, at queue.Point) error {
	for i := range op.Refs {
		k, _ := op.Refs[i].Keeper.(*allocator.Keeper)
		if k == nil {
			break
		}
		if o := k.Ledger.Use(op.Refs[i].ID, queue.After(at)); o != allocator.OK {
			return fmt.Errorf("hal: %v: %w", op.Kind, o.Err())
		}
	}
	return nil
}

func (h hook) Lost(cause error) { h.lost.CompareAndSwap(nil, &cause) }

func (h hook) Free(ref queue.Ref, at queue.Point) {
	k, _ := ref.Keeper.(*allocator.Keeper)
	if k == nil {
		return
	}
	b := allocator.Block{Addr: ref.Addr, Size: Bytes(ref.Size), Keeper: k, ID: ref.ID}
	if err := h.free(b, queue.After(at)); err != nil {
		h.log.DPanic("a claimed buffer could not be freed", zap.Error(err))
	}
}

func (h hook) Keep(ref queue.Ref, cause error) {
	if k, _ := ref.Keeper.(*allocator.Keeper); k != nil {
		k.Ledger.Unclaim(ref.ID)
	}
}

// unsent is what deallocas free that wait for a signal nobody has submitted.
func (d *Device) unsent() (n Bytes) {
	for _, q := range d.Queues() {
		n += Bytes(q.queue.Unissued())
	}
	return n
}
