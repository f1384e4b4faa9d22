package workload

import "slices"

// The shapes of Llama-3-8B as its configuration gives them.
const (
	llamaLayers  = 32
	llamaHidden  = 4096
	llamaFFN     = 14336
	llamaHeads   = 32
	llamaKVHeads = 8
	llamaHeadDim = 128
	llamaVocab   = 128256
	llamaContext = 8192

	llamaQKV = (llamaHeads + 2*llamaKVHeads) * llamaHeadDim // columns of the fused projection
)

// How it is served.
const (
	llamaRequests   = 24   // at scale 1
	llamaBatch      = 16   // sequences that run at once
	llamaStepTokens = 2048 // prompt tokens that one step takes in
	llamaBlock      = 16   // tokens in a block of the KV cache
	llamaSplit      = 256  // tokens of context that one part of a split attention covers
	llamaArrival    = 3    // steps from one request to the next, on average

	// Prompts have 16 to 2047 tokens, answers 8 to 127.
	llamaPromptLeast, llamaPromptOctaves = 16, 7
	llamaAnswerLeast, llamaAnswerOctaves = 8, 4

	// Keys and values of a block, for all layers: 2 MiB.
	llamaBlockBytes = llamaBlock * 2 * llamaKVHeads * llamaHeadDim * fp16 * llamaLayers
)

// Streams of the serving program.
const (
	llamaCompute = 0
	llamaInput   = 1
	llamaSample  = 2
)

// llamaSeq is one request, from its arrival to the end of its answer.
type llamaSeq struct {
	arrival int64 // step from which it waits
	prompt  int64 // tokens
	answer  int64 // tokens still to come
	tokens  int64 // tokens whose keys and values are in the cache
	blocks  []id
}

// llama serves requests as they arrive. Waiting prompts go first, as many as a
// step takes; else every running sequence gets one token; else time passes.
//
//	stream 1   input staging                                      freed on 0
//	stream 0   KV blocks, embedding, 32 layers, logits            logits freed on 2
//	stream 2   probabilities, sorted values and order, tokens     tokens freed a step later
//
// A sequence gives its KV blocks back when its answer is complete.
func llama(g *gen, scale int) {
	llamaWeights(g)

	var waiting []*llamaSeq
	var now int64
	for range llamaRequests * scale {
		waiting = append(waiting, &llamaSeq{
			arrival: now,
			prompt:  g.rollOctave(llamaPromptLeast, llamaPromptOctaves),
			answer:  g.rollOctave(llamaAnswerLeast, llamaAnswerOctaves),
		})
		now += g.roll(2*llamaArrival + 1)
	}

	s := llamaServer{gen: g}
	var running []*llamaSeq
	for now = 0; len(waiting)+len(running) > 0; now++ {
		// Admit what has arrived and fits; the first prompt always fits a step.
		var admitted []*llamaSeq
		var tokens int64
		for len(waiting) > 0 && waiting[0].arrival <= now && len(running)+len(admitted) < llamaBatch {
			if tokens += waiting[0].prompt; tokens > llamaStepTokens {
				break
			}
			admitted = append(admitted, waiting[0])
			waiting = waiting[1:]
		}
		switch {
		case len(admitted) > 0:
			for _, q := range admitted {
				s.extend(q, q.prompt)
			}
			s.step(admitted, true)
			running = append(running, admitted...)
		case len(running) > 0:
			for _, q := range running {
				s.extend(q, 1)
			}
			s.step(running, false)
		default:
			continue
		}
		running = slices.DeleteFunc(running, func(q *llamaSeq) bool {
			if q.answer > 0 {
				return false
			}
			g.free(llamaCompute, q.blocks...)
			return true
		})
	}
	s.end()
}

// llamaWeights allocates the parameters, 8.03 billion of them, and the table of
// the rotary embedding. They stay.
func llamaWeights(g *gen) {
	weight := func(elements int64) { g.alloc(elements*fp16, llamaCompute) }
	weight(llamaVocab * llamaHidden)
	for range llamaLayers {
		weight(llamaHidden)                             // norm before attention
		weight(llamaHidden * llamaQKV)                  // queries, keys and values
		weight(llamaHeads * llamaHeadDim * llamaHidden) // output projection
		weight(llamaHidden)                             // norm before the feed-forward part
		weight(llamaHidden * 2 * llamaFFN)              // gate and up
		weight(llamaFFN * llamaHidden)                  // down
	}
	weight(llamaHidden)
	weight(llamaHidden * llamaVocab)
	weight(llamaContext * llamaHeadDim) // cosines and sines
}

