package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/tools/halyard/internal/replay"
)

// report is what is printed of one input.
type report struct {
	job
	*replay.Result
	mutex float64 // nanoseconds
}

// print prints one report; errors of the run go to standard error in text.
func (a *app) print(r *report, f format, again bool) error {
	if f == formatJSON {
		return a.printJSON(r.json())
	}
	if again {
		fmt.Fprintln(a.stdout)
	}
	a.printText(r)
	if r.FirstError != nil {
		fmt.Fprintf(a.stderr, "halyard: %s: the first request that failed: %v\n", r.name, r.FirstError)
	}
	for _, p := range r.Problems {
		fmt.Fprintf(a.stderr, "halyard: %s: %s\n", r.name, p)
	}
	if r.Unlisted > 0 {
		fmt.Fprintf(a.stderr, "halyard: %s: and %s more\n", r.name, thousands(r.Unlisted))
	}
	return nil
}

func (a *app) printText(r *report) {
	p := a.painter()
	fmt.Fprintln(a.stdout, p.bold(r.name))
	g := grid{indent: "  "}
	what := fmt.Sprintf("%s on %s × %s", plural(len(r.trace.Events), "event"), plural(r.trace.Streams, "stream"), plural(r.Passes, "pass"))
	if r.generated != "" {
		what += ", generated with " + r.generated
	}
	g.row("trace", what)
	g.row("device", fmt.Sprintf("%s, %s", r.device, plural(r.Queues, "queue")))
	g.row("allocator", r.Allocator)
	if r.Modelled != "" {
		g.row("modelled", p.warn(r.Modelled))
	}
	g.write(a.stdout)

	fmt.Fprintln(a.stdout)
	a.printLayers(r)
	fmt.Fprintln(a.stdout)

	g = grid{indent: "  "}
	g.row("peak live", exact(r.PeakLive))
	g.row("peak held", fmt.Sprintf("%s, held/live %.3f", exact(r.PeakHeld), r.HeldOverLive()))
	cache, source := r.Cache(), r.Source()
	if total := cache.Hits + cache.Misses; total > 0 {
		g.row("cache", fmt.Sprintf("%s (%.2f %%), %s, of %s", plural(cache.Hits, "hit"), 100*float64(cache.Hits)/float64(total), plural(cache.Misses, "miss"), layerName(cache)))
		u := cache.Reused
		g.row("  reused", fmt.Sprintf("%s on the same queue, %s ordered, %s polled, %s with a wait",
			thousands(u[allocator.ReuseSame]), thousands(u[allocator.ReuseOrdered]), thousands(u[allocator.ReusePolled]), thousands(u[allocator.ReuseWait])))
	} else {
		g.row("cache", "none: no layer keeps memory")
	}
	calls := r.DriverCalls()
	g.row("driver calls", fmt.Sprintf("%s to take, %s to give back; %s, %s",
		thousands(source.SourceAllocs), thousands(source.SourceFrees), plural(source.Maps, "map"), plural(source.Unmaps, "unmap")))
	avoided := fmt.Sprintf("%s of %s", thousands(int64(r.Direct)-int64(calls)), thousands(r.Direct))
	if r.Passes > 1 {
		avoided += fmt.Sprintf("; made %s in the first pass, %s in the last",
			thousands(r.DriverCallsByPass[0]), thousands(r.DriverCallsByPass[r.Passes-1]))
	}
	g.row("  avoided", avoided)
	g.row("kept idle", r.Retained.Human()+" after the last pass")
	g.row("time", fmt.Sprintf("%s an event, as queue operation %s; M is %s", r.times(r.NSPerEvent), r.times(r.QueueNSPerEvent), ns(r.mutex)))
	g.row("failures", r.failures(p))
	g.row("checks", r.verdict(p))
	g.write(a.stdout)
}

