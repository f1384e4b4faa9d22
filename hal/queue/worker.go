package queue

import (
	"runtime"
	"sync"
)

// Worker is an [Executor] in software: it carries out operations in order, on the
// submitter's goroutine where that is quick, else on a goroutine of its own that
// lives while there is work. With Manual set it has no goroutine: somebody calls
// [Worker.Step].
type Worker struct {
	queue  *Queue
	device Runner
	manual bool

	mu     sync.Mutex
	work   ring[work]
	active bool // somebody is draining
}

type work struct {
	value uint64
	op    Op
	waits []Bound
}

// Runner is the device behind a Worker.
type Runner interface {
	// Run carries out op, which is due. It is called without a lock, one operation
	// of a queue at a time.
	Run(op *Op) error
	// Quick reports whether op is short enough to run on the submitter's
	// goroutine, under the issue lock. It must be false for user functions.
	Quick(op *Op) bool
}

// NewWorker returns an executor for q. manual workers move by Step alone.
func NewWorker(q *Queue, device Runner, manual bool) *Worker {
	return &Worker{queue: q, device: device, manual: manual}
}

// Start implements [Executor].
func (w *Worker) Start(value uint64, op *Op, waits []Bound) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.manual && w.work.n == 0 && !w.active && (op.marker() || w.device.Quick(op)) {
		if ready, err := allReady(waits); ready {
			if err != nil || op.marker() {
				return true, err
			}
			return true, w.device.Run(op)
		}
	}
	x := w.work.push()
	x.value, x.op = value, *op
	x.waits = append(x.waits[:0], waits...)
	if !w.manual && !w.active {
		w.active = true
		go w.drain()
	}
	return false, nil
}

// Close implements [Executor]; a Worker holds nothing.
func (w *Worker) Close() error { return nil }

func allReady(waits []Bound) (bool, error) {
	var first error
	for i := range waits {
		ready, err := waits[i].Ready()
		if !ready {
			return false, nil
		}
		if first == nil {
			first = err
		}
	}
	return true, first
}

// next takes the head if its waits are over.
func (w *Worker) nextLocked(x *work) (ok bool, err error) {
	if w.work.n == 0 {
		return false, nil
	}
	h := w.work.at(0)
	ready, err := allReady(h.waits)
	if !ready {
		return false, nil
	}
	x.value, x.op = h.value, h.op
	h.op = Op{}
	clear(h.waits)
	w.work.pop()
	return true, err
}

func (w *Worker) perform(x *work, err error) error {
	if err != nil || x.op.marker() || w.queue.lost.Load() != nil {
		return err
	}
	return w.device.Run(&x.op)
}

// Step carries out the next operation if it is due, and reports whether it did.
func (w *Worker) Step() bool {
	var x work
	w.mu.Lock()
	ok, err := w.nextLocked(&x)
	w.mu.Unlock()
	if !ok {
		return false
	}
	w.queue.Retire(x.value, w.perform(&x, err))
	return true
}

// Head reports the operation that Step would carry out next, whether it is due,
// and false if there is none.
func (w *Worker) Head() (op Op, value uint64, due, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.work.n == 0 {
		return Op{}, 0, false, false
	}
	h := w.work.at(0)
	due, _ = allReady(h.waits)
	return h.op, h.value, due, true
}

// drain works until there is nothing due. The caller has set active.
func (w *Worker) drain() {
	var e effects
	w.drainInto(&e, false)
	e.run()
}

// drainInto works off what is due. With quickOnly it leaves long operations to a
// goroutine, so that whoever kicked is not held up.
func (w *Worker) drainInto(e *effects, quickOnly bool) {
	var x work
	for {
		w.mu.Lock()
		if w.work.n > 0 && quickOnly && !w.work.at(0).op.marker() && !w.device.Quick(&w.work.at(0).op) {
			w.mu.Unlock()
			go w.drain() // stays active
			return
		}
		ok, err := w.nextLocked(&x)
		if !ok {
			w.active = false
			var blocked Point
			if w.work.n > 0 {
				blocked = w.blockedLocked()
			}
			w.mu.Unlock()
			if blocked == (Point{}) {
				return
			}
			// Ask to be kicked; if the point was reached meanwhile, go on.
			if q, _ := lookup(blocked.Queue); q != nil && q.whenReached(reachWait{value: blocked.Value, w: w}) {
				return
			}
			runtime.Gosched() // somebody is between reaching the point and giving its signals
			if !w.reactivate() {
				return
			}
			continue
		}
		w.mu.Unlock()
		err = w.perform(&x, err)
		w.queue.retire(x.value, err, e)
		if !quickOnly {
			e.run()
		}
	}
}

// blockedLocked returns a point that the head waits for, or the zero Point if
// none is left.
func (w *Worker) blockedLocked() Point {
	h := w.work.at(0)
	for i := range h.waits {
		if !h.waits[i].Point.Reached() {
			return h.waits[i].Point
		}
	}
	return Point{w.queue.id, 0} // became due meanwhile: look again
}

func (w *Worker) reactivate() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.active || w.work.n == 0 {
		return false
	}
	w.active = true
	return true
}

// kick goes on after a point was reached.
func (w *Worker) kick(e *effects) {
	if w.reactivate() {
		w.drainInto(e, true)
	}
}
