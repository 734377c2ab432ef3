"""Code of ranks, the processes of a launch. ``joining`` also runs in the ranks of other launchers."""
