package hal

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/block"
	"github.com/halyard-go/halyard/hal/allocator/caching"
	"github.com/halyard-go/halyard/hal/allocator/fault"
	"github.com/halyard-go/halyard/hal/allocator/limit"
	"github.com/halyard-go/halyard/hal/allocator/pool"
	"github.com/halyard-go/halyard/hal/allocator/raw"
	"github.com/halyard-go/halyard/hal/allocator/reuse"
	"github.com/halyard-go/halyard/hal/allocator/scope"
	"github.com/halyard-go/halyard/hal/allocator/vmm"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

var (
	// Drivers is the default registry of devices. It knows host.
	Drivers = &driver.Registry{}
	// Allocators is the default registry of layers. It knows the standard ones; add
	// your own with MustRegister before a flag is parsed.
	Allocators = &allocator.Registry{}
)

// presets are stacks for who doesn't want to tune: see docs/tuning.md.
var presets = []allocator.Preset{
	{Name: "benchmark", Summary: "fastest: keeps everything", Spec: "block+caching"},
	{Name: "server", Summary: "bounded: leaves a tenth of each heap to others", Spec: "limit:percent=90%+block+caching:*=64MiB;1GiB;4096"},
	{Name: "edge", Summary: "small: keeps 32 MiB, and gives back what is idle for 100 ms", Spec: "caching:*=8MiB;32MiB;256,waste=1.25,idle=100ms"},
}

func init() {
	if err := Drivers.Register(host.Driver()); err != nil {
		panic(err)
	}
	Allocators.MustRegister(raw.Layer, pool.Layer, vmm.Layer, block.Layer, caching.Layer, fault.Layer, limit.Layer, reuse.Layer, scope.Layer, allocator.Mint)
	for _, p := range presets {
		if err := Allocators.RegisterPreset(p); err != nil {
			panic(err)
		}
	}
}

// Option changes how a device is opened.
type Option interface{ apply(*options) }

type options struct {
	specs      []string
	allocators *allocator.Registry
	drivers    *driver.Registry
	log        *zap.Logger
}

type optionFunc func(*options)

func (f optionFunc) apply(o *options) { f(o) }

// WithAllocator chooses the allocator stack, innermost layer first, each spec one
// layer or several joined by '+'. Without it, and with no specs, the stack is block
// over the device's best source. Given twice, the second list goes on top of the first.
func WithAllocator(specs ...string) Option {
	return optionFunc(func(o *options) { o.specs = append(o.specs, specs...) })
}

// WithAllocators takes another registry of layers than [Allocators].
func WithAllocators(r *allocator.Registry) Option {
	return optionFunc(func(o *options) { o.allocators = r })
}

// WithDrivers takes another registry of devices than [Drivers].
func WithDrivers(r *driver.Registry) Option {
	return optionFunc(func(o *options) { o.drivers = r })
}

// WithLogger logs the effective stack at start, and what a person should know later.
func WithLogger(log *zap.Logger) Option {
	return optionFunc(func(o *options) { o.log = log })
}

// AllocatorFlag returns a --device_allocator flag for the flag and pflag packages.
// Pass what its Specs returns to [WithAllocator].
func AllocatorFlag() *allocator.Flag { return Allocators.Flag() }

// Open opens a device: NAME or NAME:OPTIONS, such as host or
// host:capacity=24GiB,queues=2. Errors in a spec are *spec.Error and show the place;
// help and NAME:help, for device and allocator alike, are a *HelpRequest.
func Open(device string, opts ...Option) (*Device, error) {
	o := options{allocators: Allocators, drivers: Drivers, log: zap.NewNop()}
	for _, opt := range opts {
		opt.apply(&o)
	}
	drv, err := o.drivers.Open(device)
	if err != nil {
		return nil, fmt.Errorf("hal: open %s: %w", device, err)
	}
	d, err := newDevice(drv, &o)
	if err != nil {
		_ = drv.Close() // the first error is the one to report
		return nil, fmt.Errorf("hal: open %s: %w", device, err)
	}
	return d, nil
}

// OpenDriver is Open for a device that a driver has opened already; Close closes it.
func OpenDriver(drv driver.Device, opts ...Option) (*Device, error) {
	o := options{allocators: Allocators, drivers: Drivers, log: zap.NewNop()}
	for _, opt := range opts {
		opt.apply(&o)
	}
	return newDevice(drv, &o)
}

func newDevice(drv driver.Device, o *options) (*Device, error) {
	d := &Device{driver: drv, info: drv.Info(), log: o.log}
	d.own.Init(&d.ownMu, d, 0)
	if len(d.info.Heaps) == 0 || len(d.info.Heaps) > allocator.MaxHeaps {
		return nil, fmt.Errorf("device %s has %d heaps, and 1 to %d are possible", d.info.Name, len(d.info.Heaps), allocator.MaxHeaps)
	}
	heap, ok := d.info.Heaps.Find(DeviceLocal, 0)
	if !ok {
		heap = 0
	}
	d.kind = allocator.MakeKind(heap, DefaultAlign, 0, 0, 0)
	env := &allocator.Env{Owner: d, Heaps: d.info.Heaps, Device: drv, Now: time.Now, Log: o.log, Fill: d.fill}
	var err error
	if d.stack, err = o.allocators.Build(env, o.specs...); err != nil {
		return nil, err
	}
	d.top, d.policy = d.stack.Top(), d.stack.Policy()
	_, d.scoped = allocator.As[interface{ Scoped() }](d.top)
	d.kind |= d.policy
	for i := range d.most {
		d.most[i] = memory.MaxBytes
		if most := d.stack.Most(i); most > 0 {
			d.most[i] = most
		}
	}
	d.stack.SetUnsent(d.unsent)
	for range d.info.Queues {
		if _, err := d.NewQueue(); err != nil {
			for _, q := range d.Queues() {
				q.Close()
			}
			_ = d.stack.Close()
			return nil, err
		}
	}
	d.first = d.Queues()
	o.log.Info("device opened", zap.String("device", d.info.Name), zap.Stringer("device_allocator", d.stack),
		zap.Int("queues", d.info.Queues), zap.String("modelled", d.info.Modelled))
	return d, nil
}

// fill is how a layer has memory filled: on a queue, after f.
func (d *Device) fill(addr uint64, size Bytes, pattern byte, f queue.Frontier) (queue.Frontier, error) {
	queues := d.Queues()
	if len(queues) == 0 {
		return f, fmt.Errorf("hal: fill: %w", ErrClosed)
	}
	op := queue.Op{Kind: queue.Fill, PatternSize: 1, Pattern: uint64(pattern), Dst: addr, Size: int64(size), After: f}
	at, issued, err := queues[0].queue.Submit(&op, nil, nil)
	if err != nil {
		return f, err
	}
	if !issued { // behind something deferred: nobody knows when
		return queue.Frontier{}, nil
	}
	return queue.After(at), nil
}

// Devices describes the devices that the default registry finds, and the drivers
// that can't be used, with the reason.
func Devices() (found []DeviceInfo, unusable map[string]error) {
	unusable = map[string]error{}
	for _, name := range Drivers.Names() {
		drv, _ := Drivers.Get(name)
		infos, err := drv.Devices()
		if err != nil {
			unusable[name] = err
			continue
		}
		found = append(found, infos...)
	}
	return found, unusable
}
