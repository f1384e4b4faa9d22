package block

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// Config says how an [Allocator] works. The zero value is the default.
type Config struct {
	// MinBlock is the granularity of suballocation: a power of two from 16 bytes up
	// to 1 MiB. 0 is 256 bytes.
	MinBlock memory.Bytes
	// MinSlab and MaxSlab bound the size of a slab; a larger request gets a slab of
	// its own size. 0 is 2 MiB and 1 GiB.
	MinSlab, MaxSlab memory.Bytes
	// Growth is the size of a new slab in percent of what is held. 0 is 4; a negative
	// number is no growth beyond MinSlab.
	Growth float64
	// Keep bounds the bytes of wholly free slabs that stay when a new one is needed. 0
	// is no bound; a negative number keeps none. Whatever it is, free slabs go back
	// before a request fails.
	Keep memory.Bytes
	// Magazine is how many freed blocks each of sixteen groups of queues keeps as they
	// are while others are in its way, until one of the same size is asked for, or more
	// is taken from the base. 0 is 4; a negative number is none; at most 16.
	Magazine int
}

// Defaults of a [Config].
const (
	defaultMinBlock memory.Bytes = 256
	defaultMinSlab               = 2 * memory.MiB
	defaultMaxSlab               = memory.GiB
	defaultGrowth                = 4.0
	maxMinBlock                  = memory.MiB
	defaultMagazine              = 4
	maxMagazine                  = 16
)

func (c Config) withDefaults() Config {
	if c.MinBlock == 0 {
		c.MinBlock = defaultMinBlock
	}
	if c.MinSlab == 0 {
		c.MinSlab = defaultMinSlab
	}
	if c.MaxSlab == 0 {
		c.MaxSlab = max(defaultMaxSlab, c.MinSlab)
	}
	switch {
	case c.Growth == 0:
		c.Growth = defaultGrowth
	case c.Growth < 0:
		c.Growth = 0
	}
	switch {
	case c.Keep == 0:
		c.Keep = memory.MaxBytes
	case c.Keep < 0:
		c.Keep = 0
	}
	switch {
	case c.Magazine == 0:
		c.Magazine = defaultMagazine
	case c.Magazine < 0:
		c.Magazine = 0
	}
	return c
}

// Validate returns all that is wrong with c, joined.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	if !memory.IsPowerOfTwo(c.MinBlock) || c.MinBlock < minUnit || c.MinBlock > maxMinBlock {
		errs = append(errs, fmt.Errorf("block: MinBlock %v is not a power of two from %v to %v", c.MinBlock, memory.Bytes(minUnit), maxMinBlock))
	}
	if c.MinSlab < c.MinBlock {
		errs = append(errs, fmt.Errorf("block: MinSlab %v is below MinBlock %v", c.MinSlab, c.MinBlock))
	}
	if c.MaxSlab < c.MinSlab {
		errs = append(errs, fmt.Errorf("block: MaxSlab %v is below MinSlab %v", c.MaxSlab, c.MinSlab))
	}
	if c.Magazine > maxMagazine {
		errs = append(errs, fmt.Errorf("block: Magazine of %d blocks: at most %d are possible", c.Magazine, maxMagazine))
	}
	if !(c.Growth <= 100) {
		errs = append(errs, fmt.Errorf("block: Growth of %v %% is above 100 %%", c.Growth))
	}
	return errors.Join(errs...)
}

// Layer describes the suballocator to a registry.
var Layer = allocator.Layer{
	Table: Table,
	Mints: true,
	Slabs: true,
	New: func(base allocator.Allocator, env *allocator.Env, v *spec.Values) (allocator.Allocator, error) {
		return New(base, env, FromValues(v))
	},
}

