"""The undocumented parts of torch that mlaunch uses: each in a module that knows what to do without it."""
