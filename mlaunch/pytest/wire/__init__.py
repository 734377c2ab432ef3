"""Records and shared memory between pytest's process and the ranks of a test."""
