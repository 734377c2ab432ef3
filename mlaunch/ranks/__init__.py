"""Ranks that stay for several calls: ``Ranks``, ``keep=``, and what cells, tests and engines run on them."""
