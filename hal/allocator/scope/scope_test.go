package scope_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator/scope"
	"github.com/halyard-go/halyard/hal/haltest"
)

var stacks = []string{"raw+scope", "vmm+block+scope", "pool+scope", "block+caching+scope"}

func onStacks(t *testing.T, f func(t *testing.T, d *hal.Device)) {
	for _, s := range stacks {
		t.Run(s, func(t *testing.T) {
			d := open(t, s)
			f(t, d)
			require.NoError(t, d.Check())
		})
	}
}

func open(t testing.TB, stack string) *hal.Device {
	d, err := hal.Open("host:capacity=256MiB,queues=2", hal.WithAllocator(stack))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close(context.Background())) })
	return d
}

func newScope(t testing.TB, o hal.ScopeOptions, d ...*hal.Device) *hal.Scope {
	c, err := hal.NewScope(o, d...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Free()) })
	return c
}

func alloca(t testing.TB, ctx context.Context, d *hal.Device, size hal.Bytes) hal.Buffer {
	t.Helper()
	b, err := d.Queue(0).Alloca(ctx, hal.Params{Size: size}, nil, nil)
	require.NoError(t, err)
	require.NoError(t, d.Queue(0).Fill(b.All(), []byte{1}, nil, nil))
	return b
}

func TestTheNextPassGetsTheSameMemory(t *testing.T) {
	onStacks(t, func(t *testing.T, d *hal.Device) {
		c := newScope(t, hal.ScopeOptions{}, d)
		seen := map[uint64]bool{}
		var held hal.Bytes
		for pass := range 50 {
			require.NoError(t, c.Do(context.Background(), func(ctx context.Context) error {
				for i := range 8 {
					b := alloca(t, ctx, d, hal.Bytes(1+i)*64*hal.KiB)
					if pass > 0 {
						require.True(t, seen[b.Address()])
					}
					seen[b.Address()] = true
					if i%2 == 0 { // the handle ends, the memory stays the pass's
						require.NoError(t, d.Queue(0).Dealloca(b, nil, nil))
						require.False(t, b.Valid())
					}
				}
				return nil
			}))
			require.NoError(t, d.Check())
			if pass == 0 {
				held = d.Stats().Source().Held
			}
			require.Equal(t, held, d.Stats().Source().Held)
		}
		f := c.Figures()
		require.EqualValues(t, 8*49, f.Hits)
		require.EqualValues(t, 8, f.Misses)
		require.Zero(t, f.Busy)
		require.NotZero(t, f.Free)
		require.Contains(t, c.String(), "free, 0 B busy in 8 blocks")
		require.NoError(t, c.Free())
		require.Zero(t, c.Figures().Free)
		require.ErrorIs(t, c.Do(context.Background(), func(context.Context) error { return nil }), scope.ErrFreed)
	})
}

func TestTheEndOfAPassRevokesItsHandles(t *testing.T) {
	onStacks(t, func(t *testing.T, d *hal.Device) {
		c := newScope(t, hal.ScopeOptions{}, d)
		var in, out hal.Buffer
		boom := errors.New("boom")
		require.ErrorIs(t, c.Do(context.Background(), func(ctx context.Context) error {
			in = alloca(t, ctx, d, 4096)
			out = alloca(t, hal.WithoutScope(ctx), d, 4096)
			return boom
		}), boom)
		require.False(t, in.Valid())
		require.ErrorIs(t, in.Release(), hal.ErrReleased)
		require.True(t, out.Valid())
		require.NoError(t, out.Release())
		require.Panics(t, func() {
			_ = c.Do(context.Background(), func(ctx context.Context) error {
				in = alloca(t, ctx, d, 4096)
				panic("in a pass")
			})
		})
		require.False(t, in.Valid())
		require.Zero(t, c.Figures().Active)
	})
}

