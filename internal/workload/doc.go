// Package workload generates allocation workloads of well-known models, so
// that allocators can be tried and compared without any file at hand.
//
// Each workload follows the published shapes of a model and the order in which
// a serving or training program allocates them. Only the shapes are published;
// the sequence is made up, from a seed, and says so in its comments. A recorded
// trace is the better evidence where there is one: see package trace.
//
//	w, ok := workload.Get("llama3-8b")
//	if !ok {
//		return fmt.Errorf("no such workload: %s", name)
//	}
//	t := w.Generate(workload.Options{Seed: 1})
//
// # Determinism
//
// The same seed and scale give the same events, on every machine: the
// arithmetic is in integers, the random numbers come from a PCG, and no map is
// walked. Tests hold the hash of each workload, so a change of a generator is a
// change that somebody meant.
//
// # Adding one
//
// A workload is one file with one generator, and one line in the table in
// workload.go. It allocates what stays (parameters, caches) first and leaves it
// live at the end, frees each id at most once, names its source, and draws
// whatever is random from the generator it is given.
//
// # Cost and concurrency
//
// A workload of the default scale has 50 to 130 thousand events and takes some
// milliseconds. Generating is safe from many goroutines; each call returns a
// trace of its own.
package workload
