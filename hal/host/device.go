package host

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/vmem"
)

// The heaps.
const (
	deviceHeap = iota
	hostHeap
	sharedHeap
)

// Device is host memory played as a device. Make it with [Open].
type Device struct {
	config  Config      // immutable
	inform  driver.Info // immutable
	heaps   [3]*heap    // immutable
	service *queue.Queue

	spaces atomic.Pointer[[]area] // of all heaps and imports, by address; changed under mu
	lost   atomic.Pointer[error]  // set once
	calls  atomic.Int64           // user functions running

	mu     sync.Mutex
	queues []*executor
	closed atomic.Bool // set under mu
}

var (
	_ driver.Device   = (*Device)(nil)
	_ driver.Raw      = (*Device)(nil)
	_ driver.Pool     = (*Device)(nil)
	_ driver.Virtual  = (*Device)(nil)
	_ driver.Importer = (*Device)(nil)
)

// Open makes a device. It takes nothing but a file descriptor for the pages.
func Open(c Config) (*Device, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c = c.withDefaults()
	d := &Device{config: c}
	d.spaces.Store(&[]area{})
	var store *vmem.Pages
	if whole := c.Capacity &^ (c.Granularity - 1); whole > 0 {
		var err error
		store, err = vmem.NewPages(int64(whole), int64(c.Granularity))
		if err != nil && !errors.Is(err, errors.ErrUnsupported) {
			return nil, fmt.Errorf("host: %w", err)
		}
	}
	d.inform = c.info(store != nil)
	for i := range d.heaps {
		d.heaps[i] = newHeap(i, d.inform.Heaps[i], func(r *vmem.Region) {
			d.addArea(area{base: uint64(r.Base()), size: uint64(r.Size()), region: r, heap: i})
		})
	}
	if store != nil {
		d.heaps[deviceHeap].pages = pages{store: store, byID: map[driver.Page]vmem.Handle{}}
	}
	d.service = d.newQueue(nil)
	return d, nil
}

const sharing = memory.SharingExport | memory.SharingReplicate | memory.SharingConcurrent | memory.SharingImmutable

// info describes the device that c makes.
func (c Config) info(pages bool) driver.Info {
	sources := []string{"pool", "raw"}
	if pages {
		sources = []string{"vmm", "pool", "raw"}
	}
	return driver.Info{
		Name:        "host",
		Description: fmt.Sprintf("host memory as device memory (%s/%s)", runtime.GOOS, runtime.GOARCH),
		Heaps: memory.Heaps{
			deviceHeap: {
				Name: "device", Type: memory.DeviceLocal, Usage: memory.Transfer | memory.Dispatch | sharing,
				Capacity: c.Capacity, MinAlignment: Alignment,
			},
			hostHeap: {
				Name:  "host",
				Type:  memory.HostLocal | memory.HostVisible | memory.HostCoherent | memory.HostCached | memory.DeviceVisible,
				Usage: memory.Transfer | memory.Dispatch | memory.Mapping | sharing, Capacity: c.HostCapacity, MinAlignment: Alignment,
			},
			sharedHeap: {
				Name:  "shared",
				Type:  memory.DeviceLocal | memory.HostVisible | memory.HostCoherent,
				Usage: memory.Transfer | memory.Dispatch | memory.Mapping | sharing, Capacity: c.HostCapacity, MinAlignment: Alignment,
			},
		},
		Sources: sources, Direct: "raw", Queues: c.Queues, Modelled: c.modelled(),
	}
}

// Info implements [driver.Device].
func (d *Device) Info() driver.Info {
	i := d.inform
	i.Heaps, i.Sources = slices.Clone(i.Heaps), slices.Clone(i.Sources)
	return i
}

// check returns why the device does nothing any more, or nil.
func (d *Device) check() error {
	if err := d.lost.Load(); err != nil {
		return *err
	}
	if d.closed.Load() {
		return ErrClosed
	}
	return nil
}

// heap returns heap i of a device that works.
func (d *Device) heap(i int) (*heap, error) {
	if err := d.check(); err != nil {
		return nil, err
	}
	if i < 0 || i >= len(d.heaps) {
		return nil, fmt.Errorf("host: heap %d of %d: %w", i, len(d.heaps), driver.ErrUnsupported)
	}
	return d.heaps[i], nil
}

// Alloc implements [driver.Raw]. What is taken is size rounded up to [Alignment],
// all of it usable.
func (d *Device) Alloc(heap int, size, align memory.Bytes) (uint64, memory.Bytes, error) {
	h, err := d.heap(heap)
	if err != nil {
		return 0, 0, err
	}
	spend(d.config.AllocCost)
	s, err := h.alloc(kindRaw, size, align)
	if err != nil {
		return 0, 0, err
	}
	return s.addr, s.taken, nil
}

// Free implements [driver.Raw].
func (d *Device) Free(heap int, addr uint64) error {
	h, err := d.heap(heap)
	if err != nil {
		return err
	}
	spend(d.config.FreeCost)
	return h.free(addr)
}

