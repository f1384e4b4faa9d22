package allocator

import (
	"context"
	"fmt"
	"sync"
)

// MaxTags bounds the distinct tags of a process: a tag is a label with few values
// (a tenant, a phase, a model part), not an identifier.
const MaxTags = 1 << 16

var tags struct {
	mu     sync.RWMutex
	number map[string]Tag
	name   []string
}

// InternTag returns the number of a label. The empty label is tag 0. When
// [MaxTags] are in use every new one is tag 1, "(other tags)".
func InternTag(label string) Tag {
	if label == "" {
		return 0
	}
	tags.mu.RLock()
	t, ok := tags.number[label]
	tags.mu.RUnlock()
	if ok {
		return t
	}
	tags.mu.Lock()
	defer tags.mu.Unlock()
	if tags.number == nil {
		tags.number = map[string]Tag{otherTags: 1}
		tags.name = []string{"", otherTags}
	}
	if t, ok := tags.number[label]; ok {
		return t
	}
	if len(tags.name) >= MaxTags {
		return 1
	}
	t = Tag(len(tags.name))
	tags.number[label] = t
	tags.name = append(tags.name, label)
	return t
}

const otherTags = "(other tags)"

// String is the label.
func (t Tag) String() string {
	tags.mu.RLock()
	defer tags.mu.RUnlock()
	if int(t) < len(tags.name) {
		return tags.name[t]
	}
	if t == 0 {
		return ""
	}
	return fmt.Sprintf("tag(%d)", uint32(t))
}

type tagKey struct{}

// WithTag returns a context whose allocations carry the tag.
func WithTag(ctx context.Context, t Tag) context.Context { return context.WithValue(ctx, tagKey{}, t) }

// TagOf is the tag that ctx carries, or 0.
func TagOf(ctx context.Context) Tag {
	t, _ := ctx.Value(tagKey{}).(Tag)
	return t
}
