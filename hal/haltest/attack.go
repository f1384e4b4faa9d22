package haltest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Setup says what [Attack] attacks. The zero value attacks the standard layers.
type Setup struct {
	// Allocators is the registry that stacks are built from; nil is hal.Allocators.
	Allocators *allocator.Registry
	// Stack draws a stack; nil is [Stacks].
	Stack func(t *rapid.T) string
	// Device draws a device; nil draws small ones of every kind.
	Device func(t *rapid.T) Config
	// Without lists steps to leave out, by name, as "lose" or "fail".
	Without []string
}

// Stacks draws stacks of the standard layers: any source, and up to three
// decorators in any order with options at the edges of their ranges.
func Stacks(t *rapid.T) string {
	parts := []string{rapid.SampledFrom([]string{"vmm", "raw", "pool", "pool:threshold=0B"}).Draw(t, "source")}
	for range rapid.IntRange(0, 3).Draw(t, "layers") {
		parts = append(parts, rapid.SampledFrom([]string{
			"block",
			"block:min_slab=64KiB,growth=0%,keep=0B",
			"block:min_block=16B,min_slab=4KiB,growth=50%,keep=64KiB",
			"caching",
			"limit:max=600KiB",
			"limit:percent=60%,device_local=500KiB",
			"reuse:wait=on",
			"reuse:same=off,ordered=off",
			"caching:device_local=*;64KiB;3,waste=*",
			"caching:device_local=16KiB;*;*,depth=1,shards=4",
			"caching:*=*;256KiB;16,waste=2,shards=2",
		}).Draw(t, "layer"))
	}
	return strings.Join(parts, "+")
}

// Devices draws small devices: some report by themselves, some must be polled.
func Devices(t *rapid.T) Config {
	return Config{
		Seed:        rapid.Uint64().Draw(t, "seed"),
		Capacity:    memory.Bytes(rapid.SampledFrom([]int{256 << 10, 1 << 20, 8 << 20}).Draw(t, "capacity")),
		Granularity: memory.Bytes(rapid.SampledFrom([]int{4 << 10, 64 << 10}).Draw(t, "granularity")),
		Queues:      rapid.IntRange(1, 4).Draw(t, "queues"),
		Polled:      rapid.Bool().Draw(t, "polled"),
	}
}

// Attack runs one random history of a device with a random stack on the simulated
// device, and fails t where anything is not as it must be. After every step:
//
//   - the monitor has nothing to say: no byte was handed out or acted on while an
//     operation of an earlier owner could still touch it;
//   - buffers don't overlap, and lie as they were asked to;
//   - what the outermost layer says is live is what is live, each layer holds what
//     the one below says it gave, the driver has given what the source holds, and no
//     figure is negative;
//   - the structures of every layer that has a Check are sound.
//
// At the end every signal is given: then everything must finish, all memory must go
// back, and Close must find nothing left. rapid shrinks a failing history and prints
// how to run it again.
func Attack(t *rapid.T, s Setup) {
	h := newHistory(t, s)
	defer h.end()
	steps := map[string]func(*rapid.T){"": func(*rapid.T) { h.check() }}
	for _, name := range slices.Sorted(maps.Keys(actions)) {
		a := actions[name]
		if slices.Contains(s.Without, name) || !a.always && !h.chance("with "+name, 2) {
			continue
		}
		for i := range a.weight {
			steps[name+strings.Repeat("'", i)] = func(*rapid.T) {
				if !h.lost {
					a.do(h)
				}
			}
		}
	}
	t.Repeat(steps)
}

// history is a run in progress: the model beside the real thing.
type history struct {
	t      *rapid.T
	sim    *Device
	dev    *hal.Device
	stack  string
	queues []*hal.Queue
	live   []*owned
	dying  []*owned // released by a dealloca that may not have been issued
	sems   []*semaphore
	lost   bool

	// What this history is fond of: one that does a few things again and again gets
	// further than one that does a little of everything.
	sizes                      []int
	waiting, signalling, added int // one in so many
}

