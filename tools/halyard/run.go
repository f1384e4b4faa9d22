package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/internal/workload"
	"github.com/halyard-go/halyard/tools/halyard/internal/replay"
)

// runOptions are the flags of run.
type runOptions struct {
	device string
	stack  *allocator.Flag
	queues int
	passes int
	verify bool
	seed   uint64
	scale  int
	list   bool
	format *format
}

func (a *app) runCommand() *cobra.Command {
	o := runOptions{stack: a.allocators.Flag()}
	c := &cobra.Command{
		Use:   "run [flags] INPUT...",
		Short: "Replay traces and workloads through a stack of allocators",
		Long: `run replays each INPUT through a device and its stack of allocators, and says
what it took. An INPUT is the name of a built-in workload (--list), the path of
a trace, text or gzip (.trace, .trace.gz), or - for a trace on standard input. A
trace has one event a line: "a ID BYTES [STREAM]" allocates, "f ID [STREAM]"
frees, a line that begins with "#" is a comment. Numbers are decimal, BYTES has
no unit, an ID is used once in a trace, STREAM is 0 to 4095 and 0 if absent. (For
a file called like a workload write ./NAME.)

What is run. Each INPUT is replayed several times, each on a freshly opened
device:
  counted         allocate and release on one queue; all counts, peaks and
                  statistics are of this run
  timed           the same without any bookkeeping; its last pass is timed
  queued          alloca and dealloca as queue operations, stream S on queue
                  S mod N; its last pass is timed until the queues have drained
  queue-verified  the queued run with every buffer checked, only with --verify
A pass is the whole trace; at its end what is still live is released, which counts
as frees and not as events. A request that fails is counted, and its free skipped.

--verify keeps a map of which addresses are live and marks both ends of every
buffer by queue operations: a buffer over another one, or a marked byte that has
changed, is a failure.

What is reported.
  peak live     most bytes asked for at one time, by what was served
  peak held     most bytes taken from the driver at one time
  cache         requests that the outermost layer that keeps memory served from
                what it had (hits) and from below (misses)
  driver calls  that took and gave memory, and those that mapped and unmapped
                pages; avoided is how many fewer all of them are than one for
                every allocation and every release
  time          nanoseconds an event (one allocation or one free) of the last
                pass, handles included; parsing, opening, checking and the
                release of what is left excluded. M is an uncontended lock and
                unlock of a mutex in the same process: compare machines by it
Counts are totals over all passes. Layers are listed outermost first, their
figures are those after the last pass; "failed" in a layer's line counts each
search it could not serve, also where trimming and asking again then did.

--format=json prints one object a line for each INPUT, sizes in bytes, times in
nanoseconds. "events" counts the events of the trace times the passes; "failed"
the requests refused, by the run that refused most (the counted run's allocs and
failed are all requests); "ok" is what the exit code says.

Exit codes: 0 all was served and nothing was found wrong; 1 a request failed, a
buffer overlapped or lost a byte, or memory was not given back; 2 usage, or an
INPUT or device that can't be opened (then nothing is run); 130 interrupted.

Environment: ` + allocator.EnvironmentVariable + ` is the stack where the flag is not
given, layers joined by '+'. NO_COLOR turns colours off.`,
		Example: `  halyard run --list
  halyard run llama3-8b
  halyard run --passes=2 --verify resnet50-train serving.trace.gz
  halyard run --device=host:capacity=24GiB --device_allocator=vmm --device_allocator=block llama3-8b
  halyard run --device_allocator='raw+caching:device_local=1GiB;4GiB;64' --format=json *.trace`,
	}
	f := c.Flags()
	f.StringVar(&o.device, "device", "host", "device, as NAME[:OPTIONS]; \"help\" lists them, NAME:help its options")
	f.Var(o.stack, "device_allocator", o.stack.Usage())
	f.IntVar(&o.queues, "queues", 0, "queues to open (default: the device's, or one for each stream if that is more, as far as the device has as many)")
	f.IntVar(&o.passes, "passes", 1, "how often each INPUT is replayed; caches stay warm between passes")
	f.BoolVar(&o.verify, "verify", false, "check every buffer for overlap and lost bytes")
	f.Uint64Var(&o.seed, "seed", 0, "seed of built-in workloads")
	f.IntVar(&o.scale, "scale", 1, fmt.Sprintf("length of built-in workloads, 1 to %d", workload.MaxScale))
	f.BoolVar(&o.list, "list", false, "list the built-in workloads and do nothing else")
	f.SortFlags = false
	o.format = formatFlag(c, "text for people, or json")
	c.RunE = func(c *cobra.Command, args []string) error {
		if o.list {
			return a.listWorkloads(&o)
		}
		return a.replay(c, &o, args)
	}
	return c
}

