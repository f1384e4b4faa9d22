package haltest

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Config describes a simulated device. The zero value is a device of 16 MiB with
// three queues and pages of 64 KiB whose queues run at random.
type Config struct {
	// Seed decides how long operations last, and so in which order those of
	// different queues end. Equal seeds and equal calls give equal runs.
	Seed uint64
	// Capacity of the device-local heap, the host-visible and the shared one each.
	Capacity memory.Bytes
	// Granularity of its pages.
	Granularity memory.Bytes
	// Queues opened with the device.
	Queues int
	// Delay is how long an operation lasts, in virtual time. rng is the device's. Nil
	// is [Adversary].
	Delay func(q queue.ID, op *queue.Op, rng *rand.Rand) time.Duration
	// Polled makes a device that doesn't say by itself when work is over, as a GPU:
	// that is learned when somebody polls ([queue.Poll]), and later than it is so.
	Polled bool
}

func (c Config) withDefaults() Config {
	if c.Capacity == 0 {
		c.Capacity = 16 << 20
	}
	if c.Granularity == 0 {
		c.Granularity = 64 << 10
	}
	if c.Queues == 0 {
		c.Queues = 3
	}
	if c.Delay == nil {
		c.Delay = Adversary()
	}
	return c
}

// Adversary returns a schedule that is hard on whoever counts on luck: at any time
// one queue may crawl while the others rush through bursts of work, and which
// changes every few operations.
func Adversary() func(q queue.ID, op *queue.Op, rng *rand.Rand) time.Duration {
	var crawls, rushes queue.ID
	left := 0
	return func(q queue.ID, _ *queue.Op, rng *rand.Rand) time.Duration {
		if left--; left < 0 {
			left = rng.IntN(24)
			crawls, rushes = 0, 0
			switch rng.IntN(4) {
			case 0:
				crawls = q
			case 1:
				rushes = q
			}
		}
		switch q {
		case crawls:
			return time.Millisecond + time.Duration(rng.IntN(int(time.Millisecond)))
		case rushes:
			return 0
		}
		return time.Duration(rng.IntN(int(20 * time.Microsecond)))
	}
}

// Device is the simulated device: host memory whose queues move in virtual time,
// one operation a [Device.Step], and never by themselves. It implements
// [driver.Device] with all its abilities, and a [Monitor] watches it.
//
// Whoever waits for it moves it (see [queue.AddPump]), so a program that uses it
// runs to the same end each time if it uses one goroutine and one such device at a
// time in its process.
type Device struct {
	*host.Device
	config  Config
	monitor *Monitor
	remove  func() // takes the pump away

	stepping sync.Mutex // held by Step; a step within a step does nothing

	mu     sync.Mutex // leaf, but for the monitor's
	rng    *rand.Rand
	now    time.Duration
	queues []*executor
	closed bool
	lost   error
	fault  func(Call) error
	calls  map[Call]int
	polls  int // since something was issued
}

// New makes a simulated device, for [github.com/halyard-go/halyard/hal.OpenDriver].
func New(c Config) (*Device, error) {
	c = c.withDefaults()
	inner, err := host.Open(host.Config{Capacity: c.Capacity, Granularity: c.Granularity, Queues: c.Queues})
	if err != nil {
		return nil, err
	}
	d := &Device{
		Device: inner, config: c, monitor: newMonitor(),
		rng: rand.New(rand.NewPCG(c.Seed, 0x68616c74)), calls: map[Call]int{},
	}
	d.remove = queue.AddPump(d.pump)
	return d, nil
}

// Monitor is what watches the device.
func (d *Device) Monitor() *Monitor { return d.monitor }

// Now is the virtual time since the device was made.
func (d *Device) Now() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.now
}

// Info implements [driver.Device].
func (d *Device) Info() driver.Info {
	i := d.Device.Info()
	i.Name, i.Description, i.Modelled = "simulated", "host memory with queues in virtual time", "time"
	return i
}

// Call names a driver call that can be counted, and made to fail.
type Call string

// The calls.
const (
	CallAlloc     Call = "alloc"
	CallFree      Call = "free"
	CallPoolAlloc Call = "pool alloc"
	CallPoolFree  Call = "pool free"
	CallPoolTrim  Call = "pool trim"
	CallReserve   Call = "reserve"
	CallUnreserve Call = "unreserve"
	CallCreate    Call = "create"
	CallRelease   Call = "release"
	CallMap       Call = "map"
	CallUnmap     Call = "unmap"
)

// SetFault makes f decide, before each driver call, whether it fails: it then returns
// the error and does nothing. Nil lets all pass. f runs under the device's lock.
func (d *Device) SetFault(f func(Call) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fault = f
}

// FailNth makes the nth call from now that takes memory (1 is the next) fail for
// want of it.
func (d *Device) FailNth(n int) {
	d.SetFault(func(c Call) error {
		switch c {
		case CallAlloc, CallPoolAlloc, CallReserve, CallCreate, CallMap:
			if n--; n == 0 {
				return fmt.Errorf("haltest: %s made to fail: %w", c, driver.ErrOutOfMemory)
			}
		}
		return nil
	})
}

