package hal

import (
	"context"
	"fmt"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/queue"
)

// Queue carries out operations in order. Each operation waits for a list of
// semaphore values, is carried out, and signals another list; nil is an empty one.
// A wait for a value that nobody has signalled yet is legal. An error says that
// nothing was submitted; an operation that is accepted and fails later fails its
// signal list with the cause, and one without a signal list tells [Queue.Drain].
//
// A failure stops nothing behind it: later operations of the queue go on, and find
// what the failed one left. To stop them too, let them wait for its signal. A call
// that returns an error has not signalled: if somebody else waits for what it was to
// signal, tell them with [Semaphore.Fail]. A wait for a semaphore that has failed is
// accepted, and fails the operation. Memory may be touched by other queues once the
// alloca has been waited for; that is not checked. Safe for concurrent use.
type Queue struct {
	device *Device
	queue  *queue.Queue
}

// Device returns the queue's device.
func (q *Queue) Device() *Device { return q.device }

// ID is the queue's identity, never reused in the process.
func (q *Queue) ID() queue.ID { return q.queue.ID() }

// Issued is the point after everything issued on the queue so far.
func (q *Queue) Issued() Point { return q.queue.Issued() }

// Now is the frontier after everything issued on the queue so far.
func (q *Queue) Now() Frontier { return queue.After(q.queue.Issued()) }

// Allocate returns memory for use by the queue's next operations, without being an
// operation itself: the memory may still be in use by earlier ones of this queue.
// The host must not touch it before [Buffer.Map]. See [Device.Allocate] for errors.
func (q *Queue) Allocate(ctx context.Context, p Params) (Buffer, error) {
	r, err := q.device.request(ctx, &p, q.queue.ID())
	if err != nil {
		return Buffer{}, err
	}
	r.Kind &^= allocator.MayWait // there is no operation to add a wait to
	b, _, err := q.device.allocate(ctx, r)
	if err != nil {
		return Buffer{}, err
	}
	return Buffer{b}, nil
}

// Release releases b after everything issued so far on q and after every recorded
// use elsewhere, without being an operation itself.
func (q *Queue) Release(b Buffer) error {
	if err := q.device.owns(b); err != nil {
		return err
	}
	return q.device.free(b.block, queue.After(q.queue.Issued()))
}

// Alloca allocates memory as an operation of the queue. It is placed now: the
// buffer's address is known and a lack of memory is an [OOMError] at once. Its
// contents may be touched by operations ordered after it: later ones of this queue,
// and those that wait for signal. While it waits for wait it holds its memory. If
// it fails later the buffer is still the caller's to release.
func (q *Queue) Alloca(ctx context.Context, p Params, wait, signal Fence) (Buffer, error) {
	r, err := q.device.request(ctx, &p, q.queue.ID())
	if err != nil {
		return Buffer{}, err
	}
	b, f, err := q.device.allocate(ctx, r)
	if err != nil {
		return Buffer{}, err
	}
	op := queue.Op{Kind: queue.Alloca}
	if f != queue.ReadyNow() && r.Reuse(f) == allocator.ReuseWait {
		op.After = f
	}
	if _, _, err := q.queue.Submit(&op, wait, signal); err != nil {
		_ = q.device.free(b, f) // never used; the handle is ours and good
		return Buffer{}, q.wrap("alloca", err)
	}
	return Buffer{b}, nil
}

// Dealloca releases b as an operation of the queue: the memory is free after it and
// after every recorded use on other queues. The handle ends now. If one of wait
// fails before the dealloca could be issued it did not happen, and the handle is
// good again: release it then. Where that is unwelcome, wait with the operation
// before and give the dealloca no wait of its own.
func (q *Queue) Dealloca(b Buffer, wait, signal Fence) error {
	if err := q.device.owns(b); err != nil {
		return err
	}
	k := b.block.Keeper
	id, o := k.Ledger.Claim(b.block.ID)
	if o != allocator.OK {
		return fmt.Errorf("hal: dealloca: %w", o.Err())
	}
	op := queue.Op{Kind: queue.Dealloca}
	op.Refs[0] = queue.Ref{Keeper: k, ID: id, Addr: b.block.Addr, Size: int64(b.block.Size)}
	if _, _, err := q.queue.Submit(&op, wait, signal); err != nil {
		k.Ledger.Unclaim(id)
		return q.wrap("dealloca", err)
	}
	return nil
}

// Fill writes pattern, of 1, 2, 4 or 8 bytes, over dst again and again.
func (q *Queue) Fill(dst Span, pattern []byte, wait, signal Fence) error {
	op := queue.Op{Kind: queue.Fill}
	switch n := len(pattern); n {
	case 1, 2, 4, 8:
		op.PatternSize = uint8(n)
		for i, c := range pattern {
			op.Pattern |= uint64(c) << (8 * i)
		}
	default:
		return invalid("fill pattern of %d bytes: it must have 1, 2, 4 or 8", n)
	}
	if err := q.target(&op, dst); err != nil {
		return err
	}
	if op.Size%int64(op.PatternSize) != 0 {
		return invalid("fill of %d bytes with a pattern of %d", op.Size, op.PatternSize)
	}
	return q.submit(&op, wait, signal)
}

