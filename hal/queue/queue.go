package queue

import (
	"context"
	"errors"
	"fmt"
	"github.com/halyard-go/halyard/internal/mutant"
	"slices"
	"sync"
	"sync/atomic"
)

var (
	// ErrClosed is what a closed queue returns, and the cause with which it fails
	// the signal lists of operations that were not issued.
	ErrClosed = errors.New("closed")
	// ErrLost matches the cause of every failure after the loss of a device.
	ErrLost = errors.New("queue: device lost")
)

// Kind says what an operation does.
type Kind uint8

// The operations. Barrier, Alloca and Dealloca only take their place on the
// timeline; the rest are carried out by the device.
const (
	Barrier Kind = iota
	Alloca
	Dealloca
	Fill     // Pattern (PatternSize bytes of it) over Size bytes at Dst
	Copy     // Size bytes from Src to Dst
	Upload   // Host to Dst
	Download // Src to Host
	Call     // Func
)

var kindNames = [...]string{"barrier", "alloca", "dealloca", "fill", "copy", "upload", "download", "call"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Ref is a piece of memory that an operation touches, as its owner knows it.
type Ref struct {
	Keeper any    // what minted it
	ID     uint64 // which one
	Addr   uint64
	Size   int64
}

// Op is one queue operation. Only the fields of its kind count.
type Op struct {
	Kind        Kind
	PatternSize uint8
	Pattern     uint64
	Dst, Src    uint64
	Size        int64
	Host        []byte
	Func        func() error
	Refs        [2]Ref   // for Hook: what must be live when the operation is issued; the first, then the second
	After       Frontier // a wait added by the allocator, on issued points only; unknown: none
}

// marker reports whether the device has nothing to do for the operation.
func (o *Op) marker() bool { return o.Kind <= Dealloca }

// Bound is something on other queues that an issued operation must wait for: the
// point of the operation that signals Value of Semaphore, or a bare point
// (Semaphore nil).
type Bound struct {
	At
	Point Point
}

// Ready reports whether the wait is over, and the failure if it ended badly.
func (b *Bound) Ready() (bool, error) {
	if !b.Point.Reached() {
		if q, _ := lookup(b.Point.Queue); q != nil {
			if lost := q.lost.Load(); lost != nil {
				return true, *lost
			}
		}
		return false, nil
	}
	if b.Semaphore == nil || b.Semaphore.value.Load() >= b.Value {
		return true, nil
	}
	// The point is reached a moment before its signals are given: whoever waited for
	// one must find its value.
	err := b.Semaphore.failedBefore(b.Value)
	return err != nil, err
}

// Executor carries out what its queue has issued, in order. [Worker] is one in
// software; a hardware queue is another.
type Executor interface {
	// Start takes the issued operation numbered value, to be carried out after
	// every earlier one and after each of waits. It is called under the issue
	// lock, in order; it must not block, call back into the queue, or keep op or
	// waits. done = true says that this and every earlier operation is over, with
	// err for this one. Otherwise the executor calls [Queue.Retire] later.
	Start(value uint64, op *Op, waits []Bound) (done bool, err error)
	// Close releases what the executor holds. The queue has drained or is lost.
	Close() error
}

// Hook is told of operations with Refs, so that whoever owns the memory can
// record uses and free.
type Hook interface {
	// Use is called under the issue lock before the executor sees op, which takes
	// place at. An error fails op: it is not carried out. Not called for Dealloca.
	Use(op *Op, at Point) error
	// Free is called without a lock once a Dealloca has been issued. Its point is
	// not reached and its signals are not given until Free has returned, so that
	// whoever waits for them finds the memory free.
	Free(ref Ref, at Point)
	// Keep is called without a lock for a Dealloca that was accepted and will never
	// be issued: it did not happen.
	Keep(ref Ref, cause error)
}

// LossHook is what a [Hook] implements that wants to know when its device is lost.
type LossHook interface {
	// Lost is called under the issue lock with the cause, which matches [ErrLost].
	Lost(cause error)
}

// Options are what a queue is made of.
type Options struct {
	Executor func(*Queue) Executor
	Hook     Hook // may be nil
}

// Queue is a timeline of operations carried out in order. Safe for concurrent use.
type Queue struct {
	id   ID
	hook Hook

	_       [48]byte // reached is written by the executor and read by everyone
	reached atomic.Uint64
	issued  atomic.Uint64 // written under mu
	_       [48]byte

	lost atomic.Pointer[error] // set once, by Lose

	mu      sync.Mutex // the issue lock
	exec    Executor
	err     error          // why Submit refuses
	fifo    ring[deferred] // accepted, not issued
	flight  ring[inFlight] // issued, not retired
	retired uint64         // what the executor is done with; reached may lag behind a held dealloca
	scratch Op             // what Start is given, so that the caller's Op needn't escape
	known   []Point        // scratch of tryIssueLocked
	bounds  []Bound        // scratch of tryIssueLocked
	gone    bool           // executor closed, id withdrawn
	unheard error          // first failure that no signal list carried

	know clock

	reachMu sync.Mutex
	onReach []reachWait
}

type deferred struct {
	op           Op
	wait, signal Fence
}

type inFlight struct {
	value  uint64
	held   bool  // a dealloca whose memory is being freed
	err    error // how it ended, as far as known
	waits  []Bound
	signal Fence
}

type reachWait struct {
	value uint64
	ch    chan struct{} // closed, or
	w     *Worker       // kicked
}

// New makes a queue, with an ID never used before.
func New(o Options) *Queue {
	q := &Queue{hook: o.Hook}
	registry.add(q)
	q.exec = o.Executor(q)
	return q
}

// ID returns the queue's identity.
func (q *Queue) ID() ID { return q.id }

// Issued is the point after all that has been issued so far.
func (q *Queue) Issued() Point { return Point{q.id, q.issued.Load()} }

// Reached is the value up to which the queue's work has retired.
func (q *Queue) Reached() uint64 { return q.reached.Load() }

// Deferred returns how many operations wait to be issued.
func (q *Queue) Deferred() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.fifo.n
}

