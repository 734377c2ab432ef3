"""What ranks call, those of other launchers too, and processes that become ranks."""
