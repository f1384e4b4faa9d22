package block

import (
	"sync/atomic"

	"github.com/halyard-go/halyard/hal/queue"
)

// pieces holds the pieces of an arena by number, in chunks without pointers: the
// collector never looks at them, however many there are. It is guarded by the arena's
// lock, but for [pieces.shared].
type pieces struct {
	chunks []*pieceChunk
	dir    atomic.Pointer[[]*pieceChunk] // chunks, for shared
	used   uint32                        // numbers ever used; 0 never is
	free   uint32                        // head of the list of unused numbers, by node.next
}

const (
	pieceShift = 9
	maxPieces  = 1 << pieceBits
)

type pieceChunk [1 << pieceShift]struct {
	node
	ready queue.Frontier // of a free piece: after which it may be touched
}

func (p *pieces) at(i uint32) *node {
	return &p.chunks[i>>pieceShift][i&(1<<pieceShift-1)].node
}

// shared is at for who doesn't hold the arena's lock, but has made sure that piece i
// is and stays live: its address and size don't change.
func (p *pieces) shared(i uint32) *node {
	return &(*p.dir.Load())[i>>pieceShift][i&(1<<pieceShift-1)].node
}

func (p *pieces) ready(i uint32) queue.Frontier {
	return p.chunks[i>>pieceShift][i&(1<<pieceShift-1)].ready
}

func (p *pieces) setReady(i uint32, f queue.Frontier) {
	p.chunks[i>>pieceShift][i&(1<<pieceShift-1)].ready = f
}

// take returns a number for a piece, or 0 if there can be no more.
func (p *pieces) take() uint32 {
	if i := p.free; i != 0 {
		p.free = p.at(i).next
		return i
	}
	if p.used == 0 {
		p.used = 1
	}
	if p.used == maxPieces {
		return 0
	}
	if int(p.used>>pieceShift) == len(p.chunks) {
		p.chunks = append(p.chunks, new(pieceChunk))
		dir := p.chunks
		p.dir.Store(&dir)
	}
	i := p.used
	p.used++
	return i
}

// drop gives the number of a piece up.
func (p *pieces) drop(i uint32) {
	*p.at(i) = node{next: p.free}
	p.free = i
}
