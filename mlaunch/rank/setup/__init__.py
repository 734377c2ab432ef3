"""Steps that make a process a rank: environment, device, group."""