// owned is a buffer as the model knows it.
type owned struct {
	hal.Buffer
	addr    uint64
	granted memory.Bytes
	align   memory.Bytes
	home    *hal.Queue     // that it was handed to, or nil: the host, so all
	born    *hal.Semaphore // at 1 when operations of other queues may touch it
	foreign bool           // in use by work outside: not to be used by operations any more
	mapped  bool
}

type semaphore struct {
	*hal.Semaphore
	given uint64 // the largest value that somebody was asked to signal
}

// action is one kind of step.
type action struct {
	weight int
	always bool // in every history, others in half of them
	do     func(*history)
}

var actions map[string]action

func init() { // not an initializer: the steps name each other
	actions = map[string]action{
		"alloca":    {8, true, (*history).alloca},
		"cycle":     {14, true, (*history).cycle},
		"allocate":  {4, false, (*history).allocate},
		"host":      {3, false, (*history).allocateHost},
		"dealloca":  {12, true, (*history).dealloca},
		"release":   {4, false, (*history).release},
		"use":       {12, true, (*history).use},
		"copy":      {2, false, (*history).copy},
		"foreign":   {2, false, (*history).foreign},
		"export":    {1, false, (*history).export},
		"order":     {5, true, (*history).order},
		"barrier":   {4, false, (*history).barrier},
		"signal":    {6, false, (*history).signal},
		"fail":      {2, false, (*history).fail},
		"step":      {4, true, (*history).step},
		"run":       {1, false, (*history).run},
		"trim":      {2, false, (*history).trim},
		"queue":     {1, false, (*history).newQueue},
		"close":     {1, false, (*history).closeQueue},
		"fault":     {2, false, (*history).fault},
		"map":       {1, false, (*history).mapping},
		"semaphore": {1, false, (*history).semaphore},
		"lose":      {1, false, (*history).lose},
	}
}

func newHistory(t *rapid.T, s Setup) *history {
	if s.Stack == nil {
		s.Stack = Stacks
	}
	if s.Device == nil {
		s.Device = Devices
	}
	if s.Allocators == nil {
		s.Allocators = hal.Allocators
	}
	h := &history{t: t, stack: s.Stack(t)}
	sim, err := New(s.Device(t))
	h.must(err)
	h.sim = sim
	h.dev, err = hal.OpenDriver(sim, hal.WithAllocator(h.stack), hal.WithAllocators(s.Allocators))
	if err != nil {
		_ = sim.Close()
		h.t.Fatalf("%s: %v", h.stack, err)
	}
	h.queues = h.dev.Queues()
	for range 1 + h.pick("sizes", 3) {
		h.sizes = append(h.sizes, rapid.SampledFrom([]int{1, 300, 4 << 10, 5000, 20 << 10, 60 << 10, 100 << 10, 300 << 10}).Draw(t, "a size"))
	}
	often := rapid.SampledFrom([]int{2, 4, 16})
	h.waiting, h.signalling, h.added = 4*often.Draw(t, "waiting"), often.Draw(t, "signalling"), often.Draw(t, "adding waits")
	sim.monitor.onDealloca = func(_ queue.Point, r queue.Ref) { h.dead(r.Addr) }
	for range 2 {
		h.semaphore()
	}
	return h
}

func (h *history) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatalf("%s: %v", h.stack, err)
	}
}

func (h *history) pick(what string, n int) int { return rapid.IntRange(0, n-1).Draw(h.t, what) }
func (h *history) queue() *hal.Queue           { return h.queues[h.pick("queue", len(h.queues))] }
func (h *history) chance(what string, in int) bool {
	return h.pick(what, in) == in-1 // shrinks towards no
}

// buffer picks a live buffer that operations may use, or nil.
func (h *history) buffer() *owned {
	if len(h.live) == 0 {
		return nil
	}
	b := h.live[h.pick("buffer", len(h.live))]
	if b.foreign || b.mapped {
		return nil
	}
	return b
}

// fences draws what an operation waits for and signals.
func (h *history) fences() (wait, signal hal.Fence) {
	if h.chance("waits", h.waiting) {
		s := h.sems[h.pick("wait", len(h.sems))]
		wait = s.At(s.given)
		if h.chance("ahead", 6) {
			wait = s.At(s.given + 1)
		}
	}
	if h.chance("signals", h.signalling) {
		s := h.sems[h.pick("signal", len(h.sems))]
		s.given++
		signal = s.At(s.given)
	}
	return wait, signal
}