// MemInfo implements [driver.Device]: what a heap's raw allocations, pool and pages
// leave of its capacity.
func (d *Device) MemInfo(heap int) (free, total memory.Bytes, err error) {
	h, err := d.heap(heap)
	if err != nil {
		return 0, 0, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.freeLocked(), h.size, nil
}

// View implements [driver.Device]. The slice is good until its memory is freed.
func (d *Device) View(addr uint64, size memory.Bytes) ([]byte, error) {
	if err := d.check(); err != nil {
		return nil, err
	}
	if a, ok := d.area(addr); ok && a.heap == deviceHeap {
		return nil, fmt.Errorf("host: view of %#x: heap %s is not host_visible: %w", addr, d.heaps[a.heap].name, driver.ErrUnsupported)
	}
	return d.bytes(addr, int64(size))
}

// executor is a worker that the device knows of.
type executor struct {
	*queue.Worker
	device *Device
	queue  *queue.Queue
	run    *runner
}

// Close implements [queue.Executor]. A lost queue may be in the middle of an
// operation; none touches memory after this.
func (e *executor) Close() error {
	e.run.stop()
	e.device.mu.Lock()
	defer e.device.mu.Unlock()
	e.device.queues = slices.DeleteFunc(e.device.queues, func(x *executor) bool { return x == e })
	return nil
}

// NewQueue implements [driver.Device].
func (d *Device) NewQueue(hook queue.Hook) (*queue.Queue, error) {
	if err := d.check(); err != nil {
		return nil, err
	}
	q := d.newQueue(hook)
	if err := d.lost.Load(); err != nil { // lost meanwhile, perhaps without this queue
		q.Lose(*err)
	}
	return q, nil
}

func (d *Device) newQueue(hook queue.Hook) *queue.Queue {
	e := &executor{device: d, run: &runner{device: d}}
	e.queue = queue.New(queue.Options{Hook: hook, Executor: func(q *queue.Queue) queue.Executor {
		e.Worker = queue.NewWorker(q, e.run, false)
		return e
	}})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues = append(d.queues, e)
	return e.queue
}

func (d *Device) executors() []*executor {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.queues)
}

// Lose plays the loss of the device, for tests: its queues are lost, and every
// later call returns an error that wraps [queue.ErrLost] and cause. The first loss
// counts.
func (d *Device) Lose(cause error) {
	err := fmt.Errorf("host: %w: %w", queue.ErrLost, cause)
	if !d.lost.CompareAndSwap(nil, &err) {
		return
	}
	for _, e := range d.executors() {
		e.queue.Lose(cause)
	}
}

// Close implements [driver.Device]. All memory is given back, also what is still
// allocated; the error says what that was, unless the device was lost. The lost
// queues are abandoned. Where a user's function is still running after a loss,
// memory stays accessible to it and the error says so. Idempotent.
func (d *Device) Close() error {
	d.mu.Lock()
	was := d.closed.Swap(true)
	d.mu.Unlock()
	if was {
		return nil
	}
	d.service.Close()
	queues := d.executors()
	for _, e := range queues {
		e.run.stop()
	}
	lost := d.lost.Load() != nil
	var errs []error
	var leaks []string
	for _, h := range d.heaps {
		h.mu.Lock()
		h.closed = true
		if s := h.leaksLocked(); s != "" && !lost {
			leaks = append(leaks, s)
		}
		h.mu.Unlock()
	}
	if n, size := d.imported(); n > 0 && !lost {
		leaks = append(leaks, fmt.Sprintf("imports: %v in %d", size, n))
	}
	if len(leaks) > 0 {
		errs = append(errs, fmt.Errorf("host: closed with memory still allocated: %s", strings.Join(leaks, "; ")))
	}
	if n := d.calls.Load(); n > 0 {
		return errors.Join(append(errs, fmt.Errorf("host: closed while %d user functions run: memory stays mapped", n))...)
	}
	d.spaces.Store(&[]area{})
	for _, h := range d.heaps {
		errs = append(errs, h.close())
	}
	if lost {
		for _, e := range queues {
			e.queue.Abandon()
		}
	}
	return errors.Join(errs...)
}

// area is a range of addresses that operations can name.
type area struct {
	base, size uint64
	region     *vmem.Region // nil: imported
	heap       int
}

// area returns the one that addr is in.
func (d *Device) area(addr uint64) (area, bool) {
	list := *d.spaces.Load()
	i, found := slices.BinarySearchFunc(list, addr, func(a area, addr uint64) int { return cmp.Compare(a.base, addr) })
	if !found {
		i--
	}
	if i < 0 || addr-list[i].base >= list[i].size {
		return area{}, false
	}
	return list[i], true
}

// addArea makes a known to operations, unless it overlaps one that is.
func (d *Device) addArea(a area) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := *d.spaces.Load()
	i, found := slices.BinarySearchFunc(list, a.base, func(x area, addr uint64) int { return cmp.Compare(x.base, addr) })
	if found || i > 0 && a.base-list[i-1].base < list[i-1].size || i < len(list) && list[i].base-a.base < a.size {
		return false
	}
	list = slices.Insert(slices.Clone(list), i, a)
	d.spaces.Store(&list)
	return true
}

// spend makes a modelled call last.
func spend(d time.Duration) {
	start := time.Now()
	if d > 2*sleepSlack {
		time.Sleep(d - sleepSlack)
	}
	for time.Since(start) < d {
	}
}

// sleepSlack is by how much a sleep may be late: timers have about a millisecond's
// resolution on many systems, and the rest is spent in a loop.
const sleepSlack = 2 * time.Millisecond