// Table holds the options of the suballocator.
var Table = &spec.Table{
	Name:    "block",
	Summary: "best-fit suballocator that merges what is freed at once",
	Doc: `Over vmm each heap is one contiguous range whose pages are mapped where they are
needed; over other sources it is any number of slabs, and the options about slabs
count.`,
	Options: []spec.Option{{
		Name: "min_block", Kind: spec.Size, Default: "256B", Min: "16B", Max: "1MiB",
		Help: "granularity of suballocation, a power of two",
	}, {
		Name: "min_slab", Kind: spec.Size, Default: "2MiB", Min: "4KiB",
		Help: "smallest slab taken while the base has room",
	}, {
		Name: "max_slab", Kind: spec.Size, Default: "1GiB", Min: "4KiB",
		Help: "largest slab; a request above it gets a slab of its own size",
	}, {
		Name: "growth", Kind: spec.Percent, Default: "4%", Max: "100%",
		Help: "size of a new slab, of what is held",
	}, {
		Name: "keep", Kind: spec.Size, Default: "*", Unlimited: true,
		Help: "bytes of wholly free slabs that stay when a new slab is needed",
	}, {
		Name: "magazine", Kind: spec.Count, Default: "4", Min: "0", Max: "16",
		Help: "freed blocks that each of 16 groups of queues keeps as they are, while others are in its way",
	}},
	Validate: func(v *spec.Values) error {
		c := FromValues(v)
		switch {
		case !memory.IsPowerOfTwo(c.MinBlock):
			return v.Errorf("min_block", "%v is not a power of two", c.MinBlock)
		case c.MinSlab < c.MinBlock:
			return v.Errorf("min_slab", "%v is below min_block=%v", c.MinSlab, c.MinBlock)
		case c.MaxSlab < c.MinSlab:
			return v.Errorf("max_slab", "%v is below min_slab=%v", c.MaxSlab, c.MinSlab)
		}
		return nil
	},
}

// FromValues returns the configuration that parsed options stand for.
func FromValues(v *spec.Values) Config {
	c := Config{
		MinBlock: v.Size("min_block"),
		MinSlab:  v.Size("min_slab"),
		MaxSlab:  v.Size("max_slab"),
		Growth:   v.Percent("growth"),
		Keep:     v.Size("keep"),
		Magazine: int(v.Count("magazine")),
	}
	if c.Magazine == 0 {
		c.Magazine = -1
	}
	if c.Growth == 0 {
		c.Growth = -1
	}
	if c.Keep == 0 {
		c.Keep = -1
	}
	return c
}

// Allocator is the suballocator. Safe for concurrent use.
type Allocator struct {
	base   allocator.Allocator
	env    *allocator.Env
	config Config
	arenas [allocator.MaxHeaps]atomic.Pointer[arena]
	closed atomic.Bool
	failed atomic.Uint64 // requests for which there was no arena
	shards [shards]shard
}

var (
	_ allocator.Allocator    = (*Allocator)(nil)
	_ allocator.Passer       = (*Allocator)(nil)
	_ allocator.Idler        = (*Allocator)(nil)
	_ allocator.LiveLister   = (*Allocator)(nil)
	_ allocator.PeakResetter = (*Allocator)(nil)
	_ allocator.Checker      = (*Allocator)(nil)
)

// New returns a suballocator over base. It takes nothing from base yet.
func New(base allocator.Allocator, env *allocator.Env, c Config) (*Allocator, error) {
	if base == nil {
		return nil, errors.New("block: no base to take memory from")
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	a := &Allocator{base: base, env: env, config: c.withDefaults()}
	for i := range a.shards {
		s := &a.shards[i]
		s.slots.Init(&s.mu, env.Owner, uint32(i))
	}
	return a, nil
}

// arena returns the arena of a heap, made on first use. The outcome is OK, or what
// the base said when it was asked for addresses.
func (a *Allocator) arena(heap int) (*arena, allocator.Outcome) {
	if ar := a.arenas[heap].Load(); ar != nil {
		return ar, allocator.OK
	}
	if a.closed.Load() {
		return nil, allocator.Unsupported
	}
	ar, o := newArena(a, heap)
	if o != allocator.OK {
		return nil, o
	}
	if !a.arenas[heap].CompareAndSwap(nil, ar) {
		ar.unreserve() // somebody was faster
	} else if a.closed.Load() {
		ar.close()
	}
	return a.arenas[heap].Load(), allocator.OK
}

// Check implements [allocator.Checker]: the pieces tile their slab or range, the index
// holds the free ones, and the counts are their sums.
func (a *Allocator) Check() error {
	for _, ar := range a.opened() {
		ar.mu.Lock()
		err := ar.checkLocked()
		ar.mu.Unlock()
		if err != nil {
			return fmt.Errorf("heap %d: %w", ar.heap, err)
		}
	}
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		err := a.checkShardLocked(s)
		s.mu.Unlock()
		if err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
	}
	return nil
}

