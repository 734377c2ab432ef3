"""The zygote's own process, and how a fork of it becomes a caller's fork server."""
