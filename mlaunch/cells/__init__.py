"""A notebook's cells on ranks that stay: ``%%ranks``, ``Ranks.cell``."""
