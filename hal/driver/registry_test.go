package driver

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/spec"
)

// fake opens nothing and remembers what it was asked.
type fake struct {
	name   string
	opened *spec.Values
}

func (f *fake) Table() *spec.Table {
	return &spec.Table{Name: f.name, Summary: "a device of the tests", Options: []spec.Option{
		{Name: "queues", Kind: spec.Count, Default: "4", Min: "1", Help: "how many"},
	}}
}
func (f *fake) Devices() ([]Info, error) { return nil, errors.New("none") }
func (f *fake) Open(v *spec.Values) (Device, error) {
	f.opened = v
	return nil, ErrUnsupported
}

func TestRegistry(t *testing.T) {
	r := &Registry{}
	require.ErrorContains(t, r.Register(nil), "nil driver")
	b, a := &fake{name: "b"}, &fake{name: "a"}
	require.NoError(t, r.Register(b))
	require.NoError(t, r.Register(a))
	require.ErrorContains(t, r.Register(&fake{name: "a"}), "registered already")
	require.Error(t, r.Register(&fake{name: "Not A Name"}))
	require.Equal(t, []string{"a", "b"}, r.Names())
	got, ok := r.Get("a")
	require.True(t, ok)
	require.Same(t, a, got)
}

func TestOpenFindsTheDriverAndParsesItsOptions(t *testing.T) {
	r := &Registry{}
	d := &fake{name: "host"}
	require.NoError(t, r.Register(d))
	_, err := r.Open("host:queues=7")
	require.ErrorIs(t, err, ErrUnsupported, "the driver's own error comes back")
	require.EqualValues(t, 7, d.opened.Count("queues"))
	for text, want := range map[string]string{
		"hots":          `did you mean "host"`,
		"host+host":     "one device at a time",
		"host:queues=0": "queues",
		"host:":         "nothing after",
		"":              "empty",
	} {
		_, err := r.Open(text)
		var at *spec.Error
		require.ErrorAs(t, err, &at, text)
		require.ErrorContains(t, err, want, text)
	}
	_, err = r.Open("host:help")
	require.ErrorIs(t, err, spec.ErrHelp)
}
