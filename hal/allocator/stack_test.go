package allocator

import (
	"context"
	"errors"
	"flag"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// paper is a device of numbers only.
type paper struct {
	driver.Device
	memErr error
}

func (*paper) Info() driver.Info {
	return driver.Info{Name: "paper", Sources: []string{"raw"}, Heaps: memory.Heaps{{Name: "device", Capacity: 1000}}}
}
func (p *paper) MemInfo(int) (free, total memory.Bytes, err error) { return 100, 1000, p.memErr }

// bump is a source of capacity bytes, which frees when the frontier is reached.
type bump struct {
	mu       sync.Mutex
	slots    Slots[memory.Bytes]
	next     uint64
	capacity memory.Bytes
	pending  []pendingBytes
	stats    Stats
	refuse   Outcome
	closed   int
	err      error
}

func (s *bump) Allocate(r Request) (Block, queue.Frontier, Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drainLocked()
	if s.refuse != OK {
		return Block{}, queue.Frontier{}, s.refuse
	}
	if s.stats.Held+r.Size > s.capacity {
		s.stats.Failed++
		return Block{}, queue.Frontier{}, Exhausted
	}
	s.next += 1 << 20
	s.stats.Held += r.Size
	s.stats.Live += r.Size
	s.stats.Allocs++
	i := s.slots.NewLocked()
	s.slots.At(i).Value = r.Size
	return s.slots.MintLocked(i, s.next, r.Size, &r, queue.ReadyNow()), queue.ReadyNow(), OK
}

func (s *bump) drainLocked() (n memory.Bytes) {
	kept := s.pending[:0]
	for _, p := range s.pending {
		if p.after.Reached() {
			s.stats.Held -= p.size
			n += p.size
		} else {
			kept = append(kept, p)
		}
	}
	s.pending = kept
	return n
}

func (s *bump) Free(b Block, after queue.Frontier) Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, f, o := s.slots.TakeLocked(b, after)
	if o != OK {
		return o
	}
	size := s.slots.At(i).Value
	s.slots.DropLocked(i)
	s.stats.Live -= size
	s.pending = append(s.pending, pendingBytes{f, size})
	s.drainLocked()
	return OK
}

func (s *bump) Trim(memory.Bytes) memory.Bytes {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.drainLocked()
}

func (s *bump) Pending(yield func(queue.Frontier, memory.Bytes) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.pending {
		if !yield(p.after, p.size) {
			return
		}
	}
}

func (s *bump) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	for _, p := range s.pending {
		st.Pending += p.size
	}
	return st
}
func (s *bump) Live(yield func(Block, Info) bool) { s.slots.Live(yield) }
func (s *bump) LastError() error                  { return s.err }
func (s *bump) Close() error                      { s.closed++; return nil }

// hoard keeps every block and hands it out again with the handle it had, and
// forgets when it was freed: a layer that knows nothing of time.
type hoard struct {
	Allocator
	mu   sync.Mutex
	free []Block
}

func (h *hoard) Allocate(r Request) (Block, queue.Frontier, Outcome) {
	h.mu.Lock()
	for i, b := range h.free {
		if b.Size >= r.Size {
			h.free = append(h.free[:i], h.free[i+1:]...)
			h.mu.Unlock()
			return b, queue.Frontier{}, OK
		}
	}
	h.mu.Unlock()
	return h.Allocator.Allocate(r)
}

func (h *hoard) Free(b Block, _ queue.Frontier) Outcome {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.free = append(h.free, b)
	return OK
}

func (h *hoard) Trim(memory.Bytes) (n memory.Bytes) {
	h.mu.Lock()
	free := h.free
	h.free = nil
	h.mu.Unlock()
	for _, b := range free {
		n += b.Size
		h.Allocator.Free(b, queue.Frontier{})
	}
	return n
}

func (h *hoard) Stats() Stats { return Stats{} }
func (h *hoard) Close() error { h.Trim(0); return nil }

func table(name string, options ...spec.Option) *spec.Table {
	return &spec.Table{Name: name, Summary: "a layer of the tests", Options: options}
}

