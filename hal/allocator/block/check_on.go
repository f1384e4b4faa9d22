//go:build invariants

package block

// invariants says that the books are checked after each critical section.
const invariants = true
