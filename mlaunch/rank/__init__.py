"""Runs in a rank, a process of a launch; ``join`` and ``recognise`` also in the ranks of other launchers."""
