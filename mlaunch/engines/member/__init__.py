"""The process that runs on each machine of an engine and starts the ranks there."""
