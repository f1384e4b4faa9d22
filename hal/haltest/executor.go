package haltest

import (
	"slices"
	"time"

	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/mutant"
)

// executor is the hardware of one queue: what was issued, in order.
type executor struct {
	device *Device
	queue  *queue.Queue

	// Guarded by Device.mu.
	work []*item
	over uint64 // what the device is done with
	told uint64 // what the queue was told of (polled devices)
	errs map[uint64]error
}

// item is an operation in flight.
type item struct {
	value   uint64
	op      queue.Op
	waits   []queue.Bound
	started bool
	failed  error // of a wait
	ends    time.Duration
}

// NewQueue implements [driver.Device].
func (d *Device) NewQueue(hook queue.Hook) (*queue.Queue, error) {
	x := &executor{device: d, errs: map[uint64]error{}}
	d.mu.Lock()
	lost := d.lost
	d.mu.Unlock()
	if lost != nil {
		return nil, lost
	}
	x.queue = queue.New(queue.Options{Hook: hook, Executor: func(q *queue.Queue) queue.Executor {
		x.queue = q
		return x
	}})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues = append(d.queues, x)
	return x.queue, nil
}

// Start implements [queue.Executor].
func (x *executor) Start(value uint64, op *queue.Op, waits []queue.Bound) (bool, error) {
	d := x.device
	d.monitor.issued(queue.Point{Queue: x.queue.ID(), Value: value}, op, waits)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.polls = 0
	x.work = append(x.work, &item{value: value, op: *op, waits: slices.Clone(waits)})
	return false, nil
}

// Close implements [queue.Executor].
func (x *executor) Close() error {
	d := x.device
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues = slices.DeleteFunc(d.queues, func(y *executor) bool { return y == x })
	return nil
}

// startLocked lets the head of x begin if its waits are over.
func (x *executor) startLocked() {
	if len(x.work) == 0 || x.work[0].started {
		return
	}
	h := x.work[0]
	for i := range h.waits {
		ready, err := h.waits[i].Ready()
		if !ready {
			return
		}
		if h.failed == nil {
			h.failed = err
		}
	}
	h.started = true
	h.ends = x.device.now + x.device.config.Delay(x.queue.ID(), &h.op, x.device.rng)
}

// Step carries out the operation that ends next, and moves virtual time there. It
// reports whether there was one: false says that nothing in flight can move.
func (d *Device) Step() bool {
	if !d.stepping.TryLock() {
		return false
	}
	defer d.stepping.Unlock()
	d.mu.Lock()
	var next *executor
	if d.lost == nil && !d.closed {
		for _, x := range d.queues {
			x.startLocked()
			if len(x.work) > 0 && x.work[0].started && (next == nil || x.work[0].ends < next.work[0].ends) {
				next = x
			}
		}
	}
	if next == nil {
		d.mu.Unlock()
		return false
	}
	h := next.work[0]
	next.work = next.work[1:]
	d.now = max(d.now, h.ends)
	d.mu.Unlock()

	err := h.failed
	if err == nil && h.op.Kind > queue.Dealloca {
		err = d.Perform(&h.op)
	}
	// The work is over now, and the queue learns it after: whatever that sets off may
	// act on the memory at once.
	d.monitor.retired(queue.Point{Queue: next.queue.ID(), Value: h.value})
	if d.config.Polled {
		d.mu.Lock()
		defer d.mu.Unlock()
		next.over = h.value
		if err != nil {
			next.errs[h.value] = err
		}
		return true
	}
	next.queue.Retire(h.value, err)
	return true
}

// patient is how many polls, with nothing issued between them, are taken for
// somebody who waits.
const patient = 4

// pump is the device's poll: what is over is told. Whoever polls once and goes on
// finds no more than that, and whoever polls again and again waits: then the device
// takes a step.
func (d *Device) pump() bool {
	told := d.config.Polled && d.tell()
	d.mu.Lock()
	d.polls++
	waited := d.polls >= patient
	busy := slices.ContainsFunc(d.queues, func(x *executor) bool { return len(x.work) > 0 })
	d.mu.Unlock()
	if !waited {
		return told || busy
	}
	return d.Step() || told
}

// tell tells the queues of a polled device what is over.
func (d *Device) tell() bool {
	if !d.stepping.TryLock() {
		return false
	}
	defer d.stepping.Unlock()
	type news struct {
		x     *executor
		value uint64
		err   error
	}
	var list []news
	d.mu.Lock()
	for _, x := range d.queues {
		if n := len(x.work); n > 0 && mutant.Is(mutant.PollBeforeRecord) {
			x.over = x.work[n-1].value
		}
		for v := x.told + 1; v <= x.over; v++ {
			list = append(list, news{x, v, x.errs[v]})
			delete(x.errs, v)
		}
		x.told = x.over
	}
	d.mu.Unlock()
	for _, n := range list {
		n.x.queue.Retire(n.value, n.err)
	}
	return len(list) > 0
}

// Run steps until nothing in flight can move, and returns how many steps that were.
func (d *Device) Run() (steps int) {
	for d.Step() || d.config.Polled && d.tell() {
		steps++
	}
	return steps
}

// Stuck lists the queues with work that is deferred, or in flight and unable to
// move. After a [Device.Run] that is whatever waits for a signal that nobody has given.
func (d *Device) Stuck() []queue.ID {
	d.mu.Lock()
	queues := append([]*executor(nil), d.queues...)
	d.mu.Unlock()
	var ids []queue.ID
	for _, x := range queues {
		if !x.queue.Idle() {
			ids = append(ids, x.queue.ID())
		}
	}
	return ids
}
