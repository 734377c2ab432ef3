"""For every process: errors, the calls of Linux that the standard library lacks, seeds, words."""
