package caching_test

import (
	"fmt"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/caching"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// source stands for the driver: it counts what it is asked.
type source struct {
	calls int
	next  uint64
}

func (s *source) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	s.calls++
	s.next += uint64(r.Size)
	return allocator.Block{Addr: s.next, Size: r.Size}, queue.ReadyNow(), allocator.OK
}
func (s *source) Free(allocator.Block, queue.Frontier) allocator.Outcome { return allocator.OK }
func (s *source) Trim(memory.Bytes) memory.Bytes                         { return 0 }
func (s *source) Stats() allocator.Stats                                 { return allocator.Stats{} }
func (s *source) Close() error                                           { return nil }

func Example() {
	driver := &source{}
	env := &allocator.Env{Heaps: memory.Heaps{{Name: "vram", Type: memory.DeviceLocal, Usage: memory.Default}}}
	options, err := caching.Table.Parse("device_local=1gib;4gib;64")
	if err != nil {
		fmt.Println(err)
		return
	}
	cache, err := caching.Layer.New(driver, env, options)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, size := range []memory.Bytes{memory.MiB, memory.MiB, memory.MiB - 100, 2 * memory.GiB, 2 * memory.GiB} {
		b, _, outcome := cache.Allocate(allocator.Request{
			Size: size,
			Kind: allocator.MakeKind(0, 256, memory.DispatchStorage, 0, 0),
		})
		fmt.Println(size, outcome, "- driver calls:", driver.calls)
		cache.Free(b, queue.ReadyNow())
	}
	fmt.Println("idle:", cache.Stats().Idle)
	fmt.Println("trimmed:", cache.Trim(0))
	// Output:
	// 1MiB ok - driver calls: 1
	// 1MiB ok - driver calls: 1
	// 1048476B ok - driver calls: 1
	// 2GiB ok - driver calls: 2
	// 2GiB ok - driver calls: 3
	// idle: 1MiB
	// trimmed: 1MiB
}
