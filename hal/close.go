package hal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/mutant"
)

// Close ends the device: it refuses new work, fails operations that wait for what no
// issued operation will signal, lets what is issued finish, frees what was not released (and
// reports it as a [LeakError]), gives all memory back and closes the driver.
//
// A [LeakError] (found with errors.As; other errors may be joined to it) says what was
// not released; the device is closed all the same.
//
// ctx bounds the waiting for issued work; an idle device closes whatever it says. If it
// ends first, what is not issued has failed and Close returns ctx's error with the
// device still closing: memory in use can't be given back. Call Close again to go on.
// After a device is lost Close waits for nothing. Idempotent: once it has succeeded it
// returns nil.
func (d *Device) Close(ctx context.Context) error {
	d.closeMu.Lock()
	defer d.closeMu.Unlock()
	if d.closed {
		return nil
	}
	d.closing.Store(true)
	queues := d.all()
	if mutant.Is(mutant.ForgetClosedQueue) {
		queues = d.Queues()
	}
	if err := d.settle(ctx, queues); err != nil {
		return fmt.Errorf("hal: close: work is still running: %w", err)
	}
	lost := slices.ContainsFunc(queues, func(q *Queue) bool { return q.queue.Lost() != nil })
	if lost {
		for _, q := range queues {
			q.queue.Abandon()
		}
	}
	if leak := d.freeLeaks(); leak != nil {
		d.leak = leak
	}
	if err := d.callbacks(ctx); err != nil {
		return fmt.Errorf("hal: close: a release callback of imported memory is still running: %w", err)
	}
	_, err := d.stack.Trim(ctx, 0, !lost)
	err = errors.Join(d.leak, err, d.stack.Close(), d.driver.Close())
	d.closed = true
	return err
}

// settle fails what waits for a signal that nothing issued will give, once nothing
// else is left to be issued, and waits until what is issued is over. If ctx ends first,
// what is not issued fails all the same.
func (d *Device) settle(ctx context.Context, queues []*Queue) error {
	// Whoever retires an operation issues what it allows right after, on its own
	// goroutine: "hopeless" is believed when it has held for a moment.
	for calm := 0; calm < 3 && ctx.Err() == nil; {
		deferred, hopeful := false, false
		for _, q := range queues {
			if q.queue.Deferred() > 0 && q.queue.Lost() == nil {
				deferred = true
				hopeful = hopeful || !q.queue.Hopeless()
			}
		}
		if !deferred {
			break
		}
		if calm++; hopeful {
			calm = 0
			queue.Poll()
		}
		time.Sleep(time.Millisecond)
	}
	for _, q := range queues {
		q.queue.Close()
	}
	for _, q := range queues {
		if err := q.queue.Drain(ctx); err != nil && q.queue.Lost() == nil {
			return err
		}
	}
	return nil
}

// callbacks waits for the release callbacks of imported memory.
func (d *Device) callbacks(ctx context.Context) error {
	done := make(chan struct{})
	go func() { d.imports.Wait(); close(done) }()
	if d.importing.Load() == 0 {
		<-done
		return nil
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// freeLeaks frees what is live and describes it, or returns nil.
func (d *Device) freeLeaks() error {
	leak := &LeakError{}
	byTag := map[allocator.Tag]*TagLeak{}
	note := func(i allocator.Info) {
		leak.Buffers++
		leak.Bytes += i.Asked
		t := byTag[i.Tag]
		if t == nil {
			t = &TagLeak{Tag: i.Tag.String()}
			byTag[i.Tag] = t
		}
		t.Buffers++
		t.Bytes += i.Asked
	}
	unpin := func(b allocator.Block, i allocator.Info) {
		if i.Pins > 0 {
			b.Keeper.Ledger.Pin(b.ID, -i.Pins)
		}
	}
	d.own.Live(func(b allocator.Block, i allocator.Info) bool {
		unpin(b, i)
		if d.freeOwn(b, queue.ReadyNow()) == nil {
			note(i)
		}
		return true
	})
	d.stack.FreeLive(func(b allocator.Block, i allocator.Info) {
		unpin(b, i)
		note(i)
	})
	if leak.Buffers == 0 {
		return nil
	}
	for _, t := range byTag {
		leak.ByTag = append(leak.ByTag, *t)
	}
	slices.SortFunc(leak.ByTag, func(a, b TagLeak) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Tag, b.Tag))
	})
	return leak
}
