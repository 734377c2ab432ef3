"""The caller's side of fork servers."""
