package allocator

import (
	"context"
	"errors"
	"time"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// A Rung is one step that the ladder took, and what it gained.
type Rung struct {
	Name   string        `json:"name"`
	Gained memory.Bytes  `json:"gained_bytes"` // given back to the driver, or made ready to be reused
	Took   time.Duration `json:"took_ns"`
}

// The rungs, in order.
const (
	rungPoll = iota
	rungTrim
	rungWait
	rungReclaim
	rungCount
)

var rungNames = [rungCount]string{"poll", "trim", "wait", "reclaim"}

// Reclaimer is a function that gives memory back when the stack has none left: it
// empties a cache outside Halyard, say, or releases buffers of this stack that it can
// do without. want is the size of the whole request. It returns how many bytes it
// freed, of either kind; what was released on a queue is waited for. As long as that
// is more than 0 and the request still fails it is called again, up to 64 times in
// all; with 0 the next one is called. It is called without locks; what it allocates
// itself does not call reclaimers again.
type Reclaimer func(ctx context.Context, want memory.Bytes) memory.Bytes

// OnPressure registers f and returns a function that takes it away.
func (s *Stack) OnPressure(f Reclaimer) (remove func()) {
	edit := func(change func([]*Reclaimer) []*Reclaimer) {
		for {
			old := s.reclaimers.Load()
			var list []*Reclaimer
			if old != nil {
				list = append(list, *old...)
			}
			list = change(list)
			if s.reclaimers.CompareAndSwap(old, &list) {
				return
			}
		}
	}
	edit(func(l []*Reclaimer) []*Reclaimer { return append(l, &f) })
	return func() {
		edit(func(l []*Reclaimer) []*Reclaimer {
			kept := l[:0]
			for _, r := range l {
				if r != &f {
					kept = append(kept, r)
				}
			}
			return kept
		})
	}
}

// Allocate serves r, walking the ladder if the layers can't. The frontier is usable
// by r.Queue, or r allows a wait and the caller adds it. ctx bounds the waits; the
// ladder never waits for work that was not issued. The error is an [*OOMError], or
// says why no amount of memory would do.
func (s *Stack) Allocate(ctx context.Context, r Request) (Block, queue.Frontier, error) {
	r.Kind |= s.policy
	if most := s.Most(r.Kind.Heap()); most > 0 && r.Size > most {
		return s.Slow(ctx, r, Block{}, queue.Frontier{}, TooLarge)
	}
	b, f, o := s.top.Allocate(r)
	if o == OK && r.Reuse(f) != ReuseNo {
		return b, f, nil
	}
	return s.Slow(ctx, r, b, f, o)
}

// Slow goes on where the top layer's Allocate did not give a block that can be
// used at once. It is for callers that ask the top layer themselves.
func (s *Stack) Slow(ctx context.Context, r Request, b Block, f queue.Frontier, o Outcome) (Block, queue.Frontier, error) {
	if s.closed.Load() {
		if o == OK {
			s.top.Free(b, f)
		}
		return Block{}, queue.Frontier{}, ErrClosed
	}
	l := ladder{Stack: s, ctx: ctx, r: r}
	for {
		switch o {
		case OK:
			return l.settle(b, f)
		case NeedsWait, OverLimit, Exhausted:
		default:
			return Block{}, queue.Frontier{}, s.refusal(r, o)
		}
		l.outcome = o
		if o == NeedsWait {
			l.wish = f
		}
		if !l.climb() {
			if errors.Is(l.cause, ErrLost) {
				return Block{}, queue.Frontier{}, l.cause
			}
			return Block{}, queue.Frontier{}, s.oom(&l)
		}
		b, f, o = s.top.Allocate(r)
	}
}

// ladder is one walk. Each call of climb does something that may have helped, or
// says that nothing is left to try; the caller then searches the whole stack again.
type ladder struct {
	*Stack
	ctx     context.Context
	r       Request
	outcome Outcome
	wish    queue.Frontier // what a layer said would help
	rung    int
	layer   int // next to trim, counted from the outermost
	waits   []pendingBytes
	rounds  int
	again   int  // asked again because memory was on its way
	swept   bool // trimmed since anything was pending
	called  int  // reclaimers that have nothing more to give
	asked   int  // calls of reclaimers
	back    bool // to the wait: a reclaimer released something
	rungs   []Rung
	cause   error
}

// maxAgain bounds how often one walk asks again because memory is on its way: for
// some tens of milliseconds.
const maxAgain = 64

// maxRounds bounds how often the ladder looks for new pending frees: others may
// free and take while it waits.
const maxRounds = 8

func (l *ladder) climb() bool {
	if l.back {
		l.back = false
		l.rung, l.rounds, l.waits, l.swept = rungWait, 0, nil, false
	}
	for ; l.rung < rungCount; l.rung++ {
		start := l.env.now()
		gained, more := l.step()
		if more {
			l.note(gained, l.env.now().Sub(start))
			return true
		}
	}
	return false
}

func (l *ladder) note(gained memory.Bytes, took time.Duration) {
	l.rungsWalked[l.rung].Add(1)
	if n := len(l.rungs); n > 0 && l.rungs[n-1].Name == rungNames[l.rung] {
		l.rungs[n-1].Gained += gained
		l.rungs[n-1].Took += took
		return
	}
	l.rungs = append(l.rungs, Rung{rungNames[l.rung], gained, took})
}

// step does the next thing on the present rung. more = false: the rung is done.
func (l *ladder) step() (gained memory.Bytes, more bool) {
	switch l.rung {
	case rungPoll:
		if l.layer < 0 {
			return 0, false
		}
		before := l.pendingNow()
		queue.Poll()
		l.layer = -1
		return max(0, before-l.pendingNow()), true
	case rungTrim:
		if l.layer < 0 {
			l.layer = 0
		}
		for l.layer < len(l.layers) {
			a := l.layers[len(l.layers)-1-l.layer]
			l.layer++
			if gained := a.Trim(0); gained > 0 {
				return gained, true
			}
		}
		return 0, false
	case rungWait:
		return l.wait()
	}
	return l.reclaim()
}

// wait waits for the oldest pending free, then trims, so that what was waited for
// gets to where it is needed.
func (l *ladder) wait() (memory.Bytes, bool) {
	wish := l.wish
	l.wish = queue.Frontier{}
	switch {
	case wish.Unknown():
	case !wish.Reached():
		l.waits = append([]pendingBytes{{wish, 0}}, l.waits...)
	case l.again < maxAgain && l.ctx.Err() == nil:
		// Memory is on its way between layers: another call moves it or gives it back.
		l.again++
		time.Sleep(min(time.Duration(l.again)*20*time.Microsecond, time.Millisecond))
		return 0, true
	}
	if len(l.waits) == 0 {
		if l.rounds++; l.rounds > maxRounds {
			return 0, false
		}
		if l.waits = l.pending(); len(l.waits) == 0 {
			if l.swept {
				return 0, false
			}
			l.swept = true // what was pending a moment ago may be idle by now
			return l.trim(0), true
		}
	}
	l.swept = false
	p := l.waits[0]
	l.waits = l.waits[1:]
	if err := p.after.Wait(l.ctx); err != nil {
		l.cause = err
		return 0, false
	}
	l.trim(0)
	return p.size, true
}

// maxReclaims bounds the calls of reclaimers in one walk.
const maxReclaims = 64

func (l *ladder) reclaim() (memory.Bytes, bool) {
	list := l.reclaimers.Load()
	if list == nil || l.called >= len(*list) || l.asked >= maxReclaims || l.ctx.Err() != nil {
		return 0, false
	}
	if !l.reclaiming.CompareAndSwap(false, true) {
		return 0, false // asked by a reclaimer, or beside one: fail rather than recurse
	}
	defer l.reclaiming.Store(false)
	f := (*list)[l.called]
	l.asked++
	gained := (*f)(l.ctx, l.r.Size)
	if gained > 0 {
		l.back = true
	} else {
		l.called++
	}
	queue.Poll()
	l.trim(0)
	return gained, true
}

// settle takes a block that was handed out. A layer that keeps no account of time
// may have handed it out too early: then wait, holding it.
func (l *ladder) settle(b Block, f queue.Frontier) (Block, queue.Frontier, error) {
	if l.r.Reuse(f) != ReuseNo {
		return b, f, nil
	}
	queue.Poll()
	if l.r.Reuse(f) != ReuseNo {
		return b, f, nil
	}
	// Another block may do now, while this one is out of the way.
	if other, g, o := l.top.Allocate(l.r); o == OK {
		if l.r.Reuse(g) != ReuseNo {
			l.top.Free(b, f)
			return other, g, nil
		}
		l.top.Free(other, g)
	}
	if err := f.Wait(l.ctx); err != nil {
		l.top.Free(b, f)
		if errors.Is(err, ErrLost) {
			return Block{}, queue.Frontier{}, err
		}
		l.cause = err
		return Block{}, queue.Frontier{}, l.oom(l)
	}
	return b, queue.ReadyNow(), nil
}

func (l *ladder) pendingNow() (n memory.Bytes) {
	for _, a := range l.layers {
		n += a.Stats().Pending
	}
	return n
}

func (e *Env) now() time.Time {
	if e.Now == nil {
		return time.Now()
	}
	return e.Now()
}
