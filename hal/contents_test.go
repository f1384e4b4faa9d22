package hal_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal"
)

// Eight queues with real goroutines behind them and random delays write patterns of
// their own, pass some of their buffers on to each other, and read everything back:
// no byte is ever another's. It is contents that are checked here, and nothing that
// Halyard says of itself.
func TestNoByteIsEverAnothers(t *testing.T) {
	each := 1_000_000 // operations of each queue
	if testing.Short() {
		each /= 50
	}
	for _, stack := range []string{"", "pool+caching:device_local=*;1MiB;64,shards=4", "vmm+block+reuse:wait=on"} {
		t.Run("stack "+stack, func(t *testing.T) {
			d := open(t, "host:capacity=256MiB,queues=8,granularity=64KiB", stack)
			var wg sync.WaitGroup
			errs := make([]error, 8)
			share := each
			if stack != "" {
				share /= 4
			}
			for i := range errs {
				wg.Go(func() { errs[i] = newWriter(d, i).run(share) })
			}
			wg.Wait()
			require.NoError(t, errors.Join(errs...))
			require.NoError(t, d.Check())
		})
	}
}

// writer is one queue's user.
type writer struct {
	d        *hal.Device
	index    int
	q        *hal.Queue
	rnd      *rand.Rand
	next     uint64 // number of the next pattern
	ops      int
	produced *hal.Semaphore // what this queue has handed on to others
	given    uint64
	reads    []read
	ring     []byte // where they go
	used     int
}

// read is a download to be compared.
type read struct {
	got     []byte
	pattern uint64
}

const ringBytes = 1 << 20

func newWriter(d *hal.Device, i int) *writer {
	return &writer{
		d: d, index: i, q: d.Queue(i), rnd: rand.New(rand.NewPCG(uint64(i), 7)),
		produced: hal.NewSemaphore(0), ring: make([]byte, ringBytes),
	}
}

func (w *writer) run(ops int) error {
	for w.ops < ops {
		if err := w.cycle(); err != nil {
			return err
		}
	}
	return w.compare()
}

// cycle allocates a buffer, writes it, perhaps through a copy, reads it back on this
// queue or on another, and frees it there.
func (w *writer) cycle() error {
	size := hal.Bytes(8 << w.rnd.IntN(9)) // 8 B to 2 KiB
	if w.rnd.IntN(512) == 0 {
		size = 128 * hal.KiB // long enough to leave the caller's goroutine
	}
	if w.used+int(size) > len(w.ring) {
		if err := w.compare(); err != nil {
			return err
		}
	}
	ctx := context.Background()
	if w.rnd.IntN(2048) == 0 {
		w.ops++
		pause := time.Duration(w.rnd.IntN(200)) * time.Microsecond
		if err := w.q.Call(func() error { time.Sleep(pause); return nil }, nil, nil); err != nil {
			return err
		}
	}
	pattern := uint64(w.index)<<56 | w.next
	w.next++
	b, err := w.q.Alloca(ctx, hal.Params{Size: size}, nil, nil)
	if err != nil {
		return err
	}
	err = w.q.Fill(b.All(), binary.LittleEndian.AppendUint64(nil, pattern), nil, nil)
	w.ops += 2
	if w.rnd.IntN(8) == 0 {
		c, e := w.q.Alloca(ctx, hal.Params{Size: size}, nil, nil)
		if e != nil {
			return e
		}
		err = errors.Join(err, w.q.Copy(c.All(), b.All(), nil, nil), w.q.Dealloca(b, nil, nil))
		b = c
		w.ops += 3
	}
	got := w.ring[w.used : w.used+int(size)]
	w.used += int(size)
	w.reads = append(w.reads, read{got, pattern})
	if w.rnd.IntN(16) != 0 {
		w.ops += 2
		return errors.Join(err, w.q.Download(got, b.All(), nil, nil), w.q.Dealloca(b, nil, nil))
	}
	// Another queue reads and frees it, after this one.
	other := w.d.Queue(w.rnd.IntN(8))
	w.given++
	w.ops += 3
	return errors.Join(err,
		w.q.Barrier(nil, w.produced.At(w.given)),
		other.Download(got, b.All(), w.produced.At(w.given), nil),
		other.Dealloca(b, nil, nil))
}

// compare waits for all that was submitted, and compares what was read.
func (w *writer) compare() error {
	for _, q := range w.d.Queues() {
		if err := q.Drain(context.Background()); err != nil {
			return err
		}
	}
	for _, r := range w.reads {
		for i := 0; i < len(r.got); i += 8 {
			if p := binary.LittleEndian.Uint64(r.got[i:]); p != r.pattern {
				return fmt.Errorf("byte %d of %d of pattern %#x of queue %d is of pattern %#x", i, len(r.got), r.pattern, w.index, p)
			}
		}
	}
	w.reads, w.used = w.reads[:0], 0
	return nil
}