func (h *history) params() hal.Params {
	p := hal.Params{
		Size:  memory.Bytes(rapid.SampledFrom(h.sizes).Draw(h.t, "size")),
		Align: memory.Bytes(rapid.SampledFrom([]int{0, 0, 0, 16, 4096, 64 << 10}).Draw(h.t, "align")),
	}
	if h.chance("waits are allowed", h.added) {
		p.Reuse |= hal.MayWait
	}
	if h.chance("restricted", 8) {
		p.Reuse |= rapid.SampledFrom([]hal.Reuse{hal.NoOrdered, hal.NoPolled, hal.NoOrdered | hal.NoPolled, hal.NoSubAlloc}).Draw(h.t, "restriction")
	}
	if h.chance("host memory", 8) {
		p.Type = hal.HostVisible
	}
	return p
}

// patience bounds what waits in a history; in virtual time nothing lasts, so whoever
// gets there waits for what can't happen.
const patience = 3 * time.Second

func (h *history) context() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

// got takes a buffer into the model. A lack of memory is no failure of the stack's.
func (h *history) got(b hal.Buffer, err error, p hal.Params, home *hal.Queue, born *hal.Semaphore) *owned {
	h.t.Helper()
	if errors.Is(err, context.DeadlineExceeded) {
		h.t.Fatalf("%s: the ladder waited for what nobody will do: %v", h.stack, err)
	}
	if errors.Is(err, hal.ErrOutOfMemory) || errors.Is(err, hal.ErrTooLarge) || errors.Is(err, hal.ErrClosed) {
		return nil
	}
	h.must(err)
	o := &owned{Buffer: b, home: home, born: born, addr: b.Address(), granted: b.Granted(), align: max(p.Align, 1)}
	if p.Align == 0 {
		o.align = hal.DefaultAlign
	}
	h.live = append(h.live, o)
	h.t.Logf("  %v: %v for %s", o.Buffer, o.granted, name(home))
	return o
}

func name(q *hal.Queue) string {
	if q == nil {
		return "the host"
	}
	return fmt.Sprintf("q%d, which has issued %d", q.ID(), q.Issued().Value)
}

func (h *history) alloca() {
	ctx, cancel := h.context()
	defer cancel()
	p, q, born := h.params(), h.queue(), hal.NewSemaphore(0)
	wait, signal := h.fences()
	b, err := q.Alloca(ctx, p, wait, signal.And(born.At(1)))
	h.got(b, err, p, q, born)
}

func (h *history) allocate() {
	ctx, cancel := h.context()
	defer cancel()
	p, q, born := h.params(), h.queue(), hal.NewSemaphore(0)
	b, err := q.Allocate(ctx, p)
	h.submitted(q.Barrier(nil, born.At(1)))
	h.got(b, err, p, q, born)
}

func (h *history) allocateHost() {
	ctx, cancel := h.context()
	defer cancel()
	p := h.params()
	b, err := h.dev.Allocate(ctx, p)
	if o := h.got(b, err, p, nil, nil); o != nil {
		h.sim.monitor.HandedToHost(o.addr, o.granted)
	}
}

// drop takes b out of the live ones.
func (h *history) drop(b *owned) {
	h.live = slices.DeleteFunc(h.live, func(o *owned) bool { return o == b })
}

func (h *history) dealloca() {
	if len(h.live) == 0 {
		return
	}
	b := h.live[h.pick("buffer", len(h.live))]
	wait, signal := h.fences()
	h.deallocate(b, h.queue(), wait, signal)
}

func (h *history) deallocate(b *owned, q *hal.Queue, wait, signal hal.Fence) {
	h.t.Logf("  dealloca of %v on %s", b.Buffer, name(q))
	h.drop(b)
	h.dying = append(h.dying, b)
	switch err := q.Dealloca(b.Buffer, wait, signal); {
	case err == nil:
	case errors.Is(err, hal.ErrMapped) && b.mapped, errors.Is(err, hal.ErrClosed):
		h.alive(b)
	default:
		h.must(err)
	}
}

