// Package haltest finds out whether a decorator or a device of one's own keeps to
// the rules: memory is never touched too early, nothing is lost, nothing hangs.
//
// # Attack a decorator
//
// [Attack] runs random histories of a whole device with random stacks on a simulated
// device, and checks after every step what must hold. Name a registry that has your
// layer, and draw stacks that use it:
//
//	func TestMine(t *testing.T) {
//		layers := &allocator.Registry{}
//		layers.MustRegister(raw.Layer, pool.Layer, vmm.Layer, block.Layer, caching.Layer, allocator.Mint, mine.Layer)
//		setup := haltest.Setup{Allocators: layers, Stack: func(t *rapid.T) string {
//			return rapid.SampledFrom([]string{"raw+mine", "vmm+block+mine", "pool+mine+caching"}).Draw(t, "stack")
//		}}
//		rapid.Check(t, func(t *rapid.T) { haltest.Attack(t, setup) })
//	}
//
// A history that fails is shrunk, and rapid (pgregory.net/rapid) prints the flag that
// runs it again, from a seed or from a file. The flag -rapid.checks says how many
// histories are run, -rapid.steps how long they are on average; rapid.MakeFuzz makes a
// fuzz target of the same function. [Progress] asks whether waits that the runtime adds
// can make a program stand still that finishes without them. How much the two find is
// known: the mistakes listed in internal/mutant are planted one by one in Halyard's own
// tests, and each is caught.
//
// # The simulated device
//
// [New] makes a device whose queues move in virtual time, and only when told:
// [Device.Step] carries out the operation that ends next, [Device.Run] everything that
// can move, and [Device.Stuck] names the queues that can't. Whoever waits for the
// device moves it too, so tests that wait don't hang. How long operations last comes
// from a seed; [Adversary] is the default, with queues that crawl while others rush.
// A polled device ([Config].Polled) tells nobody that work is over until it is asked,
// as a GPU does. Driver calls can be counted ([Device.Calls]) and made to fail
// ([Device.FailNth], [Device.SetFault]), and the device can be lost ([Device.Lose]).
//
// Its memory is real: what operations write can be read back. One such device at a
// time, used from one goroutine, gives the same run each time.
//
// # The monitor
//
// A [Monitor] watches each simulated device and knows, for each byte, which operations
// may still touch it, by vector clocks made of what the hardware was given. It needs
// no cooperation: what a layer believes of order plays no part in it.
//
//	sim, _ := haltest.New(haltest.Config{Seed: 1})
//	dev, _ := hal.OpenDriver(sim, hal.WithAllocator("vmm+block"))
//	… // use dev
//	sim.Run()
//	if err := sim.Monitor().Err(); err != nil {
//		t.Fatal(err)
//	}
//
// # Cost
//
// A history of sixty steps takes 3 to 10 ms, most of it in the checks of every
// structure after every step. Locks are taken in the order Device.stepping → locks of
// hal and of hal/queue → Device.mu → Monitor.mu.
package haltest
