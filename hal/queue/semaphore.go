package queue

import (
	"context"
	"errors"
	"fmt"
	"github.com/halyard-go/halyard/internal/mutant"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

var (
	// ErrNotIncreasing is what Signal returns for a value that isn't above the current one.
	ErrNotIncreasing = errors.New("queue: semaphore value must rise")
	// ErrFailed matches every error of a failed semaphore; the cause is wrapped beside it.
	ErrFailed = errors.New("queue: semaphore failed")
)

// failure is the error that waiters of a failed semaphore get.
type failure struct{ cause error }

func (f *failure) Error() string        { return "queue: semaphore failed: " + f.cause.Error() }
func (f *failure) Unwrap() error        { return f.cause }
func (f *failure) Is(target error) bool { return target == ErrFailed }

// Semaphore is a timeline semaphore: a value that only rises, raised by queue
// operations and by the host, and waited for by both. It can fail once: the first
// failure wins, and reaches every wait for a value that was not reached before.
// Values reached stay reached. Safe for concurrent use. The zero value is ready
// at value 0; a Semaphore must not be copied.
type Semaphore struct {
	value atomic.Uint64

	mu      sync.Mutex
	err     *failure
	pending []signal // issued by operations, not yet retired
	known   []Point  // what the latest signal by an operation came after
	queues  []*Queue // deferred queues whose head waits here
	hosts   []hostWait
}

// signal is a value that an issued operation will reach.
type signal struct {
	value uint64
	at    Point
	known []Point // what at comes after, on other queues
}

type hostWait struct {
	value uint64
	ch    chan struct{}
}

// NewSemaphore returns a semaphore at value.
func NewSemaphore(value uint64) *Semaphore {
	s := &Semaphore{}
	s.value.Store(value)
	return s
}

// String says what the value is, and that s has failed if it has.
func (s *Semaphore) String() string {
	value, err := s.Query()
	if err != nil {
		return fmt.Sprintf("semaphore at %d, %v", value, errors.Unwrap(err))
	}
	return fmt.Sprintf("semaphore at %d", value)
}

// At is the fence of one value of s, to wait for or to signal.
func (s *Semaphore) At(value uint64) Fence { return Fence{{s, value}} }

// Query returns the current value and, if s has failed, the failure.
func (s *Semaphore) Query() (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.value.Load(), s.err
	}
	return s.value.Load(), nil
}

// Signal raises s to value from the host. A value that is not above the current
// one is ErrNotIncreasing; a failed semaphore returns its failure.
func (s *Semaphore) Signal(value uint64) error {
	var e effects
	s.mu.Lock()
	switch {
	case s.err != nil:
		s.mu.Unlock()
		return s.err
	case value <= s.value.Load():
		at := s.value.Load()
		s.mu.Unlock()
		return fmt.Errorf("%w: at %d, asked for %d", ErrNotIncreasing, at, value)
	}
	s.known = s.known[:0] // a host signal teaches nothing
	s.riseLocked(value, &e)
	s.mu.Unlock()
	e.run()
	return nil
}

// Fail fails s with cause, unless it has failed already: the first failure wins.
// Every waiter, present and future, of a value not reached gets it.
func (s *Semaphore) Fail(cause error) {
	var e effects
	s.fail(cause, &e)
	e.run()
}

// Wait blocks until s has reached value, has failed, or ctx is done. It returns
// nil, the failure, or ctx's error.
func (s *Semaphore) Wait(ctx context.Context, value uint64) error {
	if s.value.Load() >= value {
		return nil
	}
	s.mu.Lock()
	if s.value.Load() >= value {
		s.mu.Unlock()
		return nil
	}
	if s.err != nil {
		s.mu.Unlock()
		return s.err
	}
	w := hostWait{value, make(chan struct{})}
	s.hosts = append(s.hosts, w)
	s.mu.Unlock()
	if err := await(ctx, w.ch); err != nil {
		s.mu.Lock()
		s.hosts = slices.DeleteFunc(s.hosts, func(h hostWait) bool { return h.ch == w.ch })
		s.mu.Unlock()
		if s.value.Load() >= value {
			return nil
		}
		return err
	}
	if s.value.Load() >= value {
		return nil
	}
	_, err := s.Query()
	return err
}

// riseLocked raises the value and collects those to wake.
func (s *Semaphore) riseLocked(value uint64, e *effects) {
	if value > s.value.Load() {
		s.value.Store(value)
	}
	s.wakeLocked(e)
}

