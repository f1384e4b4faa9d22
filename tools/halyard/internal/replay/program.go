package replay

import (
	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/internal/trace"
)

// event is one event of the trace for a single queue, as the timed loop reads it.
type event struct {
	size hal.Bytes // of an allocation
	id   int32     // of an allocation; ^id of a free
}

// queueEvent is one event of the trace for several queues.
type queueEvent struct {
	size  hal.Bytes // of an allocation
	value uint64    // on the allocating queue's semaphore: to signal, or to wait for; 0: neither
	id    int32     // of an allocation; ^id of a free
	queue int32     // where it is submitted
	home  int32     // where the buffer was allocated
}

// events compiles a trace for one queue.
func events(t *trace.Trace) []event {
	list := make([]event, len(t.Events))
	for i, e := range t.Events {
		if e.Free {
			list[i].id = ^e.ID
		} else {
			list[i] = event{hal.Bytes(e.Bytes), e.ID}
		}
	}
	return list
}

// queueEvents compiles a trace for n queues. signals is how many values each
// queue's semaphore rises by in one pass, home the queue of each allocation.
func queueEvents(t *trace.Trace, n int) (list []queueEvent, signals []uint64, home []int32) {
	list = make([]queueEvent, len(t.Events))
	signals = make([]uint64, n)
	home = make([]int32, t.Allocs)
	crosses := make([]bool, t.Allocs)
	for _, e := range t.Events {
		q := e.Stream % int32(n)
		if e.Free {
			crosses[e.ID] = q != home[e.ID]
		} else {
			home[e.ID] = q
		}
	}
	values := make([]uint64, t.Allocs)
	for i, e := range t.Events {
		q := e.Stream % int32(n)
		x := queueEvent{size: hal.Bytes(e.Bytes), id: e.ID, queue: q, home: home[e.ID]}
		if e.Free {
			x.id = ^e.ID
		} else if crosses[e.ID] {
			signals[q]++
			values[e.ID] = signals[q]
		}
		x.value = values[e.ID]
		list[i] = x
	}
	return list, signals, home
}
