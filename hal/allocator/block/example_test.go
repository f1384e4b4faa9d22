package block_test

import (
	"fmt"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/block"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// bump is the simplest source: addresses that only rise.
type bump struct{ next uint64 }

func (b *bump) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	b.next += uint64(r.Size)
	return allocator.Block{Addr: b.next - uint64(r.Size), Size: r.Size}, queue.ReadyNow(), allocator.OK
}
func (b *bump) Free(allocator.Block, queue.Frontier) allocator.Outcome { return allocator.OK }
func (b *bump) Trim(memory.Bytes) memory.Bytes                         { return 0 }
func (b *bump) Stats() allocator.Stats                                 { return allocator.Stats{} }
func (b *bump) Close() error                                           { return nil }

func ExampleNew() {
	b, err := block.New(&bump{}, &allocator.Env{}, block.Config{MinSlab: 64 * memory.KiB, Magazine: -1})
	if err != nil {
		fmt.Println(err)
		return
	}
	ask := func(size memory.Bytes) allocator.Block {
		mem, _, outcome := b.Allocate(allocator.Request{Size: size, Kind: allocator.MakeKind(0, 256, 0, 0, 0)})
		fmt.Println(size, outcome, mem.Addr, mem.Size)
		return mem
	}
	x := ask(1000)
	ask(5000)
	b.Free(x, queue.ReadyNow())
	ask(600)
	s := b.Stats()
	fmt.Println(s.Live, "of", s.Held, "in", s.Blocks, "free pieces:", s.Hits, "hits", s.Misses, "miss")
	// Output:
	// 1000B ok 0 1KiB
	// 5000B ok 1024 5KiB
	// 600B ok 0 768B
	// 5.75KiB of 64KiB in 2 free pieces: 2 hits 1 miss
}
