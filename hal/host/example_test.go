package host_test

import (
	"context"
	"fmt"

	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func Example() {
	d, err := host.Open(host.Config{Capacity: 80 * memory.GiB})
	if err != nil {
		panic(err)
	}
	q, err := d.NewQueue(nil)
	if err != nil {
		panic(err)
	}
	addr, taken, err := d.Alloc(0, 1000, 1)
	if err != nil {
		panic(err)
	}
	free, total, _ := d.MemInfo(0)
	fmt.Println("took", taken, "of", total, "leaving", total-free-taken, "unaccounted for")

	out := make([]byte, 4)
	done := queue.NewSemaphore(0)
	for _, op := range []queue.Op{
		{Kind: queue.Fill, Dst: addr, Size: 1000, Pattern: 0x2a, PatternSize: 1},
		{Kind: queue.Download, Src: addr, Host: out},
	} {
		v, _ := done.Query()
		if _, _, err := q.Submit(&op, nil, done.At(v+1)); err != nil {
			panic(err)
		}
	}
	if err := done.Wait(context.Background(), 2); err != nil {
		panic(err)
	}
	fmt.Println(out)

	q.Close()
	fmt.Println(d.Close())
	// Output:
	// took 1KiB of 80GiB leaving 0B unaccounted for
	// [42 42 42 42]
	// host: closed with memory still allocated: heap device: 1KiB in 1 raw allocations
}
