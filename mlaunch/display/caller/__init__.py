"""What the calling process draws."""
