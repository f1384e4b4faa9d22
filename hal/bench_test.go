package hal_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal"
)

// pair is an alloca and its dealloca on a queue that has nothing else to do.
func pair(tb testing.TB, q *hal.Queue, p hal.Params) {
	buf, err := q.Alloca(context.Background(), p, nil, nil)
	if err != nil {
		tb.Fatal(err)
	}
	if err := q.Dealloca(buf, nil, nil); err != nil {
		tb.Fatal(err)
	}
}

// mutexNS is the cost of an uncontended mutex, measured now: what times are given in.
func mutexNS() float64 {
	var mu sync.Mutex
	const n = 2_000_000
	start := time.Now()
	for range n {
		mu.Lock()
		//lint:ignore SA2001 the pair is what is measured
		mu.Unlock()
	}
	return float64(time.Since(start).Nanoseconds()) / n
}

// An alloca and its dealloca, served from free blocks and executed on an idle queue:
// ns/op is the pair, M/op the same in uncontended mutex pairs.
func BenchmarkPair(b *testing.B) {
	for _, stack := range []string{"", "caching", "vmm+block+caching", "raw"} {
		name := stack
		if name == "" {
			name = "default"
		}
		b.Run(name, func(b *testing.B) {
			d := open(b, "host:capacity=1GiB", stack)
			p := hal.Params{Size: 64 << 10}
			pair(b, d.Queue(0), p)
			m := mutexNS()
			b.ReportAllocs()
			for b.Loop() {
				pair(b, d.Queue(0), p)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/m, "M/op")
		})
	}
}

// Pairs on eight queues by eight goroutines against pairs on one queue by one:
// "x" is how many times the throughput of one the eight have, both measured now.
func BenchmarkEightQueues(b *testing.B) {
	for _, stack := range []string{"", "caching:shards=8", "vmm+block+caching:shards=8"} {
		name := stack
		if name == "" {
			name = "default"
		}
		b.Run(name, func(b *testing.B) {
			d := open(b, "host:capacity=1GiB,queues=8", stack)
			const each = 20_000
			p := hal.Params{Size: 64 << 10}
			run := func(queues int) time.Duration {
				var wg sync.WaitGroup
				start := time.Now()
				for i := range queues {
					wg.Go(func() {
						for range each {
							pair(b, d.Queue(i), p)
						}
					})
				}
				wg.Wait()
				return time.Since(start)
			}
			run(8)
			var one, eight time.Duration
			for b.Loop() {
				one += run(1)
				eight += run(8)
			}
			b.ReportMetric(8*float64(one)/float64(eight), "x")
			b.ReportMetric(float64(eight.Nanoseconds())/float64(b.N)/each/8, "ns/pair")
		})
	}
}

// The hot paths allocate nothing in Go, on an idle queue and with a semaphore.
func TestAPairAllocatesNothing(t *testing.T) {
	for _, stack := range []string{"", "caching", "vmm+block+caching", "block+reuse:wait=on"} {
		d := open(t, "host:capacity=1GiB", stack)
		q, done := d.Queue(0), hal.NewSemaphore(0)
		p := hal.Params{Size: 64 << 10}
		v := uint64(0)
		work := func() {
			pair(t, q, p)
			buf, err := q.Allocate(context.Background(), p)
			require.NoError(t, err)
			v++
			if q.Fill(buf.Span(0, 64), pattern, nil, hal.FenceOf(done, v)) != nil || q.Release(buf) != nil {
				t.Fatal("fill or release")
			}
		}
		work()
		require.Zero(t, testing.AllocsPerRun(200, work), stack)
	}
}

var pattern = []byte{1, 2, 3, 4}