// orderedAfter reports whether the queue's next operation comes after p. It takes
// only leaf locks.
func (q *Queue) orderedAfter(p Point) bool {
	if q != nil && q.know.covers(p, ^uint64(0)) {
		return true
	}
	return p.Reached()
}

// Submit accepts op: after wait it is carried out, and then signal is signalled.
// Both lists are copied. It returns the point of op and true if op was issued at
// once; false says that it was deferred. An error says that nothing happened.
//
// Once accepted, an operation that fails (a wait fails, its memory was released
// before it was issued, the device fails it, its queue is closed first) fails its
// signal list with the cause.
func (q *Queue) Submit(op *Op, wait, signal Fence) (Point, bool, error) {
	if err := wait.check(); err != nil {
		return Point{}, false, err
	}
	if err := signal.check(); err != nil {
		return Point{}, false, err
	}
	var e effects
	var at Point
	var cause error
	st := stateBlocked
	q.mu.Lock()
	if q.err != nil {
		defer q.mu.Unlock()
		return Point{}, false, q.err
	}
	if q.fifo.n == 0 {
		q.scratch = *op
		at, st, cause = q.tryIssueLocked(&q.scratch, wait, signal, &e)
	}
	if st == stateBlocked {
		d := q.fifo.push()
		d.op = *op
		d.wait = append(d.wait[:0], wait...)
		d.signal = append(d.signal[:0], signal...)
		if mutant.Is(mutant.FreeAtSubmit) && op.Kind == Dealloca && q.hook != nil {
			d.op = Op{Kind: Barrier}
			defer q.hook.Free(op.Refs[0], q.Issued())
		}
	}
	q.mu.Unlock()
	if st != stateBlocked && op.Kind == Dealloca && q.hook != nil {
		call := hookCall{q, op.Refs[0], at, cause}
		call.run(&e)
	}
	e.run()
	return at, st == stateReached, nil
}

