"""Functions that user code calls in a rank."""
