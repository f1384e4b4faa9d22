package caching

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Defaults of [Config].
const (
	// DefaultWaste is where more gains little: on recorded programs both the hit rate
	// and the memory held at the peak improve up to here, since a block is only used
	// for less than its size where the alternative is to take another one.
	DefaultWaste = 1.5
	DefaultDepth = 8
)

// MaxShards is the largest number of shards.
const MaxShards = 64

// Config says what is kept. The zero value keeps everything without limit.
type Config struct {
	Pools  []Pool        // tried in order; none: one without limits for all heaps
	Waste  float64       // how much larger than asked reused memory may be, from 1 to +Inf; 0: DefaultWaste
	Idle   time.Duration // what is idle for longer goes back when the cache is next used; 0: no limit
	Depth  int           // how many blocks of a size class are looked at; 0: DefaultDepth
	Shards int           // a power of two; 0: 1
}

// Pool bounds what is kept of some heaps. A limit of 0 is none.
type Pool struct {
	Heap     memory.HeapKey // the heaps
	MaxAlloc memory.Bytes   // the largest block that is kept
	Capacity memory.Bytes   // idle bytes, as granted
	Count    int64          // idle blocks
	Off      bool           // keep nothing
}

// Validate returns every problem of the configuration for a device with these
// heaps.
func (c *Config) Validate(heaps memory.Heaps) error {
	var errs []error
	for i := range c.Pools {
		errs = append(errs, c.Pools[i].check(heaps))
	}
	if c.Waste != 0 && !(c.Waste >= 1) {
		errs = append(errs, fmt.Errorf("waste %v is below 1", c.Waste))
	}
	if c.Idle < 0 {
		errs = append(errs, fmt.Errorf("idle time %v is negative", c.Idle))
	}
	if c.Depth < 0 {
		errs = append(errs, fmt.Errorf("depth %d is negative", c.Depth))
	}
	if c.Shards < 0 || c.Shards > MaxShards || c.Shards&(c.Shards-1) != 0 {
		errs = append(errs, fmt.Errorf("%d shards: %w up to %d", c.Shards, errShards, MaxShards))
	}
	return errors.Join(errs...)
}

func (p *Pool) check(heaps memory.Heaps) error {
	if p.MaxAlloc < 0 || p.Capacity < 0 || p.Count < 0 {
		return fmt.Errorf("heap %v: a limit is negative", p.Heap)
	}
	var names []string
	for _, h := range heaps {
		if p.Heap.Matches(h) {
			return nil
		}
		names = append(names, h.String())
	}
	return fmt.Errorf("heap %v matches none of the device's heaps (%s)", p.Heap, strings.Join(names, "; "))
}

// Allocator is a cache over another allocator.
type Allocator struct {
	base allocator.Allocator // immutable, as all up to shards
	log  *zap.Logger
	now  func() time.Duration // since the cache was made

	mask  uint32 // number of shards - 1
	depth int
	extra uint64 // waste - 1, in 2⁻³²; anyLarger for no limit
	idle  time.Duration
	heaps [allocator.MaxHeaps]heap
	pools []pool // pool 0 keeps nothing

	shards []shard

	total struct { // what is taken from below; mu is a leaf
		mu         sync.Mutex
		held, peak memory.Bytes
	}
}

var (
	_ allocator.Allocator    = (*Allocator)(nil)
	_ allocator.Idler        = (*Allocator)(nil)
	_ allocator.PeakResetter = (*Allocator)(nil)
	_ allocator.Passer       = (*Allocator)(nil)
	_ allocator.LiveLister   = (*Allocator)(nil)
)

// heap is what a request for a heap needs to know.
type heap struct {
	most  memory.Bytes // larger requests pass through; 0 where nothing is kept
	round memory.Bytes // the heap's alignment - 1
	bins  [2]uint32    // the first of its bins, and the first of those for NoSubAlloc
	pool  uint32
}

// bypass are the uses of memory that doesn't return to general use.
const bypass = memory.SharingExport | memory.SharingReplicate | memory.SharingImmutable

const anyLarger = math.MaxUint64

