package caching

import (
	"math"
	"math/bits"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/mutant"
)

// pool is the limits of a [Pool] and the part of them that no shard has leased.
// A limit that there isn't is leased to every shard in full.
type pool struct {
	maxAlloc memory.Bytes // immutable, as the next two; the largest value where there is no limit
	capacity memory.Bytes
	limit    int64

	mu    sync.Mutex // taken after a shard's lock
	bytes memory.Bytes
	count int64
}

func (p *pool) init(c Pool) {
	p.maxAlloc, p.capacity, p.limit = c.MaxAlloc, c.Capacity, c.Count
	if p.maxAlloc == 0 {
		p.maxAlloc = memory.MaxBytes
	}
	if p.capacity == 0 {
		p.capacity = memory.MaxBytes
	}
	if p.limit == 0 {
		p.limit = math.MaxInt64
	}
	if c.Off {
		p.maxAlloc, p.capacity, p.limit = 0, 0, 0
	}
	p.bytes, p.count = p.capacity, p.limit
}

// first returns the share of a shard at the start; one that is alone leases all.
func (p *pool) first(alone bool) (s share) {
	if alone {
		s.bytes, s.count = p.bytes, p.count
		p.bytes, p.count = 0, 0
		return s
	}
	if p.capacity == memory.MaxBytes {
		s.bytes = p.capacity
	}
	if p.limit == math.MaxInt64 {
		s.count = p.limit
	}
	return s
}

// lease gives s what it lacks for a block of size, as far as there is any, and
// reports whether that was enough.
func (p *pool) lease(s *share, size memory.Bytes) bool {
	p.mu.Lock()
	if lack := min(size-(s.bytes-s.idle), p.bytes); lack > 0 && p.capacity != memory.MaxBytes {
		p.bytes -= lack
		s.bytes += lack
	}
	if s.idles >= s.count && p.count > 0 {
		p.count--
		s.count++
	}
	p.mu.Unlock()
	return s.fits(size)
}

// release takes back what s has leased and doesn't use, and reports whether a
// block of size fits in what is not leased, together with what the caller has
// leased in vain.
func (p *pool) release(s *share, size memory.Bytes) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.capacity != memory.MaxBytes {
		p.bytes += s.bytes - s.idle
		s.bytes = s.idle
	}
	if p.limit != math.MaxInt64 {
		p.count += s.count - s.idles
		s.count = s.idles
	}
	return (p.capacity == memory.MaxBytes || p.bytes >= size) && (p.limit == math.MaxInt64 || p.count > 0)
}

// batch is blocks on their way to the base, collected under a lock.
type batch struct {
	n    int
	list [16]struct {
		block allocator.Block
		after queue.Frontier
	}
}

func (b *batch) full() bool { return b.n == len(b.list) }

// addLocked puts block i, which is in no list, on its way to the base.
func (b *batch) addLocked(s *shard, i uint32) {
	v := &s.slots.At(i).Value
	e := &b.list[b.n]
	e.block = allocator.Block{Addr: v.addr, Size: v.size, Keeper: s.keepers[v.keeper], ID: v.id}
	e.after = s.slots.ReadyLocked(i)
	s.slots.DropLocked(i)
	b.n++
}

// popLocked takes the oldest block of p for the base.
func (b *batch) popLocked(s *shard, p *share) {
	i := p.oldest
	if mutant.Is(mutant.EvictNewest) {
		i = p.newest
	}
	s.unlinkLocked(&s.slots.At(i).Value)
	b.addLocked(s, i)
}

// give frees what is in b to the base, holding no lock. It returns the bytes that
// the base took, and the last outcome. A base that refuses a block which it handed
// out breaks its contract; the block is written off, and said so.
func (a *Allocator) give(b *batch) (given memory.Bytes, last allocator.Outcome) {
	if b.n == 0 {
		return 0, allocator.OK
	}
	size := memory.Bytes(0)
	for i := range b.n {
		size += b.list[i].block.Size
	}
	a.total.mu.Lock()
	a.total.held -= size
	a.total.mu.Unlock()
	for i := range b.n {
		e := &b.list[i]
		last = a.base.Free(e.block, e.after)
		if last == allocator.OK {
			given += e.block.Size
			continue
		}
		a.log.Error("caching: the layer below refuses a block of its own",
			zap.Stringer("outcome", last), zap.Uint64("addr", e.block.Addr), zap.Int64("bytes", int64(e.block.Size)))
	}
	b.n = 0
	return given, last
}

