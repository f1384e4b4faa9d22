package haltest

import (
	"context"
	"errors"

	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/memory"
)

// Progress draws a program of queue operations, runs it where memory is plentiful
// and no wait is ever added, and again where memory is short and every alloca may be
// made to wait for memory in use. If the first run finishes, the second must: a
// runtime that adds waits must not make a deadlock of them. It holds because every
// wait that is added points backwards in the order of issue.
func Progress(t *rapid.T, s Setup) {
	if s.Stack == nil {
		s.Stack = Stacks
	}
	if s.Allocators == nil {
		s.Allocators = hal.Allocators
	}
	p := drawProgram(t)
	stack := s.Stack(t)
	seed := rapid.Uint64().Draw(t, "seed")
	plenty := Config{Seed: seed, Capacity: 64 << 20, Queues: p.queues, Granularity: 4 << 10}
	if !p.run(t, s, stack, plenty, 0) {
		return // it waits for itself
	}
	short := plenty
	short.Capacity = memory.Bytes(rapid.SampledFrom([]int{64 << 10, 128 << 10, 512 << 10}).Draw(t, "capacity"))
	if !p.run(t, s, stack, short, hal.MayWait) {
		t.Fatalf("%s: the program finishes with plenty of memory, and not with %v and waits added", stack, short.Capacity)
	}
}

// program is a list of operations over some queues, semaphores and buffers.
type program struct {
	queues, semaphores int
	ops                []operand
}

// operand is one operation. A buffer is the number of the alloca that made it.
type operand struct {
	kind         string
	queue        int
	size         memory.Bytes
	buffer       int
	wait, signal []promise
}

type promise struct {
	semaphore int
	value     uint64
}

func drawProgram(t *rapid.T) *program {
	p := &program{
		queues:     rapid.IntRange(2, 4).Draw(t, "queues"),
		semaphores: rapid.IntRange(1, 3).Draw(t, "semaphores"),
	}
	given := make([]uint64, p.semaphores)
	var live []int
	for i := range rapid.IntRange(1, 40).Draw(t, "operations") {
		o := operand{queue: rapid.IntRange(0, p.queues-1).Draw(t, "queue"), buffer: -1}
		if rapid.IntRange(0, 3).Draw(t, "waits") == 3 {
			k := rapid.IntRange(0, p.semaphores-1).Draw(t, "wait")
			o.wait = []promise{{k, given[k] + uint64(rapid.IntRange(0, 2).Draw(t, "ahead"))}}
		}
		if rapid.IntRange(0, 2).Draw(t, "signals") == 2 {
			k := rapid.IntRange(0, p.semaphores-1).Draw(t, "signal")
			given[k]++
			o.signal = []promise{{k, given[k]}}
		}
		switch kind := rapid.SampledFrom([]string{"alloca", "fill", "dealloca", "dealloca"}).Draw(t, "kind"); {
		case kind == "alloca" || len(live) == 0:
			o.kind, o.buffer = "alloca", i
			o.size = memory.Bytes(rapid.SampledFrom([]int{4 << 10, 20 << 10, 60 << 10}).Draw(t, "size"))
			live = append(live, i)
		default:
			o.kind = kind
			k := rapid.IntRange(0, len(live)-1).Draw(t, "buffer")
			o.buffer = live[k]
			if kind == "dealloca" {
				live = append(live[:k], live[k+1:]...)
			}
		}
		p.ops = append(p.ops, o)
	}
	return p
}

// run runs the program and reports whether every operation finished.
func (p *program) run(t *rapid.T, s Setup, stack string, c Config, reuse hal.Reuse) bool {
	sim, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	dev, err := hal.OpenDriver(sim, hal.WithAllocator(stack), hal.WithAllocators(s.Allocators))
	if err != nil {
		_ = sim.Close()
		t.Fatalf("%s: %v", stack, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	sems := make([]*hal.Semaphore, p.semaphores)
	for i := range sems {
		sems[i] = hal.NewSemaphore(0)
	}
	fence := func(list []promise) (f hal.Fence) {
		for _, x := range list {
			f.Add(sems[x.semaphore], x.value)
		}
		return f
	}
	type made struct {
		buffer hal.Buffer
		home   *hal.Queue
		born   *hal.Semaphore
		used   hal.Fence // by fills, which a release must come after
	}
	buffers := map[int]*made{}
	for _, o := range p.ops {
		q, wait, signal := dev.Queue(o.queue), fence(o.wait), fence(o.signal)
		b, ok := buffers[o.buffer]
		switch {
		case o.kind == "alloca":
			born := hal.NewSemaphore(0)
			b, aerr := q.Alloca(ctx, hal.Params{Size: o.size, Reuse: reuse}, wait, signal.And(born.At(1)))
			if errors.Is(aerr, hal.ErrOutOfMemory) && ctx.Err() == nil {
				err = q.Barrier(wait, signal) // the program goes on without the buffer
				break
			}
			buffers[o.buffer] = &made{b, q, born, nil}
			err = aerr
		case !ok:
			err = q.Barrier(wait, signal)
		case o.kind == "fill":
			if b.home != q {
				wait = wait.And(b.born.At(1))
			}
			used := hal.NewSemaphore(0)
			b.used.Add(used, 1)
			err = q.Fill(b.buffer.All(), []byte{1}, wait, signal.And(used.At(1)))
		default:
			err = q.Dealloca(b.buffer, wait.And(b.used), signal)
			delete(buffers, o.buffer)
		}
		t.Logf("  %s of %d on queue %d after %v, giving %v: %v", o.kind, o.buffer, o.queue, wait, signal, err)
		if err != nil {
			t.Fatalf("%s: %s on queue %d: %v", stack, o.kind, o.queue, err)
		}
	}
	sim.Run()
	finished := len(sim.Stuck()) == 0
	if err := sim.Monitor().Err(); err != nil {
		t.Fatalf("%s: %v", stack, err)
	}
	for _, s := range sems {
		if _, err := s.Query(); err != nil {
			t.Fatalf("%s: an operation of a program without a fault failed: %v", stack, err)
		}
		_ = s.Signal(1 << 40)
	}
	sim.Run()
	for _, b := range buffers {
		if err := b.buffer.Release(); err != nil {
			t.Fatalf("%s: %v", stack, err)
		}
	}
	if err := dev.Close(ctx); err != nil {
		t.Fatalf("%s: close: %v", stack, err)
	}
	return finished
}