// dead is told of deallocas as they are issued.
func (h *history) dead(addr uint64) {
	h.dying = slices.DeleteFunc(h.dying, func(o *owned) bool { return o.addr == addr })
}

// alive takes a buffer back whose release didn't happen.
func (h *history) alive(b *owned) {
	h.dying = slices.DeleteFunc(h.dying, func(o *owned) bool { return o == b })
	h.live = append(h.live, b)
}

// cycle is the life of most buffers: allocated, used, freed on the same queue, and
// once in a while used on another one on the way.
func (h *history) cycle() {
	ctx, cancel := h.context()
	defer cancel()
	p, q, born := h.params(), h.queue(), hal.NewSemaphore(0)
	wait, signal := h.fences()
	raw, err := q.Alloca(ctx, p, wait, signal.And(born.At(1)))
	b := h.got(raw, err, p, q, born)
	if b == nil {
		return
	}
	h.submitted(q.Fill(b.All(), []byte{1}, nil, nil))
	if h.chance("used elsewhere", 3) {
		other := h.queue()
		h.submitted(other.Fill(b.All(), []byte{2}, b.after(other, nil), nil))
	}
	h.deallocate(b, q, nil, nil)
}

func (h *history) release() {
	if len(h.live) == 0 {
		return
	}
	b := h.live[h.pick("buffer", len(h.live))]
	h.t.Logf("  release of %v", b.Buffer)
	var err error
	switch h.pick("way", 3) {
	case 0:
		err = b.Release()
	case 1:
		err = h.queue().Release(b.Buffer)
	case 2:
		err = b.ReleaseAfter(h.queue().Now())
	}
	if b.mapped && errors.Is(err, hal.ErrMapped) {
		return
	}
	h.must(err)
	h.drop(b)
}

// submitted takes the outcome of an operation.
func (h *history) submitted(err error) {
	h.t.Helper()
	if !errors.Is(err, hal.ErrClosed) {
		h.must(err)
	}
}

// after adds to an operation on q that it comes after b was handed out: who touches
// memory sooner has nobody to blame.
func (b *owned) after(q *hal.Queue, wait hal.Fence) hal.Fence {
	if b.home == nil || b.home == q {
		return wait
	}
	return wait.And(b.born.At(1))
}

func (h *history) use() {
	b := h.buffer()
	if b == nil {
		return
	}
	wait, signal := h.fences()
	off, n := memory.Bytes(0), b.Size()
	switch h.pick("part", 3) {
	case 1:
		n = min(n, 64)
	case 2:
		off, n = n-min(n, 64), min(n, 64)
	}
	q := h.queue()
	h.t.Logf("  fill of %v on %s", b.Buffer, name(q))
	h.submitted(q.Fill(b.Span(off, n), []byte{byte(len(h.live))}, b.after(q, wait), signal))
}

func (h *history) copy() {
	b, c := h.buffer(), h.buffer()
	if b == nil || c == nil {
		return
	}
	n := min(b.Size(), c.Size())
	wait, signal := h.fences()
	q := h.queue()
	h.t.Logf("  copy of %v to %v on %s", c.Buffer, b.Buffer, name(q))
	h.submitted(q.Copy(b.Span(b.Size()-n, n), c.Span(0, n), b.after(q, c.after(q, wait)), signal))
}

// foreign lets work outside Halyard use a buffer until a point that its owner names.
func (h *history) foreign() {
	b := h.buffer()
	if b == nil {
		return
	}
	p := h.queue().Issued()
	h.must(b.UsedUntil(p))
	b.foreign = true
	h.sim.monitor.Foreign(b.Block(), p)
}

// export lets work outside Halyard, ordered on some queue, use a buffer, and tells nobody.
func (h *history) export() {
	b := h.buffer()
	if b == nil {
		return
	}
	_, err := b.Export()
	h.must(err)
	b.foreign = true
	h.sim.monitor.Foreign(b.Block(), h.queue().Issued())
}

