"""The processes of one machine: fork server, agent, workers."""