// wakeLocked hands every deferred queue and each host waiter that has its answer
// to e. Queues look again and come back if they must.
func (s *Semaphore) wakeLocked(e *effects) {
	e.queues = append(e.queues, s.queues...)
	clear(s.queues)
	s.queues = s.queues[:0]
	if len(s.hosts) == 0 {
		return
	}
	at, failed := s.value.Load(), s.err != nil
	s.hosts = slices.DeleteFunc(s.hosts, func(h hostWait) bool {
		if failed || h.value <= at {
			close(h.ch)
			return true
		}
		return false
	})
}

func (s *Semaphore) fail(cause error, e *effects) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	var f *failure
	if errors.As(cause, &f) { // a failure passed on keeps its first cause
		cause = f.cause
	}
	s.err = &failure{cause}
	s.wakeLocked(e)
}

// expect records that the operation at will signal value.
func (s *Semaphore) expect(value uint64, at Point, know *clock, e *effects) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.pending)
	if n < cap(s.pending) {
		s.pending = s.pending[:n+1]
	} else {
		s.pending = append(s.pending, signal{})
	}
	p := &s.pending[n]
	p.value, p.at, p.known = value, at, know.snapshot(p.known[:0])
	s.wakeLocked(e)
}

// settle carries out the signal of the operation at, whether expected or not.
func (s *Semaphore) settle(value uint64, at Point, know *clock, e *effects) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known, expected := s.forgetLocked(at)
	if s.err != nil || value <= s.value.Load() {
		return
	}
	if expected && !(mutant.Is(mutant.LateLessons) && len(known) == 0) { // what the queue has learned since was learned by later operations
		s.known = append(s.known[:0], known...)
	} else {
		s.known = know.snapshot(s.known[:0])
	}
	s.known = append(s.known, at)
	s.riseLocked(value, e)
}

// forgetLocked drops at's expected signal and returns what it knew, and whether
// there was one.
func (s *Semaphore) forgetLocked(at Point) (known []Point, expected bool) {
	for i := range s.pending {
		if s.pending[i].at == at {
			last := len(s.pending) - 1
			s.pending[i], s.pending[last] = s.pending[last], s.pending[i]
			s.pending = s.pending[:last]
			return s.pending[:last+1][last].known, true
		}
	}
	return nil, false
}

// forsake drops at's expected signal: its operation failed.
func (s *Semaphore) forsake(at Point) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forgetLocked(at)
}

// state says how a wait for value stands.
type state uint8

const (
	stateReached state = iota // nothing to wait for
	stateBound                // an issued operation will signal it
	stateBlocked              // nobody known will, or one of several queues
	stateFailed
)

// resolve finds how a wait for value stands. Where it is reached or bound it
// appends what the wait teaches to known; where it is blocked, q is put on the
// list of those to wake.
func (s *Semaphore) resolve(value uint64, q *Queue, known []Point) (state, Point, []Point, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if mutant.Is(mutant.JoinByValue) {
		for i := range s.pending {
			if p := &s.pending[i]; p.value <= value {
				known = append(append(known, p.at), p.known...)
			}
		}
	}
	if s.value.Load() >= value {
		return stateReached, Point{}, append(known, s.known...), nil
	}
	if s.err != nil {
		return stateFailed, Point{}, known, s.err
	}
	var by *signal
	single := true
	for i := range s.pending {
		p := &s.pending[i]
		if p.at.Queue != s.pending[0].at.Queue {
			single = false
		}
		if p.value >= value && (by == nil || p.at.Value < by.at.Value) {
			by = p
		}
	}
	if by == nil || !single {
		if !slices.Contains(s.queues, q) {
			s.queues = append(s.queues, q)
		}
		return stateBlocked, Point{}, known, nil
	}
	return stateBound, by.at, append(known, by.known...), nil
}

// forsaken reports whether value is to come and no issued operation will bring it.
func (s *Semaphore) forsaken(value uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil || s.value.Load() >= value {
		return false
	}
	return !slices.ContainsFunc(s.pending, func(p signal) bool { return p.value >= value })
}

