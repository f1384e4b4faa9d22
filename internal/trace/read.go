package trace

import (
	"bufio"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
)

// Open reads the trace in the file at path.
func Open(path string) (*Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		reason := err
		if pe, ok := errors.AsType[*fs.PathError](err); ok {
			reason = pe.Err // the path is in Error.File already
		}
		return nil, &Error{File: path, Reason: "open: " + reason.Error(), Err: err}
	}
	defer f.Close()
	return Read(path, f)
}

// Read reads a trace, text or gzip. The name stands in errors, and its last
// element without .trace and .gz becomes the name of the trace.
//
// It reads r to the end; compressed data followed by anything else is corrupt.
// The error is an [*Error].
func Read(name string, r io.Reader) (*Trace, error) {
	return read(name, r, limits{bytes: MaxSize, events: MaxEvents, comments: MaxComments})
}

// limits are those of a read; tests use smaller ones than the package's.
type limits struct {
	bytes    int64
	events   int
	comments int
}

// parser is the state of one read.
type parser struct {
	file string
	line int64
	lim  limits
	b    Builder

	comments int // bytes counted against lim.comments

	// Most files number from 0 in order of allocation. The IDs below direct
	// are their own dense number, and only the others are in dense.
	direct int64
	dense  map[int64]int32

	// By dense ID, the lines of the allocation and of the free, for messages.
	// A line number fits: MaxSize is 1<<32, and an event is not one byte long.
	allocLine []uint32
	freeLine  []uint32
}

func read(name string, r io.Reader, lim limits) (*Trace, error) {
	p := &parser{file: name, lim: lim, dense: make(map[int64]int32)}
	p.b.limit = lim.events

	raw := bufio.NewReader(r)
	magic, err := raw.Peek(2)
	if err != nil && err != io.EOF {
		return nil, p.wrap(err)
	}
	text := io.Reader(raw)
	if bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		zr, err := gzip.NewReader(raw)
		if err != nil {
			return nil, p.wrapGzip(err)
		}
		text = gzipReader{zr}
	}
	if err := p.parse(bufio.NewReaderSize(&cappedReader{r: text, left: lim.bytes}, MaxLine)); err != nil {
		return nil, err
	}

	t, err := p.b.Trace()
	if err != nil {
		p.line = 0
		return nil, p.place(err)
	}
	t.Name = baseName(name)
	return t, nil
}

// parse reads lines to the end of the text.
func (p *parser) parse(r *bufio.Reader) error {
	bom, err := r.Peek(len("\ufeff"))
	if string(bom) == "\ufeff" {
		r.Discard(len(bom)) // can't fail, these bytes are buffered
	} else if err != nil && err != io.EOF {
		p.line = 1
		return p.wrap(err) // Peek took it from the reader, so it's gone otherwise
	}
	for {
		p.line++
		line, err := r.ReadSlice('\n')
		switch {
		case err == nil || err == io.EOF:
		case err == bufio.ErrBufferFull:
			return p.errorf("line longer than %d bytes", MaxLine)
		default:
			return p.wrap(err) // the line is incomplete, so no judgement on it
		}
		if err := p.event(line); err != nil {
			return err
		}
		if err == io.EOF {
			return nil
		}
	}
}

// event takes in one line.
func (p *parser) event(line []byte) error {
	var f [4][]byte
	n := split(line, &f)
	switch {
	case n == 0:
		return nil
	case f[0][0] == '#':
		return p.comment(line)
	case string(f[0]) == "a":
		if n < 3 || n > 4 {
			return p.errorf("want \"a ID BYTES [STREAM]\", got %d fields", n)
		}
		return p.allocate(f[1], f[2], f[3])
	case string(f[0]) == "f":
		if n < 2 || n > 3 {
			return p.errorf("want \"f ID [STREAM]\", got %d fields", n)
		}
		return p.free(f[1], f[2])
	}
	return p.errorf("unknown verb %s", quote(f[0]))
}

func (p *parser) comment(line []byte) error {
	_, text, _ := bytes.Cut(line, []byte("#"))
	text = bytes.TrimPrefix(bytes.TrimRight(text, " \t\r\n"), []byte(" "))
	p.comments += len(text) + 16
	if p.comments > p.lim.comments {
		return p.errorf("comments longer than %d bytes in all", p.lim.comments)
	}
	p.b.Comments = append(p.b.Comments, string(text))
	return nil
}

func (p *parser) allocate(id, size, stream []byte) error {
	name, err := p.number("id", id)
	if err != nil {
		return err
	}
	if dense, ok := p.lookup(name); ok {
		return p.errorf("id %d used twice (first on line %d): an id names one allocation of the trace", name, p.allocLine[dense])
	}
	n, err := p.number("size", size)
	if err != nil {
		return err
	}
	s, err := p.stream(stream)
	if err != nil {
		return err
	}
	dense, err := p.b.Alloc(n, s)
	if err != nil {
		return p.place(err)
	}
	if name == int64(dense) && p.direct == name {
		p.direct++
	} else {
		p.dense[name] = dense
	}
	p.allocLine = append(p.allocLine, uint32(p.line))
	p.freeLine = append(p.freeLine, 0)
	return nil
}

func (p *parser) free(id, stream []byte) error {
	name, err := p.number("id", id)
	if err != nil {
		return err
	}
	dense, ok := p.lookup(name)
	if !ok {
		return p.errorf("id %d freed but not allocated before", name)
	}
	if first := p.freeLine[dense]; first != 0 {
		return p.errorf("id %d freed twice (first on line %d)", name, first)
	}
	s, err := p.stream(stream)
	if err != nil {
		return err
	}
	if err := p.b.Free(dense, s); err != nil {
		return p.place(err)
	}
	p.freeLine[dense] = uint32(p.line)
	return nil
}