// tryIssueLocked issues op if each of its waits is reached or bound: it returns
// stateReached and the point. Or stateBlocked; or stateFailed and the cause, with
// which the signals were failed.
func (q *Queue) tryIssueLocked(op *Op, wait, signal Fence, e *effects) (Point, state, error) {
	q.known, q.bounds = q.known[:0], q.bounds[:0]
	for _, a := range wait {
		if a.Value == 0 {
			continue
		}
		st, by, known, err := a.Semaphore.resolve(a.Value, q, q.known)
		q.known = known
		switch st {
		case stateBlocked:
			return Point{}, stateBlocked, nil
		case stateFailed:
			failAll(signal, err, e)
			q.unheardLocked(signal, err)
			if !op.After.Unknown() && !mutant.Is(mutant.DropAddedWait) {
				// Its memory is placed, and what follows on the queue may touch it: the wait
				// that was added stands.
				*op = Op{Kind: Barrier, After: op.After}
				q.bounds = q.bounds[:0]
				q.tryIssueLocked(op, nil, nil, e)
			}
			return Point{}, stateFailed, err
		case stateBound:
			q.known = append(q.known, by)
			if by.Queue == q.id { // in order already; its failure still counts
				by.Value = 0
			}
			q.bounds = append(q.bounds, Bound{a, by})
		}
	}
	if !op.After.Unknown() {
		n := len(q.known)
		q.known = op.After.Points(q.known)
		for _, p := range q.known[n:] {
			if p.Queue != q.id {
				q.bounds = append(q.bounds, Bound{Point: p})
			}
		}
	}
	at := Point{q.id, q.issued.Load() + 1}
	for _, p := range q.known {
		if p.Queue != q.id {
			q.know.learn(p, at.Value)
		}
	}
	q.issued.Store(at.Value)
	held := op.Kind == Dealloca && q.hook != nil
	var useErr error
	if op.Refs[0].Keeper != nil && !held && q.hook != nil {
		if useErr = q.hook.Use(op, at); useErr != nil {
			*op = Op{Kind: Barrier}
		}
	}
	done, err := q.exec.Start(at.Value, op, q.bounds)
	if useErr != nil {
		err = useErr
	}
	if done && q.flight.n == 0 && !held {
		q.retired = at.Value
		q.finishLocked(at.Value, err, q.bounds, signal, e)
		return at, stateReached, nil
	}
	f := q.flight.push()
	f.value, f.held, f.err = at.Value, held, err
	f.waits = append(f.waits[:0], q.bounds...)
	f.signal = append(f.signal[:0], signal...)
	for _, a := range signal {
		a.Semaphore.expect(a.Value, at, &q.know, e)
	}
	if done {
		q.retireLocked(at.Value, err, e)
	}
	return at, stateReached, nil
}

// finishLocked ends the operation numbered value: failures first, then the point
// is reached, then the signals. So whoever sees the point reached sees the failure
// of what it waited for, and whoever is woken by a signal sees the point reached.
func (q *Queue) finishLocked(value uint64, err error, waits []Bound, signal Fence, e *effects) {
	for i := range waits {
		if err != nil {
			break
		}
		if b := &waits[i]; b.Semaphore != nil {
			err = b.Semaphore.failedBefore(b.Value)
		}
	}
	at := Point{q.id, value}
	if err != nil {
		q.unheardLocked(signal, err)
		for _, a := range signal {
			a.Semaphore.forsake(at)
		}
		failAll(signal, err, e)
	}
	q.reached.Store(value)
	if err == nil {
		for _, a := range signal {
			a.Semaphore.settle(a.Value, at, &q.know, e)
		}
	}
	q.noteReached(value, e)
}

