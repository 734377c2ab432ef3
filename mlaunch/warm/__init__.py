"""What ``mlaunch warm`` keeps, the zygote: a fork server with torch imported, of which callers get forks."""
