// Package scope is the layer for code that runs again and again: a training step, a
// decode step. What a pass of such code allocated is taken back when the pass ends,
// and the next pass gets it again, without a release in between and without asking
// the layers below.
//
//	cache := scope.New(scope.Options{})
//	for batch := range batches {
//		err := cache.Do(ctx, func(ctx context.Context) error {
//			act, err := q.Alloca(ctx, …)  // belongs to this pass
//			out, err := q.Alloca(scope.Without(ctx), …) // does not: it leaves
//			…
//		})
//	}
//	err := cache.Free()
//
// The idea is that of the @cached macro of Julia's GPUArrays.
//
// # A pass
//
// Each [Cache.Do] is a pass of its own, with its own set of blocks, so passes of one
// cache may run side by side and inside each other. What belongs to a pass is decided
// by the context that an allocation carries; goroutines started inside share it. A
// block is served again to a request of the same heap, usage, flags, alignment and
// size, and to no other.
//
//	          Allocate             Release, Dealloca
//	base ─────────────► live ───────────────────────► ended: no handle,
//	 ▲                 ▲  │                            still the pass's
//	 │ Trim, Free,     │  │ the pass ends (also by an       │
//	 │ bounds          │  │ error or a panic)               │ the pass ends
//	 │                 │  ▼                                 │
//	 └─────────────── idle ◄────────────────────────────────┘
//
// The end of a pass revokes the handles that are left: they are stale from then on.
// Memory is free after every use that was recorded, which is every operation issued
// until then; an operation that was submitted and not issued by the end of the pass
// fails, as one on a released buffer. A handle whose dealloca is not issued yet, or
// that is mapped, is not revoked: its memory comes back when it is released.
//
// # Concurrency, lock order and cost
//
// One lock a layer. A hit takes it once, with one look-up by key and one by pass;
// requests outside of any pass go straight to the base. Order:
//
//	Allocator.mu → state.mu, Pass.mu, leaves of hal/queue
//
// The base is called without a lock.
package scope

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

var (
	// ErrActive is what Free returns while a pass runs.
	ErrActive = errors.New("scope: a pass is running")
	// ErrFreed is what Do returns after Free.
	ErrFreed = errors.New("scope: the cache was freed")
)

// Options of a cache. The zero value keeps everything for the next pass.
type Options struct {
	// FreeAtEnd gives the memory of a pass back at its end, and keeps none.
	FreeAtEnd bool
	// MaxBytes bounds what a device keeps idle for the cache; 0 is no bound.
	MaxBytes memory.Bytes
}

// Cache is the memory of one piece of code that runs again and again. Safe for
// concurrent use. One cache may serve several devices; each device's share is kept and
// given back apart. A cache that is forgotten is freed, though never during a pass.
type Cache struct {
	state *state
}

// state is what layers and passes know of a cache; it doesn't keep the Cache alive.
type state struct {
	options Options

	mu     sync.Mutex
	active int
	freed  bool
	layers []*Allocator // that have a share
}

// New returns an empty cache.
func New(o Options) *Cache {
	c := &Cache{&state{options: o}}
	runtime.AddCleanup(c, func(s *state) { go s.drop() }, c.state)
	return c
}

type passKey struct{}

// Pass is one run of [Cache.Do].
type Pass struct {
	cache *Cache // alive while a pass runs
	id    uint64
	ended atomic.Bool

	mu     sync.Mutex
	layers []*Allocator // in which it has blocks
}

// passes finds a pass by its number.
var passes sync.Map // uint64 → *Pass

var lastPass atomic.Uint64

// Do runs f as a pass: what is allocated with f's context belongs to it and is taken
// back when f returns, by an error or a panic too. It returns f's error, or ErrFreed.
func (c *Cache) Do(ctx context.Context, f func(context.Context) error) error {
	s := c.state
	s.mu.Lock()
	if s.freed {
		s.mu.Unlock()
		return ErrFreed
	}
	s.active++
	s.mu.Unlock()
	p := &Pass{cache: c, id: lastPass.Add(1)}
	passes.Store(p.id, p)
	defer p.end()
	return f(context.WithValue(ctx, passKey{}, p))
}

// Without returns a context for what leaves the pass: allocations made with it belong
// to none.
func Without(ctx context.Context) context.Context {
	if PassOf(ctx) == 0 {
		return ctx
	}
	return context.WithValue(ctx, passKey{}, (*Pass)(nil))
}