// Calls returns how often each driver call was made, those that failed included.
func (d *Device) Calls() map[Call]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make(map[Call]int, len(d.calls))
	for c, n := range d.calls {
		out[c] = n
	}
	return out
}

func (d *Device) called(c Call) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls[c]++
	if d.fault == nil {
		return nil
	}
	return d.fault(c)
}

// Alloc implements [driver.Raw].
func (d *Device) Alloc(heap int, size, align memory.Bytes) (uint64, memory.Bytes, error) {
	if err := d.called(CallAlloc); err != nil {
		return 0, 0, err
	}
	addr, taken, err := d.Device.Alloc(heap, size, align)
	if err == nil {
		d.monitor.took(addr, taken)
	}
	return addr, taken, err
}

// Free implements [driver.Raw].
func (d *Device) Free(heap int, addr uint64) error {
	if err := d.called(CallFree); err != nil {
		return err
	}
	d.monitor.gave("the driver's free", addr)
	return d.Device.Free(heap, addr)
}

// PoolAlloc implements [driver.Pool].
func (d *Device) PoolAlloc(heap int, size, align memory.Bytes) (uint64, memory.Bytes, queue.Frontier, error) {
	if err := d.called(CallPoolAlloc); err != nil {
		return 0, 0, queue.Frontier{}, err
	}
	return d.Device.PoolAlloc(heap, size, align)
}

// PoolFree implements [driver.Pool].
func (d *Device) PoolFree(heap int, addr uint64, after queue.Frontier) error {
	if err := d.called(CallPoolFree); err != nil {
		return err
	}
	return d.Device.PoolFree(heap, addr, after)
}

// PoolTrim implements [driver.Pool].
func (d *Device) PoolTrim(heap int, keep memory.Bytes) (memory.Bytes, error) {
	if err := d.called(CallPoolTrim); err != nil {
		return 0, err
	}
	return d.Device.PoolTrim(heap, keep)
}

// Reserve implements [driver.Addresses].
func (d *Device) Reserve(heap int, size memory.Bytes) (uint64, error) {
	if err := d.called(CallReserve); err != nil {
		return 0, err
	}
	return d.Device.Reserve(heap, size)
}

// Unreserve implements [driver.Addresses].
func (d *Device) Unreserve(heap int, addr uint64, size memory.Bytes) error {
	if err := d.called(CallUnreserve); err != nil {
		return err
	}
	d.monitor.acted("unreserve", addr, size)
	return d.Device.Unreserve(heap, addr, size)
}

// Create implements [driver.Pages].
func (d *Device) Create(heap int) (driver.Page, error) {
	if err := d.called(CallCreate); err != nil {
		return 0, err
	}
	return d.Device.Create(heap)
}

// Release implements [driver.Pages].
func (d *Device) Release(heap int, p driver.Page) error {
	if err := d.called(CallRelease); err != nil {
		return err
	}
	d.monitor.released(p)
	return d.Device.Release(heap, p)
}

// Map implements [driver.Addresses].
func (d *Device) Map(heap int, addr uint64, pages []driver.Page) error {
	if err := d.called(CallMap); err != nil {
		return err
	}
	err := d.Device.Map(heap, addr, pages)
	if err == nil {
		d.monitor.mapped(addr, d.Granularity(heap), pages)
	}
	return err
}

// Unmap implements [driver.Addresses].
func (d *Device) Unmap(heap int, addr uint64, n int) error {
	if err := d.called(CallUnmap); err != nil {
		return err
	}
	d.monitor.unmapped(addr, d.Granularity(heap), n)
	return d.Device.Unmap(heap, addr, n)
}

// View implements [driver.Device].
func (d *Device) View(addr uint64, size memory.Bytes) ([]byte, error) {
	b, err := d.Device.View(addr, size)
	if err == nil {
		d.monitor.acted("a view of the host", addr, size)
	}
	return b, err
}

// Lose plays the loss of the device: nothing in flight is ever over.
func (d *Device) Lose(cause error) {
	d.mu.Lock()
	first := d.lost == nil
	if first {
		d.lost = cause
	}
	queues := append([]*executor(nil), d.queues...)
	d.mu.Unlock()
	if !first {
		return
	}
	d.monitor.lost()
	d.Device.Lose(cause)
	for _, x := range queues {
		x.queue.Lose(cause)
	}
}

// Close implements [driver.Device].
func (d *Device) Close() error {
	d.mu.Lock()
	was := d.closed
	d.closed = true
	queues := append([]*executor(nil), d.queues...)
	lost := d.lost != nil
	d.mu.Unlock()
	if was {
		return nil
	}
	d.remove()
	err := d.Device.Close()
	if lost {
		for _, x := range queues {
			x.queue.Abandon()
		}
	}
	return err
}
