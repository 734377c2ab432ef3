"""Agents of ranks that stay."""
