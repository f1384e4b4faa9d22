package reuse

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/queue"
)

// asked is a base that notes the flags of what it is asked for.
type asked struct {
	allocator.Allocator
	flags allocator.Kind
}

func (a *asked) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	a.flags = r.Kind & allocator.ReuseFlags
	return allocator.Block{}, queue.ReadyNow(), allocator.OK
}

func TestOptionsNarrowTheGrounds(t *testing.T) {
	require.NoError(t, Layer.Table.Check())
	for _, c := range []struct {
		options      string
		grounds, sub allocator.Kind // for the stack; for the layer below
	}{
		{"", 0, 0},
		{"wait=on", allocator.MayWait, 0}, // only who has an operation to add it to may ask
		{"same=off", allocator.NoSame, allocator.NoSame},
		{"ordered=no,polled=0", allocator.NoOrdered | allocator.NoPolled, allocator.NoOrdered | allocator.NoPolled},
		{"same=off,wait=on", allocator.NoSame | allocator.MayWait, allocator.NoSame},
	} {
		v, err := Layer.Table.Parse(c.options)
		require.NoError(t, err)
		base := &asked{}
		l, err := Layer.New(base, nil, v)
		require.NoError(t, err)
		require.Equal(t, c.grounds, l.(allocator.Policy).Grounds(), c.options)
		_, _, o := l.Allocate(allocator.Request{Size: 1})
		require.Equal(t, allocator.OK, o)
		require.Equal(t, c.sub, base.flags, c.options)

		// A request can narrow, and keeps its own wish for a wait.
		l.Allocate(allocator.Request{Size: 1, Kind: allocator.NoPolled | allocator.MayWait})
		require.Equal(t, c.sub|allocator.NoPolled|allocator.MayWait, base.flags, c.options)
	}
	_, err := Layer.Table.Parse("samee=off")
	require.ErrorContains(t, err, `did you mean "same"`)
}
