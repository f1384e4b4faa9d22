package workload

// The shapes of ResNet-50: a 7x7 convolution and a pool, then four stages of
// bottleneck blocks, each a 1x1, a 3x3 and a 1x1 convolution around a shortcut.
const (
	resnetImage   = 224 // pixels a side
	resnetColours = 3
	resnetClasses = 1000
	resnetExpand  = 4 // columns out of a block over its width
)

// resnetStages is the middle of the table in the paper.
var resnetStages = []struct {
	blocks int
	width  int64 // channels inside a block
	side   int64 // of what the stage puts out
}{
	{3, 64, 56},
	{4, 128, 28},
	{6, 256, 14},
	{3, 512, 7},
}

// How it is trained.
const (
	resnetBatches    = 32 // at scale 1
	resnetBatch      = 64
	resnetSmallBatch = 40
	resnetSmallEvery = 20
)

// Streams of the training program.
const (
	resnetCompute = 0
	resnetUpload  = 1
)

// resnetConv is one convolution with the normalisation behind it.
type resnetConv struct {
	kernel          int64
	stride          int64
	in, out         int64 // channels
	inSide, outSide int64
	algorithms      map[resnetPass]int64 // workspace chosen, by pass and batch
}

// resnetPass is one use of a convolution, for which an algorithm is chosen.
type resnetPass struct {
	kind  int // forward, gradient of the input, gradient of the weights
	batch int64
}

const (
	resnetForward = iota
	resnetInputGrad
	resnetWeightGrad
)

// resnetBlock is a bottleneck block; down is nil where the shortcut is plain.
type resnetBlock struct {
	convs [3]*resnetConv
	down  *resnetConv
}

// resnetModel returns the stem and the blocks, in order.
func resnetModel() (*resnetConv, []resnetBlock) {
	conv := func(kernel, in, out, inSide, outSide int64) *resnetConv {
		return &resnetConv{kernel, inSide / outSide, in, out, inSide, outSide, map[resnetPass]int64{}}
	}
	stem := conv(7, resnetColours, 64, resnetImage, resnetImage/2)
	var blocks []resnetBlock
	channels, side := stem.out, stem.outSide/2
	for _, s := range resnetStages {
		for i := range s.blocks {
			out := s.width * resnetExpand
			b := resnetBlock{convs: [3]*resnetConv{
				conv(1, channels, s.width, side, side),
				conv(3, s.width, s.width, side, s.side),
				conv(1, s.width, out, s.side, s.side),
			}}
			if i == 0 {
				b.down = conv(1, channels, out, side, s.side)
			}
			blocks = append(blocks, b)
			channels, side = out, s.side
		}
	}
	return stem, blocks
}

func (c *resnetConv) weights() int64 { return c.kernel * c.kernel * c.in * c.out * fp32 }
func (c *resnetConv) channel() int64 { return c.out * fp32 } // one number a channel
func (c *resnetConv) input(n int64) int64 {
	return n * c.in * c.inSide * c.inSide * fp32
}
func (c *resnetConv) output(n int64) int64 {
	return n * c.out * c.outSide * c.outSide * fp32
}

// candidates returns the workspaces of the algorithms for a batch of n.
//
//	direct    a table of offsets
//	unrolled  the input of one image, once for each tap of the kernel
//	Winograd  the transforms of input, output and weights; tiles of m by m need
//	          ((m+2)/m)^2 of an image and ((m+2)/3)^2 of the weights, for m 2 and 4
func (c *resnetConv) candidates(n int64) []int64 {
	taps := c.kernel * c.kernel
	pixels := c.outSide * c.outSide
	direct := taps * pixels * int32Size
	if c.kernel == 1 && c.stride == 1 {
		return []int64{direct}
	}
	sizes := []int64{direct, taps * c.in * pixels * fp32}
	if c.kernel == 3 && c.stride == 1 {
		images := c.input(n) + c.output(n)
		sizes = append(sizes, images*4+c.weights()*16/9, images*9/4+c.weights()*4)
	}
	return sizes
}

// resnetSaved is what the backward pass of a convolution and its normalisation
// needs from the forward pass.
type resnetSaved struct {
	conv      id // result of the convolution
	mean, dev id // of the batch
	out       id // normalised, rectified in place; the input of what follows
}

// resnetInput is a batch on the device.
type resnetInput struct {
	n              int64
	images, labels id
}

