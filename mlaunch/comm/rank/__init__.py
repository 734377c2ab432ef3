"""The exchange of objects, groups of ranks, and sums of numbers, in ranks of mlaunch and of other launchers."""
