"""In ranks that stay: they run one call after the other, and hold objects between calls."""
