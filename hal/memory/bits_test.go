package memory_test

import (
	"encoding/json"
	"math/bits"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal/memory"
)

func TestTypeText(t *testing.T) {
	for _, tt := range []struct {
		x    memory.Type
		text string
	}{
		{0, "none"},
		{memory.Optimal, "optimal"},
		{memory.HostVisible, "host_visible"},
		{memory.HostLocal, "host_local"},
		{memory.HostLocal | memory.HostVisible, "host_local"},
		{memory.HostLocal | memory.HostCoherent | memory.HostCached, "host_local|host_coherent|host_cached"},
		{memory.DeviceVisible, "device_visible"},
		{memory.DeviceLocal, "device_local"},
		{memory.DeviceLocal | memory.HostVisible, "device_local|host_visible"},
		{memory.DeviceLocal | memory.HostLocal | memory.Optimal, "device_local|host_local|optimal"},
		{memory.DeviceLocal &^ memory.DeviceVisible, "0x20"},
		{memory.HostLocal &^ memory.HostVisible, "0x40"},
		{memory.DeviceLocal | 1<<31, "device_local|0x80000000"},
	} {
		assert.Equal(t, tt.text, tt.x.String())
		got, err := memory.ParseType(tt.text)
		require.NoError(t, err)
		assert.Equal(t, tt.x, got)
	}
}

func TestUsageText(t *testing.T) {
	for _, tt := range []struct {
		x    memory.Usage
		text string
	}{
		{0, "none"},
		{memory.Default, "default"},
		{memory.Default | memory.Mapping, "default|mapping"},
		{memory.Transfer, "transfer"},
		{memory.TransferSource, "transfer_source"},
		{memory.DispatchStorage, "dispatch_storage"},
		{memory.DispatchStorageRead | memory.TransferTarget, "transfer_target|dispatch_storage_read"},
		{memory.Dispatch | memory.Transfer, "dispatch|transfer"},
		{memory.Dispatch | memory.MappingScoped, "dispatch|mapping_scoped"},
		{memory.SharingExport | memory.SharingImmutable, "sharing_export|sharing_immutable"},
		{1 << 31, "0x80000000"},
	} {
		assert.Equal(t, tt.text, tt.x.String())
		got, err := memory.ParseUsage(tt.text)
		require.NoError(t, err)
		assert.Equal(t, tt.x, got)
	}
}

func TestAccessText(t *testing.T) {
	for _, tt := range []struct {
		x    memory.Access
		text string
	}{
		{0, "none"},
		{memory.Read, "read"},
		{memory.ReadWrite, "read|write"},
		{memory.Write | memory.Discard, "write|discard"},
		{memory.All, "all"},
		{memory.All | 0x80, "all|0x80"},
	} {
		assert.Equal(t, tt.text, tt.x.String())
		got, err := memory.ParseAccess(tt.text)
		require.NoError(t, err)
		assert.Equal(t, tt.x, got)
	}
}

