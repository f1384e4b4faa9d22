package caching

import (
	"math/bits"
	"sync"
	"time"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/mutant"
)

// Classes of sizes: one for each size below 16, then eight a power of two.
const (
	classBits = 3
	classes   = (64 - classBits) << classBits
)

func class(n memory.Bytes) uint32 {
	l := uint(bits.Len64(uint64(n)>>classBits|1)) - 1
	return uint32(l)<<classBits + uint32(uint64(n)>>(l&63))
}

// node is what a shard keeps of a block besides the slot's own record. The two are
// 128 bytes and hold no pointer.
//
//	         fresh              takeLocked
//	base ────────────► live ◄──────────────── idle: in a bin, and in
//	 ▲ ▲                │ │                    │ ▲   the list of its pool
//	 │ │     settle     │ │  Free: linkLocked  │ │
//	 │ └────────────────┘ └────────────────────┼─┘
//	 └─────────────────────────────────────────┘
//	      popLocked: eviction, age, Trim, Close
type node struct {
	addr  uint64
	size  memory.Bytes // granted
	rated memory.Bytes // what it is worth: size, but within waste of the request it was made for
	id    uint64       // the base's handle, with keeper
	stamp int64        // when it became idle: rises from block to block of a shard

	newer, older         uint32 // neighbours in its bin, by time of free
	poolNewer, poolOlder uint32 // neighbours in its pool, by time of free

	bin    uint32 // the bin of rated
	pool   uint32 // 0: never kept
	keeper uint32 // index in shard.keepers
}

// fits reports whether the block is large enough for r and aligned.
func (v *node) fits(r *allocator.Request) bool {
	return v.size >= r.Size && v.addr&uint64(r.Kind.Align()-1) == 0
}

// bin is the idle blocks of one heap and size class, in order of their frees.
type bin struct{ newest, oldest uint32 }

// share is a shard's part of a pool: a lease of its limits, and what is idle, in
// order of the frees. idle ≤ bytes and idles ≤ count.
type share struct {
	bytes memory.Bytes // leased
	count int64        // leased
	idle  memory.Bytes
	idles int64

	newest, oldest uint32
}

// fits reports whether a block of size may become idle too.
func (p *share) fits(size memory.Bytes) bool { return size <= p.bytes-p.idle && p.idles < p.count }

// shard is a part of the cache with a lock of its own, which guards all its fields
// but index.
type shard struct {
	mu     sync.Mutex
	slots  allocator.Slots[node]
	bins   []bin   // classes of each heap and kind
	shares []share // as Allocator.pools

	live, peak memory.Bytes
	frees      uint64
	reused     allocator.Grounds
	misses     uint64
	failed     uint64
	evicted    uint64
	clock      int64 // the last stamp
	closed     bool
	keepers    []*allocator.Keeper // of the base's blocks

	index uint32
	_     [64]byte // shards are neighbours in memory; their locks should not be
}

func (s *shard) init(a *Allocator, index uint32, owner any, bins uint32) {
	s.index = index
	s.slots.Init(&s.mu, owner, index)
	s.bins = make([]bin, bins)
	s.shares = make([]share, len(a.pools))
	for i := range s.shares {
		s.shares[i] = a.pools[i].first(len(a.shards) == 1)
	}
}

// keeperLocked returns the index of k, one of a few.
func (s *shard) keeperLocked(k *allocator.Keeper) uint32 {
	for i, have := range s.keepers {
		if have == k {
			return uint32(i)
		}
	}
	s.keepers = append(s.keepers, k)
	return uint32(len(s.keepers) - 1)
}

// wentOutLocked counts size bytes handed out.
func (s *shard) wentOutLocked(size memory.Bytes) {
	s.live += size
	if s.live > s.peak {
		s.peak = s.live
	}
}

