"""What ranks print, on its way from their pipes to files and to people. Runs in the caller."""
