"""Runs in the agent, one process per call and machine, which forks the ranks and supervises them."""
