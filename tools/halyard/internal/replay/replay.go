package replay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/internal/trace"
)

// Config says how to replay a trace.
type Config struct {
	// Open opens the device; it is called once for each run and must open the same
	// device each time.
	Open func() (*hal.Device, error)
	// Passes is how often the trace is replayed in each run, at least once.
	Passes int
	// Verify audits every buffer.
	Verify bool
	// Progress, if not nil, is told now and then how many events of how many have
	// been replayed in all runs together. It is never called in a timed pass.
	Progress func(done, total int64)
}

// The runs, in order.
const (
	Counted = iota
	Timed
	Queued
	QueueVerified
	runCount
)

// RunNames are the names of the runs.
var RunNames = [runCount]string{"counted", "timed", "queued", "queue-verified"}

// Result is what a replay found. Counts cover all passes of the counted run
// unless they say otherwise.
type Result struct {
	Device    string // as the device names itself
	Allocator string // the effective stack
	Modelled  string // what of the device is modelled and not measured, or empty
	Queues    int
	Passes    int
	Verified  bool

	Events        int64  // of the trace, times the passes
	Allocs, Frees uint64 // served
	Direct        uint64 // calls that would have reached the driver without any layer

	// FailedByRun counts the requests that each run was refused.
	FailedByRun [runCount]uint64
	// Overlaps counts buffers handed out over bytes of a live one, LostBytes the
	// known bytes that had changed, Misplaced the grants too small or not aligned:
	// of both audited runs together.
	Overlaps, LostBytes, Misplaced uint64

	PeakLive hal.Bytes // asked for by what was served
	PeakHeld hal.Bytes // taken from the driver
	Retained hal.Bytes // held after the last pass, when nothing was live

	// Layers are the statistics after the last pass, before the final trim;
	// outermost first, the source last.
	Layers []hal.LayerStats
	// SourceAllocsByPass and DriverCallsByPass say what each pass asked of the
	// driver: calls that take memory, and calls of any kind.
	SourceAllocsByPass, DriverCallsByPass []uint64

	NSPerEvent      float64 // the last pass of the timed run
	QueueNSPerEvent float64 // the last pass of the queued run

	FirstError error    // the first refusal, in full
	Problems   []string // the first few things that must not happen, one a line
	Unlisted   int      // problems beyond those
	Took       time.Duration
}

// Failed is how many requests were refused over all passes, by the run that
// refused most.
func (r *Result) Failed() uint64 {
	most := uint64(0)
	for _, n := range r.FailedByRun {
		most = max(most, n)
	}
	return most
}

// OK reports whether every request was served and nothing was found wrong.
func (r *Result) OK() bool { return r.Failed() == 0 && len(r.Problems) == 0 }

// Source is the innermost layer: what was asked of the driver.
func (r *Result) Source() *hal.LayerStats { return &r.Layers[len(r.Layers)-1] }

// DriverCalls is how often the driver was asked in all: to take and give memory, to
// map and unmap it.
func (r *Result) DriverCalls() uint64 { return driverCalls(r.Source()) }

// Cache is the outermost layer that serves from memory it kept, or the outermost
// layer at all if there is none.
func (r *Result) Cache() *hal.LayerStats {
	for i := range r.Layers {
		if l := &r.Layers[i]; l.Hits+l.Misses > 0 {
			return l
		}
	}
	return &r.Layers[0]
}

// HeldOverLive is the peak held over the peak live, or 0 if nothing was live.
func (r *Result) HeldOverLive() float64 {
	if r.PeakLive == 0 {
		return 0
	}
	return float64(r.PeakHeld) / float64(r.PeakLive)
}

// Run replays t. The error is that of opening a device, or of ctx: a request that
// is refused and whatever an audit finds stand in the result.
func Run(ctx context.Context, t *trace.Trace, c Config) (*Result, error) {
	r := &runner{trace: t, config: c, result: &Result{
		Passes: c.Passes, Verified: c.Verify, Events: int64(len(t.Events)) * int64(c.Passes),
	}}
	r.total = 3 * r.result.Events
	if c.Verify {
		r.total += r.result.Events
	}
	start := time.Now()
	for _, run := range []struct {
		number int
		body   func(context.Context, *hal.Device) error
		wanted bool
	}{
		{Counted, r.counted, true},
		{Timed, r.timed, true},
		{Queued, r.queued, true},
		{QueueVerified, r.queueVerified, c.Verify},
	} {
		if !run.wanted {
			continue
		}
		r.run = run.number
		if err := r.onDevice(ctx, run.body); err != nil {
			return nil, err
		}
	}
	r.result.Took = time.Since(start)
	return r.result, nil
}

// runner is the state of one replay.
type runner struct {
	trace  *trace.Trace
	config Config
	result *Result

	run         int // the run in progress
	done, total int64
}

// closeTimeout bounds the closing of a device after an interrupt.
const closeTimeout = 5 * time.Second

// onDevice runs body on a device of its own and sees that it leaves nothing.
func (r *runner) onDevice(ctx context.Context, body func(context.Context, *hal.Device) error) error {
	dev, err := r.config.Open()
	if err != nil {
		return err
	}
	if err := body(ctx, dev); err != nil {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		_ = dev.Close(end) // reports what is live, of course
		return err
	}
	if _, err := dev.TrimWait(ctx, 0); err != nil {
		r.problem("trim: %v", err)
	}
	stats := dev.Stats()
	if source := stats.Source(); source.Held != 0 {
		r.problem("%s still holds %d bytes after everything was released and trimmed", source.Layer, int64(source.Held))
	}
	if err := dev.Close(ctx); err != nil {
		r.problem("close: %v", err)
	}
	return ctx.Err()
}

// mostProblems bounds the problems that are listed.
const mostProblems = 8

// problem records something that must not happen.
func (r *runner) problem(format string, args ...any) {
	if len(r.result.Problems) == mostProblems {
		r.result.Unlisted++
		return
	}
	r.result.Problems = append(r.result.Problems, RunNames[r.run]+" run: "+fmt.Sprintf(format, args...))
}

// refused records a request that failed.
func (r *runner) refused(err error) {
	r.result.FailedByRun[r.run]++
	if r.result.FirstError == nil {
		r.result.FirstError = err
	}
}

// notReleased records a release that failed. That of a buffer whose request was
// refused is none: its handle is the zero Buffer.
func (r *runner) notReleased(b hal.Buffer, id int32, err error) {
	if b == (hal.Buffer{}) && errors.Is(err, hal.ErrForeign) {
		return
	}
	r.problem("release of allocation %d: %v", id, err)
}

// chunkEvents is how many events pass between two looks at the context.
const chunkEvents = 1 << 10

// chunks calls body for one chunk of n events after the other, until ctx is done.
// Progress is reported unless quiet.
func (r *runner) chunks(ctx context.Context, n int, quiet bool, body func(from, to int)) error {
	for from := 0; from < n; from += chunkEvents {
		if err := ctx.Err(); err != nil {
			return err
		}
		to := min(from+chunkEvents, n)
		body(from, to)
		r.done += int64(to - from)
		if r.config.Progress != nil && !quiet {
			r.config.Progress(r.done, r.total)
		}
	}
	return nil
}