// Passes of one cache inside each other and side by side, and of different caches,
// have nothing in common while they run.
func TestPassesDontShareWhileTheyRun(t *testing.T) {
	onStacks(t, func(t *testing.T, d *hal.Device) {
		a, b := newScope(t, hal.ScopeOptions{}, d), newScope(t, hal.ScopeOptions{}, d)
		for range 3 {
			require.NoError(t, a.Do(context.Background(), func(ctx context.Context) error {
				x := alloca(t, ctx, d, 4096)
				return errors.Join(
					a.Do(ctx, func(ctx context.Context) error {
						require.NotEqual(t, x.Address(), alloca(t, ctx, d, 4096).Address())
						return nil
					}),
					b.Do(ctx, func(ctx context.Context) error {
						require.NotEqual(t, x.Address(), alloca(t, ctx, d, 4096).Address())
						require.ErrorIs(t, b.Free(), scope.ErrActive)
						return nil
					}))
			}))
		}
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				for range 100 {
					err := a.Do(context.Background(), func(ctx context.Context) error {
						var inner sync.WaitGroup // goroutines of a pass belong to it
						bufs := make([]hal.Buffer, 3)
						for i := range bufs {
							inner.Go(func() {
								bufs[i], _ = d.Queue(w%2).Alloca(ctx, hal.Params{Size: 4096 + hal.Bytes(i)}, nil, nil)
							})
						}
						inner.Wait()
						for _, x := range bufs {
							if !x.Valid() {
								return errors.New("taken away during the pass")
							}
						}
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		require.Zero(t, a.Figures().Busy)
		require.LessOrEqual(t, a.Figures().Blocks, 2+24+2)
		require.NoError(t, d.Check())
	})
}

func TestOnlyTheSameRequestIsServedAgain(t *testing.T) {
	d := open(t, "raw+scope")
	c := newScope(t, hal.ScopeOptions{}, d)
	for _, p := range []hal.Params{
		{Size: 4096}, {Size: 4095}, {Size: 4096, Align: 4096}, {Size: 4096, Type: hal.HostVisible},
		{Size: 4096, Usage: hal.DispatchStorage}, {Size: 4096, Access: hal.ReadAccess},
	} {
		require.NoError(t, c.Do(context.Background(), func(ctx context.Context) error {
			_, err := d.Queue(0).Alloca(ctx, p, nil, nil)
			return err
		}))
	}
	require.EqualValues(t, 6, c.Figures().Misses)
}

func TestBoundsAndFreeAtEnd(t *testing.T) {
	d := open(t, "raw+scope")
	for _, o := range []hal.ScopeOptions{{FreeAtEnd: true}, {MaxBytes: 10 << 10}} {
		c := newScope(t, o, d)
		for range 3 {
			require.NoError(t, c.Do(context.Background(), func(ctx context.Context) error {
				for i := range 4 {
					alloca(t, ctx, d, hal.Bytes(4096+i*256))
				}
				return nil
			}))
			require.NoError(t, d.Queue(0).Drain(context.Background()))
			d.Trim(hal.TiB) // what is pending goes
			require.LessOrEqual(t, c.Figures().Free, o.MaxBytes)
			require.LessOrEqual(t, d.Stats().Source().Held, o.MaxBytes)
		}
		require.NoError(t, c.Free())
	}
}

// What a dealloca still has, or the host has mapped, is its holder's to end.
func TestWhatCantBeRevokedComesBackLater(t *testing.T) {
	onStacks(t, func(t *testing.T, d *hal.Device) {
		c := newScope(t, hal.ScopeOptions{}, d)
		gate := hal.NewSemaphore(0)
		var mapped hal.Buffer
		require.NoError(t, c.Do(context.Background(), func(ctx context.Context) error {
			b := alloca(t, ctx, d, 4096)
			require.NoError(t, d.Queue(1).Dealloca(b, gate.At(1), gate.At(2)))
			var err error
			mapped, err = d.Allocate(ctx, hal.Params{Size: 64, Type: hal.HostVisible})
			require.NoError(t, err)
			_, err = mapped.Map(ctx)
			return err
		}))
		require.NotZero(t, c.Figures().Busy)
		require.True(t, mapped.Valid())
		require.NoError(t, gate.Signal(1))
		require.NoError(t, gate.Wait(context.Background(), 2))
		require.NoError(t, mapped.Unmap())
		require.NoError(t, mapped.Release())
		require.Zero(t, c.Figures().Busy)
		require.NoError(t, d.Check())
	})
}

// The ladder takes what caches keep, and memory in use on other queues when a pass
// ends isn't handed out before.
func TestTheLadderAndTheMonitor(t *testing.T) {
	for _, stack := range []string{"raw+scope", "vmm+block+scope", "pool+scope"} {
		sim, err := haltest.New(haltest.Config{Capacity: 4 << 20})
		require.NoError(t, err)
		d, err := hal.OpenDriver(sim, hal.WithAllocator(stack))
		require.NoError(t, err)
		c := newScope(t, hal.ScopeOptions{}, d)
		for range 20 {
			require.NoError(t, c.Do(context.Background(), func(ctx context.Context) error {
				born := hal.NewSemaphore(0)
				b, err := d.Queue(0).Alloca(ctx, hal.Params{Size: hal.MiB}, nil, born.At(1))
				require.NoError(t, err)
				require.NoError(t, d.Queue(1).Fill(b.All(), []byte{1}, born.At(1), nil)) // outlives the pass
				return nil
			}))
			require.NoError(t, d.Check())
		}
		big, err := d.Allocate(context.Background(), hal.Params{Size: 4 * hal.MiB})
		require.NoError(t, err, "what caches keep never stands in the way")
		require.NoError(t, big.Release())
		require.NoError(t, sim.Monitor().Err())
		sim.Run()
		require.NoError(t, d.Close(context.Background()))
	}
}

func TestAForgottenCacheIsFreed(t *testing.T) {
	d := open(t, "raw+scope")
	func() {
		c, err := hal.NewScope(hal.ScopeOptions{}, d)
		require.NoError(t, err)
		require.NoError(t, c.Do(context.Background(), func(ctx context.Context) error {
			alloca(t, ctx, d, hal.MiB)
			return nil
		}))
	}()
	require.NotZero(t, d.Stats().Source().Held)
	require.Eventually(t, func() bool {
		runtime.GC()
		d.Trim(hal.TiB)
		return d.Stats().Source().Held == 0
	}, 10*time.Second, time.Millisecond)
}

func TestOneCacheServesSeveralDevices(t *testing.T) {
	a, b := open(t, "raw+scope"), open(t, "vmm+block+scope")
	c := newScope(t, hal.ScopeOptions{}, a, b)
	for range 3 {
		require.NoError(t, c.Do(context.Background(), func(ctx context.Context) error {
			alloca(t, ctx, a, 8192)
			alloca(t, ctx, b, 4096)
			return nil
		}))
	}
	require.EqualValues(t, 12288, c.Figures().Free)
	require.NoError(t, a.Queue(0).Drain(context.Background()))
	a.Trim(0)
	require.EqualValues(t, 4096, c.Figures().Free, "each device's share is given back apart")
}

func TestAScopeNeedsItsLayer(t *testing.T) {
	d := open(t, "raw")
	_, err := hal.NewScope(hal.ScopeOptions{}, d)
	require.ErrorIs(t, err, hal.ErrUnsupported)
	require.ErrorContains(t, err, "as raw+scope")
	_, err = hal.Open("host", hal.WithAllocator("raw+scope+caching"))
	require.ErrorContains(t, err, "scope must be the last layer")
	_, err = hal.NewScope(hal.ScopeOptions{})
	require.ErrorIs(t, err, hal.ErrInvalid)
}