// New makes a cache over base.
func New(base allocator.Allocator, env *allocator.Env, c Config) (*Allocator, error) {
	if err := c.Validate(env.Heaps); err != nil {
		return nil, fmt.Errorf("caching: %w", err)
	}
	if len(c.Pools) == 0 {
		c.Pools = []Pool{{Heap: memory.HeapKey{AnyType: true}}}
	}
	if c.Waste == 0 {
		c.Waste = DefaultWaste
	}
	if c.Depth == 0 {
		c.Depth = DefaultDepth
	}
	shards := max(1, c.Shards)
	clock := env.Now
	if clock == nil {
		clock = time.Now
	}
	start := clock()
	a := &Allocator{
		base: base, log: env.Log,
		now:   func() time.Duration { return clock().Sub(start) },
		mask:  uint32(shards - 1),
		depth: c.Depth, extra: anyLarger, idle: c.Idle,
		pools:  make([]pool, 1+len(c.Pools)),
		shards: make([]shard, shards),
	}
	if a.log == nil {
		a.log = zap.NewNop()
	}
	if c.Waste < 1<<30 {
		a.extra = uint64((c.Waste - 1) * (1 << 32))
	}
	for i, p := range c.Pools {
		a.pools[i+1].init(p)
	}
	bins := uint32(0)
	for i, h := range env.Heaps {
		for j, p := range c.Pools {
			if !p.Heap.Matches(h) {
				continue
			}
			a.heaps[i] = heap{
				most:  min(a.pools[j+1].maxAlloc, a.pools[j+1].capacity),
				round: max(h.MinAlignment, 1) - 1,
				bins:  [2]uint32{bins, bins + classes},
				pool:  uint32(j + 1),
			}
			bins += 2 * classes
			break
		}
	}
	for i := range a.shards {
		a.shards[i].init(a, uint32(i), env.Owner, bins)
	}
	return a, nil
}

// want is what a request asks of the bins.
type want struct {
	bin   uint32       // of the smallest class
	last  uint32       // of the largest
	limit memory.Bytes // the largest size that isn't a waste
}

// need is what a request for size takes.
func (h *heap) need(size memory.Bytes) memory.Bytes {
	if n := (size + h.round) &^ h.round; n >= size {
		return n
	}
	return size // it would overflow, and the base will say so
}

// limit is the largest block that may serve a request for need bytes.
func (a *Allocator) limit(need memory.Bytes) memory.Bytes {
	hi, lo := bits.Mul64(uint64(need), a.extra)
	n := uint64(need) + (hi<<32 | lo>>32)
	if a.extra == anyLarger || hi>>31 != 0 || n > uint64(memory.MaxBytes) {
		return memory.MaxBytes
	}
	return memory.Bytes(n)
}

// bin is the bin of blocks of size, apart for those that must not be part of others.
func (h *heap) bin(size memory.Bytes, kind allocator.Kind) uint32 {
	return h.bins[kind/allocator.NoSubAlloc&1] + class(size) // 0 or 1: is the flag set?
}

// Allocate implements [allocator.Allocator].
func (a *Allocator) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	if invariants {
		defer a.mustCheck()
	}
	h := &a.heaps[r.Kind.Heap()]
	s := &a.shards[uint32(r.Who.Queue)&a.mask]
	if r.Size > h.most || r.Kind.Usage()&bypass != 0 {
		return a.fresh(s, &r, &heap{}, queue.Frontier{}, false)
	}
	need := h.need(r.Size)
	bin := h.bin(need, r.Kind)
	s.mu.Lock()
	if i := s.bins[bin].newest; i != 0 { // mostly it is this one
		v := &s.slots.At(i).Value
		if v.fits(&r) && (v.rated == need || v.rated <= a.limit(need)) {
			f := s.slots.ReadyLocked(i)
			if g := r.Reuse(f); g < allocator.ReuseWait {
				b := s.takeLocked(i, v, &r, f, g)
				s.mu.Unlock()
				return b, f, allocator.OK
			}
		}
	}
	s.mu.Unlock()
	return a.search(s, &r, h, need, bin)
}

// search serves a request that the head of its first bin doesn't.
//
//go:noinline
func (a *Allocator) search(s *shard, r *allocator.Request, h *heap, need memory.Bytes, bin uint32) (allocator.Block, queue.Frontier, allocator.Outcome) {
	limit := a.limit(need)
	w := want{bin: bin, last: h.bin(limit, r.Kind), limit: limit}
	busy := false
	for n := range a.shards {
		t := &a.shards[(s.index+uint32(n))&a.mask]
		b, f, o := t.find(r, &w, a.depth)
		if o == allocator.OK {
			return b, f, o
		}
		busy = busy || o == allocator.NeedsWait
	}
	var pending queue.Frontier
	if busy {
		queue.Poll()
		var b allocator.Block
		var o allocator.Outcome
		if b, pending, o = a.findAll(s, r, &w); o == allocator.OK {
			return b, pending, o
		}
		busy = o == allocator.NeedsWait
	}
	if a.idle != 0 {
		a.expire()
	}
	return a.fresh(s, r, h, pending, busy)
}

