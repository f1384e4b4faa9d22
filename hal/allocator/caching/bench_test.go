package caching

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/trace"
)

// perCall reports the cost of one call, of calls a loop, and the same in uncontended
// mutex pairs, measured right after.
func perCall(b *testing.B, calls int) {
	ns := float64(b.Elapsed().Nanoseconds()) / float64(b.N) / float64(calls)
	b.ReportMetric(ns, "ns/call")
	var mu sync.Mutex
	guarded := 0
	pair := time.Duration(1 << 62) // of 1000
	for range 5 {
		const n = 1 << 17
		start := time.Now()
		for range n {
			mu.Lock()
			guarded++
			mu.Unlock()
		}
		pair = min(pair, time.Since(start)*1000/n)
	}
	b.ReportMetric(1000*ns/float64(pair), "M/call")
	b.ReportAllocs()
}

// BenchmarkHit is one allocation and one free of the same queue, of one block.
func BenchmarkHit(b *testing.B) {
	a := newCache(b, newBase(), Config{})
	r := request(device, 1<<20, 1)
	after := queue.After(queue.Point{Queue: 1, Value: 1})
	x := get(b, a, r)
	a.Free(x, after)
	for b.Loop() {
		x, _, _ := a.Allocate(r)
		a.Free(x, after)
	}
	perCall(b, 2)
}

// BenchmarkHitMixed has 1000 blocks of 24 sizes live and replaces one at a time, in
// a scattered order.
func BenchmarkHitMixed(b *testing.B) {
	a := newCache(b, newBase(), Config{})
	after := queue.After(queue.Point{Queue: 1, Value: 1})
	size := func(i int) memory.Bytes { return 1 << (12 + i%24/4) * memory.Bytes(4+i%4) / 4 }
	var live [1000]allocator.Block
	for i := range live {
		live[i] = get(b, a, request(device, size(i), 1))
	}
	i := 0
	for b.Loop() {
		j := i * 619 % len(live)
		a.Free(live[j], after)
		live[j], _, _ = a.Allocate(request(device, size(j), 1))
		i++
	}
	perCall(b, 2)
}

// BenchmarkMiss goes to the base and back each time.
func BenchmarkMiss(b *testing.B) {
	base := newBase()
	a := newCache(b, base, Config{Pools: []Pool{{Heap: memory.HeapKey{AnyType: true}, Off: true}}})
	r := request(device, 1<<20, 1)
	for b.Loop() {
		x, _, _ := a.Allocate(r)
		a.Free(x, queue.ReadyNow())
		base.frees = base.frees[:0]
	}
	perCall(b, 2)
}

// BenchmarkShared is pairs of one allocation and one free by goroutines with a
// queue each.
func BenchmarkShared(b *testing.B) {
	for _, c := range []struct{ goroutines, shards int }{{1, 1}, {8, 1}, {8, 8}, {8, 16}} {
		b.Run(fmt.Sprintf("goroutines=%d/shards=%d", c.goroutines, c.shards), func(b *testing.B) {
			a := newCache(b, newBase(), Config{Shards: c.shards})
			const pairs = 1000
			for b.Loop() {
				var wg sync.WaitGroup
				for g := range c.goroutines {
					wg.Go(func() {
						r := request(device, 1<<20, queue.ID(g+1))
						after := queue.After(queue.Point{Queue: r.Who.Queue, Value: 1})
						for range pairs / c.goroutines {
							x, _, _ := a.Allocate(r)
							a.Free(x, after)
						}
					})
				}
				wg.Wait()
			}
			perCall(b, 2*pairs)
		})
	}
}

// tracesAt is where recorded traces are, if anywhere.
func tracesAt() []string {
	dir := os.Getenv("HALYARD_TRACES")
	if dir == "" {
		return nil
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*.trace*"))
	return files
}

// replay runs a trace passes times over a cache on base, all of it reached at once,
// and returns the hit rate of the last pass, and the ratio of the most that was held
// to the most that was asked for and live.
func replay(t testing.TB, a *Allocator, tr *trace.Trace, passes int) (hits, heldToLive float64) {
	live := make([]allocator.Block, tr.Allocs)
	var before allocator.Stats
	for pass := range passes {
		if pass == passes-1 {
			before = a.Stats()
		}
		for _, e := range tr.Events {
			switch {
			case e.Free && live[e.ID].Keeper != nil:
				put(t, a, live[e.ID])
				live[e.ID] = allocator.Block{}
			case !e.Free && e.Bytes > 0:
				live[e.ID] = get(t, a, request(device, memory.Bytes(e.Bytes), queue.ID(e.Stream+1)))
			}
		}
		for _, id := range tr.Leftover() {
			if live[id].Keeper != nil {
				put(t, a, live[id])
				live[id] = allocator.Block{}
			}
		}
	}
	st := a.Stats()
	return float64(st.Hits-before.Hits) / float64(st.Allocs-before.Allocs), float64(st.PeakHeld) / float64(tr.PeakLive)
}

// BenchmarkTraces replays recorded traces, two passes each, at several waste ratios.
func BenchmarkTraces(b *testing.B) {
	files := tracesAt()
	if len(files) == 0 {
		b.Skip("HALYARD_TRACES names no folder with traces")
	}
	for _, file := range files {
		tr, err := trace.Open(file)
		if err != nil {
			b.Fatal(err)
		}
		for _, waste := range []float64{1, 1.0625, 1.125, 1.25, 1.5, 2, 4} {
			b.Run(fmt.Sprintf("%s/waste=%v", tr.Name, waste), func(b *testing.B) {
				var cold, warm, heldCold, held float64
				for b.Loop() {
					base := newBase()
					cold, heldCold = replay(b, newCache(b, base, Config{Waste: waste}), tr, 1)
					warm, held = replay(b, newCache(b, base, Config{Waste: waste}), tr, 2)
				}
				b.ReportMetric(100*cold, "cold-hit-%")
				b.ReportMetric(100*warm, "warm-hit-%")
				b.ReportMetric(heldCold, "held/live-cold")
				b.ReportMetric(held, "held/live")
			})
		}
	}
}
