package memory_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal/memory"
)

// card is what a device with its own memory offers.
var card = memory.Heaps{
	{Name: "hbm", Type: memory.DeviceLocal, Usage: memory.Default | memory.SharingExport, Capacity: 80 * memory.GiB, MinAlignment: 256},
	{Name: "pinned", Type: memory.HostLocal | memory.HostCoherent | memory.DeviceVisible, Usage: memory.Transfer | memory.Mapping, MaxAllocation: 4 * memory.GiB},
	{Name: "bar", Type: memory.DeviceLocal | memory.HostVisible | memory.HostCoherent, Usage: memory.Default | memory.Mapping, Capacity: 256 * memory.MiB},
}

func TestHeapsFind(t *testing.T) {
	for _, tt := range []struct {
		name string
		t    memory.Type
		u    memory.Usage
		want string // "" is none
	}{
		{"anything", 0, 0, "hbm"},
		{"by type", memory.DeviceLocal, 0, "hbm"},
		{"by usage", 0, memory.MappingScoped, "pinned"},
		{"by both", memory.DeviceLocal, memory.Mapping, "bar"},
		{"first in order wins", memory.DeviceVisible, memory.Transfer, "hbm"},
		{"all bits are needed", memory.DeviceLocal | memory.HostVisible, memory.Default, "bar"},
		{"local contains visible", memory.HostVisible, memory.Mapping, "pinned"},
		{"no such type", memory.HostCached, 0, ""},
		{"no such usage", memory.DeviceLocal, memory.SharingReplicate, ""},
		{"usage of another heap does not count", memory.HostLocal, memory.DispatchStorage, ""},
		{"optimal alone is any type", memory.Optimal, memory.Mapping, "pinned"},
		{"optimal prefers the other bits", memory.Optimal | memory.DeviceLocal, memory.Mapping, "bar"},
		{"optimal falls back", memory.Optimal | memory.HostLocal, memory.DispatchStorage, "hbm"},
		{"optimal still needs the usage", memory.Optimal | memory.HostLocal, memory.SharingReplicate, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i, ok := card.Find(tt.t, tt.u)
			assert.Equal(t, tt.want != "", ok)
			if ok {
				assert.Equal(t, tt.want, card[i].Name)
			}
		})
	}
	_, ok := memory.Heaps(nil).Find(0, 0)
	assert.False(t, ok)
}

func TestHeapString(t *testing.T) {
	assert.Equal(t, "hbm: device_local, usage default|sharing_export, capacity 80GiB, alignment 256B", card[0].String())
	assert.Equal(t, "pinned: host_local|device_visible|host_coherent, usage transfer|mapping, max allocation 4GiB", card[1].String())
	assert.Equal(t, "none, usage none", memory.Heap{}.String())
}

func TestHeapKey(t *testing.T) {
	for _, tt := range []struct {
		in      string
		want    memory.HeapKey
		text    string
		matches string // initials of the heaps of card that match
	}{
		{"*", memory.HeapKey{AnyType: true}, "*", "hpb"},
		{" * ", memory.HeapKey{AnyType: true}, "*", "hpb"},
		{"*;*", memory.HeapKey{AnyType: true}, "*", "hpb"},
		{"*;none", memory.HeapKey{AnyType: true}, "*", "hpb"},
		{"*;transfer", memory.HeapKey{AnyType: true, Usage: memory.Transfer}, "*;transfer", "hpb"},
		{"*;MAPPING", memory.HeapKey{AnyType: true, Usage: memory.Mapping}, "*;mapping", "pb"},
		{"device_local", memory.HeapKey{Type: memory.DeviceLocal}, "device_local", "hb"},
		{"device_local;*", memory.HeapKey{Type: memory.DeviceLocal}, "device_local", "hb"},
		{"host_local", memory.HeapKey{Type: memory.HostLocal}, "host_local", "p"},
		{
			"host_visible|device_local ; transfer|mapping",
			memory.HeapKey{Type: memory.DeviceLocal | memory.HostVisible, Usage: memory.Transfer | memory.Mapping},
			"device_local|host_visible;transfer|mapping", "b",
		},
		{"optimal|device_local", memory.HeapKey{Type: memory.Optimal | memory.DeviceLocal}, "device_local|optimal", "hb"},
		{"none", memory.HeapKey{}, "none", "hpb"},
		{"host_cached", memory.HeapKey{Type: memory.HostCached}, "host_cached", ""},
	} {
		k, err := memory.ParseHeapKey(tt.in)
		require.NoError(t, err, tt.in)
		assert.Equal(t, tt.want, k, tt.in)
		assert.Equal(t, tt.text, k.String(), tt.in)
		var matches string
		for _, h := range card {
			if k.Matches(h) {
				matches += h.Name[:1]
			}
		}
		assert.Equal(t, tt.matches, matches, tt.in)
	}
}

func TestHeapKeyErrors(t *testing.T) {
	for _, tt := range []struct {
		in, reason    string
		offset, width int
	}{
		{"", "empty name", 0, 0},
		{";transfer", "empty name", 0, 0},
		{"device_local;", "empty name", 13, 0},
		{"*|device_local", `unknown name "*"`, 0, 1},
		{"hbm", `unknown name "hbm"`, 0, 3},
		{"device_local|hbm;transfer", `unknown name "hbm"`, 13, 3},
		{"device_local;transfer|speed", `unknown name "speed"`, 22, 5},
		{"device_local;transfer;mapping", `unknown name "transfer;mapping"`, 13, 16},
	} {
		k, err := memory.ParseHeapKey(tt.in)
		var e *memory.ParseError
		if !assert.ErrorAs(t, err, &e, tt.in) {
			continue
		}
		assert.Zero(t, k, tt.in)
		assert.Equal(t, "heap key", e.What)
		assert.Contains(t, e.Reason, tt.reason, tt.in)
		assert.Equal(t, tt.offset, e.Offset, tt.in)
		assert.Equal(t, tt.width, e.Width, tt.in)
		assert.Contains(t, e.Valid, "*", tt.in)
	}
}

func TestHeapKeyRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := memory.HeapKey{
			Type:    memory.Type(rapid.Uint32().Draw(t, "type")),
			Usage:   memory.Usage(rapid.Uint32().Draw(t, "usage")),
			AnyType: rapid.Bool().Draw(t, "any"),
		}
		if k.AnyType {
			k.Type = 0
		}
		if got, err := memory.ParseHeapKey(k.String()); err != nil || got != k {
			t.Fatalf("%+v prints %q, which reads as %+v, %v", k, k, got, err)
		}
	})
}

func FuzzParseHeapKey(f *testing.F) {
	for _, s := range []string{"", "*", "*;transfer", "device_local|host_visible;transfer", "0x80;0x1", ";", "none;none", "a|b;c|d"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		k, err := memory.ParseHeapKey(s)
		if err != nil {
			e, ok := err.(*memory.ParseError)
			if !ok || e.Text != s || e.Offset < 0 || e.Offset+e.Width > len(s) {
				t.Fatalf("ParseHeapKey(%q): %#v", s, err)
			}
			return
		}
		if again, err := memory.ParseHeapKey(k.String()); err != nil || again != k {
			t.Fatalf("%q reads as %v, which reads as %v, %v", s, k, again, err)
		}
	})
}