type fixture struct {
	registry *Registry
	env      *Env
	source   *bump
}

func newFixture() *fixture {
	x := &fixture{registry: &Registry{}, source: &bump{capacity: 1000}}
	x.env = &Env{Owner: x, Device: &paper{}, Heaps: (&paper{}).Info().Heaps}
	x.source.slots.Init(&x.source.mu, x, 0)
	x.registry.MustRegister(
		Layer{Table: table("raw"), Source: true, Mints: true,
			New: func(Allocator, *Env, *spec.Values) (Allocator, error) { return x.source, nil }},
		Layer{Table: table("hoard", spec.Option{Name: "n", Kind: spec.Count, Default: "1", Help: "a number"}),
			New: func(base Allocator, _ *Env, v *spec.Values) (Allocator, error) {
				if v.Count("n") == 13 {
					return nil, errors.New("bad luck")
				}
				return &hoard{Allocator: base}, nil
			}},
		Mint)
	return x
}

func (x *fixture) build(t testing.TB, specs ...string) *Stack {
	s, err := x.registry.Build(x.env, specs...)
	require.NoError(t, err)
	return s
}

func TestBuildPutsASourceUnderAndAMintOver(t *testing.T) {
	x := newFixture()
	require.Equal(t, "raw", x.build(t, "raw").String())
	require.Equal(t, "raw+hoard+mint", x.build(t, "hoard").String())
	require.Equal(t, "raw+hoard:n=2+hoard+mint", x.build(t, "hoard:n=2", "hoard:n=1").String())
	s := x.build(t, "raw+hoard:n=2")
	require.Equal(t, s.String(), x.build(t, s.String()).String(), "the effective stack reads back")
}

func TestBuildErrorsShowThePlace(t *testing.T) {
	x := newFixture()
	for text, want := range map[string]string{
		"raw+hord":       "unknown allocator \"hord\"",
		"raw+hoard:m=1":  "^",
		"hoard+raw":      "it must be the first layer",
		"raw+hoard:n=13": "bad luck",
		"raw+":           "^",
	} {
		_, err := x.registry.Build(x.env, text)
		require.ErrorContains(t, err, want, text)
	}
	_, err := x.registry.Build(x.env, "raw+hord")
	require.ErrorContains(t, err, "did you mean \"hoard\"")
	var help *HelpRequest
	_, err = x.registry.Build(x.env, "help")
	require.ErrorAs(t, err, &help)
	require.Contains(t, help.Error(), "hoard")
	_, err = x.registry.Build(x.env, "hoard:help")
	require.ErrorAs(t, err, &help)
	require.Contains(t, help.Error(), "a number")
}

func TestRegistryRefusesWhatItCantUse(t *testing.T) {
	x := newFixture()
	require.ErrorContains(t, x.registry.Register(Layer{}), "without a table")
	require.ErrorContains(t, x.registry.Register(Mint), "registered already")
	bad := Layer{Table: &spec.Table{Name: "x"}, New: Mint.New}
	require.Error(t, x.registry.Register(bad), "a table without a summary")
}

func TestTheFlag(t *testing.T) {
	x := newFixture()
	f := x.registry.Flag()
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	fs.SetOutput(new(strings.Builder))
	fs.Var(f, "device_allocator", f.Usage())
	require.NoError(t, fs.Parse([]string{"-device_allocator=raw", "-device_allocator=hoard:n=2+hoard"}))
	specs, err := f.Specs()
	require.NoError(t, err)
	require.Equal(t, []string{"raw", "hoard:n=2+hoard"}, specs)
	require.Equal(t, "raw+hoard:n=2+hoard", f.String())
	require.Error(t, fs.Parse([]string{"-device_allocator=nope"}))

	t.Setenv(EnvironmentVariable, "raw+hoard")
	specs, err = f.Specs()
	require.NoError(t, err)
	require.Len(t, specs, 2, "the flag wins")
	specs, err = x.registry.Flag().Specs()
	require.NoError(t, err)
	require.Equal(t, []string{"raw+hoard"}, specs)
	t.Setenv(EnvironmentVariable, "bogus")
	_, err = x.registry.Flag().Specs()
	require.ErrorContains(t, err, EnvironmentVariable)
}

