"""How an agent watches its ranks, and stops them."""