// settle ends the life of block i, which is in no list and doesn't fit in the
// shard's lease: it is kept if room can be had or made, else given back. s is
// locked, and is unlocked on return.
//
// Room is, in this order: what no shard has leased, what other shards have leased
// and don't use, the shard's own oldest blocks, those of the others. Between the
// steps others may take what was found; then the block goes back, so that the work
// is bounded and the limits hold.
//
//go:noinline
func (a *Allocator) settle(s *shard, i uint32, now time.Duration) allocator.Outcome {
	v := &s.slots.At(i).Value
	size, j := v.size, v.pool
	p, q := &s.shares[j], &a.pools[j]
	alone := len(a.shards) == 1
	roomLocked := func() bool { return !s.closed && (p.fits(size) || !alone && q.lease(p, size)) }
	var out batch
	kept := false
	if j != 0 { // a block of a pool is no larger than its capacity
		kept = roomLocked()
		if !kept && !alone {
			q.release(p, size)
			s.mu.Unlock()
			a.reclaim(s, j, size, false)
			s.mu.Lock()
			kept = roomLocked()
		}
		for !kept && !s.closed && p.oldest != 0 {
			if out.full() {
				s.mu.Unlock()
				a.give(&out)
				s.mu.Lock()
			} else {
				out.popLocked(s, p)
				s.evicted++
			}
			kept = roomLocked()
		}
		if !kept && !alone && !s.closed {
			q.release(p, size)
			s.mu.Unlock()
			a.give(&out)
			a.reclaim(s, j, size, true)
			s.mu.Lock()
			kept = roomLocked()
		}
	}
	if kept {
		s.linkLocked(p, i, v, now)
		s.mu.Unlock()
		a.give(&out)
		return allocator.OK
	}
	out.addLocked(s, i) // with room: what was evicted in vain has been given
	s.mu.Unlock()
	_, o := a.give(&out)
	return o
}

// reclaim takes from the shards other than s what they have leased of pool j and
// don't use, and with evict their oldest blocks too, until size bytes are there.
func (a *Allocator) reclaim(s *shard, j uint32, size memory.Bytes, evict bool) {
	q := &a.pools[j]
	var out batch
	for n := 1; n < len(a.shards); n++ {
		t := &a.shards[(s.index+uint32(n))&a.mask]
		p := &t.shares[j]
		t.mu.Lock()
		enough := q.release(p, size)
		for evict && !enough && p.oldest != 0 {
			if out.full() {
				t.mu.Unlock()
				a.give(&out)
				t.mu.Lock()
				continue
			}
			out.popLocked(t, p)
			t.evicted++
			enough = q.release(p, size)
		}
		t.mu.Unlock()
		if enough {
			break
		}
	}
	a.give(&out)
}

// expiredLocked reports whether a block has been idle for too long.
func (a *Allocator) expiredLocked(s *shard, now time.Duration) bool {
	p := s.oldestLocked()
	return p != nil && time.Duration(s.stampLocked(p)) < now-a.idle
}

// expire gives back what has been idle for too long.
func (a *Allocator) expire() {
	now := a.now()
	for i := range a.shards {
		a.expireShard(&a.shards[i], now)
	}
}

func (a *Allocator) expireShard(s *shard, now time.Duration) (given memory.Bytes) {
	return a.drain(s, func() bool { return a.expiredLocked(s, now) })
}

// drain gives blocks of s back, the longest idle first, while more says so, which
// is called under the lock of s and never when nothing is idle.
func (a *Allocator) drain(s *shard, more func() bool) (given memory.Bytes) {
	var out batch
	for done := false; !done; {
		s.mu.Lock()
		for !out.full() {
			p := s.oldestLocked()
			if done = p == nil || !more(); done {
				break
			}
			out.popLocked(s, p)
		}
		s.mu.Unlock()
		n, _ := a.give(&out)
		given += n
	}
	return given
}

func (a *Allocator) trimShard(s *shard, keep memory.Bytes) memory.Bytes {
	return a.drain(s, func() bool { return s.idleLocked() > keep })
}

// Trim implements [allocator.Allocator]. Each shard keeps its part of keep.
func (a *Allocator) Trim(keep memory.Bytes) memory.Bytes {
	if invariants {
		defer a.mustCheck()
	}
	given := memory.Bytes(0)
	if a.idle != 0 {
		now := a.now()
		for i := range a.shards {
			given += a.expireShard(&a.shards[i], now)
		}
	}
	keep = max(0, keep)
	idle := make([]memory.Bytes, len(a.shards))
	total := memory.Bytes(0)
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		idle[i] = s.idleLocked()
		s.mu.Unlock()
		total += idle[i]
	}
	if total <= keep {
		return given
	}
	for i := range a.shards {
		hi, lo := bits.Mul64(uint64(keep), uint64(idle[i]))
		part, _ := bits.Div64(hi, lo, uint64(total)) // keep < total, so it fits
		given += a.trimShard(&a.shards[i], memory.Bytes(part))
	}
	return given
}

// close ends the keeping of blocks if none is kept, and reports whether it did.
func (s *shard) close(a *Allocator) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.oldestLocked() != nil {
		return false
	}
	for j := range s.shares {
		a.pools[j].release(&s.shares[j], 0)
		s.shares[j] = share{}
	}
	return true
}