func TestALayerThatIgnoresTimeIsSlowNeverWrong(t *testing.T) {
	x := newFixture()
	s := x.build(t, "raw+hoard")
	q, step := manualQueue(t)
	ctx := context.Background()
	r := Request{Size: 600, Who: Who{Queue: q.ID()}} // the base has no room for another
	b, _, err := s.Allocate(ctx, r)
	require.NoError(t, err)
	p := submit(t, q)
	require.Equal(t, OK, s.Top().Free(b, queue.After(p)))
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	_, _, err = s.Allocate(short, r)
	require.ErrorIs(t, err, context.DeadlineExceeded, "not handed out while in use")
	go func() { time.Sleep(time.Millisecond); step() }()
	c, f, err := s.Allocate(ctx, r)
	require.NoError(t, err)
	require.True(t, p.Reached())
	require.True(t, f.Reached())
	require.Equal(t, b.Addr, c.Addr)
	require.Equal(t, Stale, s.Top().Free(b, queue.ReadyNow()), "the old handle of the same block")
	require.Equal(t, OK, s.Top().Free(c, queue.ReadyNow()))
}

func TestTheLadderTrimsThenWaitsThenAsks(t *testing.T) {
	x := newFixture()
	s := x.build(t, "raw+hoard")
	ctx := context.Background()
	b, _, err := s.Allocate(ctx, Request{Size: 600})
	require.NoError(t, err)
	require.Equal(t, OK, s.Top().Free(b, queue.ReadyNow()))
	b, _, err = s.Allocate(ctx, Request{Size: 900}) // 600 idle in the hoard
	require.NoError(t, err, "idle memory never stands in the way")

	q, step := manualQueue(t)
	p := submit(t, q)
	require.Equal(t, OK, s.Top().Free(b, queue.After(p)))
	go func() { time.Sleep(time.Millisecond); step() }()
	b, _, err = s.Allocate(ctx, Request{Size: 950})
	require.NoError(t, err, "what is pending and issued is waited for")

	remove := s.OnPressure(func(_ context.Context, want memory.Bytes) memory.Bytes {
		require.EqualValues(t, 500, want)
		_, _, err := s.Allocate(ctx, Request{Size: 800}) // would recurse
		require.ErrorIs(t, err, ErrOutOfMemory)
		require.Equal(t, OK, s.Top().Free(b, queue.ReadyNow()))
		return 950
	})
	c, _, err := s.Allocate(ctx, Request{Size: 500})
	require.NoError(t, err)
	remove()
	_, _, err = s.Allocate(ctx, Request{Size: 800})
	require.ErrorIs(t, err, ErrOutOfMemory)
	require.Equal(t, OK, s.Top().Free(c, queue.ReadyNow()))
	c, _, err = s.Allocate(ctx, Request{Size: 1000})
	require.NoError(t, err, "usable at once after an OOM")
	require.Equal(t, OK, s.Top().Free(c, queue.ReadyNow()))
}