// check refuses values that no run can have.
func (o *runOptions) check(c *cobra.Command) error {
	switch {
	case o.passes < 1:
		return usage(c.CommandPath(), "--passes=%d: at least 1 is wanted", o.passes)
	case c.Flags().Changed("queues") && o.queues < 1:
		return usage(c.CommandPath(), "--queues=%d: at least 1 is wanted", o.queues)
	case o.scale < 1 || o.scale > workload.MaxScale:
		return usage(c.CommandPath(), "--scale=%d: 1 to %d is wanted", o.scale, workload.MaxScale)
	}
	return nil
}

// listWorkloads prints the built-in workloads.
func (a *app) listWorkloads(o *runOptions) error {
	g := grid{}
	for _, w := range workload.List() {
		g.row(w.Name, w.Summary)
		if *o.format != formatJSON {
			continue
		}
		if err := a.printJSON(struct {
			Name    string `json:"name"`
			Summary string `json:"summary"`
			Source  string `json:"source"`
		}{w.Name, w.Summary, w.Source}); err != nil {
			return err
		}
	}
	if *o.format == formatText {
		g.write(a.stdout)
	}
	return nil
}

// job is one input, ready to be run.
type job struct {
	input
	device string // spec of the device to open
}

// replay is the run command. Everything that can be wrong with the command line
// is found before anything is run.
func (a *app) replay(c *cobra.Command, o *runOptions, args []string) error {
	if err := o.check(c); err != nil {
		return err
	}
	device, err := a.parseDevice(o.device)
	if err != nil {
		return err
	}
	specs, err := o.stack.Specs()
	if err != nil {
		return err
	}
	if len(args) == 0 {
		return usage(c.CommandPath(), "no INPUT: name a trace file or a built-in workload (%s)", strings.Join(workloadNames(), ", "))
	}
	if c.Flags().Changed("queues") {
		if err := device.setQueues(c, o.queues); err != nil {
			return err
		}
	}
	inputs, err := a.load(c.Context(), args, workload.Options{Seed: o.seed, Scale: o.scale})
	if err != nil {
		return err
	}
	open := func(device string) (*hal.Device, error) {
		return hal.Open(device, hal.WithDrivers(a.drivers), hal.WithAllocators(a.allocators), hal.WithAllocator(specs...))
	}
	var jobs []job
	for _, in := range inputs {
		jobs = append(jobs, job{in, device.forStreams(in.trace.Streams)})
	}
	for i, j := range jobs {
		if i > 0 && j.device == jobs[i-1].device {
			continue
		}
		dev, err := open(j.device)
		if err != nil {
			return err
		}
		if err := dev.Close(c.Context()); err != nil {
			return err
		}
	}
	return a.runJobs(c.Context(), o, jobs, open)
}

func (a *app) runJobs(ctx context.Context, o *runOptions, jobs []job, open func(string) (*hal.Device, error)) error {
	var reports []*report
	for i, j := range jobs {
		m := a.meter(j.name)
		res, err := replay.Run(ctx, j.trace, replay.Config{
			Open:     func() (*hal.Device, error) { return open(j.device) },
			Passes:   o.passes,
			Verify:   o.verify,
			Progress: m.progress,
		})
		m.clear()
		if err != nil {
			return err
		}
		r := &report{job: j, Result: res, mutex: replay.MutexNS()}
		a.failed = a.failed || !res.OK()
		if err := a.print(r, *o.format, i > 0); err != nil {
			return err
		}
		reports = append(reports, r)
	}
	if *o.format == formatText && len(reports) > 1 {
		a.printSummary(reports)
	}
	return nil
}
