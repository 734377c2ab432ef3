"""The process that connects one machine's ranks with the gate."""
