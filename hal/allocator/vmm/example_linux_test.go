package vmm_test

import (
	"fmt"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/vmm"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
)

func Example() {
	d, err := host.Open(host.Config{Capacity: memory.GiB})
	if err != nil {
		panic(err)
	}
	s, err := vmm.New(&allocator.Env{Device: d, Heaps: d.Info().Heaps})
	if err != nil {
		panic(err)
	}
	v := s.Virtual(0)
	addr, _ := v.Reserve(memory.GiB)                          // addresses, no memory
	fmt.Println(v.Grow(addr, 3), s.Stats().Held)              // three pages
	fmt.Println(v.Move(addr, addr+uint64(100*memory.MiB), 1)) // the first elsewhere, with what it holds
	st := s.Stats()
	fmt.Println(st.Created, "pages in", st.Maps, "mappings made")
	v.Shrink(addr+uint64(v.Granularity()), 2)
	v.Shrink(addr+uint64(100*memory.MiB), 1)
	v.Unreserve(addr, memory.GiB)
	fmt.Println(s.Close(), d.Close())
	// Output:
	// ok 6MiB
	// ok
	// 3 pages in 2 mappings made
	// <nil> <nil>
}