// printLayers prints the table of statistics.
func (a *app) printLayers(r *report) {
	g := grid{indent: "  ", right: true, header: []string{"layer", "allocs", "frees", "failed", "peak live", "peak held", "idle", "hits", "misses", "evicted"}}
	for i := range r.Layers {
		l := &r.Layers[i]
		row := []string{layerName(l), thousands(l.Allocs), thousands(l.Frees), thousands(l.Failed), l.PeakLive.Human(), l.PeakHeld.Human(), l.Idle.Human()}
		for _, n := range []uint64{l.Hits, l.Misses, l.Evicted} {
			row = append(row, thousands(n))
		}
		g.row(row...)
	}
	g.write(a.stdout)
}

// layerName is a layer without its options, which stand in the stack.
func layerName(l *hal.LayerStats) string {
	name, _, _ := strings.Cut(l.Layer, ":")
	return name
}

func (r *report) failures(p painter) string {
	if r.Failed() == 0 {
		return "none"
	}
	var runs []string
	for i, n := range r.FailedByRun {
		if n > 0 {
			runs = append(runs, fmt.Sprintf("%s %s", replay.RunNames[i], thousands(n)))
		}
	}
	return p.bad(plural(r.Failed(), "request") + " failed (" + strings.Join(runs, ", ") + ")")
}

func (r *report) verdict(p painter) string {
	var bad []string
	if r.Overlaps > 0 {
		bad = append(bad, plural(r.Overlaps, "overlap"))
	}
	if r.LostBytes > 0 {
		bad = append(bad, plural(r.LostBytes, "lost byte"))
	}
	if n := len(r.Problems) + r.Unlisted; n > 0 {
		bad = append(bad, plural(n, "problem")+" in all")
	}
	switch {
	case len(bad) > 0:
		return p.bad(strings.Join(bad, ", "))
	case r.Verified:
		return p.good("no overlap, no lost byte, all memory given back")
	}
	return "all memory given back; buffers not checked (--verify)"
}

// printSummary is a line for each of several inputs.
func (a *app) printSummary(reports []*report) {
	fmt.Fprintln(a.stdout)
	g := grid{right: true, header: []string{"input", "events", "peak live", "held/live", "driver calls", "ns/event", "×M", "queue ns", "×M", "failed", "problems"}}
	for _, r := range reports {
		calls := uint64(0)
		for _, n := range r.DriverCallsByPass {
			calls += n
		}
		g.row(filepath.Base(r.name), thousands(r.Events), r.PeakLive.Human(), fmt.Sprintf("%.3f", r.HeldOverLive()), thousands(calls),
			fmt.Sprintf("%.1f", r.NSPerEvent), fmt.Sprintf("%.1f", r.NSPerEvent/r.mutex),
			fmt.Sprintf("%.1f", r.QueueNSPerEvent), fmt.Sprintf("%.1f", r.QueueNSPerEvent/r.mutex),
			thousands(r.Failed()), thousands(len(r.Problems)+r.Unlisted))
	}
	g.write(a.stdout)
	if modelled := reports[0].Modelled; modelled != "" {
		fmt.Fprintf(a.stdout, "modelled: %s\n", a.painter().warn(modelled))
	}
}

// times is a time an event, and its ratio to the mutex.
func (r *report) times(n float64) string { return fmt.Sprintf("%s (%.1f M)", ns(n), n/r.mutex) }

func ns(n float64) string { return fmt.Sprintf("%.1f ns", n) }

// exact is a size for people with the number of bytes.
func exact(n hal.Bytes) string {
	if n < hal.KiB {
		return n.Human()
	}
	return fmt.Sprintf("%s (%s bytes)", n.Human(), thousands(int64(n)))
}

func plural[T int | uint64](n T, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	if strings.HasSuffix(noun, "s") {
		noun += "e"
	}
	return thousands(n) + " " + noun + "s"
}

// painter colours text for a terminal, or leaves it as it is.
type painter bool

func (a *app) painter() painter {
	return painter(os.Getenv("NO_COLOR") == "" && isTerminal(a.stdout))
}

func (p painter) paint(code, text string) string {
	if !p {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (p painter) bold(text string) string { return p.paint("1", text) }
func (p painter) good(text string) string { return p.paint("32", text) }
func (p painter) warn(text string) string { return p.paint("33", text) }
func (p painter) bad(text string) string  { return p.paint("31", text) }
