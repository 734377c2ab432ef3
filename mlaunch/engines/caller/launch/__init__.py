"""The caller's side of a launch on several machines."""
