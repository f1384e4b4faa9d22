package driver_test

import (
	"fmt"
	"log"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
)

// A registry of one's own, a device opened by name, and its plain way to get memory.
func ExampleRegistry() {
	drivers := &driver.Registry{}
	if err := drivers.Register(host.Driver()); err != nil {
		log.Fatal(err)
	}
	dev, err := drivers.Open("host:capacity=1GiB")
	if err != nil {
		log.Fatal(err)
	}
	raw := dev.(driver.Raw) // every device has it
	addr, taken, err := raw.Alloc(0, 1000, 256)
	if err != nil {
		log.Fatal(err)
	}
	free, total, err := dev.MemInfo(0)
	fmt.Println(taken, "taken:", total-free, "of", total, err)
	fmt.Println(raw.Free(0, addr), dev.Close())

	_, err = drivers.Open("hots")
	fmt.Println(err)
	// Output:
	// 1KiB taken: 1KiB of 1GiB <nil>
	// <nil> <nil>
	// spec: unknown device "hots" (valid: host); did you mean "host"?
	//   hots
	//   ^~~~ column 1
}
