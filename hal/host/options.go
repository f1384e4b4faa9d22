package host

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/spec"
	"github.com/halyard-go/halyard/internal/vmem"
)

const (
	defaultCapacity    = 64 * memory.GiB
	defaultGranularity = 2 * memory.MiB
	defaultQueues      = 4
	maxQueues          = 256
	maxCapacity        = memory.PiB
	maxPages           = math.MaxUint32
	// Alignment is what every allocation is aligned to, and the unit in which the
	// capacity is counted.
	Alignment memory.Bytes = 256
)

var table = &spec.Table{
	Name:    "host",
	Summary: "host memory as device memory, with asynchronous queues",
	Doc: "Always there. Address space is reserved as needed and memory is used when it is touched, " +
		"so the capacity may be far more than the machine has.",
	Options: []spec.Option{
		{Name: "capacity", Kind: spec.Size, Default: "64GiB", Min: "4KiB", Max: "1PiB", Help: "size of the device-local heap"},
		{Name: "host_capacity", Kind: spec.Size, Min: "4KiB", Max: "1PiB", Help: "size of the host-visible heap, and of the shared one; not given, that of the device-local heap"},
		{Name: "queues", Kind: spec.Count, Default: "4", Min: "1", Max: "256", Help: "queues opened with the device"},
		{Name: "granularity", Kind: spec.Size, Default: "2MiB", Min: "4KiB", Max: "1GiB", Help: "size of a page for vmm, a power of two and a multiple of the system's page"},
		{Name: "alloc_cost", Kind: spec.Duration, Default: "0", Help: "modelled time of a call that takes or maps memory"},
		{Name: "free_cost", Kind: spec.Duration, Default: "0", Help: "modelled time of a call that gives back or unmaps memory"},
	},
	Validate: func(v *spec.Values) error {
		c := fromValues(v)
		if err := c.checkGranularity(); err != nil {
			return v.Errorf("granularity", "%w", err)
		}
		if v.IsSet("granularity") && c.Granularity > c.Capacity {
			return v.Errorf("granularity", "no page of %v fits in a capacity of %v", c.Granularity, c.Capacity)
		}
		return c.Validate()
	},
}

// systemPage is the size of a page of the operating system.
var systemPage = memory.Bytes(vmem.PageSize())

// Config says what device to play. The zero value is the default device.
type Config struct {
	Capacity     memory.Bytes // of the device-local heap; 0 is 64 GiB
	HostCapacity memory.Bytes // of the host-visible heap and of the shared one; 0 is Capacity
	Queues       int          // opened with the device by hal; 0 is 4
	Granularity  memory.Bytes // of pages; 0 is 2 MiB
	AllocCost    time.Duration
	FreeCost     time.Duration
}

func (c Config) withDefaults() Config {
	if c.Capacity == 0 {
		c.Capacity = defaultCapacity
	}
	if c.HostCapacity == 0 {
		c.HostCapacity = c.Capacity
	}
	if c.Queues == 0 {
		c.Queues = defaultQueues
	}
	if c.Granularity == 0 {
		c.Granularity = defaultGranularity
	}
	return c
}

// Validate returns all that is wrong with the configuration, joined.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("host: "+format, args...)) }
	for _, s := range []struct {
		name string
		size memory.Bytes
	}{{"capacity", c.Capacity}, {"host_capacity", c.HostCapacity}} {
		if s.size < Alignment || s.size > maxCapacity {
			bad("%s %v is not within %v and %v", s.name, s.size, Alignment, maxCapacity)
		}
	}
	if c.Queues < 1 || c.Queues > maxQueues {
		bad("%d queues are not within 1 and %d", c.Queues, maxQueues)
	}
	if err := c.checkGranularity(); err != nil {
		bad("%w", err)
	}
	if c.AllocCost < 0 || c.FreeCost < 0 {
		bad("costs of %v and %v: they can't be negative", c.AllocCost, c.FreeCost)
	}
	return errors.Join(errs...)
}

func (c Config) checkGranularity() error {
	switch {
	case !memory.IsPowerOfTwo(c.Granularity) || c.Granularity%systemPage != 0:
		return fmt.Errorf("granularity %v is not a power of two that is a multiple of %v", c.Granularity, systemPage)
	case c.Capacity/c.Granularity > maxPages:
		return fmt.Errorf("a capacity of %v has more than %d pages of %v", c.Capacity, int64(maxPages), c.Granularity)
	}
	return nil
}

// modelled is what driver.Info says of the costs.
func (c Config) modelled() string {
	var parts []string
	if c.AllocCost > 0 {
		parts = append(parts, "alloc_cost="+c.AllocCost.String())
	}
	if c.FreeCost > 0 {
		parts = append(parts, "free_cost="+c.FreeCost.String())
	}
	return strings.Join(parts, " ")
}

func fromValues(v *spec.Values) Config {
	return Config{
		Capacity: v.Size("capacity"), HostCapacity: v.Size("host_capacity"), Queues: int(v.Count("queues")),
		Granularity: v.Size("granularity"), AllocCost: v.Duration("alloc_cost"), FreeCost: v.Duration("free_cost"),
	}
}

// Driver is the driver named host.
func Driver() driver.Driver { return hostDriver{} }

type hostDriver struct{}

func (hostDriver) Table() *spec.Table { return table }

func (hostDriver) Devices() ([]driver.Info, error) {
	c := Config{}.withDefaults()
	return []driver.Info{c.info(havePages())}, nil
}

func (hostDriver) Open(v *spec.Values) (driver.Device, error) { return Open(fromValues(v)) }

// havePages reports whether this system can move pages.
func havePages() bool {
	p, err := vmem.NewPages(int64(systemPage), int64(systemPage))
	if err != nil {
		return false
	}
	return p.Close() == nil
}
