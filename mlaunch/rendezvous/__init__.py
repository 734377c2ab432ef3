"""How ranks and machines find each other. Runs in processes of its own beside the agent, and in clients."""
