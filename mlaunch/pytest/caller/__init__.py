"""In pytest's process: choose the tests for ranks, send them, report them."""
