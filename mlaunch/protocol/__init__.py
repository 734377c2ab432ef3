"""The data that crosses process boundaries: records, channels, memory files, and how values and calls are pickled."""
