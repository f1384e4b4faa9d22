// Package mutant plants faults on purpose, to show that the tests find them. In an
// ordinary build [Is] is the constant false and leaves no trace in the code; with the
// build tag mutants the fault named by HALYARD_MUTANT is there. Each is a mistake
// that an allocator ordered by queues is prone to.
package mutant

// Name names a fault.
type Name string

// The faults.
const (
	// FreeAtSubmit frees memory when its dealloca is submitted, not when it is issued.
	FreeAtSubmit Name = "free-at-submit"
	// UnmapOnOrdered unmaps what some queue's next operation comes after, though
	// unmapping happens at once.
	UnmapOnOrdered Name = "unmap-on-ordered"
	// SplitLosesFrontier gives the upper half of a split block as ready.
	SplitLosesFrontier Name = "split-loses-frontier"
	// MergeLosesFrontier keeps only one frontier of two blocks that are merged.
	MergeLosesFrontier Name = "merge-loses-frontier"
	// ShardLosesFrontier hands what another shard kept out as ready.
	ShardLosesFrontier Name = "shard-loses-frontier"
	// JoinByValue lets a wait for a value claim every signal of a smaller one.
	JoinByValue Name = "join-by-value"
	// ZeroIsReady takes the zero frontier for ready and not for unknown.
	ZeroIsReady Name = "zero-is-ready"
	// PollBeforeRecord asks an event that wasn't recorded, which says that all is over.
	PollBeforeRecord Name = "poll-before-record"
	// CoarseFromSubmitted makes the overflow set of what was submitted, which may
	// never be issued.
	CoarseFromSubmitted Name = "coarse-from-submitted"
	// SkipUse forgets that an operation on another queue uses a buffer.
	SkipUse Name = "skip-use"
	// ReuseQueueID gives a new queue the identity of one that is gone.
	ReuseQueueID Name = "reuse-queue-id"
	// AlignOffByOne aligns to half of what was asked.
	AlignOffByOne Name = "align-off-by-one"
	// ForgetCount forgets to count a free.
	ForgetCount Name = "forget-count"
	// EvictNewest evicts the block that was freed last.
	EvictNewest Name = "evict-newest"
	// DropAddedWait forgets the wait that was added to an alloca which then fails.
	DropAddedWait Name = "drop-added-wait"
	// LateLessons lets a signal claim what its queue has learned since.
	LateLessons Name = "late-lessons"
	// ClaimedIsStale fails an operation whose buffer's dealloca was submitted behind it.
	ClaimedIsStale Name = "claimed-is-stale"
	// ForgetClosedQueue closes a device without regard to the work of closed queues.
	ForgetClosedQueue Name = "forget-closed-queue"
)

// All lists the faults.
var All = []Name{
	FreeAtSubmit, UnmapOnOrdered, SplitLosesFrontier, MergeLosesFrontier, ShardLosesFrontier, JoinByValue, ZeroIsReady,
	PollBeforeRecord, CoarseFromSubmitted, SkipUse, ReuseQueueID, AlignOffByOne, ForgetCount, EvictNewest,
	DropAddedWait, LateLessons, ClaimedIsStale, ForgetClosedQueue,
}
