"""What user code in a rank calls."""