// checkShardLocked verifies a magazine: to the arena its pieces are live.
func (a *Allocator) checkShardLocked(s *shard) error {
	if s.n > a.config.Magazine {
		return fmt.Errorf("block: %d pieces in a magazine of %d", s.n, a.config.Magazine)
	}
	for _, e := range s.kept[:s.n] {
		ar := a.arenas[e.heap].Load()
		ar.mu.Lock()
		n := *ar.node(e.piece)
		ar.mu.Unlock()
		if n.state != live || n.addr != e.addr || n.size != e.size {
			return fmt.Errorf("block: piece %d in the magazine, [%#x, +%#x), is %s [%#x, +%#x) to the arena", e.piece, e.addr, e.size, stateNames[n.state], n.addr, n.size)
		}
		if v := s.slots.At(e.slot).Value; v.piece() != e.piece || v.heap() != e.heap {
			return fmt.Errorf("block: piece %d in the magazine has the handle of piece %d", e.piece, v.piece())
		}
	}
	return nil
}

// opened returns the arenas that exist.
func (a *Allocator) opened() []*arena {
	list := make([]*arena, 0, allocator.MaxHeaps)
	for i := range a.arenas {
		if ar := a.arenas[i].Load(); ar != nil {
			list = append(list, ar)
		}
	}
	return list
}

// Allocate implements [allocator.Allocator].
func (a *Allocator) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	ar := a.arenas[r.Kind.Heap()].Load()
	if ar == nil {
		var o allocator.Outcome
		if ar, o = a.arena(r.Kind.Heap()); o != allocator.OK {
			a.failed.Add(1)
			return allocator.Block{}, queue.Frontier{}, o
		}
	}
	s := &a.shards[uint32(r.Who.Queue)&shardMask]
	s.mu.Lock()
	if s.n > 0 {
		if b, f, ok := s.findLocked(&r, a.config.MinBlock); ok {
			s.mu.Unlock()
			return b, f, allocator.OK
		}
	}
	if !ar.mu.TryLock() {
		s.hot = hotFrees
		ar.mu.Lock()
	}
	i, f, ok := ar.quickLocked(&r)
	ar.unlock()
	if !ok {
		s.mu.Unlock()
		a.spill()
		var o allocator.Outcome
		if i, f, o = ar.grow(&r); o != allocator.OK {
			return allocator.Block{}, f, o
		}
		s.mu.Lock()
	}
	b, ok := s.mintLocked(ar, i, &r, f)
	s.mu.Unlock()
	if !ok {
		ar.give(i, f)
		_, f, o := ar.fail(&r, allocator.Exhausted, queue.Frontier{})
		return b, f, o
	}
	return b, f, allocator.OK
}

// Free implements [allocator.Allocator].
func (a *Allocator) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	if b.Keeper == nil || b.Keeper.Index >= shards {
		return allocator.Foreign
	}
	s := &a.shards[b.Keeper.Index]
	s.mu.Lock()
	v, kind, f, o := s.slots.RemoveLocked(b, after)
	if o != allocator.OK {
		s.mu.Unlock()
		return o
	}
	ar := a.arenas[v.heap()].Load()
	n := ar.pieces.shared(v.piece())
	s.frees++
	s.live -= n.size
	if s.hot == 0 {
		if ar.mu.TryLock() {
			rest := ar.giveLocked(v.piece(), f)
			ar.unlock()
			s.mu.Unlock()
			if rest != (leftover{}) {
				ar.finish(rest)
			}
			return allocator.OK
		}
		s.hot = hotFrees
	}
	s.hot--
	own := kind&allocator.NoSubAlloc != 0 // all of a slab, which goes back
	slot := uint32(0)
	if a.config.Magazine > 0 && !own && !a.closed.Load() {
		slot = s.slots.NewLocked() // the one that it had
	}
	if slot != 0 {
		e := kept{n.addr, n.size, slot, v.piece(), v.heap()}
		s.slots.At(e.slot).Value = v
		s.slots.SetReadyLocked(e.slot, f)
		var full bool
		if e, full = s.keepLocked(e, a.config.Magazine); !full {
			s.mu.Unlock()
			return allocator.OK
		}
		ar, v, f = a.arenas[e.heap].Load(), handleOf(int(e.heap), e.piece), s.dropLocked(e)
	}
	ar.mu.Lock()
	rest := ar.giveLocked(v.piece(), f)
	ar.unlock()
	s.mu.Unlock()
	ar.finish(rest)
	return allocator.OK
}

