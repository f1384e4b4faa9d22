package host_test

import (
	"testing"

	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func BenchmarkRaw(b *testing.B) {
	d := open(b, host.Config{})
	b.ReportAllocs()
	for b.Loop() {
		a, _, err := d.Alloc(deviceHeap, memory.MiB, 256)
		if err != nil {
			b.Fatal(err)
		}
		if err := d.Free(deviceHeap, a); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPool(b *testing.B) {
	d := open(b, host.Config{})
	if err := d.SetPoolThreshold(deviceHeap, memory.GiB); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		a, _, _, err := d.PoolAlloc(deviceHeap, memory.MiB, 256)
		if err != nil {
			b.Fatal(err)
		}
		if err := d.PoolFree(deviceHeap, a, queue.ReadyNow()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkInlineFill(b *testing.B) {
	d := open(b, host.Config{})
	q := newQueue(b, d)
	addr := alloc(b, d, deviceHeap, 4096)
	op := queue.Op{Kind: queue.Fill, Dst: addr, Size: 256, Pattern: 1, PatternSize: 4}
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := q.Submit(&op, nil, nil); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCall(b *testing.B) {
	d := open(b, host.Config{})
	q := newQueue(b, d)
	op := queue.Op{Kind: queue.Call, Func: func() error { return nil }}
	b.ReportAllocs()
	for b.Loop() {
		at, _, err := q.Submit(&op, nil, nil)
		if err != nil {
			b.Fatal(err)
		}
		if err := at.Wait(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