// PassOf is the number of the pass that ctx belongs to, for [allocator.Request]; 0 is
// none.
func PassOf(ctx context.Context) uint64 {
	if p, _ := ctx.Value(passKey{}).(*Pass); p != nil && !p.ended.Load() {
		return p.id
	}
	return 0
}

func (p *Pass) end() {
	p.mu.Lock()
	p.ended.Store(true)
	layers := p.layers
	p.mu.Unlock()
	passes.Delete(p.id)
	for _, a := range layers {
		a.endPass(p)
	}
	s := p.cache.state
	s.mu.Lock()
	s.active--
	s.mu.Unlock()
}

// Free gives back what the cache keeps. ErrActive while a pass runs. Idempotent.
func (c *Cache) Free() error {
	s := c.state
	s.mu.Lock()
	if s.active > 0 {
		n := s.active
		s.mu.Unlock()
		return fmt.Errorf("%w: %d of them", ErrActive, n)
	}
	s.freed = true
	s.mu.Unlock()
	s.drop()
	return nil
}

// drop gives every share back.
func (s *state) drop() {
	s.mu.Lock()
	layers := slices.Clone(s.layers)
	s.layers = nil
	s.mu.Unlock()
	for _, a := range layers {
		a.dropShare(s)
	}
}

// Figures are what a cache has, over all devices.
type Figures struct {
	Active int          `json:"active"` // passes running
	Free   memory.Bytes `json:"free_bytes"`
	Busy   memory.Bytes `json:"busy_bytes"` // of passes running
	Blocks int          `json:"blocks"`
	Hits   uint64       `json:"hits"`
	Misses uint64       `json:"misses"`
}

// Figures returns the cache's figures at one moment.
func (c *Cache) Figures() (f Figures) {
	s := c.state
	s.mu.Lock()
	f.Active = s.active
	layers := slices.Clone(s.layers)
	s.mu.Unlock()
	for _, a := range layers {
		a.figures(s, &f)
	}
	return f
}

// String says how much the cache has.
func (c *Cache) String() string {
	f := c.Figures()
	return fmt.Sprintf("scope: %s free, %s busy in %d blocks; %d passes running", f.Free.Human(), f.Busy.Human(), f.Blocks, f.Active)
}

// Layer describes the layer to a registry.
var Layer = allocator.Layer{
	Table: &spec.Table{
		Name:    "scope",
		Summary: "memory of a repeated piece of code, for its next pass",
		Doc: `Serves code that is run with hal.NewScope: what one pass allocated is taken back at
its end and handed to the next. Everything else goes straight to the layer below.
It must be the last layer.`,
	},
	Mints: true,
	Last:  true,
	New: func(base allocator.Allocator, env *allocator.Env, _ *spec.Values) (allocator.Allocator, error) {
		return NewLayer(base, env)
	},
}

// Allocator is the layer. Safe for concurrent use.
type Allocator struct {
	base allocator.Allocator

	mu     sync.Mutex
	slots  allocator.Slots[entry]
	inner  []*allocator.Keeper
	shares map[*state]*share
	byID   map[uint32]*share // of entries, by share.id
	last   uint32
	busy   map[uint64][]uint32 // slots of the passes that run
	closed bool
	stats  allocator.Stats
}

// share is what one cache has of one device.
type share struct {
	state *state
	id    uint32
	idle  map[key][]uint32 // slots, the last freed last
	free  memory.Bytes
	used  memory.Bytes // of passes running
	count int          // blocks, idle and busy
	hits  uint64
	miss  uint64
	gone  bool // dropped: what is still out goes back to the base
}

// key is what a request must have in common with the one that a block was made for.
type key struct {
	size memory.Bytes
	kind allocator.Kind // without the flags of reuse
}

// entry is what is kept with a block.
type entry struct {
	addr  uint64
	size  memory.Bytes
	id    uint64
	inner int32
	share uint32
	pass  uint64 // that it belongs to; 0: idle, or out after its pass has ended
	out   bool   // has a handle
}

var (
	_ allocator.Allocator    = (*Allocator)(nil)
	_ allocator.Passer       = (*Allocator)(nil)
	_ allocator.Idler        = (*Allocator)(nil)
	_ allocator.LiveLister   = (*Allocator)(nil)
	_ allocator.PeakResetter = (*Allocator)(nil)
	_ allocator.Checker      = (*Allocator)(nil)
)