// lookup returns the dense number of an ID in the file.
func (p *parser) lookup(name int64) (int32, bool) {
	if 0 <= name && name < p.direct {
		return int32(name), true
	}
	dense, ok := p.dense[name]
	return dense, ok
}

// stream parses an optional stream.
func (p *parser) stream(text []byte) (int32, error) {
	if text == nil {
		return 0, nil
	}
	n, ok, fits := parseInt(text)
	switch {
	case !ok:
		return 0, p.errorf("stream %s is not a number", quote(text))
	case !fits || n < 0 || n > MaxStream:
		return 0, p.errorf("stream %s is outside 0 to %d", clip(text), MaxStream)
	}
	return int32(n), nil
}

// number parses a field that what names in a message.
func (p *parser) number(what string, text []byte) (int64, error) {
	n, ok, fits := parseInt(text)
	switch {
	case !ok:
		return 0, p.errorf("%s %s is not a number", what, quote(text))
	case !fits && text[0] == '-':
		return 0, p.errorf("%s %s does not fit: the least is %d", what, clip(text), int64(math.MinInt64))
	case !fits:
		return 0, p.errorf("%s %s does not fit: the limit is %d", what, clip(text), int64(math.MaxInt64))
	}
	return n, nil
}

func (p *parser) errorf(format string, args ...any) error {
	return &Error{File: p.file, Line: p.line, Reason: fmt.Sprintf(format, args...)}
}

// place puts the file and the line on an error of the builder.
func (p *parser) place(err error) error {
	if e, ok := errors.AsType[*Error](err); ok {
		e.File, e.Line = p.file, p.line
	}
	return err
}

// wrap turns the failure of a reader into an error of the trace.
func (p *parser) wrap(err error) error {
	if ge, ok := errors.AsType[gzipError](err); ok {
		return p.wrapGzip(ge.error)
	}
	reason := "read: " + err.Error()
	if err == errTooLarge {
		reason = fmt.Sprintf("text longer than %d bytes", p.lim.bytes)
	}
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		reason = "read: " + pe.Err.Error()
	}
	return &Error{File: p.file, Line: p.line, Reason: reason, Err: err}
}

// wrapGzip tells data that ends early and data that is wrong from a reader
// that failed beneath the decompressor.
func (p *parser) wrapGzip(err error) error {
	var reason string
	_, corrupt := errors.AsType[flate.CorruptInputError](err)
	switch {
	case err == io.EOF || err == io.ErrUnexpectedEOF:
		err = io.ErrUnexpectedEOF
		reason = "truncated gzip: " + err.Error()
	case corrupt || err == gzip.ErrHeader || err == gzip.ErrChecksum:
		reason = "corrupt gzip: " + err.Error()
	default:
		return p.wrap(err)
	}
	return &Error{File: p.file, Line: p.line, Reason: reason, Err: err}
}

// gzipReader marks the errors of a decompressor.
type gzipReader struct{ r io.Reader }

func (g gzipReader) Read(b []byte) (int, error) {
	n, err := g.r.Read(b)
	if err != nil && err != io.EOF {
		err = gzipError{err}
	}
	return n, err
}

type gzipError struct{ error }

// cappedReader fails with errTooLarge once more than left bytes were read.
type cappedReader struct {
	r    io.Reader
	left int64 // below zero: one byte too many was seen
}

var errTooLarge = errors.New("text too long")

func (c *cappedReader) Read(b []byte) (int, error) {
	if c.left < 0 {
		return 0, errTooLarge
	}
	if int64(len(b)) > c.left+1 {
		b = b[:c.left+1]
	}
	n, err := c.r.Read(b)
	c.left -= int64(n)
	if c.left < 0 {
		return n - 1, errTooLarge
	}
	return n, err
}

// split puts the first fields of line into f and returns how many there are
// altogether. Fields beyond those of the line are nil.
func split(line []byte, f *[4][]byte) int {
	n := 0
	for i := 0; i < len(line); {
		if isSpace(line[i]) {
			i++
			continue
		}
		start := i
		for i < len(line) && !isSpace(line[i]) {
			i++
		}
		if n < len(f) {
			f[n] = line[start:i:i]
		}
		n++
	}
	return n
}

func isSpace(c byte) bool {
	return c == ' ' || c == '\t' || c == '\n' || c == '\r'
}

// parseInt parses a decimal number, without the allocation of an error or of a
// string. It reports whether text is one, and whether it fits in an int64.
func parseInt(text []byte) (n int64, ok, fits bool) {
	digits, negative := text, false
	if len(text) > 0 && text[0] == '-' {
		digits, negative = text[1:], true
	}
	if len(digits) == 0 {
		return 0, false, false
	}
	fits = true
	var u uint64
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, false, false
		}
		if u > (1<<63)/10 { // the next digit would pass 1<<63 by far
			fits = false
			continue
		}
		u = u*10 + uint64(c-'0')
	}
	if negative {
		return -int64(u), true, fits && u <= 1<<63
	}
	return int64(u), true, fits && u < 1<<63
}

// quote and clip keep a message short whatever stands in the file.
func quote(text []byte) string { return fmt.Sprintf("%q", clip(text)) }

func clip(text []byte) string {
	const most = 40
	if len(text) > most {
		return string(text[:most]) + "..."
	}
	return string(text)
}