// Trim implements [allocator.Allocator]: wholly free slabs and pages that are
// reached go back, those at the highest addresses first.
func (a *Allocator) Trim(keep memory.Bytes) memory.Bytes {
	queue.Poll()
	a.spill()
	arenas := a.opened()
	idle := memory.Bytes(0)
	for _, ar := range arenas {
		idle += ar.idle()
	}
	gave := memory.Bytes(0)
	for _, ar := range slices.Backward(arenas) {
		if idle-gave <= keep {
			break
		}
		gave += ar.giveBack(idle - gave - keep)
	}
	return gave
}

// Stats implements [allocator.Allocator]. Peaks are sums of peaks: of the heaps, and
// where that is less, for what is live, of the groups of queues.
func (a *Allocator) Stats() allocator.Stats {
	sum := allocator.Stats{Failed: a.failed.Load()}
	peak := memory.Bytes(0)
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		sum.Allocs += s.allocs
		sum.Frees += s.frees
		sum.Live += s.live
		sum.Hits += s.hits
		peak += s.peak
		for g := range sum.Reused {
			sum.Reused[g] += s.reused[g]
		}
		for _, e := range s.kept[:s.n] {
			sum.Idle += e.size
			sum.Blocks++
			sum.LargestFree = max(sum.LargestFree, e.size)
			if !s.slots.ReadyLocked(e.slot).Reached() {
				sum.Pending += e.size
			}
		}
		s.mu.Unlock()
	}
	for _, ar := range a.opened() {
		s := ar.figures()
		sum.Failed += s.Failed
		sum.PeakLive += s.PeakLive
		sum.Held += s.Held
		sum.PeakHeld += s.PeakHeld
		sum.Idle += s.Idle
		sum.Pending += s.Pending
		sum.LargestFree = max(sum.LargestFree, s.LargestFree)
		sum.Blocks += s.Blocks
		sum.Hits += s.Hits
		sum.Misses += s.Misses
		sum.Evicted += s.Evicted
		for i := range sum.Reused {
			sum.Reused[i] += s.Reused[i]
		}
	}
	sum.PeakLive = min(sum.PeakLive, peak)
	return sum
}

// ResetPeaks implements [allocator.PeakResetter].
func (a *Allocator) ResetPeaks() {
	for _, ar := range a.opened() {
		ar.resetPeaks()
	}
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		s.peak = s.live
		s.mu.Unlock()
	}
}

// Pending implements [allocator.Idler].
func (a *Allocator) Pending(yield func(after queue.Frontier, size memory.Bytes) bool) {
	a.spill()
	for _, ar := range a.opened() {
		for _, p := range ar.pending() {
			if !yield(p.ready, p.size) {
				return
			}
		}
	}
}

// Live implements [allocator.LiveLister].
func (a *Allocator) Live(yield func(b allocator.Block, i allocator.Info) bool) {
	more := true
	for i := range a.shards {
		if !more {
			return
		}
		a.shards[i].slots.Live(func(b allocator.Block, i allocator.Info) bool {
			more = yield(b, i)
			return more
		})
	}
}

// Close implements [allocator.Allocator]: what is idle goes back, addresses too.
// Blocks that are still live can be freed afterwards, and their memory then goes
// back at once; new requests are refused. It is an error if the device still uses
// pages that are to be unmapped; they go back with a later Trim.
func (a *Allocator) Close() error {
	a.closed.Store(true)
	queue.Poll()
	a.spill()
	var errs []error
	for _, ar := range a.opened() {
		if left := ar.close(); left > 0 {
			errs = append(errs, fmt.Errorf("block: heap %d: %v of free memory are still in use by the device", ar.heap, left))
		}
	}
	return errors.Join(errs...)
}

// Pass implements [allocator.Passer]. It hides virtual memory: pages taken past the
// suballocator would not be in its figures.
func (a *Allocator) Pass(capability any) allocator.Allocator {
	if _, ok := capability.(*allocator.VirtualMemory); ok {
		return nil
	}
	return a.base
}