// resnetTrainer is a run of the training program.
type resnetTrainer struct {
	*gen
	stem   *resnetConv
	blocks []resnetBlock
	params []int64 // sizes, in order of the model
	grads  []id    // of this pass
}

// resnet trains. What the forward pass saves is freed by the backward pass in
// reverse; gradients live until the optimiser has used them; workspaces only
// for their operation; the next batch is uploaded while this one is at work.
func resnet(g *gen, scale int) {
	t := &resnetTrainer{gen: g}
	t.stem, t.blocks = resnetModel()
	t.persistent()

	batches := resnetBatches * scale
	batch := t.upload(0)
	for i := range batches {
		batch = t.train(batch, i+1, i+1 < batches)
	}
}

// convs calls f for each convolution in order of the model.
func (t *resnetTrainer) convs(f func(*resnetConv)) {
	f(t.stem)
	for _, b := range t.blocks {
		for _, c := range b.convs {
			f(c)
		}
		if b.down != nil {
			f(b.down)
		}
	}
}

// persistent allocates what stays: parameters, running statistics, momentum.
func (t *resnetTrainer) persistent() {
	param := func(bytes int64) {
		t.alloc(bytes, resnetCompute)
		t.params = append(t.params, bytes)
	}
	t.convs(func(c *resnetConv) {
		param(c.weights())
		param(c.channel())                  // scale
		param(c.channel())                  // shift
		t.alloc(c.channel(), resnetCompute) // running mean
		t.alloc(c.channel(), resnetCompute) // running variance
		t.alloc(int64Size, resnetCompute)   // batches seen
	})
	features := t.features()
	param(features * resnetClasses * fp32)
	param(resnetClasses * fp32)
	for _, bytes := range t.params {
		t.alloc(bytes, resnetCompute)
	}
}

// features returns the number of inputs of the classifier.
func (t *resnetTrainer) features() int64 {
	return t.blocks[len(t.blocks)-1].convs[2].out
}

// upload brings a batch to the device: bytes first, which become numbers there.
func (t *resnetTrainer) upload(index int) resnetInput {
	n := int64(resnetBatch)
	if index%resnetSmallEvery == resnetSmallEvery-1 {
		n = resnetSmallBatch
	}
	elements := n * resnetColours * resnetImage * resnetImage
	raw := t.alloc(elements, resnetUpload)
	in := resnetInput{n: n}
	in.labels = t.alloc(n*int64Size, resnetUpload)
	in.images = t.alloc(elements*fp32, resnetUpload)
	t.free(resnetUpload, raw)
	return in
}

// train makes one step with in. Somewhere on the way back it uploads the batch
// of the index after, if there is more to come, and returns that.
func (t *resnetTrainer) train(in resnetInput, after int, more bool) (next resnetInput) {
	n := in.n

	// Forward.
	stem := t.forward(t.stem, n)
	pooled := t.stem.output(n) / 4
	indices := t.alloc(pooled/fp32*int64Size, resnetCompute)
	pool := t.alloc(pooled, resnetCompute)
	saved := make([][4]resnetSaved, len(t.blocks)) // the last of each is the shortcut
	for i, b := range t.blocks {
		for j, c := range b.convs {
			saved[i][j] = t.forward(c, n)
		}
		if b.down != nil {
			saved[i][3] = t.forward(b.down, n)
			t.free(resnetCompute, saved[i][3].out) // added to the third in place
		}
	}

	// The classifier and the loss, there and back.
	row := n * resnetClasses * fp32
	features := t.alloc(n*t.features()*fp32, resnetCompute)
	scores := t.alloc(row, resnetCompute)
	logs := t.alloc(row, resnetCompute)
	t.free(resnetCompute, scores)
	loss := t.alloc(fp32, resnetCompute)
	seed := t.alloc(fp32, resnetCompute) // gradient of the loss: one
	logsGrad := t.alloc(row, resnetCompute)
	scoresGrad := t.alloc(row, resnetCompute)
	t.free(resnetCompute, logsGrad, logs, seed, loss)
	t.gradient(t.features() * resnetClasses * fp32)
	t.gradient(resnetClasses * fp32)
	featuresGrad := t.alloc(n*t.features()*fp32, resnetCompute)
	t.free(resnetCompute, scoresGrad, features)
	last := t.blocks[len(t.blocks)-1].convs[2]
	grad := t.alloc(last.output(n), resnetCompute)
	t.free(resnetCompute, featuresGrad)

	// Backward.
	uploadAt := -1
	if more {
		uploadAt = int(t.roll(int64(len(t.blocks))))
	}
	for i := len(t.blocks) - 1; i >= 0; i-- {
		grad = t.backwardBlock(t.blocks[i], saved[i], grad, n)
		if i == uploadAt {
			next = t.upload(after)
		}
	}
	stemGrad := t.alloc(t.stem.output(n), resnetCompute)
	t.free(resnetCompute, grad, indices, pool)
	stemGrad = t.rectified(t.stem, stemGrad, stem.out, n)
	t.backward(t.stem, stem, stemGrad, n, false)
	t.free(resnetCompute, stemGrad, in.images, in.labels)

	t.optimise()
	return next
}

