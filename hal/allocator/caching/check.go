package caching

import (
	"fmt"
	"math"

	"github.com/halyard-go/halyard/hal/memory"
)

// Check implements [allocator.Checker]: it walks everything and returns the first thing that is wrong.
func (a *Allocator) Check() error {
	a.lockAll()
	defer a.unlockAll()
	a.total.mu.Lock()
	held := a.total.held
	a.total.mu.Unlock()
	for i := range a.shards {
		s := &a.shards[i]
		if err := s.checkLocked(); err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
		held -= s.live + s.idleLocked()
	}
	if held < 0 {
		return fmt.Errorf("%v more are live and idle than held", -held)
	}
	for j := range a.pools {
		if err := a.checkPoolLocked(j); err != nil {
			return fmt.Errorf("pool %d: %w", j, err)
		}
	}
	return nil
}

// checkPoolLocked checks that leases and what is left add up to the limits. A shard
// that is closed has no lease of what has no limit.
func (a *Allocator) checkPoolLocked(j int) error {
	q := &a.pools[j]
	q.mu.Lock()
	bytes, count := q.bytes, q.count
	q.mu.Unlock()
	if bytes < 0 || count < 0 {
		return fmt.Errorf("%v and %d blocks are not leased", bytes, count)
	}
	var idle memory.Bytes
	var idles int64
	for i := range a.shards {
		p := &a.shards[i].shares[j]
		idle += p.idle
		idles += p.idles
		bytes += p.bytes
		count += p.count
	}
	if idle > q.capacity || idles > q.limit {
		return fmt.Errorf("%v in %d blocks are idle, of %v in %d", idle, idles, q.capacity, q.limit)
	}
	if q.capacity != memory.MaxBytes && bytes != q.capacity {
		return fmt.Errorf("leases add up to %v of %v", bytes, q.capacity)
	}
	if q.limit != math.MaxInt64 && count != q.limit {
		return fmt.Errorf("leases add up to %d blocks of %d", count, q.limit)
	}
	return nil
}

func (s *shard) checkLocked() error {
	if s.live < 0 || s.peak < s.live {
		return fmt.Errorf("live %v, at most %v", s.live, s.peak)
	}
	inPool := map[uint32]bool{}
	for j := range s.shares {
		p := &s.shares[j]
		var idle memory.Bytes
		var idles int64
		var before uint32
		stamp := int64(math.MinInt64)
		for i := p.oldest; i != 0; {
			v := &s.slots.At(i).Value
			switch {
			case inPool[i]:
				return fmt.Errorf("block %d is in a pool's list twice", i)
			case v.poolOlder != before:
				return fmt.Errorf("block %d follows %d and says %d", i, before, v.poolOlder)
			case v.pool != uint32(j) || j == 0:
				return fmt.Errorf("block %d of pool %d is in pool %d", i, v.pool, j)
			case v.stamp <= stamp:
				return fmt.Errorf("block %d is older than the one before", i)
			case v.size <= 0:
				return fmt.Errorf("block %d has size %v", i, v.size)
			}
			inPool[i] = true
			stamp = v.stamp
			idle += v.size
			idles++
			before, i = i, v.poolNewer
		}
		switch {
		case p.newest != before:
			return fmt.Errorf("pool %d ends with %d and says %d", j, before, p.newest)
		case p.idle != idle || p.idles != idles:
			return fmt.Errorf("pool %d counts %v in %d blocks and has %v in %d", j, p.idle, p.idles, idle, idles)
		case idle > p.bytes || idles > p.count:
			return fmt.Errorf("pool %d has %v in %d blocks and leased %v in %d", j, idle, idles, p.bytes, p.count)
		}
	}
	for n := range s.bins {
		var before uint32
		stamp := int64(math.MinInt64)
		for i := s.bins[n].oldest; i != 0; {
			v := &s.slots.At(i).Value
			switch {
			case !inPool[i]:
				return fmt.Errorf("block %d is in bin %d twice or in no pool", i, n)
			case v.older != before:
				return fmt.Errorf("block %d of bin %d follows %d and says %d", i, n, before, v.older)
			case v.bin != uint32(n) || n%classes != int(class(v.rated)):
				return fmt.Errorf("block %d of bin %d, rated %v, is in bin %d", i, v.bin, v.rated, n)
			case v.stamp <= stamp:
				return fmt.Errorf("block %d of bin %d is older than the one before", i, n)
			}
			delete(inPool, i)
			stamp = v.stamp
			before, i = i, v.newer
		}
		if s.bins[n].newest != before {
			return fmt.Errorf("bin %d ends with %d and says %d", n, before, s.bins[n].newest)
		}
	}
	if len(inPool) > 0 {
		return fmt.Errorf("%d idle blocks are in no bin", len(inPool))
	}
	return nil
}

// mustCheck panics where check finds something wrong.
func (a *Allocator) mustCheck() {
	if err := a.Check(); err != nil {
		panic("caching: " + err.Error())
	}
}
