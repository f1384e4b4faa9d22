package trace

import (
	"errors"
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// A replay walks millions of events, so the size of one is part of the design.
func TestEventSize(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(Event{}), uintptr(24))
}

func TestBuilder(t *testing.T) {
	b := Builder{Name: "x", Comments: []string{"hand made"}}
	add := func(bytes int64, stream int32) int32 {
		t.Helper()
		id, err := b.Alloc(bytes, stream)
		require.NoError(t, err)
		return id
	}
	require.EqualValues(t, 0, add(100, 0))
	require.EqualValues(t, 1, add(50, 2))
	require.NoError(t, b.Free(0, 7))
	require.EqualValues(t, 2, add(0, 0))
	require.EqualValues(t, 3, add(60, 0))

	tr, err := b.Trace()
	require.NoError(t, err)
	require.Equal(t, &Trace{
		Name:     "x",
		Comments: []string{"hand made"},
		Events: []Event{
			{Bytes: 100},
			{Bytes: 50, ID: 1, Stream: 2},
			{ID: 0, Stream: 7, Free: true},
			{ID: 2},
			{Bytes: 60, ID: 3},
		},
		Allocs:   4,
		Frees:    1,
		PeakLive: 150,
		Streams:  8,
	}, tr)
	require.Equal(t, []int32{1, 2, 3}, tr.Leftover())

	_, err = b.Trace()
	require.ErrorIs(t, err, ErrEmpty, "the builder starts afresh")
}

func TestLeftoverNone(t *testing.T) {
	var b Builder
	id, err := b.Alloc(1, 0)
	require.NoError(t, err)
	require.NoError(t, b.Free(id, 0))
	tr, err := b.Trace()
	require.NoError(t, err)
	require.Empty(t, tr.Leftover())
}

// A refused call leaves no mark on the trace.
func TestBuilderErrors(t *testing.T) {
	b := Builder{Name: "x", limit: 3}
	_, err := b.Alloc(1<<62, 0)
	require.NoError(t, err)
	_, err = b.Alloc(0, 0)
	require.NoError(t, err)
	require.NoError(t, b.Free(1, 0))

	alloc := func(bytes int64, stream int32) error { _, err := b.Alloc(bytes, stream); return err }
	for _, tt := range []struct {
		err  error
		want string
	}{
		{alloc(-1, 0), "x: size -1 is negative"},
		{alloc(1<<62, 0), "x: size 4611686018427387904 does not fit: with 4611686018427387904 bytes live the sum would pass 9223372036854775807"},
		{alloc(math.MaxInt64, 0), "x: size 9223372036854775807 does not fit: with 4611686018427387904 bytes live the sum would pass 9223372036854775807"},
		{alloc(1, -1), "x: stream -1 is outside 0 to 4095"},
		{alloc(1, MaxStream+1), "x: stream 4096 is outside 0 to 4095"},
		{alloc(1, 0), "x: more than 3 events"},
		{b.Free(-1, 0), "x: id -1 freed but never allocated"},
		{b.Free(2, 0), "x: id 2 freed but never allocated"},
		{b.Free(1, 0), "x: id 1 freed twice"},
		{b.Free(0, MaxStream+1), "x: stream 4096 is outside 0 to 4095"},
		{b.Free(0, 0), "x: more than 3 events"},
	} {
		require.EqualError(t, tt.err, tt.want)
		_, typed := errors.AsType[*Error](tt.err)
		require.True(t, typed)
	}

	tr, err := b.Trace()
	require.NoError(t, err)
	require.Equal(t, []Event{{Bytes: 1 << 62}, {ID: 1}, {ID: 1, Free: true}}, tr.Events)
	require.Equal(t, int64(1<<62), tr.PeakLive)
	require.Equal(t, 1, tr.Streams)
}

func TestErrorWithoutFile(t *testing.T) {
	require.EqualError(t, &Error{Line: 3, Reason: "bad"}, "trace:3: bad")
	require.EqualError(t, &Error{Reason: "bad"}, "trace: bad")
}

// draw makes any valid trace, and checks the totals against a plain count.
func draw(t *rapid.T) *Trace {
	b := Builder{Comments: rapid.SliceOfN(rapid.StringMatching(`[^\s]?|[a-z:#]+( +[a-z]+)*`), 0, 3).Draw(t, "comments")}
	if len(b.Comments) == 0 {
		b.Comments = nil
	}
	var live []int32
	var sum, peak int64
	size := map[int32]int64{}
	frees := 0
	stream := rapid.Int32Range(0, MaxStream)
	for i := range rapid.IntRange(1, 60).Draw(t, "events") {
		if i > 0 && len(live) > 0 && rapid.Bool().Draw(t, "free") {
			at := rapid.IntRange(0, len(live)-1).Draw(t, "which")
			if err := b.Free(live[at], stream.Draw(t, "stream")); err != nil {
				t.Fatal(err)
			}
			sum -= size[live[at]]
			live = append(live[:at], live[at+1:]...)
			frees++
			continue
		}
		n := rapid.Int64Range(0, math.MaxInt64/60).Draw(t, "bytes")
		id, err := b.Alloc(n, stream.Draw(t, "stream"))
		if err != nil {
			t.Fatal(err)
		}
		live, size[id] = append(live, id), n
		sum += n
		peak = max(peak, sum)
	}
	tr, err := b.Trace()
	if err != nil {
		t.Fatal(err)
	}
	if tr.PeakLive != peak || tr.Frees != frees || tr.Allocs != len(size) || len(tr.Leftover()) != len(live) {
		t.Fatalf("totals %d %d %d, want %d %d %d", tr.PeakLive, tr.Frees, tr.Allocs, peak, frees, len(size))
	}
	return tr
}