func TestAnOOMSaysWhy(t *testing.T) {
	x := newFixture()
	s := x.build(t, "raw")
	s.SetUnsent(func() memory.Bytes { return 5 })
	ctx := context.Background()
	b, _, err := s.Allocate(ctx, Request{Size: 600})
	require.NoError(t, err)
	x.source.err = errors.New("CUDA_ERROR_OUT_OF_MEMORY (2)")
	_, _, err = s.Allocate(ctx, Request{Size: 500, Kind: MakeKind(0, 4096, 0, 0, 0), Who: Who{Tag: InternTag("kv")}})
	var oom *OOMError
	require.ErrorAs(t, err, &oom)
	require.ErrorIs(t, err, ErrOutOfMemory)
	require.ErrorIs(t, err, x.source.err)
	require.EqualValues(t, 500, oom.Asked)
	require.EqualValues(t, 600, oom.Live)
	require.EqualValues(t, 600, oom.Held)
	require.EqualValues(t, 5, oom.Unsignalled)
	require.EqualValues(t, 100, oom.DriverFree)
	require.Equal(t, "kv", oom.Tag)
	require.Equal(t, "poll", oom.Rungs[0].Name)
	text := err.Error()
	require.LessOrEqual(t, strings.Count(text, "\n"), 20)
	lines := strings.Split(text, "\n")
	require.Contains(t, lines[len(lines)-1], "advice: full")

	x.env.Device.(*paper).memErr = errors.New("no answer")
	_, _, err = s.Allocate(ctx, Request{Size: 500})
	require.ErrorContains(t, err, "driver: unknown free of unknown")
	x.source.refuse = OverLimit
	_, _, err = s.Allocate(ctx, Request{Size: 500})
	require.ErrorContains(t, err, "advice: capped")
	x.source.refuse = TooLarge
	_, _, err = s.Allocate(ctx, Request{Size: 500})
	require.ErrorIs(t, err, ErrTooLarge)
	require.NotErrorIs(t, err, ErrOutOfMemory)
	require.Equal(t, OK, s.Top().Free(b, queue.ReadyNow()))
}

func TestTheLadderEndsWithItsContext(t *testing.T) {
	x := newFixture()
	s := x.build(t, "raw")
	q, _ := manualQueue(t)
	b, _, err := s.Allocate(context.Background(), Request{Size: 900})
	require.NoError(t, err)
	require.Equal(t, OK, s.Top().Free(b, queue.After(submit(t, q))))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Millisecond)
	defer cancel()
	_, _, err = s.Allocate(ctx, Request{Size: 900})
	require.ErrorIs(t, err, ErrOutOfMemory)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "advice: memory enough is pending")
}

func TestTheLadderDoesNotWaitOnALostQueueForever(t *testing.T) {
	x := newFixture()
	s := x.build(t, "raw")
	q, _ := manualQueue(t)
	b, _, err := s.Allocate(context.Background(), Request{Size: 900})
	require.NoError(t, err)
	require.Equal(t, OK, s.Top().Free(b, queue.After(submit(t, q))))
	q.Lose(errors.New("gone"))
	_, _, err = s.Allocate(context.Background(), Request{Size: 900})
	require.ErrorIs(t, err, ErrLost)
	q.Abandon()
}

func TestCloseAndTrim(t *testing.T) {
	x := newFixture()
	s := x.build(t, "raw+hoard")
	ctx := context.Background()
	q, step := manualQueue(t)
	b, _, err := s.Allocate(ctx, Request{Size: 300})
	require.NoError(t, err)
	require.Equal(t, OK, s.Top().Free(b, queue.After(submit(t, q))))
	n, err := s.Trim(ctx, 0, false)
	require.NoError(t, err)
	require.Zero(t, n)
	go step()
	n, err = s.Trim(ctx, 0, true)
	require.NoError(t, err)
	require.EqualValues(t, 300, n)
	b, _, err = s.Allocate(ctx, Request{Size: 300})
	require.NoError(t, err)
	leaks := 0
	s.FreeLive(func(_ Block, i Info) { leaks++; require.EqualValues(t, 300, i.Asked) })
	require.Equal(t, 1, leaks)
	require.Equal(t, Stale, s.Top().Free(b, queue.ReadyNow()))
	require.Zero(t, s.Source().Held)
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.Equal(t, 1, x.source.closed)
}

type finder interface{ Find() int }
type found struct{ Allocator }

func (found) Find() int { return 7 }

type passing struct{ Allocator }

func (p passing) Pass(capability any) Allocator {
	if _, hide := capability.(*LastErrorer); hide {
		return nil
	}
	return p.Allocator
}

func TestCapabilitiesPassOnlyWhereALayerLetsThem(t *testing.T) {
	base := found{&bump{}}
	f, ok := As[finder](passing{passing{base}})
	require.True(t, ok)
	require.Equal(t, 7, f.Find())
	_, ok = As[finder](passing{&hoard{Allocator: base}})
	require.False(t, ok, "a layer that says nothing hides everything")
	_, ok = As[LastErrorer](passing{&bump{}})
	require.False(t, ok)
}
