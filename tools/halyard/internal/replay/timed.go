package replay

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/halyard-go/halyard/hal"
)

// timed is the run whose last pass gives the time of an event on one queue's
// timeline.
func (r *runner) timed(ctx context.Context, dev *hal.Device) error {
	q := dev.Queue(0)
	list, bufs := events(r.trace), make([]hal.Buffer, r.trace.Allocs)
	leftover := r.trace.Leftover()
	for pass := range r.config.Passes {
		last := pass == r.config.Passes-1
		if last {
			runtime.GC() // of the runs before, which is not this one's to pay
		}
		start := time.Now()
		err := r.chunks(ctx, len(list), last, func(from, to int) { r.direct(q, list[from:to], bufs) })
		took := time.Since(start)
		if err != nil {
			return err
		}
		if last {
			r.result.NSPerEvent = float64(took.Nanoseconds()) / float64(len(list))
		}
		for _, id := range leftover {
			if err := q.Release(bufs[id]); err != nil {
				r.notReleased(bufs[id], id, err)
			}
		}
	}
	return nil
}

// direct is the timed loop: nothing but the calls, and a slice of handles.
func (r *runner) direct(q *hal.Queue, list []event, bufs []hal.Buffer) {
	ctx := context.Background()
	for i := range list {
		e := &list[i]
		if e.id >= 0 {
			b, err := q.Allocate(ctx, hal.Params{Size: e.size})
			bufs[e.id] = b
			if err != nil {
				r.refused(err)
			}
		} else if err := q.Release(bufs[^e.id]); err != nil {
			r.notReleased(bufs[^e.id], ^e.id, err)
		}
	}
}

// MutexNS is the time of an uncontended lock and unlock of a mutex, in
// nanoseconds: the unit to compare the times of different machines by. It measures
// anew each time, some 50 ms long, so that it can be done beside what is compared.
func MutexNS() float64 {
	const pairs, rounds = 1 << 20, 7
	var mu sync.Mutex
	times := make([]float64, rounds)
	for i := range times {
		start := time.Now()
		for range pairs {
			mu.Lock()
			//lint:ignore SA2001 an empty critical section is what is measured
			mu.Unlock()
		}
		times[i] = float64(time.Since(start).Nanoseconds()) / pairs
	}
	slices.Sort(times)
	return times[rounds/2]
}
