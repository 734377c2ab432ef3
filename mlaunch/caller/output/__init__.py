"""The output of ranks, from their pipes to files and to people."""
