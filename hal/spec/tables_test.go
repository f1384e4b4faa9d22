package spec_test

import "github.com/halyard-go/halyard/hal/spec"

// caching takes what IREE's caching allocator takes, and has an option of every
// kind besides.
func caching() *spec.Table {
	return &spec.Table{
		Name:    "caching",
		Summary: "keeps freed blocks for the next request",
		Doc:     "Blocks are kept by heap and size,\nmost recently used first.",
		Options: []spec.Option{
			{Name: "max_bytes", Kind: spec.Size, Default: "*", Min: "1KiB", Max: "1TiB", Unlimited: true, Help: "bytes kept"},
			{Name: "depth", Kind: spec.Count, Default: "8", Min: "1", Max: "1024", Help: "free blocks looked at in a bin"},
			{Name: "keep", Kind: spec.Percent, Max: "100%", Help: "share of the heap that may be kept"},
			{Name: "waste", Kind: spec.Ratio, Default: "1.25", Min: "1", Unlimited: true, Help: "how much larger a reused block may be"},
			{Name: "idle", Kind: spec.Duration, Default: "*", Unlimited: true, Help: "time after which a block is returned"},
			{Name: "shared", Kind: spec.Bool, Default: "true", Help: "queues share their blocks"},
			{Name: "label", Kind: spec.Text, Help: "name in reports"},
			{Name: "evict", Kind: spec.Enum, Default: "lru", Enum: []string{"lru", "Largest", "fifo"}, Help: "what goes first | order"},
		},
		Heaps: &spec.HeapOption{
			Help: "A pool for one heap; pools are tried in order, and what matches none isn't cached.",
			Fields: []spec.Option{
				{Name: "max_alloc", Kind: spec.Size, Default: "*", Unlimited: true, Help: "largest allocation kept"},
				{Name: "capacity", Kind: spec.Size, Default: "*", Unlimited: true, Help: "bytes kept"},
				{Name: "count", Kind: spec.Count, Default: "64", Unlimited: true, Help: "blocks kept"},
			},
		},
	}
}

// host is a device: options, no heap items.
func host() *spec.Table {
	return &spec.Table{
		Name:    "host",
		Summary: "host memory as device memory",
		Options: []spec.Option{
			{Name: "capacity", Kind: spec.Size, Default: "1GiB", Min: "1B", Help: "size of the heap"},
			{Name: "queues", Kind: spec.Count, Default: "1", Min: "1", Max: "64", Help: "number of queues"},
		},
	}
}

// raw has nothing to say.
func raw() *spec.Table {
	return &spec.Table{Name: "raw", Summary: "the driver's own allocate and free"}
}
