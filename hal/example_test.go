package hal_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"

	"github.com/halyard-go/halyard/hal"
)

// An inference engine: a decode loop on two queues, inputs that are uploaded on one
// and used and freed on the other, and a request that doesn't fit.
func Example_engine() {
	ctx := context.Background()
	dev, err := hal.Open("host:capacity=64MiB,queues=2")
	if err != nil {
		log.Fatal(err)
	}
	compute, staging := dev.Queue(0), dev.Queue(1)
	uploaded, computed := hal.NewSemaphore(0), hal.NewSemaphore(0)

	tokens := make([]byte, 4096)
	for step := uint64(1); step <= 100; step++ {
		input, err := staging.Alloca(ctx, hal.Params{Size: 4 * hal.KiB}, nil, nil)
		if err != nil {
			log.Fatal(err)
		}
		check(staging.Upload(input.All(), tokens, nil, uploaded.At(step)))

		hidden, err := compute.Alloca(ctx, hal.Params{Size: 8 * hal.MiB}, nil, nil)
		if err != nil {
			log.Fatal(err)
		}
		check(compute.Copy(hidden.Span(0, 4*hal.KiB), input.All(), uploaded.At(step), nil))
		check(compute.Dealloca(input, nil, nil)) // on another queue than it came from
		check(compute.Dealloca(hidden, nil, computed.At(step)))
	}
	check(computed.Wait(ctx, 100))
	held := dev.Stats().Source().PeakHeld
	fmt.Println("100 steps stayed within a few buffers:", held < 32*hal.MiB)

	_, err = compute.Alloca(ctx, hal.Params{Size: 100 * hal.MiB}, nil, nil)
	if oom, ok := errors.AsType[*hal.OOMError](err); ok {
		fmt.Println(oom.Asked, "asked, live", oom.Live)
		fmt.Println(oom.Advice)
	}
	fmt.Println(dev.Close(ctx))
	// Output:
	// 100 steps stayed within a few buffers: true
	// 100MiB asked, live 0B
	// the request is larger than the device: 100 MiB of 64 MiB
	// <nil>
}

// A program that only offers the flag.
func Example_flag() {
	fs := flag.NewFlagSet("serve", flag.ContinueOnError)
	allocator := hal.AllocatorFlag()
	fs.Var(allocator, "device_allocator", allocator.Usage())
	check(fs.Parse([]string{"--device_allocator=block", "--device_allocator=caching:device_local=1gib;4gib;64"}))

	specs, err := allocator.Specs()
	check(err)
	dev, err := hal.Open("host", hal.WithAllocator(specs...))
	check(err)
	fmt.Println(dev.Allocator())
	check(dev.Close(context.Background()))

	_, err = hal.Open("host", hal.WithAllocator("cachng"))
	fmt.Println(err)
	// Output:
	// vmm+block+caching:device_local=max_alloc:1GiB/capacity:4GiB/count:64
	// hal: open host: spec: unknown allocator "cachng" (valid: pool, raw, vmm, block, caching, fault, limit, mint, reuse, scope); did you mean "caching"?
	//   cachng
	//   ^~~~~~ column 1
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// A training step that never frees anything, a thousand times over: each pass gets the
// memory of the one before. Nothing of it is touched, so any laptop can run it.
func ExampleNewScope() {
	ctx := context.Background()
	dev, err := hal.Open("host:capacity=1TiB", hal.WithAllocator("raw+scope"))
	check(err)
	cache, err := hal.NewScope(hal.ScopeOptions{}, dev)
	check(err)
	q := dev.Queue(0)
	step := func(ctx context.Context) error {
		for range 8 { // activations and gradients
			if _, err := q.Alloca(ctx, hal.Params{Size: hal.GiB}, nil, nil); err != nil {
				return err
			}
		}
		return nil
	}
	for range 1000 {
		check(cache.Do(ctx, step))
	}
	fmt.Println("with a scope:   ", dev.Stats().Source().PeakHeld)
	fmt.Println(cache)
	check(cache.Free())
	dev.Trim(0)
	dev.ResetPeaks()

	for range 10 {
		check(step(ctx)) // belongs to no pass
	}
	fmt.Println("ten without one:", dev.Stats().Source().PeakHeld)
	var leak *hal.LeakError
	fmt.Println(errors.As(dev.Close(ctx), &leak), leak.Buffers)
	// Output:
	// with a scope:    8GiB
	// scope: 8 GiB free, 0 B busy in 8 blocks; 0 passes running
	// ten without one: 80GiB
	// true 80
}
