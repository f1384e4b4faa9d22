package replay

import (
	"context"
	"runtime"
	"time"

	"github.com/halyard-go/halyard/hal"
)

// lanes are a device's queues with what orders them.
type lanes struct {
	queues []*hal.Queue
	list   []queueEvent
	home   []int32 // queue of each allocation
	left   []int32 // ids that the trace never frees

	// By queue: a semaphore that rises as allocations are ready that another queue
	// frees. fences are for one value of each, so that no call makes a list.
	fences  []hal.Fence
	base    []uint64 // what it had reached when the pass began
	signals []uint64 // what a pass adds
}

func (r *runner) lanes(dev *hal.Device) *lanes {
	l := &lanes{queues: dev.Queues(), left: r.trace.Leftover()}
	l.list, l.signals, l.home = queueEvents(r.trace, len(l.queues))
	l.base = make([]uint64, len(l.queues))
	for range l.queues {
		l.fences = append(l.fences, hal.NewSemaphore(0).At(0))
	}
	return l
}

// fence is what an allocation signals, or its free waits for; nil if both are on
// one queue. It is good until the next call.
func (l *lanes) fence(e *queueEvent) hal.Fence {
	if e.value == 0 {
		return nil
	}
	f := l.fences[e.home]
	f[0].Value = l.base[e.home] + e.value
	return f
}

// drain waits until all that was submitted is over. An operation that failed is a
// problem of the run's.
func (r *runner) drain(ctx context.Context, l *lanes) error {
	for _, q := range l.queues {
		err := q.Drain(ctx)
		if ctx.Err() != nil {
			return err
		}
		if err != nil {
			r.problem("a queue operation: %v", err)
		}
	}
	return nil
}

// endPass makes the next pass signal new values.
func (l *lanes) endPass() {
	for i, n := range l.signals {
		l.base[i] += n
	}
}

// queued is the run whose last pass gives the time of an event as a queue
// operation, until the last one is over.
func (r *runner) queued(ctx context.Context, dev *hal.Device) error {
	l, bufs := r.lanes(dev), make([]hal.Buffer, r.trace.Allocs)
	for pass := range r.config.Passes {
		last := pass == r.config.Passes-1
		if last {
			runtime.GC()
		}
		start := time.Now()
		err := r.chunks(ctx, len(l.list), last, func(from, to int) { r.submit(l, l.list[from:to], bufs) })
		if err == nil {
			err = r.drain(ctx, l)
		}
		took := time.Since(start)
		if err != nil {
			return err
		}
		if last {
			r.result.QueueNSPerEvent = float64(took.Nanoseconds()) / float64(len(l.list))
		}
		for _, id := range l.left {
			if err := l.queues[l.home[id]].Dealloca(bufs[id], nil, nil); err != nil {
				r.notReleased(bufs[id], id, err)
			}
		}
		if err := r.drain(ctx, l); err != nil {
			return err
		}
		l.endPass()
	}
	return nil
}

// submit is the timed loop of the queued run.
func (r *runner) submit(l *lanes, list []queueEvent, bufs []hal.Buffer) {
	ctx := context.Background()
	for i := range list {
		e := &list[i]
		if e.id >= 0 {
			b, err := l.queues[e.queue].Alloca(ctx, hal.Params{Size: e.size}, nil, l.fence(e))
			bufs[e.id] = b
			if err != nil {
				r.refused(err)
			}
		} else if err := l.queues[e.queue].Dealloca(bufs[^e.id], l.fence(e), nil); err != nil {
			r.notReleased(bufs[^e.id], ^e.id, err)
		}
	}
}

// queueVerified is the queued run with every buffer audited, not timed.
func (r *runner) queueVerified(ctx context.Context, dev *hal.Device) error {
	l, bufs := r.lanes(dev), make([]hal.Buffer, r.trace.Allocs)
	sizes := make([]hal.Bytes, r.trace.Allocs)
	audit := newAuditor(r, r.trace.Allocs, len(l.queues))

	release := func(e *queueEvent) {
		id := ^e.id
		b := bufs[id]
		if b == (hal.Buffer{}) {
			return
		}
		wait := l.fence(e)
		if audit.end(ctx, l.queues[e.queue], int(e.queue), id, b, sizes[id], wait) {
			wait = nil // the read has waited
		}
		if err := l.queues[e.queue].Dealloca(b, wait, nil); err != nil {
			r.notReleased(b, id, err)
		}
	}
	for range r.config.Passes {
		err := r.chunks(ctx, len(l.list), false, func(from, to int) {
			for i := from; i < to; i++ {
				e := &l.list[i]
				if e.id < 0 {
					release(e)
					continue
				}
				q := l.queues[e.queue]
				b, err := q.Alloca(ctx, hal.Params{Size: e.size}, nil, nil)
				bufs[e.id], sizes[e.id] = b, e.size
				if err != nil {
					r.refused(err)
					continue
				}
				audit.begin(q, e.id, b, e.size, l.fence(e))
			}
		})
		if err != nil {
			return err
		}
		for _, id := range l.left {
			release(&queueEvent{id: ^id, queue: l.home[id], home: l.home[id]})
		}
		audit.settle(ctx)
		if err := r.drain(ctx, l); err != nil {
			return err
		}
		l.endPass()
	}
	return nil
}
