package caching

import (
	"cmp"
	"slices"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// lockAll takes every lock, so that figures are those of one moment.
func (a *Allocator) lockAll() {
	for i := range a.shards {
		a.shards[i].mu.Lock()
	}
}

func (a *Allocator) unlockAll() {
	for i := range a.shards {
		a.shards[i].mu.Unlock()
	}
}

// eachLocked calls f with every idle block of s, pool by pool, the longest idle
// first, until f returns false.
func (s *shard) eachLocked(f func(i uint32, v *node) bool) bool {
	for j := range s.shares {
		for i := s.shares[j].oldest; i != 0; {
			v := &s.slots.At(i).Value
			if !f(i, v) {
				return false
			}
			i = v.poolNewer
		}
	}
	return true
}

// Stats implements [allocator.Allocator]. What passed through counts as a miss.
// With several shards PeakLive is an upper bound: shards may peak at different
// times.
func (a *Allocator) Stats() allocator.Stats {
	a.lockAll()
	defer a.unlockAll()
	var st allocator.Stats
	for i := range a.shards {
		s := &a.shards[i]
		st.Misses += s.misses
		st.Frees += s.frees
		st.Failed += s.failed
		st.Evicted += s.evicted
		st.Live += s.live
		st.PeakLive += s.peak
		for g, n := range s.reused {
			st.Reused[g] += n
			st.Hits += n
		}
		s.eachLocked(func(i uint32, v *node) bool {
			st.Idle += v.size
			st.Blocks++
			st.LargestFree = max(st.LargestFree, v.size)
			if !s.slots.ReadyLocked(i).Reached() {
				st.Pending += v.size
			}
			return true
		})
	}
	st.Allocs = st.Hits + st.Misses
	a.total.mu.Lock()
	st.Held, st.PeakHeld = a.total.held, a.total.peak
	a.total.mu.Unlock()
	st.PeakLive = min(st.PeakLive, st.PeakHeld)
	return st
}

// ResetPeaks implements [allocator.PeakResetter].
func (a *Allocator) ResetPeaks() {
	a.lockAll()
	defer a.unlockAll()
	for i := range a.shards {
		a.shards[i].peak = a.shards[i].live
	}
	a.total.mu.Lock()
	a.total.peak = a.total.held
	a.total.mu.Unlock()
}

// Pending implements [allocator.Idler]. The order is exact within a shard.
func (a *Allocator) Pending(yield func(after queue.Frontier, size memory.Bytes) bool) {
	for i := range a.shards {
		for _, p := range a.shards[i].pending() {
			if !yield(p.after, p.size) {
				return
			}
		}
	}
}

// pendingBlock is an idle block that isn't ready.
type pendingBlock struct {
	stamp int64
	after queue.Frontier
	size  memory.Bytes
}

// pending lists the idle blocks of s that aren't ready, the longest idle first.
func (s *shard) pending() []pendingBlock {
	var list []pendingBlock
	s.mu.Lock()
	s.eachLocked(func(i uint32, v *node) bool {
		if f := s.slots.ReadyLocked(i); !f.Reached() {
			list = append(list, pendingBlock{v.stamp, f, v.size})
		}
		return true
	})
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b pendingBlock) int { return cmp.Compare(a.stamp, b.stamp) })
	return list
}

// Live implements [allocator.LiveLister].
func (a *Allocator) Live(yield func(b allocator.Block, i allocator.Info) bool) {
	more := true
	for i := range a.shards {
		a.shards[i].slots.Live(func(b allocator.Block, info allocator.Info) bool {
			more = yield(b, info)
			return more
		})
		if !more {
			return
		}
	}
}