// order makes one queue come after another, through a semaphore of their own.
func (h *history) order() {
	from, to := h.queue(), h.queue()
	if from == to {
		return
	}
	s := hal.NewSemaphore(0)
	if h.chance("wait first", 3) {
		h.submitted(to.Barrier(s.At(1), nil))
		h.submitted(from.Barrier(nil, s.At(1)))
	} else {
		h.submitted(from.Barrier(nil, s.At(1)))
		h.submitted(to.Barrier(s.At(1), nil))
	}
	h.sems = append(h.sems, &semaphore{s, 1})
}

func (h *history) barrier() {
	wait, signal := h.fences()
	h.submitted(h.queue().Barrier(wait, signal))
}

func (h *history) semaphore() { h.sems = append(h.sems, &semaphore{Semaphore: hal.NewSemaphore(0)}) }

// signal is the host's.
func (h *history) signal() {
	s := h.sems[h.pick("signal", len(h.sems))]
	s.given++
	_ = s.Signal(s.given) // failed, or a queue was faster
}

var errChosen = errors.New("chosen to fail")

func (h *history) fail() { h.sems[h.pick("fail", len(h.sems))].Fail(errChosen) }

func (h *history) step() {
	for range 1 + h.pick("steps", 8) {
		h.sim.Step()
	}
	if h.chance("poll", 2) {
		queue.Poll()
	}
}

func (h *history) run() { h.sim.Run() }

func (h *history) trim() {
	keep := memory.Bytes(rapid.SampledFrom([]int{0, 64 << 10}).Draw(h.t, "keep"))
	if !h.chance("waiting", 3) {
		h.dev.Trim(keep)
		return
	}
	ctx, cancel := h.context()
	defer cancel()
	_, err := h.dev.TrimWait(ctx, keep)
	h.must(err)
}

func (h *history) newQueue() {
	if len(h.queues) > 6 {
		return
	}
	q, err := h.dev.NewQueue()
	h.must(err)
	h.queues = append(h.queues, q)
}

func (h *history) closeQueue() {
	if len(h.queues) == 1 {
		return
	}
	i := h.pick("queue", len(h.queues))
	h.queues[i].Close()
	h.queues = slices.Delete(h.queues, i, i+1)
}

func (h *history) fault() { h.sim.FailNth(1 + h.pick("nth", 4)) }

// mapping maps a host-visible buffer, or unmaps it.
func (h *history) mapping() {
	for _, b := range h.live {
		if b.foreign || h.dev.Info().Heaps[0].Type.Has(hal.HostVisible) {
			continue
		}
		if b.mapped {
			h.must(b.Unmap())
			b.mapped = false
			return
		}
		ctx, cancel := h.context()
		_, err := b.Map(ctx)
		cancel()
		if errors.Is(err, hal.ErrUnsupported) {
			continue
		}
		h.must(err)
		b.mapped = true
		return
	}
}

func (h *history) lose() {
	if !h.chance("really", 4) {
		return
	}
	h.sim.Lose(errChosen)
	h.lost = true
}

// check compares the model and the real thing.
func (h *history) check() {
	h.t.Helper()
	for _, b := range slices.Clone(h.dying) {
		if b.Valid() { // its wait failed
			h.alive(b)
		}
	}
	if err := h.sim.monitor.Err(); err != nil {
		h.t.Fatalf("%s: %v", h.stack, err)
	}
	if err := h.dev.Check(); err != nil {
		h.t.Fatalf("%s: %v", h.stack, err)
	}
	all := slices.Concat(h.live, h.dying)
	slices.SortFunc(all, func(a, b *owned) int {
		switch {
		case a.addr < b.addr:
			return -1
		case a.addr > b.addr:
			return 1
		}
		return 0
	})
	var live memory.Bytes
	for i, b := range all {
		live += b.granted
		if b.addr%uint64(b.align) != 0 {
			h.t.Fatalf("%s: %#x was asked for at a multiple of %d", h.stack, b.addr, b.align)
		}
		if i > 0 && all[i-1].addr+uint64(all[i-1].granted) > b.addr {
			h.t.Fatalf("%s: [%#x, +%#x) and [%#x, +%#x) overlap", h.stack, all[i-1].addr, all[i-1].granted, b.addr, b.granted)
		}
	}
	for _, b := range h.live {
		if !b.Valid() {
			h.t.Fatalf("%s: the handle of %#x is stale while it lives", h.stack, b.addr)
		}
	}
	h.figures(live)
}