// Retire says that the operations up to value are over, the last of them with
// err. Executors call it in order, holding no lock.
func (q *Queue) Retire(value uint64, err error) {
	var e effects
	q.retire(value, err, &e)
	e.run()
}

func (q *Queue) retire(value uint64, err error, e *effects) {
	q.mu.Lock()
	q.retireLocked(value, err, e)
	q.mu.Unlock()
}

func (q *Queue) retireLocked(value uint64, err error, e *effects) {
	if q.lost.Load() != nil { // never reached: its memory is not to be used again
		return
	}
	q.retired = max(q.retired, value)
	if err != nil && q.flight.n > 0 {
		if first := q.flight.at(0).value; value >= first && value-first < uint64(q.flight.n) {
			q.flight.at(int(value - first)).err = err
		}
	}
	q.finishRetiredLocked(e)
}

// finishRetiredLocked ends what the executor is done with, up to a dealloca whose
// memory is still being freed.
func (q *Queue) finishRetiredLocked(e *effects) {
	for q.flight.n > 0 {
		f := q.flight.at(0)
		if f.value > q.retired || f.held {
			break
		}
		q.finishLocked(f.value, f.err, f.waits, f.signal, e)
		clear(f.waits)
		clear(f.signal)
		f.err = nil
		q.flight.pop()
	}
	if q.err != nil && q.flight.n == 0 {
		q.withdrawLocked(e)
	}
}

// freed lets go of a held dealloca.
func (q *Queue) freed(at Point, e *effects) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.flight.n == 0 { // lost, and abandoned since
		return
	}
	first := q.flight.at(0).value
	q.flight.at(int(at.Value - first)).held = false
	if q.lost.Load() == nil {
		q.finishRetiredLocked(e)
	}
}

func (q *Queue) noteReached(value uint64, e *effects) {
	q.reachMu.Lock()
	defer q.reachMu.Unlock()
	kept := q.onReach[:0]
	for _, w := range q.onReach {
		switch {
		case w.value > value:
			kept = append(kept, w)
		case w.w != nil:
			e.workers = append(e.workers, w.w)
		default:
			close(w.ch)
		}
	}
	clear(q.onReach[len(kept):])
	q.onReach = kept
}

// whenReached arranges for w to be kicked, or ch closed, when value is reached.
// It returns false if it is already.
func (q *Queue) whenReached(r reachWait) bool {
	q.reachMu.Lock()
	defer q.reachMu.Unlock()
	if q.reached.Load() >= r.value || q.lost.Load() != nil {
		return false
	}
	q.onReach = append(q.onReach, r)
	return true
}

// Wait blocks until p is reached, its queue is lost, or ctx is done.
func (p Point) Wait(ctx context.Context) error {
	q, _ := lookup(p.Queue)
	if q == nil || p.Reached() {
		return nil
	}
	ch := make(chan struct{})
	if q.whenReached(reachWait{value: p.Value, ch: ch}) {
		if err := await(ctx, ch); err != nil {
			q.reachMu.Lock()
			q.onReach = slices.DeleteFunc(q.onReach, func(r reachWait) bool { return r.ch == ch })
			q.reachMu.Unlock()
			return err
		}
	}
	if lost := q.lost.Load(); lost != nil && !p.Reached() {
		return *lost
	}
	return nil
}