// NewLayer returns the layer over base.
func NewLayer(base allocator.Allocator, env *allocator.Env) (*Allocator, error) {
	if base == nil {
		return nil, errors.New("scope: no base to take memory from")
	}
	a := &Allocator{base: base, shares: map[*state]*share{}, byID: map[uint32]*share{}, busy: map[uint64][]uint32{}}
	a.slots.Init(&a.mu, env.Owner, 0)
	return a, nil
}

// Scoped marks a stack that has the layer.
func (a *Allocator) Scoped() {}

// Allocate implements [allocator.Allocator].
func (a *Allocator) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	if r.Pass == 0 {
		return a.base.Allocate(r)
	}
	found, ok := passes.Load(r.Pass)
	if !ok { // it has ended: a goroutine that outlived it
		return a.base.Allocate(r)
	}
	p := found.(*Pass)
	k := key{r.Size, r.Kind &^ allocator.ReuseFlags}
	a.mu.Lock()
	s := a.shareLocked(p)
	if s == nil {
		a.mu.Unlock()
		return a.base.Allocate(r)
	}
	list := s.idle[k]
	var pending queue.Frontier
	for n := len(list) - 1; n >= 0; n-- {
		i := list[n]
		f := a.slots.ReadyLocked(i)
		g := r.Reuse(f)
		if g >= allocator.ReuseWait {
			pending = f
			continue
		}
		s.idle[k] = slices.Delete(list, n, n+1)
		b := a.handOutLocked(s, p, i, &r, f)
		s.hits++
		a.stats.Hits++
		a.stats.Reused[g&3]++
		a.mu.Unlock()
		return b, f, allocator.OK
	}
	a.mu.Unlock()

	b, f, o := a.base.Allocate(r)

	a.mu.Lock()
	if o != allocator.OK {
		a.stats.Failed++
		a.mu.Unlock()
		if !pending.Unknown() && (o == allocator.Exhausted || o == allocator.OverLimit) {
			return allocator.Block{}, pending, allocator.NeedsWait
		}
		return allocator.Block{}, f, o
	}
	i := uint32(0)
	if s = a.shareLocked(p); s != nil {
		i = a.slots.NewLocked()
	}
	if i == 0 { // the pass has ended meanwhile, or there can be no more handles
		a.mu.Unlock()
		return b, f, allocator.OK
	}
	a.slots.At(i).Value = entry{addr: b.Addr, size: b.Size, id: b.ID, inner: a.keeperLocked(b.Keeper), share: s.id}
	s.count++
	s.miss++
	a.stats.Misses++
	a.stats.Held += b.Size
	a.stats.PeakHeld = max(a.stats.PeakHeld, a.stats.Held)
	s.free += b.Size // handOutLocked takes it off
	out := a.handOutLocked(s, p, i, &r, f)
	a.mu.Unlock()
	return out, f, allocator.OK
}

// shareLocked returns the share of p's cache, made on first use, or nil if the pass
// has ended or the layer is closed.
func (a *Allocator) shareLocked(p *Pass) *share {
	if a.closed || p.ended.Load() {
		return nil
	}
	st := p.cache.state
	s := a.shares[st]
	if s == nil {
		a.last++
		s = &share{state: st, id: a.last, idle: map[key][]uint32{}}
		a.shares[st], a.byID[s.id] = s, s
		st.mu.Lock()
		st.layers = append(st.layers, a)
		st.mu.Unlock()
	}
	if _, known := a.busy[p.id]; !known {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.ended.Load() {
			return nil
		}
		p.layers = append(p.layers, a)
		a.busy[p.id] = nil
	}
	return s
}

// handOutLocked makes slot i, which is idle or new, live in pass p.
func (a *Allocator) handOutLocked(s *share, p *Pass, i uint32, r *allocator.Request, f queue.Frontier) allocator.Block {
	v := &a.slots.At(i).Value
	v.pass, v.out = p.id, true
	a.busy[p.id] = append(a.busy[p.id], i)
	s.free -= v.size
	s.used += v.size
	a.stats.Allocs++
	a.stats.Live += v.size
	a.stats.PeakLive = max(a.stats.PeakLive, a.stats.Live)
	return a.slots.MintLocked(i, v.addr, v.size, r, f)
}