// figures checks the statistics against the model and each other.
func (h *history) figures(live memory.Bytes) {
	h.t.Helper()
	if h.lost {
		return
	}
	all := h.dev.Stats().Layers
	source := all[len(all)-1]
	layers := append(slices.DeleteFunc(all[:len(all)-1], func(l hal.LayerStats) bool {
		return l.Allocs == 0 && l.Live == 0 && l.Held == 0 // it counts nothing, as one made of allocator.Forward
	}), source)
	if got := layers[0].Live; got != live && layers[0].Maps == 0 {
		h.t.Fatalf("%s: %s has %d bytes live, and there are %d", h.stack, layers[0].Spec, got, live)
	}
	for i, l := range layers {
		for name, n := range map[string]memory.Bytes{
			"live": l.Live, "held": l.Held, "idle": l.Idle, "pending": l.Pending, "largest free": l.LargestFree,
			"peak live − live": l.PeakLive - l.Live, "peak held − held": l.PeakHeld - l.Held, "held − live": l.Held - l.Live,
		} {
			if n < 0 {
				h.t.Fatalf("%s: %s: %s is %d: %+v", h.stack, l.Spec, name, n, l.Stats)
			}
		}
		if l.Frees > l.Allocs {
			h.t.Fatalf("%s: %s: %d frees of %d allocations", h.stack, l.Spec, l.Frees, l.Allocs)
		}
		if i+1 < len(layers) {
			if below := layers[i+1]; below.Live != l.Held && below.Maps == 0 {
				h.t.Fatalf("%s: %s holds %d, and %s has given %d", h.stack, l.Spec, l.Held, below.Spec, below.Live)
			}
		}
	}
	var taken memory.Bytes
	for i := range h.sim.Info().Heaps {
		free, total, err := h.sim.MemInfo(i)
		h.must(err)
		taken += total - free
	}
	if source.Held != taken {
		h.t.Fatalf("%s: the driver has given %d, and %s holds %d", h.stack, taken, source.Spec, source.Held)
	}
}

// end gives every signal there is; then all must finish, and all must go back.
func (h *history) end() {
	h.t.Helper()
	if r := recover(); r != nil {
		h.abandon()
		panic(r)
	}
	if h.t.Failed() {
		h.abandon()
		return
	}
	h.sim.SetFault(nil)
	ctx, cancel := h.context()
	defer cancel()
	if !h.lost {
		h.sim.Run()
		for _, s := range h.sems {
			_ = s.Signal(1 << 40)
			h.sim.Run()
		}
		if ids := h.sim.Stuck(); len(ids) > 0 {
			h.abandon()
			h.t.Fatalf("%s: queues %v never finish, with every signal given", h.stack, ids)
		}
		h.check()
	}
	for _, b := range slices.Concat(h.live, h.dying) {
		if b.mapped {
			h.must(b.Unmap())
		}
		if err := b.Release(); err != nil && !(h.lost && errors.Is(err, hal.ErrReleased)) {
			h.abandon()
			h.t.Fatalf("%s: %v can't be released at the end: %v", h.stack, b, err)
		}
	}
	h.live, h.dying = nil, nil
	if !h.lost {
		_, err := h.dev.TrimWait(ctx, 0)
		h.must(err)
		h.check()
		for _, l := range h.dev.Stats().Layers {
			if l.Held != 0 || l.Live != 0 || l.Idle != 0 || l.Allocs != l.Frees {
				h.abandon()
				h.t.Fatalf("%s: %s is not at zero at the end: %+v", h.stack, l.Spec, l.Stats)
			}
		}
	}
	if err := h.dev.Close(ctx); err != nil {
		h.t.Fatalf("%s: close: %v", h.stack, err)
	}
	if err := h.sim.monitor.Err(); err != nil {
		h.t.Fatalf("%s: %v", h.stack, err)
	}
}

// abandon closes the devices of a history that failed.
func (h *history) abandon() {
	h.sim.Lose(fmt.Errorf("abandoned"))
	ctx, cancel := h.context()
	defer cancel()
	_ = h.dev.Close(ctx)
}
