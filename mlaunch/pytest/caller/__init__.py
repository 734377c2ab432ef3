"""In pytest's process: which tests are to run on ranks, what goes there, and what is reported of it."""