// llamaServer runs steps.
type llamaServer struct {
	*gen
	next []id // tokens that the last step chose; the next step's input reads them
}

// extend makes room in the cache for n more tokens of q.
func (s *llamaServer) extend(q *llamaSeq, n int64) {
	q.tokens += n
	for int64(len(q.blocks))*llamaBlock < q.tokens {
		q.blocks = append(q.blocks, s.alloc(llamaBlockBytes, llamaCompute))
	}
}

// step runs the model over a batch, whose cache is long enough already: over
// whole prompts, or over the last token of each sequence.
func (s *llamaServer) step(batch []*llamaSeq, prompts bool) {
	n := int64(len(batch)) // sequences
	tokens := n
	var longest, mostBlocks int64
	for _, q := range batch {
		q.answer--
		longest = max(longest, q.tokens)
		mostBlocks = max(mostBlocks, int64(len(q.blocks)))
	}
	if prompts {
		tokens = 0
		for _, q := range batch {
			tokens += q.prompt
		}
	}

	// The input is uploaded on its own stream. Compute is its last reader, so
	// it's freed there.
	ids := s.alloc(tokens*int64Size, llamaInput)
	positions := s.alloc(tokens*int64Size, llamaInput)
	slots := s.alloc(tokens*int64Size, llamaInput) // where in the cache each token goes
	tables := s.alloc(n*mostBlocks*int32Size, llamaInput)
	lengths := s.alloc((n+1)*int32Size, llamaInput)
	s.end()

	hidden := s.alloc(tokens*llamaHidden*fp16, llamaCompute)
	s.free(llamaCompute, ids)
	for range llamaLayers {
		s.layer(tokens, n, longest, prompts)
	}
	s.free(llamaCompute, positions, slots, tables, lengths)

	// Only the last token of each sequence needs logits.
	last := s.alloc(n*llamaHidden*fp16, llamaCompute)
	s.free(llamaCompute, hidden)
	logits := s.alloc(n*llamaVocab*fp16, llamaCompute)
	s.free(llamaCompute, last)

	probs := s.alloc(n*llamaVocab*fp32, llamaSample)
	s.free(llamaSample, logits)
	sorted := s.alloc(n*llamaVocab*fp32, llamaSample)
	order := s.alloc(n*llamaVocab*int64Size, llamaSample)
	s.free(llamaSample, probs)
	s.next = append(s.next, s.alloc(n*int64Size, llamaSample))
	s.free(llamaSample, sorted, order)
}

// layer runs one layer. The residual is updated in place, and each result is
// freed as soon as what follows has read it.
func (s *llamaServer) layer(tokens, n, longest int64, prompts bool) {
	act := func(columns int64) id { return s.alloc(tokens*columns*fp16, llamaCompute) }

	normed := act(llamaHidden)
	qkv := act(llamaQKV)
	s.free(llamaCompute, normed)

	attended := act(llamaHeads * llamaHeadDim)
	// Over prompts attention keeps the log of the sums of each row; for single
	// tokens it splits the context, and keeps what each part found.
	workspace := tokens * llamaHeads * fp32
	if !prompts {
		parts := (longest + llamaSplit - 1) / llamaSplit
		workspace = n * llamaHeads * parts * (llamaHeadDim + 2) * fp32
	}
	partial := s.alloc(workspace, llamaCompute)
	s.free(llamaCompute, partial, qkv)
	projected := act(llamaHidden)
	s.free(llamaCompute, attended)

	normed = act(llamaHidden)
	s.free(llamaCompute, projected)
	gateUp := act(2 * llamaFFN)
	s.free(llamaCompute, normed)
	gated := act(llamaFFN)
	s.free(llamaCompute, gateUp)
	down := act(llamaHidden)
	s.free(llamaCompute, gated, down)
}

// end frees the tokens of the last step, which have been read.
func (s *llamaServer) end() {
	s.free(llamaSample, s.next...)
	s.next = s.next[:0]
}