// Copy copies src to dst, which must be of the same size. They may overlap.
func (q *Queue) Copy(dst, src Span, wait, signal Fence) error {
	op := queue.Op{Kind: queue.Copy}
	if err := q.target(&op, dst); err != nil {
		return err
	}
	addr, size, ref, err := q.resolve(src)
	if err != nil {
		return err
	}
	if size != op.Size {
		return invalid("copy of %d bytes to a span of %d", size, op.Size)
	}
	op.Src = addr
	op.Refs[1] = ref
	return q.submit(&op, wait, signal)
}

// Upload copies src to dst, which must be of the same size. src must not be changed
// before signal is reached.
func (q *Queue) Upload(dst Span, src []byte, wait, signal Fence) error {
	op := queue.Op{Kind: queue.Upload, Host: src}
	if err := q.target(&op, dst); err != nil {
		return err
	}
	if int64(len(src)) != op.Size {
		return invalid("upload of %d bytes to a span of %d", len(src), op.Size)
	}
	return q.submit(&op, wait, signal)
}

// Download copies src to dst, which must be of the same size. dst must not be
// touched before signal is reached.
func (q *Queue) Download(dst []byte, src Span, wait, signal Fence) error {
	op := queue.Op{Kind: queue.Download, Host: dst}
	addr, size, ref, err := q.resolve(src)
	if err != nil {
		return err
	}
	op.Src, op.Size, op.Refs[0] = addr, size, ref
	if int64(len(dst)) != size {
		return invalid("download of %d bytes to a slice of %d", size, len(dst))
	}
	return q.submit(&op, wait, signal)
}

// Call calls f on a goroutine of its own, in the queue's order: what follows waits
// until it has returned. An error, or a panic, fails signal.
func (q *Queue) Call(f func() error, wait, signal Fence) error {
	if f == nil {
		return invalid("call of a nil function")
	}
	return q.submit(&queue.Op{Kind: queue.Call, Func: f}, wait, signal)
}

// Barrier does nothing but wait and signal, in the queue's order.
func (q *Queue) Barrier(wait, signal Fence) error {
	return q.submit(&queue.Op{Kind: queue.Barrier}, wait, signal)
}

// Drain blocks until everything submitted so far that can be issued is over, or ctx
// is done. It also returns the first failure, since the last Drain, of an operation
// that had no signal list: one that nobody else would learn of.
func (q *Queue) Drain(ctx context.Context) error {
	if err := q.queue.Drain(ctx); err != nil {
		return fmt.Errorf("hal: drain of queue %d: %w", q.queue.ID(), err)
	}
	if err := q.queue.TakeError(); err != nil {
		return fmt.Errorf("hal: on queue %d: %w", q.queue.ID(), err)
	}
	return nil
}

// Write copies src to dst, which must be of the same size, and waits until that is
// done. If ctx ends first, the copy goes on: leave src alone until [Queue.Drain].
func (q *Queue) Write(ctx context.Context, dst Span, src []byte) error {
	var done Semaphore
	if err := q.Upload(dst, src, nil, done.At(1)); err != nil {
		return err
	}
	return q.await(ctx, "write", &done)
}

// Read copies src to dst, which must be of the same size, and waits until that is
// done. If ctx ends first, the copy goes on: leave dst alone until [Queue.Drain].
func (q *Queue) Read(ctx context.Context, dst []byte, src Span) error {
	var done Semaphore
	if err := q.Download(dst, src, nil, done.At(1)); err != nil {
		return err
	}
	return q.await(ctx, "read", &done)
}

func (q *Queue) await(ctx context.Context, what string, done *Semaphore) error {
	if err := done.Wait(ctx, 1); err != nil {
		return q.wrap(what, err)
	}
	return nil
}

// Close ends the queue: what is not issued fails, what is issued completes, and
// memory that was freed on it is there for all. It doesn't wait; [Queue.Drain] does.
// Idempotent.
func (q *Queue) Close() {
	q.device.end(q)
	q.queue.Close()
}

func (q *Queue) submit(op *queue.Op, wait, signal Fence) error {
	if _, _, err := q.queue.Submit(op, wait, signal); err != nil {
		return q.wrap(op.Kind.String(), err)
	}
	return nil
}

func (q *Queue) wrap(what string, err error) error {
	return fmt.Errorf("hal: %s on queue %d: %w", what, q.queue.ID(), err)
}

func (q *Queue) target(op *queue.Op, dst Span) (err error) {
	op.Dst, op.Size, op.Refs[0], err = q.resolve(dst)
	return err
}

// resolve checks a span and returns where it is.
func (q *Queue) resolve(s Span) (addr uint64, size int64, ref queue.Ref, err error) {
	if err := q.device.owns(s.buffer); err != nil {
		return 0, 0, ref, err
	}
	b := s.buffer.block
	info, o := b.Keeper.Ledger.Info(b.ID)
	if o != allocator.OK {
		return 0, 0, ref, fmt.Errorf("hal: %w", o.Err())
	}
	off, n := s.off, s.size
	if s.whole {
		n = info.Asked
	}
	if off < 0 || n < 0 || off > info.Asked-n {
		return 0, 0, ref, invalid("span of %d bytes at %d of a buffer of %d", int64(n), int64(off), int64(info.Asked))
	}
	return b.Addr + uint64(off), int64(n), queue.Ref{Keeper: b.Keeper, ID: b.ID, Addr: b.Addr, Size: int64(b.Size)}, nil
}
