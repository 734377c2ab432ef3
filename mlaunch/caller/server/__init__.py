"""Fork servers, from their callers' side."""
