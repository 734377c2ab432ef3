"""The zygote of ``mlaunch warm``: a fork server with torch imported, of which callers get forks."""
