"""The prompt of debuggers in ranks, where the caller is."""