func TestBitsParseLeniently(t *testing.T) {
	for text, want := range map[string]memory.Type{
		"NONE":                          0,
		" none ":                        0,
		"DEVICE_LOCAL|Host_Visible":     memory.DeviceLocal | memory.HostVisible,
		" host_visible | device_local ": memory.DeviceLocal | memory.HostVisible,
		"host_local|host_visible":       memory.HostLocal,
		"optimal|optimal":               memory.Optimal,
		"0x1":                           memory.Optimal,
		"0X00000001|0x2":                memory.Optimal | memory.HostVisible,
	} {
		got, err := memory.ParseType(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
}

func TestBitsErrors(t *testing.T) {
	for _, tt := range []struct {
		in, reason    string
		offset, width int
	}{
		{"", "empty name", 0, 0},
		{"device_local|", "empty name", 13, 0},
		{"|device_local", "empty name", 0, 0},
		{"*", `unknown name "*"`, 0, 1},
		{"device_local|hots_visible", `unknown name "hots_visible"`, 13, 12},
		{"device_local| x ", `unknown name "x"`, 14, 1},
		{"none|device_local", `"none" stands alone`, 0, 4},
		{"device_local,host_local", `unknown name "device_local,host_local"`, 0, 23},
		{"0x", `unknown name "0x"`, 0, 2},
		{"0x1ffffffff", "not a 32-bit hexadecimal number", 0, 11},
		{"0xg", "not a 32-bit hexadecimal number", 0, 3},
		{"16", `unknown name "16"`, 0, 2},
	} {
		_, err := memory.ParseType(tt.in)
		var e *memory.ParseError
		if !assert.ErrorAs(t, err, &e, tt.in) {
			continue
		}
		assert.Contains(t, e.Reason, tt.reason, tt.in)
		assert.Equal(t, tt.offset, e.Offset, tt.in)
		assert.Equal(t, tt.width, e.Width, tt.in)
		assert.Contains(t, e.Valid, "device_local")
		assert.Contains(t, e.Valid, "none")
	}
	_, err := memory.ParseUsage("sharing")
	assert.ErrorContains(t, err, `memory: usage "sharing": unknown name "sharing" (valid: dispatch, default, transfer,`)
	_, err = memory.ParseAccess("execute")
	assert.EqualError(t, err, `memory: access "execute": unknown name "execute" (valid: all, read, write, discard, none)`)
}

func TestBitsHas(t *testing.T) {
	assert.True(t, memory.HostLocal.Has(memory.HostVisible), "local memory is visible")
	assert.True(t, memory.DeviceLocal.Has(memory.DeviceVisible), "local memory is visible")
	assert.False(t, memory.HostVisible.Has(memory.HostLocal))
	assert.False(t, memory.DeviceLocal.Has(memory.HostVisible))
	assert.True(t, memory.Type(0).Has(0))
	assert.True(t, memory.Default.Has(memory.Transfer))
	assert.False(t, memory.TransferSource.Has(memory.Transfer), "has means all of the bits")
	assert.True(t, memory.All.Has(memory.ReadWrite))
	assert.False(t, memory.Read.Has(memory.ReadWrite))
}

// TestBitsFit checks the promise that requests can pack the named bits.
func TestBitsFit(t *testing.T) {
	var u memory.Usage
	for bit := range 32 {
		if x := memory.Usage(1) << bit; !strings.HasPrefix(x.String(), "0x") {
			u |= x
		}
	}
	assert.LessOrEqual(t, bits.Len32(uint32(u)), memory.UsageBits)
	assert.LessOrEqual(t, bits.Len32(uint32(memory.All)), memory.AccessBits)
}

// TestUsageTextIsShortest compares the printer with a search over all sets of
// composite names, for every combination of the named bits.
func TestUsageTextIsShortest(t *testing.T) {
	composites := []memory.Usage{memory.Dispatch, memory.Default, memory.Transfer, memory.DispatchStorage, memory.Mapping}
	var named []memory.Usage
	for bit := range 32 {
		if x := memory.Usage(1) << bit; !strings.HasPrefix(x.String(), "0x") {
			named = append(named, x)
		}
	}
	for set := 1; set < 1<<len(named); set++ {
		var x memory.Usage
		for i, bit := range named {
			if set>>i&1 != 0 {
				x |= bit
			}
		}
		best := bits.OnesCount32(uint32(x))
		for chosen := range 1 << len(composites) {
			var covered memory.Usage
			for i, c := range composites {
				if chosen>>i&1 != 0 {
					covered |= c
				}
			}
			if x.Has(covered) {
				best = min(best, bits.OnesCount(uint(chosen))+bits.OnesCount32(uint32(x&^covered)))
			}
		}
		if got := strings.Count(x.String(), "|") + 1; got != best {
			t.Fatalf("%v has %d names, %d would do", x, got, best)
		}
	}
}

func TestBitsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := rapid.Uint32().Draw(t, "bits") & rapid.SampledFrom([]uint32{0x7f, 0xff, 0xfffff, 0xffffffff}).Draw(t, "mask")
		if got, err := memory.ParseType(memory.Type(x).String()); err != nil || got != memory.Type(x) {
			t.Fatalf("%v reads back as %v, %v", memory.Type(x), got, err)
		}
		if got, err := memory.ParseUsage(memory.Usage(x).String()); err != nil || got != memory.Usage(x) {
			t.Fatalf("%v reads back as %v, %v", memory.Usage(x), got, err)
		}
		if got, err := memory.ParseAccess(memory.Access(x).String()); err != nil || got != memory.Access(x) {
			t.Fatalf("%v reads back as %v, %v", memory.Access(x), got, err)
		}
	})
}

func TestBitsJSON(t *testing.T) {
	type all struct {
		Type   memory.Type
		Usage  memory.Usage
		Access memory.Access
		Key    memory.HeapKey
	}
	want := all{
		memory.DeviceLocal | memory.HostVisible, memory.Default, memory.ReadWrite,
		memory.HeapKey{AnyType: true, Usage: memory.Transfer},
	}
	text, err := json.Marshal(want)
	require.NoError(t, err)
	assert.JSONEq(t, `{"Type":"device_local|host_visible","Usage":"default","Access":"read|write","Key":"*;transfer"}`, string(text))
	var got all
	require.NoError(t, json.Unmarshal(text, &got))
	assert.Equal(t, want, got)
	for _, bad := range []string{`{"Type":"x"}`, `{"Usage":"x"}`, `{"Access":"x"}`, `{"Key":"x"}`} {
		assert.ErrorContains(t, json.Unmarshal([]byte(bad), &got), `unknown name "x"`, bad)
	}
	assert.Equal(t, want, got, "a failed unmarshal leaves the value alone")
}
