package replay

import (
	"context"

	"github.com/halyard-go/halyard/hal"
)

// counted is the run that gives the counts and peaks.
func (r *runner) counted(ctx context.Context, dev *hal.Device) error {
	res, q := r.result, dev.Queue(0)
	res.Device, res.Allocator, res.Modelled, res.Queues = dev.Info().Name, dev.Allocator(), dev.Info().Modelled, len(dev.Queues())

	list, bufs := events(r.trace), make([]hal.Buffer, r.trace.Allocs)
	sizes := make([]hal.Bytes, r.trace.Allocs)
	leftover := r.trace.Leftover()
	var audit *auditor
	if r.config.Verify {
		audit = newAuditor(r, r.trace.Allocs, 1)
	}

	live := hal.Bytes(0)
	release := func(id int32) {
		b := bufs[id]
		if b == (hal.Buffer{}) {
			return
		}
		if audit != nil {
			audit.end(ctx, q, 0, id, b, sizes[id], nil)
			audit.settle(ctx)
		}
		if err := q.Release(b); err != nil {
			r.notReleased(b, id, err)
			return
		}
		live -= sizes[id]
		res.Frees++
		if sizes[id] > 0 {
			res.Direct++
		}
	}
	allocate := func(id int32, size hal.Bytes) {
		b, err := q.Allocate(ctx, hal.Params{Size: size})
		bufs[id], sizes[id] = b, size
		if err != nil {
			r.refused(err)
			return
		}
		live += size
		res.Allocs++
		res.PeakLive = max(res.PeakLive, live)
		if size > 0 {
			res.Direct++
		}
		if audit != nil {
			audit.begin(q, id, b, size, nil)
		}
	}

	var before hal.LayerStats
	for range res.Passes {
		err := r.chunks(ctx, len(list), false, func(from, to int) {
			for _, e := range list[from:to] {
				if e.id >= 0 {
					allocate(e.id, e.size)
				} else {
					release(^e.id)
				}
			}
		})
		if err != nil {
			return err
		}
		for _, id := range leftover {
			release(id)
		}
		stats := dev.Stats()
		res.Layers = stats.Layers
		now := stats.Source()
		res.SourceAllocsByPass = append(res.SourceAllocsByPass, now.SourceAllocs-before.SourceAllocs)
		res.DriverCallsByPass = append(res.DriverCallsByPass, driverCalls(&now)-driverCalls(&before))
		before = now
	}
	res.PeakHeld, res.Retained = before.PeakHeld, before.Held
	return nil
}

// driverCalls is how many calls a source made that take, give or map memory.
func driverCalls(s *hal.LayerStats) uint64 {
	return s.SourceAllocs + s.SourceFrees + s.Maps + s.Unmaps
}
