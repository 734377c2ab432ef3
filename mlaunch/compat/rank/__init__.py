"""For ranks, also those of other launchers, and for processes that become ranks."""