// findAll looks at everything that fits, in all shards: first for what is usable as
// it is, then for what is with a wait, if the request allows that. NeedsWait comes
// with the frontier of a block that will do.
func (a *Allocator) findAll(s *shard, r *allocator.Request, w *want) (allocator.Block, queue.Frontier, allocator.Outcome) {
	var pending queue.Frontier
	outcome := allocator.Exhausted
	for _, worst := range [...]allocator.Reuse{allocator.ReusePolled, allocator.ReuseWait} {
		for n := range a.shards {
			t := &a.shards[(s.index+uint32(n))&a.mask]
			b, f, o := t.findOldest(r, w, worst)
			if o == allocator.OK {
				return b, f, o
			}
			if o == allocator.NeedsWait && outcome != o {
				pending, outcome = f, o
			}
		}
		if r.Kind&allocator.MayWait == 0 {
			break
		}
	}
	return allocator.Block{}, pending, outcome
}

// fresh takes a block from the base, for a request on s. h is the zero heap for one
// that passes through. busy says that a kept block will do after pending.
func (a *Allocator) fresh(s *shard, r *allocator.Request, h *heap, pending queue.Frontier, busy bool) (allocator.Block, queue.Frontier, allocator.Outcome) {
	s.mu.Lock()
	i := s.slots.NewLocked()
	if i == 0 {
		s.failed++
		s.mu.Unlock()
		return allocator.Block{}, queue.Frontier{}, allocator.Exhausted
	}
	s.mu.Unlock()

	b, f, o := a.base.Allocate(*r)

	s.mu.Lock()
	defer s.mu.Unlock()
	if o != allocator.OK {
		s.slots.DropLocked(i)
		s.failed++
		if busy && (o == allocator.Exhausted || o == allocator.OverLimit) {
			return allocator.Block{}, pending, allocator.NeedsWait
		}
		return allocator.Block{}, f, o
	}
	v := &s.slots.At(i).Value
	*v = node{addr: b.Addr, size: b.Size, id: b.ID, keeper: s.keeperLocked(b.Keeper)}
	if b.Size <= h.most {
		need := h.need(r.Size)
		v.rated = min(max(b.Size, need), a.limit(need))
		v.bin = h.bin(v.rated, r.Kind)
		v.pool = h.pool
	}
	s.misses++
	s.wentOutLocked(b.Size)
	a.hold(b.Size)
	return s.slots.MintLocked(i, b.Addr, b.Size, r, f), f, allocator.OK
}

// hold counts what is taken from below.
func (a *Allocator) hold(size memory.Bytes) {
	a.total.mu.Lock()
	a.total.held += size
	a.total.peak = max(a.total.peak, a.total.held)
	a.total.mu.Unlock()
}

// Free implements [allocator.Allocator].
func (a *Allocator) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	if invariants {
		defer a.mustCheck()
	}
	if b.Keeper == nil {
		return allocator.Foreign
	}
	s := &a.shards[b.Keeper.Index&a.mask]
	now := time.Duration(0)
	if a.idle != 0 {
		now = a.now()
	}
	s.mu.Lock()
	i, _, o := s.slots.TakeLocked(b, after)
	if o != allocator.OK {
		s.mu.Unlock()
		return o
	}
	v := &s.slots.At(i).Value
	s.live -= v.size
	s.frees++
	if p := &s.shares[v.pool]; p.fits(v.size) {
		s.linkLocked(p, i, v, now)
		old := a.idle != 0 && a.expiredLocked(s, now)
		s.mu.Unlock()
		if old {
			a.expireShard(s, now)
		}
		return allocator.OK
	}
	return a.settle(s, i, now) // unlocks
}

// Pass implements [allocator.Passer]. Memory taken through the base's
// [allocator.VirtualMemory] would go past the cache, so that is hidden.
func (a *Allocator) Pass(capability any) allocator.Allocator {
	if _, ok := capability.(*allocator.VirtualMemory); ok {
		return nil
	}
	return a.base
}

// Close implements [allocator.Allocator]: all idle memory goes back, and what is
// freed later goes straight back too.
func (a *Allocator) Close() error {
	for i := range a.shards {
		for s := &a.shards[i]; !s.close(a); {
			a.trimShard(s, 0)
		}
	}
	if invariants {
		a.mustCheck()
	}
	return nil
}
