"""Cells on ranks that stay, as their caller has them."""
