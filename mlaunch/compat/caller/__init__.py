"""For processes that are not ranks."""