// failedBefore returns the failure of s if value was not reached before it.
func (s *Semaphore) failedBefore(value uint64) error {
	if s.value.Load() >= value {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil && s.value.Load() < value {
		return s.err
	}
	return nil
}

// At is one value of one semaphore.
type At struct {
	Semaphore *Semaphore
	Value     uint64
}

// Fence is a list of semaphore values: as a wait list it is satisfied when all are
// reached, as a signal list all are signalled. nil waits for nothing and signals
// nothing. Build one with [Semaphore.At] and [Fence.And], or grow one with [Fence.Add].
type Fence []At

// Add puts s at value into f; of two values of one semaphore the larger stays.
func (f *Fence) Add(s *Semaphore, value uint64) {
	for i := range *f {
		if a := &(*f)[i]; a.Semaphore == s {
			a.Value = max(a.Value, value)
			return
		}
	}
	*f = append(*f, At{s, value})
}

// And returns the fence of f and others together; f is not changed.
func (f Fence) And(others ...Fence) Fence {
	all := slices.Clone(f)
	for _, o := range others {
		for _, a := range o {
			all.Add(a.Semaphore, a.Value)
		}
	}
	return all
}

// Query reports whether every value is reached, or the first failure found.
func (f Fence) Query() (bool, error) {
	done := true
	for _, a := range f {
		if err := a.Semaphore.failedBefore(a.Value); err != nil {
			return false, err
		}
		done = done && a.Semaphore.value.Load() >= a.Value
	}
	return done, nil
}

// Wait blocks until every value is reached, one fails, or ctx is done.
func (f Fence) Wait(ctx context.Context) error {
	for _, a := range f {
		if err := a.Semaphore.Wait(ctx, a.Value); err != nil {
			return err
		}
	}
	return nil
}

// Signal signals every value from the host and returns the errors joined.
func (f Fence) Signal() error {
	var errs []error
	for _, a := range f {
		if err := a.Semaphore.Signal(a.Value); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Fail fails every semaphore of f with cause.
func (f Fence) Fail(cause error) {
	for _, a := range f {
		a.Semaphore.Fail(cause)
	}
}

// String formats f as values and their present state, such as [3 of 5, 2 of 2].
func (f Fence) String() string {
	parts := make([]string, len(f))
	for i, a := range f {
		parts[i] = fmt.Sprintf("%d of %d", a.Semaphore.value.Load(), a.Value)
	}
	return "[" + strings.Join(parts, ", ") + "]"
}

// ErrNilSemaphore is what a fence that names no semaphore gets.
var ErrNilSemaphore = errors.New("queue: fence names a nil semaphore")

func (f Fence) check() error {
	for _, a := range f {
		if a.Semaphore == nil {
			return ErrNilSemaphore
		}
	}
	return nil
}

// pumps are the devices whose progress somebody has to ask for.
var pumps struct {
	sync.Mutex
	list atomic.Pointer[[]*func() bool]
}

// AddPump registers a function that makes a device's progress known: it polls
// the driver once, or takes a step of a simulation, and reports whether anything
// moved. Whoever waits calls it, holding no lock, and so does a layer before it takes
// more memory: one call for all points, never one a block. How often the driver is
// really asked the device bounds with [Limited]. The returned function takes the pump
// away again. Devices that report retirement by themselves need none.
func AddPump(pump func() bool) (remove func()) {
	edit := func(f func([]*func() bool) []*func() bool) {
		pumps.Lock()
		defer pumps.Unlock()
		var list []*func() bool
		if p := pumps.list.Load(); p != nil {
			list = slices.Clone(*p)
		}
		list = f(list)
		pumps.list.Store(&list)
	}
	edit(func(l []*func() bool) []*func() bool { return append(l, &pump) })
	return func() {
		edit(func(l []*func() bool) []*func() bool {
			return slices.DeleteFunc(l, func(p *func() bool) bool { return p == &pump })
		})
	}
}

// Limited is a pump that asks at most once in every: a call that comes sooner finds
// that nothing has moved. A poll of a driver costs microseconds, and layers poll
// whenever a search finds only memory that was in use at the last one. Safe for
// concurrent use; of calls at the same time one asks.
func Limited(every time.Duration, pump func() bool) func() bool {
	start := time.Now()
	var next atomic.Int64 // since start
	return func() bool {
		now, due := int64(time.Since(start)), next.Load()
		return now >= due && next.CompareAndSwap(due, now+int64(every)) && pump()
	}
}

// Poll asks every device that has to be asked for its progress, once, and
// reports whether anything moved.
func Poll() bool {
	list := pumps.list.Load()
	if list == nil {
		return false
	}
	moved := false
	for _, p := range *list {
		moved = (*p)() || moved
	}
	return moved
}

// await waits for ch to be closed, pumping devices that need it.
func await(ctx context.Context, ch <-chan struct{}) error {
	pause := 5 * time.Microsecond
	for {
		if p := pumps.list.Load(); p == nil || len(*p) == 0 {
			select {
			case <-ch:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if Poll() {
			pause = 5 * time.Microsecond
		}
		select {
		case <-ch:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		default:
		}
		timer := time.NewTimer(pause)
		select {
		case <-ch:
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
		pause = min(2*pause, time.Millisecond)
	}
}
