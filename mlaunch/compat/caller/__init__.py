"""What a process that is no rank calls."""
