"""Code of the fork server, which imports torch once and forks an agent per call."""