// find looks at the first depth blocks of each bin, the last freed first. NeedsWait
// says that one would do but isn't ready.
func (s *shard) find(r *allocator.Request, w *want, depth int) (allocator.Block, queue.Frontier, allocator.Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	outcome := allocator.Exhausted
	for n := w.bin; n <= w.last; n++ {
		left := depth
		for i := s.bins[n].newest; i != 0 && left > 0; left-- {
			v := &s.slots.At(i).Value
			if v.rated <= w.limit && v.fits(r) {
				f := s.slots.ReadyLocked(i)
				if mutant.Is(mutant.ShardLosesFrontier) && f.Queue() != r.Who.Queue {
					f = queue.ReadyNow()
				}
				if g := r.Reuse(f); g < allocator.ReuseWait {
					return s.takeLocked(i, v, r, f, g), f, allocator.OK
				}
				outcome = allocator.NeedsWait
			}
			i = v.older
		}
	}
	return allocator.Block{}, queue.Frontier{}, outcome
}

// findOldest looks at all blocks that fit, the longest idle of each bin first, since
// that is the likeliest to be ready, for one that is usable on no worse ground than
// worst. NeedsWait comes with the frontier of the first that would do later.
func (s *shard) findOldest(r *allocator.Request, w *want, worst allocator.Reuse) (allocator.Block, queue.Frontier, allocator.Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var pending queue.Frontier
	outcome := allocator.Exhausted
	for n := w.bin; n <= w.last; n++ {
		for i := s.bins[n].oldest; i != 0; {
			v := &s.slots.At(i).Value
			if v.rated <= w.limit && v.fits(r) {
				f := s.slots.ReadyLocked(i)
				if g := r.Reuse(f); g <= worst {
					return s.takeLocked(i, v, r, f, g), f, allocator.OK
				}
				if outcome != allocator.NeedsWait {
					pending, outcome = f, allocator.NeedsWait
				}
			}
			i = v.newer
		}
	}
	return allocator.Block{}, pending, outcome
}

// takeLocked hands an idle block, free after f, out again.
func (s *shard) takeLocked(i uint32, v *node, r *allocator.Request, f queue.Frontier, g allocator.Reuse) allocator.Block {
	s.unlinkLocked(v)
	s.reused[g&3]++
	s.wentOutLocked(v.size)
	return s.slots.MintLocked(i, v.addr, v.size, r, f)
}

// linkLocked makes a block idle, as the newest of its bin and of its pool. now is 0
// where the cache has no use for time.
func (s *shard) linkLocked(p *share, i uint32, v *node, now time.Duration) {
	s.clock = max(s.clock+1, int64(now))
	v.stamp = s.clock
	b := &s.bins[v.bin]
	v.newer, v.older = 0, b.newest
	if v.older != 0 {
		s.slots.At(v.older).Value.newer = i
	} else {
		b.oldest = i
	}
	b.newest = i
	v.poolNewer, v.poolOlder = 0, p.newest
	if v.poolOlder != 0 {
		s.slots.At(v.poolOlder).Value.poolNewer = i
	} else {
		p.oldest = i
	}
	p.newest = i
	p.idle += v.size
	p.idles++
}

// unlinkLocked takes an idle block off both lists.
func (s *shard) unlinkLocked(v *node) {
	b, p := &s.bins[v.bin], &s.shares[v.pool]
	if v.newer != 0 {
		s.slots.At(v.newer).Value.older = v.older
	} else {
		b.newest = v.older
	}
	if v.older != 0 {
		s.slots.At(v.older).Value.newer = v.newer
	} else {
		b.oldest = v.newer
	}
	if v.poolNewer != 0 {
		s.slots.At(v.poolNewer).Value.poolOlder = v.poolOlder
	} else {
		p.newest = v.poolOlder
	}
	if v.poolOlder != 0 {
		s.slots.At(v.poolOlder).Value.poolNewer = v.poolNewer
	} else {
		p.oldest = v.poolNewer
	}
	p.idle -= v.size
	p.idles--
}

// oldestLocked returns the share whose oldest block has been idle longest, or nil.
func (s *shard) oldestLocked() *share {
	var first *share
	for j := range s.shares {
		p := &s.shares[j]
		if p.oldest != 0 && (first == nil || s.stampLocked(p) < s.stampLocked(first)) {
			first = p
		}
	}
	return first
}

// stampLocked is that of the share's oldest block.
func (s *shard) stampLocked(p *share) int64 { return s.slots.At(p.oldest).Value.stamp }

// idleLocked is what is idle in all pools.
func (s *shard) idleLocked() (n memory.Bytes) {
	for j := range s.shares {
		n += s.shares[j].idle
	}
	return n
}
