"""The caller's side of a launch, from its plan to its result."""
