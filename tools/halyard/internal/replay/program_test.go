package replay

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/internal/trace"
)

func parse(t testing.TB, text string) *trace.Trace {
	t.Helper()
	tr, err := trace.Read("test.trace", strings.NewReader(text))
	require.NoError(t, err)
	return tr
}

func TestEvents(t *testing.T) {
	tr := parse(t, "a 7 100\na 8 0 2\nf 7 1\n")
	require.Equal(t, []event{{100, 0}, {0, 1}, {0, ^int32(0)}}, events(tr))
}

func TestQueueEvents(t *testing.T) {
	tr := parse(t, "a 0 100 0\na 1 200 1\na 2 300 4\na 3 400 0\nf 0 1\nf 1 1\nf 2 2\nf 3 3\n")

	list, signals, home := queueEvents(tr, 3)
	require.Equal(t, []queueEvent{
		{size: 100, value: 1, id: 0, queue: 0, home: 0},
		{size: 200, id: 1, queue: 1, home: 1},
		{size: 300, value: 1, id: 2, queue: 1, home: 1}, // stream 4 is on queue 1
		{size: 400, id: 3, queue: 0, home: 0},
		{value: 1, id: ^int32(0), queue: 1, home: 0},
		{id: ^int32(1), queue: 1, home: 1},
		{value: 1, id: ^int32(2), queue: 2, home: 1},
		{id: ^int32(3), queue: 0, home: 0}, // stream 3 is on queue 0 too
	}, list)
	require.Equal(t, []uint64{1, 1, 0}, signals)
	require.Equal(t, []int32{0, 1, 1, 0}, home)

	_, signals, _ = queueEvents(tr, 1)
	require.Equal(t, []uint64{0}, signals, "one queue needs no semaphore")
}
