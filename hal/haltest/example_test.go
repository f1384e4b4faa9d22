package haltest_test

import (
	"context"
	"fmt"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/raw"
	"github.com/halyard-go/halyard/hal/haltest"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// hasty frees memory at once, whatever still uses it: the mistake that the monitor is
// for.
type hasty struct{ allocator.Forward }

func (h hasty) Free(b allocator.Block, _ queue.Frontier) allocator.Outcome {
	return h.Base.Free(b, queue.ReadyNow())
}

// A decorator that frees too early, caught on the simulated device.
func ExampleNew() {
	layers := &allocator.Registry{}
	layers.MustRegister(raw.Layer, allocator.Mint, allocator.Layer{
		Table: &spec.Table{Name: "hasty", Summary: "frees too early"},
		New: func(base allocator.Allocator, _ *allocator.Env, _ *spec.Values) (allocator.Allocator, error) {
			return hasty{allocator.Forward{Base: base}}, nil
		},
	})
	sim, err := haltest.New(haltest.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	dev, err := hal.OpenDriver(sim, hal.WithAllocators(layers), hal.WithAllocator("raw+hasty"))
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, q := context.Background(), dev.Queue(0)
	b, err := q.Alloca(ctx, hal.Params{Size: 4096}, nil, nil)
	fmt.Println(err)
	fmt.Println(q.Fill(b.All(), []byte{1}, nil, nil), q.Dealloca(b, nil, nil))
	fmt.Println(sim.Monitor().Err() != nil, "before anything has run: the driver got the memory back too early")
	sim.Run()
	fmt.Println(dev.Close(ctx))
	// Output:
	// <nil>
	// <nil> <nil>
	// true before anything has run: the driver got the memory back too early
	// <nil>
}
