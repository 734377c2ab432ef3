"""Code of ranks, the processes of a launch. ``become_rank.py`` also runs in those of other launchers."""
