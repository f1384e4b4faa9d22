package allocator_test

import (
	"context"
	"fmt"
	"log"
	"math/bits"
	"sync"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// histogram counts requests by power of two. It changes nothing else, so it embeds
// Forward and writes one method.
type histogram struct {
	allocator.Forward
	mu     sync.Mutex // leaf: not held while the base is called
	counts [64]int
}

func (h *histogram) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	b, f, o := h.Base.Allocate(r)
	if o == allocator.OK {
		h.mu.Lock()
		h.counts[bits.Len64(uint64(r.Size-1))]++
		h.mu.Unlock()
	}
	return b, f, o
}

func (h *histogram) String() (text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, n := range h.counts {
		if n > 0 {
			text += fmt.Sprintf("up to %v: %d\n", hal.Bytes(1)<<i, n)
		}
	}
	return text
}

// A decorator of one's own, registered by name and chosen as by the flag.
func Example_decorator() {
	var h *histogram
	hal.Allocators.MustRegister(allocator.Layer{
		Table: &spec.Table{Name: "histogram", Summary: "counts requests by size"},
		Mints: true, // it passes on the handles of its base
		New: func(base allocator.Allocator, _ *allocator.Env, _ *spec.Values) (allocator.Allocator, error) {
			h = &histogram{Forward: allocator.Forward{Base: base}}
			return h, nil
		},
	})

	ctx := context.Background()
	dev, err := hal.Open("host", hal.WithAllocator("block+caching+histogram"))
	if err != nil {
		log.Fatal(err)
	}
	for _, size := range []hal.Bytes{1000, 1024, 5 * hal.KiB, 2 * hal.MiB} {
		b, err := dev.Allocate(ctx, hal.Params{Size: size})
		if err != nil {
			log.Fatal(err)
		}
		defer b.Release()
	}
	fmt.Print(dev.Allocator(), "\n", h)
	// Output:
	// vmm+block+caching+histogram
	// up to 1KiB: 2
	// up to 8KiB: 1
	// up to 2MiB: 1
}
