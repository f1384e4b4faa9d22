package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"unsafe"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// quickBytes is the most that an operation on an idle queue moves inline.
const quickBytes = 64 << 10

// PanicError is the error of a Call whose function panicked.
type PanicError struct {
	Value any
	Stack []byte
}

// Error has the value and the stack.
func (e *PanicError) Error() string {
	return fmt.Sprintf("host: call panicked: %v\n\n%s", e.Value, e.Stack)
}

// Unwrap returns the value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// errGoexit is the error of a Call whose function ended its goroutine.
var errGoexit = errors.New("host: call ended with runtime.Goexit")

// runner carries out the operations of one queue.
type runner struct {
	device *Device

	mu      sync.Mutex // held while an operation touches memory
	stopped bool
}

// stop waits for the operation that is touching memory, and refuses later ones.
func (r *runner) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopped = true
}

// Quick implements [queue.Runner].
func (r *runner) Quick(op *queue.Op) bool {
	switch op.Kind {
	case queue.Fill, queue.Copy:
		return op.Size <= quickBytes
	case queue.Upload, queue.Download:
		return len(op.Host) <= quickBytes
	}
	return false
}

// Run implements [queue.Runner].
func (r *runner) Run(op *queue.Op) error {
	if op.Kind == queue.Call {
		return r.device.call(op.Func)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.device.check(); err != nil {
		return err
	}
	if r.stopped {
		return ErrClosed
	}
	return r.device.touch(op)
}

// touch carries out an operation on memory. A fault in the middle of it, where
// memory was taken away meanwhile, is an error.
func (d *Device) touch(op *queue.Op) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if v := recover(); v != nil {
			fault, ok := v.(interface{ Addr() uintptr })
			if !ok {
				panic(v)
			}
			err = fmt.Errorf("host: %v: memory fault at %#x: it was freed or unmapped while in use", op.Kind, fault.Addr())
		}
	}()
	var dst, src []byte
	if op.Kind != queue.Download {
		if dst, err = d.bytes(op.Dst, size(op)); err != nil {
			return fmt.Errorf("host: %v to %#x: %w", op.Kind, op.Dst, err)
		}
	}
	if op.Kind == queue.Download || op.Kind == queue.Copy {
		if src, err = d.bytes(op.Src, size(op)); err != nil {
			return fmt.Errorf("host: %v from %#x: %w", op.Kind, op.Src, err)
		}
	}
	switch op.Kind {
	case queue.Fill:
		return fill(dst, op.Pattern, int(op.PatternSize))
	case queue.Copy:
		copy(dst, src)
	case queue.Upload:
		copy(dst, op.Host)
	case queue.Download:
		copy(op.Host, src)
	default:
		return fmt.Errorf("host: unknown operation %v", op.Kind)
	}
	return nil
}

// size is how many bytes of the device op touches.
func size(op *queue.Op) int64 {
	if op.Kind == queue.Upload || op.Kind == queue.Download {
		return int64(len(op.Host))
	}
	return op.Size
}

// fillRun is how much of a fill is copied at a time: what a first-level cache holds.
const fillRun = 16 << 10

func fill(dst []byte, pattern uint64, n int) error {
	switch n {
	case 1, 2, 4, 8:
	default:
		return fmt.Errorf("host: fill with a pattern of %d bytes: it must have 1, 2, 4 or 8", n)
	}
	if len(dst)%n != 0 {
		return fmt.Errorf("host: fill of %d bytes with a pattern of %d", len(dst), n)
	}
	var p [8]byte
	binary.LittleEndian.PutUint64(p[:], pattern)
	if [8]byte(p) == [8]byte{} {
		clear(dst)
		return nil
	}
	done := copy(dst, p[:n])
	for done < len(dst) { // double what is there, then repeat it
		done += copy(dst[done:], dst[:min(done, fillRun)])
	}
	return nil
}

// Perform carries out op at once on the caller's goroutine, whatever queue it came
// from: for a device that wraps this one and has queues of its own, as the simulated
// one in hal/haltest. Such a device ends its queues itself.
func (d *Device) Perform(op *queue.Op) error {
	if op.Kind == queue.Call {
		return d.call(op.Func)
	}
	if err := d.check(); err != nil {
		return err
	}
	return d.touch(op)
}

// call runs a user's function on a goroutine of its own, so that neither a panic
// nor runtime.Goexit takes the queue's worker with it.
func (d *Device) call(f func() error) error {
	if f == nil {
		return errors.New("host: call without a function")
	}
	d.calls.Add(1)
	defer d.calls.Add(-1)
	if err := d.check(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		err := errGoexit
		debug.SetPanicOnFault(true)
		defer func() {
			if v := recover(); v != nil {
				err = &PanicError{v, debug.Stack()}
			}
			done <- err
		}()
		err = f()
	}()
	return <-done
}

// bytes returns the memory of n bytes at addr, which must lie in one region, all of
// it committed or mapped, or in one import.
func (d *Device) bytes(addr uint64, n int64) ([]byte, error) {
	if n < 0 {
		return nil, fmt.Errorf("host: negative size %d", n)
	}
	if n == 0 {
		return []byte{}, nil
	}
	a, ok := d.area(addr)
	switch {
	case !ok:
		return nil, fmt.Errorf("host: no memory of the device at %#x", addr)
	case uint64(n) > a.size-(addr-a.base):
		return nil, fmt.Errorf("host: %v at %#x reach beyond its memory, which ends at %#x", memory.Bytes(n), addr, a.base+a.size)
	case a.region != nil:
		return a.region.At(addr, n)
	}
	return importedBytes(uintptr(addr), n), nil
}

// importedBytes is the one place where an address that somebody else gave becomes a
// pointer. Whoever imported it keeps it alive and in place.
func importedBytes(addr uintptr, n int64) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), n)
}