func (a *Allocator) keeperLocked(k *allocator.Keeper) int32 {
	if i := slices.Index(a.inner, k); i >= 0 {
		return int32(i)
	}
	a.inner = append(a.inner, k)
	return int32(len(a.inner) - 1)
}

// Free implements [allocator.Allocator]. Inside a pass it ends the handle, and the
// memory stays the pass's.
func (a *Allocator) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	if !a.slots.Mints(b) {
		return a.base.Free(b, after)
	}
	a.mu.Lock()
	i, _, o := a.slots.TakeLocked(b, after)
	if o != allocator.OK {
		a.mu.Unlock()
		return o
	}
	v := &a.slots.At(i).Value
	v.out = false
	a.stats.Frees++
	a.stats.Live -= v.size
	var back []freed
	if v.pass == 0 { // its pass is over
		back = a.idleLocked(i, nil)
	}
	a.mu.Unlock()
	a.give(back)
	return allocator.OK
}

// freed is a block for the base.
type freed struct {
	block allocator.Block
	after queue.Frontier
}

func (a *Allocator) give(list []freed) (sum memory.Bytes) {
	for _, f := range list {
		a.base.Free(f.block, f.after)
		sum += f.block.Size
	}
	return sum
}

// idleLocked keeps the block in slot i, which has no handle and is of a pass that has
// ended, or appends it to back.
func (a *Allocator) idleLocked(i uint32, back []freed) []freed {
	v := &a.slots.At(i).Value
	v.pass = 0
	s := a.byID[v.share]
	s.used -= v.size
	s.free += v.size
	o := &s.state.options
	if s.gone || a.closed || o.FreeAtEnd || o.MaxBytes > 0 && s.free > o.MaxBytes {
		return a.evictLocked(s, i, back)
	}
	info := a.slots.AskedLocked(i)
	k := key{info.Asked, info.Kind &^ allocator.ReuseFlags}
	s.idle[k] = append(s.idle[k], i)
	return back
}

// evictLocked takes the block in slot i, which is on no list, off the books.
func (a *Allocator) evictLocked(s *share, i uint32, back []freed) []freed {
	v := a.slots.At(i).Value
	f := a.slots.ReadyLocked(i)
	a.slots.DropLocked(i)
	s.free -= v.size
	if s.count--; s.gone && s.count == 0 {
		delete(a.byID, s.id)
	}
	a.stats.Held -= v.size
	return append(back, freed{allocator.Block{Addr: v.addr, Size: v.size, Keeper: a.inner[v.inner], ID: v.id}, f})
}

// endPass takes back what belongs to p.
func (a *Allocator) endPass(p *Pass) {
	a.mu.Lock()
	var back []freed
	for _, i := range a.busy[p.id] {
		v := &a.slots.At(i).Value
		if v.out {
			if !a.slots.RevokeLocked(i) { // claimed or mapped: its holder releases it
				v.pass = 0
				continue
			}
			v.out = false
			a.stats.Frees++
			a.stats.Live -= v.size
		}
		back = a.idleLocked(i, back)
	}
	delete(a.busy, p.id)
	a.mu.Unlock()
	a.give(back)
}

// dropShare gives back what st's cache keeps here.
func (a *Allocator) dropShare(st *state) {
	a.mu.Lock()
	var back []freed
	if s := a.shares[st]; s != nil {
		delete(a.shares, st)
		s.gone = true
		back = a.emptyLocked(s, 0, nil)
		if s.count == 0 {
			delete(a.byID, s.id)
		}
	}
	a.mu.Unlock()
	a.give(back)
}

// emptyLocked evicts idle blocks of s until at most keep bytes are left.
func (a *Allocator) emptyLocked(s *share, keep memory.Bytes, back []freed) []freed {
	for k, list := range s.idle {
		n := len(list)
		for n > 0 && s.idleBytes() > keep {
			n--
			back = a.evictLocked(s, list[n], back)
		}
		if s.idle[k] = list[:n]; n == 0 {
			delete(s.idle, k)
		}
	}
	return back
}

func (s *share) idleBytes() memory.Bytes { return s.free }

