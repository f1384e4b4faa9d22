package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version and how it was built",
		Args:  noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			info, _ := debug.ReadBuildInfo()
			_, err := fmt.Fprintln(c.OutOrStdout(), version(info))
			return err
		},
	}
}

// version is one line for people and for reports of faults.
func version(info *debug.BuildInfo) string {
	text, revision, changed := "(unknown)", "", false
	if info != nil {
		text = info.Main.Version
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				revision = s.Value[:min(12, len(s.Value))]
			case "vcs.modified":
				changed = s.Value == "true"
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "halyard %s", text)
	if revision != "" {
		fmt.Fprintf(&b, " %s", revision)
	}
	if changed {
		b.WriteString(" (with changes)")
	}
	fmt.Fprintf(&b, " %s %s/%s", runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return b.String()
}
