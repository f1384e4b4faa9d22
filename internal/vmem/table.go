package vmem

import "github.com/google/btree"

// A kind is the state of a page of address space. The picture is in the
// package comment.
type kind uint8

const (
	reserved  kind = iota // not accessible, no memory behind it
	committed             // private memory of the region
	mapped                // pages of a Pages
)

// An extent is a run of pages of one kind. For a mapped one it is a run of
// consecutive pages of one Pages, beginning with page index.
type extent struct {
	off, n int64
	kind   kind
	index  uint32
	pages  *Pages
}

func (e extent) end() int64 { return e.off + e.n }

// clip returns the part of e inside [off, end), which must not be empty. Of
// a mapped extent, off must be the beginning of one of its pages.
func (e extent) clip(off, end int64) extent {
	if off > e.off {
		if e.kind == mapped {
			e.index += uint32((off - e.off) / e.pages.granularity)
		}
		e.n -= off - e.off
		e.off = off
	}
	if e.end() > end {
		e.n = end - e.off
	}
	return e
}

// follows reports whether e continues prev, so that the two are one extent.
func (e extent) follows(prev extent) bool {
	if prev.end() != e.off || prev.kind != e.kind || prev.pages != e.pages {
		return false
	}
	return e.kind != mapped || int64(prev.index)+prev.n/e.pages.granularity == int64(e.index)
}

// A table says what kind each page of a region is. It holds the extents that
// are not reserved, disjoint and as long as possible: what it has is what the
// kernel has, mapping for mapping.
type table struct {
	tree *btree.BTreeG[extent] // by off
}

func newTable() table {
	return table{tree: btree.NewG(16, func(a, b extent) bool { return a.off < b.off })}
}

// floor returns the last extent that begins at off or before.
func (t table) floor(off int64) (e extent, ok bool) {
	t.tree.DescendLessOrEqual(extent{off: off}, func(x extent) bool {
		e, ok = x, true
		return false
	})
	return e, ok
}

// covered reports whether no page of [off, off+n) is reserved, n > 0.
func (t table) covered(off, n int64) bool {
	for end := off + n; off < end; {
		e, ok := t.floor(off)
		if !ok || e.end() <= off {
			return false
		}
		off = e.end()
	}
	return true
}

// overlapping returns all that lies in [off, off+n) in order, gaps included as
// reserved extents. Gaps are clipped to the range; extents are not.
func (t table) overlapping(off, n int64) []extent {
	var list []extent
	end, at, first := off+n, off, off
	if e, ok := t.floor(off); ok && e.end() > off {
		first = e.off
	}
	t.tree.AscendRange(extent{off: first}, extent{off: end}, func(e extent) bool {
		if e.off > at {
			list = append(list, extent{off: at, n: e.off - at})
		}
		list = append(list, e)
		at = e.end()
		return true
	})
	if at < end {
		list = append(list, extent{off: at, n: end - at})
	}
	return list
}

// set makes e the state of its range, joining it to its neighbours.
func (t table) set(e extent) {
	for {
		x, ok := t.floor(e.end() - 1)
		if !ok || x.end() <= e.off {
			break
		}
		t.tree.Delete(x)
		if x.off < e.off {
			t.tree.ReplaceOrInsert(x.clip(x.off, e.off))
		}
		if x.end() > e.end() {
			t.tree.ReplaceOrInsert(x.clip(e.end(), x.end()))
		}
	}
	if e.kind == reserved {
		return
	}
	if prev, ok := t.floor(e.off); ok && e.follows(prev) {
		t.tree.Delete(prev)
		prev.n += e.n
		e = prev
	}
	if next, ok := t.tree.Get(extent{off: e.end()}); ok && next.follows(e) {
		t.tree.Delete(next)
		e.n += next.n
	}
	t.tree.ReplaceOrInsert(e)
}
