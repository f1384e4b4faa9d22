package caching

import (
	"errors"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/spec"
)

// Layer describes the cache to a registry.
var Layer = allocator.Layer{
	Table: Table,
	Mints: true,
	New: func(base allocator.Allocator, env *allocator.Env, v *spec.Values) (allocator.Allocator, error) {
		c := FromValues(v)
		for _, p := range c.Pools {
			if err := p.check(env.Heaps); err != nil {
				return nil, v.Errorf(p.Heap.String(), "%w", err)
			}
		}
		return New(base, env, c)
	},
}

// Table holds the options of the cache.
var Table = &spec.Table{
	Name:    "caching",
	Summary: "keeps freed memory and hands it out again",
	Doc: `Without heap items the memory of every heap is kept, without limit. With heap
items only the heaps that they match are cached; the first that matches counts,
and what matches none passes through. Memory that has been idle longest makes
room for what is freed; what is larger than an item could keep is never kept.

The strings of IREE's caching allocator are accepted. What differs from it: the
maximum allocation is enforced, '*' is no limit (not 64 blocks), the capacity
bounds what is idle, and the oldest goes first.`,
	Options: []spec.Option{{
		Name: "waste", Kind: spec.Ratio, Default: "1.5", Min: "1", Unlimited: true,
		Help: "how much larger than asked reused memory may be, as a ratio; 1 is the exact size",
	}, {
		Name: "idle", Kind: spec.Duration, Default: "*", Min: "1ns", Unlimited: true,
		Help: "memory that has been idle for longer goes back, when the cache is next used",
	}, {
		Name: "depth", Kind: spec.Count, Default: "8", Min: "1", Unlimited: true,
		Help: "how many blocks of a size class are looked at, the last freed first",
	}, {
		Name: "shards", Kind: spec.Count, Default: "1", Min: "1", Max: "64",
		Help: "parts with a lock each, chosen by queue; a power of two",
	}},
	Heaps: &spec.HeapOption{
		Help: "What is kept of the heaps that HEAP matches. A limit of 0 keeps nothing.",
		Fields: []spec.Option{{
			Name: "max_alloc", Kind: spec.Size, Default: "*", Unlimited: true,
			Help: "the largest block that is kept",
		}, {
			Name: "capacity", Kind: spec.Size, Default: "*", Unlimited: true,
			Help: "idle bytes kept at a time",
		}, {
			Name: "count", Kind: spec.Count, Default: "*", Unlimited: true,
			Help: "idle blocks kept at a time",
		}},
	},
	Validate: func(v *spec.Values) error {
		if n := v.Count("shards"); n&(n-1) != 0 {
			return v.Errorf("shards", "%w", errShards)
		}
		return nil
	},
}

var errShards = errors.New("the number of shards must be a power of two")

// FromValues returns the configuration that parsed options stand for.
func FromValues(v *spec.Values) Config {
	c := Config{
		Waste:  v.Ratio("waste"),
		Idle:   v.Duration("idle"),
		Depth:  int(v.Count("depth")),
		Shards: int(v.Count("shards")),
	}
	if v.IsUnlimited("idle") {
		c.Idle = 0
	}
	size := func(h *spec.HeapValues, name string) (memory.Bytes, bool) {
		n := h.Size(name)
		if h.IsUnlimited(name) {
			return 0, false
		}
		return n, n == 0
	}
	for _, h := range v.Heaps() {
		p := Pool{Heap: h.Key}
		var noSize, noRoom, noCount bool
		p.MaxAlloc, noSize = size(&h, "max_alloc")
		p.Capacity, noRoom = size(&h, "capacity")
		if !h.IsUnlimited("count") {
			p.Count = h.Count("count")
			noCount = p.Count == 0
		}
		p.Off = noSize || noRoom || noCount
		c.Pools = append(c.Pools, p)
	}
	return c
}
