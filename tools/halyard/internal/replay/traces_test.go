package replay

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/internal/trace"
)

// tracesVariable names a folder of recorded traces, absolute or relative to this
// package or to the root of the module.
const tracesVariable = "HALYARD_TRACES"

// recorded returns the traces in the folder, smallest first to fail first.
func recorded(t *testing.T) []*trace.Trace {
	t.Helper()
	folder := os.Getenv(tracesVariable)
	if folder == "" {
		t.Skip("set " + tracesVariable + " to a folder of traces to replay them through every stack")
	}
	if !filepath.IsAbs(folder) {
		if _, err := os.Stat(folder); err != nil {
			folder = filepath.Join(moduleRoot(t), folder)
		}
	}
	var files []string
	for _, pattern := range []string{"*.trace", "*.trace.gz"} {
		found, err := filepath.Glob(filepath.Join(folder, pattern))
		require.NoError(t, err)
		files = append(files, found...)
	}
	require.NotEmpty(t, files, "no traces in %s", folder)
	var list []*trace.Trace
	for _, f := range files {
		tr, err := trace.Open(f)
		require.NoError(t, err)
		if testing.Short() && len(tr.Events) > 5_000 {
			continue
		}
		list = append(list, tr)
	}
	return list
}

func moduleRoot(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		require.NotEqual(t, dir, up, "no go.mod above the test")
		dir = up
	}
}

func TestRecordedTracesThroughEveryStack(t *testing.T) {
	list := recorded(t)
	for _, stack := range []string{
		"", "raw", "pool", "vmm",
		"raw+block", "pool+block", "vmm+block",
		"raw+caching", "pool+caching", "vmm+caching",
		"raw+block+caching", "pool+block+caching", "vmm+block+caching",
	} {
		name, options := "default", []hal.Option(nil)
		if stack != "" {
			name, options = stack, []hal.Option{hal.WithAllocator(stack)}
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, tr := range list {
				passes := 2
				if stack != "" && !strings.Contains(stack, "+") {
					// A bare source asks the operating system for every buffer.
					if passes = 1; len(tr.Events) > 10_000 {
						continue
					}
				}
				if len(tr.Events) > 30_000 && stack != "" {
					passes = 1
				}
				r := replay(t, tr, Config{
					Open:   opener(fmt.Sprintf("host:queues=%d", tr.Streams), options...),
					Passes: passes, Verify: true,
				})
				require.True(t, r.OK(), "%s: %v %v", tr.Name, r.FirstError, r.Problems)
				require.Zero(t, r.Overlaps, tr.Name)
				require.Equal(t, uint64(passes*tr.Allocs), r.Allocs, tr.Name)
				require.Equal(t, r.Allocs, r.Frees, tr.Name)
				require.Equal(t, hal.Bytes(tr.PeakLive), r.PeakLive, tr.Name)
				require.GreaterOrEqual(t, r.PeakHeld, r.PeakLive, tr.Name)
				if stack == "" {
					require.Zero(t, r.DriverCallsByPass[1], "%s: a warm pass that fits makes no driver call", tr.Name)
				}
			}
		})
	}
}

func TestRecordedTracesOnATightDevice(t *testing.T) {
	for _, tr := range recorded(t) {
		t.Run(tr.Name, func(t *testing.T) {
			t.Parallel()
			device := fmt.Sprintf("host:queues=%d,capacity=%d", tr.Streams, tr.PeakLive/4*5)
			if strings.HasPrefix(tr.Name, "minimalloc.") || strings.HasPrefix(tr.Name, "iree.") {
				// A MiB or two is less than a page of 2 MiB and its neighbour.
				device = fmt.Sprintf("host:queues=%d,capacity=%d,granularity=4KiB", tr.Streams, tr.PeakLive/10*21)
			}
			r := replay(t, tr, Config{Open: opener(device), Passes: 1})
			require.True(t, r.OK(), "%s: %v %v", device, r.FirstError, r.Problems)
		})
	}
}