// forward runs a convolution and its normalisation.
func (t *resnetTrainer) forward(c *resnetConv, n int64) resnetSaved {
	var s resnetSaved
	s.conv = t.alloc(c.output(n), resnetCompute)
	t.workspace(c, resnetForward, n)
	s.out = t.alloc(c.output(n), resnetCompute)
	s.mean = t.alloc(c.channel(), resnetCompute)
	s.dev = t.alloc(c.channel(), resnetCompute)
	return s
}

// backwardBlock takes the gradient of the result of a block and returns that of
// its input. The result itself is freed on the way: the block after has done
// with it.
func (t *resnetTrainer) backwardBlock(b resnetBlock, s [4]resnetSaved, grad id, n int64) id {
	grad = t.rectified(b.convs[2], grad, s[2].out, n) // of the sum, for both branches
	branch := t.backward(b.convs[2], s[2], grad, n, true)
	for i := 1; i >= 0; i-- {
		masked := t.rectified(b.convs[i], branch, s[i].out, n)
		branch = t.backward(b.convs[i], s[i], masked, n, true)
		t.free(resnetCompute, masked)
	}
	if b.down != nil {
		shortcut := t.backward(b.down, s[3], grad, n, true)
		t.free(resnetCompute, grad)
		grad = shortcut
	}
	sum := t.alloc(b.convs[0].input(n), resnetCompute)
	t.free(resnetCompute, branch, grad)
	return sum
}

// rectified turns the gradient of what was rectified into that before, and
// frees the result whose sign it needed.
func (t *resnetTrainer) rectified(c *resnetConv, grad, out id, n int64) id {
	masked := t.alloc(c.output(n), resnetCompute)
	t.free(resnetCompute, grad, out)
	return masked
}

// backward goes back through the normalisation and the convolution; grad stays
// the caller's. It returns the gradient of the input if that is wanted.
func (t *resnetTrainer) backward(c *resnetConv, s resnetSaved, grad id, n int64, input bool) id {
	convGrad := t.alloc(c.output(n), resnetCompute)
	t.gradient(c.channel())
	t.gradient(c.channel())
	t.free(resnetCompute, s.conv, s.mean, s.dev)

	var inputGrad id
	if input {
		inputGrad = t.alloc(c.input(n), resnetCompute)
		t.workspace(c, resnetInputGrad, n)
	}
	t.gradient(c.weights())
	t.workspace(c, resnetWeightGrad, n)
	t.free(resnetCompute, convGrad)
	return inputGrad
}

// gradient allocates the gradient of a parameter.
func (t *resnetTrainer) gradient(bytes int64) {
	t.grads = append(t.grads, t.alloc(bytes, resnetCompute))
}

// workspace allocates and frees the workspace of a pass over a batch of n. The
// first time it tries every algorithm, as a tuner does, and settles on one.
func (t *resnetTrainer) workspace(c *resnetConv, kind int, n int64) {
	pass := resnetPass{kind, n}
	bytes, ok := c.algorithms[pass]
	if !ok {
		candidates := c.candidates(n)
		for _, bytes := range candidates {
			t.free(resnetCompute, t.alloc(bytes, resnetCompute))
		}
		bytes = candidates[t.roll(int64(len(candidates)))]
		c.algorithms[pass] = bytes
	}
	t.free(resnetCompute, t.alloc(bytes, resnetCompute))
}

// optimise updates the parameters, with a temporary for weight decay each, and
// frees the gradients.
func (t *resnetTrainer) optimise() {
	for _, bytes := range t.params {
		t.free(resnetCompute, t.alloc(bytes, resnetCompute))
	}
	t.free(resnetCompute, t.grads...)
	t.grads = t.grads[:0]
}
