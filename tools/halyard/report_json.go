package main

import (
	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/tools/halyard/internal/replay"
)

// reportJSON is a line of run --format=json. Sizes are bytes, times nanoseconds;
// counts are totals over all passes. Keys are only ever added.
type reportJSON struct {
	OK        bool   `json:"ok"`
	Input     string `json:"input"`
	Trace     string `json:"trace"`
	Generated string `json:"generated"` // options of a built-in workload, or empty
	Device    string `json:"device"`
	Allocator string `json:"device_allocator"`
	Modelled  string `json:"modelled"` // what is modelled and not measured, or empty
	Queues    int    `json:"queues"`
	Streams   int    `json:"streams"`
	Passes    int    `json:"passes"`
	Verified  bool   `json:"verified"`

	Events      int64             `json:"events"`
	Allocs      uint64            `json:"allocs"`
	Frees       uint64            `json:"frees"`
	Failed      uint64            `json:"failed"`
	FailedByRun map[string]uint64 `json:"failed_by_run"`
	Overlaps    uint64            `json:"overlaps"`
	LostBytes   uint64            `json:"lost_bytes"`
	Misplaced   uint64            `json:"misplaced"`

	PeakLive     int64   `json:"peak_live_bytes"`
	PeakHeld     int64   `json:"peak_held_bytes"`
	HeldOverLive float64 `json:"held_over_live"`
	Retained     int64   `json:"retained_bytes"`

	SourceAllocs       uint64   `json:"source_allocs"`
	SourceFrees        uint64   `json:"source_frees"`
	Maps               uint64   `json:"maps"`
	Unmaps             uint64   `json:"unmaps"`
	PagesCreated       uint64   `json:"pages_created"`
	PagesReleased      uint64   `json:"pages_released"`
	CallsAvoided       int64    `json:"driver_calls_avoided"`
	SourceAllocsByPass []uint64 `json:"source_allocs_by_pass"`
	DriverCallsByPass  []uint64 `json:"driver_calls_by_pass"`

	CacheLayer  string `json:"cache_layer"`
	CacheHits   uint64 `json:"cache_hits"`
	CacheMisses uint64 `json:"cache_misses"`
	Evicted     uint64 `json:"evicted"`

	NSPerEvent      float64 `json:"ns_per_event"`
	QueueNSPerEvent float64 `json:"queue_ns_per_event"`
	MutexNS         float64 `json:"mutex_ns"`
	Seconds         float64 `json:"seconds"` // all runs of the input

	FirstError       string           `json:"first_error"` // or empty
	Problems         []string         `json:"problems"`
	ProblemsUnlisted int              `json:"problems_unlisted"`
	Layers           []hal.LayerStats `json:"layers"` // outermost first
}

func (r *report) json() *reportJSON {
	cache, source := r.Cache(), r.Source()
	j := &reportJSON{
		OK: r.OK(), Input: r.name, Trace: r.trace.Name, Generated: r.generated, Device: r.device, Allocator: r.Allocator, Modelled: r.Modelled,
		Queues: r.Queues, Streams: r.trace.Streams, Passes: r.Passes, Verified: r.Verified,
		Events: r.Events, Allocs: r.Allocs, Frees: r.Frees, Failed: r.Failed(), FailedByRun: map[string]uint64{},
		Overlaps: r.Overlaps, LostBytes: r.LostBytes, Misplaced: r.Misplaced,
		PeakLive: int64(r.PeakLive), PeakHeld: int64(r.PeakHeld), HeldOverLive: r.HeldOverLive(), Retained: int64(r.Retained),
		SourceAllocs: source.SourceAllocs, SourceFrees: source.SourceFrees, Maps: source.Maps, Unmaps: source.Unmaps,
		PagesCreated: source.Created, PagesReleased: source.Released,
		CallsAvoided:       int64(r.Direct) - int64(r.DriverCalls()),
		SourceAllocsByPass: r.SourceAllocsByPass, DriverCallsByPass: r.DriverCallsByPass,
		CacheLayer: cache.Layer, CacheHits: cache.Hits, CacheMisses: cache.Misses,
		NSPerEvent: r.NSPerEvent, QueueNSPerEvent: r.QueueNSPerEvent, MutexNS: r.mutex, Seconds: r.Took.Seconds(),
		Problems: append([]string{}, r.Problems...), ProblemsUnlisted: r.Unlisted,
	}
	if r.FirstError != nil {
		j.FirstError = r.FirstError.Error()
	}
	for i, n := range r.FailedByRun {
		if i != replay.QueueVerified || r.Verified {
			j.FailedByRun[replay.RunNames[i]] = n
		}
	}
	for i := range r.Layers {
		j.Evicted += r.Layers[i].Evicted
		j.Layers = append(j.Layers, r.Layers[i])
	}
	return j
}
