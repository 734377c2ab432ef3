"""What every process may use: errors, the calls of Linux that the standard library lacks, seeds, words."""