// Wait blocks until f is reached or ctx is done. An unknown frontier waits for
// everything issued when Wait was called.
func (f Frontier) Wait(ctx context.Context) error {
	if f.Unknown() {
		f = Everything()
	}
	for _, p := range f.Points(nil) {
		if err := p.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// advance issues what can be issued now.
func (q *Queue) advance(e *effects) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.fifo.n > 0 {
		d := q.fifo.at(0)
		q.scratch = d.op
		at, st, cause := q.tryIssueLocked(&q.scratch, d.wait, d.signal, e)
		if st == stateBlocked {
			return
		}
		q.undeferLocked(d, at, cause, e)
	}
	if q.err != nil && q.flight.n == 0 {
		q.withdrawLocked(e)
	}
}

// undeferLocked takes d, the head of the FIFO, off it: issued at, or abandoned
// for cause.
func (q *Queue) undeferLocked(d *deferred, at Point, cause error, e *effects) {
	if d.op.Kind == Dealloca && q.hook != nil {
		e.hooks = append(e.hooks, hookCall{q, d.op.Refs[0], at, cause})
	}
	d.op = Op{}
	clear(d.wait)
	clear(d.signal)
	q.fifo.pop()
}

// Hopeless reports whether the first operation that is not issued waits for a value
// that no issued operation will signal.
func (q *Queue) Hopeless() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.fifo.n == 0 {
		return false
	}
	return slices.ContainsFunc(q.fifo.at(0).wait, func(a At) bool { return a.Semaphore.forsaken(a.Value) })
}

// Unissued is how many bytes the deallocas that were not issued would free.
func (q *Queue) Unissued() (bytes int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.fifo.n {
		if op := &q.fifo.at(i).op; op.Kind == Dealloca {
			bytes += op.Refs[0].Size
		}
	}
	return bytes
}

// Idle reports whether nothing is deferred or in flight.
func (q *Queue) Idle() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.fifo.n == 0 && q.flight.n == 0
}

// unheardLocked notes a failure that no signal list carries to anybody.
func (q *Queue) unheardLocked(signal Fence, err error) {
	if len(signal) == 0 && q.unheard == nil {
		q.unheard = err
	}
}

// TakeError returns the first failure, since the last call, of an operation that had
// no signal list to fail, or nil.
func (q *Queue) TakeError() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	err := q.unheard
	q.unheard = nil
	return err
}

// Drain blocks until nothing is in flight or ctx is done. What is deferred stays.
func (q *Queue) Drain(ctx context.Context) error { return q.Issued().Wait(ctx) }

// Close refuses new work and fails what is not issued with [ErrClosed]; what is
// issued completes. The queue's points stay good: once it has drained they are
// all reached. Idempotent; it doesn't wait.
func (q *Queue) Close() { q.shut(ErrClosed, false) }

// Lose says that the device is gone: everything fails with cause, and nothing in
// flight is ever reached, so that no memory it touched is used again. A second
// cause is ignored.
func (q *Queue) Lose(cause error) {
	q.shut(fmt.Errorf("%w: %w", ErrLost, cause), true)
}

func (q *Queue) shut(err error, lose bool) {
	var e effects
	q.mu.Lock()
	if q.err == nil || (lose && q.lost.Load() == nil) {
		q.err = err
	}
	err = q.err
	for q.fifo.n > 0 {
		d := q.fifo.at(0)
		failAll(d.signal, err, &e)
		q.undeferLocked(d, Point{}, err, &e)
	}
	switch {
	case lose && q.lost.Load() == nil:
		q.lost.Store(&err)
		if h, ok := q.hook.(LossHook); ok {
			h.Lost(err)
		}
		for i := range q.flight.n {
			failAll(q.flight.at(i).signal, err, &e)
		}
		q.noteReached(^uint64(0), &e) // whoever waits finds out why it won't be
	case q.lost.Load() == nil && q.flight.n == 0:
		q.withdrawLocked(&e)
	}
	q.mu.Unlock()
	e.run()
}

// Lost returns why the queue's device was lost, or nil.
func (q *Queue) Lost() error {
	if err := q.lost.Load(); err != nil {
		return *err
	}
	return nil
}

// Abandon withdraws a lost queue when its device has been closed and no work of
// it can run any more: its points count as reached from then on.
func (q *Queue) Abandon() {
	var e effects
	q.mu.Lock()
	for q.flight.n > 0 {
		f := q.flight.at(0)
		f.err, f.held = nil, false
		clear(f.waits)
		clear(f.signal)
		q.flight.pop()
	}
	q.reached.Store(q.issued.Load())
	q.noteReached(q.issued.Load(), &e)
	q.withdrawLocked(&e)
	q.mu.Unlock()
	e.run()
}

