"""Ranks that stay between calls, as their caller has them."""
