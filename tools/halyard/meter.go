package main

import (
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// meterDelay is how long a run may last before a progress bar appears.
const meterDelay = time.Second

// meter shows progress on a terminal, if it lasts.
type meter struct {
	w     io.Writer // nil: nobody looks
	name  string
	start time.Time
	bar   *progressbar.ProgressBar // nil until it is needed
}

// meter returns a meter for standard error.
func (a *app) meter(name string) *meter {
	m := &meter{name: name, start: time.Now()}
	if isTerminal(a.stderr) {
		m.w = a.stderr
	}
	return m
}

func (m *meter) progress(done, total int64) {
	if m.w == nil || m.bar == nil && time.Since(m.start) < meterDelay {
		return
	}
	if m.bar == nil {
		m.bar = progressbar.NewOptions64(total,
			progressbar.OptionSetWriter(m.w),
			progressbar.OptionSetDescription(m.name),
			progressbar.OptionSetWidth(30),
			progressbar.OptionSetPredictTime(false), // it begins late, so its guess would be wrong
			progressbar.OptionSetElapsedTime(false),
			progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionClearOnFinish())
	}
	_ = m.bar.Set64(done) // a bar that can't be drawn is no reason to stop
}

// clear takes the bar away.
func (m *meter) clear() {
	if m.bar != nil {
		_ = m.bar.Clear()
	}
}

// isTerminal reports whether w is a terminal that can move its cursor.
func isTerminal(w io.Writer) bool {
	if f, ok := w.(*faultyWriter); ok {
		w = f.w
	}
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
}