func (q *Queue) withdrawLocked(e *effects) {
	if q.gone {
		return
	}
	q.gone = true
	registry.remove(q)
	e.closers = append(e.closers, q.exec)
}

func failAll(f Fence, cause error, e *effects) {
	for _, a := range f {
		a.Semaphore.fail(cause, e)
	}
}

// effects is what an action under a lock sets off elsewhere, to be run after
// unlocking. One list is worked off in a loop, so a chain of queues that set each
// other off uses no stack.
type effects struct {
	queues  []*Queue
	workers []*Worker
	hooks   []hookCall
	closers []Executor
}

// hookCall tells the hook how a dealloca went.
type hookCall struct {
	q     *Queue
	ref   Ref
	at    Point
	cause error // not issued
}

func (c *hookCall) run(e *effects) {
	if c.cause != nil {
		c.q.hook.Keep(c.ref, c.cause)
		return
	}
	c.q.hook.Free(c.ref, c.at)
	c.q.freed(c.at, e)
}

func (e *effects) run() {
	for {
		switch {
		case len(e.hooks) > 0: // memory is freed before anybody looks for some
			h := e.hooks[0]
			e.hooks = e.hooks[1:]
			h.run(e)
		case len(e.queues) > 0:
			q := e.queues[0]
			e.queues = e.queues[1:]
			q.advance(e)
		case len(e.workers) > 0:
			w := e.workers[0]
			e.workers = e.workers[1:]
			w.kick(e)
		case len(e.closers) > 0:
			x := e.closers[0]
			e.closers = e.closers[1:]
			_ = x.Close() // a drained executor has nothing left to fail
		default:
			return
		}
	}
}

// registry finds a queue by its ID.
var registry registryTable

type registryTable struct {
	mu   sync.Mutex
	last atomic.Uint32
	dir  atomic.Pointer[[]*chunk] // grown by copying, under mu
	live map[ID]*Queue
}

const chunkSize = 256

type chunk [chunkSize]atomic.Pointer[Queue]

func (t *registryTable) add(q *Queue) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.live == nil {
		t.live = map[ID]*Queue{}
	}
	id := t.last.Load() + 1
	if mutant.Is(mutant.ReuseQueueID) {
		for i := ID(1); uint32(i) < id; i++ {
			if old, _ := lookup(i); old == nil {
				id = uint32(i)
				break
			}
		}
	}
	if id == 0 {
		panic("queue: 2³²-1 queues were made in this process")
	}
	var dir []*chunk
	if p := t.dir.Load(); p != nil {
		dir = *p
	}
	if int(id/chunkSize) >= len(dir) {
		grown := append(dir[:len(dir):len(dir)], new(chunk))
		t.dir.Store(&grown)
		dir = grown
	}
	q.id = ID(id)
	dir[id/chunkSize][id%chunkSize].Store(q)
	t.live[q.id] = q
	t.last.Store(max(id, t.last.Load()))
}

func (t *registryTable) remove(q *Queue) {
	t.mu.Lock()
	defer t.mu.Unlock()
	(*t.dir.Load())[q.id/chunkSize][q.id%chunkSize].Store(nil)
	delete(t.live, q.id)
}

// lookup returns the queue named id, or nil; known says that it has existed.
func lookup(id ID) (q *Queue, known bool) {
	dir := registry.dir.Load()
	if dir == nil || int(id/chunkSize) >= len(*dir) {
		return nil, false
	}
	q = (*dir)[id/chunkSize][id%chunkSize].Load()
	return q, q != nil || (id != 0 && uint32(id) <= registry.last.Load())
}

// Lookup returns the live queue named id, or nil.
func Lookup(id ID) *Queue {
	q, _ := lookup(id)
	return q
}
