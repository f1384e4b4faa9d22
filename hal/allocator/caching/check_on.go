//go:build invariants

package caching

// invariants says that the lists and sums are checked after each call.
const invariants = true