func (a *Allocator) figures(st *state, f *Figures) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.shares[st]; s != nil {
		f.Free += s.free
		f.Busy += s.used
		f.Blocks += s.count
		f.Hits += s.hits
		f.Misses += s.miss
	}
}

// Trim implements [allocator.Allocator]: caches give back what no pass uses.
func (a *Allocator) Trim(keep memory.Bytes) memory.Bytes {
	a.mu.Lock()
	var back []freed
	idle := a.idleNowLocked()
	for _, s := range a.byID {
		if idle <= keep {
			break
		}
		before := s.free
		back = a.emptyLocked(s, max(0, s.free-(idle-keep)), back)
		idle -= before - s.free
	}
	a.mu.Unlock()
	return a.give(back)
}

func (a *Allocator) idleNowLocked() (sum memory.Bytes) {
	for _, s := range a.byID {
		sum += s.free
	}
	return sum
}

// Pending implements [allocator.Idler].
func (a *Allocator) Pending(yield func(after queue.Frontier, size memory.Bytes) bool) {
	type waiting struct {
		f    queue.Frontier
		size memory.Bytes
	}
	var list []waiting
	a.mu.Lock()
	a.eachIdleLocked(func(i uint32) {
		if f := a.slots.ReadyLocked(i); !f.Reached() {
			list = append(list, waiting{f, a.slots.At(i).Value.size})
		}
	})
	a.mu.Unlock()
	for _, w := range list {
		if !yield(w.f, w.size) {
			return
		}
	}
}

func (a *Allocator) eachIdleLocked(visit func(i uint32)) {
	for _, s := range a.byID {
		for _, list := range s.idle {
			for _, i := range list {
				visit(i)
			}
		}
	}
}

// Stats implements [allocator.Allocator]. Requests outside of any pass don't count.
func (a *Allocator) Stats() allocator.Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	st := a.stats
	st.Idle = a.idleNowLocked()
	a.eachIdleLocked(func(i uint32) {
		v := &a.slots.At(i).Value
		st.Blocks++
		st.LargestFree = max(st.LargestFree, v.size)
		if !a.slots.ReadyLocked(i).Reached() {
			st.Pending += v.size
		}
	})
	return st
}

// ResetPeaks implements [allocator.PeakResetter].
func (a *Allocator) ResetPeaks() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stats.PeakLive, a.stats.PeakHeld = a.stats.Live, a.stats.Held
}

// Live implements [allocator.LiveLister].
func (a *Allocator) Live(yield func(allocator.Block, allocator.Info) bool) { a.slots.Live(yield) }

// Pass implements [allocator.Passer].
func (a *Allocator) Pass(capability any) allocator.Allocator {
	if _, ok := capability.(*allocator.VirtualMemory); ok {
		return nil
	}
	return a.base
}

// Close implements [allocator.Allocator].
func (a *Allocator) Close() error {
	a.mu.Lock()
	a.closed = true
	var back []freed
	for _, s := range a.byID {
		back = a.emptyLocked(s, 0, back)
	}
	a.mu.Unlock()
	a.give(back)
	return nil
}

// Check implements [allocator.Checker]: every block is idle, or a pass's, or out.
func (a *Allocator) Check() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := memory.Bytes(0)
	for _, s := range a.byID {
		idle := memory.Bytes(0)
		for k, list := range s.idle {
			for _, i := range list {
				v := &a.slots.At(i).Value
				idle += v.size
				if v.out || v.pass != 0 || v.share != s.id {
					return fmt.Errorf("scope: idle block %d has a handle or a pass: %+v", i, *v)
				}
				if got := a.slots.AskedLocked(i); got.Asked != k.size {
					return fmt.Errorf("scope: block %d, of %d bytes, is kept for %d", i, got.Asked, k.size)
				}
			}
		}
		if idle != s.free || s.used < 0 {
			return fmt.Errorf("scope: %d bytes are idle, counted %d, busy %d", idle, s.free, s.used)
		}
		held += s.free + s.used
	}
	if held != a.stats.Held {
		return fmt.Errorf("scope: %d bytes are held, counted %d", held, a.stats.Held)
	}
	for id, list := range a.busy {
		for _, i := range list {
			if v := &a.slots.At(i).Value; v.pass != id {
				return fmt.Errorf("scope: block %d of pass %d belongs to pass %d", i, id, v.pass)
			}
		}
	}
	return nil
}
