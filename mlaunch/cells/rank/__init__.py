"""A notebook's cells on ranks that stay: where they run, and what they leave there."""
