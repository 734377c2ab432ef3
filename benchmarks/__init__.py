"""The same work done by mlaunch and by its peers, alternating, in one run."""
