"""A launch over machines, as the caller drives it."""
