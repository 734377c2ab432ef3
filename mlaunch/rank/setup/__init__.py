"""What makes a process a rank: environment, device, group."""
